"""Reading ``config.json``: two spellings of the same facts, and a refusal of what is not understood.

transformers 4 wrote ``rope_theta``, ``rope_scaling`` and ``torch_dtype``; transformers 5 writes ``rope_parameters``
(for some families one set per kind of layer) and ``dtype``.  Published checkpoints have either, and multimodal ones
nest the text model's fields in ``text_config``.  Everything is brought into one form here, so that a family file
states only what its family is.

A field that changes the arithmetic and is not supported is an error that names it; nothing falls back to a default in
silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from lorarun.kernels.gated import ACTIVATIONS

ROPE_TYPES: dict[str, tuple[str, ...]] = {  # and the fields that each needs
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "factors": ("factors",),  # of GGUF files: what each frequency is divided by
}
C = TypeVar("C")


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's fields: ``text_config`` with the outer level's dtype and tying where it states neither."""
    inner = raw.get("text_config")
    if inner is None:
        return dict(raw)
    if not isinstance(inner, Mapping):
        raise ValueError(f"config.json: text_config is {inner!r:.40}; expected an object.")
    outer = {key: raw[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if raw.get(key) is not None}
    return outer | {key: value for key, value in inner.items() if not (key in outer and value is None)}


def stored_dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that the file says its weights have; None when it does not say."""
    fields = text_config(raw)
    name = fields.get("dtype") or fields.get("torch_dtype")
    if name is None:
        return None
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"config.json: dtype is {name!r}; expected bfloat16, float16 or float32.")
    return dtype


def rope_parameters(raw: Mapping[str, Any], theta: float, layer_type: str | None = None) -> dict[str, Any]:
    """The rotary parameters as ``{"rope_type": …, "rope_theta": …, …}``, from either spelling.

    ``theta`` is the family's own default.  ``layer_type`` picks a set where a checkpoint has one per kind of layer
    (Gemma 3); in the older spelling sliding layers then have ``rope_local_base_freq`` and no scaling.
    """
    newer = raw.get("rope_parameters")
    if newer is not None:
        if not isinstance(newer, Mapping):
            raise ValueError(f"config.json: rope_parameters is {newer!r}; expected an object.")
        found = dict(newer.get(layer_type, newer))
    elif layer_type == "sliding_attention":
        found = {"rope_theta": raw.get("rope_local_base_freq")}
    else:
        found = {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    kind = found.pop("type", None)  # the oldest spelling
    found.setdefault("rope_type", kind or "default")
    found["rope_theta"] = float(found.get("rope_theta") or raw.get("rope_theta") or theta)
    _check_rope(found, raw)
    return found


def _check_rope(rope: dict[str, Any], raw: Mapping[str, Any]) -> None:
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise ValueError(f"config.json: rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"config.json: partial_rotary_factor {partial} is not supported; whole heads (1.0) are.")
    missing = [key for key in ROPE_TYPES[kind] if rope.get(key) is None]
    if missing:
        raise ValueError(f"config.json: rope type {kind!r} needs {', '.join(missing)}, which the file does not have.")
    if kind == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise ValueError(
            f"config.json: low_freq_factor {rope['low_freq_factor']} must be below high_freq_factor "
            f"{rope['high_freq_factor']}."
        )


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _positive(value: Any) -> bool:
    """A number that fp32 holds, and its inverse too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-30 <= value <= 1e30


def _base(value: Any) -> bool:
    return _positive(value) and value > 1


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


# What a field may be, where it is there and not null: (names, check, in words).  The limits lie far beyond any
# published model; within them a model takes no time or memory to build on the meta device.
LAYERS, WIDTH, HEADS, MANY = 500, 2**24, 2**16, 2**31 - 1
FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("vocab_size max_position_embeddings sliding_window sliding_window_pattern", _whole(1, MANY), f"from 1 to {MANY}"),
    ("hidden_size intermediate_size", _whole(1, WIDTH), f"from 1 to {WIDTH}"),
    ("num_attention_heads num_key_value_heads head_dim", _whole(1, HEADS), f"from 1 to {HEADS}"),
    ("num_hidden_layers", _whole(0, LAYERS), f"from 0 to {LAYERS}"),
    ("max_window_layers", _whole(0, MANY), f"from 0 to {MANY}"),
    ("rms_norm_eps query_pre_attn_scalar", _positive, "a positive number"),
    ("attn_logit_softcapping final_logit_softcapping", _positive, "a positive number"),
    ("rope_theta rope_local_base_freq", _base, "a number above 1"),
    ("attention_bias mlp_bias tie_word_embeddings use_sliding_window", _is(bool), "true or false"),
    ("model_type hidden_act hidden_activation", _is(str), "a text"),
    ("rope_parameters rope_scaling", _is(dict), "an object"),
    ("layer_types", lambda value: isinstance(value, list) and all(map(_is(str), value)), "a list of texts"),
)
ROPE_FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("rope_type type", _is(str), "a text"),
    ("rope_theta", _base, "a number above 1"),
    ("factor low_freq_factor high_freq_factor", _positive, "a positive number"),
    ("original_max_position_embeddings", _whole(1, MANY), f"from 1 to {MANY}"),
    ("beta_fast beta_slow mscale mscale_all_dim attention_factor", _positive, "a positive number"),
    ("factors", lambda value: isinstance(value, list) and all(map(_positive, value)), "a list of positive numbers"),
    ("full_attention sliding_attention", _is(dict), "an object"),
)


