"""The gated activations against the reference in float64."""

import pytest
import torch
from kernels.checks import compare, narrow

from lorarun.kernels.gated import ACTIVATIONS, gated, gated_backward, gated_reference


def check(device, dtype, act, shape):
    torch.manual_seed(0)
    gate, up = (3 * torch.randn(shape)).to(device, dtype), torch.randn(shape).to(device, dtype)
    # fp32: 1 ± tanh cancels for moderate gates, which costs a few bits.
    roundings = 4 if dtype.itemsize == 2 else 16
    compare(lambda g, u: gated(g, u, act), lambda g, u: gated_reference(g, u, act), (gate, up), roundings)


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 100), (2, 1100)])
def test_values_and_gradients(device, shape, act, half):
    check(device, narrow(device) if half else torch.float32, act, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(4097, 14336), (2, 1000, 10241)])
def test_values_and_gradients_large(device, shape, act):
    check(device, torch.bfloat16, act, shape)


@pytest.mark.kernel
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_far_out_nothing_overflows(device, act):
    gate = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4]], device=device, requires_grad=True)
    up = torch.ones_like(gate, requires_grad=True)
    y = gated(gate, up, act)
    torch.testing.assert_close(y, gated_reference(gate, up, act), rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(y.sum(), (gate, up))
    exact = torch.autograd.grad(gated_reference(gate, up, act).sum(), (gate, up))
    for a, b in zip(grads, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.kernel
def test_halves_of_one_product(device):
    torch.manual_seed(0)
    both = torch.randn(5, 2 * 70, device=device)
    gate, up = both.chunk(2, dim=1)
    torch.testing.assert_close(gated(gate, up, "silu"), gated_reference(gate, up, "silu"))
    dy = torch.randn(5, 70, device=device)
    grads = gated_backward(dy, gate, up, "silu")
    leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
    exact = torch.autograd.grad(gated_reference(*leaves, "silu"), leaves, dy)
    torch.testing.assert_close(grads, torch.cat(exact, dim=1), rtol=1e-5, atol=1e-6)
    assert gated(gate[:0], up[:0], "silu").shape == (0, 70)
