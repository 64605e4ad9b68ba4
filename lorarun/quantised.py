"""Checkpoints that hold weights in four or eight bits: which tensors make up a weight, and the store they become.

A quantised weight is several tensors: codes under the weight's own name, and beside them what the codes mean.  Where
one of those is lost, bytes become a matrix, and a float8 weight without its scale is thousands of times too large, in
silence.  The usual way lets each format's library take what it finds.  Here every tensor beside a weight is looked for,
measured and compared with what the format says before a weight is read, all faults are raised at once, and a format
that is not understood is refused by the name that ``config.json`` gives it, before weights are even fetched.

Two formats are understood, and each goes into its store as it is, without being quantised again.

    bitsandbytes NF4    X.weight, X.weight.absmax, .quant_map, .quant_state.bitsandbytes__nf4 (JSON in bytes), and with
                        double quantisation .nested_absmax, .nested_quant_map; source: ``QuantState.as_dict`` there
    FP8 e4m3            X.weight, X.weight_scale_inv or X.weight_scale, which codes are multiplied with: one, one a row
                        or one a block; as DeepSeek and Qwen3 publish it, as compressed-tensors' "float-quantized" and
                        as fbgemm_fp8

Given up: quantised activations, which the latter three may ask for.  They are a way to compute and not a part of the
weights, and training needs activations as they are; that is said on loading.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.headers import Entry, abbreviate
from lorarun.kernels.nf4 import NESTED, VALUES, check_block, dynamic_map
from lorarun.quant.store import FP8Store, NF4Store, Store

NF4, FP8 = "NF4", "FP8"
BESIDE_NF4 = re.compile(r"(.*\.weight)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)")
STATE = "quant_state.bitsandbytes__"
BESIDE_FP8 = re.compile(r"(.*\.weight)_(scale_inv|scale)")
ACTIVATIONS = re.compile(r".*\.(input_scale|output_scale|activation_scale|(kv|[qkv])_scale)")  # and of the cache
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
STATE_BYTES = 1 << 16  # more than any quant state has


class Scheme(NamedTuple):
    """What ``quantization_config`` says of the weights."""

    method: str  # its quant_method
    format: str  # NF4 or FP8
    blocks: tuple[int, int] | None = None  # of FP8 scales
    whole: bool = True  # whether FP8 scales may be one a weight or one a row
    notice: str | None = None  # what of it is not followed


class Packed(NamedTuple):
    """A weight that several tensors make up."""

    parts: dict[str, str]  # part -> the name of its tensor; "codes" is the weight itself
    shape: tuple[int, ...]
    kind: str  # the format in words
    store: type[Store]
    make: Callable[[dict[str, Tensor]], Store]  # part -> tensor, all on one device, to the store


class Quantised(NamedTuple):
    """What of a checkpoint is quantised; nothing, for most."""

    packed: dict[str, Packed]  # by the weight's stored name
    beside: frozenset[str]  # the names of tensors that are no parameters of the model
    notice: str | None = None


# --- what config.json says -----------------------------------------------------------------------------------------


def read_scheme(raw: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a ``config.json``; None for a checkpoint that is not quantised.

    Raises ValueError, naming it, for a scheme that is not supported and for one that contradicts itself.
    """
    inner = raw.get("text_config")
    config = raw.get("quantization_config") or (
        inner.get("quantization_config") if isinstance(inner, Mapping) else None
    )
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method is None and isinstance(config, Mapping) and ("load_in_4bit" in config or "load_in_8bit" in config):
        method = "bitsandbytes"  # before transformers wrote the method
    scheme, wrong = None, f"quant_method {method!r}"
    if method in ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"):
        scheme, wrong = Scheme(method, NF4), _bitsandbytes_problem(method, config)
    elif method in ("fp8", "fbgemm_fp8"):
        scheme, wrong = _fp8_scheme(method, config)
    elif method == "compressed-tensors":
        scheme, wrong = _compressed_scheme(config)
    if scheme is None or wrong:
        raise ValueError(
            f"config.json describes a quantised checkpoint ({method or 'unnamed'}) that is not supported: {wrong}. "
            "Supported are bitsandbytes NF4 and FP8 e4m3 (fp8, fbgemm_fp8, compressed-tensors); use one of these or "
            "the repo it was quantised from."
        )
    return scheme


def _bitsandbytes_problem(method: str, config: Mapping[str, Any]) -> str:
    if config.get("load_in_4bit") and config.get("load_in_8bit"):
        return "load_in_4bit and load_in_8bit contradict each other"
    if config.get("load_in_8bit") or method == "bitsandbytes_8bit":
        return "LLM.int8 (load_in_8bit)"
    kind = config.get("bnb_4bit_quant_type")
    return "" if kind in (None, "nf4") else f"bnb_4bit_quant_type {kind!r} (nf4 is supported)"


