"""Learning rates against transformers' schedules, AdamW against torch's in double precision and bitsandbytes' own,
groups against PEFT's LoRA+."""

import io
import sys

import bitsandbytes
import peft
import peft.optimizers
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler, get_wsd_schedule

from lorarun import optim
from lorarun.optim import OPTIMIZERS, SCHEDULES, Optimizer, as_steps, learning_rate


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), [(6, 2), (1, 0), (50, 7), (10, 9)])
def test_rates_are_those_of_transformers(schedule, steps, warmup):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    for step in range(steps):
        assert learning_rate(step, steps, 1e-3, warmup, schedule) == pytest.approx(
            theirs.get_last_lr()[0], rel=1e-12, abs=1e-18
        )
        optimizer.step()
        theirs.step()


def test_the_linear_schedule_as_documented():
    rates = [learning_rate(step, 6, 1e-3, warmup=2, schedule="linear") for step in range(6)]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4], rel=1e-12)
    with pytest.raises(ValueError, match="expected one of cosine, linear, constant"):
        learning_rate(3, 6, 1e-3, schedule="step")


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup", "decay"), [(10, 2, 4), (10, 0, 1), (9, 3, 6), (7, 0, 7)])
def test_a_decay_at_the_end_is_that_of_transformers(schedule, steps, warmup, decay):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = get_wsd_schedule(optimizer, warmup, decay, num_training_steps=steps, decay_type=schedule)
    for step in range(steps):
        ours = learning_rate(step, steps, 1e-3, warmup, schedule, decay)
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-18)
        optimizer.step()
        theirs.step()


def test_parts_of_a_run_are_steps_or_a_fraction():
    assert [as_steps(part, 10) for part in (3, 0.25, 0.0, 0)] == [3, 2, 0, 0]


def two(dtype):
    """Parameters by name, and the gradients of five steps."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)}  # noqa: E731
    parameters = {name: torch.nn.Parameter(value.to(dtype)) for name, value in draw().items()}
    return parameters, [draw() for _ in range(5)]


def test_steps_are_adamw_with_one_clip_over_all():
    ours, gradients = two(torch.float32)
    theirs = [torch.nn.Parameter(p.detach().double()) for p in ours.values()]
    optimizer = Optimizer(ours, weight_decay=0.1, clip=1.0)
    reference = torch.optim.AdamW(theirs, weight_decay=0.1, foreach=False)
    for step, gradient in enumerate(gradients):
        rate = 1e-2 / (step + 1)
        for (name, mine), other in zip(ours.items(), theirs, strict=True):
            mine.grad, other.grad = gradient[name].clone(), gradient[name].double()
        norm, broken = optimizer.step(rate)
        expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        assert norm == pytest.approx(expected.item(), rel=1e-6) and norm > 1.0 and not broken
        assert all(p.grad is None for p in ours.values())
    for mine, other in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(mine.double(), other.detach(), rtol=1e-5, atol=1e-6, check_dtype=False)


def test_narrow_parameters_are_stepped_in_fp32():
    """Steps far below half a unit of bf16's last place add up; in bf16 itself they would all be lost."""
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = Optimizer({"a": parameter})
    for _ in range(200):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(1e-4)
    assert all(value.dtype == torch.float32 for state in optimizer.adamw.state.values() for value in state.values())
    torch.testing.assert_close(parameter.float(), torch.full((8,), 0.98), rtol=0, atol=2**-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, poison):
    parameters, gradients = two(dtype)
    optimizer = Optimizer(parameters, clip=1.0)
    for step, gradient in enumerate(gradients[:3]):
        before = {name: p.detach().clone() for name, p in parameters.items()}
        states = [value.clone() for state in optimizer.adamw.state.values() for value in state.values()]
        for name, parameter in parameters.items():
            parameter.grad = gradient[name].to(dtype)
        if step == 1:
            parameters["b"].grad[2] = poison
        norm, broken = optimizer.step(1e-2)
        assert broken == (["b"] if step == 1 else [])
        if step == 1:
            assert not norm < float("inf")
            assert all(torch.equal(parameters[name], before[name]) for name in before)
            after = [value for state in optimizer.adamw.state.values() for value in state.values()]
            assert all(map(torch.equal, states, after))
        else:
            assert not any(torch.equal(parameters[name], before[name]) for name in before)


# --- loss scaling ----------------------------------------------------------------------------------------------------


def test_the_loss_scale_is_that_of_torch_amp(monkeypatch):
    """Halved by a step that is not finite, doubled by so many that are: the numbers of torch's own scaler."""
    monkeypatch.setattr(optim, "GROWTH", 3)
    parameter, other = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    ours = Optimizer({"a": parameter}, loss_scale=optim.LOSS_SCALE)
    theirs, scaler = torch.optim.AdamW([other], weight_decay=0.0), torch.amp.GradScaler("cpu", growth_interval=3)
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        gradient = torch.randn(4, generator=generator)
        if step in (0, 1, 6):
            gradient[2] = float("inf")
        parameter.grad = ours.scale * gradient
        other.grad = scaler.scale(torch.ones(())) * gradient
        theirs.param_groups[0]["lr"] = 1e-2
        norm, broken = ours.step(1e-2)
        scaler.step(theirs)
        scaler.update()
        assert ours.scale == scaler.get_scale()
        assert torch.equal(parameter, other)
        assert bool(broken) == (step in (0, 1, 6)) and (broken or norm == pytest.approx(gradient.norm().item()))
    assert ours.scale == 2.0**15


