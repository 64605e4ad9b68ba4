"""DoRA's scaling of a product's columns, against float64."""

import pytest
import torch
from kernels.checks import close, narrow, poison

from lorarun.dora import row_norms
from lorarun.kernels.rescale import rescale, rescale_reference


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 129), (700, 40), (0, 5)])
def test_rescale(device, rows, cols, bias, half):
    torch.manual_seed(0)
    dtype = narrow(device) if half else torch.float32
    wide = torch.randn(2, rows, cols + 7).to(device, dtype)  # z is a part of wider rows, as a projection's is
    s, b = (torch.randn(cols, device=device, requires_grad=True) for _ in "sb")
    leaf = wide.requires_grad_()
    z = leaf[..., 3 : 3 + cols]
    poison(device)
    y = rescale(z, s, b if bias else None)
    dy = torch.randn_like(y)
    got = [y, *torch.autograd.grad(y, [leaf, s] + [b] * bias, dy)]
    exact = [t.detach().double().requires_grad_() for t in (z, s, b)]
    expected = rescale_reference(exact[0], exact[1], exact[2] if bias else None)
    grads = torch.autograd.grad(expected, exact[: 2 + bias], dy.double())
    got[1] = got[1][..., 3 : 3 + cols]
    for i, (ours, theirs) in enumerate(zip(got, [expected, *grads], strict=True)):
        # y and dz are one rounding of a product or two; ds and db sums of fp32 over 2 · rows
        close(ours.detach(), theirs.detach(), f"result {i}", 4 if i < 2 else 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_norms(dtype):
    torch.manual_seed(0)
    w, a, b = torch.randn(50, 70).to(dtype), torch.randn(4, 70), torch.randn(50, 4)
    w[7] = 0
    b[7] = 0
    rounded = a.to(dtype).double()
    exact = (w.double() + 0.7 * b.double() @ rounded).norm(dim=1)
    got = row_norms(w, a, b, 0.7)
    assert got.dtype == torch.float32
    exact[7] = got[7]  # a row of zeros has a length to divide by
    assert 0 < got[7] < 1e-15
    bound = 1e-6 if dtype == torch.float32 else 2**-8  # W · Aᵀ is rounded to the dtype
    assert ((got / exact - 1).abs() < bound).all()
    assert (row_norms(w.double(), a, b, 0.7) - (w.double() + 0.7 * (b @ a).double()).norm(dim=1))[8:].abs().max() < 1e-4


def test_an_update_that_cancels_the_weight_is_no_nan():
    torch.manual_seed(0)
    a, b = torch.randn(4, 70), torch.randn(50, 4)
    w = -(b @ a)
    assert (row_norms(w, a, b, 1.0) < 2**-10 * w.norm(dim=1)).all()
