"""How a step changes the parameters: its learning rate, AdamW in three storages, clipping, and loss scaling.

Rates count optimizer steps, never batches: with accumulation, schedules that were advanced once per batch have decayed
as many times too fast.  torch's optimizers step over a gradient that is not finite and leave NaN behind; here such a
step changes nothing, and the caller is told which parameters it was.

Given up: optimizers other than AdamW, and moments in 16 bits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SCHEDULES = ("cosine", "linear", "constant")
OPTIMIZERS = {
    "adamw": "moments in fp32",
    "adamw8bit": "moments in 8 bits by blocks (Dettmers et al. 2021, arXiv:2110.02861)",
    "paged_adamw": "moments in fp32, which move to host memory where the GPU's runs short",
    "paged_adamw8bit": "both",
}
LOSS_SCALE, GROWTH = 2.0**16, 2000  # where loss scaling starts; after so many good steps it doubles, as in torch.amp


def learning_rate(
    step: int, steps: int, peak: float, warmup: int = 0, schedule: str = "cosine", decay: int | None = None
) -> float:
    """The learning rate of optimizer step ``step``, counted from 0, of ``steps``.

    The first ``warmup`` steps have peak · step / warmup, the first of them thus 0.  The rate falls in the last
    ``decay`` steps (None: all behind the warm-up), between them it is the peak.  With p = (step − (steps − decay)) /
    decay: "linear" peak · (1 − p), "cosine" peak · (1 + cos πp) / 2; "constant" stays at the peak.  Accumulated batches
    are one step.  The values are those of transformers' schedules, with ``decay`` of its warm-up, stable and decay one.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; expected one of {', '.join(SCHEDULES)}.")
    if step < warmup:
        return peak * step / warmup
    decay = steps - warmup if decay is None else decay
    passed = max(0.0, (step - (steps - decay)) / max(1, decay))
    falls = {"linear": 1.0 - passed, "cosine": 0.5 * (1.0 + math.cos(math.pi * passed)), "constant": 1.0}
    return peak * falls[schedule]


def as_steps(part: float, steps: int) -> int:
    """A number of steps as it is, a fraction of ``steps`` to the nearest one."""
    return part if isinstance(part, int) else round(part * steps)


def factor_of(name: str, b_ratio: float, embedding_ratio: float) -> float:
    """By how much the learning rate of a parameter is multiplied.

    b_ratio: of an adapter's matrices B, which want larger steps than A the wider the model (LoRA+, Hayou et al. 2024,
    arXiv:2402.12354: the ratio λ, about 16 there).  embedding_ratio: of everything in the embedding or the head.
    """
    parts = name.split(".")
    if "embed_tokens" in parts or "lm_head" in parts:
        return embedding_ratio
    return b_ratio if {"lora_B", "lora_embedding_B"} & set(parts) else 1.0


def starting_scale(model: nn.Module) -> float | None:
    """The loss scale that training starts with, None where nothing of float16 flows back."""
    return LOSS_SCALE if any(p.dtype == torch.float16 for p in model.parameters()) else None


