"""Projections and the gated MLP as one Function, against the modules one by one in float64."""

import copy

import pytest
import torch
from kernels.checks import close, narrow, poison

from lorarun.dora import held
from lorarun.kernels.backend import reference
from lorarun.linear import Adapter, Clock, Linear, few_projected
from lorarun.project import gated_mlp, obstacle, project
from lorarun.quant.store import NF4Store


def linear(device, dtype, cols, size, rank, bias=False, dropout=0.0, stream=0, clock=None, stored=False, options=()):
    made = Linear(cols, size, bias)
    made.weight.data = torch.randn(size, cols) / cols**0.5
    if bias:
        made.bias.data = torch.randn(size)
    made.requires_grad_(False).to(device, dtype)
    if stored:
        store = NF4Store.from_dense(made.weight.data)
        del made.weight
        made.weight = store
    if rank:
        adapter = Adapter(1.5, dropout, stream, clock or Clock(3, 1), "frozen a" in options)
        a, b = torch.randn(rank, cols) / cols**0.5, torch.randn(size, rank) / rank**0.5
        more = {
            "magnitude": torch.rand(size) + 0.5 if "dora" in options else None,
            "b_bias": torch.randn(size) if "b_bias" in options else None,
            "bias": torch.randn(size) if "own bias" in options and bias else None,
            "start": (torch.randn(rank, cols) / cols**0.5, torch.randn(size, rank) / 4) if "start" in options else None,
        }
        more = {key: tuple(t.to(device) for t in value) if key == "start" else value.to(device)
                for key, value in more.items() if value is not None}  # fmt: skip
        made.attach("default", adapter, a.to(device), b.to(device), **more)
        made.active = "default"
        if "frozen a" in options:
            made.factors("default")[0].requires_grad_(False)
    return made.train()


def compare(call, linears, inputs, roundings):
    """``call(linears, *inputs)`` through the kernels, and in float64 through each module of its own."""
    upstream = None
    results = []
    for exact in (False, True):
        modules = copy.deepcopy(linears)
        leaves = [t.detach().clone().to(torch.float64 if exact else t.dtype).requires_grad_() for t in inputs]
        if exact:
            modules = [m.double() for m in modules]
        poison(inputs[0].device)
        if exact:
            with reference():
                out = call(modules, *leaves)
        else:
            out = call(modules, *leaves)
        outs = out if isinstance(out, tuple) else (out,)
        upstream = upstream or [torch.randn_like(o) for o in outs]
        learning = [p for m in modules for p in m.parameters() if p.requires_grad]
        grads = torch.autograd.grad(
            outs, leaves + learning, [u.to(o.dtype) for u, o in zip(upstream, outs, strict=True)]
        )
        results.append([*outs, *grads])
        if not exact:
            assert all(g.dtype == torch.float32 for g in grads[len(leaves) :])
    dtype = inputs[0].dtype
    for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
        close(ours.detach().to(dtype), theirs.detach(), f"result {i}", roundings)


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("ranks", [(8, 8, 8), (4, 0, 16), (0, 0, 0)])
@pytest.mark.parametrize(("bias", "dropout", "stored"), [(False, 0.0, False), (True, 0.25, False), (True, 0.0, True)])
def test_project(device, ranks, bias, dropout, stored, half):
    torch.manual_seed(0)
    dtype = narrow(device) if half else torch.float32
    sizes = zip((96, 40, 40), ranks, strict=True)
    linears = [linear(device, dtype, 68, n, r, bias, dropout, stored=stored) for n, r in sizes]
    assert obstacle(linears, dtype) is None
    x = torch.randn(2, 9, 68).to(device, dtype)
    compare(lambda ls, x: project(x, *ls), linears, [x], 8 if half else 64)


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(
    ("ranks", "dropout"), [((8, 8, 8), 0.0), ((4, 0, 16), 0.25), ((0, 0, 4), 0.0), ((0, 4, 0), 0.0), ((0, 0, 0), 0.0)]
)
def test_gated_mlp(device, act, ranks, dropout, half):
    torch.manual_seed(0)
    dtype = narrow(device) if half else torch.float32
    bias = ranks[0] == 4
    gate, up = (linear(device, dtype, 64, 132, r, bias, dropout, stream=2) for r in ranks[:2])
    down = linear(device, dtype, 132, 64, ranks[2], bias, dropout, stream=3)
    h, residual = torch.randn(2, 35, 64).to(device, dtype), torch.randn(2, 35, 64).to(device, dtype)
    call = lambda ls, h, r: gated_mlp(h, *ls, act, residual=r)  # noqa: E731
    compare(call, [gate, up, down], [h, residual], 16 if half else 64)


