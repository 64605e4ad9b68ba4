"""The loop: what it trains, writes and says, how it stops; and the same loop in the open, scripts/finetune.py."""

import functools
import io
import json
import math
import runpy
import shlex
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toy
from safetensors.torch import load_file

import lorarun
from lorarun import loop, train
from lorarun.data import batches, prepare

load = functools.partial(lorarun.load, device="cpu")
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"what {'quick ' * (i % 5)}fox {i}"},
            {"role": "assistant", "content": f"the brown fox {i % 3}"},
        ]
    }
    for i in range(24)
]


@pytest.fixture
def model(tiny, tmp_path):
    """A tiny model whose folder has a tokenizer, with an adapter."""
    folder = shutil.copytree(tiny("llama3"), tmp_path / "base")
    return lorarun.add_lora(load(toy.make(folder), template="chatml"), r=4, seed=0)


def metrics(result):
    return [json.loads(line) for line in result.metrics.read_text().splitlines()]


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def on_forward(model, call, act):
    """Do something to the final hidden states of the forward number `call`, counted from 1."""
    calls = []

    def hook(module, args, out):
        calls.append(None)
        return act(out) if len(calls) == call else None

    model.model.norm.register_forward_hook(hook)


def longest(model):
    return max(len(document.ids) for document in prepare(ROWS, model.tokenizer).documents)


def test_fit_learns_and_leaves_everything_behind(model, tmp_path, capsys):
    before, frozen = trained(model), {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    rows = [*ROWS, {"messages": [{"role": "user", "content": "quick " * 200}, {"role": "assistant", "content": "fox"}]}]
    result = lorarun.fit(
        model, rows, tmp_path / "out", epochs=6, lr=2e-2, max_tokens=150, eval_rows=ROWS[:5], eval_every=7, clip=0.5
    )
    said = capsys.readouterr().err
    data = prepare(ROWS, model.tokenizer)
    total = sum(len(document.ids) for document in data.documents)
    learned = sum(int((document.labels[1:] >= 0).sum()) for document in data.documents)
    assert f"training on 24 rows: {total:,} tokens, {learned:,} of them supervised" in said
    assert "1 of 25 rows left out: 1 longer than max_tokens=150 (row 25)" in said
    assert "evaluating on 5 rows" in said and f"{result.steps} steps of up to 150 tokens" in said
    assert str(result.adapter) in said

    lines = metrics(result)
    assert [line["step"] for line in lines] == list(range(result.steps + 1))
    assert sum(line.get("tokens", 0) for line in lines) == 6 * total
    assert sum(line.get("supervised", 0) for line in lines) == 6 * learned
    keys = {"step", "loss", "lr", "grad_norm", "tokens", "supervised", "tokens_per_s", "memory_gib", "elapsed_s"}
    measured = {"eval_loss", "eval_perplexity", "eval_accuracy", "eval_tokens"}
    for line in lines[1:]:
        due = line["step"] % 7 == 0 or line["step"] == result.steps
        assert line.keys() == (keys | measured if due else keys)
    assert lines[0].keys() == {"step", "elapsed_s", *measured}
    assert (result.first_loss, result.last_loss) == (lines[1]["loss"], lines[-1]["loss"])
    assert (result.eval_before, result.eval_after) == (lines[0]["eval_loss"], lines[-1]["eval_loss"])
    assert result.eval_after == train.evaluate(model, batches(ROWS[:5], model.tokenizer, 150)).loss
    assert result.eval_after < 0.8 * result.eval_before

    assert result.plot.read_bytes().startswith(b"\x89PNG")
    assert not result.interrupted and result.skipped == 0
    assert model.training and all(p.grad is None for p in model.parameters())
    after = trained(model)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.startswith(".") or "tmp" in path.name]
    saved = load(tmp_path / "base", adapter=result.adapter)
    got = {name: p for name, p in saved.named_parameters() if ".lora_" in name}
    assert got.keys() == after.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in after.items())


def test_the_schedule_advances_once_a_step(model, tmp_path):
    """24 batches by 4 are 6 steps (tracel-ai/burn#5695); two passes by 5 are 10, the last of 3 batches."""
    how = {"max_tokens": longest(model), "pack": False, "schedule": "linear"}
    single = [{"messages": row["messages"]} for row in ROWS if "fox 4" in row["messages"][0]["content"]][:1] * 24
    result = lorarun.fit(model, single, tmp_path, accumulate=4, lr=1e-3, warmup=2, **how)
    assert result.steps == 6
    rates = [0.0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4]
    assert [line["lr"] for line in metrics(result)] == pytest.approx(rates, rel=1e-12)
    one = metrics(result)[0]["tokens"]
    result = lorarun.fit(model, single, tmp_path, accumulate=5, epochs=2, **how)
    assert [line["tokens"] / one for line in metrics(result)] == [5 / 4] * 9 + [3 / 4]


