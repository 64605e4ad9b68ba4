"""DoRA's scaling of a product's columns, against float64."""

import pytest
import torch
from kernels.checks import close, narrow, poison

from lorarun.kernels.rescale import rescale, rescale_backward, rescale_reference


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


@pytest.mark.kernel
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 3, 700])
def test_the_gradient_of_what_is_divided_by_a_length(device, rows, bias):
    torch.manual_seed(0)
    dy, z = torch.randn(2, rows, 129, device=device)
    s, norms = torch.rand(2, 129, device=device) + 0.5
    poison(device)
    dz, dm, db = rescale_backward(dy, z, s, norms, bias)
    exact = [t.double() for t in (dy, z, s, norms)]
    close(dz, exact[0] * exact[2], "dz")
    close(dm, (exact[0] * exact[1]).sum(0) / exact[3], "dm", 64)
    assert (db is not None) == bias
    if db is not None:
        close(db, exact[0].sum(0), "db", 64)
