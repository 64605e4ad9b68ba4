"""What an adapter's ``adapter_config.json`` says, both ways: PEFT's fields and :class:`lorarun.options.Lora`.

PEFT ignores fields that it does not know, and an adapter read that way runs, only not as it was trained.  Here a field
that would change the arithmetic and is not supported is an error that names it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lorarun.headers import read_json
from lorarun.initial import subtracts
from lorarun.lora import block_of, find_targets, selects
from lorarun.nn import Model
from lorarun.options import BIASES, Lora, faults, of_pattern
from lorarun.trained_files import beside_fields, longer, targets_with_tables, wrong_fields

CONFIG = "adapter_config.json"

# Fields of adapter_config.json: what is read; what says nothing about the arithmetic (megatron_core and
# qalora_group_size only serve megatron_config and use_qalora); what PEFT knows and is not supported here.
READ = set(
    "peft_type task_type r lora_alpha lora_dropout use_rslora target_modules bias layers_to_transform layers_pattern "
    "init_lora_weights rank_pattern alpha_pattern lora_bias use_dora loftq_config modules_to_save "
    "trainable_token_indices ensure_weight_tying".split()
)
IDLE = set(
    "base_model_name_or_path revision inference_mode auto_mapping peft_version runtime_config megatron_core "
    "qalora_group_size".split()
)
UNSUPPORTED = set(
    "alora_invocation_tokens arrow_config corda_config eva_config exclude_modules fan_in_fan_out "
    "kasa_config layer_replication lora_ga_config megatron_config monteclora_config "
    "target_parameters use_bdlora use_qalora velora_config".split()
)
# Initialisations that leave the base model's weights alone; the others belong to a base that was changed with them.
HARMLESS_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
LOFTQ = {"loftq_bits": 4}  # beside init_lora_weights=true, where PEFT ignores it: made for NF4 weights


# --- writing -------------------------------------------------------------------------------------------------------


def stored_name(model: Model, module: str) -> str:
    """A module's name in the model that transformers makes of the same checkpoint."""
    module = module.removeprefix("_orig_mod.")  # torch.compile's wrapper
    return longer(module) if model.nested else module


def config_fields(model: Model, lora: Lora) -> dict[str, Any]:
    """The fields that every PEFT since 0.7 knows; newer ones take their defaults where that is possible."""
    source = model.source
    ranks, alphas = (dict[str, Any](pattern) for pattern in (lora.rank_pattern, lora.alpha_pattern))
    if model.nested:  # patterns are about the longer names that PEFT sees
        every = [*lora.modules, *lora.tables]
        ranks = {stored_name(model, m): r for m in every if (r := lora.rank_of(m)) != lora.r}
        alphas = {stored_name(model, m): a for m in every if (a := lora.alpha_of(m)) != lora.alpha}
    times, grown = (2, math.sqrt(2) if lora.rslora else 2) if subtracts(lora.init) else (1, 1)  # the scale stays
    targets: str | list[str] = lora.targets
    if targets == "all-linear":
        targets = sorted({module.rpartition(".")[2] for module in lora.modules})
    layers = lora.layers
    # The short form, where PEFT would find exactly these modules by it.  It takes no layers with a pattern, and in a
    # multimodal model a short name also means the vision tower.
    found = [path for path in dict(find_targets(model, "all-linear")) if selected(targets, layers, path)]
    if model.nested or found != lora.modules or (layers and isinstance(targets, str)):
        targets, layers = sorted(stored_name(model, module) for module in lora.modules), None
    targets = targets_with_tables(lora, targets, model.nested)
    newer: dict[str, Any] = {"use_dora": True} if lora.dora else {}
    newer |= {"lora_bias": True} if lora.lora_bias else {}
    newer |= {"loftq_config": LOFTQ} if lora.init == "loftq" else {}
    return {
        "alpha_pattern": {key: _whole(alpha * grown) for key, alpha in alphas.items()},
        "auto_mapping": None,
        "base_model_name_or_path": source and (source.repo or str(Path(source.folder).resolve())),
        "bias": lora.bias,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": layers,
        "lora_alpha": _whole(lora.alpha * grown),
        "lora_dropout": lora.dropout,
        "peft_type": "LORA",
        "r": lora.r * times,
        "rank_pattern": {key: rank * times for key, rank in ranks.items()},
        "revision": source and source.revision,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.rslora,
        **newer,
        **beside_fields(lora, model.nested),
    }


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def selected(targets: str | list[str], layers: list[int] | None, path: str) -> bool:
    return selects(targets, path) and (layers is None or block_of(path) in layers)


