"""A GGUF file as a checkpoint: its metadata as a ``config.json``, its tensors dequantised under Hugging Face's names.

GGUF is what llama.cpp reads: one file with the settings, the vocabulary and the weights, quantised or not.  Its Llama
has the rows of q and k in another order, its Gemma has norm weights with the 1 added, and what llama.cpp hard-codes the
file does not say.  All of this is undone here, so that nothing else has to know: to the loader this is a checkpoint of
fp32 tensors, and its own dtype and bits apply as to any other.

The gguf library dequantises.  Its reader is not used: it takes a quarter of a minute for a vocabulary of 262,144
tokens, trusts every length it reads, and so hangs or fills the memory on a damaged file.  The header is parsed here
instead, every length checked against the file's before it is followed.  Source of the format: docs/gguf.md of the ggml
project.  Given up: files in several parts, big-endian files, and version 1, which nothing has written since 2023.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lorarun.checkpoint import Checkpoint
from lorarun.headers import LFS_POINTER, Entry, abbreviate

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
ROPE_FREQS = "rope_freqs.weight"  # what each rotary frequency is divided by
# Value types, by numpy's names.
NUMBERS = dict(enumerate("u1 i1 u2 i2 u4 i4 f4 ?".split())) | {10: "u8", 11: "i8", 12: "f8"}
STRING, ARRAY = 8, 9  # the other two
HEADER = 1 << 25  # bytes of metadata that are read; the largest vocabularies take a quarter, and in Python ten times it
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}  # types of numbers as they are
PATTERNS = {"gemma2": 2, "gemma3": 6}  # every n-th layer sees all, as llama.cpp has it
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",  # the third norm of four in Gemma 2 and 3
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def library() -> Any:
    """The gguf package, which is optional."""
    try:
        import gguf  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(f"GGUF files need the gguf package ({error}): pip install 'lorarun[gguf]'.") from None
    return gguf


def names_of(arch: str) -> dict[str, str]:
    """GGUF's names of an architecture's modules -> Hugging Face's, both without the layer."""
    return NAMES | ({"ffn_norm": "pre_feedforward_layernorm"} if arch in PATTERNS else {})


def hf_name(name: str, arch: str) -> str:
    """Translate a tensor's name, such as blk.0.attn_q.weight; an unknown one stays what it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names_of(arch):
        return name
    return (f"model.layers.{match[1]}." if match[1] else "") + f"{names_of(arch)[match[2]]}.{match[3]}"


# --- the header ----------------------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """One tensor: its type (a number of ``GGMLQuantizationType``), shape (outermost first) and place in the file."""

    kind: int
    shape: tuple[int, ...]
    start: int
    nbytes: int


class _Cursor:
    """Reads a header from its beginning; every step is checked against what is left of the file."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at, self.what = data[:HEADER], 0, "the header"
        self.end = "it ends" if len(data) <= HEADER else f"the first {HEADER >> 20} MiB, which hold any model's, end"

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError(f"{self.end} inside {self.what}")
        self.at += count
        return self.data[self.at - count : self.at].tobytes()

    def number(self, form: str) -> int:
        (value,) = struct.unpack("<" + form, self.take(struct.calcsize(form)))
        return int(value)

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{self.what} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            dtype = np.dtype(NUMBERS[kind]).newbyteorder("<")
            return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        if kind != ARRAY:
            raise ValueError(f"{self.what} has a value of type {kind}, which GGUF does not know")
        inner, count = self.number("I"), self.number("Q")
        if inner == STRING:
            self.left(count, 8)
            return [self.text() for _ in range(count)]
        if inner not in NUMBERS:
            raise ValueError(f"{self.what} is a list of values of type {inner}, which is not supported")
        dtype = np.dtype(NUMBERS[inner]).newbyteorder("<")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def left(self, count: int, size: int) -> None:
        """Refuse a count of things of at least ``size`` bytes that cannot be in what is left."""
        if count > (len(self.data) - self.at) // size:
            raise ValueError(f"{self.end} before {self.what}, of which there are to be {count}")


