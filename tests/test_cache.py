"""Decoding with a cache is the full forward, cut into steps.

The full forward agrees with transformers elsewhere; here it is the reference for every way of cutting it: prompts
shorter and longer than the window, one token at a time, chunks, padding on the left up to whole windows of it.
Checkpoints are tiny, and their windows (8, or less where a test says so) are shorter than their rows.

1e-4 on logits of unit size: fp32 sums of a few hundred products, taken in another order, over six layers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lorarun.cache import Cache, place
from lorarun.models import build_model

FAMILIES = (
    "llama3",
    "llama-bias",
    "mistral-sliding",
    "qwen2",
    "qwen2-sliding",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3-text",
)
WINDOWED = ("mistral-sliding", "qwen2-sliding", "gemma2", "gemma3-text")
CLOSE = dict(rtol=0.0, atol=1e-4)
Tiny = Callable[[str], Path]


@functools.cache
def build(folder: Path, window: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a tiny checkpoint, its window replaced where one is given."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if window is not None:
        assert raw["sliding_window"] is not None
        raw["sliding_window"] = window
    with torch.device("meta"):
        model: Any = build_model(raw)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False, assign=True)
    model.tie()
    return model.to(dtype).requires_grad_(False).eval()


def some_ids(*shape: int) -> Tensor:
    return torch.randint(3, 1000, shape, generator=torch.Generator().manual_seed(1))


def left_padded(rows: list[Tensor], extra: int) -> tuple[Tensor, Tensor]:
    """ids and documents [rows, longest + extra]; pads have an ordinary token's id, so that nothing can go by the id."""
    length = max(len(row) for row in rows) + extra
    ids, documents = torch.full((len(rows), length), 7), torch.full((len(rows), length), -1)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], documents[i, length - len(row) :] = row, 0
    return ids, documents


def in_chunks(
    model: Any, ids: Tensor, sizes: list[int], documents: Tensor | None = None, cache: Cache | None = None
) -> Tensor:
    """The logits of all of ids, whose first chunks have these sizes and whose rest goes one by one."""
    cache = cache or Cache(model, *ids.shape)
    sizes = [*sizes, *[1] * (ids.shape[1] - sum(sizes))]
    first = None if documents is None else documents[:, : sizes[0]]
    pieces = ids.split(sizes, dim=1)
    logits = [model(pieces[0], documents=first, cache=cache)]
    logits += [model(piece, cache=cache) for piece in pieces[1:]]
    pads = 0 if documents is None else (documents < 0).sum(dim=1)
    assert torch.equal(torch.tensor(cache.lengths), torch.full((len(ids),), ids.shape[1]) - pads)
    assert cache.filled.tolist() == cache.lengths
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sizes", [[1], [13], [3, 6, 1, 9]], ids=["steps", "prompt", "chunks"])
def test_any_cut_equals_the_full_forward(tiny: Tiny, name: str, sizes: list[int]) -> None:
    model, ids = build(tiny(name)), some_ids(2, 22)
    torch.testing.assert_close(in_chunks(model, ids, sizes), model(ids), **CLOSE)


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("window", [1, 4])
def test_short_windows(tiny: Tiny, name: str, window: int) -> None:
    """A window of one token sees nothing but itself, and its cache stays empty."""
    model, ids = build(tiny(name), window), some_ids(2, 12)
    torch.testing.assert_close(in_chunks(model, ids, [6, 3]), model(ids), **CLOSE)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("extra", [0, 3, 50])
def test_left_padding_changes_nothing(tiny: Tiny, name: str, extra: int) -> None:
    """Rows of 2, 5 and 11 tokens in one batch, continued by 10, against each row alone.  50 pads fill whole windows."""
    model = build(tiny(name))
    prompts, more = [some_ids(n) for n in (2, 5, 11)], some_ids(3, 10)
    ids, documents = left_padded(prompts, extra)
    whole = torch.cat((ids, more), dim=1)
    cut = in_chunks(model, whole, [ids.shape[1]], documents)
    full = model(whole, documents=torch.cat((documents, torch.zeros_like(more)), dim=1))
    assert bool(cut.isfinite().all()) and bool(full.isfinite().all())
    for i, prompt in enumerate(prompts):
        alone = model(torch.cat((prompt, more[i])).unsqueeze(0))[0]
        torch.testing.assert_close(cut[i, -len(alone) :], alone, **CLOSE)
        torch.testing.assert_close(full[i, -len(alone) :], alone, **CLOSE)


