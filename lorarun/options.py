"""What an adapter is: its fields, what they mean for one projection, and which of them contradict each other."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from lorarun.initial import known, subtracts

BIASES = ("none", "lora_only", "all")


@dataclass
class Lora:
    """What an adapter of a model is; fields as in PEFT's ``adapter_config.json`` where it has them.

    ``bias`` is "none", "lora_only" or "all"; ``lora_bias``, whether B has one.
    """

    r: int
    alpha: float
    targets: str | list[str]
    dropout: float
    rslora: bool
    layers: list[int] | None
    modules: list[str]  # full names of the projections that carry it
    seed: int | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    bias: str = "none"
    lora_bias: bool = False
    dora: bool = False
    init: str = "default"
    freeze_a: bool = False
    tables: list[str] = field(default_factory=list)  # the embedding and the head, where they have a low-rank update
    modules_to_save: list[str] = field(default_factory=list)  # as asked
    copies: list[str] = field(default_factory=list)  # full names of the modules of which it holds copies
    tokens: dict[str, list[int]] = field(default_factory=dict)  # ids whose rows it trains, by table
    tied: bool = False  # whether what it has for the embedding serves a tied head too, and the other way round

    @property
    def scale(self) -> float:
        """Of a projection that no pattern means."""
        return self.scale_of("")

    def rank_of(self, path: str) -> int:
        """The rank in the projection of this name."""
        return of_pattern(self.rank_pattern, path, self.r)

    def alpha_of(self, path: str) -> float:
        """The alpha of the projection of this name."""
        return of_pattern(self.alpha_pattern, path, self.alpha)

    def scale_of(self, path: str) -> float:
        """alpha / r, or alpha / √r with ``rslora`` (Kalajdzievski 2023, arXiv:2312.03732, section 3)."""
        r = self.rank_of(path)
        return self.alpha_of(path) / (math.sqrt(r) if self.rslora else r)


Number = TypeVar("Number", int, float)


def of_pattern(pattern: Mapping[str, Number], path: str, default: Number) -> Number:
    """What a rank_pattern or alpha_pattern says of a module: its first key that matches the whole name or what follows
    a dot in it, as a regular expression; PEFT's rule."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", path)), default)


def faults(lora: Lora, dtype: torch.dtype) -> list[str]:
    """What is wrong with the arguments of an adapter, whatever the model."""
    wrong = []

    def number(value: Any, kind: Any) -> bool:
        return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf

    for key, rank in {"r": lora.r, **{f"rank_pattern[{k!r}]": v for k, v in lora.rank_pattern.items()}}.items():
        if not number(rank, int):
            wrong.append(f"{key} is {rank!r}; expected a whole number from 1 up")
    alphas = {"alpha": lora.alpha, **{f"alpha_pattern[{k!r}]": v for k, v in lora.alpha_pattern.items()}}
    wrong += [f"{key} is {a!r}; expected a number above 0" for key, a in alphas.items() if not number(a, int | float)]
    for key in (*lora.rank_pattern, *lora.alpha_pattern):
        try:
            of_pattern({key: 1}, "", 1)
        except re.error as error:
            wrong.append(f"the pattern {key!r} is not a regular expression: {error}")
    if not 0.0 <= lora.dropout < 1.0:
        wrong.append(f"dropout is {lora.dropout}; expected a probability from 0 up to, not including, 1")
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2):
        wrong.append(f"dtype is {dtype!r}; expected a floating-point torch.dtype")
    if lora.bias not in BIASES:
        wrong.append(f"bias is {lora.bias!r}; expected False, True, 'lora_only' or 'all'")
    if not known(lora.init):
        wrong.append(f"init is {lora.init!r}; expected default, gaussian, pissa, pissa_niter_N, olora or loftq")
    if lora.dora and lora.lora_bias:
        wrong.append("dora with bias=True is not supported, nor is it in PEFT: what should the length be of?")
    if lora.dropout and subtracts(lora.init):
        wrong.append(f"init={lora.init!r} with dropout would drop from the weight itself; choose dropout=0")
    return wrong
