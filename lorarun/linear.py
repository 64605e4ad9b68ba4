"""A projection, and the adapters that it can carry.

A ``Linear`` here is what ``torch.nn.Linear`` is, plus named low-rank adapters inside it, none by default.  The usual
way wraps every projection in an adapter class and renames its weight; then a model with adapters is another model
than one without, and checkpoints need translation.  Here ``weight`` stays ``weight`` and an adapter is two more
parameters below the same module (with DoRA or biases, three or four), named as PEFT names them
(``lora_A.<adapter>.weight``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorarun.dora import Norms
from lorarun.kernels.backend import autocast, runs_triton
from lorarun.kernels.dropout import Dropout, dropout
from lorarun.kernels.few_rows import ROWS, Stored, few_rows, serves
from lorarun.kernels.lora import Branch, low_rank
from lorarun.kernels.replay import decide
from lorarun.kernels.rescale import rescale
from lorarun.kernels.scaled import ScaledWeight
from lorarun.quant.store import FP8Store, NF4Store, Store
from lorarun.weighted import Weighted, replace_columns

# The projections of a block, those that share an input together, behind the name of the module that holds them.
INPUTS = (
    ("self_attn", "q_proj", "k_proj", "v_proj"),
    ("self_attn", "o_proj"),
    ("mlp", "gate_proj", "up_proj"),
    ("mlp", "down_proj"),
)


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
    """What one adapter of one projection is, besides its matrices.

    ``stream`` numbers the input that dropout is applied to; projections that share an input share it, and so their
    mask.  ``freeze_a``: whether A stays as it began (LoRA-FA).
    """

    scale: float
    dropout: float
    stream: int
    clock: Clock
    freeze_a: bool = False


class Mixed:
    """Adapters that serve the rows of one batch together: ``which`` [batch, seq] int64 has the number in ``names`` of
    each token's, −1 for none."""

    def __init__(self, names: list[str]) -> None:
        self.names = list(names)
        self.which: Tensor | None = None

    def number(self, name: str | None) -> int:
        return -1 if name is None else self.names.index(name)