def test_positions_count_tokens_only(tiny: Tiny) -> None:
    """Rotation is relative: positions that count the pads too would show in no logits, but for dynamic scaling."""
    model = build(tiny("llama3"))
    ids, documents = left_padded([some_ids(2), some_ids(5)], 1)
    cache = Cache(model, 2, 9)
    assert place(ids, None, documents, cache)[0].tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 1, 2, 3, 4]]
    model(ids, documents=documents, cache=cache)
    assert place(ids[:, :2], None, None, cache)[0].tolist() == [[2, 3], [5, 6]]
    assert place(ids[:, :1], None, None, cache)[0].tolist() == [[2], [5]]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_without_padding(tiny: Tiny, name: str) -> None:
    """Prompts one behind the other, not in the order of the rows; a longer one in pieces; then steps of all together.

    Row 1 is filled with another text first, and row 3 is a copy of row 0.
    """
    model = build(tiny(name))
    texts = [some_ids(5), some_ids(30), some_ids(12)]
    more = some_ids(4, 14)
    cache = Cache(model, 4, 44)
    model(some_ids(1, 17), documents=torch.ones(1, 17, dtype=torch.int64), cache=cache)
    cache.clear(1)
    packed = torch.cat((texts[2], texts[0]))[None]
    logits = model(packed, documents=torch.tensor([[2] * 12 + [0] * 5]), cache=cache)
    parts = {2: [logits[0, :12]], 0: [logits[0, 12:]], 1: []}
    for piece in texts[1].split([9, 1, 20]):
        parts[1].append(model(piece[None], documents=torch.ones(1, len(piece), dtype=torch.int64), cache=cache)[0])
    cache.copy_row(0, [3])
    assert cache.lengths == [5, 30, 12, 5]
    for ids in more.split([1, 1, 3, *[1] * 9], dim=1):
        step = model(ids, cache=cache)
        for row in range(3):
            parts[row].append(step[row])
    for row, text in enumerate(texts):
        alone = model(torch.cat((text, more[row]))[None])[0]
        torch.testing.assert_close(torch.cat(parts[row]), alone, **CLOSE)


@pytest.mark.parametrize("name", ["llama3", "gemma3-text"])
def test_a_copied_row_goes_on_by_itself(tiny: Tiny, name: str) -> None:
    model, prompt, more = build(tiny(name)), some_ids(11), some_ids(3, 10)
    cache = Cache(model, 3, 21)
    model(prompt[None], documents=torch.zeros(1, 11, dtype=torch.int64), cache=cache)
    cache.copy_row(0, [1, 2])
    steps = torch.cat([model(ids, cache=cache) for ids in more.split(1, dim=1)], dim=1)
    for row in range(3):
        alone = model(torch.cat((prompt, more[row]))[None])[0, 11:]
        torch.testing.assert_close(steps[row], alone, **CLOSE)


