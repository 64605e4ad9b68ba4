"""Steps with the options of adapters: the same bits under every policy, in a captured step, and as the planner says."""

import math

import pytest
import torch
from peft_side import fill
from small import packed, texts
from torch.nn.attention import SDPBackend, sdpa_kernel

import lorarun
from lorarun import graph, train
from lorarun.graph import Steps
from lorarun.lora import linears
from lorarun.recompute import POLICIES
from lorarun.trace import Tracer, peak

OPTIONS = {
    "dora": ("llama3", None, {"dora": True}),
    "dora on nf4": ("gemma2", 4, {"dora": True}),
    "dora with dropout": ("llama3", None, {"dora": True, "dropout": 0.2}),
    "dora from pissa": ("qwen3", None, {"dora": True, "init": "pissa"}),
    "bias": ("gemma3-text", None, {"bias": True}),
    "all biases": ("llama-bias", None, {"bias": "all", "targets": ["q_proj", "down_proj"]}),
    "frozen a": ("qwen2", 4, {"freeze_a": True, "dropout": 0.2}),
    "patterns": ("gemma", None, {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"up_proj": 2}}),
}


def adapted(tiny, kind, device="cpu"):
    """A tiny model in training mode with an adapter, every part of which already does something."""
    name, bits, options = OPTIONS[kind]
    model = lorarun.add_lora(lorarun.load(tiny(name), bits=bits, device=device), **({"r": 4, "seed": 0} | options))
    fill(model)
    return model


def step(model, batches):
    model.clock.step = 0
    losses = [lorarun.loss(model, batch) for batch in batches]
    torch.autograd.backward(losses[0] + 2 * losses[1])
    found = [p.grad for p in lorarun.lora_parameters(model)]
    model.zero_grad()
    assert all(grad is not None and grad.isfinite().all() and grad.abs().sum() > 0 for grad in found)
    return [torch.stack(losses).detach(), *found]


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_policy_changes_no_bit(tiny, kind):
    model, batches = adapted(tiny, kind), (packed(4, 6), texts(2, 9, seed=1))
    expected = step(model, batches)
    for policy in POLICIES[1:]:
        model.policies, model.tile = [policy] * len(model.policies), 7
        assert all(map(torch.equal, step(model, batches), expected)), policy


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["dora on nf4", "frozen a"])
def test_a_policy_changes_no_bit_in_kernels(tiny, kind, device, monkeypatch):
    """On two blocks and few tokens, since a kernel under the interpreter takes seconds.  An accelerator would plan by
    itself, and replay the second step."""
    monkeypatch.setattr(train, "follow", lambda model, tokens: None)
    monkeypatch.setattr(graph, "SIGHTINGS", math.inf)
    model, batches = adapted(tiny, kind, device), (packed(4, 6), texts(1, 9, seed=1))
    model.model.layers = model.model.layers[::3]
    model.policies = ["keep", "keep"]
    expected = step(model, batches)
    for policies in (["no_gate_up", "selective"], ["offload", "recompute"]):
        model.policies = policies
        assert all(map(torch.equal, step(model, batches), expected)), policies


@pytest.mark.parametrize("kind", OPTIONS)
def test_what_was_switched_to_before_backward_does_not_matter(tiny, kind):
    """A recomputed block runs the adapter of its forward, with the lengths and the masks of its forward."""
    model, batches = adapted(tiny, kind), (packed(4, 6), texts(2, 9, seed=1))
    expected = step(model, batches)
    model.policies = ["recompute"] * len(model.policies)
    model.clock.step = 0
    losses = [lorarun.loss(model, batch) for batch in batches]
    lorarun.use_adapter(model, None)
    for p in lorarun.lora_parameters(model, "default"):
        p.requires_grad_(True)
    torch.autograd.backward(losses[0] + 2 * losses[1])
    for p, grad in zip(lorarun.lora_parameters(model, "default"), expected[1:], strict=True):
        assert torch.equal(p.grad, grad)


@pytest.mark.parametrize("kind", OPTIONS)
def test_captured_steps_are_eager_ones(tiny, kind, monkeypatch):
    """Also after a step of the optimizer, which changes DoRA's lengths.  Padding changes the order of sums."""
    monkeypatch.setattr(graph, "SIGHTINGS", 1)
    results = []
    for captured in (True, False):
        model = adapted(tiny, kind)
        if captured:
            model.graphs = Steps(lambda run: run() or run)
        parameters = lorarun.lora_parameters(model)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        found = []
        for _ in range(3):
            loss = lorarun.loss(model, packed(9, 1, 17))
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in parameters)]
            optimizer.step()
            optimizer.zero_grad()
        results.append(found)
        assert not captured or (model.graphs.replays, model.graphs.reason) == (3, None)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5 * max(theirs.abs().max().item(), 1e-12))


def test_a_captured_step_notices_another_option(tiny, monkeypatch):
    monkeypatch.setattr(graph, "SIGHTINGS", 1)
    model = adapted(tiny, "dora")
    model.graphs = Steps(lambda run: run() or run)
    lorarun.loss(model, packed(9, 1, 17))
    first = list(model.graphs.held)
    linear = next(linear for _, linear in linears(model))
    linear.lora_magnitude_vector["default"].weight.requires_grad_(False)
    lorarun.loss(model, packed(9, 1, 17))
    assert list(model.graphs.held)[: len(first)] == first and len(model.graphs.held) == 2
    linear.lora_magnitude_vector["default"].weight.data = linear.lora_magnitude_vector["default"].weight.data.clone()
    lorarun.loss(model, packed(9, 1, 17))
    assert len(model.graphs.held) == 1  # a pointer moved: the others are gone


@pytest.mark.parametrize("policy", ["keep", "selective", "recompute"])
@pytest.mark.parametrize("kind", ["dora", "dora on nf4", "dora from pissa", "frozen a"])
def test_prediction_of_a_real_run(tiny, kind, policy):
    """As in test_memory, with the moments and gradients of whatever is trained."""
    model = adapted(tiny, kind)
    batch = {key: torch.randint(3, 900, (1, 96)) for key in ("ids", "labels")}
    with sdpa_kernel(SDPBackend.MATH):
        lorarun.plan(model, 96, policy=policy)
        optimizer = torch.optim.AdamW(lorarun.lora_parameters(model), lr=1e-4, fused=True)
        held = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
        trace = Tracer("cpu")
        with trace:
            for _ in range(3):
                lorarun.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    measured = sum(-(-t.nbytes // 512) * 512 for t in held) + peak(trace.events)
    assert model.planned.allocated == pytest.approx(measured, rel=0.01)
