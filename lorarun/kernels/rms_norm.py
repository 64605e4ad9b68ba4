"""Root-mean-square normalisation over the last dimension.

    y = x / sqrt(mean(x²) + eps) · w          (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)

Two conventions exist, and they differ in more than an offset.  Llama and Qwen round the normalised row to the input's
dtype before they multiply by ``w``; Gemma multiplies by ``1 + w`` in fp32 and rounds once, at the end.  Both are
followed to the bit, since a model was trained with one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Normalise the rows of ``x`` and scale them.

    x [..., dim] in any floating dtype, weight [dim].  Statistics are taken in fp32 (fp64 for fp64 input).
    ``plus_one`` selects Gemma's ``1 + w``.  Returns [..., dim] in the dtype of ``x`` (of ``weight`` where that is
    wider).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if plus_one:
        return (y * (1.0 + weight.to(wide))).to(x.dtype)
    return weight * y.to(x.dtype)
