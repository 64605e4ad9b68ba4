"""Products of a few rows with stored weights, against float64 of the decoded weights.

Tolerances: every path rounds values of a code to the dtype of x (2⁻⁹ or 2⁻¹² relative, exact in fp32) and the result
once; sums run in fp32.  With unit outputs an error of a few roundings of either stays below 2⁻⁷ in bf16, 2⁻¹⁰ in fp16
and 1e-4 in fp32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.checks import poison

from lorarun.kernels.backend import INTERPRETED, reference
from lorarun.kernels.few_rows import Stored, dequantized, few_rows, serves
from lorarun.kernels.fp8 import FP8, fp8_quantize
from lorarun.kernels.gated import ACTIVATIONS
from lorarun.kernels.lora import Branch
from lorarun.kernels.nf4 import nf4_quantize

pytestmark = pytest.mark.kernel
BOUND = {torch.float32: 1e-4, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def stored(rows: int, cols: int, device: Any, kind: str = "nf4", seed: int = 0) -> Stored:
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(device) * cols**-0.5
    if kind == "fp8":
        return Stored(fp8_quantize(w), rows, cols)
    if kind == "fp8-blocks":
        scale = (
            torch.rand(-(-rows // 32), -(-cols // 64), generator=torch.Generator().manual_seed(seed)).to(device) + 0.5
        )
        return Stored(FP8(fp8_quantize(w).codes, scale / 100, (32, 64)), rows, cols)
    block = 128 if kind == "nf4-128" else 64
    return Stored(nf4_quantize(w, block, nested=kind != "nf4-single"), rows, cols, block)


def branch(rows: int, cols: int, rank: int, device: Any, seed: int = 0) -> Branch:
    if not rank:
        return Branch(rows)
    generator = torch.Generator().manual_seed(seed + 7)
    a, b = (torch.randn(shape, generator=generator).to(device) for shape in ((rank, cols), (rows, rank)))
    return Branch(rows, a * cols**-0.5, b * rank**-0.5, 0.5)


def exact(x: Any, weights: Any, biases: Any, branches: Any, residual: Any, act: str | None) -> Any:
    """In float64."""
    wide, ys = x.double(), []
    for weight, bias, each in zip(weights, biases, branches, strict=True):
        y = wide @ dequantized(weight, torch.float64).T
        y = y if bias is None else y + bias.double()
        if each.a is not None:
            y = y + each.scale * (wide @ each.a.double().T @ each.b.double().T)
        ys.append(y)
    y = torch.cat(ys, 1) if act is None else ACTIVATIONS[act](ys[0]) * ys[1]
    return y if residual is None else y + residual.double()


def check(
    device: Any, rows: int, cols: int, sizes: list[int], kind: str, ranks: list[int], bias: bool = False,
    residual: bool = False, act: str | None = None, dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """dtype: by default fp32 under the interpreter and bf16 on a GPU, where the kernels take 16 bits alone."""
    dtype = dtype or (torch.float32 if INTERPRETED else torch.bfloat16)
    generator = torch.Generator().manual_seed(rows)
    padded = torch.randn(rows, cols + 8, generator=generator).to(device, dtype)
    x = padded[:, :cols]
    weights = [stored(n, cols, device, kind, i) for i, n in enumerate(sizes)]
    biases = [torch.randn(n, generator=generator).to(device, dtype) if bias else None for n in sizes]
    branches = [branch(n, cols, rank, device, i) for i, (n, rank) in enumerate(zip(sizes, ranks, strict=True))]
    wide = sizes[0] if act else sum(sizes)
    rest = torch.randn(rows, wide, generator=generator).to(device, dtype) if residual else None
    assert serves(x, weights, biases, branches)
    poison(device)
    y = few_rows(x, weights, biases, branches, rest, act)
    with reference():
        plain = few_rows(x, weights, biases, branches, rest, act)
    expected = exact(x, weights, biases, branches, rest, act)
    for found in (y, plain):
        assert found.dtype == dtype and found.shape == (rows, wide)
        assert float((found.double() - expected).norm() / expected.norm()) < BOUND[dtype]


@pytest.mark.parametrize("rows", [1, 3, 8, 11])
@pytest.mark.parametrize("kind", ["nf4", "nf4-single", "nf4-128", "fp8", "fp8-blocks"])
def test_one_weight(device: Any, rows: int, kind: str) -> None:
    check(device, rows, 256 if kind in ("nf4-single", "nf4-128") else 192, [40], kind, [0])


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_three_side_by_side_with_adapters(device: Any, kind: str) -> None:
    check(device, 5, 128, [48, 20, 16], kind, [4, 0, 16], bias=True)
    check(device, 2, 128, [17, 33], kind, [20, 3], residual=True)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated(device: Any, act: str) -> None:
    check(device, 3, 128, [40, 40], "nf4", [4, 2], act=act)
    check(device, 3, 128, [40, 40], "fp8", [0, 0], act=act, bias=True)


@pytest.mark.parametrize("rows", [17, 33, 64])
def test_many_rows(device: Any, rows: int) -> None:
    check(device, rows, 128, [32], "nf4", [8], residual=True)


@pytest.mark.parametrize("kind", ["nf4", "nf4-single"])
def test_scales_of_the_last_round(device: Any, kind: str) -> None:
    """Four at a time, where the last rounds have blocks for some warps alone: none is read past the last row."""
    check(device, 3, 64 * 36, [20], kind, [0])


@pytest.mark.parametrize("kind", ["nf4", "nf4-single", "fp8"])
def test_columns_are_divided_where_there_are_few_tiles(device: Any, kind: str) -> None:
    check(device, 33, 64 * 36, [20], kind, [8], residual=True)
    check(device, 17, 64 * 33, [20, 20], kind, [0, 3], act="silu", bias=True)


# The interpreter's products of bf16 are not the GPU's.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_half_precision(device: Any, dtype: torch.dtype) -> None:
    check(device, 2, 256, [48, 16], "nf4", [4, 4], dtype=dtype)
    check(device, 2, 256, [48, 16], "fp8", [4, 4], dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
def test_real_shapes(device: Any, rows: int) -> None:
    check(device, rows, 4096, [4096, 1024, 1024], "nf4", [16, 16, 16], dtype=torch.bfloat16)
    check(device, rows, 14336, [4096], "nf4", [16], residual=True, dtype=torch.bfloat16)
    check(device, rows, 2560, [10240, 10240], "fp8", [16, 16], act="gelu_pytorch_tanh", dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 9, 29, 33, 63])
@pytest.mark.parametrize("kind", ["nf4", "nf4-single", "nf4-128", "fp8", "fp8-blocks"])
def test_odd_sizes(device: Any, rows: int, kind: str) -> None:
    """Rows that fill no tile, weights whose last rows fill none, columns that fill no round of the loop."""
    how: Any = dict(kind=kind, dtype=torch.bfloat16)
    check(device, rows, 1152, [1024, 256, 256], ranks=[16, 0, 5], **how)  # gemma3 1B
    check(device, rows, 896, [4864, 4864], ranks=[8, 8], act="silu", bias=True, **how)  # qwen2.5 0.5B
    check(device, rows, 6912, [1152], ranks=[64], residual=True, **how)
    check(device, rows, 640, [1007, 13], ranks=[0, 0], bias=True, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_the_same_launch_again_and_again(device: Any, kind: str) -> None:
    """Two thousand times, on two streams at once: all agree, and a row's bits do not depend on what stands beside
    it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 1024, generator=generator).to(device, torch.bfloat16)
    weights = [stored(n, 1024, device, kind, i) for i, n in enumerate((14336, 14336))]
    branches = [branch(14336, 1024, 64, device, i) for i in range(2)]
    first = few_rows(x, weights, [None] * 2, branches, None, "silu")
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    others = torch.zeros_like(wrong)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    for i in range(1000):
        wrong += (few_rows(x, weights, [None] * 2, branches, None, "silu") != first).sum()
        with torch.cuda.stream(beside):
            rows = 1 + i % 8
            others += (few_rows(x[:rows], weights, [None] * 2, branches, None, "silu") != first[:rows]).sum()
    torch.cuda.synchronize()
    assert int(wrong) == int(others) == 0


