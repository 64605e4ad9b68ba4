"""Adapters on a live model: PEFT's arithmetic, its choice of modules, and the switches around them."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from peft_side import FAMILIES, PROJECTIONS, carriers, fill_b, ids_for, off, reference, with_adapter

from lorarun.adapter import save_adapter
from lorarun.load import load
from lorarun.lora import (
    adapters_disabled,
    add_lora,
    find_targets,
    linears,
    lora_parameters,
    use_adapter,
)
from lorarun.merge import merge, unmerge
from lorarun.nn import Linear, Model
from lorarun.project import project

Tiny = Callable[[str], Path]


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model(ids_for(model))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


# --- the arithmetic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_pefts(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """All seven targets, B != 0.  1e-5 of a tensor's length is some 100 roundings of fp32: these models' depth."""
    model = load(tiny(name), dtype=torch.float32)
    add_lora(model, r=4, alpha=12, seed=0)
    fill_b(model)
    save_adapter(model, tmp_path)
    other = with_adapter(tiny(name), tmp_path, trainable=True)
    ids = ids_for(model)
    ours, theirs = model(ids), other(input_ids=ids).logits
    assert off(ours, theirs) < 1e-5
    next_token_loss(ours, ids).backward()
    next_token_loss(theirs, ids).backward()
    expected = {n.removeprefix("base_model.model."): p.grad for n, p in other.named_parameters() if p.requires_grad}
    got = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    blocks = len(model.model.layers)
    assert got.keys() == expected.keys() and len(got) == blocks * len(PROJECTIONS) * 2
    wrong = {n: off(got[n], expected[n]) for n in got if not off(got[n], expected[n]) < 1e-5}
    assert not wrong
    assert all(p.grad is None for n, p in model.named_parameters() if "lora_" not in n)


def test_initial_values(tiny: Tiny) -> None:
    model = load(tiny("llama3"))
    before = logits(model)
    torch.manual_seed(3)
    assert add_lora(model, r=64) is model and model.training
    assert torch.equal(logits(model), before)  # B = 0: nothing changes yet
    for _, linear in linears(model):
        a, b = linear.factors("default")
        bound = 1 / math.sqrt(linear.in_features)
        assert not b.any() and a.abs().max() <= bound
        # Uniform in ±bound has standard deviation bound/√3; n values show it to 0.45/√n, five times that is allowed.
        assert abs(a.std() / (bound / math.sqrt(3)) - 1) < 2.3 / math.sqrt(a.numel())
        assert abs(a.mean()) < 5 * bound / math.sqrt(3 * a.numel())
    first = [p.clone() for p in lora_parameters(model)]
    torch.manual_seed(3)
    again = lora_parameters(add_lora(load(tiny("llama3")), r=64))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))  # torch's own generator


def test_a_seed_decides_the_values_and_spares_the_global_generator(tiny: Tiny) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, two, other = (lora_parameters(add_lora(load(tiny("llama3")), seed=seed)) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 8.0)])
def test_scale(rslora: bool, scale: float, tiny: Tiny) -> None:
    """alpha / r, or alpha / √r: at r = 16 the second is four times as strong."""
    model = add_lora(load(tiny("llama3")), r=16, alpha=32, rslora=rslora, targets=["q_proj"])
    linear = model.model.layers[0].self_attn.q_proj
    fill_b(model)
    x = torch.randn(3, linear.in_features)
    a, b = linear.factors("default")
    expected = x.double() @ (linear.weight.double() + scale * b.double() @ a.double()).T
    assert off(linear(x), expected) < 1e-6


# --- which modules -------------------------------------------------------------------------------------------------

SELECTIONS = [
    ("all-linear", None),
    (["q_proj"], None),
    (["q_proj", "mlp.up_proj"], None),
    (["self_attn.q_proj", "q_proj"], None),
    (["proj"], None),  # no suffix of a dotted name: nothing
    (["model.layers.1.mlp.down_proj"], None),
    (r".*\.[qv]_proj", None),
    (r"model\.layers\.[02]\..*(up|gate)_proj", None),
    (r"layers\.0\..*", None),  # a pattern must match the whole name: nothing
    (PROJECTIONS, [1]),
    (["v_proj"], [0, 3]),
    (["v_proj"], 2),
]


@pytest.mark.parametrize(("targets", "layers"), SELECTIONS)
def test_targets_mean_what_they_mean_to_peft(
    targets: str | list[str], layers: list[int] | int | None, tiny: Tiny
) -> None:
    config = peft.LoraConfig(target_modules=targets, layers_to_transform=layers, task_type="CAUSAL_LM")
    try:
        other = peft.get_peft_model(reference(tiny("llama-bias")), config)
    except ValueError as error:
        assert "not found" in str(error)
        with pytest.raises(ValueError, match="match no module"):
            add_lora(load(tiny("llama-bias")), targets=targets, layers=layers)
        return
    expected = {
        n.split(".lora_A")[0].removeprefix("base_model.model.") for n, _ in other.named_parameters() if "lora_A" in n
    }
    model = add_lora(load(tiny("llama-bias")), targets=targets, layers=layers)
    assert set(carriers(model)) == expected and expected
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{path}.lora_{letter}.default.weight" for path in expected for letter in "AB"}


def test_a_name_that_matches_nothing_beside_others_is_told(tiny: Tiny) -> None:
    model = load(tiny("llama3"))
    with pytest.warns(UserWarning, match="targets out_proj, c_attn match no module"):
        add_lora(model, targets=["q_proj", "out_proj", "c_attn"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_targets(model, ["q_proj", "self_attn.q_proj"])  # both match, the same modules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": ["nothing"]}, "match no module; projections are named down_proj"),
        ({"targets": []}, "match no module"),
        ({"targets": "("}, "not a regular expression"),
        (
            {"targets": ["self_attn"]},
            r"match 4 modules that are no projections, such as model.layers.0.self_attn \(Attention\)",
        ),
        ({"targets": r".*layers\.0\..*"}, "that are no projections"),
        ({"layers": [4]}, "expected numbers of blocks from 0 to 3"),
        ({"layers": []}, "expected numbers of blocks"),
        ({"r": 0}, "r is 0"),
        ({"r": 2.0}, "r is 2.0"),
        ({"alpha": 0}, "alpha is 0"),
        ({"alpha": math.inf}, "alpha is inf"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dtype": torch.int8}, "expected a floating-point"),
        ({"name": "a.b"}, "name is 'a.b'"),
        ({"name": "train"}, "no torch module has"),
        ({"targets": ["q_proj", "lm_head"], "layers": [1]}, "targets mean lm_head, which are in no layer"),
        ({"modules_to_save": ["head"], "targets": ["lm_head"], "layers": [1]}, "match no module of layers"),
        ({"modules_to_save": ["lm_head", "nothing", ""]}, "no module of this model is called 'nothing', ''"),
        ({"modules_to_save": "lm_head"}, "expected a list of names"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_the_model_alone(arguments: dict, message: str, tiny: Tiny) -> None:
    model = load(tiny("llama-tied"))
    with pytest.raises(ValueError, match=message):
        add_lora(model, **arguments)
    assert not carriers(model) and not model.adapters and model.active is None and not model.training


# --- dtypes --------------------------------------------------------------------------------------------------------


def moved(model: Model, steps: int) -> float:
    """The fraction of B's entries with a gradient that `steps` of Adam at 1e-5 change; checks the moments, too."""
    fill_b(model)
    factors = lora_parameters(model)
    before = [factor.detach().clone() for factor in factors]
    optimizer = torch.optim.AdamW(factors, lr=1e-5, weight_decay=0.0)
    ids = ids_for(model, rows=1, length=8)
    touched = [torch.zeros_like(factor, dtype=torch.bool) for factor in factors]
    for _ in range(steps):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        for factor, seen in zip(factors, touched, strict=True):
            seen |= factor.grad != 0
        optimizer.step()
    assert all(optimizer.state[factor]["exp_avg"].dtype == factor.dtype for factor in factors)
    changed = [(now != then)[seen] for now, then, seen in zip(factors, before, touched, strict=True)][1::2]
    return float(torch.cat(changed).float().mean())


