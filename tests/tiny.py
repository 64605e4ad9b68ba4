"""Tiny checkpoints with random weights, and what transformers makes of them.

A family is only right when it agrees with somebody else's decoder on a checkpoint that exercises every one of its
fields, so each recipe here is written to disk by transformers itself and carries transformers' own answer with it. Real
checkpoints would do the same at a thousand times the cost, and would not bite: a window of 4096 never closes in a test.
Here windows, soft-caps and RoPE ranges are small and the weights have unit gain (norms and biases have noise), so that
a mistake in any of them shows in the logits. What this gives up is realism: nothing here ever learnt anything.

`make(name, out)` writes the folder `out/name` with `config.json`, bfloat16 safetensors and `reference.safetensors`:

    input_ids         int64 [2, 40], ids in [3, 1000)
    logits            fp32 [2, 40, vocab], eager attention on the CPU, from the bfloat16 weights cast to fp32
    hidden_states.N   fp32 [2, 40, hidden]: the embeddings (N = 0), each layer, and as the last the final norm's output
    loss              fp32 [], mean over all positions that have a next token

Two suffixes name variants of a recipe: `-sharded` (several weight files and an index) and `-v4config` (`config.json`
as transformers 4 wrote it, with `rope_theta`, `rope_scaling` and `torch_dtype`, which is what most published
checkpoints have). Every recipe also has `-bnb4` (projections in NF4 with double quantisation) and `-fp8` (in blocks of
128 × 128); their references are computed from the dequantised weights, see tests/packed.py. To look at them by hand:
`python tests/tiny.py FOLDER [NAME ...]`.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import packed
import torch
import transformers
from safetensors.torch import save_file

Fields = dict[str, Any]

BATCH, LENGTH = 2, 40
SPECIAL_IDS = 1000  # ids from here on are left to the special tokens of multimodal checkpoints
BASE: Fields = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(theta: float, kind: str = "default", **more: Any) -> Fields:
    """RoPE settings as `config.json` spells them since transformers 5."""
    return {"rope_type": kind, "rope_theta": theta, **more}


LLAMA3_ROPE = rope(
    500_000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
QWEN_YARN = rope(1_000_000.0, "yarn", factor=4.0, original_max_position_embeddings=128)
LLAMA_YARN = rope(
    10_000.0,
    "yarn",
    factor=8.0,
    original_max_position_embeddings=64,
    beta_fast=16.0,
    beta_slow=2.0,
    attention_factor=1.2,
)
GEMMA3_ROPE = {"full_attention": rope(1_000_000.0, "linear", factor=8.0), "sliding_attention": rope(10_000.0)}
GEMMA3_TEXT: Fields = {
    **BASE,
    "num_hidden_layers": 6,
    "head_dim": 32,
    "query_pre_attn_scalar": 48,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_parameters": GEMMA3_ROPE,
}
GEMMA3_VISION: Fields = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}


class Recipe(NamedTuple):
    """transformers' classes of the model and its configuration, the configuration's fields, and the variants."""

    model: str
    config: str
    fields: Fields
    variants: tuple[str, ...] = ()


def llama(*variants: str, **fields: Any) -> Recipe:
    return Recipe("LlamaForCausalLM", "LlamaConfig", BASE | fields, variants)


def qwen2(*variants: str, **fields: Any) -> Recipe:
    return Recipe("Qwen2ForCausalLM", "Qwen2Config", BASE | fields, variants)


RECIPES: dict[str, Recipe] = {
    # Llama 3.1: llama3 RoPE scaling, an lm_head of its own
    "llama3": llama("sharded", "v4config", rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    # tied embeddings and one key-value head
    "llama-tied": llama(num_key_value_heads=1, tie_word_embeddings=True),
    # a bias on every projection, head_dim other than hidden_size / heads
    "llama-bias": llama(attention_bias=True, mlp_bias=True, head_dim=24),
    # the vocabulary of SmolLM2, to go with its tokenizer
    "llama-vocab49k": llama(vocab_size=49152, tie_word_embeddings=True),
    "llama-linear": llama("v4config", rope_parameters=rope(10_000.0, "linear", factor=4.0)),
    # dynamic NTK changes the base only beyond the trained length, so that is shorter than the reference's rows
    "llama-dynamic": llama(
        "v4config", rope_parameters=rope(10_000.0, "dynamic", factor=2.0), max_position_embeddings=16
    ),
    # YaRN with every optional field given
    "llama-yarn": llama("v4config", rope_parameters=LLAMA_YARN),
    # Mistral since v0.3 has no window; v0.1 has one in every layer
    "mistral": Recipe("MistralForCausalLM", "MistralConfig", BASE | {"sliding_window": None, "head_dim": 24}),
    "mistral-sliding": Recipe("MistralForCausalLM", "MistralConfig", BASE | {"sliding_window": 8}, ("v4config",)),
    # Qwen2 and 2.5: biases on q, k and v
    "qwen2": qwen2("v4config", rope_parameters=rope(1_000_000.0), tie_word_embeddings=True),
    # a window in the upper two layers
    "qwen2-sliding": qwen2("v4config", use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen2-yarn": qwen2("v4config", rope_parameters=QWEN_YARN),
    # Qwen3: norms on q and k, head_dim other than hidden_size / heads
    "qwen3": Recipe(
        "Qwen3ForCausalLM", "Qwen3Config", BASE | {"head_dim": 32, "tie_word_embeddings": True}, ("sharded",)
    ),
    # Gemma 1: norms of 1 + weight, scaled embeddings, GeGLU
    "gemma": Recipe("GemmaForCausalLM", "GemmaConfig", BASE | {"head_dim": 32, "num_key_value_heads": 1}),
    # Gemma 2: soft-caps, a window in every second layer
    "gemma2": Recipe(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        BASE
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 48,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    # Gemma 3 text: norms on q and k, two RoPE bases, linear scaling of one
    "gemma3-text": Recipe("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA3_TEXT, ("v4config",)),
    # the same inside a multimodal checkpoint, with a vision tower that text does not touch
    "gemma3": Recipe(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": GEMMA3_TEXT,
            "vision_config": GEMMA3_VISION,
            "mm_tokens_per_image": 4,
            "boi_token_index": SPECIAL_IDS,
            "eoi_token_index": SPECIAL_IDS + 1,
            "image_token_index": SPECIAL_IDS + 2,
        },
        ("v4config",),
    ),
}
# Every name that `make` knows: the recipes and their variants.
NAMES = [name + suffix for name, recipe in RECIPES.items() for suffix in ("", *(f"-{v}" for v in recipe.variants))]
# What every recipe has too.
QUANTISED = {"bnb4": packed.quantise_bnb4, "fp8": packed.quantise_fp8}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give matrices unit gain, and vectors (norms, biases) some noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.1 * noise)


def v4_config(config: Fields) -> Fields:
    """Spell a configuration as transformers 4 did."""
    config = dict(config)
    if "text_config" in config:
        config["text_config"] = v4_config(config["text_config"])
    else:
        parameters = config.pop("rope_parameters")
        if "full_attention" in parameters:
            config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
            parameters = parameters["full_attention"]
        config["rope_theta"] = parameters["rope_theta"]
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        if config["model_type"] == "llama" and scaling["rope_type"] in ("linear", "dynamic"):
            scaling["type"] = scaling.pop("rope_type")  # the key of the time when there were only these two
        config["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
        layer_types = config.pop("layer_types", [])  # they followed from other fields
        if config["model_type"] == "gemma3_text":
            del config["_sliding_window_pattern"]
            config["sliding_window_pattern"] = layer_types.index("full_attention") + 1
    if "dtype" in config:  # of a nested configuration only the outer part has it
        config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.52.0"
    return config


def write_reference(recipe: Recipe, folder: Path, seed: int) -> None:
    """Write what transformers computes from the checkpoint in `folder`, in fp32 with eager attention."""
    model_class = getattr(transformers, recipe.model)
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(3, SPECIAL_IDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    tensors = {"input_ids": ids, "logits": output.logits, "loss": loss}
    tensors |= {f"hidden_states.{index}": hidden for index, hidden in enumerate(output.hidden_states)}
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / "reference.safetensors")


def make(name: str, out: Path, seed: int = 0) -> Path:
    """Write the checkpoint `name` (one of `NAMES`) to `out/name`, in one step at the end, and return that folder."""
    base, _, variant = (name, "", "") if name in RECIPES else name.rpartition("-")
    recipe = RECIPES[base]
    assert not variant or variant in (*recipe.variants, *QUANTISED), f"{name} is none of {', '.join(NAMES)}"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".making-") as scratch:
        partial = Path(scratch) / name
        model = getattr(transformers, recipe.model)(getattr(transformers, recipe.config)(**recipe.fields))
        randomize(model, seed)
        model.to(torch.bfloat16).save_pretrained(partial, max_shard_size="200KB" if variant == "sharded" else "5GB")
        if variant == "v4config":
            path = partial / "config.json"
            config = v4_config(json.loads(path.read_text(encoding="utf-8")))
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if variant in QUANTISED:
            QUANTISED[variant](partial)
            dense = packed.dense_copy(partial, Path(scratch) / "dense")
            write_reference(recipe, dense, seed)
            shutil.move(dense / "reference.safetensors", partial)
        else:
            write_reference(recipe, partial, seed)
        shutil.rmtree(out / name, ignore_errors=True)
        try:
            partial.replace(out / name)
        except OSError:  # somebody else finished the same folder first
            assert (out / name / "reference.safetensors").is_file()
    return out / name


if __name__ == "__main__":
    for each in sys.argv[2:] or NAMES:
        print(make(each, Path(sys.argv[1])))
