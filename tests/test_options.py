"""The options of an adapter against PEFT's: values, gradients and files in both directions, and the switches around
them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import torch.nn.functional as F
from peft_side import PROJECTIONS, fill, ids_for, off, reference, with_adapter
from safetensors.torch import load_file

from lorarun.adapter import WEIGHTS, load_adapter, save_adapter
from lorarun.adapter_config import CONFIG
from lorarun.export import save_merged
from lorarun.generate import generate
from lorarun.kernels.dropout import dropout
from lorarun.load import load
from lorarun.lora import adapters_disabled, add_lora, linears, lora_parameters, use_adapter
from lorarun.merge import combine_adapters, merge, unmerge
from lorarun.nn import Linear, Model
from lorarun.quant.store import Store, dequantize
from lorarun.report import report

Tiny = Callable[[str], Path]
# One of each family, gemma3 in its two shapes; llama-bias and qwen2 have biases.
FAMILIES = ["llama3", "llama-bias", "qwen2", "qwen3", "gemma", "gemma2", "gemma3-text"]

OPTIONS: dict[str, dict[str, Any]] = {
    "patterns": {
        "rank_pattern": {"o_proj": 2, r"layers\.[02]\.mlp\.up_proj": 9, "up_proj": 3},
        "alpha_pattern": {"model.layers.1.self_attn.q_proj": 3, "down_proj": 20},
    },
    "rslora patterns": {"rslora": True, "rank_pattern": {"q_proj": 9}, "alpha_pattern": {"q_proj": 3, "v_proj": 50}},
    "bias": {"bias": True},
    "bias, one target": {"bias": True, "targets": ["v_proj"]},
    "dora": {"dora": True},
    "dora, patterns": {
        "dora": True,
        "rslora": True,
        "rank_pattern": {"gate_proj": 3},
        "targets": ["gate_proj", "k_proj"],
    },  # fmt: skip
}
BIASED: dict[str, dict[str, Any]] = {
    "lora_only": {"bias": "lora_only", "targets": ["q_proj", "v_proj", "up_proj"]},
    "all": {"bias": "all", "targets": ["q_proj", "up_proj"]},
    "dora, lora_only": {"bias": "lora_only", "dora": True},
}
FIELDS = {  # ours and PEFT's
    "r": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "rank_pattern": "rank_pattern", "dora": "use_dora",
    "alpha_pattern": "alpha_pattern",
}  # fmt: skip


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model(ids_for(model))


def peft_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids_for(model)).logits


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def adapted(base: Path, **options: Any) -> Model:
    """A model in fp32 with an adapter, every part of which already does something."""
    arguments = {"r": 4, "alpha": 12, "seed": 0} | options
    load_options = {key: arguments.pop(key) for key in ("bits",) if key in arguments}
    model = add_lora(load(base, dtype=torch.float32, **load_options), **arguments)
    fill(model)
    return model.eval()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """By the names that files have."""
    loss.backward()
    found = {n.removeprefix("base_model.model."): p.grad for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    rename = (".lora_bias.default.weight", ".base_layer.bias"), (".default", "")
    for old, new in rename:
        found = {name.replace(old, new): grad for name, grad in found.items()}
    return found


def compare(model: Model, other: Any) -> None:
    """Logits, and the gradient of everything that is trained.  1e-5 of a tensor's length is some 100 roundings of fp32,
    as deep as these models are."""
    ids = ids_for(model)
    ours, theirs = model(ids), other(input_ids=ids).logits
    assert off(ours, theirs) < 1e-5
    got, expected = gradients(model, next_token_loss(ours, ids)), gradients(other, next_token_loss(theirs, ids))
    names = {name.replace("base_layer.", "") for name in expected}
    assert {name.replace("base_layer.", "") for name in got} == names and got
    expected = {name.replace("base_layer.", ""): grad for name, grad in expected.items()}
    off_by = {name: off(grad, expected[name.replace("base_layer.", "")]) for name, grad in got.items()}
    assert all(grad.abs().sum() > 0 for grad in got.values())
    assert not {name: error for name, error in off_by.items() if not error < 2e-5}


# --- against PEFT --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in FAMILIES for kind in ("patterns", "bias", "dora")]
    + [("llama-bias", kind) for kind in ("rslora patterns", "bias, one target", "dora, patterns")],
)
def test_written_here_read_by_peft(name: str, kind: str, tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny(name), **OPTIONS[kind])
    save_adapter(model, tmp_path)
    compare(model, with_adapter(tiny(name), tmp_path, trainable=True))
    again = load(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))
    save_adapter(again, tmp_path / "again")
    for file in (CONFIG, WEIGHTS):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / file).read_bytes()


@pytest.mark.parametrize("kind", BIASED)
@pytest.mark.parametrize("name", ["llama-bias", "qwen2"])
def test_trained_biases_written_here_read_by_peft(name: str, kind: str, tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny(name), **BIASED[kind])
    save_adapter(model, tmp_path)
    compare(model, with_adapter(tiny(name), tmp_path, trainable=True))
    assert torch.equal(logits(load(tmp_path, dtype=torch.float32)), logits(model))


@pytest.mark.parametrize("kind", [*OPTIONS, *BIASED])
def test_written_by_peft_read_here(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    name = "llama-bias"
    options = {"r": 4, "alpha": 12, "targets": PROJECTIONS} | (OPTIONS | BIASED)[kind]
    bias = options.get("bias", False)
    fields = {theirs: options[ours] for ours, theirs in FIELDS.items() if ours in options}
    fields |= {"target_modules": options["targets"], "bias": bias if isinstance(bias, str) else "none"}
    fields |= {"lora_bias": bias is True}
    other = peft.get_peft_model(reference(tiny(name)), peft.LoraConfig(task_type="CAUSAL_LM", **fields))
    fill(other)
    other.save_pretrained(tmp_path / "peft")
    model = load(tiny(name), dtype=torch.float32)
    plain = logits(model)
    load_adapter(model, tmp_path / "peft")
    compare(model, other.eval())
    with adapters_disabled(model):
        assert torch.equal(logits(model), plain)  # which PEFT does not promise with biases
    save_adapter(model, tmp_path / "again")
    first, second = load_file(tmp_path / "peft" / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    before, after = (peft.PeftConfig.from_pretrained(tmp_path / each) for each in ("peft", "again"))
    for field in (*FIELDS.values(), "bias", "lora_bias", "target_modules"):
        assert getattr(after, field) == getattr(before, field), field


@pytest.mark.parametrize("kind", ["patterns", "dora", "bias"])
def test_the_text_model_of_a_multimodal_checkpoint(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    """There PEFT's names are longer, and patterns are about these."""
    model = adapted(tiny("gemma3"), **OPTIONS[kind])
    save_adapter(model, tmp_path)
    assert off(logits(model), peft_logits(with_adapter(tiny("gemma3"), tmp_path))) < 1e-5
    again = load(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))
    text = load(tiny("gemma3-text"), dtype=torch.float32)
    load_adapter(text, tmp_path)  # whose names are shorter
    kept = model.adapters["default"]
    for path in kept.modules:
        assert text.adapters["default"].scale_of(path) == kept.scale_of(path), path


