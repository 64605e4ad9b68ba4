"""In which precision the frozen products run: bf16, or FP8 on its tensor cores, which are about 1.7 times as fast.

FP8 is a choice of the user (``compute="fp8"``): it changes what is computed, by about a sixteenth of a gradient in
random directions.  An adapter trained that way is an ordinary adapter and is best run in bf16.  Only products with
frozen weights change, forward and for the gradient of their input; adapters, norms, attention, head and loss stay as
they are, and nothing is merged.

The copies (:mod:`lorarun.kernels.scaled`, two bytes a weight) are made once.  They do not follow a weight that somebody
edits or moves to another device afterwards: call :func:`use_fp8` again then.  A merged adapter is served in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lorarun.kernels.scaled import MULTIPLE, scale_weight, unavailable
from lorarun.linear import INPUTS
from lorarun.nn import Linear, Model
from lorarun.quant.store import Store, dequantize_side_by_side


def groups(model: Model) -> Iterator[dict[str, Linear]]:
    """The projections of every block by their full names, those that share an input together."""
    for i, block in enumerate(model.model.layers):
        for part, *names in INPUTS:
            yield {f"model.layers.{i}.{part}.{name}": getattr(getattr(block, part), name) for name in names}


def _own(linear: Linear) -> Tensor | Store:
    """The weight without an adapter that is merged into it."""
    weight: Tensor | Store = linear.weight
    return weight if linear.merged is None else linear.merged[1].to(weight.device)


@torch.no_grad()
def use_fp8(model: Model) -> None:
    """Run the frozen products of ``model`` in FP8 from now on.

    Raises ValueError where the hardware has none, for activations that are not bf16, and for projections whose sizes
    the tensor cores do not take.
    """
    if reason := unavailable(model.device):
        raise ValueError(
            f'compute="fp8": {reason}; expected an NVIDIA GPU of compute capability 8.9 or newer (Ada, Hopper, '
            'Blackwell). Use compute="bf16".'
        )
    if model.device.type == "cuda" and model.dtype != torch.bfloat16:
        raise ValueError(f'compute="fp8": the model runs in {model.dtype}; load it with dtype=torch.bfloat16.')
    found = list(groups(model))
    odd = [
        f"{name} [{linear.out_features}, {linear.in_features}]"
        for group in found
        for name, linear in group.items()
        if linear.out_features % MULTIPLE or linear.in_features % MULTIPLE
    ]
    if odd:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise ValueError(
            f'compute="fp8": FP8 tensor cores take weights [out, in] with multiples of {MULTIPLE}, which '
            f'{", ".join(odd[:3])}{more} are not. Use compute="bf16".'
        )
    for group in found:
        weights = [_own(linear) for linear in group.values()]
        scaled = scale_weight(dequantize_side_by_side(weights, torch.float32))
        for linear in group.values():
            linear.scaled = scaled
    model.compute = "fp8"


def use(model: Model, compute: str) -> None:
    """Run the frozen products in "fp8" or "bf16" from now on; copies that there are stay."""
    if compute != model.compute:
        (use_fp8 if compute == "fp8" else use_bf16)(model)


def use_bf16(model: Model) -> None:
    """Run the frozen products of ``model`` in its own dtype again, and drop the FP8 copies."""
    for group in groups(model):
        for linear in group.values():
            linear.scaled = None
    model.compute = "bf16"
