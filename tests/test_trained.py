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
from lorarun.kernels import cross_entropy
from lorarun.load import load
from lorarun.lora import adapters_disabled, add_lora, lora_parameters, use_adapter
from lorarun.merge import merge, unmerge
from lorarun.nn import Model
from lorarun.trained import is_tied, weighted

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


# --- arguments of add_lora, dtypes, switching -----------------------------------------------------------------------

OWN: dict[str, dict[str, Any]] = {
    "whole tables": {"modules_to_save": ["lm_head"]},  # a tied one is had by both
    "norms, a projection": {"modules_to_save": ["norm", "layers.1.self_attn.k_proj"]},
    "updated tables": {"targets": ["q_proj", "embed_tokens", "lm_head"]},
}


def moved(model: Model, seed: int = 1, size: float = 0.05) -> Model:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def adapted(base: Path, dtype: torch.dtype = torch.float32, bits: int | None = None, **arguments: Any) -> Model:
    model = load(base, dtype=dtype, bits=bits)
    return moved(add_lora(model, r=4, alpha=8, seed=0, **({"targets": ["q_proj"]} | arguments)))


@pytest.mark.parametrize("case", OWN)
@pytest.mark.parametrize("name", ["llama-bias", "llama-tied", "gemma3-text", "gemma3"])
def test_what_is_saved_here_runs_in_peft(name: str, case: str, tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny(name), **OWN[case])
    live = logits(model)
    save_adapter(model, tmp_path)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = with_adapter(tiny(name), tmp_path)
        assert off(live, other(input_ids=ids()).logits) < 1e-5
    assert not any("vision" in n and ("lora_" in n or "modules_to_save" in n) for n, _ in other.named_parameters())
    again = load(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again), live)
    kept, got = model.adapters["default"], again.adapters["default"]
    assert (got.copies, got.tables, got.tied) == (kept.copies, kept.tables, kept.tied)
    save_adapter(again, tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()


@pytest.mark.parametrize("case", OWN)
def test_the_model_starts_unchanged_and_only_what_was_asked_for_is_trained(case: str, tiny: Tiny) -> None:
    """https://github.com/unslothai/unsloth/issues/9326: the trained set is the requested set."""
    for name in ("llama3", "llama-tied"):
        model = load(tiny(name), dtype=torch.float32)
        base = logits(model)
        add_lora(model, r=4, seed=0, **({"targets": ["q_proj"]} | OWN[case])).eval()
        assert torch.equal(logits(model), base)
        trained = {n for n, p in model.named_parameters() if p.requires_grad and "q_proj" not in n}
        table, head = "model.embed_tokens", "lm_head"
        whole = {f"{path}.modules_to_save.default.weight" for path in model.adapters["default"].copies}
        updates = {f"{table}.lora_embedding_{x}.default" for x in "AB"}
        if case == "whole tables":
            assert trained == {f"{table if name == 'llama-tied' else head}.modules_to_save.default.weight"}
        elif case == "updated tables":
            own = {f"{head}.lora_{x}.default.weight" for x in "AB"}
            assert trained == updates | (own if name == "llama3" else set())
        else:
            assert trained == whole and len(whole) == 2 * 4 + 1 + 1


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_over_a_16_bit_base(name: str, bits: int | None, tiny: Tiny) -> None:
    """Copies and rows are fp32, so that small steps move them; values are those of the weights they round to."""
    model = adapted(tiny(name), torch.bfloat16, bits, modules_to_save=["lm_head", "norm"])
    assert {p.dtype for p in lora_parameters(model)} == {torch.float32} and model.dtype == torch.bfloat16
    exact = adapted(tiny(name), torch.float32, bits, modules_to_save=["lm_head", "norm"])
    with torch.no_grad():
        for ours, theirs in zip(lora_parameters(exact), lora_parameters(model), strict=True):
            ours.copy_(theirs)
    rough = logits(model)
    assert rough.dtype == torch.bfloat16
    assert off(rough, logits(exact)) < 0.05  # bf16 through these blocks: a frozen model's is 0.02 to 0.03
    lorarun.loss(model, {"ids": ids(), "labels": ids()}).backward()
    lorarun.loss(exact, {"ids": ids(), "labels": ids()}).backward()
    for a, b in zip(lora_parameters(model), lora_parameters(exact), strict=True):
        assert a.grad.dtype == torch.float32 and off(a.grad, b.grad) < 0.25
    before = [p.detach().clone() for p in lora_parameters(model)]
    optimizer = torch.optim.AdamW(lora_parameters(model), lr=1e-5, weight_decay=0.0)
    optimizer.step()
    for p, then in zip(lora_parameters(model), before, strict=True):
        assert ((p != then) == (p.grad != 0)).float().mean() > 0.99  # https://github.com/huggingface/peft/issues/2421


def test_quantised_weights_cannot_be_copied(tiny: Tiny) -> None:
    model = load(tiny("llama3"), bits=4)
    with pytest.raises(ValueError, match="means 4 quantised weights, model.layers.0.self_attn.k_proj"):
        add_lora(model, modules_to_save=["k_proj"])
    assert not model.adapters
    add_lora(load(tiny("llama3"), bits=4, skip=["k_proj"]), modules_to_save=["k_proj"])


def test_switching_and_merging(tiny: Tiny) -> None:
    model = load(tiny("llama-tied"), dtype=torch.float32)
    base = logits(model)
    alone = {}
    for name, arguments in zip(("one", "two", "three"), OWN.values(), strict=True):
        moved(add_lora(model, r=4, name=name, seed=0, **({"targets": ["q_proj"]} | arguments)), seed=len(name))
        alone[name] = logits(model)
        assert off(alone[name], base) > 1e-3
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, expected in alone.items():
        use_adapter(model, name)
        assert torch.equal(logits(model), expected)
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {n for n in start if f".{name}" in n}
        with adapters_disabled(model):
            assert torch.equal(logits(model), base)
        assert torch.equal(logits(model), expected)
        merge(model)
        merge(model)
        assert is_tied(model) and off(logits(model), expected) < 1e-5
        for call in (lambda: use_adapter(model, None), lambda: add_lora(model, name="four")):
            with pytest.raises(ValueError, match="call unmerge"):
                call()
        with pytest.raises(ValueError, match="state_dict"):
            model.state_dict()
        unmerge(model)
        assert all(torch.equal(p, start[n]) for n, p in model.named_parameters()) and is_tied(model)
    use_adapter(model, None)
    assert torch.equal(logits(model), base) and not any(p.requires_grad for p in model.parameters())


def test_a_biased_projection_is_copied_with_its_bias(tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny("qwen2"), modules_to_save=["v_proj"])
    live, before = logits(model), model.model.layers[0].self_attn.v_proj.bias.clone()
    save_adapter(model, tmp_path)
    assert "base_model.model.model.layers.0.self_attn.v_proj.bias" in load_file(tmp_path / WEIGHTS)
    merge(model)
    assert not torch.equal(model.model.layers[0].self_attn.v_proj.bias, before) and off(logits(model), live) < 1e-5
    unmerge(model)
    assert torch.equal(model.model.layers[0].self_attn.v_proj.bias, before) and torch.equal(logits(model), live)


# --- the loss ------------------------------------------------------------------------------------------------------


def backward_elsewhere(model: Model, loss: torch.Tensor) -> None:
    """What is computed again on the way back is what was computed, although nothing of it is on any more."""
    for _, module in weighted(model):
        module.active = module.trained = None
    loss.backward()
    use_adapter(model, "default")


def test_an_adapted_heads_loss_in_chunks_with_dropout(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks change nothing, dropout's mask included, and full logits never exist."""
    model = adapted(tiny("gemma2"), dropout=0.3, targets=["q_proj", "embed_tokens", "lm_head"]).train()
    batch = {"ids": ids(), "labels": ids()}
    results = []
    for rows in (10**6, 5):
        monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", rows * 4 * 4 * 1024)
        model.zero_grad()
        model.clock.step = 0
        loss = lorarun.loss(model, batch)
        backward_elsewhere(model, loss)
        results.append((loss.detach(), [p.grad.clone() for p in lora_parameters(model)]))
    (whole, expected), (parts, got) = results
    assert off(parts, whole) < 1e-6 and all(off(a, b) < 1e-5 for a, b in zip(got, expected, strict=True))
    model.eval()
    assert abs(float(lorarun.loss(model, batch)) / float(whole) - 1) > 1e-4  # there was dropout


@pytest.mark.parametrize("policy", ["selective", "recompute", "offload"])
def test_policies_change_no_gradient(policy: str, tiny: Tiny) -> None:
    model = adapted(tiny("gemma3-text"), modules_to_save=["norm", "k_proj", "embed_tokens"]).train()
    batch = {"ids": ids(), "labels": ids()}
    results = []
    for each in ("keep", policy):
        model.policies = [each] * len(model.policies)
        model.zero_grad()
        loss = lorarun.loss(model, batch)
        backward_elsewhere(model, loss)
        results.append([p.grad.clone() for p in lora_parameters(model)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_generation_runs_what_was_trained(tiny: Tiny) -> None:
    for arguments in OWN.values():
        model = adapted(tiny("gemma3-text"), **arguments)
        row = ids()[:1, :9]
        for _ in range(6):
            row = torch.cat((row, model(row)[:, -1:].argmax(-1)), dim=1)
        assert lorarun.generate(model, ids()[:1, :9], max_new_tokens=6, stop=[]) == row[:, 9:].tolist()


def test_plan_and_report_know(tiny: Tiny) -> None:
    model = adapted(tiny("llama3"), modules_to_save=["norm"], targets=["q_proj", "lm_head"])
    lorarun.plan(model, 64)
    lorarun.loss(model, {"ids": ids(), "labels": ids()}).backward()
    facts = lorarun.report(model).to_dict()
    assert "9 modules whole" in facts["adapters"]["default"] and "lm_head" in facts["adapters"]["default"]
    assert facts["model"]["parameters"] == sum(p.numel() for p in load(tiny("llama3")).parameters())


def test_adapters_by_row_are_for_projections(tiny: Tiny) -> None:
    model = adapted(tiny("llama3"), modules_to_save=["norm"])
    moved(add_lora(model, r=4, name="plain"))
    for names, active in ((["default", None], "plain"), (["plain", None], "default")):
        use_adapter(model, active)
        with pytest.raises(ValueError, match="and 'default' has copies of modules"):
            lorarun.generate(model, ids()[:, :5], max_new_tokens=2, adapters=names)
    use_adapter(model, None)
    lorarun.generate(model, ids()[:, :5], max_new_tokens=2, adapters=["plain", None])


def test_evaluation_and_smoothing_go_through_the_head_that_runs(tiny: Tiny) -> None:
    for arguments in OWN.values():
        model = adapted(tiny("gemma2"), **arguments)
        batch = {"ids": ids(), "labels": ids()}
        z = logits(model).float()
        expected = next_token_loss(z, ids())
        found = lorarun.evaluate(model, [batch])
        assert abs(found.loss / float(expected) - 1) < 1e-5
        assert abs(found.accuracy - float((z[:, :-1].argmax(-1) == ids()[:, 1:]).float().mean())) < 1e-6
        smoothed = F.cross_entropy(z[:, :-1].flatten(0, 1), ids()[:, 1:].flatten(), label_smoothing=0.2)
        assert off(lorarun.loss(model, batch, smoothing=0.2), smoothed) < 1e-5
