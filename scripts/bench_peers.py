#!/usr/bin/env python3
"""The peers' side of the benchmarks, one peer a process, since some of them patch torch and transformers on import.

    python scripts/bench_peers.py kernels liger|unsloth [WORDS]   # their kernels at the shapes of bench_kernels.py

Prints one JSON object a line; ``failed`` says why there is no figure.  Their functions are called as their own model
patches call them; gradients are asked for inputs only, as norms and heads are frozen under LoRA.  An object's ``row``
is the name of our row that does the same work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

if "unsloth" in sys.argv:
    import unsloth  # noqa: F401  # before torch and transformers are used, as it asks for

import torch
from bench_timing import (
    DEVICE,
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    INNER,
    KV,
    ROWS,
    VOCAB,
    begin,
    measure_either_way,
    random,
    reason,
)
from torch import Tensor

Call = Callable[[], Any]
Rows = Iterator[tuple[str, Callable[[], Call]]]  # a row's name, and what builds the call that is timed


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def backward(outputs: Any, inputs: list[Tensor], grads: Any) -> Call:
    return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)


def rotary_inputs(base: tuple[int, int] = (4, 2048)) -> tuple[list[Tensor], Tensor, Tensor]:
    """q and k [batch, heads, seq, head_dim] as transformers has them, views of [batch, seq, ...]; tables."""
    heads = [random(*base, count, DIM).transpose(1, 2).requires_grad_() for count in (HEADS, KV)]
    angles = torch.rand(base[1], DIM // 2, device=DEVICE) * 50
    angles = torch.cat((angles, angles), dim=-1)
    return heads, angles.cos().bfloat16(), angles.sin().bfloat16()


def liger_kernels() -> Rows:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Norm  # noqa: PLC0415
    from liger_kernel.ops.fused_linear_cross_entropy import (  # noqa: PLC0415
        LigerFusedLinearCrossEntropyFunction as Loss,
    )
    from liger_kernel.ops.rope import LigerRopeFunction as Rope  # noqa: PLC0415
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction as SwiGLU  # noqa: PLC0415

    x, delta, w = random(ROWS, HIDDEN).requires_grad_(), random(ROWS, HIDDEN).requires_grad_(), random(HIDDEN)

    def norm() -> Any:
        return Norm.apply(x, delta, w, 1e-5, 0.0, "llama", False)

    yield "add+norm forward", lambda: norm
    yield "add+norm backward", lambda: backward(norm(), [x, delta], [random(ROWS, HIDDEN) for _ in "ys"])
    gate, up = random(ROWS, INNER).requires_grad_(), random(ROWS, INNER).requires_grad_()
    yield "SwiGLU forward", lambda: lambda: SwiGLU.apply(gate, up)
    yield "SwiGLU backward", lambda: _liger_swiglu_backward(gate, up)
    heads, cos, sin = rotary_inputs()
    given = [h.detach() for h in heads]
    yield "rotary forward", lambda: lambda: Rope.apply(*given, cos[None], sin[None])
    # Its Function rotates in place, which leaves of a graph cannot be; the gradient takes the same kernel.
    yield "rotary backward", lambda: _liger_rope_backward(given, cos[None], sin[None])
    hidden, head = random(ROWS, HIDDEN).requires_grad_(), random(VOCAB, HIDDEN, scale=HIDDEN**-0.5)
    goal = torch.randint(VOCAB, (ROWS,), device=DEVICE)
    yield "linear + cross-entropy", lambda: lambda: Loss.apply(hidden, head, goal)


def _liger_swiglu_backward(gate: Tensor, up: Tensor) -> Call:
    from liger_kernel.ops.swiglu import swiglu_backward  # noqa: PLC0415

    a, b, dy = gate.detach(), up.detach(), random(ROWS, INNER)
    return lambda: swiglu_backward(a, b, dy)


def _liger_rope_backward(given: list[Tensor], cos: Tensor, sin: Tensor) -> Call:
    from liger_kernel.ops.rope import rope_backward  # noqa: PLC0415

    return lambda: rope_backward(*given, cos, sin)


def unsloth_kernels() -> Rows:
    import bitsandbytes.functional as bnb  # noqa: PLC0415
    from unsloth.kernels import rms_layernorm, rope_embedding, swiglu, utils  # noqa: PLC0415

    x, delta, w = random(ROWS, HIDDEN).requires_grad_(), random(ROWS, HIDDEN), random(HIDDEN)
    layer = SimpleNamespace(weight=w, variance_epsilon=1e-5)

    def norm(stream: Tensor) -> Tensor:
        y: Tensor = rms_layernorm.fast_rms_layernorm(layer, stream)
        return y

    def norm_backward() -> Call:
        y, dy = norm(x), random(ROWS, HIDDEN)
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)[0] + delta

    yield "add+norm forward", lambda: lambda: norm(x + delta)
    yield "add+norm backward", norm_backward
    gate, up, dy = (random(4, ROWS // 4, INNER) for _ in range(3))
    yield "SwiGLU forward", lambda: lambda: swiglu.swiglu_fg_kernel(gate, up)
    flat = [t.flatten(0, 1) for t in (dy, gate, up)]
    yield "SwiGLU backward", lambda: lambda: swiglu.swiglu_DWf_DW_dfg_kernel(*flat)
    heads, cos, sin = rotary_inputs()
    given = [h.detach() for h in heads]
    yield "rotary forward", lambda: lambda: rope_embedding.fast_rope_embedding(*given, cos, sin)

    def rope_backward() -> Call:
        out = rope_embedding.fast_rope_embedding(*heads, cos, sin)
        return backward(out, heads, [torch.randn_like(h) for h in heads])

    yield "rotary backward", rope_backward
    dense = [random(*shape, scale=0.02) for group in GROUPS for shape in group]
    held = [bnb.quantize_4bit(weight, compress_statistics=True, quant_type="nf4") for weight in dense]
    yield "NF4 dequantise, a layer", lambda: lambda: [utils.fast_dequantize(*each) for each in held]


def kernels(peer: str, words: list[str]) -> None:
    for name, build in {"liger": liger_kernels, "unsloth": unsloth_kernels}[peer]():
        if words and not any(word in name for word in words):
            continue
        try:
            ms, captured = measure_either_way(build())
            say(row=name, ms=ms, captured=captured)
        except Exception as problem:
            say(row=name, failed=reason(problem))


def main() -> None:
    what, peer, *rest = sys.argv[1:]
    try:
        begin()
        kernels(peer, rest)
    except Exception as problem:
        say(failed=reason(problem))
        sys.exit(1)


if __name__ == "__main__":
    main()
