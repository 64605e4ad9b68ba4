"""The lengths that DoRA divides by, and when they are computed (how: :mod:`lorarun.kernels.row_norms`).

Lengths change with every step of an optimizer, and with every edit of A and B, which nothing announces.  So they
belong to one pass through the model; only while answers are generated they are held on to (:func:`held`), since each
token would read every weight twice otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lorarun.kernels.backend import version
from lorarun.kernels.row_norms import row_norms, row_squares
from lorarun.quant.store import Store, dequantize


class Norms:
    """What is remembered of one projection's lengths: ‖w‖², until the weight is another, and with :func:`held` what was
    computed last.

    Copies and pickles start empty.
    """

    def __init__(self) -> None:
        self.known: tuple[Any, Tensor] | None = None  # ‖w‖², behind the weight that they are of
        self.holds = False
        self.last: tuple[Sequence[Any], Any] | None = None  # what was computed, behind what it was computed from

    def __reduce__(self) -> Any:
        return Norms, ()

    def __call__(self, weight: Tensor | Store, dtype: torch.dtype, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """:func:`row_norms` of this projection's weight, dense or a store, which is dequantised to ``dtype``."""

        def measure() -> Tensor:
            dense = dequantize(weight, dtype) if isinstance(weight, Store) else weight
            return row_norms(dense, a, b, scale, self.squares(weight, dense))

        return self.hold((a, b), measure)

    def squares(self, weight: Tensor | Store, dense: Tensor) -> Tensor:
        """‖w‖² of each row of ``weight``, which is also given ``dense``."""
        if torch.compiler.is_compiling():
            return row_squares(dense)
        held = weight.codes if isinstance(weight, Store) else weight
        of = held.data_ptr(), version(held), str(held.device)
        if self.known is None or self.known[0] != of:
            self.known = of, row_squares(dense)
        return self.known[1]

    def hold(self, given: Sequence[Any], make: Callable[[], Any]) -> Any:
        """make(), or while lengths are held on to what it gave the last time for the very same objects."""
        if self.last is not None and len(self.last[0]) == len(given):
            if all(before is now for before, now in zip(self.last[0], given, strict=True)):
                return self.last[1]
        made = make()
        if self.holds:
            self.last = given, made
        return made


@contextmanager
def held(norms: Sequence[Norms]) -> Iterator[None]:
    """Hold on to lengths inside a ``with`` block, in which no adapter changes."""
    for each in norms:
        each.holds = True
    try:
        yield
    finally:
        for each in norms:
            each.holds, each.last = False, None
