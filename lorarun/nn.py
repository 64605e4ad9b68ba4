"""The parts a decoder is wired from: projections that can carry adapters, norms, embedding.

A ``Linear`` here is what ``torch.nn.Linear`` is, plus named low-rank adapters inside it, none by default.  The usual
way wraps every projection in an adapter class and renames its weight; then a model with adapters is another model
than one without, and checkpoints need translation.  Here ``weight`` stays ``weight`` and an adapter is two more
parameters below the same module, named as PEFT names them (``lora_A.<adapter>.weight``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorarun.kernels.backend import autocast, runs_triton
from lorarun.kernels.dropout import Dropout, dropout
from lorarun.kernels.few_rows import ROWS, Stored, few_rows, serves
from lorarun.kernels.lora import Branch, low_rank
from lorarun.kernels.replay import decide
from lorarun.kernels.rms_norm import add_rms_norm, rms_norm
from lorarun.kernels.rope import rope
from lorarun.kernels.scaled import ScaledWeight
from lorarun.quant.store import FP8Store, NF4Store, Store, stores
from lorarun.rotary import Tables


@dataclass
class Clock:
    """What dropout masks depend on besides the element: ``seed``, and ``step``, which ``lorarun.loss`` advances."""

    seed: int = 0
    step: int = 0
    now: Tensor | None = field(default=None, compare=False, repr=False)  # instead of both, in a captured step

    def value(self) -> int | Tensor:
        """One 63-bit number of both; odd multipliers keep neighbouring seeds and steps apart.

        In a captured step an int64 scalar on the device, which is read when the step is replayed.
        """
        if self.now is not None:
            return self.now
        return (self.seed * 0x9E3779B97F4A7C15 + self.step * 0xD1B54A32D192ED03) & 0x7FFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Adapter:
    """What one adapter of one projection is, besides its two matrices.

    ``stream`` numbers the input that dropout is applied to; projections that share an input share it, and so their
    mask.
    """

    scale: float
    dropout: float
    stream: int
    clock: Clock


class Mixed:
    """Adapters that serve the rows of one batch together: ``which`` [batch, seq] int64 has the number in ``names`` of
    each token's, −1 for none."""

    def __init__(self, names: list[str]) -> None:
        self.names = list(names)
        self.which: Tensor | None = None

    def number(self, name: str | None) -> int:
        return -1 if name is None else self.names.index(name)


class Factor(nn.Module):
    """One matrix of an adapter, in a module of its own so that its name ends in ``.weight`` as in PEFT's files."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class Linear(nn.Module):
    """y = x · Wᵀ + b, plus the update of the active adapter.

    ``weight`` [out, in], a Parameter or a frozen store (:mod:`lorarun.quant.store`); ``bias`` [out] or None.  The
    products run in the dtype of ``weight``, with a store, which has none, in that of ``x`` (torch.autocast decides
    otherwise where it is on); the result has the dtype of ``x``.  Adapter matrices may be wider (fp32 by default):
    they are cast for the product, and their gradients arrive in their own dtype.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: Any = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.adapters: dict[str, Adapter] = {}
        self.lora_A: Any  # module dictionaries of factors, there when there are adapters
        self.lora_B: Any
        self.active: str | None = None  # the adapter that runs
        self.mixed: Mixed | None = None  # instead of ``active``, where rows of a batch have adapters of their own
        self.merged: tuple[str, Tensor] | None = None  # (adapter, the weight before it was added)
        self.scaled: ScaledWeight | None = None  # FP8 copies, shared by all projections of one input

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Store):
            h = x.to(_autocast_dtype(x))
            few = few_projected(h.reshape(-1, h.shape[-1]), (self,), [Branch(self.out_features)])
            bias = None if self.bias is None else self.bias.to(h.dtype)
            y: Tensor = _StoredLinear.apply(h, self.weight, bias) if few is None else few.view(*x.shape[:-1], -1)
        else:
            h = x.to(self.weight.dtype)
            y = F.linear(h, self.weight, self.bias)
        y = self.adapt(y, h)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def adapt(self, y: Tensor, x: Tensor) -> Tensor:
        """y, the product with the weight, plus the update of the active adapter for the same input x."""
        if self.mixed is not None and self.mixed.which is not None:
            for i, name in enumerate(self.mixed.names):
                if name in self.adapters:
                    own = torch.where((self.mixed.which == i).unsqueeze(-1), x, 0.0)
                    y = y + low_rank(own, *self.factors(name), self.adapters[name].scale)
            return y
        branch, drop = self.running()
        if branch.a is None or branch.b is None:
            return y
        return y + low_rank(x if drop is None else dropout(x, *drop), branch.a, branch.b, branch.scale)

    def running(self) -> tuple[Branch, Dropout | None]:
        """The adapter that runs (none when it is merged), and its dropout where that is on.

        Now, or inside a model at the time when this pass through it began.
        """
        running: tuple[Branch, Dropout | None] = decide(self, self._running)
        return running

    def _running(self) -> tuple[Branch, Dropout | None]:
        name = self.active if self.merged is None else None
        if name is None:
            return Branch(self.out_features), None
        adapter = self.adapters[name]
        drop = Dropout(adapter.dropout, adapter.clock.value(), adapter.stream)
        branch = Branch(self.out_features, *self.factors(name), adapter.scale)
        return branch, drop if self.training and adapter.dropout > 0.0 else None

    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """A [rank, in] and B [out, rank] of an adapter."""
        return self.lora_A[name].weight, self.lora_B[name].weight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.merged is not None:
            raise ValueError(
                f"state_dict: the adapter {self.merged[0]!r} is merged into {prefix}weight and would be applied twice "
                "when this is loaded. Call unmerge(model) first; save_merged writes a merged checkpoint."
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def attach(self, name: str, adapter: Adapter, a: Tensor, b: Tensor) -> None:
        """Add an adapter with A [rank, in] and B [out, rank] as trainable parameters; it is not made active."""
        if not self.adapters:
            self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.adapters[name] = adapter
        self.lora_A[name], self.lora_B[name] = Factor(a), Factor(b)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, adapters={list(self.adapters)}"
        )


