"""What a model learns from in one pass, and which of its tokens count.

Padding and boundaries are given by ``documents``, never inferred from ids, and the shift by one happens here alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lorarun.kernels.cross_entropy import IGNORE


@dataclass
class Batch:
    """What a model learns from in one pass; all tensors but weights are [batch, seq] int64.

    ids: token ids. labels: the ids repeated where they are supervised, -100 elsewhere; not shifted. positions: index of
    a token in its document, None for its index in the row. documents: number of the packed document, -1 for padding,
    None for one document a row. adapters: [batch] int64, which adapter serves each row, None for the active one.
    weights: [batch, seq] float32 from 0 up, how much the loss of each token of ``labels`` counts, None for 1.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    adapters: Tensor | None = None
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        wrong = []
        for name in ("ids", "labels", "positions", "documents"):
            value = getattr(self, name)
            if value is None and name in ("positions", "documents"):
                continue
            if not isinstance(value, Tensor):
                wrong.append(f"{name} is a {type(value).__name__}")
            elif value.dtype != torch.int64 or value.dim() != 2 or value.shape != getattr(self.ids, "shape", None):
                wrong.append(f"{name} is {value.dtype} {list(value.shape)}")
        if self.weights is not None and not wrong:
            self._check_weights(self.weights)
        if wrong:
            raise ValueError(f"a batch needs int64 tensors of one shape [batch, seq], got: {'; '.join(wrong)}")

    def _check_weights(self, weights: Any) -> None:
        shape = list(self.ids.shape)
        if not isinstance(weights, Tensor) or weights.dtype != torch.float32 or list(weights.shape) != shape:
            raise ValueError(f"weights are a float32 tensor {shape} as ids, got {weights!r:.80}")
        if not (weights.isfinite() & (weights >= 0)).all():
            raise ValueError("weights are finite numbers from 0 up: a token cannot be learned backwards")


MAKES = "lorarun.batches(rows, model.tokenizer) makes batches of rows"


def as_batch(batch: Batch | Mapping[str, Any]) -> Batch:
    """``batch`` itself, or a mapping with its fields as a Batch; other keys are refused, for they would be ignored."""
    if isinstance(batch, Batch):
        return batch
    if not isinstance(batch, Mapping):
        raise ValueError(f"expected a Batch, or a mapping with its fields, got a {type(batch).__name__}; {MAKES}")
    names = [entry.name for entry in fields(Batch)]
    if not {"ids", "labels"} <= set(batch) <= set(names):
        raise ValueError(
            f"a batch given as a mapping has ids, labels and maybe {names[2:]}, got {sorted(batch)}; {MAKES}"
        )
    return Batch(**batch)


def targets(batch: Batch | Mapping[str, Any]) -> Tensor:
    """What each position has to predict: [batch, seq] int64, -100 where nothing.

    The one place where labels are shifted: position t predicts label t + 1 if both lie in the same document. So the
    last position and the first token of a document count for nothing, and neither does padding.
    """
    batch = as_batch(batch)
    shifted = torch.full_like(batch.labels, IGNORE)
    shifted[:, :-1] = batch.labels[:, 1:]
    if batch.documents is not None:
        here, following = batch.documents[:, :-1], batch.documents[:, 1:]
        shifted[:, :-1].masked_fill_((here != following) | (following < 0), IGNORE)
    return shifted


def target_weights(batch: Batch) -> Tensor | None:
    """The weight of each position's target, shifted as :func:`targets` are; 0 where there is none.  None without."""
    if batch.weights is None:
        return None
    shifted = torch.zeros_like(batch.weights)
    shifted[:, :-1] = batch.weights[:, 1:]
    return shifted.masked_fill_(targets(batch) == IGNORE, 0.0)


def supervised(batch: Batch | Mapping[str, Any]) -> int:
    """How many tokens ``batch`` supervises, counted after the shift."""
    return int((targets(batch) != IGNORE).sum())


def weight_of(batch: Batch | Mapping[str, Any]) -> float:
    """What the losses of ``batch`` are divided by: the sum of its targets' weights, or without any their number."""
    weights = target_weights(as_batch(batch))
    return supervised(batch) if weights is None else float(weights.sum())
