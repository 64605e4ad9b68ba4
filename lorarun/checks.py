"""What a training run checks and says before it starts: its arguments, what it trains, the ids in its data.

Everything that can be known to be wrong is found here, before the first step and all at once; a run that dies after an
hour for a misspelt argument has cost an hour.
"""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

import torch
from torch import nn

from lorarun.data import Prepared
from lorarun.kernels.cross_entropy import IGNORE
from lorarun.lora import check_not_merged, lora_parameters
from lorarun.nn import Model
from lorarun.optim import OPTIMIZERS, SCHEDULES
from lorarun.tokens import check_added, learns_row
from lorarun.watch import WATCHERS


def _whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _part(value: Any) -> bool:
    """Whether this is a number of steps, or a fraction of them."""
    return _whole(value, 0) or (isinstance(value, float) and 0.0 <= value < 1.0)


# What each argument of lorarun.fit may be, in words and as a test; None is allowed where it is the default.
LIMITS: dict[str, tuple[str, Any]] = {
    "epochs": ("a whole number from 1 up", _whole),
    "steps": ("a whole number from 1 up, or None for whole epochs", _whole),
    "lr": ("a positive number", lambda x: 0 < x < math.inf),
    "accumulate": ("how many batches make a step, from 1 up", _whole),
    "warmup": ("a fraction below 1.0 of all steps, or a whole number of steps", _part),
    "decay": ("a fraction below 1.0 of all steps, a whole number of steps, or None for all behind the warm-up", _part),
    "schedule": (f"one of {', '.join(SCHEDULES)}", lambda x: x in SCHEDULES),
    "clip": ("a positive norm, or None for no limit", lambda x: x > 0),
    "weight_decay": ("a number from 0 up", lambda x: 0 <= x < math.inf),
    "optimizer": (f"one of {', '.join(OPTIMIZERS)}", lambda x: x in OPTIMIZERS),
    "b_ratio": ("a positive number, 1 for plain LoRA", lambda x: 0 < x < math.inf),
    "embedding_lr": ("a positive number, or None for lr", lambda x: 0 < x < math.inf),
    "smoothing": ("a share from 0 up to, not including, 1", lambda x: 0.0 <= x < 1.0),
    "eval_fraction": ("a fraction from 0 up to, not including, 1", lambda x: 0.0 <= x < 1.0),
    "eval_every": ("a number of steps from 1 up, or None", _whole),
    "patience": ("a number of evaluations from 1 up, or None", _whole),
    "save_every": ("a number of steps from 1 up, or None", _whole),
    "keep": ("how many checkpoints are kept, from 1 up", _whole),
    "buffer": ("how many documents are held, from 1 up, or None to read all rows first", _whole),
    "watch": (f"a list of {', '.join(WATCHERS)}", lambda x: not isinstance(x, str) and set(x) <= set(WATCHERS)),
}
OPTIONAL = {"steps", "accumulate", "decay", "clip", "embedding_lr", "eval_every", "patience", "save_every", "buffer"}


def check_arguments(**given: Any) -> None:
    """Every argument out of range, and those that do not go together, in one error."""
    wrong = []
    for name, value in given.items():
        expected, fits = LIMITS[name]
        try:
            right = (value is None and name in OPTIONAL) or (value is not None and fits(value))
        except TypeError:
            right = False
        if not right:
            wrong.append(f"{name} is {value!r}; expected {expected}")
    if not wrong:
        wrong = _together(given)
    if wrong:
        raise ValueError(f"fit: {'; '.join(wrong)}.")


def _together(given: dict[str, Any]) -> list[str]:
    """Arguments that are each in range and make no sense beside one another."""
    wrong = []
    if given["decay"] is not None and given["schedule"] == "constant":
        wrong.append("decay says when the rate falls, but schedule='constant' never does; choose linear or cosine")
    if given["buffer"] is not None and given["steps"] is None:
        wrong.append("with buffer the rows are read while training, so how many there are is not known: give steps")
    if given["buffer"] is not None and given["eval_fraction"]:
        wrong.append("with buffer no fraction of the rows can be held out: give eval_rows")
    return wrong


