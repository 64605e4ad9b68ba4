"""Projections that share an input, and the gated MLP: where frozen weights and adapters meet.

The seam between a family file and how its matrix products run.  ``q_proj``, ``k_proj`` and ``v_proj`` stay three
modules; that they belong together is said by the call.  The specification is each ``Linear`` in turn, and that is
what runs on a CPU. On a GPU one hand-written Function runs them as one: one product for frozen weights that lie side
by side, one path for all adapters, and a backward that keeps the input and little else.

What autograd keeps: for ``project`` x and u (a few columns), for ``gated_mlp`` h, both products gate|up without their
adapters' terms, and u.  Activations and adapter terms are computed again on the way back; frozen weights are never
kept.  A block's policy (:mod:`lorarun.recompute`) can have less kept, and the MLP's rows taken in tiles.

DoRA scales the columns of a product, and its gradient needs them as they were before: they are kept, too.  Learned
biases are added by autograd.  An MLP with one of these runs as project, activation, project, whole and with gate and up
kept.

A ``Linear`` that somebody subclassed, hooked or trains takes the separate path through its own ``forward``; the
reason is given by :func:`obstacle`, which the report shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lorarun.frozen import Frozen, side_by_side
from lorarun.kernels.backend import autocast, runs_triton
from lorarun.kernels.dropout import Dropout
from lorarun.kernels.gated import adapted_backward, adapted_forward, gated
from lorarun.kernels.lora import Branch, lora_down, lora_grad, lora_input_grad, lora_up_, serves
from lorarun.kernels.replay import decide, frame, keep
from lorarun.kernels.rescale import columns, rescale_backward, rescale_forward
from lorarun.linear import Linear, few_projected
from lorarun.nn import untouched
from lorarun.quant.store import Store


def obstacle(linears: Sequence[Linear], dtype: torch.dtype) -> str | None:
    """Why these projections cannot run as one on inputs of ``dtype``; None when they can."""
    if not all(untouched(linear) for linear in linears):
        return "a projection is hooked or replaced"
    if any(linear.mixed is not None for linear in linears):
        return "rows of the batch have adapters of their own"
    copied = any(linear.trained is not None and linear.merged is None for linear in linears)
    if copied or any(p is not None and p.requires_grad for m in linears for p in (m.weight, m.bias)):
        return "a base weight is trained"
    dense = {str(linear.weight.dtype) for linear in linears if not isinstance(linear.weight, Store)}
    if dtype == torch.float64 or dense - {str(dtype)}:
        return f"inputs are {dtype}, weights {', '.join(sorted(dense)) or 'stored'}"
    running = [linear.running() for linear in linears]
    if len({each.drop for each in running if each.branch.rank}) > 1:
        return "adapters of one input differ in dropout"
    if any(each.magnitude is not None and each.drop is not None for each in running):
        return "DoRA with dropout multiplies by the weight twice"
    return None


def _fused(x: Tensor, linears: Sequence[Linear]) -> tuple[list[Branch], Dropout | None] | None:
    """The adapters and their dropout if one Function serves these projections, else None."""
    if not runs_triton(x) or autocast(x.device) or obstacle(linears, x.dtype) is not None:
        return None
    running = [linear.running() for linear in linears]
    branches = [each.branch for each in running]
    drop = next((each.drop for each in running if each.branch.rank), None)
    flat = x.flatten(0, -2)
    return (branches, drop) if not any(b.rank for b in branches) or serves(flat, branches, drop) else None


def _rows(x: Tensor) -> Tensor:
    """x [..., in] as [rows, in] with unit stride in a row, as kernels read it."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _in_fp8(x: Tensor, linears: Sequence[Linear]) -> Frozen | None:
    """The frozen product where FP8 serves it although one Function does not serve the adapters; else None."""
    if autocast(x.device) or obstacle(linears, x.dtype) is not None:
        return None
    frozen = Frozen(linears)
    return None if frozen.scaled is None else frozen


