"""An adapter folded into the weights, in memory and out again, or as the weight that an export writes; and several
adapters folded into one.

What is folded is W + scale · B·A, with DoRA its rows at their learned lengths, always computed in fp32 from the weight
as it was and rounded once; the weight before is kept, since subtracting again would not give back its bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lorarun.headers import abbreviate
from lorarun.lora import attach, check_new, linears
from lorarun.nn import Linear, Model
from lorarun.options import Lora
from lorarun.quant.store import Store
from lorarun.trained import beyond_projections, bias_in, is_tied, merge_trained, touches_tables, untie, weighted


def merged_weight(weight: Tensor, linear: Linear, name: str) -> Tensor:
    """V = W + scale · B·A of an adapter, [out, in], with DoRA (m / ‖V‖) · V row by row: computed in fp32 (fp64 for a
    weight of that) and not rounded yet.

    weight: W, which may be another than the linear's own; it is computed where that is.
    """
    device = weight.device
    wide = torch.promote_types(weight.dtype, torch.float32)
    parts = {part: tensor.detach().to(device, wide) for part, tensor in linear.parts(name).items()}
    whole = weight.to(device, wide)
    if "a" in parts:
        with torch.autocast(device.type, enabled=False):
            whole = whole + linear.adapters[name].scale * (parts["b"] @ parts["a"])
    if "magnitude" in parts:
        lengths = torch.linalg.vector_norm(whole, dim=1).clamp_min(torch.finfo(wide).tiny)
        whole = whole * (parts["magnitude"] / lengths)[:, None]
    return whole


def merged_bias(bias: Tensor | None, linear: Linear, name: str) -> Tensor | None:
    """What an adapter makes of a projection's bias [out], in fp32 (fp64 for a bias of that); None: there is none."""
    parts = linear.parts(name)
    wide = torch.float32 if bias is None else torch.promote_types(bias.dtype, torch.float32)
    device = linear.weight.device if bias is None else bias.device
    base = parts.get("bias", bias)
    base = None if base is None else base.detach().to(device, wide)
    if "b_bias" not in parts:
        return base
    added = linear.adapters[name].scale * parts["b_bias"].detach().to(device, wide)
    return added if base is None else base + added


def without_place(model: Model, name: str) -> str | None:
    """Why an adapter cannot be folded into weights and biases; None when it can."""
    homeless = [
        path for path, m in linears(model) if m.bias is None and name in m.adapters and "b_bias" in m.parts(name)
    ]
    if not homeless:
        return None
    return (
        f"the adapter has biases (bias=True) where this architecture has none to add them to: {abbreviate(homeless)}; "
        "save_adapter keeps them"
    )


@torch.no_grad()
def merge(model: Model) -> None:
    """Fold the active adapter into the weights: W ← W + scale · B·A, added in fp32 and rounded once, and with DoRA
    scaled row by row; biases likewise.

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
    if wrong := without_place(model, model.active):
        raise ValueError(f"merge: {wrong}.")
    tied = is_tied(model) and touches_tables(model, model.active)
    if tied:
        untie(model)
    merge_trained(model, model.active)
    for _, linear in linears(model):
        if linear.active is not None and linear.merged is None:
            weight, bias = linear.weight, linear.bias
            linear.merged = (linear.active, weight.detach().to("cpu", copy=True))
            linear.bias_before = None if bias is None else bias.detach().to("cpu", copy=True)
            weight.copy_(merged_weight(weight.detach(), linear, linear.active))
            if bias is not None and (anew := merged_bias(bias.detach(), linear, linear.active)) is not None:
                bias.copy_(anew)
    if tied and model.adapters[model.active].tied:
        model.lm_head.weight = model.model.embed_tokens.weight  # the same values


@torch.no_grad()
def unmerge(model: Model) -> None:
    """Undo :func:`merge`, to the bit.  Does nothing to a model that is not merged."""
    for _, module in weighted(model):
        if module.merged is not None:
            module.weight.copy_(module.merged[1])
            if module.bias_before is not None:
                bias_in(module).copy_(module.bias_before)
            module.merged = module.bias_before = None
    if model.untied:
        model.untied = False
        model.tie()


def combine_adapters(model: Model, weights: Mapping[str, float], name: str = "combined") -> None:
    """Make one adapter of several and make it the active one: its update of every weight is Σ weight · scale · B·A.

    weights: of adapters by name, any numbers.  The new one has the matrices side by side, so that nothing is lost: its
    rank is the sum of theirs, projection by projection, its scale 1 and its dropout 0; the others stay as they are.

    Raises ValueError for names that the model does not have, and for adapters that do not add up: with DoRA, with
    biases in the place of the base's, with tables or copies of modules, or made to correct quantised weights
    (``init="loftq"``).
    """
    wrong = [f"there is no adapter {each!r}" for each in weights if each not in model.adapters]
    wrong += [f"the weight of {each!r} is {w!r}" for each, w in weights.items() if not _finite(w)]
    for each in set(weights) & set(model.adapters):
        lora: Lora = model.adapters[each]
        kinds = {"DoRA": lora.dora, "biases of the base's": lora.bias != "none", "init='loftq'": lora.init == "loftq"}
        kinds |= {"tables or copies": beyond_projections(lora)}
        wrong += [f"{each!r} has {kind}, which does not add up" for kind, there in kinds.items() if there]
    if wrong or not weights:
        have = ", ".join(model.adapters) or "none"
        raise ValueError(f"combine_adapters: {'; '.join(wrong) or 'no adapter is named'}; the model has {have}.")
    check_new(model, name, "combine_adapters")
    biased = any(model.adapters[each].lora_bias for each in weights)
    parts = list(_side_by_side(model, weights, biased))
    ranks = {path: len(part["a"]) for path, _, part in parts}
    r = max(ranks.values())
    fewer = {path: rank for path, rank in ranks.items() if rank != r}
    combined = Lora(r, r, list(ranks), 0.0, False, None, list(ranks), None, fewer, dict(fewer), lora_bias=biased)
    attach(model, name, combined, parts)


def _finite(weight: Any) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)


def _side_by_side(
    model: Model, weights: Mapping[str, float], biased: bool
) -> Iterator[tuple[str, Linear, dict[str, Any]]]:
    """What :func:`lorarun.lora.attach` takes, for each projection that one of the adapters has."""
    for path, linear in linears(model):
        own = {each: linear.parts(each) for each in weights if each in linear.adapters}
        if not own:
            continue
        scales = {each: weights[each] * linear.adapters[each].scale for each in own}
        dtype = max((parts["b"].dtype for parts in own.values()), key=lambda dtype: dtype.itemsize)
        part = {
            "a": torch.cat([parts["a"].detach().to(dtype) for parts in own.values()]),
            "b": torch.cat([scales[each] * parts["b"].detach().to(dtype) for each, parts in own.items()], dim=1),
        }
        if biased:
            terms = (
                scales[each] * parts["b_bias"].detach().to(dtype) for each, parts in own.items() if "b_bias" in parts
            )
            part["b_bias"] = sum(terms, part["b"].new_zeros(len(part["b"])))
        yield path, linear, part