@pytest.mark.kernel
def test_inputs_with_strides_in_a_row(device):
    torch.manual_seed(0)
    gate, up = (linear(device, torch.float32, 64, 36, 4) for _ in range(2))
    down = linear(device, torch.float32, 36, 64, 4)
    h, residual = (torch.randn(1, 64, 5).to(device) for _ in range(2))  # with two, flattening copies
    compare(lambda ls, h: project(h.mT, *ls), [gate, up], [h], 64)
    compare(lambda ls, h, r: gated_mlp(h.mT, *ls, "silu", residual=r.mT), [gate, up, down], [h, residual], 64)


@pytest.mark.kernel
def test_dropout_in_an_mlp_whose_inner_width_is_no_multiple_of_four(device):
    torch.manual_seed(0)
    gate, up = (linear(device, torch.float32, 64, 38, 4, dropout=0.25, stream=2) for _ in range(2))
    down = linear(device, torch.float32, 38, 64, 4, dropout=0.25, stream=3)
    compare(lambda ls, h: gated_mlp(h, *ls, "silu"), [gate, up, down], [torch.randn(2, 5, 64).to(device)], 64)


OPTIONS = [
    (("dora",), 0.0, False),
    (("dora", "own bias", "start"), 0.0, True),
    (("dora",), 0.25, False),  # which runs one by one
    (("b_bias",), 0.25, False),
    (("frozen a",), 0.25, True),
]


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("options", "dropout", "stored"), OPTIONS)
def test_project_with_options(device, options, dropout, stored, half):
    """DoRA multiplies z by a number near 1 and sums dy · z over rows: as many roundings as a product more."""
    torch.manual_seed(0)
    dtype = narrow(device) if half else torch.float32
    sizes = zip((96, 40, 40), (4, 0, 16), strict=True)
    linears = [linear(device, dtype, 68, n, r, True, dropout, stored=stored, options=options) for n, r in sizes]
    assert (obstacle(linears, dtype) is None) == (not (dropout and "dora" in options))
    x = torch.randn(2, 9, 68).to(device, dtype)
    compare(lambda ls, x: project(x, *ls), linears, [x], 16 if half else 128)


@pytest.mark.kernel
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("options", "dropout", "stored"), OPTIONS)
def test_gated_mlp_with_options(device, options, dropout, stored, half):
    torch.manual_seed(0)
    dtype = narrow(device) if half else torch.float32
    gate, up = (
        linear(device, dtype, 64, 132, r, True, dropout, stream=2, stored=stored, options=options) for r in (8, 4)
    )
    down = linear(device, dtype, 132, 64, 8, True, dropout, stream=3, stored=stored, options=options)
    h, residual = torch.randn(2, 35, 64).to(device, dtype), torch.randn(2, 35, 64).to(device, dtype)
    call = lambda ls, h, r: gated_mlp(h, *ls, "silu", residual=r)  # noqa: E731
    compare(call, [gate, up, down], [h, residual], 32 if half else 128)


@pytest.mark.kernel
@pytest.mark.parametrize("options", [(), ("dora", "own bias"), ("b_bias",), ("start",)])
def test_few_rows_with_options(device, options):
    """Without gradients, stored weights are multiplied where they lie; biases and DoRA come after."""
    torch.manual_seed(0)
    dtype = narrow(device)
    linears = [linear(device, dtype, 64, n, 4, True, stored=True, options=options) for n in (96, 32)]
    x = torch.randn(1, 3, 64).to(device, dtype)
    exact = [copy.deepcopy(m).double() for m in linears]
    with torch.no_grad():
        assert few_projected(x[0], linears, [m.running().branch for m in linears]) is not None
        got = [*project(x, *linears), linears[0](x)]
        with reference():
            expected = [*project(x.double(), *exact), exact[0](x.double())]
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        close(ours, theirs, f"result {i}", 16)


@pytest.mark.kernel
@pytest.mark.parametrize("stored", [False, True])
def test_weights_made_in_inference_mode(device, stored):
    """They keep no count of what is written into them, so that a copy of a store that may be kept is made anew."""
    torch.manual_seed(0)
    with torch.inference_mode():
        linears = [linear(device, narrow(device), 64, n, 4, stored=stored, options=("dora",)) for n in (96, 32)]
        x = torch.randn(1, 70, 64).to(device, narrow(device))
        if stored:
            for m in linears:
                m.weight.kept = True
        exact = [copy.deepcopy(m).double() for m in linears]
        got = project(x, *linears)
        with reference():
            expected = project(x.double(), *exact)
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        close(ours, theirs, f"result {i}", 16)


@pytest.mark.kernel
@pytest.mark.parametrize("stored", [False, True])
def test_lengths_are_held_on_to_for_all_projections_of_an_input(device, stored):
    torch.manual_seed(0)
    linears = [linear(device, torch.float32, 64, n, 4, stored=stored, options=("dora",)) for n in (96, 32)]
    x = torch.randn(1, 3, 64, device=device)
    with torch.no_grad():
        with held([m.norms for m in linears]):
            lengths = [linears[0].norms.last for _ in range(3) if project(x, *linears)]
            assert lengths[0] is not None and all(each is lengths[0] for each in lengths)
        assert linears[0].norms.last is None
        before = project(x, *linears)
        linears[1].factors("default")[1].data *= 3  # announces nothing
        after = project(x, *linears)
        assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
        for ours, each in zip(after, linears, strict=True):
            close(ours, copy.deepcopy(each).double()(x.double()), "after an edit", 128)