def test_the_norm_of_float16_gradients_does_not_overflow():
    """Scaled gradients of float16 parameters: their squares are beyond 65,504 long before they are themselves."""
    parameter = torch.nn.Parameter(torch.ones(100, dtype=torch.float16))
    optimizer = Optimizer({"a": parameter}, clip=1.0, loss_scale=2.0**10)
    parameter.grad = torch.full((100,), 2.0**14, dtype=torch.float16)
    assert optimizer.step(1e-2) == (pytest.approx(16 * 10.0), [])


# --- groups and storages ---------------------------------------------------------------------------------------------


def adapted():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "embed_tokens"], init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def test_groups_are_those_of_peft_for_lora_plus():
    """The rate of B is a multiple of A's, the embedding has its own: as PEFT's LoRA+ steps, from the same gradients."""
    results = []
    for ours in (True, False):
        model = adapted()
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if ours:
            optimizer = Optimizer(parameters, b_ratio=16.0, embedding_ratio=1e-3 / 1e-2)
        else:
            theirs = peft.optimizers.create_loraplus_optimizer(
                model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16.0, loraplus_lr_embedding=1e-3,
                loraplus_weight_decay=0.0, weight_decay=0.0,
            )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step(1e-2) if ours else theirs.step()
        results.append(parameters)
    embeddings = [name for name in results[0] if "embed_tokens" in name]
    assert len(results[0]) == 2 * 2 * 2 + 2 and len(embeddings) == 2
    for name, parameter in results[1].items():
        torch.testing.assert_close(results[0][name], parameter, rtol=1e-6, atol=1e-7, msg=name)


def test_eight_bits_are_bitsandbytes_own():
    """The moments of large parameters in 8 bits, with the same rates, decay and clipping around them."""
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(size, generator=generator) for name, size in (("large", 8192), ("small", 64))}
    ours = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = Optimizer(ours, weight_decay=0.1, kind="adamw8bit")
    reference = bitsandbytes.optim.AdamW8bit(list(theirs.values()), weight_decay=0.1)
    for step in range(4):
        for name in start:
            ours[name].grad = torch.randn(start[name].shape, generator=generator)
            theirs[name].grad = ours[name].grad.clone()
        reference.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step(1e-2 / (step + 1))
        reference.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in start)
    assert optimizer.adamw.state[ours["large"]]["state1"].dtype == torch.uint8
    assert optimizer.adamw.state[ours["small"]]["state1"].dtype == torch.float32


def test_storages_that_cannot_be_had_are_refused(monkeypatch):
    parameters = {"a": torch.nn.Parameter(torch.ones(3))}
    for kind in OPTIMIZERS:
        if kind.startswith("paged"):
            with pytest.raises(ValueError, match=f"{kind}.*parameters are on cpu; use '{kind[6:]}' there"):
                Optimizer(parameters, kind=kind)
    with pytest.raises(ValueError, match="optimizer is 'sgd'; expected one of adamw, adamw8bit"):
        Optimizer(parameters, kind="sgd")
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ValueError, match="optimizer is 'adamw8bit', for which bitsandbytes is needed"):
        Optimizer(parameters, kind="adamw8bit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_a_restored_optimizer_goes_on_bit_by_bit(kind, dtype):
    """After three steps, through a file; parameters stay where they are, and one without a gradient has no moments."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.lora_A.weight": (64, 100), "b.lora_B.weight": (7,), "idle": (3,)}
    gradients = [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(6)]

    def steps(optimizer, some):
        for gradient in some:
            for name, parameter in optimizer.parameters.items():
                parameter.grad = None if name == "idle" else optimizer.scale * gradient[name].to(dtype)
            assert optimizer.step(1e-2)[1] == []

    def fresh():
        parameters = {name: torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in shapes.items()}
        return Optimizer(parameters, 0.1, kind=kind, b_ratio=4.0, loss_scale=8.0)

    whole, first, second = fresh(), fresh(), fresh()
    steps(whole, gradients)
    steps(first, gradients[:3])
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    pointers = [p.data_ptr() for p in second.parameters.values()]
    second.restore(torch.load(file, weights_only=True))
    steps(second, gradients[3:])
    assert [p.data_ptr() for p in second.parameters.values()] == pointers
    assert all(torch.equal(second.parameters[name], p) for name, p in whole.parameters.items())
    assert second.state()["moments"].keys() == {"a.lora_A.weight", "b.lora_B.weight"}
    assert second.good == whole.good == 6


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw8bit", "paged_adamw", "paged_adamw8bit"])
def test_storages_on_a_gpu(device, kind):
    """Near the steps of torch's AdamW: moments in 8 bits are rounded to about a hundredth, in fp32 not at all.

    bitsandbytes' kernels are compiled with fast math, whose 0.999 ** step has an absolute error of 4e-7 (2⁻²² of the
    logarithm and 2⁻²² of the power).  Divided by 1 − 0.999 and under a root, that is up to 2e-4 of a step.
    """
    torch.manual_seed(0)
    start, gradients = torch.randn(128, 128), [torch.randn(128, 128) for _ in range(6)]
    exact, ours = (torch.nn.Parameter(start.to(device)) for _ in range(2))
    one, other = Optimizer({"a": exact}), Optimizer({"a": ours}, kind=kind)
    for step, gradient in enumerate(gradients):
        exact.grad, ours.grad = gradient.to(device), gradient.to(device)
        one.step(1e-2)
        other.step(1e-2)
        if step == 2:  # restored in place
            again = Optimizer({"a": ours}, kind=kind)
            again.restore({**other.state(), "parameters": {"a": ours.detach().clone()}})
            other = again
    moved, expected = (p.detach() - start.to(device) for p in (ours, exact))
    error = ((moved - expected).norm() / expected.norm()).item()
    assert error < (0.05 if "8bit" in kind else 2e-4)
