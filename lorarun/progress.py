"""What a training run shows while it runs and leaves behind: a bar, ``metrics.jsonl``, pictures.

Apart from the loop, so that ``lorarun.fit`` and a loop of one's own share it: call :meth:`Progress.step` after each
optimizer step, :meth:`Progress.evaluated` after an evaluation, and close it (or use ``with``).  A trainer class would
own the loop and call back; here the loop calls, and nothing is hidden in between.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lorarun.watch import Watcher, draw

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

QUIET_SECONDS = 10.0  # between two lines where there is no terminal to draw a bar on


def plain_warnings() -> None:
    """From now on warnings are a sentence on stderr, above a bar if there is one, for programs whose users have no use
    for the line of ours that warns."""
    warnings.showwarning = lambda message, *_, **__: tqdm.write(f"warning: {message}", file=sys.stderr)


class Progress:
    """A bar on stderr (a line now and then where that is no terminal), and the files ``metrics.jsonl`` and the
    pictures of :mod:`lorarun.watch`.

    ``metrics.jsonl`` has a JSON object for each step, written as the run goes: ``step`` (from 1), what :meth:`step` was
    given, ``tokens_per_s`` of this step, ``memory_gib`` (the most that was allocated on the accelerator so far, or held
    by the process where there is none), ``elapsed_s`` since the start, and what an evaluation after the step gave; one
    before the first step is ``step`` 0.  Numbers that are not finite are null.  A file of an earlier run is replaced;
    ``rows`` are what it begins with where a run goes on.

    watchers: are given each row once it is complete.  mute: show and write nothing, as all processes but one do.
    """

    def __init__(
        self,
        folder: str | Path,
        steps: int,
        rows: Iterable[dict[str, Any]] = (),
        watchers: Sequence[Watcher] = (),
        mute: bool = False,
    ) -> None:
        self.folder, self.metrics = Path(folder), Path(folder) / "metrics.jsonl"
        self.plot: Path | None = None  # of the losses, once it is drawn
        self.rows, self.watchers, self.mute = list(rows), list(watchers), mute
        self.steps, self.done, self.before = steps, 0, 0.0
        if self.rows:  # an earlier process wrote them
            self.done, self.before = self.rows[-1]["step"], self.rows[-1]["elapsed_s"]
        self.written = len(self.rows)
        if not mute:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.metrics.with_name(".metrics.jsonl.partial")
            partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
            partial.replace(self.metrics)
            self._file = self.metrics.open("a", encoding="utf-8")
        self._held: dict[str, Any] | None = None  # the last step, not written yet: an evaluation may belong to it
        form = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} steps{postfix}"
        off = mute or not sys.stderr.isatty()
        self._bar = tqdm(
            total=steps, initial=self.done, file=sys.stderr, disable=off, bar_format=form, dynamic_ncols=True
        )
        self._start = self._clock = self._printed = time.perf_counter()
        self._spent, self._timed = 0.0, 0  # seconds in steps, without what is between them, and how many these were

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, loss: float, tokens: int, **more: Any) -> None:
        """Record an optimizer step: its mean loss, the tokens it processed, and more facts under names of your own."""
        now = time.perf_counter()
        rate = tokens / max(now - self._clock, 1e-9)
        self._spent, self._timed = self._spent + now - self._clock, self._timed + 1
        self.flush()
        self.done += 1
        self._held = {"step": self.done, "loss": loss, "tokens": tokens, **more}
        self._held |= {"tokens_per_s": round(rate, 1), "memory_gib": round(peak_memory() / 2**30, 3)}
        self._held["elapsed_s"] = self._elapsed(now)
        self.rows.append(self._held)
        self._clock = now
        self._show(loss, rate, now)

    def evaluated(self, loss: float, **more: float) -> float:
        """Record the loss on held-out rows, after the step recorded last, or before the first one; returns it.  More
        facts under names of your own become ``eval_…``."""
        if self._held is None:
            self._held = {"step": self.done, "elapsed_s": self._elapsed(time.perf_counter())}
            self.rows.append(self._held)
        self._held |= {"eval_loss": loss, **{f"eval_{name}": value for name, value in more.items()}}
        self._clock = time.perf_counter()  # the time it took is not the next step's
        told = "".join(f", {name} {value:.4g}" for name, value in more.items() if isinstance(value, float))
        self.note(f"evaluation loss after step {self._held['step']}: {loss:.4f}{told}")
        return loss

    def pause(self) -> None:
        """What was done since the last step is not the next one's time."""
        self._clock = time.perf_counter()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if not self.mute:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Finish the files; ``plot`` is the path of the losses' picture when matplotlib is installed."""
        self._bar.close()
        self.flush()
        if not self.mute and not self._file.closed:
            self._file.close()
            self._tell(None)
            self.plot = draw(self.rows, self.folder)

    def flush(self) -> int:
        """Write the last step's row, which nothing more can be added to then; how many there are in the file."""
        if self._held is not None:
            line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in self._held.items()}
            self._held = None
            self.written += 1
            if not self.mute:
                self._write(line)
        return self.written

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk must not end the training
            self.note(f"{self.metrics} cannot be written: {error}")
        self._tell(line)

    def _tell(self, line: dict[str, Any] | None) -> None:
        for watcher in list(self.watchers):
            try:
                watcher(line)
            except Exception as error:  # nor must somebody's server
                self.watchers.remove(watcher)
                self.note(f"a watcher is dropped: {type(error).__name__}: {error}")

    def _elapsed(self, now: float) -> float:
        return round(self.before + now - self._start, 3)

    def _show(self, loss: float, rate: float, now: float) -> None:
        left = tqdm.format_interval(self._spent / self._timed * (self.steps - self.done))
        text = f"loss {loss:.3f}, {rate:,.0f} tokens/s, {left} left"
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self.done in (1, self.steps) or now - self._printed >= QUIET_SECONDS:
            self.note(f"step {self.done}/{self.steps}: {text}")
            self._printed = now


def peak_memory() -> int:
    """The most bytes that were allocated on the accelerator so far, or without one that this process has held."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    if resource is None:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def written_rows(metrics: Path, count: int) -> list[dict[str, Any]]:
    """The first ``count`` rows of a ``metrics.jsonl``; ValueError where they are not there."""
    try:
        with metrics.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line, _ in zip(file, range(count), strict=False)]
    except (OSError, ValueError) as error:
        raise ValueError(f"{metrics} cannot be read: {error}; it has the rows before the checkpoint.") from error
    if len(rows) < count:
        raise ValueError(f"{metrics} has {len(rows)} rows; at the checkpoint there were {count}.")
    return rows
