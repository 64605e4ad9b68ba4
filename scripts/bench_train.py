"""``bench.py train``: one model, one shape of work; tokens a second, where the time goes, memory, loss curve, peers.

A step is loss, backward, clipping and AdamW, on adapters of rank 16 on all seven projections, over four batches of
random tokens in turn; the peers get the same weights, the same first values of A, the same tokens and the same step.
The ceiling of a step is what this card needs when nothing but its limits counts: every frozen product at the rate
measured for its shape here, attention as measured alone, and the bytes that fused kernels cannot avoid at the speed of
a copy (:func:`floor`); nothing is recomputed in it.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import bench_models
import torch
from bench_models import RANK, warm_up
from bench_timing import (
    DEVICE,
    begin,
    copy_rate,
    elsewhere,
    measure,
    random,
    reason,
    timed_steps,
    training_step,
)
from torch import Tensor

import lorarun
from lorarun.kernels.attention import attention, document_spans
from lorarun.nn import Model
from lorarun.recompute import POLICIES

PEERS = ("hf", "hf-off", "liger", "liger-off", "unsloth", "unsloth-off")
# By what a kernel's name contains, the first that fits.
CLASSES = {
    "attention": ("flash", "fmha", "sdpa", "cudnn", "attention", "_forward_kernel", "_dq_kernel", "_dkv_kernel"),
    "GEMM": ("gemm", "nvjet", "cutlass", "xmma", "matmul", "_scaled_mm", "cublas", "splitkreduce"),
    "memory-bound": ("",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", choices=bench_models.CONFIGS)
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--documents", type=int, help="pack documents of about so many tokens into one row")
    parser.add_argument("--policy", choices=("auto", *POLICIES), default="auto")
    parser.add_argument("--compute", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--keep-dense", choices=("yes", "no"), help="16-bit copies of stored weights; else as planned")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dora", action="store_true", help="adapters with magnitudes; of lorarun alone, not the peers")
    parser.add_argument("--peers", default="", help=f"some of {','.join(PEERS)}; '-off': without checkpointing")


# --- the ceiling -----------------------------------------------------------------------------------------------------


def shapes(config: Any) -> dict[str, tuple[int, int, int]]:
    """Rows and columns of each frozen product, and how many there are of it; q|k|v and gate|up as one."""
    d, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    q = config.num_attention_heads * config.head_dim
    qkv = q + 2 * config.num_key_value_heads * config.head_dim
    return {
        "qkv": (qkv, d, layers),
        "o": (d, q, layers),
        "gate_up": (2 * f, d, layers),
        "down": (d, f, layers),
        "head": (config.vocab_size, d, 1),
    }


def moved(config: Any, tokens: int, bits: int, trained: int) -> dict[str, float]:
    """Bytes that a step cannot avoid beside products and attention, activations in 16 bits, nothing recomputed.

    norms: a sum's operands read, sum and norm written, the same on the way back.  rotary: q and k read and written.
    gate: 3 and 5 vectors.  adapters: inputs read for A, outputs (but gate|up's, finished in the activation) read and
    written for B; backward dy read, x read, dx read and written (but down's, finished in the activation).  weights:
    decoded once in each direction.  loss: logits read and their gradient written.  optimizer: gradient, moments and
    parameter, and clipping.
    """
    d, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    q = config.num_attention_heads * config.head_dim
    k = config.num_key_value_heads * config.head_dim
    wide = q + 2 * k
    weights = sum(rows * cols * count for name, (rows, cols, count) in shapes(config).items() if name != "head")
    stored = {4: 4.127 / 8 + 2, 8: 3.0, 16: 0.0}[bits]
    adapters = (d + q + d + f) + 2 * (wide + d + d) + (wide + d + 2 * f + d) + 3 * (d + q + d)
    return {
        "norms": 2.0 * tokens * layers * (6 + 8) * d,
        "rotary": 2.0 * tokens * layers * 4 * (q + k),
        "gate": 2.0 * tokens * layers * 8 * f,
        "adapters": 2.0 * tokens * layers * adapters,
        "weights": 2.0 * weights * stored,
        "loss": 2.0 * tokens * 2 * config.vocab_size,
        "optimizer": 40.0 * trained,
    }


def products(config: Any, tokens: int, compute: str) -> dict[str, float]:
    """Milliseconds of a step's frozen products in both directions, measured for each shape; the head stays in bf16."""
    rows = min(tokens, 8192)
    found = {}
    for name, (out, inner, count) in shapes(config).items():
        x, dy, w = random(rows, inner), random(rows, out), random(out, inner)
        if compute == "fp8" and name != "head":
            calls = [_scaled(x, w), _scaled(dy, w.T.contiguous())]
        else:
            calls = [lambda x=x, w=w: x @ w.T, lambda dy=dy, w=w: dy @ w]
        found[name] = sum(measure(call, 8) for call in calls) * count * tokens / rows
        del x, dy, w, calls
    return found


def _scaled(x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    """x · wᵀ in FP8 with a scale a row of each, the casts not counted."""
    x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    sx, sw = torch.ones(len(x), 1, device=x.device), torch.ones(1, len(w), device=x.device)
    return lambda: torch._scaled_mm(x8, w8.T, sx, sw, out_dtype=torch.bfloat16, use_fast_accum=True)


def attentions(config: Any, batch: Any) -> float:
    """Milliseconds of a step's attention in both directions, as ``lorarun`` calls it, measured for each window."""
    rows, seq = batch.ids.shape
    spans = None if batch.documents is None else document_spans(batch.documents.to(DEVICE))
    total = 0.0
    for window in set(config.windows):
        q, k, v = (
            random(rows, seq, heads, config.head_dim).requires_grad_()
            for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        )
        dy = random(*q.shape)

        def both(q: Tensor = q, k: Tensor = k, v: Tensor = v, dy: Tensor = dy, window: int | None = window) -> Any:
            return torch.autograd.grad(attention(q, k, v, spans, window), (q, k, v), dy)

        total += measure(both, 2) * config.windows.count(window)
    return total


def floor(config: Any, batch: Any, bits: int, compute: str, trained: int) -> dict[str, float]:
    """The ceiling in milliseconds, and its parts."""
    tokens = batch.ids.numel()
    copy = copy_rate()
    each = moved(config, tokens, bits, trained)
    parts = {
        "GEMM": sum(products(config, tokens, compute).values()),
        "attention": attentions(config, batch),
        "memory-bound": sum(each.values()) / copy / 1e9,
    }
    torch.cuda.empty_cache()
    return {"ms": sum(parts.values()), **parts}


# --- where the time went ---------------------------------------------------------------------------------------------


def kind(kernel: str) -> str:
    """The class of a kernel by its name."""
    lower = kernel.lower()
    return next(name for name, words in CLASSES.items() if any(word in lower for word in words))


def breakdown(kernels: list[tuple[str, float, float]], step_ms: float) -> dict[str, Any]:
    """Milliseconds of a step by class, from (name, start, end) in microseconds of everything that ran on the GPU.

    What is left of ``step_ms``, the step without the profiler, is launches and idling.  ``top`` are the twelve names
    that took most.
    """
    by_class = dict.fromkeys(CLASSES, 0.0)
    by_name: dict[str, float] = {}
    busy, reached = 0.0, 0.0
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        by_class[kind(name)] += (end - start) / 1e3
        by_name[name[:60]] = by_name.get(name[:60], 0.0) + (end - start) / 1e3
        busy += max(0.0, end - max(start, reached)) / 1e3
        reached = max(reached, end)
    top = sorted(by_name.items(), key=lambda item: -item[1])[:12]
    return {**by_class, "launches, idle": max(0.0, step_ms - busy), "top": dict(top), "kernels": len(kernels)}


def profiled(step: Callable[[], Any]) -> list[tuple[str, float, float]]:
    """What runs on the GPU in one step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Optimizer.", "ProfilerStep", "## "))
    ]


# --- ours ------------------------------------------------------------------------------------------------------------


def planned(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Plan the run; what is predicted, in GiB."""
    plan = lorarun.plan(model, args.batch * args.seq, policy=args.policy, compute=args.compute)
    keep = args.keep_dense == "yes"
    if args.keep_dense is not None and keep != model.keep_dense:
        model.keep_dense = keep
        return {}  # the prediction is for the other way
    return {"allocated": plan.allocated / 2**30, "reserved": plan.reserved / 2**30}


def ours(args: argparse.Namespace) -> dict[str, Any]:
    config = bench_models.CONFIGS[args.model]
    model = bench_models.build(config, args.bits)
    lorarun.add_lora(model, r=RANK, alpha=RANK, dropout=args.dropout, dora=args.dora, seed=0)
    bench_models.same_adapters(model)
    predicted = planned(model, args)
    batches = bench_models.batches(config["vocab_size"], args.batch, args.seq, args.documents)
    parameters = list(lorarun.lora_parameters(model))
    model.train()
    step = training_step(parameters, lambda: lorarun.loss(model, next(batches)))
    found = timed_steps(step, args.steps, warm_up(args.batch, args.seq))
    found["predicted_gib"] = predicted
    found["policies"] = dict(Counter(model.policies))
    found["operations"] = lorarun.report(model).to_dict()["operations"]
    found["trained"] = sum(p.numel() for p in parameters)
    try:
        found["breakdown"] = breakdown(profiled(step), found["ms"])
    except Exception as problem:  # the figures above are worth having without it
        found["breakdown"] = {"failed": reason(problem)}
    return found


def theirs(args: argparse.Namespace, peers: list[str]) -> dict[str, dict[str, Any]]:
    """Each peer on the checkpoint with the same weights, which is written when it is not there."""
    folder = bench_models.checkpoint(args.model)
    if bench_models.parameters(args.model) > bench_models.LARGE:
        return {peer: {"failed": "no checkpoint is made of a model of this size"} for peer in peers}
    if not folder.is_dir():
        print(f"writing {folder} for the peers", flush=True)
        bench_models.write(bench_models.CONFIGS[args.model], folder)
        torch.cuda.empty_cache()
    settings = {
        name: getattr(args, name) for name in ("model", "bits", "batch", "seq", "documents", "steps", "dropout")
    }
    found = {}
    for peer in peers:
        said = list(elsewhere("train", peer, json.dumps({**settings, "folder": str(folder)}), timeout=420.0))
        found[peer] = said[-1] if said else {"failed": "it said nothing"}
        print(line(peer, found[peer], args.batch * args.seq), flush=True)
    return found


# --- the table -------------------------------------------------------------------------------------------------------


def line(name: str, found: dict[str, Any], tokens: int, ms: float | None = None) -> str:
    """A row: tokens a second, milliseconds a step, peaks; ``ms``: our step, to set it beside."""
    if "failed" in found:
        return f"{name:<14} failed: {found['failed']}"
    figures = f"{tokens / found['ms'] * 1e3:>10,.0f}{found['ms']:>10.1f}"
    figures += f"{found['allocated_gib']:>11.2f}{found['reserved_gib']:>10.2f}"
    first, last = found["losses"][0], found["losses"][-1]
    return f"{name:<14}{figures}{first:>9.3f}{last:>9.3f}" + ("" if ms is None else f"   {found['ms'] / ms:.2f}x")


HEADER = f"{'':<14}{'tokens/s':>10}{'ms':>10}{'alloc GiB':>11}{'reserved':>10}{'loss 1':>9}{'last':>9}   ours is faster"


def table(own: dict[str, Any], peers: dict[str, dict[str, Any]], tokens: int) -> str:
    ms = own.get("ms")
    lines = [HEADER, line("lorarun", own, tokens)]
    lines += [line(name, found, tokens, ms) for name, found in peers.items()]
    if predicted := own.get("predicted_gib"):
        lines.append("predicted GiB: " + ", ".join(f"{name} {value:.2f}" for name, value in predicted.items()))
    if policies := own.get("policies"):
        lines.append("blocks: " + ", ".join(f"{count} {name}" for name, count in policies.items()))
    lines += [f"{name}: {value}" for name, value in own.get("operations", {}).items()]
    parts, best = own.get("breakdown", {}), own.get("floor", {})
    if "failed" in parts:
        lines.append(f"no breakdown: {parts['failed']}")
    elif parts:
        lines.append("ms of a step: " + ", ".join(f"{name} {parts[name]:.1f}" for name in [*CLASSES, "launches, idle"]))
        lines += [f"    {spent:>8.2f}  {name}" for name, spent in parts["top"].items()]
    if "ms" in best:
        named = ", ".join(f"{name} {best[name]:.1f}" for name in CLASSES)
        lines.append(f"the card's own limit: {best['ms']:.1f} ms ({named})")
        if ms is not None:
            lines.append(f"share of that ceiling: {best['ms'] / ms:.0%}, of {tokens / best['ms'] * 1e3:,.0f} tokens/s")
    elif "failed" in best:
        lines.append(f"no ceiling: {best['failed']}")
    curves = {"lorarun": own, **peers}
    lines += [
        f"loss {who:<13} " + " ".join(f"{x:.3f}" for x in c["losses"]) for who, c in curves.items() if "losses" in c
    ]
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    """Print the table and the JSON; 1 when our own run failed."""
    peers = [name for name in args.peers.split(",") if name]
    if unknown := sorted(set(peers) - set(PEERS)):
        raise SystemExit(f"error: no peers named {', '.join(unknown)}; there are {', '.join(PEERS)}.")
    torch.manual_seed(0)
    tokens = args.batch * args.seq
    try:
        own = ours(args)
    except Exception as problem:
        own = {"failed": reason(problem)}
    gc.collect()
    torch.cuda.empty_cache()
    print(HEADER + "\n" + line("lorarun", own, tokens), flush=True)
    config = bench_models.on_meta(bench_models.CONFIGS[args.model]).config
    begin()
    try:
        batch = next(bench_models.batches(config.vocab_size, args.batch, args.seq, args.documents))
        own["floor"] = floor(config, batch, args.bits, args.compute, own.get("trained", 0))
    except Exception as problem:
        own["floor"] = {"failed": reason(problem)}
    try:
        found = theirs(args, peers)
    except Exception as problem:  # such as no room for their checkpoint
        found = {peer: {"failed": reason(problem)} for peer in peers}
    print(table(own, found, tokens))
    facts = {"work": vars(args), "lorarun": own, "peers": found}
    print(json.dumps(facts))
    return int("failed" in own)
