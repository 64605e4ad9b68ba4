"""Captured steps: what they are keyed by, what they copy, and that gradients are those of eager steps.

On a CPU a "graph" here is the captured callable itself, run again on the same static buffers; everything around it is
the real thing.  tests/test_training_gpu.py has the graphs.
"""

import copy
import functools
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from small import BATCHES, given, packed, texts
from torch.utils.flop_counter import FlopCounterMode

import lorarun
from lorarun import graph, train
from lorarun.bucket import shape_of
from lorarun.graph import Steps, look
from lorarun.lora import linears

load = functools.partial(lorarun.load, device="cpu")


def rerun(run):
    """In a graph's place; like one, it has run before it is replayed for the first time."""
    run()
    return run


def adapted(folder, steps=True, dropout=0.0):
    """A model with an adapter that already does something, with captured steps from the first sight on, or without."""
    model = lorarun.add_lora(load(folder), r=4, seed=0, dropout=dropout)
    generator = torch.Generator().manual_seed(1)
    for _, linear in linears(model):
        b = linear.factors("default")[1]
        b.data.copy_(0.05 * torch.randn(b.shape, generator=generator))
    if steps:
        model.graphs = Steps(rerun)
    return model


@pytest.fixture(autouse=True)
def at_first_sight(monkeypatch):
    monkeypatch.setattr(graph, "SIGHTINGS", 1)


def gradients(model):
    found = [p.grad for p in lorarun.lora_parameters(model)]
    model.zero_grad()
    return found


def same(got, expected, rel=2e-5):
    """Padding changes the order of sums, and so the last places."""
    assert len(got) == len(expected) > 0
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=rel * max(theirs.abs().max().item(), 1e-12))


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["llama3", "qwen2-sliding", "gemma2", "gemma3-text"])
def test_loss_and_gradients_are_those_of_an_eager_step(tiny, name, batch):
    model, eager = adapted(tiny(name)), adapted(tiny(name), steps=False)
    for each in (BATCHES[batch](), BATCHES[batch]()):
        ours, theirs = lorarun.loss(model, each), lorarun.loss(eager, each)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        ours.backward()
        theirs.backward()
        same(gradients(model), gradients(eager))
    assert (model.graphs.replays, model.graphs.eager, model.graphs.reason) == (2, 0, None)
    assert eager.graphs.replays == 0 and "not on cpu" in eager.graphs.reason


def test_without_padding_gradients_are_bit_equal(tiny):
    model, eager = adapted(tiny("llama3")), adapted(tiny("llama3"), steps=False)
    batch = texts(1, 128, share=2.0)
    for each in (model, eager):
        lorarun.loss(each, batch).backward()
    for mine, theirs in zip(gradients(model), gradients(eager), strict=True):
        assert torch.equal(mine, theirs)


def test_losses_accumulate_whatever_was_replayed_in_between(tiny):
    """The static gradients are written again before the first loss is differentiated, and while .grad holds them."""
    model, eager = adapted(tiny("llama3")), adapted(tiny("llama3"), steps=False)
    one, two = packed(9, 1, 17), packed(20, 9, seed=1)
    assert shape_of(given(one)) == shape_of(given(two))
    first, second = lorarun.loss(model, one), lorarun.loss(model, two)
    (first + 10 * second).backward()
    (lorarun.loss(eager, one) + 10 * lorarun.loss(eager, two)).backward()
    expected = gradients(eager)
    same(gradients(model), expected)
    lorarun.loss(model, one).backward()  # 1 + 10, where a view of the static buffer would give 20
    (10 * lorarun.loss(model, two)).backward()
    same(gradients(model), expected)
    assert model.graphs.replays == 4 and len(model.graphs.held) == 1


def test_upstream_gradient_scales(tiny):
    model = adapted(tiny("llama3"))
    lorarun.loss(model, texts()).backward()
    once = gradients(model)
    (3 * lorarun.loss(model, texts())).backward()
    same(gradients(model), [3 * g for g in once], rel=1e-6)


