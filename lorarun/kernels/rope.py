"""Rotary position embedding of queries and keys, with the per-head norm that some families put before it.

    (x₁, x₂) → (x₁·cos − x₂·sin, x₂·cos + x₁·sin)      (Su et al. 2021, arXiv:2104.09864, eq. 34)

where x₁ and x₂ are the halves of a head (Hugging Face's layout, not the interleaved one of the paper).  Angles and
products are fp32 and rounded once, which is closer to exact than the usual way of rounding the tables to 16 bits
first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorarun.kernels.rms_norm import rms_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, seq, heads, head_dim] by tables [batch, seq, head_dim / 2] (batch may be 1), in fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x1, x2 = x.to(wide).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [batch, seq, 1, head_dim / 2]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise the heads of q and k where weights are given, then rotate them.

    q [batch, seq, heads, head_dim], k [batch, seq, kv_heads, head_dim]; cos, sin [batch or 1, seq, head_dim / 2]
    fp32; q_weight, k_weight [head_dim] are the scales of an RMSNorm over each head.  Returns both in their own dtype
    and shape.
    """
    if q_weight is not None and k_weight is not None:
        q, k = (rms_norm(q, q_weight, eps, plus_one), rms_norm(k, k_weight, eps, plus_one))
    return rotate(q, cos, sin), rotate(k, cos, sin)
