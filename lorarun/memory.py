"""The plan of a run: what each block keeps for its way back, so that the largest batch fits and nothing is done twice
without need.

The usual way is to try, run out of memory, and recompute everything from then on.  Here memory is predicted before the
first step, by :mod:`lorarun.sketch`, and policies are chosen by the block: as many as fit keep everything, the others
the next that saves memory (``engine``'s order: keep, no_gate_up, selective, recompute, offload).  Blocks at the top of
the stack get the faster policy: they are freed first, and the slower ones' larger working set comes when that is gone.

A prediction is the sum over time of weights, adapters, moments of AdamW, what the pieces of a step hold, and the
workspaces of cuBLAS; ``reserved`` is what torch's allocator makes of it, and what is compared with the budget.  It is
for steps without accumulation, every token supervised, in one dense row.  Given up: captured graphs keep memory of
their own, which is not counted (they are dropped when a step needs it).
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from lorarun.bucket import bucket
from lorarun.compute import use
from lorarun.kernels.backend import shapes_only
from lorarun.load import free_memory
from lorarun.nn import Model
from lorarun.quant.store import stores
from lorarun.recompute import POLICIES  # from fast to slow
from lorarun.sketch import Sketch, step
from lorarun.trace import MIB, Event, Reserved, peak, rounded

GIB = 2**30
TILES = (4096, 2048, 1024)  # rows of an MLP at a time; its products lose no speed at the first
DENSE_TOKENS = 2048  # up to here dequantising is at least a twelfth of a step
HOSTS = ("cpu", "meta")  # where loss does not plan by itself
MARGIN = GIB  # of a device's free memory left to what torch does not allocate: kernels, libraries


class Choice(NamedTuple):
    policies: list[str]
    tile: int | None = None
    keep_dense: bool = False


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` decided and predicts; bytes.  ``asked`` is the policy that was asked for."""

    tokens: int
    asked: str
    policies: tuple[str, ...]
    tile: int | None
    keep_dense: bool
    compute: str
    deterministic: bool
    allocated: int
    reserved: int
    budget: float
    failed: str = ""  # why nothing could be predicted

    def rows(self) -> dict[str, str]:
        """The plan in words."""
        runs = [(policy, len(list(same))) for policy, same in groupby(self.policies)]
        limit = f", budget {self.budget / GIB:.2f} GiB" if math.isfinite(self.budget) else ", no budget"
        tiled = self.tile is not None and any(policy != "keep" for policy, _ in runs)
        copies = "in 16 bits, beside the quantised weights" if self.keep_dense else "none"
        return {
            "tokens of a batch": f"{self.tokens:,}",
            "predicted": f"nothing: {self.failed}"
            if self.failed
            else f"{self.allocated / GIB:.2f} GiB allocated, {self.reserved / GIB:.2f} GiB reserved{limit}",
            "blocks, from the input": ", then ".join(f"{count} {policy}" for policy, count in runs),
            "MLP": f"{self.tile:,} rows at a time" if tiled else "whole",
            "kept copies of weights": copies,
            "frozen products": {"bf16": "in the model's dtype", "fp8": "in FP8"}[self.compute],
            **({"deterministic": "steps repeat bit by bit"} if self.deterministic else {}),
        }

    def __str__(self) -> str:
        rows = self.rows()
        width = max(map(len, rows))
        return "\n".join(["plan", *(f"  {key:<{width}}  {value}" for key, value in rows.items())])


def plan(
    model: Model,
    max_tokens: int,
    policy: str = "auto",
    budget: float | None = None,
    compute: str = "bf16",
    deterministic: bool = False,
) -> Plan:
    """Decide what each block keeps in training on batches of up to ``max_tokens`` tokens, print it and set it.

    policy: "auto" takes the fastest that fits the budget; "keep" (everything), "no_gate_up" (all but the MLP's inner
    products), "selective" (inputs and what attention returns), "recompute" (inputs) and "offload" (inputs, in the
    host's memory) are obeyed for every block.
    budget: bytes for the whole run, weights included; None: what the device has free and what the model holds of it,
    less a margin.  A model on the meta device is planned for the accelerator of this machine, or without a limit.
    compute: "bf16" (frozen products in the dtype of the model) or "fp8".  deterministic: steps repeat bit by bit, with
    our attention in the place of cuDNN's, whose backward adds in any order.

    Policies change no gradient; tiles of an MLP's rows change the order of sums, and with it the last bits.
    Raises ValueError when nothing fits, with the largest ``max_tokens`` that would, and for a model on which nothing is
    trained.
    """
    if policy not in ("auto", *POLICIES):
        raise ValueError(f"plan: policy is {policy!r}; expected auto, {', '.join(POLICIES)}.")
    if compute not in ("bf16", "fp8"):
        raise ValueError(f"plan: compute is {compute!r}; expected bf16 or fp8.")
    whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
    if not whole or max_tokens < 1 or (budget is not None and not budget > 0):
        raise ValueError(
            f"plan: max_tokens={max_tokens!r}, budget={budget!r}; expected a whole number of tokens and, if given, a "
            "positive number of bytes."
        )
    before = model.compute
    use(model, compute)
    try:
        predictor = Predictor(model, deterministic)
        if not predictor.sketch.learns:
            raise ValueError("plan: nothing of this model is trained; call add_lora(model) first.")
        limit = _free(model, predictor) if budget is None else float(budget)
        found = choose(predictor, max_tokens, policy, limit)
        if found is None:
            raise ValueError(_too_large(predictor, max_tokens, policy, limit))
    except BaseException:
        use(model, before)
        raise
    choice, (allocated, reserved) = found
    made = Plan(
        max_tokens, policy, tuple(choice.policies), choice.tile, choice.keep_dense, compute, deterministic,
        allocated, reserved, limit,
    )  # fmt: skip
    model.policies, model.tile = list(choice.policies), choice.tile
    if model.keep_dense != choice.keep_dense:  # setting it drops the copies that there are
        model.keep_dense = choice.keep_dense
    model.deterministic, model.planned = deterministic, made
    if model.device.type not in HOSTS:
        _take_workspaces(model.device)
    print(made, file=sys.stderr)
    return made