@pytest.mark.parametrize("name", ["llama3", "mistral-sliding", "gemma3-text"])
def test_tokens_taken_back(tiny: Tiny, name: str) -> None:
    """As long as no ring has gone round; then the row can only be begun anew."""
    model, ids = build(tiny(name)), some_ids(1, 12)
    cache = Cache(model, 1, 40)
    model(ids[:, :7], cache=cache)
    assert cache.rewind(0, 4) and cache.lengths == [4] and cache.filled.tolist() == [4]
    logits = torch.cat((model(ids[:, 4:6], cache=cache), model(ids[:, 6:7], cache=cache)), dim=1)
    torch.testing.assert_close(logits, model(ids[:, :7])[:, 4:], **CLOSE)
    model(ids[:, 7:], cache=cache)
    assert cache.rewind(0, 12)
    assert cache.rewind(0, 9) == (name == "llama3")
    cache.clear(0)
    torch.testing.assert_close(model(ids, cache=cache), model(ids), **CLOSE)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_second_token_is_not_taken_back(tiny: Tiny, name: str) -> None:
    """The ring has lost what the two would have to give way to; once the first is replaced, one more goes."""
    model, ids, other = build(tiny(name)), some_ids(1, 14), some_ids(2, 14)[1:]
    cache = Cache(model, 1, 14)
    model(ids[:, :12], cache=cache)
    assert cache.rewind(0, 11) and not cache.rewind(0, 10) and cache.lengths == [11]
    assert cache.rewind(0, 11)  # which is where it stands
    for at in (11, 12):
        model(other[:, at : at + 1], cache=cache)
        assert cache.rewind(0, at)
        logits = model(ids[:, at : at + 1], cache=cache)
        torch.testing.assert_close(logits, model(ids[:, : at + 1])[:, at:], **CLOSE)
    cache.clear(0)
    model(ids[:, :3], cache=cache)
    assert cache.rewind(0, 1)


@pytest.mark.parametrize("name", ["llama3", "gemma3-text"])
def test_a_padded_prompt_in_chunks(tiny: Tiny, name: str) -> None:
    model = build(tiny(name), 4 if name == "gemma3-text" else None)
    prompts = [some_ids(n) for n in (10, 12)]
    ids, documents = left_padded(prompts, 0)
    logits = in_chunks(model, ids, [5, 4], documents)
    for i, prompt in enumerate(prompts):
        torch.testing.assert_close(logits[i, -len(prompt) :], model(prompt.unsqueeze(0))[0], **CLOSE)


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma2", "gemma3-text"])
@pytest.mark.parametrize("window", [4, 8])
def test_a_window_counts_its_own_token(tiny: Tiny, name: str, window: int) -> None:
    """Query i sees keys i − W + 1 … i: layer 1's output at token W does not depend on token 0, at W − 1 it does.

    A window that counts W tokens *before* the query is one too wide (github.com/sgl-project/sglang/issues/26147).
    """
    model, ids = build(tiny(name), window), some_ids(1, 2 * window)
    assert model.config.windows[0] == window
    other = ids.clone()
    other[0, 0] += 1

    def first_layer(ids: Tensor, prompt: int) -> Tensor:
        cache = Cache(model, *ids.shape)
        pieces = ids.split([prompt, *[1] * (ids.shape[1] - prompt)], dim=1)
        return torch.cat([model.hidden_states(piece, cache=cache, layers=True)[1] for piece in pieces], dim=1)

    for prompt in (2 * window, window - 1, 1):  # all at once; tokens W − 1 and W as steps; all of them as steps
        change = (first_layer(ids, prompt) - first_layer(other, prompt)).abs().amax(dim=(0, 2))  # [2 W]
        assert bool((change[:window] > 1e-6).all()) and bool((change[window:] == 0).all())


@pytest.mark.parametrize("name", ["llama3", "qwen2-sliding", "gemma2", "gemma3-text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_left_padded_rows_have_finite_gradients(tiny: Tiny, name: str, dtype: torch.dtype) -> None:
    """A pad sees itself, so no softmax is 0/0 and no NaN spreads from it (github.com/pytorch/pytorch/issues/103749)."""
    model = build(tiny(name), 4 if name in WINDOWED else None, dtype)
    rows = [some_ids(n) for n in (3, 12, 7)]  # nine pads before the first: whole windows of padding
    ids, documents = left_padded(rows, 0)

    def gradients(ids: Tensor, documents: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            logits = model(ids, documents=documents).float()
        assert bool(logits.isfinite().all())
        real = (documents[:, 1:] == 0) & (documents[:, :-1] == 0)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1][real], ids[:, 1:][real], reduction="sum")
        named = dict(model.named_parameters())
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))

    model.requires_grad_(True)
    try:
        padded = gradients(ids, documents)
        alone = [gradients(row.unsqueeze(0), torch.zeros(1, len(row), dtype=torch.int64)) for row in rows]
    finally:
        model.requires_grad_(False)
    for key, gradient in padded.items():
        assert bool(gradient.isfinite().all()), key
        if dtype == torch.float32:
            expected = sum(each[key] for each in alone)
            torch.testing.assert_close(
                gradient, expected, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
            )


