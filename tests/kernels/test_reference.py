"""Each operation against something written by others, or against the plain formula in float64."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from lorarun.kernels import cross_entropy
from lorarun.kernels.cross_entropy import linear_cross_entropy, linear_scores
from lorarun.kernels.gated import ACTIVATIONS, gated
from lorarun.kernels.lora import low_rank
from lorarun.kernels.rms_norm import rms_norm
from lorarun.kernels.rope import rope


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("theirs", "plus_one"), [(LlamaRMSNorm, False), (Gemma3RMSNorm, True)])
def test_rms_norm_equals_transformers_to_the_bit(theirs, plus_one, dtype):
    x, w = 3 * torch.randn(5, 7, 48).to(dtype), torch.randn(48).to(dtype)
    norm = theirs(48, eps=1e-6).to(dtype)
    norm.weight.data.copy_(w)
    assert torch.equal(rms_norm(x, w, 1e-6, plus_one), norm(x))


@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm_gradients(plus_one):
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    w = torch.randn(10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5, plus_one), (x, w))


def test_rms_norm_backward_leaves_the_incoming_gradient_alone():
    """A norm whose backward overwrites the gradient it is given corrupts the residual branch that shares it."""
    x = torch.randn(4, 16, requires_grad=True)
    w1, w2 = torch.randn(16), torch.randn(16)
    y = x + rms_norm(torch.tanh(rms_norm(x, w1, 1e-6)), w2, 1e-6)
    given = torch.randn_like(y)
    before = given.clone()
    first = torch.autograd.grad(y, x, given, retain_graph=True)[0]
    second = torch.autograd.grad(y, x, given)[0]
    assert torch.equal(given, before) and torch.equal(first, second)


@pytest.mark.parametrize("head_dim", [16, 80])
def test_rope_equals_transformers(head_dim):
    q, k = torch.randn(2, 9, 4, head_dim), torch.randn(2, 9, 2, head_dim)
    angles = torch.rand(2, 9, head_dim // 2) * 100
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    theirs = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    ours = rope(q, k, angles.cos(), angles.sin())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_rope_norms_heads_first():
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
    wq, wk, angles = torch.randn(8), torch.randn(8), torch.rand(1, 5, 4)
    ours = rope(q, k, angles.cos(), angles.sin(), wq, wk, eps=1e-5, plus_one=True)
    theirs = rope(rms_norm(q, wq, 1e-5, True), rms_norm(k, wk, 1e-5, True), angles.cos(), angles.sin())
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gated_follows_the_formula(act):
    gate = torch.linspace(-4, 4, 4001, dtype=torch.float64, requires_grad=True)
    up = torch.randn(4001, dtype=torch.float64, requires_grad=True)
    x = gate
    formula = {
        "silu": x / (1 + torch.exp(-x)),
        "gelu": 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        "gelu_pytorch_tanh": 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    }[act] * up
    ours = gated(gate, up, act)
    torch.testing.assert_close(ours, formula, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (gate, up), upstream), torch.autograd.grad(formula, (gate, up), upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cross_entropy_equals_full_logits(monkeypatch, softcap, smoothing):
    vocab, dim = 37, 8
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 8 * vocab * 3)  # three rows a chunk
    hidden = torch.randn(10, dim, dtype=torch.float64, requires_grad=True)
    weight = (3 * torch.randn(vocab, dim, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(vocab, (10,))
    targets[[1, 4, 5, 9]] = -100
    ours = linear_cross_entropy(hidden, weight, targets, softcap, smoothing=smoothing)
    logits = hidden @ weight.T
    if softcap:
        assert logits.abs().max() > 2 * softcap
        logits = softcap * torch.tanh(logits / softcap)
    theirs = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100, label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert (ours[targets == -100] == 0).all()
    upstream = torch.randn(10, dtype=torch.float64)  # each row weighted by its own number
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight), upstream),
        torch.autograd.grad(theirs, (hidden, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_hits_are_the_arg_max_and_of_equal_ones_the_first(monkeypatch, softcap):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 8 * 37 * 3)
    hidden, weight = torch.randn(10, 8, dtype=torch.float64), torch.randn(37, 8, dtype=torch.float64)
    best = (hidden @ weight.T).argmax(dim=1)
    targets = torch.where(torch.arange(10) % 2 == 0, best, (best + 1) % 37)
    targets[4] = -100
    losses, hits = linear_scores(hidden, weight, targets, softcap)
    assert torch.equal(losses, linear_cross_entropy(hidden, weight, targets, softcap))
    assert torch.equal(hits, targets == best) and hits.sum() == 4
    weight = torch.tensor([[1.0], [3.0], [3.0]])
    assert linear_scores(torch.ones(3, 1), weight, torch.arange(3))[1].tolist() == [False, True, False]


def test_cross_entropy_of_no_rows_and_of_16_bits():
    weight = torch.randn(50, 8, dtype=torch.bfloat16)
    empty = torch.zeros(0, 8, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(empty, weight, torch.zeros(0, dtype=torch.int64)).sum().backward()
    assert empty.grad.shape == (0, 8)
    hidden = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
    losses = linear_cross_entropy(hidden, weight, torch.randint(50, (6,)))
    losses.sum().backward()
    assert losses.dtype == torch.float32 and hidden.grad.dtype == torch.bfloat16


def test_low_rank_casts_down_and_returns_gradients_in_the_masters_dtype():
    x = torch.randn(3, 16, dtype=torch.bfloat16, requires_grad=True)
    a, b = torch.randn(4, 16, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    y = low_rank(x, a, b, 0.5)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and a.grad.dtype == b.grad.dtype == torch.float32
    exact = 0.5 * x.double() @ a.double().T @ b.double().T
    assert (y.double() - exact).norm() < 2**-7 * exact.norm()  # a few roundings to 8 bits
