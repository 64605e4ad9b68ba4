"""The rows of ``bench.py kernels``: a correctness gate, then time, share of the ceiling, peers, goals.

Ceilings (a device copy, 16-bit products) are measured in the same run; inputs are random and larger than the L2 cache.
A kernel whose gate fails is not timed; whatever goes wrong in a row or with a peer is written into its row, and the
others go on.  Liger and Unsloth are measured in processes of their own (bench_peers.py).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import bench_attention
import torch
from bench_timing import (
    BF16,
    DEVICE,
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    INNER,
    KV,
    ROWS,
    VOCAB,
    Row,
    begin,
    copy_rate,
    elsewhere,
    error,
    measure,
    measure_either_way,
    product_rate,
    random,
    reason,
)
from torch import Tensor

from lorarun.frozen import Frozen
from lorarun.kernels import cross_entropy, fp8, gated, lora, rms_norm, rope
from lorarun.kernels.backend import reference
from lorarun.linear import Adapter, Clock, Linear
from lorarun.quant.store import FP8Store, NF4Store, dequantize_side_by_side

PEERS = ("liger", "unsloth")


class Bench:
    def __init__(self, words: list[str]) -> None:
        self.words, self.rows = words, list[Row]()
        self.copy, self.gemm = copy_rate(), product_rate()
        print(f"ceilings: copy {self.copy:.2f} TB/s, bf16 product {self.gemm:.0f} TFLOP/s")
        self.absent: dict[str, str] = {}
        self.outside: dict[str, dict[str, dict[str, Any]]] = {}  # row, peer: what bench_peers.py measured
        torch.cuda.empty_cache()
        for peer in PEERS:
            for found in elsewhere("kernels", peer, *words):
                if "row" in found:
                    self.outside.setdefault(found["row"], {})[peer] = found
                else:
                    self.absent[peer] = found["failed"]
                    print(f"{peer} is not measured: {found['failed']}")
        print(f"{'kernel':<36}{'error':>9}{'ms':>10}{'rate':>9} {'':<8}{'share':>6}  goals; peers (* not by a graph)")

    def wants(self, name: str) -> bool:
        return not self.words or any(word in name for word in self.words)

    def add(
        self, name: str, call: Callable[[], Any], exact: Callable[[], Any] | None, limit: float,
        gigabytes: float = 0.0, teraflops: float = 0.0, peers: dict[str, Callable[[], Any]] | None = None,
        gate: Callable[[], Any] | None = None, alike: float | None = None,
        least: float | None = None, beats: dict[str, float] | None = None, goals: dict[str, bool | None] | None = None,
        calls: int = 4,
    ) -> None:  # fmt: skip
        """Gate ``call`` (or ``gate``) against ``exact``, run with the reference forced; then time it and its peers.

        alike: how far a peer's result may be from ours.  least: the share of the ceiling that is asked for; beats: how
        many times longer the named peers must take.
        """
        if not self.wants(name):
            return
        row = Row(name, goals=dict(goals or {}))
        self.rows.append(row)
        try:
            if exact is not None:
                ours = (gate or call)()
                with reference():
                    row.error = error(ours, exact())
                del ours
                if not row.error < limit:
                    raise ValueError(f"the relative error is {row.error:.2e}, the limit {limit:.0e}; not timed")
            row.ms = measure(call, calls)
            row.unit, ceiling = ("TB/s", self.copy) if gigabytes else ("TFLOP/s", self.gemm)
            row.rate = (gigabytes or 1e3 * teraflops) / row.ms
            row.share = row.rate / ceiling
            self._compare(row, call, peers or {}, alike)
            self._judge(row, least, beats or {})
        except Exception as problem:
            row.failed = reason(problem)
        print(row, flush=True)
        torch.cuda.empty_cache()

    def _compare(
        self, row: Row, call: Callable[[], Any], peers: dict[str, Callable[[], Any]], alike: float | None
    ) -> None:
        for peer, other in peers.items():
            try:
                if alike is not None and not (off := error(other(), call())) < alike:
                    raise ValueError(f"it differs from ours by {off:.1e}")
                ms, captured = measure_either_way(other)
                row.peers[peer] = ms / row.ms
                row.starred += [] if captured else [peer]
            except Exception as problem:
                row.peers[peer] = f"failed: {reason(problem)}"
        for peer, found in self.outside.get(row.name, {}).items():
            row.peers[peer] = found["ms"] / row.ms if "ms" in found else f"failed: {found['failed']}"
            row.starred += [] if found.get("captured", True) else [peer]

    def _judge(self, row: Row, least: float | None, beats: dict[str, float]) -> None:
        if least is not None:
            row.goals[f">= {least:.0%}"] = row.share >= least
        for peer, times in beats.items():
            ratio = row.peers.get(peer)
            row.goals[f">= {times:.2g}x {peer}"] = ratio >= times if isinstance(ratio, float) else None


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

    forward, backward = rms_norm.add_rms_norm_forward, rms_norm.add_rms_norm_backward
    total, _, rstd, _ = forward(x, delta, w, 1e-5, False, None, True)
    bench.add(
        "add+norm forward", lambda: forward(x, delta, w, 1e-5, False, None, True)[:2], norm_exact, 1e-2, 4 * unit,
        least=0.85,
    )  # fmt: skip
    bench.add(
        "add+norm backward", lambda: backward(delta, x, total, rstd, w, False)[0], norm_backward_exact, 1e-2, 4 * unit,
        least=0.85,
    )  # fmt: skip
    both, dy = random(ROWS, 2 * INNER), random(ROWS, INNER)
    gate, up = both.chunk(2, dim=1)

    def gated_backward_exact() -> Tensor:
        leaves = [half.double().requires_grad_() for half in (gate, up)]
        return torch.cat(torch.autograd.grad(gated.gated_reference(*leaves, "silu"), leaves, dy.double()), dim=1)

    bench.add(
        "SwiGLU forward", lambda: gated.gated_forward(gate, up, "silu"),
        lambda: gated.gated_reference(gate.double(), up.double(), "silu"), 1e-2, 3 * dy.nbytes / 1e9, least=0.85,
    )  # fmt: skip
    bench.add(
        "SwiGLU backward", lambda: gated.gated_backward(dy, gate, up, "silu"), gated_backward_exact, 1e-2,
        5 * dy.nbytes / 1e9, least=0.85,
    )  # fmt: skip


def rotary(bench: Bench) -> None:
    """Rotary embedding of q and k as they lie in the product of q|k|v, alone and behind the norm of each head."""
    qkv = random(1, ROWS, (HEADS + 2 * KV) * DIM)
    q, k, _ = (part.unflatten(-1, (-1, DIM)) for part in qkv.split([HEADS * DIM, KV * DIM, KV * DIM], dim=-1))
    angles = torch.rand(1, ROWS, DIM // 2, device=DEVICE) * 50
    cos, sin, heads = angles.cos(), angles.sin(), random(DIM)
    moved, tables = 2 * (q.numel() + k.numel()) * 2 / 1e9, 2 * angles.nbytes / 1e9
    grads = rope._launch(q, k, None, cos, sin, None, None, 1e-6, False)

    def exact(weight: Tensor | None, backward: bool) -> Any:
        leaves = [t.double().requires_grad_(backward) for t in (q, k)]
        wide = None if weight is None else weight.double()
        out = rope.rope_reference(*leaves, cos.double(), sin.double(), wide, wide)
        return torch.autograd.grad(out, leaves, [g.double() for g in grads]) if backward else out

    for name, weight in (("rotary", None), ("rotary with q/k norm", heads)):
        for way, given, times in (("forward", None, 1.0), ("backward", grads, 1.0 if weight is None else 1.5)):
            bench.add(
                f"{name} {way}",
                lambda weight=weight, given=given: rope._launch(q, k, given, cos, sin, weight, weight, 1e-6, False),
                lambda weight=weight, given=given: exact(weight, given is not None), 1e-2,
                moved * times + tables, least=0.85,
            )  # fmt: skip


def quantised(bench: Bench) -> None:
    """A whole layer's weights, in the groups that a block dequantises together."""
    if not any(bench.wants(f"{name}, a layer") for name in ("NF4 dequantise", "FP8 dequantise", "FP8 quantise")):
        return
    dense = [[random(*shape, scale=0.02) for shape in group] for group in GROUPS]
    flat = [w for group in dense for w in group]
    count = sum(w.numel() for w in flat)
    peers = {}
    try:
        import bitsandbytes.functional as bnb  # noqa: PLC0415

        held = [bnb.quantize_4bit(w, compress_statistics=True, quant_type="nf4") for w in flat]
        peers["bitsandbytes"] = lambda: [bnb.dequantize_4bit(*each) for each in held]
    except Exception as problem:  # not installed, or built for another CUDA
        bench.absent["bitsandbytes"] = reason(problem)
    bytes_of = {"NF4": 0.5 + 1 / 64 + 4 / 64 / 256, "FP8": 1.0}
    for name, kind in (("NF4", NF4Store), ("FP8", FP8Store)):
        stored = [[kind.from_dense(w) for w in group] for group in dense]

        def layer(stored: list[Any] = stored) -> list[Tensor]:
            return [dequantize_side_by_side(group, BF16) for group in stored]

        bench.add(
            f"{name} dequantise, a layer", layer, layer, 1e-9, count * (bytes_of[name] + 2) / 1e9,
            peers=peers if name == "NF4" else None,
            least=0.85, beats={"bitsandbytes": 1.2} if name == "NF4" else None,
        )  # fmt: skip

    def quantise() -> list[list[Tensor]]:
        return [[part.codes.view(torch.uint8), part.scale] for part in map(fp8.fp8_quantize, flat)]

    bench.add("FP8 quantise, a layer", quantise, quantise, 1e-3, count * 3 / 1e9, least=0.85)


