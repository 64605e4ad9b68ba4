"""Decoding against the full forward, transformers' own generation, and distributions computed by transformers.

Two models stand in where a decoder would only be in the way: `Scripted` emits what a test wrote down, and `Chain` has a
known distribution for the next token.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
import transformers
from test_cache import build
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import logits_process as theirs

from lorarun.answer import Text
from lorarun.cache import Cache
from lorarun.generate import generate
from lorarun.load import load
from lorarun.logprobs import logprobs
from lorarun.lora import adapters_disabled, add_lora, use_adapter
from lorarun.nn import Embedding, Model
from lorarun.rotary import Rotary
from lorarun.sampling import Sampling, choose
from lorarun.tokenizer import Tokenizer

decoding = importlib.import_module("lorarun.generate")  # the package has a function of that name
Tiny = Callable[[str], Path]
FAMILIES = (
    "llama3",
    "llama-dynamic",  # trained for 16 positions: prompts and answers here go beyond
    "mistral-sliding",
    "qwen2-sliding",
    "qwen2-yarn",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3-text",
)


class Stub(Model):
    """A model whose logits a test decides; the vocabulary is that of its tokenizer or `vocab`."""

    def __init__(self, tokenizer: Tokenizer | None = None, vocab: int = 300, longest: int = 100) -> None:
        sizes = {"num_hidden_layers": 0, "num_key_value_heads": 1, "head_dim": 2, "windows": []}
        super().__init__(SimpleNamespace(vocab_size=vocab, max_position_embeddings=longest, **sizes))
        self.tokenizer = tokenizer
        self.model = nn.Module()
        self.model.embed_tokens = Embedding(vocab, 1)
        self.rotary = Rotary(2, {"rope_type": "default", "rope_theta": 1e4}, longest)
        self.batches: list[int] = []  # rows of every call
        self.rows = torch.zeros(0)  # of each token of the last one

    def hidden_states(self, ids: Tensor, *args: Any, documents: Tensor | None = None, **kwargs: Any) -> Tensor:
        self.rows = torch.arange(len(ids)).unsqueeze(1).expand(ids.shape) if documents is None else documents
        self.batches.append(len(self.rows.unique()))
        return self.logits(ids)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, ids: Tensor) -> Tensor:
        raise NotImplementedError


class Scripted(Stub):
    """Row i of the batch emits scripts[i], and then 0 for ever."""

    def __init__(self, *scripts: list[int], tokenizer: Tokenizer | None = None, **more: Any) -> None:
        super().__init__(tokenizer, **more)
        self.scripts = scripts

    def logits(self, ids: Tensor) -> Tensor:
        step = len(self.batches) - 1
        logits = torch.zeros(*ids.shape, self.config.vocab_size)
        for i, script in enumerate(self.scripts):
            logits[..., script[step] if step < len(script) else 0][self.rows == i] = 1.0
        return logits


class Chain(Stub):
    """Logits depend on the last token alone: they are a row of `table` [vocab, vocab]."""

    def __init__(self, table: Tensor, **more: Any) -> None:
        super().__init__(vocab=len(table), **more)
        self.table = table

    def logits(self, ids: Tensor) -> Tensor:
        return self.table[ids]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level one with a chat template, whose end token is </s> and whose answers end in <|im_end|>."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made = Tokenizer.load(toy.make(tmp_path_factory.mktemp("toy"), template))
    assert made is not None and set(made.stop_ids) == {2, 4}
    return made


def some_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * seed + count)
    return torch.randint(3, 1000, (count,), generator=generator).tolist()


# --- a decoder's answers ---------------------------------------------------------------------------------------------


def by_full_forwards(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_full_forwards(tiny: Tiny, name: str) -> None:
    model = build(tiny(name))
    for prompt in (some_ids(11), some_ids(20)):
        assert generate(model, prompt, max_new_tokens=12, stop=[]) == by_full_forwards(model, prompt, 12)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_batch_equals_its_rows_alone(tiny: Tiny, name: str, penalty: float) -> None:
    """With as many pads as the longest prompt asks for: the id under a pad must not count as seen either.

    transformers does count it (github.com/unslothai/unsloth/issues/3699 and its neighbours are about the positions).
    """
    model = build(tiny(name))
    how: dict[str, Any] = dict(max_new_tokens=12, repetition_penalty=penalty, stop=[])
    short = [some_ids(2), some_ids(5), some_ids(11)]
    alone = [generate(model, prompt, **how) for prompt in short]
    for extra in (0, 3, 50):
        longer = [some_ids(11 + extra, seed=1)] if extra else []
        assert generate(model, short + longer, **how)[:3] == alone


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_in_pieces_gives_the_same_answer(tiny: Tiny, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 7 tokens, less than the windows of 8; several prompts that share a pass; one that is just as long."""
    model = build(tiny(name))
    prompts = [some_ids(40), some_ids(3), some_ids(7), some_ids(2), some_ids(21), some_ids(3)]
    whole = generate(model, prompts, max_new_tokens=10, stop=[])
    monkeypatch.setattr("lorarun.decode.PREFILL", 7)
    assert generate(model, prompts, max_new_tokens=10, stop=[]) == whole
    assert whole[1] == whole[5] == generate(model, prompts[1], max_new_tokens=10, stop=[])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kept", [None, "fp8"])
