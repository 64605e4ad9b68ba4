"""The head and the cross-entropy in one operation, so that full logits never exist.

    z = cap(scale · W·h),   loss = logsumexp(z) − (1 − ε) · z[target] − ε · mean(z)

with ε the label smoothing, 0 by default (Szegedy et al. 2016, arXiv:1512.00567, section 7).

For a vocabulary of 128,256 the fp32 logits of 8,192 tokens are 4 GiB, more than an NF4 model of 8 billion weights.
Rows are taken in chunks instead.  The gradient of a row's loss with respect to its own hidden state needs only that
row, so it is made on the way forward, while the chunk's logits are there, and scaled by the upstream gradient on the
way back: two products with the head, not three.  A trained head cannot be served like that (its gradient sums rows
that are weighted by the upstream gradient) and recomputes the chunks on the way back.

The kernel reads a row of logits twice, the second time from L2, and writes the gradient over it: 4 bytes an element of
device memory where the two products with the head cost 16 · dim operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorarun.kernels.backend import runs_triton, tl, triton

IGNORE = -100  # the target of a row that has none
CHUNK_BYTES = 512 * 2**20  # of one chunk's logits
BLOCK = 4096


def logits_reference(hidden: Tensor, weight: Tensor, softcap: float | None, scale: float) -> Tensor:
    """Capped logits [rows, vocab] in fp32 (fp64 for fp64 input)."""
    z = torch.nn.functional.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32)) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def gradient_reference(
    z: Tensor, targets: Tensor, softcap: float | None, scale: float, smoothing: float = 0.0
) -> Tensor:
    """d loss / d raw logits, [rows, vocab], from capped logits; rows without a target are zero."""
    grad = z.softmax(dim=-1)
    rows = torch.arange(len(targets), device=z.device)
    grad[rows, targets.clamp(min=0)] -= 1.0 - smoothing
    if smoothing:
        grad -= smoothing / z.shape[-1]
    if softcap is not None:
        grad *= 1.0 - (z / softcap).square()
    return grad * ((targets != IGNORE).unsqueeze(-1) * scale)


def loss_reference(z: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The loss of each row [rows] from capped logits; 0 without a target."""
    picked = z.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    if smoothing:
        picked = (1.0 - smoothing) * picked + smoothing * z.mean(dim=-1)
    return torch.where(targets != IGNORE, z.logsumexp(dim=-1) - picked, 0.0)


def hits_reference(z: Tensor, targets: Tensor) -> Tensor:
    """Whether each row's target is its highest logit, and of equal ones the first: [rows] bool; False without one."""
    place = targets.clamp(min=0).unsqueeze(1)
    picked = z.gather(1, place)
    earlier = torch.arange(z.shape[1], device=z.device) < place  # [rows, vocab]
    beaten = (z > picked) | (earlier & (z == picked))
    return (targets != IGNORE) & ~beaten.any(dim=1)


@triton.jit
def _capped(b_z, scale, cap, CAP: tl.constexpr):
    """cap · tanh(x) for x = scale · z / cap, and tanh's slope 1 − tanh²(x) = 4e / (1 + e)² for e = exp(−2|x|), fp32.

    The difference would lose the digits of a slope near 0, and what is above 1 / ε would overflow.
    """
    b_z = b_z.to(tl.float32) * scale
    b_s = 1.0
    if CAP:
        b_e = tl.exp(-2.0 * tl.abs(b_z / cap))
        b_t = cap * (1.0 - b_e) / (1.0 + b_e)
        b_z = tl.where(b_z < 0, -b_t, b_t)
        b_s = 4.0 * b_e / ((1.0 + b_e) * (1.0 + b_e))
    return b_z, b_s


