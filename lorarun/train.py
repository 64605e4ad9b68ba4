"""The loss of a batch, of a step and of held-out rows.

``loss`` is the one place that divides: whatever is accumulated, packed or spread over processes, the mean is over the
supervised tokens of a whole step, never a mean of means.  ``accumulated`` is a step's loss and gradient, over all
processes where there are several.  A loop of one's own needs no more than these and an optimizer;
:mod:`lorarun.fit` is the loop that most people want.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun import distributed
from lorarun.batch import Batch, as_batch, supervised, target_weights, targets, weight_of
from lorarun.bucket import Given, Inputs, sent
from lorarun.graph import Steps
from lorarun.head import head_losses, head_scores
from lorarun.kernels.cross_entropy import IGNORE
from lorarun.memory import follow
from lorarun.nn import Model


def loss(
    model: Model,
    batch: Batch | Mapping[str, Any],
    denominator: float | Tensor | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """Mean cross-entropy over the supervised tokens of ``batch``, a scalar in fp32 that can be differentiated.

    batch: a :class:`lorarun.data.Batch` or a mapping with its keys; ids and labels [batch, seq] int64 on any device.
    The shift by one happens here; the first token of a document is never a target.  With ``weights`` the mean is
    Σ w · loss / Σ w over the targets.
    denominator: what the sum of the losses is divided by, instead of the batch's own count (or weight): that of the
    whole accumulated step (:func:`lorarun.data.supervised` of each batch, added; over all ranks where there are
    several).
    smoothing: of the labels, ε in :mod:`lorarun.kernels.cross_entropy`.

    Full logits are never held: rows without a target are dropped before the head, the rest goes through it in chunks.
    A small step is replayed as a CUDA graph from its second time on, see :mod:`lorarun.graph`; nothing else changes.
    A batch without a target gives 0 with zero gradients, whatever the denominator, and a warning when its step has none
    either.
    """
    batch = as_batch(batch)
    goal, rows = _goal(model, batch)
    weights = target_weights(batch)
    count = len(rows)
    picked = None if weights is None else weights.flatten()[rows]
    total = count if picked is None else float(picked.sum())
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"loss: smoothing is {smoothing}; expected a share from 0 up to, not including, 1.")
    if denominator is None:
        denominator = total
    if total == 0:
        if float(denominator) == 0:
            warnings.warn("loss: no token of this step is supervised; its loss is 0 and teaches nothing.", stacklevel=2)
        denominator = 1  # of a sum without terms
    follow(model, batch.ids.numel())
    model.clock.step += model.training
    if model.graphs is None:
        model.graphs = Steps()
    given = Given(batch.ids, batch.positions, batch.documents, goal, count, denominator)
    if smoothing or picked is not None:  # captured steps know neither
        model.graphs.reason, model.graphs.eager = "smoothed labels or weighted tokens", model.graphs.eager + 1
        return _eager(model, given, rows, picked, smoothing)
    replayed: Tensor | None = model.graphs.loss(model, given, _mean)
    return _eager(model, given, rows) if replayed is None else replayed


def _goal(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """The targets [batch, seq] and the indices of those that there are [supervised], checked."""
    if batch.adapters is not None:
        raise ValueError(
            "loss: a different adapter for each row (batch.adapters) is not supported; switch with use_adapter."
        )
    goal = targets(batch)
    rows = (goal.flatten() != IGNORE).nonzero().squeeze(1)
    wrong = goal.flatten()[rows]
    wrong = wrong[(wrong < 0) | (wrong >= model.config.vocab_size)]
    if len(wrong):
        raise ValueError(
            f"loss: {len(wrong)} labels are no ids of the model, such as {int(wrong[0])}; expected 0 to "
            f"{model.config.vocab_size - 1}, and {IGNORE} where nothing is learned."
        )
    return goal, rows


def _picked(model: Model, inputs: Inputs) -> Tensor:
    """The hidden states that go through the head, [supervised, hidden]."""
    hidden: Tensor = model.hidden_states(inputs.ids, inputs.positions, inputs.documents)
    picked = hidden.flatten(0, 1)  # [tokens, hidden]
    return picked if inputs.rows is None else picked.index_select(0, inputs.rows)


def _mean(model: Model, inputs: Inputs) -> Tensor:
    """The loss of a batch that lies on the model's device."""
    losses = head_losses(model, _picked(model, inputs), inputs.goal, inputs.smoothing)
    if inputs.weights is not None:
        losses = losses * inputs.weights
    denominator = inputs.denominator
    return losses.sum() / (denominator.to(losses.dtype) if isinstance(denominator, Tensor) else denominator)


