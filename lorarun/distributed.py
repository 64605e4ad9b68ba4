"""Several processes that train one adapter, each on its share of every step.

    torchrun --nproc-per-node 4 scripts/finetune.py …

A model with frozen weights needs little of what distributed training usually brings: no wrapped model, no buckets of
gradients sent while backward runs, no hooks that fire in the wrong order under recomputation.  All gradients together
are some tens of megabytes, so they go in one flat buffer and one all-reduce, once a step, behind the last backward.
Every process makes the whole step's batches, which is cheap, and computes its share; so each knows the count that the
losses are divided by, a process may be left without a batch, and no row comes twice.  In a process of its own all of
this does nothing.

Given up: sharding of the weights (each process holds the whole model), and reading the rows only once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


def start() -> None:
    """Join the other processes that ``torchrun`` started, and take this one's GPU as torch's current device.

    Does nothing in a process that was started alone.  Call it before the model is loaded.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    if torch.accelerator.is_available():
        local, there = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
        if local >= there:
            raise ValueError(f"torchrun started at least {local + 1} processes here, but there are {there} GPUs.")
        torch.accelerator.set_device_index(local)
    dist.init_process_group()


def stop() -> None:
    """Leave the others, at the end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def size() -> int:
    """How many processes there are; 1 for one of its own."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0; the first is the one that writes."""
    return dist.get_rank() if size() > 1 else 0


def check_started(who: str) -> None:
    """ValueError in a process of several that has not joined the others: each would train, and write, alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) > size():
        raise ValueError(
            f"{who}: torchrun started {os.environ['WORLD_SIZE']} processes; call lorarun.distributed.start() before "
            "the model is loaded, so that they train together."
        )


def share(items: Sequence[T]) -> list[tuple[int, T]]:
    """This process's part of ``items``, each with its place among all."""
    return list(enumerate(items))[rank() :: size()]


def total(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The sum of each number over all processes; device: where the model is."""
    if size() == 1:
        return list(numbers)
    summed = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.tolist()


def sum_gradients(parameters: Sequence[nn.Parameter], number: Tensor) -> Tensor:
    """Add up ``.grad`` over all processes, in one all-reduce; returns the sum of ``number``, which travels with them.

    A process without a gradient (it had no batch) adds zeros; where none has one, there is none afterwards.
    """
    if size() == 1:
        return number
    wide = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    there = torch.tensor([p.grad is not None for p in parameters], dtype=wide).to(number.device)
    flat = torch.cat([*(part.to(wide).flatten() for part in parts), there, number.to(wide).view(1)])
    dist.all_reduce(flat)
    *grads, present, summed = flat.split([*(p.numel() for p in parameters), len(parameters), 1])
    for parameter, grad, found in zip(parameters, grads, present.tolist(), strict=True):
        parameter.grad = grad.view(parameter.shape).to(parameter.dtype) if found else None
    return summed.squeeze(0).to(number.dtype)


def spread(tensors: Sequence[Tensor]) -> None:
    """Give all processes the values of the first one's tensors, in place."""
    if size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


def gathered(value: T) -> list[T]:
    """The value of each process, in order; anything that can be pickled."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values
