"""A model, or its adapter alone, as a GGUF file that llama.cpp runs.

The usual way saves a merged model in Hugging Face's format and lets a converter read that again, with its own idea of
each tokenizer and architecture.  Here the live model is written directly: each weight is dequantised, gets its adapter
(in fp32), llama.cpp's row order or norm offset, and the type asked for, and goes to disk before the next one.  What is
exported is thus what was trained and measured.

llama.cpp has no words for some of what a configuration can say: these are refused by name, since the file would load
there and answer wrongly.  The gguf library writes and quantises; what it wrote is read back by our own reader, which
shares no code with it, and compared bit by bit before the file gets its name.

Given up: llama.cpp's k- and i-quants, which the library reads only (make them from an f16 file with llama-quantize),
and logits compared after writing as ``save_merged`` does it.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lorarun.gguf_config import implied_scale
from lorarun.gguf_read import MODEL_TYPES, PATTERNS, ROPE_FREQS, library, names_of, open_gguf
from lorarun.gguf_vocab import vocabulary_fields
from lorarun.headers import abbreviate
from lorarun.merge import merged_bias, merged_weight, without_place
from lorarun.nn import Linear, Model
from lorarun.options import Lora
from lorarun.quant.store import dequantize
from lorarun.rotary import frequencies
from lorarun.trained import changes, touches_tables, with_adapter

DTYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
ARCHS = {kind: arch for arch, kind in MODEL_TYPES.items()} | {"mistral": "llama"}


class Piece(NamedTuple):
    """A tensor to be written: its shape, its type's name and how its values (fp32, on the CPU) are had."""

    shape: tuple[int, ...]
    dtype: str
    values: Callable[[], Tensor]