def check_types(raw: Mapping[str, Any]) -> None:
    """Refuse values of a type or sign that a field cannot have, all in one error; null means the family's default."""
    wrong = _misfits(raw, FIELDS, "")
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := raw.get(name), dict):
            wrong += _misfits(rope, ROPE_FIELDS, f"{name}.")
            for kind in ("full_attention", "sliding_attention"):
                if isinstance(inner := rope.get(kind), dict):
                    wrong += _misfits(inner, ROPE_FIELDS, f"{name}.{kind}.")
    if wrong:
        raise ValueError(f"config.json: {'; '.join(wrong)}.")


def _misfits(
    raw: Mapping[str, Any], fields: tuple[tuple[str, Callable[[Any], bool], str], ...], where: str
) -> list[str]:
    return [
        f"{where}{name} is {raw[name]!r:.40}, expected {words}"
        for names, right, words in fields
        for name in names.split()
        if raw.get(name) is not None and not right(raw[name])
    ]


def check_supported(raw: Mapping[str, Any], activation: str) -> None:
    """Refuse settings that no family file implements, all in one error."""
    wrong = []
    if activation not in ACTIVATIONS:
        wrong.append(f"activation {activation!r} (supported: {', '.join(ACTIVATIONS)})")
    if raw.get("attention_dropout"):
        wrong.append(f"attention_dropout {raw['attention_dropout']} (supported: 0)")
    if raw.get("use_bidirectional_attention"):
        wrong.append("use_bidirectional_attention (supported: causal attention)")
    kinds = set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        wrong.append(f"layer_types {', '.join(sorted(kinds))} (supported: full_attention, sliding_attention)")
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        wrong.append(f"{heads} attention heads over {kv_heads} key-value heads (the first must be a multiple)")
    if wrong:
        raise ValueError(f"config.json of model_type {raw.get('model_type')!r} asks for " + "; ".join(wrong) + ".")


def build(cls: type[C], fields: Mapping[str, Any]) -> C:
    """An instance of a family's ``Config`` dataclass from the fields it declares; the others are not its business."""
    declared = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    missing = [
        name
        for name, field in declared.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING and name not in fields
    ]
    if missing:
        raise ValueError(f"config.json of model_type {fields.get('model_type')!r} lacks {', '.join(missing)}.")
    kinds, count = fields.get("layer_types"), fields.get("num_hidden_layers")
    if "layer_types" in declared and kinds is not None and len(kinds) != count:
        raise ValueError(f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers {count}.")
    if (head_dim := fields["head_dim"]) % 2 or not 4 <= head_dim <= HEADS:
        raise ValueError(
            f"config.json: head_dim is {head_dim} (where it is not given, hidden_size / num_attention_heads), expected "
            f"an even number from 4 to {HEADS}: rotary embedding turns pairs."
        )
    return cls(**{name: fields[name] for name in declared if name in fields})