@triton.jit
def _loss(
    p_z, p_target, p_loss, p_hit, vocab, scale, cap, smoothing, IGNORE: tl.constexpr, CAP: tl.constexpr,
    SMOOTH: tl.constexpr, HIT: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its loss, with HIT whether its target is the first of the highest logits, and with GRAD the gradient of
    its logits written over them."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_z + row * vocab
    target = tl.load(p_target + row)
    o_v = tl.arange(0, BLOCK)
    if target == IGNORE:
        tl.store(p_loss + row, 0.0)
        if HIT:
            tl.store(p_hit + row, 0)
        if GRAD:
            for at in range(0, vocab, BLOCK):
                tl.store(p_row + at + o_v, tl.zeros([BLOCK], p_z.dtype.element_ty), mask=at + o_v < vocab)
    else:
        top, total = -float("inf"), 0.0
        earlier, sum_z = -float("inf"), 0.0  # the highest before the target; all, for their mean
        for at in range(0, vocab, BLOCK):
            m_v = at + o_v < vocab
            b_z, _ = _capped(tl.load(p_row + at + o_v, mask=m_v, other=0.0), scale, cap, CAP)
            if SMOOTH:
                sum_z += tl.sum(b_z, axis=0)  # what lies beyond the vocabulary is 0, capped or not
            b_z = tl.where(m_v, b_z, -float("inf"))
            if HIT:
                earlier = tl.maximum(earlier, tl.max(tl.where(at + o_v < target, b_z, -float("inf")), axis=0))
            higher = tl.maximum(top, tl.max(b_z, axis=0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(b_z - higher), axis=0)
            top = higher
        lse = top + tl.log(total)
        picked, _ = _capped(tl.load(p_row + target), scale, cap, CAP)
        if HIT:
            tl.store(p_hit + row, ((picked > earlier) & (picked >= top)).to(tl.int8))
        if SMOOTH:
            tl.store(p_loss + row, lse - (1.0 - smoothing) * picked - smoothing * (sum_z / vocab))
        else:
            tl.store(p_loss + row, lse - picked)
        if GRAD:
            for at in range(0, vocab, BLOCK):
                m_v = at + o_v < vocab
                b_z, b_s = _capped(tl.load(p_row + at + o_v, mask=m_v, other=0.0), scale, cap, CAP)
                b_g = tl.exp(b_z - lse) - tl.where(at + o_v == target, 1.0 - smoothing, 0.0)
                if SMOOTH:
                    b_g -= smoothing / vocab
                b_g *= scale
                if CAP:
                    b_g *= b_s
                tl.store(p_row + at + o_v, b_g.to(p_z.dtype.element_ty), mask=m_v)


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, scale: float, smoothing: float,
    fused: bool, gradient: bool, hit: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Losses [rows], and with ``gradient`` d loss / d logits [rows, vocab] in the dtype of ``hidden``; hit [rows] bool
    is written to."""
    if not fused:
        z = logits_reference(hidden, weight, softcap, scale)
        if hit is not None:
            hit.copy_(hits_reference(z, targets))
        grad = gradient_reference(z, targets, softcap, scale, smoothing).to(hidden.dtype) if gradient else None
        return loss_reference(z, targets, smoothing), grad
    return _rows(torch.nn.functional.linear(hidden, weight), targets, softcap, scale, smoothing, gradient, hit)


def _rows(
    z: Tensor, targets: Tensor, softcap: float | None, scale: float, smoothing: float, gradient: bool,
    hit: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Losses [rows] of raw logits [rows, vocab], and with ``gradient`` theirs, in the same memory."""
    losses = torch.empty(len(z), dtype=torch.float32, device=z.device)
    _loss[(len(z),)](
        z, targets, losses, losses if hit is None else hit.view(torch.int8), z.shape[1], scale, softcap or 1.0,
        smoothing, IGNORE=IGNORE, CAP=softcap is not None, SMOOTH=smoothing > 0.0, HIT=hit is not None, GRAD=gradient,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return losses, z if gradient else None


def _plan(hidden: Tensor, weight: Tensor) -> tuple[bool, int]:
    """Whether the kernel serves these, and how many rows a chunk has."""
    fused = runs_triton(hidden) and hidden.dtype != torch.float64
    copies = 1 if fused else 4  # the reference holds logits, gradient and what lies between at once
    rows = max(1, CHUNK_BYTES // (copies * hidden.element_size() * weight.shape[0]))
    return fused, rows // 128 * 128 or rows  # whole tiles of the product


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves d hidden; for a trained head also hidden, weight and targets."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, scale: float, smoothing: float
    ) -> Tensor:
        ctx.weight_dtype, weight = weight.dtype, weight.to(hidden.dtype)
        fused, rows = _plan(hidden, weight)
        losses = torch.empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            losses[part], grad = _chunk(
                hidden[part], weight, targets[part], softcap, scale, smoothing, fused, gradient=dhidden is not None
            )
            if dhidden is not None and grad is not None:
                torch.mm(grad, weight, out=dhidden[part])
            del grad
        ctx.how, ctx.rows = (softcap, scale, smoothing, fused), rows
        ctx.save_for_backward(dhidden, *((hidden, weight, targets) if ctx.needs_input_grad[1] else ()))
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        dhidden, *rest = ctx.saved_tensors
        if dhidden is not None:
            dhidden = (dhidden * upstream.unsqueeze(-1)).to(dhidden.dtype)
        dweight = None
        if rest:
            hidden, weight, targets = rest
            dweight = torch.zeros_like(weight, dtype=upstream.dtype)
            softcap, scale, smoothing, fused = ctx.how
            for at in range(0, len(hidden), ctx.rows):
                part = slice(at, at + ctx.rows)
                _, grad = _chunk(hidden[part], weight, targets[part], softcap, scale, smoothing, fused, gradient=True)
                assert grad is not None
                dweight += (grad * upstream[part].unsqueeze(-1).to(grad.dtype)).T @ hidden[part]
                del grad
            dweight = dweight.to(ctx.weight_dtype)
        return dhidden, dweight, None, None, None, None


class _CrossEntropy(torch.autograd.Function):
    """Saves d logits, which a kernel writes over the logits."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, targets: Tensor, softcap: float | None, smoothing: float) -> tuple[Tensor, Tensor]:
        gradient = ctx.needs_input_grad[0]
        hit = torch.empty(len(z), dtype=torch.bool, device=z.device)
        if runs_triton(z) and z.dtype != torch.float64:
            losses, grad = _rows(z.contiguous(), targets, softcap, 1.0, smoothing, gradient, hit)
        else:
            wide = z.to(torch.promote_types(z.dtype, torch.float32))
            wide = wide if softcap is None else softcap * torch.tanh(wide / softcap)
            losses = loss_reference(wide, targets, smoothing)
            hit.copy_(hits_reference(wide, targets))
            grad = gradient_reference(wide, targets, softcap, 1.0, smoothing).to(z.dtype) if gradient else None
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(hit)
        return losses, hit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * upstream.unsqueeze(-1).to(grad.dtype), None, None, None


def cross_entropy(
    z: Tensor, targets: Tensor, softcap: float | None = None, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The loss of each row [rows] in fp32 (fp64 for fp64 input) from raw logits z [rows, vocab], as
    :func:`linear_cross_entropy`, and whether its target has the highest, as :func:`linear_scores`.

    z is used up: its memory may hold its gradient afterwards, so nothing else may need it.
    """
    return _CrossEntropy.apply(z, targets, softcap, smoothing)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None = None,
    scale: float = 1.0,
    smoothing: float = 0.0,
) -> Tensor:
    """The loss of each row, without ever holding the logits of all rows.

    hidden [rows, dim]; weight [vocab, dim]; targets [rows] int64, −100 for a row without a target (its loss and
    gradient are exactly 0); ``scale`` multiplies the logits, then ``softcap`` caps them as Gemma 2 does; ``smoothing``
    is ε, from 0 up to 1.  Returns [rows] in fp32 (fp64 for fp64 input).  Without gradients no gradient is made.  Extra
    memory: one chunk of logits in the dtype of ``hidden`` (512 MiB at the most).
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, softcap, scale, smoothing)


@torch.no_grad()
def linear_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """What :func:`linear_cross_entropy` gives, and whether greedy decoding would have chosen each target: [rows] bool.

    Of equal logits the first counts as the highest.  Nothing here can be differentiated.
    """
    weight = weight.to(hidden.dtype)
    fused, rows = _plan(hidden, weight)
    losses = torch.empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    hits = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
    for at in range(0, len(hidden), rows):
        part = slice(at, at + rows)
        losses[part], _ = _chunk(
            hidden[part], weight, targets[part], softcap, 1.0, 0.0, fused, gradient=False, hit=hits[part]
        )
    return losses, hits
