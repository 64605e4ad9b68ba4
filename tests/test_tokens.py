"""New tokens and whole models: rows that are trained alone, tables that grow, and the checkpoints made of it all."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
import toy
import transformers
from peft_side import ids_for, off, reference, with_adapter

import lorarun
from lorarun import add_tokens, save_merged, train_all
from lorarun.adapter import load_adapter, save_adapter
from lorarun.checks import check_ids
from lorarun.fit import fit
from lorarun.load import load
from lorarun.lora import adapters_disabled, add_lora, lora_parameters, use_adapter
from lorarun.merge import merge, unmerge
from lorarun.nn import Model
from lorarun.optim import Optimizer
from lorarun.trained import is_tied

Tiny = Callable[[str], Path]
NEW = ["<think>", "</think>"]


def logits(model: Model, ids: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(ids_for(model) if ids is None else ids)


def with_text(base: Path, out: Path, fits: bool = False, template: str | None = None) -> Path:
    """A checkpoint with a tokenizer, by default one whose vocabulary fills the tables to the last row."""
    shutil.copytree(base, out)
    toy.make(out, template)
    if not fits:
        core = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
        core.add_tokens([f"<fill{i}>" for i in range(1024 - core.get_vocab_size(True))])
        core.save(str(out / "tokenizer.json"))
    return out


def moved(model: Model, seed: int = 1) -> Model:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def spoken(new: list[int]) -> torch.Tensor:
    found = ids_for(None)
    found[0, 3 : 3 + len(new)] = torch.tensor(new)
    return found


def in_transformers(folder: Path, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


# --- new tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["adapter", "tokens"])
@pytest.mark.parametrize("name", ["llama3", "llama-tied", "gemma3", "qwen3"])
def test_new_tokens_are_rows_of_their_own(name: str, first: str, tiny: Tiny, tmp_path: Path) -> None:
    base = with_text(tiny(name), tmp_path / "base")
    model = load(base, dtype=torch.float32)
    tied, before = is_tied(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    steps: list[Callable[[], Any]] = [
        lambda: add_lora(model, r=4, seed=0, targets=["q_proj"]), lambda: add_tokens(model, NEW)
    ]  # fmt: skip
    results = [step() for step in (steps if first == "adapter" else reversed(steps))]
    new = next(each for each in results if isinstance(each, list))
    assert new == [1024, 1025] and model.config.vocab_size == 1026 and is_tied(model) == tied
    assert model.tokenizer.encode("a<think>b", bos=False)[1:2] == [1024]
    places = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    rows = {f"{path}.token_adapter.trainable_tokens_delta.default" for path in places}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n in trained if "q_proj" not in n} == rows
    for path in places:  # the mean of all rows, and not one row of before changed
        table, old = model.get_submodule(path).weight, before[f"{path}.weight"]
        assert torch.equal(table[:1024], old) and off(table[1024:], old.mean(0).expand(2, -1)) < 1e-6
        assert off(trained[f"{path}.token_adapter.trainable_tokens_delta.default"], table[1024:]) < 1e-6
    moved(model)
    ids = spoken(new)
    lorarun.loss(model, {"ids": ids, "labels": ids}).backward()
    assert all(trained[n].grad.abs().sum() > 0 for n in rows)
    live = logits(model, ids)
    with adapters_disabled(model):
        assert off(logits(model, ids), live) > 1e-3
    merge(model)
    assert is_tied(model) == tied and off(logits(model, ids), live) < 1e-5
    unmerge(model)
    assert torch.equal(logits(model, ids), live)

    save_adapter(model, tmp_path / "adapter")
    again = load(tmp_path / "adapter", dtype=torch.float32)
    assert torch.equal(logits(again, ids), live) and again.config.vocab_size == 1026
    assert again.tokenizer.encode("a<think>b") == model.tokenizer.encode("a<think>b")
    assert again.tokenizer.stop_ids == model.tokenizer.stop_ids and again.added == model.added
    other = load(base, dtype=torch.float32)
    lorarun.load_adapter(other, tmp_path / "adapter")
    assert torch.equal(logits(other, ids), live)
    with torch.no_grad(), warnings.catch_warnings():  # PEFT's user makes room first
        warnings.simplefilter("ignore")
        plain = reference(base)
        plain.resize_token_embeddings(1026)
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", torch_device="cpu").eval()
        assert off(live, theirs(input_ids=ids).logits) < 1e-5

    save_merged(model, tmp_path / "merged", dtype=torch.float32)
    assert off(in_transformers(tmp_path / "merged", ids), live) < 1e-5
    assert off(logits(load(tmp_path / "merged", dtype=torch.float32), ids), live) < 1e-5
    text = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert text.convert_tokens_to_ids(NEW) == new and text("<think>", add_special_tokens=False)["input_ids"] == [1024]


def test_rows_that_no_token_has_are_taken_first(tiny: Tiny, tmp_path: Path) -> None:
    """A table that is longer than the vocabulary does not grow, and its own rows stay, whatever they are."""
    base = with_text(tiny("llama-tied"), tmp_path / "base", fits=True)
    model = add_lora(load(base, dtype=torch.float32), r=4, seed=0)
    known, before = model.tokenizer.vocab_size, model.lm_head.weight.clone()
    new = add_tokens(model, [*NEW, "the"])
    assert new[:2] == [known, known + 1] and new[2] < known
    assert model.config.vocab_size == 1024 and torch.equal(model.lm_head.weight, before)
    tokens, rows = model.model.embed_tokens.rows_of("default")
    assert tokens.tolist() == sorted(new)
    assert torch.equal(rows[0], before[new[2]])  # a token that was there begins with its own row
    assert off(rows[1:], before[:known].mean(0).expand(2, -1)) < 1e-6
    again = add_tokens(model, ["<answer>", NEW[0]])
    assert again == [known + 2, known] and model.adapters["default"].tokens == {
        "model.embed_tokens": sorted({*new, *again})
    }
    assert add_tokens(model, NEW) == new[:2]
    assert {n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n} == {
        "model.embed_tokens.token_adapter.trainable_tokens_delta.default"
    }


def test_control_tokens_and_those_that_are_not(tiny: Tiny, tmp_path: Path) -> None:
    model = load(with_text(tiny("llama-tied"), tmp_path / "base"))
    plain, control = add_tokens(model, ["<think>"]), add_tokens(model, ["<|turn|>"], special=True)
    assert model.tokenizer.decode([*plain, *control]) == "<think>"
    assert model.tokenizer.has_control_token("<|turn|>") and not model.tokenizer.has_control_token("<think>")


def test_what_add_tokens_refuses(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        add_tokens(load(tiny("llama3")), NEW)
    base = with_text(tiny("llama3"), tmp_path / "base")
    for wrong, message in (("<think>", "expected a list"), ([""], "not blank"), ([3], "not blank")):
        with pytest.raises(ValueError, match=message):
            add_tokens(load(base), wrong)
    model = add_lora(load(base), modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="'default' has the embedding or the head whole"):
        add_tokens(model, NEW)
    merged = add_lora(load(base))
    merge(merged)
    with pytest.raises(ValueError, match="call unmerge"):
        add_tokens(merged, NEW)
    fresh = load(base)
    add_tokens(fresh, NEW)
    with pytest.raises(ValueError, match="a low-rank update and rows of 2 added tokens"):
        add_lora(fresh, targets=["q_proj", "lm_head"])
    assert not fresh.adapters


def test_whole_tables_hold_the_new_rows_too(tiny: Tiny, tmp_path: Path) -> None:
    base = with_text(tiny("llama3"), tmp_path / "base")
    model = load(base, dtype=torch.float32)
    new = add_tokens(model, NEW)
    add_lora(model, r=4, seed=0, targets=["q_proj"], modules_to_save=["embed_tokens"])  # and rows of the head
    assert model.adapters["default"].tokens == {"lm_head": new}
    live = logits(moved(model), spoken(new))
    save_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(load(tmp_path / "adapter", dtype=torch.float32), spoken(new)), live)
    save_merged(model, tmp_path / "merged", dtype=torch.float32)
    assert off(in_transformers(tmp_path / "merged", spoken(new)), live) < 1e-5


def test_added_tokens_that_nothing_trains_are_named(tiny: Tiny, tmp_path: Path) -> None:
    """https://github.com/unslothai/unsloth/issues/1258 and its kin"""
    base = with_text(tiny("llama-tied"), tmp_path / "base", template="chatml")
    model = add_lora(load(base), r=4)
    use_adapter(model, None)
    add_tokens(model, NEW)
    prepared = lorarun.data.prepare([{"text": "the <think> fox"}], model.tokenizer, 64)
    with pytest.warns(UserWarning, match=r"were added and that are not trained: ids 1024\."):
        check_ids(model, prepared)
    add_lora(model, name="second")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_ids(model, prepared)
    table = model.model.embed_tokens.weight
    table.data[prepared.documents[0].ids[1]] = 0.0
    with pytest.warns(UserWarning, match=r"never trained \(all zero\)"):
        check_ids(model, prepared)