@dataclass(frozen=True)
class Gguf(Checkpoint):
    """A GGUF file, open: ``entries`` are its tensors under Hugging Face's names, in fp32 whatever they are stored in.

    fields: the metadata by key.  tensors: by GGUF's own names.
    """

    fields: dict[str, Any] = field(default_factory=dict, repr=False)
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def arch(self) -> str:
        return str(self.fields["general.architecture"])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in where the user does not say: fp32 where most weights have it, else bfloat16 (that is
        what f16 files were mostly converted from, and not every model bears float16)."""
        sizes: dict[int, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + math.prod(tensor.shape)
        return torch.bfloat16 if max(sizes, key=lambda kind: sizes[kind]) else torch.float32

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """The value of a key (``ARCH.`` stands for the architecture's name), of a type; an error without default."""
        key = key.replace("ARCH.", f"{self.arch}.")
        value = self.fields.get(key)
        if value is None and default is not ...:
            return default
        numeric = kind is float and type(value) is int
        if not (type(value) is kind or numeric):
            got = "lacks" if value is None else f"has {value!r:.40} as"
            raise ValueError(f"{self.folder} {got} {key}, which must be of type {kind.__name__}: convert it afresh.")
        return value

    def format(self, name: str) -> str:
        kind = library().GGMLQuantizationType(self.tensors[self.own[name]].kind).name
        return f"dense {PLAIN[kind]}" if kind in PLAIN else f"GGUF {kind}"

    @cached_property
    def own(self) -> dict[str, str]:
        """Hugging Face's names of the tensors -> GGUF's."""
        return {hf_name(name, self.arch): name for name in self.tensors}

    def read(self, names: Collection[str], mmap: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors in file order, dequantised to fp32, in memory of their own (``mmap`` has no meaning)."""
        for name in sorted(names, key=lambda name: self.entries[name].start):
            yield name, self._plain(name, dequantized(self.folder, self.tensors[self.own[name]]))

    def _plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as Hugging Face keeps it."""
        if self.arch.startswith("gemma") and name.endswith("norm.weight"):
            return tensor - 1  # llama.cpp multiplies by its weights, Gemma by 1 + weight
        if self.arch == "llama" and (match := re.search(r"self_attn\.([qk])_proj\.", name)):
            heads = self.get("ARCH.attention.head_count", int)
            return unpermute(tensor, heads if match[1] == "q" else self.get("ARCH.attention.head_count_kv", int, heads))
        return tensor


def unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of the rows of Llama's q and k.

    It rotates neighbouring rows of a head together, so its converter interleaves the head's two halves; Hugging Face's
    layout rotates row i with row i + dim / 2.
    """
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(tensor.shape)


def dequantized(path: Path, tensor: Tensor) -> torch.Tensor:
    """A tensor of the file, in fp32."""
    gguf = library()
    raw = np.fromfile(path, np.uint8, tensor.nbytes, offset=tensor.start)
    if len(raw) != tensor.nbytes:
        raise OSError(f"{path} became shorter while it was read: load again.")
    array = gguf.dequantize(raw.reshape(*tensor.shape[:-1], -1), gguf.GGMLQuantizationType(tensor.kind))
    return torch.from_numpy(np.require(array, np.float32, ["C", "W"]).reshape(tensor.shape))


def open_gguf(path: str | Path, adapter: bool = False) -> Gguf:
    """Read and check everything but the tensors, of a model's file or an adapter's.

    Raises ValueError for a file that is damaged or not served.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file; expected a GGUF file.")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: fetch it again.")
    data = np.memmap(path, np.uint8, "r")
    try:
        fields, tensors = _parse(data)
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read as GGUF: {error}. Was a download interrupted? Fetch it again."
        ) from None
    arch = fields.get("general.architecture")
    if not isinstance(arch, str) or arch not in MODEL_TYPES:
        raise ValueError(f"{path} is of architecture {arch!r:.40}; served are {', '.join(MODEL_TYPES)}.")
    if fields.get("general.type", "model") != ("adapter" if adapter else "model"):
        raise ValueError(
            f"{path} holds a {fields['general.type']!r:.40}, not a whole model: give the base model's file."
        )
    if fields.get("split.count", 0) not in (0, 1):
        raise ValueError(f"{path} is one of several parts; join them with llama.cpp's llama-gguf-split --merge.")
    _check_kinds(path, tensors)
    entries: dict[str, Entry] = {}
    for name, (_, shape, start, nbytes) in tensors.items():
        if name != ROPE_FREQS:
            entries[hf_name(name, arch)] = Entry(path.name, torch.float32, shape, start, start + nbytes)
    return Gguf(folder=path, entries=entries, fields=fields, tensors=tensors)


