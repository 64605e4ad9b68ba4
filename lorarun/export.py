"""A model with its adapter folded in, as a folder that any program for Hugging Face checkpoints loads.

The usual way asks the live model for its state and saves it.  Then names, shards, dtypes and everything that the
decoder does not use (a vision tower) are what the program makes of them, and an adapter that was not applied shows to
nobody.  Here the source checkpoint is copied: the same shards with the same tensors in the same order, byte for byte,
except that each projection with an adapter becomes W + scale · B·A, computed in fp32 and rounded once, and that
projections become codes of four or eight bits where these are asked for.  One tensor is in memory at a time.

What was written is then read back and compared with what it should be, bit by bit, and a model loaded from it must
answer as the live one does.  Only after that the folder gets its name; until then it is called ``.<name>.partial``.

Given up: exporting weights that were changed by hand after loading.  They are noticed, since every dense tensor is
compared with the live model on the way, and refused.  The price of it all is reading the source twice.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lorarun.checkpoint import read_config
from lorarun.export_check import check_logits, check_written, progress
from lorarun.export_plan import FORMS, prepare
from lorarun.export_weights import Export, Kept, table, total
from lorarun.gguf_read import Gguf
from lorarun.gguf_vocab import write_files
from lorarun.headers import DTYPES, INDEX, abbreviate, read_json
from lorarun.merge import without_place
from lorarun.nn import Model
from lorarun.packing import quantization_config
from lorarun.trained import weighted

COPIED = (".json", ".jinja", ".model", ".txt")  # of the source's small files; LICENSE and NOTICE are copied too
LEFT = ("adapter_config.json", ".index.json")  # endings of names that are not
CODES = {dtype: code for code, dtype in DTYPES.items()}
KEPT = 0.9  # of an update, below which the user is told
FAR = 1.0  # times an update, which a projection may be off it before they are told: without it, it would be as far off


def save_merged(
    model: Model,
    path: str | os.PathLike[str],
    base: str = "dequantized",
    dtype: torch.dtype | None = None,
    bits: int = 16,
) -> dict[str, Kept]:
    """Write the model with its active adapter folded in to the new folder ``path``, verified before it appears there.

    The model must come from ``load``; its source is read again, tensor by tensor.  Whether the adapter is merged in
    memory makes no difference.  Configuration, tokenizer and generation files are copied, and so is all that the
    decoder leaves aside of a multimodal checkpoint.  Out of a GGUF file come those that a hub would give.

    base: by default ("dequantized") W is the weight that the adapter was trained on; where the model was loaded in
    four or eight bits, or in a narrower dtype than the source has, that is the dequantised or rounded one.
    "original" takes the source's and says how far the logits move.  For others both are the same.  A source that is
    quantised itself (NF4, FP8, GGUF) is its own original, dequantised exactly: the weights that it was made from are
    not in it, and an adapter was not trained on them.
    dtype: of all floating-point tensors that are written dense (bfloat16, float16, float32); by default each keeps its
    own, and those that were quantised get what ``config.json`` or the GGUF file stands for, mostly bfloat16.
    bits: 16, weights that are not quantised.  4, bitsandbytes NF4 with double quantisation.  8, FP8 e4m3 with a scale a
    row (compressed-tensors), or in the blocks that the model was loaded in (``fp8``); other programs round activations
    to FP8 for these (see :mod:`lorarun.packing`).  Quantised are the projections of the blocks that the model has
    quantised, all where it has none; everything else stays dense and is named in ``config.json``.

    Returns, by projection, how much of the adapter's update is in what was written (see
    :mod:`lorarun.export_weights`).  With fewer bits than 16 a summary is printed.  A warning says when it is little, or
    when projections are off by as much as their whole update.

    Raises ValueError for arguments, a model or a ``path`` that do not allow it, OSError for a full disk, RuntimeError
    when the verification fails; then nothing is left behind.
    """
    _check_arguments(model, base, dtype, bits)
    path = Path(path).resolve()  # a link is followed, and "." has a name
    if path.exists() and (not path.is_dir() or any(path.iterdir()) or os.path.ismount(path) or path == Path.cwd()):
        raise ValueError(f"save_merged: {path} exists already; give a new folder, or delete it first.")
    export = prepare(model, base, dtype, bits)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
    partial.mkdir(parents=True)
    try:
        _check_space(export, partial)
        _write(export, partial)
        check_written(export, partial)
        check_logits(export, partial)
        if path.exists():
            path.rmdir()  # empty
        os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    kept = {module: export.kept[module] for module, _ in weighted(model) if module in export.kept}
    print(f"save_merged: {path} is complete and verified; {len(kept)} projections were merged.", file=sys.stderr)
    if export.forms:
        print(f"save_merged: how much of the adapter's update is in it:\n{table(kept)}", file=sys.stderr)
    _warn_of_losses(export, kept, bits)
    return kept


def _warn_of_losses(export: Export, kept: dict[str, Kept], bits: int) -> None:
    """Warn where little of the update is in what was written, and where what is wrong there is larger than it."""
    what, steps = ("requantising", "the codes") if export.forms else ("rounding", "the weights")
    keeps = "bits=16 (--bits 16) keeps more" if export.forms else "dtype=torch.float32 (--dtype float32) keeps all"
    said = []
    if (share := total(kept.values()).share) < KEPT:
        said.append(f"kept {share:.0%} of the adapter's update (the rest is below half a step of {steps})")
    if far := [path for path, one in kept.items() if one.off >= FAR]:
        worst = max(far, key=lambda path: kept[path].off)
        said.append(
            f"erred by as much as the update is or more in {len(far)} of {len(kept)} projections ({worst}: "
            f"{kept[worst].off:.1f} times)"
        )
    if said:
        warnings.warn(
            f"save_merged: {what} to {bits} bits {' and '.join(said)}. {keeps}, and so does the adapter itself.",
            stacklevel=3,
        )


# --- before --------------------------------------------------------------------------------------------------------


def _check_arguments(model: Model, base: str, dtype: torch.dtype | None, bits: int) -> None:
    wrong = []
    if bits not in (16, *FORMS):
        wrong.append(f"bits={bits!r} is not supported; 16, 8 and 4 are")
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
    if wrong:
        raise ValueError(f"save_merged: {'; '.join(wrong)}.")


def _check_space(export: Export, partial: Path) -> None:
    needed = sum(part.nbytes for name in export.names for part in export.layout(name).values())
    needed += sum(file.stat().st_size for file in _small_files(export.source.folder)) + 2**20
    needed += 256 * export.model.config.vocab_size if isinstance(export.source, Gguf) else 0  # its tokenizer, about
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
    files = export.files()
    with progress("writing", export) as bar:
        for file, names in files.items():
            with open(partial / file, "wb") as out:
                out.write(_header(export, file, names))
                for name in names:
                    _write_weight(export, name, out)
                    bar.update(export.entries[name].nbytes)
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
        warnings.warn(
            f"save_merged: the adapter leaves {len(export.same)} of {len(export.kept)} projections as they were: "
            f"{abbreviate(export.same)}. It was not trained, or what it learnt is smaller than the dtype can show.",
            stacklevel=3,
        )
    _write_small_files(export, partial)
    if len(files) > 1 or (export.source.folder / INDEX).exists():
        _write_index(export, files, partial)


def _header(export: Export, file: str, names: list[str]) -> bytes:
    """The first bytes of a shard, with the source's metadata; see :mod:`lorarun.headers` for the format."""
    metadata = {"format": "pt"}
    if (export.source.folder / file).is_file():
        with open(export.source.folder / file, "rb") as stream:
            before = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        metadata = before.get("__metadata__") or metadata
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        for part, tensor in export.layout(name).items():
            start, end = end, end + tensor.nbytes
            header[part] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def _write_weight(export: Export, name: str, out: BinaryIO) -> None:
    for tensor in export.compute(name).values():
        if tensor.numel():
            whole = tensor.contiguous()
            out.write((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))


