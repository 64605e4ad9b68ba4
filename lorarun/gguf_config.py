"""The ``config.json`` that a GGUF file's metadata amounts to.

Half of what makes an architecture is not in the file, since llama.cpp hard-codes it: activations, which layers of Gemma
have windows, how its queries are scaled.  It is written out here.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from lorarun.gguf_read import MODEL_TYPES, PATTERNS, ROPE_FREQS, Gguf, dequantized
from lorarun.rotary import frequencies

WIDE = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, which scales queries otherwise


def gguf_config(file: Gguf) -> dict[str, Any]:
    """What the model's ``config.json`` says.  Raises ValueError for what is missing or does not fit the tensors."""
    arch, path = file.arch, file.folder
    layers, hidden = file.get("ARCH.block_count", int), file.get("ARCH.embedding_length", int)
    heads = file.get("ARCH.attention.head_count", int)
    found = {int(match[1]) for name in file.tensors if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    if len(found) != layers or found != set(range(layers)):
        raise ValueError(f"{path} has tensors of {len(found)} blocks and {arch}.block_count {layers}: fetch it again.")
    table, query = file.tensors.get("token_embd.weight"), file.tensors.get("blk.0.attn_q.weight")
    if table is None or query is None or len(table.shape) != 2 or len(query.shape) != 2:
        raise ValueError(f"{path} lacks token_embd.weight or blk.0.attn_q.weight: it is not whole.")
    if file.get("ARCH.expert_count", int, 0):
        raise ValueError(f"{path} is a mixture of experts, which is not served.")
    head_dim = file.get("ARCH.attention.key_length", int, hidden // heads if heads > 0 else 0)
    for key in ("rope.dimension_count", "attention.value_length"):
        if (other := file.get(f"ARCH.{key}", int, head_dim)) != head_dim:
            raise ValueError(f"{path} has {arch}.{key} {other} with heads of {head_dim}; only equal ones are served.")
    if heads < 1 or head_dim < 2 or query.shape[0] != heads * head_dim:
        raise ValueError(f"{path}: {heads} heads of {head_dim} do not fit blk.0.attn_q.weight {list(query.shape)}.")
    config = {
        "model_type": MODEL_TYPES[arch],
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.get("ARCH.feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("ARCH.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.get("ARCH.context_length", int),
        "rms_norm_eps": _round(file.get("ARCH.attention.layer_norm_rms_epsilon", float)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": str(file.dtype).removeprefix("torch."),
        **_rope(file),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{role}_token_id"] = file.get(f"tokenizer.ggml.{key}_token_id", int, None)
    if not arch.startswith("gemma"):
        return config | {"hidden_act": "silu", "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    config["hidden_activation"] = "gelu_pytorch_tanh"
    return config if arch == "gemma" else config | _gemma_extras(file, config)


def published_config(file: Gguf) -> dict[str, Any]:
    """The same as programs for Hugging Face checkpoints read it.

    Raises ValueError for rotary factors that are not those of Llama 3.1, the only ones that they have words for.
    """
    config = gguf_config(file)
    kind = config["model_type"].removesuffix("_text").title()
    return {"architectures": [f"{kind}ForCausalLM"], **config, "rope_scaling": _llama3(file, config)}


def _llama3(file: Gguf, config: dict[str, Any]) -> dict[str, Any] | None:
    """Rotary factors as Llama 3.1's scaling that they were made with: how far between kept and divided a frequency is
    gives the original context, the longest wavelength the factor; see :func:`lorarun.rotary.frequencies`."""
    scaling, theta = config["rope_scaling"], config["rope_theta"]
    if scaling is None or scaling["rope_type"] != "factors":
        return dict(scaling) if scaling else None
    sizes = config["head_dim"], config["max_position_embeddings"]
    plain = frequencies(sizes[0], {"rope_type": "default", "rope_theta": theta}, sizes[1])[0]
    divided = frequencies(sizes[0], scaling | {"rope_theta": theta}, sizes[1])[0]
    factor = round(float((plain / divided).max()), 3)
    kept = (divided / plain - 1 / factor) / (1 - 1 / factor) if factor > 1 else torch.ones_like(plain)
    between = (kept > 0.01) & (kept < 0.99)
    original = ((3 * kept + 1) * 2 * math.pi / plain)[between].median() if between.any() else torch.tensor(8192.0)
    found = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": round(float(original)),
    }
    if not torch.allclose(frequencies(sizes[0], found | {"rope_theta": theta}, sizes[1])[0], divided, rtol=1e-4):
        raise ValueError(f"{file.folder} has rotary factors of its own, which a config.json cannot say.")
    return found


def _gemma_extras(file: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 have beyond the others; llama.cpp hard-codes half of it."""
    arch, layers = file.arch, config["num_hidden_layers"]
    every = file.get("ARCH.attention.sliding_window_pattern", int, PATTERNS[arch])
    if every < 1:
        raise ValueError(f"{file.folder} has {arch}.attention.sliding_window_pattern {every}; expected 1 or more.")
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    defaults = (50.0, 30.0) if arch == "gemma2" else (None, None)
    extras = {name: file.get(f"ARCH.{name}", float, default) for name, default in zip(caps, defaults, strict=True)}
    sizes = (config[name] for name in ("hidden_size", "num_attention_heads", "head_dim"))
    return extras | {
        "query_pre_attn_scalar": implied_scale(arch, layers, *sizes),
        "sliding_window": file.get("ARCH.attention.sliding_window", int),
        "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
    }


def _rope(file: Gguf) -> dict[str, Any]:
    """The rotary settings, as ``rope_theta`` and ``rope_scaling``."""
    theta = _round(file.get("ARCH.rope.freq_base", float, 1_000_000.0 if file.arch == "gemma3" else 10_000.0))
    kind = file.get("ARCH.rope.scaling.type", str, "none")
    factor = file.get("ARCH.rope.scaling.factor", float, file.get("ARCH.rope.scale_linear", float, 1.0))
    rope: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
    if file.arch == "gemma3":
        rope["rope_local_base_freq"] = _round(file.get("ARCH.rope.freq_base_swa", float, 10_000.0))
    if ROPE_FREQS in file.tensors:
        if kind not in ("none", "linear") or factor != 1.0:
            raise ValueError(
                f"{file.folder} has both {ROPE_FREQS} and a rotary scaling {kind!r}; expected one of them."
            )
        factors = dequantized(file.folder, file.tensors[ROPE_FREQS])
        rope["rope_scaling"] = {"rope_type": "factors", "factors": factors.flatten().tolist()}
    elif kind == "yarn":
        rope["rope_scaling"] = _yarn(file, factor)
    elif kind == "linear" or (kind == "none" and factor != 1.0):
        rope["rope_scaling"] = {"rope_type": "linear", "factor": _round(factor)}
    elif kind != "none":
        raise ValueError(f"{file.folder} has rotary scaling {kind!r}; served are none, linear, yarn and {ROPE_FREQS}.")
    return rope


def _yarn(file: Gguf, factor: float) -> dict[str, Any]:
    amplitude = (0.1 * math.log(factor) + 1.0) * file.get("ARCH.rope.scaling.attn_factor", float, 1.0)
    found = {
        "rope_type": "yarn",
        "factor": _round(factor),
        "attention_factor": amplitude,
        "original_max_position_embeddings": file.get("ARCH.rope.scaling.original_context_length", int, None),
    }
    return {key: value for key, value in found.items() if value is not None}


def _round(value: float) -> float:
    """Six digits undo the noise of fp32: 9.99999e-06 was 1e-05."""
    return float(f"{value:.6g}")


def implied_scale(arch: str, layers: int, hidden: int, heads: int, head_dim: int) -> int | float:
    """What llama.cpp scales queries by the root of: the file does not say it."""
    return hidden / heads if WIDE.get(arch) == layers else head_dim
