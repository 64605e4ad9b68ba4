"""Rows of attention: ours against the exact sums on a slice, then beside the peers that torch brings.

Dense rows at head_dim 128 (Llama), a window of 1024 at head_dim 256 (Gemma 3) and packed documents at head_dim 128.
FLOPs are those of the visible pairs alone, whatever a peer computes; forward and backward together count 3.5 forwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from bench_timing import random
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lorarun.kernels.attention import attention, document_spans, document_starts, visible

Call = Callable[[], Tensor]


class Case(NamedTuple):
    batch: int
    seq: int
    heads: int
    kv: int
    dim: int
    window: int | None = None
    document: int | None = None  # about how many tokens each has


CASES = {
    "attention, 4x2048": Case(4, 2048, 32, 8, 128),
    "attention, 1x8192": Case(1, 8192, 32, 8, 128),
    "attention, window, d256": Case(1, 8192, 8, 4, 256, window=1024),
    "attention, documents": Case(1, 8192, 32, 8, 128, document=500),
}
GOALS = {
    "attention, window, d256": {"FlexAttention": 1.5, "masked SDPA": 1.5},
    "attention, documents": {"FA2 varlen": 1.0},
}


class Inputs:
    """q, k, v cut from one product, as the model has them, with what a case hides."""

    def __init__(self, case: Case) -> None:
        self.case, sizes = case, [case.heads, case.kv, case.kv]
        wide = random(case.batch, case.seq, sum(sizes), case.dim)
        self.leaves = [part.detach().requires_grad_() for part in wide.split(sizes, dim=2)]
        self.dy = random(case.batch, case.seq, case.heads, case.dim)
        self.documents = (
            None if case.document is None else documents(case.batch, case.seq, case.document).to(wide.device)
        )
        self.spans = None if self.documents is None else document_spans(self.documents)

    def both(self, call: Call) -> list[Tensor]:
        """The output and the three gradients."""
        o = call()
        return [o, *torch.autograd.grad(o, self.leaves, self.dy)]

    def ours(self) -> Tensor:
        return attention(*self.leaves, self.spans, self.case.window)

    def slice(self, results: list[Tensor]) -> list[Tensor]:
        """What the first key-value head of the first row, and the query heads that read it, have of output and
        gradients."""
        group = self.case.heads // self.case.kv
        counts = [group, group, 1, 1]  # o, dq, dk, dv
        return [x[:1, :, :count] for x, count in zip(results, counts, strict=False)]

    def exact(self) -> list[Tensor]:
        """The same slices by the formula, every score held in fp64."""
        group = self.case.heads // self.case.kv
        q, k, v = (
            x[:1, :, :count].detach().double().requires_grad_()
            for x, count in zip(self.leaves, (group, 1, 1), strict=True)
        )
        first = None if self.documents is None else document_starts(self.documents)[:1]
        mask = visible(self.case.seq, self.case.seq, first, self.case.window, q.device)
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * self.case.dim**-0.5
        p = scores.masked_fill_(~mask, -torch.inf).softmax(dim=-1)
        o = (p @ v.transpose(1, 2)).transpose(1, 2)
        grads = torch.autograd.grad(o, (q, k, v), self.dy[:1, :, :group].double())
        return [o.detach(), *grads]

    def teraflops(self) -> float:
        """Of a forward."""
        i = torch.arange(self.case.seq)
        start = torch.zeros_like(i) if self.documents is None else document_starts(self.documents.cpu())
        start = torch.maximum(start, i - (self.case.window or self.case.seq) + 1)
        pairs = int((i - start + 1).expand(self.case.batch, -1).sum())
        return 4 * self.case.heads * self.case.dim * pairs / 1e12

    def peers(self) -> dict[str, Call]:
        q, k, v = self.leaves
        case, heads = self.case, [x.transpose(1, 2) for x in self.leaves]
        found: dict[str, Call] = {}

        def sdpa(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)

        def flash(*rows: Any, **more: Any) -> Tensor:
            out: Tensor = torch.ops.aten._flash_attention_forward(*rows, 0.0, True, False, **more)[0]
            return out

        if case.window is None and self.documents is None:
            whole = document_spans(torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device))
            found["FA2"] = lambda: sdpa(SDPBackend.FLASH_ATTENTION)
            found["cuDNN by SDPA"] = lambda: sdpa(SDPBackend.CUDNN_ATTENTION)
            found["own Triton kernel"] = lambda: attention(q, k, v, whole)
            return found
        if case.window is not None:
            mask = visible(case.seq, case.seq, None, case.window, q.device)
            group = case.heads // case.kv
            found["masked SDPA"] = lambda: F.scaled_dot_product_attention(
                heads[0], *(x.repeat_interleave(group, dim=1) for x in heads[1:]), mask
            ).transpose(1, 2)
            found["FA2 window"] = lambda: flash(
                q, k, v, None, None, case.seq, case.seq, window_size_left=case.window - 1, window_size_right=0
            )
        if self.documents is not None:
            counts = torch.unique_consecutive(self.documents[0], return_counts=True)[1]
            ends, longest = F.pad(counts.cumsum(0), (1, 0)).int(), int(counts.max())
            found["FA2 varlen"] = lambda: flash(q[0], k[0], v[0], ends, ends, longest, longest)[None]
        found["FlexAttention"] = flex(heads, case, self.documents)
        return found


def documents(batch: int, seq: int, mean: int) -> Tensor:
    """Numbers of documents of mean ± half tokens, [batch, seq] int64, every row alike."""
    lengths = torch.randint(
        mean // 2, mean * 3 // 2 + 1, (2 + 2 * seq // mean,), generator=torch.Generator().manual_seed(0)
    )
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:seq].expand(batch, seq).contiguous()


def flex(heads: list[Tensor], case: Case, numbers: Tensor | None) -> Call:
    """torch's FlexAttention, compiled, with a block mask made once (at the first call, where it may fail)."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = j <= i
        if case.window is not None:
            mask = mask & (i - j < case.window)
        return mask if numbers is None else mask & (numbers[b, i] == numbers[b, j])

    @functools.cache
    def made() -> tuple[Any, Any]:
        block = create_block_mask(seen, case.batch, None, case.seq, case.seq, device=heads[0].device, _compile=True)
        return torch.compile(flex_attention, dynamic=False), block

    def call() -> Tensor:
        compiled, block = made()
        out: Tensor = compiled(*heads, block_mask=block, enable_gqa=True)
        return out.transpose(1, 2)

    return call


def rows(bench: Any) -> None:
    for name, case in CASES.items():
        if not bench.wants(name):
            continue
        inputs = Inputs(case)
        peers, flops = inputs.peers(), inputs.teraflops()
        bench.add(
            f"{name}, forward", inputs.ours, lambda inputs=inputs: inputs.exact()[:1], 1e-2, teraflops=flops,
            gate=lambda inputs=inputs: inputs.slice([inputs.ours()]), peers=peers, alike=2e-2,
        )  # fmt: skip
        bench.add(
            f"{name}, both ways", lambda inputs=inputs: inputs.both(inputs.ours), inputs.exact, 2e-2,
            teraflops=3.5 * flops, gate=lambda inputs=inputs: inputs.slice(inputs.both(inputs.ours)),
            peers={who: functools.partial(inputs.both, call) for who, call in peers.items()}, alike=2e-2,
            beats=GOALS.get(name),
        )  # fmt: skip
