"""Captured steps on a GPU against the same steps run eagerly: gradients, curves, memory, failures, waiting."""

import copy
import dataclasses
import gc

import pytest
import torch
from test_training_gpu import VOCAB, curve, distance, make

import lorarun
from lorarun import graph
from lorarun.data import supervised
from lorarun.graph import SIGHTINGS
from lorarun.kernels.backend import reference
from lorarun.lora import linears

pytestmark = pytest.mark.gpu


def batch(rows, seq, learned, seed=0, documents=True):
    """``learned`` tokens are supervised; packed texts of unequal length, or dense rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, seq), generator=generator)
    numbers = torch.zeros(rows, seq, dtype=torch.int64)
    if documents:
        for start in torch.randint(1, seq, (3,), generator=generator).tolist():
            numbers[:, start:] += 1
    first = torch.cat([torch.ones(rows, 1, dtype=torch.bool), numbers[:, 1:] != numbers[:, :-1]], dim=1)
    choice = (~first).flatten().nonzero().squeeze(1)
    choice = choice[torch.randperm(len(choice), generator=generator)[:learned]]
    labels = torch.full((rows * seq,), -100)
    labels[choice] = ids.flatten()[choice]
    made = {"ids": ids, "labels": labels.view(rows, seq)}
    made |= {"documents": numbers} if documents else {}
    assert supervised(made) == learned
    return made


def gradients(model, data, denominator=None):
    lorarun.loss(model, data, denominator).backward()
    grads = [p.grad.clone() for p in lorarun.lora_parameters(model)]
    model.zero_grad()
    return grads


def captured(model, data, denominator=None):
    """Gradients from a replay; the first step plans, and makes the copies of weights that the plan keeps."""
    for _ in range(SIGHTINGS + 1):
        found = gradients(model, data, denominator)
    assert model.graphs.reason is None and model.graphs.replays > 0, str(model.graphs)
    return found


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_without_padding_gradients_are_bit_equal(device, name, bits):
    """The same kernels on the same shapes: packed rows of a bucket's length, supervised in a bucket's number."""
    model = make(name, bits, device)
    eager, data = copy.deepcopy(model), batch(1, 512, 256)
    ours = captured(model, data, 256)
    gradients(eager, data, 256)
    eager.graphs.stopped = "a test compares with it"
    theirs = gradients(eager, data, 256)
    assert eager.graphs.replays == 0
    assert all(map(torch.equal, ours, theirs))
    again = gradients(model, batch(1, 512, 256, seed=1), 256)
    assert distance(again, ours) > 0.1 * distance(ours, [0 * g for g in ours])
    assert all(map(torch.equal, gradients(model, data, 256), theirs))  # nothing of the other batch is left


@pytest.mark.parametrize("keep_dense", [False, True])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("documents", [True, False])
def test_with_padding_gradients_are_as_close_to_float32(device, documents, bits, keep_dense):
    model, data = make("llama", bits, device), batch(2, 250, 333, documents=documents)
    model.keep_dense = keep_dense
    eager = copy.deepcopy(model)
    exact = copy.deepcopy(model).float()
    with reference():
        truth = gradients(exact, data)
    noise = distance(gradients(eager, data), truth)
    assert distance(captured(model, data), truth) <= 1.2 * noise


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("documents", [True, False])
def test_fifty_steps(device, documents, bits, monkeypatch):
    batches = [batch(2, 500, 480 + 7 * seed, seed, documents) for seed in range(4)]
    model = make("llama", bits, device)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).float()
    in_fp32 = curve(exact, batches, forced=True)
    ours = curve(model, batches, forced=False)
    assert model.graphs.replays >= 40, str(model.graphs)
    monkeypatch.setattr(graph, "WORK", 0)
    theirs = curve(eager, batches, forced=False)
    assert eager.graphs.replays == 0
    assert in_fp32[-4:].mean() < in_fp32[:4].mean() - 0.3
    noise, error = ((c - in_fp32).square().mean().sqrt() for c in (theirs, ours))
    print(f"from {in_fp32[0]:.3f} to {in_fp32[-1]:.3f}; rms from fp32: eager {noise:.4f}, captured {error:.4f}")
    assert error <= 1.5 * noise + 1e-3


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize(
    "options", [{"dora": True}, {"dora": True, "init": "pissa_niter_2"}, {"bias": True}, {"freeze_a": True}], ids=str
)
def test_options_of_adapters_after_a_step(device, bits, options):
    """DoRA's lengths are computed inside the graph: after a step they are those of the new matrices."""
    model = make("llama", bits, device, **options)
    eager, data = copy.deepcopy(model), batch(1, 512, 256)
    before = captured(model, data, 256)
    gradients(eager, data, 256)
    eager.graphs.stopped = "a test compares with it"
    for each in (model, eager):
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for p in lorarun.lora_parameters(each):
                p.add_(0.05 * torch.randn(p.shape, device=device, generator=generator))
    ours, theirs = gradients(model, data, 256), gradients(eager, data, 256)
    assert all(map(torch.equal, ours, theirs)) and eager.graphs.replays == 0
    assert distance(ours, before) > 0.1


