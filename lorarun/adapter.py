"""Adapters as files: the folder that PEFT writes and reads, and nothing else.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``, with the tensors named as PEFT names them, so
that an adapter trained here runs wherever PEFT's do, and the other way round.  PEFT itself is lenient when it reads:
tensors that fit nothing are dropped, missing ones stay as they were initialised, and a configuration field that it does
not know is ignored.  An adapter read that way runs, only not as it was trained.  So reading is strict here: the tensors
must be exactly those that the configuration promises, and a field that would change the arithmetic and is not supported
is an error that names it.

Files are replaced, never rewritten: a process killed in the middle of saving leaves the old adapter, or (when the
configuration changed too) a folder without ``adapter_config.json``, which nothing takes for an adapter.

Values never change on the way.  A and B are written in the dtype they have and read back into fp32, or into the file's
dtype where that is wider.  Given up: adapters in pickles (``adapter_model.bin``), which run code when they are opened.
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

from lorarun.headers import Entry, abbreviate, is_there, read_header, read_json, read_text
from lorarun.lora import Lora, attach, block_of, check_new, find_targets, selects
from lorarun.nn import Linear, Model

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # PEFT's two wrappers around the model
KEY = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.[^.]+)?\.weight")  # some writers keep the adapter's name
# What may stand in front of `layers.` in a text model's module names, plain, multimodal, compiled or distributed.
WRAPPERS = {"base_model", "model", "language_model", "module", "_orig_mod"}

# Fields of adapter_config.json: what is read; what says nothing about the arithmetic (megatron_core and
# qalora_group_size only serve megatron_config and use_qalora); what PEFT knows and is not supported here.
READ = set(
    "peft_type task_type r lora_alpha lora_dropout use_rslora target_modules bias layers_to_transform layers_pattern "
    "init_lora_weights".split()
)
IDLE = set(
    "base_model_name_or_path revision inference_mode auto_mapping peft_version runtime_config megatron_core "
    "qalora_group_size".split()
)
UNSUPPORTED = set(
    "alora_invocation_tokens alpha_pattern arrow_config corda_config ensure_weight_tying eva_config exclude_modules "
    "fan_in_fan_out kasa_config layer_replication loftq_config lora_bias lora_ga_config megatron_config "
    "modules_to_save monteclora_config rank_pattern target_parameters trainable_token_indices use_bdlora use_dora "
    "use_qalora velora_config".split()
)
# Initialisations that leave the base model's weights alone; the others belong to a base that was changed with them.
HARMLESS_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


# --- writing -------------------------------------------------------------------------------------------------------


def save_adapter(model: Model, path: str | os.PathLike[str], name: str | None = None) -> None:
    """Write an adapter (the active one by default) into the folder ``path``, in PEFT's format.

    Tensors are written in the dtype that they have, fp32 unless ``add_lora`` was told otherwise.  A chat template
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
    for module in lora.modules:
        linear = model.get_submodule(module)
        assert isinstance(linear, Linear)
        for letter, factor in zip("AB", linear.factors(name), strict=True):
            key = f"{PREFIX}{_stored_name(model, module)}.lora_{letter}.weight"
            tensors[key] = factor.detach().to("cpu", copy=True).contiguous()
    config = json.dumps(_config(model, lora), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
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


def _stored_name(model: Model, module: str) -> str:
    """A module's name in the model that transformers makes of the same checkpoint."""
    module = module.removeprefix("_orig_mod.")  # torch.compile's wrapper
    return module.replace("model.", "model.language_model.", 1) if model.nested else module


def _config(model: Model, lora: Lora) -> dict[str, Any]:
    """The fields that every PEFT since 0.7 knows; newer ones take their defaults."""
    source = model.source
    targets: str | list[str] = lora.targets
    if targets == "all-linear":
        targets = sorted({module.rpartition(".")[2] for module in lora.modules})
    layers = lora.layers
    # The short form, where PEFT would find exactly these modules by it.  It takes no layers with a pattern, and in a
    # multimodal model a short name also means the vision tower.
    found = [path for path in dict(find_targets(model, "all-linear")) if _selected(targets, layers, path)]
    if model.nested or found != lora.modules or (layers and isinstance(targets, str)):
        targets, layers = sorted(_stored_name(model, module) for module in lora.modules), None
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": source and (source.repo or str(Path(source.folder).resolve())),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": layers,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.r,
        "rank_pattern": {},
        "revision": source and source.revision,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.rslora,
    }


