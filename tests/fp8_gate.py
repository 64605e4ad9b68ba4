#!/usr/bin/env python3
"""Does an adapter learn in FP8 what it learns in bf16?  On a real model: python tests/fp8_gate.py MODEL --data FOLDER

Random weights would prove nothing, and loss curves little: training hides a gradient that is wrong by a tenth.  So for
each seed the first step's gradients are compared (their size and directions), an adapter is trained in each precision
on the same rows, and both are evaluated in bf16, where an adapter is used.  What must hold:

    gradient   size 0.9 to 1.1 of bf16's, median cosine over the projections ≥ 0.94
    kept       the loss on held-out rows falls by ≥ 0.97 (NF4) or ≥ 0.93 (16 bits) of what it falls with bf16
    offset     with the adapter evaluated in FP8 as well, it is within 2 % of bf16's
    fault      dx made 10 % too large in every product fails the first check

Of each seed the first, of the mean of the seeds the next two.

``--outliers`` does it with six channels of every projection's input 50 times as large, as large models have them; the
weights' columns are as much smaller, so that the model is the same.  Trials run side by side in ``--jobs`` processes,
which one GPU serves well, since the models are small.  On a CPU FP8 is emulated, and 300 steps take an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import lorarun
from lorarun.compute import groups, use_bf16, use_fp8
from lorarun.data import Batch, read_rows
from lorarun.kernels.scaled import _emulation, unavailable
from lorarun.nn import Model, RMSNorm
from lorarun.optim import learning_rate
from lorarun.quant.store import NF4Store

KEPT = {4: 0.97, 16: 0.93}
TOKENS, RATE, WARMUP = 256, 5e-4, 15
FIRST = 8  # batches whose gradients are compared
CHANNELS, FACTOR, FAULT = 6, 50.0, 1.1


class Task(NamedTuple):
    model: Path
    data: Path
    bits: int
    seed: int
    outliers: bool
    steps: int


def opened(task: Task, device: torch.device) -> tuple[Model, list[Batch], list[Batch]]:
    """The model with dense weights, its batches to learn from and the held-out ones."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = lorarun.load(task.model, dtype=dtype, device=device)
    train, held = (read_rows(task.data / f"chatterbot.{part}.jsonl") for part in ("train", "eval"))
    first = lorarun.batches(train, model.tokenizer, TOKENS, shuffle=True, seed=task.seed)
    return model, list(first), list(lorarun.batches(held, model.tokenizer, TOKENS))