def test_a_sliding_layer_keeps_no_more_than_its_window(tiny: Tiny) -> None:
    model = build(tiny("gemma3-text"))
    cache = Cache(model, 3, 40)
    sizes = [part.shape[1] for part in cache.buffers[::2]]
    assert sizes == [8, 8, 40, 8, 8, 40]
    vectors = 2 * sum(sizes) * 3 * model.config.num_key_value_heads
    assert cache.nbytes == vectors * model.config.head_dim * 4
    assert Cache(model, 3, 40, "fp8").nbytes == vectors * (model.config.head_dim + 4)


# --- FP8 -------------------------------------------------------------------------------------------------------------


class Told(Cache):
    """A cache of the model's dtype whose keys and values are changed before it sees them."""

    def __init__(self, change: Callable[[Tensor], Tensor], *args: Any) -> None:
        super().__init__(*args)
        self.change = change

    def update(self, layer: int, k: Tensor, v: Tensor, spans: Any) -> Any:
        return super().update(layer, self.change(k), self.change(v), spans)


def rounded(x: Tensor) -> Tensor:
    """To e4m3 and back, with a scale for each vector."""
    absmax = x.float().abs().amax(dim=-1, keepdim=True)
    largest = torch.full_like(absmax, 448.0)
    return ((x.float() * (largest / absmax)).to(torch.float8_e4m3fn).float() * (absmax / largest)).to(x.dtype)


def tour(model: Any, cache: Cache) -> Tensor:
    """The logits of every kind of pass that four rows of 44 tokens may see."""
    one = torch.ones(1, 30, dtype=torch.int64)
    logits = [model(some_ids(1, 17), documents=one[:, :17], cache=cache)]
    cache.clear(1)
    logits.append(model(some_ids(1, 17), documents=torch.tensor([[2] * 12 + [0] * 5]), cache=cache))
    for piece in some_ids(1, 30).split([9, 1, 20], dim=1):
        logits.append(model(piece, documents=one[:, : piece.shape[1]], cache=cache))
    cache.copy_row(0, [3])
    for piece in some_ids(4, 12).split([1, 1, 3, *[1] * 7], dim=1):
        logits.append(model(piece, cache=cache))
    for row in range(4):
        assert cache.rewind(row, cache.lengths[row] - 1)
    logits.append(model(some_ids(4, 1) + 1, cache=cache))
    return torch.cat([piece.flatten(0, 1) for piece in logits])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_fp8_is_a_cache_of_rounded_vectors(tiny: Tiny, name: str, dtype: torch.dtype) -> None:
    """To the bit, in every kind of pass."""
    model = build(tiny(name), None, dtype)
    assert torch.equal(tour(model, Cache(model, 4, 44, "fp8")), tour(model, Told(rounded, model, 4, 44)))