def test_a_replayed_step_is_the_step(tiny: Tiny, name: str, kept: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be captured reads nothing from the host: run again and again without its Python, it gives the same.

    A graph is stood in for by a recording of the operations, which replays them on the same tensors.  In FP8 sums in
    another order may round a key to another code; steps over the whole cache add in one order.
    """

    class Anywhere(Cache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._anywhere = True

    model = build(tiny(name))
    prompts: Any = [some_ids(2), some_ids(11), some_ids(30)]
    how: dict[str, Any] = dict(max_new_tokens=24, stop=[], repetition_penalty=1.3, temperature=0.8, seed=3)
    how["cache_dtype"] = kept
    if kept is not None:
        monkeypatch.setattr(decoding, "Cache", Anywhere)
    expected = generate(model, prompts, **how, logprobs=True)
    made = []

    class Captured(decoding.Decoder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, capture=recorded)
            made.append(self)

    monkeypatch.setattr(decoding, "Decoder", Captured)
    found = generate(model, prompts, **how, logprobs=True)
    assert [answer.ids for answer in found] == [answer.ids for answer in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert all((decoder.replay is None) == bool(decoder.obstacle) == (name == "llama-dynamic") for decoder in made)


@pytest.mark.parametrize("name", ["llama3", "qwen2-sliding", "gemma3-text"])
@pytest.mark.parametrize("kept", [None, "fp8"])
def test_a_cache_that_grows(tiny: Tiny, name: str, kept: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the same answer without it, with rings that have not gone round when they grow; also where steps are
    replayed, which are recorded again for each larger cache, and none of them for one that is about to grow."""
    model, prompt = build(tiny(name)), some_ids(3)
    how: dict[str, Any] = dict(stop=[], repetition_penalty=1.3, logprobs=True)
    expected = generate(model, prompt, max_new_tokens=40, cache_dtype=kept, **how)
    rooms: list[int] = []

    class Captured(decoding.Decoder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, capture=lambda run: rooms.append(self.cache.room) or recorded(run))

    for decoder in (decoding.Decoder, Captured):
        monkeypatch.setattr(decoding, "Decoder", decoder)
        cache = Cache(model, 1, 1000, kept, first=4)
        small = cache.nbytes
        found = generate(model, prompt, max_new_tokens=40, cache=cache, **how)
        assert found.ids == expected.ids and found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert all(part.stride(1) == 1 for part in cache.buffers if part.ndim == 3)  # scales, as the kernel reads them
        assert cache.lengths == [3 + 40 - 1] and cache.room == 64 and small < cache.nbytes
        again = generate(model, prompt + found.ids, max_new_tokens=9, cache=cache, **how)
        assert again.ids == generate(model, prompt + found.ids, max_new_tokens=9, cache_dtype=kept, **how).ids
    assert rooms[:3] == [8, 16, 32]
    few = Cache(model, 1, 20, kept, first=4)
    assert generate(model, prompt, max_new_tokens=18, cache=few, **how).ids == expected.ids[:18] and few.room == 20


class Recording(TorchDispatchMode):
    """Notes every operation with its tensors, as a graph does with their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            assert args[0].numel() == 1 and args[0].item() == 8.0, "a wait"  # Gemma's scale, a number of the host
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(*map(torch.utils._pytree.tree_leaves, (out, again)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def recorded(run: Callable[[], None]) -> Callable[[], None]:
    """As a capture: nothing that it writes counts until it is replayed."""
    decoder = run.__self__  # type: ignore[attr-defined]
    held = [decoder.tokens, decoder.chosen, decoder.logprobs, decoder.number, decoder.seen, decoder.cache.filled]
    held += decoder.cache.buffers
    before = [tensor.clone() for tensor in held]
    with Recording() as recording:
        run()
    for tensor, was in zip(held, before, strict=True):
        tensor.copy_(was)
    return recording.replay


@pytest.mark.parametrize("name", ["llama3", "llama-bias", "qwen3", "gemma2"])
def test_rows_with_adapters_of_their_own(tiny: Tiny, name: str) -> None:
    """One batch, three adapters and none, against each prompt alone with its adapter switched on."""
    model: Any = build.__wrapped__(tiny(name))
    for i, each in enumerate(("a", "b", "c")):
        targets = ["q_proj", "down_proj"] if each == "b" else "all-linear"
        add_lora(model, r=2 + i, targets=targets, name=each, seed=i, dropout=0.5)
        for key, parameter in model.named_parameters():
            if f"lora_B.{each}" in key:
                nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(i + len(key)))
    prompts, names = [some_ids(4), some_ids(9), some_ids(4), some_ids(13), some_ids(4)], ["a", None, "b", "c", "a"]
    how: dict[str, Any] = dict(max_new_tokens=8, stop=[])
    expected = []
    for prompt, each in zip(prompts, names, strict=True):
        use_adapter(model, each)
        expected.append(generate(model, prompt, **how))
    use_adapter(model, "c")
    before = state(model)
    assert generate(model, prompts, adapters=names, **how) == expected
    assert same(state(model), before)
    assert expected[0] != expected[2] and expected[0] == expected[4]
    assert generate(model, prompts[3], **how) == expected[3]  # none of it is left
    for wrong in (["a"], ["a", None, "b", "c", "d"]):
        with pytest.raises(ValueError, match="expected a name .there are: a, b, c. or None for each"):
            generate(model, prompts, adapters=wrong, **how)


@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_log_probabilities(tiny: Tiny, name: str) -> None:
    """Of the model's own distribution, whatever was done to it for drawing; against full forwards in fp64."""
    model, exact = build(tiny(name)), build(tiny(name), dtype=torch.float64)
    prompts = [some_ids(3), some_ids(12)]
    how: dict[str, Any] = dict(max_new_tokens=6, stop=[], temperature=0.5, top_k=5, repetition_penalty=1.5, seed=1)
    answers = generate(model, prompts, logprobs=True, **how)
    assert [answer.answer for answer in answers] == generate(model, prompts, **how)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == answer.answer
        logits = exact(torch.tensor([prompt + answer.ids]))[0].log_softmax(-1)
        expected = [float(logits[len(prompt) - 1 + t, token]) for t, token in enumerate(answer.ids)]
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)  # as the logits, see test_cache.py