def _parse(data: np.ndarray) -> tuple[dict[str, Any], dict[str, Tensor]]:
    cursor = _Cursor(data)
    if data[: len(LFS_POINTER)].tobytes() == LFS_POINTER:
        raise ValueError("it is a git-lfs pointer, not the file itself (run `git lfs pull`)")
    if (magic := cursor.take(4)) != b"GGUF":
        raise ValueError(f"it begins with {magic!r} instead of b'GGUF'")
    version = cursor.number("I")
    if version not in (2, 3):
        what = " (it is big-endian)" if version in (2 << 24, 3 << 24) else ""
        raise ValueError(f"it has version {version}{what}; 2 and 3, little-endian, are supported")
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    fields: dict[str, Any] = {}
    cursor.what = "the metadata"
    cursor.left(field_count, 13)
    for number in range(field_count):
        cursor.what = f"field {number} of the metadata"
        key = cursor.text()
        if key in fields:
            raise ValueError(f"it has {key!r:.60} twice")
        cursor.what = f"{key!r:.60}"
        fields[key] = cursor.value(cursor.number("I"))
    return fields, _parse_tensors(cursor, tensor_count, fields.get("general.alignment", 32), len(data))


def _parse_tensors(cursor: _Cursor, count: int, alignment: Any, size: int) -> dict[str, Tensor]:
    sizes = {int(kind): size for kind, size in library().GGML_QUANT_SIZES.items()}
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r:.40}, expected a power of two")
    found: dict[str, Tensor] = {}
    cursor.what = "the tensors' table"
    cursor.left(count, 32)
    for number in range(count):
        cursor.what = f"entry {number} of the tensors' table"
        name, dims = cursor.text(), cursor.number("I")
        if name in found or not 1 <= dims <= 4:
            raise ValueError(f"{name!r:.60} is there twice" if name in found else f"{name!r:.60} has {dims} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
        kind, offset = cursor.number("I"), cursor.number("Q")
        if kind not in sizes:
            raise ValueError(f"{name!r:.60} is of type {kind}, which the gguf package does not know: update it")
        block, nbytes = sizes[kind]
        if shape[-1] % block or not all(shape) or offset % alignment:
            raise ValueError(f"{name!r:.60} has shape {list(shape)} and offset {offset}, which its type cannot have")
        found[name] = Tensor(kind, shape, offset, math.prod(shape) // block * nbytes)
    base = -(-cursor.at // alignment) * alignment
    end, previous = 0, "the table"
    for name, tensor in sorted(found.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise ValueError(f"the tensors {previous!r:.60} and {name!r:.60} overlap")
        end, previous = tensor.start + tensor.nbytes, name
    if base + end > size:
        cut = sum(base + tensor.start + tensor.nbytes > size for tensor in found.values())
        raise ValueError(f"it is cut short by {base + end - size} bytes, in {cut} of its {count} tensors")
    return {name: tensor._replace(start=base + tensor.start) for name, tensor in found.items()}


def _check_kinds(path: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse types that the gguf library cannot dequantise, by trying a block of each."""
    gguf = library()
    wrong: dict[str, list[str]] = {}
    for kind in {tensor.kind for tensor in tensors.values()}:
        kind = gguf.GGMLQuantizationType(kind)
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            wrong[kind.name] = [name for name, tensor in tensors.items() if tensor.kind == kind]
    if wrong:
        held = "; ".join(f"{kind}: {abbreviate(names, 3)}" for kind, names in wrong.items())
        raise ValueError(f"{path} holds types that the gguf package cannot dequantise ({held}).")
