"""Frozen weights of projections that share an input as one product, and gradients of their outputs as one matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lorarun.kernels.lora import Branch
from lorarun.kernels.replay import decide
from lorarun.kernels.row_norms import row_scales
from lorarun.kernels.scaled import quantize_rows, scaled_mm
from lorarun.linear import Linear, biases_beside
from lorarun.quant.store import Store, dense_side_by_side, dequantize


class Frozen:
    """The frozen weights and biases of projections that share an input, as one product.

    ``sizes`` are the rows of each output.  Stored weights are dequantised side by side into one buffer that lives for
    the product alone (or stays, with ``model.keep_dense``); dense ones are multiplied one by one into the columns of
    one result, without copies.  With FP8 copies, made for just these projections by :mod:`lorarun.compute`, products
    run on those.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = linears
        self.weights = [linear.weight for linear in linears]
        self.versions = self._versions()
        self.biases = biases_beside(linears)
        self.sizes = [linear.out_features for linear in linears]
        self.stored = any(isinstance(weight, Store) for weight in self.weights)
        scaled = linears[0].scaled
        alike = all(linear.scaled is scaled and linear.merged is None for linear in linears)
        covered = scaled is not None and len(scaled.forward.codes) == sum(self.sizes)
        self.scaled = scaled if alike and covered else None

    def _versions(self) -> list[int]:
        """Of dense weights, which autograd would look after if it had them; those made under torch.inference_mode have
        none."""
        return [w._version for w in self.weights if not isinstance(w, Store) and not w.is_inference()]

    def whole(self, dtype: torch.dtype) -> Tensor | None:
        """Stored weights dequantised [Σ sizes, in], for several products in a row; None for dense ones."""
        return dense_side_by_side(self.weights, dtype) if self.stored and self.scaled is None else None

    def scales(
        self, branches: Sequence[Branch], magnitudes: Sequence[Tensor | None], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """DoRA's lengths and scales [Σ sizes], once in a pass through the model, and :meth:`whole` where that was made
        for them."""
        whole = None

        def measure() -> tuple[Tensor, Tensor]:
            nonlocal whole
            whole = self.whole(dtype)
            dense = [dequantize(w, dtype) for w in self.weights] if whole is None else whole.split(self.sizes)
            squares = [
                None if magnitude is None else linear.norms.squares(linear.weight, part)
                for linear, part, magnitude in zip(self.linears, dense, magnitudes, strict=True)
            ]
            return row_scales(dense, branches, squares, magnitudes)

        given = *(matrix for branch in branches for matrix in (branch.a, branch.b)), *magnitudes
        hold = self.linears[0].norms.hold
        norms, scales = decide(("scales", *self.linears), lambda: hold(given, measure))
        return norms, scales, whole

    def mm(self, x: Tensor, whole: Tensor | None = None) -> Tensor:
        """x [rows, in] → [rows, Σ sizes], biases added."""
        if self.stored or self.scaled is not None:
            bias = None
            if any(b is not None for b in self.biases):
                zero = [x.new_zeros(size) if b is None else b for b, size in zip(self.biases, self.sizes, strict=True)]
                bias = torch.cat(zero).to(x.dtype)
            if self.scaled is not None:
                return scaled_mm(quantize_rows(x), self.scaled.forward, x.dtype, bias, fast=True)
            return F.linear(x, dense_side_by_side(self.weights, x.dtype) if whole is None else whole, bias)
        y = torch.empty((len(x), sum(self.sizes)), dtype=x.dtype, device=x.device)
        for part, weight, bias in zip(y.split(self.sizes, dim=1), self.weights, self.biases, strict=True):
            if bias is None:
                torch.mm(x, weight.T, out=part)
            else:
                torch.addmm(bias, x, weight.T, out=part)
        return y

    def mm_t(self, dy: Tensor, dx: Tensor | None = None, whole: Tensor | None = None) -> Tensor:
        """dy [rows, Σ sizes] → the gradient of x, [rows, in]; added to ``dx`` in place where it is given."""
        if self._versions() != self.versions:
            raise RuntimeError(
                "backward: a weight has changed since the loss was computed (merge and unmerge do that); compute the "
                "loss again, or call backward before the change."
            )
        if self.scaled is not None:
            product = scaled_mm(quantize_rows(dy), self.scaled.backward, dy.dtype)
            return product if dx is None else dx.add_(product)
        if self.stored:
            pairs = [(dy, dense_side_by_side(self.weights, dy.dtype) if whole is None else whole)]
        else:
            pairs = list(zip(dy.split(self.sizes, dim=1), self.weights, strict=True))
        for part, weight in pairs:
            dx = torch.mm(part, weight) if dx is None else dx.addmm_(part, weight)
        assert dx is not None
        return dx


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Gradients [rows, size] of several outputs as one matrix: without a copy where they already lie in one."""
    first = parts[0]
    if len(parts) == 1:
        return first.contiguous()
    at, width = first.storage_offset(), sum(part.shape[1] for part in parts)
    for part in parts:
        adjacent = part.untyped_storage()._cdata == first.untyped_storage()._cdata  # also on meta, where pointers are 0
        if not adjacent or part.storage_offset() != at or part.stride() != (width, 1):
            return torch.cat(tuple(parts), dim=1)
        at += part.shape[1]
    return first.as_strided((len(first), width), (width, 1))
