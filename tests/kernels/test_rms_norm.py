"""RMSNorm: transformers to the bit on the CPU; the kernel against float64, with memory poisoned beforehand."""

import pytest
import torch
from kernels.checks import close, narrow, poison

from lorarun.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm


@pytest.mark.kernel
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("kind", ["norm", "pass", "add", "post"])
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 5, 257)])
@pytest.mark.parametrize("half", [False, True])
def test_values_and_gradients(device, shape, kind, plus_one, half):
    check(device, shape, kind, plus_one, narrow(device) if half else torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["pass", "add", "post"])
@pytest.mark.parametrize("shape", [(4097, 4096), (2, 1024, 5376), (7, 8192)])
def test_values_and_gradients_large(device, shape, kind):
    check(device, shape, kind, kind == "post", torch.bfloat16)


def check(device, shape, kind, plus_one, dtype):
    torch.manual_seed(0)
    x, delta, dsum, dy = ((3 * torch.randn(shape)).to(device, dtype) for _ in range(4))
    w, post = (torch.randn(shape[-1]).to(device, dtype) for _ in range(2))
    inputs = [x] if kind in ("norm", "pass") else [x, delta]
    results = []
    for exact in (False, True):
        leaves = [(t.double() if exact else t.clone()).requires_grad_() for t in inputs]
        branch = leaves[1] if len(leaves) > 1 else None
        args = (w.double(), post.double()) if exact else (w, post)
        call = add_rms_norm_reference if exact else add_rms_norm
        poison(device)
        if kind == "norm":
            total, y = None, rms_norm(leaves[0], args[0], 1e-5, plus_one)
        else:
            total, y = call(leaves[0], branch, args[0], 1e-5, plus_one, args[1] if kind == "post" else None)
        outputs = [(y, dy)] + ([] if total is None else [(total, dsum)])
        grads = torch.autograd.grad([o for o, _ in outputs], leaves, [g.to(o.dtype) for o, g in outputs])
        results.append([y, *([] if total is None else [total]), *grads])
    for i, (ours, exact) in enumerate(zip(*results, strict=True)):
        close(ours, exact, f"{kind} result {i}")


@pytest.mark.kernel
def test_no_rows_and_strided_rows(device):
    w = torch.randn(48, device=device)
    empty = torch.empty(0, 48, device=device, requires_grad=True)
    rms_norm(empty, w, 1e-6).sum().backward()
    assert empty.grad.shape == (0, 48)
    wide = torch.randn(6, 100, device=device)
    part = wide[:, 10:58]
    torch.testing.assert_close(rms_norm(part, w, 1e-6), rms_norm(part.contiguous(), w, 1e-6))


@pytest.mark.kernel
def test_backward_twice_and_the_incoming_gradient_unharmed(device):
    x = torch.randn(5, 64, device=device, requires_grad=True)
    w = torch.randn(64, device=device)
    total, y = add_rms_norm(x, torch.tanh(x), w, 1e-6)
    given = [torch.randn_like(total), torch.randn_like(y)]
    before = [g.clone() for g in given]
    first = torch.autograd.grad([total, y], x, given, retain_graph=True)[0]
    second = torch.autograd.grad([total, y], x, given)[0]
    assert torch.equal(first, second) and all(map(torch.equal, given, before))


@pytest.mark.kernel
def test_only_one_of_the_two_results_used(device):
    x = torch.randn(5, 64, device=device, requires_grad=True)
    w = torch.randn(64, device=device)
    total, y = add_rms_norm(x, None, w, 1e-6)
    assert torch.equal(torch.autograd.grad(total.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    assert torch.isfinite(torch.autograd.grad(y.sum(), x)[0]).all()


@pytest.mark.kernel
def test_trained_weights_get_gradients(device):
    leaves = [torch.randn(7, 64), torch.randn(7, 64), torch.randn(64), torch.randn(64)]
    grads = []
    for call, dtype in ((add_rms_norm, torch.float32), (add_rms_norm_reference, torch.float64)):
        x, d, w, p = (t.to(device, dtype).requires_grad_() for t in leaves)
        total, y = call(x, d, w, 1e-6, True, p)
        grads.append(torch.autograd.grad((total * y).sum(), (x, d, w, p)))
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)