@pytest.mark.parametrize("name", ["llama3", "qwen2-sliding", "gemma3-text"])
@pytest.mark.parametrize("kept", [None, "fp8"])
def test_a_kept_cache_goes_on(tiny: Tiny, name: str, kept: str | None) -> None:
    """A conversation: each prompt is the one before with its answer and more.  And one that is another text."""
    model = build(tiny(name))
    cache, prompt = Cache(model, 1, 90, kept), some_ids(12)
    computed: list[int] = []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))
    try:
        for turn in range(3):
            computed.clear()
            answer = generate(model, prompt, max_new_tokens=10, stop=[], cache=cache)
            assert sum(computed) == (12 if turn == 0 else 6) + 9
            assert cache.ids[0] == prompt + answer[:-1] and cache.lengths == [len(cache.ids[0])]
            assert answer == generate(model, prompt, max_new_tokens=10, stop=[], cache_dtype=kept)
            prompt = prompt + answer + some_ids(5, seed=turn)
        other = cache.ids[0][:9] + some_ids(20)  # goes another way after nine tokens
        computed.clear()
        answer = generate(model, other, max_new_tokens=3, stop=[], cache=cache)
        assert sum(computed) == (20 if name == "llama3" else 29) + 2
    finally:
        hook.remove()
    assert answer == generate(model, other, max_new_tokens=3, stop=[], cache_dtype=kept)
    with pytest.raises(ValueError, match="cache_dtype is for a cache made here"):
        generate(model, other, cache=cache, cache_dtype="fp8")
    with pytest.raises(ValueError, match="dtype of a cache is torch.float16; expected 'fp8'"):
        generate(model, other, cache_dtype=torch.float16)
    with pytest.raises(ValueError, match="the cache has 1 rows, and there are 2 answers"):
        generate(model, [other, other], cache=cache)
    with pytest.raises(ValueError, match="holds 90 tokens a row; prompt and answer take 128"):
        generate(model, other, max_new_tokens=100, cache=cache)


def test_a_kept_cache_belongs_to_a_model(tiny: Tiny) -> None:
    """One of the same shape, without adapters either; and one that has been cast since."""
    model, other = build.__wrapped__(tiny("llama3")), build.__wrapped__(tiny("llama3"))
    cache = Cache(model, 1, 40)
    generate(model, some_ids(12), max_new_tokens=3, stop=[], cache=cache)
    for wrong in (other, model.to(torch.bfloat16)):
        with pytest.raises(ValueError, match="made for another model, or before this one was cast or moved"):
            generate(wrong, some_ids(12), max_new_tokens=3, stop=[], cache=cache)


def test_kept_rows_end_at_different_steps(tiny: Tiny) -> None:
    model, prompts = build(tiny("llama3")), [some_ids(4), some_ids(9)]
    greedy = generate(model, prompts[0], max_new_tokens=9, stop=[])
    stop = greedy[3]
    cache = Cache(model, 2, 60)
    answers = generate(model, prompts, max_new_tokens=9, stop=[stop], cache=cache)
    ended = greedy.index(stop) + 1
    assert len(answers[0]) == ended < len(answers[1])
    assert cache.lengths == [4 + ended - 1, 9 + len(answers[1]) - 1]
    longer = [prompt + answer + some_ids(3) for prompt, answer in zip(prompts, answers, strict=True)]
    expected = generate(model, longer, max_new_tokens=9, stop=[])
    assert generate(model, longer, max_new_tokens=9, stop=[], cache=cache) == expected