def test_backward_twice(tiny):
    model = adapted(tiny("llama3"))
    value = lorarun.loss(model, texts())
    value.backward(retain_graph=True)
    once = [g.clone() for g in gradients(model)]
    lorarun.loss(model, texts(seed=1))  # another replay
    value.backward()
    same(gradients(model), once, rel=0)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_parameter_hooks_and_autograd_grad(tiny):
    model = adapted(tiny("llama3"))
    parameters = lorarun.lora_parameters(model)
    lorarun.loss(model, texts()).backward()
    plain = gradients(model)
    chosen = [parameters[3], parameters[0]]
    same(torch.autograd.grad(lorarun.loss(model, texts()), chosen), [plain[3], plain[0]], rel=0)
    seen = []
    parameters[0].register_hook(lambda grad: 2 * grad)
    parameters[1].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    lorarun.loss(model, texts()).backward()
    same(gradients(model), [2 * plain[0], *plain[1:]], rel=0)
    same(seen, [plain[1]], rel=0)
    assert model.graphs.replays == 3


def test_frozen_half(tiny):
    """As LoRA-FA: A is not trained, has no gradient, and costs another key."""
    model, eager = adapted(tiny("llama3")), adapted(tiny("llama3"), steps=False)
    for each in (model, eager):
        lorarun.loss(each, texts()).backward()
        gradients(each)
        for _, linear in linears(each):
            linear.factors("default")[0].requires_grad_(False)
        lorarun.loss(each, texts()).backward()
    ours, theirs = gradients(model), gradients(eager)
    assert [g is None for g in ours] == [g is None for g in theirs] == [True, False] * (len(ours) // 2)
    same([g for g in ours if g is not None], [g for g in theirs if g is not None])
    assert model.graphs.replays == 2


# --- what changes between steps --------------------------------------------------------------------------------------


def test_a_training_run(tiny):
    """Parameters are stepped, denominators differ, a batch has no target, the model is evaluated in between."""
    curves = []
    batches = [packed(9, 1, 17), packed(20, 9, seed=1), texts(2, seed=2), packed(5, 22, seed=3)]
    batches[3].labels.fill_(-100)
    for steps in (True, False):
        model = adapted(tiny("llama3"), steps)
        optimizer = torch.optim.AdamW(lorarun.lora_parameters(model), lr=1e-2)
        curve = []
        for step in range(8):
            denominator = [None, 7, torch.tensor(5), 2.5][step % 4]
            loss = lorarun.loss(model, batches[step % 4], denominator)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve += [loss.item(), train.evaluate(model, batches[:3]).loss]
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert curves[1][-1] < curves[1][1] - 0.05
    assert curves[0][6] == 0.0


def test_without_a_target_loss_and_gradients_are_zero(tiny):
    model = adapted(tiny("llama3"))
    lorarun.loss(model, texts()).backward()
    gradients(model)
    none = texts()
    none.labels.fill_(-100)
    with pytest.warns(UserWarning, match="no token of this step is supervised"):
        loss = lorarun.loss(model, none)
    loss.backward()
    assert loss == 0.0 and not any(g.any() for g in gradients(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lorarun.loss(model, none, denominator=3) == 0.0
    assert model.graphs.replays == 3


def test_an_adapter_that_is_loaded_or_chosen_is_the_one_that_learns(tiny, tmp_path):
    model, eager = adapted(tiny("llama3")), adapted(tiny("llama3"), steps=False)
    lorarun.save_adapter(eager, tmp_path)
    for each in (model, eager):
        lorarun.loss(each, texts()).backward()
        each.zero_grad()
        lorarun.load_adapter(each, tmp_path, name="second")
        for p in lorarun.lora_parameters(each):
            p.data *= 1.5
        lorarun.loss(each, texts()).backward()
    same(gradients(model), gradients(eager))
    lorarun.use_adapter(model, "default")
    assert all(p.grad is None for p in lorarun.lora_parameters(model))
    lorarun.loss(model, texts()).backward()
    lorarun.use_adapter(model, "second")
    assert model.graphs.replays == 3 and len(model.graphs.held) == 2
    lorarun.loss(model, texts()).backward()
    assert model.graphs.replays == 4 and len(model.graphs.held) == 2
    with lorarun.adapters_disabled(model):
        assert not lorarun.loss(model, texts()).requires_grad
    assert model.graphs.reason == "no adapter is trained"
    lorarun.loss(lorarun.merge(model) or model, texts())
    assert model.graphs.reason == "no adapter is trained"
    lorarun.unmerge(model)
    lorarun.loss(model, texts()).backward()
    assert model.graphs.reason is None


def test_a_parameter_with_another_pointer_is_seen(tiny):
    model, eager = adapted(tiny("llama3")), adapted(tiny("llama3"), steps=False)
    for each in (model, eager):
        lorarun.loss(each, texts()).backward()
        gradients(each)
        factor = each.model.layers[1].mlp.up_proj.lora_B["default"]
        factor.weight = torch.nn.Parameter(factor.weight.detach() * 3)
        lorarun.loss(each, texts()).backward()
    same(gradients(model), gradients(eager))
    assert len(model.graphs.held) == 1  # the first is gone
    before = look(model).structure
    model.model.layers[0].mlp.down_proj.weight.data = model.model.layers[0].mlp.down_proj.weight.data.clone()
    assert look(model).structure != before


def test_another_dtype_and_a_copy_have_graphs_of_their_own(tiny):
    model = adapted(tiny("llama3"))
    lorarun.loss(model, texts())
    clone = copy.deepcopy(model)
    assert clone.graphs.replays == 0 and not clone.graphs.held and pickle.loads(pickle.dumps(clone.graphs)).eager == 0
    key = next(iter(model.graphs.held))
    for path, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in path else torch.bfloat16)
    loss = lorarun.loss(model, texts())
    loss.backward()
    assert loss.dtype == torch.float32 and all(g.dtype == torch.float32 for g in gradients(model))
    assert list(model.graphs.held) != [key] and len(model.graphs.held) == 1
    model.to(torch.float16)
    lorarun.loss(model, texts())
    assert "float16" in model.graphs.reason


def test_adapters_in_sixteen_bits(tiny):
    model, eager = adapted(tiny("llama3")), adapted(tiny("llama3"), steps=False)
    for each in (model, eager):
        for p in lorarun.lora_parameters(each):
            p.data = p.data.to(torch.bfloat16)
        lorarun.loss(each, texts()).backward()
    ours, theirs = gradients(model), gradients(eager)
    assert all(g.dtype == torch.bfloat16 for g in ours)
    same(ours, theirs, rel=2**-8)
    lorarun.lora_parameters(model)[0].data = lorarun.lora_parameters(model)[0].data.float()
    lorarun.loss(model, texts())
    assert model.graphs.reason == "adapter matrices of several dtypes"


def test_dropout_follows_the_clock(tiny):
    """Each replay draws the masks of its own step; eval mode is another key."""
    model, eager = adapted(tiny("llama3"), dropout=0.3), adapted(tiny("llama3"), steps=False, dropout=0.3)
    batch = texts(1, 128, share=2.0)  # without padding, since a mask depends on an element's index
    losses = []
    for _ in range(3):
        ours, theirs = lorarun.loss(model, batch), lorarun.loss(eager, batch)
        ours.backward()
        theirs.backward()
        same(gradients(model), gradients(eager))
        losses.append(ours.item())
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert len(set(losses)) == 3 and len(model.graphs.held) == 1 and model.clock.now is None
    assert model.eval().graphs is not None
    assert lorarun.loss(model, batch).item() == pytest.approx(lorarun.loss(eager.eval(), batch).item(), rel=1e-6)
    assert len(model.graphs.held) == 2


def test_a_model_goes_when_nobody_holds_it(tiny):
    """Its memory is not left to the garbage collector."""
    model = adapted(tiny("llama3"))
    value = lorarun.loss(model, texts())
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    value.backward()


# --- eager instead ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, "a table, or rows of it, are trained"),
        ({"modules_to_save": ["norm"]}, "a base weight is trained"),
        ({"modules_to_save": ["k_proj"]}, "a base weight is trained"),
        ({"targets": ["q_proj", "lm_head"]}, "a table has an adapter"),
        ({"targets": ["q_proj", "embed_tokens"]}, "a table has an adapter"),
        (None, "a base weight is trained"),
    ],
)
def test_what_is_trained_beside_projections_runs_eagerly(tiny, arguments, reason):
    """And steps of another adapter of the same model are captured as ever."""
    model = adapted(tiny("llama3"))
    for _ in range(3):
        lorarun.loss(model, texts())
    replays = model.graphs.replays
    assert replays > 0
    if arguments is None:
        model.adapters.clear()
        lorarun.train_all(model)
    else:
        lorarun.add_lora(model, name="more", **({"targets": ["q_proj"]} | arguments))
    for _ in range(3):
        lorarun.loss(model, texts()).backward()
    assert model.graphs.replays == replays and model.graphs.reason == reason
    if arguments is not None:
        lorarun.use_adapter(model, "default")
        for _ in range(3):
            lorarun.loss(model, texts())
        assert model.graphs.replays > replays


