"""Headers that are no good: each fault is named, and the safetensors library refuses the same file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lorarun.headers import Entry, abbreviate, is_plain_name, read_header

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file by hand; `header` is JSON text or what becomes it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def test_a_good_file_has_entries_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    raw(path, {"__metadata__": {"format": "pt"}, "b": GOOD | {"data_offsets": [8, 16]}, "a": GOOD}, bytes(16))
    problems: list[str] = []
    start = path.stat().st_size - 16
    assert list(read_header(path, problems).items()) == [
        ("a", Entry("w.safetensors", torch.float32, (2,), start, start + 8)),
        ("b", Entry("w.safetensors", torch.float32, (2,), start + 8, start + 16)),
    ]
    assert problems == [] and load_file(path).keys() == {"a", "b"}


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    problems: list[str] = []
    (tmp_path / "empty").touch()
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    (tmp_path / "folder").mkdir()
    for name in ("empty", "pointer", "folder", "absent"):
        assert read_header(tmp_path / name, problems) == {}
    assert problems == [
        "empty is empty",
        "pointer is a git-lfs pointer, not the weights (run `git lfs pull`)",
        "folder cannot be read (Is a directory)",
        "absent cannot be read (No such file or directory)",
    ]


@pytest.mark.parametrize(
    ("file", "plain"),
    [("model-1.safetensors", True), ("..safetensors", True), ("w.bin", False), ("../w.safetensors", False)]
    + [(file, False) for file in ("/w.safetensors", "a/w.safetensors", "a\\w.safetensors", "C:w.safetensors", "")],
)
def test_names_that_an_index_may_use(file: str, plain: bool) -> None:
    assert is_plain_name(file) == plain


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({"a": GOOD}, b"1234567", None, r"is cut short: \d+ of \d+ bytes, which cuts off 1 of its 1 tensors"),
        ({"a": GOOD}, b"123456789", None, r"has 1 bytes after its last tensor"),
        ({"a": GOOD}, b"12345678", 10**6, r"has \d+ bytes and claims a header of 1000000: cut short, or not"),
        ({"a": GOOD}, b"12345678", 2**63, r"claims a header of 9223372036854775808"),
        ({"a": GOOD}, b"12345678", 0, r"claims a header of 0"),
        (b"<html>", b"", None, r"has 14 bytes and claims a header of 6"),
        (b"<html></html>", b"", None, r"has a corrupt header: Expecting value"),
        (b"\xff\xfe" * 8, b"", None, r"has a corrupt header: 'utf-8' codec"),
        (b"[" * 100_000, b"", None, r"has a corrupt header: "),
        (b"[1, 2, 3, 4]", b"", None, r"has a corrupt header: it is not a JSON object"),
        (b'{"a": {}, "a": {}}', b"", None, r"has a corrupt header: it names a more than once"),
        ({"a": 3, "b": GOOD | {"shape": [-2]}}, b"", None, r"a lacks a valid shape or data_offsets; b lacks a valid"),
        ({"a": GOOD | {"shape": [True, 2]}}, b"", None, r"a lacks a valid shape"),
        ({"a": GOOD | {"data_offsets": [0, 8, 16]}}, b"", None, r"a has 3 data_offsets instead of 2"),
        ({"a": GOOD | {"dtype": "F4"}}, b"", None, r"a has dtype 'F4'; known are BOOL, U8, "),
        ({"a": GOOD | {"dtype": ["F32"]}}, b"", None, r"a has dtype \['F32'\]"),
        ({"a": GOOD | {"shape": [3]}}, b"12345678", None, r"a is F32 \[3\], which takes 12 bytes, not the 8 of its"),
        ({"a": GOOD | {"data_offsets": [8, 0]}}, b"", None, r"a is F32 \[2\], which takes 8 bytes, not the -8 of its"),
        ({"a": GOOD, "b": GOOD | {"data_offsets": [4, 12]}}, b"x" * 12, None, r"corrupt header: a and b overlap"),
        ({"a": GOOD, "b": GOOD | {"data_offsets": [12, 20]}}, b"x" * 20, None, r"a and b leave a gap between them"),
        ({"a": GOOD | {"data_offsets": [4, 12]}}, b"x" * 12, None, r"the header and a leave a gap between them"),
    ],
)
def test_a_corrupt_file_is_named_with_its_fault(
    tmp_path: Path, header: Any, data: bytes, length: int | None, message: str
) -> None:
    raw(tmp_path / "model.safetensors", header, data, length)
    problems: list[str] = []
    read_header(tmp_path / "model.safetensors", problems)
    assert len(problems) == 1 and re.match(r"model\.safetensors .*" + message, problems[0])
    with pytest.raises(Exception):  # noqa: B017 - the library agrees that the file is no good
        load_file(tmp_path / "model.safetensors")


def test_long_lists_of_names_stay_readable() -> None:
    names = [f"model.layers.{n}.{part}.weight" for n in (0, 1, 2, 3, 7) for part in ("q", "k")] + ["lm_head.weight"]
    assert abbreviate(names) == "model.layers.{0-3,7}.q.weight, model.layers.{0-3,7}.k.weight, lm_head.weight"
    assert abbreviate(["model.layers.4.mlp.experts.2.w"]) == "model.layers.4.mlp.experts.2.w"
    assert abbreviate([f"name{n}" for n in range(300)], 2) == "name0, name1 and 298 more"
    assert abbreviate([]) == ""
