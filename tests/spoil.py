"""Ways to spoil a checkpoint, an adapter or a GGUF file: each function here gives one that changes a folder.

Apart from the table of test_bad_input.py, so that the table reads as one: what is wrong, and which words say so.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER, TOKENIZER = "adapter_config.json", "tokenizer.json"
Change = Callable[[Path], Any]


def put(name: str, content: bytes | str | Callable[[bytes], bytes]) -> Change:
    """Other bytes in a file, given or made of those that are there."""

    def change(folder: Path) -> None:
        path = folder / name
        data = content(path.read_bytes()) if callable(content) else content
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    return change


def fields(name: str = CONFIG, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def instead(name: str, how: Callable[[Path], Any]) -> Change:
    """Something else under a file's name, or nothing."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        how(folder / name)

    return change


def header(edit: Callable[[dict[str, Any]], Any], name: str = WEIGHTS) -> Change:
    """Another header in front of the same data."""

    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        held = json.loads(data[8 : 8 + length])
        text = json.dumps(edit(held) or held).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return put(name, change)


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any], name: str = WEIGHTS) -> Change:
    def change(folder: Path) -> None:
        held = load_file(folder / name)
        held = {key: tensor.clone() for key, tensor in held.items()}
        edit(held)
        save_file(held, folder / name, {"format": "pt"})

    return change


def without(name: str) -> Change:
    return tensors(lambda held: held.pop(name))


def with_length(length: int, name: str = WEIGHTS) -> Change:
    return put(name, lambda data: length.to_bytes(8, "little") + data[8:])


def cut(share: Callable[[bytes], int], name: str = WEIGHTS) -> Change:
    return put(name, lambda data: data[: share(data)])


def weight_map(edit: Callable[[dict[str, str]], Any]) -> Change:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        edit(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return change


def template(text: str) -> Change:
    return put("chat_template.jinja", text)


def vocabulary(edit: Callable[[dict[str, Any]], Any]) -> Change:
    def change(folder: Path) -> None:
        held = json.loads((folder / TOKENIZER).read_text())
        edit(held)
        (folder / TOKENIZER).write_text(json.dumps(held))

    return change


def number(key: str, value: int, form: str = "I", at: int = 4) -> Change:
    """A number ``at`` bytes behind a key of the GGUF file (behind its type, that is)."""

    def change(data: bytes) -> bytes:
        place = data.index(key.encode()) + len(key) + at
        return data[:place] + struct.pack("<" + form, value) + data[place + struct.calcsize(form) :]

    return put("model.gguf", change)


def sparse(path: Path, size: int = 2**36) -> None:
    """A file that claims many bytes and takes none."""
    with open(path, "wb") as stream:
        stream.truncate(size)


def nothing(path: Path) -> None:
    pass


def folder_at(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to("blobs/0123")


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def as_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"x")


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


Q = "model.layers.0.self_attn.q_proj.weight"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SHARD = "model-00002-of-"


def shard(how: Callable[[Path], Any]) -> Change:
    def change(folder: Path) -> None:
        path = next(folder.glob(SHARD + "*"))
        path.unlink()
        how(path)

    return change


def nest(depth: int, key: str = "rope_scaling") -> str:
    return f'{{"model_type": "llama", "{key}": ' + "[" * depth + "]" * depth + "}"


def spliced(name: str, old: str, new: str) -> Change:
    def change(data: bytes) -> bytes:
        assert old.encode() in data
        return data.replace(old.encode(), new.encode(), 1)

    return put(name, change)


def state(**values: Any) -> Change:
    """Other values in the quant state of a weight."""

    def edit(held: dict[str, torch.Tensor]) -> None:
        name = f"{Q}.quant_state.bitsandbytes__nf4"
        text = json.dumps(json.loads(bytes(held[name].tolist())) | values).encode()
        held[name] = torch.tensor(list(text), dtype=torch.uint8)

    return tensors(edit)


def set_to(name: str, value: Any, file: str = WEIGHTS) -> Change:
    def edit(held: dict[str, torch.Tensor]) -> None:
        held[name] = value(held[name]) if callable(value) else value

    return tensors(edit, file)


def spoilt(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.index_put_((torch.tensor([1]), torch.tensor([2])), torch.tensor(value).to(tensor))


def put_at(path: Path) -> None:
    """A header of 1 GiB, which is there."""
    with open(path, "r+b") as stream:
        stream.write((2**30).to_bytes(8, "little"))


def shard_tensor(value: float) -> Change:
    def change(folder: Path) -> None:
        path = next(folder.glob(SHARD + "*"))
        name = next(name for name, tensor in load_file(path).items() if tensor.dim() == 2)
        set_to(name, spoilt(value), path.name)(folder)

    return change
