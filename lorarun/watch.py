"""A run's numbers as pictures, and for those who ask, in TensorBoard or Weights & Biases.

A watcher is a function that is given each complete row of ``metrics.jsonl``, and None when the run is over.  What goes
wrong in it ends the watcher, not the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Watcher = Callable[[Row | None], None]

# What is drawn: the file's name, the axis, and the keys of a row with what the legend calls them.
PLOTS: dict[str, tuple[str, dict[str, str]]] = {
    "loss.png": ("loss (mean over supervised tokens)", {"loss": "training", "eval_loss": "evaluation"}),
    "lr.png": ("learning rate", {"lr": ""}),
    "grad_norm.png": ("norm of the gradient before clipping", {"grad_norm": ""}),
    "tokens_per_s.png": ("tokens/s", {"tokens_per_s": ""}),
    "memory_gib.png": ("peak memory, GiB", {"memory_gib": ""}),
}
WINDOWED = ("loss", "grad_norm", "tokens_per_s")  # drawn pale, with a mean over a tenth of the run


def draw(rows: Iterable[Row], folder: str | Path) -> Path | None:
    """Draw all of ``PLOTS`` into ``folder``; the picture of the losses, None where matplotlib is not installed."""
    rows = list(rows)
    for name, (label, keys) in PLOTS.items():
        if not plot(rows, Path(folder) / name, label, keys):
            return None
    return Path(folder) / "loss.png"


def plot(rows: Iterable[Row], path: str | Path, label: str, keys: Mapping[str, str]) -> bool:
    """Draw numbers of ``rows`` over their steps into a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError:
        return False
    rows = list(rows)
    figure = Figure(figsize=(7, 4), dpi=120)
    axes = figure.add_axes((0.12, 0.12, 0.85, 0.81), xlabel="step", ylabel=label)
    for color, (key, legend) in zip(("C0", "C1"), keys.items(), strict=False):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        if key in WINDOWED:
            window = 1 + len(values) // 10
            parts = (values[max(0, i - window) : i] for i in range(1, len(values) + 1))
            means = [sum(part) / len(part) for part in parts]
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, means, color=color, label=f"{legend}, mean of {window} steps".removeprefix(", "))
        else:
            axes.plot(steps, values, "o-" if legend else "-", color=color, label=legend or None)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    partial = Path(path).with_name(f".{Path(path).name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(path)
    return True


def tensorboard(folder: Path, settings: Mapping[str, Any]) -> Watcher:
    """Scalars under ``folder/tensorboard``; ValueError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ValueError(f"watch: TensorBoard is not installed ({error}); pip install tensorboard.") from error
    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def write(row: Row | None) -> None:
        if row is None:
            writer.close()
            return
        for key, value in _numbers(row).items():
            writer.add_scalar(key, value, row["step"])
        writer.flush()

    return write


def wandb(folder: Path, settings: Mapping[str, Any]) -> Watcher:
    """A run of Weights & Biases, kept in ``folder``, under the account and the mode of the environment; a run that is
    resumed is a new one there.  ValueError where it is not installed."""
    try:
        import wandb as client  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ValueError(f"watch: Weights & Biases is not installed ({error}); pip install wandb.") from error
    folder.mkdir(parents=True, exist_ok=True)
    run = client.init(dir=str(folder), config=dict(settings))
    return lambda row: run.finish() if row is None else run.log(_numbers(row), step=row["step"])


WATCHERS: dict[str, Callable[[Path, Mapping[str, Any]], Watcher]] = {"tensorboard": tensorboard, "wandb": wandb}


def _numbers(row: Row) -> dict[str, float]:
    return {key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float))}
