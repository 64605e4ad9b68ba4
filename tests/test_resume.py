"""Runs that are killed and go on as if they had not been, bit for bit, and those that are refused for being others."""

import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import resume_side as side
import torch
import toy
from resume_side import ROWS
from safetensors.torch import load_file, save_file

import lorarun
from lorarun import loop, progress, resume, train

SIDE = Path(side.__file__)
load = functools.partial(lorarun.load, device="cpu")


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    """A tiny model with a tokenizer."""
    return toy.make(shutil.copytree(tiny("llama3"), tmp_path_factory.mktemp("resume") / "base"))


def process(base, out, *where, **more):
    """Run in a process of its own; what it said, and how it ended."""
    command = [sys.executable, SIDE, base, out, json.dumps(more), *where]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    return done.stderr, done.returncode


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """Ten steps without a break."""
    out = tmp_path_factory.mktemp("whole")
    said, code = process(base, out)
    assert code == 0, said
    return out


def rows(out):
    """What metrics.jsonl says, without the clock."""
    timed = {"tokens_per_s", "elapsed_s", "memory_gib"}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


def assert_same_run(out, other):
    """Adapter, best adapter, moments, metrics and samples, all bit by bit."""
    assert rows(out) == rows(other)
    if (other / "samples.jsonl").exists():
        assert (out / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    names = [path.name for path in resume.checkpoints(other)]
    assert [path.name for path in resume.checkpoints(out)] == names and names
    for folder in ("adapter", "best", f"checkpoints/{names[-1]}/adapter"):
        if (other / folder).exists():
            ours, theirs = (load_file(path / folder / "adapter_model.safetensors") for path in (out, other))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours), folder
    ours, theirs = (resume.read_checkpoint(resume.checkpoints(path)[-1]) for path in (out, other))
    assert_equal(ours, theirs)


def assert_equal(ours, theirs, path=""):
    assert type(ours) is type(theirs), path
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{path}/{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), path
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(*pair, f"{path}/{i}")
    else:
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, path


def test_killed_and_gone_on_is_bit_by_bit_the_run_that_was_not(base, whole, tmp_path):
    """Ten steps, killed in a step, while a state is written, while an old checkpoint is removed, and before a new one
    takes its place.  (The first 74 passes are those up to step 4: 66 for an evaluation and a sample, 8 in training.)"""
    said, code = process(base, tmp_path, "forward 77")
    assert code == -signal.SIGKILL, said
    assert len(rows(tmp_path)) == 1 + 4  # the fifth step's is written with the next
    places = [
        ("fsync 5", "step-00000004"),  # two for the best adapter of step 5, two for that of step 8, then its state
        ("remove", "step-00000004"),
        ("rename 1", "step-00000008"),
        (None, "step-00000008"),
    ]
    for where, begins in places:
        said, code = process(base, tmp_path, *[where] if where else [], resume=True)
        assert code == (-signal.SIGKILL if where else 0), said
        assert f"going on from {tmp_path / 'checkpoints' / begins}" in said
    assert_same_run(tmp_path, whole)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_killed_by_somebody_else(base, whole, tmp_path):
    """At whatever point that is, once six steps are done."""
    running = subprocess.Popen([sys.executable, SIDE, base, tmp_path, "{}"], stderr=subprocess.DEVNULL)
    while running.poll() is None:
        if (tmp_path / "metrics.jsonl").exists() and len(rows(tmp_path)) > 6:
            running.kill()
        time.sleep(0.005)
    said, code = process(base, tmp_path, resume=True)
    assert code == 0 and "going on from" in said
    assert_same_run(tmp_path, whole)


# --- the same in one process -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Which take longer than such a run."""
    monkeypatch.setattr(progress, "draw", lambda rows, folder: None)


class Planted(Exception):
    pass


def break_at(model, number):
    """An error in that pass in training."""
    calls = []

    def hook(module, args, out):
        calls.append(None)
        if len(calls) == number:
            raise Planted

    model.model.norm.register_forward_hook(hook)


