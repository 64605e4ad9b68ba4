"""Files become rows, and the layouts that rows come in become one of three.

``read_rows`` reads JSONL, JSON, CSV, Parquet, plain texts and folders of them. A row is a dict that also knows its
``origin``, the file and line (or item) that it was read from, so that whatever is wrong with it later can be found. The
usual way, a general loader with a cache of converted files, is a dependency larger than this package.

``standard`` turns the layouts that data sets on the hub have into the three that ``documents.py`` encodes: messages, a
prompt with its completion, a text. What is recognised is decided by the names of the columns; a row that fits two
layouts is refused with the names found, since a guess would train on the wrong column without a word.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FORMS = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"), ("text",))
ACCEPTED = (
    "{'messages': [{'role', 'content'}, ...]}, {'prompt': text, 'completion': text} or {'text': text}, "
    "or ShareGPT's {'conversations': [{'from', 'value'}, ...]} or Alpaca's {'instruction', 'input', 'output'}"
)
SHAREGPT = {"human": "user", "gpt": "assistant"}  # the other roles have their usual names
LINES, ARRAY, TABLE, PARQUET, TEXT = "JSONL", "JSON", "CSV", "Parquet", "text"
KINDS = {
    **{".jsonl": LINES, ".ndjson": LINES, ".json": ARRAY, ".csv": TABLE, ".tsv": TABLE, ".parquet": PARQUET},
    **{".txt": TEXT, ".md": TEXT},
}
LONGEST = 2**31 - 1  # characters of a CSV cell; the csv module's own limit is 131,072


class Row(dict[str, Any]):
    """A row that was read from a file. origin: where, such as "rows.jsonl, line 57"."""

    origin: str


# --- files -----------------------------------------------------------------------------------------------------------


def read_rows(*paths: str | Path) -> list[dict[str, Any]]:
    """The rows of the files and folders at ``paths``, in that order; ``iter_rows`` gives them one by one.

    The name's ending decides: .jsonl or .ndjson (an object a line, blank lines left out), .json (an array of objects,
    or JSONL), .csv and .tsv (with a header), .parquet (needs pyarrow), .txt and .md (one ``{"text"}`` each); all but
    Parquet also with .gz behind. A folder's files, those of its folders too, are read in the order of their names and
    must be of one kind.

    Raises FileNotFoundError for a path that is not there, ValueError with the file and line of what cannot be read.
    """
    return list(iter_rows(*paths))


def iter_rows(*paths: str | Path) -> Iterator[Row]:
    """As ``read_rows``, holding no more than a row at a time (of .json the whole file, of Parquet 256 rows)."""
    if not paths:
        raise ValueError("there is no file to read rows from: expected one or more paths")
    for path in (found for given in paths for found in _files(Path(given))):
        yield from READERS[_kind(path)](path)


def _ending(path: Path) -> str:
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def _kind(path: Path) -> str:
    kind = KINDS.get(_ending(path))
    if kind is None or (kind == PARQUET and path.suffix.lower() == ".gz"):
        raise ValueError(
            f"{path}: how to read it is told by the ending, and known are {', '.join(KINDS)}; all but .parquet also .gz"
        )
    return kind


def _files(path: Path) -> list[Path]:
    """``path`` itself, or the readable files in that folder, hidden ones left out."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path} (seen from {Path.cwd()})")
    if not path.is_dir():
        return [path]
    inside = [file for file in path.rglob("*") if file.is_file()]
    seen = sorted(file for file in inside if not any(part[0] == "." for part in file.relative_to(path).parts))
    files = [file for file in seen if _ending(file) in KINDS]
    kinds = sorted({_kind(file) for file in files})
    if len(kinds) != 1:
        got = f"files of several kinds ({', '.join(kinds)}): name those to be read" if kinds else "none"
        raise ValueError(f"the folder {path} must hold files ending in one of {', '.join(KINDS)}, got {got}")
    if len(files) < len(seen):
        other = next(file for file in seen if file not in files)
        print(f"lorarun: not all files in {path} are read: {other.name} is not, for one", file=sys.stderr)
    return files


