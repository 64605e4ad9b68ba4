"""Tables of rotary embedding (Su et al. 2021, arXiv:2104.09864), with the scalings that published checkpoints use.

One pass through a model computes cosine and sine once, for its positions, and gives them to every block.  Frequencies
come from the configuration, never from a checkpoint, and stay in fp32 whatever the model is cast to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tables(NamedTuple):
    """Cosine and sine [batch or 1, seq, head_dim / 2] fp32 of one pass's positions, which every block of it is given.

    ``decided`` is what the pass has decided so far, see :func:`lorarun.kernels.replay.decide`.
    """

    cos: Tensor
    sin: Tensor
    decided: dict[Any, Any]


class Rotary:
    """A model's tables; a plain object and no module, whose frequencies a cast of the model would reach.

    ``rope`` is what :func:`lorarun.config.rope_parameters` returns.
    """

    def __init__(self, head_dim: int, rope: Mapping[str, Any], max_positions: int) -> None:
        self.head_dim, self.rope, self.max_positions = head_dim, dict(rope), max_positions
        self.dynamic = rope["rope_type"] == "dynamic"
        self.inv_freq, self.amplitude = frequencies(head_dim, rope, max_positions)
        self._on_device = self.inv_freq

    def __call__(self, positions: Tensor) -> Tables:
        """The tables of a pass through the model, for positions [batch or 1, seq]."""
        if self._on_device.device != positions.device:
            self._on_device = self.inv_freq.to(positions.device)
        inv_freq = self._on_device
        if self.dynamic and not positions.is_meta and (longest := int(positions.max()) + 1) > self.max_positions:
            inv_freq = frequencies(self.head_dim, self.rope, self.max_positions, longest)[0].to(positions.device)
        angles = positions.unsqueeze(-1).float() * inv_freq
        return Tables(angles.cos() * self.amplitude, angles.sin() * self.amplitude, {})


def frequencies(
    head_dim: int, rope: Mapping[str, Any], max_positions: int, length: int | None = None
) -> tuple[Tensor, float]:
    """The angles per position, fp32 [head_dim / 2], and the factor on cosine and sine.

    default: theta^(−2i/d).  linear: positions divided by ``factor``.  dynamic: a larger theta once ``length`` passes
    max_positions ("NTK-aware" scaling).  llama3: wavelengths beyond the original context divided by ``factor``, a
    blend between. yarn: arXiv:2309.00071, sections 3.2 to 3.4. factors: what each frequency is divided by.
    """
    kind, theta = rope["rope_type"], rope["rope_theta"]
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    if kind == "dynamic":
        stretch = rope["factor"] * max(length or 0, max_positions) / max_positions - (rope["factor"] - 1)
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    inv_freq = 1.0 / theta**exponent
    if kind == "linear":
        return inv_freq / rope["factor"], 1.0
    if kind == "factors":
        if len(rope["factors"]) != len(inv_freq):
            raise ValueError(f"config.json: {len(rope['factors'])} rotary factors, expected {len(inv_freq)}.")
        return inv_freq / torch.tensor(rope["factors"], dtype=torch.float32, device="cpu"), 1.0
    if kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rope, head_dim, max_positions)
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's scaling: by how many turns a frequency makes over the original context, keep, blend or divide it."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1 above `high` turns, 0 below `low`
    return kept * inv_freq + (1.0 - kept) * inv_freq / rope["factor"]


def _yarn(inv_freq: Tensor, rope: Mapping[str, Any], head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    factor, theta = rope["factor"], rope["rope_theta"]
    original = rope.get("original_max_position_embeddings") or max_positions

    def dimension(turns: float) -> float:
        """The (real-valued) index of the frequency that makes this many turns over the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    divided = ramp.clamp(0.0, 1.0)

    def temperature(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    amplitude = rope.get("attention_factor")
    if amplitude is None:
        one, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        amplitude = temperature(factor, one) / temperature(factor, all_dim) if one and all_dim else temperature(factor)
    return inv_freq * (1.0 - divided) + inv_freq / factor * divided, float(amplitude)


def dynamic_limit(rotary: Rotary | dict[str, Rotary]) -> int | None:
    """The length beyond which a model's frequencies depend on the length (dynamic scaling); None: there is none."""
    tables = rotary.values() if isinstance(rotary, dict) else [rotary]
    return min((table.max_positions for table in tables if table.dynamic), default=None)