def test_small_steps_are_not_lost_over_a_16_bit_base(tiny: Tiny) -> None:
    """https://github.com/huggingface/peft/issues/2421: in bf16, 0.1 + 1e-5 is 0.1."""
    where = {"targets": ["v_proj", "down_proj"], "layers": [1, 2]}
    model = add_lora(load(tiny("llama-tied"), dtype=torch.bfloat16), r=4, seed=0, **where)
    assert {p.dtype for p in lora_parameters(model)} == {torch.float32}
    assert moved(model, steps=50) >= 0.99
    narrow = add_lora(load(tiny("llama-tied"), dtype=torch.bfloat16), r=4, seed=0, dtype=torch.bfloat16, **where)
    assert {p.dtype for p in lora_parameters(narrow)} == {torch.bfloat16}
    assert moved(narrow, steps=3) < 0.5  # so the test above can fail


def test_wide_inputs_over_a_narrow_base(tiny: Tiny) -> None:
    """A projection gives back the dtype it gets, and computes in the weight's; gradients have their owners' dtype."""
    model = add_lora(load(tiny("llama3"), dtype=torch.bfloat16), seed=0)
    fill_b(model)
    linear = model.model.layers[0].mlp.up_proj
    x = torch.randn(2, 5, linear.in_features).bfloat16().float().requires_grad_()
    y = linear(x)
    assert y.dtype == torch.float32 and torch.equal(y, linear(x.bfloat16()).float())
    y.square().mean().backward()
    a, b = linear.factors("default")
    assert x.grad.dtype == a.grad.dtype == b.grad.dtype == torch.float32
    for value in (x.grad, a.grad, b.grad):
        assert value.isfinite().all() and value.abs().sum() > 0


