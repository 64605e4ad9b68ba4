"""What a training step allocates, found out without a device: the real code on meta tensors.

A formula for memory is a second description of the code and goes stale with it.  Here the code itself runs, on tensors
that have shapes and no data, while :mod:`lorarun.trace` follows its storages.

Blocks of one structure under one policy allocate alike, so one of each is traced, alone between two cuts of a model
that consists of nothing else; what stands before and behind the blocks (embedding, norm, head, loss) is traced once
with one cut in their place.  :func:`step` lays these pieces end to end: forward from the first block to the last,
backward from the last to the first.  A tensor that crosses an edge (``in``: a block's input, ``out``: its output,
``dout`` and ``din``: their gradients) is one storage for both neighbours, and lives until the later of them lets go.

Given up: what other code allocates, and the first step, which has no moments of the optimizer yet and needs less.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorarun.head import head_losses
from lorarun.nn import Model
from lorarun.quant.store import Store, stores
from lorarun.trace import Event, Tracer, rounded

# --- pieces of a step ------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The events of a stretch of the model on the way forward and on the way back; crossing storages go by name.

    Of the ends, ``forward`` is what stands before the blocks, ``loss`` what lies between the last block's forward and
    its backward, ``backward`` the rest.  kept: bytes that stay from the first step on.
    """

    forward: list[Event]
    backward: list[Event]
    loss: list[Event] = []
    kept: list[int] = []


