"""The same adapter on the other side: transformers' model with PEFT around it, and numbers to compare by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from lorarun.lora import linears

# Every projection of every family; gemma3's text model is in test_adapter's multimodal cases too.
FAMILIES = ["llama3", "llama-tied", "llama-bias", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3-text"]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def ids_for(model: Any, rows: int = 2, length: int = 24) -> Tensor:
    """Random ids below those that multimodal checkpoints keep for themselves."""
    return torch.randint(3, 1000, (rows, length), generator=torch.Generator().manual_seed(5))


def fill_b(model: torch.nn.Module, size: float = 0.1, seed: int = 1) -> None:
    """Random B for every adapter of a lorarun or PEFT model; B = 0 would hide almost everything."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))


def fill(model: torch.nn.Module, size: float = 0.1, seed: int = 1) -> None:
    """Random values, too, for biases and DoRA's magnitudes: for all that a lorarun or PEFT model trains but A."""
    fill_b(model, size, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = (size * torch.randn(parameter.shape, generator=generator)).to(parameter.device)
            if ".lora_magnitude_vector." in name:
                parameter.mul_(1 + 2 * noise)
            elif parameter.requires_grad and (name.endswith(".bias") or ".lora_bias." in name):
                parameter.add_(noise)


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a checkpoint, as plain as it comes."""
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def with_adapter(folder: Path, adapter: Path, trainable: bool = False) -> Any:
    """PEFT's model of a checkpoint and a saved adapter."""
    return peft.PeftModel.from_pretrained(reference(folder), adapter, is_trainable=trainable, torch_device="cpu").eval()


def carriers(model: torch.nn.Module) -> list[str]:
    """The modules of a lorarun model that carry an adapter."""
    return [path for path, _ in linears(model)]


def off(got: Tensor, expected: Tensor) -> float:
    """Distance over length: what fraction of `expected` is wrong."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())
