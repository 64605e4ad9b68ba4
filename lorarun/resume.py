"""Checkpoints of a training run, from which a new process goes on as if the old one had never stopped.

A checkpoint is a folder ``step-00000100`` with ``adapter``, which any program that reads PEFT's format can use (none
where every weight of the model is trained), and ``state.pt``: parameters, their fp32 copies, moments, loss scale, the
dropout clock, random states, the place in the data, how the evaluations went, how many rows of metrics there were, and
the run's identity.  On a CPU the steps behind it are the same bit for bit; elsewhere as far as the kernels repeat
themselves.

A checkpoint is there whole or not at all: it is written into a hidden folder, synced, and renamed.  A process that is
killed in the middle leaves that hidden folder, which the next run clears away.

The usual way restores what it can and goes on.  Here whatever would make another run of it (other rows, another base,
rank or schedule) is an error that names each difference.  Free to change are the number of processes and what only
watches: evaluations, samples, how often to save.

Given up: going on inside a step, and random numbers that a user's own hooks draw in a run of more processes than
before.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lorarun.adapter import save_adapter
from lorarun.batch import Batch
from lorarun.documents import Document
from lorarun.nn import Model
from lorarun.trained import owner

FOLDER, STATE, FORMAT = "checkpoints", "state.pt", 1
NAME = re.compile(r"step-(\d{8})")
SAMPLE = 64  # values of each frozen tensor that stand for it


# --- files -----------------------------------------------------------------------------------------------------------


def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of the run in ``out``, oldest first."""
    return sorted(path for path in (out / FOLDER).glob("step-*") if NAME.fullmatch(path.name) and path.is_dir())


def write_checkpoint(model: Model, out: Path, step: int, state: Mapping[str, Any], keep: int) -> None:
    """Write a checkpoint and remove all but the ``keep`` newest.  OSError where it cannot be."""
    folder = out / FOLDER
    final, partial = folder / f"step-{step:08}", folder / f".step-{step:08}.partial"
    clear_partial(out)
    partial.mkdir(parents=True)
    try:
        if not model.whole:  # whose weights are in the state
            save_adapter(model, partial / "adapter")
        with (partial / STATE).open("wb") as file:
            torch.save({"format": FORMAT, "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        if final.exists():  # of a run that went on from an older one
            _remove(final)
        partial.rename(final)
    except (OSError, RuntimeError) as error:  # the second is torch's word for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"no checkpoint of step {step} in {folder}: {error}") from error
    _sync(folder)
    for old in checkpoints(out)[:-keep]:
        _remove(old)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The state in a checkpoint, on the CPU; ValueError for one that cannot be read."""
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises almost anything for a damaged file
        raise ValueError(
            f"the checkpoint {folder} cannot be read ({type(error).__name__}: {str(error).partition(chr(10))[0]}); "
            "move it away to go on from the one before."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{folder / STATE} is no checkpoint that this version reads; expected format {FORMAT}.")
    return state


def clear_partial(out: Path) -> None:
    """Remove what a killed process has left of a checkpoint."""
    for path in (out / FOLDER).glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that at no time a part of it could be taken for one."""
    hidden = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk, where the system can say so."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


# --- what is random --------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Python's and torch's generators, that of this process's accelerator among them."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random(state: Mapping[str, Any]) -> None:
    """Set the generators back."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# --- what a run is ---------------------------------------------------------------------------------------------------


def digest_of(documents: Iterable[Document]) -> str:
    """A digest of rows as the model sees them: ids and labels, in their order."""
    found = hashlib.sha256()
    for document in documents:
        found.update(len(document.ids).to_bytes(8, "little"))
        found.update(document.ids.numpy().tobytes() + document.labels.numpy().tobytes())
    return found.hexdigest()[:16]


def chained(digest: str, batch: Batch) -> str:
    """The digest of all batches so far, ``batch`` the last of them."""
    return hashlib.sha256(digest.encode() + batch.ids.numpy().tobytes() + batch.labels.numpy().tobytes()).hexdigest()


def identity_of(model: Model) -> dict[str, Any]:
    """What a model is, for comparison: its frozen weights by a sample of each, and the adapter by its settings."""
    base, trained = hashlib.sha256(), hashlib.sha256()
    count = values = 0
    for name, parameter in model.named_parameters():
        about = f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode()
        if parameter.requires_grad:
            trained.update(about)
            count, values = count + 1, values + parameter.numel()
        elif owner(name) is None:  # other adapters are no part of the run
            flat = parameter.detach().reshape(-1)
            places = torch.linspace(0, len(flat) - 1, min(SAMPLE, len(flat)), dtype=torch.float64).long()
            base.update(about + flat[places.to(flat.device)].cpu().view(torch.uint8).numpy().tobytes())
    lora = vars(model.adapters[model.active]) if model.active is not None else {}
    lora = {key: value for key, value in lora.items() if key not in ("modules", "seed")}
    return {
        "base": f"{type(model).__name__} {base.hexdigest()[:16]}",
        "dtype": str(model.dtype),
        **{f"adapter's {key}": repr(value) for key, value in lora.items()},
        "trained": f"{count} tensors of {values:,} values, {trained.hexdigest()[:16]}",
    }


def check_identity(stored: Mapping[str, str], own: Mapping[str, str], folder: Path) -> None:
    """ValueError that names everything in which this run differs from that of the checkpoint."""
    wrong = [
        f"{key} is {own.get(key, 'absent')}, there it was {stored.get(key, 'absent')}"
        for key in {**stored, **own}
        if stored.get(key, "absent") != own.get(key, "absent")
    ]
    if wrong:
        raise ValueError(
            f"fit: this is another run than the one in {folder}: {'; '.join(wrong)}. Give what was given then, or "
            "start anew in another folder."
        )
