"""FP8 products: the cast bit by bit against its reference; products, and the Functions that use them, against emulation
on the same codes."""

import contextlib
import copy

import pytest
import torch
from kernels.checks import close, narrow, poison
from kernels.test_project import linear

from lorarun.kernels.backend import reference
from lorarun.kernels.scaled import Scaled, quantize_rows, quantize_rows_reference, scale_weight, scaled_mm
from lorarun.kernels.scaled import _emulation as emulation
from lorarun.project import gated_mlp, project
from lorarun.quant.store import FP8Store, NF4Store, dequantize_side_by_side

SHAPES = [(1, 1), (3, 7), (5, 64), (1, 63), (130, 100), (4, 5000)]


def rows(shape, dtype, device):
    """Rows of any size, among them zero, tiny, huge, infinite and NaN, in a wider buffer that would show if it were
    read."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape[0], 1, generator=generator)
    for row, value in enumerate((0.0, 1e-6, 3e4)):
        if row < shape[0] - 2:
            x[row] *= value
    if shape[0] > 4:
        x[3, -1], x[4, 0] = float("inf"), float("nan")
    buffer = torch.full((shape[0], shape[1] + 9), 6e4, device=device, dtype=dtype)
    buffer[:, : shape[1]] = x.to(device, dtype)
    return buffer[:, : shape[1]]


def same(a, b):
    equal_scales = torch.equal(a.scale.view(torch.int32), b.scale.view(torch.int32))
    return equal_scales and torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))


def test_the_reference_follows_the_formula():
    """e4m3 has three bits of mantissa: half a step is 1/16 of the value, or 2⁻¹⁰ of the scale below 2⁻⁶."""
    x = rows((130, 100), torch.float32, "cpu")
    got = quantize_rows_reference(x)
    finite = torch.isfinite(x).all(1)
    assert not finite[3] and not finite[4] and finite.sum() == 128
    assert (got.scale[~finite].isnan()).all() and (got.codes[~finite].float() == 0).all()
    back = got.codes.float() * got.scale
    bound = (x.abs() / 16).maximum(got.scale * 2.0**-10) * (1 + 1e-5)
    assert ((back - x).abs() <= bound)[finite].all() and (back[0] == 0).all()
    torch.testing.assert_close(got.scale[5:, 0], x[5:].abs().amax(1) / 448, rtol=1e-6, atol=0)


def check_quantize(device, shape, dtype):
    x = rows(shape, dtype, device)
    for view in (x, x.contiguous(), x.T.contiguous().T):
        poison(device)
        assert same(quantize_rows(view), quantize_rows_reference(x))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize(device, shape):
    check_quantize(device, shape, torch.float32)
    check_quantize(device, shape, torch.float16)


@pytest.mark.kernel
def test_nothing(device):
    for shape in ((0, 64), (3, 0)):
        got = quantize_rows(torch.empty(shape, device=device))
        assert got.codes.shape == shape and got.scale.shape == (shape[0], 1)
    assert quantize_rows(torch.empty(3, 64, device="meta")).codes.is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4097, 4095), (8192, 4096), (777, 14336), (777, 28672), (9, 70000)])
def test_quantize_large(device, shape):
    check_quantize(device, shape, torch.bfloat16)


@pytest.mark.gpu
def test_more_elements_than_an_int_counts(device):
    x = torch.randn(1, 28672, device=device, dtype=torch.bfloat16).expand(80_000, -1).contiguous()  # 2.3e9
    got = quantize_rows(x)
    assert same(Scaled(got.codes[-3:], got.scale[-3:]), quantize_rows_reference(x[-3:]))


@pytest.mark.kernel
@pytest.mark.parametrize("store", [NF4Store, FP8Store, None])
def test_both_copies_come_from_the_stores_fp32_values(device, store):
    """A copy made from the other, or from values rounded to 16 bits, would differ in some codes."""
    generator = torch.Generator().manual_seed(0)
    dense = [torch.randn(n, 96, generator=generator).to(device, torch.float16) for n in (64, 32, 32)]
    weights = [w if store is None else store.from_dense(w) for w in dense]
    w = torch.cat([x.float() if store is None else x.dequantize(torch.float32) for x in weights])
    got = scale_weight(dequantize_side_by_side(weights, torch.float32))
    assert same(got.forward, quantize_rows_reference(w)) and same(got.backward, quantize_rows_reference(w.T))
    assert got.forward.codes.is_contiguous() and got.backward.codes.is_contiguous()


def test_the_emulation_is_the_product_of_the_values():
    x, w = (quantize_rows(torch.randn(n, 64)) for n in (7, 48))
    bias = torch.randn(48)
    values = [(part.codes.double() * part.scale.double()) for part in (x, w)]
    close(scaled_mm(x, w, torch.float32, bias), values[0] @ values[1].T + bias.double(), "product", 8)
    x.scale[2] = torch.nan
    assert scaled_mm(x, w, torch.float32).isnan().any(1).tolist() == [i == 2 for i in range(7)]


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (3, 48, 576), (513, 6144, 4096), (256, 4096, 28672)])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_products_against_emulation_on_the_same_codes(device, m, n, k, fast, biased):
    """bf16 rounds by 2⁻⁹; sums on the tensor cores lose up to 2⁻¹³ of their largest term each, fast ones all along k.
    A row with NaN stays one."""
    torch.manual_seed(0)
    x = quantize_rows(torch.randn(m, k, device=device, dtype=torch.bfloat16))
    w = quantize_rows(torch.randn(n, k, device=device) * torch.rand(n, 1, device=device))
    bias = torch.randn(n, device=device, dtype=torch.bfloat16) if biased else None
    poison(device)
    ours = scaled_mm(x, w, torch.bfloat16, bias, fast)
    values = [(part.codes.double() * part.scale.double()) for part in (x, w)]
    exact = values[0] @ values[1].T + (0 if bias is None else bias.double())
    close(ours, exact, f"{m}×{k}·{n}", 4 if fast else 1)
    x.scale[-1] = torch.nan
    spoilt = scaled_mm(x, w, torch.bfloat16, bias, fast)
    assert spoilt[-1].isnan().all() and torch.equal(spoilt[:-1], ours[:-1])


def in_fp8(linears):
    scaled = scale_weight(dequantize_side_by_side([m.weight for m in linears], torch.float32))
    for module in linears:
        module.scaled = scaled


def distances(call, groups, inputs):
    """How far apart, of each output and gradient in the norm: one Function in FP8 and the emulation, modules in turn;
    the emulation and modules in turn in their own dtype, which is what FP8 costs."""
    results, upstream = [], []
    for fp8, fused in ((True, True), (True, False), (False, False)):
        modules = copy.deepcopy(groups)
        for group in modules if fp8 else ():
            in_fp8(group)
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        flat = [module for group in modules for module in group]
        poison(inputs[0].device)
        with contextlib.ExitStack() as stack:
            for context in () if fused else (emulation, reference):
                stack.enter_context(context())
            out = call(flat, *leaves)
            outs = out if isinstance(out, tuple) else (out,)
            upstream = upstream or [torch.randn_like(o) for o in outs]
            learning = [p for module in flat for p in module.parameters() if p.requires_grad]
            results.append(
                [t.detach().float() for t in (*outs, *torch.autograd.grad(outs, leaves + learning, upstream))]
            )
    assert all(torch.isfinite(t).all() for t in results[0])
    relative = lambda a, b: ((a - b).norm() / b.norm()).item()  # noqa: E731
    return [(relative(a, b), relative(b, c)) for a, b, c in zip(*results, strict=True)]


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("ranks", "stored", "bias", "dropout", "options"),
    [
        ((8, 8, 8), True, False, 0.0, ()),
        ((4, 0, 16), False, True, 0.25, ()),
        ((0, 0, 0), True, True, 0.0, ()),
        ((80, 8, 8), True, True, 0.0, ()),
        ((4, 0, 16), True, True, 0.0, ("dora",)),
    ],
)
def test_project(device, ranks, stored, bias, dropout, options):
    """The frozen products see the same codes on both sides.  dB has nothing of FP8 in it, and a rank of 80 is not
    served by kernels: then both are the same path."""
    torch.manual_seed(0)
    dtype = narrow(device)
    sizes = zip((96, 48, 48), ranks, strict=True)
    linears = [linear(device, dtype, 64, n, r, bias, dropout, stored=stored, options=options) for n, r in sizes]
    x = torch.randn(2, 35, 64).to(device, dtype)
    found = distances(lambda ls, x: project(x, *ls), [linears], [x])
    assert all(error < 8 * torch.finfo(dtype).eps for error, _ in found), found
    assert all(0.01 < cost < 0.1 for _, cost in found[:4]), found  # three outputs and dx


@pytest.mark.kernel
@pytest.mark.parametrize(("ranks", "dropout"), [((8, 8, 8), 0.0), ((4, 0, 16), 0.25), ((0, 0, 0), 0.0)])
def test_gated_mlp(device, ranks, dropout):
    """Between its products a rounding can differ and move a code to its neighbour: that is less than half of what FP8
    costs."""
    torch.manual_seed(0)
    dtype = narrow(device)
    gate, up = (linear(device, dtype, 64, 144, r, ranks[0] == 4, dropout, stream=2) for r in ranks[:2])
    down = linear(device, dtype, 144, 64, ranks[2], ranks[0] == 4, dropout, stream=3)
    h, residual = (torch.randn(2, 35, 64).to(device, dtype) for _ in "hr")
    call = lambda ls, h, r: gated_mlp(h, *ls, "silu", residual=r)  # noqa: E731
    found = distances(call, [[gate, up], [down]], [h, residual])
    assert all(error < max(0.5 * cost, 8 * torch.finfo(dtype).eps) for error, cost in found), found
    assert all(0.01 < cost < 0.1 for _, cost in found[:2]), found  # the output and dh


@pytest.mark.gpu
def test_a_layer_of_real_size(device):
    torch.manual_seed(0)
    dtype = torch.bfloat16
    x = torch.randn(1, 1025, 4096).to(device, dtype)
    linears = [linear(device, dtype, 4096, n, 16, stored=True) for n in (4096, 1024, 1024)]
    found = distances(lambda ls, x: project(x, *ls), [linears], [x])
    assert all(error < 8 * torch.finfo(dtype).eps for error, _ in found), found
    gate, up = (linear(device, dtype, 4096, 14336, 16, stream=2) for _ in "gu")
    down = linear(device, dtype, 14336, 4096, 16, stream=3)
    call = lambda ls, h, r: gated_mlp(h, *ls, "silu", residual=r)  # noqa: E731
    found = distances(call, [[gate, up], [down]], [x, x.flip(1)])
    assert all(error < max(0.5 * cost, 8 * torch.finfo(dtype).eps) for error, cost in found), found


@pytest.mark.kernel
def test_other_groupings_merged_weights_and_hooks_run_in_their_own_dtype(device):
    torch.manual_seed(0)
    linears = [linear(device, narrow(device), 64, n, 8) for n in (48, 32)]
    x = torch.randn(2, 3, 64).to(device, narrow(device))
    plain = project(x, *linears)
    in_fp8(linears)
    scaled = project(x, *linears)
    assert not any(map(torch.equal, scaled, plain))
    close(project(x, linears[1])[0].detach(), plain[1].detach(), "alone", 4)
    linears[0].merged = ("default", linears[0].weight)
    close(project(x, *linears)[1].detach(), plain[1].detach(), "merged", 4)
    linears[0].merged = None
    handle = linears[1].register_forward_hook(lambda *args: None)
    close(project(x, *linears)[1].detach(), plain[1].detach(), "hooked", 4)
    handle.remove()
    assert all(map(torch.equal, project(x, *linears), scaled))
