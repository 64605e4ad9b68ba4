"""Checkpoints in four and eight bits, written as their publishers write them, and what their weights are.

bitsandbytes' own functions quantise to NF4 and dequantise from what was written; FP8 is five lines of torch, after the
description in DeepSeek-V3's and compressed-tensors' own files.  `quantise_*` rewrite a folder of plain checkpoints,
`dequantised` reads such a folder back into fp32 tensors, which transformers can then run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Fields = dict[str, Any]
FILE = "model.safetensors"


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight") and ".layers." in name and "vision" not in name


def edit(folder: Path, **fields: Any) -> None:
    """Set fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields, indent=2), encoding="utf-8")


def rewrite(folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]], config: Fields) -> None:
    """Replace each tensor by what `change` makes of it, and put `quantization_config` into config.json."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / FILE).items():
        tensors |= change(name, tensor)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, {"format": "pt"})
    edit(folder, quantization_config=config)


def quantise_bnb4(
    folder: Path,
    block: int = 64,
    nested: bool = True,
    skip: tuple[str, ...] = (),
    kind: str = "nf4",
    storage: torch.dtype = torch.uint8,
) -> None:
    """The projections in four bits, but those whose names hold a text of `skip`."""
    functional = pytest.importorskip("bitsandbytes.functional")

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_projection(name) or any(text in name for text in skip):
            return {name: tensor}
        codes, state = functional.quantize_4bit(
            tensor, blocksize=block, compress_statistics=nested, quant_type=kind, quant_storage=storage
        )
        return {name: codes, **{f"{name}.{part}": held.cpu() for part, held in state.as_dict(packed=True).items()}}

    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_skip_modules": ["lm_head", *skip],
    }
    rewrite(folder, change, config)


def fp8(weight: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes, and a scale for each block of rows × cols; those at the edges are smaller."""
    w = weight.float()
    padded = torch.nn.functional.pad(w, (0, -w.shape[1] % cols, 0, -w.shape[0] % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    return (w / spread(scale, w.shape, rows, cols)).to(torch.float8_e4m3fn), scale


def spread(scale: Tensor, shape: torch.Size, rows: int, cols: int) -> Tensor:
    return scale.float().repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(cols, 1)[:, : shape[1]]


def by_token(x: Tensor) -> Tensor:
    """Activations rounded to e4m3 as they come, with a scale a token."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def quantise_fp8(
    folder: Path, block: tuple[int, int] | None = (128, 128), dtype: torch.dtype = torch.float32, skip: Any = ()
) -> None:
    """Projections as DeepSeek and Qwen3 publish them; without `block`, one scale a weight, and one for activations."""

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_projection(name) or any(text in name for text in skip):
            return {name: tensor}
        codes, scale = fp8(tensor, *(block or tensor.shape))
        if dtype == torch.float8_e8m0fnu:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
            codes = (tensor.float() / spread(scale, tensor.shape, *(block or tensor.shape))).to(torch.float8_e4m3fn)
        if block is None:
            return {
                name: codes,
                f"{name}_scale": scale.reshape(()).to(dtype),
                f"{name[:-6]}input_scale": torch.ones(()),
            }
        return {name: codes, f"{name}_scale_inv": scale.to(dtype)}

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic" if block else "static",
        "weight_block_size": list(block) if block else None,
        "modules_to_not_convert": ["lm_head", *skip],
    }
    rewrite(folder, change, config)


def quantise_compressed(folder: Path, strategy: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Projections as llm-compressor writes them, "float-quantized": a scale a tensor, a channel or a block."""

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_projection(name):
            return {name: tensor}
        size = {"tensor": tensor.shape, "channel": (1, tensor.shape[1]), "block": (128, 128)}[strategy]
        codes, scale = fp8(tensor, *size)
        return {name: codes, f"{name}_scale": (scale.reshape(1) if strategy == "tensor" else scale).to(dtype)}

    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    weights["block_structure"] = [128, 128] if strategy == "block" else None
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "kv_cache_scheme": None,
    }
    rewrite(folder, change, config)


def dequantised(folder: Path) -> dict[str, Tensor]:
    """Every weight of a quantised folder in fp32: NF4 by bitsandbytes, FP8 by the formula."""
    tensors = load_file(folder / FILE)
    method = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    size = method.get("weight_block_size")
    if method["quant_method"] == "compressed-tensors":
        size = method["config_groups"]["group_0"]["weights"]["block_structure"]
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        beside = {n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(f"{name}.")}
        scale = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
        if beside:
            functional = pytest.importorskip("bitsandbytes.functional")
            state = functional.QuantState.from_dict(beside, device=torch.device("cpu"))
            state.dtype = torch.float32  # else the values would be rounded to that of the original
            # As one row: blocks run over the whole weight, and bitsandbytes' CPU code begins a new one with each row,
            # unlike its CUDA code and its own quantisation, where rows are no multiple of the block.
            shape, state.shape = state.shape, torch.Size([1, state.shape.numel()])
            weights[name] = functional.dequantize_4bit(tensor, state).view(shape)
        elif scale is not None:
            wide = spread(scale, tensor.shape, *size) if size else scale.float()
            weights[name] = tensor.float() * wide
        elif ".weight." not in name and "_scale" not in name:
            weights[name] = tensor.float()
    return weights


def dense_copy(folder: Path, out: Path) -> Path:
    """The same checkpoint with its weights dequantised, in fp32, which transformers loads."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in dequantised(folder).items()}, out / FILE, {"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out
