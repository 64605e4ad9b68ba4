"""A whole model on an accelerator: gradients and fifty steps through the kernels against the reference."""

import contextlib
import copy
import dataclasses

import pytest
import torch

import lorarun
from lorarun import graph
from lorarun.kernels.backend import reference
from lorarun.lora import linears
from lorarun.models import build_model
from lorarun.nn import Linear
from lorarun.quant.store import FP8Store, NF4Store
from lorarun.recompute import POLICIES

SHAPES = {
    "llama": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 5e5,
    },
    "qwen3": {
        "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 128, "sliding_window_pattern": 2,
    },
}  # fmt: skip
VOCAB, LAYERS, TOKENS = 32_000, 4, 1024


def make(name, bits, device, **options):
    """A decoder of real widths with random weights, its projections stored in ``bits``, and an adapter with B ≠ 0."""
    torch.manual_seed(0)
    with torch.device(device):
        model = build_model(SHAPES[name] | {"vocab_size": VOCAB, "num_hidden_layers": LAYERS})
    for parameter in model.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.1
        parameter.data.normal_(std=scale)
        if parameter.ndim == 1 and "gemma" not in name:
            parameter.data += 1.0
    model.requires_grad_(False).to(torch.bfloat16)
    store = {4: NF4Store, 8: FP8Store}.get(bits)
    for path, module in model.named_modules():
        if store and isinstance(module, Linear) and ".layers." in path:
            weight = module.weight.data
            del module.weight
            module.weight = store.from_dense(weight)
    lorarun.add_lora(model, r=16, seed=1, **options)
    for _, linear in linears(model):
        linear.factors("default")[1].data.normal_(std=0.01)
    return model


def data(device):
    """Four packed batches of texts of unequal length, half of each supervised; on the CPU, as batches come."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(4):
        ids = torch.randint(3, VOCAB, (1, TOKENS), generator=generator)
        documents = torch.tensor([[0] * 300 + [1] * 5 + [2] * 519 + [3] * 200])
        labels = torch.where(torch.rand(1, TOKENS, generator=generator) < 0.5, ids, -100)
        found.append({"ids": ids, "labels": labels, "documents": documents})
    return found


def gradients(model, batch, forced):
    with reference() if forced else contextlib.nullcontext():
        lorarun.loss(model, batch).backward()
    grads = [p.grad.float().clone() for p in lorarun.lora_parameters(model)]
    model.zero_grad()
    return grads


def curve(model, batches, forced, steps=50, lr=2e-3):
    optimizer = torch.optim.AdamW(lorarun.lora_parameters(model), lr=lr, fused=True)
    losses = []
    with reference() if forced else contextlib.nullcontext():
        for step in range(steps):
            loss = lorarun.loss(model, batches[step % len(batches)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return torch.stack(losses).float()


def distance(ours, exact):
    return (sum((a - b).square().sum() for a, b in zip(ours, exact, strict=True))).sqrt()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_and_fifty_steps(device, name, bits):
    batches = data(device)
    kernels, plain = make(name, bits, device), make(name, bits, device)
    exact = copy.deepcopy(plain).float()
    assert "16 of 16" in lorarun.report(kernels).to_dict()["operations"]["projections"]

    truth = gradients(exact, batches[0], forced=True)
    noise = distance(gradients(plain, batches[0], forced=True), truth)
    error = distance(gradients(kernels, batches[0], forced=False), truth)
    assert error <= 1.5 * noise, (error.item(), noise.item(), distance(truth, [0 * t for t in truth]).item())

    through_kernels, through_torch = curve(kernels, batches, forced=False), curve(plain, batches, forced=True)
    in_fp32 = curve(exact, batches, forced=True)
    assert in_fp32[-4:].mean() < in_fp32[:4].mean() - 0.3  # it does learn, so the curves say something
    noise = (through_torch - in_fp32).square().mean().sqrt()
    error = (through_kernels - in_fp32).square().mean().sqrt()
    print(
        f"{name} {bits}: from {in_fp32[0]:.3f} to {in_fp32[-1]:.3f}; rms from fp32: torch {noise:.4f}, ours {error:.4f}"
    )
    assert error <= 2 * noise + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_a_hundred_steps_under_each_policy(device, packed, monkeypatch):
    """Eager under each policy, and captured; on NF4, packed texts or dense rows, beside the reference path's curve.

    What is allowed is twice the largest distance from fp32 of three runs of the reference path in bf16, of which two
    begin a rounding beside the first: curves that learn by heart drift apart, each at a rate of its own.
    """
    batches, how = data(device), dict(steps=100, lr=5e-4)
    if not packed:
        batches = [{key: value for key, value in batch.items() if key != "documents"} for batch in batches]
    model = make("llama", 4, device)
    start = [parameter.detach().clone() for parameter in lorarun.lora_parameters(model)]
    in_fp32 = curve(copy.deepcopy(model).float(), batches, forced=True, **how)
    noises = []
    for seed in range(3):
        plain, generator = copy.deepcopy(model), torch.Generator(device).manual_seed(seed)
        for parameter in lorarun.lora_parameters(plain) if seed else ():
            beside = torch.randn(parameter.shape, generator=generator, device=device)
            parameter.data *= 1 + torch.finfo(torch.bfloat16).eps * beside
        noises.append((curve(plain, batches, forced=True, **how) - in_fp32).square().mean().sqrt())
    noise = max(noises)
    assert in_fp32[-4:].mean() < in_fp32[:4].mean() - 0.3
    print(f"\n{'reference':<12}", *(f"{x:.3f}" for x in in_fp32[::10]))
    for name in (*POLICIES, "captured"):
        for parameter, value in zip(lorarun.lora_parameters(model), start, strict=True):
            parameter.data.copy_(value)
        with monkeypatch.context() as patch:
            if name != "captured":
                patch.setattr(graph, "WORK", 0.0)
            lorarun.plan(model, TOKENS, policy="keep" if name == "captured" else name)
            before = model.graphs.replays if model.graphs else 0
            ours = curve(model, batches, forced=False, **how)
        replays = model.graphs.replays - before
        assert replays >= 90 if name == "captured" else replays == 0
        error = (ours - in_fp32).square().mean().sqrt()
        print(f"{name:<12}", *(f"{x:.3f}" for x in ours[::10]), f"rms {error:.4f}, the reference's in bf16 {noise:.4f}")
        assert error <= 2 * noise + 1e-3, name


@pytest.mark.gpu
def test_dropout_draws_one_mask_in_kernels_and_reference(device):
    """With another mask on the other side the gradients would differ by a third of their size."""
    batch = data(device)[0]
    grads = []
    for forced in (False, True):
        model = make("llama", 4, device)
        for _, linear in linears(model):
            linear.adapters["default"] = dataclasses.replace(linear.adapters["default"], dropout=0.1)
        model.clock.step = 5
        grads.append(gradients(model, batch, forced))
    assert distance(*grads) < 0.05 * distance(grads[1], [0 * g for g in grads[1]])


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["keep", "selective", "recompute"])
def test_deterministic_steps_repeat_bit_by_bit(device, policy):
    """Dense rows, which cuDNN would serve otherwise; its backward adds in any order."""
    dense = {key: value for key, value in data(device)[0].items() if key != "documents"}
    model = make("qwen3", 4, device)
    lorarun.plan(model, TOKENS, policy=policy, deterministic=True)
    assert "deterministic" in str(lorarun.report(model))
    first = gradients(model, dense, forced=False)
    for _ in range(5):
        assert all(map(torch.equal, gradients(model, dense, forced=False), first))
