"""Adapters as files: the folder that PEFT writes and reads, and nothing else.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``, with the tensors named as PEFT names them, so
that an adapter trained here runs wherever PEFT's do, and the other way round.  PEFT itself is lenient when it reads:
tensors that fit nothing are dropped, and missing ones stay as they were initialised.  An adapter read that way runs,
only not as it was trained.  So reading is strict here: the tensors must be exactly those that the configuration
(:mod:`lorarun.adapter_config`) promises.

Files are replaced, never rewritten: a process killed in the middle of saving leaves the old adapter, or (when the
configuration changed too) a folder without ``adapter_config.json``, which nothing takes for an adapter.

Values never change on the way.  A and B are written in the dtype they have and read back into fp32, or into the file's
dtype where that is wider.  Given up: adapters in pickles (``adapter_model.bin``), which run code when they are opened,
and a limit on the time that matching takes where ``target_modules`` is a pattern.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lorarun.adapter_config import (
    CONFIG,
    config_fields,
    read_adapter_config,
    selected,
    stored_name,
    translate,
    understand,
)
from lorarun.headers import Entry, abbreviate, is_there, read_header, read_text
from lorarun.lora import attach, biased, check_new, find_targets, linears
from lorarun.nn import Linear, Model
from lorarun.options import Lora
from lorarun.quant.store import NF4Store
from lorarun.tokens import adopt, beyond_the_base
from lorarun.trained_files import Beside, beside_tensors, mismatches, other_tables, take, understand_beside

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # PEFT's two wrappers around the model
# What a file holds of a projection, and what it is to `Linear.attach`; some writers keep the adapter's name.
PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "b_bias",
    "lora_magnitude_vector": "magnitude",
    "base_layer.bias": "bias",
}
KEY = re.compile(
    r"(?P<module>.+?)\.(?:(?P<matrix>lora_[AB])(?:\.[^.]+)?\.(?P<leaf>weight|bias)|"
    r"(?P<vector>lora_magnitude_vector)(?:\.[^.]+)?(?:\.weight)?|(?:base_layer\.)?(?P<bias>bias))"
)
# What may stand in front of `layers.` in a text model's module names, plain, multimodal, compiled or distributed.
WRAPPERS = {"base_model", "model", "language_model", "module", "_orig_mod"}

# --- writing -------------------------------------------------------------------------------------------------------


def save_adapter(model: Model, path: str | os.PathLike[str], name: str | None = None) -> None:
    """Write an adapter (the active one by default) into the folder ``path``, in PEFT's format.

    Tensors are written in the dtype that they have, fp32 unless ``add_lora`` was told otherwise.  An adapter that
    subtracts what it began with (``init="pissa"`` or ``"olora"``) is written as the plain one of twice the rank that it
    is, and read again as that; that A was frozen is not written, as PEFT has no word for it.  A chat template
    that was named when the model was loaded is saved beside them, with the tokenizer's files.  Other files in the
    folder stay; an adapter that is there already is replaced.

    Raises ValueError for a name that the model does not have, and for a ``path`` that is a file.
    """
    name = model.active if name is None else name
    if name is None or name not in model.adapters:
        which = "no adapter is active" if name is None else f"there is no adapter {name!r}"
        raise ValueError(f"save_adapter: {which}; the model has {', '.join(model.adapters) or 'none: call add_lora'}.")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"save_adapter: {folder} is a file; expected a folder, or a name for a new one.")
    lora: Lora = model.adapters[name]
    tensors = {}
    for module, linear in linears(model):
        if name not in linear.adapters or module in lora.tables:
            continue
        for part, tensor in linear.parts(name).items():
            ours = next(key for key, value in PARTS.items() if value == part)
            key = "bias" if part == "bias" and module not in lora.modules else ours
            tensors[f"{PREFIX}{stored_name(model, module)}.{key}"] = tensor.detach().to("cpu", copy=True).contiguous()
    for own, tensor in beside_tensors(model, name, lora):
        tensors[f"{PREFIX}{stored_name(model, own)}"] = tensor.detach().to("cpu", copy=True).contiguous()
    config = json.dumps(config_fields(model, lora), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    if model.tokenizer is not None and model.tokenizer.replaced:
        model.tokenizer.save(folder)
    elif (folder / CONFIG).exists() and not (folder / "config.json").exists():
        (folder / "chat_template.jinja").unlink(missing_ok=True)  # of the adapter that is replaced
    _replace(folder, config.encode(), safetensors.torch.save(tensors, metadata={"format": "pt"}))


def _replace(folder: Path, config: bytes, weights: bytes) -> None:
    """Put both files in place so that at no time a configuration stands beside the tensors of another."""
    try:
        for file, content in ((CONFIG, config), (WEIGHTS, weights)):
            with open(folder / f"{file}.partial", "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as error:
        for file in (CONFIG, WEIGHTS):
            (folder / f"{file}.partial").unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}: the adapter needs {len(weights):,} bytes", str(folder)) from None
    there = folder / CONFIG
    if there.exists() and there.read_bytes() != config:
        there.unlink()
    os.replace(folder / f"{WEIGHTS}.partial", folder / WEIGHTS)
    os.replace(folder / f"{CONFIG}.partial", there)


# --- reading -------------------------------------------------------------------------------------------------------


def load_adapter(
    model: Model, path: str | os.PathLike[str], name: str = "default", dtype: torch.dtype | None = None
) -> None:
    """Attach the adapter in the PEFT folder ``path`` and make it the active one; everything else is frozen.

    name: what the model calls it, whatever it was called when it was saved.  dtype: of A and B; by default fp32, or the
    file's where that is wider, so that values never change and 16-bit files can be trained further.  The model stays in
    the mode it is in: call ``model.train()`` to go on training with the adapter's dropout.

    Raises one ValueError that lists everything in the configuration that is not supported, or every missing, unexpected
    or mis-shaped tensor, or every one that holds NaN or infinity; the model is then as before.
    """
    check_new(model, name, "load_adapter")
    folder = Path(path)
    raw = read_adapter_config(folder)
    lora = understand(raw, folder)
    more = beyond_the_base(model, folder)
    parts, beside = _match(model, lora, folder, raw, extended=bool(more))
    tensors, broken = [], []
    with safetensors.safe_open(folder / WEIGHTS, framework="pt") as file:
        for module, linear, keys in parts:
            device = linear.weight.device
            own = {PARTS[part]: _own(file.get_tensor(key), device, dtype) for part, key in keys.items()}
            tensors.append((module, linear, own))
            broken += [keys[part] for part in keys if not own[PARTS[part]].isfinite().all()]
        frozen = {path: file.get_tensor(key) for path, key in beside.frozen.items()}
        if other := other_tables(model, frozen):
            raise ValueError(
                f"The adapter in {folder} was trained on another {' and '.join(other)} than this model has, and holds "
                "a frozen one: load it with its own base, or have it saved with the table in modules_to_save."
            )
        values = {own_key: file.get_tensor(key) for own_key, key in beside.keys.items()}
        broken += [beside.keys[own_key] for own_key, value in values.items() if not value.isfinite().all()]
        if broken:
            raise ValueError(
                f"{folder / WEIGHTS} holds NaN or infinity in {len(broken)} tensors: {abbreviate(broken)}. Its "
                "training failed; take an adapter that was saved before."
            )
        adopt(model, more, beside.size, lora, frozen)
        attach(model, name, lora, tensors, dtype, values)


def _own(stored: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """A copy in memory of its own: what the file gives is a view of the file."""
    return stored.to(device, dtype or torch.promote_types(stored.dtype, torch.float32), copy=True)


def base_of(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Which model an adapter's folder says it belongs to: hub id or folder, and the revision where one is recorded."""
    raw = read_adapter_config(path)
    base, revision = raw.get("base_model_name_or_path"), raw.get("revision")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{Path(path) / CONFIG} names no base model: load the base and pass this folder as adapter=.")
    return base, None if os.path.exists(base) else revision


