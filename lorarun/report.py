"""What really runs: where a model came from, how its weights are stored, which adapter is live, what serves each
operation.

Everything is read off the model when the report is made, not remembered from what was asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from lorarun import decode
from lorarun.compute import groups
from lorarun.frozen import Frozen
from lorarun.headers import abbreviate
from lorarun.kernels import decode_attention
from lorarun.kernels.attention import serves
from lorarun.kernels.backend import runs_triton, why
from lorarun.kernels.few_rows import ROWS
from lorarun.kernels.replay import Frame, Running
from lorarun.linear import Linear, few_stored
from lorarun.nn import Model
from lorarun.project import obstacle
from lorarun.quant.store import Store, stores
from lorarun.trained import owner, parameters_of, weighted


class Report:
    """Prints as a table; :meth:`to_dict` has the same facts as plain values."""

    def __init__(self, facts: dict[str, dict[str, Any]]) -> None:
        self._facts = facts

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return {section: dict(rows) for section, rows in self._facts.items()}

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        width = max(len(key) for rows in self._facts.values() for key in rows)
        lines = []
        for section, rows in self._facts.items():
            lines += [section, *(f"  {key:<{width}}  {value}" for key, value in rows.items())]
        return "\n".join(lines)


def report(model: Model) -> Report:
    """What ``model`` is and how it runs, as it stands now.

    Sections: source (name, folder, revision), model (family, parameters, device), storage (bytes and dtypes of each
    group of weights, how they were stored, what was asked), adapters (rank, scale, projections, dtype, whether live),
    plan (predicted memory, what blocks keep), operations (what serves each, and why).
    """
    source = model.source
    facts: dict[str, dict[str, Any]] = {
        "source": {
            "name": getattr(source, "name", None),
            "folder": str(source.folder) if source else None,
            "repository": getattr(source, "repo", None),
            "revision": getattr(source, "revision", None),
        },
        "model": {
            "family": f"{type(model).__name__} ({model.config.model_type})",
            "parameters": sum(held.numel() for path, held in _weights(model) if owner(path) is None),
            "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "device": str(model.device),
            "mode": "train" if model.training else "eval",
        },
        "storage": _storage(model),
        "adapters": {name: _adapter(model, name) for name in model.adapters}
        or {"none": "every weight is trained itself" if model.whole else "the base model alone"},
        "plan": model.planned.rows() if model.planned else {"none": "made at the first loss on an accelerator"},
        "operations": _operations(model),
    }
    return Report(facts)


def _weights(model: Model) -> list[tuple[str, Any]]:
    """Every Parameter of the model by its name, a store counted as the one weight that it stands for."""
    stored = list(stores(model))
    parts = tuple(f"{path}." for path, _ in stored)
    return [*stored, *((path, p) for path, p in model.named_parameters() if not path.startswith(parts))]


def _storage(model: Model) -> dict[str, str]:
    quantised = any(True for _ in stores(model))
    found: dict[str, list[tuple[str, Any]]] = {}
    for path, held in _weights(model):
        if owner(path) is not None:
            group = "adapters"
        elif ".layers." not in path:
            group = "embedding, head, final norm"
        elif "norm" in path or path.endswith(".bias"):
            group = "norms, biases"
        else:
            group = "projections left dense" if quantised and not isinstance(held, Store) else "projections"
        found.setdefault(group, []).append((path, held))
    facts = {group: _held([held for _, held in weights]) for group, weights in found.items()}
    if model.keep_dense:
        copies = [store.dense[1] for _, store in stores(model) if store.dense is not None]
        facts["kept for the run"] = f"{sum(copy.nbytes for copy in copies) / 2**20:,.1f} MiB, {len(copies)} dequantised"
    if dense := found.get("projections left dense"):
        facts["projections left dense"] += ": " + abbreviate([path.removesuffix(".weight") for path, _ in dense])
    for group, weights in found.items():
        facts[group] += _origin(model, weights)
    scaled = {id(linear.scaled): linear.scaled for group in groups(model) for linear in group.values()}
    if copies := [tensor for held in scaled.values() if held for way in held for tensor in way]:
        facts["FP8 copies"] = f"{sum(tensor.nbytes for tensor in copies) / 2**20:,.1f} MiB, for both directions"
    return facts


def _origin(model: Model, weights: list[tuple[str, Any]]) -> str:
    """How a group of weights is stored in the checkpoint, and what was asked for it."""
    kinds = sorted({model.stored[path] for path, _ in weights if path in model.stored})
    if not kinds:
        return ""
    bits = model.asked["bits"]
    projections = any("_proj.weight" in path for path, _ in weights)
    asked = "as stored" if bits is None else f"bits={bits}"
    dtype = str(model.asked["dtype"]).removeprefix("torch.")
    return f" (stored: {', '.join(kinds)}; asked: {f'{asked}, ' if projections else ''}{dtype})"


def _held(weights: list[Any]) -> str:
    """Size and format of weights, stores or Parameters."""
    tensors = [tensor for held in weights for tensor in (held.parameters() if isinstance(held, Store) else [held])]
    kinds = {h.kind if isinstance(h, Store) else f"dense {str(h.dtype).removeprefix('torch.')}" for h in weights}
    return f"{sum(tensor.nbytes for tensor in tensors) / 2**20:,.1f} MiB {', '.join(sorted(kinds))}"


def _adapter(model: Model, name: str) -> str:
    lora = model.adapters[name]
    merged = any(module.merged is not None and module.merged[0] == name for _, module in weighted(model))
    live = any(name in (module.active, module.trained) for _, module in weighted(model))
    state = "merged into the weights" if merged else "live" if live else "off"
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters_of(model, name)})
    ranks = _span({lora.rank_of(path) for path in lora.modules} or {lora.r})
    scales = _span({lora.scale_of(path) for path in lora.modules} or {lora.scale})
    biases = {"none": "", "lora_only": ", trained biases", "all": ", all biases trained"}[lora.bias]
    beside = f", {len(lora.copies)} modules whole: {abbreviate(lora.copies)}" if lora.copies else ""
    beside += f", {' and '.join(lora.tables)}" if lora.tables else ""
    rows = {path: len(ids) for path, ids in lora.tokens.items()}
    beside += "".join(f", {count} rows of {path}" for path, count in rows.items())
    return (
        f"{state}; r={ranks}, scale={scales}, dropout={lora.dropout:g}, {len(lora.modules)} projections{beside}, "
        f"{', '.join(dtypes)}{', DoRA' * lora.dora}{', B with bias' * lora.lora_bias}{biases}"
        f"{'' if lora.init == 'default' else f', init {lora.init}'}{', A frozen' * lora.freeze_a}"
    )


def _span(values: set[float]) -> str:
    return f"{min(values):g}" + (f" to {max(values):g}" if len(values) > 1 else "")


LENGTH = 8192  # of the rows that the report asks attention about


def _operations(model: Model) -> dict[str, str]:
    """Each question is put to what decides it when the model runs."""
    weight = model.model.embed_tokens.weight
    inputs = [list(group.values()) for group in groups(model)]
    return {
        "projections": _projections(model, inputs),
        "frozen products": _products(model, inputs),
        **_attention(model),
        "norm, rotary, gate": why(weight.device),
        "captured step": "decided at the first loss" if model.graphs is None else str(model.graphs),
        "decoding": _decoding(model, inputs),
        "head and loss": f"in chunks, full logits are never held; rows of logits: {why(weight.device)}",
    }


def _projections(model: Model, inputs: list[list[Linear]]) -> str:
    apart: dict[str, int] = {}
    if not runs_triton(model.model.embed_tokens.weight):
        return f"one by one ({why(model.device)})"
    for group in inputs:
        if reason := obstacle(group, model.dtype):
            apart[reason] = apart.get(reason, 0) + 1
    fused = len(inputs) - sum(apart.values())
    rest = "".join(f"; {count} one by one ({reason})" for reason, count in apart.items())
    return f"{fused} of {len(inputs)} groups that share an input run as one{rest}"


def _products(model: Model, inputs: list[list[Linear]]) -> str:
    dtype = str(model.dtype).removeprefix("torch.")
    served = [group for group in inputs if Frozen(group).scaled is not None and obstacle(group, model.dtype) is None]
    if not served:
        return dtype
    rest = f", the others {dtype}" if len(served) < len(inputs) else ""
    return f"FP8 e4m3 in both directions, a scale a row: {len(served)} of {len(inputs)} groups{rest}"


def _decoding(model: Model, inputs: list[list[Linear]]) -> str:
    """How ``generate`` computes its steps."""
    reason = decode.obstacle(model)
    steps = "steps replayed as a CUDA graph" if reason is None else f"steps one by one ({reason})"
    q = torch.empty(1, model.config.head_dim, dtype=model.dtype, device=model.device)
    attention = "Triton" if decode_attention.serves(q) else "torch"
    stored = [group for group in inputs if any(isinstance(linear.weight, Store) for linear in group)]
    if not stored:
        return f"{steps}; attention: {attention}"

    def from_codes(group: list[Linear]) -> bool:
        x = torch.empty(1, group[0].in_features, dtype=model.dtype, device=model.device)
        return few_stored(x, group, [linear.running().branch for linear in group]) is not None

    served = sum(map(from_codes, stored))
    return f"{steps}; attention: {attention}; up to {ROWS} rows from codes: {served} of {len(stored)} stored groups"


def _attention(model: Model) -> dict[str, str]:
    """What serves long rows in training, of one document and packed, for each kind of layer."""
    config = model.config

    def heads(count: int) -> torch.Tensor:
        one = torch.empty(1, 1, count, config.head_dim, dtype=model.dtype, device=model.device)
        return one.expand(1, LENGTH, count, config.head_dim)

    q, k = heads(config.num_attention_heads), heads(config.num_key_value_heads)
    spans = torch.zeros(1, 1, dtype=torch.int32, device=model.device).expand(1, LENGTH)
    cap = getattr(config, "attn_logit_softcapping", None)
    kinds = sorted(set(config.windows), key=lambda window: window or 0)
    facts = {}
    for window in kinds:
        name = "attention, full" if window is None else f"attention, window {window}"
        with Running(Frame(deterministic=model.deterministic)):
            one, packed = (serves(q, k, k, each, window, cap) for each in (None, spans))
        facts[name] = one if one == packed else f"{one}; packed documents: {packed}"
    return facts
