"""How probable given answers are: the log-probability of each of their tokens.

What scoring, ranking and preference losses ask for.  The usual way pads the answers to one length and takes a softmax
over the logits of all of it, prompts included.  Here rows are packed without padding, those of similar length together,
and only the positions that predict a token of an answer go through the head, chunk by chunk, as in training: full
logits never exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lorarun.bucket import sent
from lorarun.data import Batches, Document, Prepared, targets
from lorarun.decode import aside
from lorarun.documents import check_rows, documents_of
from lorarun.head import head_losses
from lorarun.kernels.cross_entropy import IGNORE
from lorarun.nn import Model


def logprobs(
    model: Model,
    rows: Iterable[Mapping[str, Any] | Sequence[Any]],
    max_tokens: int = 8192,
    fold_system: bool = False,
) -> list[Tensor]:
    """The log-probabilities of the answers in ``rows``, fp32 [tokens of the answer] each, on the model's device.

    rows: as :func:`lorarun.data.prepare` takes them (conversations, prompts with completions, texts), whose learned
        tokens count, end tokens included; or pairs of ids, (prompt, answer), all of whose answers' tokens count.
    max_tokens: computed together; what is longer is computed alone.

    The first token of a text without a prompt has no probability and is left out.  Dropout is off, no gradient is kept,
    and the model is left as it was.  Raises ValueError, naming rows, for rows without an answer or of another form.
    """
    documents, owners = _documents(model, rows, max_tokens, fold_system)
    plan: list[list[int]] = []
    used = max_tokens
    for i in sorted(range(len(documents)), key=lambda i: len(documents[i].ids)):
        if used + len(documents[i].ids) > max_tokens:
            plan.append([])
            used = 0
        plan[-1].append(i)
        used += len(documents[i].ids)
    found: list[Tensor] = [torch.empty(0)] * len(documents)
    batches = Batches(Prepared(max_tokens, documents=documents), plan, pack=True, pad_id=0)
    with aside(model):
        for chosen, batch in zip(plan, batches, strict=True):
            goal = targets(batch).flatten()
            picked = (goal != IGNORE).nonzero().squeeze(1)
            ids, positions, numbers, where, goal = (
                sent(t, model.device)
                for t in (batch.ids, batch.positions, batch.documents, picked, goal[picked])
                if t is not None
            )
            hidden = model.hidden_states(ids, positions, numbers)[0].index_select(0, where)
            each = -head_losses(model, hidden, goal).float()
            counts = [int((documents[i].labels[1:] != IGNORE).sum()) for i in chosen]
            for i, part in zip(chosen, each.split(counts), strict=True):
                found[i] = part.clone()  # a view would hold on to the whole batch's
    pieces: list[list[Tensor]] = [[] for _ in range(max(owners, default=-1) + 1)]
    for owner, part in zip(owners, found, strict=True):
        pieces[owner].append(part)
    return [torch.cat(parts) for parts in pieces]


def _documents(
    model: Model, rows: Iterable[Any], max_tokens: int, fold_system: bool
) -> tuple[list[Document], list[int]]:
    """The documents of all rows, and the row (from 0) that each belongs to: a long text has several."""
    documents: list[Document] = []
    owners: list[int] = []
    wrong: list[str] = []
    vocab = model.config.vocab_size
    for number, row in enumerate(rows):
        if isinstance(row, Mapping):
            prepared = Prepared(max_tokens, rows=number)
            try:
                made = documents_of(row, check_rows([row], model.tokenizer, max_tokens), fold_system, prepared)
            except ValueError as error:
                wrong.append(str(error))
                continue
            if not made:
                reasons = ", ".join(reason for numbers, reason in prepared.reasons() if numbers)
                wrong.append(f"row {number + 1}: {reasons}")
        else:
            prompt, answer = ([int(token) for token in part] for part in row) if len(row) == 2 else ([], [])
            if not answer or (not prompt and len(answer) == 1):
                wrong.append(f"row {number + 1}: expected a mapping, or a prompt's ids and an answer's that has some")
                continue
            ids = torch.tensor(prompt + answer)
            if int(ids.min()) < 0 or int(ids.max()) >= vocab:
                wrong.append(f"row {number + 1} has ids that are not the model's, 0 to {vocab - 1}")
                continue
            made = [Document(ids, torch.where(torch.arange(len(ids)) < len(prompt), IGNORE, ids))]
        documents += made
        owners += [number] * len(made)
    if wrong:
        more = f"\nand {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError("logprobs: " + "\n".join(wrong[:5]) + more)
    return documents, owners