def template_of(path: str | os.PathLike[str]) -> str | None:
    """The chat template that was saved with an adapter, if one was."""
    file = Path(path) / "chat_template.jinja"
    return read_text(file) if is_there(file) else None


class _Part(NamedTuple):
    """One projection and the keys of its parts in the file."""

    module: str
    linear: Linear
    keys: dict[str, str]


def _match(
    model: Model, lora: Lora, folder: Path, raw: Mapping[str, Any], extended: bool
) -> tuple[list[_Part], Beside]:
    """Which tensors belong where; fills in ``lora.modules``.  One error for all that is missing, strange or wrong."""
    problems: list[str] = []
    entries = _entries(folder, problems)
    understand_beside(model, lora, raw, problems)
    beside = take(model, lora, entries, PREFIX, extended, problems)
    projections = dict(find_targets(model, "all-linear"))
    own, roots, vision, strange = _sort_keys(entries, projections, problems)
    lora.modules = [
        path
        for path in projections
        if path not in lora.copies
        and any(selected(lora.targets, lora.layers, root + path.removeprefix("model.")) for root in roots)
    ]
    if roots - {"model."}:
        translate(lora, roots)
    if not own and not beside.keys:
        problems.append("no tensor belongs to a projection of this model")
    if lora.init == "loftq" and not all(isinstance(projections[m].weight, NF4Store) for m in lora.modules):
        problems.append("it was made for weights in NF4 and corrects their error; load the model with bits=4")
    kinds = ["lora_A.weight", "lora_B.weight"]
    kinds += ["lora_B.bias"] * lora.lora_bias + ["lora_magnitude_vector"] * lora.dora
    wanted = [(module, kind) for module in lora.modules for kind in kinds]
    wanted += [(path, "base_layer.bias") for path, module in biased(model, lora).items()]
    missing = [f"{module}.{part}" for module, part in wanted if (module, part) not in own]
    unasked = [own[place] for place in own if place not in set(wanted)]
    if missing:
        problems.append(f"{len(missing)} of {len(wanted)} tensors are missing: {abbreviate(missing)}")
    if strange:
        problems.append(f"{len(strange)} tensors are unexpected: {abbreviate(strange)}")
    if unasked:
        problems.append(f"{len(unasked)} tensors are of modules that {CONFIG} does not target: {abbreviate(unasked)}")
    problems += mismatches({key: (entries[key], _shape(lora, at, projections[at], p)) for (at, p), key in own.items()})
    if problems:
        here = model.source.name if model.source else f"a {model.config.model_type} made from a configuration"
        raise ValueError(
            f"The adapter in {folder} does not fit this model:\n"
            + "".join(f"  - {problem}\n" for problem in problems)
            + f"It names {raw.get('base_model_name_or_path') or 'no model'} as its base; this model is {here}."
        )
    if vision:
        print(f"{folder}: {len(vision)} tensors for the vision tower are left out.", file=sys.stderr)
    parts = [
        _Part(path, linear, {part: own[at, part] for at, part in wanted if at == path})
        for path, linear in projections.items()
        if any(at == path for at, _ in wanted)
    ]
    return parts, beside