def save_gguf(model: Model, path: str | os.PathLike[str], dtype: str = "f16", adapter_only: bool = False) -> None:
    """Write the model, its active adapter folded in, to the GGUF file ``path``; an older file there is replaced at the
    end, when the new one is complete and verified.

    dtype: of the matrices, one of ``DTYPES``; vectors are kept in fp32, and matrices whose rows do not divide into
    blocks of 32 in f16.  adapter_only: write the adapter alone, in the format that llama.cpp's ``--lora`` takes (dtype
    f16, bf16 or f32).

    Raises ValueError for what GGUF cannot say, OSError for a full disk, RuntimeError when the file read back is not
    what was to be written; then nothing is left behind.
    """
    path = Path(path).resolve()
    arch = _check(model, path, dtype, adapter_only)
    if adapter_only:
        fields, pieces = _adapter(model, arch, dtype)
    else:
        fields = {**_fields(model, arch), **_vocabulary(model)}
        pieces = _pieces(model, arch, dtype)
        gguf = library()
        kind = "ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"
        fields |= {"general.file_type": int(gguf.LlamaFileType[kind])}
        if dtype.startswith("q"):
            fields["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    unfinished = path.with_name(f".{path.name}.partial")
    _check_space(pieces, model, path)
    try:
        sums = _write(unfinished, arch, fields, pieces)
        _verify(unfinished, arch, fields, sums)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    print(f"save_gguf: {path} is complete and verified; {len(pieces)} tensors.", file=sys.stderr)


# --- what GGUF can say ---------------------------------------------------------------------------------------------


def _check(model: Model, path: Path, dtype: str, adapter_only: bool) -> str:
    """The architecture's name, once everything that llama.cpp would compute otherwise is ruled out."""
    library()
    config, wrong = model.config, []
    arch = ARCHS[config.model_type]
    kinds = DTYPES[:3] if adapter_only else DTYPES
    if dtype not in kinds:
        wrong.append(f"dtype={dtype!r} is not supported; {', '.join(kinds)} are")
    if path.is_dir() or not path.parent.is_dir():
        wrong.append(f"{path} is a folder or in none; give a file's name in a folder that exists")
    if model.source is not None and path == Path(model.source.folder).resolve():
        wrong.append(f"{path} is what this model was loaded from; choose another name")
    if adapter_only and model.active is None:
        wrong.append(f"no adapter is active; the model has {', '.join(model.adapters) or 'none'}")
    if model.active is not None:
        lora = model.adapters[model.active]
        if adapter_only and (lora.dora or lora.lora_bias or lora.bias != "none"):
            wrong.append(
                "llama.cpp's adapters are A and B alone; this one has DoRA or biases, so write the whole model"
            )
        elif not adapter_only and (homeless := without_place(model, model.active)):
            wrong.append(homeless)
        if adapter_only and (kept := _beside(lora)):
            wrong.append(f"llama.cpp's adapters hold low-rank updates of projections alone, and this one has {kept}")
        if config.tie_word_embeddings and touches_tables(model, model.active) and not lora.tied:
            wrong.append("the adapter makes two tables of a tied one, and the file would hold one")
    if arch.startswith("gemma"):
        wrong += _gemma_limits(arch, config)
    elif any(window is not None for window in config.windows):
        wrong.append(f"llama.cpp's {arch} has no sliding window, and this model has one")
    if arch not in ("llama", "qwen2") and config.attention_bias:
        wrong.append(f"llama.cpp's {arch} has no biases, and this model has")
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    if activation != ("gelu_pytorch_tanh" if arch.startswith("gemma") else "silu"):
        wrong.append(f"llama.cpp's {arch} has not the activation {activation}")
    if wrong:
        raise ValueError(f"save_gguf: {'; '.join(wrong)}.")
    return arch


def _beside(lora: Lora) -> str:
    """What an adapter trains beside projections."""
    kinds = {"copies of modules": lora.copies, "updates of the tables": lora.tables, "rows of tokens": lora.tokens}
    return ", ".join(kind for kind, there in kinds.items() if there)


def _gemma_limits(arch: str, config: Any) -> list[str]:
    wrong = []
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    if arch == "gemma" and any(sliding):
        wrong.append("llama.cpp's gemma has no sliding window, and this model has one")
    elif arch != "gemma" and (_pattern(sliding, PATTERNS[arch]) is None or config.sliding_window is None):
        wrong.append(f"llama.cpp's {arch} has windows in all but every n-th layer, and this model another pattern")
    elif arch == "gemma2" and _pattern(sliding, 2) != 2:
        wrong.append("llama.cpp's gemma2 has a window in every second layer, and this model another pattern")
    capped = config.attn_logit_softcapping is not None
    if capped != (arch == "gemma2") or (config.final_logit_softcapping is None and arch == "gemma2"):
        wrong.append(f"llama.cpp's {arch} {'needs' if arch == 'gemma2' else 'has no'} soft-caps of attention and head")
    if not config.tie_word_embeddings:
        wrong.append(f"llama.cpp's {arch} has a tied head, and this model a head of its own")
    return wrong


def _pattern(sliding: list[bool], usual: int) -> int | None:
    """n where every n-th layer sees all and the others have windows; None where there is no such n."""
    for every in (usual, *range(1, len(sliding) + 2)):
        if sliding == [bool((i + 1) % every) for i in range(len(sliding))]:
            return every
    return None


# --- metadata ------------------------------------------------------------------------------------------------------


def _fields(model: Model, arch: str) -> dict[str, Any]:
    c = model.config
    own = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.dimension_count": c.head_dim,
        **_rope(c, arch),
    }
    if arch in PATTERNS:
        own["attention.sliding_window"] = c.sliding_window
        every = _pattern([kind == "sliding_attention" for kind in c.layer_types], PATTERNS[arch])
        if every != PATTERNS[arch]:
            own["attention.sliding_window_pattern"] = every
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := getattr(c, name)) is not None:
                own[name] = float(cap)
    name = Path(model.source.name).stem if model.source is not None else c.model_type
    fields = {"general.type": "model", "general.name": name}
    return fields | {f"{arch}.{key}": value for key, value in own.items()}


