"""The gated activation of an MLP: act(gate) · up  (Shazeer 2020, arXiv:2002.05202: SwiGLU and GeGLU).

Three activations occur in the families here.  ``gelu_pytorch_tanh`` is the tanh approximation that Gemma was trained
with; ``gelu`` is the exact one.  They differ by up to 5e-4, so a name is never replaced by another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": _gelu_tanh}


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) · up, elementwise, for two tensors of one shape and dtype; ``act`` is a name of :data:`ACTIVATIONS`.

    torch computes a 16-bit activation in fp32 and rounds it once, before the product.
    """
    return ACTIVATIONS[act](gate) * up
