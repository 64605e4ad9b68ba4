"""Adapter folders: PEFT reads what lorarun writes, lorarun reads what PEFT writes, and nothing is lost or dropped."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors
import torch
import toy
from peft_side import PROJECTIONS, carriers, fill_b, ids_for, off, reference, with_adapter
from safetensors.torch import load_file, save_file

from lorarun.adapter import WEIGHTS, base_of, load_adapter, save_adapter
from lorarun.adapter_config import CONFIG, UNSUPPORTED
from lorarun.load import load
from lorarun.load import load_adapter as load_adapter_by_name
from lorarun.lora import adapters_disabled, add_lora, lora_parameters, use_adapter
from lorarun.merge import merge, unmerge
from lorarun.nn import Model

Tiny = Callable[[str], Path]
ROOT = Path(__file__).resolve().parent.parent


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model(ids_for(model))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text())


def change(folder: Path, **fields: Any) -> Path:
    """Write these fields into an adapter's configuration."""
    (folder / CONFIG).write_text(json.dumps(config_of(folder) | fields))
    return folder


def made_by_peft(base: Path, out: Path, **fields: Any) -> Any:
    """An adapter as PEFT saves it, and PEFT's live model."""
    fields = {"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM"} | fields
    model = peft.get_peft_model(reference(base), peft.LoraConfig(**fields))
    fill_b(model)
    model.save_pretrained(out)
    return model.eval()


def made_here(base: Path, out: Path, **arguments: Any) -> Model:
    model = add_lora(load(base, dtype=torch.float32), **({"r": 4, "alpha": 8, "seed": 0} | arguments))
    fill_b(model)
    save_adapter(model, out)
    return model.eval()


# --- both directions -----------------------------------------------------------------------------------------------