def _ropes(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary settings of the layers that see all, and of those with a window."""
    ropes = getattr(config, "ropes", None) or {"full_attention": config.rope}
    full = ropes.get("full_attention") or ropes["sliding_attention"]
    return full, ropes.get("sliding_attention") or full


def _rope(config: Any, arch: str) -> dict[str, Any]:
    rope, local = _ropes(config)
    kind, fields = rope["rope_type"], {"rope.freq_base": float(rope["rope_theta"])}
    if arch == "gemma3":
        if local["rope_type"] != "default" and local is not rope:
            raise ValueError("save_gguf: llama.cpp's gemma3 scales no rotary frequencies of layers with a window.")
        fields["rope.freq_base_swa"] = float(local["rope_theta"])
    if kind in ("llama3", "factors") and arch == "llama" or kind == "default":
        return fields  # the factors are a tensor
    betas = rope.get("beta_fast") in (None, 32) and rope.get("beta_slow") in (None, 1)  # it has no others
    if kind not in ("linear", "yarn") or rope.get("truncate") is False or not betas:
        raise ValueError(f"save_gguf: llama.cpp's {arch} has no rotary scaling {kind!r} as this model uses it.")
    scaling = {"type": kind, "factor": float(rope["factor"])}
    if kind == "yarn":
        amplitude = frequencies(config.head_dim, rope, config.max_position_embeddings)[1]
        scaling["attn_factor"] = amplitude / (0.1 * math.log(rope["factor"]) + 1.0)
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        scaling["original_context_length"] = int(original)
    return fields | {f"rope.scaling.{key}": value for key, value in scaling.items()}


def _vocabulary(model: Model) -> dict[str, Any]:
    if model.tokenizer is None:
        print("save_gguf: this model has no tokenizer, and so has the file.", file=sys.stderr)
        return {"tokenizer.ggml.model": "none"}
    return vocabulary_fields(model.tokenizer, model.config.vocab_size)


# --- tensors -------------------------------------------------------------------------------------------------------


def _named(model: Model, arch: str) -> dict[str, Any]:
    """GGUF's name -> module, for every module that holds weights of the base."""
    stems = {hf: name for name, hf in names_of(arch).items() if name != "ffn_norm" or hf == names_of(arch)["ffn_norm"]}
    if arch not in PATTERNS:
        stems["post_attention_layernorm"] = "ffn_norm"
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)", path)
        stem = stems.get(match[2]) if match else None
        if match and stem and not (path == "lm_head" and model.config.tie_word_embeddings):
            found[(f"blk.{match[1]}." if match[1] else "") + stem] = module
    return found


def _stored(model: Model, arch: str, name: str, values: Tensor) -> Tensor:
    """Values in fp32 as llama.cpp keeps them; rows of a weight, a bias, or of an adapter's B."""
    c, stem = model.config, name.split(".")[-2]
    if arch.startswith("gemma") and stem.endswith("norm"):
        values = values + 1
    if arch == "llama" and stem in ("attn_q", "attn_k"):
        heads = c.num_attention_heads if stem == "attn_q" else c.num_key_value_heads
        halves = values.reshape(heads, 2, c.head_dim // 2, -1)
        values = halves.swapaxes(1, 2).reshape(values.shape)
    if stem == {"gemma2": "attn_q", "gemma3": "attn_q_norm"}.get(arch):
        # llama.cpp has its own idea of how queries are scaled; the difference goes into what makes them.
        implied = implied_scale(arch, c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.head_dim)
        values = values * math.sqrt(implied / (c.query_pre_attn_scalar or c.head_dim))
    return values.contiguous()


def _values(model: Model, arch: str, name: str, module: Any) -> Tensor:
    """A module's weight, with the active adapter in it, or its bias, as it is written."""
    if name.endswith(".bias"):
        bias = (module.bias if module.bias_before is None else module.bias_before).detach().float().cpu()
        if (copy := module.copy_of(model.active)) is not None:
            bias = copy.bias.detach().float().cpu()
        elif model.active is not None and module.active == model.active:
            bias = merged_bias(bias, module, model.active)
        return _stored(model, arch, name, bias)
    merged = getattr(module, "merged", None)
    weight = dequantize(module.weight if merged is None else merged[1], torch.float32).detach().cpu()
    if model.active is not None and changes(module, model.active):
        weight = with_adapter(weight, module, model.active)
    elif isinstance(module, Linear) and model.active is not None and module.active == model.active:
        weight = merged_weight(weight, module, model.active)
    return _stored(model, arch, name, weight)


def _pieces(model: Model, arch: str, dtype: str) -> dict[str, Piece]:
    block = library().GGML_QUANT_SIZES[library().GGMLQuantizationType[dtype.upper()]][0]
    pieces: dict[str, Piece] = {}
    rope = _ropes(model.config)[0]
    if rope["rope_type"] in ("llama3", "factors"):
        size, longest = model.config.head_dim, model.config.max_position_embeddings
        plain = frequencies(size, rope | {"rope_type": "default"}, longest)[0]
        factors = plain / frequencies(size, rope, longest)[0]
        pieces[ROPE_FREQS] = Piece(tuple(factors.shape), "f32", factors.contiguous)
    for stem, module in _named(model, arch).items():
        shape, name = tuple(module.weight.shape), f"{stem}.weight"
        kind = "f32" if len(shape) == 1 else dtype if shape[-1] % block == 0 else "f16"
        pieces[name] = Piece(shape, kind, partial(_values, model, arch, name, module))
        if (bias := getattr(module, "bias", None)) is not None:
            name = f"{stem}.bias"
            pieces[name] = Piece(tuple(bias.shape), "f32", partial(_values, model, arch, name, module))
    return pieces


def _adapter(model: Model, arch: str, dtype: str) -> tuple[dict[str, Any], dict[str, Piece]]:
    """The active adapter as llama.cpp's ``--lora`` takes it: one alpha for all, what differs from it goes into B."""
    assert model.active is not None
    lora = model.adapters[model.active]
    fields = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": float(lora.alpha)}
    pieces: dict[str, Piece] = {}
    for stem, module in _named(model, arch).items():
        if not isinstance(module, Linear) or module.active != model.active:
            continue
        a, b = (matrix.detach().float().cpu() for matrix in module.matrices(model.active))
        b = b * (module.adapters[model.active].scale * len(a) / lora.alpha)
        b = _stored(model, arch, f"{stem}.weight", b)
        for name, factor in (("lora_a", a), ("lora_b", b)):
            pieces[f"{stem}.weight.{name}"] = Piece(tuple(factor.shape), dtype, factor.contiguous)
    return fields, pieces


# --- the file ------------------------------------------------------------------------------------------------------


def _nbytes(piece: Piece) -> int:
    gguf = library()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[piece.dtype.upper()]]
    return math.prod(piece.shape) // block * int(size)


