"""What the benchmarks share: how a call is timed, what a row of a table is, the shapes that kernels are measured at.

A time is the median over replays of a CUDA graph that holds several calls, so that launching is not part of it.
Somebody else's call that cannot be captured is timed by events around many calls in a row, and marked with a star: what
the GPU waits for is then part of it.

Everything runs on one side stream (:func:`begin`), since a backward pass runs on the stream of its forward and the
default stream cannot be captured.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # nothing is timed on a CPU, but tests run there
ROWS, HIDDEN, INNER, HEADS, KV, DIM, VOCAB = 8192, 4096, 14_336, 32, 8, 128, 128_256  # Llama-3.1-8B, 4 × 2048 tokens
# Weights of a block, in the groups that are dequantised together.
GROUPS = [[(4096, 4096), (1024, 4096), (1024, 4096)], [(4096, 4096)], [(INNER, 4096)] * 2, [(4096, INNER)]]


@dataclass
class Row:
    """One line of the table of kernels; ``share`` is of the ceiling that bounds it.

    peers: how many times longer each of them takes, or why it was not timed; ``starred`` names those timed without a
    graph.  goals: whether each was met, None where what it compares with is missing.
    """

    name: str
    error: float = 0.0
    ms: float = 0.0
    rate: float = 0.0
    unit: str = ""
    share: float = 0.0
    peers: dict[str, float | str] = field(default_factory=dict)
    starred: list[str] = field(default_factory=list)
    goals: dict[str, bool | None] = field(default_factory=dict)
    failed: str = ""

    def __str__(self) -> str:
        if self.failed:
            return f"{self.name:<36} failed: {self.failed}"
        figures = f"{self.error:>9.1e}{self.ms:>10.4f}{self.rate:>9.2f} {self.unit:<8}{self.share:>6.0%}"
        notes = [f"{goal}: {verdict(met)}" for goal, met in self.goals.items()]
        for name, value in self.peers.items():
            star = "*" if name in self.starred else ""
            notes.append(f"{name} {value}" if isinstance(value, str) else f"{value:.2f}x {name}{star}")
        return f"{self.name:<36}{figures}  {'; '.join(notes)}"


def verdict(met: bool | None) -> str:
    return "not measured" if met is None else "met" if met else "MISSED"


def reason(error: BaseException) -> str:
    """An exception in one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def begin() -> None:
    """Make a side stream the current one."""
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.manual_seed(0)


def measure(call: Callable[[], Any], calls: int = 4, replays: int = 15) -> float:
    """Milliseconds of one call: median over replays of a graph of several."""
    stream = torch.cuda.current_stream()
    for _ in range(3):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    _between_events(graph.replay, 1)
    once = _between_events(graph.replay, 1)
    _between_events(graph.replay, int(50 / once) + 1)  # until the clocks have risen
    return statistics.median(_between_events(graph.replay, 1) for _ in range(replays)) / calls


def measure_either_way(call: Callable[[], Any]) -> tuple[float, bool]:
    """Milliseconds of one call, and whether a graph could be captured."""
    try:
        return measure(call), True
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a peer's code raises while it is captured
        torch.cuda.synchronize()
        call()
        return statistics.median(_between_events(call, 10) for _ in range(5)), False


def _between_events(call: Callable[[], Any], times: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def error(ours: Any, exact: Any) -> float:
    """The largest relative error (in the norm of a tensor) over the tensors of two results."""
    pairs = zip(flat(ours), flat(exact), strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value or () for tensor in flat(part)] if isinstance(value, list | tuple) else []


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=BF16) * scale


def copy_rate() -> float:
    """TB/s read and written, by a kernel: inside a graph copy_ becomes a memory node, which is slower."""
    source = torch.empty(2**29, dtype=BF16, device=DEVICE).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: torch.add(source, 0, out=target)) / 1e9


def product_rate(rows: int = ROWS, inner: int = HIDDEN, columns: int = INNER, calls: int = 20) -> float:
    """TFLOP/s of a 16-bit product [rows, inner] · [inner, columns]."""
    x, w = random(rows, inner), random(columns, inner)
    return 2 * rows * inner * columns / measure(lambda: x @ w.T, calls) / 1e9


def timed_steps(step: Callable[[], Tensor], count: int, warm: int) -> dict[str, Any]:
    """Run ``warm`` + ``count`` steps without waiting for the GPU in between, as a training loop may.

    Returns the median milliseconds from the end of a step to the end of the next, the loss of every step (those of the
    warm-up first), and the peaks in GiB from the first step on, what was there before included.
    """
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    marks, losses = [], []
    for _ in range(warm + count):
        losses.append(step().detach().clone())
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    times = [marks[i - 1].elapsed_time(marks[i]) for i in range(max(1, warm), warm + count)]
    return {
        "ms": statistics.median(times),
        "losses": [round(float(loss), 4) for loss in losses],
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def training_step(parameters: list[Tensor], loss: Callable[[], Tensor], lr: float = 1e-4) -> Callable[[], Tensor]:
    """A whole step: loss, backward, clipping to norm 1, torch's fused AdamW; the same for everybody."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=True)

    def step() -> Tensor:
        value = loss()
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    return step


def elsewhere(*arguments: str, timeout: float = 240.0) -> Iterator[dict[str, Any]]:
    """What bench_peers.py prints, a JSON object a line, in a process of its own: some peers patch torch on import.

    The last object has ``failed`` when it did not end well.
    """
    command = [sys.executable, str(Path(__file__).with_name("bench_peers.py")), *arguments]
    quiet = {"UNSLOTH_DISABLE_STATISTICS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    quiet["UNSLOTH_COMPILE_LOCATION"] = str(Path(tempfile.gettempdir()) / "unsloth_compiled_cache")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=quiet | dict(os.environ), check=False
        )
        out, code, said = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        out, code, said = late.stdout or "", 1, f"no result within {timeout:.0f} s"
        out = out.decode() if isinstance(out, bytes) else out
    failed = False
    for line in out.splitlines():
        if line.startswith('{"'):
            try:
                found = json.loads(line)
            except ValueError:  # somebody else's output
                continue
            failed = failed or "row" not in found and "failed" in found
            yield found
    if code and not failed:
        lines = [line for line in said.strip().splitlines() if line.strip()]
        yield {"failed": (lines[-1] if lines else f"it ended with {code}")[:160]}