def test_a_step_is_the_same_however_it_is_cut_and_packed(model, tmp_path):
    """1 × 8 = 2 × 4 = 4 × 2 = 8 × 1 rows of one length, packed and padded: loss and gradient of every step."""
    rows = [{"prompt": f"what {i % 10}", "completion": f" fox {i // 10}"} for i in range(24)]
    lengths = {len(document.ids) for document in prepare(rows, model.tokenizer).documents}
    assert len(lengths) == 1
    before, expected = trained(model), None
    for cut in (1, 2, 4, 8):
        for pack in (True, False):
            model.load_state_dict(before, strict=False)
            how = {"max_tokens": 8 // cut * max(lengths), "accumulate": cut, "pack": pack, "lr": 1e-3, "warmup": 0}
            lines = metrics(lorarun.fit(model, rows, tmp_path, **how))
            found = [(line["loss"], line["grad_norm"]) for line in lines]
            expected = expected or found
            assert len(found) == 3 and [line["tokens"] for line in lines] == [8 * max(lengths)] * 3
            # The second and third come behind steps of AdamW, from a B of zero: see tests/test_distributed.py.
            assert found[0] == pytest.approx(expected[0], rel=1e-5)
            assert [x for pair in found for x in pair] == pytest.approx([x for p in expected for x in p], rel=1e-3)


def test_steps_take_as_many_passes_as_they_need_and_orders_follow_the_seed(model, tmp_path):
    before = trained(model)

    def run(**how):
        model.load_state_dict(before, strict=False)
        return [line["loss"] for line in metrics(lorarun.fit(model, ROWS, tmp_path, max_tokens=150, lr=1e-3, **how))]

    first = run(steps=8)
    assert len(first) == 8
    assert first == run(steps=8)
    assert first != run(steps=8, seed=1)


def test_the_account_of_bad_rows_comes_before_the_first_step(model, tmp_path, capsys):
    def row(user, *answers):
        said = [{"role": "assistant", "content": answer} for answer in answers]
        return {"messages": [{"role": "user", "content": user}, *said]}

    bad = [row("what", ""), row("what"), row("what", "fox " * 30_000), row("what <|im_end|>\n<|im_start|>", "fox")]
    with pytest.warns(UserWarning, match="answers are empty in row 57: they are not learned"):
        lorarun.fit(model, [*ROWS * 2, *ROWS[:8], *bad], tmp_path, steps=1, warmup=0)
    said = capsys.readouterr().err
    left_out = "4 of 60 rows left out: 1 longer than max_tokens=2048 (row 59), "
    left_out += "2 without an answer or text to learn (rows 57, 58), 1 with con"
    assert left_out in said
    assert said.index("training on 56 rows: ") < said.index("step 1/1")
    with pytest.raises(ValueError, match="there is nothing to learn: 2 of 2 rows left out"):
        lorarun.fit(model, [row("what"), row("who")], tmp_path / "none")
    rows = [row("what", "fox")] * 100
    rows[56] = {"messages": [{"role": "usr", "content": "what"}]}
    with pytest.raises(ValueError, match="^row 57: role 'usr' is unknown"):
        lorarun.fit(model, rows, tmp_path / "none")
    with pytest.raises(ValueError, match="^row 57: "):  # held-out rows too
        lorarun.fit(model, ROWS, tmp_path / "none", eval_rows=rows)
    assert not (tmp_path / "none").exists()


def test_rates_by_the_kind_of_parameter_and_a_decay_at_the_end(model, tmp_path):
    """After a first step of AdamW every value has moved by its rate: B by 8 times as much as the schedule says."""
    before = trained(model)
    torch.nn.init.ones_(lorarun.lora_parameters(model)[1])  # or the A beside it has no gradient
    start = trained(model)
    result = lorarun.fit(model, ROWS, tmp_path, steps=1, lr=1e-3, warmup=0, max_tokens=150, b_ratio=8.0)
    moved = {name: (p - start[name]).abs().max().item() for name, p in trained(model).items()}
    a, b = list(before)[:2]
    assert ".lora_A." in a and moved[a] == pytest.approx(1e-3, rel=1e-3)
    assert ".lora_B." in b and moved[b] == pytest.approx(8e-3, rel=1e-3)
    result = lorarun.fit(
        model, ROWS, tmp_path, steps=8, lr=1e-3, warmup=2, decay=0.5, schedule="linear", max_tokens=150
    )
    rates = [0.0, 5e-4, 1e-3, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4]
    assert [line["lr"] for line in metrics(result)] == pytest.approx(rates, rel=1e-12)


def test_smoothing_and_eight_bits_reach_the_loop(model, tmp_path):
    plain = lorarun.fit(model, ROWS, tmp_path, steps=1, max_tokens=150, warmup=0, lr=1e-9)
    batch = next(iter(batches(ROWS, model.tokenizer, 150, shuffle=True)))
    result = lorarun.fit(model, ROWS, tmp_path, steps=1, max_tokens=150, warmup=0, lr=1e-9, smoothing=0.25)
    assert result.last_loss == pytest.approx(lorarun.loss(model, batch, smoothing=0.25).item(), rel=1e-5)
    assert result.last_loss != pytest.approx(plain.last_loss, rel=1e-3)
    result = lorarun.fit(model, ROWS, tmp_path, epochs=6, lr=2e-2, max_tokens=150, optimizer="adamw8bit")
    assert result.last_loss < 0.8 * result.first_loss


def test_float16_is_trained_with_a_loss_scale(tiny, tmp_path):
    """Found by halving: the first steps may overflow, and say so; then it learns as in fp32."""
    folder = toy.make(shutil.copytree(tiny("llama3"), tmp_path / "base"))
    losses = {}
    for dtype in (torch.float16, torch.float32):
        model = lorarun.add_lora(load(folder, template="chatml", dtype=dtype), r=4, seed=0)
        result = lorarun.fit(model, ROWS, tmp_path / str(dtype), steps=12, lr=1e-2, max_tokens=150, warmup=0)
        losses[dtype] = [line["loss"] for line in metrics(result)]
        assert ("loss_scale" in metrics(result)[0]) == (dtype == torch.float16)
        if dtype == torch.float16:
            assert result.skipped <= 4 and metrics(result)[-1]["loss_scale"] == 2.0 ** (16 - result.skipped)
    assert losses[torch.float16][-1] < 0.8 * losses[torch.float16][0]
    assert losses[torch.float16][0] == pytest.approx(losses[torch.float32][0], rel=1e-2)


def test_a_fraction_can_be_held_out(model, tmp_path, capsys):
    result = lorarun.fit(model, iter(ROWS), tmp_path, eval_fraction=0.25, max_tokens=150)
    said = capsys.readouterr().err
    assert "training on 18 rows" in said and "evaluating on 6 rows" in said
    assert result.eval_before and result.eval_after


# --- looking at it on the way ----------------------------------------------------------------------------------------


def planted(monkeypatch, losses):
    """Evaluations that give these losses, one after the other; the adapters as they were then."""
    seen, values = [], iter(losses)

    def evaluated(model, held):
        seen.append(trained(model))
        loss = next(values)
        return train.Evaluation(loss, math.exp(loss), 0.5, 10)

    monkeypatch.setattr(loop, "evaluate", evaluated)
    return seen


HOW = {"lr": 1e-2, "max_tokens": 150, "warmup": 0, "schedule": "constant"}


def test_the_best_adapter_is_kept_and_patience_ends_the_run(model, tmp_path, monkeypatch, capsys):
    """Evaluated before and after every second step: the lowest loss is that of step 4, two more are not below it."""
    seen = planted(monkeypatch, [3.0, 2.0, 1.0, 1.0, 1.5, 0.1])
    result = lorarun.fit(
        model, ROWS, tmp_path / "out", steps=20, eval_rows=ROWS[:2], eval_every=2, patience=2, **HOW
    )  # fmt: skip
    assert result.stopped and result.steps == 8 and len(seen) == 5
    assert (result.best, result.best_loss, result.eval_after) == (tmp_path / "out" / "best", 1.0, 1.5)
    said = capsys.readouterr().err
    assert "stopped: 2 evaluations without a lower loss than 1.0000" in said and "the best, of step 4" in said
    for folder, expected in ((result.best, seen[2]), (result.adapter, seen[4])):
        saved = load(tmp_path / "base", adapter=folder)
        kept = {name: p for name, p in saved.named_parameters() if ".lora_" in name}
        assert all(torch.equal(kept[name], tensor) for name, tensor in expected.items())
    lines = metrics(result)
    assert [line["eval_loss"] for line in lines if "eval_loss" in line] == [3.0, 2.0, 1.0, 1.0, 1.5]
    assert lines[-1]["eval_perplexity"] == math.exp(1.5) and lines[-1]["eval_accuracy"] == 0.5


def test_nothing_is_best_that_is_no_better_than_before(model, tmp_path, monkeypatch):
    planted(monkeypatch, [1.0, 1.0, 2.0])
    result = lorarun.fit(model, ROWS, tmp_path / "out", steps=2, eval_rows=ROWS[:2], eval_every=1, **HOW)
    assert result.best is None and result.best_loss is None and not (tmp_path / "out" / "best").exists()
    assert not result.stopped


def test_samples_are_written_whenever_the_model_is_looked_at(model, tmp_path, capsys):
    prompts = ["what fox", [{"role": "user", "content": "what quick fox 1"}]]
    result = lorarun.fit(model, ROWS, tmp_path / "out", steps=4, eval_every=3, samples=prompts, **HOW)
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(n, p) for n in (0, 3, 4) for p in prompts]
    expected = [lorarun.generate(model, prompt, max_new_tokens=loop.SAMPLE_TOKENS) for prompt in prompts]
    assert [line["answer"] for line in lines[-2:]] == expected and any(expected)
    assert "sample after step 4: " in capsys.readouterr().err
    assert model.training and result.steps == 4
    losses = [line["loss"] for line in metrics(result)]
    again = lorarun.add_lora(load(tmp_path / "base", template="chatml"), r=4, seed=0)
    assert [line["loss"] for line in metrics(lorarun.fit(again, ROWS, tmp_path / "out", steps=4, **HOW))] == losses
    assert not (tmp_path / "out" / "samples.jsonl").exists()


