"""Training every weight, and the checkpoints that merging writes of all that is trained beside projections."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_trained as beside
import torch
import toy
from peft_side import FAMILIES, ids_for, off, reference
from safetensors.torch import load_file

import lorarun
from lorarun import save_merged, train_all
from lorarun.fit import fit
from lorarun.load import load
from lorarun.lora import add_lora, lora_parameters
from lorarun.merge import merge
from lorarun.nn import Model
from lorarun.optim import Optimizer
from lorarun.project import obstacle
from lorarun.trained import is_tied

Tiny = Callable[[str], Path]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") if "ref" not in file.name for k, v in load_file(file).items()}


# --- merged checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", beside.OWN)
@pytest.mark.parametrize("name", ["llama3-sharded", "llama-tied", "qwen2", "gemma2", "gemma3"])
def test_a_merged_checkpoint_is_the_live_model(name: str, case: str, tiny: Tiny, tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/45127: tied stays tied, and nothing trained is lost."""
    model = beside.adapted(tiny(name), **beside.OWN[case])
    live = beside.logits(model)
    if case == "whole tables":
        merge(model)  # makes no difference
    save_merged(model, tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        assert off(reference(tmp_path / "merged")(input_ids=beside.ids()).logits, live) < 1e-5
    before, after = stored(tiny(name)), stored(tmp_path / "merged")
    assert after.keys() == before.keys() and is_tied(load(tmp_path / "merged")) == is_tied(model)
    lora = model.adapters["default"]
    changed = {f"{path}.weight" for path in (*lora.modules, *lora.copies, *lora.tables)}
    changed |= {f"{path}.bias" for path in lora.copies}
    if is_tied(model):
        changed.discard("lm_head.weight")
    ours = {k.replace("language_model.model.", "model.").replace("model.language_model.", "model."): k for k in before}
    wrong = [n for n, k in ours.items() if torch.equal(before[k].float(), after[k]) == (n in changed)]
    assert not wrong


@pytest.mark.parametrize("case", beside.APART)
@pytest.mark.parametrize("name", ["llama-tied", "gemma3"])
def test_two_tables_of_a_tied_one_are_written_as_two(name: str, case: str, tiny: Tiny, tmp_path: Path) -> None:
    """https://github.com/huggingface/peft/issues/2018: otherwise the embedding gets what the head learnt."""
    fields = beside.APART[case] | ({"target_modules": r".*language_model.*q_proj"} if name == "gemma3" else {})
    if name == "gemma3" and "target_modules" in beside.APART[case]:
        fields["target_modules"] = r".*language_model.*q_proj|lm_head|.*embed_tokens"
    other = beside.from_peft(tiny(name), tmp_path / "peft", **fields)
    model = load(tiny(name), adapter=tmp_path / "peft", dtype=torch.float32)
    live = beside.logits(model)
    with torch.no_grad():
        assert off(live, other(input_ids=beside.ids()).logits) < 1e-5
    save_merged(model, tmp_path / "merged", dtype=torch.float32)
    assert "lm_head.weight" in "".join(stored(tmp_path / "merged"))
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    again = load(tmp_path / "merged", dtype=torch.float32)
    assert not is_tied(again) and off(beside.logits(again), live) < 1e-5
    with torch.no_grad():
        assert off(reference(tmp_path / "merged")(input_ids=beside.ids()).logits, live) < 1e-5


def test_over_quantised_weights(tiny: Tiny, tmp_path: Path) -> None:
    for name, arguments in (("llama-tied", beside.OWN["whole tables"]), ("gemma2", beside.OWN["updated tables"])):
        model = beside.adapted(tiny(name), bits=4, **arguments)
        save_merged(model, tmp_path / name, dtype=torch.float32)
        assert off(beside.logits(load(tmp_path / name, dtype=torch.float32)), beside.logits(model)) < 1e-5


def test_an_untrained_copy_is_told(tiny: Tiny, tmp_path: Path) -> None:
    model = add_lora(load(tiny("llama3")), r=4, targets=["q_proj"], modules_to_save=["lm_head"])
    with pytest.warns(UserWarning, match="leaves 5 of 5 .* as they were: lm_head.weight"):
        save_merged(model, tmp_path / "merged")


# --- every weight --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_every_weight_are_those_of_transformers(name: str, tiny: Tiny) -> None:
    """fp32; 1e-5 of a tensor's length is some 100 roundings."""
    model, other = train_all(load(tiny(name), dtype=torch.float32)), reference(tiny(name))
    assert model.training and all(p.requires_grad for p in model.parameters())
    ids = ids_for(model)
    loss = lorarun.loss(model, {"ids": ids, "labels": ids})
    expected = other(input_ids=ids, labels=ids).loss
    assert off(loss, expected) < 1e-6
    loss.backward()
    expected.backward()
    theirs = {n: p.grad for n, p in other.named_parameters()}
    got = {n: p.grad for n, p in model.named_parameters()}
    assert got.keys() == theirs.keys()
    wrong = {n: off(got[n], theirs[n]) for n in got if not off(got[n], theirs[n]) < 1e-5}
    assert not wrong


def test_sixteen_bits_are_stepped_and_written(tiny: Tiny, tmp_path: Path) -> None:
    """Steps of 1e-5 are below a rounding of most weights: the optimizer's fp32 copies add them up."""
    model = train_all(load(tiny("gemma2"), dtype=torch.bfloat16))
    attention = model.model.layers[0].self_attn
    assert obstacle([attention.q_proj, attention.k_proj], torch.bfloat16) == "a base weight is trained"
    assert "every weight" in lorarun.report(model).to_dict()["adapters"]["none"]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = Optimizer(dict(model.named_parameters()))
    ids = ids_for(model)
    for _ in range(20):
        lorarun.loss(model, {"ids": ids, "labels": ids}).backward()
        optimizer.step(1e-4)
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    save_merged(model, tmp_path / "trained")
    written = load(tmp_path / "trained", dtype=torch.bfloat16)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), written.parameters(), strict=True))
    assert {t.dtype for t in stored(tmp_path / "trained").values()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="base='original' would leave out"):
        save_merged(model, tmp_path / "other", base="original")