def test_views_with_gaps(device: Any) -> None:
    """A residual, a bias and scales that do not lie number beside number; an x of another width is an error."""
    x, weight = torch.randn(3, 128, device=device), stored(16, 128, device, "fp8")
    bias, rest = torch.randn(16, 2, device=device)[:, 0], torch.randn(16, 3, device=device).T
    part = weight.part._replace(scale=torch.stack([weight.part.scale] * 2, 1)[:, 0])
    for one, beside in ((weight, None), (weight, bias), (weight._replace(part=part), None)):
        expected = exact(x, [one], [beside], [Branch(16)], rest, None)
        found = few_rows(x, [one], [beside], [Branch(16)], rest)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    with pytest.raises(RuntimeError, match="shapes"):
        few_rows(x[:, :64].contiguous(), [weight], [None], [Branch(16)])


def test_what_others_serve(device: Any) -> None:
    """Rows that are no whole number of blocks, more rows, other dtypes: the reference."""
    x = torch.randn(2, 160, device=device)
    odd = stored(16, 160, device)
    assert not serves(x, [odd], [None], [Branch(16)])
    expected = exact(x, [odd], [None], [Branch(16)], None, None)
    torch.testing.assert_close(few_rows(x, [odd], [None], [Branch(16)]).double(), expected, rtol=0, atol=1e-4)
    even = stored(16, 128, device)
    assert not serves(torch.randn(65, 128, device=device), [even], [None], [Branch(16)])
    assert not serves(torch.randn(2, 128, device=device).double(), [even], [None], [Branch(16)])
    assert not serves(
        torch.randn(2, 128, device=device), [even, stored(16, 128, device, "fp8")], [None] * 2, [Branch(16)] * 2
    )