# --- more rows than memory holds -------------------------------------------------------------------------------------


class Counted:
    """Rows that are made when they are asked for, again in each pass."""

    def __init__(self, rows):
        self.rows, self.read, self.passes = rows, 0, 0

    def __iter__(self):
        self.passes += 1
        for row in self.rows:
            self.read += 1
            yield row


def test_a_stream_is_read_as_it_is_used(model, tmp_path, capsys, monkeypatch):
    """Never more ahead than the buffer, the batch at hand and the next; over as many passes as the steps need."""
    rows, ahead = Counted(ROWS), []
    real = loop.accumulated
    monkeypatch.setattr(loop, "accumulated", lambda *a: ahead.append((rows.passes, rows.read)) or real(*a))
    result = lorarun.fit(model, rows, tmp_path, steps=30, buffer=4, max_tokens=longest(model), pack=False, lr=1e-2)
    assert "training on rows that are read on the way" in capsys.readouterr().err
    assert result.steps == 30 and rows.passes == 2 and result.last_loss < result.first_loss
    assert [read for _, read in ahead[:19]] == list(range(5, 24))  # four held, and one that does not fit any more


def test_the_run_ends_with_an_iterator(model, tmp_path, capsys):
    result = lorarun.fit(
        model, iter(ROWS), tmp_path, steps=99, warmup=0, buffer=4, max_tokens=longest(model), pack=False, accumulate=5,
        eval_rows=ROWS[:2], save_every=50,
    )  # fmt: skip
    assert result.steps == 5 and result.eval_after is not None and not result.interrupted
    assert [line["supervised"] for line in metrics(result)[1:]] == [30] * 4 + [24]
    assert "the rows ended after 5 of 99 steps" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / "step-00000005").is_dir()