def _small_files(folder: Path) -> Iterator[Path]:
    """Configuration, tokenizer, templates and licences of a checkpoint's folder; nothing where it is a file."""
    listed = folder.iterdir() if folder.is_dir() else ()
    for file in [*sorted(listed), *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        wanted = file.name.endswith(COPIED) or file.name.upper().startswith(("LICENSE", "NOTICE"))
        if file.is_file() and wanted and not file.name.endswith(LEFT):
            yield file


def _write_small_files(export: Export, partial: Path) -> None:
    source = export.source
    if isinstance(source, Gguf):
        write_files(source, export.config, partial)
    for file in _small_files(source.folder):
        copy = partial / file.relative_to(source.folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if export.model.tokenizer is not None:
        export.model.tokenizer.save(partial)  # with the chat template that was named at loading
    config = _with_fields(_config(export), export.fields)
    if config != read_config(partial):
        _write_json(partial / "config.json", config)


def _config(export: Export) -> dict[str, Any]:
    """The source's ``config.json``, true of what is written."""
    config = {key: value for key, value in export.config.items() if key != "quantization_config"}
    if "quantization_config" in (inner := config.get("text_config") or {}):
        config["text_config"] = {key: value for key, value in inner.items() if key != "quantization_config"}
    entries = export.entries
    if any(export.dtype_of(name) != entries[name].dtype for name in export.names if name not in export.source.packed):
        dtype = export.dtype or max(map(export.dtype_of, export.names), key=lambda dtype: dtype.itemsize)
        config = _with_dtype(config, str(dtype).removeprefix("torch."))
    if export.form is not None:
        dtype = max(map(export.dtype_of, export.forms), key=lambda dtype: dtype.itemsize)
        config["quantization_config"] = quantization_config(export.form, export.dense_modules(), dtype)
    return config


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


def _write_index(export: Export, files: dict[str, list[str]], partial: Path) -> None:
    index: dict[str, Any] = {}
    if (export.source.folder / INDEX).exists():
        index = read_json(export.source.folder / INDEX)
    layouts = {file: {k: v for name in names for k, v in export.layout(name).items()} for file, names in files.items()}
    size = sum(tensor.nbytes for layout in layouts.values() for tensor in layout.values())
    index["metadata"] = {**(index.get("metadata") or {}), "total_size": size}
    index["weight_map"] = {part: file for file, layout in layouts.items() for part in layout}
    _write_json(partial / INDEX, index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
