"""``bench.py decode``: tokens a second that are generated, and what share of the memory's speed that is.

Random prompts of one length, greedy, no stop, adapters of rank 16 on all seven projections with B ≠ 0.  A step's time
is the median between the arrivals of two tokens on the host, in the second halves of answers: the prompt and the
capture come before.  ``first`` is the time to the first token and ``whole`` the tokens a second of a call with
everything in it.

The limit of a step is what it has to read at the speed of a copy: codes and scales of every weight, the head, the
adapters, and the keys and values of all rows at the middle of the measured span.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import bench_models
import torch
from bench_models import RANK
from bench_timing import DEVICE, begin, copy_rate, elsewhere, reason
from bench_train import profiled
from torch import nn

import lorarun
from lorarun.cache import vector_bytes
from lorarun.decode import Reader
from lorarun.nn import Model

PEERS = ("hf", "unsloth")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", choices=bench_models.CONFIGS)
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, nargs="+", default=[64], help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--cache", choices=("fp8",), help="keep keys and values in FP8 (default: in bf16)")
    parser.add_argument("--peers", default="", help=f"some of {','.join(PEERS)}")


def prompts(vocab: int, batch: int, length: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(0)
    made: list[list[int]] = torch.randint(4, vocab, (batch, length), generator=drawn).tolist()
    return made


def timed(call: Callable[[], Any], times: int = 3) -> float:
    """Seconds of a call that ends with the GPU idle; the median, after one that is not counted."""
    found = []
    for _ in range(times + 1):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def arrivals(call: Callable[[], Any]) -> list[float]:
    """When the host read the tokens of a call's steps, in seconds."""
    found: list[float] = []
    read = Reader.read

    def watched(self: Reader) -> Any:
        tokens = read(self)
        found.append(time.perf_counter())
        return tokens

    try:
        Reader.read = watched  # type: ignore[method-assign]
        call()
    finally:
        Reader.read = read  # type: ignore[method-assign]
    return found


def read(model: Model, batch: int, length: float, kept: str | None = None) -> dict[str, float]:
    """GB that a step reads, for rows of ``length`` tokens."""
    config = model.config
    head = model.lm_head.weight
    weights = sum(p.nbytes for n, p in model.named_parameters() if ".layers." in n and "lora_" not in n)
    adapters = sum(p.nbytes for n, p in model.named_parameters() if "lora_" in n)
    sizes = [length if window is None else min(length, window) for window in config.windows]
    each = 2 * config.num_key_value_heads * vector_bytes(model, kept)
    parts = {"weights": weights, "head": head.nbytes, "adapters": adapters, "cache": batch * each * sum(sizes)}
    return {name: value / 1e9 for name, value in parts.items()}


def measured(model: Model, batch: int, length: int, new: int, copy: float, kept: str | None) -> dict[str, Any]:
    """The figures of one batch size and prompt length."""
    ids = prompts(model.config.vocab_size, batch, length)

    def run(count: int) -> Any:
        return lorarun.generate(model, ids, max_new_tokens=count, stop=[], cache_dtype=kept)

    first, whole = timed(lambda: run(1)), timed(lambda: run(new))
    times = [arrivals(lambda: run(new))[new // 2 :] for _ in range(3)]
    step = statistics.median(after - before for each in times for before, after in itertools.pairwise(each))
    parts = read(model, batch, length + 0.75 * new, kept)
    moved = sum(parts.values())
    kernels = [len(profiled(lambda n=n: run(n))) for n in (16, 24)]
    launches = (kernels[1] - kernels[0]) / 8
    return {
        "batch": batch,
        "prompt": length,
        "tokens_s": batch / step,
        "step_ms": 1e3 * step,
        "first_s": first,
        "whole_tokens_s": batch * new / whole,
        "gb": parts,
        "gb_s": moved / step,
        "share": moved / copy / 1e3 / step,
        "launches": launches,
        "launches_a_layer": launches / model.config.num_hidden_layers,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


HEADER = (
    f"{'batch':>5}{'prompt':>8}{'tokens/s':>11}{'ms/step':>9}{'GB/s':>8}{'share':>7}{'launches (a layer)':>20}"
    f"{'first s':>9}{'whole':>10}"
)


def line(found: dict[str, Any], peers: dict[str, float]) -> str:
    beside = "".join(f"  {found['whole_tokens_s'] / other:.1f}x {name}" for name, other in peers.items())
    launches = f"{found['launches']:.0f} ({found['launches_a_layer']:.1f})"
    return (
        f"{found['batch']:>5}{found['prompt']:>8}{found['tokens_s']:>11,.0f}{found['step_ms']:>9.3f}"
        f"{found['gb_s']:>8,.0f}{found['share']:>7.0%}{launches:>20}{found['first_s']:>9.3f}"
        f"{found['whole_tokens_s']:>10,.0f}{beside}"
    )


def with_adapters(name: str, bits: int) -> Model:
    model = bench_models.build(bench_models.CONFIGS[name], bits)
    lorarun.add_lora(model, r=RANK, alpha=RANK, seed=0)
    bench_models.same_adapters(model)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.02, generator=bench_models.generator(key, DEVICE))
    return model.eval()


def theirs(args: argparse.Namespace, peers: list[str]) -> dict[str, Any]:
    """Tokens a second of whole calls by (batch, prompt) for each peer, on a checkpoint with the same base weights."""
    folder = bench_models.checkpoint(args.model)
    if peers and not folder.is_dir():
        print(f"writing {folder} for the peers", flush=True)
        bench_models.write(bench_models.CONFIGS[args.model], folder)
    settings = {name: getattr(args, name) for name in ("model", "bits", "batch", "prompt", "new")}
    settings |= {"folder": str(folder), "seq": max(args.prompt) + args.new, "documents": None, "dropout": 0.0}
    found = {}
    for peer in peers:
        said = list(elsewhere("decode", peer, json.dumps(settings), timeout=420.0))
        found[peer] = said[-1] if said else {"failed": "it said nothing"}
        if "failed" in found[peer]:
            print(f"{peer} failed: {found[peer]['failed']}", flush=True)
    return found


def main(args: argparse.Namespace) -> int:
    """Print the table and the JSON; 1 when a run of ours failed."""
    peers = [name for name in args.peers.split(",") if name]
    if unknown := sorted(set(peers) - set(PEERS)):
        raise SystemExit(f"error: no peers named {', '.join(unknown)}; there are {', '.join(PEERS)}.")
    begin()
    copy = copy_rate()
    print(f"copy {copy:.2f} TB/s")
    model = with_adapters(args.model, args.bits)
    beside = theirs(args, peers)
    print(HEADER, flush=True)
    rows: list[dict[str, Any]] = []
    for length in args.prompt:
        for batch in args.batch:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                found = measured(model, batch, length, args.new, copy, args.cache)
                others = {
                    peer: said[f"{batch}x{length}"] for peer, said in beside.items() if f"{batch}x{length}" in said
                }
                print(line(found, others), flush=True)
            except Exception as problem:
                found = {"batch": batch, "prompt": length, "failed": reason(problem)}
                print(f"{batch:>5}{length:>8} failed: {found['failed']}", flush=True)
            rows.append(found)
    print(json.dumps({"work": vars(args), "copy_tb_s": copy, "lorarun": rows, "peers": beside}))
    return sum("failed" in row for row in rows)
