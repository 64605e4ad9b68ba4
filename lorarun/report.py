"""What really runs: where a model came from, how its weights are stored, which adapter is live, what serves each
operation.

Everything is read off the model when the report is made, not remembered from what was asked for.
"""

from __future__ import annotations

from typing import Any

from lorarun.headers import abbreviate
from lorarun.lora import linears
from lorarun.nn import Linear, Model
from lorarun.quant.store import Store, stores


class Report:
    """Prints as a table; :meth:`to_dict` has the same facts as plain values."""

    def __init__(self, facts: dict[str, dict[str, Any]]) -> None:
        self._facts = facts

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return {section: dict(rows) for section, rows in self._facts.items()}

    def __str__(self) -> str:
        width = max(len(key) for rows in self._facts.values() for key in rows)
        lines = []
        for section, rows in self._facts.items():
            lines += [section, *(f"  {key:<{width}}  {value}" for key, value in rows.items())]
        return "\n".join(lines)


def report(model: Model) -> Report:
    """What ``model`` is and how it runs, as it stands now.

    Sections: source (name, folder, revision), model (family, parameters, device), storage (bytes and dtypes of each
    group of weights), adapters (rank, scale, projections, dtype, whether live), operations (what serves each, and
    why).
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
            "parameters": sum(held.numel() for path, held in _weights(model) if "lora_" not in path),
            "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "device": str(model.device),
            "mode": "train" if model.training else "eval",
        },
        "storage": _storage(model),
        "adapters": {name: _adapter(model, name) for name in model.adapters} or {"none": "the base model alone"},
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
    groups: dict[str, list[tuple[str, Any]]] = {}
    for path, held in _weights(model):
        if "lora_" in path:
            group = "adapters"
        elif ".layers." not in path:
            group = "embedding, head, final norm"
        elif "norm" in path or path.endswith(".bias"):
            group = "norms, biases"
        else:
            group = "projections left dense" if quantised and not isinstance(held, Store) else "projections"
        groups.setdefault(group, []).append((path, held))
    facts = {group: _held([held for _, held in weights]) for group, weights in groups.items()}
    if dense := groups.get("projections left dense"):
        facts["projections left dense"] += ": " + abbreviate([path.removesuffix(".weight") for path, _ in dense])
    return facts


def _held(weights: list[Any]) -> str:
    """Size and format of weights, stores or Parameters."""
    tensors = [tensor for held in weights for tensor in (held.parameters() if isinstance(held, Store) else [held])]
    kinds = {h.kind if isinstance(h, Store) else f"dense {str(h.dtype).removeprefix('torch.')}" for h in weights}
    return f"{sum(tensor.nbytes for tensor in tensors) / 2**20:,.1f} MiB {', '.join(sorted(kinds))}"


def _adapter(model: Model, name: str) -> str:
    lora = model.adapters[name]
    carriers = [linear for _, linear in linears(model) if name in linear.adapters]
    merged = any(linear.merged is not None and linear.merged[0] == name for linear in carriers)
    live = any(linear.active == name for linear in carriers)
    state = "merged into the weights" if merged else "live" if live else "off"
    dtypes = sorted({str(factor.dtype).removeprefix("torch.") for c in carriers for factor in c.factors(name)})
    return (
        f"{state}; r={lora.r}, scale={lora.scale:g}, dropout={lora.dropout:g}, {len(carriers)} projections, "
        f"{', '.join(dtypes)}"
    )


def _operations(model: Model) -> dict[str, str]:
    reference = "torch (the only implementation yet)"
    hooked = [
        path
        for path, module in model.named_modules()
        if isinstance(module, Linear) and (module._forward_hooks or module._forward_pre_hooks)
    ]
    capped = getattr(model.config, "attn_logit_softcapping", None)
    return {
        "projections": "torch matmul, each on its own" + (f"; hooks on {len(hooked)}" if hooked else ""),
        "attention": "torch, explicit scores (soft-cap)" if capped else "torch scaled_dot_product_attention",
        "norm, rotary, gate": reference,
        "head and loss": "torch, chunked: full logits are never held",
    }
