"""A folder of safetensors files, checked whole before a weight is read, then poured into a model tensor by tensor.

What is read here becomes the model, and nothing after this file looks again: a shard that is not there, an index that
disagrees with its shards or a name the model does not know would end as weights left as they were initialised, which
trains and answers, only worse. So the headers are parsed here and not left to a library that opens one file at a time:
every shard's size, offsets, dtypes and names are compared with each other, with the index and with the model, and every
disagreement is raised at once, by name. That costs one small read a shard.

Reading is streamed. The model is built on the meta device, each tensor is read, moved, cast and put in its place, and
the next one is read. Host memory stays below the model plus its largest tensor, also with memory mapping: a mapping of
a whole shard would count every page it has touched, so each tensor is opened through a mapping of its own (about a
millisecond each for a shard of a thousand tensors).

Weights that several tensors make up, codes and scales, are the business of :mod:`lorarun.quantised`; here they count as
one.

Given up: pickled checkpoints, and checkpoints that leave tensors out and have a library fill them with defaults.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lorarun.headers import (
    INDEX,
    SINGLE,
    Entry,
    abbreviate,
    is_plain_name,
    is_there,
    read_header,
    read_json,
    read_mapped,
    read_plain,
    same_bytes,
)
from lorarun.quant.store import Store
from lorarun.quantised import Packed, Quantised, find_quantised

DENSE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VISION = ("vision_tower.", "multi_modal_projector.", "vision_model.", "embed_vision.")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one folder by name, in the order of its files and of the offsets in them."""

    folder: Path
    entries: dict[str, Entry]

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point dtype that holds most of the weights: what the checkpoint "is in"."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.entries.values():
            if entry.dtype in DENSE:
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes // entry.dtype.itemsize
        if not sizes:
            raise ValueError(f"{self.folder} holds no floating-point tensor.")
        return max(sizes, key=lambda dtype: sizes[dtype])

    @cached_property
    def quantised(self) -> Quantised:
        """What of it is quantised.  Raises ValueError for what is not supported or not whole."""
        config = read_config(self.folder) if (self.folder / "config.json").exists() else {}
        return find_quantised(self.folder, self.entries, config)

    @property
    def packed(self) -> dict[str, Packed]:
        """The quantised weights, by name."""
        return self.quantised.packed

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; of a quantised weight, that of the matrix that it stands for."""
        return self.packed[name].shape if name in self.packed else self.entries[name].shape

    def format(self, name: str) -> str:
        """How a weight is stored, in words."""
        if name in self.packed:
            return self.packed[name].kind
        return f"dense {str(self.entries[name].dtype).removeprefix('torch.')}"

    def unpack(self, name: str, device: torch.device | str = "cpu", mmap: bool = True) -> Store:
        """A quantised weight as it is stored, on ``device`` in memory of its own."""
        packed = self.packed[name]
        codes = packed.parts["codes"]
        tensors = dict(self.read([codes], mmap))
        tensors |= self.read([n for n in packed.parts.values() if n != codes], mmap=False)  # too small to map
        return packed.make({part: tensors[n].to(device, copy=mmap) for part, n in packed.parts.items()})

    def dense(self, name: str) -> torch.Tensor:
        """Any tensor as numbers on the CPU in fp32: a quantised one dequantised, another one cast."""
        if name in self.packed:
            return self.unpack(name).dequantize(torch.float32)
        ((_, tensor),) = self.read([name])
        return tensor.to(torch.float32, copy=True)

    def in_file_order(self, names: Collection[str]) -> list[str]:
        return sorted(names, key=lambda name: (self.entries[name].file, self.entries[name].start))

    def read(self, names: Collection[str], mmap: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, one at a time in file order, on the CPU in the stored dtype.

        ``mmap=True`` (the default) maps each tensor's file: nothing is read before it is used, and the tensor must be
        copied, not kept, since its pages are the file's. A file that another program shortens meanwhile kills the
        process (SIGBUS). ``mmap=False`` reads from front to back into memory of the tensor's own, which suits network
        file systems, and a file that has become shorter is an ``OSError`` that names it.
        """
        unknown = [name for name in names if name not in self.entries]
        if unknown:
            raise ValueError(f"{self.folder} holds no tensor {abbreviate(unknown)}.")
        for name in self.in_file_order(names):
            entry = self.entries[name]
            path = self.folder / entry.file
            yield name, read_mapped(path, name) if mmap else read_plain(path, name, entry)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The raw ``config.json`` of a checkpoint's folder."""
    path = Path(folder) / "config.json"
    try:
        return read_json(path)
    except FileNotFoundError:
        what = (
            "it is an adapter: load its base model and pass this folder as adapter="
            if (path.parent / "adapter_config.json").exists()
            else "expected a folder with config.json and safetensors files, as Hugging Face's save_pretrained writes it"
        )
        raise ValueError(f"{folder} has no config.json; {what}.") from None


