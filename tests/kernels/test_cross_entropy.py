"""Linear + cross-entropy against full logits in float64."""

import pytest
import torch
import torch.nn.functional as F
from kernels.checks import close, narrow, poison

from lorarun.kernels import cross_entropy
from lorarun.kernels.cross_entropy import linear_cross_entropy, linear_scores


def check(device, dtype, rows, dim, vocab, softcap=None, scale=1.0, roundings=8, trained=True, smoothing=0.0):
    torch.manual_seed(0)
    hidden = torch.randn(rows, dim).to(device, dtype)
    weight = (2 * torch.randn(vocab, dim) / dim**0.5).to(device, dtype)
    targets = torch.randint(vocab, (rows,), device=device)
    targets[::3] = -100
    upstream = torch.randn(rows, device=device)  # each row weighted by its own number
    results = []
    for exact in (False, True):
        h, w = ((t.double() if exact else t.clone()).requires_grad_() for t in (hidden, weight))
        w.requires_grad_(trained)
        poison(device)
        if exact:
            z = scale * h @ w.T
            z = softcap * torch.tanh(z / softcap) if softcap else z
            losses = F.cross_entropy(z, targets, reduction="none", label_smoothing=smoothing)
        else:
            losses = linear_cross_entropy(h, w, targets, softcap, scale, smoothing)
            assert (losses[targets == -100] == 0).all() and losses.dtype == torch.float32
        leaves = (h, w) if trained else (h,)
        results.append((losses, *torch.autograd.grad(losses, leaves, upstream.to(losses.dtype))))
    for name, ours, exact in zip(("loss", "hidden", "weight"), *results, strict=False):
        # Losses are fp32 numbers computed from logits of the narrow dtype.
        close(ours.to(dtype) if name == "loss" else ours, exact, name, roundings)


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (1.5, 1.0), (None, 0.25), (2.0, 3.0)])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 50), (7, 65), (10, 5000)])
def test_values_and_gradients(device, monkeypatch, rows, vocab, softcap, scale, half):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 3 * 4 * vocab)  # a few rows a chunk
    check(device, narrow(device) if half else torch.float32, rows, 16, vocab, softcap, scale, 8 if half else 32)


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (2.0, 3.0)])
@pytest.mark.parametrize(("smoothing", "vocab"), [(0.1, 65), (0.5, 5000)])
def test_label_smoothing(device, monkeypatch, vocab, smoothing, softcap, scale, half):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 3 * 4 * vocab)
    dtype = narrow(device) if half else torch.float32
    check(device, dtype, 7, 16, vocab, softcap, scale, 8 if half else 32, smoothing=smoothing)


@pytest.mark.kernel
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("vocab", [65, 5000])
def test_hits_are_the_arg_max(device, monkeypatch, vocab, softcap):
    """Losses as ever, and whether each target is the first of the highest logits."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 3 * 4 * vocab)
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 16, device=device), torch.randn(vocab, 16, device=device) / 4
    z = (hidden.double() @ weight.double().T).cpu()
    best = z.argmax(dim=1).to(device)
    targets = (best + torch.randint(1, vocab, (12,), device=device)) % vocab  # any but the best
    targets[::2] = best[::2]
    targets[4] = -100
    losses, hits = linear_scores(hidden, weight, targets, softcap)
    assert torch.equal(losses, linear_cross_entropy(hidden, weight, targets, softcap))
    assert torch.equal(hits.cpu(), z.argmax(dim=1) == targets.cpu())
    assert hits.sum() == 5


@pytest.mark.kernel
def test_of_equal_logits_the_first_is_the_hit(device):
    """Whole numbers, so that the ties are exact: the highest logits are 3, at places 2 and 4."""
    weight = torch.tensor([[1.0], [0.0], [3.0], [2.0], [3.0]], device=device)
    targets = torch.tensor([0, 2, 4, 3], device=device)
    assert linear_scores(torch.ones(4, 1, device=device), weight, targets)[1].tolist() == [False, True, False, False]
    zero = torch.zeros(2, 1, device=device)
    assert linear_scores(zero, weight, torch.tensor([0, 4], device=device))[1].tolist() == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("rows", "dim", "vocab"), [(4097, 2048, 128256), (1000, 1152, 262144)])
def test_values_and_gradients_large(device, rows, dim, vocab, softcap):
    check(device, torch.bfloat16, rows, dim, vocab, softcap, trained=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(8193, 262144), (16744, 128256)])
def test_past_two_to_the_31_logits(device, monkeypatch, rows, vocab):
    """In one chunk of more than 2³¹ elements, the last rows are what they are alone."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 2**40)
    torch.manual_seed(0)
    hidden = torch.randn(rows, 64, device=device, dtype=torch.bfloat16)
    weight = torch.randn(vocab, 64, device=device, dtype=torch.bfloat16)
    targets = torch.randint(vocab, (rows,), device=device)
    losses, grads = [], []
    for part in (slice(None), slice(rows - 64, rows)):
        h = hidden[part].clone().requires_grad_()
        loss = linear_cross_entropy(h, weight, targets[part])
        loss.sum().backward()
        losses.append(loss[-64:])
        grads.append(h.grad[-64:])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    close(grads[0], grads[1], "gradient")


@pytest.mark.kernel
def test_no_rows_no_gradient_and_extreme_logits(device):
    weight = torch.randn(50, 8, device=device)
    empty = torch.zeros(0, 8, device=device, requires_grad=True)
    linear_cross_entropy(empty, weight, torch.zeros(0, dtype=torch.int64, device=device)).sum().backward()
    assert empty.grad.shape == (0, 8)
    hidden, targets = 1e3 * torch.randn(4, 8, device=device), torch.tensor([0, 3, -100, 7], device=device)
    with torch.no_grad():
        losses = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(losses, F.cross_entropy(hidden @ weight.T, targets, reduction="none"))
