#!/usr/bin/env python3
"""Measure lorarun on an accelerator. The last line is JSON.

    python scripts/bench.py kernels             # every kernel: a correctness gate, then time, share of the ceiling
    python scripts/bench.py kernels norm NF4    # those whose names contain one of these words

Ceilings (a device copy, 16-bit products) are measured in the same run. A time is the median over replays of a CUDA
graph that holds several calls, so that launching is not part of it; inputs are random and larger than the L2 cache. A
kernel whose gate fails is not timed. Peers (bitsandbytes, Liger) are timed the same way where they are installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lorarun.kernels import cross_entropy, gated, lora, rms_norm, rope
from lorarun.kernels.backend import reference
from lorarun.nn import Adapter, Clock, Linear
from lorarun.project import Frozen
from lorarun.quant.store import FP8Store, NF4Store, dequantize_side_by_side

BF16 = torch.bfloat16
ROWS, HIDDEN, INNER, HEADS, KV, DIM, VOCAB = 8192, 4096, 14_336, 32, 8, 128, 128_256  # Llama-3.1-8B, 4 × 2048 tokens


@dataclass
class Row:
    """One line of the table; ``share`` is of the ceiling that bounds it, ``peer`` how many times faster than that
    one."""

    name: str
    error: float
    ms: float
    rate: float
    unit: str
    share: float
    peers: dict[str, float] = field(default_factory=dict)
    target: str = ""

    def __str__(self) -> str:
        peers = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in self.peers.items())
        figures = f"{self.error:>9.1e}{self.ms:>10.4f}{self.rate:>9.2f} {self.unit:<8}{self.share:>6.0%}"
        return f"{self.name:<34}{figures}  {peers}"


def measure(call: Callable[[], Any], calls: int = 4, replays: int = 15) -> float:
    """Milliseconds of one call: median over replays of a graph of several."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def error(ours: Any, exact: Any) -> float:
    """The largest relative error (in the norm of a tensor) over the tensors of two results."""
    pairs = zip(flat(ours), flat(exact), strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value or () for tensor in flat(part)]


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16) * scale


class Bench:
    def __init__(self, words: list[str]) -> None:
        self.words, self.rows = words, list[Row]()
        source = torch.empty(2**29, dtype=BF16, device="cuda").normal_()
        target = torch.empty_like(source)
        # TB/s read and written, by a kernel: inside a graph copy_ becomes a memory node, which is slower.
        self.copy = 2 * source.nbytes / measure(lambda: torch.add(source, 0, out=target)) / 1e9
        x, w = random(ROWS, HIDDEN), random(INNER, HIDDEN)
        self.gemm = 2 * ROWS * HIDDEN * INNER / measure(lambda: x @ w.T, 20) / 1e9  # TFLOP/s
        print(f"ceilings: copy {self.copy:.2f} TB/s, bf16 product {self.gemm:.0f} TFLOP/s")
        print(f"{'kernel':<34}{'error':>9}{'ms':>10}{'rate':>9} {'':<8}{'share':>6}  peers")

    def wants(self, name: str) -> bool:
        return not self.words or any(word in name for word in self.words)

    def add(
        self, name: str, call: Callable[[], Any], exact: Callable[[], Any] | None, limit: float,
        gigabytes: float = 0.0, teraflops: float = 0.0, peers: dict[str, Callable[[], Any]] | None = None,
        target: str = "",
    ) -> None:  # fmt: skip
        """Gate ``call`` against ``exact`` (run with the reference forced), then time it and its peers."""
        if not self.wants(name):
            return
        wrong = 0.0
        if exact is not None:
            ours = call()
            with reference():
                wrong = error(ours, exact())
            if not wrong < limit:
                raise SystemExit(f"{name}: the relative error is {wrong:.2e}, the limit {limit:.0e}; not timed.")
        ms = measure(call)
        rate, unit, ceiling = (
            (gigabytes / ms, "TB/s", self.copy) if gigabytes else (1e3 * teraflops / ms, "TFLOP/s", self.gemm)
        )
        row = Row(name, wrong, ms, rate, unit, rate / ceiling, target=target)
        for peer, other in (peers or {}).items():
            row.peers[peer] = measure(other) / ms
        self.rows.append(row)
        print(row, flush=True)