def _selected(targets: str | list[str], layers: list[int] | None, path: str) -> bool:
    return selects(targets, path) and (layers is None or block_of(path) in layers)


# --- reading -------------------------------------------------------------------------------------------------------


def load_adapter(
    model: Model, path: str | os.PathLike[str], name: str = "default", dtype: torch.dtype | None = None
) -> None:
    """Attach the adapter in the PEFT folder ``path`` and make it the active one; everything else is frozen.

    name: what the model calls it, whatever it was called when it was saved.  dtype: of A and B; by default fp32, or the
    file's where that is wider, so that values never change and 16-bit files can be trained further.  The model stays in
    the mode it is in: call ``model.train()`` to go on training with the adapter's dropout.

    Raises one ValueError that lists everything in the configuration that is not supported, or every missing, unexpected
    or mis-shaped tensor; the model is then as before.
    """
    check_new(model, name, "load_adapter")
    folder = Path(path)
    raw = read_adapter_config(folder)
    lora = _understand(raw, folder)
    parts = _match(model, lora, folder, raw)
    tensors, broken = [], []
    with safetensors.safe_open(folder / WEIGHTS, framework="pt") as file:
        for module, linear, keys in parts:
            a, b = (_own(file.get_tensor(key), linear.weight.device, dtype) for key in keys)
            tensors.append((module, linear, a, b))
            broken += [key for key, factor in zip(keys, (a, b), strict=True) if not factor.isfinite().all()]
    if broken:
        raise ValueError(
            f"{folder / WEIGHTS} holds NaN or infinity in {len(broken)} tensors: {abbreviate(broken)}. Its training "
            "failed; take an adapter that was saved before."
        )
    attach(model, name, lora, tensors)