def test_autocast(tiny: Tiny) -> None:
    """torch.autocast over an fp32 model: loss and gradients of fp32, but for roundings of 2⁻⁹ through four blocks."""
    model = add_lora(load(tiny("llama3"), dtype=torch.float32), seed=0)
    fill_b(model)
    ids, results = ids_for(model), []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = next_token_loss(model(ids), ids)
        loss.backward()
        results.append((loss.detach(), [p.grad.clone() for p in lora_parameters(model)]))
    (exact, gradients), (rough, rough_gradients) = results
    assert exact != rough and off(rough, exact) < 0.02
    assert all(off(a, b) < 0.1 and a.dtype == torch.float32 for a, b in zip(rough_gradients, gradients, strict=True))


# --- dropout -------------------------------------------------------------------------------------------------------


def showing(model: Model, p: float = 0.25, seed: int | None = 0) -> Model:
    """Make projections of `hidden_size` inputs answer with their dropped input: W = 0, B·A = 1 (first outputs)."""
    hidden = model.config.hidden_size
    add_lora(
        model,
        r=hidden,
        alpha=hidden,
        dropout=p,
        targets=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
        seed=seed,
    )
    with torch.no_grad():
        for _, linear in linears(model):
            linear.weight.zero_()
            linear.factors("default")[0].copy_(torch.eye(hidden))
            linear.factors("default")[1].copy_(torch.eye(linear.out_features, hidden))
    return model


