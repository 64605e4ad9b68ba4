"""The captured step: forward and backward of a small batch as one CUDA graph, behind ``lorarun.loss``.

A step of few tokens is a few thousand short kernels, and a GPU that waits for Python to launch each of them idles for
most of the step.  A graph launches them all at once.  The usual way asks for it: a wrapped model, static tensors, a
training loop built around them, and gradients that must not be touched at the wrong moment.  Here ``loss`` is the
boundary and the loop stays the open one.  What is replayed is the loss *and* its gradients for an upstream gradient of
1, written into one flat buffer.  The autograd Function that stands for it keeps a fresh clone of that buffer, and its
backward returns views of clone · upstream: accumulation, ``3 * loss``, hooks on parameters and ``autograd.grad`` see
what they would see without a graph, since no gradient that autograd holds is ever written again.

A graph serves one shape, so batches are padded to a few (:mod:`lorarun.bucket`).  Which tokens are supervised, the
documents, the denominator and the value that dropout masks depend on are data in a static buffer: nothing waits.

What may not be replayed is not captured: everything that Python would have done in the step (hooks, replaced modules,
modes, autocast) is looked for at every call, and so is every pointer that a graph holds.  Such a step runs as always,
and the report names the reason.  Given up: gradients of float16 models (their loss is scaled before backward, which
would come too late here), and steps that are large enough to keep the GPU busy anyway, where padding would cost more
than launching.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lorarun.bucket import Given, Inputs, Shape, pack, shape_of, unpack
from lorarun.capture import capturable, modes, record
from lorarun.linear import PARTS, Linear
from lorarun.nn import Model, touched
from lorarun.rotary import dynamic_limit
from lorarun.trained import beyond

GRAPHS = 8  # held at a time; they share one pool, which takes what the largest needs
SIGHTINGS = 2  # a step is captured when its key comes up for this time: the first compiles kernels and fills caches
IDLE = 64  # replays after which a graph that served none of them may make room for another
# Tokens × weights of a block above which a step keeps the GPU busy.  A block is launched in 1 to 2 ms, forward and
# backward, and computes for 4 · tokens · weights / (650e12 / s); at 2,048 tokens of an 8B model (218e6 weights a block)
# that is 2.7 ms, and launching hides behind it.
WORK = 4.5e11

Compute = Callable[[Model, Inputs], Tensor]
Slot = tuple[dict[str, Any], str]  # what holds a trained parameter, and under which name


# --- what a step depends on ------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """A model as a graph would hold it.  structure: its modules and every pointer; state: what is switched on."""

    obstacle: str | None
    structure: tuple[Any, ...]
    state: tuple[Any, ...]
    slots: list[Slot]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [held[name] for held, name in self.slots]


def look(model: Model) -> Look:
    """Walk over a model: some microseconds a projection, since it is done at every step.

    Below a projection only its weight and its adapters' matrices are looked at, which never call anything.
    """
    if (beside := beyond(model)) is not None:
        return Look(beside, (), (), [])
    structure: list[Any] = []
    state: list[Any] = []
    learning: list[Slot] = []
    obstacle, live = None, False
    stack: list[nn.Module] = [model]
    while stack:
        module = stack.pop()
        kind = type(module)
        own: dict[str, Any] = module.__dict__
        if touched(module):
            obstacle = f"a {kind.__name__} has hooks or another forward"
        elif kind.__module__[:7] not in ("lorarun", "torch.n"):
            obstacle = f"a {kind.__name__} is none of lorarun's modules"
        structure.append(kind)
        for parameter in own["_parameters"].values():
            if parameter is not None:
                structure += parameter.data_ptr(), parameter._version
                obstacle = "a base weight is trained" if parameter.requires_grad else obstacle
        if kind is not Linear:
            stack.extend(child for child in own["_modules"].values() if child is not None)
            continue
        if own["trained"] is not None:
            obstacle = "a base weight is trained"
        if own["scaled"] is not None:
            structure += (part.data_ptr() for way in own["scaled"] for part in way)
        if own["_modules"]:
            live |= _look_below(own, structure, state, learning)
    if obstacle is None and not (learning and live):
        obstacle = "no adapter is trained"
    if obstacle is None and len({held[name].dtype for held, name in learning}) > 1:
        obstacle = "adapter matrices of several dtypes"
    return Look(obstacle, tuple(structure), tuple(state), learning)


def _look_below(own: dict[str, Any], structure: list[Any], state: list[Any], learning: list[Slot]) -> bool:
    """Add a projection's store and adapters; whether one of these runs."""
    children = own["_modules"]
    if (store := children.get("weight")) is not None:
        codes = store.__dict__["_parameters"]["codes"]
        structure += codes.data_ptr(), codes._version, type(store)  # of an edited one there may be a stale copy
        if store.dense is not None:
            structure.append(store.dense[1].data_ptr())
    if not own["adapters"]:
        return False
    for kind in PARTS:
        if kind not in children:
            continue
        for factor in children[kind].__dict__["_modules"].values():
            inner = factor.__dict__
            for buffer in inner["_buffers"].values():
                if buffer is not None:
                    structure.append(buffer.data_ptr())
            held = inner["_parameters"]
            for name, parameter in held.items():
                if parameter is not None:
                    structure.append(parameter.data_ptr())
                    if parameter.requires_grad:
                        learning.append((held, name))
                        state.append(len(structure))
    adapter, on = own["adapters"].get(own["active"]), own["merged"] is None
    state.append((own["active"], own["training"], on))
    state.append(None if adapter is None else (adapter.scale, adapter.dropout, adapter.stream))
    return on and adapter is not None


