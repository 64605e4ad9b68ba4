"""Files and layouts: every row is read as it was written, and what cannot be read is named by file and line."""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import toy
from pyarrow import csv as arrow_csv

from lorarun.checks import summary
from lorarun.documents import prepare
from lorarun.rows import Row, iter_rows, read_rows, standard
from lorarun.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROWS = [{"prompt": 'what, "é"\nwho\u2028', "completion": " fox"}, {"prompt": "", "completion": "\ttab, 'q'"}]


def load(folder: Path, template: str = TEMPLATE, **how: Any) -> Tokenizer:
    tokenizer = Tokenizer.load(toy.make(folder / "toy", template, **how))
    assert tokenizer is not None
    return tokenizer


def chat(*contents: str, **first: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": [{**messages[0], **first}, *messages[1:]]}


def origins(rows: list[Any]) -> list[str]:
    return [row.origin.split("/")[-1] for row in rows]


# --- files -----------------------------------------------------------------------------------------------------------


def written(path: Path) -> Path:
    """ROWS in the format that the name asks for, by the standard library or pyarrow."""
    kind = path.name.split(".")[1]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        return path
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8", newline="") as file:
        if kind in ("csv", "tsv"):
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)
        elif kind == "json":
            json.dump(ROWS, file, indent=1)
        else:
            file.write("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS))
    return path


@pytest.mark.parametrize(("name", "wanted"), [
    ("a.jsonl", ["a.jsonl, line 1", "a.jsonl, line 2"]),
    ("a.ndjson.gz", ["a.ndjson.gz, line 1", "a.ndjson.gz, line 2"]),
    ("a.json", ["a.json, item 1", "a.json, item 2"]),
    ("a.JSON.gz", ["a.JSON.gz, line 1", "a.JSON.gz, line 2"]),  # a .json file of one object a line
    ("a.csv", ["a.csv, line 2", "a.csv, line 4"]),
    ("a.tsv.gz", ["a.tsv.gz, line 2", "a.tsv.gz, line 4"]),
    ("a.parquet", ["a.parquet, row 1", "a.parquet, row 2"]),
])  # fmt: skip
def test_each_kind_of_file(tmp_path: Path, name: str, wanted: list[str]) -> None:
    rows = read_rows(written(tmp_path / name))
    assert rows == ROWS and origins(rows) == wanted


def test_texts_folders_and_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "c.txt").write_bytes("\ufeffsecond\r\né".encode())
    (folder / "b" / "a.txt").write_text("first")
    (folder / ".hidden" / "no.txt").write_text("never")
    assert read_rows(folder) == [{"text": "first"}, {"text": "second\r\né"}]
    assert capsys.readouterr().err == ""
    (folder / "picture.png").write_bytes(b"\x89")
    assert origins(read_rows(written(tmp_path / "a.jsonl"), folder))[1:] == ["a.jsonl, line 2", "a.txt", "c.txt"]
    assert capsys.readouterr().err == f"lorarun: not all files in {folder} are read: picture.png is not, for one\n"
    written(folder / "rows.jsonl")
    with pytest.raises(ValueError, match=r"files of several kinds \(JSONL, text\): name those"):
        read_rows(folder)
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"the folder .* must hold files ending in one of \.jsonl.*, got none"):
        read_rows(empty)


def test_a_wide_cell_leaves_the_csv_module_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text("text\n" + "fox " * 100_000 + "\n")
    limit = csv.field_size_limit()
    assert read_rows(path) == [{"text": "fox " * 100_000}] and csv.field_size_limit() == limit
    assert arrow_csv.read_csv(path).to_pylist() == read_rows(path)


def test_rows_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fox"}\n' * 3 + "broken\n")
    rows = iter_rows(path)
    assert [next(rows) for _ in range(3)] == [{"text": "fox"}] * 3
    with pytest.raises(ValueError, match="line 4 is not valid JSON"):
        next(rows)


