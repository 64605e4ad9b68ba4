"""scripts/chat.py, with questions from a pipe and no terminal, on a tiny model with a toy tokenizer."""

from __future__ import annotations

import io
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import toy
from safetensors.torch import load_file, save_file

from lorarun.adapter import save_adapter
from lorarun.generate import generate
from lorarun.load import load
from lorarun.lora import add_lora

SCRIPT = Path(__file__).parent.parent / "scripts" / "chat.py"
Tiny = Callable[[str], Path]
Chat = Callable[..., tuple[str, str]]
pytestmark = pytest.mark.usefixtures("one_thread")


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
    base = tmp_path / "base"
    shutil.copytree(tiny("llama3"), base)
    toy.make(base)
    with pytest.raises(SystemExit, match="chat: .*no chat template.*--template"):
        chat([], base)
    assert len(chat(["fox"], base, "--template", "chatml", "--max-new-tokens", 2)[0]) > 0
