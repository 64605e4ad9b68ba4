"""What adapters train beside projections: copies of modules, updates and rows of the tables; PEFT is the measure."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from peft_side import FAMILIES, ids_for, off, reference, with_adapter
from safetensors.torch import load_file

import lorarun
from lorarun.adapter import WEIGHTS, save_adapter
from lorarun.load import load
from lorarun.lora import lora_parameters
from lorarun.merge import merge, unmerge
from lorarun.nn import Model
from lorarun.trained import is_tied

Tiny = Callable[[str], Path]
TABLES = ["embed_tokens", "lm_head"]
ROWS = [5, 7, 900]

# PEFT's fields.  The tied ones are asked for as one table: ensure_weight_tying.
CASES: dict[str, dict[str, Any]] = {
    "whole tables": {"modules_to_save": TABLES},
    "whole head": {"modules_to_save": ["lm_head"]},
    "norms": {"modules_to_save": ["norm"]},
    "a projection": {"modules_to_save": ["k_proj"]},
    "updated tables": {"target_modules": ["q_proj", *TABLES]},
    "updated embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "rows": {"trainable_token_indices": ROWS},
}
APART: dict[str, dict[str, Any]] = {  # a tied table that an adapter has twice, which is PEFT's default
    "whole tables": {"modules_to_save": TABLES},
    "whole embedding": {"modules_to_save": ["embed_tokens"]},
    "whole head": {"modules_to_save": ["lm_head"]},
    "updated tables": {"target_modules": ["q_proj", *TABLES]},
    "updated head": {"target_modules": ["q_proj", "lm_head"]},
    "rows of the head": {"trainable_token_indices": {"lm_head": ROWS}},
    "other rows of the head": {"trainable_token_indices": {"embed_tokens": ROWS[:1], "lm_head": ROWS}},
}


def peft_model(base: Path, seed: int = 1, **fields: Any) -> Any:
    """PEFT's model with every trained value moved by 0.05."""
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | fields
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about ties, and about frozen tables in the file
        model = peft.get_peft_model(reference(base), peft.LoraConfig(**fields)).eval()
    generator = torch.Generator().manual_seed(seed)
    pointers = set()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.data_ptr() not in pointers:  # tied matrices are there twice
                pointers.add(parameter.data_ptr())
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def from_peft(base: Path, out: Path, **fields: Any) -> Any:
    model = peft_model(base, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(out)
    return model


def tying(base: Path, case: dict[str, Any]) -> dict[str, Any]:
    tied = json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    return case | {"ensure_weight_tying": tied and "trainable_token_indices" not in case and case not in WITHOUT_TABLES}


WITHOUT_TABLES = [CASES["norms"], CASES["a projection"]]


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the names that a lorarun model has."""
    named = model.named_parameters()
    return {n.removeprefix("base_model.model."): p.grad for n, p in named if p.requires_grad}


def joined(grads: dict[str, torch.Tensor], names: Any) -> dict[str, torch.Tensor]:
    """PEFT's gradients with those of a tied head's matrices added to the embedding's, whose memory they share.

    In PEFT each is a parameter of its own, so that an optimizer steps the shared matrix twice; here it is one.
    """
    grads = dict(grads)
    for ours, theirs in (("A", "B"), ("B", "A")):
        tied = f"lm_head.lora_{theirs}.default.weight"
        if tied in grads and tied not in names:
            grads[f"model.embed_tokens.lora_embedding_{ours}.default"] += grads.pop(tied).T
    return grads


def ids() -> torch.Tensor:
    """Random ids, and those whose rows are trained."""
    found = ids_for(None)
    found[0, 3:6] = torch.tensor(ROWS)
    return found


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model(ids())


# --- PEFT's numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_values_gradients_and_files_are_pefts(name: str, case: str, tiny: Tiny, tmp_path: Path) -> None:
    """1e-5 of a tensor's length is some 100 roundings of fp32: these models' depth."""
    base = tiny(name)
    other = from_peft(base, tmp_path / "peft", **tying(base, CASES[case]))
    model = load(base, adapter=tmp_path / "peft", dtype=torch.float32)
    check(model, other)
    save_adapter(model, tmp_path / "again")
    first, second = (load_file(tmp_path / each / WEIGHTS) for each in ("peft", "again"))
    first = {key: value for key, value in first.items() if "base_layer" not in key}
    assert second.keys() >= first.keys()
    assert all(torch.equal(second[key], value) for key, value in first.items())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = with_adapter(base, tmp_path / "again")(input_ids=ids()).logits
        assert torch.equal(again, other(input_ids=ids()).logits)


def check(model: Model, other: Any) -> None:
    """Logits and gradients of full logits, and the same gradients through the loss that never has them."""
    tokens = ids()
    ours, theirs = model(tokens), other(input_ids=tokens).logits
    assert off(ours, theirs) < 1e-5
    next_token_loss(ours, tokens).backward()
    next_token_loss(theirs, tokens).backward()
    got = gradients(model)
    expected = joined(gradients(other), got.keys())
    assert got.keys() == expected.keys()
    wrong = {n: off(got[n], expected[n]) for n in got if not off(got[n], expected[n]) < 1e-5}
    assert not wrong
    parameters = lora_parameters(model)
    assert {id(p) for p in parameters} == {id(p) for p in model.parameters() if p.requires_grad}
    model.zero_grad()
    lorarun.loss(model, {"ids": tokens, "labels": tokens}).backward()
    fused = gradients(model)
    assert max(off(fused[n], got[n]) for n in got) < 1e-5


@pytest.mark.parametrize("case", APART)
@pytest.mark.parametrize("name", ["llama-tied", "gemma2"])
def test_a_tied_table_that_peft_trained_apart(name: str, case: str, tiny: Tiny, tmp_path: Path) -> None:
    """https://github.com/huggingface/peft/issues/2777, https://github.com/huggingface/peft/issues/2018"""
    base = tiny(name)
    other = from_peft(base, tmp_path / "peft", **APART[case])
    model = load(base, adapter=tmp_path / "peft", dtype=torch.float32)
    check(model, other)
    live = logits(model)
    merge(model)
    assert not is_tied(model) and off(logits(model), live) < 1e-5
    unmerge(model)
    assert is_tied(model) and torch.equal(logits(model), live)
    save_adapter(model, tmp_path / "again")
    again = load(base, adapter=tmp_path / "again", dtype=torch.float32)
    assert torch.equal(logits(again), live)
