"""Rotation of q and k, with and without their norm, against the reference in float64."""

import pytest
import torch
from kernels.checks import compare, narrow

from lorarun.kernels.rope import rope, rope_reference


def inputs(device, dtype, batch, seq, heads, kv_heads, dim, table_batch):
    torch.manual_seed(0)
    q = torch.randn(batch, seq, heads, dim).to(device, dtype)
    k = torch.randn(batch, seq, kv_heads, dim).to(device, dtype)
    angles = (torch.rand(table_batch, seq, dim // 2) * 50).to(device)
    return q, k, angles.cos(), angles.sin()


def check(device, dtype, norm, plus_one, *sizes):
    q, k, cos, sin = inputs(device, dtype, *sizes)
    weights = [torch.randn(sizes[4]).to(device, dtype) for _ in "qk"] if norm else [None, None]

    def call(function, to):
        w = [None if t is None else t.to(to) for t in weights]
        tables = (cos, sin) if function is rope else (cos.double(), sin.double())
        return lambda q, k: function(q, k, *tables, *w, 1e-6, plus_one)

    compare(call(rope, dtype), call(rope_reference, torch.float64), (q, k))


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("norm", "plus_one"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("sizes", [(1, 3, 1, 1, 64, 1), (2, 5, 10, 3, 80, 2), (2, 7, 4, 2, 24, 1)])
def test_values_and_gradients(device, sizes, norm, plus_one, half):
    check(device, narrow(device) if half else torch.float32, norm, plus_one, *sizes)


@pytest.mark.gpu
@pytest.mark.parametrize(("norm", "plus_one"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("sizes", [(1, 4097, 32, 8, 128, 1), (4, 513, 8, 4, 256, 4)])
def test_values_and_gradients_large(device, sizes, norm, plus_one):
    check(device, torch.bfloat16, norm, plus_one, *sizes)


@pytest.mark.kernel
def test_slices_of_one_product_and_no_tokens(device):
    torch.manual_seed(0)
    wide = torch.randn(2, 6, (4 + 2 + 2) * 16, device=device, requires_grad=True)
    q, k, _ = (t.unflatten(-1, (-1, 16)) for t in wide.split([64, 32, 32], dim=-1))
    _, _, cos, sin = inputs(device, torch.float32, 2, 6, 4, 2, 16, 1)
    a, b = rope(q, k, cos, sin), rope_reference(q, k, cos, sin)
    for ours, theirs in zip(a, b, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    upstream = [torch.randn_like(t) for t in a]
    ours, theirs = (torch.autograd.grad(out, wide, upstream)[0] for out in (a, b))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    empty = rope(q[:, :0], k[:, :0], cos[:, :0], sin[:, :0])
    assert empty[0].shape == (2, 0, 4, 16)