# --- headers and index ---------------------------------------------------------------------------------------------


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read and check the index and every shard's header; no tensor is read.

    Raises one ``ValueError`` that lists every problem of every file.
    """
    folder = Path(folder)
    problems: list[str] = []
    weight_map = _weight_map(folder, problems)
    files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
    entries: dict[str, Entry] = {}
    absent: list[str] = []
    broken: set[str] = set()
    twice: dict[tuple[str, str], list[str]] = {}
    for file in files:
        known = len(problems)
        path = folder / file
        if not path.exists():
            absent.append(f"{file} (a dangling link)" if path.is_symlink() else file)
        header = read_header(path, problems) if path.exists() else {}
        if len(problems) > known or not path.exists():
            broken.add(file)
        for name, entry in header.items():
            if name in entries:
                twice.setdefault((entries[name].file, file), []).append(name)
            entries[name] = entry
    if absent:
        problems.insert(0, f"{len(absent)} of {len(files)} shards are not there: {abbreviate(absent)}")
    for pair, names in twice.items():
        problems.append(f"{pair[0]} and {pair[1]} both hold {abbreviate(names)}")
    if weight_map is not None:
        problems += _index_problems(weight_map, entries, broken)
    if not problems and not entries:
        problems.append("the files hold no tensors")
    if problems:
        raise ValueError(
            f"The checkpoint in {folder} cannot be loaded:\n"
            + "".join(f"  - {problem}\n" for problem in problems)
            + "Was a download interrupted? Fetch the named files again."
        )
    return Checkpoint(folder, entries)


def _weight_map(folder: Path, problems: list[str]) -> dict[str, str] | None:
    """Tensor name -> file name as the index has it; None when one file holds everything. Entries that no index may
    have become problems; a folder without safetensors is refused here."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder.")
    single, index = folder / SINGLE, folder / INDEX
    if not is_there(index):
        if not single.exists() and not single.is_symlink():
            raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}; {_what_instead(folder)}.")
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f'{index} must have a "weight_map" from tensor names to file names: fetch it again.')
    if not weight_map:
        raise ValueError(f"{index} names no tensors: fetch it again.")
    if single.exists() and SINGLE not in weight_map.values():
        raise ValueError(
            f"{folder} holds both {SINGLE} and {INDEX}, which does not name it: one of the two is left over from "
            "another checkpoint; remove it."
        )
    outside = {file for file in weight_map.values() if not is_plain_name(file)}
    if outside:
        problems.append(f"the index names files that are not plain names in this folder: {abbreviate(outside)}")
    return {name: file for name, file in weight_map.items() if file not in outside}


def _what_instead(folder: Path) -> str:
    names = sorted(os.listdir(folder))
    tensors = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if "adapter_model.safetensors" in tensors:
        return "it is an adapter: load its base model and pass this folder as adapter="
    if tensors:
        return f"it holds {abbreviate(tensors)}, of which no index says what belongs together: fetch {INDEX} too"
    if pickles:
        return (
            f"it holds pickles ({abbreviate(pickles)}), which run code when they are opened and are never loaded: "
            "get the safetensors version or convert it with Hugging Face's tools"
        )
    return "expected a folder as Hugging Face's save_pretrained writes it"


def _index_problems(weight_map: dict[str, str], entries: dict[str, Entry], broken: set[str]) -> list[str]:
    """Names that the index and the (readable) shards do not agree on."""
    problems = []
    for file in sorted(set(weight_map.values()) - broken):
        lacking = [n for n, f in weight_map.items() if f == file and (n not in entries or entries[n].file != file)]
        if lacking:
            problems.append(f"the index places in {file} what it does not hold: {abbreviate(lacking)}")
    unnamed = [name for name, entry in entries.items() if name not in weight_map and entry.file not in broken]
    if unnamed:
        problems.append(f"the index does not name {len(unnamed)} tensors that the shards hold: {abbreviate(unnamed)}")
    return problems


