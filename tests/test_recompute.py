"""Policies of blocks: the same bits as ``keep``, what is run again and what is not, and what stays in memory."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lorarun
from lorarun import project
from lorarun.data import Batch
from lorarun.kernels import attention
from lorarun.kernels.backend import reference
from lorarun.lora import linears
from lorarun.recompute import POLICIES, run_block

FAMILIES = ["llama3", "qwen3", "gemma2", "gemma3-text"]
OTHERS = [policy for policy in POLICIES if policy != "keep"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def load(tiny, device):
    """A tiny model in training mode with an adapter that already does something."""

    def make(name, dropout=0.0, **options):
        model = lorarun.add_lora(lorarun.load(tiny(name), device=device, **options), r=4, dropout=dropout, seed=0)
        generator = torch.Generator().manual_seed(1)
        for _, linear in linears(model):
            b = linear.factors("default")[1]
            b.data.copy_(0.05 * torch.randn(b.shape, generator=generator))
        return model

    return make


def batch(packed, seq=12, seed=0):
    ids = torch.randint(3, 1000, (2, seq), generator=torch.Generator().manual_seed(seed))
    documents = torch.tensor([[0] * 5 + [1] * (seq - 5), [0] * (seq - 2) + [-1] * 2]) if packed else None
    return Batch(ids, ids, documents=documents)


def take_gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    assert all(grad is not None and torch.isfinite(grad).all() and grad.abs().sum() > 0 for grad in found.values())
    return found


def assert_equal(got, expected):
    assert got.keys() == expected.keys() and got
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def step(model, policy, packed, tile=None):
    """Loss and gradients of a step of two losses before one backward."""
    model.policies = [policy] * len(model.policies)
    model.tile = tile
    model.clock.step = 0
    losses = [lorarun.loss(model, batch(packed, seed=seed)) for seed in (0, 1)]
    torch.autograd.backward(losses[0] + 2 * losses[1])
    return {"loss": torch.stack(losses).detach()} | take_gradients(model)


def compare_policies(model, packed, policies, tile=None):
    expected = step(model, "keep", packed, tile)
    for policy in policies:
        assert_equal(step(model, policy, packed, tile), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_policy_changes_no_bit(load, name, packed, dropout):
    model = load(name, dropout)
    compare_policies(model, packed, OTHERS)
    compare_policies(model, packed, OTHERS, tile=7)


@pytest.mark.kernel
@pytest.mark.parametrize(("dropout", "tile"), [(0.0, None), (0.1, 16)])
@pytest.mark.parametrize(("name", "packed"), [("llama3", False), ("qwen3", True), ("gemma2", True), ("gemma3-text", False)])
def test_a_policy_changes_no_bit_in_kernels(load, name, packed, dropout, tile):
    model = load(name, dropout)
    compare_policies(model, packed, OTHERS, tile)
