"""Turn a GGUF file of SmolLM2 or Gemma 3 into the folder that a model hub would give.

The package registries carry these two only as GGUF, which is another world: tensors quantised and under other names,
Llama's q and k rows in another order, Gemma's norm weights with the 1 added, the tokenizer as lists of metadata. This
undoes each of these, so that nothing else has to know. It is not a general converter: it knows two architectures and
trusts the file, whose digest the caller has checked. `gguf` dequantises; the rest was checked against the published
configurations, and the weights it writes are pinned by their digest in `tests/reference`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tqdm import tqdm


class Gguf:
    """A GGUF file's metadata, and its tensors as fp32 arrays."""

    def __init__(self, path: Path) -> None:
        self.reader = GGUFReader(path)
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {role: self.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys.items()}
        self.special = {role: int(value) for role, value in ids.items() if value is not None}

    def get(self, key: str) -> Any:
        """The value of a key, `ARCH.` standing for the architecture's name; None when there is none."""
        if key.startswith("ARCH."):
            key = self.get("general.architecture") + key[4:]
        field = self.reader.fields.get(key)
        return None if field is None else field.contents()

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each tensor under its Hugging Face name."""
        for tensor in tqdm(self.reader.tensors, "  dequantising", unit=" tensors", disable=None):
            yield hf_name(tensor.name, self.get("general.architecture")), dequantize(tensor.data, tensor.tensor_type)


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
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def hf_name(name: str, arch: str) -> str:
    """Translate a GGUF tensor name, such as blk.0.attn_q.weight."""
    stem, suffix = name.rsplit(".", 1)
    layer, stem = match.groups() if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) else (None, stem)
    names = NAMES | {"ffn_norm": "pre_feedforward_layernorm" if arch == "gemma3" else "post_attention_layernorm"}
    return f"model.layers.{layer}.{names[stem]}.{suffix}" if layer else f"{names[stem]}.{suffix}"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of Llama's q and k weights.

    It rotates neighbouring rows of a head together, so its converter interleaves the head's two halves; Hugging Face's
    layout rotates row i with row i + dim / 2.
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def common_config(gguf: Gguf) -> dict[str, Any]:
    """The config.json fields that Llama and Gemma 3 share."""
    return {
        "vocab_size": len(gguf.get("tokenizer.ggml.tokens")),
        "hidden_size": gguf.get("ARCH.embedding_length"),
        "intermediate_size": gguf.get("ARCH.feed_forward_length"),
        "num_hidden_layers": gguf.get("ARCH.block_count"),
        "num_attention_heads": gguf.get("ARCH.attention.head_count"),
        "num_key_value_heads": gguf.get("ARCH.attention.head_count_kv"),
        "max_position_embeddings": gguf.get("ARCH.context_length"),
        # Six digits undo the noise of fp32: 9.99999e-06 was 1e-05.
        "rms_norm_eps": float(f"{gguf.get('ARCH.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(f"{gguf.get('ARCH.rope.freq_base'):.6g}"),
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": gguf.special["bos"],
        "eos_token_id": gguf.special["eos"],
        "pad_token_id": gguf.special["pad"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def byte_level_tokenizer(gguf: Gguf) -> Tokenizer:
    """SmolLM2's tokenizer: GPT-2's byte-level BPE, with every digit on its own."""
    tokens = gguf.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = gguf.get("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


def sentencepiece_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """The BPE merges that reproduce the scores of a SentencePiece BPE model.

    A token can be made by every split into two tokens. Better scores come first; ties, which are the splits of one
    token, go by the longer left half.
    """
    known = set(tokens)
    merges = [
        (-score, -cut, cut - len(token), token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
    merges.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in merges]


def gemma_tokenizer(gguf: Gguf) -> Tokenizer:
    """Gemma's tokenizer: SentencePiece BPE that falls back to bytes."""
    # llama.cpp's converter writes the spaces of user-defined tokens as they are typed, and replaces their scores, which
    # are 0 (the best); in the model's own vocabulary a space is always U+2581.
    tokens = [token.replace(" ", "\u2581") for token in gguf.get("tokenizer.ggml.tokens")]
    kinds = gguf.get("tokenizer.ggml.token_type")
    given = zip(gguf.get("tokenizer.ggml.scores"), kinds, strict=True)
    scores = [0.0 if kind in (CONTROL, USER_DEFINED) else score for score, kind in given]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = sentencepiece_merges(tokens, scores)
    unknown = tokens[gguf.special["unk"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    bos = tokens[gguf.special["bos"]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, gguf.special["bos"])]
    )
    special = {tokens[i] for i in gguf.special.values()}
    special |= {f"<{edge}_of_{what}>" for edge in ("start", "end") for what in ("turn", "image")}
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added if token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added if token not in special])
    return tokenizer


