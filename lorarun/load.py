"""From a name to a model that runs: name → folder → configuration → decoder on the meta device → weights streamed in.

Nothing is guessed on the way.  A model is built without memory first, then each tensor of the checkpoint takes its
place, and every tensor that is missing, unexpected or of another shape is an error before anything could run on
uninitialised weights.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lorarun import adapter as adapters
from lorarun.checkpoint import VISION, Checkpoint, fill, open_checkpoint, read_config, stored_names
from lorarun.config import stored_dtype
from lorarun.gguf_config import gguf_config
from lorarun.gguf_read import Gguf, open_gguf
from lorarun.gguf_vocab import write_files
from lorarun.headers import abbreviate
from lorarun.hub import Source, resolve, resolve_adapter
from lorarun.lora import find_targets, selects
from lorarun.messages import NAMED
from lorarun.models import build_model
from lorarun.nn import Model
from lorarun.quant.store import FP8Store, NF4Store, Store
from lorarun.quantised import read_scheme
from lorarun.tokenizer import Tokenizer

STORES: dict[int, type[Store]] = {4: NF4Store, 8: FP8Store}


def load(
    name: str | Path,
    bits: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    mmap: bool = True,
    template: str | None = None,
    skip: Sequence[str] = (),
) -> Model:
    """Load a model, frozen and in eval mode, with its tokenizer as ``model.tokenizer``.

    name: a local folder, a GGUF file, a hub id (``owner/name``) or an alias (``llama-3.1-8b-instruct``; see
        ``lorarun.hub.ALIASES``).  It may also hold an adapter: then its base is loaded and the adapter put on it.
    bits: how the projections of the blocks are kept: None, as stored; 16, dense; 8, FP8 with a scale a row; 4, NF4 with
        double quantisation.  Each is quantised as it arrives; embedding, head and norms stay dense.  A checkpoint that
        is quantised itself (bitsandbytes NF4, FP8) is taken as it is with None and with its own bits, what it left in
        16 bits included.  bits=16 dequantises it, bits=4 makes NF4 of FP8: both are said on stderr and in the report.
    dtype: of what is dense and of the arithmetic; by default what the checkpoint has on an accelerator, fp32 on a CPU,
        where quantised weights work too, slowly.
    device: by default the accelerator, else the CPU.  A model that does not fit is refused with the numbers.
    revision: a branch, tag or commit of the hub repository.
    adapter: a folder or hub id of a PEFT adapter to put on the model.
    mmap: False reads the shards sequentially, which network file systems prefer.
    template: a chat template by name, for a base model that has none (see :class:`lorarun.tokenizer.Tokenizer`).  One
        that is not the checkpoint's, this one or the adapter's, is named on stderr.
    skip: projections that stay dense although ``bits`` says otherwise, by name or what their names end in
        ("down_proj", "layers.0.mlp.up_proj").

    Raises ValueError for a name, a configuration or a checkpoint that cannot be loaded exactly, OSError for what
    cannot be read.
    """
    if bits not in (None, 16, *STORES):
        raise ValueError(f"load: bits={bits!r} is not supported; None (what is stored), 16 (dense), 8 and 4 are.")
    if dtype is not None and dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"load: dtype is {dtype!r}; expected torch.bfloat16, float16, float32 or float64.")
    source, adapter = _find(name, revision, adapter)
    folder = None if adapter is None else resolve_adapter(adapter).folder
    if not source.folder.is_dir():
        checkpoint: Checkpoint = (file := open_gguf(source.folder))
        raw = gguf_config(file)
    else:
        raw = read_config(source.folder)
        checkpoint = open_checkpoint(source.folder)
    place = default_device() if device is None else _device(device)
    if dtype is None:
        dtype = torch.float32 if place.type == "cpu" else stored_dtype(raw) or checkpoint.dtype
    with torch.device("meta"):
        model = build_model(raw)
    if dtype is torch.float16 and not model.fp16:
        raise ValueError(f"load: {name} overflows in float16; choose dtype=torch.bfloat16 or torch.float32.")
    model.nested = raw.get("text_config") is not None
    stores, model.stored = _stores(model, checkpoint, bits, skip)
    model.asked = {"bits": bits, "dtype": dtype}
    _check_fits(model, dtype, place, stores)
    _say(checkpoint, model.stored, stores, place)
    origin = "was asked for"
    if folder is not None and template is None:
        template, origin = adapters.template_of(folder), "was saved with the adapter"
    if isinstance(checkpoint, Gguf):
        model.tokenizer = _unpacked_tokenizer(checkpoint, raw, template)
    else:
        model.tokenizer = Tokenizer.load(source.folder, template=template)
    if model.tokenizer is not None and model.tokenizer.replaced:
        name = next((f" {name!r}" for name, (text, _) in NAMED.items() if text == model.tokenizer.template), "")
        print(f"load: messages are written with the chat template{name} that {origin}.", file=sys.stderr)
    model.requires_grad_(False).eval()
    fill(model, checkpoint, dtype, place, mmap, model.nested, stores)
    model.source, model.original = source, partial(_original, source.folder, model.nested)
    if folder is not None:
        adapters.load_adapter(model, folder)
    return model.eval()


def _find(name: str | Path, revision: str | None, adapter: str | Path | None) -> tuple[Source, str | Path | None]:
    """Where the model lies, and the adapter to put on it; of an adapter's name, its base and itself."""
    source = resolve(str(name), revision, _check_config)
    if (source.folder / "adapter_config.json").is_file() and not (source.folder / "config.json").is_file():
        if adapter is not None:
            raise ValueError(
                f"load: {name} is an adapter itself; give its base as the name to load adapter={adapter!r}."
            )
        adapter = source.folder
        base, base_revision = adapters.base_of(adapter)
        try:
            source = resolve(base, base_revision, _check_config)
        except (ValueError, OSError) as error:
            where = f"{adapter / adapters.CONFIG} names {base} as the base"
            raise type(error)(f"{error} ({where}; another base: load(BASE, adapter={str(adapter)!r})") from error
    # Absolute, since the working folder may change before it is read again.
    return source._replace(folder=source.folder.absolute()), adapter


