"""Rows as the model sees them: what was written around them, and which tokens are learned.

Most failures of fine-tuning are in the data and make no error: a template that is not the model's, answers that are not
learned, prompts that are. Ten seconds of reading find them. What is shown is decoded from the ids of the documents that
training would get, not from the row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import groupby, islice
from typing import Any

from lorarun.documents import Document, as_documents, check_rows
from lorarun.kernels.cross_entropy import IGNORE
from lorarun.tokenizer import Stream, Tokenizer

COLOURED = ("\x1b[32m", "\x1b[0m")  # green
BRACKETED = ("[[", "]]")


def preview(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Tokenizer | None,
    n: int = 3,
    max_tokens: int = 8192,
    fold_system: bool = False,
) -> None:
    """Prints the first ``n`` rows as training would see them, learned tokens in green, or in [[ ]] off a terminal.

    The other arguments are those of ``batches``. Rows that would be left out are shown by the reason alone. Of an
    iterator, ``n`` rows are consumed. Raises ValueError, naming the row, for rows that training would refuse.
    """
    check_rows(rows, tokenizer, max_tokens)
    marks = COLOURED if sys.stdout.isatty() else BRACKETED
    for name, documents, left_out in as_documents(islice(rows, n), tokenizer, max_tokens, fold_system):
        if not documents:
            print(f"--- row {name}: {left_out}")
        for document in documents:
            learned = int((document.labels[1:] != IGNORE).sum())
            print(f"--- row {name}: {len(document.ids):,} tokens, {learned:,} of them learned")
            assert tokenizer is not None
            print(_marked(document, tokenizer, marks))


def _marked(document: Document, tokenizer: Tokenizer, marks: tuple[str, str]) -> str:
    """The text of a document, its learned stretches between ``marks``; a character goes with its last token."""
    stream = Stream(tokenizer, skip_special=False)
    learned = [False, *(document.labels[1:] != IGNORE).tolist()]  # nothing predicts the first token
    text = ""
    for marked, run in groupby(zip(document.ids.tolist(), learned, strict=True), key=lambda pair: pair[1]):
        piece = stream.put(*(i for i, _ in run)).replace("\x1b", "\\x1b")  # a terminal would obey it
        text += f"{marks[0]}{piece}{marks[1]}" if marked and piece else piece
    return text + stream.end()