def _entries(folder: Path, problems: list[str]) -> dict[str, Entry]:
    path = folder / WEIGHTS
    if is_there(path):
        return read_header(path, problems)
    if (folder / PICKLE).exists():
        raise ValueError(
            f"{folder} holds its adapter as a pickle ({PICKLE}), which runs code when it is opened and is never "
            "loaded: load and save it once with a current PEFT, which writes safetensors."
        )
    raise ValueError(f"{folder} has no {WEIGHTS}; expected a folder with an adapter as PEFT writes it.")


def _sort_keys(
    keys: Iterable[str], projections: Mapping[str, Linear], problems: list[str]
) -> tuple[dict[tuple[str, str], str], set[str], list[str], list[str]]:
    """The keys by (module, part); what the trained model's module names had before ``layers.``; the keys of a vision
    tower, if a text model stood beside it; and those that fit nothing."""
    own: dict[tuple[str, str], str] = {}
    roots: set[str] = set()
    vision, strange = list[str](), list[str]()
    for key in keys:
        found = KEY.fullmatch(key.removeprefix(PREFIX))
        root, _, rest = found["module"].partition("layers.") if found else ("", "", "")
        parts, module = root.split(".")[:-1], f"model.layers.{rest}"
        place = module, _part(found)
        if found and any(part.startswith("vision") for part in parts):
            vision.append(key)
        elif place[1] not in PARTS or module not in projections or not set(parts) <= WRAPPERS:
            strange.append(key)
        elif place in own:
            problems.append(f"{own[place]} and {key} are the same matrix")
        else:
            own[place] = key
            roots.add("".join(f"{part}." for part in parts if part in ("model", "language_model")))
    if not any("language_model" in root for root in roots):
        vision, strange = [], strange + vision
    return own, roots, vision, strange


def _part(found: re.Match[str] | None) -> str:
    """Which part of a projection a key names, spelt as in PARTS."""
    if found is None:
        return ""
    if found["matrix"]:
        return f"{found['matrix']}.{found['leaf']}"
    return found["vector"] or "base_layer.bias"


def _shape(lora: Lora, module: str, linear: Linear, part: str) -> tuple[int, ...]:
    """The shape of a part of a projection, spelt as in PARTS."""
    if part == "lora_A.weight":
        return lora.rank_of(module), linear.in_features
    return (linear.out_features, lora.rank_of(module)) if part == "lora_B.weight" else (linear.out_features,)
