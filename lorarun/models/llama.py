"""Llama 2, 3, 3.1, 3.2, 3.3, their relatives of model_type ``llama`` (SmolLM2 …), and Mistral.

The decoder that the other families vary: pre-norm blocks, rotary positions, grouped key-value heads, SwiGLU.  What
differs between checkpoints of this family is in ``Config``: biases, tied head, rotary scaling, and Mistral's sliding
window.

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
    rope: dict[str, Any] = field(repr=False)
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        fields = DEFAULTS[raw["model_type"]] | {key: value for key, value in raw.items() if value is not None}
        check_supported(fields, fields["hidden_act"])
        heads = fields.get("num_attention_heads", 1)
        fields.setdefault("num_key_value_heads", heads)
        fields.setdefault("head_dim", fields.get("hidden_size", 0) // heads)
        if "sliding_window" in raw or raw["model_type"] == "llama":  # null switches Mistral's window off
            fields["sliding_window"] = raw.get("sliding_window") if raw["model_type"] == "mistral" else None
        return build(cls, fields | {"rope": rope_parameters(raw, theta=10_000.0)})

    @property
    def windows(self) -> list[int | None]:
        """How many keys each layer's queries see, themselves included; None: all."""
        return [self.sliding_window] * self.num_hidden_layers


DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "max_position_embeddings": 2048},
    "mistral": {
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
}


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer, self.window, self.head_dim = layer, config.windows[layer], config.head_dim
        d, e, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = Linear(d, config.num_attention_heads * e, bias)
        self.k_proj = Linear(d, config.num_key_value_heads * e, bias)
        self.v_proj = Linear(d, config.num_key_value_heads * e, bias)
        self.o_proj = Linear(config.num_attention_heads * e, d, bias)

    def forward(self, h: Tensor, tables: Tables, spans: Spans | None, cache: Cache | None) -> Tensor:
        heads = (*h.shape[:2], -1, self.head_dim)
        q, k, v = (y.view(heads) for y in project(h, self.q_proj, self.k_proj, self.v_proj))  # [B,T,H,E], [B,T,K,E]
        q, k = rotary(q, k, tables)
        if cache is not None:
            k, v, spans = cache.update(self.layer, k, v, spans)
        o = attention(q, k, v, spans, window=self.window)  # [B, T, H, E]
        (y,) = project(o.flatten(2), self.o_proj, name="o_proj")
        return y  # [B, T, D]


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, f, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj, self.up_proj, self.down_proj = Linear(d, f, bias), Linear(d, f, bias), Linear(f, d, bias)
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


class Llama(Model):
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