def few_projected(
    x: Tensor,
    linears: Sequence[Linear],
    branches: Sequence[Branch],
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor | None:
    """:func:`lorarun.kernels.few_rows.few_rows` of stored weights for x [rows, in]; None where that does not serve:
    more rows, dense weights, gradients."""
    weights = None if torch.is_grad_enabled() else few_stored(x, linears, branches)
    if weights is None:
        return None
    flag = None
    if any(branch.rank for branch in branches):
        flag = next(decide("flags", lambda: _flags(x.device)))
    return few_rows(x, weights, [linear.bias for linear in linears], branches, residual, act, flag)


def few_stored(x: Tensor, linears: Sequence[Linear], branches: Sequence[Branch]) -> list[Stored] | None:
    """The weights of a product of few rows x [rows, in] as its kernel takes them; None where that does not serve."""
    if not 0 < len(x) <= ROWS or not runs_triton(x):
        return None
    weights = []
    for linear in linears:
        if not isinstance(linear.weight, (NF4Store, FP8Store)):
            return None
        block = linear.weight.block if isinstance(linear.weight, NF4Store) else 0
        weights.append(Stored(linear.weight.part(), linear.out_features, linear.in_features, block))
    return weights if serves(x, weights, [linear.bias for linear in linears], branches) else None


def _flags(device: torch.device) -> Iterator[Tensor]:
    """Zeros, int32 [1, 4] each, for launches that wait for a part of themselves: filled for many at once."""
    while True:
        yield from torch.zeros(256, 4, dtype=torch.int32, device=device).split(1)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """What torch.autocast makes of ``x`` in a matrix product; its own dtype where that is off."""
    return torch.get_autocast_dtype(x.device.type) if autocast(x.device) else x.dtype


class _StoredLinear(torch.autograd.Function):
    """x · Wᵀ + b with a frozen, stored W.  Saves nothing: backward dequantises W again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Store, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantize(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        dx = dy @ ctx.weight.dequantize(dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension; ``plus_one`` for Gemma's 1 + w.  See :mod:`lorarun.kernels.rms_norm`."""

    def __init__(self, dim: int, eps: float, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.plus_one)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, plus_one={self.plus_one}"


def add_norm(x: Tensor, delta: Tensor | None, norm: RMSNorm, post: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
    """Add ``delta`` (or ``post(delta)``) to the residual stream and norm the sum: returns (x + delta, norm(x + delta)).

    x, delta [batch, seq, hidden].  With delta None the stream passes unchanged.
    """
    if untouched(norm) and (post is None or untouched(post)):
        return add_rms_norm(x, delta, norm.weight, norm.eps, norm.plus_one, None if post is None else post.weight)
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
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    )  # fmt: skip
    return "forward" in vars(module) or any(hooks)


class Embedding(nn.Module):
    """Rows of a table [vocab, hidden], times ``scale`` where a family has one.

    The scale is first rounded to the table's dtype, as Gemma was trained: √3072 is 55.5 in bf16, not 55.4256.
    """

    def __init__(self, vocab: int, hidden: int, scale: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.weight)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype).item()


class Model(nn.Module):
    """What every family's model is, beside its wiring: a decoder under ``model``, a head, and what it carries along.

    ``tokenizer``, ``source``, ``stored`` (the format of each weight in the checkpoint, by name) and ``asked`` (what was
    asked of loading) come from there (empty for a model built from a configuration), ``adapters`` and
    ``active`` from :mod:`lorarun.lora`, ``compute`` from :mod:`lorarun.compute`.  ``policies`` (a name of
    :mod:`lorarun.recompute` for each block) and ``tile`` (rows that an MLP takes at a time, None: all) say what
    training keeps in memory; no result depends on them, and the first loss on an accelerator sets both where
    :mod:`lorarun.memory` has not planned.
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
        self.policies: list[str] = ["keep"] * config.num_hidden_layers
        self.tile: int | None = None
        self.deterministic = False
        self.tokenizer: Any = None
        self.source: Any = None
        self.stored: dict[str, str] = {}
        self.asked: dict[str, Any] = {}
        self.adapters: dict[str, Any] = {}
        self.active: str | None = None
        self.compute = "bf16"
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
        device: torch.device = self.model.embed_tokens.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the residual stream, which the embedding's table decides."""
        dtype: torch.dtype = self.model.embed_tokens.weight.dtype
        return dtype

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
    return rope(q, k, cos, sin, q_norm.weight, k_norm.weight, q_norm.eps, q_norm.plus_one)
