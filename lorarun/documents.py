"""Rows become documents: token ids, and labels that repeat the ids where the model has to learn them.

Everything is decided by position. The usual way, labels masked by comparing with the pad id, also masks the real end
token wherever a tokenizer pads with it, and the model never stops.

Rows are never cut or dropped in silence: what cannot be used is counted, with row numbers, and said once. Only plain
texts are cut, into consecutive pieces, for no piece of a text is less of a text.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.kernels.cross_entropy import IGNORE
from lorarun.rows import standard
from lorarun.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
STRANGE = {("start", "assistant"), ("start", "tool"), ("user", "tool"), ("user", "user"), ("assistant", "assistant")}
SHOWN = 5  # row numbers, or errors, before "and N more"
CONTROL = "with control tokens typed into a message, which only prompts, completions and texts may hold"
ACROSS = (
    "it is not learned, and differs from what generation sees; let completions, not prompts, hold the white space "
    "between them"
)
DISORDERED = (
    "a late system text, an answer first, a tool unasked, or one side twice in a row; they are used as they are"
)


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
    control: list[int] = field(default_factory=list)  # conversations in whose messages a control token is typed
    empty: list[int] = field(default_factory=list)  # conversations with an empty answer
    disordered: list[int] = field(default_factory=list)  # conversations whose roles come in a strange order
    origins: dict[int, str] = field(default_factory=dict)  # of the rows to be named: the file and line, if known

    def noted(self) -> list[list[int]]:
        """The lists of rows to speak of."""
        return [self.too_long, self.nothing, self.merged, self.unended, self.control, self.empty, self.disordered]

    def reasons(self) -> list[tuple[list[int], str]]:
        """The rows that were left out, by reason."""
        too_long = f"longer than max_tokens={self.max_tokens}"
        return [
            (self.too_long, too_long),
            (self.nothing, "without an answer or text to learn"),
            (self.control, CONTROL),
        ]

    def left_out(self) -> str:
        """One line saying which rows were left out and why, "" if none."""
        reasons = self.reasons()
        said = [f"{len(numbers)} {reason} ({_numbered(self, numbers)})" for numbers, reason in reasons if numbers]
        count = sum(len(numbers) for numbers, _ in reasons)
        return f"{count} of {self.rows} rows left out: {', '.join(said)}" if said else ""


def _named(prepared: Prepared, number: int) -> str:
    return f"{number} ({prepared.origins[number]})" if number in prepared.origins else str(number)


def _numbered(prepared: Prepared, numbers: list[int]) -> str:
    names = ", ".join(_named(prepared, number) for number in numbers[:SHOWN])
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"row{'s' if len(numbers) > 1 else ''} {names}{more}"


def _encode(row: Any, tokenizer: Tokenizer, fold_system: bool, prepared: Prepared) -> tuple[list[int], list[bool]]:
    """The ids of a row in a standard form, and which of them are learned."""
    if "messages" in row:
        return _encode_chat(row["messages"], row["tools"], tokenizer, fold_system, prepared)
    if "text" in row:
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


def _encode_chat(
    messages: Any, tools: Any, tokenizer: Tokenizer, fold_system: bool, prepared: Prepared
) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, and which of them are learned: no answer that is empty, none of weight 0."""
    roles = [m.get("role") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    if strange := [role for role in roles if isinstance(role, str) and role not in ROLES]:
        raise ValueError(f"role {strange[0]!r} is unknown; known are {', '.join(ROLES)}")
    if isinstance(messages, list):
        empty = [_is_empty(message) for message in messages]
        messages = [{**m, "weight": 0} if none else m for m, none in zip(messages, empty, strict=True)]
        if any(empty):
            prepared.empty.append(prepared.rows)
    if _out_of_order([role for role in roles if not (fold_system and role == "system")]):
        prepared.disordered.append(prepared.rows)
    if tokenizer.has_control_token([messages, tools]):
        prepared.control.append(prepared.rows)
        return [], []
    try:
        ids, learned = tokenizer.encode_chat(messages, tools=tools, fold_system=fold_system)
    except ValueError as error:
        hint = "; fold_system=True (--fold-system) puts system texts into the next user turn"
        hinted = tokenizer.template and "system" in roles and not fold_system
        raise ValueError(f"{error}{hint if hinted else ''}") from error
    last = [i for i, kept in zip(ids, learned, strict=True) if kept][-1:]
    if last and last[0] not in tokenizer.stop_ids:
        prepared.unended.append(prepared.rows)
    return ids, learned


def _is_empty(message: Any) -> bool:
    """Whether this is an answer with nothing in it, of which a model would learn to stop at once."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return False
    content = message.get("content")
    more = any(value for key, value in message.items() if key not in ("role", "content", "name", "weight"))
    return isinstance(content, str) and not content.strip() and not more


def _out_of_order(roles: list[Any]) -> bool:
    """Whether a system text comes late, an answer first, a tool unasked, or one side twice in a row."""
    sides = ["tool" if role in ("function", "ipython") else role for role in roles]
    while sides and sides[0] in ("system", "developer"):
        sides = sides[1:]
    pairs = set(zip(["start", *sides], sides, strict=False))
    return not {"system", "developer"}.isdisjoint(sides) or not pairs.isdisjoint(STRANGE)


def documents_of(row: Any, tokenizer: Tokenizer, fold_system: bool, prepared: Prepared) -> list[Document]:
    """The documents that one row gives, [] where it is left out; both are noted in ``prepared``.

    Raises ValueError with the row's number, and its file and line where it has them.
    """
    prepared.rows += 1
    if origin := getattr(row, "origin", ""):
        prepared.origins[prepared.rows] = origin
    try:
        row = standard(row)
        ids, learned = _encode(row, tokenizer, fold_system, prepared)
    except ValueError as error:
        raise ValueError(f"row {_named(prepared, prepared.rows)}: {error}") from error
    documents = []
    if prepared.control[-1:] == [prepared.rows]:
        pass
    elif not any(learned[1:]):
        prepared.nothing.append(prepared.rows)
    elif len(ids) > prepared.max_tokens and "text" not in row:
        prepared.too_long.append(prepared.rows)
    else:
        whole = torch.tensor(ids)
        labels = whole.masked_fill(~torch.tensor(learned), IGNORE)
        for start in range(0, len(ids) - 1, prepared.max_tokens - 1):
            piece = slice(start, start + prepared.max_tokens)
            documents.append(Document(whole[piece], labels[piece]))
    if not any(numbers[-1:] == [prepared.rows] and len(numbers) <= SHOWN for numbers in prepared.noted()):
        prepared.origins.pop(prepared.rows, None)  # only those that will be shown
    return documents


def prepare(
    rows: Iterable[Mapping[str, Any]] | Prepared,
    tokenizer: Tokenizer | None,
    max_tokens: int = 8192,
    fold_system: bool = False,
) -> Prepared:
    """Every row as a document of at most ``max_tokens`` tokens, and an account of what was left out.

    Rows have any of the layouts in ``rows.py``. ``{"messages"}`` (and "tools") goes through the chat template; every
    assistant turn is learned, its end token too, but for those with ``"weight": 0`` and empty ones. Where a control
    token is typed into a message the row is left out, for it would be read as the template's own.
    ``{"prompt", "completion"}`` are joined and encoded once; tokens that start in the completion, and the end token
    put behind it, are learned. ``{"text"}``: all of it is learned, the end token too; a longer text is cut into
    pieces, each of which begins with the last token of the one before, so that every token is predicted exactly once.
    Longer conversations and prompts are left out. ``fold_system``: see ``Tokenizer.render``. An iterator is consumed
    once.

    Raises ValueError, naming rows, for rows of another form or refused by the template, and when nothing is left.
    """
    if isinstance(rows, Prepared):
        return rows
    tokenizer = check_rows(rows, tokenizer, max_tokens)
    prepared = Prepared(max_tokens)
    errors: list[str] = []
    for row in rows:
        try:
            prepared.documents += documents_of(row, tokenizer, fold_system, prepared)
        except ValueError as error:
            errors.append(str(error))
            if len(errors) == SHOWN:
                break
    if errors:
        raise ValueError("\n".join(errors))
    say(prepared, len(prepared.documents))
    return prepared


def check_rows(rows: Any, tokenizer: Tokenizer | None, max_tokens: int) -> Tokenizer:
    """``tokenizer``; ValueError for arguments that cannot be meant."""
    if tokenizer is None:
        raise ValueError("rows of text need a tokenizer, and this model came without tokenizer files")
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(
            f"rows need lorarun's own tokenizer, which is model.tokenizer, got a {type(tokenizer).__name__}"
        )
    if isinstance(rows, (str, bytes, Path)):
        raise ValueError(f"rows must be an iterable of dicts, got {rows!r}; lorarun.data.read_rows reads files")
    if isinstance(rows, Mapping):
        raise ValueError(f"rows must be an iterable of dicts, got a mapping: choose one of {sorted(map(str, rows))}")
    if max_tokens < 2:
        raise ValueError(f"max_tokens must be at least 2, for one token predicts the next, got {max_tokens}")
    return tokenizer


def as_documents(
    rows: Iterable[Any], tokenizer: Tokenizer | None, max_tokens: int, fold_system: bool
) -> Iterator[tuple[str, list[Document], str]]:
    """Each row's name, the documents it gives, and why it is left out if it gives none."""
    tokenizer = check_rows(rows, tokenizer, max_tokens)
    for number, row in enumerate(rows):
        alone = Prepared(max_tokens, rows=number)
        documents = documents_of(row, tokenizer, fold_system, alone)
        name = f"{number + 1} ({row.origin})" if hasattr(row, "origin") else str(number + 1)
        yield name, documents, ", ".join(reason for numbers, reason in alone.reasons() if numbers)


def say(prepared: Prepared, documents: int) -> None:
    """The account of the rows on stderr; ValueError when nothing is left to train on."""
    left_out = prepared.left_out()
    if not documents:
        raise ValueError(f"there is nothing to learn: {left_out or 'there are no rows'}")
    if left_out:
        print(f"lorarun: {left_out}", file=sys.stderr)
    for numbers, before, after in (
        (prepared.merged, "a token runs across the end of the prompt", ACROSS),
        (prepared.unended, "answers end in no stop token", "the model will not learn to stop"),
        (prepared.empty, "answers are empty", "they are not learned"),
        (prepared.disordered, "roles are out of order", DISORDERED),
    ):
        if numbers:
            warnings.warn(f"{before} in {_numbered(prepared, numbers)}: {after}", UserWarning, stacklevel=3)
