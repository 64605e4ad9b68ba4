"""Under the interpreter no kernel may read or write outside the tensors that it was given.

A GPU has no such check: memory behind a tensor is mostly somebody else's, and a stray read there is multiplied by 0 or
masked out later, until it lies behind the last page.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lorarun.kernels.backend import INTERPRETED, triton


@pytest.fixture(autouse=True)
def inside_its_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    interpreter = triton.runtime.interpreter
    memory, grid = interpreter._interpreter, interpreter.GridExecutor
    given = grid._init_args_hst
    first, last = np.empty(0, np.int64), np.empty(0, np.int64)  # bytes of the tensors of the kernel that runs

    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes where the copies lie on which the interpreter works."""
        nonlocal first, last
        found = given(self, *args, **kwargs)
        spans: dict[int, int] = {}

        def walk(part: Any) -> None:
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                spans[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
            elif isinstance(part, (list, tuple)):
                list(map(walk, part))
            elif isinstance(part, dict):
                walk(list(part.values()))
            elif hasattr(part, "base"):  # a descriptor of tiles
                walk(part.base)

        walk(found)
        first = np.array(sorted(spans), np.int64)
        last = np.array([spans[start] for start in sorted(spans)], np.int64)
        return found

    def check(pointers: Any, mask: Any, size: int, what: str) -> None:
        at = np.asarray(pointers, np.uint64).astype(np.int64)[np.asarray(mask, bool)]
        if at.size and first.size:
            owner = np.searchsorted(first, at, side="right") - 1
            stray = (owner < 0) | (at + size > last[owner])
            assert not stray.any(), f"{stray.sum()} of {at.size} {what} lie outside the kernel's tensors"

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        check(pointers, mask, np.dtype(dtype).itemsize, "reads")
        return memory_load(pointers, mask, other, dtype)

    def store(pointers: Any, value: Any, mask: Any) -> Any:
        check(pointers, mask, np.asarray(value).itemsize, "writes")
        return memory_store(pointers, value, mask)

    memory_load, memory_store = memory.load, memory.store
    monkeypatch.setattr(memory, "load", load)
    monkeypatch.setattr(memory, "store", store)
    monkeypatch.setattr(grid, "_init_args_hst", begin)
    yield