def losses(bench: Bench) -> None:
    """The head's two products and the cross-entropy between them."""
    if not bench.wants("linear + cross-entropy"):
        return
    hidden, head = random(ROWS, HIDDEN).requires_grad_(), random(VOCAB, HIDDEN, scale=HIDDEN**-0.5)
    goal = torch.randint(VOCAB, (ROWS,), device=DEVICE)

    def ours() -> Tensor:
        return cross_entropy.linear_cross_entropy(hidden, head, goal)

    def first() -> list[Tensor]:
        each = ours()
        return [each[:64], torch.autograd.grad(each.sum(), hidden)[0][:64]]

    def exact() -> list[Tensor]:
        few = hidden.detach()[:64].double().requires_grad_()
        each = torch.nn.functional.cross_entropy(few @ head.double().T, goal[:64], reduction="none")
        return [each, torch.autograd.grad(each.sum(), few)[0]]

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours()
    extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    products = {"its two products": lambda: torch.mm(torch.mm(hidden.detach(), head.T), head)}
    flops = 4 * ROWS * HIDDEN * VOCAB / 1e12
    bench.add(
        "linear + cross-entropy", ours, exact, 2e-2, teraflops=flops, peers=products, gate=first,
        beats={"its two products": 1 / 1.15}, goals={f"<= 1 GiB extra ({extra:.2f})": extra <= 1.0}, calls=1,
    )  # fmt: skip


