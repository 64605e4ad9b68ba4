"""The head and the cross-entropy in one operation, so that full logits never exist.

    z = cap(W·h),   loss = logsumexp(z) − z[target]

For a vocabulary of 128,256 the fp32 logits of 8,192 tokens are 4 GiB, more than an NF4 model of 8 billion weights.
Rows are taken in chunks instead.  The gradient of a row's loss with respect to its own hidden state needs only that
row, so it is made on the way forward, while the chunk's logits are there, and scaled by the upstream gradient on the
way back: two products with the head, not three.  A trained head cannot be served like that (its gradient sums rows
that are weighted by the upstream gradient) and recomputes the chunks on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
CHUNK_BYTES = 128 * 2**20  # of fp32 logits in one chunk


def _logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    """Capped logits [rows, vocab] in fp32 (fp64 for fp64 input)."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    z = torch.nn.functional.linear(hidden, weight).to(wide)
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _gradient(z: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """d loss / d raw logits, [rows, vocab]; rows without a target are zero."""
    grad = z.softmax(dim=-1)
    rows = torch.arange(len(targets), device=z.device)
    grad[rows, targets.clamp(min=0)] -= 1.0
    if softcap is not None:
        grad *= 1.0 - (z / softcap).square()
    return grad * (targets != IGNORE).unsqueeze(-1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
        ctx.weight_dtype, weight = weight.dtype, weight.to(hidden.dtype)
        rows = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
        losses = torch.zeros(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            z = _logits(hidden[part], weight, softcap)
            target = targets[part]
            picked = z.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
            losses[part] = torch.where(target != IGNORE, z.logsumexp(dim=-1) - picked, 0.0)
            if dhidden is not None:
                grad = _gradient(z, target, softcap).to(hidden.dtype)
                dhidden[part] = grad @ weight
        ctx.softcap, ctx.rows = softcap, rows
        ctx.save_for_backward(dhidden, *((hidden, weight, targets) if ctx.needs_input_grad[1] else ()))
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dhidden, *rest = ctx.saved_tensors
        if dhidden is not None:
            dhidden = (dhidden * upstream.unsqueeze(-1)).to(dhidden.dtype)
        dweight = None
        if rest:
            hidden, weight, targets = rest
            dweight = torch.zeros_like(weight, dtype=upstream.dtype)
            for at in range(0, len(hidden), ctx.rows):
                part = slice(at, at + ctx.rows)
                grad = _gradient(_logits(hidden[part], weight, ctx.softcap), targets[part], ctx.softcap)
                grad = (grad * upstream[part].unsqueeze(-1)).to(hidden.dtype)
                dweight += grad.T @ hidden[part]
            dweight = dweight.to(ctx.weight_dtype)
        return dhidden, dweight, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    """The loss of each row, without ever holding the logits of all rows.

    hidden [rows, dim]; weight [vocab, dim]; targets [rows] int64, −100 for a row without a target (its loss and
    gradient are exactly 0); softcap caps the logits as Gemma 2 does.  Returns [rows] in fp32 (fp64 for fp64 input).
    """
    losses: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, softcap)  # type: ignore[no-untyped-call]
    return losses