def test_a_broken_row_of_a_stream_is_named_and_nothing_is_lost(model, tmp_path):
    rows = [*ROWS[:12], {"messages": [{"role": "usr", "content": "what"}]}, *ROWS[12:]]
    with pytest.raises(ValueError, match=r"row 13: role 'usr' is unknown"):
        lorarun.fit(model, rows, tmp_path, steps=20, buffer=2, max_tokens=longest(model), lr=1e-2, warmup=0)
    again = lorarun.lora_parameters(load(tmp_path / "base", adapter=tmp_path / "adapter"))
    assert all(map(torch.equal, lorarun.lora_parameters(model), again)) and any(p.any() for p in again[1::2])
    model.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(200, 64), requires_grad=False)
    with pytest.raises(ValueError, match=r"fit: the rows have id \d+, the model's table ends at 199"):
        lorarun.fit(model, ROWS, tmp_path, steps=2, buffer=4)


# --- watching --------------------------------------------------------------------------------------------------------


def test_tensorboard_and_wandb_are_told_when_asked(model, tmp_path, monkeypatch, capsys):
    """Stand-ins for both, for neither is needed; what they are given is what metrics.jsonl has."""
    told = {"board": [], "run": []}

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path / "out" / "tensorboard")

        def add_text(self, tag, text):
            assert tag == "settings" and "lr: 0.01" in text and "base: Llama" in text

        def add_scalar(self, key, value, step):
            told["board"].append((step, key, value))

        def flush(self):
            pass

        def close(self):
            told["board"].append("closed")

    class Client:
        @staticmethod
        def init(dir, config):  # noqa: A002 - as it is called there
            assert dir == str(tmp_path / "out") and config["lr"] == 1e-2
            return Client()

        def log(self, numbers, step):
            told["run"] += [(step, key, value) for key, value in numbers.items()]
            if step == 3:
                raise ConnectionError("gone")

        def finish(self):
            told["run"].append("finished")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", Client)
    result = lorarun.fit(
        model, ROWS, tmp_path / "out", steps=4, eval_rows=ROWS[:2], watch=["tensorboard", "wandb"], **HOW
    )  # fmt: skip
    written = [(row["step"], k, v) for row in metrics(result) for k, v in row.items() if k != "step"]
    assert told["board"] == [*written, "closed"]
    assert told["run"] == [row for row in written if row[0] <= 3]
    assert "a watcher is dropped: ConnectionError: gone" in capsys.readouterr().err
    assert result.steps == 4


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_watcher_that_is_not_installed_is_named(model, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ValueError, match=f"watch: .* is not installed .*pip install {name}"):
        lorarun.fit(model, ROWS, tmp_path / "out", watch=[name])
    assert not (tmp_path / "out").exists()


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c():
    """As in a terminal: a program that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_saves_what_is_trained(model, tmp_path, capsys):
    on_forward(model, 4, lambda out: signal.raise_signal(signal.SIGINT))
    result = lorarun.fit(model, ROWS, tmp_path / "out", steps=9, lr=1e-2, max_tokens=150, warmup=0, eval_rows=ROWS[:2])
    assert result.interrupted and result.eval_after is None
    assert result.steps == len(metrics(result)) - 1 == 2  # the first forward was the evaluation
    assert f"adapter in {result.adapter}" in capsys.readouterr().err
    saved = load(tmp_path / "base", adapter=result.adapter)
    parameters = {name: p for name, p in saved.named_parameters() if ".lora_" in name}
    assert all(torch.equal(parameters[name], tensor) for name, tensor in trained(model).items())
    assert any(p.any() for name, p in parameters.items() if ".lora_B." in name)


def test_out_of_memory_says_what_is_kept_and_what_would_help(model, tmp_path):
    """The third step's allocation fails; the run goes on from its checkpoint once there is room again."""

    def full(out):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    on_forward(model, 3, full)
    how = dict(steps=4, lr=1e-2, max_tokens=150, warmup=0, save_every=1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        lorarun.fit(model, ROWS, tmp_path / "out", **how)
    said = str(caught.value)
    assert said.startswith("fit: out of memory in step 3 (CUDA out of memory. Tried to allocate 2.00 GiB.)")
    assert f"the adapter of 2 steps is in {tmp_path / 'out' / 'adapter'}" in said and "resume=True" in said
    saved = load(tmp_path / "base", adapter=tmp_path / "out" / "adapter")
    parameters = {name: p for name, p in saved.named_parameters() if ".lora_" in name}
    assert all(torch.equal(parameters[name], tensor) for name, tensor in trained(model).items())
    assert lorarun.fit(model, ROWS, tmp_path / "out", resume=True, **how).steps == 4


def test_a_step_that_is_not_finite_changes_nothing(model, tmp_path, capsys):
    seen, calls = [], []

    def poison(module, args, out):
        """The third step's pass, and the one after it that looks for the layer."""
        calls.append(None)
        seen.append(trained(model))
        return out * math.nan if len(calls) in (3, 4) else None

    model.model.layers[1].register_forward_hook(poison)
    result = lorarun.fit(model, ROWS, tmp_path, steps=5, lr=1e-2, max_tokens=150, warmup=0)
    assert (result.steps, result.skipped) == (4, 1)
    assert all(torch.equal(seen[2][name], seen[4][name]) for name in seen[0])
    assert not all(torch.equal(seen[4][name], seen[5][name]) for name in seen[0])
    assert model.clock.step == 5
    lines = metrics(result)
    assert [line["step"] for line in lines if "skipped" in line] == [3]
    assert lines[2]["loss"] is None and lines[2]["grad_norm"] is None
    where = "the loss is not finite; on the way forward layer 1 is the first that is not"
    assert lines[2]["skipped"] == where and f"step 3 is skipped: {where}" in capsys.readouterr().err
    assert all(p.isfinite().all() for p in trained(model).values())


def test_a_gradient_that_overflows_is_named_by_the_layer_it_begins_in(model, tmp_path):
    calls = []

    def poison(grad):
        calls.append(None)
        return grad * math.inf if len(calls) == 2 else None

    model.model.layers[2].register_forward_hook(lambda module, args, out: out.register_hook(poison) and None)
    result = lorarun.fit(model, ROWS, tmp_path, steps=3, lr=1e-2, max_tokens=150, warmup=0)
    assert (result.steps, result.skipped) == (2, 1)
    assert loop.why_skipped(model, [], 0, ["their norm"], 1.0).startswith("the norm of the gradient is not finite")
    where = metrics(result)[1]["skipped"]
    assert where.startswith("on the way back model.layers.2.mlp.down_proj.lora_B.default.weight is the first of 4")


def test_without_matplotlib_there_is_no_plot(model, tmp_path, monkeypatch):
    (tmp_path / "loss.png").write_bytes(b"of another run")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert lorarun.fit(model, ROWS, tmp_path, steps=1, warmup=0).plot is None


def test_untrained_embeddings_are_named_when_the_data_uses_them(model, tmp_path):
    occurring = {i for document in prepare(ROWS, model.tokenizer).documents for i in document.ids.tolist()}
    used, unused = max(occurring), next(i for i in range(1000) if i not in occurring)
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        table[[used, unused]] = 0.0
    before = table.clone()
    with pytest.warns(UserWarning, match=rf"never trained \(all zero\): ids {used}\. ") as caught:
        result = lorarun.fit(model, ROWS, tmp_path, steps=2, warmup=0, max_tokens=150)
    assert len(caught) == 1
    assert torch.equal(table, before)
    assert math.isfinite(result.last_loss)


def test_ids_beyond_the_table_are_refused(model, tmp_path):
    model.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(200, 64), requires_grad=False)
    with pytest.raises(ValueError, match="the model's table ends at 199: this is another model's tokenizer"):
        lorarun.fit(model, ROWS, tmp_path)


