"""scripts/bench.py where there is nothing to time: its sums, shapes, models and tables."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent / "scripts"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """`scripts(name)` imports one of the benchmark's files."""
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module
    sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("window,document", [(None, None), (9, None), (None, 12)])
def test_exact_attention_and_its_flops(scripts: Any, window: int | None, document: int | None) -> None:
    bench = scripts("bench_attention")
    inputs = bench.Inputs(bench.Case(2, 48, 4, 2, 16, window, document))
    results = inputs.both(inputs.ours)
    assert scripts("bench_timing").error(inputs.slice(results), inputs.exact()) < 2e-2
    mask = torch.ones(48, 48, dtype=torch.bool).tril()
    if window is not None:
        mask &= ~torch.ones(48, 48, dtype=torch.bool).tril(-window)
    if document is not None:
        numbers = inputs.documents[0]
        assert len(numbers.unique()) > 2 and 6 <= int((numbers == 0).sum()) <= 18
        mask &= numbers[:, None] == numbers[None, :]
    assert inputs.teraflops() == 2 * 2 * 2 * 4 * 16 * int(mask.sum()) / 1e12


def test_row_says_what_was_met_and_what_failed(scripts: Any) -> None:
    timing, kernels = scripts("bench_timing"), scripts("bench_kernels")
    bench = object.__new__(kernels.Bench)
    bench.outside = {"norm": {"liger": {"ms": 3.0, "captured": False}, "unsloth": {"failed": "no such thing"}}}
    row = timing.Row("norm", 1e-3, 2.0, 3.0, "TB/s", 0.8, {"torch": 1.25})
    bench._compare(row, lambda: None, {}, None)
    bench._judge(row, 0.85, {"torch": 1.2, "unsloth": 1.0})
    line = str(row)
    assert row.goals == {">= 85%": False, ">= 1.2x torch": True, ">= 1x unsloth": None}
    for words in (">= 85%: MISSED", "torch: met", "unsloth: not measured", "1.50x liger*", "failed: no such thing"):
        assert words in line
    assert str(timing.Row("norm", failed="OutOfMemoryError: no")).endswith("failed: OutOfMemoryError: no")


def test_a_peer_that_cannot_be_imported_is_one_line_that_says_why(scripts: Any) -> None:
    found = list(scripts("bench_timing").elsewhere("kernels", "nobody"))
    assert len(found) == 1 and "failed" in found[0] and "row" not in found[0]