def _rejoin(branches: Sequence[Branch], factors: Sequence[Tensor | None]) -> list[Branch]:
    """Branches with the matrices that came back from autograd: A and B of each in turn."""
    return [
        Branch(branch.size, a, b, branch.scale)
        for branch, a, b in zip(branches, factors[::2], factors[1::2], strict=True)
    ]


def _factors(branches: Sequence[Branch]) -> list[Tensor | None]:
    return [matrix for branch in branches for matrix in (branch.a, branch.b)]


def _cast(grads: Sequence[Tensor | None], like: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients in the dtype of their masters (they are fp32, as masters are by default)."""
    return [None if g is None or t is None else g.contiguous().to(t.dtype) for g, t in zip(grads, like, strict=True)]


class _Project(torch.autograd.Function):
    """Saves x (unless every A is frozen) and u.  Backward: dx = dy·W + the adapters' part; dA and dB in one pass over x
    and one over dy.  With magnitudes [size] the outputs are z · magnitude / length + shift, and z is saved as well, and
    the lengths and their quotients [Σ sizes].

    Replayed, the outputs are those of the first time if the block's policy kept ``name``.
    """

    @staticmethod
    def forward(
        ctx: Any, frozen: Frozen, branches: list[Branch], drop: Dropout | None, name: str, x: Tensor,
        shift: Tensor | None, *learned: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        factors, magnitudes = learned[: 2 * len(branches)], learned[2 * len(branches) :]
        branches = _rejoin(branches, factors)
        u = lora_down(x, branches, drop) if any(branch.rank for branch in branches) else None
        norms = scales = whole = None
        if any(magnitude is not None for magnitude in magnitudes):
            norms, scales, whole = frozen.scales(branches, magnitudes, x.dtype)

        def products() -> Tensor:
            nonlocal whole
            y, whole = frozen.mm(x, whole), None
            return y if u is None else lora_up_(y, u, branches)

        y = z = keep(name, products)
        if scales is not None:
            y = rescale_forward(z, scales, shift)
        ctx.frozen, ctx.drop = frozen, drop
        ctx.shapes = [Branch(branch.size, scale=branch.scale) for branch in branches]
        ctx.magnitudes = [None if magnitude is None else magnitude.dtype for magnitude in magnitudes]
        needs_x = any(ctx.needs_input_grad[6 : 6 + len(factors) : 2])
        ctx.save_for_backward(x if needs_x else None, u, None if scales is None else z, norms, scales, *factors)
        return tuple(y.split(frozen.sizes, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x, u, z, norms, scales, *factors = ctx.saved_tensors
        dy = side_by_side(dys)
        grads: list[Tensor | None] = [None] * len(factors)
        dmagnitudes: list[Tensor | None] = [None] * len(ctx.magnitudes)
        dshift = None
        if z is not None:
            dy, dm, dshift = rescale_backward(dy, z, scales, norms, ctx.needs_input_grad[5])
            pairs = zip(dm.split(ctx.frozen.sizes), ctx.magnitudes, strict=True)
            dmagnitudes = [None if dtype is None else part.to(dtype) for part, dtype in pairs]
        dx, needs_dx = None, ctx.needs_input_grad[4]
        if u is not None:
            branches = _rejoin(ctx.shapes, factors)
            du, grads[1::2] = lora_grad(dy, u, branches)
            dx, grads[::2] = lora_input_grad(x, du, branches, ctx.drop, needs_dx)
        if needs_dx:
            dx = ctx.frozen.mm_t(dy, dx)
        return None, None, None, None, dx, dshift, *_cast(grads, factors), *dmagnitudes


class _Product(torch.autograd.Function):
    """The frozen product alone, in FP8, for adapters that the kernels do not serve.  Saves nothing."""

    @staticmethod
    def forward(ctx: Any, frozen: Frozen, x: Tensor) -> tuple[Tensor, ...]:
        ctx.frozen = frozen
        return frozen.mm(x).split(frozen.sizes, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[None, Tensor | None]:
        return None, ctx.frozen.mm_t(side_by_side(dys)) if ctx.needs_input_grad[1] else None


def _in_tiles(
    rows: int, tile: int | None, make: Callable[[slice], tuple[Tensor | None, ...]]
) -> tuple[Tensor | None, ...]:
    """make(part), row by row tensors, for parts of ``tile`` rows one after the other; the whole of each tensor."""
    if tile is None:
        return make(slice(0, rows))
    made: tuple[Tensor | None, ...] = ()
    for start in range(0, rows, tile):
        part = slice(start, min(start + tile, rows))
        pieces = make(part)
        made = made or tuple(None if p is None else p.new_empty(rows, p.shape[1]) for p in pieces)
        for whole, piece in zip(made, pieces, strict=True):
            if whole is not None and piece is not None:
                whole[part] = piece
    return made


def _add(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None else total if more is None else total.add_(more)


class _GatedMLP(torch.autograd.Function):
    """Saves h, both u, and where ``save`` says so gate|up without their adapters' terms (then, where A is frozen, no
    h); the rest is computed again.

    In tiles of ``tile`` rows gate|up, their activation and the gradients of these never exist whole; gradients of A
    and B are summed over tiles in fp32, first to last.
    """

    @staticmethod
    def forward(
        ctx: Any, frozen: tuple[Frozen, Frozen], branches: list[Branch], drops: tuple[Dropout | None, Dropout | None],
        act: str, save: bool, tile: int | None, h: Tensor, residual: Tensor | None, *factors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        gate, up, down = branches = _rejoin(branches, factors)
        u = lora_down(h, [gate, up], drops[0]) if gate.rank or up.rank else None
        tile = None if tile is None or tile >= len(h) else tile
        save = save and tile is None
        y = gu = None

        def products() -> tuple[Tensor | None, ...]:
            wide, narrow = (None if tile is None else f.whole(h.dtype) for f in frozen)

            def make(part: slice) -> tuple[Tensor | None, ...]:
                nonlocal gu
                both = frozen[0].mm(h[part], wide)
                gu = both if save else None
                a = adapted_forward(both, None if u is None else u[part], gate, up, act)
                del both
                y, u_down = frozen[1].mm(a, narrow), None
                rest = None if residual is None else residual[part]
                if down.rank:
                    u_down = lora_down(a, [down], _from_row(drops[1], part.start))
                    lora_up_(y, u_down, [down], rest)
                elif rest is not None:
                    y += rest
                return y, u_down

            return _in_tiles(len(h), tile, make)

        if residual is None:
            y, u_down = keep("down_proj", products)
        else:  # the block ends here, so a replay needs no y

            def closing() -> Tensor | None:
                nonlocal y
                y, u_down = products()
                return u_down

            u_down = keep("mlp", closing)
            if y is None:
                y = h.new_full((1, 1), float("nan")).expand(residual.shape)
        ctx.frozen, ctx.drops, ctx.act, ctx.tile = frozen, drops, act, tile
        ctx.shapes = [Branch(branch.size, scale=branch.scale) for branch in branches]
        needs_h = gu is None or any(ctx.needs_input_grad[8:11:2])
        ctx.save_for_backward(h if needs_h else None, gu, u, u_down, *factors)
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        h, gu, u, u_down, *factors = ctx.saved_tensors
        gate, up, down = _rejoin(ctx.shapes, factors)
        grads: list[Tensor | None] = [None] * 6
        rows = dy.contiguous()
        du_down = None
        if u_down is not None:
            du_down, (grads[5],) = lora_grad(rows, u_down, [down])
        wide, narrow = (None if ctx.tile is None else f.whole(dy.dtype) for f in ctx.frozen)
        needs_dh = ctx.needs_input_grad[6]

        def make(part: slice) -> tuple[Tensor | None, ...]:
            both = ctx.frozen[0].mm(h[part], wide) if gu is None else gu[part]
            dgu, da_down = adapted_backward(
                ctx.frozen[1].mm_t(rows[part], whole=narrow), both, None if u is None else u[part], gate, up, ctx.act,
                None if du_down is None else du_down[part], down, _from_row(ctx.drops[1], part.start),
            )  # fmt: skip
            del both
            grads[4] = _add(grads[4], da_down)
            dh = None
            if u is not None:
                du, dbs = lora_grad(dgu, u[part], [gate, up])
                x = None if h is None else h[part]
                dh, das = lora_input_grad(x, du, [gate, up], _from_row(ctx.drops[0], part.start), needs_dh)
                grads[0:4:2], grads[1:4:2] = map(_add, grads[0:4:2], das), map(_add, grads[1:4:2], dbs)
            return (ctx.frozen[0].mm_t(dgu, dh, wide) if needs_dh else None,)

        (dh,) = _in_tiles(len(dy), ctx.tile, make)
        dresidual = dy if ctx.needs_input_grad[7] else None
        return None, None, None, None, None, None, dh, dresidual, *_cast(grads, factors)


def _from_row(drop: Dropout | None, row: int) -> Dropout | None:
    """The dropout of an input's rows from this one on."""
    return None if drop is None else drop._replace(row=row)


