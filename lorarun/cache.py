"""The key/value cache of decoding: every row has a length of its own, and nothing is kept for padding.

A full layer has a slot for each token of a row, a sliding layer a ring of as many slots as its window: token p lies in
slot p % window, so that after writing a step's key the ring holds exactly what its query may see, in whatever order (a
softmax does not ask).  The usual way aligns rows on the right and keeps their padding in every layer; here a row of 5
tokens beside one of 4,000 reads 5.  All memory is allocated once, or, where nobody knows how long a conversation
becomes, twice as much whenever it is full.

What a pass brings is told by the shape of its ids:

    [batch, 1]          a step: a token for each row.  Lengths are read on the device, so a CUDA graph can replay it.
    [batch, seq]        as many more tokens for each row; in the first call ``documents`` may mark padding with −1
    [1, tokens]         with ``documents`` the row of each token: pieces of some rows one behind the other, padding none

In FP8 every pass sees keys and values as they are kept, its own too, so that the way a prompt is cut shows only where
the order of a sum tips a rounding.

Given up: tokens cannot be taken back from a ring that has gone round (:meth:`Cache.rewind`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.kernels.attention import Spans, document_spans
from lorarun.kernels.decode_attention import Held, Step
from lorarun.nn import Model


class Plan(NamedTuple):
    """Where the tokens of a pass come from and go to, the same for all layers.

    rows, histories: the cache's rows in the order of the batch's, and how many tokens each held.  added: how many each
    gets.  moves: for each size of a layer, on the device, which of the flattened tokens of the pass are written, to
    which row and which slot; into a ring the last ones alone.
    """

    rows: list[int]
    histories: list[int]
    added: list[int]
    moves: dict[int, tuple[Tensor, Tensor, Tensor]]


class Cache:
    """Keys and values of every layer for ``batch`` rows of at most ``capacity`` tokens.

    dtype: "fp8" keeps e4m3 codes with an fp32 scale for each vector, None the model's own dtype.  first: how many
    tokens a row has room for at first; more is allocated when a row needs it.  None: ``capacity``.

    ``lengths`` are the rows' tokens so far, ``filled`` the same on the device, int32 [batch].  ``ids`` and
    ``adapters`` are for whoever fills the cache to note what each row holds, and which adapter made it.
    """

    @torch.inference_mode(False)  # a cache may outlive the mode that it is made in
    def __init__(
        self, model: Model, batch: int, capacity: int, dtype: str | None = None, first: int | None = None
    ) -> None:
        if dtype not in (None, "fp8"):
            raise ValueError(f"The dtype of a cache is {dtype!r}; expected 'fp8', or None for the model's own.")
        config = model.config
        self._made_for = weakref.ref(model), model.device, model.dtype
        self.batch, self.capacity, self.room = batch, capacity, capacity if first is None else min(first, capacity)
        self.windows: list[int | None] = list(config.windows)
        self.lengths, self._longest = [0] * batch, 1
        self.filled = torch.zeros(batch, dtype=torch.int32, device=model.device)
        self.ids: list[list[int]] = [[] for _ in range(batch)]
        self.adapters: list[str | None] = [None] * batch
        # What each row held before tokens were taken back: rings have lost what those replaced.
        self._most = [0] * batch
        self._anywhere = False  # whether a step may be run again when rows are longer
        self._plan: Plan | None = None  # of a pass that is no step
        self._step: dict[int, tuple[Tensor, Tensor]] = {}  # slot and count of a step for each size of a layer
        self._layers: list[tuple[Held, Held]] = []
        for window in self.windows:
            shape = (batch, min(self.room, window or self.room), config.num_key_value_heads, config.head_dim)
            self._layers.append((_empty(model, shape, dtype), _empty(model, shape, dtype)))

    def belongs_to(self, model: Model) -> bool:
        """Whether this was made for ``model``, as it stands now: neither cast nor moved since."""
        made_for, device, dtype = self._made_for
        return made_for() is model and (device, dtype) == (model.device, model.dtype)

    @property
    def buffers(self) -> list[Tensor]:
        """All memory of keys and values."""
        return [part for layer in self._layers for held in layer for part in held if part is not None]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.buffers)

    def update(self, layer: int, k: Tensor, v: Tensor, spans: Spans | None) -> tuple[Tensor, Tensor, Any]:
        """Append k, v [batch, new, kv_heads, head_dim] of a layer.

        Returns the keys and values that the new queries attend to, and the queries' spans, counted from the first of
        those keys; for a step k and v themselves, which :func:`lorarun.kernels.attention.attention` puts in place.
        Lengths move on after the last layer.
        """
        keys, values = self._layers[layer]
        size, last = keys.data.shape[1], layer == len(self._layers) - 1
        if self._plan is None:
            step = Step(keys, values, *self._step[size], size if self._anywhere else min(self._longest, size))
            if last:
                self.filled.add_(1)
                self.advance()
            return k, v, step
        plan = self._plan
        new_keys, new_values = keys.encode(k.flatten(0, 1)), values.encode(v.flatten(0, 1))
        k, v = (new.decode(k.dtype).unflatten(0, k.shape[:2]) for new in (new_keys, new_values))
        seen = self._attended(plan, layer, k, v, spans)  # before a ring is written over
        source, row, slot = plan.moves[size]
        keys.put((row, slot), new_keys.at(source))
        values.put((row, slot), new_values.at(source))
        if seen is None:
            rows = slice(plan.rows[0], plan.rows[0] + len(plan.rows))
            place = rows, slice(plan.histories[0] + k.shape[1])
            seen = keys.at(place).decode(k.dtype), values.at(place).decode(v.dtype), None
        if last:
            self._plan = None
            for r, count in zip(plan.rows, plan.added, strict=True):
                self.lengths[r] += count
            self._send_lengths()
        return seen

    def _attended(
        self, plan: Plan, layer: int, k: Tensor, v: Tensor, spans: Spans | None
    ) -> tuple[Tensor, Tensor, Spans | None] | None:
        """What the queries of a plan see: the new keys, behind those that each row held before; None where that is what
        a full layer holds once they are written."""
        keys, values = self._layers[layer]
        size, window = keys.data.shape[1], self.windows[layer]
        past = min(max(plan.histories), size if window is None else window - 1)
        if not past:
            return k, v, spans
        if window is None and len(set(plan.histories)) == 1:
            return None
        device = k.device
        held = torch.tensor(plan.histories, device=device).unsqueeze(1)
        place = held - past + torch.arange(past, device=device)  # [rows, past]; below 0 there is nothing
        where = torch.tensor(plan.rows, device=device).unsqueeze(1), place.clamp(min=0) % size
        k = torch.cat((keys.at(where).decode(k.dtype), k), dim=1)
        v = torch.cat((values.at(where).decode(v.dtype), v), dim=1)
        if min(plan.histories) >= past:
            return k, v, None
        first = (past - held).clamp(min=0).to(torch.int32)
        return k, v, Spans(first.expand(-1, k.shape[1] - past))

    def plan(self, ids: Tensor, documents: Tensor | None) -> Tensor:
        """Prepare for a pass with ids [batch or 1, seq]: returns each token's position in its row, int64 as ids."""
        shape, device = tuple(ids.shape), ids.device
        self._plan = None
        if shape == (self.batch, 1) and documents is None:
            self._longest = max(self.lengths, default=0) + 1
            self._check(self._longest)
            self._step = {n: (self.filled % n, (self.filled + 1).clamp(max=n)) for n in self._sizes()}
            return self.filled.to(torch.int64).unsqueeze(1)
        packed = documents is not None and shape[0] == 1
        if not packed and shape[0] != self.batch:
            raise ValueError(f"This cache has {self.batch} rows; got ids {list(shape)} without documents to say which.")
        if documents is not None and not packed and any(self.lengths):
            raise ValueError("documents belong to the first call with a cache; later calls pass the new ids alone.")
        flat = torch.arange(self.batch).repeat_interleave(shape[1])
        if documents is not None:
            given = documents.cpu()
            flat = given.flatten() if packed else torch.where(given.flatten() < 0, -1, flat)
        source = (flat >= 0).nonzero().squeeze(1)
        row = flat[source]
        rows, added = (t.tolist() for t in torch.unique_consecutive(row, return_counts=True))
        wrong = len(set(rows)) < len(rows) or (packed and len(source) < len(flat)) or (rows and max(rows) >= self.batch)
        if wrong:
            raise ValueError(
                f"documents number the rows of the cache, 0 to {self.batch - 1}, each in one piece, without padding."
            )
        if packed and len(rows) > 1 and any(self.lengths[r] for r in rows):
            raise ValueError("A row that holds tokens already is continued alone, or together with all rows.")
        if not packed:
            counts = dict(zip(rows, added, strict=True))
            rows, added = list(range(self.batch)), [counts.get(r, 0) for r in range(self.batch)]
        histories = [self.lengths[r] for r in rows]
        self._check(max(h + n for h, n in zip(histories, added, strict=True)))
        within = torch.cat([torch.arange(n) for n in added]) if added else source
        place = within + torch.tensor(self.lengths)[row]
        back = torch.tensor(added).repeat_interleave(torch.tensor(added)) - 1 - within
        positions = torch.zeros(flat.shape, dtype=torch.int64)
        positions[source] = place
        moves = {}
        for n in self._sizes():
            chosen = (source, row, place % n) if n == self.room else (t[back < n] for t in (source, row, place % n))
            first, second, third = (t.to(device) for t in chosen)
            moves[n] = first, second, third
        self._plan = Plan(rows, histories, added, moves)
        return positions.view(shape).to(device)

    @property
    def full(self) -> bool:
        """Whether the next step moves the keys and values to a larger place, which a captured one knows nothing of."""
        return self.room <= max(self.lengths, default=0) < self.capacity

    def advance(self) -> None:
        """Count a step of every row that the device counts itself (in a replayed graph, say)."""
        self._check(max(self.lengths, default=0) + 1)
        self.lengths = [length + 1 for length in self.lengths]

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """Steps inside serve rows of any lengths: they can be replayed later."""
        self._anywhere = True
        try:
            yield
        finally:
            self._anywhere = False

    def rewind(self, row: int, length: int) -> bool:
        """Forget a row's tokens from ``length`` on; False, and nothing is done, where a ring has lost older ones.

        One token can always be taken back: the one that it replaced is not seen by the next.  A second one can not,
        until another has been put in the place of the first.
        """
        have = self.lengths[row]
        most = max(have, self._most[row])
        if length < min(have, most - 1) and most > min(self._sizes(), default=most):
            return False
        self.lengths[row], self._most[row] = min(length, have), most
        self.ids[row] = self.ids[row][:length]
        self._send_lengths()
        return True

    def clear(self, row: int) -> None:
        """Forget a row."""
        self.lengths[row], self._most[row], self.ids[row] = 0, 0, []
        self._send_lengths()

    def copy_row(self, source: int, targets: list[int]) -> None:
        """Let rows hold what another holds."""
        if not targets:
            return
        for part in self.buffers:
            count = min(self.lengths[source], part.shape[1])
            part[targets, :count] = part[source, :count].clone()
        for row in targets:
            self.lengths[row], self._most[row] = self.lengths[source], self._most[source]
        self._send_lengths()

    def _sizes(self) -> set[int]:
        return {keys.data.shape[1] for keys, _ in self._layers}

    def _send_lengths(self) -> None:
        self.filled.copy_(torch.tensor(self.lengths, dtype=torch.int32))

    def _check(self, wanted: int) -> None:
        if wanted > self.capacity:
            raise ValueError(f"The cache holds {self.capacity} tokens; {wanted} were asked for.")
        if wanted > self.room:
            self._grow(min(self.capacity, max(wanted, 2 * self.room)))

    @torch.inference_mode(False)
    def _grow(self, room: int) -> None:
        """Have room for so many tokens a row.  A ring that grows has not gone round: its tokens stay in their slots."""
        for layer, window in enumerate(self.windows):
            keys, values = self._layers[layer]
            if more := min(room, window or room) - keys.data.shape[1]:
                self._layers[layer] = keys.longer(more), values.longer(more)
        self.room = room


