"""What a safetensors file says about itself, read and checked without reading a tensor; and one tensor's bytes.

A safetensors file is the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape,
data_offsets counted from the header's end) and the tensors' bytes without gaps. The safetensors library checks this
too, but it opens one file, stops at the first fault and names neither the file nor the tensor. Here every fault of a
file becomes a line of text, so that the caller can report those of all files at once; the library has the last word.
The JSON files beside the weights are read here too. Whoever wrote a file may have meant harm: lengths are compared with
the file's before they are followed, what is no regular file is not opened (a pipe would wait for ever), and JSON is
bounded in size and depth. Source of the format: the README of the safetensors project. Given up: dtypes of less than a
byte, which torch has no tensors for, and headers between 4 MiB and the format's limit of 100 MB, which no model has.
"""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# The dtypes of the safetensors format that torch can hold in whole bytes.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
MAX_JSON = 1 << 22  # bytes of a header, index or configuration: several times any real one; it takes 20 times as many
MAX_DEPTH = 64  # of lists and objects in each other; deeper ones exhaust the stack of whoever prints or compares them
CHUNK = 1 << 24  # bytes compared at once
LFS_POINTER = b"version https://git-lfs"


class Entry(NamedTuple):
    """Where one tensor lies: bytes ``start`` to ``end`` (exclusive) of ``file``, both counted from the file's
    beginning."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_header(path: Path, problems: list[str]) -> dict[str, Entry]:
    """The entries of one safetensors file in the order of their offsets. What is wrong with it is appended to
    ``problems``, each a phrase that begins with the file's name; then the entries may be incomplete."""
    try:
        size = path.stat().st_size
        if path.is_fifo():  # opening one would wait for a writer
            raise OSError(errno.EINVAL, "it is no regular file")
        with open(path, "rb") as stream:
            first = stream.read(max(8, len(LFS_POINTER)))
            length = int.from_bytes(first[:8], "little")
            stream.seek(8)
            text = stream.read(length) if 8 < length <= min(size - 8, MAX_JSON) else b""
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})")
        return {}
    if size == 0:
        problems.append(f"{path.name} is empty")
    elif first.startswith(LFS_POINTER):
        problems.append(f"{path.name} is a git-lfs pointer, not the weights (run `git lfs pull`)")
    elif MAX_JSON < length <= size - 8:
        problems.append(f"{path.name} claims a header of {length} bytes; that of a model has no more than {MAX_JSON}")
    elif not text:
        problems.append(f"{path.name} has {size} bytes and claims a header of {length}: cut short, or not safetensors")
    if not text or first.startswith(LFS_POINTER):
        return {}
    try:
        header = _shallow(json.loads(text.decode("utf-8"), object_pairs_hook=_unique))
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} has a corrupt header: {error}")
        return {}
    entries: list[tuple[str, Entry]] = []
    faults: list[str] = [] if isinstance(header, dict) else ["it is not a JSON object"]
    for name, spec in header.items() if not faults else ():
        try:
            if name != "__metadata__":
                entries.append((name, _entry(path.name, name, spec, 8 + length)))
        except ValueError as error:
            faults.append(str(error))
    if faults:
        problems.append(f"{path.name} has a corrupt header: {'; '.join(faults[:8])}")
        return dict(entries)
    entries.sort(key=lambda item: (item[1].start, item[1].end))
    problem = _layout_problem(entries, 8 + length, size) or _library_problem(path)
    if problem:
        problems.append(f"{path.name} {problem}")
    return dict(entries)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"it names {abbreviate(twice)} more than once")
    return dict(pairs)


