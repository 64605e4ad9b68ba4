"""The next token from logits: penalty, temperature, cuts, and one number in [0, 1) that decides.

Randomness is computed, not drawn: the number that decides token t of an answer is a function of (seed, answer, t), the
same on every device.  No generator is read or moved, so a training run that looks at samples on its way stays the same
run.  Everything here is a few operations on tensors of fixed shape that wait for nothing, so that a step of decoding
can be captured with its choice in it.  That is what top_p costs: how many tokens it needs is known on the device alone,
so the whole vocabulary is sorted at every step, unless top_k says of how many the order matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lorarun.kernels.dropout import philox


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the fields are arguments of :func:`lorarun.generate`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    min_p: float = 0.0


def uniform(streams: list[tuple[int, int]], count: int) -> Tensor:
    """Numbers in [0, 1), fp32 [rows, count] on the CPU, for each row's (seed, number of the answer).

    As multiples of 2⁻²³, times any total they stay below that total.
    """
    bits = torch.stack([philox(seed, number, count, torch.device("cpu")) for seed, number in streams])
    return (bits >> 9).float() * 2.0**-23


def choose(logits: Tensor, sampling: Sampling, seen: Tensor | None, random: Tensor | None) -> Tensor:
    """The next id of each row: int64 [rows] for logits [rows, vocab]; −1 where a row's logits are not finite.

    seen: bool [rows, vocab], ids that the repetition penalty is for. random: fp32 [rows] in [0, 1), needed above
    temperature 0: the token at which the sum of the probabilities (from the most probable on, where top_k or top_p ask
    for an order) passes that number.
    """
    scores = logits.float()
    if seen is not None and (penalty := sampling.repetition_penalty) != 1:
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    top, picked = scores.max(dim=-1, keepdim=True)
    if random is not None:
        # The maximum goes first and the divisor stays above 0, so the best token has exp(0) at any temperature.
        scores = (scores - top) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
        picked = _draw(scores, random.unsqueeze(1), sampling)
    return torch.where(top.isfinite(), picked, -1).squeeze(1)


def _draw(scores: Tensor, random: Tensor, sampling: Sampling) -> Tensor:
    """Ids [rows, 1] from softmax(scores [rows, vocab]) cut to top_k, then top_p, then min_p, with random [rows, 1].

    ``scores`` are 0 at their largest.
    """
    order, top_p, top_k = None, sampling.top_p, sampling.top_k
    if 0 < top_k < scores.shape[1]:
        scores, order = scores.topk(top_k, dim=-1)
    elif top_p < 1:
        scores, order = scores.sort(dim=-1, descending=True)
    likely = scores >= (math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf)
    probabilities = scores.softmax(dim=-1)
    if order is None:
        probabilities = torch.where(likely, probabilities, 0.0)
    total = probabilities.cumsum(dim=-1)
    end = total[:, -1:]
    if order is not None:
        kept = (likely & (total - probabilities < top_p)).sum(dim=-1, keepdim=True)  # before which top_p is not reached
        end = total.gather(1, kept.clamp(min=1) - 1)
    index = torch.searchsorted(total, random * end, right=True).clamp(max=scores.shape[1] - 1)
    return index if order is None else order.gather(1, index)


def log_probabilities(logits: Tensor, chosen: Tensor) -> Tensor:
    """The logarithm of the model's own probability of ``chosen`` [rows], fp32: before penalty, temperature and cuts."""
    scores = logits.float()
    return scores.gather(1, chosen.unsqueeze(1)).squeeze(1) - scores.logsumexp(dim=-1)