def check_schedule(steps: int, ramp: int, fall: int | None, warmup: Any, decay: Any) -> None:
    """ValueError for a warm-up or a decay that ``steps`` has no room for."""
    if not 0 <= ramp < steps:
        raise ValueError(f"fit: warmup={warmup} is {ramp} of {steps} steps; expected fewer, so that lr is reached.")
    if fall is not None and not 1 <= fall <= steps - ramp:
        raise ValueError(
            f"fit: decay={decay} is {fall} of {steps} steps, {ramp} of them warm-up; expected 1 to {steps - ramp}."
        )


def trainable(model: Model) -> dict[str, nn.Parameter]:
    """The parameters of the active adapter, or after ``train_all`` of the model, by name; ValueError where training
    would have no effect or be lost."""
    check_not_merged(model, "fit")
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if model.whole and found:
        if model.source is None:
            raise ValueError(
                "fit: this model was not loaded from a checkpoint, whose files are needed to save it; load it with "
                "lorarun.load."
            )
        return found
    if model.active is None or not found:
        raise ValueError("fit: there is nothing to train; call add_lora(model) first, or use_adapter to choose one.")
    own = set(map(id, lora_parameters(model)))
    foreign = [name for name, p in found.items() if id(p) not in own]
    if foreign:
        raise ValueError(
            f"fit: it trains and saves an adapter, but {len(foreign)} other parameters require gradients too "
            f"({', '.join(foreign[:3])}): freeze them, or write a loop as in scripts/finetune.py."
        )
    return found


def hold_out(rows: list[Any], eval_rows: object, fraction: float, seed: int) -> tuple[list[Any], list[Any]]:
    """The rows to train on and the held-out ones, each in their order."""
    if eval_rows is not None:
        raise ValueError("fit: give eval_rows or eval_fraction, not both.")
    count = max(1, round(fraction * len(rows)))
    if count >= len(rows):
        raise ValueError(f"fit: eval_fraction={fraction} of {len(rows)} rows leaves none to train on.")
    held = set(random.Random(seed).sample(range(len(rows)), count))
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]


def check_ids(model: Model, *data: Prepared) -> None:
    """Look for ids in the data that the model cannot know, before it meets them.

    Raises ValueError for ids beyond the embedding's table; warns once of those whose row in it is all zero, as
    checkpoints have for reserved tokens.  Nothing is altered.
    """
    table = model.model.embed_tokens.weight.detach()
    ids = torch.unique(torch.cat([torch.unique(document.ids) for part in data for document in part.documents]))
    beyond = ids[(ids < 0) | (ids >= len(table))].tolist()
    if beyond:
        raise ValueError(
            f"The data has ids {beyond[:10]}, but the model's table ends at {len(table) - 1}: this is another model's "
            "tokenizer."
        )
    check_added(model, ids.tolist())
    empty = ids[(table[ids.to(table.device)] == 0).all(dim=-1).cpu()].tolist()
    empty = [i for i in empty if not learns_row(model, i)]
    if empty:
        more = f" and {len(empty) - 20} more" if len(empty) > 20 else ""
        warnings.warn(
            f"The data has tokens whose embedding was never trained (all zero): ids {', '.join(map(str, empty[:20]))}"
            f"{more}. An adapter cannot tell them apart; use a template with tokens that the checkpoint knows, or "
            "train their rows (add_tokens).",
            stacklevel=3,
        )


def summary(prepared: Prepared) -> str:
    """How much there is to learn from, in words."""
    used = prepared.rows - len(prepared.too_long) - len(prepared.nothing) - len(prepared.control)
    total = sum(len(document.ids) for document in prepared.documents)
    learned = sum(int((document.labels[1:] != IGNORE).sum()) for document in prepared.documents)
    return f"{used:,} rows: {total:,} tokens, {learned:,} of them supervised"
