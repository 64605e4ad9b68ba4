"""What A and B are when training begins.

    default    A uniform in ±1/√in, B zero                                   (as Hu et al.'s own code draws them)
    gaussian   A normal with deviation 1/r, B zero
    pissa      the r largest singular values and vectors of W                 (Meng et al. 2024, arXiv:2404.02948)
    pissa_niter_N   the same, found approximately in N rounds: fast for large weights
    olora      the first r columns of Q and rows of R, W = Q·R                 (Büyükakyüz 2024, arXiv:2406.01775)
    loftq      the r largest of what quantisation took from W                 (Li et al. 2023, arXiv:2310.08659)

PiSSA and OLoRA begin with a part of the weight in A and B.  The usual way takes that part out of W, after which the
base is no longer the base: its adapters do not fit it, switching them off does not give it back, and a saved adapter
needs the changed weights beside it.  Here W stays, and what A and B began with is subtracted where they are added:

    W·x + s·(B·A − B₀·A₀)·x = W·x + s·[B, −B₀]·[A; A₀]·x

That is the same function of A and B with the same gradients, and a plain adapter of rank 2r: so it is saved, as PEFT
itself converts it, and any program applies it to the plain base.  Given up: quantising what is left of W, which the
first of the two papers does; ``loftq`` is there for that error.

LoftQ is the first of its rounds, as in PEFT's ``replace_lora_weights_loftq``: the quantised weight stays, and A and B
begin with what it lacks.  More rounds would quantise again, and the adapter would fit these weights alone.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from lorarun.quant.store import Store, dequantize

INITS = ("default", "gaussian", "pissa", "olora", "loftq")
NITER = re.compile(r"pissa_niter_(\d+)")


def known(init: str) -> bool:
    """Whether there is an initialisation of this name."""
    return init in INITS or NITER.fullmatch(init) is not None


def subtracts(init: str) -> bool:
    """Whether adapters begin with a part of the weight, and subtract it."""
    return init == "olora" or init.startswith("pissa")


@torch.no_grad()
def first_values(
    init: str,
    weight: Tensor | Store,
    r: int,
    scale: float,
    dtype: torch.dtype,
    generator: torch.Generator | None = None,
    original: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """A [r, in], B [out, r], both in ``dtype``, and what is subtracted: (A₀, −B₀), or None.

    weight [out, in]; original: with ``loftq`` the weight that was quantised, on any device.  Random numbers are those
    of ``generator``, on the CPU, or of torch's own.
    """
    rows, cols = weight.shape
    if init in ("default", "gaussian"):
        a, b = torch.empty(r, cols, device="cpu"), torch.zeros(rows, r, dtype=dtype, device="cpu")
        if init == "gaussian":
            return a.normal_(0.0, 1.0 / r, generator=generator).to(dtype), b, None
        bound = 1.0 / math.sqrt(cols)
        return a.uniform_(-bound, bound, generator=generator).to(dtype), b, None
    w = dequantize(weight, torch.float32)
    if init == "olora":
        q, upper = torch.linalg.qr(w)
        a, b = upper[:r], q[:, :r]
    else:
        if init == "loftq":
            assert original is not None
            w = original.to(w.device, torch.float32) - w
        a, b = _largest(w, r, scale, NITER.fullmatch(init), generator)
    a, b = a.to(dtype).contiguous(), b.to(dtype).contiguous()
    return a, b, (a.clone(), -b) if subtracts(init) else None


def _largest(
    w: Tensor, r: int, scale: float, rounds: re.Match[str] | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """A and B with scale · B·A the best approximation of w of rank r, its singular values shared between both."""
    if rounds is None:
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
    else:
        with torch.random.fork_rng(enabled=generator is not None):  # svd_lowrank knows only torch's own numbers
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            u, s, v = torch.svd_lowrank(w, r, niter=int(rounds[1]))
            vh = v.T
    root = (s[:r] / scale).sqrt()
    return root[:, None] * vh[:r], u[:, :r] * root