class _Cut(torch.autograd.Function):
    """Passes nothing on but the shape: behind it, forward and backward, stands a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor, trace: _Trace, name: str) -> Tensor:
        ctx.trace, ctx.name = trace, name
        return trace.cut(name, x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        into = ctx.trace.cut("d" + ctx.name, dx)
        return None, into if ctx.needs_input_grad[1] else None, None, None


class _Slot(nn.Module):
    """Stands for blocks: a cut, or with ``fixed`` an input that wants no gradient.  Its attributes are a block's."""

    def __init__(self, trace: _Trace, name: str, block: nn.Module, fixed: bool = False) -> None:
        super().__init__()
        self.__dict__.update(trace=trace, name=name, block=block, fixed=fixed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        self.trace.held += rest  # a block keeps its rotary tables and spans for the way back
        if self.fixed:
            return self.trace.cut(self.name, x)
        leaf = torch.empty((), device=x.device, requires_grad=True)
        return _Cut.apply(leaf, x, self.trace, self.name)


class _Trace(Tracer):
    """A tracer with cuts: where each was passed, the storage that arrived there and the one that left."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts: dict[str, tuple[int, int, int]] = {}
        self.held: list[Any] = []

    def cut(self, name: str, x: Tensor) -> Tensor:
        at, arrived = len(self.events), self.number(x)
        fresh = torch.empty_like(x)
        self.cuts[name] = at, arrived, self.number(fresh)
        return fresh

    def region(self, spans: Sequence[tuple[int, int]], named: dict[int, str], closed: bool) -> list[list[Event]]:
        """The events of each span.  What was made inside one and dies between two, or behind the last, dies at the end
        of the one before; so does what came in.  ``closed``: an output that dies between two was let go by the
        neighbour."""
        found: list[list[Event]] = [[] for _ in spans]
        own = set()
        for at, (number, size) in enumerate(self.events):
            behind = [i for i, (low, _) in enumerate(spans) if low <= at]
            if not behind:
                continue
            i = behind[-1]
            inside, name = at < spans[i][1], named.get(number, number)
            if size > 0:
                if not inside or name in ("in", "dout"):
                    continue
                own.add(number)
            elif name in ("out", "din"):
                if number not in own or name == "din" or (closed and not inside):
                    continue
            elif number not in own and name not in ("in", "dout"):
                continue
            found[i].append((name, size))
        return found


class Sketch:
    """A model in shapes: its ends, one block of each structure, and what lies in memory all the time.

    ``kinds`` numbers the structure of each block, ``graded`` says whether its input wants a gradient.
    """

    def __init__(self, model: Model) -> None:
        layers = list(model.model.layers)
        memo: dict[int, Any] = {id(model.model.layers): nn.ModuleList()}
        for name in ("tokenizer", "source", "graphs", "planned"):
            memo[id(getattr(model, name, None))] = None
        self.model = _on_meta(model, memo)
        self.kinds: list[int] = []
        self.graded: list[bool] = []
        self.blocks: list[nn.Module] = []
        known: dict[Any, int] = {}
        graded = any(p.requires_grad for p in model.model.embed_tokens.parameters())
        for block in layers:
            key = _structure(block)
            if key not in known:
                known[key] = len(self.blocks)
                self.blocks.append(_on_meta(block, {}))
            self.kinds.append(known[key])
            self.graded.append(graded)
            graded = graded or any(p.requires_grad for p in block.parameters())
        self.learns = graded or any(p.requires_grad for p in model.parameters())
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), *_carried(model))}.values()
        self.weights = [rounded(t.nbytes) for t in tensors]
        self.trained: list[Tensor] = [p for p in tensors if p.requires_grad]
        self.dense = model.keep_dense
        self._pieces: dict[Any, Piece] = {}

    def ends(self, tokens: int) -> Piece:
        """What stands before and behind the blocks, for one row of ``tokens`` that are all supervised."""
        if (tokens, None) not in self._pieces:
            trace = self._run([("cut", None, False)], ["keep"], tokens, loss=True)
            at, arrived, left = trace.cuts["cut"]
            back, darrived, dleft = trace.cuts.get("dcut", (len(trace.events), 0, 0))
            named = {arrived: "out", left: "in", darrived: "din", dleft: "dout"}
            spans = [(0, at), (at, back), (back, len(trace.events))]
            before, middle, after = trace.region(spans, named, closed=False)
            self._pieces[tokens, None] = Piece(before, after, middle)
        return self._pieces[tokens, None]

    def block(self, i: int, policy: str, tokens: int) -> Piece:
        """Block i under a policy."""
        key = tokens, self.kinds[i], self.graded[i], policy, self.model.tile, self.dense
        if key not in self._pieces:
            block = _on_meta(self.blocks[self.kinds[i]], {})  # one that has not run yet, and keeps nothing
            layers = [("in", None, not self.graded[i]), ("block", block, False), ("out", None, False)]
            policies = ["keep", policy, "keep"]
            kept = self._run(layers, policies, 128).alive()  # the first run makes what is kept for good
            trace = self._run(layers, policies, tokens)
            end = len(trace.events)
            (start, _, entered), (at, arrived, _) = trace.cuts["in"], trace.cuts["out"]
            back, _, dleft = trace.cuts.get("dout", (end, 0, 0))
            out, darrived, _ = trace.cuts.get("din", (end, 0, 0))
            named = {entered: "in", arrived: "out", dleft: "dout", darrived: "din"}
            forward, backward = trace.region([(start, at), (back, out)], named, closed=True)
            self._pieces[key] = Piece(forward, backward, kept=kept)
        return self._pieces[key]

    def set(self, tile: int | None, dense: bool) -> None:
        """How blocks are traced from now on: rows of an MLP's tile, and whether copies of stored weights are kept."""
        self.model.tile = tile
        if dense != self.dense:
            self.dense = dense
            for block in self.blocks:
                for _, store in stores(block):
                    store.kept, store.dense = dense, None

    def _run(self, layers: Sequence[Any], policies: list[str], tokens: int, loss: bool = False) -> _Trace:
        """Forward and backward of a model with such layers; gradients are dropped, the events end before that."""
        trace, model = _Trace(), self.model
        model.model.layers = nn.ModuleList(
            _Slot(trace, name, self.blocks[0], fixed) if block is None else block for name, block, fixed in layers
        )
        model.policies = policies
        model.train()
        with trace:
            _forward_backward(model, tokens, loss)
            trace.held.clear()
        trace.events = list(trace.events)  # before gradients are dropped
        model.zero_grad()
        return trace


def _forward_backward(model: Model, tokens: int, loss: bool) -> None:
    out = _loss(model, tokens) if loss else _inner(model, tokens).sum()
    if out.requires_grad:
        out.backward()


def _inner(model: Model, tokens: int) -> Tensor:
    return model.hidden_states(torch.empty((1, tokens), dtype=torch.int64, device="meta"))


def _loss(model: Model, tokens: int) -> Tensor:
    """As :func:`lorarun.loss` computes it, with the same tensors alive."""
    goal, rows = (torch.empty(tokens, dtype=torch.int64, device="meta") for _ in range(2))
    picked = _inner(model, tokens).flatten(0, 1).index_select(0, rows)
    return head_losses(model, picked, goal).sum() / tokens


def _on_meta(module: Any, memo: dict[int, Any]) -> Any:
    """A copy without memory.  Hooks are kept in number, since they decide what runs, but do nothing."""
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    for tensor in _carried(module):
        memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    made = copy.deepcopy(module, memo)
    for child in made.modules():
        for hooks in (child._forward_hooks, child._forward_pre_hooks, child._backward_hooks, child._backward_pre_hooks):
            for key in hooks:
                hooks[key] = lambda *args, **kwargs: None
    return made


def _carried(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold beside parameters: weights before a merge, copies in another format.  What a store
    keeps is left out, since a copy of it makes its own."""
    for child in module.modules():
        values = [] if isinstance(child, Store) else list(vars(child).values())
        while values:
            value = values.pop()
            if isinstance(value, tuple):
                values += value
            elif isinstance(value, Tensor):
                yield value


def _structure(block: nn.Module) -> tuple[Any, ...]:
    """Everything that decides what a block allocates; two blocks with the same are alike."""
    facts: list[Any] = []
    for path, module in block.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str)) and k != "layer"}
        patched = "forward" in vars(module)
        hooks = patched, len(module._forward_hooks) + len(module._forward_pre_hooks), len(module._backward_hooks)
        adapters = [(n, a.dropout > 0) for n, a in getattr(module, "adapters", {}).items()]
        facts += [path, type(module), *sorted(plain.items()), hooks, *adapters, getattr(module, "merged", None) is None]
        for name, p in module._parameters.items():
            facts += [name, None if p is None else (tuple(p.shape), p.dtype, p.requires_grad)]
    return tuple(facts)


# --- laying pieces end to end ----------------------------------------------------------------------------------------


def step(ends: Piece, blocks: Sequence[Piece], offloaded: Sequence[bool] = ()) -> tuple[list[Event], list[Event]]:
    """The events of one forward and backward pass, and those of freeing what it leaves: the gradients.

    The piece of an offloaded block is that of a recomputed one: what is different happens between blocks.  Its input
    leaves when that of the next offloaded block does, and is fetched when that one's is used.
    """
    count = len(blocks)
    events: list[Event] = []
    leaves = [i for i in range(count - 1) if offloaded and offloaded[i] and offloaded[i + 1]]

    def add(part: list[Event], own: Any, before: int, behind: int, back: bool = False) -> None:
        edges = {"in": ("x", before), "out": ("x", behind), "din": ("dx", before), "dout": ("dx", behind)}
        if back and before in leaves:
            edges["in"] = ("fetched", before)
        events.extend((edges.get(name) or (own, name), size) for name, size in part)

    add(ends.forward, "ends", count, 0)
    for i, block in enumerate(blocks):
        if i - 1 in leaves:
            events.append((("x", i - 1), -1))
        add(block.forward, i, i, i + 1)
    add(ends.loss, "ends", count, 0)
    width = next((size for name, size in events if name == ("x", 0)), 0)
    for i in reversed(range(count)):
        if i - 1 in leaves:
            events.append((("fetched", i - 1), width))
        add(blocks[i].backward, i, i, i + 1, back=True)
    add(ends.backward, "ends", count, 0)
    return _settled(events)


def _settled(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Of several frees of a storage the last one, and frees of what had none."""
    sizes = {name: size for name, size in events if size > 0}
    freed: set[Any] = set()
    found: list[Event] = []
    for name, size in reversed(events):
        if size < 0:
            if name in freed or name not in sizes:
                continue
            freed.add(name)
            size = -sizes[name]
        found.append((name, size))
    found.reverse()
    return found, [(name, -size) for name, size in sizes.items() if name not in freed]
