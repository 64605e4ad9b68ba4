"""Answers in the making: the ids that a row has got, and their text cut where it has to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lorarun.tokenizer import Stream, Tokenizer


class Text:
    """An answer's text as it grows, cut before the first stop text; ``write`` gets what can no longer be cut.

    ``after`` are the last ids of a text that this one continues: some tokenizers drop the space of a first token.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: list[str], write: Callable[[str], object] | None, after: Sequence[int] = ()
    ) -> None:
        self.shown, self._written, self._stops, self._write = "", 0, stops, write
        self._stream: Stream | None = Stream(tokenizer)  # None: a stop text is complete
        self._stream.put(*after)
        self._stream.end()

    def put(self, token: int) -> bool:
        """Add a token; True when a stop text is complete."""
        return self._stream is None or self._add(self._stream.put(token), final=False)

    def end(self) -> None:
        """Add what waited for the rest of a character, and write what waited for the rest of a stop text."""
        self._add("" if self._stream is None else self._stream.end(), final=True)

    def _add(self, piece: str, final: bool) -> bool:
        before = len(self.shown)
        self.shown += piece
        found = [at for stop in self._stops if (at := self.shown.find(stop, max(0, before - len(stop)))) >= 0]
        if found:
            self.shown, self._stream = self.shown[: min(found)], None
        starts = [n for stop in self._stops for n in range(1, len(stop)) if self.shown.endswith(stop[:n])]
        safe = len(self.shown) - (0 if final or found else max(starts, default=0))
        if self._write is not None and safe > self._written:
            self._write(self.shown[self._written : safe])
            self._written = safe
        return bool(found)


@dataclass
class Row:
    """One answer in the making.

    number: its place among all.  stream: the seed and the number that its randomness depends on.  adapter: the one
    that serves it, where rows differ in that.
    """

    prompt: list[int]
    number: int
    text: Text | None = None
    stream: tuple[int, int] = (0, 0)
    adapter: str | None = None
    new: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    done: bool = False

    def take(self, token: int, logprob: float | None, stops: frozenset[int], last: bool) -> None:
        """Add a chosen token and see whether it ends the answer."""
        if token < 0:
            raise RuntimeError(
                f"generate: the logits of answer {self.number} are not finite at its new token {len(self.new)}; look "
                "for NaN in the weights, and if they are float16 load them in bfloat16 or float32."
            )
        self.new.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.done = last or token in stops
        if self.text is not None:
            # A stop id is no text, even where it is an ordinary token.
            self.done = (token not in stops and self.text.put(token)) or self.done
            if self.done:
                self.text.end()
