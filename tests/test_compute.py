"""FP8 compute on whole models: what is refused, what is reported, and the gradients of a real one."""

import contextlib
from pathlib import Path

import fp8_gate
import pytest
import torch
from fp8_gate import Task, add_outliers, first_step, passes

import lorarun
from lorarun import memory
from lorarun.compute import groups, use_bf16, use_fp8
from lorarun.kernels.backend import shapes_only
from lorarun.kernels.scaled import _emulation as emulation
from lorarun.models import build_model

IDS = torch.arange(3, 60)[None]


def decoder(device="cpu", **fields):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = build_model(dict(model_type="llama", vocab_size=100, num_hidden_layers=2, rope_theta=1e4) | sizes | fields)
    for parameter in model.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    model.requires_grad_(False)
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def test_without_the_hardware_it_is_refused():
    model = decoder()
    with pytest.raises(ValueError, match=r"cpu has no FP8 tensor cores.*8\.9.*bf16"):
        use_fp8(model)
    assert model.compute == "bf16" and not any(m.scaled for group in groups(model) for m in group.values())


@pytest.mark.gpu
def test_other_dtypes_are_refused(device):
    with pytest.raises(ValueError, match="torch.float16.*dtype=torch.bfloat16"):
        use_fp8(decoder(device).half())


def test_sizes_that_tensor_cores_do_not_take_are_named():
    with emulation(), pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj \[100, 64\].*and 3 more"):
        use_fp8(decoder(intermediate_size=100))


def test_products_change_in_fp8_and_are_the_same_bits_in_bf16_afterwards():
    model = decoder()
    lorarun.add_lora(model, r=4, seed=0)
    for group in groups(model):
        for projection in group.values():
            projection.factors("default")[1].data.normal_(std=0.05)
    plain, facts = model(IDS), lorarun.report(model).to_dict()
    assert facts["operations"]["frozen products"] == "float32" and "FP8 copies" not in facts["storage"]
    with emulation():
        use_fp8(model)
        scaled = model(IDS)
        assert 0.003 < (scaled - plain).norm() / plain.norm() < 0.2
        facts = lorarun.report(model).to_dict()
        assert "8 of 8 groups" in facts["operations"]["frozen products"]
        weights = 2 * sum(m.weight.numel() for group in groups(model) for m in group.values())
        assert float(facts["storage"]["FP8 copies"].split()[0]) == pytest.approx(weights / 2**20, abs=0.06)
        lorarun.merge(model)  # into the weights, of which the copies know nothing
        torch.testing.assert_close(model(IDS), plain, rtol=1e-4, atol=1e-4)
        assert lorarun.report(model).to_dict()["operations"]["frozen products"] == "float32"
        use_bf16(model)
        use_fp8(model)  # of the weights without the adapter
        lorarun.unmerge(model)
        assert torch.equal(model(IDS), scaled)
    use_bf16(model)
    assert torch.equal(model(IDS), plain) and model.compute == "bf16"
    assert "FP8 copies" not in lorarun.report(model).to_dict()["storage"]


def test_a_plan_counts_the_copies_and_runs_on_shapes(capsys):
    model = decoder()
    lorarun.add_lora(model, r=4, seed=0)
    plain = lorarun.plan(model, 64, budget=1e9).allocated
    with emulation():
        scaled = lorarun.plan(model, 64, budget=1e9, compute="fp8").allocated
        copies = {id(m.scaled): m.scaled for group in groups(model) for m in group.values()}.values()
        held = [-(-part.nbytes // 512) * 512 for copy in copies for way in copy for part in way]
        assert model.compute == "fp8" and sum(held) <= scaled - plain < 1.5 * sum(held)
        assert lorarun.plan(model, 64, budget=1e9).allocated == plain and model.compute == "bf16"
    capsys.readouterr()
    shapes = model.to("meta").train()
    use_fp8(shapes)
    with shapes_only():  # the way through the kernels
        shapes.hidden_states(IDS.to("meta")).sum().backward()


@pytest.mark.gpu
def test_captured_steps_do_not_outlive_the_copies(device):
    """Copies that are made again have other pointers; a graph that still read the first would read whatever came after
    them.  Small steps are captured at the second sight."""
    model = decoder(device, hidden_size=256, intermediate_size=512)
    lorarun.add_lora(model, r=4, seed=0)
    ids = IDS.repeat(1, 4)
    parameters = lorarun.lora_parameters(model)
    found = []
    for _ in range(3):
        use_fp8(model)
        for _ in range(4):
            loss = lorarun.loss(model, {"ids": ids, "labels": ids})
            found.append((loss.detach(), *torch.autograd.grad(loss, parameters)))
        use_bf16(model)
        lorarun.loss(model, {"ids": ids, "labels": ids}).backward()
        junk = [torch.full((1 << size,), torch.nan, device=device) for size in range(4, 22) for _ in range(16)]
        del junk
    for step in found[1:]:
        for ours, first in zip(step, found[0], strict=True):
            assert (ours - first).norm() <= 0.02 * first.norm()  # padded lengths and eager ones sum in another order


def test_plans_in_fp8():
    """Also of adapters that the kernels do not serve; a plan that fails changes nothing, nor does a longer batch."""
    model = decoder().to("meta", torch.bfloat16)
    lorarun.add_lora(model, r=80)
    with pytest.raises(ValueError, match="Not even 128 tokens"):
        lorarun.plan(model, 128, budget=1.0, compute="fp8")
    assert model.compute == "bf16" and not model.model.layers[0].mlp.up_proj.scaled
    lorarun.plan(model, 128, compute="fp8")
    with pytest.raises(ValueError, match="Not even 128 tokens"):
        lorarun.plan(model, 128, budget=1.0)
    assert model.compute == "fp8" and model.model.layers[0].mlp.up_proj.scaled


def test_a_plan_that_loss_makes_leaves_fp8_on(monkeypatch):
    monkeypatch.setattr(memory, "HOSTS", ("meta",))  # as on an accelerator
    model = decoder()
    lorarun.add_lora(model, r=4, seed=0)
    with emulation():
        use_fp8(model)
        for length in (100, 200):  # the first plan, and one for a longer batch
            ids = torch.arange(length)[None] % 100
            lorarun.loss(model, {"ids": ids, "labels": ids})
            assert model.compute == model.planned.compute == "fp8" and model.planned.tokens >= length


@pytest.mark.parametrize("outliers", [False, True])
def test_first_gradients_of_a_real_model_and_a_planted_fault(real, outliers):
    """What tests/fp8_gate.py asks of the first step, with few tokens and on a CPU by emulation; it goes on to train."""
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    task = Task(Path(real("smollm2-135m")), Path(real("data")), 16, 0, outliers, 0)
    with emulation() if device.type == "cpu" else contextlib.nullcontext():
        model, batches, _ = fp8_gate.opened(task, device)
        if outliers:
            add_outliers(model)
        lorarun.add_lora(model, r=16, seed=0)
        facts = first_step(model, batches[:2])
    assert passes(facts["size"], facts["cosine"]), facts
    assert not passes(facts["fault_size"], facts["fault_cosine"]) and facts["fault_size"] > 2, facts
