"""1, 2 and 4 processes do the same steps: loss, gradients and adapters to 1e-5, whatever batch lands where.

The bound: a gradient is a sum of fp32 terms in another order, whose roundings differ by a few 1e-7 of its largest
element.  What several steps of AdamW have made of it may differ by more, for it divides by the root of the second
moment: an adapter is held to 1e-4, and after a change of the number of processes to 1e-3.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_side as side
import torch
import toy
from safetensors.torch import load_file

import lorarun
from lorarun import distributed

SIZES = (2, 4)


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    return toy.make(shutil.copytree(tiny("llama3"), tmp_path_factory.mktemp("ranks") / "base"))


@pytest.fixture(scope="module")
def done(base, tmp_path_factory):
    """The folder in which all jobs are done."""
    out = tmp_path_factory.mktemp("done")
    ended = subprocess.run([sys.executable, side.__file__, base, out], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return out


def results(done, job, size):
    """What each process left."""
    return [torch.load(done / f"{job}-{size}-{rank}.pt") for rank in range(size)]


def close(ours, theirs, rel=1e-5):
    assert ours.keys() == theirs.keys() and ours
    for name, tensor in theirs.items():
        assert tensor.abs().max() > 0, name
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=rel * tensor.abs().max().item(), msg=name)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(ours, theirs, *keys, rel=1e-5):
    """Rows of metrics, where both have them."""
    assert ours.keys() == theirs.keys()
    there = [key for key in keys if key in theirs]
    assert [ours[key] for key in there] == pytest.approx([theirs[key] for key in there], rel=rel) and there


@pytest.mark.parametrize("size", SIZES)
def test_loss_and_gradients_are_those_of_one_process(done, size):
    """Also where a process has no batch, none with a target, or weighted tokens; with dropout."""
    (one,) = results(done, "steps", 1)
    for each in results(done, "steps", size):
        assert each["clock"] == one["clock"] == 6 + 5 + 1 + 2 + 12
        assert each["evaluation"] == pytest.approx(one["evaluation"], rel=1e-5)
        for ours, theirs in zip(each["steps"], one["steps"], strict=True):
            assert ours["count"] == theirs["count"] > 0
            assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-5)
            assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
            close(ours["grads"], theirs["grads"])


@pytest.mark.parametrize("size", SIZES)
def test_all_processes_have_the_same_adapter(done, size):
    first, *others = results(done, "steps", size)
    for each in others:
        for ours, theirs in zip(each["steps"], first["steps"], strict=True):
            assert all(torch.equal(ours["after"][name], p) for name, p in theirs["after"].items())


@pytest.mark.parametrize("size", (1, *SIZES))
def test_a_gradient_that_is_not_finite_somewhere_is_refused_everywhere(done, size):
    for each in results(done, "narrow", size):
        assert each["broken"] == 2 * 2 * 7 and each["scale"] == 4.0 and each["clock"] == [6, 6]
        assert each["why"] == "the loss is not finite; on the way forward layer 2 is the first that is not"
        assert each["none"] and each["sum"] == size


@pytest.mark.parametrize("size", SIZES)
def test_a_run_is_that_of_one_process(done, size):
    keys = ("loss", "lr", "grad_norm", "tokens", "supervised", "eval_loss", "eval_accuracy", "step")
    ours, theirs = lines(done / f"run-{size}"), lines(done / "run-1")
    assert len(ours) == len(theirs) > 6
    for mine, other in zip(ours, theirs, strict=True):
        same(mine, other, *keys)
    found = [load_file(done / f"run-{n}" / "adapter" / "adapter_model.safetensors") for n in (size, 1)]
    close(*found, rel=1e-4)
    said = [each["result"] for each in results(done, "run", size)]
    plot = 8  # only the first process draws
    assert all(each[:plot] == said[0][:plot] and each[plot + 1 :] == said[0][plot + 1 :] for each in said[1:])


def test_only_one_process_writes(done):
    for size in SIZES:
        names, expected = (
            sorted(str(path.relative_to(done / f"run-{n}")) for path in (done / f"run-{n}").rglob("*"))
            for n in (size, 1)
        )
        assert names == expected
        samples = (done / f"run-{size}" / "samples.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in samples] == sorted({json.loads(line)["step"] for line in samples})


@pytest.mark.parametrize("size", (1, 2))
def test_a_checkpoint_of_four_goes_on_with_fewer(done, size):
    assert results(done, f"broken-{size}", 4) == ["planted"] * 4
    ours, theirs = lines(done / f"resumed-{size}"), lines(done / "run-1")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        same(mine, other, "loss", "eval_loss", "grad_norm", "lr", rel=1e-4)
    found = [load_file(done / name / "adapter" / "adapter_model.safetensors") for name in (f"resumed-{size}", "run-1")]
    close(*found, rel=1e-3)


@pytest.mark.parametrize("size", SIZES)
def test_recomputation_and_layers_without_adapters(done, size):
    """huggingface/trl#921, huggingface/transformers#23728, artidoro/qlora#223: no hooks, nothing to be ready twice."""
    (one,) = results(done, "ahead", 1)
    first, *others = results(done, "ahead", size)
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-5)
    close(first["after"], one["after"], rel=1e-4)
    assert all(torch.equal(each["after"][name], p) for each in others for name, p in first["after"].items())


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_is_shared_too(done, size):
    (one,) = results(done, "stream", 1)
    for each in results(done, "stream", size):
        assert each["losses"] == pytest.approx(one["losses"], rel=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_processes_that_were_told_different_things(done, size):
    """Are refused; but for the adapter's first values, which are the first process's."""
    first, *others = results(done, "apart", size)
    for each in (first, *others):
        rows, rate, few = each["said"]
        assert "was given another run than this one: rows is " in rows
        assert "was given another run than this one: lr is 0." in rate
        assert f"accumulate=1 batches make a step, so of {size} processes {size - 1} would have nothing to do" in few
        assert each["seed"] == 0
        assert all(torch.equal(each["after"][name], p) for name, p in first["after"].items())


def test_a_process_of_several_that_did_not_join_is_refused(base, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"started 2 processes; call lorarun.distributed.start\(\) before"):
        lorarun.fit(side.adapted(base), side.ROWS, tmp_path)
    monkeypatch.delenv("WORLD_SIZE")
    distributed.start()
    assert (distributed.rank(), distributed.size(), distributed.share("abc")) == (0, 1, [(0, "a"), (1, "b"), (2, "c")])


def test_the_script_under_torchrun(base, tmp_path):
    """Two processes, one step's batches shared: what one process gets from steps of two batches."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in side.ROWS))
    script = Path(__file__).parent.parent / "scripts" / "finetune.py"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script, base, "--data",
        tmp_path / "rows.jsonl", "--eval", tmp_path / "rows.jsonl", "--device", "cpu", "--template", "chatml", "--rank",
        4, "--lr", 1e-2, "--steps", 4, "--max-tokens", 60, "--question", "what fox", "--out", tmp_path / "out",
    ]  # fmt: skip
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Before training") == 1 and ended.stderr.count("training on 24 rows") == 1
    model = lorarun.add_lora(lorarun.load(base, device="cpu", template="chatml"), r=4, seed=0)
    lorarun.fit(
        model, side.ROWS, tmp_path / "fit", lr=1e-2, steps=4, max_tokens=60, accumulate=2, warmup=0, eval_rows=side.ROWS
    )
    ours, theirs = lines(tmp_path / "out"), lines(tmp_path / "fit")
    assert len(ours) == len(theirs) == 5
    for mine, other in zip(ours, theirs, strict=True):
        # B begins at zero, so the first gradients are small, and AdamW makes full steps of what rounding left of them.
        rel = 1e-5 if mine["step"] in (0, 1) else 1e-4
        same(mine, other, "loss", "eval_loss", "grad_norm", "lr", "tokens", "supervised", rel=rel)
