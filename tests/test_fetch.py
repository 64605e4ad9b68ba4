"""What scripts/fetch.py makes of the registries' packages is what the references were computed from."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

REFERENCES = Path(__file__).parent / "reference"
FETCH = Path(__file__).parent.parent / "scripts" / "fetch.py"


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_model_is_the_one_of_the_references(real: Callable[[str], Path], name: str) -> None:
    folder = real(name)
    reference = json.loads((REFERENCES / f"{name}.json").read_text(encoding="utf-8"))
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    assert digest.hexdigest() == reference["weights_sha256"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for case in reference["cases"]:
        if case["name"] != "long":  # its ids were cut off, so decoding gave text that need not encode to them
            assert tokenizer(case["text"], add_special_tokens="messages" not in case).input_ids == case["ids"]


def test_damaged_download_is_refused_and_deleted(tmp_path: Path) -> None:
    wheel = tmp_path / ".downloads" / "data" / "chatterbot_corpus-1.3.3-py2.py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"half a wheel")  # as if it had been fetched by an earlier run
    command = [sys.executable, FETCH, "data", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the sha256 of chatterbot_corpus-1.3.3-py2.py3-none-any.whl is" in done.stderr
    assert "run this again" in done.stderr
    assert not wheel.exists()
    assert not (tmp_path / "data").exists()