# --- PEFT's adapters over tables that were enlarged there ------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"trainable_token_indices": [1025, 1024, 7]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {},
    ],
)
@pytest.mark.parametrize("name", ["llama3", "llama-tied"])
def test_frozen_tables_in_an_adapter(name: str, fields: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    base, ids = with_text(tiny(name), tmp_path / "base"), spoken([7, 1024, 1025])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = reference(base)
        plain.resize_token_embeddings(1026)
        fields = {"target_modules": ["q_proj"], "r": 4, "task_type": "CAUSAL_LM"} | fields
        tying = is_tied(load(base)) and "modules_to_save" in fields
        other = peft.get_peft_model(plain, peft.LoraConfig(**fields, ensure_weight_tying=tying)).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in other.parameters():
                if p.requires_grad:
                    p.add_(0.05 * torch.randn(p.shape, generator=generator))
            expected = other(input_ids=ids).logits
        other.save_pretrained(tmp_path / "adapter")
    text = transformers.AutoTokenizer.from_pretrained(base)
    text.add_tokens(NEW)
    text.save_pretrained(tmp_path / "adapter")  # as trainers leave it there
    model = load(base, adapter=tmp_path / "adapter", dtype=torch.float32)
    assert off(logits(model, ids), expected) < 1e-5
    assert model.tokenizer.encode("<think>", bos=False) == [1024] and is_tied(model) == is_tied(load(base))
    elsewhere = load(base, dtype=torch.float32)
    with torch.no_grad():
        elsewhere.model.embed_tokens.weight[3] += 1.0
        elsewhere.lm_head.weight[3] += 1.0
    if fields.get("modules_to_save") is None:
        with pytest.raises(ValueError, match="was trained on another model.embed_tokens"):
            load_adapter(elsewhere, tmp_path / "adapter")
        assert not elsewhere.adapters and elsewhere.config.vocab_size == 1024


# --- in a run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_a_run_that_learns_new_tokens(whole: bool, tiny: Tiny, tmp_path: Path) -> None:
    base = with_text(tiny("llama3"), tmp_path / "base")
    model = load(base, dtype=torch.float32)
    new = add_tokens(model, NEW)
    train_all(model) if whole else add_lora(model, r=4, seed=0)
    rows = [{"prompt": "quick", "completion": "<think> fox</think>"}] * 8
    if whole:
        saved, optimizer = tmp_path / "trained", Optimizer(dict(model.named_parameters()))
        (batch,) = lorarun.batches(rows, model.tokenizer, max_tokens=64)
        losses = []
        for _ in range(12):
            losses.append(lorarun.loss(model, batch))
            losses[-1].backward()
            optimizer.step(3e-3)
        assert losses[-1] < losses[0] / 2
        save_merged(model, saved)
    else:
        result = fit(model, rows, tmp_path / "out", epochs=6, lr=1e-2, max_tokens=32)
        saved = result.adapter
        assert result.last_loss < result.first_loss / 2
    again = load(saved, dtype=torch.float32)
    assert again.tokenizer.encode("<think>", bos=False) == new[:1]
    assert off(logits(again, spoken(new)), logits(model.eval(), spoken(new))) < (
        0.01 if whole else 1e-6
    )  # bf16 written
    head = again.lm_head.weight if whole else again.lm_head.rows_of("default")[1]
    assert (head[-2:] - again.lm_head.weight[:1024].mean(0)).abs().max() > 1e-3


def test_patterns_of_tables(tiny: Tiny, tmp_path: Path) -> None:
    for name in ("llama3", "gemma3"):
        model = load(tiny(name), dtype=torch.float32)
        pattern = {"lm_head": 6, "embed_tokens": 6, "q_proj": 3}
        add_lora(model, r=4, seed=0, targets=["q_proj", "embed_tokens", "lm_head"], rank_pattern=pattern)
        live = logits(moved(model))
        save_adapter(model, tmp_path / name)
        assert torch.equal(logits(load(tmp_path / name, dtype=torch.float32)), live)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert off(with_adapter(tiny(name), tmp_path / name)(input_ids=ids_for(None)).logits, live) < 1e-5
    with pytest.raises(ValueError, match="name both alike"):
        add_lora(load(tiny("gemma3")), targets=["lm_head", "q_proj"], rank_pattern={"lm_head": 6})
