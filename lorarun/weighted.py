"""A module whose weight an adapter may train otherwise than by a low-rank update.

``Weighted`` is what projections, norms and the embedding have in common.  An adapter can hold a whole copy of a
module's parameters (PEFT's ``modules_to_save``), which runs in place of the frozen ones, or single rows of a table
(its ``trainable_token_indices``).  Neither touches ``weight``: the base model stays what it was, several adapters can
differ, and switching between them is a matter of one name.  Parameters are named as PEFT names them.

A copy is trained in its own dtype, fp32 by default, and rounded to the weight's where it is used: AdamW's steps are far
below a rounding of 16 bits.  What it costs is that rounding, once for each use, and four bytes a number instead of two.
Gradients arrive in the copy's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorarun.kernels.replay import decide


class Copy(nn.Module):
    """A module's parameters once more, of one adapter."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


class TokenRows(nn.Module):
    """Rows of a table [tokens, hidden] by adapter, and which tokens they are of: int64, ascending."""

    def __init__(self) -> None:
        super().__init__()
        self.trainable_tokens_delta = nn.ParameterDict()

    def add(self, name: str, tokens: Tensor, rows: Tensor) -> None:
        self.trainable_tokens_delta[name] = rows if isinstance(rows, nn.Parameter) else nn.Parameter(rows)
        self.register_buffer(f"tokens_{name}", tokens, persistent=False)

    def of(self, name: str) -> tuple[Tensor, nn.Parameter]:
        """The tokens of an adapter and their rows."""
        return getattr(self, f"tokens_{name}"), self.trainable_tokens_delta[name]

    def __contains__(self, name: str) -> bool:
        return name in self.trainable_tokens_delta


class Weighted(nn.Module):
    """A module with a ``weight`` (and perhaps a ``bias``), of which an adapter may hold a copy, or rows."""

    weight: Any  # a Parameter, or a store
    modules_to_save: Any  # copies by adapter, there when there are any
    token_adapter: Any  # a TokenRows, likewise

    def __init__(self) -> None:
        super().__init__()
        self.active: str | None = None  # the adapter whose low-rank update runs
        self.trained: str | None = None  # the one whose copy or rows do
        self.merged: tuple[str, Tensor] | None = None  # (adapter, the weight before it was added)
        self.bias_before: Tensor | None = None  # likewise, where a copy has a bias

    def copy_of(self, name: str | None) -> Copy | None:
        """An adapter's copy of this module's parameters, if it has one."""
        held: Any = self._modules.get("modules_to_save")
        return held[name] if held is not None and name in held else None

    def rows_of(self, name: str | None) -> tuple[Tensor, nn.Parameter] | None:
        """The tokens of which an adapter trains the rows here, and those rows; None where it does not."""
        held: Any = self._modules.get("token_adapter")
        return held.of(name) if held is not None and name in held else None

    def _running(self, kind: str) -> str | None:
        """The adapter that runs, as it was when this pass through the model began."""
        if kind not in self._modules:
            return None
        return decide((self, kind), lambda: self.trained if self.merged is None else None)

    def copy(self) -> Copy | None:
        """The copy that runs in place of the frozen parameters, if one does."""
        return self.copy_of(self._running("modules_to_save"))

    def master(self) -> Any:
        """The weight that runs, in the dtype that it is trained in."""
        copy = self.copy()
        return self.weight if copy is None else copy.weight

    def effective(self) -> Any:
        """The weight that runs, in the dtype of the frozen one."""
        copy = self.copy()
        return self.weight if copy is None else copy.weight.to(self.weight.dtype)

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """The tokens whose rows the running adapter replaces, and those rows; None where it does not."""
        return self.rows_of(self._running("token_adapter"))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.merged is not None:
            raise ValueError(
                f"state_dict: the adapter {self.merged[0]!r} is merged into {prefix}weight and would be applied twice "
                "when this is loaded. Call unmerge(model) first; save_merged writes a merged checkpoint."
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)


def replace_rows(x: Tensor, ids: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Embeddings x [..., hidden] of ``ids`` [...], those of the given tokens taken from their rows."""
    tokens, values = rows
    slot = torch.searchsorted(tokens, ids).clamp(max=len(tokens) - 1)
    return torch.where((tokens[slot] == ids).unsqueeze(-1), F.embedding(slot, values).to(x.dtype), x)


def replace_columns(logits: Tensor, hidden: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Logits [..., vocab] of ``hidden`` [..., dim], those of the given tokens computed from their rows."""
    tokens, values = rows
    return logits.index_copy(-1, tokens, F.linear(hidden, values.to(hidden.dtype)).to(logits.dtype))