# The file holds the pretrained model, which has no template. With this one, which is Gemma's documented turn format (a
# system message goes before the first user turn), it can learn to answer.
GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(prefix='') -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {%- if not loop.first -%}
            {{- raise_exception('A system message must come first') -}}
        {%- endif -%}
        {%- set ns.prefix = message['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
        {{- '<start_of_turn>' + role + '\\n' + ns.prefix -}}
        {{- message['content'] | trim + '<end_of_turn>\\n' -}}
        {%- set ns.prefix = '' -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""


def write_smollm2(gguf: Gguf, folder: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **common_config(gguf)}
    config |= {"head_dim": gguf.get("ARCH.rope.dimension_count"), "hidden_act": "silu", "mlp_bias": False}
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, array in gguf.tensors():
            count = heads.get(".".join(name.split(".")[-2:]))
            yield name, unpermute(array, count) if count else array

    template = gguf.get("tokenizer.chat_template")
    write(folder, gguf, config, tensors(), byte_level_tokenizer(gguf), template, config["eos_token_id"])


def write_gemma3(gguf: Gguf, folder: Path) -> None:
    config = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **common_config(gguf)}
    config |= {
        "head_dim": gguf.get("ARCH.attention.key_length"),
        "query_pre_attn_scalar": gguf.get("ARCH.attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": gguf.get("ARCH.attention.sliding_window"),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        # llama.cpp hard-codes what follows, so the file does not say it: five windows to a full layer, two RoPE bases.
        "layer_types": [
            "sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(config["num_hidden_layers"])
        ],
        "rope_local_base_freq": 10_000.0,
    }
    # llama.cpp multiplies by its norm weights, Gemma by 1 + weight.
    tensors = ((name, array - 1 if name.endswith("norm.weight") else array) for name, array in gguf.tensors())
    tokenizer = gemma_tokenizer(gguf)
    stops = [config["eos_token_id"], tokenizer.token_to_id("<end_of_turn>")]
    write(folder, gguf, config, tensors, tokenizer, GEMMA_TEMPLATE, stops)


def write(
    folder: Path,
    gguf: Gguf,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    tokenizer: Tokenizer,
    template: str,
    stops: int | list[int],
) -> None:
    # A copy where it must be: torch wants an array that it may write to.
    weights = {name: torch.from_numpy(np.require(a, np.float32, ["C", "W"])).bfloat16() for name, a in tensors}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the class that takes tokenizer.json as it is
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": tokenizer.id_to_token(i) for role, i in gguf.special.items()},
        "chat_template": template,
    }
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id")} | {"eos_token_id": stops}
    files = {"config.json": config, "tokenizer_config.json": settings, "generation_config.json": generation}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(path: Path, folder: Path) -> None:
    """Write the model in the GGUF file `path`, of SmolLM2 or Gemma 3, to the existing `folder`."""
    gguf = Gguf(path)
    {"llama": write_smollm2, "gemma3": write_gemma3}[gguf.get("general.architecture")](gguf, folder)
