"""What the kernel tests share: poisoned memory, a comparison with float64, and values with their gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def narrow(device: torch.device) -> torch.dtype:
    """A 16-bit dtype that can be trusted there: the interpreter's bf16 cannot."""
    return torch.float16 if device.type == "cpu" else torch.bfloat16


def poison(device: torch.device) -> None:
    """Fill the allocator's free blocks with NaN, so that an element that nobody writes shows."""
    for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
        torch.full((size,), float("nan"), device=device)


def close(ours: Tensor, exact: Tensor, what: str, roundings: float = 4) -> None:
    """Within a few roundings of the dtype of ``ours``, in the norm of the whole tensor."""
    eps = torch.finfo(ours.dtype).eps
    error = (ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)
    assert torch.isfinite(ours).all() and error < roundings * eps, (what, error.item() / eps)


def compare(
    ours: Callable[..., Any],
    exact: Callable[..., Any],
    inputs: Sequence[Tensor],
    roundings: float = 4,
    trained: int | None = None,
) -> None:
    """Values and gradients of ``ours`` on ``inputs`` against ``exact`` on the same in float64, with random upstreams.

    Only the first ``trained`` inputs (None: all) get gradients.
    """
    results = []
    upstreams: list[Tensor] = []
    for call, dtype in ((ours, None), (exact, torch.float64)):
        leaves = [t.to(dtype or t.dtype).detach().clone() for t in inputs]
        learning = [leaf.requires_grad_() for leaf in leaves[:trained]]
        poison(inputs[0].device)
        out = call(*leaves)
        outs = list(out) if isinstance(out, tuple) else [out]
        upstreams = upstreams or [torch.randn_like(o) for o in outs]
        grads = torch.autograd.grad(outs, learning, [u.to(o.dtype) for u, o in zip(upstreams, outs, strict=True)])
        results.append([*outs, *grads])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert a.shape == b.shape
        close(a.detach(), b.detach(), f"result {i}", roundings)
