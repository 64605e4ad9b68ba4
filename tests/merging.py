"""What tests of merged checkpoints share: a model with an adapter that does something, and what lies in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft_side import fill_b, ids_for
from safetensors.torch import load_file

from lorarun.load import load
from lorarun.lora import add_lora
from lorarun.nn import Model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model(ids_for(model))
    return out if isinstance(out, torch.Tensor) else out.logits


def adapted(folder: Path, dtype: torch.dtype = torch.float32, bits: int | None = None, **arguments: Any) -> Model:
    model = add_lora(load(folder, dtype=dtype, bits=bits), **({"r": 4, "alpha": 8, "seed": 0} | arguments))
    fill_b(model)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("model*.safetensors")) for k, v in load_file(file).items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