def _check_space(pieces: dict[str, Piece], model: Model, path: Path) -> None:
    needed = sum(map(_nbytes, pieces.values())) + 64 * model.config.vocab_size + 2**20
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"save_gguf: the file takes {needed / 2**30:.2f} GiB and the disk of {path.parent} has {free / 2**30:.2f} "
            "GiB free; make room or write to another disk",
        )


def _write(unfinished: Path, arch: str, fields: dict[str, Any], pieces: dict[str, Piece]) -> dict[str, int]:
    """Write everything; the check sum of each tensor's bytes."""
    gguf = library()
    writer = gguf.GGUFWriter(unfinished, arch)
    adders = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
    for key, value in fields.items():
        getattr(writer, adders[type(value)])(key, value)
    for name, piece in pieces.items():
        kind = gguf.GGMLQuantizationType[piece.dtype.upper()]
        writer.add_tensor_info(name, piece.shape, np.dtype(np.float32), _nbytes(piece), raw_dtype=kind)
    sums: dict[str, int] = {}
    infinite: list[str] = []
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, piece in pieces.items():
            values = piece.values()
            if not (values.abs() <= (65504 if piece.dtype == "f16" else torch.finfo(torch.float32).max)).all():
                infinite.append(name)
            with np.errstate(over="ignore", invalid="ignore"):
                array = gguf.quantize(values.numpy(), gguf.GGMLQuantizationType[piece.dtype.upper()])
            sums[name] = zlib.crc32(array.tobytes())
            writer.write_tensor_data(array)
        for file in writer.fout:
            file.flush()
            os.fsync(file.fileno())
    finally:
        writer.close()
    if infinite:
        raise ValueError(f"save_gguf: these would not be finite numbers: {abbreviate(infinite)}. Is bf16 wide enough?")
    return sums


def _verify(unfinished: Path, arch: str, fields: dict[str, Any], sums: dict[str, int]) -> None:
    """Read the file back, and compare the metadata and the bytes of every tensor."""
    written = open_gguf(unfinished, adapter="adapter.type" in fields)
    wrong = sorted(sums.keys() ^ written.tensors.keys())
    for key, value in {**fields, "general.architecture": arch}.items():
        expected = np.float32(value).item() if isinstance(value, float) else value
        if written.fields.get(key) != expected:
            wrong.append(key)
    for name in sums.keys() & written.tensors.keys():
        tensor = written.tensors[name]
        if zlib.crc32(np.fromfile(unfinished, np.uint8, tensor.nbytes, offset=tensor.start).tobytes()) != sums[name]:
            wrong.append(name)
    if wrong:
        raise RuntimeError(
            f"save_gguf: what was read back is not what was to be written: {abbreviate(wrong)}; nothing is kept. Is "
            "the disk sound?"
        )
