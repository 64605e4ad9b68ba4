"""Projections that share an input, and the gated MLP, as the decoder calls them.

The seam between a family file and how its matrix products run.  A family says which projections belong together;
what runs here is each ``Linear`` in turn, which is the specification of whatever fuses them.
"""

from __future__ import annotations

from torch import Tensor

from lorarun.kernels.gated import gated
from lorarun.nn import Linear


def project(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """The outputs [batch, seq, out] of projections of one input x [batch, seq, in], adapters included."""
    return tuple(linear(x) for linear in linears)


def gated_mlp(h: Tensor, gate: Linear, up: Linear, down: Linear, act: str, residual: Tensor | None = None) -> Tensor:
    """down(act(gate(h)) · up(h)), plus ``residual`` where the call closes a block.  h, residual [batch, seq,
    hidden]."""
    opened, raised = project(h, gate, up)
    y: Tensor = down(gated(opened, raised, act))
    return y if residual is None else residual + y
