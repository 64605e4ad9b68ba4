"""Learning rates against transformers' schedules, and AdamW against torch's in double precision."""

import pytest
import torch
from transformers import get_scheduler

from lorarun.optim import SCHEDULES, Optimizer, learning_rate


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
