"""Storages followed from birth to death, and what torch's allocator makes of them.

A dispatch mode sees every operation, notes each new storage, and hears of its end when the last reference dies, as the
caching allocator of torch does.  It serves any kind of device whose work happens in the thread that asks for it: meta
tensors, which have shapes and no data, and the CPU.  What meta tensors cannot show is added where it happens: the
workspace of cuDNN's attention backward.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 2**20
Event = tuple[Any, int]  # (which storage, its bytes; negative when it is freed)


def rounded(size: int) -> int:
    """What the allocator takes for ``size`` bytes: whole blocks of 512."""
    return -(-size // 512) * 512


class Tracer(TorchDispatchMode):
    """Notes every storage on devices of type ``device`` that is made inside a ``with`` block, and when it dies.

    events: (number of the storage, bytes in whole blocks), negative bytes where it is freed.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device = device
        self.events: list[Event] = []
        self._known: dict[int, tuple[int, Any]] = {}  # address → (number, −1 for what was there before; weak reference)
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors(args):
            self._see(tensor, new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out if isinstance(out, (tuple, list)) else (out,)):
            self._see(tensor, new=True)
        if func is _CUDNN_BACKWARD and self.device == "meta":
            q, k = args[1], args[2]  # [batch, heads, seq, head_dim]
            # dq in fp32, a sum for each row and, with grouped heads, dk and dv of each head before they are added up.
            grouped = 2 * q.nbytes if q.shape[1] != k.shape[1] else 0
            workspace = rounded(4 * q.numel() + 4 * q.numel() // q.shape[-1] + grouped)
            self._count += 1
            self.events += [(self._count, workspace), (self._count, -workspace)]
        return out

    def number(self, tensor: Tensor) -> int:
        """Of the storage of a tensor that was seen."""
        return self._known[tensor.untyped_storage()._cdata][0]

    def alive(self) -> list[int]:
        """The bytes of each storage that was made and is still there."""
        there = {number for number, _ in self._known.values()}
        return [size for number, size in self.events if size > 0 and number in there]

    def _see(self, tensor: Tensor, new: bool) -> None:
        if tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, rounded(storage.nbytes())
        if key in self._known:
            return
        number = -1
        if new:
            self._count += 1
            number = self._count
            if size:
                self.events.append((number, size))
        self._known[key] = number, weakref.ref(storage, partial(self._died, key, number, size))

    def _died(self, key: int, number: int, size: int, _: Any) -> None:
        del self._known[key]
        if number > 0 and size:
            self.events.append((number, -size))


_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [each for each in value if isinstance(each, Tensor)]
    return found


def peak(events: Iterable[Event]) -> int:
    """The most bytes that are held at once."""
    held = highest = 0
    for _, size in events:
        held += size
        highest = max(highest, held)
    return highest


class Reserved:
    """torch's caching allocator, as far as it decides how much of a device is reserved.

    Its rules, as torch's notes on CUDA semantics and its allocator state them: up to 1 MiB comes from segments of 2
    MiB, below 10 MiB from segments of 20 MiB, more gets a segment of its own in whole 2 MiB; the smallest free block
    that is large enough is taken, and split where more than 1 MiB (512 bytes among the small) remains.  One stream, no
    expandable segments; segments are never given back, as long as the device has room.
    """

    def __init__(self) -> None:
        self.total = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (bytes, address), small ones and large
        self._used: dict[Any, tuple[bool, int, int]] = {}
        self._starts: dict[int, int] = {}  # free blocks: address → bytes
        self._ends: dict[int, int] = {}  # free blocks: address behind it → address

    def run(self, events: Iterable[Event]) -> Reserved:
        for name, size in events:
            if size > 0:
                self._take(name, size)
            else:
                self._give(name)
        return self

    def _take(self, name: Any, size: int) -> None:
        small = size <= MIB
        pool = self._free[small]
        at = bisect.bisect_left(pool, (size, 0))
        if at == len(pool):
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            block, start = segment, self.total * 2 + 1024  # a gap between segments, so that they never merge
            self.total += segment
        else:
            block, start = pool.pop(at)
            del self._starts[start], self._ends[start + block]
        if block - size > (0 if small else MIB):
            self._put(small, start + size, block - size)
            block = size
        self._used[name] = small, start, block

    def _give(self, name: Any) -> None:
        small, start, block = self._used.pop(name)
        pool = self._free[small]
        if (after := self._starts.get(start + block)) is not None:
            self._remove(pool, start + block, after)
            block += after
        if (before := self._ends.get(start)) is not None:
            size = start - before
            self._remove(pool, before, size)
            start, block = before, block + size
        self._put(small, start, block)

    def _remove(self, pool: list[tuple[int, int]], start: int, size: int) -> None:
        pool.pop(bisect.bisect_left(pool, (size, start)))
        del self._starts[start], self._ends[start + size]

    def _put(self, small: bool, start: int, size: int) -> None:
        bisect.insort(self._free[small], (size, start))
        self._starts[start], self._ends[start + size] = size, start