def _fp8_scheme(method: str, config: Mapping[str, Any]) -> tuple[Scheme | None, str]:
    size, form = config.get("weight_block_size"), config.get("fmt")
    if form not in (None, "e4m3", "float8_e4m3fn"):
        return None, f"fmt {form!r} (e4m3 is supported)"
    if size is not None and _pair(size) is None:
        return None, f"weight_block_size {size!r:.40} (two whole numbers or null are)"
    return Scheme(method, FP8, _pair(size), size is None, str(config.get("activation_scheme", "dynamic"))), ""


def _compressed_scheme(config: Mapping[str, Any]) -> tuple[Scheme | None, str]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
        return None, f"config_groups {groups!r:.40}"
    formats = {str(config.get("format")), *(str(group["format"]) for group in groups.values() if group.get("format"))}
    if not formats <= {"float-quantized", "naive-quantized"}:  # the same files, by the later and the earlier name
        return None, f"format {', '.join(sorted(formats))} (float-quantized is supported)"
    for name in ("sparsity_config", "transform_config"):
        if (more := config.get(name)) and not (isinstance(more, Mapping) and more.get("format") == "dense"):
            return None, f"{name} {more!r:.60}"
    blocks: set[tuple[int, int] | None] = set()
    for group in groups.values():
        weights = group.get("weights")
        if not isinstance(weights, Mapping) or (weights.get("num_bits"), weights.get("type")) != (8, "float"):
            return None, f"weights {weights!r:.60} (num_bits 8 and type 'float' are supported)"
        strategy, block = weights.get("strategy"), _pair(weights.get("block_structure"))
        good = strategy in ("tensor", "channel") or strategy == "block" and block
        if not good or weights.get("dynamic") or weights.get("symmetric") is False:
            return None, f"weights {weights!r:.200} (static symmetric ones by tensor, channel or block are supported)"
        blocks.add(block if strategy == "block" else None)
    sizes = blocks - {None}
    if len(sizes) > 1:
        return None, f"blocks of several sizes, {sizes}"
    notice = "input_activations" if any(group.get("input_activations") for group in groups.values()) else None
    return Scheme("compressed-tensors", FP8, next(iter(sizes), None), None in blocks, notice), ""


def _pair(value: Any) -> tuple[int, int] | None:
    """Two sizes as JSON has them; None for anything else."""
    good = isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 2**31 for n in value)
    return (value[0], value[1]) if good else None


# --- what the tensors say ------------------------------------------------------------------------------------------


def find_quantised(folder: Path, entries: Mapping[str, Entry], raw: Mapping[str, Any]) -> Quantised:
    """The quantised weights of a checkpoint whose headers are ``entries`` and whose ``config.json`` is ``raw``.

    Reads the few bytes that say what codes mean, no weight.  Raises one ValueError that names everything that is
    missing, of another shape or dtype than the format has, or not supported.
    """
    scheme = read_scheme(raw)
    problems: dict[str, list[str]] = {}  # what -> the weights of which that is so
    found = Quantised({}, frozenset())
    if scheme is not None:
        found = (_find_nf4 if scheme.format == NF4 else _find_fp8)(folder, entries, scheme, problems)
    known = found.packed.keys() | found.beside
    for name, entry in entries.items():
        if entry.dtype.itemsize == 1 and entry.dtype != torch.bool and name not in known:
            if not any(name in names for names in problems.values()):
                what = f"nothing says what the codes mean of {str(entry.dtype).removeprefix('torch.')}"
                problems.setdefault(what, []).append(name)
    if scheme is not None and not found.packed and not problems:
        problems["config.json says so, but no tensor is quantised"] = []
    if problems:
        lines = [f"{what}: {abbreviate(names)}" if names else what for what, names in problems.items()]
        kind = "no quantization_config in config.json" if scheme is None else scheme.method
        raise ValueError(
            f"{folder} is a quantised checkpoint ({kind}) that cannot be loaded:\n"
            + "\n".join(f"  - {line}" for line in lines)
        )
    return found


def _read(folder: Path, entry: Entry) -> bytes:
    with open(folder / entry.file, "rb") as stream:
        stream.seek(entry.start)
        return stream.read(entry.nbytes)


def _group(entries: Mapping[str, Entry], pattern: re.Pattern[str]) -> dict[str, dict[str, str]]:
    """Weight -> part -> name of the tensor, of the tensors whose names fit."""
    groups: dict[str, dict[str, str]] = {}
    for name in entries:
        if match := pattern.fullmatch(name):
            groups.setdefault(match[1], {})[match[2]] = name
    return groups