def memory_bound(bench: Bench) -> None:
    """Norm, rotary, gated activation: their bytes at the speed of a copy."""
    x, delta, w = random(ROWS, HIDDEN), random(ROWS, HIDDEN), random(HIDDEN)
    unit = x.nbytes / 1e9
    double = [t.double() for t in (x, delta, w)]

    def norm_exact() -> Any:
        return rms_norm.add_rms_norm_reference(*double, 1e-5)

    def norm_backward_exact() -> Tensor:
        leaf = total.double().requires_grad_()
        y = rms_norm.rms_norm_reference(leaf, double[2], 1e-5)
        return torch.autograd.grad(y, leaf, double[1])[0] + double[0]

    forward = rms_norm.add_rms_norm_forward
    bench.add("add+norm forward", lambda: forward(x, delta, w, 1e-5, False, None, True)[:2], norm_exact, 1e-2, 4 * unit)
    total, _, rstd, _ = forward(x, delta, w, 1e-5, False, None, True)
    bench.add(
        "add+norm backward",
        lambda: rms_norm.add_rms_norm_backward(delta, x, total, rstd, w, False)[0],
        norm_backward_exact, 1e-2, 4 * unit,
    )  # fmt: skip
    qkv = random(1, ROWS, (HEADS + 2 * KV) * DIM)
    q, k, _ = (part.unflatten(-1, (-1, DIM)) for part in qkv.split([HEADS * DIM, KV * DIM, KV * DIM], dim=-1))
    angles = torch.rand(1, ROWS, DIM // 2, device="cuda") * 50
    cos, sin, heads = angles.cos(), angles.sin(), random(DIM)
    moved = 2 * (q.numel() + k.numel()) * 2 / 1e9
    grads = rope._launch(q, k, None, cos, sin, None, None, 1e-6, False)
    for name, weight in (("rotary", None), ("rotary with q/k norm", heads)):
        bench.add(
            f"{name} forward",
            lambda weight=weight: rope._launch(q, k, None, cos, sin, weight, weight, 1e-6, False),
            lambda weight=weight: rope.rope_reference(
                q.double(), k.double(), cos.double(), sin.double(),
                *(2 * [None if weight is None else weight.double()]),
            ),
            1e-2, moved,
        )  # fmt: skip
        bench.add(
            f"{name} backward",
            lambda weight=weight: rope._launch(q, k, grads, cos, sin, weight, weight, 1e-6, False),
            None, 1e-2, moved * (1.0 if weight is None else 1.5),
        )  # fmt: skip
    both, dy = random(ROWS, 2 * INNER), random(ROWS, INNER)
    gate, up = both.chunk(2, dim=1)
    bench.add(
        "SwiGLU forward", lambda: gated.gated_forward(gate, up, "silu"),
        lambda: gated.gated_reference(gate.double(), up.double(), "silu"), 1e-2, 3 * dy.nbytes / 1e9,
    )  # fmt: skip
    bench.add("SwiGLU backward", lambda: gated.gated_backward(dy, gate, up, "silu"), None, 1e-2, 5 * dy.nbytes / 1e9)


def quantised(bench: Bench) -> None:
    """A whole layer's weights, in the groups that a block dequantises together."""
    groups = [[(4096, 4096), (1024, 4096), (1024, 4096)], [(4096, 4096)], [(INNER, 4096)] * 2, [(4096, INNER)]]
    dense = [[random(*shape, scale=0.02) for shape in group] for group in groups]
    count = sum(w.numel() for group in dense for w in group)
    peers = {}
    try:
        import bitsandbytes.functional as bnb  # noqa: PLC0415

        held = [bnb.quantize_4bit(w, compress_statistics=True, quant_type="nf4") for g in dense for w in g]
        peers["bitsandbytes"] = lambda: [bnb.dequantize_4bit(*each) for each in held]
    except ImportError:
        pass
    bytes_of = {"NF4": 0.5 + 1 / 64 + 4 / 64 / 256, "FP8": 1.0}
    for name, kind in (("NF4", NF4Store), ("FP8", FP8Store)):
        stored = [[kind.from_dense(w) for w in group] for group in dense]

        def layer(stored: list[Any] = stored) -> list[Tensor]:
            return [dequantize_side_by_side(group, BF16) for group in stored]

        target = ">= 85 %" + (" and >= 1.2x bitsandbytes" if name == "NF4" else "")
        moved = count * (bytes_of[name] + 2) / 1e9
        bench.add(f"{name} dequantise, a layer", layer, layer, 1e-9, moved, peers=peers, target=target)
        peers = {}


def losses(bench: Bench) -> None:
    if not bench.wants("cross-entropy"):
        return
    hidden, head = random(ROWS, HIDDEN).requires_grad_(), random(VOCAB, HIDDEN, scale=HIDDEN**-0.5)
    goal = torch.randint(VOCAB, (ROWS,), device="cuda")
    few = hidden.detach()[:64].double().requires_grad_()
    z = few @ head.double().T
    exact = torch.nn.functional.cross_entropy(z, goal[:64], reduction="none")
    ours = cross_entropy.linear_cross_entropy(hidden, head, goal)
    wrong = error(
        [ours[:64], torch.autograd.grad(ours.sum(), hidden)[0][:64]], [exact, torch.autograd.grad(exact.sum(), few)[0]]
    )
    alone = measure(lambda: torch.mm(torch.mm(hidden.detach(), head.T), head), 1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cross_entropy.linear_cross_entropy(hidden, head, goal)
    extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    ms = measure(lambda: cross_entropy.linear_cross_entropy(hidden, head, goal), 1)
    rate = 4 * ROWS * HIDDEN * VOCAB / ms / 1e9
    row = Row("linear + cross-entropy", wrong, ms, rate, "TFLOP/s", rate / bench.gemm, {"its products": alone / ms})
    row.target = "<= 1.15x its two products, <= 1 GiB extra"
    bench.rows.append(row)
    print(f"{row}; {ms / alone:.3f} of the two products alone, {extra:.2f} GiB extra")


def projection(rows: int, columns: int, rank: int) -> Linear:
    with torch.device("meta"):
        made = Linear(columns, rows)
    made.weight = torch.nn.Parameter(random(rows, columns, scale=columns**-0.5), requires_grad=False)
    made.attach("default", Adapter(1.0, 0.0, 0, Clock()), *(
        torch.randn(shape, device="cuda") / 64 for shape in ((rank, columns), (rows, rank))
    ))  # fmt: skip
    made.active = "default"
    return made


def adapters(bench: Bench) -> None:
    """A whole layer's projections with adapters against the frozen products alone."""
    if not bench.wants("adapters"):
        return
    q, k, v, o = (projection(n, HIDDEN, 16) for n in (4096, 1024, 1024, 4096))
    gate, up, down = projection(INNER, HIDDEN, 16), projection(INNER, HIDDEN, 16), projection(HIDDEN, INNER, 16)
    groups = [Frozen((q, k, v)), Frozen((o,)), Frozen((gate, up)), Frozen((down,))]
    inputs = [random(ROWS, n) for n in (HIDDEN, HIDDEN, HIDDEN, INNER)]
    grads = [random(ROWS, sum(group.sizes)) for group in groups]
    both, dy = grads[2], random(ROWS, INNER)
    halves = both.chunk(2, dim=1)
    plain = [
        measure(lambda: [group.mm(x) for group, x in zip(groups, inputs, strict=True)]),
        measure(lambda: [group.mm_t(g) for group, g in zip(groups, grads, strict=True)]),
    ]
    activation = [
        measure(lambda: gated.gated_forward(*halves, "silu")),
        measure(lambda: gated.gated_backward(dy, *halves, "silu")),
    ]
    branches = [[linear.running()[0] for linear in group] for group in ((q, k, v), (o,), (gate, up), (down,))]

    def forward() -> list[Any]:
        kept: list[Any] = []
        for i in (0, 1):
            y, u = groups[i].mm(inputs[i]), lora.lora_down(inputs[i], branches[i])
            lora.lora_up_(y, u, branches[i])
            kept.append(u)
        gu, u = groups[2].mm(inputs[2]), lora.lora_down(inputs[2], branches[2])
        a = gated.adapted_forward(gu, u, *branches[2], "silu")
        y, u_down = groups[3].mm(a), lora.lora_down(a, branches[3])
        lora.lora_up_(y, u_down, branches[3])
        return [*kept, gu, u, u_down]

    u_qkv, u_o, gu, u, u_down = forward()

    def backward() -> None:
        for i, kept in ((0, u_qkv), (1, u_o)):
            du, _ = lora.lora_grad(grads[i], kept, branches[i])
            dx, _ = lora.lora_input_grad(inputs[i], du, branches[i])
            groups[i].mm_t(grads[i], dx)
        du_down, _ = lora.lora_grad(grads[3], u_down, branches[3])
        da = groups[3].mm_t(grads[3])
        dgu, du, *_ = gated.adapted_backward(da, gu, u, *branches[2], "silu", du_down, branches[3][0])
        dx, _ = lora.lora_input_grad(inputs[2], du, branches[2])
        groups[2].mm_t(dgu, dx)

    for name, call, i, target in (("forward", forward, 0, "<= 7 %"), ("backward", backward, 1, "<= 10 %")):
        ms = measure(call)
        over = (ms - activation[i] - plain[i]) / plain[i]
        row = Row(f"adapters of a layer, {name}", 0.0, ms, over, "over", plain[i] / (ms - activation[i]), target=target)
        bench.rows.append(row)
        alone = f"the products alone, {plain[i]:.3f} ms ({target})"
        print(f"{row.name:<34}{ms:>19.4f}  {over:+.1%} over {alone}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kernels"])
    parser.add_argument("words", nargs="*", help="only rows whose names contain one of these")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: the benchmark needs an accelerator, and torch sees none.")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    bench = Bench(args.words)
    for part in (memory_bound, quantised, losses, adapters):
        part(bench)
        torch.cuda.empty_cache()
    rows = [asdict(row) for row in bench.rows]
    print(json.dumps({"copy_tb_s": bench.copy, "gemm_tflop_s": bench.gemm, "kernels": rows}))


if __name__ == "__main__":
    main()
