"""Rows become token ids and labels, and those become batches.

A row is a conversation, a prompt with its completion, or a text. Each becomes one document: its ids, and labels that
repeat the ids where the model has to learn them. Everything is decided by position. The usual way, labels masked by
comparing with the pad id, also masks the real end token wherever a tokenizer pads with it, and the model never stops.

Rows are never cut or dropped in silence: what cannot be used is counted, with row numbers, and said once. Only plain
texts are cut, into consecutive pieces, for no piece of a text is less of a text.

``batches`` packs several documents into one row by default, where padding would be work for nothing; positions
restart with each document and ``documents`` says which token belongs to which, so none attends to another. Rows are
tokenised when ``batches`` is called, not while iterating: the number of batches is known, and every mistake shows
before training. What that gives up is data larger than memory (16 bytes a token).
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.kernels.cross_entropy import IGNORE
from lorarun.tokenizer import Tokenizer

FORMS = (("messages",), ("prompt", "completion"), ("text",))
ACCEPTED = "{'messages': [{'role', 'content'}, ...]}, {'prompt': text, 'completion': text} or {'text': text}"
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHOWN = 5  # row numbers, or errors, before "and N more"


# --- batches as tensors ----------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """What a model learns from in one pass; all tensors are [batch, seq] int64.

    ids: token ids. labels: the ids repeated where they are supervised, -100 elsewhere; not shifted. positions: index of
    a token in its document, None for its index in the row. documents: number of the packed document, -1 for padding,
    None for one document a row. adapters: [batch] int64, which adapter serves each row, None for the active one.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    adapters: Tensor | None = None

    def __post_init__(self) -> None:
        wrong = []
        for name in ("ids", "labels", "positions", "documents"):
            value = getattr(self, name)
            if value is None and name in ("positions", "documents"):
                continue
            if not isinstance(value, Tensor):
                wrong.append(f"{name} is a {type(value).__name__}")
            elif value.dtype != torch.int64 or value.dim() != 2 or value.shape != getattr(self.ids, "shape", None):
                wrong.append(f"{name} is {value.dtype} {list(value.shape)}")
        if wrong:
            raise ValueError(f"a batch needs int64 tensors of one shape [batch, seq], got: {'; '.join(wrong)}")


def as_batch(batch: Batch | Mapping[str, Any]) -> Batch:
    """``batch`` itself, or a mapping with its fields as a Batch; other keys are refused, for they would be ignored."""
    if isinstance(batch, Batch):
        return batch
    if not isinstance(batch, Mapping):
        raise ValueError(f"expected a Batch or a mapping with its fields, got a {type(batch).__name__}")
    names = [entry.name for entry in fields(Batch)]
    if not {"ids", "labels"} <= set(batch) <= set(names):
        raise ValueError(f"a batch given as a mapping has ids, labels and maybe {names[2:]}, got {sorted(batch)}")
    return Batch(**batch)


def targets(batch: Batch | Mapping[str, Any]) -> Tensor:
    """What each position has to predict: [batch, seq] int64, -100 where nothing.

    The one place where labels are shifted: position t predicts label t + 1 if both lie in the same document. So the
    last position and the first token of a document count for nothing, and neither does padding.
    """
    batch = as_batch(batch)
    shifted = torch.full_like(batch.labels, IGNORE)
    shifted[:, :-1] = batch.labels[:, 1:]
    if batch.documents is not None:
        here, following = batch.documents[:, :-1], batch.documents[:, 1:]
        shifted[:, :-1].masked_fill_((here != following) | (following < 0), IGNORE)
    return shifted


def supervised(batch: Batch | Mapping[str, Any]) -> int:
    """How many tokens ``batch`` supervises, counted after the shift."""
    return int((targets(batch) != IGNORE).sum())