PEFT_CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "r": 16, "lora_alpha": 32},
    "layers": {"layers_to_transform": [1, 3], "target_modules": ["q_proj", "down_proj"]},
    "pattern": {"target_modules": r".*layers\.[01]\.mlp\.(up|gate)_proj"},
    "all-linear": {"target_modules": "all-linear", "lora_dropout": 0.1},
    "untyped": {"task_type": None, "lora_alpha": 5, "init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("kind", PEFT_CONFIGS)
def test_from_peft_and_back(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    base = tiny("llama-bias")
    other = made_by_peft(base, tmp_path / "peft", **PEFT_CONFIGS[kind])
    model = load(base, adapter=tmp_path / "peft", dtype=torch.float32)
    with torch.no_grad():
        expected = other(input_ids=ids_for(model)).logits
    assert off(logits(model), expected) < 1e-5
    use_adapter(model, None)
    assert off(logits(model), expected) > 0.01
    save_adapter(model, tmp_path / "again", name="default")
    first, second = load_file(tmp_path / "peft" / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    before, after = (peft.PeftConfig.from_pretrained(tmp_path / each) for each in ("peft", "again"))
    for field in ("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "layers_to_transform", "bias"):
        assert getattr(after, field) == getattr(before, field), field
    with torch.no_grad():
        assert torch.equal(with_adapter(base, tmp_path / "again")(input_ids=ids_for(model)).logits, expected)


OWN_ARGUMENTS: dict[str, tuple[dict[str, Any], Any, Any]] = {  # and target_modules, layers_to_transform as written
    "default": ({}, sorted(PROJECTIONS), None),
    "rslora": ({"r": 16, "alpha": 32, "rslora": True, "targets": ["v_proj"], "dropout": 0.05}, ["v_proj"], None),
    "layers": ({"layers": [2, 0]}, sorted(PROJECTIONS), [0, 2]),
    "pattern": ({"targets": r".*\.[qv]_proj"}, r".*\.[qv]_proj", None),
    # PEFT takes no layers with a pattern, so each module is named
    "pattern, layers": (
        {"targets": r".*\.[qv]_proj", "layers": 3},
        ["model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.v_proj"],
        None,
    ),
    "half alpha": ({"alpha": 2.5, "targets": ["k_proj"]}, ["k_proj"], None),
}


@pytest.mark.parametrize("kind", OWN_ARGUMENTS)
def test_to_peft_and_back(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    arguments, targets, layers = OWN_ARGUMENTS[kind]
    model = made_here(tiny("qwen2"), tmp_path, **arguments)
    other = with_adapter(tiny("qwen2"), tmp_path)
    with torch.no_grad():
        assert off(logits(model), other(input_ids=ids_for(model)).logits) < 1e-5
    config = config_of(tmp_path)
    assert (config["target_modules"], config["layers_to_transform"]) == (targets, layers)
    assert config["base_model_name_or_path"] == str(tiny("qwen2").resolve()) and config["revision"] is None
    unknown = config.keys() - vars(peft.LoraConfig()).keys()
    assert not unknown
    again = load(tmp_path, dtype=torch.float32)  # the base is found by its name
    assert carriers(again) == carriers(model) and torch.equal(logits(again), logits(model))
    kept, got = model.adapters["default"], again.adapters["default"]
    assert (got.r, got.alpha, got.dropout, got.scale) == (kept.r, kept.alpha, kept.dropout, kept.scale)
    save_adapter(again, tmp_path / "again")
    assert config_of(tmp_path / "again") == config
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()


@pytest.mark.parametrize("name", ["gemma3", "gemma3-v4config"])
def test_the_text_model_of_a_multimodal_checkpoint(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """PEFT sees the text model under `model.language_model`, and a vision tower with projections of the same names."""
    model = made_here(tiny(name), tmp_path / "own")
    other = with_adapter(tiny(name), tmp_path / "own")
    with torch.no_grad():
        assert off(logits(model), other(input_ids=ids_for(model)).logits) < 1e-5
    assert not any("vision" in n and "lora_" in n for n, _ in other.named_parameters())
    assert torch.equal(logits(load(tmp_path / "own", dtype=torch.float32)), logits(model))


def test_an_adapter_with_parts_for_a_vision_tower(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = made_by_peft(tiny("gemma3"), tmp_path, target_modules=["q_proj", "v_proj"])
    model = load(tiny("gemma3"), adapter=tmp_path, dtype=torch.float32)
    assert "8 tensors for the vision tower are left out" in capsys.readouterr().err
    with torch.no_grad():
        assert off(logits(model), other(input_ids=ids_for(model)).logits) < 1e-5
    with pytest.raises(ValueError, match="8 tensors are unexpected: base_model.model.model.vision_tower"):
        shutil.copytree(tmp_path, tmp_path / "plain")
        tensors = load_file(tmp_path / WEIGHTS)
        tensors = {key.replace("language_model.", ""): value for key, value in tensors.items()}
        save_file(tensors, tmp_path / "plain" / WEIGHTS)
        load_adapter(load(tiny("gemma3-text")), tmp_path / "plain")  # no vision tower belongs to this one


def test_names_as_other_writers_spell_them(tiny: Tiny, tmp_path: Path) -> None:
    model = made_here(tiny("gemma3-text"), tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / WEIGHTS)
    spellings: dict[str, Callable[[str], str]] = {
        "adapter's name": lambda key: key.replace(".weight", ".default.weight"),
        "bare": lambda key: key.removeprefix("base_model.model."),
        "compiled": lambda key: key.replace("base_model.model.", "base_model.model._orig_mod."),
        "multimodal": lambda key: key.replace("model.layers", "model.language_model.layers"),
        "multimodal, older": lambda key: key.replace("model.layers", "language_model.model.layers"),
    }
    for kind, spell in spellings.items():
        folder = shutil.copytree(tmp_path / "plain", tmp_path / kind)
        save_file({spell(key): value for key, value in tensors.items()}, folder / WEIGHTS)
        fresh = load(tiny("gemma3-text"), dtype=torch.float32)
        load_adapter(fresh, folder)
        assert torch.equal(logits(fresh), logits(model)), kind


# --- dtypes --------------------------------------------------------------------------------------------------------


def test_values_survive_in_every_dtype(tiny: Tiny, tmp_path: Path) -> None:
    """https://github.com/huggingface/peft/issues/2421"""
    base = tiny("llama3")
    for dtype, held in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        model = made_here(base, tmp_path / "one", dtype=dtype, targets=["q_proj"])
        stored = load_file(tmp_path / "one" / WEIGHTS)
        assert {tensor.dtype for tensor in stored.values()} == {dtype}
        again = load(base)
        load_adapter(again, tmp_path / "one")
        assert {p.dtype for p in lora_parameters(again)} == {held}
        pairs = zip(lora_parameters(model), lora_parameters(again), strict=True)
        assert all(torch.equal(a.double(), b.double()) for a, b in pairs)
        save_adapter(again, tmp_path / "two")
        assert all(torch.equal(t.to(dtype), stored[k]) for k, t in load_file(tmp_path / "two" / WEIGHTS).items())
        narrow = load(base)
        load_adapter(narrow, tmp_path / "one", dtype=torch.bfloat16)
        assert {p.dtype for p in lora_parameters(narrow)} == {torch.bfloat16}


def test_factors_that_are_views(tiny: Tiny, tmp_path: Path) -> None:
    """Slices of one buffer and transposed matrices: https://github.com/safetensors/safetensors/issues/202"""
    model = made_here(tiny("llama3"), tmp_path / "plain", targets=["q_proj", "v_proj"])
    expected = load_file(tmp_path / "plain" / WEIGHTS)
    buffer = torch.cat([p.detach().flatten() for p in lora_parameters(model)])
    start = 0
    for parameter in lora_parameters(model):
        parameter.data = buffer[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    first = lora_parameters(model)[0]
    first.data = first.data.t().contiguous().t()
    save_adapter(model, tmp_path / "views")
    got = load_file(tmp_path / "views" / WEIGHTS)
    assert all(torch.equal(got[key], expected[key]) for key in expected)
    assert (tmp_path / "views" / WEIGHTS).stat().st_size == (tmp_path / "plain" / WEIGHTS).stat().st_size


# --- around the model ----------------------------------------------------------------------------------------------


def test_loading_leaves_the_mode_and_trains_only_the_adapter(tiny: Tiny, tmp_path: Path) -> None:
    made_here(tiny("llama3"), tmp_path, dropout=0.5)
    model = load(tiny("llama3"), dtype=torch.float32)
    base = logits(model)
    load_adapter_by_name(model, str(tmp_path), name="mine")
    assert not model.training and model.active == "mine"
    assert torch.equal(logits(model), logits(model))  # no dropout
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if ".mine." in n
    }
    model.train()
    load_adapter(model, tmp_path, name="other")
    assert model.training and model.active == "other" and list(model.adapters) == ["mine", "other"]
    with adapters_disabled(model.eval()):
        assert torch.equal(logits(model), base)
    merge(model)
    save_adapter(model, tmp_path / "merged", name="mine")
    assert (tmp_path / "merged" / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()
    for call, message in (
        (lambda: load_adapter(model, tmp_path, name="mine"), "an adapter named 'mine' already"),
        (lambda: load_adapter(model, tmp_path, name="third"), "call unmerge"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    unmerge(model)


def test_two_adapters_loaded_side_by_side(tiny: Tiny, tmp_path: Path) -> None:
    """Of other ranks, scales and targets, each as PEFT runs it alone, whichever was on before."""
    base, expected = tiny("llama3"), {}
    kinds = {"one": PEFT_CONFIGS["rslora"], "two": PEFT_CONFIGS["layers"]}
    for name, fields in kinds.items():
        other = made_by_peft(base, tmp_path / name, **fields)
        with torch.no_grad():
            expected[name] = other(input_ids=ids_for(load(base))).logits
    model = load(base, dtype=torch.float32)
    plain = logits(model)
    for name in kinds:
        load_adapter(model, tmp_path / name, name=name)
        assert off(logits(model), expected[name]) < 1e-5
    for name in ("one", None, "two", "one", "two"):
        use_adapter(model, name)
        assert off(logits(model), plain if name is None else expected[name]) < 1e-5
    assert min(off(expected["one"], expected["two"]), off(expected["one"], plain)) > 1e-2


def test_saving_by_name(tiny: Tiny, tmp_path: Path) -> None:
    model = load(tiny("llama3"))
    with pytest.raises(ValueError, match="no adapter is active; the model has none: call add_lora"):
        save_adapter(model, tmp_path)
    add_lora(model, name="one", targets=["q_proj"])
    add_lora(model, name="two", targets=["v_proj"])
    with pytest.raises(ValueError, match="there is no adapter 'three'; the model has one, two"):
        save_adapter(model, tmp_path, name="three")
    save_adapter(model, tmp_path / "two")
    save_adapter(model, tmp_path / "deep" / "one", name="one")
    assert all("v_proj" in key for key in load_file(tmp_path / "two" / WEIGHTS))
    assert all("q_proj" in key for key in load_file(tmp_path / "deep" / "one" / WEIGHTS))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        save_adapter(model, tmp_path / "file")


def test_a_named_chat_template_is_saved_and_found_again(tiny: Tiny, tmp_path: Path) -> None:
    base = shutil.copytree(tiny("llama-tied"), tmp_path / "base")
    toy.make(base)
    model = add_lora(load(base, template="chatml"), targets=["q_proj"])
    save_adapter(model, tmp_path / "adapter")
    chat = [{"role": "user", "content": "fox"}]
    again = load(tmp_path / "adapter")
    assert again.tokenizer.render(chat) == model.tokenizer.render(chat)
    assert "<|im_start|>" in model.tokenizer.render(chat)
    assert load(tmp_path / "adapter", template="{{ messages[0].content }}").tokenizer.render(chat) == "fox"
    plain = add_lora(load(base), targets=["q_proj"])
    save_adapter(plain, tmp_path / "plain")
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == [CONFIG, WEIGHTS]


def test_base_of(tiny: Tiny, tmp_path: Path) -> None:
    made_here(tiny("llama3"), tmp_path, targets=["q_proj"])
    assert base_of(tmp_path) == (str(tiny("llama3").resolve()), None)
    change(tmp_path, base_model_name_or_path="owner/name", revision="abc")
    assert base_of(tmp_path) == ("owner/name", "abc")
    change(tmp_path, base_model_name_or_path=str(tiny("llama3")), revision="main")
    assert base_of(tmp_path) == (str(tiny("llama3")), None)  # a revision of a folder means nothing
    change(tmp_path, base_model_name_or_path=None)
    with pytest.raises(ValueError, match="names no base model: load the base and pass this folder as adapter="):
        base_of(tmp_path)


# --- configurations that are not plain LoRA ------------------------------------------------------------------------


def test_fields_of_a_newer_peft(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """https://github.com/huggingface/peft/issues/2275: without a value they are told about once, with one refused."""
    model = made_here(tiny("llama3"), tmp_path, targets=["q_proj"])
    nothing = {"monteclora_config": None, "lora_bias": False, "ensure_weight_tying": False, "corda_config": None}
    change(tmp_path, **nothing, future_flag=False, later_config=None, more={}, names=[], text="")
    fresh = load(tiny("llama3"), dtype=torch.float32)
    load_adapter(fresh, tmp_path)
    assert torch.equal(logits(fresh), logits(model))
    said = [line for line in capsys.readouterr().err.splitlines() if "ignored" in line]
    assert len(said) == 1 and said[0].endswith("future_flag, later_config, more, names, text.")
    change(tmp_path, future_flag=True, use_bdlora=True, layer_replication=[[0, 2]], target_parameters=["x"], zero=0)
    fresh = load(tiny("llama3"))
    with pytest.raises(ValueError) as caught:
        load_adapter(fresh, tmp_path)
    for part in (
        "future_flag is True",
        "use_bdlora is True",
        "layer_replication is [[0, 2]]",
        "target_parameters is ['x']",
    ):
        assert part in str(caught.value)
    assert "zero is 0" in str(caught.value)  # a number may well mean something
    assert not carriers(fresh) and not fresh.adapters


WRONG_FIELDS: dict[str, Any] = dict.fromkeys(sorted(UNSUPPORTED), {"x": 1}) | {
    "peft_type": "LOHA",
    "task_type": "SEQ_CLS",
    "bias": "most",
    "lora_bias": 1.5,
    "use_dora": "yes",
    "loftq_config": {"loftq_bits": 8},
    "fan_in_fan_out": True,
    "init_lora_weights": "pissa_niter_4",
    "layers_pattern": "h",
    "modules_to_save": "lm_head",
    "trainable_token_indices": {"q_proj": [1]},
    "ensure_weight_tying": "yes",
    "exclude_modules": ["q_proj"],
    "rank_pattern": {"q_proj": 0},
    "alpha_pattern": ["q_proj"],
    "r": 0,
    "lora_alpha": "16",
    "lora_dropout": 1.5,
    "target_modules": None,
    "layers_to_transform": "1",
}


def test_every_field_that_would_change_the_arithmetic_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    model = load(tiny("llama3"))
    made_here(tiny("llama3"), tmp_path / "good", targets=["q_proj"])
    for field, value in WRONG_FIELDS.items():
        folder = change(shutil.copytree(tmp_path / "good", tmp_path / field), **{field: value})
        with pytest.raises(ValueError) as caught:
            load_adapter(model, folder)
        assert f" {field} is {value!r}" in str(caught.value), field
    assert not carriers(model)


def test_every_field_of_the_installed_peft_is_known(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_by_peft(tiny("llama3"), tmp_path, target_modules=["q_proj"])
    capsys.readouterr()
    load_adapter(load(tiny("llama3")), tmp_path)
    assert "ignored" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "change_to", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, {"modules_to_save": None}, "was trained on another lm_head"),
        ({"modules_to_save": ["norm"]}, {"modules_to_save": ["lm_head"]}, "1 tensors are missing: lm_head.weight"),
        ({"modules_to_save": ["norm"]}, {"modules_to_save": None}, "9 tensors are unexpected"),
        ({}, {"modules_to_save": ["classifier"]}, "no module of this model is called 'classifier'"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            {"target_modules": ["q_proj"]},
            "2 tensors are unexpected: base_model.model.lm_head.lora_A.weight",
        ),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            {"target_modules": ["q_proj", "lm_head"]},
            "2 tensors are missing: lm_head.lora_A.weight, lm_head.lora_B.weight",
        ),
        (
            {"trainable_token_indices": [1, 2]},
            {"trainable_token_indices": [1, 2, 3]},
            r"shape \[2, 64\] instead of \[3, 64\]: .*trainable_tokens_delta",
        ),
        (
            {"trainable_token_indices": [1, 2]},
            {"modules_to_save": ["embed_tokens"]},
            "rows of tokens together with a copy or an update of the table are not supported: model.embed_tokens",
        ),
    ],
)
def test_tensors_that_are_no_projections(
    fields: dict, change_to: dict, message: str, tiny: Tiny, tmp_path: Path
) -> None:
    """Trained values are never taken for frozen ones, nor left out."""
    other = made_by_peft(tiny("llama3"), tmp_path, **({"target_modules": ["q_proj"]} | fields))
    with torch.no_grad():
        for n, parameter in other.named_parameters():
            if "modules_to_save" in n:
                parameter.add_(0.1)
    other.save_pretrained(tmp_path)
    load_adapter(load(tiny("llama3")), tmp_path)
    model = load(tiny("llama3"))
    with pytest.raises(ValueError, match=message):
        load_adapter(model, change(tmp_path, **change_to))
    assert not carriers(model) and not model.adapters


# --- files that do not fit -----------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_said_at_once(tiny: Tiny, tmp_path: Path) -> None:
    made_here(tiny("llama3"), tmp_path, targets=["q_proj", "o_proj"])
    tensors = load_file(tmp_path / WEIGHTS)
    prefix = "base_model.model.model.layers."
    del tensors[f"{prefix}0.self_attn.q_proj.lora_A.weight"]
    tensors[f"{prefix}1.self_attn.o_proj.lora_B.weight"] = torch.zeros(3, 4)
    tensors[f"{prefix}2.self_attn.o_proj.lora_B.weight"] = torch.zeros(64, 4, dtype=torch.int32)
    tensors[f"{prefix}7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 64)
    tensors[f"{prefix}0.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 64)
    tensors["base_model.model.lm_head.weight"] = torch.zeros(4)
    save_file(tensors, tmp_path / WEIGHTS)
    model = load(tiny("llama3"))
    with pytest.raises(ValueError) as caught:
        load_adapter(model, tmp_path)
    text = str(caught.value)
    for part in (
        "1 of 16 tensors are missing: model.layers.0.self_attn.q_proj.lora_A.weight",
        f"2 tensors are unexpected: base_model.model.lm_head.weight, {prefix}7.self_attn.q_proj.lora_A.weight",
        f"1 tensors are of modules that {CONFIG} does not target: {prefix}0.mlp.up_proj.lora_A.weight",
        f"shape [3, 4] instead of [64, 4]: {prefix}1.self_attn.o_proj.lora_B.weight",
        f"dtype int32 instead of float32, bfloat16 or float16: {prefix}2.self_attn.o_proj.lora_B.weight",
    ):
        assert part in text
    assert not carriers(model)


def test_the_adapter_of_another_model(tiny: Tiny, tmp_path: Path) -> None:
    made_here(tiny("qwen3"), tmp_path)
    with pytest.raises(ValueError) as caught:
        load_adapter(load(tiny("llama3")), tmp_path)
    assert f"It names {tiny('qwen3').resolve()} as its base; this model is {tiny('llama3')}." in str(caught.value)
    assert "shape [128, 4] instead of [64, 4]: base_model.model.model.layers.{0-3}.self_attn.q_proj" in str(
        caught.value
    )


def test_the_same_matrix_twice(tiny: Tiny, tmp_path: Path) -> None:
    made_here(tiny("llama3"), tmp_path, targets=["q_proj"])
    tensors = load_file(tmp_path / WEIGHTS)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {key.replace(".weight", ".default.weight"): tensors[key].clone()}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="are the same matrix"):
        load_adapter(load(tiny("llama3")), tmp_path)


def test_folders_that_hold_no_adapter(tiny: Tiny, tmp_path: Path) -> None:
    made_here(tiny("llama3"), tmp_path / "good", targets=["q_proj"])
    model = load(tiny("llama3"))

    def without(file: str, kind: str) -> Path:
        folder = shutil.copytree(tmp_path / "good", tmp_path / kind)
        (folder / file).unlink()
        return folder

    no_weights, pickled = without(WEIGHTS, "no weights"), without(WEIGHTS, "pickled")
    torch.save({}, pickled / "adapter_model.bin")
    cut = without(WEIGHTS, "cut")
    whole = (tmp_path / "good" / WEIGHTS).read_bytes()
    (cut / WEIGHTS).write_bytes(whole[:-100])
    broken = without(CONFIG, "broken")
    (broken / CONFIG).write_text("{")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / CONFIG).write_text("[]")
    for folder, message in (
        (tmp_path / "nowhere", "has no adapter_config.json; expected a folder with an adapter"),
        (no_weights, "has no adapter_model.safetensors"),
        (pickled, "as a pickle .adapter_model.bin., which runs code when it is opened and is never loaded"),
        (cut, "is cut short"),
        (broken, "is not valid JSON"),
        (tmp_path / "list", "must hold a JSON object, got a list"),
    ):
        with pytest.raises(ValueError, match=message):
            load_adapter(model, folder)
    assert not carriers(model)


# --- a process that dies while it saves ----------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from lorarun import adapter
from lorarun.load import load
from lorarun.lora import add_lora

base, root = Path(sys.argv[1]), Path(sys.argv[2])
model = load(base)
add_lora(model, r=4, targets=["q_proj"], name="old", seed=1)
add_lora(model, r=4, targets=["q_proj"], name="new", seed=2)
add_lora(model, r=8, targets=["v_proj"], name="other", seed=3)
names = ("open", "fsync", "unlink", "replace", "mkdir")


def counted(call, left):
    def step(*arguments, **named):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return call(*arguments, **named)
    return step


for name in ("new", "other"):
    for there in (False, True):
        for step in range(100):
            folder = root / f"{name} {'over old' if there else 'alone'} {step}"
            if there:
                adapter.save_adapter(model, folder, "old")
            child = os.fork()
            if child == 0:
                left = [step]
                adapter.open = counted(open, left)  # shadows the builtin there
                for each in names[1:]:
                    setattr(os, each, counted(getattr(os, each), left))
                adapter.save_adapter(model, folder, name)
                os._exit(0)
            if os.waitpid(child, 0)[1] == 0:
                break
"""


def test_a_kill_at_any_step_leaves_a_whole_adapter_or_none(tiny: Tiny, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tiny("llama-tied"), tmp_path], cwd=ROOT, check=True)
    folders = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert len(folders) > 20
    known = load(tiny("llama-tied"))
    add_lora(known, r=4, targets=["q_proj"], name="old", seed=1)
    add_lora(known, r=4, targets=["q_proj"], name="new", seed=2)
    add_lora(known, r=8, targets=["v_proj"], name="other", seed=3)
    found: dict[str, set[str]] = {}
    for folder in folders:
        states = found.setdefault(folder.name.rpartition(" ")[0], set())
        if not (folder / CONFIG).exists():
            states.add("none")
            continue
        model = load(tiny("llama-tied"), adapter=folder)  # strict: raises if the two files were not of one adapter
        got = lora_parameters(model)[0]
        states.update(name for name in known.adapters if torch.equal(lora_parameters(known, name)[0], got))
    assert found == {
        "new alone": {"none", "new"},
        "new over old": {"old", "new"},  # of one configuration: never nothing
        "other alone": {"none", "other"},
        "other over old": {"old", "none", "other"},
    }


def test_what_a_kill_left_does_not_matter(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / f"{WEIGHTS}.partial").write_bytes(b"half")
    (tmp_path / "README.md").write_text("mine")
    made_here(tiny("llama3"), tmp_path, targets=["q_proj"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", CONFIG, WEIGHTS]
    with safetensors.safe_open(tmp_path / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers wants it
