"""A batch in one of a few shapes, as one flat buffer: what a captured step reads.

A graph serves one shape, so batches are padded to lengths that are about a factor √2 apart.  Padding takes part in
nothing: behind dense causal rows nobody sees it, elsewhere each padding token is a document of its own, and none has a
label.  Of the rows that go through the head there are a quarter, a half or all of the tokens, the supervised ones
first, so that a batch with few labels does not pay for a head on everything.

All of it is computed on the CPU, where batches are made, and goes to the device in one copy from pinned memory: nobody
waits, and what differs between two batches of a shape is data, not a launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorarun.kernels.cross_entropy import IGNORE


class Given(NamedTuple):
    """A batch on the CPU, as ``loss`` sees it; tensors [batch, seq] int64.  goal: the targets, −100 where none."""

    ids: Tensor
    positions: Tensor | None
    documents: Tensor | None
    goal: Tensor
    supervised: int  # how many targets there are
    denominator: float | Tensor


class Inputs(NamedTuple):
    """The same on the model's device.  rows: the indices of the tokens that go through the head, None for all of
    them; goal: their targets, [rows]."""

    ids: Tensor
    positions: Tensor | None
    documents: Tensor | None
    rows: Tensor | None
    goal: Tensor
    denominator: float | Tensor
    weights: Tensor | None = None  # of the losses, [rows]
    smoothing: float = 0.0


class Shape(NamedTuple):
    """What a graph is made for: batch, seq, rows through the head, and which of the optional inputs there are."""

    batch: int
    seq: int
    rows: int
    positions: bool
    documents: bool

    def __str__(self) -> str:
        kind = "packed or padded" if self.documents else "dense"
        return f"{self.batch}×{self.seq} {kind}, {self.rows} supervised"


def bucket(length: int, least: int = 128) -> int:
    """The next of the lengths 2ᵏ and 1.5 · 2ᵏ, about powers of √2: 128, 192, 256, 384, 512 and so on."""
    power = 1 << max(length - 1, least - 1).bit_length()  # ≥ length
    return power * 3 // 4 if length <= power * 3 // 4 >= least else power


def shape_of(given: Given) -> Shape:
    """The shape that a batch is padded to.

    Dense rows stay dense, which cuDNN serves in multiples of 128, where that is at most a quarter longer.  All others
    become (or are) documents, whose padding is documents of its own.
    """
    batch, seq = given.ids.shape
    dense = -(-seq // 128) * 128
    if given.documents is None and dense <= 1.25 * seq:
        documents, padded = False, dense
    else:
        documents, padded = True, bucket(seq, max(16, 128 // max(batch, 1)))
    tokens = batch * padded
    rows = next(n for n in (tokens // 4, tokens // 2, tokens) if n >= given.supervised)
    return Shape(batch, padded, rows, given.positions is not None, documents)


def pack(given: Given, shape: Shape, clock: int) -> Tensor:
    """Everything that a captured step reads, padded and one behind the other: int64 on the CPU, see :func:`unpack`."""
    pad = (0, shape.seq - given.ids.shape[1])
    goal = F.pad(given.goal, pad, value=IGNORE).flatten()
    parts = [F.pad(given.ids, pad).flatten()]
    if given.positions is not None:
        parts.append(F.pad(given.positions, pad).flatten())
    if shape.documents:
        documents = torch.zeros_like(given.ids) if given.documents is None else given.documents
        parts.append(F.pad(documents, pad, value=-1).flatten())
    if shape.rows < len(goal):  # the supervised ones first, then others, so that no row comes twice
        rows = (goal == IGNORE).int().argsort(stable=True)[: shape.rows]
        parts.append(rows)
        goal = goal[rows]
    own = 1.0 if isinstance(given.denominator, Tensor) else float(given.denominator)
    numbers = torch.tensor([own], dtype=torch.float64, device="cpu").view(torch.int64)
    return torch.cat([*parts, goal, numbers, torch.tensor([clock], device="cpu")])


def unpack(flat: Tensor, shape: Shape) -> tuple[Inputs, Tensor]:
    """Views of what :func:`pack` made, and the dropout clock's value [] behind them."""
    grid = shape.batch * shape.seq
    some = shape.rows < grid
    present = [True, shape.positions, shape.documents]
    sizes = [grid * there for there in present] + [shape.rows * some, shape.rows, 1, 1]
    ids, positions, documents, rows, goal, denominator, clock = flat[: sum(sizes)].split(sizes)
    grids = [
        part.view(shape.batch, shape.seq) if there else None
        for part, there in zip((ids, positions, documents), present, strict=True)
    ]
    assert grids[0] is not None
    inputs = Inputs(
        grids[0], grids[1], grids[2], rows if some else None, goal, denominator.view(torch.float64).squeeze(0)
    )
    return inputs, clock.squeeze(0)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on ``device``; from the CPU to an accelerator by way of pinned memory, which nobody waits for."""
    if tensor.device.type == "cpu" and device.type not in ("cpu", "meta"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
