"""scripts/chat.py, with questions from a pipe and no terminal, on a tiny model with a toy tokenizer."""

from __future__ import annotations

import io
import itertools
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from safetensors.torch import load_file, save_file

from lorarun.adapter import save_adapter
from lorarun.cache import Cache
from lorarun.generate import generate
from lorarun.load import load
from lorarun.lora import add_lora

SCRIPT = Path(__file__).parent.parent / "scripts" / "chat.py"
Tiny = Callable[[str], Path]
Chat = Callable[..., tuple[str, str]]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """`chat(lines, *arguments)`: what the script prints as answers, and what it says beside."""
    main = runpy.run_path(str(SCRIPT))["main"]

    def run(lines: list[str], *arguments: object) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that speaks in letters, with a toy tokenizer and a template that refuses system messages."""
    made = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny("llama3"), made)
    weights = load_file(made / "model.safetensors")
    letters = [toy.core().token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    silent = torch.ones(len(weights["lm_head.weight"]), dtype=torch.bool).index_fill(0, torch.tensor(letters), False)
    weights["lm_head.weight"][silent] = 0.0  # the largest of 26 random logits is above 0
    save_file(weights, made / "model.safetensors")
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return toy.make(made, template)


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    model = add_lora(load(folder, device="cpu"), r=2, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    save_adapter(model, folder.parent / "adapter")
    return folder.parent / "adapter"


def test_a_conversation(chat: Chat, folder: Path, adapter: Path) -> None:
    """Answers are `generate`'s, of the whole conversation so far, with the adapter on or off."""
    with_adapter, alone = load(folder, adapter=adapter, device="cpu"), load(folder, device="cpu")

    def expected(model: object, *turns: str, system: str = "") -> str:
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        if system:
            messages[0]["content"] = f"{system}\n\n{messages[0]['content']}"
        return generate(model, messages, max_new_tokens=4)  # type: ignore[arg-type]

    first = expected(with_adapter, "the fox")
    second = expected(with_adapter, "the fox", first, "what")
    off = expected(alone, "the fox", first, "what", second, "quick")
    fresh = expected(alone, "the fox")
    told = expected(alone, "the fox", system="answers")
    assert first != fresh
    lines = ["the fox", "what", "/adapter off", "quick", "/reset", "the fox", "/system answers", "the fox"]
    out, err = chat([*lines, "", "/nonsense", "/exit", "never"], folder, "--adapter", adapter, "--max-new-tokens", 4)
    assert out.splitlines() == [first, second, off, fresh, told] and min(map(len, out.splitlines())) == 4
    assert err.count("tokens/s]") == 5 and "The adapter is off." in err and err.count("A new conversation") == 2


