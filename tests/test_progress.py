"""The bar on a terminal, lines elsewhere, and the files of a run."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from lorarun import progress
from lorarun.progress import Progress
from lorarun.watch import PLOTS, draw


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines(run):
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_a_bar_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(tmp_path, 2) as run:
        run.step(1.25, 10)
        run.evaluated(0.5)
        run.step(1.125, 10)
    said = sys.stderr.getvalue()
    assert "| 2/2 steps, loss 1.125" in said and "tokens/s, 00:00 left" in said
    assert "evaluation loss after step 1: 0.5000\n" in said


def test_a_line_now_and_then_elsewhere(tmp_path, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress(tmp_path, 100) as run:
        for _ in range(100):  # a second and 8 tokens each
            run.step(2.0, 8)
    said = sys.stderr.getvalue().splitlines()
    assert said[0] == "step 1/100: loss 2.000, 8 tokens/s, 01:39 left"
    assert said[1].startswith("step 11/100") and said[-1] == "step 100/100: loss 2.000, 8 tokens/s, 00:00 left"
    assert len(said) == 11
    assert [line["tokens_per_s"] for line in lines(run)] == [8.0] * 100


def test_metrics_are_written_as_the_run_goes(tmp_path, monkeypatch):
    """Each line once it is complete: a step's evaluation belongs to it, and its time is not the next step's."""
    clock = iter([0.0, 2.0, 3.0, 4.0, 54.0, 59.0])  # start; evaluation, its end; step; end of an evaluation; step
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    run = Progress(tmp_path / "new", 2)
    run.evaluated(3.0)
    run.step(float("inf"), 10, lr=0.5)
    assert lines(run) == [{"step": 0, "elapsed_s": 2.0, "eval_loss": 3.0}]
    run.evaluated(2.0)
    run.step(1.0, 10, lr=0.25)
    run.close()
    run.close()
    assert [line["step"] for line in lines(run)] == [0, 1, 2]
    assert lines(run)[1]["memory_gib"] > 0.01
    assert lines(run)[1] | {"tokens_per_s": 0, "memory_gib": 0} == {
        "step": 1, "loss": None, "tokens": 10, "lr": 0.5, "tokens_per_s": 0, "memory_gib": 0, "elapsed_s": 4.0,
        "eval_loss": 2.0,
    }  # fmt: skip
    assert lines(run)[2]["tokens_per_s"] == pytest.approx(10 / 5)


def test_the_plots_are_pictures_of_what_there_is(tmp_path):
    rows = [
        {"step": 0, "eval_loss": 3.0},
        {"step": 1, "loss": None},
        {"step": 2, "loss": float("nan"), "lr": 0.5, "grad_norm": 1.0},
        {"step": 3, "loss": 2.0, "eval_loss": 2.5, "tokens_per_s": 8.0, "memory_gib": 1.5},
    ]
    for name, chosen in [("some", rows), ("none", [])]:
        (tmp_path / name).mkdir()
        assert draw(chosen, tmp_path / name) == tmp_path / name / "loss.png"
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == sorted(PLOTS)
        assert all((tmp_path / name / file).read_bytes().startswith(b"\x89PNG") for file in PLOTS)
    for file in PLOTS:  # each of them shows something
        assert (tmp_path / "some" / file).read_bytes() != (tmp_path / "none" / file).read_bytes(), file
