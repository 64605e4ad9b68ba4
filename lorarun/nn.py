"""The parts a decoder is wired from, beside its projections (:mod:`lorarun.linear`): norms, embedding, and what every
model is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorarun.kernels.rms_norm import add_rms_norm, rms_norm
from lorarun.kernels.rope import rope
from lorarun.linear import Adapter, Clock, Linear
from lorarun.quant.store import stores
from lorarun.rotary import Tables
from lorarun.weighted import Weighted, replace_rows


class RMSNorm(Weighted):
    """RMSNorm over the last dimension; ``plus_one`` for Gemma's 1 + w.  See :mod:`lorarun.kernels.rms_norm`."""

    def __init__(self, dim: int, eps: float, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.effective(), self.eps, self.plus_one)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, plus_one={self.plus_one}"


def add_norm(x: Tensor, delta: Tensor | None, norm: RMSNorm, post: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
    """Add ``delta`` (or ``post(delta)``) to the residual stream and norm the sum: returns (x + delta, norm(x + delta)).

    x, delta [batch, seq, hidden].  With delta None the stream passes unchanged.
    """
    if untouched(norm) and (post is None or untouched(post)):
        after = None if post is None else post.effective()
        return add_rms_norm(x, delta, norm.effective(), norm.eps, norm.plus_one, after)
    if delta is not None:
        x = x + (delta if post is None else post(delta))
    return x, norm(x)


def untouched(module: nn.Module) -> bool:
    """Whether a module is one of ours as it was made: nobody subclassed it, replaced its forward or put hooks on it.

    Only then may an operation that covers several modules run in their place.
    """
    return type(module) in (Linear, RMSNorm) and not touched(module)


def touched(module: nn.Module) -> bool:
    """Whether somebody put hooks on a module or replaced its ``forward``."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return "forward" in vars(module) or any(hooks)


class Embedding(Weighted):
    """Rows of a table [vocab, hidden], times ``scale`` where a family has one, plus the update of the active adapter.

    The scale is first rounded to the table's dtype, as Gemma was trained: √3072 is 55.5 in bf16, not 55.4256.  An
    adapter's A [rank, vocab] and B [hidden, rank] update the table by scale · (B·A)ᵀ, without dropout as in PEFT, and
    are named as there (``lora_embedding_A.<adapter>``).
    """

    def __init__(self, vocab: int, hidden: int, scale: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.scale = scale
        self.adapters: dict[str, Adapter] = {}
        self.lora_embedding_A: Any  # dictionaries of parameters, there when there are adapters
        self.lora_embedding_B: Any

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.master()).to(self.weight.dtype)
        if (rows := self.rows()) is not None:
            x = replace_rows(x, ids, rows)
        x = self._scaled(x)
        if self.active is None or self.merged is not None:
            return x
        a, b = self.factors(self.active)
        update = F.linear(F.embedding(ids, a.T), b) * self.adapters[self.active].scale
        return (x + self._scaled(update)).to(x.dtype)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=self.weight.dtype).item()

    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """A [rank, vocab] and B [hidden, rank] of an adapter."""
        return self.lora_embedding_A[name], self.lora_embedding_B[name]

    def attach(self, name: str, adapter: Adapter, a: Tensor, b: Tensor) -> None:
        """Add an adapter with A [rank, vocab] and B [hidden, rank] as trainable parameters; it is not made active."""
        if not self.adapters:
            self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        self.adapters[name] = adapter
        self.lora_embedding_A[name], self.lora_embedding_B[name] = nn.Parameter(a), nn.Parameter(b)


class Model(nn.Module):
    """What every family's model is, beside its wiring: a decoder under ``model``, a head, and what it carries along.

    From ``tokenizer`` to ``original`` it is what :mod:`lorarun.load` gives, empty for a model built from a
    configuration.  ``policies`` and ``tile`` say what training keeps in memory; no result depends on them, and the
    first loss on an accelerator sets both where :mod:`lorarun.memory` has not planned.
    """

    config: Any
    model: Any
    lm_head: Linear
    rotary: Any  # tables, or a dictionary of them
    softcap: float | None = None  # of the head's logits
    fp16 = True  # whether activations stay below 65,504, the largest float16
    nested = False  # whether its checkpoint is a multimodal one, which keeps it under ``model.language_model``

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.policies: list[str] = ["keep"] * config.num_hidden_layers  # names of lorarun.recompute, one a block
        self.tile: int | None = None  # rows that an MLP takes at a time, None: all
        self.deterministic = False
        self.tokenizer: Any = None
        self.source: Any = None
        self.stored: dict[str, str] = {}  # the format of each weight in the checkpoint, by name
        self.asked: dict[str, Any] = {}  # of loading
        self.original: Any = None  # reads a weight by name, as the checkpoint has it
        self.adapters: dict[str, Any] = {}  # this and the next: see lorarun.lora
        self.active: str | None = None
        self.added: dict[int, bool] = {}  # tokens whose rows are to be trained, and whether their rows are new
        self.whole = False  # whether the weights themselves are trained, see lorarun.tokens.train_all
        self.untied = False  # whether a merge gave a tied head a table of its own
        self.compute = "bf16"  # or "fp8", see lorarun.compute
        self.clock = Clock()
        self.planned: Any = None  # what lorarun.plan decided, or loss by itself
        self.graphs: Any = None  # the captured steps of lorarun.loss, see lorarun.graph
        self._keep_dense = False

    @property
    def keep_dense(self) -> bool:
        """Whether copies of quantised weights in the compute dtype are kept: four times the memory in 16 bits, and no
        dequantising."""
        return self._keep_dense

    @keep_dense.setter
    def keep_dense(self, on: bool) -> None:
        self._keep_dense = on
        for _, store in stores(self):
            store.kept, store.dense = on, None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.graphs is not None:
            self.graphs.drop()  # they hold on to where things are
        return super()._apply(fn, recurse)

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the residual stream, which the embedding's table decides."""
        return self.model.embed_tokens.weight.dtype

    def tie(self) -> None:
        """Let the head share the embedding's table where the checkpoint says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def hidden_states(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Any = None,
        layers: bool = False,
    ) -> Any:
        """The final hidden states [batch, seq, hidden] of ids [batch, seq] int64, or with ``layers`` a list: the
        embeddings, each block's output, and in the last one's place the output of the final norm.

        documents [batch, seq]: the number of the text that a token belongs to, −1 for padding; texts do not see each
        other. positions [batch or 1, seq]: by default the index inside the text.  cache: see
        :class:`lorarun.cache.Cache`.
        """
        raise NotImplementedError(f"{type(self).__name__} is no family")

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden states [..., hidden], in their dtype; the soft-cap is taken in fp32."""
        logits: Tensor = self.lm_head(hidden)
        if self.softcap is None:
            return logits
        capped: Tensor = self.softcap * torch.tanh(logits.float() / self.softcap)
        return capped.to(logits.dtype)

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Logits [batch, seq, vocab]; the arguments are those of :meth:`hidden_states`."""
        return self.head(self.hidden_states(ids, positions, documents, cache))


def rotary(
    q: Tensor, k: Tensor, tables: Tables, q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate q [batch, seq, heads, head_dim] and k [batch, seq, kv_heads, head_dim], normed per head first where
    norms are given."""
    cos, sin = tables[:2]
    if q_norm is None or k_norm is None:
        return rope(q, k, cos, sin)
    return rope(q, k, cos, sin, q_norm.effective(), k_norm.effective(), q_norm.eps, q_norm.plus_one)
