"""scripts/bench.py where there is nothing to time: its sums, shapes, models and tables."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lorarun
from lorarun.cache import Cache
from lorarun.quant.store import stores

SCRIPTS = Path(__file__).parent.parent / "scripts"


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


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "sliding_window": 8,
}
PARAMETERS = {  # as published
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-7b": 7_615_616_512,
    "gemma-3-4b": 3_880_263_168,
}


def small(bench: Any, name: str) -> dict[str, Any]:
    config = bench.CONFIGS[name] | SMALL
    if name != "gemma-3-4b":
        del config["sliding_window"]
    return config


def test_models_have_their_published_size(scripts: Any) -> None:
    bench = scripts("bench_models")
    assert set(bench.CONFIGS) == set(PARAMETERS)
    assert {name: bench.parameters(name) for name in bench.CONFIGS} == PARAMETERS


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "gemma-3-4b", "llama-3.2-1b"])
def test_the_checkpoint_of_the_peers_has_the_same_weights_and_loss(
    scripts: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in packed documents, and by transformers and PEFT as the peers' script calls them."""
    bench, peers = scripts("bench_models"), scripts("bench_peers")
    monkeypatch.setattr(bench, "STD", 0.2)  # so that attention matters at this size
    config = small(bench, name)
    bench.write(config, tmp_path / "model", shard=1 << 16)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    loaded, built = lorarun.load(tmp_path / "model", dtype=torch.bfloat16), bench.build(config, 16)
    for (path, theirs), (other, ours) in zip(loaded.named_parameters(), built.named_parameters(), strict=True):
        assert path == other and torch.equal(theirs, ours), path
    lorarun.add_lora(built, r=bench.RANK, alpha=bench.RANK)
    bench.same_adapters(built)
    settings = {"folder": str(tmp_path / "model"), "bits": 16, "model": name, "dropout": 0.0, "documents": 12}
    theirs = peers.peer_model("hf-off", settings)
    a = {path.split("layers.")[1]: p for path, p in theirs.named_parameters() if "lora_A" in path}
    assert a and all(torch.equal(a[p.split("layers.")[1]], q) for p, q in built.named_parameters() if "lora_A" in p)
    for documents in (None, 12):
        batch = next(bench.batches(256, 2, 24, documents))
        got, ours = peers.peer_loss(theirs, batch, unsloth=False), lorarun.loss(built, batch)
        # bf16; documents that saw each other would be off by 0.03 (Gemma) to 0.5
        assert abs(got.item() - ours.item()) < 0.015, documents


@pytest.mark.parametrize("bits", [4, 8])
def test_stores_are_built_one_by_one(scripts: Any, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = scripts("bench_models")
    config = small(bench, "llama-3.1-70b")
    whole, model = bench.build(config, 16), bench.build(config, bits)
    found = dict(stores(model))
    assert len(found) == 14
    for path, store in found.items():
        dense = whole.get_parameter(path)
        assert (store.dequantize(torch.float32) - dense.float()).norm() < 0.12 * dense.float().norm()
    monkeypatch.setattr(bench, "LARGE", 0)
    drawn, values = list[str](), bench.values
    monkeypatch.setattr(bench, "values", lambda name, *rest: (drawn.append(name), values(name, *rest))[1])
    codes = dict(stores(bench.build(config, 4)))
    weight = codes["model.layers.0.mlp.up_proj.weight"].dequantize(torch.float32)
    assert drawn and not any("_proj" in name for name in drawn)
    assert 0.9 * bench.STD < float(weight.std()) < 1.1 * bench.STD and abs(float(weight.mean())) < 0.2 * bench.STD


def test_batches_are_the_same_each_time_and_documents_start_unlabelled(scripts: Any) -> None:
    bench = scripts("bench_models")
    one, other = bench.batches(256, 4, 32, documents=10), bench.batches(256, 4, 32, documents=10)
    first = [next(one) for _ in range(5)]
    assert all(torch.equal(a.ids, next(other).ids) for a in first) and torch.equal(first[0].ids, first[4].ids)
    assert not torch.equal(first[0].ids, first[1].ids) and first[0].ids.shape == (1, 128)
    for batch in first:
        starts = batch.positions == 0
        assert starts.sum() == batch.documents.max() + 1 and torch.equal(starts, batch.labels == -100)
        assert torch.equal(batch.labels[~starts], batch.ids[~starts])


def test_breakdown_counts_each_kernel_once_and_the_rest_as_idle(scripts: Any) -> None:
    train = scripts("bench_train")
    kernels = [
        ("nvjet_sm90_tst_128x256", 0.0, 4000.0),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 3000.0, 5000.0),  # beside the product
        ("_dkv_kernel", 6000.0, 7000.0),
        ("void at::native::elementwise_kernel", 8000.0, 8500.0),
        ("_input_grad", 9000.0, 9500.0),
    ]
    found = train.breakdown(kernels, 10.0)
    assert found["GEMM"] == 4 and found["attention"] == 3 and found["memory-bound"] == 1
    assert found["launches, idle"] == pytest.approx(10 - 7) and len(found["top"]) == 5