def test_wrong_arguments_are_refused_together(model, tmp_path):
    with pytest.raises(
        ValueError, match=r"accumulate is 0; .*schedule is 'cosin'; expected one of cosine, linear, constant"
    ):
        lorarun.fit(model, ROWS, tmp_path, accumulate=0, schedule="cosin")
    wrong = [
        {"epochs": 0},
        {"steps": 0},
        {"steps": 1.5},
        {"lr": 0.0},
        {"lr": math.nan},
        {"accumulate": -1},
        {"warmup": -1},
        {"warmup": 1.0},
        {"clip": 0.0},
        {"weight_decay": -0.1},
        {"eval_fraction": 1.0},
        {"eval_every": 0},
        {"decay": 1.5},
        {"optimizer": "sgd"},
        {"b_ratio": 0.0},
        {"embedding_lr": -1.0},
        {"smoothing": 1.0},
        {"patience": 0},
        {"save_every": 0},
        {"keep": 0},
        {"buffer": 0},
        {"watch": ["tensorbord"]},
        {"watch": "wandb"},
    ]
    for each in wrong:
        with pytest.raises(ValueError, match=rf"^fit: {next(iter(each))} is .*; expected "):
            lorarun.fit(model, ROWS, tmp_path, **each)
    with pytest.raises(ValueError, match="warmup=4 is 4 of 4 steps"):
        lorarun.fit(model, ROWS, tmp_path, steps=4, warmup=4)
    with pytest.raises(ValueError, match="decay=3 is 3 of 4 steps, 2 of them warm-up; expected 1 to 2"):
        lorarun.fit(model, ROWS, tmp_path, steps=4, warmup=2, decay=3)
    with pytest.raises(ValueError, match="schedule='constant' never does"):
        lorarun.fit(model, ROWS, tmp_path, decay=3, schedule="constant")
    with pytest.raises(ValueError, match="with buffer .* give steps; with buffer no fraction .* give eval_rows"):
        lorarun.fit(model, ROWS, tmp_path, buffer=3, eval_fraction=0.5)
    with pytest.raises(ValueError, match="optimizer is 'paged_adamw8bit', whose moments .* use 'adamw8bit' there"):
        lorarun.fit(model, ROWS, tmp_path, optimizer="paged_adamw8bit")
    with pytest.raises(ValueError, match="not both"):
        lorarun.fit(model, ROWS, tmp_path, eval_fraction=0.1, eval_rows=ROWS)
    with pytest.raises(ValueError, match="leaves none"):
        lorarun.fit(model, ROWS[:1], tmp_path, eval_fraction=0.1)
    with pytest.raises(ValueError, match="read_rows"):
        lorarun.fit(model, "rows.jsonl", tmp_path)
    assert not any(tmp_path.glob("*.jsonl"))