def _take_workspaces(device: torch.device) -> None:
    """Let both threads of a step take cuBLAS's workspace now, for good.  At their first product inside a step they
    would cut it out of what a larger tensor has just freed, and the next one of that size would need a new segment:
    1.8 GiB more were reserved for a row of 32,768 tokens."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((16, 16), device=device, requires_grad=True)
        torch.autograd.backward((x @ x).sum())


def follow(model: Model, tokens: int) -> None:
    """Plan a training step of ``tokens`` on an accelerator where there is no plan yet, or one for shorter batches."""
    made = model.planned
    if model.device.type in HOSTS or not torch.is_grad_enabled() or (made and tokens <= made.tokens):
        return
    if not any(p.requires_grad for p in model.parameters()):
        return
    if made is None:
        try:
            plan(model, bucket(tokens), compute=model.compute)
        except (RuntimeError, TypeError) as error:  # somebody's module that cannot run on the meta device
            failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            print(f"plan: memory cannot be predicted, every block keeps everything ({failed})", file=sys.stderr)
            keep = ("keep",) * len(model.policies)
            model.planned = Plan(sys.maxsize, "auto", keep, None, False, model.compute, False, 0, 0, math.inf, failed)
        return
    print(f"plan: a batch of {tokens:,} tokens is longer than the {made.tokens:,} planned; again:", file=sys.stderr)
    plan(model, bucket(tokens), made.asked, made.budget, model.compute, made.deterministic)


# --- prediction ------------------------------------------------------------------------------------------------------


class Predictor:
    """Predicts what steps of a model take; a model on a CPU as it runs there, others as on an accelerator."""

    def __init__(self, model: Model, deterministic: bool = False) -> None:
        self.sketch = Sketch(model)
        self.sketch.model.deterministic = deterministic
        self.accelerated = model.device.type != "cpu"
        self.quantised = model.compute == "bf16" and any(True for _ in stores(model))
        self.device = model.device

    @property
    def blocks(self) -> int:
        return len(self.sketch.kinds)

    def predict(self, tokens: int, choice: Choice) -> tuple[int, int]:
        """The most bytes allocated and reserved in any step but the first."""
        sketch = self.sketch
        if self.accelerated:
            tokens = -(-tokens // 128) * 128  # what cuDNN takes, which needs more than other lengths
        with self._as_there():
            sketch.set(choice.tile, choice.keep_dense)
            ends = sketch.ends(tokens)
            leaves = [policy == "offload" for policy in choice.policies]
            traced = ["recompute" if left else policy for policy, left in zip(choice.policies, leaves, strict=True)]
            blocks = [sketch.block(i, policy, tokens) for i, policy in enumerate(traced)]
        passed, left = step(ends, blocks, leaves if self.accelerated else ())
        kept = [size for block in blocks for size in block.kept]
        always = [*sketch.weights, *self._workspaces(), *kept]
        first: list[Event] = [(("always", i), size) for i, size in enumerate(always)]
        moments = [(("moment", i), size) for i, size in enumerate(moments_of(sketch.trained))]
        events = [*first, *passed, *moments, *left, *passed, *left]
        return peak(events), Reserved().run(events).total

    def _workspaces(self) -> list[int]:
        """cuBLAS keeps one for each handle, and a thread has its own: that of the forward, that of the backward."""
        if not self.accelerated:
            return []
        hopper = True  # stands for what is not here
        if torch.cuda.is_available():
            hopper = torch.cuda.get_device_capability(self.device if self.device.type == "cuda" else None)[0] == 9
        return [32 * MIB if hopper else 8 * MIB + 128 * 1024] * 2

    @contextlib.contextmanager
    def _as_there(self) -> Iterator[None]:
        with torch.enable_grad(), shapes_only() if self.accelerated else contextlib.nullcontext():
            yield


def moments_of(trained: list[torch.Tensor]) -> list[int]:
    """What AdamW holds: both moments and a step count of each parameter, in fp32 as :mod:`lorarun.optim` has them."""
    sizes = []
    for p in trained:
        wide = rounded(p.numel() * max(4, p.element_size()))
        sizes += [rounded(4), wide, wide] + ([wide] if p.element_size() < 4 else [])
    return sizes


# --- choice ----------------------------------------------------------------------------------------------------------

Found = tuple[Choice, tuple[int, int]]


def choose(predictor: Predictor, tokens: int, policy: str, limit: float) -> Found | None:
    """The first choice in the order of speed whose prediction is within ``limit`` bytes, and that prediction."""

    def fits(choice: Choice) -> tuple[int, int] | None:
        predicted = predictor.predict(tokens, choice)
        return predicted if predicted[1] <= limit else None

    count = predictor.blocks
    if policy != "auto":
        candidates = [Choice([policy] * count, tile) for tile in _tiles(tokens, policy)]
        return next(((c, found) for c in candidates if (found := fits(c))), None)
    if predictor.quantised and tokens <= DENSE_TOKENS:
        dense = Choice(["keep"] * count, keep_dense=True)
        if found := fits(dense):
            return dense, found
    for fast, slow in zip(POLICIES, POLICIES[1:], strict=False):
        for tile in _tiles(tokens, "auto")[: {"no_gate_up": 1, "offload": None}.get(slow, 2)]:
            if best := _most(functools.partial(_mixed, count, fast, slow, tile), count, fits):
                return best
    return None


def _tiles(tokens: int, policy: str) -> list[int | None]:
    """Tiles worth trying, from fast to small.  A tiled MLP keeps no products; the last two policies are asked for to
    save memory, and tile in any case."""
    tiles: list[int | None] = [tile for tile in TILES if tile < tokens]
    if policy == "keep" or not tiles:
        return [None]
    return tiles if policy in ("recompute", "offload") else [None, *tiles]


def _mixed(count: int, fast: str, slow: str, tile: int | None, most: int) -> Choice:
    """The last ``most`` of the blocks under the faster policy."""
    return Choice([slow] * (count - most) + [fast] * most, tile)


def _most(make: Callable[[int], Choice], count: int, fits: Callable[[Choice], tuple[int, int] | None]) -> Found | None:
    """The choice with the most blocks of the faster policy that fits, by bisection; None if not even none does."""
    if found := fits(make(count)):
        return make(count), found
    low, high, best = 0, count, fits(make(0))
    while best is not None and high - low > 1:
        middle = (low + high) // 2
        if found := fits(make(middle)):
            low, best = middle, found
        else:
            high = middle
    return None if best is None else (make(low), best)


def _free(model: Model, predictor: Predictor) -> float:
    """What a run may take: what is free where the model is to run, with what the model already holds there."""
    device = model.device
    if device.type == "meta":
        there = torch.accelerator.current_accelerator()
        return math.inf if there is None else free_memory(torch.device(there.type, 0)) - MARGIN
    grads = sum(rounded(p.nbytes) for p in predictor.sketch.trained)  # there all the time when steps accumulate
    held = sum(predictor.sketch.weights) + sum(rounded(p.grad.nbytes) for p in model.parameters() if p.grad is not None)
    held += sum(store.dense[1].nbytes for _, store in stores(model) if store.dense is not None)
    return free_memory(device) + held - grads - (0 if device.type == "cpu" else MARGIN)


def _too_large(predictor: Predictor, tokens: int, policy: str, limit: float) -> str:
    least = POLICIES[-1] if policy == "auto" else policy

    def needs(units: int) -> int:  # of 128 tokens
        choice = Choice([least] * predictor.blocks, _tiles(128 * units, least)[-1])
        return predictor.predict(128 * units, choice)[1]

    low, high = 1, max(2, -(-tokens // 128))
    at_low, at_high = needs(low), needs(high)
    what = f"plan: {tokens:,} tokens need {at_high / GIB:.2f} GiB with policy {least!r}, of {limit / GIB:.2f} GiB. "
    while at_low <= limit and high - low > (apart := max(1, high // 128)):  # the line is nearly straight
        guess = low + int((high - low) * (limit - at_low) / (at_high - at_low))
        guess = min(max(guess, low + apart), high - apart)
        if (found := needs(guess)) <= limit:
            low, at_low = guess, found
        else:
            high, at_high = guess, found
    if at_low > limit:
        return what + "Not even 128 tokens fit: fewer bits, a smaller rank or a smaller model would help."
    return what + f"max_tokens={128 * low} would fit" + ("." if least == POLICIES[-1] else ", or policy='auto'.")
