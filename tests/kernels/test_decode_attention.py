"""One query a row against its cache: kernels and reference against float64, and what is written to the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.checks import close, narrow, poison

from lorarun.kernels import decode_attention as kernels
from lorarun.kernels.backend import reference
from lorarun.kernels.decode_attention import Held, Step, decode_attention

SHAPES = [  # batch, heads, kv heads, head_dim, slots
    (3, 4, 2, 32, 100),
    (1, 8, 1, 64, 40),
    (2, 3, 3, 24, 300),
]


def exact(q: Any, step: Step, softcap: float | None, scale: float) -> Any:
    """In float64, row by row, from what the cache holds afterwards."""
    rows = []
    for b, n in enumerate(step.filled.tolist()):
        keys, values = (
            held.at((b, slice(n))).decode(torch.float64) for held in (step.keys, step.values)
        )  # [n, kv, dim]
        group = q.shape[2] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q[b, 0].double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
    return torch.stack(rows)[:, None]


def empty(shape: tuple[int, ...], device: Any, dtype: torch.dtype, fp8: bool) -> Held:
    """Keys and values [2, batch, slots, kv, dim] whose slots hold NaN."""
    nan = float("nan")
    if not fp8:
        return Held(torch.full(shape, nan, dtype=dtype, device=device))
    two, batch, slots, kv, _ = shape
    scale = torch.full((two, batch, kv, slots), nan, device=device).transpose(2, 3)
    return Held(torch.full(shape, 0x7E, dtype=torch.uint8, device=device), scale)


def check(
    shape: Any, device: Any, dtype: torch.dtype, softcap: float | None, full: bool = False, fp8: bool = False,
    size: float | None = None,
) -> None:  # fmt: skip
    """size: values are about this, instead of standing around 0."""
    batch, heads, kv, dim, slots = shape
    generator = torch.Generator().manual_seed(dim)

    def random(*sizes: int) -> Any:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    wide = random(batch, 1, (heads + 2 * kv) * dim)  # q, k, v as columns of one product
    q, k, v = (t.view(batch, 1, -1, dim) for t in wide.split([heads * dim, kv * dim, kv * dim], dim=2))
    filled = [slots if full else 1 + (7 + 61 * b) % slots for b in range(batch)]
    slot = [(n - 1) if not full else (5 * b + 3) % slots for b, n in enumerate(filled)]
    held = empty((2, batch, slots, kv, dim), device, dtype, fp8)
    for b, n in enumerate(filled):
        new = random(2, n, kv, dim)
        if size is not None:
            new[1] = size * (1 + new[1] / 8)
        held.put((slice(None), b, slice(n)), held.encode(new))
    if size is not None:
        v.mul_(size)
    parts = [part for part in held if part is not None]
    before = [part.clone() for part in parts]
    for forced in (False, True):
        for part, was in zip(parts, before, strict=True):
            part.copy_(was)
            if forced:
                part.nan_to_num_()  # it may read what is not filled, as long as that is finite
        positions = [torch.tensor(x, dtype=torch.int32, device=device) for x in (slot, filled)]
        step = Step(held.at(0), held.at(1), *positions, slots)
        poison(device)
        with reference() if forced else torch.no_grad():
            out = decode_attention(q, k, v, step, softcap, 0.2)
        with reference():
            expected = held.encode(torch.cat((k, v), dim=1).transpose(0, 1))  # [2, batch, kv, dim]
        for part, was, new in zip(parts, before, expected, strict=False):
            assert torch.equal(part[:, range(batch), slot], new)
            written = torch.zeros_like(part, dtype=torch.bool)
            written[:, range(batch), slot] = True
            assert bool(((part == was) | was.isnan() | written).all()), "only the new slot is written"
        assert out.shape == (batch, 1, heads, dim) and out.dtype == dtype
        close(out, exact(q, step, softcap, 0.2), f"{shape} {forced}", 8)  # probabilities are rounded to 16 bits too


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("fp8", [False, True])
def test_against_float64(device: Any, shape: Any, softcap: float | None, fp8: bool) -> None:
    """In FP8 against what the cache holds, scales included; codes and scales that are written are the reference's."""
    check(shape, device, torch.float32 if device.type == "cpu" else torch.float16, softcap, fp8=fp8)
    check(shape, device, narrow(device), softcap, fp8=fp8)


@pytest.mark.kernel
def test_small_values_in_fp16(device: Any) -> None:
    """Their scales are 5e-7, which fp16 has three bits for, and its products with probabilities less."""
    check((2, 4, 2, 64, 200), device, torch.float16, None, fp8=True, size=2e-4)


@pytest.mark.kernel
def test_vectors_of_zeros_and_of_nan(device: Any) -> None:
    """A vector of zeros has a scale that is no 0, and NaN shows in the row that has it."""
    held, dtype = empty((2, 2, 5, 1, 32), device, narrow(device), fp8=True), narrow(device)
    zeros = torch.zeros(2, 1, 1, 32, dtype=dtype, device=device)
    slot, filled = torch.zeros(2, 2, dtype=torch.int32, device=device).unbind()
    step = Step(held.at(0), held.at(1), slot, filled + 1, 5)
    assert torch.equal(decode_attention(zeros + 1, zeros, zeros, step), zeros)
    v = zeros.clone()
    v[1, 0, 0, 7] = float("nan")
    out = decode_attention(zeros + 1, zeros, v, step)
    assert torch.equal(out[0], zeros[0]) and bool(out[1].isnan().all())


@pytest.mark.kernel
@pytest.mark.parametrize("fp8", [False, True])
def test_a_ring_that_is_full(device: Any, fp8: bool) -> None:
    """The newest key stands anywhere."""
    check((3, 4, 2, 32, 70), device, narrow(device), None, full=True, fp8=fp8)


@pytest.mark.kernel
@pytest.mark.parametrize("busy", [1, 10_000])
def test_any_number_of_parts(device: Any, busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BUSY", busy)
    for fp8 in (False, True):
        check((2, 4, 2, 32, 300), device, narrow(device), None, fp8=fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("fp8", [False, True])
def test_real_shapes(device: Any, dim: int, batch: int, fp8: bool) -> None:
    check((batch, 32, 8, dim, 4224), device, torch.bfloat16, None, fp8=fp8)
    check((batch, 8, 4, dim, 1024), device, torch.bfloat16, 50.0, full=True, fp8=fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 2, 63, 65, 4097])
@pytest.mark.parametrize("heads, kv", [(1, 1), (28, 4), (14, 2), (4, 1), (40, 8)])
def test_odd_sizes(device: Any, heads: int, kv: int, slots: int) -> None:
    """Heads of a group that fill no tile, slots that fill no part."""
    for batch in (1, 5):
        for fp8 in (False, True):
            check((batch, heads, kv, 128, slots), device, torch.bfloat16, None, fp8=fp8)
            check((batch, heads, kv, 80, slots), device, torch.bfloat16, None, full=True, fp8=fp8)
