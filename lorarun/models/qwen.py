"""Qwen2, Qwen2.5 and Qwen3 (dense).

What differs from Llama: Qwen2 has biases on q, k and v and none on o; Qwen3 has none by default, but norms every head
of q and k before the rotation, and its head_dim is its own.  Both may give their upper layers a sliding window.

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
    rope: dict[str, Any] = field(repr=False)
    layer_types: list[str] = field(repr=False)
    max_position_embeddings: int = 32_768
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        fields = DEFAULTS | {key: value for key, value in raw.items() if value is not None}
        check_supported(fields, fields["hidden_act"])
        heads = fields.get("num_attention_heads", 1)
        fields.setdefault("num_key_value_heads", min(heads, 32))
        fields.setdefault("head_dim", 128 if raw["model_type"] == "qwen3" else fields.get("hidden_size", 0) // heads)
        if not fields["use_sliding_window"]:
            fields["sliding_window"] = None
        count = fields.get("num_hidden_layers", 0)
        lowest = fields["max_window_layers"] if fields["sliding_window"] else count
        kinds = ["sliding_attention" if i >= lowest else "full_attention" for i in range(count)]
        fields.setdefault("layer_types", kinds)
        return build(cls, fields | {"rope": rope_parameters(raw, theta=10_000.0)})

    @property
    def windows(self) -> list[int | None]:
        """How many keys each layer's queries see, themselves included; None: all."""
        return [self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types]


DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer, self.window, self.head_dim = layer, config.windows[layer], config.head_dim
        d, e = config.hidden_size, config.head_dim
        qwen3 = config.model_type == "qwen3"
        bias = config.attention_bias if qwen3 else True
        self.q_proj = Linear(d, config.num_attention_heads * e, bias)
        self.k_proj = Linear(d, config.num_key_value_heads * e, bias)
        self.v_proj = Linear(d, config.num_key_value_heads * e, bias)
        self.o_proj = Linear(config.num_attention_heads * e, d, bias and qwen3)
        self.q_norm = RMSNorm(e, config.rms_norm_eps) if qwen3 else None
        self.k_norm = RMSNorm(e, config.rms_norm_eps) if qwen3 else None

    def forward(self, h: Tensor, tables: Tables, spans: Spans | None, cache: Cache | None) -> Tensor:
        heads = (*h.shape[:2], -1, self.head_dim)
        q, k, v = (y.view(heads) for y in project(h, self.q_proj, self.k_proj, self.v_proj))  # [B,T,H,E], [B,T,K,E]
        q, k = rotary(q, k, tables, self.q_norm, self.k_norm)
        if cache is not None:
            k, v, spans = cache.update(self.layer, k, v, spans)
        o = attention(q, k, v, spans, window=self.window)  # [B, T, H, E]
        (y,) = project(o.flatten(2), self.o_proj, name="o_proj")
        return y  # [B, T, D]


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = Linear(d, f), Linear(d, f), Linear(f, d)
        self.act = config.hidden_act

    def forward(self, h: Tensor, residual: Tensor | None = None) -> Tensor:
        return gated_mlp(h, self.gate_proj, self.up_proj, self.down_proj, self.act, residual)


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @in_pass
    def forward(self, x: Tensor, tables: Tables, spans: Spans | None, cache: Cache | None) -> Tensor:
        x, h = add_norm(x, None, self.input_layernorm)
        x, h = add_norm(x, self.self_attn(h, tables, spans, cache), self.post_attention_layernorm)
        return self.mlp(h, residual=x)  # [B, T, D]


class Decoder(nn.Module):
    """Embedding, blocks and final norm: what checkpoints keep under ``model.``"""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen(Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.rotary = Rotary(config.head_dim, config.rope, config.max_position_embeddings)
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
        tables = self.rotary(positions)
        x = self.model.embed_tokens(ids)
        states = [x] if layers else []
        for policy, block in with_policies(self):
            x = run_block(policy, block, x, tables, spans, cache, tile=self.tile, deterministic=self.deterministic)
            if layers:
                states.append(x)
        x = self.model.norm(x)
        return [*states[:-1], x] if layers else x
