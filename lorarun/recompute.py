"""How much of a block is kept for the backward pass, and where.

Every block of a model runs under a policy of its own.  A policy changes memory and time, never a result: gradients
have the same bits under each, dropout included (as far as attention's backward repeats its own: cuDNN's does not).
Tiles of an MLP's rows change the shapes of its products and the order of sums, and with them the last bits.

    keep         everything that backward reads
    no_gate_up   all but the MLP's gate and up, half of the whole: backward multiplies for them again
    selective    the block's input and what attention and its output projection made; the rest is computed again
    recompute    the block's input
    offload      nothing: as recompute, with the block's input in the host's memory

The last three are torch's own (non-reentrant) checkpointing around the block, which holds under ``autograd.grad``, a
retained graph and two losses before one backward.  What it lacks is a way to say, inside an operation, that a result
is kept: :mod:`lorarun.kernels.replay`.  A recomputed MLP that closes its block does nothing at all, since its output
is what nobody asks for a second time; and its products wait for its own backward (as in ``no_gate_up``), which can
take them a tile of rows at a time.

A block that somebody hooked, patched or wrapped is recomputed whole, since there every output may be looked at.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from lorarun.cache import Cache
from lorarun.kernels.replay import Frame, Running
from lorarun.nn import Model, touched

# What is kept beside the block's input; "mlp" is what an MLP that closes its block needs for its own backward, a few
# columns, "down_proj" the output of one that does not.
KEPT = {
    "selective": frozenset(("attention", "o_proj", "down_proj", "mlp")),
    "recompute": frozenset(("mlp",)),
    "offload": frozenset(("mlp",)),
}
POLICIES = ("keep", "no_gate_up", *KEPT)


def with_policies(model: Model) -> list[tuple[str, Any]]:
    """The blocks of a model, each behind its policy; ValueError where there is not one for each."""
    policies, blocks = model.policies, model.model.layers
    if len(policies) != len(blocks):
        raise ValueError(
            f"model.policies has {len(policies)} policies for {len(blocks)} blocks; expected one for each, or let "
            "lorarun.plan(model, max_tokens, policy=...) set them."
        )
    return list(zip(policies, blocks, strict=True))


def run_block(
    policy: str, block: nn.Module, x: Tensor, *rest: Any, tile: int | None = None, deterministic: bool = False
) -> Tensor:
    """block(x, *rest) under ``policy``, its MLP ``tile`` rows at a time (None: all at once).

    deterministic: the same bits for the same inputs, which cuDNN's attention does not promise on the way back.

    Without gradients, and where a cache is filled, nothing is kept for backward and the policy does not matter.
    """
    if policy not in POLICIES:
        raise ValueError(f"The policy of a block is one of {', '.join(POLICIES)}; got {policy!r}.")
    if not torch.is_grad_enabled() or any(isinstance(item, Cache) for item in rest):
        policy = "keep"
    whole = policy not in KEPT
    if torch.compiler.is_compiling():  # torch takes no contexts of ours there
        again = functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
        return block(x, *rest) if whole else again(x, *rest)
    names = () if whole or not _bare(block) else KEPT[policy]
    frame = Frame(names, save_products=policy == "keep", tile=tile, deterministic=deterministic)
    if whole:
        with Running(frame):
            return block(x, *rest)
    contexts = Running(frame), Running(frame, replay=True)
    with torch.autograd.graph.saved_tensors_hooks(_leave, _fetch) if policy == "offload" else contextlib.nullcontext():
        return checkpoint(
            block, x, *rest, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts
        )  # fmt: skip


def _bare(block: nn.Module) -> bool:
    """Whether a block consists of our modules, with nothing hooked on or put in the place of anything."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    return not any(
        touched(part) or not (type(part).__module__.startswith("lorarun.") or type(part) is nn.ModuleDict)
        for part in block.modules()
    )


# --- offload: what checkpointing saves for a block, which is its input, passes through these two ---


def _leave(x: Tensor) -> Tensor | _OnHost:
    if x.numel() == 0:
        return x
    return x.detach().clone() if x.device.type == "cpu" else _OnHost(x.detach())


def _fetch(left: Tensor | _OnHost) -> Tensor:
    return left if isinstance(left, Tensor) else left.fetch()


class _OnHost:
    """A tensor on its way to pinned host memory and back, on a stream beside the one that computes.

    At most two are on the device at a time.  Forward: the source is released when the next one is left, and not
    before it has been copied.  Backward: fetching one starts the copy of the one that was left before it, which will
    be asked for next.  Device memory is taken and given back in the order of the computing stream, which waits for a
    copy wherever it could overtake it; so nothing depends on how far the host runs ahead.
    """

    latest: dict[torch.device, weakref.ref[_OnHost]] = {}  # the one that was left last

    def __init__(self, x: Tensor) -> None:
        self.device = x.device
        self.source: Tensor | None = x
        self.coming: tuple[Tensor, Any, Any] | None = None  # destination, the copy's event, the stream that will wait
        self.real = x.device.type != "meta"
        self.torch = torch.get_device_module(x.device) if self.real else _Still()
        self.host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=self.real)
        latest = self.latest.get(x.device, lambda: None)()
        if latest is not None:
            latest._release()
        self.before = None if latest is None else weakref.ref(latest)
        self.latest[x.device] = weakref.ref(self)
        self.left = self._copy(x, self.host)

    def _copy(self, x: Tensor, to: Tensor) -> Any:
        """Start a copy after all that was asked for before; returns the event of its end."""
        stream = _copies(self.device) if self.real else self.torch
        stream.wait_stream(self.torch.current_stream(self.device))
        with self.torch.stream(stream):
            if self.real:
                to.copy_(x, non_blocking=True)
        return stream.record_event()

    def _release(self) -> None:
        if self.source is not None:
            self.torch.current_stream(self.device).wait_event(self.left)
            self.source = None

    def _prefetch(self) -> None:
        if self.source is None and self.coming is None:
            x = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
            self.coming = (x, self._copy(self.host, x), self.torch.current_stream(self.device))

    def fetch(self) -> Tensor:
        x = self.source  # the last one is still there
        if x is None:
            self._prefetch()
            assert self.coming is not None
            (x, copied, stream), self.coming = self.coming, None
            stream.wait_event(copied)
        before = None if self.before is None else self.before()
        if before is not None:
            before._prefetch()
        return x

    def __del__(self) -> None:
        if self.coming is not None:  # nobody came for it: its memory is free once it has been written
            self.coming[2].wait_event(self.coming[1])


class _Still:
    """Streams and events of the meta device, where memory is planned: nothing is copied, nobody waits."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: contextlib.nullcontext() if name == "stream" else self


@functools.cache
def _copies(device: torch.device) -> Any:
    """The stream on which copies to and from the host run."""
    return torch.get_device_module(device).Stream(device)
