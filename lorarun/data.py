"""Rows, as documents, become batches.

``batches`` packs several documents into one row by default, where padding would be work for nothing; positions
restart with each document and ``documents`` says which token belongs to which, so none attends to another. Rows are
tokenised when ``batches`` is called, not while iterating: the number of batches is known, and every mistake shows
before training. That takes 16 bytes a token; with ``buffer`` rows are tokenised on the way, so that they may be more
than memory holds, and what that gives up is the number of batches, and a shuffle wider than the buffer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, overload

import torch

from lorarun.batch import Batch, as_batch, supervised, targets
from lorarun.documents import Document, Prepared, check_rows, documents_of, prepare, say
from lorarun.kernels.cross_entropy import IGNORE
from lorarun.rows import iter_rows, read_rows
from lorarun.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Batches",
    "Document",
    "Prepared",
    "Streamed",
    "as_batch",
    "batches",
    "iter_rows",
    "prepare",
    "read_rows",
    "supervised",
    "targets",
]

T = TypeVar("T")


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


class Streamed:
    """What ``batches`` returns with ``buffer``: iteration alone, each time through the rows anew.

    prepared: the account of the rows of the latest pass; it holds no documents.
    """

    def __init__(self, passing: Callable[[Prepared], Iterator[Batch]], max_tokens: int) -> None:
        self.passing = passing
        self.prepared = Prepared(max_tokens)

    def __iter__(self) -> Iterator[Batch]:
        self.prepared = Prepared(self.prepared.max_tokens)
        return self.passing(self.prepared)


def _stirred(documents: Iterable[Document], buffer: int, draw: random.Random) -> Iterator[Document]:
    """``documents`` in an order drawn by holding ``buffer`` of them and giving any of these."""
    held: list[Document] = []
    for document in documents:
        held.append(document)
        if len(held) == buffer:
            chosen = draw.randrange(buffer)
            held[chosen], held[-1] = held[-1], held[chosen]
            yield held.pop()
    draw.shuffle(held)
    yield from held


def _grouped(items: Iterable[T], length: Callable[[T], int], max_tokens: int, pack: bool) -> Iterator[list[T]]:
    """``items`` in their order, as many together as a batch holds."""
    group: list[T] = []
    used = longest = 0  # of the group: tokens, and its longest document
    for item in items:
        longest = max(longest, length(item))
        used = used + length(item) if pack else longest * (len(group) + 1)
        if group and used > max_tokens:
            yield group
            group = []
            used = longest = length(item)
        group.append(item)
    if group:
        yield group


@overload
def batches(
    rows: Iterable[Mapping[str, Any]] | Prepared,
    tokenizer: Tokenizer | None,
    max_tokens: int = 8192,
    pack: bool = True,
    shuffle: bool = False,
    seed: int = 0,
    fold_system: bool = False,
    buffer: None = None,
) -> Batches: ...


@overload
def batches(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Tokenizer | None,
    max_tokens: int = 8192,
    pack: bool = True,
    shuffle: bool = False,
    seed: int = 0,
    fold_system: bool = False,
    *,
    buffer: int,
) -> Streamed: ...


def batches(
    rows: Iterable[Mapping[str, Any]] | Prepared,
    tokenizer: Tokenizer | None,
    max_tokens: int = 8192,
    pack: bool = True,
    shuffle: bool = False,
    seed: int = 0,
    fold_system: bool = False,
    buffer: int | None = None,
) -> Batches | Streamed:
    """The rows as batches of at most ``max_tokens`` tokens, in the order of the rows or shuffled by ``seed``.

    ``pack=True``: [1, seq], as many documents one behind the other as fit. ``pack=False``: [n, seq], a document a
    row, padded on the right, n · seq ≤ max_tokens. Give what ``prepare`` returned instead of rows to tokenise only
    once (for a new order each epoch, say). The global random state is neither read nor changed. Errors as in
    ``prepare``.

    ``buffer``: rows are read and tokenised while iterating, for more rows than memory holds (a generator, a streamed
    data set). At most ``buffer`` documents are held, and shuffled among themselves. The result has no length, a row
    that cannot be used stops the iteration there, and what was left out is said at the end of each pass.
    """
    if buffer is not None:
        return _streamed(
            rows, check_rows(rows, tokenizer, max_tokens), max_tokens, pack, shuffle, seed, fold_system, buffer
        )
    prepared = prepare(rows, tokenizer, max_tokens, fold_system)
    lengths = [len(document.ids) for document in prepared.documents]
    if max(lengths) > max_tokens:
        raise ValueError(f"the rows were prepared for {prepared.max_tokens} tokens, batches hold {max_tokens}")
    order = list(range(len(lengths)))
    if shuffle:
        random.Random(seed).shuffle(order)
    plan = list(_grouped(order, lengths.__getitem__, max_tokens, pack))
    return Batches(prepared, plan, pack, 0 if tokenizer is None else tokenizer.pad_id)


def _streamed(
    rows: Any, tokenizer: Tokenizer, max_tokens: int, pack: bool, shuffle: bool, seed: int, fold: bool, buffer: int
) -> Streamed:
    if isinstance(rows, Prepared) or buffer < 1:
        raise ValueError(f"buffer needs rows not yet prepared and at least 1, got a {type(rows).__name__} and {buffer}")
    once = iter(rows) is rows
    started = False

    def passing(prepared: Prepared) -> Iterator[Batch]:
        nonlocal started
        if once and started:
            raise ValueError("these rows can be read once only, being an iterator: give a list, or a streamed data set")
        started = True
        count = 0
        documents = (document for row in rows for document in documents_of(row, tokenizer, fold, prepared))
        drawn = _stirred(documents, buffer, random.Random(seed)) if shuffle else documents
        for group in _grouped(drawn, lambda document: len(document.ids), max_tokens, pack):
            count += len(group)
            yield _packed(group) if pack else _padded(group, tokenizer.pad_id)
        say(prepared, count)

    return Streamed(passing, max_tokens)