def test_dropout_follows_the_clock(device, monkeypatch):
    model, data = make("llama", 4, device), batch(1, 512, 256)
    for _, linear in linears(model):
        linear.adapters["default"] = dataclasses.replace(linear.adapters["default"], dropout=0.1)
    captured(model, data, 256)
    found = {}
    for step in (7, 8, 7):
        model.clock.step = step - 1
        found[step] = gradients(model, data, 256)
    assert model.graphs.reason is None and distance(found[7], found[8]) > 0.02 * distance(
        found[7], [0 * g for g in found[7]]
    )
    monkeypatch.setattr(graph, "WORK", 0)
    for step in (7, 8):
        model.clock.step = step - 1
        assert all(map(torch.equal, gradients(model, data, 256), found[step]))


@pytest.mark.parametrize("eager", [False, True])
def test_nobody_waits_for_the_device(device, eager, monkeypatch):
    model, batches = make("llama", 4, device), [batch(1, 500, 250 + seed, seed) for seed in range(3)]
    if eager:
        monkeypatch.setattr(graph, "WORK", 0)
    curve(model, batches, forced=False, steps=6)  # compiles, captures, makes the optimizer's kernels ready
    parameters = lorarun.lora_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    replays = model.graphs.replays
    torch.cuda.set_sync_debug_mode("error")
    try:
        for data in batches:
            loss = lorarun.loss(model, data)
            (2 * loss).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert model.graphs.replays - replays == (0 if eager else 3)


@pytest.mark.parametrize("how", ["memory", "waiting"])
def test_a_capture_that_fails(device, how, monkeypatch):
    """Training goes on eagerly, on the same stream, and nothing stands in the way of a later capture."""
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()  # by what earlier tests left
    model, data = make("llama", 4, device), batch(1, 512, 256)
    run, calls = graph.Step.run, []

    def fail(step):
        run(step)
        calls.append(torch.cuda.is_current_stream_capturing())
        if calls[-1]:
            step.loss.item() if how == "waiting" else torch.empty(1 << 46, device=device)

    monkeypatch.setattr(graph.Step, "run", fail)
    eager = [gradients(model, data, 256) for _ in range(4)]
    assert calls == [False, False, True]
    said = "out of memory while capturing" if how == "memory" else "the capture failed"
    assert model.graphs.reason.startswith(said) and not model.graphs.held, model.graphs.reason
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    before = torch.cuda.memory_allocated()
    gradients(model, data, 256)
    assert torch.cuda.memory_allocated() == before
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - reserved < before + 2**28
    assert torch.randn(8, device=device).isfinite().all()  # torch's generator is not left inside the capture
    monkeypatch.undo()
    model.graphs.drop()
    model.graphs.stopped = None
    assert all(map(torch.equal, captured(model, data, 256), eager[0]))


def test_graphs_share_their_memory(device):
    model = make("llama", 4, device)
    captured(model, batch(1, 1024, 512))
    torch.cuda.empty_cache()
    one = torch.cuda.memory_reserved()
    for seq in (768, 512, 384, 256):
        captured(model, batch(1, seq, seq // 2))
    torch.cuda.empty_cache()
    assert len(model.graphs.held) == 5
    flats = 5 * sum(p.numel() for p in lorarun.lora_parameters(model)) * 4
    assert torch.cuda.memory_reserved() - one < flats + 2**28
    assert model.graphs.drop()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < one
