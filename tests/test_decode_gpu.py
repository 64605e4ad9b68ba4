"""Decoding on an accelerator, in bf16 at real widths: replayed steps, logits, and two hundred answers in a row."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_training_gpu import SHAPES, VOCAB, make

import lorarun
from lorarun import decode
from lorarun.cache import Cache
from lorarun.kernels.backend import reference
from lorarun.lora import linears

generating = importlib.import_module("lorarun.generate")  # the package has a function of that name
pytestmark = pytest.mark.gpu
LENGTHS = (3, 1, 150, 41, 300)  # of prompts; the window of gemma3 is 128 here


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@contextlib.contextmanager
def eager(replayed: bool = True) -> Iterator[None]:
    """No step is replayed, but each is computed as if it were: in as many parts as the whole cache has.

    replayed: False for what would not be replayed anyway; its parts are those of what the cache holds.
    """

    class Anywhere(Cache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._anywhere = replayed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "obstacle", lambda model: "a test asked for it")
        patch.setattr(generating, "Cache", Anywhere)
        yield


@contextlib.contextmanager
def watched() -> Iterator[list[Any]]:
    """What each decoder inside says at its end: whether it replayed, and why not."""
    found: list[Any] = []
    run = decode.Decoder.run

    def watch(self: Any, stops: Any) -> None:
        run(self, stops)
        found.append((self.replay is not None, self.obstacle))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.Decoder, "run", watch)
        yield found


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("temperature, kept", [(0.0, None), (1.0, None), (1.0, "fp8")])
def test_replayed_steps_are_the_eager_ones(
    device: torch.device, name: str, bits: int, temperature: float, kept: str | None
) -> None:
    """To the bit, past the window, with what chooses the token in the graph."""
    model = make(name, bits, device)
    how: dict[str, Any] = dict(
        max_new_tokens=60,
        stop=[],
        logprobs=True,
        temperature=temperature,
        top_p=0.95,
        repetition_penalty=1.1,
        seed=1,
        cache_dtype=kept,
    )
    with watched() as decoders:
        ours = lorarun.generate(model, prompts(*LENGTHS), **how)
        alone = lorarun.generate(model, prompts(*LENGTHS)[2], **how)
    assert decoders == [(True, None)] * 2
    with eager(), watched() as decoders:
        theirs = lorarun.generate(model, prompts(*LENGTHS), **how)
        assert lorarun.generate(model, prompts(*LENGTHS)[2], **how) == alone
    assert decoders == [(False, "a test asked for it")] * 2
    assert ours == theirs and all(len(answer.ids) == 60 for answer in ours)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_full_forwards(device: torch.device, name: str, bits: int) -> None:
    """Rows of unequal lengths together, step by step, against each alone and whole in fp32.

    What is allowed is twice the error of the same forward in bf16 through the reference path, as for training curves:
    both round as often, ours in other places.
    """
    model, new = make(name, bits, device).eval(), 24
    exact = copy.deepcopy(model).float()
    texts = prompts(*(length + new for length in LENGTHS), seed=1)
    cache = Cache(model, len(texts), max(LENGTHS) + new)
    packed = torch.tensor([token for text, n in zip(texts, LENGTHS, strict=True) for token in text[:n]])
    rows = torch.arange(len(texts)).repeat_interleave(torch.tensor(LENGTHS))
    with torch.no_grad():
        first = model(packed[None].to(device), documents=rows[None], cache=cache)[0]
        logits = [[first[end - 1]] for end in torch.tensor(LENGTHS).cumsum(0).tolist()]
        for at in range(new):
            ids = torch.tensor([[text[n + at]] for text, n in zip(texts, LENGTHS, strict=True)], device=device)
            for row, step in zip(logits, model(ids, cache=cache)[:, 0], strict=True):
                row.append(step)
        assert cache.lengths == cache.filled.tolist() == [n + new for n in LENGTHS]
        ours = torch.cat([torch.stack(row) for row in logits]).float()
        with reference():
            in_fp32, in_bf16 = (
                torch.cat([each(torch.tensor([text], device=device))[0, -new - 1 :].float() for text in texts])
                for each in (exact, model)
            )
    noise = (in_bf16 - in_fp32).square().mean().sqrt()
    error = (ours - in_fp32).square().mean().sqrt()
    print(f"{name} {bits}: logits {in_fp32.std():.3f}; rms from fp32: torch in bf16 {noise:.4f}, decoding {error:.4f}")
    assert ours.isfinite().all() and error <= 2 * noise
    for n, part, whole in zip(LENGTHS, ours.split(new + 1), in_fp32.split(new + 1), strict=True):
        assert (part - whole).square().mean().sqrt() <= 3 * noise, n  # one wrong row would vanish among five


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_two_hundred_answers(device: torch.device, name: str) -> None:
    """Of all sizes, each with a graph of its own or none, adapters switched between: memory stays, answers are right.
    A thousand over the families.

    Right is what steps that are not replayed give, to the bit.
    """
    model = make(name, 4, device)
    lorarun.add_lora(model, r=8, seed=2, name="other")
    for _, linear in linears(model):
        linear.factors("other")[1].data.normal_(std=0.02)
    drawn = random.Random(0)

    def work() -> dict[str, Any]:
        lengths = [drawn.randint(1, 300) for _ in range(drawn.randint(1, 5))]
        how = dict(max_new_tokens=drawn.randint(1, 40), temperature=drawn.choice([0.0, 0.8]), seed=3, stop=[])
        return dict(what=prompts(*lengths, seed=drawn.randint(0, 99)), **how)

    def memory() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    most: dict[str, Any] = dict(what=prompts(*[300] * 5), max_new_tokens=40, temperature=0.8, seed=3, stop=[])
    for name in ("default", "other", None):
        lorarun.use_adapter(model, name)
        lorarun.generate(model, **most)
    with eager():
        lorarun.generate(model, **most)
    torch.cuda.empty_cache()
    start, answers = memory(), set()
    with watched() as decoders:
        for _ in range(200):
            lorarun.use_adapter(model, drawn.choice(["default", "other", None]))
            asked = work()
            found = lorarun.generate(model, **asked)
            assert memory()[0] == start[0]
            with eager(replayed=decoders[-1][0]):
                assert lorarun.generate(model, **asked) == found
            answers.add(str(found))
    assert sum(replayed for replayed, _ in decoders) > 100 and len(answers) > 190
    torch.cuda.empty_cache()
    assert memory()[1] <= start[1] + 2**26


def test_a_capture_that_fails_leaves_no_trace(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait inside a capture is refused; then steps run one by one, and the next answer has its graph again."""
    model, prompt = make("llama", 4, device), prompts(20)[0]
    expected = lorarun.generate(model, prompt, max_new_tokens=30, stop=[])
    allocated, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    choose = decode.choose

    def waits(logits: Any, *rest: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            logits.sum().item()
        return choose(logits, *rest)

    with monkeypatch.context() as patch, watched() as decoders:
        patch.setattr(decode, "choose", waits)
        assert lorarun.generate(model, prompt, max_new_tokens=30, stop=[]) == expected
    ((replayed, why),) = decoders
    assert not replayed and "the capture failed" in why
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.rand(3, device=device)  # the generator is in no capture
    with watched() as decoders:
        assert lorarun.generate(model, prompt, max_new_tokens=30, stop=[]) == expected
    assert decoders == [(True, None)]
    gc.collect()
    assert torch.cuda.memory_allocated() == allocated


def test_an_answer_that_is_interrupted_leaves_no_trace(device: torch.device) -> None:
    """Ctrl-C while steps are being replayed, with a cache that is kept."""
    model, texts = make("gemma3", 4, device), prompts(140, 9)
    model.train()
    modes = [module.training for module in model.modules()]
    cache = Cache(model, 1, 260)
    expected = lorarun.generate(model, texts[0] + texts[1], max_new_tokens=40, stop=[])
    read, reads = decode.Reader.read, []

    def interrupted(self: Any) -> Any:
        reads.append(1)
        if len(reads) == 20:
            raise KeyboardInterrupt
        return read(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decode.Reader, "read", interrupted)
        lorarun.generate(model, texts[0], max_new_tokens=60, stop=[], cache=cache)
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()
    found = lorarun.generate(model, texts[0] + texts[1], max_new_tokens=40, stop=[], cache=cache)
    with eager():
        again = lorarun.generate(model, texts[0] + texts[1], max_new_tokens=40, stop=[])
    assert again == expected and len(found) == 40
    own = Cache(model, 1, 260)  # of the same size, so that its parts are the same
    assert found == lorarun.generate(model, texts[0] + texts[1], max_new_tokens=40, stop=[], cache=own)
