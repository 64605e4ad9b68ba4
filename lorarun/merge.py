"""An adapter folded into the weights, in memory and out again, or as the weight that an export writes.

What is folded is W + scale · B·A, always computed in fp32 from the weight as it was and rounded once; the weight before
is kept, since subtracting again would not give back its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorarun.lora import linears
from lorarun.nn import Linear, Model
from lorarun.quant.store import Store
from lorarun.trained import is_tied, merge_trained, touches_tables, unmerge_trained, untie


def merged_weight(weight: Tensor, linear: Linear, name: str, device: torch.device | str | None = None) -> Tensor:
    """W + scale · B·A of an adapter, [out, in]: computed in fp32 (fp64 for a weight of that) and not rounded yet.

    weight: W, which may be another than the linear's own.  device: where to compute, by default where ``weight`` is.
    """
    device = weight.device if device is None else torch.device(device)
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = (factor.detach().to(device, wide) for factor in linear.factors(name))
    with torch.autocast(device.type, enabled=False):
        return weight.to(device, wide) + linear.adapters[name].scale * (b @ a)


def merge(model: Model) -> None:
    """Fold the active adapter into the weights: W ← W + scale · B·A, added in fp32 and rounded once.

    Copies and rows take the place of what they stand for; a tied head gets a table of its own where the adapter has
    one for either.  Calling it again changes nothing.  The weights before are kept in host memory, so that
    :func:`unmerge` restores every bit.
    """
    if model.active is None:
        raise ValueError("merge: no adapter is active; attach one with add_lora or load_adapter.")
    stored = [path for path, linear in linears(model) if linear.active and isinstance(linear.weight, Store)]
    if stored:
        raise ValueError(
            f"merge: {len(stored)} projections are quantised, and an adapter folded into them would be rounded to "
            "their few bits; write a merged model in 16 bits with save_merged, or load with bits=16 to merge in memory."
        )
    tied = is_tied(model) and touches_tables(model, model.active)
    if tied:
        untie(model)
    merge_trained(model, model.active)
    for _, linear in linears(model):
        if linear.active is not None and linear.merged is None:
            weight = linear.weight.data
            linear.merged = (linear.active, weight.to("cpu", copy=True))
            weight.copy_(merged_weight(weight, linear, linear.active))
    if tied and model.adapters[model.active].tied:
        model.lm_head.weight = model.model.embed_tokens.weight  # the same values


def unmerge(model: Model) -> None:
    """Undo :func:`merge`, to the bit.  Does nothing to a model that is not merged."""
    for _, linear in linears(model):
        if linear.merged is not None:
            linear.weight.data.copy_(linear.merged[1])
            linear.merged = None
    unmerge_trained(model)