def test_what_python_would_do_in_a_step_is_not_captured(tiny, monkeypatch):
    model = adapted(tiny("llama3"))
    lorarun.loss(model, texts())
    block = model.model.layers[1]

    def eager(reason):
        replays = model.graphs.replays
        lorarun.loss(model, texts()).backward()
        assert model.graphs.replays == replays and reason in model.graphs.reason, model.graphs.reason
        assert reason in str(model.graphs)

    calls = []
    hook = block.register_forward_hook(lambda *_: calls.append(1))
    eager("a Block has hooks")
    hook.remove()
    assert len(calls) == 1
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    eager("hooks on all modules")
    hook.remove()
    block.mlp.forward = type(block.mlp).forward.__get__(block.mlp)
    eager("another forward")
    del block.mlp.forward
    model.lm_head.weight.requires_grad_(True)
    eager("a base weight is trained")
    model.lm_head.weight.requires_grad_(False)
    with torch.autocast("cpu"):
        eager("autocast")
    with FlopCounterMode(display=False):
        eager("dispatch mode")
    monkeypatch.setattr(graph, "WORK", 1000)
    eager("keep the GPU busy")
    monkeypatch.undo()
    model.policies = ["keep", "recompute", "keep", "keep"]
    eager("the plan says recompute")
    model.policies = ["keep"] * 4
    with torch.no_grad():
        assert not lorarun.loss(model, texts()).requires_grad
    outer = block.mlp
    block.mlp = torch.nn.Sequential(outer)
    block.mlp.forward = outer.forward
    eager("another forward")
    block.mlp = outer
    replays = model.graphs.replays
    lorarun.loss(model, texts()).backward()
    assert model.graphs.replays == replays + 1 and model.graphs.reason is None