def test_nothing_to_train_is_refused(model, tmp_path):
    lorarun.merge(model)
    with pytest.raises(ValueError, match="unmerge"):
        lorarun.fit(model, ROWS, tmp_path)
    lorarun.unmerge(model)
    model.lm_head.requires_grad_(True)
    with pytest.raises(ValueError, match=r"1 other parameters require gradients too \(lm_head.weight\)"):
        lorarun.fit(model, ROWS, tmp_path)
    model.lm_head.requires_grad_(False)
    lorarun.use_adapter(model, None)
    with pytest.raises(ValueError, match="call add_lora"):
        lorarun.fit(model, ROWS, tmp_path)
    with pytest.raises(ValueError, match="call add_lora"):
        lorarun.fit(load(tmp_path / "base"), ROWS, tmp_path)


@pytest.mark.gpu
def test_fit_on_an_accelerator(tiny, tmp_path, device):
    folder = toy.make(shutil.copytree(tiny("llama3"), tmp_path / "base"))
    model = lorarun.add_lora(lorarun.load(folder, template="chatml"), r=4, seed=0)
    assert (model.device.type, model.dtype) == (device.type, torch.bfloat16)
    result = lorarun.fit(model, ROWS, tmp_path, epochs=6, lr=2e-2, max_tokens=150, accumulate=2, eval_rows=ROWS[:5])
    assert result.eval_after < 0.8 * result.eval_before and result.skipped == 0
    assert all(p.dtype == torch.float32 and p.any() for p in trained(model).values())