def _there(model: Model, given: Given, rows: Tensor) -> Inputs:
    """A batch on the model's device, with nothing padded."""
    device = model.device
    return Inputs(
        sent(given.ids, device),
        None if given.positions is None else sent(given.positions, device),
        None if given.documents is None else sent(given.documents, device),
        sent(rows, device),
        sent(given.goal.flatten()[rows], device),
        given.denominator,
    )


def _eager(model: Model, given: Given, rows: Tensor, weights: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """The loss without a graph; where captured steps hold the memory that this one needs, they are dropped."""
    inputs = _there(model, given, rows)._replace(
        weights=None if weights is None else sent(weights, model.device), smoothing=smoothing
    )
    try:
        return _mean(model, inputs)
    except torch.OutOfMemoryError:
        if not model.graphs.drop():
            raise
    return _mean(model, inputs)


# --- held-out rows ---------------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """What :func:`evaluate` measured, over all supervised tokens."""

    loss: float  # mean cross-entropy
    perplexity: float  # its exponential
    accuracy: float  # the share of tokens that greedy decoding would have chosen
    tokens: int


@torch.no_grad()
def evaluate(model: Model, held_out: Iterable[Batch | Mapping[str, Any]]) -> Evaluation:
    """Loss, perplexity and token accuracy on several batches, in eval mode; the mode before is restored.

    Full logits are never held, for the accuracy neither.  Weights of a batch do not count.  Where there are several
    processes all of them call this with the same batches, and each takes its share.
    """
    training = model.training
    model.eval()
    try:
        total = right = count = 0.0
        for batch in islice(held_out, distributed.rank(), None, distributed.size()):
            batch = as_batch(batch)
            goal, rows = _goal(model, batch)
            given = Given(batch.ids, batch.positions, batch.documents, goal, len(rows), 1.0)
            inputs = _there(model, given, rows)
            losses, hits = head_scores(model, _picked(model, inputs), inputs.goal)
            total, right, count = total + float(losses.sum()), right + float(hits.sum()), count + len(rows)
        total, right, count = distributed.total([total, right, count], model.device)
        if not count:
            raise ValueError("evaluate: no token is supervised; is this an iterator that was used up before?")
        mean = total / count
        return Evaluation(mean, math.exp(mean) if mean < 700 else math.inf, right / count, int(count))
    finally:
        model.train(training)


# --- a step ----------------------------------------------------------------------------------------------------------


def accumulated(
    model: Model, step: Sequence[Batch | Mapping[str, Any]], smoothing: float = 0.0, scale: float = 1.0
) -> tuple[Tensor, int]:
    """The mean loss over the supervised tokens of all batches of a step, and their number; gradients are added to
    ``.grad``, multiplied by ``scale``.

    However the same rows are split into batches, loss and gradients are the same: each batch's sum is divided by the
    count (or weight) of the whole step.  Where there are several processes all of them give the whole step: every one
    knows its count, takes its share of the batches, and the gradients of all are added up.  Dropout masks go by a
    batch's place in the step, so they too are the same for any number of processes.
    """
    batches = [as_batch(batch) for batch in step]
    count, whole = sum(map(supervised, batches)), sum(map(weight_of, batches))
    total, clock = torch.zeros((), device=model.device), model.clock.step
    for place, batch in distributed.share(batches):
        model.clock.step = clock + place * model.training
        part = loss(model, batch, whole, smoothing)
        torch.autograd.backward(part if scale == 1.0 else part * scale)
        total += part.detach()
    model.clock.step = clock + len(batches) * model.training
    return distributed.sum_gradients([p for p in model.parameters() if p.requires_grad], total), count


@torch.no_grad()
def first_not_finite(model: Model, batch: Batch | Mapping[str, Any]) -> str | None:
    """Where the way forward first has a number that is not finite, None if nowhere: to be asked after the loss was not.

    The pass is that of ``loss`` with the same ``model.clock.step``.
    """
    batch = as_batch(batch)
    positions, documents = (None if t is None else t.to(model.device) for t in (batch.positions, batch.documents))
    states = model.hidden_states(batch.ids.to(model.device), positions, documents, layers=True)
    names = ["the embeddings", *(f"layer {i}" for i in range(len(states) - 2)), "the last layer or the final norm"]
    return next((name for name, state in zip(names, states, strict=True) if not state.isfinite().all()), None)


def tokens(batch: Batch) -> int:
    """How many tokens a batch has, padding not counted."""
    return batch.ids.numel() if batch.documents is None else int((batch.documents >= 0).sum())