def test_captured_at_the_second_sight(tiny, monkeypatch):
    monkeypatch.setattr(graph, "SIGHTINGS", 2)
    model = adapted(tiny("llama3"))
    for step in range(3):
        lorarun.loss(model, texts()).backward()
        assert (model.graphs.eager, model.graphs.replays) == (1, step)
    assert "graphs of 2×64 packed or padded, 64 supervised; 2 of 3 steps replayed" in str(model.graphs)
    assert lorarun.report(model).to_dict()["operations"]["captured step"] == str(model.graphs)


def test_eight_graphs_are_held_and_an_idle_one_makes_room(tiny, monkeypatch):
    monkeypatch.setattr(graph, "IDLE", 4)
    monkeypatch.setattr(graph, "GRAPHS", 2)
    model = adapted(tiny("llama3"))
    one, two, three = texts(1, 16), texts(1, 150), texts(1, 200)
    for batch in (one, two, three):
        lorarun.loss(model, batch)
    assert (model.graphs.replays, model.graphs.reason) == (2, "2 graphs are in use")
    for _ in range(3):
        lorarun.loss(model, two)
    lorarun.loss(model, three)
    assert model.graphs.reason is None
    assert [step.shape.seq for step in model.graphs.held.values()] == [192, 256]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("no capture\nof this")])
def test_a_failed_capture_is_told_and_training_goes_on(tiny, error):
    model, eager = adapted(tiny("llama3")), adapted(tiny("llama3"), steps=False)
    calls = []

    def fail(run):
        calls.append(1)
        run()
        raise error

    model.graphs = Steps(fail)
    for _ in range(3):
        lorarun.loss(model, texts()).backward()
        lorarun.loss(eager, texts()).backward()
        same(gradients(model), gradients(eager), rel=0)
    memory = isinstance(error, torch.OutOfMemoryError)
    reason = "out of memory while capturing" if memory else "the capture failed: no capture"
    assert model.graphs.reason == reason and len(calls) == 1 and not model.graphs.held


def test_graphs_make_room_for_an_eager_step(tiny, monkeypatch):
    model = adapted(tiny("llama3"))
    expected = lorarun.loss(model, texts()).item()
    monkeypatch.setattr(graph, "WORK", 0)
    mean, calls = train._mean, []

    def tight(*args):
        calls.append(len(model.graphs.held))
        if model.graphs.held:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return mean(*args)

    monkeypatch.setattr(train, "_mean", tight)
    assert lorarun.loss(model, texts()).item() == pytest.approx(expected, rel=1e-5)
    assert calls == [1, 0]
    monkeypatch.setattr(train, "_mean", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA")))
    with pytest.raises(torch.OutOfMemoryError):
        lorarun.loss(model, texts())