# --- the loop in the open ---

SCRIPT = Path(__file__).parent.parent / "scripts" / "finetune.py"


def test_the_open_loop_is_the_loop_of_fit(tiny, tmp_path, monkeypatch, capsys):
    folder = toy.make(shutil.copytree(tiny("llama3"), tmp_path / "base"))
    for name, rows in [("a", ROWS[:10]), ("b", ROWS[10:]), ("held", ROWS[:4])]:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "script"
    files = ["--data", tmp_path / "a.jsonl", "--data", tmp_path / "b.jsonl", "--eval", tmp_path / "held.jsonl"]
    settings = [
        "--device",
        "cpu",
        "--template",
        "chatml",
        "--rank",
        4,
        "--lr",
        1e-2,
        "--steps",
        10,
        "--max-tokens",
        150,
    ]
    command = [SCRIPT, folder, *files, *settings, "--question", "what fox", "--out", out]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr().out
    assert said.index("Before training") < said.index("After training")
    assert "evaluation loss: " in said and str(out / "adapter") in said and str(out / "loss.png") in said

    model = lorarun.add_lora(load(folder, template="chatml"), r=4, seed=0)
    how = {"lr": 1e-2, "steps": 10, "max_tokens": 150, "eval_rows": ROWS[:4], "warmup": 0}
    result = lorarun.fit(model, ROWS, tmp_path / "fit", **how)
    ours, expected = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (out, tmp_path / "fit"))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
    timed = {"tokens_per_s", "elapsed_s", "memory_gib"}
    lines, others = (
        [{key: value for key, value in json.loads(line).items() if key not in timed} for line in path.open()]
        for path in (out / "metrics.jsonl", result.metrics)
    )
    assert lines == others

    more = [
        SCRIPT,
        out / "adapter",
        *files,
        "--device",
        "cpu",
        "--steps",
        1,
        "--max-tokens",
        150,
        "--out",
        tmp_path / "on",
    ]
    monkeypatch.setattr(sys, "argv", [str(word) for word in more])
    runpy.run_path(str(SCRIPT), run_name="__main__")  # trains the adapter further
    on = load_file(tmp_path / "on" / "adapter" / "adapter_model.safetensors")
    far = sum((on[key] - tensor).square().sum() for key, tensor in ours.items()).sqrt()
    assert on.keys() == ours.keys() and 0 < far < 0.1 * sum(t.square().sum() for t in ours.values()).sqrt()