def test_a_turn_computes_what_is_new(chat: Chat, folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that go through the model: a question and its answer, not the conversation before them, until an adapter,
    a reset or a system message changes what stands there.  Counted, as are those that the script says per second."""
    passes: list[int] = []
    seconds = iter(range(1000))  # each look at the clock is a second later

    def loaded(*args: object, **how: object) -> object:
        model = load(*args, **how)  # type: ignore[arg-type]
        model.model.embed_tokens.register_forward_pre_hook(lambda _, given: passes.append(given[0].numel()))
        return model

    def encoded(*turns: str) -> int:
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        return len(tokenizer.encode_prompt(messages))

    monkeypatch.setattr("lorarun.load", loaded)
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    tokenizer = load(folder, device="cpu").tokenizer
    lines = ["the fox", "what", "quick", "/adapter off", "quick", "/reset", "the fox", "/system answers", "the fox"]
    out, err = chat(lines, folder, "--adapter", adapter, "--max-new-tokens", 4)
    one, two, three, _, fresh, told = out.splitlines()
    prompts = [encoded("the fox"), encoded("the fox", one, "what"), encoded("the fox", one, "what", two, "quick")]
    prompts += [encoded("the fox", one, "what", two, "quick", three, "quick"), encoded("the fox")]
    prompts += [encoded("answers\n\nthe fox")]
    first = passes[::4]
    assert passes == [part for count in first for part in (count, 1, 1, 1)] and len(first) == 6
    assert first[0] == prompts[0] and first[3] == prompts[3]
    for turn in (1, 2):  # what the last answer was computed from is held, but for its last token
        assert prompts[turn] - prompts[turn - 1] - 4 <= first[turn] <= prompts[turn] - prompts[turn - 1]
    assert first[4] == 1  # the same question as the first of what is held
    assert 1 < first[5] < prompts[5]  # the template begins alike
    assert err.count("[4 tokens, 4.0 tokens/s]") == 6


def test_an_answer_that_is_stopped(chat: Chat, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after two letters: they are the answer, and the conversation goes on from them."""
    flushed: list[str] = []
    say = print

    def stops(*args: object, **how: object) -> None:
        say(*args, **how)  # type: ignore[call-overload]
        if how.get("end") == "":
            flushed.extend(map(str, args))
            if len(flushed) == 2:
                raise KeyboardInterrupt

    model = load(folder, device="cpu")
    monkeypatch.setattr("builtins.print", stops)
    out, err = chat(["the fox", "what"], folder, "--max-new-tokens", 5)
    monkeypatch.undo()
    turns = [{"role": "user", "content": "the fox"}]
    whole = generate(model, turns, max_new_tokens=5)
    turns += [{"role": "assistant", "content": whole[:2]}, {"role": "user", "content": "what"}]
    assert out.splitlines() == [whole[:2], generate(model, turns, max_new_tokens=5)]
    assert "[2 tokens," in err and "tokens/s, stopped]" in err and "[5 tokens," in err


def test_the_cache_grows_with_the_conversation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one cache, at most twice as large as what it holds, however long an answer might become."""
    made: list[Cache] = []
    say, letters = print, itertools.count(1)

    class Watched(Cache):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            made.append(self)

    def stops(*args: object, **how: object) -> None:
        say(*args, **how)  # type: ignore[call-overload]
        if how.get("end") == "" and next(letters) % 6 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr("lorarun.cache.Cache", Watched)
    monkeypatch.setattr("builtins.print", stops)
    main = runpy.run_path(str(SCRIPT))["main"]
    monkeypatch.setitem(main.__globals__, "ROOM", 10)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\n" * 5))
    main([str(folder), "--max-new-tokens", "100000", "--cache", "fp8"])
    assert len(made) == 1 and next(letters) == 5 * 6 + 1 and made[0].buffers[0].dtype == torch.uint8
    assert 10 < made[0].lengths[0] <= made[0].room < 2 * made[0].lengths[0] + 2


def test_what_is_neither_on_nor_off(chat: Chat, folder: Path, adapter: Path) -> None:
    _, err = chat(["/adapter of", "/adapter"], folder, "--adapter", adapter)
    assert "/adapter of: expected /adapter on or /adapter off." in err and "The adapter is off." not in err
    assert err.count("The adapter is on.") == 1


def test_questions_end_with_the_pipe(chat: Chat, folder: Path) -> None:
    out, err = chat(["/adapter on", "fox"], folder, "--max-new-tokens", 2, "--temperature", 0.1, "--seed", 3)
    again, _ = chat(["fox"], folder, "--max-new-tokens", 2, "--temperature", 0.1, "--seed", 3)
    assert out == again and len(out.strip()) == 2 and "There is no adapter; start with --adapter" in err


def test_a_bad_argument_is_said_not_thrown(chat: Chat, folder: Path) -> None:
    _, err = chat(["fox", "fox"], folder, "--temperature", -1)
    assert err.count("temperature is -1.0, expected 0 or more") == 2


def test_what_cannot_be_talked_to(chat: Chat, tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="chat: .*no tokenizer.json"):
        chat([], tiny("llama3"))
    with pytest.raises(SystemExit, match="chat: .*nowhere"):
        chat([], tmp_path / "nowhere")
    with pytest.raises(SystemExit, match=r"chat: .*nowhere .*expected the folder of an adapter"):
        chat([], tiny("llama3"), "--adapter", tmp_path / "nowhere")
    base = tmp_path / "base"
    shutil.copytree(tiny("llama3"), base)
    toy.make(base)
    with pytest.raises(SystemExit, match="chat: .*no chat template.*--template"):
        chat([], base)
    assert len(chat(["fox"], base, "--template", "chatml", "--max-new-tokens", 2)[0]) > 0
