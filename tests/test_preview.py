"""The preview shows the ids that training would get, with learned tokens marked."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import lorarun
from lorarun.rows import read_rows
from lorarun.tokenizer import Tokenizer

ROW = {
    "messages": [
        {"role": "user", "content": "Was \u00e9 \x1b[31mred?"},
        {"role": "assistant", "content": "\U0001f98a yes"},
    ]
}


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_text_and_marks(
    real: Callable[[str], Path], name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(real(name), template="chatml" if name == "smollm2-135m" else "gemma")
    reference = PreTrainedTokenizerFast.from_pretrained(real(name))
    lorarun.preview([ROW], tokenizer)
    head, _, text = capsys.readouterr().out.partition("\n")
    ids = tokenizer.encode_chat(ROW["messages"])[0]
    assert text.replace("[[", "").replace("]]", "").replace("\\x1b", "\x1b") == reference.decode(ids) + "\n"
    assert "\x1b" not in text  # what a row has typed does not reach the terminal
    end = "<|im_end|>" if name == "smollm2-135m" else "<end_of_turn>"
    assert re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL) == [f"\U0001f98a yes{end}"]
    learned = len(reference.encode(f"\U0001f98a yes{end}", add_special_tokens=False))
    assert head == f"--- row 1: {len(ids)} tokens, {learned} of them learned"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lorarun.preview([ROW], tokenizer)
    assert f"\x1b[32m\U0001f98a yes{end}\x1b[0m" in capsys.readouterr().out


def test_rows_left_out_and_pieces(
    real: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(real("smollm2-135m"))
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": ""}\n{"text": "one two three four"}\n{"text": "five"}\n')
    drawn = []

    def rows() -> Iterator[dict[str, Any]]:
        for row in read_rows(path):
            drawn.append(row)
            yield row

    lorarun.preview(rows(), tokenizer, n=2, max_tokens=3)
    assert len(drawn) == 2
    assert capsys.readouterr().out.splitlines() == [
        f"--- row 1 ({path}, line 1): without an answer or text to learn",
        f"--- row 2 ({path}, line 2): 3 tokens, 2 of them learned",
        "one[[ two three]]",
        f"--- row 2 ({path}, line 2): 3 tokens, 2 of them learned",
        f" three[[ four{tokenizer.decode([tokenizer.eos_id], skip_special=False)}]]",
    ]
    with pytest.raises(ValueError, match="row 1: got the keys"):
        lorarun.preview([{"a": 1}], tokenizer)
    with pytest.raises(ValueError, match="read_rows reads files"):
        lorarun.preview("rows.jsonl", tokenizer)
