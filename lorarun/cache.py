"""The key/value cache of decoding, for layers that see everything and layers that see a window.

A full layer's keys and values are allocated once, for the whole length; a sliding layer keeps the last ``window − 1``,
which is all that its next query can see beside itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorarun.kernels.attention import Spans, document_spans
from lorarun.nn import Model


class Cache:
    """Keys and values of every layer for ``batch`` rows of at most ``capacity`` tokens.

    ``length`` counts the slots that are filled; a row's padding on the left fills slots too, and ``first`` [batch, 1]
    is where its text starts (None: at slot 0 in every row).
    """

    def __init__(self, model: Model, batch: int, capacity: int) -> None:
        config = model.config
        shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
        self.capacity, self.length = capacity, 0
        self.first: Tensor | None = None
        self.windows: list[int | None] = list(config.windows)
        self._layers: list[tuple[Tensor, Tensor]] = []
        for window in self.windows:
            size = shape if window is None else (batch, 0, *shape[2:])
            empty = torch.empty(size, dtype=model.dtype, device=model.device)
            self._layers.append((empty, torch.empty_like(empty)))

    def update(self, layer: int, k: Tensor, v: Tensor, spans: Spans | None) -> tuple[Tensor, Tensor, Spans | None]:
        """Append k, v [batch, new, kv_heads, head_dim] of a layer.

        Returns the keys and values that the new queries attend to, and the queries' spans, counted from the first of
        those keys.  ``length`` moves on after the last layer.
        """
        end = self.length + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"The cache holds {self.capacity} tokens; {end} were asked for.")
        keys, values = self._layers[layer]
        window = self.windows[layer]
        if window is None:
            keys[:, self.length : end], values[:, self.length : end] = k, v
            keys, values = keys[:, :end], values[:, :end]
        else:
            gone = self.length - keys.shape[1]
            spans = None if spans is None else Spans((spans.first - gone).clamp(min=0))
            keys, values = torch.cat((keys, k), dim=1), torch.cat((values, v), dim=1)
            past = max(0, keys.shape[1] - (window - 1))
            recent = keys[:, past:], values[:, past:]
            # After a long prompt a view would hold on to the keys of all of it; a step leaves one token behind.
            self._layers[layer] = (recent[0].clone(), recent[1].clone()) if past > 1 else recent
        if layer == len(self._layers) - 1:
            self.length = end
        return keys, values, spans


def place(
    ids: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Cache | None
) -> tuple[Tensor, Spans | None]:
    """Where each token stands: its position [batch or 1, seq], and the span of its document (None: the whole row).

    ids, documents [batch, seq].  ``positions`` overrides the default, the index inside the document.
    """
    if ids.ndim != 2 or ids.numel() == 0:
        raise ValueError(f"ids have the shape {list(ids.shape)}; expected [batch, seq] with at least one token.")
    seq = ids.shape[1]
    start = 0 if cache is None else cache.length
    spans = None
    if documents is not None:
        if start:
            raise ValueError("documents belong to the first call with a cache; later calls pass the new ids alone.")
        spans = document_spans(documents)
        if cache is not None:
            if bool((documents[:, -1] < 0).any()):
                raise ValueError("A batch that fills a cache must be padded on the left: each row ends in a token.")
            cache.first = spans.first[:, -1:]
    elif cache is not None and cache.first is not None:
        spans = Spans(cache.first.expand(-1, seq))
    if positions is None:
        slots = torch.arange(start, start + seq, device=ids.device).unsqueeze(0)
        positions = slots if spans is None else slots - spans.first
    return positions, spans