class Factor(nn.Module):
    """One matrix of an adapter, in a module of its own so that its name ends in ``.weight`` as in PEFT's files.

    ``bias`` is B's, for adapters that have one.  ``start`` is frozen and stands beside the trained matrix, below A's
    rows and behind B's columns: an adapter that began with matrices taken from the weight (PiSSA, OLoRA) subtracts
    there what it began with, so that the weight itself stays what it was.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, start: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.start: Tensor | None
        self.register_buffer("start", start)

    def whole(self, dim: int) -> Tensor:
        """The matrix with its frozen part."""
        return self.weight if self.start is None else torch.cat((self.weight, self.start), dim)


class Running(NamedTuple):
    """What of an adapter runs: its matrices with the dropout of their input, and what is done to the product after.

    With ``magnitude`` [out] (DoRA) each output is multiplied by magnitude / ‖row of W + scale · B · A‖.  ``bias`` [out]
    stands in for the projection's own, ``added`` [out] is B's own and scaled as B is.  Where there is one of these,
    the product with the frozen weight leaves the projection's bias out (``after``).
    """

    branch: Branch
    drop: Dropout | None = None
    bias: Tensor | None = None
    added: Tensor | None = None
    magnitude: Tensor | None = None
    name: str = ""

    @property
    def after(self) -> bool:
        return self.bias is not None or self.added is not None or self.magnitude is not None


PARTS = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_bias")


class Linear(Weighted):
    """y = x · Wᵀ + b, plus the update of the active adapter.

    ``weight`` [out, in], a Parameter or a frozen store (:mod:`lorarun.quant.store`); ``bias`` [out] or None.  The
    products run in the dtype of ``weight``, with a store, which has none, in that of ``x`` (torch.autocast decides
    otherwise where it is on); the result has the dtype of ``x``.  Adapter matrices may be wider (fp32 by default):
    they are cast for the product, and their gradients arrive in their own dtype.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.adapters: dict[str, Adapter] = {}
        self.lora_A: Any  # module dictionaries of factors by the adapter's name, there when an adapter needs them
        self.lora_B: Any
        self.lora_magnitude_vector: Any
        self.lora_bias: Any  # stands in for the bias; PEFT trains the bias itself, which no other adapter survives
        self.norms = Norms()
        self.mixed: Mixed | None = None  # instead of ``active``, where rows of a batch have adapters of their own
        self.scaled: ScaledWeight | None = None  # FP8 copies, shared by all projections of one input

    def forward(self, x: Tensor, row: int = 0) -> Tensor:
        """``row``: where the rows of x start in the input that dropout's mask belongs to, when they are a part of
        it."""
        h = x.to(_autocast_dtype(x) if isinstance(self.weight, Store) else self.weight.dtype)
        copy = self.copy()
        bias: Tensor | None = None if self.running().after else self.bias
        if copy is not None and copy.bias is not None:
            bias = copy.bias.to(h.dtype)
        few = None
        if copy is None and isinstance(self.weight, Store):
            few = few_projected(h.reshape(-1, h.shape[-1]), (self,), [Branch(self.out_features)])
        y = self.adapt(self._product(h, bias) if few is None else few.view(*x.shape[:-1], -1), h, row)
        if (rows := self.rows()) is not None:
            y = replace_columns(y, h, rows)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def _product(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
        if not isinstance(self.weight, Store):
            return F.linear(h, self.effective(), bias)
        return _StoredLinear.apply(h, self.weight, None if bias is None else bias.to(h.dtype))

    def adapt(self, y: Tensor, x: Tensor, row: int = 0) -> Tensor:
        """y, the product of x with the weight, plus the active adapter; :class:`Running` says if y has the bias."""
        if self.mixed is not None and self.mixed.which is not None:
            return self._adapt_rows(y, x, self.mixed.names, self.mixed.which)
        running = self.running()
        branch, drop = running.branch, running.drop
        if branch.a is None or branch.b is None:
            return self.finish(y)
        if drop is None:
            return self.finish(y + low_rank(x, branch.a, branch.b, branch.scale))
        dropped = dropout(x, *drop._replace(row=row))
        update = low_rank(dropped, branch.a, branch.b, branch.scale)
        if running.magnitude is None:
            return self.finish(y + update)
        # As in PEFT, the weight that DoRA scales sees the dropped input, and what it scales it from the whole one.
        base = self._product(dropped)
        return y - base + self.finish(base + update)

    def _adapt_rows(self, y: Tensor, x: Tensor, names: list[str], which: Tensor) -> Tensor:
        """y, the product with the weight and the bias, plus each token's own adapter: ``which`` of ``names``."""
        for i, name in enumerate(names):
            if name not in self.adapters:
                continue
            own, running = (which == i).unsqueeze(-1), self._of(name)
            a, b = running.branch.a, running.branch.b
            if not running.after and a is not None and b is not None:
                y = y + low_rank(torch.where(own, x, 0.0), a, b, running.branch.scale)
                continue
            z = y if self.bias is None else y - self.bias.to(y.dtype)
            if a is not None and b is not None:
                z = z + low_rank(x, a, b, running.branch.scale)
            y = torch.where(own, self.finish(z, running), y)
        return y

    def finish(self, y: Tensor, running: Running | None = None) -> Tensor:
        """y, the product with the weight and the adapter's matrices, as the adapter scales and shifts it: the one that
        runs, or another."""
        running = running or self.running()
        bias = self.shift(running)
        if running.magnitude is not None:
            return rescale(y, running.magnitude / self._norms(running, y.dtype), bias)
        return y if bias is None else y + bias.to(y.dtype)

    def shift(self, running: Running) -> Tensor | None:
        """What is added [out] once the product is scaled; None: nothing is, or the product has the bias already."""
        if not running.after:
            return None
        bias = self.bias if running.bias is None else running.bias
        if running.added is None:
            return bias
        added = running.branch.scale * running.added
        return added if bias is None else bias + added

    def _norms(self, running: Running, dtype: torch.dtype) -> Tensor:
        """‖row of W + scale · B · A‖ [out], once in a pass through the model."""
        _, a, b, scale = running.branch
        assert a is not None and b is not None
        return decide((self, running.name), lambda: self.norms(self.weight, dtype, a, b, scale))

    def running(self) -> Running:
        """The adapter that runs (none when it is merged), and its dropout where that is on.

        Now, or inside a model at the time when this pass through it began.
        """
        return decide(self, self._adapter)

    def _adapter(self) -> Running:
        mixed = self.mixed is not None and self.mixed.which is not None
        name = self.active if self.merged is None and not mixed else None
        return Running(Branch(self.out_features)) if name is None else self._of(name)

    def _of(self, name: str) -> Running:
        """An adapter, as it would run now."""
        adapter = self.adapters[name]
        bias, magnitude = (self._part(kind, name) for kind in ("lora_bias", "lora_magnitude_vector"))
        after = None if bias is None else bias.weight, None, None if magnitude is None else magnitude.weight
        if self._part("lora_A", name) is None:
            return Running(Branch(self.out_features), None, *after, name)
        drop = Dropout(adapter.dropout, adapter.clock.value(), adapter.stream)
        branch = Branch(self.out_features, *self.matrices(name), adapter.scale)
        running = Running(branch, drop if self.training and adapter.dropout > 0.0 else None, *after, name)
        return running._replace(added=self.lora_B[name].bias)

    def _part(self, kind: str, name: str) -> Any:
        """One of an adapter's factors, None where it has none of that kind."""
        held = self._modules.get(kind)
        return held[name] if isinstance(held, nn.ModuleDict) and name in held else None

    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """A [rank, in] and B [out, rank] of an adapter."""
        return self.lora_A[name].weight, self.lora_B[name].weight

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B of an adapter as they are multiplied: with what it began with, if it subtracts that."""
        return self.lora_A[name].whole(0), self.lora_B[name].whole(1)

    def parts(self, name: str) -> dict[str, Tensor]:
        """What an adapter is, by the arguments of :meth:`attach`, A and B as they are multiplied."""
        a, b, magnitude, bias = (self._part(kind, name) for kind in PARTS)
        found = {"magnitude": magnitude and magnitude.weight, "bias": bias and bias.weight}
        if a is not None:
            found |= zip(("a", "b", "b_bias"), (*self.matrices(name), b.bias), strict=True)
        return {part: tensor for part, tensor in found.items() if tensor is not None}

    def attach(
        self,
        name: str,
        adapter: Adapter,
        a: Tensor | None = None,
        b: Tensor | None = None,
        *,
        b_bias: Tensor | None = None,
        magnitude: Tensor | None = None,
        bias: Tensor | None = None,
        start: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Add an adapter with A [rank, in] and B [out, rank] as trainable parameters; it is not made active.

        The others, [out], are described at :class:`Running`, ``start`` at :class:`Factor`.  One without A and B has a
        ``bias`` alone.
        """
        self.adapters[name] = adapter
        a_start, b_start = (None, None) if start is None else start
        factors = (
            None if a is None else Factor(a, start=a_start),
            None if b is None else Factor(b, b_bias, b_start),
            None if magnitude is None else Factor(magnitude),
            None if bias is None else Factor(bias),
        )
        for kind, factor in zip(PARTS, factors, strict=True):
            if factor is not None:
                if kind not in self._modules:
                    self.add_module(kind, nn.ModuleDict())
                self._modules[kind][name] = factor  # type: ignore[index, operator]

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
    return None if weights is None else few_rows(x, weights, biases_beside(linears), branches, residual, act)


def biases_beside(linears: Sequence[Linear]) -> list[Tensor | None]:
    """The biases that go with frozen products; those that an adapter replaces or scales around are left out."""
    return [None if linear.running().after else linear.bias for linear in linears]


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
    return weights if serves(x, weights, biases_beside(linears), branches) else None


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