def project(x: Tensor, *linears: Linear, name: str = "") -> tuple[Tensor, ...]:
    """The outputs [batch, seq, out] of projections of one input x [batch, seq, in], adapters included.

    Under the fused path the outputs are columns of one buffer.  Gradients of A and B arrive in their own dtype.
    ``name`` is what a block's policy may keep them under (:func:`lorarun.kernels.replay.keep`).
    """
    served = _fused(x, linears)
    if served is None:
        if linears[0].scaled is not None and (frozen := _in_fp8(x, linears)) is not None:
            ys = _Product.apply(frozen, x.flatten(0, -2))
            return tuple(linear.adapt(y.unflatten(0, x.shape[:-1]), x) for linear, y in zip(linears, ys, strict=True))
        return tuple(linear(x) for linear in linears)
    branches, drop = served
    frozen, running = Frozen(linears), [linear.running() for linear in linears]
    magnitudes = [each.magnitude for each in running]
    shifts = [linear.shift(each) for linear, each in zip(linears, running, strict=True)]
    scaled = any(magnitude is not None for magnitude in magnitudes)
    shift = columns(shifts, frozen.sizes) if scaled else None
    few = few_projected(_rows(x), linears, branches) if drop is None else None
    if few is None:
        ys = _Project.apply(frozen, branches, drop, name, _rows(x), shift, *_factors(branches), *magnitudes)
    else:
        if scaled:
            few = rescale_forward(few, frozen.scales(branches, magnitudes, x.dtype)[1], shift)
        ys = few.split(frozen.sizes, dim=1)
    ys = tuple(y.unflatten(0, x.shape[:-1]) for y in ys)
    return tuple(y if scaled or b is None else y + b.to(y.dtype) for y, b in zip(ys, shifts, strict=True))