# --- rows ------------------------------------------------------------------------------------------------------------


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file: a JSON object on every line, blank lines left out.

    Raises ValueError with the number of a line that is not a JSON object.
    """
    rows: list[dict[str, Any]] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            text = ""
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() else None
            except (ValueError, RecursionError) as error:
                array = "; this looks like one JSON array: write one object a line" if text.lstrip()[:1] == "[" else ""
                raise ValueError(f"{path}, line {number} is not valid JSON: {error}{array}") from error
            if text.strip() and not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} must be a JSON object, got a {type(row).__name__}")
            if row is not None:
                rows.append(row)
    return rows


class Document(NamedTuple):
    """One tokenised row: ids and labels, [length] int64 each; labels are -100 where nothing is learned."""

    ids: Tensor
    labels: Tensor


@dataclass
class Prepared:
    """What ``prepare`` made of the rows, and what it left out. Row numbers count from 1."""

    max_tokens: int
    documents: list[Document] = field(default_factory=list)
    rows: int = 0
    too_long: list[int] = field(default_factory=list)  # rows of more than max_tokens
    nothing: list[int] = field(default_factory=list)  # rows in which no token is supervised
    merged: list[int] = field(default_factory=list)  # rows with a token across the end of the prompt
    unended: list[int] = field(default_factory=list)  # conversations whose last answer ends in no stop token

    def left_out(self) -> str:
        """One line saying which rows were left out and why, "" if none."""
        reasons = [
            (self.too_long, f"longer than {self.max_tokens} tokens"),
            (self.nothing, "nothing to learn"),
        ]
        said = [f"{len(numbers)} {reason} ({_numbered(numbers)})" for numbers, reason in reasons if numbers]
        count = len(self.too_long) + len(self.nothing)
        return f"{count} of {self.rows} rows left out: {', '.join(said)}" if said else ""


def _numbered(numbers: list[int]) -> str:
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"row{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:SHOWN]))}{more}"


def _form(row: Any) -> tuple[str, ...]:
    """Which of FORMS the row has; ValueError says what was got instead."""
    if not isinstance(row, Mapping):
        raise ValueError(f"got a {type(row).__name__}, a row is {ACCEPTED}")
    found = [form for form in FORMS if all(row.get(key) is not None for key in form)]
    if len(found) != 1:
        keys = sorted(str(key) for key, value in row.items() if value is not None)
        raise ValueError(f"got the keys {keys}, a row is {'only one of ' if found else ''}{ACCEPTED}")
    for key in found[0] if found[0] != ("messages",) else ():
        if not isinstance(row[key], str):
            raise ValueError(f"{key!r} must be text, got a {type(row[key]).__name__}; a row is {ACCEPTED}")
    return found[0]


def _encode(row: Any, tokenizer: Tokenizer, fold_system: bool, prepared: Prepared) -> tuple[list[int], list[bool]]:
    """The ids of a row, and which of them are learned."""
    form = _form(row)
    if form == ("messages",):
        messages = row["messages"]
        roles = [m.get("role") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
        if strange := [role for role in roles if isinstance(role, str) and role not in ROLES]:
            raise ValueError(f"role {strange[0]!r} is unknown; known are {', '.join(ROLES)}")
        try:
            ids, learned = tokenizer.encode_chat(messages, tools=row.get("tools"), fold_system=fold_system)
        except ValueError as error:
            hint = (
                "; fold_system=True (--fold-system) puts system texts into the next user turn"
                if "system" in roles
                else ""
            )
            raise ValueError(f"{error}{hint if tokenizer.template and not fold_system else ''}") from error
        last = [i for i, kept in zip(ids, learned, strict=True) if kept][-1:]
        if last and last[0] not in tokenizer.stop_ids:
            prepared.unended.append(prepared.rows)
        return ids, learned
    if form == ("text",):
        ids = tokenizer.encode(row["text"])
        learned = [bool(row["text"])] * len(ids)
    else:
        prompt, text = row["prompt"], row["prompt"] + row["completion"]
        ids, learned = tokenizer.encode_spans(text, [(len(prompt), len(text))])
        if any(learned) and ids[: learned.index(True)] != tokenizer.encode(prompt):
            prepared.merged.append(prepared.rows)
    if tokenizer.eos_id is not None and ids[-1:] != [tokenizer.eos_id]:
        ids, learned = [*ids, tokenizer.eos_id], [*learned, any(learned)]
    return ids, learned


def prepare(
    rows: Iterable[Mapping[str, Any]] | Prepared,
    tokenizer: Tokenizer | None,
    max_tokens: int = 8192,
    fold_system: bool = False,
) -> Prepared:
    """Every row as a document of at most ``max_tokens`` tokens, and an account of what was left out.

    ``{"messages"}`` (and "tools") goes through the chat template, every assistant turn is learned, its end token too.
    ``{"prompt", "completion"}`` are joined and encoded once; tokens that start in the completion, and the end token
    put behind it, are learned. ``{"text"}``: all of it is learned, the end token too; a longer text is cut into
    pieces, each of which begins with the last token of the one before, so that every token is predicted exactly once.
    Longer conversations and prompts are left out. ``fold_system``: see ``Tokenizer.render``. An iterator is consumed
    once.

    Raises ValueError, naming rows, for rows of another form or refused by the template, and when nothing is left.
    """
    if isinstance(rows, Prepared):
        return rows
    if tokenizer is None:
        raise ValueError("rows of text need a tokenizer, and this model came without tokenizer files")
    if isinstance(rows, (str, bytes, Path)):
        raise ValueError(f"rows must be an iterable of dicts, got {rows!r}; lorarun.data.read_rows reads a JSONL file")
    if max_tokens < 2:
        raise ValueError(f"max_tokens must be at least 2, for one token predicts the next, got {max_tokens}")
    prepared = Prepared(max_tokens)
    errors: list[str] = []
    for row in rows:
        prepared.rows += 1
        try:
            ids, learned = _encode(row, tokenizer, fold_system, prepared)
        except ValueError as error:
            errors.append(f"row {prepared.rows}: {error}")
            if len(errors) == SHOWN:
                break
            continue
        if not any(learned[1:]):
            prepared.nothing.append(prepared.rows)
        elif len(ids) > max_tokens and _form(row) != ("text",):
            prepared.too_long.append(prepared.rows)
        else:
            whole = torch.tensor(ids)
            labels = whole.masked_fill(~torch.tensor(learned), IGNORE)
            for start in range(0, len(ids) - 1, max_tokens - 1):
                piece = slice(start, start + max_tokens)
                prepared.documents.append(Document(whole[piece], labels[piece]))
    if errors:
        raise ValueError("\n".join(errors))
    _say(prepared)
    return prepared


def _say(prepared: Prepared) -> None:
    """The account of ``prepare`` on stderr; ValueError when nothing is left to train on."""
    left_out = prepared.left_out()
    if not prepared.documents:
        raise ValueError(f"there is nothing to learn: {left_out or 'there are no rows'}")
    if left_out:
        print(f"lorarun: {left_out}", file=sys.stderr)
    if prepared.merged:
        warnings.warn(
            f"a token runs across the end of the prompt in {_numbered(prepared.merged)}: it is not learned, and "
            "differs from what generation sees; let completions, not prompts, hold the white space between them",
            UserWarning,
            stacklevel=3,
        )
    if prepared.unended:
        warnings.warn(
            f"answers end in no stop token in {_numbered(prepared.unended)}: the model will not learn to stop",
            UserWarning,
            stacklevel=3,
        )


# --- batches ---------------------------------------------------------------------------------------------------------


class Batches:
    """What ``batches`` returns: ``len``, indexing, and iteration as often as wanted, each time in the same order."""

    def __init__(self, prepared: Prepared, plan: list[list[int]], pack: bool, pad_id: int) -> None:
        self.prepared = prepared
        self.plan = plan  # the documents of each batch
        self.pack = pack
        self.pad_id = pad_id

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Batch:
        chosen = [self.prepared.documents[i] for i in self.plan[index]]
        return _packed(chosen) if self.pack else _padded(chosen, self.pad_id)

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


def _packed(chosen: list[Document]) -> Batch:
    """Documents one behind the other: [1, total]."""
    lengths = torch.tensor([len(document.ids) for document in chosen])
    return Batch(
        ids=torch.cat([document.ids for document in chosen])[None],
        labels=torch.cat([document.labels for document in chosen])[None],
        positions=torch.cat([torch.arange(len(document.ids)) for document in chosen])[None],
        documents=torch.repeat_interleave(torch.arange(len(chosen)), lengths)[None],
    )


def _padded(chosen: list[Document], pad_id: int) -> Batch:
    """A document a row, padded on the right: [documents, longest]; the padding is document -1 at position 0."""
    shape = (len(chosen), max(len(document.ids) for document in chosen))
    ids, labels = torch.full(shape, pad_id), torch.full(shape, IGNORE)
    positions, documents = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
    for row, document in enumerate(chosen):
        length = len(document.ids)
        ids[row, :length], labels[row, :length] = document.ids, document.labels
        positions[row, :length], documents[row, :length] = torch.arange(length), 0
    return Batch(ids, labels, positions, documents)


def batches(
    rows: Iterable[Mapping[str, Any]] | Prepared,
    tokenizer: Tokenizer | None,
    max_tokens: int = 8192,
    pack: bool = True,
    shuffle: bool = False,
    seed: int = 0,
    fold_system: bool = False,
) -> Batches:
    """The rows as batches of at most ``max_tokens`` tokens, in the order of the rows or shuffled by ``seed``.

    ``pack=True``: [1, seq], as many documents one behind the other as fit. ``pack=False``: [n, seq], a document a
    row, padded on the right, n · seq ≤ max_tokens. Give what ``prepare`` returned instead of rows to tokenise only
    once (for a new order each epoch, say). The global random state is neither read nor changed. Errors as in
    ``prepare``.
    """
    prepared = prepare(rows, tokenizer, max_tokens, fold_system)
    lengths = [len(document.ids) for document in prepared.documents]
    if max(lengths) > max_tokens:
        raise ValueError(f"the rows were prepared for {prepared.max_tokens} tokens, batches hold {max_tokens}")
    order = list(range(len(lengths)))
    if shuffle:
        random.Random(seed).shuffle(order)
    plan: list[list[int]] = []
    used = longest = 0  # of the last batch: tokens, and its longest document
    for i in order:
        longest = max(longest, lengths[i])
        used = used + lengths[i] if pack else longest * (len(plan[-1]) + 1 if plan else 1)
        if not plan or used > max_tokens:
            plan.append([])
            used = longest = lengths[i]
        plan[-1].append(i)
    return Batches(prepared, plan, pack, 0 if tokenizer is None else tokenizer.pad_id)