CUT_SHORT = gzip.compress(b"fox\n" * 9, mtime=0)[:-9]  # a time in it would be another in each process


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.json", b'[{"text": "fox"}, 3]', r"a\.json, item 2 must be a JSON object such as .*, got a int"),
    ("a.json", b'[{"text": "fox"},\n {"text" "fox"}]', r"a\.json is not valid JSON: .* line 2 column 10"),
    ("a.jsonl", b'[\n{"text": "fox"}]', r"a\.jsonl, line 1 is not valid JSON: .* give the file a \.json ending"),
    ("a.jsonl", b'{"text": "fox"}\n{"text" "fox"}', r"a\.jsonl, line 2 is not valid JSON: Expecting .* at column 9$"),
    ("a.jsonl", b'{\n "text": "fox"\n}', r"a\.jsonl, line 1 is not valid JSON: .*; a \.jsonl file has"),
    ("a.csv", b"text,id\nfox,1\nfox\n", r"a\.csv, line 3 has fewer cells than the header's 2"),
    ("a.csv", b"text,id\n\nfox,1\n\nfox\n", r"a\.csv, line 5 has fewer cells than the header's 2"),
    ("a.csv", b"text,id\nfox,1\nfox,2,3\n", r"a\.csv, line 3 has more cells than the header's 2"),
    ("a.csv", b'text,id\nfox,1\n"fox,2\n', r"a\.csv, line 3 is not valid CSV: unexpected end of data"),
    ("a.csv", b"text,id\nfox,1\n\xff,2\n", r"a\.csv, line 3 is not UTF-8: .*save the file as UTF-8"),
    ("a.txt", b"fox\n\xe9\n", r"a\.txt, line 2 is not UTF-8"),
    ("a.parquet", b"PAR1 not really", r"a\.parquet cannot be read as Parquet, behind row 0"),
    ("a.txt.gz", b"fox", r"a\.txt\.gz cannot be decompressed, behind line 0: Not a gzipped file"),
    ("a.txt.gz", CUT_SHORT, r"a\.txt\.gz cannot be decompressed, behind line \d+: .*; fetch it"),
    ("a.xlsx", b"", r"a\.xlsx: how to read it is told by the ending, and known are \.jsonl, "),
    ("a.parquet.gz", b"", r"a\.parquet\.gz: how to read it .* all but \.parquet also \.gz"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing"])
def test_what_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"there is no file or folder .*{name} \(seen from "):
        read_rows(tmp_path / name)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="reading Parquet needs pyarrow, which is not installed: pip install pyarrow"):
        read_rows(path)


# --- layouts ---------------------------------------------------------------------------------------------------------

TURNS = [("system", "the"), ("user", "what"), ("assistant", "fox")]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]
NAMES = ("system", "human", "gpt")
SHAREGPT = [{"from": name, "value": content} for name, (_, content) in zip(NAMES, TURNS, strict=True)]


@pytest.mark.parametrize("row", [
    {"messages": MESSAGES, "id": 3},
    {"messages": json.dumps(MESSAGES), "tools": ""},
    {"conversations": SHAREGPT, "messages": None},
    {"conversations": SHAREGPT[1:], "system": "the"},
    {"conversations": MESSAGES},
    {"messages": SHAREGPT},
    {"instruction": "what", "output": "fox", "input": "", "system": "the"},
])  # fmt: skip
def test_layouts_give_the_same_messages(row: dict[str, Any]) -> None:
    assert standard(row) == {"messages": MESSAGES, "tools": None}


def test_an_input_stands_under_its_instruction() -> None:
    row = standard({"instruction": "Translate.", "input": "der Fuchs", "output": "the fox"})
    assert row["messages"][0]["content"] == "Translate.\n\nder Fuchs"


def test_tool_calls_and_tools_as_openai_writes_them(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages = [
        {"role": "user", "content": "what"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "fox", "tool_call_id": "1"},
        {"role": "assistant", "content": "the fox", "tool_calls": None},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = "{{ tools | tojson }}" + TEMPLATE.replace(
        "m.content", "(m.tool_calls[0].function.arguments | tojson if m.tool_calls else m.content)"
    )
    tokenizer = load(tmp_path, template)
    for given in (tools, json.dumps(tools)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            document = prepare([{"messages": messages, "tools": given}], tokenizer).documents[0]
        assert tokenizer.decode(document.ids).startswith(json.dumps(tools))
        text = tokenizer.decode(document.labels[document.labels != -100], skip_special=False)
        assert text == '{"x": [1]}</s>the fox</s>'
    assert call["function"]["arguments"] == '{"x": [1]}'  # the user's row is as it was


@pytest.mark.parametrize(("row", "message"), [
    ({"text": "a", "instruction": "a", "output": "b"}, r"keys \['instruction', 'output', 'text'\], a row is only one"),
    ({"messages": MESSAGES, "conversations": SHAREGPT}, r"the keys \['conversations', 'messages'\], a row is only one"),
    ({"instruction": "a", "input": "b"}, r"got the keys \['input', 'instruction'\], a row is"),
    ({"instruction": "a", "output": ["b"]}, "'output' must be text, got a list"),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history' is not read: write the conversation"),
    ({"messages": "[{"}, "'messages' is not valid JSON"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]},
     "arguments of the tool call 'f' is not valid JSON"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "role 'narrator' is unknown"),
    ({"conversations": [{"from": "human", "value": None}]}, "message 1 must have a text 'role' and a 'content'"),
    ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "message 1 must have weight 1 .* got 0.5"),
])  # fmt: skip
def test_what_is_no_layout_is_refused_by_its_keys(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"row 1: .*{message}"):
        prepare([row], load(tmp_path))


GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template", [TEMPLATE, GENERATION, TEMPLATE.replace("m.content", "m.content + (m.weight | string)")]
)
def test_an_answer_of_weight_0_is_not_learned(tmp_path: Path, template: str) -> None:
    tokenizer = load(tmp_path, template)
    row = chat("what", "fox", "who", "quick", "what", "brown")
    plain = prepare([row], tokenizer).documents[0]
    row["messages"][1]["weight"], row["messages"][3]["weight"] = 1, 0
    document = prepare([row], tokenizer).documents[0]
    assert document.ids.tolist() == plain.ids.tolist()
    assert tokenizer.decode(document.labels[document.labels != -100], skip_special=False) == "fox</s>brown</s>"


# --- bad data in a file ----------------------------------------------------------------------------------------------

LONG = "fox " * 30_000


@pytest.mark.parametrize(("bad", "message"), [
    (b'{"messages": [', "line 57 is not valid JSON"),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', "line 57 is not UTF-8"),
    (b'{"question": "what"}', r"row 57 \(.*rows.jsonl, line 57\): got the keys \['question'\]"),
    (b'{"messages": [{"role": "robot", "content": "fox"}]}', r"row 57 \(.*, line 57\): role 'robot' is unknown"),
    (b'{"text": "half a pair \\ud83d"}', r"row 57 \(.*, line 57\): only text can be encoded"),
])  # fmt: skip
def test_a_broken_row_of_a_hundred_stops_the_run(tmp_path: Path, bad: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(chat("what", "fox")).encode()] * 100
    lines[56] = bad
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=message):
        prepare(read_rows(path), load(tmp_path))


@pytest.mark.parametrize(("bad", "message"), [
    (chat("what", ""), r"1 without an answer or text to learn \(row 57 \(.*rows.jsonl, line 57\)\)"),
    (chat("what"), r"1 without an answer or text to learn \(row 57 \(.*rows.jsonl, line 57\)\)"),
    (chat("what", LONG), r"1 longer than max_tokens=8192 \(row 57 \(.*rows.jsonl, line 57\)\)"),
    (chat("what </s><|im_start|>assistant\nfox", "fox"), r"1 with control tokens typed .*\(row 57 \(.*, line 57\)\)"),
])  # fmt: skip
def test_a_row_that_cannot_be_used_is_left_out_and_named(
    tmp_path: Path, bad: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [*[chat("what", "fox")] * 56, bad, *[chat("a", "b")] * 43]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare(read_rows(path), load(tmp_path))
    said = capsys.readouterr().err
    assert len(prepared.documents) == 99 and "lorarun: 1 of 100 rows left out: " in said
    assert re.search(message, said), said
    assert list(prepared.origins) == [57] and summary(prepared).startswith("99 rows: ")


@pytest.mark.parametrize("roles", [
    ["assistant", "user", "assistant"],
    ["user", "user", "assistant"],
    ["user", "assistant", "assistant"],
    ["user", "system", "assistant"],
    ["user", "tool", "assistant"],
])  # fmt: skip
def test_roles_out_of_order_are_told(tmp_path: Path, roles: list[str]) -> None:
    strange = Row({"messages": [{"role": role, "content": "fox"} for role in roles]})
    strange.origin = "rows.jsonl, line 57"
    with pytest.warns(UserWarning, match=r"roles are out of order in row 2 \(rows.jsonl, line 57\): a late system"):
        prepare([chat("what", "fox"), strange], load(tmp_path))


def test_an_empty_answer_among_others_is_told_and_not_learned(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    with pytest.warns(UserWarning, match="answers are empty in row 1: they are not learned"):
        document = prepare([chat("what", " ", "who", "fox")], tokenizer).documents[0]
    assert tokenizer.decode(document.labels[document.labels != -100], skip_special=False) == "fox</s>"


def test_a_text_of_30_000_tokens_is_cut_and_learned_whole(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    documents = prepare([{"text": LONG}], tokenizer).documents
    ids = [*tokenizer.encode(LONG), tokenizer.eos_id]
    assert len(ids) > 30_000 and [i for d in documents for i in d.labels[1:].tolist()] == ids[1:]


@pytest.mark.parametrize("seed", range(3))
def test_no_answer_loses_its_end(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tokenizer = load(tmp_path)
    rows = [chat("what", "fox " * draw.randint(1, 60)) for _ in range(50)]
    prepared = prepare(rows, tokenizer, max_tokens=50)
    assert 0 < len(prepared.too_long) < 50 == len(prepared.too_long) + len(prepared.documents)
    assert all(document.labels[document.labels != -100][-1] == tokenizer.eos_id for document in prepared.documents)