def gated_mlp(h: Tensor, gate: Linear, up: Linear, down: Linear, act: str, residual: Tensor | None = None) -> Tensor:
    """down(act(gate(h)) · up(h)), plus ``residual`` where this closes a block.  h, residual [batch, seq, hidden]."""
    opened, closed = _fused(h, (gate, up)), _fused(h, (down,))
    if opened is None or closed is None or any(linear.running().after for linear in (gate, up, down)):
        raw_gate, raw_up = project(h, gate, up)
        middle = gated(raw_gate, raw_up, act)
        (y,) = project(middle, down)
        return y if residual is None else residual + y
    branches = [*opened[0], *closed[0]]
    rest = None if residual is None else _rows(residual)
    if opened[1] is None and closed[1] is None:
        made = few_projected(_rows(h), (gate, up), opened[0], act=act)
        if made is not None and (done := few_projected(made, (down,), closed[0], rest)) is not None:
            return done.unflatten(0, h.shape[:-1])
    save, tile = decide((gate, "products"), lambda: (frame().save_products, frame().tile))
    out = _GatedMLP.apply(
        (Frozen((gate, up)), Frozen((down,))), branches, (opened[1], closed[1]), act,
        save, tile, _rows(h), rest, *_factors(branches),
    )  # fmt: skip
    return out.unflatten(0, h.shape[:-1])