def test_ceiling_counts_what_the_design_counts(scripts: Any) -> None:
    """Four FLOPs a frozen weight and token of an 8B model, and about 30 ms of bytes that no fusion avoids."""
    train, models = scripts("bench_train"), scripts("bench_models")
    config = models.on_meta(models.CONFIGS["llama-3.1-8b"]).config
    weights = sum(rows * cols * count for rows, cols, count in train.shapes(config).values())
    assert weights == models.parameters("llama-3.1-8b") - 128_256 * 4096 - 65 * 4096
    parts = train.moved(config, 8192, 4, 41_943_040)
    gate = 8 * 8192 * 14_336 * 2 * 32
    assert parts["gate"] == gate and parts["weights"] == pytest.approx(2 * 17.6e9, rel=0.02)
    assert 30 < sum(parts.values()) / 4.24e9 < 60


def test_table_and_json_survive_whatever_failed(scripts: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    train, bench = scripts("bench_train"), scripts("bench")
    run = {"ms": 500.0, "losses": [12.5, 12.25], "allocated_gib": 30.0, "reserved_gib": 31.0, "trained": 5}
    kernels = [("gemm", 0.0, 400_000.0)]
    own = run | {"predicted_gib": {"allocated": 29.5}, "breakdown": train.breakdown(kernels, 500.0)}
    monkeypatch.setattr(train, "begin", lambda: None)
    monkeypatch.setattr(train, "ours", lambda args: dict(own))
    monkeypatch.setattr(train, "floor", lambda *given: dict.fromkeys(("ms", *train.CLASSES), 400.0))
    said = {"hf": run | {"ms": 1000.0}, "unsloth": {"failed": "ImportError: no"}}
    monkeypatch.setattr(train, "theirs", lambda args, peers: {peer: said[peer] for peer in peers})
    args = bench.parser().parse_args(["train", "llama-3.1-8b", "--peers", "hf,unsloth"])
    assert train.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = json.loads(lines[-1])
    assert facts["peers"] == said and facts["work"]["seq"] == 2048 and facts["lorarun"]["breakdown"]["GEMM"] == 400
    text = "\n".join(lines)
    for words in ("16,384", "2.00x", "failed: ImportError: no", "allocated 29.50", "idle 100.0", "ceiling: 80%"):
        assert words in text, words

    monkeypatch.setattr(train, "ours", lambda args: 1 / 0)
    monkeypatch.setattr(train, "floor", lambda *given: 1 / 0)
    assert train.main(args) == 1
    assert "ZeroDivisionError" in json.loads(capsys.readouterr().out.splitlines()[-1])["lorarun"]["failed"]
    with pytest.raises(SystemExit, match="nobody"):
        train.main(bench.parser().parse_args(["train", "llama-3.1-8b", "--peers", "nobody"]))


@pytest.mark.parametrize("documents", [None, 12])
def test_both_sides_train_on_the_same_and_fall_alike(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, documents: int | None
) -> None:
    """A whole run of ours, its ceiling, and a whole run of transformers with PEFT, with the clock taken out."""
    train, models, peers = scripts("bench_train"), scripts("bench_models"), scripts("bench_peers")
    config = small(models, "llama-3.1-8b")
    models.write(config, tmp_path / "model")
    monkeypatch.setitem(models.CONFIGS, "llama-3.1-8b", config)

    def steps(step: Any, count: int, warm: int) -> dict[str, Any]:
        return {"ms": 1.0, "losses": [float(step().detach()) for _ in range(count + warm)]}

    for module in (train, peers):
        monkeypatch.setattr(module, "timed_steps", steps)
    monkeypatch.setattr(train, "profiled", lambda step: [("gemm", 0.0, 1.0)])
    monkeypatch.setattr(train, "measure", lambda call, calls: (call(), 1.0)[1])
    monkeypatch.setattr(train, "copy_rate", lambda: 4.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    words = ["train", "llama-3.1-8b", "--bits", "16", "--batch", "2", "--seq", "24", "--steps", "8"]
    args = scripts("bench").parser().parse_args(words + ([] if documents is None else ["--documents", str(documents)]))
    own = train.ours(args)
    settings = {name: vars(args)[name] for name in ("model", "bits", "batch", "seq", "documents", "steps", "dropout")}
    peers.train("hf-off", {**settings, "folder": str(tmp_path / "model")})
    theirs = json.loads([line for line in capsys.readouterr().out.splitlines() if line.startswith('{"')][-1])
    assert own["trained"] == theirs["trained"] == 2 * 16 * (4 * 64 + 64 + 32 + 32 + 64 + 2 * 192 + 192)
    assert own["breakdown"]["kernels"] == 1 and own["operations"]
    gaps = [abs(one - other) for one, other in zip(own["losses"], theirs["losses"], strict=True)]
    assert max(gaps) < 0.001 < 0.005 < own["losses"][0] - own["losses"][8], gaps  # the same batch, two rounds later

    batch = next(models.batches(256, 2, 24, documents))
    parts = train.floor(models.on_meta(config).config, batch, 4, "bf16", own["trained"])
    assert parts["ms"] == pytest.approx(sum(parts[name] for name in train.CLASSES)) and parts["GEMM"] == 4 * 2 * 2 + 2


@pytest.mark.parametrize("bits", [4, 16])
def test_bytes_that_a_step_of_decoding_reads(scripts: Any, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Against the model's own storage and its cache's, whose windows are shorter than the rows."""
    decode, models = scripts("bench_decode"), scripts("bench_models")
    monkeypatch.setitem(models.CONFIGS, "gemma-3-4b", small(models, "gemma-3-4b"))
    model = decode.with_adapters("gemma-3-4b", bits)
    assert all(float(p.detach().abs().max()) > 0 for name, p in model.named_parameters() if "lora_B" in name)
    assert not model.training and any(stores(model)) == (bits == 4)
    parts = {name: value * 1e9 for name, value in decode.read(model, 3, 20).items()}
    everything = sum(p.nbytes for p in model.parameters())
    outside = sum(p.nbytes for name, p in model.named_parameters() if ".layers." not in name)
    assert parts["head"] == model.lm_head.weight.nbytes
    assert parts["weights"] + parts["adapters"] == pytest.approx(everything - outside)
    assert parts["cache"] == pytest.approx(Cache(model, 3, 20).nbytes)
    assert decode.read(model, 3, 20, "fp8")["cache"] * 1e9 == pytest.approx(Cache(model, 3, 20, "fp8").nbytes)
    eight = models.on_meta(models.CONFIGS["llama-3.1-8b"]).to(torch.bfloat16)
    assert sum(decode.read(eight, 1, 64).values()) == pytest.approx(2 * (8.03 - 128_256 * 4096 / 1e9), rel=0.01)


def test_decoding_is_timed_between_tokens(scripts: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A clock of our own: half a second for prompts and capture, 10 ms a step, seven kernels a layer."""
    decode, models, bench = scripts("bench_decode"), scripts("bench_models"), scripts("bench")
    monkeypatch.setitem(models.CONFIGS, "llama-3.1-8b", small(models, "llama-3.1-8b"))
    asked: list[tuple[int, int]] = []

    def answered(call: Any) -> int:
        answers = call()
        asked.append((len(answers), len(answers[0])))
        return asked[-1][1]

    monkeypatch.setattr(decode, "timed", lambda call, times=3: 0.5 + 0.01 * answered(call))
    clock = itertools.count()
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: 0.01 * next(clock)))
    monkeypatch.setattr(decode, "profiled", lambda call: [("k", 0.0, 1.0)] * (7 + 14 * answered(call)))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(decode, "begin", lambda: None)
    monkeypatch.setattr(decode, "copy_rate", lambda: 4.0)
    said = {"hf": {"2x9": 10.0, "1x9": 5.0}, "unsloth": {"failed": "ImportError: no"}}
    monkeypatch.setattr(decode, "theirs", lambda args, peers: {peer: said[peer] for peer in peers})
    words = ["decode", "llama-3.1-8b", "--batch", "1", "2", "--prompt", "9", "--new", "8", "--peers", "hf,unsloth"]
    args = bench.parser().parse_args(words)
    assert decode.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = json.loads(lines[-1])
    assert asked == [(batch, new) for batch in (1, 2) for new in (1, 8, 16, 24)]
    for batch, row in zip((1, 2), facts["lorarun"], strict=True):
        assert row["step_ms"] == pytest.approx(10) and row["tokens_s"] == pytest.approx(100 * batch)
        assert row["first_s"] == pytest.approx(0.51) and row["whole_tokens_s"] == pytest.approx(batch * 8 / 0.58)
        assert row["launches"] == 14 and row["launches_a_layer"] == 7
        moved = sum(row["gb"].values())
        assert row["gb_s"] == pytest.approx(100 * moved) and row["share"] == pytest.approx(100 * moved / 4000)
    assert lines[2].index(f"  {8 / 0.58 / 5:.1f}x hf") == len(lines[1]) and "14 (7.0)" in lines[2]
    assert facts["peers"] == said and facts["work"]["new"] == 8

    monkeypatch.setattr(decode, "timed", lambda call, times=3: 1 / 0)
    assert decode.main(args) == 2
    out = capsys.readouterr().out.splitlines()
    assert "ZeroDivisionError" in out[2] and "ZeroDivisionError" in json.loads(out[-1])["lorarun"][1]["failed"]
    with pytest.raises(SystemExit, match="nobody"):
        decode.main(bench.parser().parse_args(["decode", "llama-3.1-8b", "--peers", "nobody"]))


def test_the_peers_decode_as_many_tokens(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """transformers with PEFT, by the script that the benchmark starts, on a checkpoint of the same weights."""
    models, peers = scripts("bench_models"), scripts("bench_peers")
    config = small(models, "llama-3.1-8b")
    models.write(config, tmp_path / "model")
    monkeypatch.setitem(models.CONFIGS, "llama-3.1-8b", config)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = iter(range(100))
    monkeypatch.setattr(peers.time, "perf_counter", lambda: next(clock))
    settings = {"model": "llama-3.1-8b", "bits": 16, "batch": [1, 3], "prompt": [9], "new": 5}
    settings |= {"folder": str(tmp_path / "model"), "seq": 14, "documents": None, "dropout": 0.0}
    peers.decode("hf", settings)
    found = json.loads([line for line in capsys.readouterr().out.splitlines() if line.startswith('{"')][-1])
    assert found == {"1x9": 5.0, "3x9": 15.0}