def test_dropout_masks(tiny: Tiny) -> None:
    p = 0.25
    model = showing(load(tiny("llama3"), dtype=torch.float32), p)
    attention, mlp, x = model.model.layers[0].self_attn, model.model.layers[0].mlp, torch.ones(3, 50, 64)

    def masks(model: Model = model) -> torch.Tensor:
        return model.model.layers[0].self_attn.q_proj(x)

    first = masks()
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    rows = first.flatten(0, 1) == 0
    for part in (rows.flatten(), rows.any(0), rows.any(1)):  # no column and no row is always kept or dropped
        assert part.any()
    count, dropped = rows.numel(), int(rows.sum())
    assert abs(dropped - count * p) < 5 * math.sqrt(count * p * (1 - p))
    together = (rows[:, :-1] & rows[:, 1:]).float().mean()  # neighbours are independent: p² of the pairs
    assert abs(together - p * p) < 5 * math.sqrt(p * p / rows[:, 1:].numel()) * 2

    q, k, v = project(x, attention.q_proj, attention.k_proj, attention.v_proj)
    gate, up = project(x, mlp.gate_proj, mlp.up_proj)
    assert torch.equal(k, q[..., : k.shape[-1]]) and torch.equal(v, k)  # one input, one mask
    assert torch.equal(gate, up) and not torch.equal(gate[..., :64], q)
    assert not torch.equal(model.model.layers[1].self_attn.q_proj(x), q)
    assert torch.equal(masks(), first)  # nothing is drawn from a generator's state
    model.clock.step += 1
    second = masks()
    assert (
        not torch.equal(second, first) and abs(float((second == first).float().mean()) - (p * p + (1 - p) ** 2)) < 0.03
    )
    again, other = (showing(load(tiny("llama3"), dtype=torch.float32), p, seed) for seed in (0, 1))
    assert torch.equal(masks(again), first) and not torch.equal(masks(other), first)
    again.clock.step += 1
    assert torch.equal(masks(again), second)
    model.eval()
    assert torch.equal(masks(), x)


def test_dropout_in_the_backward_pass_is_that_of_the_forward(tiny: Tiny) -> None:
    model = showing(load(tiny("llama3"), dtype=torch.float32))
    x = torch.randn(2, 9, 64, requires_grad=True)
    y = model.model.layers[0].mlp.up_proj(x)
    y[..., :64].sum().backward()
    assert torch.equal(x.grad == 0, y[..., :64] == 0)
    assert torch.allclose(x.grad[x.grad != 0], torch.tensor(4 / 3))


# --- merging in memory ---------------------------------------------------------------------------------------------


