"""FP8 weights: the reference against its formula and torch's own conversion, the kernels against the reference.

The kernels work on bytes, so that they can be trusted under the interpreter as well, and are compared bit by bit.
"""

import pytest
import torch
from kernels.checks import poison

from lorarun.kernels import fp8
from lorarun.kernels.backend import tl, triton
from lorarun.kernels.fp8 import (
    FP8,
    fp8_dequantize,
    fp8_dequantize_reference,
    fp8_quantize,
    fp8_quantize_blocks,
    fp8_quantize_reference,
)

SHAPES = [(1, 1), (3, 7), (5, 64), (1, 63), (129, 100), (200, 300), (4, 20000)]


def weight(shape, dtype=torch.float32, device="cpu", seed=0):
    """Random, a row of zeros and a tiny one in it, with memory behind it that would show in a scale if it were read."""
    generator = torch.Generator().manual_seed(seed)
    n = shape[0] * shape[1]
    w = torch.randn(shape, generator=generator)
    w[shape[0] // 2] *= 0.0 if shape[0] > 1 else 1.0
    w[-1] *= 1e-6 if shape[0] > 2 else 1.0
    buffer = torch.full((n + 32768,), 6e4, device=device, dtype=dtype)
    buffer[:n] = w.flatten().to(device, dtype)
    return buffer[:n].view(shape)


def same(a, b):
    return torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(a.scale, b.scale)


# --- the reference -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_comes_back_within_half_a_step(shape):
    """e4m3 has three bits of mantissa: half a step is 1/16 of the value, or 2⁻¹⁰ of the scale below 2⁻⁶."""
    w = weight(shape)
    part = fp8_quantize(w)
    assert part.scale.shape == (shape[0], 1) and torch.isfinite(part.codes.float()).all()
    torch.testing.assert_close(part.scale.flatten(), w.abs().amax(1).clamp(min=fp8.TINY) / 448, rtol=1e-6, atol=0)
    back = fp8_dequantize([part], torch.float32)
    bound = (w.abs() / 16).maximum(part.scale * 2.0**-10) * (1 + 1e-5)
    assert ((back - w).abs() <= bound).all()
    assert (back[w == 0] == 0).all()


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (16, 48), (1, 128), (128, 1)])
def test_blocks_follow_the_formula(block):
    """200 × 300 does not tile into 128 × 128: the last are partial (github.com/unslothai/unsloth/issues/6848)."""
    rows, cols = 200, 300
    generator = torch.Generator().manual_seed(0)
    codes = (20 * torch.randn(rows, cols, generator=generator)).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-cols // block[1]), generator=generator)
    back = fp8_dequantize([FP8(codes, scale, block)], torch.float32)
    for i, j in ((0, 0), (127, 127), (128, 128), (199, 299), (63, 256), (64, 48)):
        assert back[i, j] == codes[i, j].float() * scale[i // block[0], j // block[1]]


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (16, 48), (1, 300), (512, 512)])
def test_blocks_come_back_within_half_a_step(block):
    """Each number is held against the scale of its block; blocks at the edges are partial, or larger than all."""
    w = weight((200, 300))
    part = fp8_quantize_blocks(w, block)
    assert part.scale.shape == (-(-200 // block[0]), -(-300 // block[1]))
    back = fp8_dequantize([part], torch.float32)
    for i in range(part.scale.shape[0]):
        for j in range(part.scale.shape[1]):
            rows, cols = (slice(n * size, (n + 1) * size) for n, size in zip((i, j), block, strict=True))
            largest = w[rows, cols].abs().max()
            torch.testing.assert_close(part.scale[i, j], largest.clamp(min=fp8.TINY) / 448, rtol=1e-6, atol=0)
            bound = (w[rows, cols].abs() / 16).maximum(part.scale[i, j] * 2.0**-10) * (1 + 1e-5)
            assert ((back[rows, cols] - w[rows, cols]).abs() <= bound).all()
    if block == (1, 300):
        assert same(part, fp8_quantize(w))
    w[3, 7] = float("nan")
    assert (~torch.isfinite(fp8_quantize_blocks(w, block).scale)).sum() == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_has_no_code_shows_in_the_scale(bad):
    w = weight((5, 64))
    w[3, 7] = bad
    assert (~torch.isfinite(fp8_quantize(w).scale)).flatten().tolist() == [False, False, False, True, False]


# --- the kernels ---------------------------------------------------------------------------------------------------


@triton.jit
def _both(p_x, p_code, p_y, N: tl.constexpr):
    o = tl.arange(0, N)
    code = fp8._encode(tl.load(p_x + o))
    tl.store(p_code + o, code)
    tl.store(p_y + o, fp8._decode(code))


@pytest.mark.kernel
def test_bytes_are_those_of_torchs_conversion(device):
    """Every value of the format, every midpoint between two, its neighbours, and random numbers."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (values[1:] + values[:-1]) / 2
    around = [torch.nextafter(middle, torch.tensor(end)) for end in (1e9, -1e9)]
    noise = torch.rand(4000, generator=torch.Generator().manual_seed(0)) * torch.tensor([448.0, 2.0**-6]).repeat(2000)
    x = torch.cat([values, middle, *around, noise, torch.tensor([1e-30, 1e-45, 463.9])])
    x = torch.cat([x, -x, torch.zeros(16384 - 2 * len(x))]).to(device)
    codes, back = torch.empty(16384, dtype=torch.uint8, device=device), torch.empty_like(x)
    _both[(1,)](x, codes, back, N=16384, enable_fp_fusion=False)
    expected = x.to(torch.float8_e4m3fn)
    assert torch.equal(codes, expected.view(torch.uint8)) and torch.equal(back, expected.float())


def check_quantize(device, shape, dtype):
    w = weight(shape, dtype, device)
    poison(device)
    assert same(fp8_quantize(w), fp8_quantize_reference(w))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize(device, shape):
    check_quantize(device, shape, torch.float32)
    check_quantize(device, shape, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4097, 4095), (14336, 4096), (4096, 14336), (1000, 53248)])
def test_quantize_large(device, shape):
    check_quantize(device, shape, torch.bfloat16)


def check_dequantize(device, rows, cols, block, dtype):
    """Several weights into the middle of a guarded buffer."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for m in rows:
        codes = (20 * torch.randn(m, cols, generator=generator)).to(torch.float8_e4m3fn).to(device)
        scale = torch.rand(-(-m // block[0]), -(-cols // block[1]), generator=generator).to(device)
        parts.append(FP8(codes, scale, block))
    total = sum(rows) * cols
    guarded = torch.full((total + 64,), float("nan"), dtype=dtype, device=device)
    out = guarded[32 : 32 + total].view(sum(rows), cols)
    assert fp8_dequantize(parts, dtype, out) is out
    expected = fp8_dequantize_reference(parts, torch.empty_like(out))
    assert torch.equal(out, expected)
    assert guarded[:32].isnan().all() and guarded[32 + total :].isnan().all()
    poison(device)
    assert torch.equal(fp8_dequantize(parts, dtype), expected)


@pytest.mark.kernel
@pytest.mark.parametrize("block", [None, (128, 128), (64, 64), (16, 48), (1, 128)])
def test_dequantize(device, block):
    for rows, cols in (([1], 1), ([3], 7), ([5, 130, 1], 300), ([2], 2100), ([1, 2, 3, 4], 64), ([0, 3], 64)):
        check_dequantize(device, rows, cols, block or (1, cols), torch.float32)
    check_dequantize(device, [5, 3], 320, block or (1, 320), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [None, (128, 128), (64, 64), (16, 48)])
def test_dequantize_large(device, block):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_dequantize(device, [4096, 1024, 1024], 4096, block or (1, 4096), dtype)
        check_dequantize(device, [4097, 33], 4095, block or (1, 4095), dtype)


@pytest.mark.kernel
def test_nothing_and_mixed_formats(device):
    for shape in ((0, 64), (3, 0)):
        w = torch.empty(shape, device=device)
        assert fp8_dequantize([fp8_quantize(w)], torch.float32).shape == shape
    w = weight((4, 64), device=device)
    row = fp8_quantize(w)
    blocks = FP8(row.codes, torch.full((1, 1), 0.5, device=device), (128, 128))
    both = fp8_dequantize([row, blocks, row], torch.float32)
    assert torch.equal(both, torch.cat([fp8_dequantize([part], torch.float32) for part in (row, blocks, row)]))


@pytest.mark.gpu
def test_more_elements_than_an_int_counts(device):
    rows, cols = 2**17 + 3, 2**14 + 16  # 2.15e9
    w = torch.randn(1024, cols, device=device, dtype=torch.bfloat16).repeat(129, 1)[:rows]
    part = fp8_quantize(w)
    back = fp8_dequantize([part, FP8(part.codes[-2:], part.scale[-2:], part.block)], torch.bfloat16)
    for piece in (slice(0, 5), slice(rows - 5, rows)):
        expected = fp8_quantize_reference(w[piece])
        assert same(FP8(part.codes[piece], part.scale[piece], part.block), expected)
        assert torch.equal(back[piece], fp8_dequantize_reference([expected], torch.empty_like(w[piece])))
    assert torch.equal(back[rows:], back[rows - 2 : rows])