@pytest.mark.parametrize(
    ("name", "kind"), [*(("llama-bias", kind) for kind in ("patterns", "bias", "dora")), ("gemma3-text", "dora")]
)
def test_on_nf4(name: str, kind: str, tiny: Tiny, tmp_path: Path) -> None:
    """PEFT over the weights that NF4 makes of these."""
    model = adapted(tiny(name), bits=4, **OPTIONS[kind])
    save_adapter(model, tmp_path)
    base = reference(tiny(name))
    for path, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.weight, Store):
            base.get_submodule(path).weight.data = dequantize(module.weight, torch.float32)
    compare(model, peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True, torch_device="cpu").eval())


def test_a_16_bit_base(tiny: Tiny, tmp_path: Path) -> None:
    """bf16 on both sides: PEFT's products of the adapter are fp32, ours bf16, so both are a few roundings of 2⁻⁹ off
    the exact value, which fp32 over the same weights is."""
    for kind in ("dora", "bias", "patterns"):
        model = add_lora(load(tiny("llama-bias"), dtype=torch.bfloat16), r=4, alpha=12, seed=0, **OPTIONS[kind]).eval()
        fill(model)
        save_adapter(model, tmp_path / kind)
        exact = peft_logits(with_adapter(tiny("llama-bias"), tmp_path / kind))
        base = peft_logits(reference(tiny("llama-bias"), torch.bfloat16)).float()
        rounding = off(base, peft_logits(reference(tiny("llama-bias"))))
        assert off(logits(model).float(), exact) < 2 * rounding
        next_token_loss(model(ids_for(model)), ids_for(model)).backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in lora_parameters(model))