@pytest.mark.kernel
def test_with_a_frozen_a_no_input_is_kept(device):
    torch.manual_seed(0)
    made = {
        frozen: linear(device, torch.float32, 64, 48, 8, options=("frozen a",) * frozen) for frozen in (False, True)
    }
    h = torch.randn(5, 7, 64, device=device, requires_grad=True)
    for frozen, each in made.items():
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(tuple(t.shape)) or t, lambda t: t
        ):
            (y,) = project(h, each)
        assert ((35, 64) in kept) != frozen
        assert torch.autograd.grad(y.sum(), [h])[0].abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_a_layer_of_real_size(device, dropout):
    torch.manual_seed(0)
    dtype = torch.bfloat16
    x = torch.randn(1, 4097, 4096).to(device, dtype)
    linears = [linear(device, dtype, 4096, n, 16, False, dropout) for n in (4096, 1024, 1024)]
    compare(lambda ls, x: project(x, *ls), linears, [x], 8)
    gate, up = (linear(device, dtype, 4096, 14336, 16, False, dropout, stream=2) for _ in "gu")
    down = linear(device, dtype, 14336, 4096, 16, False, dropout, stream=3)
    call = lambda ls, h, r: gated_mlp(h, *ls, "silu", residual=r)  # noqa: E731
    compare(call, [gate, up, down], [x, x.flip(1)], 16)


@pytest.mark.kernel
def test_unused_outputs_no_input_gradient_and_the_same_bits_twice(device):
    torch.manual_seed(0)
    linears = [linear(device, torch.float32, 64, n, 8) for n in (48, 32)]
    x = torch.randn(5, 7, 64, device=device)
    y, _ = project(x, *linears)
    factors = [p for m in linears for p in m.parameters() if p.requires_grad]
    first = torch.autograd.grad(y.square().sum(), factors, retain_graph=True)
    second = torch.autograd.grad(y.square().sum(), factors)
    assert all(map(torch.equal, first, second))
    assert all((g == 0).all() for g in first[2:]) and all(g.abs().sum() > 0 for g in first[:2])


@pytest.mark.kernel
def test_a_hook_on_one_projection_fires(device):
    linears = [linear(device, torch.float32, 64, n, 8) for n in (48, 32)]
    seen = []
    linears[1].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    x = torch.randn(2, 3, 64, device=device)
    hooked = project(x, *linears)
    assert seen == [(2, 3, 32)] and "hook" in obstacle(linears, torch.float32)
    linears[1]._forward_hooks.clear()
    for a, b in zip(hooked, project(x, *linears), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.kernel
def test_a_clock_on_the_device_draws_the_same_masks(device):
    """What a captured step reads its masks from, instead of a number in the launch."""
    torch.manual_seed(0)
    clock = Clock(3, 2**40 + 5)
    gate, up = (linear(device, torch.float32, 64, 132, 8, dropout=0.25, stream=2, clock=clock) for _ in "gu")
    down = linear(device, torch.float32, 132, 64, 4, dropout=0.25, stream=3, clock=clock)
    h = torch.randn(2, 35, 64, device=device, requires_grad=True)
    results = []
    for now in (None, torch.tensor(clock.value(), device=device)):
        clock.now = now
        y = gated_mlp(project(h, gate, up)[0][..., :64] + h, gate, up, down, "silu")
        results.append([y, *torch.autograd.grad(y.square().sum(), [h, *gate.factors("default")])])
    assert all(map(torch.equal, *results))
    before = project(h, gate)[0]
    clock.now.add_(1)
    assert not torch.equal(project(h, gate)[0], before)


@pytest.mark.kernel
def test_kept_copies_give_the_same_bits(device):
    torch.manual_seed(0)
    linears = [linear(device, torch.float32, 64, n, 8, stored=True) for n in (64, 32)]
    x = torch.randn(5, 7, 64, device=device, requires_grad=True)
    results = []
    for kept in (False, True, True):
        for each in linears:
            each.weight.kept = kept
        y = torch.cat(project(x, *linears), -1)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *linears[0].factors("default")])])
        assert (linears[0].weight.dense is not None) == kept and linears[1].weight.dense is None
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))


@pytest.mark.kernel
def test_a_weight_that_changes_before_the_backward_is_an_error(device):
    torch.manual_seed(0)
    one = linear(device, torch.float32, 32, 16, rank=4)
    (y,) = project(torch.randn(1, 3, 32, device=device, requires_grad=True), one)
    with torch.no_grad():
        one.weight.mul_(2)
    with pytest.raises(RuntimeError, match="has changed since the loss was computed"):
        y.sum().backward()
