"""How a step changes the parameters: its learning rate, and AdamW with clipping.

Both count optimizer steps, never batches: with accumulation, schedules that were advanced once per batch have decayed
as many times too fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

SCHEDULES = ("cosine", "linear", "constant")


def learning_rate(step: int, steps: int, peak: float, warmup: int = 0, schedule: str = "cosine") -> float:
    """The learning rate of optimizer step ``step``, counted from 0, of ``steps``.

    The first ``warmup`` steps have peak · step / warmup, the first of them thus 0.  Behind them, with p = (step −
    warmup) / (steps − warmup): "linear" peak · (1 − p), "cosine" peak · (1 + cos πp) / 2, "constant" peak.  Accumulated
    batches are one step.  The values are those of transformers' schedules.
    """
    if step < warmup:
        return peak * step / warmup
    passed = (step - warmup) / max(1, steps - warmup)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; expected one of {', '.join(SCHEDULES)}.")
    falls = {"linear": 1.0 - passed, "cosine": 0.5 * (1.0 + math.cos(math.pi * passed)), "constant": 1.0}
    return peak * falls[schedule]


class Optimizer:
    """AdamW with moments in fp32, clipping, and a refusal to step where a gradient is not finite.

    parameters: by name.  Those narrower than fp32 are stepped through fp32 copies and rounded after each step; betas
    and eps are torch's.  clip: see :func:`fit`.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], weight_decay: float = 0.0, clip: float | None = None
    ) -> None:
        self.parameters, self.clip = dict(parameters), clip
        self.copies = {name: p.detach().float() for name, p in parameters.items() if p.dtype.itemsize < 4}
        stepped = [self.copies.get(name, p) for name, p in parameters.items()]
        self.adamw = torch.optim.AdamW(stepped, lr=0.0, weight_decay=weight_decay, fused=True)

    def step(self, lr: float) -> tuple[float, list[str]]:
        """Step with what is in ``.grad`` and clear it.

        Returns the norm of the whole gradient before clipping, and the names of the parameters whose gradient is not
        finite; if there are any, nothing has changed.
        """
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm = nn.utils.get_total_norm(list(grads.values()))
        if not norm.isfinite():
            broken = [name for name, grad in grads.items() if not grad.isfinite().all()]
            self.clear()
            return float(norm), broken or ["their norm"]
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self.parameters.values(), self.clip, norm)
        for name, copy in self.copies.items():
            grad = self.parameters[name].grad
            copy.grad = None if grad is None else grad.float()
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        with torch.no_grad():
            for name, copy in self.copies.items():
                self.parameters[name].copy_(copy)
        self.clear()
        return float(norm), []

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