def _original(folder: Path, nested: bool, name: str) -> torch.Tensor:
    """A weight of a loaded model, by its name there, read again as its checkpoint has it; fp32 on the CPU."""
    checkpoint = open_gguf(folder) if folder.is_file() else open_checkpoint(folder)
    return checkpoint.dense(stored_names(checkpoint, nested)[0][name])


def _unpacked_tokenizer(file: Gguf, raw: Mapping[str, Any], template: str | None) -> Tokenizer | None:
    """The tokenizer of a GGUF file, in a folder of its own that goes when it does."""
    folder = tempfile.mkdtemp(prefix="lorarun-gguf-")
    try:
        write_files(file, raw, Path(folder))
        tokenizer = Tokenizer.load(folder, template=template)
    except BaseException:
        shutil.rmtree(folder)
        raise
    weakref.finalize(tokenizer or file, shutil.rmtree, folder, True)
    return tokenizer


def load_adapter(
    model: Model,
    path: str | Path,
    name: str = "default",
    revision: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Attach a PEFT adapter from a local folder or the hub (``owner/name``), and make it the active one.

    revision: a branch, tag or commit of the hub's repository.  The rest is :func:`lorarun.adapter.load_adapter`.
    """
    adapters.load_adapter(model, resolve_adapter(path, revision).folder, name, dtype)


def _check_config(folder: Path) -> None:
    """Refuse a model that no family serves, or whose weights are in a format that is not supported, as soon as its
    configuration is there, before its weights are fetched."""
    if (folder / "config.json").is_file():
        raw = read_config(folder)
        with torch.device("meta"):
            build_model(raw)
        stored_dtype(raw)
        read_scheme(raw)


def _device(wanted: str | torch.device) -> torch.device:
    """A device that tensors can be put on here."""
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
        assert device.type != "meta"
    except (RuntimeError, AssertionError, TypeError) as error:
        there = f"{default_device()} and cpu" if default_device().type != "cpu" else "cpu"
        raise ValueError(
            f"load: device={str(wanted)!r} cannot be used ({error or 'no memory'}); here are {there}."
        ) from None
    return device


def default_device() -> torch.device:
    """The accelerator that torch sees, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def _stores(
    model: Model, checkpoint: Checkpoint, bits: int | None, skip: Sequence[str]
) -> tuple[dict[str, type[Store]], dict[str, str]]:
    """The weights that become stores, by name: of the blocks' projections, without what ``skip`` names.  And the format
    in which each weight of the model is stored."""
    names = [skip] if isinstance(skip, str) else list(skip)
    if names and bits not in STORES:
        raise ValueError(f"load: skip={names} means something with bits=8 or 4 only; got bits={bits}.")
    unknown = [name for name in names if not any(selects([name], path) for path, _ in model.named_modules())]
    if unknown:
        raise ValueError(f"load: skip names {', '.join(unknown)}, which no module of this model is called.")
    places, _ = stored_names(checkpoint, model.nested)
    packed = {name: checkpoint.packed[place] for name, place in places.items() if place in checkpoint.packed}
    stored = {name: checkpoint.format(place) for name, place in places.items()}
    projections = [f"{path}.weight" for path, _ in find_targets(model, "all-linear") if not selects(names, path)]
    held = {name: packed[name].store for name in projections if name in packed}
    if bits == 8 and NF4Store in held.values():
        raise ValueError(
            "load: bits=8 on a 4-bit checkpoint would round its weights again and double the memory; bits=None or 4 "
            "keeps them, bits=16 dequantises them."
        )
    if bits is None:
        return held, stored
    wanted = list(held) if packed else projections
    if bits in STORES and (left := [name for name in projections if name not in wanted]):
        print(f"load: the checkpoint left in 16 bits, and so they stay: {abbreviate(left)}.", file=sys.stderr)
    return {name: STORES[bits] for name in wanted if bits in STORES}, stored


def _say(
    checkpoint: Checkpoint, stored: Mapping[str, str], stores: Mapping[str, type[Store]], device: torch.device
) -> None:
    """Say on stderr what becomes of what is stored, and what a CPU makes of stores."""
    converted: dict[tuple[str, str], list[str]] = {}
    for name, kind in stored.items():
        after = stores[name].format if name in stores else "dense"
        if not kind.startswith((after, "dense ")):
            converted.setdefault((kind, after), []).append(name)
    for (kind, after), names in converted.items():
        lossy = "" if after == "dense" else ", which rounds them again"
        print(f"load: stored as {kind}, made {after}{lossy}: {abbreviate(names)}.", file=sys.stderr)
    if aside := [name for name in checkpoint.entries if name.removeprefix("model.").startswith(VISION)]:
        print(f"load: {len(aside)} tensors of a vision tower are left aside.", file=sys.stderr)
    if checkpoint.packed and checkpoint.quantised.notice:
        print(f"load: {checkpoint.quantised.notice}.", file=sys.stderr)
    if stores and device.type == "cpu":
        widths = " and ".join(sorted({f"{store.bits:.0f}-bit" for store in stores.values()}))
        print(
            f"load: {widths} weights work on a CPU, but slowly: each product decodes them again. bits=16 is faster "
            "where memory allows it.",
            file=sys.stderr,
        )


def _check_fits(model: Model, dtype: torch.dtype, device: torch.device, stores: Mapping[str, type[Store]]) -> None:
    """Refuse before reading what cannot fit: the weights alone against the free memory of an accelerator."""
    if device.type != "cuda":
        return
    needed = sum(
        p.numel() * (stores[name].bits / 8 if name in stores else dtype.itemsize)
        for name, p in model.named_parameters()
    )
    free, total = free_memory(device), torch.cuda.mem_get_info(device)[1]
    if needed > free:
        gib = 2**30
        raise ValueError(
            f"load: the weights take {needed / gib:.1f} GiB in {dtype}{', quantised' if stores else ''}, and {device} "
            f"has {free / gib:.1f} GiB free of {total / gib:.1f}. Free memory there, or choose a smaller model, fewer "
            "bits or a smaller dtype."
        )


def free_memory(device: torch.device) -> float:
    """Bytes that can still be had on an accelerator or the host (by the limit of a container too); inf if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, but free
        return torch.cuda.mem_get_info(device)[0] + unused
    free, system, group = math.inf, Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if system.exists():
        free = _field(system, "MemAvailable:") * 1024
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        free = min(free, int(limit) - _field(group / "memory.stat", "anon"))
    return free


def _field(path: Path, name: str) -> int:
    return next(int(words[1]) for words in map(str.split, path.read_text().splitlines()) if words[0] == name)