def _row(content: Any, origin: str) -> Row:
    if not isinstance(content, dict):
        raise ValueError(
            f"{origin} must be a JSON object such as {{'messages': [...]}}, got a {type(content).__name__}"
        )
    row = Row(content)
    row.origin = origin
    return row


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Every line's origin and text. Lines end in \\n and nothing else, for JSON may hold Unicode's other line ends."""
    number = 0
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield f"{path}, line {number}", line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number} is not UTF-8: {error}; save the file as UTF-8") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be decompressed, behind line {number}: {error}; fetch it again") from error


def _parsed(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "; this looks like one JSON array: give the file a .json ending" if text.lstrip()[:1] == "[" else ""
        if text.strip() == "{":
            hint = "; a .jsonl file has a whole object on each line, and a .json file an array of them"
        said = str(error)
        if isinstance(error, json.JSONDecodeError) and ", line " in origin:  # its own line number is of this text
            said = f"{error.msg} at column {error.colno}"
        raise ValueError(f"{origin} is not valid JSON: {said}{hint}") from error


def _read_lines(path: Path) -> Iterator[Row]:
    return (_row(_parsed(text, origin), origin) for origin, text in _lines(path) if text.strip())


def _read_array(path: Path) -> Iterator[Row]:
    first = next((text for _, text in _lines(path) if text.strip()), "")
    if first.lstrip()[:1] != "[":
        yield from _read_lines(path)
        return
    for number, item in enumerate(_parsed("".join(text for _, text in _lines(path)), str(path)), 1):
        yield _row(item, f"{path}, item {number}")


def _read_table(path: Path) -> Iterator[Row]:
    lines = (text for _, text in _lines(path))
    reader = csv.DictReader(lines, strict=True, delimiter="\t" if _ending(path) == ".tsv" else ",")
    while True:
        start = reader.line_num + 1
        limit = csv.field_size_limit(LONGEST)  # of the whole process, so only while a row is read
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{path}, line {start} is not valid CSV: {error}") from error
        finally:
            csv.field_size_limit(limit)
        if cells is None:
            return
        inside = sum(cell.count("\n") for cell in cells.values() if isinstance(cell, str))
        origin = f"{path}, line {reader.line_num - inside}"
        if None in cells or None in cells.values():  # where DictReader puts cells too many, and those that lack
            more = "more" if None in cells else "fewer"
            raise ValueError(f"{origin} has {more} cells than the header's {len(reader.fieldnames or [])}")
        yield _row(cells, origin)


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ValueError(
            f"{path}: reading Parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for some in file.iter_batches(batch_size=256):
                for content in some.to_pylist():
                    number += 1
                    yield _row(content, f"{path}, row {number}")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as Parquet, behind row {number}: {error}") from error


def _read_text(path: Path) -> Iterator[Row]:
    yield _row({"text": "".join(text for _, text in _lines(path))}, str(path))


READERS = {LINES: _read_lines, ARRAY: _read_array, TABLE: _read_table, PARQUET: _read_parquet, TEXT: _read_text}


# --- layouts ---------------------------------------------------------------------------------------------------------


def standard(row: Any) -> dict[str, Any]:
    """``row`` as {"messages"} (with "tools"), {"prompt", "completion"} or {"text"}; nothing else is in it.

    Raises ValueError, saying what was got, for a row of no known layout, or of more than one.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"got a {type(row).__name__}, a row is {ACCEPTED}")
    found = [form for form in FORMS if all(row.get(key) is not None for key in form)]
    if len(found) != 1:
        keys = sorted(str(key) for key, value in row.items() if value is not None)
        raise ValueError(f"got the keys {keys}, a row is {'only one of ' if found else ''}{ACCEPTED}")
    form = found[0]
    if form in (("messages",), ("conversations",)):
        system = [] if form == ("messages",) else _system(row)
        messages = _json(row, form[0])
        if isinstance(messages, (list, tuple)):
            messages = [*system, *map(_message, messages)]
        return {"messages": messages, "tools": _json(row, "tools")}
    asked = [key for key in ("input",) if form == ("instruction", "output") and row.get(key)]
    for key in (*form, *asked):
        if not isinstance(row[key], str):
            raise ValueError(f"{key!r} must be text, got a {type(row[key]).__name__}; a row is {ACCEPTED}")
    if form != ("instruction", "output"):
        return {key: row[key] for key in form}
    if row.get("history"):
        raise ValueError("Alpaca's 'history' is not read: write the conversation as {'messages': [...]}")
    question = "\n\n".join(row[key] for key in ("instruction", *asked))
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return {"messages": [*_system(row), *turns], "tools": None}


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The "system" column of ShareGPT and Alpaca rows as a message, if there is one."""
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _json(row: Mapping[str, Any], key: str) -> Any:
    """``row[key]``, parsed where it is JSON in a text, as in tables; None if there is none."""
    value = row.get(key)
    return _parsed(value, repr(key)) if isinstance(value, str) and value else value or None


def _message(message: Any) -> Any:
    """``message`` as {"role", "content"}: ShareGPT's names replaced, and OpenAI's tool calls, whose arguments are JSON
    in a text, parsed, for templates write them as JSON once more. What it cannot read is left for others to refuse."""
    if not isinstance(message, Mapping):
        return message
    if isinstance(message.get("from"), str) and "value" in message and "role" not in message:
        rest = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": SHAREGPT.get(message["from"], message["from"]), "content": message["value"], **rest}
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call) for call in calls]} if isinstance(calls, (list, tuple)) else message


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _parsed(function["arguments"] or "{}", f"arguments of the tool call {function.get('name')!r}")
    return {**call, "function": {**function, "arguments": arguments}}
