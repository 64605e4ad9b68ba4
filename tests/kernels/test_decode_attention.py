"""One query a row against its cache: kernels and reference against float64, and what is written to the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.checks import close, narrow, poison

from lorarun.kernels import decode_attention as kernels
from lorarun.kernels.backend import reference
from lorarun.kernels.decode_attention import Step, decode_attention

SHAPES = [  # batch, heads, kv heads, head_dim, slots
    (3, 4, 2, 32, 100),
    (1, 8, 1, 64, 40),
    (2, 3, 3, 24, 300),
]


def exact(q: Any, step: Step, softcap: float | None, scale: float) -> Any:
    """In float64, row by row, from what the cache holds afterwards."""
    rows = []
    for b, n in enumerate(step.filled.tolist()):
        keys, values = (held[b, :n].double() for held in (step.keys, step.values))  # [n, kv, dim]
        group = q.shape[2] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q[b, 0].double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
    return torch.stack(rows)[:, None]


def check(shape: Any, device: Any, dtype: torch.dtype, softcap: float | None, full: bool = False) -> None:
    batch, heads, kv, dim, slots = shape
    generator = torch.Generator().manual_seed(dim)

    def random(*sizes: int) -> Any:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    wide = random(batch, 1, (heads + 2 * kv) * dim)  # q, k, v as columns of one product
    q, k, v = (t.view(batch, 1, -1, dim) for t in wide.split([heads * dim, kv * dim, kv * dim], dim=2))
    filled = [slots if full else 1 + (7 + 61 * b) % slots for b in range(batch)]
    slot = [(n - 1) if not full else (5 * b + 3) % slots for b, n in enumerate(filled)]
    held = torch.full((2, batch, slots, kv, dim), float("nan"), dtype=dtype, device=device)
    for b, n in enumerate(filled):
        held[:, b, :n] = random(2, n, kv, dim)
    before = held.clone()
    for forced in (False, True):
        held.copy_(before)
        if forced:
            held.nan_to_num_()  # it may read what is not filled, as long as that is finite
        positions = [torch.tensor(x, dtype=torch.int32, device=device) for x in (slot, filled)]
        step = Step(held[0], held[1], *positions, slots)
        poison(device)
        with reference() if forced else torch.no_grad():
            out = decode_attention(q, k, v, step, softcap, 0.2)
        for b, at in enumerate(slot):
            assert torch.equal(held[0, b, at], k[b, 0]) and torch.equal(held[1, b, at], v[b, 0])
        written = torch.zeros_like(held, dtype=torch.bool)
        written[:, range(batch), slot] = True
        same = (held == before) | before.isnan() | written
        assert bool(same.all()), "only the new slot is written"
        assert out.shape == (batch, 1, heads, dim) and out.dtype == dtype
        close(out, exact(q, step, softcap, 0.2), f"{shape} {forced}", 8)  # probabilities are rounded to 16 bits too


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_against_float64(device: Any, shape: Any, softcap: float | None) -> None:
    check(shape, device, torch.float32 if device.type == "cpu" else torch.float16, softcap)
    check(shape, device, narrow(device), softcap)


@pytest.mark.kernel
def test_a_ring_that_is_full(device: Any) -> None:
    """The newest key stands anywhere."""
    check((4, 4, 2, 32, 130), device, narrow(device), None, full=True)


@pytest.mark.kernel
@pytest.mark.parametrize("busy", [1, 10_000])
def test_any_number_of_parts(device: Any, busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BUSY", busy)
    check((2, 4, 2, 32, 300), device, narrow(device), None)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_real_shapes(device: Any, dim: int, batch: int) -> None:
    check((batch, 32, 8, dim, 4224), device, torch.bfloat16, None)
    check((batch, 8, 4, dim, 1024), device, torch.bfloat16, 50.0, full=True)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 2, 63, 65, 4097])
@pytest.mark.parametrize("heads, kv", [(1, 1), (28, 4), (14, 2), (4, 1), (40, 8)])
def test_odd_sizes(device: Any, heads: int, kv: int, slots: int) -> None:
    """Heads of a group that fill no tile, slots that fill no part."""
    for batch in (1, 5):
        check((batch, heads, kv, 128, slots), device, torch.bfloat16, None)
        check((batch, heads, kv, 80, slots), device, torch.bfloat16, None, full=True)