@torch.no_grad()
def add_outliers(model: Model) -> None:
    """Six channels that attention and MLP read become 50 times as large, and the columns of weights that read them as
    much smaller: the same function."""
    hidden = model.config.hidden_size
    chosen = torch.randperm(hidden, generator=torch.Generator().manual_seed(0))[:CHANNELS].to(model.device)

    def scale(norm: RMSNorm, *readers: Any) -> None:
        one = float(norm.plus_one)
        norm.weight[chosen] = (norm.weight[chosen] + one) * FACTOR - one
        for linear in readers:
            linear.weight[:, chosen] /= FACTOR

    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        scale(block.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        before = getattr(block, "pre_feedforward_layernorm", None) or block.post_attention_layernorm
        scale(before, mlp.gate_proj, mlp.up_proj)


def quantise(model: Model) -> None:
    for group in groups(model):
        for linear in group.values():
            weight = linear.weight.data
            del linear.weight
            linear.weight = NF4Store.from_dense(weight)


def gradients(model: Model, batches: list[Batch]) -> list[Tensor]:
    """Of every B; those of A are zero in the first step."""
    model.zero_grad()
    for batch in batches:
        lorarun.loss(model, batch).backward()
    found = [p.grad.float().clone() for name, p in model.named_parameters() if p.requires_grad and "lora_B" in name]
    model.zero_grad()
    return found


def plant_fault(model: Model) -> None:
    """dx 10 % too large in every product in FP8."""
    for group in groups(model):
        next(iter(group.values())).scaled.backward.scale.mul_(FAULT)


def first_step(model: Model, batches: list[Batch]) -> dict[str, float]:
    """Size and median cosine of FP8's gradients beside bf16's, and of those with the planted fault.

    Over several batches: of a few hundred tokens alone the size can be a tenth off, since it is the gradient of a
    slightly different function (with FP8 on the way back alone it is 1 % off).
    """
    model.train()
    exact = gradients(model, batches)
    facts = {}
    use_fp8(model)
    for name in ("", "fault_"):
        ours = gradients(model, batches)
        size = [torch.stack([g.norm() for g in found]).norm() for found in (ours, exact)]
        cosines = [F.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in zip(ours, exact, strict=True)]
        facts |= {name + "size": (size[0] / size[1]).item(), name + "cosine": torch.stack(cosines).median().item()}
        plant_fault(model)
    use_bf16(model)
    return facts


def passes(size: float, cosine: float) -> bool:
    """The gate of the first step."""
    return 0.9 <= size <= 1.1 and cosine >= 0.94


def learn(model: Model, batches: list[Batch], steps: int) -> None:
    parameters = lorarun.lora_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, fused=True)
    for step, batch in zip(range(steps), itertools.cycle(batches), strict=False):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, RATE, min(WARMUP, steps // 2))
        lorarun.loss(model.train(), batch).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def trial(task: Task) -> dict[str, Any]:
    """One seed: both trainings and their evaluations."""
    started = time.perf_counter()
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    torch.set_num_threads(1)
    with _emulation() if unavailable(device) else contextlib.nullcontext():
        model, batches, held = opened(task, device)
        if task.outliers:
            add_outliers(model)
        if task.bits == 4:
            quantise(model)
        lorarun.add_lora(model, r=16, seed=task.seed)
        start = [p.detach().clone() for p in lorarun.lora_parameters(model)]
        facts: dict[str, Any] = first_step(model, batches[:FIRST])
        before = lorarun.evaluate(model, held).loss
        learn(model, batches, task.steps)
        bf16 = lorarun.evaluate(model, held).loss
        for parameter, value in zip(lorarun.lora_parameters(model), start, strict=True):
            parameter.data.copy_(value)
        use_fp8(model)
        learn(model, batches, task.steps)
        own = lorarun.evaluate(model, held).loss
        use_bf16(model)
        fp8 = lorarun.evaluate(model, held).loss
    facts |= {"before": before, "bf16": bf16, "fp8": fp8, "own": own}
    facts |= {"kept": (before - fp8) / (before - bf16), "offset": own / bf16 - 1.0}
    return facts | {"seconds": time.perf_counter() - started}


def failures(bits: int, trials: list[dict[str, Any]]) -> list[str]:
    """What does not hold for the seeds of one model and kind of weights."""
    kept, offset = (sum(t[key] for t in trials) / len(trials) for key in ("kept", "offset"))
    checks = {
        f"kept {kept:.3f} < {KEPT[bits]}": kept >= KEPT[bits],
        "gradient": all(passes(t["size"], t["cosine"]) for t in trials),
        f"offset {offset:.3f} > 0.02": abs(offset) <= 0.02,
        "the planted fault passes": not any(passes(t["fault_size"], t["fault_cosine"]) for t in trials),
        "bf16 learns nothing": all(t["bf16"] < 0.9 * t["before"] for t in trials),
    }
    return [name for name, holds in checks.items() if not holds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="folders, such as .cache/models/smollm2-135m")
    parser.add_argument("--data", type=Path, default=Path(".cache/models/data"), help="folder of scripts/fetch.py data")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 16], choices=[4, 16])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--outliers", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    kinds = list(itertools.product(args.models, args.bits))
    tasks = [
        Task(model, args.data, bits, seed, args.outliers, args.steps)
        for seed in range(args.seeds)
        for model, bits in kinds
    ]
    failed = False
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        found: dict[tuple[Path, int], list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for task, facts in zip(tasks, pool.map(trial, tasks), strict=True):
            found[task.model, task.bits].append(facts)
            shown = {key: round(value, 4) for key, value in facts.items()}
            print(json.dumps({"model": task.model.name, "bits": task.bits, "seed": task.seed} | shown), flush=True)
    for (model, bits), trials in found.items():
        wrong = failures(bits, trials)
        failed |= bool(wrong)
        print(f"{model.name}, {bits} bits{', outliers' if args.outliers else ''}: {'; '.join(wrong) or 'holds'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
