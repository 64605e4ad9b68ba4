"""Frozen weights in four or eight bits, in the place of a ``Linear``'s weight.

The usual way makes a quantised projection another class of layer, whose weight is a tensor subclass that packs itself
when it is moved.  Here the layer stays what it is and its weight is a *store*: a small module of frozen Parameters
(codes and scales) that can be dequantised into any dtype.  A store moves with the model, is copied, pickled and saved
like any module, and is never cast: ``model.to(torch.bfloat16)`` leaves its bits alone, since scales that were rounded
would be other weights.

Given up: a store cannot be trained or edited, and has no dtype of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lorarun.kernels.backend import version
from lorarun.kernels.fp8 import FP8, fp8_dequantize, fp8_quantize, fp8_quantize_blocks
from lorarun.kernels.nf4 import NESTED, NF4, check_block, nf4_dequantize, nf4_quantize


class Store(nn.Module):
    """What every store is.  ``shape`` is that of the weight, ``bits`` what a weight takes, scales included (about)."""

    requires_grad = False
    dtype = None  # whoever dequantises chooses one
    shape: torch.Size
    bits: float
    format: str  # in a word
    codes: nn.Parameter
    kept = False  # whether the weight may stay dequantised between its uses, see :func:`dense_side_by_side`
    dense: tuple[Any, Tensor] | None = None  # what it stays as, and from what that was made

    @classmethod
    def from_dense(cls, w: Tensor) -> Store:
        """Quantise ``w`` where it is.  Raises ValueError when it holds NaN or infinity (which waits for the device)."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def numel(self) -> int:
        """The number of weights."""
        return self.shape.numel()

    @property
    def kind(self) -> str:
        """The format in words."""
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The weight in ``dtype``, computed in fp32 and rounded once; into ``out``, contiguous, where it is given."""
        raise NotImplementedError

    def _hold(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            frozen = None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)
            self.register_parameter(name, frozen)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.dense = None

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "dense": None}  # a copy of the store makes its own

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.kind}"


class NF4Store(Store):
    """A weight in NF4, see :mod:`lorarun.kernels.nf4`; made from codes and scales as bitsandbytes writes them.

    codes: two a byte, ⌈n / 2⌉ bytes in any shape and dtype.  absmax: a scale for each block of ``block`` weights, fp32,
    or bytes with double quantisation; then nested_absmax fp32, a scale for each 256 of those, nested_map fp32 [256] and
    offset, one fp32 number.  Raises ValueError when they do not fit ``shape`` or each other.
    """

    format = "NF4"
    bits = 4.127  # 4 + 8 / 64 + 32 / (64 · 256)
    absmax: nn.Parameter
    nested_absmax: nn.Parameter | None
    nested_map: nn.Parameter | None
    offset: nn.Parameter | None

    def __init__(
        self,
        codes: Tensor,
        absmax: Tensor,
        nested_absmax: Tensor | None = None,
        nested_map: Tensor | None = None,
        offset: Tensor | None = None,
        *,
        shape: Sequence[int],
        block: int = 64,
    ) -> None:
        super().__init__()
        check_block(block)
        self.shape, self.block = torch.Size(shape), block
        blocks = -(-self.numel() // block)
        nested = (nested_absmax, nested_map, offset)
        double = any(tensor is not None for tensor in nested)
        expected: list[tuple[str, Tensor | None, torch.dtype, int]] = [
            ("codes", codes.detach().contiguous().view(-1).view(torch.uint8), torch.uint8, (self.numel() + 1) // 2),
            ("absmax", absmax, torch.uint8 if double else torch.float32, blocks),
        ]
        if double:
            sizes = (-(-blocks // NESTED), 256, 1)
            names = ("nested_absmax", "nested_map", "offset")
            expected += [(n, t, torch.float32, size) for n, t, size in zip(names, nested, sizes, strict=True)]
        wrong = [
            f"{name} is missing"
            if tensor is None
            else f"{name} has {tensor.numel()} elements of {tensor.dtype} instead of {size} of {dtype}"
            for name, tensor, dtype, size in expected
            if tensor is None or tensor.dtype != dtype or tensor.numel() != size
        ]
        if wrong:
            raise ValueError(f"NF4 weight {list(shape)} in blocks of {block}: {'; '.join(wrong)}.")
        held = {name: tensor.contiguous().view(-1) for name, tensor, _, _ in expected if tensor is not None}
        self._hold(**{"nested_absmax": None, "nested_map": None, "offset": None, **held})

    @classmethod
    def from_dense(cls, w: Tensor, block: int = 64, nested: bool = True) -> NF4Store:
        part = nf4_quantize(w, block, nested)
        _check_finite(part.absmax if part.offset is None else part.offset)
        return cls(*part, shape=w.shape, block=block)

    def part(self) -> NF4:
        """What the kernels take."""
        return NF4(self.codes, self.absmax, self.nested_absmax, self.nested_map, self.offset)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return nf4_dequantize([self.part()], [self.numel()], self.block, dtype, out).view(self.shape)

    @property
    def kind(self) -> str:
        return f"NF4 in blocks of {self.block}{'' if self.offset is None else ', double quantisation'}"


class FP8Store(Store):
    """A weight [rows, cols] in FP8 e4m3, see :mod:`lorarun.kernels.fp8`.

    codes: float8_e4m3fn [rows, cols], kept as bytes (torch can neither pickle that dtype nor leave it alone in a cast).
    scale, what codes are multiplied with (fp32, bf16 or powers of two in float8_e8m0fnu; kept as fp32): one a row, or
    with ``block`` = (bm, bn) one for each block of bm × bn, partial blocks at the edges counted.  Raises ValueError
    when they do not fit each other.
    """

    format = "FP8"
    bits = 8.01
    scale: nn.Parameter

    def __init__(self, codes: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> None:
        super().__init__()
        if codes.ndim != 2 or codes.dtype != torch.float8_e4m3fn:
            raise ValueError(f"FP8 weight: codes are {codes.dtype} {list(codes.shape)}; expected e4m3 [rows, cols].")
        self.shape, self.block = codes.shape, block
        rows, cols = block or (1, max(1, codes.shape[1]))
        grid = (-(-codes.shape[0] // rows), 1 if block is None else -(-codes.shape[1] // cols))
        if not (scale.shape == grid or block is None and scale.shape == grid[:1]):
            what = "a scale a row" if block is None else f"blocks of {rows} × {cols}"
            raise ValueError(
                f"FP8 weight {list(codes.shape)} with {what}: scales are {list(scale.shape)} instead of {list(grid)}."
            )
        self._hold(codes=codes.contiguous().view(torch.uint8), scale=scale.detach().float().reshape(grid))

    @classmethod
    def from_dense(cls, w: Tensor, block: tuple[int, int] | None = None) -> FP8Store:
        part = fp8_quantize(w) if block is None else fp8_quantize_blocks(w, block)
        _check_finite(part.scale)
        return cls(part.codes, part.scale, block)

    def part(self) -> FP8:
        """What the kernels take."""
        codes = self.codes.view(torch.float8_e4m3fn)
        return FP8(codes, self.scale, self.block or (1, max(1, self.shape[1])))

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return fp8_dequantize([self.part()], dtype, out)

    @property
    def kind(self) -> str:
        return "FP8 e4m3, " + ("a scale a row" if self.block is None else "blocks of {} × {}".format(*self.block))


def _check_finite(scales: Tensor) -> None:
    if not scales.is_meta and not torch.isfinite(scales).all():
        raise ValueError("the weight holds NaN or infinity, for which there is no code.")


def dequantize(weight: Tensor | Store, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Any weight in ``dtype``, without gradient: a store dequantised, a dense one cast (itself where nothing changes).

    out: a contiguous tensor to put it into.
    """
    if isinstance(weight, Store):
        return weight.dequantize(dtype, out)
    return weight.detach().to(dtype) if out is None else out.copy_(weight.detach())


