"""What a block keeps between its forward and a second run of it.

A block that is recomputed on the way back runs twice, and the usual way leaves it at that: everything happens again.
Here an operation can name what is dear: ``keep("attention", make)`` makes it the first time, and when the block is
replayed hands back what was made.  Which names are kept is the block's policy (:mod:`lorarun.recompute`); outside a
policy ``keep`` is a plain call.

The second run must also decide as the first did.  Which adapter runs and which dropout masks are drawn depends on
state that may have moved on by then: another loss was computed, another adapter switched to.  So such choices go
through ``decide`` and are noted in a dictionary that belongs to one pass through the model.  It travels into the block
with its arguments (``in_pass``), so that a recomputation that somebody else arranged finds it too.

Both look at the thread that asks: a backward pass on an accelerator runs in a thread of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch

from lorarun.kernels import backend


class Frame:
    """How a block runs once, and what it kept: ``names`` are kept for replays; ``save_products``, whether its MLP
    saves gate and up for backward; ``tile``, how many rows its MLP takes at a time (None: all); ``deterministic``,
    whether the same inputs must give the same bits again."""

    def __init__(
        self,
        names: Collection[str] = (),
        save_products: bool = True,
        tile: int | None = None,
        deterministic: bool = False,
    ) -> None:
        self.names, self.save_products, self.tile, self.deterministic = names, save_products, tile, deterministic
        self.kept: dict[str, Any] = {}
        self.forced = False  # whether the forward ran the references


class _Here(threading.local):
    def __init__(self) -> None:
        self.running: list[Running] = []
        self.decided: dict[Hashable, Any] | None = None


class Running:
    """While the context is entered, blocks run under ``frame``: for the first time, or replayed.

    Not a generator, since each backward through a graph that is retained enters it again.
    """

    def __init__(self, frame: Frame, replay: bool = False) -> None:
        self.frame, self.replay = frame, replay
        self.forced = False

    def __enter__(self) -> None:
        _here.running.append(self)
        if self.replay:
            self.forced = backend.force(self.frame.forced)
        else:
            self.frame.forced = backend.forced()

    def __exit__(self, *error: Any) -> None:
        _here.running.pop()
        if self.replay:
            backend.force(self.forced)


_here = _Here()
_PLAIN = Frame()


def frame() -> Frame:
    """The frame that the caller runs under; outside any, one that keeps nothing and saves everything."""
    return _here.running[-1].frame if _here.running else _PLAIN


def keep(name: str, make: Callable[[], Any]) -> Any:
    """make(), a tensor or a tuple of tensors and Nones; replayed, what it gave the first time if ``name`` is kept.

    What is kept is an alias without history.  A name stands for one output of a block.
    """
    running = _here.running[-1] if _here.running else None
    if running is None or name not in running.frame.names:
        return make()
    kept = running.frame.kept
    if running.replay and name in kept:
        return _aliases(kept[name])
    made = make()
    if not running.replay:
        kept[name] = _aliases(made)
    return made


def _aliases(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_aliases(item) for item in value)
    return None if value is None else value.detach()


def decide(key: Hashable, choose: Callable[[], Any]) -> Any:
    """choose(), once in a pass through the model: whoever asks again in the same pass gets the same answer."""
    decided = None if torch.compiler.is_compiling() else _here.decided
    if decided is None:
        return choose()
    if key not in decided:
        decided[key] = choose()
    return decided[key]


def in_pass(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a block's ``forward(self, x, tables, …)``: choices inside are those of the pass that made ``tables``.

    ``tables.decided`` is that pass's dictionary; without the attribute every choice is made anew.
    """

    @functools.wraps(forward)
    def run(self: Any, x: torch.Tensor, tables: Any, *rest: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, x, tables, *rest)
        before, _here.decided = _here.decided, getattr(tables, "decided", None)
        try:
            return forward(self, x, tables, *rest)
        finally:
            _here.decided = before

    return run