def test_the_script_stopped_before_a_step_speaks_of_no_adapter(tiny, tmp_path, monkeypatch, capsys):
    folder = toy.make(shutil.copytree(tiny("llama3"), tmp_path / "base"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = [SCRIPT, folder, "--data", tmp_path / "rows.jsonl", "--template", "chatml", "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in [*words, "--device", "cpu"]])

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("lorarun.train.accumulated", interrupt)
    with pytest.raises(SystemExit, match="error: stopped before the first step"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr()
    assert "adapter" not in said.out and "saving" not in said.err and not (tmp_path / "out" / "adapter").exists()


def test_what_the_script_says_can_be_done_next_can_be_done(tiny, tmp_path, monkeypatch, capsys):
    """In four bits; a second run leaves the adapter of the first.  Warnings and the template are one sentence."""
    folder = toy.make(shutil.copytree(tiny("llama3"), tmp_path / "base"))
    rows = [*ROWS, {"messages": [{"role": "user", "content": "fox"}, {"role": "assistant", "content": ""}]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(SCRIPT.parent.parent)

    def run(*words):
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        runpy.run_path(str(words[0]), run_name="__main__")
        return capsys.readouterr()

    command = [SCRIPT, folder, "--data", tmp_path / "rows.jsonl", "--template", "chatml", "--bits", 4, "--steps", 2]
    command += ["--max-tokens", 150, "--out", tmp_path / "out"]
    said = run(*command)
    assert said.err.count("messages are written with the chat template 'chatml' that was asked for.") == 1
    assert "\nwarning: answers are empty in row 25" in said.err and "UserWarning" not in said.err
    file = tmp_path / "out" / "adapter" / "adapter_model.safetensors"
    adapter = file.read_bytes()
    with pytest.raises(SystemExit, match="adapter is there: choose another --out"):
        run(*command)
    assert file.read_bytes() == adapter and "training on" not in capsys.readouterr().err
    chat, export, another = (
        shlex.split(line, comments=True)[1:] for line in said.out.splitlines() if line.startswith("  python")
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("/adapter off\n"))
    said = run(*chat)
    assert "The adapter is off." in said.err and "'chatml' that was saved with the adapter" in said.err
    assert "4-bit weights work on a CPU" in said.err or torch.accelerator.is_available()
    run(*export)
    lorarun.save_merged(lorarun.load(tmp_path / "out" / "adapter", bits=4), tmp_path / "merged")
    ours, theirs = (
        load_file(path / "model.safetensors") for path in (tmp_path / "out" / "merged", tmp_path / "merged")
    )
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert another[another.index("--out") + 1] == f"{tmp_path / 'out'}-qwen3"


def test_it_is_short_enough_to_copy():
    assert len(SCRIPT.read_text().splitlines()) <= 120


def test_an_error_in_the_middle_loses_nothing(model, tmp_path, monkeypatch):
    calls, accumulated = [], loop.accumulated

    def failing(*args):
        calls.append(None)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("planted")
        return accumulated(*args)

    monkeypatch.setattr(loop, "accumulated", failing)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        lorarun.fit(model, ROWS, tmp_path / "out", steps=10, max_tokens=longest(model))
    again = load(tmp_path / "base", adapter=tmp_path / "out" / "adapter")
    kept = lorarun.lora_parameters(again)
    assert all(map(torch.equal, lorarun.lora_parameters(model), kept)) and any(p.any() for p in kept[1::2])


def test_a_run_without_a_step_leaves_the_adapter_that_is_there(model, tmp_path, monkeypatch, capsys):
    lorarun.fit(model, ROWS, tmp_path / "out", steps=2, max_tokens=longest(model))
    before = (tmp_path / "out" / "adapter" / "adapter_model.safetensors").read_bytes()

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "accumulated", interrupt)
    fresh = lorarun.add_lora(load(tmp_path / "base", template="chatml"), r=4, seed=1)
    assert "replaced" not in capsys.readouterr().err
    result = lorarun.fit(fresh, ROWS, tmp_path / "out", steps=2, max_tokens=longest(model))
    assert result.interrupted and result.steps == 0
    assert "out/adapter of an earlier run will be replaced" in capsys.readouterr().err
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").read_bytes() == before


def test_gradients_from_before_are_not_part_of_the_first_step(tmp_path, model):
    norms = []
    for stale in (False, True):
        fresh = lorarun.add_lora(load(tmp_path / "base", template="chatml"), r=4, seed=0)
        if stale:
            ids = torch.arange(3, 40).unsqueeze(0)
            (100 * lorarun.loss(fresh, {"ids": ids, "labels": ids})).backward()
        result = lorarun.fit(fresh, ROWS, tmp_path / str(stale), steps=1, max_tokens=longest(fresh), warmup=0)
        norms.append(metrics(result)[0]["grad_norm"])
    assert norms[0] == norms[1]


def test_ways_to_train_are_compared_over_seeds(tiny, tmp_path, monkeypatch, capsys):
    """scripts/compare.py: every kind learns, in its own way, from the same beginning."""
    folder = toy.make(shutil.copytree(tiny("llama3"), tmp_path / "base"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    script = SCRIPT.with_name("compare.py")
    words = [script, folder, "--data", tmp_path / "rows.jsonl", "--eval", tmp_path / "rows.jsonl", "--seeds", 2]
    words += ["--steps", 6, "--every", 3, "--max-tokens", 150, "--lr", 1e-2, "--full-lr", 1e-3, "--device", "cpu"]
    monkeypatch.setattr(
        sys, "argv", [str(word) for word in [*words, "--template", "chatml", "--out", tmp_path / "out"]]
    )
    runpy.run_path(str(script), run_name="__main__")
    rows = [json.loads(line) for line in (tmp_path / "out" / "curves.jsonl").open()]
    found = {(row["kind"], row["seed"], row["step"]): row["loss"] for row in rows}
    assert sorted({key[2] for key in found}) == [0, 3, 6] and len(found) == 4 * 2 * 3
    for kind in ("lora", "rslora", "dora", "full"):
        assert found[kind, 0, 0] == found["lora", 1, 0]  # nothing is trained yet
        assert all(found[kind, seed, 6] < found[kind, seed, 0] - 0.05 for seed in range(2))
        assert found[kind, 0, 6] != found[kind, 1, 6]
    assert len({found[kind, 0, 6] for kind in ("lora", "rslora", "dora", "full")}) == 4
    assert "lora: loss on held-out rows after 6 steps" in capsys.readouterr().out
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