def projection(rows: int, columns: int, rank: int) -> Linear:
    with torch.device("meta"):
        made = Linear(columns, rows)
    made.weight = torch.nn.Parameter(random(rows, columns, scale=columns**-0.5), requires_grad=False)
    made.attach("default", Adapter(1.0, 0.0, 0, Clock()), *(
        torch.randn(shape, device=DEVICE) / 64 for shape in ((rank, columns), (rows, rank))
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
    plain: list[Callable[[], Any]] = [
        lambda: [group.mm(x) for group, x in zip(groups, inputs, strict=True)],
        lambda: [group.mm_t(g) for group, g in zip(groups, grads, strict=True)],
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
        dgu, _ = gated.adapted_backward(da, gu, u, *branches[2], "silu", du_down, branches[3][0])
        du, _ = lora.lora_grad(dgu, u, branches[2])
        dx, _ = lora.lora_input_grad(inputs[2], du, branches[2])
        groups[2].mm_t(dgu, dx)

    for name, call, i, most in (("forward", forward, 0, 0.07), ("backward", backward, 1, 0.10)):
        turns = [(measure(plain[i]), measure(call)) for _ in range(5)]  # by turns: the clock of products wanders
        alone, ms = (statistics.median(column) for column in zip(*turns, strict=True))
        over = (ms - activation[i] - alone) / alone
        row = Row(
            f"adapters of a layer, {name}", ms=ms, rate=100 * over, unit="% over", share=alone / (ms - activation[i])
        )
        row.goals[f"<= {most:.0%} over the products alone ({alone:.3f} ms)"] = over <= most
        bench.rows.append(row)
        print(row, flush=True)


def main(words: list[str]) -> int:
    """Print the table and the JSON; how many of our own rows failed."""
    begin()
    bench = Bench(words)
    for part in (memory_bound, rotary, quantised, losses, adapters, bench_attention.rows):
        try:
            part(bench)
        except Exception as problem:  # before or between its rows
            bench.rows.append(Row(part.__name__, failed=reason(problem)))
            print(bench.rows[-1], flush=True)
        torch.cuda.empty_cache()
    for peer, why in bench.absent.items():
        print(f"{peer} was not measured: {why}")
    ceilings = {"copy_tb_s": bench.copy, "gemm_tflop_s": bench.gemm}
    print(json.dumps({**ceilings, "kernels": [asdict(row) for row in bench.rows], "absent": bench.absent}))
    return sum(bool(row.failed) for row in bench.rows)