@torch.no_grad()
def dequantize_side_by_side(weights: Sequence[Tensor | Store], dtype: torch.dtype) -> Tensor:
    """Weights of one width, one below the other in a new buffer [sum of rows, cols] of ``dtype``.

    Up to three stores of one format share a launch.
    """
    rows = [weight.shape[0] for weight in weights]
    first = weights[0]
    out = torch.empty((sum(rows), first.shape[1]), dtype=dtype, device=first.device)
    nf4 = [w for w in weights if isinstance(w, NF4Store)]
    fp8 = [w for w in weights if isinstance(w, FP8Store)]
    if len(nf4) == len(weights) and len({w.block for w in nf4}) == 1:
        nf4_dequantize([w.part() for w in nf4], [w.numel() for w in nf4], nf4[0].block, dtype, out)
    elif len(fp8) == len(weights):
        fp8_dequantize([w.part() for w in fp8], dtype, out)
    else:
        for part, weight in zip(out.split(rows), weights, strict=True):
            dequantize(weight, dtype, part)
    return out


def dense_side_by_side(weights: Sequence[Tensor | Store], dtype: torch.dtype) -> Tensor:
    """:func:`dequantize_side_by_side`, made once and kept on the first of the weights where all of them may be kept.

    Made again for another dtype and for weights that were moved, replaced or loaded into.
    """
    first = weights[0]
    if not isinstance(first, Store) or not all(isinstance(weight, Store) and weight.kept for weight in weights):
        return dequantize_side_by_side(weights, dtype)
    parts = [part for weight in weights if isinstance(weight, Store) for part in weight.parameters()]
    made_from = (dtype, *((part.data_ptr(), version(part)) for part in parts))
    if first.dense is None or first.dense[0] != made_from:
        first.dense = None  # frees it first
        first.dense = (made_from, dequantize_side_by_side(weights, dtype))
    return first.dense[1]


def stores(model: nn.Module) -> Iterator[tuple[str, Store]]:
    """Every store of a model, by the name of the weight that it holds."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, Store))