def vector_bytes(model: Model, dtype: str | None) -> int:
    """Of one key or value of one head in a cache of this dtype."""
    dim: int = model.config.head_dim
    return dim * model.dtype.itemsize if dtype is None else dim + torch.float32.itemsize


def _empty(model: Model, shape: tuple[int, ...], dtype: str | None) -> Held:
    """Zeros, as what nobody wrote is multiplied by a weight of 0."""
    if dtype is None:
        return Held(torch.zeros(shape, dtype=model.dtype, device=model.device))
    batch, slots, heads, _ = shape
    scale = torch.zeros((batch, heads, slots), device=model.device).transpose(1, 2)  # a head's are read together
    return Held(torch.zeros(shape, dtype=torch.uint8, device=model.device), scale)


def place(
    ids: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Cache | None
) -> tuple[Tensor, Spans | None]:
    """Where each token stands: its position [batch or 1, seq], and the span of its document (None: the whole row).

    ids, documents [batch, seq].  ``positions`` overrides the default, the index inside the document (with a cache,
    inside the row).
    """
    if ids.ndim != 2 or ids.numel() == 0:
        raise ValueError(f"ids have the shape {list(ids.shape)}; expected [batch, seq] with at least one token.")
    spans = None if documents is None else document_spans(documents.to(ids.device))
    if cache is not None:
        planned = cache.plan(ids, documents)
        return planned if positions is None else positions, spans
    if positions is None:
        index = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        positions = index if spans is None else index - spans.first
    return positions, spans