# --- one captured step -----------------------------------------------------------------------------------------------


class Step:
    """One graph with its static inputs (``flat``) and outputs (``loss``, ``grads``), all outside the graphs' pool."""

    def __init__(self, model: Model, shape: Shape, parameters: list[nn.Parameter], compute: Compute) -> None:
        self.model = weakref.ref(model)  # which holds the step, and shall go when its owner lets go of it
        self.shape, self.compute, self.clock = shape, compute, model.clock
        self.dtype = parameters[0].dtype
        self.sizes = [parameter.numel() for parameter in parameters]
        self.shapes = [parameter.shape for parameter in parameters]
        self.used = [True] * len(parameters)  # whether the loss depends on a parameter
        device, wide = model.device, torch.promote_types(self.dtype, torch.float32)
        self.grads = torch.zeros(sum(self.sizes), dtype=wide, device=device)
        self.loss = torch.zeros((), dtype=torch.promote_types(model.dtype, torch.float32), device=device)
        self.flat: Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self.last = 0  # when it was replayed, in replays of all graphs

    def fill(self, given: Given) -> None:
        """Put a batch into the static inputs: one copy."""
        packed = pack(given, self.shape, int(self.clock.value()))
        if self.flat is None:
            self.flat = torch.empty(packed.shape, dtype=packed.dtype, device=self.grads.device)
        self.flat.copy_(packed.pin_memory() if self.flat.is_cuda else packed, non_blocking=True)
        if isinstance(given.denominator, Tensor):
            denominator = unpack(self.flat, self.shape)[0].denominator
            assert isinstance(denominator, Tensor)
            denominator.copy_(given.denominator, non_blocking=True)

    def run(self) -> None:
        """What is captured: the loss of the static inputs and its gradients, into the static outputs."""
        model = self.model()
        assert model is not None and self.flat is not None
        inputs, clock = unpack(self.flat, self.shape)
        slots = look(model).slots
        masters = [held[name] for held, name in slots]
        # The same memory without the hooks of the parameters, which belong to the loss that is replayed.
        bare = [nn.Parameter(master.detach()) for master in masters]
        self.clock.now = clock
        try:
            for (held, name), parameter in zip(slots, bare, strict=True):
                held[name] = parameter
            with torch.enable_grad():
                loss = self.compute(model, inputs)
                grads = torch.autograd.grad(loss, bare, allow_unused=True)
        finally:
            self.clock.now = None
            for (held, name), master in zip(slots, masters, strict=True):
                held[name] = master
        self.loss.copy_(loss.detach())
        self.used = [grad is not None for grad in grads]
        views = [view for view, used in zip(self.views(self.grads), self.used, strict=True) if used]
        torch._foreach_copy_(views, [grad for grad in grads if grad is not None])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradient of each parameter in a flat buffer."""
        parts = flat.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class _Replayed(torch.autograd.Function):
    """Keeps a clone of the gradients that the replay wrote; backward scales it."""

    @staticmethod
    def forward(ctx: Any, step: Step, *parameters: Tensor) -> Tensor:
        assert step.replay is not None
        step.replay()
        ctx.step = step
        ctx.save_for_backward(step.grads.clone())
        return step.loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grads,) = ctx.saved_tensors
        views = ctx.step.views((grads * upstream).to(ctx.step.dtype))
        return None, *[view if used else None for view, used in zip(views, ctx.step.used, strict=True)]


# --- all of a model's ------------------------------------------------------------------------------------------------

Capture = Callable[[Callable[[], None]], Callable[[], None]]  # takes what is to be run, returns its replay


class Steps:
    """The captured steps of a model, and why the others run eagerly.  Copies of a model start without any.

    capture: instead of a CUDA graph, for tests: takes a callable and returns what replays it.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self.capture = capture
        self.held: OrderedDict[Any, Step] = OrderedDict()  # the least recently used first
        self.seen: dict[Any, int] = {}  # how often a key came up
        self.structure: tuple[Any, ...] = ()
        self.replays = self.eager = 0
        self.reason: str | None = None  # of the last eager step
        self.stopped: str | None = None  # why nothing more is captured for this structure
        self.pool: Any = None
        self.stream: Any = None  # on which graphs are captured
        self.order: Any = None  # the stream of the last replay

    def __reduce__(self) -> Any:
        return Steps, ()

    def loss(self, model: Model, given: Given, compute: Compute) -> Tensor | None:
        """The loss of a batch from a replay, or None where the step has to run eagerly."""
        if not torch.is_grad_enabled():
            return None  # evaluation
        shape, step = shape_of(given), None
        parameters: list[nn.Parameter] = []
        own = None if self.capture else capturable(model)
        self.reason = modes(model.device) or own or unfit(model, given, shape)
        if self.reason is None:
            found = look(model)
            self.reason, parameters = found.obstacle, found.parameters
            if self.reason is None:
                step = self._find(model, given, compute, shape, found)
        if step is None:
            self.eager += 1
            return None
        self.replays += 1
        step.last = self.replays
        if self.capture is None:  # graphs share their memory, so they run one after the other
            here = torch.cuda.current_stream()
            if self.order is not None and self.order != here:
                here.wait_stream(self.order)
            self.order = here
        step.fill(given)
        return _Replayed.apply(step, *parameters)

    def _find(self, model: Model, given: Given, compute: Compute, shape: Shape, found: Look) -> Step | None:
        """The captured step for a batch, captured now where it is time to; else None, and ``reason`` says why."""
        if found.structure != self.structure:
            self.drop()
            self.structure, self.stopped, self.seen = found.structure, None, {}
        key = shape, model.dtype, found.state, model.compute
        if key in self.held:
            self.held.move_to_end(key)
            return self.held[key]
        if self.stopped is not None:
            self.reason = self.stopped
            return None
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] < SIGHTINGS:
            self.reason = f"the first step of {shape}"
            return None
        if len(self.held) == GRAPHS:
            oldest = next(iter(self.held))
            if self.replays - self.held[oldest].last < IDLE:
                self.reason = f"{GRAPHS} graphs are in use"
                return None
            self._synchronize()
            del self.held[oldest]
        try:
            step = Step(model, shape, found.parameters, compute)
            step.fill(given)
            step.replay = (self.capture or self._graph)(step.run)
            self.held[key] = step
            return step
        except RuntimeError as error:
            memory = isinstance(error, torch.OutOfMemoryError)
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.reason = self.stopped = "out of memory while capturing" if memory else f"the capture failed: {said}"
        self.drop()  # and training goes on without graphs
        return None

    def _graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warm up twice on a side stream, where kernels compile and cuDNN plans, then capture."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        try:
            with torch.cuda.stream(self.stream):
                run()
                run()
                torch.cuda.synchronize()
                gc.collect()
                torch.cuda.empty_cache()  # what the warm-up held is needed again, inside the pool
                return record(run, self.pool)
        finally:
            here.wait_stream(self.stream)

    def _synchronize(self) -> None:
        if self.capture is None and self.held:
            torch.cuda.synchronize()  # a graph that still runs must not be taken down

    def drop(self) -> bool:
        """Give up all graphs and their memory; whether there were any."""
        there, pool = bool(self.held), self.pool
        self._synchronize()
        self.held.clear()
        self.pool = self.order = None
        if pool is not None:
            gc.collect()
            torch.cuda.empty_cache()
        return there

    def __str__(self) -> str:
        shapes = "; ".join(str(step.shape) for step in self.held.values())
        graphs = f"graphs of {shapes}" if self.held else "no graph"
        total = self.replays + self.eager
        last = "" if self.reason is None else f"; the last step was eager: {self.reason}"
        return f"{graphs}; {self.replays} of {total} steps replayed{last}"


def unfit(model: Model, given: Given, shape: Shape) -> str | None:
    """Why a batch of this shape is better run eagerly, or cannot run otherwise; None where a graph serves it."""
    policies = sorted(set(model.policies) - {"keep"})
    if policies:
        return f"the plan says {', '.join(policies)}"
    if any(t is not None and t.device.type != "cpu" for t in (given.ids, given.positions, given.documents, given.goal)):
        return "the batch is on the device already"
    if model.deterministic or torch.are_deterministic_algorithms_enabled():
        return "deterministic: a graph's padded rows would change the order of sums"
    if model.dtype == torch.float16:
        return "the loss of a float16 model is scaled before backward"
    if dynamic_limit(model.rotary) is not None:
        return "dynamic rotary scaling looks at the positions"
    tokens, c = shape.batch * shape.seq, model.config
    rows = 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim + 3 * c.intermediate_size
    if tokens * c.hidden_size * rows > WORK:
        return f"{tokens:,} tokens keep the GPU busy"
    return None
