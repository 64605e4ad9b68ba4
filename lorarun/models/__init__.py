"""Which family serves a ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorarun.config import check_types, text_config
from lorarun.models import gemma, llama, qwen
from lorarun.nn import Model

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (llama.Config, llama.Llama),
    "mistral": (llama.Config, llama.Llama),
    "qwen2": (qwen.Config, qwen.Qwen),
    "qwen3": (qwen.Config, qwen.Qwen),
    "gemma": (gemma.Config, gemma.Gemma),
    "gemma2": (gemma.Config, gemma.Gemma),
    "gemma3_text": (gemma.Config, gemma.Gemma),
}


def build_model(raw: Mapping[str, Any]) -> Model:
    """The decoder that a ``config.json`` describes, with its parameters allocated on torch's current default device.

    A multimodal Gemma 3 (model_type ``gemma3``) gives its text model.
    """
    fields = text_config(raw)
    if raw.get("model_type") == "gemma3" and raw.get("text_config") is not None:
        fields.setdefault("model_type", "gemma3_text")
    check_types(fields)
    kind = fields.get("model_type")
    if kind not in FAMILIES or raw.get("model_type") not in (*FAMILIES, "gemma3"):
        raise ValueError(
            f"config.json: model_type {raw.get('model_type')!r} is not supported; supported are {', '.join(FAMILIES)}, "
            "and gemma3's text model."
        )
    config, family = FAMILIES[kind]
    return family(config.from_dict(fields))