VARIANTS = {
    "fp32": ({}, {}, {}),
    "bf16 adapters": ({"dtype": torch.bfloat16}, {}, {}),
    "float16": ({}, {"dtype": torch.float16}, {}),
    "8 bits": ({"r": 64}, {}, {"optimizer": "adamw8bit"}),
    "groups": ({}, {}, {"b_ratio": 4.0, "smoothing": 0.1, "decay": 3}),
    "a stream": ({}, {}, {"buffer": 5}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_run_goes_on(base, tmp_path, name):
    """Seven steps of two batches, over several passes, with an error in the sixth; a checkpoint after the third."""
    adapter, loaded, more = VARIANTS[name]
    how = {"steps": 7, "lr": 1e-2, "max_tokens": 150, "accumulate": 2, "warmup": 2, "save_every": 3, **more}

    def fresh():
        return lorarun.add_lora(
            load(base, template="chatml", **loaded), **{"r": 4, "seed": 0, "dropout": 0.1, **adapter}
        )

    lorarun.fit(fresh(), ROWS, tmp_path / "whole", **how)
    broken = fresh()
    break_at(broken, 11)
    with pytest.raises(Planted):
        lorarun.fit(broken, ROWS, tmp_path / "out", **how)
    assert [path.name for path in resume.checkpoints(tmp_path / "out")] == ["step-00000003"]
    again = fresh()
    pointers = [p.data_ptr() for p in lorarun.lora_parameters(again)]
    result = lorarun.fit(again, ROWS, tmp_path / "out", resume=True, **how)
    assert [p.data_ptr() for p in lorarun.lora_parameters(again)] == pointers
    assert result.steps + result.skipped == 7
    assert_same_run(tmp_path / "out", tmp_path / "whole")


def small(base, out, rows=ROWS, lora=None, **more):
    model = lorarun.add_lora(load(base, template="chatml"), **{"r": 4, "seed": 0, **(lora or {})})
    how = {"steps": 4, "max_tokens": 150, "save_every": 2, "warmup": 0, **more}
    return lorarun.fit(model, rows, out, **how)


def test_the_oldest_checkpoints_are_removed_and_each_is_an_adapter(base, tmp_path):
    result = small(base, tmp_path, steps=7, keep=2)
    assert [path.name for path in resume.checkpoints(tmp_path)] == ["step-00000006", "step-00000007"]
    ours, last = (
        lorarun.lora_parameters(load(base, adapter=folder))
        for folder in (result.adapter, tmp_path / "checkpoints" / "step-00000007" / "adapter")
    )
    assert all(map(torch.equal, ours, last))


def test_a_finished_run_is_finished(base, tmp_path):
    first = small(base, tmp_path)
    before, weights = rows(tmp_path), load_file(first.adapter / "adapter_model.safetensors")
    shutil.rmtree(first.adapter)
    again = small(base, tmp_path, resume=True)
    assert (again.steps, again.last_loss) == (4, first.last_loss)
    assert rows(tmp_path) == before
    saved = load_file(again.adapter / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())


def test_patience_is_remembered(base, tmp_path, monkeypatch):
    """Stopped after two evaluations that were no better; gone on, it stays stopped."""
    losses = iter([3.0, 1.0, 2.0, 2.0])
    monkeypatch.setattr(
        loop, "evaluate", lambda model, held: train.Evaluation(next(losses), 1.0, 0.5, 10)
    )  # fmt: skip
    how = {"eval_rows": ROWS[:2], "eval_every": 1, "patience": 2, "steps": 9}
    first = small(base, tmp_path, **how)
    again = small(base, tmp_path, resume=True, **how)
    assert (
        (first.stopped, first.steps, first.best_loss) == (again.stopped, again.steps, again.best_loss) == (True, 3, 1.0)
    )


def test_another_run_is_refused_by_what_differs(base, tiny, tmp_path, capsys):
    out = tmp_path / "out"
    small(base, out)
    with pytest.raises(ValueError, match="has checkpoints of a run, the last of them step-00000004; resume=True"):
        small(base, out)
    with pytest.raises(ValueError, match="has checkpoints of a run"):
        small(base, out, save_every=None)
    changed = json.loads(json.dumps(ROWS))
    changed[7]["messages"][1]["content"] = "the brown fix 1"
    other = toy.make(shutil.copytree(tiny("qwen3"), tmp_path / "other"))
    edited = shutil.copytree(base, tmp_path / "edited")
    tensors = load_file(edited / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, edited / "model.safetensors", metadata={"format": "pt"})
    for message, folder, given in (
        (r"rows' digest is \w+, there it was \w+\.", base, {"rows": changed}),
        (r"rows is 23 rows: ", base, {"rows": ROWS[1:]}),
        (r"rows' digest is ", base, {"rows": ROWS[::-1]}),
        (r"adapter's r is 8, there it was 4; trained is 56 tensors of ", base, {"lora": {"r": 8}}),
        (r"adapter's alpha is 32, there it was 16", base, {"lora": {"alpha": 32}}),
        (r"adapter's targets is .*q_proj", base, {"lora": {"targets": ["q_proj"]}}),
        (r"base is Qwen", other, {}),
        (r"base is Llama \w+, there it was Llama \w+\.", edited, {}),
        (r"lr is 0.1, there it was 0.0002; schedule is linear", base, {"lr": 0.1, "schedule": "linear"}),
        (r"steps is 5, there it was 4", base, {"steps": 5}),
        (r"seed is 1, there it was 0", base, {"seed": 1}),
        (r"accumulate is 2", base, {"accumulate": 2}),
        (r"optimizer is adamw8bit", base, {"optimizer": "adamw8bit"}),
    ):
        with pytest.raises(ValueError, match=f"fit: this is another run than the one in .*step-00000004: .*{message}"):
            small(folder, out, resume=True, **given)
    small(base, out, resume=True, eval_rows=ROWS[:2], eval_every=3, samples=["what"], save_every=1, keep=5)


def test_a_stream_that_reads_otherwise_is_refused(base, tmp_path):
    how = {"buffer": 4, "steps": 6, "accumulate": 2}
    small(base, tmp_path, steps=6, buffer=4, accumulate=2)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    changed = json.loads(json.dumps(ROWS))
    changed[2]["messages"][1]["content"] = "the brown fix 1"
    with pytest.raises(ValueError, match="rows are not the checkpoint's, whose 8 batches read otherwise"):
        small(base, tmp_path, rows=changed, resume=True, **how)
    with pytest.raises(ValueError, match="rows are not the checkpoint's: they end . batches before it"):
        small(base, tmp_path, rows=iter(ROWS[:6]), resume=True, **how)
    assert small(base, tmp_path, resume=True, **how).steps == 6


def test_what_cannot_be_read_is_named(base, tmp_path, capsys):
    small(base, tmp_path, steps=6)
    newest = resume.checkpoints(tmp_path)[-1]
    state = (newest / "state.pt").read_bytes()
    (newest / "state.pt").write_bytes(state[: len(state) // 2])
    with pytest.raises(ValueError, match=r"checkpoint .*step-00000006 cannot be read .*; move it away to go on from"):
        small(base, tmp_path, steps=6, resume=True)
    newest.rename(tmp_path / "away")
    metrics = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(metrics[:2]))
    with pytest.raises(ValueError, match=r"metrics.jsonl has 2 rows; at the checkpoint there were 4"):
        small(base, tmp_path, steps=6, resume=True)
    (tmp_path / "metrics.jsonl").write_text("".join(metrics) + '{"step": 7, "lo')  # cut in the middle of a line
    assert small(base, tmp_path, steps=6, resume=True).steps == 6
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    small(base, tmp_path / "new", resume=True)
    assert f"no checkpoint in {tmp_path / 'new'}: starting from the beginning" in capsys.readouterr().err


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(base, tmp_path, monkeypatch, capsys):
    real, calls = torch.save, []

    def full(*args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    result = small(base, tmp_path, steps=6)
    assert "no checkpoint of step 4 in" in (said := capsys.readouterr().err) and "No space left" in said
    assert result.steps == 6
    assert [path.name for path in resume.checkpoints(tmp_path)] == ["step-00000002", "step-00000006"]
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit"])
def test_a_run_on_an_accelerator_goes_on(base, tmp_path, device, kind):
    """With captured steps, which hold pointers to what is restored; kernels may add in another order, so not to the
    bit."""
    how = {"steps": 8, "lr": 1e-2, "max_tokens": 150, "warmup": 2, "save_every": 3, "optimizer": kind}

    def fresh():
        return lorarun.add_lora(lorarun.load(base, template="chatml"), r=64, seed=0, dropout=0.1)

    lorarun.fit(fresh(), ROWS, tmp_path / "whole", **how)
    broken = fresh()
    real, calls = loop.accumulated, []

    def failing(*args):
        calls.append(None)
        if len(calls) == 5:
            raise Planted
        return real(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Planted):
        patch.setattr(loop, "accumulated", failing)
        lorarun.fit(broken, ROWS, tmp_path / "out", **how)
    again = broken if kind == "adamw" else fresh()  # the former has graphs already
    lorarun.fit(again, ROWS, tmp_path / "out", resume=True, **how)
    ours, theirs = ([row["loss"] for row in rows(tmp_path / name)] for name in ("out", "whole"))
    assert ours == pytest.approx(theirs, rel=5e-3) and theirs[-1] < 0.9 * theirs[0]