@pytest.mark.parametrize("name", WINDOWED)
def test_fp8_with_left_padding_and_short_windows(tiny: Tiny, name: str) -> None:
    for window in (1, 4):
        model = build(tiny(name), window)
        prompts, more = [some_ids(n) for n in (2, 11)], some_ids(2, 10)
        ids, documents = left_padded(prompts, 3)
        whole = torch.cat((ids, more), dim=1)
        found, expected = (
            in_chunks(model, whole, [ids.shape[1], 4], documents, cache)
            for cache in (Cache(model, *whole.shape, "fp8"), Told(rounded, model, *whole.shape))
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_fp8_costs_no_more_than_its_roundings(tiny: Tiny, name: str) -> None:
    """e4m3 has three bits of mantissa, so no element moves by more than 2⁻⁴ of itself (the smallest of a vector, which
    are subnormal, by 2⁻¹⁰ · absmax / 448); logits move less than where every element moves at random up to that far.

    A random move has an rms of 2⁻⁴ / √3, a rounding one of three quarters of that.
    """
    model, ids = build(tiny(name)), some_ids(4, 22)
    generator = torch.Generator().manual_seed(0)

    def noisy(x: Tensor) -> Tensor:
        return x * (1 + (torch.rand(x.shape, generator=generator) * 2 - 1) / 16)

    exact = model(ids)
    ours = in_chunks(model, ids, [9], cache=Cache(model, *ids.shape, "fp8")) - exact
    noise = in_chunks(model, ids, [9], cache=Told(noisy, model, *ids.shape)) - exact
    ratio = float(ours.norm() / noise.norm())
    print(f"{name}: {float(ours.norm() / exact.norm()):.4f} of the logits, {ratio:.2f} of the noise")
    assert 0.3 < ratio < 1


@pytest.mark.parametrize("name", FAMILIES)
def test_any_cut_in_fp8_is_the_same(tiny: Tiny, name: str) -> None:
    """But for the few numbers that lie so close between two codes that the order of a sum decides.  A pass that saw its
    own keys as they were would be off by as much as FP8 is."""
    model, ids = build(tiny(name)), some_ids(2, 22)
    whole = in_chunks(model, ids, [22], cache=Cache(model, *ids.shape, "fp8"))
    for sizes in ([1], [13], [3, 6, 1, 9]):
        cut = in_chunks(model, ids, sizes, cache=Cache(model, *ids.shape, "fp8"))
        assert (cut - whole).norm() < 0.1 * (whole - model(ids)).norm()


@pytest.mark.parametrize("kept", [None, "fp8"])
def test_a_cache_outlives_inference_mode(tiny: Tiny, kept: str | None) -> None:
    """Made and grown there, filled there and outside."""
    model, ids = build(tiny("gemma3-text")), some_ids(1, 22)
    expected = in_chunks(model, ids, [9, 3], cache=Cache(model, 1, 30, kept))
    with torch.inference_mode():
        cache = Cache(model, 1, 30, kept, first=4)
        model(ids[:, :9], cache=cache)
    torch.testing.assert_close(model(ids[:, 9:12], cache=cache), expected[:, 9:12], **CLOSE)
    with torch.inference_mode():
        model(ids[:, 12:20], cache=cache)
    torch.testing.assert_close(
        model(ids[:, 20:21], cache=cache), expected[:, 20:21], rtol=0.0, atol=1e-4 if kept is None else 0.1
    )


def test_what_a_cache_refuses(tiny: Tiny) -> None:
    model, ids = build(tiny("llama3")), some_ids(2, 6)
    with pytest.raises(ValueError, match="The dtype of a cache is 'int8'; expected 'fp8', or None"):
        Cache(model, 2, 8, "int8")
    cache = Cache(model, 2, 8)
    for documents, message in (
        ([[0, 0, 0, 1, 1, 0]], "each in one piece"),
        ([[0, 0, 0, 1, 1, 2]], "the rows of the cache, 0 to 1"),
        ([[0, 0, 0, 1, 1, -1]], "without padding"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids[:1], documents=torch.tensor(documents), cache=cache)
    with pytest.raises(ValueError, match=r"2 rows; got ids \[1, 6\] without documents"):
        model(ids[:1], cache=cache)
    assert cache.lengths == [0, 0]
    model(ids, documents=torch.tensor([[0, 0, 0, 0, 0, 0], [-1, -1, 0, 0, 0, 0]]), cache=cache)
    assert cache.lengths == [6, 4]
    with pytest.raises(ValueError, match="documents belong to the first call"):
        model(ids[:, :1], documents=torch.zeros(2, 1, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="continued alone"):
        model(ids[:1, :2], documents=torch.tensor([[0, 1]]), cache=cache)
    with pytest.raises(ValueError, match="holds 8 tokens; 9 were asked for"):
        model(ids[:, :3], cache=cache)
    assert cache.lengths == [6, 4] == cache.filled.tolist()
