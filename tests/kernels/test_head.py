"""The loss through a head that an adapter changes, against full logits in float64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from kernels.checks import close, narrow, poison

from lorarun.head import composed, head_losses
from lorarun.kernels import cross_entropy
from lorarun.linear import Adapter, Clock, Linear
from lorarun.weighted import Copy, TokenRows

ROWS, DIM, VOCAB, RANK = 10, 16, 300, 4
TOKENS = [3, 70, 299]


def made(device, dtype, kind):
    torch.manual_seed(0)
    head = Linear(DIM, VOCAB)
    head.weight = torch.nn.Parameter((2 * torch.randn(VOCAB, DIM) / DIM**0.5).to(dtype), requires_grad=False)
    if kind == "update":
        head.attach("one", Adapter(0.5, 0.0, 0, Clock()), torch.randn(RANK, DIM) / 4, torch.randn(VOCAB, RANK) / 2)
        head.active = "one"
    elif kind == "rows":
        head.token_adapter = TokenRows()
        head.token_adapter.add("one", torch.tensor(TOKENS), torch.randn(len(TOKENS), DIM) / 2)
        head.trained = "one"
    else:
        head.modules_to_save = torch.nn.ModuleDict({"one": Copy(torch.randn(VOCAB, DIM) / 2)})
        head.trained = "one"
    return head.to(device)


def table(head, kind):
    """The head as one weight in float64, of leaves that stand for its parameters."""
    leaves = [p.detach().double().requires_grad_() for p in head.parameters() if p.requires_grad]
    weight = head.weight.double()
    if kind == "update":
        return weight + 0.5 * leaves[1] @ leaves[0], leaves
    if kind == "rows":
        return weight.index_copy(0, torch.tensor(TOKENS, device=weight.device), leaves[0]), leaves
    return leaves[0], leaves


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["update", "rows", "copy"])
def test_values_and_gradients(device, monkeypatch, kind, softcap, half):
    """In chunks of three rows, each row weighted by its own number.  Masters are fp32, products in ``dtype``: with 16
    bits each factor is rounded on its way into a product, which is a rounding more than a frozen head has."""
    dtype = narrow(device) if half else torch.float32
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 3 * 4 * dtype.itemsize * VOCAB)
    head = made(device, dtype, kind)
    assert composed(head) == (kind != "copy")
    hidden, targets = torch.randn(ROWS, DIM).to(device, dtype), torch.randint(VOCAB, (ROWS,), device=device)
    targets[::3], targets[1] = -100, TOKENS[1]
    upstream = torch.randn(ROWS, device=device)
    poison(device)
    ours = hidden.clone().requires_grad_()
    losses = head_losses(SimpleNamespace(lm_head=head, softcap=softcap), ours, targets)
    assert losses.dtype == torch.float32 and (losses[targets == -100] == 0).all()
    trained = [p for p in head.parameters() if p.requires_grad]
    got = torch.autograd.grad(losses, [ours, *trained], upstream)
    exact = hidden.double().requires_grad_()
    weight, leaves = table(head, kind)
    z = exact @ weight.T
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    expected = F.cross_entropy(z, targets, reduction="none")
    wanted = torch.autograd.grad(expected, [exact, *leaves], upstream.double())
    close(losses.to(dtype), expected, "loss", 12 if half else 32)
    for name, a, b in zip(["hidden", *"ab"], got, wanted, strict=False):
        assert a.dtype == (dtype if name == "hidden" else torch.float32)
        close(a.to(dtype), b, name, 12 if half else 64)
