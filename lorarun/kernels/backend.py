"""Which implementation serves a call: Triton on a GPU or under its interpreter, the plain-PyTorch reference elsewhere.

The one place that imports Triton, and the one place that decides.  Triton does not exist on every platform and costs
import time, so it is loaded where this build of torch has an accelerator, or where ``TRITON_INTERPRET=1`` asks for the
interpreter; elsewhere a stand-in lets kernel files be read and imported all the same.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


_shapes = False  # whether operations on meta tensors behave as they would on an accelerator


class _Absent:
    """Stands in for ``triton.language`` while kernels are defined; none of them can be run."""

    def __getattr__(self, name: str) -> Any:
        return lambda value=None, **options: value if value is not None else lambda function: function


class _NoTriton:
    """Stands in for ``triton``: what host functions need to work out shapes, and kernels that cannot be launched."""

    class JITFunction:
        def __init__(self, function: Any, **options: Any) -> None:
            self.__doc__ = function.__doc__

        def __getitem__(self, grid: Any) -> Any:
            return self.run

        def run(self, *args: Any, **options: Any) -> None:
            raise RuntimeError("this kernel cannot be launched: there is no Triton here.")

    @staticmethod
    def _descriptor(base: Tensor, *rest: Any) -> Any:
        return SimpleNamespace(base=base)

    tools = SimpleNamespace(tensor_descriptor=SimpleNamespace(TensorDescriptor=_descriptor))

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


_module: Any = _NoTriton()
tl: Any = _Absent()
HAS_TRITON = False
if INTERPRETED or torch.accelerator.current_accelerator() is not None:
    try:
        import triton as _module  # type: ignore[no-redef]
        import triton.language as tl  # type: ignore[no-redef]  # noqa: F401
        from triton.tools import tensor_descriptor  # noqa: F401

        HAS_TRITON = True
    except ImportError:  # macOS, or a build without it
        pass


class _Skips:
    """A launch that does nothing on meta tensors while :func:`shapes_only` is on; else the kernel's own."""

    def __getitem__(self, grid: Any) -> Any:
        launch = super().__getitem__(grid)  # type: ignore[misc]
        return functools.partial(_unless_meta, launch) if _shapes else launch


def _unless_meta(launch: Any, *args: Any, **options: Any) -> None:
    parts = (getattr(x, "base", x) for x in args)  # a tensor descriptor has one
    if not any(isinstance(x, Tensor) and x.is_meta for x in parts):
        launch(*args, **options)


@functools.cache
def _kernel_class() -> Any:
    interpreted = HAS_TRITON and INTERPRETED
    base = _module.runtime.interpreter.InterpretedFunction if interpreted else _module.JITFunction
    return type(base.__name__, (_Skips, base), {})  # Triton asks some of its objects for the name of their class


class _Triton:
    """Triton with a ``jit`` whose kernels know about meta tensors."""

    def jit(self, function: Any = None, **options: Any) -> Any:
        return functools.partial(self.jit, **options) if function is None else _kernel_class()(function, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(_module, name)


triton: Any = _Triton()

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


@contextmanager
def shapes_only() -> Iterator[None]:
    """Take the path of an accelerator for operations on meta tensors inside a ``with`` block; launches do nothing."""
    global _shapes
    before, _shapes = _shapes, True
    try:
        yield
    finally:
        _shapes = before


def runs_triton(x: Tensor) -> bool:
    """Whether a Triton kernel serves a call on ``x``.

    Not where the reference is forced, nor while a user's torch.compile traces (it gets the reference to optimise), nor
    on another GPU than torch's current one, where Triton would launch.
    """
    if _shapes and x.is_meta:
        return not _forced
    if not HAS_TRITON or _forced or torch.compiler.is_compiling():
        return False
    return INTERPRETED or (x.device.type in ("cuda", "xpu") and _is_current(x.device))


def autocast(device: torch.device) -> bool:
    """Whether torch.autocast is on there; it knows nothing of meta tensors."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def version(x: torch.Tensor) -> object:
    """Equal for as long as nothing was written into ``x``.  Tensors that were made under torch.inference_mode keep no
    count of that, so for them it never is."""
    return object() if x.is_inference() else x._version


def _is_current(device: torch.device) -> bool:
    return device.index == torch.accelerator.current_device_index()


def converts_fp8(device: torch.device) -> bool:
    """Whether the hardware converts to e4m3 itself (NVIDIA from Ada and Hopper on)."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


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