def test_what_train_all_refuses(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="28 weights are quantised.*load with bits=16, or train an adapter"):
        train_all(load(tiny("llama3"), bits=4))
    with pytest.raises(ValueError, match="has the adapters default"):
        train_all(add_lora(load(tiny("llama3"))))
    with pytest.raises(ValueError, match="add_lora: train_all trains the model's own weights"):
        add_lora(train_all(load(tiny("llama3"))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fit_trains_every_weight(
    tiny: Tiny, tmp_path: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it saves is the live model; and a run that was stopped goes on from its checkpoint bit for bit."""
    base = toy.make(shutil.copytree(tiny("llama-tied"), tmp_path / "base"))
    rows = [{"text": f"the quick brown fox {i % 3} answers {i}"} for i in range(12)]
    how: dict[str, Any] = dict(steps=6, lr=1e-3, max_tokens=60, save_every=2, eval_rows=rows[:3], eval_every=3)

    def fresh() -> Model:
        return train_all(load(base, dtype=dtype, device="cpu"))

    def fails(module: object, args: object, out: object) -> None:
        calls.append(None)
        if len(calls) == 7:  # after two steps and a first evaluation of a batch, in the fourth step or so
            raise RuntimeError("planted")

    model = fresh()
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = fit(model, rows, tmp_path / "out", **how)
    assert result.adapter == tmp_path / "out" / "model" and f"model in {result.adapter}" in capsys.readouterr().err
    assert result.best_loss is not None and result.eval_before is not None and result.best == tmp_path / "out" / "best"
    assert result.best_loss < 0.9 * result.eval_before
    assert all(not torch.equal(p, first[name]) for name, p in model.named_parameters())
    again = load(result.adapter, dtype=dtype, device="cpu")
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    assert {tensor.dtype for tensor in stored(result.adapter).values()} == {dtype}

    calls: list[None] = []
    model = fresh()
    model.model.norm.register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="planted"):
        fit(model, rows, tmp_path / "stopped", **how)
    last = max((tmp_path / "stopped" / "checkpoints").iterdir())
    assert last.name in ("step-00000002", "step-00000004") and [file.name for file in last.iterdir()] == ["state.pt"]
    with pytest.raises(ValueError, match="this is another run"):
        fit(add_lora(load(base, dtype=dtype, device="cpu")), rows, tmp_path / "stopped", resume=True, **how)
    fit(fresh(), rows, tmp_path / "stopped", resume=True, **how)
    for name in ("model", "best"):
        ours, expected = stored(tmp_path / "stopped" / name), stored(tmp_path / "out" / name)
        assert all(torch.equal(ours[key], tensor) for key, tensor in expected.items())
    assert sorted(path.name for path in (tmp_path / "stopped").glob("*") if path.is_dir()) == [
        "best", "checkpoints", "model",
    ]  # fmt: skip


def test_fit_saves_only_what_came_from_a_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    model = train_all(load(toy.make(shutil.copytree(tiny("llama-tied"), tmp_path / "base"))))
    model.source = None
    with pytest.raises(ValueError, match="fit: this model was not loaded from a checkpoint"):
        fit(model, [{"text": "the fox"}], tmp_path / "out")


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*beside.OWN, "plain"])
def test_training_goes_on_where_an_adapter_stopped(case: str, tiny: Tiny, tmp_path: Path) -> None:
    """Saved, loaded and trained further is trained in one go, with AdamW begun anew in both."""
    arguments = beside.OWN.get(case, {})
    model = beside.adapted(tiny("llama-tied"), torch.bfloat16, **arguments).train()
    ids = ids_for(model)

    def train(model: Model) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(lora_parameters(model), lr=1e-4)
        for _ in range(3):
            optimizer.zero_grad()
            lorarun.loss(model, {"ids": ids, "labels": ids}).backward()
            optimizer.step()
        return [p.detach().clone() for p in lora_parameters(model)]

    before = train(model)
    lorarun.save_adapter(model, tmp_path)
    resumed = load(tiny("llama-tied"), dtype=torch.bfloat16, adapter=tmp_path).train()
    assert all(torch.equal(a, b) for a, b in zip(lora_parameters(resumed), before, strict=True))
    assert {p.dtype for p in lora_parameters(resumed)} == {torch.float32}
    assert {id(p) for p in lora_parameters(resumed)} == {id(p) for p in resumed.parameters() if p.requires_grad}
    assert all(torch.equal(a, b) for a, b in zip(train(resumed), train(model), strict=True))


def test_a_16_bit_adapter_is_trained_further_in_fp32(tiny: Tiny, tmp_path: Path) -> None:
    """https://github.com/huggingface/peft/issues/2421"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = beside.peft_model(tiny("llama3"), modules_to_save=["lm_head"])
        other.bfloat16().save_pretrained(tmp_path)
    kinds = {t.dtype for t in load_file(tmp_path / "adapter_model.safetensors").values()}
    assert kinds == {torch.bfloat16}
    model = load(tiny("llama3"), dtype=torch.bfloat16, adapter=tmp_path)
    assert {p.dtype for p in lora_parameters(model)} == {torch.float32}
    lorarun.load_adapter(model, tmp_path, name="narrow", dtype=torch.bfloat16)
    assert {p.dtype for p in lora_parameters(model)} == {torch.bfloat16}