def test_dropout_with_dora_is_pefts(tiny: Tiny, tmp_path: Path) -> None:
    """Our masks in PEFT's place: what is scaled sees the dropped input, what it is added to the whole one."""
    model = adapted(tiny("llama-bias"), dora=True, dropout=0.3, targets=["up_proj", "o_proj"]).train()
    save_adapter(model, tmp_path)
    other = with_adapter(tiny("llama-bias"), tmp_path, trainable=True).train()
    linear = model.model.layers[1].mlp.up_proj
    theirs = other.base_model.model.model.layers[1].mlp.up_proj
    x = torch.randn(2, 9, linear.in_features)
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()

    class Ours(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return dropout(x, *linear.running().drop)

    theirs.lora_dropout["default"] = Ours()
    y, expected = linear(x_ours), theirs(x_theirs)
    assert off(y, expected) < 1e-6
    up = torch.randn_like(y)
    y.backward(up)
    expected.backward(up)
    assert off(x_ours.grad, x_theirs.grad) < 1e-6
    for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
        ours = getattr(linear, part)["default"].weight.grad
        assert off(ours, getattr(theirs, part)["default"].weight.grad) < 1e-5, part
    model.eval()
    assert off(linear(x), y) > 0.1


# --- initialisations -----------------------------------------------------------------------------------------------


def peft_start(base: Path, init: Any, **fields: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """PEFT's model with an initialisation, and the A and B that it starts from, by our names."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=12, target_modules=PROJECTIONS, init_lora_weights=init, **fields
    )
    other = peft.get_peft_model(reference(base), config)
    return other, {n.removeprefix("base_model.model."): p for n, p in other.named_parameters() if "lora_" in n}


@pytest.mark.parametrize(
    ("name", "init", "options"),
    [(name, "pissa", {}) for name in FAMILIES]
    + [("llama3", init, {"use_rslora": True, "use_dora": True}) for init in ("pissa", "olora")]
    + [(name, "olora", {}) for name in ("llama3", "gemma2")],
)
def test_pissa_and_olora_are_pefts(name: str, init: str, options: dict, tiny: Tiny, tmp_path: Path) -> None:
    """The same start, the same function and gradients behind it, and the file holds for the plain base.

    Singular vectors have a sign of their own, so it is products that are compared; those of 1e-5 in the start come
    from LAPACK's order of sums.
    """
    other, start = peft_start(tiny(name), init, **options)
    model = add_lora(
        load(tiny(name), dtype=torch.float32),
        r=4,
        alpha=12,
        init=init,
        rslora="use_rslora" in options,
        dora="use_dora" in options,
    )
    before = logits(load(tiny(name), dtype=torch.float32))
    assert off(logits(model.eval()), before) < 1e-5 and off(peft_logits(other.eval()), before) < 1e-5
    own = dict(model.named_parameters())
    with torch.no_grad():
        for path, linear in linears(model):
            a, b = (start[f"{path}.lora_{letter}.default.weight"] for letter in "AB")
            ours_a, ours_b = linear.factors("default")
            assert off(ours_b @ ours_a, b @ a) < 1e-4, path
            ours_a.copy_(a), ours_b.copy_(b)
            linear.lora_A["default"].start.copy_(a), linear.lora_B["default"].start.copy_(-b)
    fill(model), fill(other)
    assert sum("lora_" in n for n in own) == len(start)
    compare(model, other)
    save_adapter(model, tmp_path)
    plain = with_adapter(tiny(name), tmp_path)  # over a base that was not changed
    assert off(peft_logits(plain), logits(model)) < 1e-5
    assert off(logits(load(tmp_path, dtype=torch.float32)), logits(model)) < 1e-5
    with adapters_disabled(model):
        assert torch.equal(logits(model), before)


def test_pissa_by_rounds(tiny: Tiny) -> None:
    """svd_lowrank is near the truth where the spectrum falls; the same seed gives the same, and spares the global
    generator."""
    generator = torch.Generator().manual_seed(0)
    model = load(tiny("llama-tied"), dtype=torch.float32)
    one, two = (torch.linalg.qr(torch.randn(64, 64, generator=generator))[0] for _ in range(2))
    model.model.layers[0].self_attn.q_proj.weight.data.copy_(one * 0.3 ** torch.arange(64) @ two)
    before, state = logits(model), torch.get_rng_state()
    others = [copy.deepcopy(model) for _ in range(2)]
    add_lora(model, r=4, alpha=4, init="pissa", targets=["q_proj"], layers=0)
    for other in others:
        add_lora(other, r=4, alpha=4, init="pissa_niter_4", targets=["q_proj"], layers=0, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    exact, one, two = (lora_parameters(m) for m in (model, *others))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert off(one[1] @ one[0], exact[1] @ exact[0]) < 1e-3
    assert off(logits(others[0].eval()), before) < 1e-5


def test_gaussian(tiny: Tiny) -> None:
    model = add_lora(load(tiny("llama3")), r=16, init="gaussian", rank_pattern={"o_proj": 4}, seed=0)
    for path, linear in linears(model):
        a, b = linear.factors("default")
        r = 4 if "o_proj" in path else 16
        # n normal values show their deviation to 1/√2n, five times that is allowed
        assert not b.any() and abs(a.std() * r - 1) < 5 / math.sqrt(2 * a.numel())
        assert a.abs().max() * r > 2  # a uniform one of that deviation ends at √3


def test_loftq(tiny: Tiny, tmp_path: Path) -> None:
    """A and B are the best of their rank for what bitsandbytes' NF4 takes from the weights: PEFT's formula, with the
    scale taken out, which PEFT leaves to alpha = r."""
    base = tiny("llama3")
    model = add_lora(load(base, dtype=torch.float32, bits=4), r=8, alpha=24, init="loftq").eval()
    original = reference(base)
    for path, linear in linears(model):
        w = original.get_submodule(path).weight.detach()
        flat = w.flatten()  # rows of 160 numbers, which are no whole blocks, come back as others on a CPU
        codes, state = bitsandbytes.functional.quantize_4bit(flat, quant_type="nf4", compress_statistics=True)
        lost = w - bitsandbytes.functional.dequantize_4bit(codes, state).view_as(w)
        u, s, vh = torch.linalg.svd(lost, full_matrices=False)
        a, b = linear.factors("default")
        assert off(linear.adapters["default"].scale * (b @ a), (u[:, :8] * s[:8]) @ vh[:8]) < 1e-3, path
        assert off(a.norm(), b.norm()) < 1e-4  # shared between both
    exact, corrected = peft_logits(original), logits(model)
    with adapters_disabled(model):
        assert off(corrected, exact) < 0.9 * off(logits(model), exact)
    save_adapter(model, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["loftq_config"] == {"loftq_bits": 4}
    again = load(base, dtype=torch.float32, bits=4, adapter=tmp_path)
    assert torch.equal(logits(again), corrected)
    dequantised = reference(base)
    for path, linear in linears(model):
        dequantised.get_submodule(path).weight.data = dequantize(linear.weight, torch.float32)
    with pytest.warns(UserWarning, match="loftq_config"):
        other = peft.PeftModel.from_pretrained(dequantised, tmp_path).eval()
    assert off(peft_logits(other), corrected) < 1e-5
    with pytest.raises(ValueError, match="made for weights in NF4"):
        load(base, adapter=tmp_path)
    with pytest.raises(ValueError, match="would correct twice"):
        save_merged(model, tmp_path / "merged", base="original")
    save_merged(model, tmp_path / "merged")
    assert off(logits(load(tmp_path / "merged", dtype=torch.float32)), corrected) < 0.02


# --- switches ------------------------------------------------------------------------------------------------------

MERGED: dict[str, dict[str, Any]] = {
    "dora": {"dora": True},
    "bias": {"bias": True},
    "all": {"bias": "all", "targets": ["q_proj"]},
    "lora_only, dora": {"bias": "lora_only", "dora": True},
    "pissa": {"init": "pissa"},
}


@pytest.mark.parametrize("kind", MERGED)
def test_merged(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny("llama-bias"), **MERGED[kind])
    live, start = logits(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    save_adapter(model, tmp_path / "adapter")
    theirs = with_adapter(tiny("llama-bias"), tmp_path / "adapter").merge_and_unload()
    merge(model)
    merge(model)
    assert off(logits(model), live) < 1e-5 and off(peft_logits(theirs), live) < 1e-5
    for path, linear in linears(model):
        for part in ("weight", "bias"):
            ours, expected = getattr(linear, part), getattr(theirs.get_submodule(path), part)
            assert off(ours, expected) < 1e-5, (path, part)
    save_merged(model, tmp_path / "merged", dtype=torch.float32)
    unmerge(model)
    assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())
    assert torch.equal(logits(model), live)
    assert off(peft_logits(reference(tmp_path / "merged")), live) < 1e-5


def test_a_bias_with_no_place_is_not_merged(tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny("llama3"), bias=True, targets=["q_proj"])
    with pytest.raises(ValueError, match="none to add them to: model.layers.{0-3}.self_attn.q_proj"):
        merge(model)
    with pytest.raises(ValueError, match="none to add them to"):
        save_merged(model, tmp_path / "merged")


def test_dora_over_nf4_is_written_merged(tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny("qwen3"), dora=True, bits=4)
    save_merged(model, tmp_path, dtype=torch.float32)
    assert off(peft_logits(reference(tmp_path)), logits(model)) < 1e-5


def test_several_adapters_of_several_kinds(tiny: Tiny) -> None:
    model = load(tiny("qwen2"), dtype=torch.float32)
    base, alone = logits(model), {}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {}, "dora": {"dora": True}, "bias": {"bias": "all", "targets": ["v_proj"]}, "fa": {"freeze_a": True}
    }  # fmt: skip
    for name, options in kinds.items():
        one = add_lora(load(tiny("qwen2"), dtype=torch.float32), r=4, seed=len(name), **options)
        fill(one)
        alone[name] = logits(one.eval())
        add_lora(model, r=4, name=name, **options)
        for ours, theirs in zip(lora_parameters(model), lora_parameters(one), strict=True):
            ours.data.copy_(theirs)
        if "freeze_a" in options:
            for (_, ours), (_, theirs) in zip(linears(model), linears(one), strict=True):
                ours.factors(name)[0].data.copy_(theirs.factors("default")[0])
    for name in kinds:
        use_adapter(model.eval(), name)
        assert torch.equal(logits(model), alone[name]), name
        assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in lora_parameters(model, name)}
    use_adapter(model, None)
    assert torch.equal(logits(model), base)


def test_decoding_with_dora_sees_what_was_edited_in_between(tiny: Tiny) -> None:
    """Lengths are held on to while an answer is generated, and no longer."""
    model = adapted(tiny("llama3"), dora=True)
    ids = [5, 6, 7]
    first = generate(model, ids, max_new_tokens=8, stop=[])
    for _, linear in linears(model):
        linear.factors("default")[1].data.mul_(-3)  # announces nothing
    assert all(linear.norms.last is None for _, linear in linears(model))
    second = generate(model, ids, max_new_tokens=8, stop=[])
    step = torch.tensor([ids])
    for token in second:
        assert int(model(step)[0, -1].argmax()) == token
        step = torch.cat((step, torch.tensor([[token]])), 1)
    assert first != second


def test_rows_of_a_batch_with_adapters_of_their_own(tiny: Tiny) -> None:
    model = load(tiny("qwen2"), dtype=torch.float32)
    kinds: dict[str, dict[str, Any]] = {
        "dora": {"dora": True}, "bias": {"bias": True}, "own": {"bias": "all", "dora": True}, "pissa": {"init": "pissa"}
    }  # fmt: skip
    for name, options in kinds.items():
        add_lora(model, r=4, name=name, seed=len(name), **options)
        fill(model)
    prompts, names = [[5, 6, 7], [8, 9], [5, 6, 7], [3, 4, 5, 6], [5, 6, 7]], [*kinds, None]
    expected = []
    for name, prompt in zip(names, prompts, strict=True):
        use_adapter(model, name)
        expected.append(generate(model, prompt, max_new_tokens=8, stop=[]))
    assert expected[0] != expected[2]
    use_adapter(model, "dora")  # which has no say
    assert generate(model, prompts, max_new_tokens=8, stop=[], adapters=names) == expected
    add_lora(model, name="norms", modules_to_save=["norm"], targets=["q_proj"])
    with pytest.raises(ValueError, match="'norms' has copies of modules or parts of the tables"):
        generate(model, prompts, max_new_tokens=8, stop=[], adapters=names)


def test_a_frozen_a(tiny: Tiny) -> None:
    model = adapted(tiny("llama3"), freeze_a=True)
    assert (
        len(lora_parameters(model)) == 28
        and not model.model.layers[0].mlp.up_proj.lora_A["default"].weight.requires_grad
    )
    next_token_loss(model(ids_for(model)), ids_for(model)).backward()
    free = adapted(tiny("llama3"))
    next_token_loss(free(ids_for(free)), ids_for(free)).backward()
    for (_, ours), (_, theirs) in zip(linears(model), linears(free), strict=True):
        (a, b), (_, expected) = ours.factors("default"), theirs.factors("default")
        assert a.grad is None and torch.equal(b.grad, expected.grad)
    use_adapter(model, None)
    use_adapter(model, "default")
    assert sum(p.requires_grad for p in model.parameters()) == 28


# --- adapters combined ---------------------------------------------------------------------------------------------


def test_combined_is_pefts_cat(tiny: Tiny, tmp_path: Path) -> None:
    base, parts = tiny("llama3"), {"one": {"r": 4, "alpha": 12}, "two": {"r": 8, "alpha": 8, "rslora": True}}
    model, targets = load(base, dtype=torch.float32), {"one": ["q_proj", "up_proj"], "two": ["up_proj", "down_proj"]}
    for seed, (name, options) in enumerate(parts.items()):
        add_lora(model, name=name, targets=targets[name], seed=seed, **options)
    fill(model)
    model.eval()
    other = None
    for name in parts:
        save_adapter(model, tmp_path / name, name=name)
        if other is None:
            other = peft.PeftModel.from_pretrained(reference(base), tmp_path / name, adapter_name=name)
        else:
            other.load_adapter(tmp_path / name, adapter_name=name)
    other.add_weighted_adapter(list(parts), [0.7, -0.4], "both", combination_type="cat")
    other.set_adapter("both")
    combine_adapters(model, {"one": 0.7, "two": -0.4}, name="both")
    assert off(logits(model), peft_logits(other.eval())) < 1e-5
    ranks = {path: len(linear.factors("both")[0]) for path, linear in linears(model)}
    assert {path.rpartition(".")[2]: rank for path, rank in ranks.items()} == {
        "q_proj": 4,
        "up_proj": 12,
        "down_proj": 8,
    }
    save_adapter(model, tmp_path / "both")
    assert off(peft_logits(with_adapter(base, tmp_path / "both")), logits(model)) < 1e-5
    add_lora(model, name="dora", dora=True)
    with pytest.raises(ValueError, match="'dora' has DoRA, which does not add up; the model has one, two, both, dora"):
        combine_adapters(model, {"one": 1.0, "dora": 1.0})
    with pytest.raises(ValueError, match="no adapter 'three'; the weight of 'two' is nan"):
        combine_adapters(model, {"three": 1.0, "two": math.nan})
    with pytest.raises(ValueError, match="no adapter is named"):
        combine_adapters(model, {})


def test_combined_biases(tiny: Tiny) -> None:
    model = load(tiny("llama3"), dtype=torch.float32)
    add_lora(model, r=2, name="one", bias=True, targets=["q_proj"], seed=1)
    add_lora(model, r=3, name="two", targets=["q_proj"], seed=2)
    fill(model)
    combine_adapters(model, {"one": 2.0, "two": 0.5})
    linear, x = model.eval().model.layers[2].self_attn.q_proj, torch.randn(7, 64)
    outs = {}
    for name in ("one", "two", "combined", None):
        use_adapter(model, name)
        outs[name] = linear(x)
    base = outs[None]
    assert off(outs["combined"] - base, 2.0 * (outs["one"] - base) + 0.5 * (outs["two"] - base)) < 1e-5


# --- what is refused, and what is said -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank_pattern": {"nothing": 4}}, "rank_pattern: 'nothing' matches none of the projections"),
        ({"alpha_pattern": {"v_proj": 4}, "targets": ["q_proj"]}, "alpha_pattern: 'v_proj' matches none"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] is 0"),
        ({"rank_pattern": {"(": 1}}, "the pattern '\\(' is not a regular expression"),
        ({"bias": "lora"}, "bias is 'lora'; expected False, True, 'lora_only' or 'all'"),
        ({"bias": "lora_only"}, "bias='lora_only': these projections have no bias to train; bias=True"),
        ({"dora": True, "bias": True}, "dora with bias=True is not supported"),
        ({"init": "eva"}, "init is 'eva'; expected default, gaussian, pissa"),
        ({"init": "pissa", "dropout": 0.1}, "with dropout would drop from the weight itself"),
        ({"init": "olora", "r": 33, "targets": ["k_proj"]}, "has fewer"),
        ({"init": "loftq"}, "load the model with bits=4"),
        ({"r": 0, "dropout": 1.0}, "r is 0; .*; dropout is 1.0"),
    ],
)
def test_refused(arguments: dict, message: str, tiny: Tiny) -> None:
    model = load(tiny("llama3"))
    with pytest.raises(ValueError, match=message):
        add_lora(model, **arguments)
    assert not list(linears(model)) and not model.adapters


def test_loftq_of_what_is_stored_in_four_bits_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="needs the weights before they were quantised"):
        add_lora(load(tiny("llama3-bnb4")), init="loftq")


def test_report_names_the_options(tiny: Tiny) -> None:
    model = add_lora(load(tiny("llama-bias")), r=4, alpha=4, dora=True, bias="lora_only", rank_pattern={"q_proj": 8})
    add_lora(model, name="other", r=4, alpha=4, bias=True, init="pissa", freeze_a=True)
    rows = report(model).to_dict()["adapters"]
    assert rows["default"] == "off; r=4 to 8, scale=0.5 to 1, dropout=0, 28 projections, float32, DoRA, trained biases"
    assert rows["other"].endswith("28 projections, float32, B with bias, init pissa, A frozen")
