"""Gemma, Gemma 2 and the text model of Gemma 3.

What differs from Llama: norms multiply by 1 + w; embeddings are scaled by √hidden_size; the MLP is GeGLU; the head is
tied. Gemma 2 and 3 norm the output of attention and MLP before it joins the stream, scale queries by their own
number, and give some layers a sliding window.  Gemma 2 caps attention scores and logits.  Gemma 3 norms the heads of
q and k instead, and its sliding layers have a rotary base of their own.

Shapes: B batch, T tokens, D hidden_size, F intermediate_size, H query heads, K key-value heads, E head_dim, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lorarun.cache import Cache, place
from lorarun.config import build, check_supported, rope_parameters
from lorarun.kernels.attention import Spans, attention
from lorarun.kernels.replay import in_pass
from lorarun.nn import Embedding, Linear, Model, RMSNorm, add_norm, rotary
from lorarun.project import gated_mlp, project
from lorarun.recompute import run_block, with_policies
from lorarun.rotary import Rotary, Tables


@dataclass
class Config:
    """Fields as in ``config.json``."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    ropes: dict[str, dict[str, Any]] = field(repr=False)
    layer_types: list[str] = field(repr=False)
    rms_norm_eps: float = 1e-6
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float | None = None
    sliding_window: int | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        kind = raw["model_type"]
        switched_off = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")  # by null
        fields = DEFAULTS[kind] | {k: v for k, v in raw.items() if v is not None or k in switched_off}
        # The first Gemma files say "gelu" where the tanh approximation is meant, and a later field says so.
        named = fields.get("hidden_activation") or fields.get("hidden_act") or "gelu_pytorch_tanh"
        fields["hidden_activation"] = "gelu_pytorch_tanh" if kind == "gemma" and named == "gelu" else named
        check_supported(fields, fields["hidden_activation"])
        count = fields["num_hidden_layers"]
        every = {"gemma": 1, "gemma2": 2}.get(kind) or raw.get("sliding_window_pattern") or 6
        if not fields.get("layer_types"):
            fields["layer_types"] = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
        bases = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
        if kind == "gemma3_text":
            ropes = {name: rope_parameters(raw, bases[name], name) for name in sorted(set(fields["layer_types"]))}
        else:
            ropes = dict.fromkeys(sorted(set(fields["layer_types"])), rope_parameters(raw, 10_000.0))
        return build(cls, fields | {"ropes": ropes})

    @property
    def windows(self) -> list[int | None]:
        """How many keys each layer's queries see, themselves included; None: all."""
        return [self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types]


DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
}


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer, self.window, self.head_dim = layer, config.windows[layer], config.head_dim
        self.softcap = config.attn_logit_softcapping
        self.scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        d, e, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = Linear(d, config.num_attention_heads * e, bias)
        self.k_proj = Linear(d, config.num_key_value_heads * e, bias)
        self.v_proj = Linear(d, config.num_key_value_heads * e, bias)
        self.o_proj = Linear(config.num_attention_heads * e, d, bias)
        gemma3 = config.model_type == "gemma3_text"
        self.q_norm = RMSNorm(e, config.rms_norm_eps, plus_one=True) if gemma3 else None
        self.k_norm = RMSNorm(e, config.rms_norm_eps, plus_one=True) if gemma3 else None

    def forward(self, h: Tensor, tables: Tables, spans: Spans | None, cache: Cache | None) -> Tensor:
        heads = (*h.shape[:2], -1, self.head_dim)
        q, k, v = (y.view(heads) for y in project(h, self.q_proj, self.k_proj, self.v_proj))  # [B,T,H,E], [B,T,K,E]
        q, k = rotary(q, k, tables, self.q_norm, self.k_norm)
        if cache is not None:
            k, v, spans = cache.update(self.layer, k, v, spans)
        o = attention(q, k, v, spans, self.window, self.softcap, self.scale)  # [B, T, H, E]
        (y,) = project(o.flatten(2), self.o_proj, name="o_proj")
        return y  # [B, T, D]


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = Linear(d, f), Linear(d, f), Linear(f, d)
        self.act = config.hidden_activation

    def forward(self, h: Tensor, residual: Tensor | None = None) -> Tensor:
        return gated_mlp(h, self.gate_proj, self.up_proj, self.down_proj, self.act, residual)


class Block(nn.Module):
    """A block of Gemma 1, whose second norm stands before the MLP as in Llama."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.kind = config.layer_types[layer]
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, plus_one=True)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, plus_one=True)

    @in_pass
    def forward(self, x: Tensor, tables: Tables, spans: Spans | None, cache: Cache | None) -> Tensor:
        x, h = add_norm(x, None, self.input_layernorm)
        x, h = add_norm(x, self.self_attn(h, tables, spans, cache), self.post_attention_layernorm)
        return self.mlp(h, residual=x)  # [B, T, D]


class NormedBlock(Block):
    """A block of Gemma 2 and 3: what attention and MLP return is normed before it joins the stream."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, plus_one=True)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, plus_one=True)

    @in_pass
    def forward(self, x: Tensor, tables: Tables, spans: Spans | None, cache: Cache | None) -> Tensor:
        x, h = add_norm(x, None, self.input_layernorm)
        attended = self.self_attn(h, tables, spans, cache)
        x, h = add_norm(x, attended, self.pre_feedforward_layernorm, post=self.post_attention_layernorm)
        return x + self.post_feedforward_layernorm(self.mlp(h))  # [B, T, D]


class Decoder(nn.Module):
    """Embedding, blocks and final norm: what checkpoints keep under ``model.``"""

    def __init__(self, config: Config) -> None:
        super().__init__()
        block = Block if config.model_type == "gemma" else NormedBlock
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, scale=config.hidden_size**0.5)
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, plus_one=True)


class Gemma(Model):
    fp16 = False  # published checkpoints overflow in the MLP and the residual stream

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.softcap = config.final_logit_softcapping
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.rotary = {
            kind: Rotary(config.head_dim, rope, config.max_position_embeddings) for kind, rope in config.ropes.items()
        }
        self.tie()

    def hidden_states(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        layers: bool = False,
    ) -> Any:
        positions, spans = place(ids, positions, documents, cache)
        tables = {kind: table(positions) for kind, table in self.rotary.items()}
        x = self.model.embed_tokens(ids)
        states = [x] if layers else []
        for policy, block in with_policies(self):
            x = run_block(
                policy, block, x, tables[block.kind], spans, cache, tile=self.tile, deterministic=self.deterministic
            )
            if layers:
                states.append(x)
        x = self.model.norm(x)
        return [*states[:-1], x] if layers else x
