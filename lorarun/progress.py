"""What a training run shows while it runs and leaves behind: a bar, ``metrics.jsonl``, a plot of the losses.

Apart from the loop, so that ``lorarun.fit`` and a loop of one's own share it: call :meth:`Progress.step` after each
optimizer step, :meth:`Progress.evaluated` after an evaluation, and close it (or use ``with``).  A trainer class would
own the loop and call back; here the loop calls, and nothing is hidden in between.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

QUIET_SECONDS = 10.0  # between two lines where there is no terminal to draw a bar on


class Progress:
    """A bar on stderr (a line now and then where that is no terminal), and the files ``metrics.jsonl`` and
    ``loss.png``.

    ``metrics.jsonl`` has a JSON object for each step, written as the run goes: ``step`` (from 1), what :meth:`step` was
    given, ``tokens_per_s`` of this step, ``elapsed_s`` since the start, and ``eval_loss`` where it was measured after
    the step; an evaluation before the first step is ``step`` 0.  Numbers that are not finite are null.  A file of an
    earlier run is replaced.
    """

    def __init__(self, folder: str | Path, steps: int) -> None:
        self.folder, self.metrics = Path(folder), Path(folder) / "metrics.jsonl"
        self.plot: Path | None = None  # once it is drawn
        self.steps, self.done, self.rows = steps, 0, list[dict[str, Any]]()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.metrics.open("w", encoding="utf-8")
        self._held: dict[str, Any] | None = None  # the last step, not written yet: an evaluation may belong to it
        form = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} steps{postfix}"
        self._bar = tqdm(
            total=steps, file=sys.stderr, disable=not sys.stderr.isatty(), bar_format=form, dynamic_ncols=True
        )
        self._start = self._clock = self._printed = time.perf_counter()
        self._spent = 0.0  # seconds in steps, without what is between them

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, loss: float, tokens: int, **more: Any) -> None:
        """Record an optimizer step: its mean loss, the tokens it processed, and more facts under names of your own."""
        now = time.perf_counter()
        rate = tokens / max(now - self._clock, 1e-9)
        self._spent += now - self._clock
        self._flush()
        self.done += 1
        self._held = {"step": self.done, "loss": loss, "tokens": tokens, **more}
        self._held |= {"tokens_per_s": round(rate, 1), "elapsed_s": round(now - self._start, 3)}
        self.rows.append(self._held)
        self._clock = now
        self._show(loss, rate, now)

    def evaluated(self, loss: float) -> float:
        """Record the loss on held-out rows, after the step recorded last, or before the first one; returns it."""
        if self._held is None:
            elapsed = round(time.perf_counter() - self._start, 3)
            self._held = {"step": self.done, "elapsed_s": elapsed}
            self.rows.append(self._held)
        self._held["eval_loss"] = loss
        self._clock = time.perf_counter()  # the time it took is not the next step's
        self.note(f"evaluation loss after step {self._held['step']}: {loss:.4f}")
        return loss

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Finish the files; ``plot`` is the picture's path when matplotlib is installed."""
        self._bar.close()
        if not self._file.closed:
            self._flush()
            self._file.close()
            picture = self.folder / "loss.png"
            self.plot = picture if plot_losses(self.rows, picture) else None

    def _flush(self) -> None:
        if self._held is not None:
            line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in self._held.items()}
            self._held = None
            try:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
            except OSError as error:  # a full disk must not end the training
                self.note(f"{self.metrics} cannot be written: {error}")

    def _show(self, loss: float, rate: float, now: float) -> None:
        left = tqdm.format_interval(self._spent / self.done * (self.steps - self.done))
        text = f"loss {loss:.3f}, {rate:,.0f} tokens/s, {left} left"
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self.done in (1, self.steps) or now - self._printed >= QUIET_SECONDS:
            self.note(f"step {self.done}/{self.steps}: {text}")
            self._printed = now


def plot_losses(rows: list[dict[str, Any]], path: str | Path) -> bool:
    """Draw the losses in ``rows`` (of ``metrics.jsonl``) into a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (mean over supervised tokens)")
    trained, measured = (
        [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
        for key in ("loss", "eval_loss")
    )
    if trained:
        steps, losses = zip(*trained, strict=True)
        window = 1 + len(losses) // 10
        means = [sum(part) / len(part) for part in (losses[max(0, i - window) : i] for i in range(1, len(losses) + 1))]
        axes.plot(steps, losses, color="C0", alpha=0.25, linewidth=1)
        axes.plot(steps, means, color="C0", label=f"training, mean of {window} steps")
    if measured:
        axes.plot(*zip(*measured, strict=True), "o-", color="C1", label="evaluation")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    partial = Path(path).with_name(f".{Path(path).name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(path)
    return True