def _find_nf4(folder: Path, entries: Mapping[str, Entry], scheme: Scheme, problems: dict[str, list[str]]) -> Quantised:
    packed: dict[str, Packed] = {}
    groups = _group(entries, BESIDE_NF4)
    for weight, parts in groups.items():
        if weight in entries:
            parts = {"codes": weight, **parts}
        state, wrong = _read_state(folder, {part: entries[name] for part, name in parts.items()})
        if not wrong:
            packed[weight] = _pack_nf4(parts, state)
        for what in wrong:
            problems.setdefault(what, []).append(weight)
    return Quantised(packed, frozenset(name for parts in groups.values() for name in parts.values()))


def _read_state(folder: Path, parts: dict[str, Entry]) -> tuple[dict[str, Any], list[str]]:
    """The quant state of a weight, and what is wrong with its parts."""
    names = [part for part in parts if part.startswith("quant_state.")]
    missing = [part for part in ("codes", "absmax", "quant_map") if part not in parts]
    if names != [STATE + "nf4"]:
        if names:
            return {}, [f"{', '.join(names)} instead of {STATE}nf4, the one that is supported"]
        missing.append(STATE + "nf4")
    if missing:
        return {}, [f"{part} is missing" for part in missing]
    blob = parts[names[0]]
    try:
        state = json.loads(_read(folder, blob)) if blob.nbytes <= STATE_BYTES else None
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        return {}, [f"{names[0]} is not a JSON object"]
    state["nested"] = (
        parts["absmax"].dtype == torch.uint8
        or any(part.startswith("nested_") for part in parts)
        or any(key.startswith("nested_") and value is not None for key, value in state.items())
    )
    if wrong := _state_problems(state):
        return state, wrong
    return state, _part_problems(folder, parts, state)


def _state_problems(state: dict[str, Any]) -> list[str]:
    """What the JSON of a quant state has wrong, by itself."""
    wrong = []
    expected: dict[str, tuple[bool, str]] = {
        "quant_type": (state.get("quant_type") == "nf4", "'nf4'"),
        "shape": (_pair(state.get("shape")) is not None, "the two sizes of a matrix"),
        "blocksize": (_is_block(state.get("blocksize")), "a power of two from 32 to 4096"),
    }
    if state["nested"]:
        offset = state.get("nested_offset")
        number = type(offset) in (int, float) and abs(offset) <= torch.finfo(torch.float32).max  # type: ignore[arg-type]
        expected["nested_blocksize"] = (state.get("nested_blocksize") == NESTED, str(NESTED))
        expected["nested_dtype"] = (state.get("nested_dtype") == "float32", "'float32'")
        expected["nested_offset"] = (number, "a number")
    for key, (right, words) in expected.items():
        if not right:
            wrong.append(f"quant state: {key} is {state.get(key)!r:.40} instead of {words}")
    return wrong


def _is_block(value: Any) -> bool:
    try:
        check_block(value)
    except ValueError:
        return False
    return type(value) is int


