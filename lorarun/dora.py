"""The length of each row of W + s·B·A, which DoRA divides by, without ever making that sum.

    ‖w + s·b·A‖² = ‖w‖² + 2s·(W·Aᵀ)·b + s²·b·(A·Aᵀ)·b              for a row w of W and its row b of B

(Liu et al. 2024, arXiv:2402.09353, section 4.3, where the length is a constant to the gradient.)  The usual way adds
B·A to a copy of W and takes the norm of that: three passes over weights that a projection's own product reads once.
Here W is read once, for a product as narrow as the rank; ‖w‖² is a constant and computed once.  Where the update almost
cancels the weight the terms cancel too, and a length has an absolute error of 2⁻¹² ‖w‖ in fp32: no adapter gets there.

Lengths change with every step of an optimizer, and with every edit of A and B, which nothing announces.  So they
belong to one pass through the model; only while answers are generated they are held on to (:func:`held`), since each
token would read every weight twice otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lorarun.kernels.backend import autocast
from lorarun.quant.store import Store, dequantize


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float, squares: Tensor | None = None) -> Tensor:
    """‖W + scale·B·A‖ of each row, [out], in fp32 (fp64 for a weight of that).

    weight [out, in] dense, a [rank, in], b [out, rank].  W·Aᵀ is taken in the dtype of ``weight`` with A cast to it, as
    the adapter's own product does.  squares [out]: ‖w‖², where it is known.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    on = autocast(weight.device)
    with torch.autocast(weight.device.type, enabled=False) if on else nullcontext():
        if squares is None:
            squares = row_squares(weight)
        a = a.to(weight.dtype)
        if weight.dtype != wide and weight.is_cuda:
            along = torch.mm(weight, a.T, out_dtype=wide)
        else:
            along = (weight @ a.T).to(wide)  # [out, rank]
        a, b = a.to(wide), b.to(wide) * scale
        total = squares + ((2 * along + b @ (a @ a.T)) * b).sum(1)
        return total.clamp_min_(torch.finfo(wide).tiny).sqrt_()  # a row of zeros has a length to divide by


@torch.no_grad()
def row_squares(weight: Tensor) -> Tensor:
    """‖w‖² of each row, [out], in fp32 or fp64."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32)).square()


class Norms:
    """:func:`row_norms` of one projection's weight, dense or a store.  ‖w‖² is kept, until the weight is another.

    Copies and pickles start empty.
    """

    def __init__(self) -> None:
        self.squares: tuple[Any, Tensor] | None = None  # and the weight that they are of
        self.holds = False
        self.last: tuple[Tensor, Tensor, Tensor] | None = None  # A, B and the lengths with them, while it holds

    def __reduce__(self) -> Any:
        return Norms, ()

    @torch.no_grad()
    def __call__(self, weight: Tensor | Store, dtype: torch.dtype, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """dtype: what a store is dequantised to."""
        if self.last is not None and self.last[0] is a and self.last[1] is b:
            return self.last[2]
        dense = dequantize(weight, dtype) if isinstance(weight, Store) else weight
        if torch.compiler.is_compiling():
            return row_norms(dense, a, b, scale)
        held = weight.codes if isinstance(weight, Store) else weight
        of = held.data_ptr(), held._version, str(held.device)
        if self.squares is None or self.squares[0] != of:
            self.squares = of, row_squares(dense)
        norms = row_norms(dense, a, b, scale, self.squares[1])
        if self.holds:
            self.last = a, b, norms
        return norms


@contextmanager
def held(norms: Sequence[Norms]) -> Iterator[None]:
    """Hold on to lengths inside a ``with`` block, in which no adapter changes."""
    for each in norms:
        each.holds = True
    try:
        yield
    finally:
        for each in norms:
            each.holds, each.last = False, None