# --- into a model --------------------------------------------------------------------------------------------------


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    mmap: bool = True,
    nested: bool = False,
    stores: Mapping[str, type[Store]] | None = None,
) -> None:
    """Replace every (meta) parameter of ``model`` by the checkpoint's tensor of that name, frozen, cast to ``dtype`` on
    ``device``, in memory of its own.

    Those that ``stores`` names become stores of that class instead.  What is stored in that format is taken as it is;
    everything else is quantised on ``device``, from the values that are stored, before the next one is read, so that
    device memory holds one dense tensor at a time.  Quantised weights that ``stores`` does not name are dequantised.

    ``nested=True`` reads a text model out of a multimodal checkpoint, in both layouts that exist:
    ``language_model.model.*`` and ``model.language_model.*``. Parameters that the model ties (one Parameter under two
    names) may be stored under either name, or under both when they are bit-equal; ``model.tie()`` is called at the end.

    Raises one ``ValueError`` that lists every missing, unexpected, mis-shaped or wrong-typed tensor before any is
    read, and one that lists every tensor that holds NaN or infinity (in ``dtype``, too, where that is narrower); after
    that, or an ``OSError`` while reading, the model is unusable.
    """
    places, problems = stored_names(checkpoint, nested)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}  # the names of each parameter, tied ones have several
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    problems += _mismatches(parameters, places, checkpoint)
    missing = [tied[0] for tied in names.values() if not any(name in places for name in tied)]
    if missing:
        problems.insert(0, f"{len(missing)} of {len(names)} tensors are missing: {abbreviate(missing)}")
    for tied in names.values():
        stored = [places[name] for name in tied if name in places]
        for other in stored[1:]:
            if not problems and not _same_weight(checkpoint, stored[0], other):
                problems.append(
                    f"{stored[0]} and {other} differ, though config.json ties them: set tie_word_embeddings to false "
                    "there if the head is meant to be its own"
                )
    if problems:
        raise ValueError(
            f"The tensors in {checkpoint.folder} do not fit the model that its config.json describes:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    targets = {next(places[n] for n in tied if n in places): tied[0] for tied in names.values()}
    _pour(model, checkpoint, targets, dtype, device, mmap, stores or {})
    if len(parameters) > len(names):
        model.tie()  # type: ignore[operator]
    assert not any(parameter.is_meta for parameter in model.parameters())


def _pour(
    model: nn.Module,
    checkpoint: Checkpoint,
    targets: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device | str,
    mmap: bool,
    stores: Mapping[str, type[Store]],
) -> None:
    """Put each tensor of ``targets`` (stored name -> model name) into its place, one after the other."""
    problems = []
    for stored in checkpoint.in_file_order(targets):
        path, _, leaf = targets[stored].rpartition(".")
        owner, store = model.get_submodule(path), stores.get(targets[stored])
        if store is not None:
            delattr(owner, leaf)  # a module cannot be assigned where a Parameter is
        try:
            setattr(owner, leaf, _weight(checkpoint, stored, store, dtype, device, mmap))
        except ValueError as error:
            problems.append(f"{stored}: {error}")
    if problems:
        raise ValueError(
            f"These tensors in {checkpoint.folder} cannot be loaded:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def _weight(
    checkpoint: Checkpoint,
    name: str,
    store: type[Store] | None,
    dtype: torch.dtype,
    device: torch.device | str,
    mmap: bool,
) -> nn.Parameter | Store:
    """A tensor as a store of that class, or as a frozen Parameter of ``dtype``; from whichever it is stored as."""
    if name in checkpoint.packed:
        held = checkpoint.unpack(name, device, mmap)
        if type(held) is store:
            return held
        value = held.dequantize(torch.float32 if store else dtype)
    else:
        ((_, value),) = checkpoint.read([name], mmap)
        value = value.to(device) if store else value.to(device, dtype, copy=mmap)
    if value.numel() and not all(bound.isfinite() for bound in value.aminmax()):  # one pass, and no copy
        raise ValueError(f"the weight holds NaN or infinity in {str(value.dtype).removeprefix('torch.')}")
    return store.from_dense(value) if store else nn.Parameter(value, requires_grad=False)


def _same_weight(checkpoint: Checkpoint, one: str, other: str) -> bool:
    parts = [tuple(checkpoint.packed[n].parts.values()) if n in checkpoint.packed else (n,) for n in (one, other)]
    return len(parts[0]) == len(parts[1]) and all(
        same_bytes(checkpoint.folder, checkpoint.entries[a], checkpoint.entries[b]) for a, b in zip(*parts, strict=True)
    )


def stored_names(checkpoint: Checkpoint, nested: bool) -> tuple[dict[str, str], list[str]]:
    """Model name -> stored name, those of a vision tower left out, and the problems found."""
    places: dict[str, str] = {}
    problems: list[str] = []
    for stored in checkpoint.entries:
        if stored in checkpoint.quantised.beside:
            continue
        name = stored
        if nested:
            inner = stored.removeprefix("model.")
            if inner.startswith(VISION):
                continue
            if inner.startswith("language_model."):
                inner = inner.removeprefix("language_model.")
                name = inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
        if name.endswith(".rotary_emb.inv_freq"):  # older files store it; the model computes it
            continue
        if name in places:
            problems.append(f"{places[name]} and {stored} are the same tensor of the model")
        places[name] = stored
    return places, problems


def _mismatches(parameters: dict[str, nn.Parameter], places: dict[str, str], checkpoint: Checkpoint) -> list[str]:
    """Unexpected names, and tensors of a wrong dtype or shape (those that are wrong alike in one line)."""
    unexpected: list[str] = []
    alike: dict[str, list[str]] = {}
    for name, stored in places.items():
        entry = checkpoint.entries[stored]
        if name not in parameters:
            unexpected.append(stored)
        elif checkpoint.shape(stored) != tuple(parameters[name].shape):
            wrong = f"shape {list(checkpoint.shape(stored))} instead of {list(parameters[name].shape)}"
            alike.setdefault(wrong, []).append(stored)
        elif entry.dtype not in DENSE and stored not in checkpoint.packed:
            wrong = f"dtype {str(entry.dtype).removeprefix('torch.')} instead of a floating-point one"
            alike.setdefault(wrong, []).append(stored)
    problems = [f"{len(unexpected)} tensors are unexpected: {abbreviate(unexpected)}"] if unexpected else []
    return problems + [f"{wrong}: {abbreviate(names)}" for wrong, names in alike.items()]