def _part_problems(folder: Path, parts: dict[str, Entry], state: dict[str, Any]) -> list[str]:
    """What is wrong with the tensors beside the codes, and the codes' size."""
    count = math.prod(state["shape"])
    blocks = -(-count // state["blocksize"])
    sizes: dict[str, tuple[torch.dtype, int]] = {
        "absmax": (torch.uint8 if state["nested"] else torch.float32, blocks),
        "quant_map": (torch.float32, len(VALUES)),
    }
    if state["nested"]:
        sizes["nested_absmax"] = (torch.float32, -(-blocks // NESTED))
        sizes["nested_quant_map"] = (torch.float32, 256)
    wrong = [f"{part} is missing" for part in sizes if part not in parts]
    for part, (dtype, size) in sizes.items():
        if part in parts and (parts[part].dtype, math.prod(parts[part].shape)) != (dtype, size):
            got = f"{math.prod(parts[part].shape)} elements of {parts[part].dtype}".replace("torch.", "")
            wrong.append(f"{part} has {got} instead of {size} of {dtype}".replace("torch.", ""))
    if parts["codes"].nbytes != (count + 1) // 2:
        wrong.append(f"codes have {parts['codes'].nbytes} bytes instead of {(count + 1) // 2} for {state['shape']}")
    if wrong:
        return wrong
    values = torch.frombuffer(bytearray(_read(folder, parts["quant_map"])), dtype=torch.float32)
    if values.tolist() != torch.tensor(VALUES).tolist():
        wrong.append("quant_map does not hold the values of NF4")
    if state["nested"]:
        values = torch.frombuffer(bytearray(_read(folder, parts["nested_quant_map"])), dtype=torch.float32)
        if not torch.allclose(values, dynamic_map(), rtol=0, atol=1e-6):
            wrong.append("nested_quant_map does not hold bitsandbytes' dynamic map")
    return wrong


def _pack_nf4(parts: dict[str, str], state: dict[str, Any]) -> Packed:
    names = ["codes", "absmax", *(["nested_absmax", "nested_quant_map"] if state["nested"] else [])]

    def make(tensors: dict[str, Tensor]) -> Store:
        held = [tensors[name] for name in names]
        _check_scales(held[-2] if state["nested"] else held[1])
        if state["nested"]:
            held.append(torch.tensor([state["nested_offset"]], dtype=torch.float32, device=held[0].device))
        return NF4Store(*held, shape=state["shape"], block=state["blocksize"])

    kind = f"NF4 in blocks of {state['blocksize']}{', double quantisation' if state['nested'] else ''}"
    return Packed({name: parts[name] for name in names}, tuple(state["shape"]), kind, NF4Store, make)


def _find_fp8(folder: Path, entries: Mapping[str, Entry], scheme: Scheme, problems: dict[str, list[str]]) -> Quantised:
    packed: dict[str, Packed] = {}
    groups = _group(entries, BESIDE_FP8)
    weights = [name for name, entry in entries.items() if entry.dtype == torch.float8_e4m3fn]
    for weight in dict.fromkeys([*groups, *weights]):
        scales = list(groups.get(weight, {}).values())
        codes = entries.get(weight)
        wrong, block = "", None
        if codes is None or codes.dtype != torch.float8_e4m3fn:
            held = "not there" if codes is None else str(codes.dtype).removeprefix("torch.")
            wrong = f"there is a scale, but the weight is {held} instead of float8_e4m3fn"
        elif len(scales) != 1:
            wrong = (
                "weight_scale_inv and weight_scale are missing" if not scales else "two scales, of which one is meant"
            )
        elif len(codes.shape) != 2:
            wrong = f"the weight has shape {list(codes.shape)} instead of that of a matrix"
        else:
            wrong, block = _grid(codes.shape, entries[scales[0]], scheme)
        if wrong:
            problems.setdefault(wrong, []).append(weight)
        else:
            assert codes is not None
            packed[weight] = _pack_fp8({"codes": weight, "scale": scales[0]}, codes.shape, entries[scales[0]], block)
    spare = {name for name in entries if ACTIVATIONS.fullmatch(name)}
    beside = {name for parts in groups.values() for name in parts.values()} | spare
    activations = scheme.notice or ("scales of activations" if spare else None)
    notice = f"activations are not quantised (the checkpoint's scheme: {activations})" if activations else None
    return Quantised(packed, frozenset(beside), notice)


def _grid(shape: tuple[int, ...], scale: Entry, scheme: Scheme) -> tuple[str, tuple[int, int] | None]:
    """What is wrong with a scale, and the blocks that it is for (None: one a row, or one)."""
    if scale.dtype not in SCALES:
        return f"the scale is {scale.dtype} instead of float32, bfloat16, float16 or e8m0".replace("torch.", ""), None
    expected = []
    if scheme.blocks is not None:
        grid = tuple(-(-size // block) for size, block in zip(shape, scheme.blocks, strict=True))
        expected.append(f"{list(grid)} for blocks of {scheme.blocks[0]} × {scheme.blocks[1]}")
        if scale.shape == grid:
            return "", scheme.blocks
    if scheme.whole:
        expected.append(f"one number, [{shape[0]}] or [{shape[0]}, 1]")
        if math.prod(scale.shape) == 1 or scale.shape in ((shape[0],), (shape[0], 1)):
            return "", None
    return f"the scale has shape {list(scale.shape)} instead of {' or '.join(expected)}", None


def _pack_fp8(parts: dict[str, str], shape: tuple[int, ...], scale: Entry, block: tuple[int, int] | None) -> Packed:
    def make(tensors: dict[str, Tensor]) -> Store:
        scales = tensors["scale"].float()
        _check_scales(scales)
        if ((tensors["codes"].view(torch.uint8) & 0x7F) == 0x7F).any():
            raise ValueError("the weight holds NaN.")
        if block is None:
            scales = scales.reshape(-1, 1).expand(shape[0], 1).contiguous()
        return FP8Store(tensors["codes"], scales, block)

    if block is not None:
        how = f"blocks of {block[0]} × {block[1]}"
    else:
        how = "one scale" if math.prod(scale.shape) == 1 else "a scale a row"
    return Packed(parts, shape, f"FP8 e4m3, {how}", FP8Store, make)


def _check_scales(scales: Tensor) -> None:
    if not torch.isfinite(scales).all():
        raise ValueError("the scales hold NaN or infinity.")