class Optimizer:
    """AdamW with clipping, and a refusal to step where a gradient is not finite.

    parameters: by name.  Those narrower than fp32 are stepped through fp32 copies and rounded after each step; betas
    and eps are torch's.  clip: see :func:`lorarun.fit`.  kind: one of ``OPTIMIZERS``, all but the first from
    bitsandbytes, whose moments of parameters below 4,096 elements are in fp32 always.  b_ratio, embedding_ratio: see
    :func:`factor_of`.  loss_scale: what the loss was multiplied with before backward (see ``scale``), so that the
    gradients of float16 activations do not vanish: halved after a step that is not finite, but not below 1, and
    doubled after 2,000 that were (Micikevicius et al. 2017, arXiv:1710.03740, section 3.2); None: no scaling.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        weight_decay: float = 0.0,
        clip: float | None = None,
        kind: str = "adamw",
        b_ratio: float = 1.0,
        embedding_ratio: float = 1.0,
        loss_scale: float | None = None,
    ) -> None:
        self.parameters, self.clip = dict(parameters), clip
        self.scale, self.scaled, self.good = loss_scale or 1.0, loss_scale is not None, 0
        self.copies = {name: p.detach().float() for name, p in parameters.items() if p.dtype.itemsize < 4}
        self.stepped: dict[str, Tensor] = {name: self.copies.get(name, p) for name, p in parameters.items()}
        groups: dict[float, list[Tensor]] = {}  # by factor of the learning rate
        for name, parameter in self.stepped.items():
            groups.setdefault(factor_of(name, b_ratio, embedding_ratio), []).append(parameter)
        self.factors = list(groups)
        self.adamw = _adamw(kind, [{"params": group} for group in groups.values()], weight_decay)

    def step(self, lr: float) -> tuple[float, list[str]]:
        """Step with what is in ``.grad`` and clear it.

        Returns the norm of the whole gradient before clipping, and the names of the parameters whose gradient is not
        finite, in the order they were given; if there are any, nothing has changed but the loss scale.
        """
        for name, copy in self.copies.items():
            grad = self.parameters[name].grad
            copy.grad = None if grad is None else grad.float()
        grads = {name: p.grad for name, p in self.stepped.items() if p.grad is not None}
        if self.scale != 1.0:
            torch._foreach_div_(list(grads.values()), self.scale)  # a power of two: exact
        norm = nn.utils.get_total_norm(list(grads.values()))
        if not norm.isfinite():
            broken = [name for name, grad in grads.items() if not grad.isfinite().all()]
            self.clear()
            self.scale, self.good = max(1.0, self.scale / 2.0) if self.scaled else 1.0, 0
            return float(norm), broken or ["their norm"]
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(list(self.stepped.values()), self.clip, norm)
        for group, factor in zip(self.adamw.param_groups, self.factors, strict=True):
            group["lr"] = lr * factor
        self.adamw.step()
        with torch.no_grad():
            for name, copy in self.copies.items():
                self.parameters[name].copy_(copy)
        self.clear()
        self.good += 1
        if self.scaled and self.good % GROWTH == 0:
            self.scale *= 2.0
        return float(norm), []

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in (*self.parameters.values(), *self.copies.values()):
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """All that a later process needs to go on: the parameters, their copies, the moments by name, the loss scale.

        The tensors are not copies: write them before the next step.
        """
        moments = {name: dict(self.adamw.state[p]) for name, p in self.stepped.items() if self.adamw.state.get(p)}
        parameters = {name: p.detach() for name, p in self.parameters.items()}
        return {
            "parameters": parameters, "copies": self.copies, "moments": moments, "scale": self.scale, "good": self.good
        }  # fmt: skip

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what :meth:`state` told, in place: captured steps hold pointers to parameters, pages stay pages."""
        for own, stored in ((self.parameters, state["parameters"]), (self.copies, state["copies"])):
            for name, tensor in own.items():
                tensor.copy_(stored[name])
        self.clear()
        for name in state["moments"]:
            self.stepped[name].grad = torch.zeros_like(self.stepped[name])
        for group in self.adamw.param_groups:
            group["lr"] = 0.0
        if state["moments"]:
            self.adamw.step()  # makes the moments, and at a rate of 0 nothing else
        self.clear()
        for name, stored in state["moments"].items():
            own = self.adamw.state[self.stepped[name]]
            for key, value in stored.items():
                if isinstance(value, Tensor):
                    own[key].copy_(value)
                else:
                    own[key] = value
        self.scale, self.good = state["scale"], state["good"]


def _adamw(kind: str, groups: list[dict[str, Any]], weight_decay: float) -> Any:
    """torch's AdamW, or one of bitsandbytes'; ValueError for one that cannot be had here."""
    if kind not in OPTIMIZERS:
        raise ValueError(f"optimizer is {kind!r}; expected one of {', '.join(OPTIMIZERS)}.")
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, weight_decay=weight_decay, fused=True)
    devices = {p.device.type for group in groups for p in group["params"]}
    if kind.startswith("paged") and devices != {"cuda"}:
        raise ValueError(
            f"optimizer is {kind!r}, whose moments move between a GPU and its host, but the parameters are on "
            f"{', '.join(sorted(devices))}; use {kind.removeprefix('paged_')!r} there."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import bitsandbytes.optim as bnb  # noqa: PLC0415 - takes seconds
    except (ImportError, OSError, RuntimeError) as error:  # its library does not load on every system
        raise ValueError(f"optimizer is {kind!r}, for which bitsandbytes is needed: {error}") from error
    made = {"adamw8bit": bnb.AdamW8bit, "paged_adamw": bnb.PagedAdamW, "paged_adamw8bit": bnb.PagedAdamW8bit}[kind]
    return made(groups, lr=0.0, weight_decay=weight_decay)