def _own(stored: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """A copy in memory of its own: what the file gives is a view of the file."""
    return stored.to(device, dtype or torch.promote_types(stored.dtype, torch.float32), copy=True)


def read_adapter_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The raw ``adapter_config.json`` of a folder."""
    try:
        return read_json(Path(folder) / CONFIG)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {CONFIG}; expected a folder with an adapter as PEFT writes it.") from None


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


def _understand(raw: Mapping[str, Any], folder: Path) -> Lora:
    """What the configuration asks for, if it is supported; else one error that names every field that is not."""
    wrong = [f"lacks {field}" for field in ("peft_type", "r", "lora_alpha", "target_modules") if field not in raw]
    allowed: dict[str, tuple[Any, ...]] = {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "bias": ("none", None),
        "init_lora_weights": HARMLESS_INITS,
        "layers_pattern": (None, [], "", "layers", ["layers"]),
    }
    for field, values in allowed.items():
        if field in raw and raw[field] not in values:
            wrong.append(f"{field} is {raw[field]!r}")
    ignored = []
    for field, value in raw.items():
        if field in READ or field in IDLE:
            continue
        if value is not None and value is not False and value not in ("", [], {}):
            wrong.append(f"{field} is {value!r}")
        elif field not in UNSUPPORTED:
            ignored.append(field)
    rank, alpha, dropout = raw.get("r", 1), raw.get("lora_alpha", 1), raw.get("lora_dropout") or 0.0
    if not _is(int, rank) or rank < 1:
        wrong.append(f"r is {rank!r}")
    if not _is(int | float, alpha) or not 0 < alpha <= 1e30:
        wrong.append(f"lora_alpha is {alpha!r}")
    if not _is(int | float, dropout) or not 0.0 <= dropout < 1.0:
        wrong.append(f"lora_dropout is {dropout!r}")
    targets, layers = raw.get("target_modules", ""), raw.get("layers_to_transform")
    layers = [layers] if _is(int, layers) else layers or None
    if not isinstance(targets, str) and not (isinstance(targets, list) and all(_is(str, each) for each in targets)):
        wrong.append(f"target_modules is {targets!r}")
    if layers is not None and not (isinstance(layers, list) and all(_is(int, each) for each in layers)):
        wrong.append(f"layers_to_transform is {layers!r}")
    if wrong:
        raise ValueError(
            f"{folder / CONFIG} describes what is not supported, and leaving it out would change the model: "
            f"{'; '.join(wrong)}. Plain LoRA on the projections of the blocks is; a field that you know to be without "
            "effect can be removed from the file."
        )
    if ignored:
        print(f"{folder / CONFIG}: unknown fields without a value are ignored: {', '.join(ignored)}.", file=sys.stderr)
    return Lora(rank, alpha, targets, float(dropout), raw.get("use_rslora") is True, layers, [])


def _is(kind: Any, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class _Part(NamedTuple):
    """One projection and the keys of its A and B in the file."""

    module: str
    linear: Linear
    keys: tuple[str, str]


def _match(model: Model, lora: Lora, folder: Path, raw: Mapping[str, Any]) -> list[_Part]:
    """Which tensors belong where; fills in ``lora.modules``.  One error for all that is missing, strange or wrong."""
    problems: list[str] = []
    entries = _entries(folder, problems)
    projections = dict(find_targets(model, "all-linear"))
    own, roots, vision, strange = _sort_keys(entries, projections, problems)
    lora.modules = [
        path
        for path in projections
        if any(_selected(lora.targets, lora.layers, root + path.removeprefix("model.")) for root in roots)
    ]
    if not own:
        problems.append("no tensor belongs to a projection of this model")
    wanted = [(module, letter) for module in lora.modules for letter in "AB"]
    missing = [f"{module}.lora_{letter}.weight" for module, letter in wanted if (module, letter) not in own]
    unasked = [own[place] for place in own if place not in set(wanted)]
    if missing:
        problems.append(f"{len(missing)} of {len(wanted)} tensors are missing: {abbreviate(missing)}")
    if strange:
        problems.append(f"{len(strange)} tensors are unexpected: {abbreviate(strange)}")
    if unasked:
        problems.append(f"{len(unasked)} tensors are of modules that {CONFIG} does not target: {abbreviate(unasked)}")
    problems += _mismatches(lora, projections, own, entries)
    if problems:
        here = model.source.name if model.source else f"a {model.config.model_type} made from a configuration"
        raise ValueError(
            f"The adapter in {folder} does not fit this model:\n"
            + "".join(f"  - {problem}\n" for problem in problems)
            + f"It names {raw.get('base_model_name_or_path') or 'no model'} as its base; this model is {here}."
        )
    if vision:
        print(f"{folder}: {len(vision)} tensors for the vision tower are left out.", file=sys.stderr)
    return [_Part(path, projections[path], (own[path, "A"], own[path, "B"])) for path in lora.modules]


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
    """The keys by (module, "A" or "B"); what the trained model's module names had before ``layers.``; the keys of a
    vision tower, if a text model stood beside it; and those that fit nothing."""
    own: dict[tuple[str, str], str] = {}
    roots: set[str] = set()
    vision, strange = list[str](), list[str]()
    for key in keys:
        found = KEY.fullmatch(key.removeprefix(PREFIX))
        root, _, rest = found["module"].partition("layers.") if found else ("", "", "")
        parts, module = root.split(".")[:-1], f"model.layers.{rest}"
        if found and any(part.startswith("vision") for part in parts):
            vision.append(key)
        elif not found or module not in projections or not set(parts) <= WRAPPERS:
            strange.append(key)
        elif (module, found["factor"]) in own:
            problems.append(f"{own[module, found['factor']]} and {key} are the same matrix")
        else:
            own[module, found["factor"]] = key
            roots.add("".join(f"{part}." for part in parts if part in ("model", "language_model")))
    if not any("language_model" in root for root in roots):
        vision, strange = [], strange + vision
    return own, roots, vision, strange


def _mismatches(
    lora: Lora, projections: Mapping[str, Linear], own: Mapping[tuple[str, str], str], entries: Mapping[str, Entry]
) -> list[str]:
    """Tensors of a wrong shape or dtype; those that are wrong alike in one line."""
    alike: dict[str, list[str]] = {}
    for (module, letter), key in own.items():
        linear, entry = projections[module], entries[key]
        shape = (lora.r, linear.in_features) if letter == "A" else (linear.out_features, lora.r)
        if entry.shape != shape:
            alike.setdefault(f"shape {list(entry.shape)} instead of {list(shape)}", []).append(key)
        elif not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            dtype = str(entry.dtype).removeprefix("torch.")
            alike.setdefault(f"dtype {dtype} instead of float32, bfloat16 or float16", []).append(key)
    return [f"{wrong}: {abbreviate(keys)}" for wrong, keys in alike.items()]
