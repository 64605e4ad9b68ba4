"""A model with its adapter folded in, as a folder that any program for Hugging Face checkpoints loads.

The usual way asks the live model for its state and saves it.  Then names, shards, dtypes and everything that the
decoder does not use (a vision tower) are what the program makes of them, and an adapter that was not applied shows to
nobody.  Here the source checkpoint is copied: the same shards with the same tensors in the same order, byte for byte,
except that each projection with an adapter becomes W + scale · B·A, computed in fp32 and rounded once.  One tensor is
in memory at a time.

What was written is then read back and compared with what it should be, bit by bit, and a model loaded from it must
answer as the live one does.  Only after that the folder gets its name; until then it is called ``.<name>.partial``.

Given up: exporting weights that were changed by hand after loading.  They are noticed, since every tensor is compared
with the live model on the way, and refused.  The price of it all is reading the source twice.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

from lorarun.checkpoint import open_checkpoint, read_config
from lorarun.export_plan import Export, plan_export
from lorarun.headers import DTYPES, INDEX, abbreviate
from lorarun.load import free_memory, load
from lorarun.merge import without_place
from lorarun.nn import Linear, Model
from lorarun.quant.store import Store
from lorarun.weighted import Weighted

COPIED = (".json", ".jinja", ".model", ".txt")  # of the source's small files; LICENSE and NOTICE are copied too
LEFT = ("adapter_config.json", ".index.json")  # endings of names that are not
CODES = {dtype: code for code, dtype in DTYPES.items()}
TOKENS = 64  # of the row on which logits are compared
KEPT = 0.9  # of an update in 16 bits, below which the user is told
FACTOR = 2.0  # times the measured noise that logits may be off; 0.2 to 0.9 are seen


def save_merged(
    model: Model,
    path: str | os.PathLike[str],
    base: str = "dequantized",
    dtype: torch.dtype | None = None,
    bits: int = 16,
) -> None:
    """Write the model with its active adapter folded in to the new folder ``path``, verified before it appears there.

    The model must come from ``load``; its source is read again, tensor by tensor.  Whether the adapter is merged in
    memory makes no difference.  Configuration, tokenizer and generation files are copied, and so is all that the
    decoder leaves aside of a multimodal checkpoint.

    base: by default ("dequantized") W is the weight that the adapter was trained on; where the model was loaded in
    four or eight bits, or in a narrower dtype than the source has, that is the dequantised or rounded one.
    "original" takes the source's and says how far the logits move.  For others both are the same.  dtype: of all
    floating-point tensors written (bfloat16, float16, float32); by default each keeps its own.  bits: 16, weights
    that are not quantised, is what there is.

    Raises ValueError for arguments, a model or a ``path`` that do not allow it, OSError for a full disk, RuntimeError
    when the verification fails; then nothing is left behind.
    """
    _check_arguments(model, base, dtype, bits)
    path = Path(path).resolve()  # a link is followed, and "." has a name
    if path.exists() and (not path.is_dir() or any(path.iterdir()) or os.path.ismount(path) or path == Path.cwd()):
        raise ValueError(f"save_merged: {path} exists already; give a new folder, or delete it first.")
    export = plan_export(model, base, dtype)
    partial = path.absolute().parent / f".{path.absolute().name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
    partial.mkdir(parents=True)
    try:
        _check_space(export, partial)
        _write(export, partial)
        _check_written(export, partial)
        _check_logits(export, partial)
        if path.exists():
            path.rmdir()  # empty
        os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    count = sum(map(export.merges, export.rewritten))
    print(f"save_merged: {path} is complete and verified; {count} projections were merged.", file=sys.stderr)
    if export.asked and (share := export.kept / export.asked) < KEPT:
        warnings.warn(
            f"save_merged: rounding to 16 bits kept {share:.0%} of the adapter's update; the rest is below half a step "
            "of the weights. dtype=torch.float32 (--dtype float32) keeps all, and so does the adapter itself.",
            stacklevel=2,
        )


# --- before --------------------------------------------------------------------------------------------------------


def _check_arguments(model: Model, base: str, dtype: torch.dtype | None, bits: int) -> None:
    wrong = []
    if bits != 16:
        wrong.append(f"bits={bits} is not supported; 16 is")
    if base not in ("dequantized", "original"):
        wrong.append(f"base={base!r} is not known; expected 'dequantized' or 'original'")
    if dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        wrong.append(f"dtype={dtype} is not supported; torch.bfloat16, float16 and float32 are")
    if dtype == torch.float16 and not model.fp16:
        wrong.append("this model overflows in float16; choose torch.bfloat16 or float32")
    if model.active is None and not model.whole:
        wrong.append(f"no adapter is active; the model has {', '.join(model.adapters) or 'none'}")
    elif model.active is None and base == "original":
        wrong.append("base='original' would leave out what was trained, which are the model's own weights")
    elif model.active is not None and (homeless := without_place(model, model.active)):
        wrong.append(homeless)
    elif model.active is not None and base == "original" and model.adapters[model.active].init == "loftq":
        wrong.append("base='original' would correct twice: init='loftq' has the error of the quantised weights in it")
    if model.source is None:
        wrong.append("this model was not loaded from a checkpoint")
    elif model.source.folder.suffix == ".gguf":
        wrong.append("this model was loaded from a GGUF file, which save_gguf writes again")
    if wrong:
        raise ValueError(f"save_merged: {'; '.join(wrong)}.")


def _check_space(export: Export, partial: Path) -> None:
    source = export.source
    needed = sum(map(export.size_of, export.entries.values()))
    needed += sum(file.stat().st_size for file in _small_files(source.folder)) + 2**20
    free = shutil.disk_usage(partial).free
    if needed > free:
        gib = 2**30
        raise OSError(
            errno.ENOSPC,
            f"save_merged: the merged model takes {needed / gib:.2f} GiB and the disk of {partial.parent} has "
            f"{free / gib:.2f} GiB free; make room or give a folder on another disk",
        )


# --- writing -------------------------------------------------------------------------------------------------------


def _write(export: Export, partial: Path) -> None:
    """Write every file into the folder, and note what is wrong with the live model or the values."""
    files: dict[str, list[str]] = {}
    for name, entry in export.entries.items():
        files.setdefault(entry.file, []).append(name)
    with _progress("writing", export) as bar:
        for file, names in files.items():
            with open(partial / file, "wb") as out:
                out.write(_header(export, file, names))
                for name in names:
                    _write_tensor(export, name, out)
                    bar.update(export.size_of(export.entries[name]))
                out.flush()
                os.fsync(out.fileno())
    if export.changed:
        raise ValueError(
            f"save_merged: {len(export.changed)} weights of this model are not those of {export.source.folder}, which "
            f"is what is merged: {abbreviate(export.changed)}. Load the model afresh and put the adapter on it."
        )
    if export.infinite:
        raise ValueError(f"save_merged: these would not be finite numbers: {abbreviate(export.infinite)}.")
    if export.same:
        count = f"{len(export.same)} of {sum(map(export.merges, export.rewritten))}"
        warnings.warn(
            f"save_merged: the adapter leaves {count} projections as they were: {abbreviate(export.same)}. It was not "
            "trained, or what it learnt is smaller than the dtype can show.",
            stacklevel=3,
        )
    _write_small_files(export, partial)


def _header(export: Export, file: str, names: list[str]) -> bytes:
    """The first bytes of a shard, with the source's metadata; see :mod:`lorarun.headers` for the format."""
    with open(export.source.folder / file, "rb") as stream:
        before = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header: dict[str, Any] = {"__metadata__": before.get("__metadata__") or {"format": "pt"}}
    end = 0
    for name in names:
        entry = export.entries[name]
        start, end = end, end + export.size_of(entry)
        code = CODES[export.dtype_of(entry)]
        header[name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def _write_tensor(export: Export, name: str, out: BinaryIO) -> None:
    stored = export.read(name)
    live = export.live.get(name)
    if export.adapter is not None and live is not None and not torch.equal(stored.to(live.device, live.dtype), live):
        export.changed.append(name)
    before = export.base(name, stored)
    exact = export.exact(name, before)
    value = exact.to(export.dtype_of(export.entries[name])).contiguous()
    changed = export.merges(name) or name in export.biases or value.dtype != stored.dtype
    if changed and not torch.isfinite(value).all():
        export.infinite.append(name)
    if export.merges(name):
        if torch.equal(value, before.to(value.dtype)):
            export.same.append(name)
        update = exact - before
        export.asked += float(update.square().sum())
        export.kept += float((update * (value.to(exact.dtype) - before)).sum())
    if value.numel():
        out.write((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))


def _small_files(folder: Path) -> Iterator[Path]:
    """Configuration, tokenizer, templates and licences of a checkpoint's folder."""
    for file in [*sorted(folder.iterdir()), *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        wanted = file.name.endswith(COPIED) or file.name.upper().startswith(("LICENSE", "NOTICE"))
        if file.is_file() and wanted and not file.name.endswith(LEFT):
            yield file


def _write_small_files(export: Export, partial: Path) -> None:
    source = export.source
    for file in _small_files(source.folder):
        copy = partial / file.relative_to(source.folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if export.model.tokenizer is not None:
        export.model.tokenizer.save(partial)  # with the chat template that was named at loading
    config = read_config(partial)
    if any(export.dtype_of(entry) != entry.dtype for entry in export.entries.values()):
        config = _with_dtype(config, str(export.dtype).removeprefix("torch."))
    if (changed := _with_fields(config, export.config)) != read_config(partial):
        _write_json(partial / "config.json", changed)
    if (source.folder / INDEX).exists():
        index = json.loads((source.folder / INDEX).read_text(encoding="utf-8"))
        total = sum(map(export.size_of, export.entries.values()))
        index["weight_map"] |= {name: export.entries[name].file for name in export.origin}
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": total}
        _write_json(partial / INDEX, index)


def _with_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A config.json with the dtype's name wherever it states one."""
    return {
        key: name if key in ("dtype", "torch_dtype") else _with_dtype(value, name) if isinstance(value, dict) else value
        for key, value in config.items()
    }


def _with_fields(config: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """A config.json with these fields, of the text model where it describes a multimodal one."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config | fields
    outer = {key: value for key, value in fields.items() if key == "tie_word_embeddings"}  # stated on both levels
    return config | outer | {"text_config": inner | fields}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _progress(what: str, export: Export) -> Any:
    """A bar on stderr over the bytes written; a line where that is no terminal."""
    terminal = sys.stderr.isatty()
    total = sum(map(export.size_of, export.entries.values()))
    if not terminal:
        print(f"save_merged: {what} {total / 2**20:,.1f} MiB", file=sys.stderr)
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, disable=not terminal)


# --- verification --------------------------------------------------------------------------------------------------


def _check_written(export: Export, partial: Path) -> None:
    """Read every tensor back and compare its bits with what it should be, computed again from the source."""
    entries, written = export.entries, open_checkpoint(partial)
    wrong = sorted(entries.keys() ^ written.entries.keys())
    with _progress("reading back", export) as bar:
        for name, got in written.read(entries.keys() & written.entries.keys()):
            expected = export.value(name, export.read(name))
            if got.dtype != expected.dtype or got.shape != expected.shape or not _same_bits(got, expected):
                wrong.append(name)
            bar.update(export.size_of(entries[name]))
    if wrong:
        raise RuntimeError(
            f"save_merged: what was read back is not what was to be written: {abbreviate(wrong)}; nothing is kept. Is "
            "the disk sound, and was the source left alone meanwhile?"
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that also holds for NaN, and not between 0 and -0."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _check_logits(export: Export, partial: Path) -> None:
    """Load what was written and compare its logits with the live model's, on one row of random ids.

    They differ by rounding: merged weights are rounded to the dtype written, and sums are rounded elsewhere.  How far
    that moves the logits of this very model is measured: the live model runs once more with each projection's output
    disturbed by noise of one such rounding.  The written model may be off by FACTOR times as much (root mean square).
    """
    model = export.model
    device = _room(export)
    if device is None:
        print("save_merged: no memory for a second model, so logits were not compared.", file=sys.stderr)
        return
    ids = torch.randint(model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    training = model.training
    model.eval()
    try:
        live = _logits(model, ids)
        with _noise(export):
            noisy = _logits(model, ids)
    finally:
        model.train(training)
    if not live.isfinite().all():
        raise RuntimeError(
            "save_merged: the live model's logits are not finite (a run that diverged?); nothing is kept."
        )
    error = _rms(_logits(load(partial, dtype=model.dtype, device=device), ids) - live)
    allowed = FACTOR * _rms(noisy - live) + torch.finfo(model.dtype).eps * _rms(live)
    if export.original and any(isinstance(linear.weight, Store) for linear in export.rewritten.values()):
        print(f"save_merged: logits differ from the live model's by {error / _rms(live):.2%}.", file=sys.stderr)
    elif not error <= allowed:
        raise RuntimeError(
            f"save_merged: the written model answers differently from the live one (logits are off by {error:.3g}, "
            f"rounding explains {allowed:.3g}); nothing is kept. Please report this."
        )


@torch.no_grad()
def _logits(model: Model, ids: Tensor) -> Tensor:
    with torch.autocast(model.device.type, enabled=False):
        logits: Tensor = model(ids.to(model.device))
        return logits.double().cpu()


@contextmanager
def _noise(export: Export) -> Iterator[None]:
    """Disturb each projection's output by one rounding, relative to its size: half a unit in the last place of the
    dtype computed in and, if its weight was written anew, of the dtype written, and what summing in fp32 adds."""
    generator = torch.Generator().manual_seed(1)
    entries, written = export.entries, dict[Weighted, float]()
    for name, module in export.rewritten.items():
        written[module] = torch.finfo(export.dtype_of(entries[name])).eps

    def disturb(module: Weighted, inputs: Any, y: Tensor) -> Tensor:
        summing = torch.finfo(torch.float32).eps * math.sqrt(module.weight.shape[-1])
        size = (torch.finfo(y.dtype).eps + written.get(module, 0.0) + summing) / 2
        return y + y * (size * torch.randn(y.shape, generator=generator)).to(y)

    hooks = [
        m.register_forward_hook(disturb)
        for m in export.model.modules()
        if isinstance(m, Linear) or (isinstance(m, Weighted) and m in written)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _room(export: Export) -> torch.device | None:
    """Where a second, dense model can be had: beside the first, else on the host, else nowhere."""
    numbers = sum(math.prod(entry.shape) for entry in export.entries.values())
    for device in (export.model.device, torch.device("cpu")):
        if 1.1 * numbers * export.model.dtype.itemsize < free_memory(device):
            return device
    return None