# --- reading -------------------------------------------------------------------------------------------------------


def read_adapter_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The raw ``adapter_config.json`` of a folder."""
    try:
        return read_json(Path(folder) / CONFIG)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {CONFIG}; expected a folder with an adapter as PEFT writes it.") from None


def understand(raw: Mapping[str, Any], folder: Path) -> Lora:
    """What the configuration asks for, if it is supported; else one error that names every field that is not."""
    wrong = [f"lacks {field}" for field in ("peft_type", "r", "lora_alpha", "target_modules") if field not in raw]
    allowed: dict[str, tuple[Any, ...]] = {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "bias": (*BIASES, None),
        "lora_bias": (True, False, None),
        "use_dora": (True, False, None),
        "loftq_config": (LOFTQ, {}, None),
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
    patterns = [raw.get(f"{kind}_pattern") or {} for kind in ("rank", "alpha")]
    if not _is(int, rank) or rank < 1:
        wrong.append(f"r is {rank!r}")
    if not _is(int | float, alpha) or not 0 < alpha <= 1e30:
        wrong.append(f"lora_alpha is {alpha!r}")
    if not _is(int | float, dropout) or not 0.0 <= dropout < 1.0:
        wrong.append(f"lora_dropout is {dropout!r}")
    for kind, pattern, number in zip(("rank", "alpha"), patterns, (int, int | float), strict=True):
        if not isinstance(pattern, dict) or not all(_is(number, v) and 0 < v < math.inf for v in pattern.values()):
            wrong.append(f"{kind}_pattern is {pattern!r}")
    targets, layers = raw.get("target_modules", ""), raw.get("layers_to_transform")
    layers = [layers] if _is(int, layers) else layers or None
    if not isinstance(targets, str) and not (isinstance(targets, list) and all(_is(str, each) for each in targets)):
        wrong.append(f"target_modules is {targets!r}")
    if layers is not None and not (isinstance(layers, list) and all(_is(int, each) for each in layers)):
        wrong.append(f"layers_to_transform is {layers!r}")
    wrong += wrong_fields(raw)
    if wrong:
        raise ValueError(
            f"{folder / CONFIG} describes what is not supported, and leaving it out would change the model: "
            f"{'; '.join(wrong)}. Plain LoRA on the projections of the blocks is; a field that you know to be without "
            "effect can be removed from the file."
        )
    if ignored:
        print(f"{folder / CONFIG}: unknown fields without a value are ignored: {', '.join(ignored)}.", file=sys.stderr)
    lora = Lora(
        rank, alpha, targets, float(dropout), bool(raw.get("use_rslora")), layers, [], None,
        dict(patterns[0]), dict(patterns[1]),
        raw.get("bias") or "none", bool(raw.get("lora_bias")), bool(raw.get("use_dora")),
        "loftq" if raw.get("loftq_config") else "default",
    )  # fmt: skip
    if wrong := faults(lora, torch.float32):
        raise ValueError(f"{folder / CONFIG}: {'; '.join(wrong)}.")
    return lora


def _is(kind: Any, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def translate(lora: Lora, roots: set[str]) -> None:
    """Write patterns anew for a model's own names, where those of the file begin otherwise: with one of ``roots``."""
    patterns: tuple[dict[str, Any], ...] = (lora.rank_pattern, lora.alpha_pattern)
    for pattern in patterns:
        named = [
            (path, root + path.removeprefix("model."))
            for path in (*lora.modules, *lora.tables)
            for root in sorted(roots)
        ]
        found = {path: value for path, name in named if (value := of_pattern(pattern, name, 0))}
        pattern.clear()
        pattern.update(found)
