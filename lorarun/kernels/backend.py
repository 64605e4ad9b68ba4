"""Which implementation serves a call: Triton on a GPU or under its interpreter, the plain-PyTorch reference elsewhere.

The one place that imports Triton, and the one place that decides.  Triton does not exist on every platform and costs
import time, so it is loaded where this build of torch has an accelerator, or where ``TRITON_INTERPRET=1`` asks for the
interpreter; elsewhere a stand-in lets kernel files be read and imported all the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class _Absent:
    """Stands in for ``triton`` and ``triton.language`` while kernels are defined; none of them can be launched."""

    def __getattr__(self, name: str) -> Any:
        return lambda value=None, **options: value if value is not None else lambda function: function


triton: Any = _Absent()
tl: Any = _Absent()
HAS_TRITON = False
if INTERPRETED or torch.accelerator.current_accelerator() is not None:
    try:
        import triton  # type: ignore[no-redef]  # noqa: F401
        import triton.language as tl  # type: ignore[no-redef]  # noqa: F401
        import triton.tools.tensor_descriptor  # type: ignore[no-redef]  # noqa: F401

        HAS_TRITON = True
    except ImportError:  # macOS, or a build without it
        pass

_forced = False


@contextmanager
def reference() -> Iterator[None]:
    """Run the plain-PyTorch reference of every operation inside a ``with`` block.

    It counts where an operation is called: a backward pass takes the path that its forward took.
    """
    before = force(True)
    try:
        yield
    finally:
        force(before)


def force(on: bool) -> bool:
    """Switch the references on or off; returns how it was."""
    global _forced
    before, _forced = _forced, on
    return before


def forced() -> bool:
    """Whether the references are asked for."""
    return _forced


def runs_triton(x: Tensor) -> bool:
    """Whether a Triton kernel serves a call on ``x``.

    Not where the reference is forced, nor while a user's torch.compile traces (it gets the reference to optimise), nor
    on another GPU than torch's current one, where Triton would launch.
    """
    if not HAS_TRITON or _forced or torch.compiler.is_compiling():
        return False
    return INTERPRETED or (x.device.type in ("cuda", "xpu") and _is_current(x.device))


def _is_current(device: torch.device) -> bool:
    return device.index == torch.accelerator.current_device_index()


def why(device: torch.device) -> str:
    """The same decision in words, for reports."""
    if _forced:
        return "torch reference: it was asked for"
    if not HAS_TRITON:
        return "torch reference: no Triton here"
    if INTERPRETED:
        return "Triton's interpreter: TRITON_INTERPRET=1"
    if device.type not in ("cuda", "xpu"):
        return f"torch reference: Triton does not serve {device.type}"
    if not _is_current(device):
        return f"torch reference: {device} is not torch's current device, where Triton would launch"
    return "Triton"
