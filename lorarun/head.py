"""The loss of hidden states through whatever the head is: frozen, a trained copy, or with an adapter on it.

A plain head is one weight, and :mod:`lorarun.kernels.cross_entropy` has the head and the loss in one operation.  A head
with a low-rank update, or with rows of single tokens, is several products.  Writing them as one weight would copy the
table at every step, and writing their backward by hand would have it in three variants; so each chunk of logits is
computed by the head's own ``forward``, dropped, and computed again on the way back.  That is one product with the head
more than a frozen one costs (as for a trained weight), and no more memory: full logits never exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lorarun.kernels import cross_entropy as kernel
from lorarun.kernels.replay import in_pass
from lorarun.nn import Linear, Model

COPIES = 4  # of a chunk's logits that the head's own forward and the loss hold at once


class _Pass:
    """What the head decided on the way forward: which adapter runs, which dropout mask."""

    def __init__(self) -> None:
        self.decided: dict[Any, Any] = {}


def composed(head: Linear) -> bool:
    """Whether the head is more than one weight."""
    running = head.running()
    return running.branch.rank > 0 or running.after or head.rows() is not None


def head_losses(model: Model, hidden: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The loss of each row [rows] in fp32, of hidden states [rows, dim] and targets [rows] int64 (−100: none).

    As :func:`lorarun.kernels.cross_entropy.linear_cross_entropy` with the model's head, adapters on it included.
    """
    head = model.lm_head
    if not composed(head):
        return kernel.linear_cross_entropy(hidden, head.master(), targets, model.softcap, smoothing=smoothing)
    return _composed(model, hidden, targets, smoothing)[0]


@torch.no_grad()
def head_scores(model: Model, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The losses, and whether greedy decoding would have chosen each target, [rows] bool; without gradients."""
    head = model.lm_head
    if not composed(head):
        return kernel.linear_scores(hidden, head.master(), targets, model.softcap)
    return _composed(model, hidden, targets, 0.0)


def _composed(model: Model, hidden: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    head = model.lm_head
    rows = max(1, kernel.CHUNK_BYTES // (COPIES * hidden.element_size() * head.out_features))
    now = _Pass()
    parts = [
        checkpoint(
            _chunk, head, hidden[at : at + rows], now, targets[at : at + rows], model.softcap, smoothing, at,
            use_reentrant=False, preserve_rng_state=False,
        )
        for at in range(0, max(1, len(hidden)), rows)
    ]  # fmt: skip
    losses, hits = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(hits)


@in_pass
def _chunk(
    head: Linear, hidden: Tensor, now: _Pass, targets: Tensor, softcap: float | None, smoothing: float, row: int
) -> tuple[Tensor, Tensor]:
    return kernel.cross_entropy(head(hidden, row), targets, softcap, smoothing)