def test_merging_between_a_loss_and_its_backward_is_an_error(tiny: Tiny) -> None:
    """Gradients through the weights that the loss has not seen would be wrong, with nothing to show it."""
    model = add_lora(load(tiny("llama3"), dtype=torch.float32))
    loss = model.hidden_states(torch.arange(12)[None] % 7 + 3).sum()
    merge(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation|has changed since the loss"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_and_unmerge(dtype: torch.dtype, tiny: Tiny) -> None:
    model = add_lora(load(tiny("qwen2"), dtype=dtype), r=8, alpha=16, seed=0).eval()
    fill_b(model)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    unmerged = logits(model)
    with torch.autocast("cpu", torch.bfloat16):  # must not narrow what is computed
        merge(model)
    once = {name: value.detach().clone() for name, value in model.named_parameters()}
    merge(model)
    assert all(torch.equal(value, once[name]) for name, value in model.named_parameters())
    for path, linear in linears(model):
        a, b = (factor.detach() for factor in linear.factors("default"))
        expected = (start[f"{path}.weight"].float() + 2.0 * (b @ a)).to(dtype)
        assert torch.equal(linear.weight, expected) and not torch.equal(expected, start[f"{path}.weight"])
    # bf16: a rounding of 2⁻⁹ in each of 7 projections of 4 blocks, twice what it is in the other order of adding
    assert off(logits(model), unmerged) < (1e-5 if dtype == torch.float32 else 2 * 2**-9 * math.sqrt(28) * 2)
    for call in (
        lambda: use_adapter(model, None),
        lambda: add_lora(model, name="second"),
        lambda: adapters_disabled(model).__enter__(),
    ):
        with pytest.raises(ValueError, match="merged into the weights; call unmerge"):
            call()
    unmerge(model)
    unmerge(model)
    assert all(torch.equal(value, start[name]) for name, value in model.named_parameters())
    assert torch.equal(logits(model), unmerged)


def test_merge_needs_an_active_adapter(tiny: Tiny) -> None:
    model = load(tiny("llama3"))
    with pytest.raises(ValueError, match="no adapter is active"):
        merge(model)
    add_lora(model)
    with adapters_disabled(model), pytest.raises(ValueError, match="no adapter is active"):
        merge(model)


# --- several adapters ----------------------------------------------------------------------------------------------


def test_switching_between_adapters(tiny: Tiny) -> None:
    model = load(tiny("llama3"), dtype=torch.float32)
    base = logits(model)
    add_lora(model, r=4, targets=["q_proj", "up_proj"], name="one", seed=1)
    add_lora(model, r=8, targets=["up_proj", "down_proj"], rslora=True, name="two", seed=2)
    fill_b(model)
    model.eval()
    alone = {}
    for name in ("one", "two"):
        use_adapter(model, name)
        alone[name] = logits(model)
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {
            n for n, _ in model.named_parameters() if f".{name}." in n
        }
        assert [id(p) for p in lora_parameters(model)] == [
            id(p) for n, p in model.named_parameters() if f".{name}." in n
        ]
    assert off(alone["one"], base) > 0.01 and off(alone["two"], base) > 0.01 and off(alone["one"], alone["two"]) > 0.01
    lonely = copy.deepcopy(model)
    for _, linear in linears(lonely):
        if "one" in linear.adapters:
            linear.factors("one")[1].data.zero_()
    assert torch.equal(logits(lonely), alone["two"])  # the other one has no say
    use_adapter(model, None)
    assert torch.equal(logits(model), base) and not any(p.requires_grad for p in model.parameters())
    assert len(lora_parameters(model, "two")) == 2 * 2 * 4
    for call in (lambda: use_adapter(model, "three"), lambda: lora_parameters(model, "three")):
        with pytest.raises(ValueError, match="There is no adapter 'three'; the model has one, two"):
            call()
    with pytest.raises(ValueError, match="there is an adapter named 'one' already"):
        add_lora(model, name="one")


def test_adapters_disabled_restores_everything(tiny: Tiny) -> None:
    model = load(tiny("llama3"), dtype=torch.float32)
    base = logits(model)
    add_lora(model, targets=["q_proj"], name="one", seed=1)
    add_lora(model, targets=["v_proj"], name="two", seed=2)
    fill_b(model)
    model.eval()
    live = logits(model)
    frozen = model.model.layers[0].self_attn.v_proj.factors("two")[0].requires_grad_(False)  # by the user, on purpose
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    with pytest.raises(KeyError), adapters_disabled(model):
        with adapters_disabled(model):
            assert torch.equal(logits(model), base)
        assert torch.equal(logits(model), base)  # leaving the inner block does not switch the outer one off
        use_adapter(model, "one")
        assert not torch.equal(logits(model), base)
        raise KeyError
    assert model.active == "two" and torch.equal(logits(model), live)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags and not frozen.requires_grad


def test_only_the_adapter_is_trained(tiny: Tiny) -> None:
    model = load(tiny("llama-tied"))
    model.model.norm.weight.requires_grad_(True)
    add_lora(model, targets=["o_proj"])
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"model.layers.{i}.self_attn.o_proj.lora_{letter}.default.weight" for i in range(4) for letter in "AB"
    }
    assert all(re.search(r"\.lora_[AB]\.default\.weight$", n) or "lora" not in n for n in model.state_dict())
    assert all(isinstance(linear, Linear) for _, linear in linears(model))


def test_a_merged_model_gives_no_state_dict_that_would_be_applied_twice(tiny):
    model = add_lora(load(tiny("llama3"), device="cpu"), r=4)
    merge(model)
    with pytest.raises(ValueError, match="unmerge"):
        model.state_dict()
    unmerge(model)
    assert model.state_dict()
    with pytest.raises(ValueError, match="dtype"):
        add_lora(model, dtype=torch.float8_e4m3fn, name="other")