@pytest.mark.parametrize("name", ["llama3", "gemma3-text"])
def test_kept_rows_go_on_one_token_earlier(tiny: Tiny, name: str) -> None:
    """A row that ended a step before the other has run a token too many; its next prompt leaves another one out."""
    model, prompts = build(tiny(name)), [some_ids(12), some_ids(15)]
    how: dict[str, Any] = dict(max_new_tokens=8, temperature=1.0, seed=0)
    drawn = generate(model, prompts, stop=[], **how)
    cache = Cache(model, 2, 40)
    answers = generate(model, prompts, stop=[drawn[0][2], drawn[1][3]], cache=cache, **how)
    assert [len(answer) for answer in answers] == [3, 4]
    again = [prompt + answer[:-1] for prompt, answer in zip(prompts, answers, strict=True)]
    expected = generate(model, again, max_new_tokens=8, stop=[], logprobs=True)
    found = generate(model, again, max_new_tokens=8, stop=[], logprobs=True, cache=cache)
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_kept_cache_belongs_to_an_adapter(tiny: Tiny) -> None:
    model: Any = build.__wrapped__(tiny("llama3"))
    for i, each in enumerate("ab"):
        add_lora(model, r=4, name=each, seed=i)
        for key, parameter in model.named_parameters():
            if f"lora_B.{each}" in key:
                nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(i + len(key)))
    how: dict[str, Any] = dict(max_new_tokens=6, stop=[])
    cache, prompt, answers = Cache(model, 1, 40), some_ids(20), []
    for active in ("a", None, "b"):
        use_adapter(model, active)
        answers.append(generate(model, prompt, cache=cache, **how))
        assert answers[-1] == generate(model, prompt, **how)
    for active in ("a", "b"):
        answers.append(generate(model, [prompt], adapters=[active], cache=cache, **how)[0])
    assert answers[3:] == [answers[0], answers[2]] and answers[0] != answers[1] != answers[2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("name", ["llama3", "gemma3-text"])
def test_a_kept_cache_survives_what_fails(tiny: Tiny, name: str, error: type[BaseException]) -> None:
    """In the prompt and in a step, in the middle of the layers: what half is written there is not used again."""
    model = build.__wrapped__(tiny(name))
    before, prompt = state(model), some_ids(14)
    longer = prompt + some_ids(9)
    expected = generate(model, longer, max_new_tokens=9, stop=[])
    for passes in (1, 4):
        cache = Cache(model, 1, 40)
        generate(model, prompt, max_new_tokens=3, stop=[], cache=cache)
        calls = []

        def fails(*_: Any, passes: int = passes, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == passes:
                raise error("no more")

        hook = model.model.layers[3].register_forward_pre_hook(fails)
        with pytest.raises(error):
            generate(model, prompt + some_ids(5), max_new_tokens=9, stop=[], cache=cache)
        hook.remove()
        assert same(state(model), before)
        assert generate(model, longer, max_new_tokens=9, stop=[], cache=cache) == expected


def test_a_ring_that_was_half_written_is_not_used(tiny: Tiny) -> None:
    """The ninth token has taken the first one's place in some layers, and the host has not counted it."""
    model, prompt = build.__wrapped__(tiny("gemma3-text")), some_ids(4)
    longer, cache, calls = prompt + some_ids(3), Cache(model, 1, 40), []
    generate(model, prompt, max_new_tokens=1, stop=[], cache=cache)

    def fails(*_: Any) -> None:
        calls.append(1)
        if cache.lengths == [8]:
            raise KeyboardInterrupt

    hook = model.model.layers[3].register_forward_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        generate(model, prompt, max_new_tokens=9, stop=[], cache=cache)
    hook.remove()
    how: dict[str, Any] = dict(max_new_tokens=2, stop=[], logprobs=True)
    found, expected = generate(model, longer, cache=cache, **how), generate(model, longer, **how)
    assert len(calls) == 6 and found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_a_cache_that_holds_just_what_is_needed(tiny: Tiny) -> None:
    """The last token is chosen and never looked up; prompts of one token; rows of other lengths."""
    model, prompts = build(tiny("gemma3-text")), [some_ids(1), some_ids(9)]
    expected = generate(model, prompts, max_new_tokens=7, stop=[])
    assert expected == [generate(model, prompt, max_new_tokens=7, stop=[]) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=7, stop=[], cache=Cache(model, 2, 15)) == expected
    assert generate(model, prompts[:1], max_new_tokens=1, cache=Cache(model, 1, 1), stop=[]) == [expected[0][:1]]
    with pytest.raises(ValueError, match="holds 14 tokens a row; prompt and answer take 15"):
        generate(model, prompts, max_new_tokens=7, stop=[], cache=Cache(model, 2, 14))


def test_kept_rows_whose_rotation_depends_on_their_length(tiny: Tiny) -> None:
    """Alone they are what they are without a cache; together they would need a rotation each."""
    model, prompts = build(tiny("llama-dynamic")), [some_ids(4), some_ids(9)]
    for prompt in prompts:
        expected = generate(model, prompt, max_new_tokens=12, stop=[])
        assert generate(model, prompt, max_new_tokens=12, stop=[], cache=Cache(model, 1, 30)) == expected
    with pytest.raises(ValueError, match="beyond 16 tokens .* rows go alone"):
        generate(model, prompts, max_new_tokens=12, stop=[], cache=Cache(model, 2, 30))
    short = generate(model, prompts, max_new_tokens=7, stop=[])
    assert generate(model, prompts, max_new_tokens=7, stop=[], cache=Cache(model, 2, 30)) == short


def test_a_pad_is_no_token_that_was_seen() -> None:
    """Every id is tried: whichever fills the place of a pad, the penalty must not find it there."""
    for favourite in range(40):
        table = torch.zeros(40, 40)
        table[:, favourite], table[:, favourite - 1] = 1.0, 0.9
        model, one = Chain(table), [(favourite + 7) % 40]
        how: dict[str, Any] = dict(max_new_tokens=2, repetition_penalty=1.3)
        assert generate(model, [one, one * 5], **how)[0] == generate(model, one, **how)
        assert generate(model, one, **how) == [favourite, (favourite - 1) % 40]


@pytest.mark.parametrize("name", ["llama3", "qwen2-sliding", "gemma2", "gemma3-text"])
def test_greedy_equals_transformers(tiny: Tiny, name: str) -> None:
    folder = tiny(name)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model, prompts = build(folder), [some_ids(4), some_ids(13)]
    for penalty in (1.0, 1.3):
        config = transformers.GenerationConfig(
            max_new_tokens=20, do_sample=False, repetition_penalty=penalty, eos_token_id=None, pad_token_id=0
        )
        expected = [
            other.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
        assert generate(model, prompts, max_new_tokens=20, repetition_penalty=penalty, stop=[]) == expected


@pytest.mark.parametrize("target", ["smollm2-135m", "gemma3-270m"])
def test_real_models_give_the_recorded_answers(real: Tiny, target: str) -> None:
    """Prompts of 5 to 50 tokens in one batch; transformers computed the answers."""
    model = load(real(target), dtype=torch.float32, device="cpu")
    recorded = json.loads((Path(__file__).parent / "reference" / f"{target}.json").read_text(encoding="utf-8"))
    cases = [case for case in recorded["cases"] if case.get("greedy_ids") and len(case["ids"]) <= 50]
    assert len(cases) == 4
    answers = generate(model, [case["ids"] for case in cases], max_new_tokens=16, stop=[])
    assert answers == [case["greedy_ids"] for case in cases]
    plain = cases[0]
    text = generate(model, plain["text"], max_new_tokens=16, stop=[])
    assert text == model.tokenizer.decode(plain["greedy_ids"])


@pytest.mark.parametrize("name", ["llama3", "gemma3-text"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_with_whole_windows_of_padding(tiny: Tiny, name: str, dtype: torch.dtype) -> None:
    model = build(tiny(name), 4 if name == "gemma3-text" else None, dtype)
    prompts = [some_ids(3), some_ids(12), some_ids(7)]
    greedy = generate(model, prompts, max_new_tokens=6, stop=[])
    sampled = generate(model, prompts, max_new_tokens=6, temperature=0.7, top_p=0.9, stop=[], seed=0)
    assert [len(answer) for answer in greedy + sampled] == [6] * 6
    assert all(0 <= token < 1024 for answer in greedy + sampled for token in answer)


# --- what goes in and comes out --------------------------------------------------------------------------------------


def test_ids_in_ids_out() -> None:
    table = torch.eye(300).roll(1, dims=1)  # 5 is followed by 6
    model = Chain(table)
    assert generate(model, [3, 5], max_new_tokens=3) == [6, 7, 8]
    assert generate(model, torch.tensor([3, 5]), max_new_tokens=1) == [6]
    assert generate(model, torch.tensor([[3, 5], [5, 3]]), max_new_tokens=2) == [[6, 7], [4, 5]]
    assert generate(model, [[3, 5, 9], [5], (7, 8)], max_new_tokens=2) == [[10, 11], [6, 7], [9, 10]]
    assert generate(model, [[5], [7]], max_new_tokens=1, n=2, temperature=1e-4) == [[[6], [6]], [[8], [8]]]
    assert generate(model, [5], max_new_tokens=1, n=3, temperature=1e-4) == [[6], [6], [6]]
    assert generate(model, []) == []


def test_text_and_messages_in_text_out(tokenizer: Tokenizer) -> None:
    say = tokenizer.encode("fox answers", bos=False) + [4]
    chat = [{"role": "user", "content": "what?"}]

    def model() -> Scripted:
        return Scripted(*[say] * 4, tokenizer=tokenizer)

    assert generate(model(), "the quick") == "fox answers"
    assert generate(model(), chat) == "fox answers"
    assert generate(model(), ["the quick", chat, "x"]) == ["fox answers"] * 3
    assert generate(model(), ["the", chat], n=2, temperature=1e-3) == [["fox answers"] * 2] * 2
    assert generate(model(), tokenizer.encode_prompt(chat)) == say


def test_a_text_goes_on_where_the_prompt_ended(tmp_path: Path) -> None:
    """A tokenizer that drops the space of a text's first token must not do so in the middle of one."""
    pieces = Tokenizer.load(toy.make(tmp_path, kind="pieces"))
    assert pieces is not None
    new = pieces.encode("fox", bos=False)
    assert pieces.decode(new) == "fox" and pieces.decode(pieces.encode("the", bos=False) + new) == "the fox"
    assert generate(Scripted(new + [2], tokenizer=pieces, vocab=400), "the") == " fox"


@pytest.mark.parametrize(
    "what, message",
    [
        ({"role": "user", "content": "x"}, "got a dict, where a message alone goes into a list"),
        (3, "got a int"),
        (torch.zeros(2, 3, 4), r"got a tensor of shape \[2, 3, 4\]"),
        (torch.zeros(2, 3), "got Tensor, Tensor"),
        ([[1, 2], "x"], "got ids, text"),
        ([[1, 2.5]], "got list"),
        ([[3], []], "prompt 1 is empty"),
        ("", "prompt 0 is empty"),
        ([[3], [4, -1]], "prompt 1 has ids from -1 to 4; the model's are 0 to 299"),
        ([300], "prompt 0 has ids from 300 to 300"),
    ],
)
def test_prompts_that_cannot_be_used(tokenizer: Tokenizer, what: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(Scripted([5], tokenizer=tokenizer), what)


def test_an_empty_text_starts_from_the_begin_token(tmp_path: Path) -> None:
    begins = Tokenizer.load(toy.make(tmp_path, begins=True))
    assert begins is not None and begins.encode("") == [1]
    assert generate(Scripted(begins.encode("fox", bos=False) + [2], tokenizer=begins), "") == "fox"


def test_without_a_tokenizer() -> None:
    model = Scripted([5, 6])
    for what, more in (("text", {}), ([3], {"stream": print}), ([3], {"stop": ["x"]}), ([{"role": "user"}], {})):
        with pytest.raises(ValueError, match="this model has no tokenizer; give ids"):
            generate(model, what, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how, message",
    [
        ({"temperature": -0.5}, "temperature is -0.5, expected 0 or more"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 1.1}, "top_p is 1.1, expected a probability"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"n": 0}, "n is 0"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": [1, None]}, r"seed is \[1, None\]"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"top_p": -1, "top_k": -2}, "top_p is -1, .*; top_k is -2"),
        ({"stop": [""]}, "expected a list of ids and of texts"),
        ({"stop": [3.5]}, "expected a list of ids and of texts"),
        ({"stream": print, "n": 2, "temperature": 1}, "stream shows one answer"),
    ],
)
def test_arguments_out_of_range(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(Scripted([5]), [3], **how)


def test_what_is_only_warned_of() -> None:
    with pytest.warns(UserWarning, match="n=2 answers at temperature 0"):
        assert generate(Scripted([5], [5]), [3], n=2, max_new_tokens=1) == [[5], [5]]
    with pytest.warns(UserWarning, match="a prompt has 9 tokens, and this model is made for 8"):
        assert generate(Scripted([5], longest=8), [3] * 9, max_new_tokens=1) == [5]


def test_a_long_list_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers keep their places, and randomness theirs."""
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(0))
    prompts = [[3] * length for length in (9, 1, 5, 7, 2, 9, 4)]
    how: dict[str, Any] = dict(max_new_tokens=4, temperature=1.0, seed=1, n=2)
    whole = Chain(table)
    together = generate(whole, prompts, **how)
    assert whole.batches == [6] + [14] * 3  # of equal prompts one is computed
    monkeypatch.setattr(decoding, "TOGETHER", 40)
    parts = Chain(table)
    assert generate(parts, prompts, **how) == together
    assert sum(parts.batches) > 14 * 3 and max(parts.batches) < 10


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "named, end, stops",
    [(None, "</s>", {2}), (7, "</s>", {2, 7}), ([5, 7], "</s>", {2, 5, 7}), (5, "<|im_end|>", {4, 5})],
    ids=["absent", "int", "list", "both"],
)
def test_every_end_id_of_the_checkpoint_stops(tmp_path: Path, named: Any, end: str, stops: set[int]) -> None:
    """generation_config's and the tokenizer's together; rows stop at different steps, and have the stop id last."""
    folder = toy.make(tmp_path, eos_token=end)
    (folder / "config.json").write_text("{}")
    if named is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None and set(tokenizer.stop_ids) == stops
    scripts = [[10, 11, 2, 30], [10, 7, 31, 32], [5, 33, 34, 35], [12, 13, 4, 36], [14, 15, 16, 17]]

    def until_a_stop(script: list[int]) -> list[int]:
        return next((script[: i + 1] for i, token in enumerate(script) if token in stops), script)

    answers = generate(Scripted(*scripts, tokenizer=tokenizer), [[20 + i] for i in range(5)], max_new_tokens=4)
    assert answers == [until_a_stop(script) for script in scripts]
    text = generate(Scripted(*scripts, tokenizer=tokenizer), list("vwxyz"), max_new_tokens=4)
    assert text == [tokenizer.decode([t for t in until_a_stop(script) if t not in stops]) for script in scripts]


def test_end_ids_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 6}, "eos_token_id": None}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    for end in (6, 7, 8):
        model = Scripted([5, end, 9])
        model.source = SimpleNamespace(folder=tmp_path)
        assert generate(model, [3], max_new_tokens=3) == [5, end]
    assert generate(Scripted([5, 7, 9]), [3], max_new_tokens=3) == [5, 7, 9]  # nothing is known


def test_a_list_replaces_the_end_ids(tokenizer: Tokenizer) -> None:
    script = [10, 4, 11, 2, 12]

    def run(stop: Any) -> Any:
        return generate(Scripted(script, tokenizer=tokenizer), [3], max_new_tokens=5, stop=stop)

    assert run(None) == [10, 4]
    assert run([]) == script
    assert run([11]) == run(11) == [10, 4, 11]
    assert run([2, 11]) == [10, 4, 11]
    assert run("<|im_end|>") == run(["</s>", "<|im_end|>"]) == [10, 4]  # control tokens by name
    assert run(["</s>"]) == [10, 4, 11, 2]


def test_an_end_id_in_the_prompt_ends_nothing() -> None:
    assert generate(Scripted([5, 7, 6]), [7, 3, 7], max_new_tokens=3, stop=[7]) == [5, 7]


def test_rows_end_together_only_when_all_have_ended() -> None:
    model = Scripted([7], [5, 5, 7], [5, 7])
    assert generate(model, [[1], [2], [3]], max_new_tokens=50, stop=[7]) == [[7], [5, 5, 7], [5, 7]]
    assert len(model.batches) == 3


def test_stop_texts_and_streaming(tokenizer: Tokenizer) -> None:
    """Whatever tokens a stop text is spread over, neither it nor what follows shows up, in pieces or in the answer."""
    full = "the fox é🙂 ### Question: what"
    letters = [i for letter in full for i in tokenizer.encode(letter, bos=False)]  # every byte on its own
    assert len(letters) == len(full.encode())
    for tokens in (letters, tokenizer.encode(full, bos=False)):
        for stops in ([], ["###"], ["### Q", " ###"], ["Question: whatever", "### Question"], ["🙂"], ["the"], ["zzz"]):
            pieces: list[str] = []
            model = Scripted(tokens + [2], tokenizer=tokenizer)
            answer = generate(model, "x", stop=[2, *stops], stream=pieces.append)
            ends = [full.find(stop) for stop in stops if stop in full]
            assert answer == (full[: min(ends)] if ends else full)
            assert "".join(pieces) == answer
            assert "\ufffd" not in answer and "" not in pieces
            silent = Scripted(tokens + [2], tokenizer=tokenizer)
            assert generate(silent, "x", stop=[2, *stops]) == answer
            assert silent.batches == model.batches  # and nothing is computed after it
    assert len(pieces) > 3


def test_a_stop_text_for_ids_ends_behind_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    tokens = [i for letter in "abc###d" for i in tokenizer.encode(letter, bos=False)]
    assert generate(Scripted(tokens, tokenizer=tokenizer), [3], stop=["##"]) == tokens[:5]


def test_a_text_cut_short_shows_what_it_has(tokenizer: Tokenizer) -> None:
    """At max_new_tokens: half a character, and the beginning of a stop text that never came."""
    tokens = [i for letter in "ab##" for i in tokenizer.encode(letter, bos=False)]
    pieces: list[str] = []
    answer = generate(Scripted(tokens, tokenizer=tokenizer), "x", max_new_tokens=4, stop=["###"], stream=pieces.append)
    assert answer == "ab##" == "".join(pieces)
    half = tokenizer.encode("é", bos=False)[:1]
    assert generate(Scripted(half, tokenizer=tokenizer), "x", max_new_tokens=1) == "\ufffd"


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize(
    "raw",
    [b"a\x80b", b"\xf0\x9f", b"\xf0\x9fa\xc3\xa9", b"\xc3\xc3\xa9", b"\xc0\xaf\xffz", b"\xed\xa0\x80."],
    ids=bytes.hex,
)
def test_bytes_that_are_no_text(tmp_path: Path, kind: str, raw: bytes) -> None:
    """Stray, cut and overlong sequences, alone and between letters: streamed, they are what all ids decode to."""
    tokenizer = Tokenizer.load(toy.make(tmp_path, kind=kind))
    assert tokenizer is not None
    vocab = tokenizer._core.get_vocab()
    names = [
        bytes_to_unicode()[byte] if kind == "bytes" else chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in raw
    ]
    ids = [vocab[name] for name in names]
    pieces: list[str] = []
    answer = generate(Scripted(ids + [2], tokenizer=tokenizer, vocab=400), "x", stream=pieces.append)
    assert "".join(pieces) == answer == tokenizer.decode([*tokenizer.encode("x")[-4:], *ids])[1:]
    assert "\ufffd" in answer


def test_several_answers_cut_by_texts_over_tokens(tokenizer: Tokenizer) -> None:
    """Each is cut by itself, wherever its tokens end: the same text in letters and in longer tokens, behind one."""
    first = tokenizer.encode(":", bos=False)
    letters = first + [i for letter in "fox ### Q" for i in tokenizer.encode(letter, bos=False)]
    words, clean = (first + tokenizer.encode(text, bos=False) for text in ("fox ### Q", "the fox"))
    model = Scripted(letters + [2], words + [2], clean + [2], tokenizer=tokenizer)
    answers = generate(model, "x", n=3, temperature=1e-4, stop=["## Q", 2], logprobs=True)
    assert [answer.answer for answer in answers] == [":fox #", ":fox #", ":the fox"]
    assert [answer.ids for answer in answers] == [letters, words, clean + [2]]
    assert [len(answer.logprobs) for answer in answers] == [len(answer.ids) for answer in answers]


def test_stream_true_prints(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    script = tokenizer.encode("fox", bos=False) + [2]
    assert generate(Scripted(script, tokenizer=tokenizer), [3], stream=True) == script
    assert capsys.readouterr().out == "fox\n"


def test_text_pieces_of_several_tokens_at_once(tokenizer: Tokenizer) -> None:
    """A token that holds a stop text and more: the earliest of several stop texts cuts."""
    text = Text(tokenizer, ["quick", "the"], None)
    assert [text.put(token) for token in tokenizer.encode("see the quick fox", bos=False)].index(True) >= 0
    assert text.shown == "see "


# --- sampling --------------------------------------------------------------------------------------------------------

GRID = 2**16


def probabilities(logits: Tensor, **how: Any) -> Tensor:
    """What `choose` gives each id of logits [vocab] over an even grid of random numbers: exact to 1 / GRID an edge."""
    seen = torch.zeros(1, len(logits), dtype=torch.bool)
    for token in how.pop("had", ()):
        seen[0, token] = True
    random = (torch.arange(GRID) + 0.5) / GRID
    picked = [
        choose(logits.expand(len(part), -1), Sampling(**how), seen.expand(len(part), -1), part)
        for part in random.split(2**12)
    ]
    return torch.bincount(torch.cat(picked), minlength=len(logits)) / GRID


@pytest.mark.parametrize(
    "how",
    [
        dict(temperature=1.0),
        dict(temperature=0.3),
        dict(temperature=2.5, top_k=7),
        dict(temperature=1.0, top_p=0.6),
        dict(temperature=0.8, top_k=12, top_p=0.9),
        dict(temperature=1.3, top_k=500, top_p=0.99),
        dict(temperature=1.5, min_p=0.1),
        dict(temperature=1.5, top_p=0.8, min_p=0.2),
        dict(temperature=2.0, top_k=20, top_p=0.9, min_p=0.3),
        dict(temperature=1.0, repetition_penalty=1.7, had=[0, 3, 9, 20]),
        dict(temperature=0.7, repetition_penalty=0.6, had=[1, 2], top_k=5, top_p=0.8),
    ],
    ids=str,
)
def test_the_distribution_is_transformers(how: dict[str, Any]) -> None:
    logits = 2.0 * torch.randn(40, generator=torch.Generator().manual_seed(3))
    scores = logits.unsqueeze(0)
    had = torch.tensor([how.get("had", [0])])
    scores = theirs.RepetitionPenaltyLogitsProcessor(how.get("repetition_penalty", 1.0))(had, scores)
    scores = theirs.TemperatureLogitsWarper(how["temperature"])(had, scores)
    if how.get("top_k"):
        scores = theirs.TopKLogitsWarper(how["top_k"])(had, scores)
    if how.get("top_p"):
        scores = theirs.TopPLogitsWarper(how["top_p"])(had, scores)
    if how.get("min_p"):
        scores = theirs.MinPLogitsWarper(how["min_p"])(had, scores)
    expected = scores.double().softmax(-1)[0]
    found = probabilities(logits, **how)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2.0 / GRID)
    assert bool(((found > 0) <= (expected > 0)).all())  # nothing that was cut


def test_answers_are_drawn_from_it() -> None:
    """3,000 answers of two tokens, the whole way: chi-square of the pairs within 4.5 standard deviations of its mean.

    Its mean is the degrees of freedom d, its variance 2 d. The draws are a function of the seed: this cannot flicker.
    """
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(2))
    answers = torch.tensor(generate(Chain(table), [3], max_new_tokens=2, temperature=1.0, n=3000, seed=5))
    first = table[3].softmax(-1)
    expected = 3000 * first.unsqueeze(1) * table.softmax(-1)  # [5, 5]: token one, token two
    found = torch.bincount(5 * answers[:, 0] + answers[:, 1], minlength=25).view(5, 5)
    assert float(expected.min()) > 3
    chi_square, freedom = float(((found - expected) ** 2 / expected).sum()), 24
    assert abs(chi_square - freedom) < 4.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-4, 0.5, 1e6])
@pytest.mark.parametrize(
    "cut",
    [
        {},
        dict(top_p=0.0),
        dict(top_p=1e-4),
        dict(top_k=1),
        dict(min_p=1.0),
        dict(min_p=1.0, top_p=0.5),
        dict(top_k=10**6),
        dict(top_k=10**6, top_p=0.5),
    ],
    ids=str,
)
def test_extremes(dtype: torch.dtype, temperature: float, cut: dict[str, Any]) -> None:
    """Logits up to 3e4 in 16 bits: no Inf, no NaN, always a token (github.com/Lightning-AI/litgpt/issues/401)."""
    logits = torch.linspace(-3e4, 3e4, 50)[torch.randperm(50, generator=torch.Generator().manual_seed(0))].to(dtype)
    random = torch.tensor([0.0, 0.25, 0.5, 1.0 - 2.0**-23])
    seen = torch.zeros(4, 50, dtype=torch.bool)
    chosen = choose(logits.expand(4, -1), Sampling(temperature, **cut), seen, random if temperature else None)
    assert bool(((chosen >= 0) & (chosen < 50)).all())
    if temperature < 1e6 or cut.get("top_k") == 1 or cut.get("top_p") in (0.0, 1e-4) or cut.get("min_p"):
        assert chosen.tolist() == [int(logits.argmax())] * 4


def test_logits_that_are_not_finite() -> None:
    table = torch.zeros(10, 10)
    table[4, 2] = math.nan
    table[4, 4] = 1.0
    model = Chain(table)
    for temperature in (0.0, 1.0):
        with pytest.raises(RuntimeError, match="logits of answer 1 are not finite at its new token 0"):
            generate(model, [[3], [4]], temperature=temperature, max_new_tokens=3)
    table[4, 2] = -math.inf  # a token that is ruled out is no such thing
    assert generate(model, [4], max_new_tokens=1) == [4]
    assert 2 not in generate(model, [4, 4], temperature=1.0, max_new_tokens=1, n=50, seed=0)


def test_a_seed_decides_the_answer() -> None:
    model = Chain(torch.randn(200, 200, generator=torch.Generator().manual_seed(0)))
    run = functools.partial(generate, model, max_new_tokens=12, temperature=1.0)
    answer = run([[3], [5, 6]], seed=1)
    assert run([[3], [5, 6]], seed=1) == answer
    assert run([[3], [5, 6]], seed=2) != answer
    assert run([[3], [5, 6]], seed=1 + 2**40) != answer  # every bit counts
    assert run([[9, 9, 9], [5, 6], [7]], seed=1)[1] == answer[1]  # whatever stands beside it
    assert run([[3]], seed=1)[0] == answer[0]
    assert run([[3], [3]], seed=1)[0] != run([[3], [3]], seed=1)[1]
    assert run([[3], [5, 6]], seed=1, max_new_tokens=5) == [row[:5] for row in answer]
    assert run([3]) != run([3])  # without a seed
    own = run([[3], [5, 6]], seed=[8, 9], n=2)
    assert run([[5, 6]], seed=[9], n=2)[0] == own[1] == run([[5, 6], [7], [8]], seed=[9, 1, 1], n=2)[0]
    assert own[0] != own[1] and own[0][0] != own[0][1]
    with pytest.raises(ValueError, match="3 seeds for 2 prompts"):
        run([[3], [5, 6]], seed=[1, 2, 3])


# --- leaving no trace ------------------------------------------------------------------------------------------------


def trained(tiny: Tiny) -> Any:
    """A model in the middle of training: adapters with dropout, B ≠ 0, gradients, and one module in another mode."""
    model: Any = build.__wrapped__(tiny("llama3"))
    add_lora(model, r=4, dropout=0.5, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model(torch.tensor([some_ids(9)])).square().mean().backward()
    model.model.layers[1].mlp.eval()
    return model


def state(model: Any) -> Any:
    return (
        [(name, module.training) for name, module in model.named_modules()],
        [(name, p.requires_grad, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()],
        torch.get_rng_state().tolist(),
        (model.clock.seed, model.clock.step, model.active, torch.is_grad_enabled()),
    )


def same(one: Any, other: Any) -> bool:
    return (
        one[0] == other[0]
        and one[2:] == other[2:]
        and all(
            a[:2] == b[:2] and (a[2] is b[2] if a[2] is None or b[2] is None else torch.equal(a[2], b[2]))
            for a, b in zip(one[1], other[1], strict=True)
        )
    )


def test_generating_in_the_middle_of_training_leaves_no_trace(tiny: Tiny) -> None:
    model = trained(tiny)
    before, prompts = state(model), [some_ids(3), some_ids(8)]
    during = generate(model, prompts, max_new_tokens=6, stop=[])
    sampled = generate(model, prompts, max_new_tokens=6, stop=[], temperature=1.0, seed=3)
    assert same(state(model), before)
    with adapters_disabled(model):
        assert generate(model, prompts, max_new_tokens=6, stop=[]) != during
    model.eval()
    assert generate(model, prompts, max_new_tokens=6, stop=[]) == during  # dropout was off
    assert generate(model, prompts, max_new_tokens=6, stop=[], temperature=1.0, seed=3) == sampled


def test_a_callback_generates_as_well(tiny: Tiny, tokenizer: Tokenizer) -> None:
    """With another adapter than the answer that is streamed, and neither notices."""
    model = trained(tiny)
    model.tokenizer = tokenizer
    add_lora(model, r=4, name="other", seed=1)
    how: dict[str, Any] = dict(max_new_tokens=40, temperature=1.0, seed=1, stop=[])
    expected = generate(model, "the fox", adapters=["default"], **how)
    before, prompt = state(model), some_ids(8)
    alone = generate(model, prompt, **how)
    likely = logprobs(model, [(prompt, alone)])[0]
    assert alone != generate(model, [prompt], adapters=["default"], **how)[0]
    inside: list[Any] = []

    def asks(_: str) -> None:
        if not inside:
            inside.extend([generate(model, prompt, **how), logprobs(model, [(prompt, alone)])[0]])
            inside.extend(generate(model, [prompt], adapters=["other"], **how))

    assert generate(model, "the fox", adapters=["default"], stream=asks, **how) == expected
    assert inside[0] == inside[2] == alone and torch.equal(inside[1], likely)
    assert same(state(model), before)


def test_a_model_that_was_loaded_in_inference_mode(tiny: Tiny) -> None:
    """Its tensors keep no count of what is written into them."""
    answers = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            model = load(tiny("llama3"), device="cpu")
            add_lora(model, r=4, seed=0, dora=True)
            answers.append(generate(model, some_ids(5), max_new_tokens=5, stop=[]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_exception_leaves_no_trace_either(tiny: Tiny, tokenizer: Tokenizer, error: type[BaseException]) -> None:
    model = trained(tiny)
    model.tokenizer = tokenizer
    before, calls = state(model), []

    def broken(piece: str) -> None:
        assert not model.training and not torch.is_grad_enabled()
        calls.append(piece)
        raise error("the terminal is gone")

    with pytest.raises(error, match="terminal"):
        generate(model, "the fox", max_new_tokens=30, temperature=1.0, stop=[], stream=broken)
    assert len(calls) == 1
    assert same(state(model), before)


def test_the_cache_is_freed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    class Watched(Cache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(decoding, "Cache", Watched)
    generate(build(tiny("llama3")), [some_ids(3), some_ids(5)], max_new_tokens=3)
    assert [ref() for ref in made] == [None]


@pytest.mark.gpu
def test_an_accelerator_gives_the_same_answers(tiny: Tiny, device: torch.device) -> None:
    """In fp32, where logits differ by less than tokens do; randomness does not know the device."""
    prompts = [some_ids(2), some_ids(11), some_ids(30)]
    for name in ("llama3", "llama-dynamic", "gemma2", "gemma3-text"):
        here, there = build(tiny(name)), build.__wrapped__(tiny(name)).to(device)
        for how in ({}, dict(repetition_penalty=1.3), dict(temperature=0.8, top_k=50, top_p=0.9, seed=1)):
            more: dict[str, Any] = dict(max_new_tokens=12, stop=[], **how)
            assert generate(there, prompts, **more) == generate(here, prompts, **more)