def _entry(file: str, name: str, spec: Any, base: int) -> Entry:
    spec = spec if isinstance(spec, dict) else {}
    shape, offsets = spec.get("shape"), spec.get("data_offsets")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{name} lacks a valid shape or data_offsets")
    if len(offsets) != 2:
        raise ValueError(f"{name} has {len(offsets)} data_offsets instead of 2")
    if not isinstance(spec.get("dtype"), str) or spec["dtype"] not in DTYPES:
        raise ValueError(f"{name} has dtype {spec.get('dtype')!r}; known are {', '.join(DTYPES)}")
    dtype = DTYPES[spec["dtype"]]
    size = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != size:
        raise ValueError(
            f"{name} is {spec['dtype']} {shape}, which takes {size} bytes, not the {offsets[1] - offsets[0]} of its "
            "data_offsets"
        )
    return Entry(file, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _layout_problem(entries: list[tuple[str, Entry]], base: int, size: int) -> str | None:
    """What is wrong with where the tensors of one file lie, as the end of a sentence that begins with its name."""
    end, previous = base, "the header"
    for name, entry in entries:
        if entry.start != end:
            how = "overlap" if entry.start < end else "leave a gap between them"
            return f"has a corrupt header: {previous} and {name} {how}"
        end, previous = entry.end, name
    if size < end:
        cut = sum(entry.end > size for _, entry in entries)
        return f"is cut short: {size} of {end} bytes, which cuts off {cut} of its {len(entries)} tensors"
    return f"has {size - end} bytes after its last tensor" if size > end else None


def _library_problem(path: Path) -> str | None:
    """What the library, which reads the tensors, has against a file that seems good: metadata that is no text, say."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            return None
    except (safetensors.SafetensorError, OSError) as error:
        return f"has a corrupt header: {error}"


def is_there(path: Path) -> bool:
    """Whether there is a file of this name.  Raises ValueError for what is there and is not the file: a folder, a pipe,
    a dangling link, a git-lfs pointer."""
    if path.is_file():
        with open(path, "rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` there.")
        return True
    if path.exists():
        raise ValueError(f"{path} is a {'folder' if path.is_dir() else 'pipe or device'}, expected a file.")
    if path.is_symlink():
        raise ValueError(f"{path} is a dangling link to {os.readlink(path)}: fetch the file again.")
    return False


def read_text(path: Path) -> str:
    """A small text file as it stands, line ends too.  Raises FileNotFoundError where there is none, ValueError for
    what :func:`is_there` refuses, for more than ``MAX_JSON`` bytes and for what is not UTF-8."""
    if not is_there(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with open(path, "rb") as stream:
        data = stream.read(MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise ValueError(f"{path} has more than the {MAX_JSON:,} bytes that a file of its kind can have.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8, or fetch it again.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, with or without a byte-order mark; a name may be there twice if its values are equal.

    Raises FileNotFoundError where there is no file, ValueError for anything else.
    """
    text = read_text(path).removeprefix("\ufeff")
    collects = gc.isenabled()
    gc.disable()  # of many small lists each thousand would have it look through everything that is loaded
    try:
        value = _shallow(json.loads(text, object_pairs_hook=_consistent))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch it again.") from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(value).__name__}.")
    return value


def _shallow(value: Any) -> Any:
    """The value itself.  Raises ValueError where lists and objects are nested beyond ``MAX_DEPTH``."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inner for item in items]
        if not level:
            return value
    raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")


def _consistent(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, of which none may contradict another."""
    found = dict(pairs)
    if len(found) < len(pairs) and (twice := [name for name, value in pairs if value != found[name]]):
        raise ValueError(f"it has two values for {abbreviate(twice)}")
    return found


def is_plain_name(file: str) -> bool:
    """Whether an index may name this file: a safetensors file in the same folder, on any operating system."""
    return file.endswith(".safetensors") and not re.search(r"[/\\:\0]", file)


def abbreviate(names: Collection[str], limit: int = 8) -> str:
    """Names for an error message: those that differ in their first number (the layer) in one piece, as in
    ``model.layers.{0-3,7}.self_attn.q_proj.weight``, and no more than ``limit`` pieces."""
    groups: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?\.)(\d+)((?:\..*)?)", name)
        key = (match[1], match[3]) if match else (name, "")
        groups.setdefault(key, set()).update([int(match[2])] if match else [])
    pieces = []
    for (before, after), numbers in groups.items():
        spans: list[list[int]] = []
        for number in sorted(numbers):
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
        pieces.append(before + (f"{{{text}}}" if len(numbers) > 1 else text) + after)
    more = f" and {len(pieces) - limit} more" if len(pieces) > limit else ""
    return ", ".join(pieces[:limit]) + more


# --- one tensor ----------------------------------------------------------------------------------------------------


def read_mapped(path: Path, name: str) -> torch.Tensor:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except safetensors.SafetensorError as error:
        raise OSError(f"{path} changed while {name} was read from it ({error}): load again.") from None


def read_plain(path: Path, name: str, entry: Entry) -> torch.Tensor:
    buffer = bytearray(entry.nbytes)
    with open(path, "rb", buffering=0) as stream:
        stream.seek(entry.start)
        _read_into(stream, buffer, path, name)
    if not buffer:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(buffer, dtype=entry.dtype).reshape(entry.shape)  # shares the buffer and keeps it alive


def _read_into(stream: Any, buffer: bytearray, path: Path, name: str) -> None:
    """Fill ``buffer``; one system call reads at most 2 GiB, and may read less than asked."""
    view, done = memoryview(buffer), 0
    while done < len(buffer):
        count = stream.readinto(view[done:])
        if not count:
            raise OSError(f"{path} ended after {done} of the {len(buffer)} bytes of {name}: it changed; load again.")
        done += count


def same_bytes(folder: Path, one: Entry, other: Entry) -> bool:
    """Whether two tensors are bit-equal, without holding either."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open(folder / one.file, "rb", buffering=0) as left, open(folder / other.file, "rb", buffering=0) as right:
        left.seek(one.start)
        right.seek(other.start)
        for done in range(0, one.nbytes, CHUNK):
            size = min(CHUNK, one.nbytes - done)
            a, b = bytearray(size), bytearray(size)
            _read_into(left, a, folder / one.file, "a tensor")
            _read_into(right, b, folder / other.file, "a tensor")
            if a != b:
                return False
    return True
