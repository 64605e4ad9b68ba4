"""Whether a step can be a CUDA graph here and now, and making one of it.

What the captured steps of training (:mod:`lorarun.graph`) and of decoding (:mod:`lorarun.decode`) have in common.
torch's own ``torch.cuda.graph`` leaves its allocator and generator inside a capture that failed; after a failure here
the process goes on without graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lorarun.kernels.backend import runs_triton, why
from lorarun.nn import Model


def modes(device: torch.device) -> str | None:
    """What is switched on around a step that a replay would not notice; None if nothing is."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "a dispatch mode is active"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a function transform is active"
    if nn.modules.module._has_any_global_hook():
        return "there are hooks on all modules"
    return None


def capturable(model: Model) -> str | None:
    """Why this device or model has no graphs; None where it has."""
    weight = model.model.embed_tokens.weight
    if model.device.type != "cuda":
        return f"graphs are captured on CUDA devices, not on {model.device.type}"
    if not runs_triton(weight):
        return why(model.device)
    if torch.cuda.is_current_stream_capturing():
        return "somebody else's graph is being captured"
    return None


def record(run: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Capture ``run`` on the current stream as a CUDA graph in ``pool``; returns its replay.

    Where that fails torch is as before: ending a capture that is invalid raises before the allocator has left the pool,
    and before torch's generator has left the capture (it would refuse every later draw).
    """
    graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    drawn = generator.clone_state()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        run()
    except BaseException:
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)
        generator.graphsafe_set_state(drawn)
        raise
    graph.capture_end()
    return graph.replay
