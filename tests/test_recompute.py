"""Policies of blocks: the same bits as ``keep``, what is run again and what is not, and what stays in memory."""

import contextlib
import functools
import gc
import math
import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import lorarun
from lorarun import graph, project, train
from lorarun.data import Batch
from lorarun.kernels import attention
from lorarun.kernels.backend import INTERPRETED, reference
from lorarun.kernels.replay import Frame, Running
from lorarun.lora import linears
from lorarun.models import build_model
from lorarun.recompute import POLICIES, run_block

FAMILIES = ["llama3", "qwen3", "gemma2", "gemma3-text"]
OTHERS = [policy for policy in POLICIES if policy != "keep"]
pytestmark = pytest.mark.usefixtures("set_by_hand")


@pytest.fixture
def set_by_hand(monkeypatch):
    """On an accelerator the first loss would plan policies and tile itself, and replay the second step as a graph."""
    monkeypatch.setattr(train, "follow", lambda model, tokens: None)
    monkeypatch.setattr(graph, "SIGHTINGS", math.inf)


@pytest.fixture
def load(tiny, device):
    """A tiny model in training mode with an adapter that already does something."""

    def make(name, dropout=0.0, **options):
        model = lorarun.add_lora(lorarun.load(tiny(name), device=device, **options), r=4, dropout=dropout, seed=0)
        generator = torch.Generator().manual_seed(1)
        for _, linear in linears(model):
            b = linear.factors("default")[1]
            b.data.copy_(0.05 * torch.randn(b.shape, generator=generator))
        return model

    return make


def batch(packed, rows=2, seed=0):
    ids = torch.randint(3, 1000, (rows, 10), generator=torch.Generator().manual_seed(seed))
    documents = torch.tensor([[0] * 4 + [1] * 6, [0] * 8 + [-1] * 2])[:rows] if packed else None
    return Batch(ids, ids, documents=documents)


def take_gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    assert all(grad is not None and torch.isfinite(grad).all() and grad.abs().sum() > 0 for grad in found.values())
    return found


def assert_equal(got, expected):
    assert got.keys() == expected.keys() and got
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def step(model, policies, packed, tile=None, rows=2):
    """Losses and gradients of a step of two losses before one backward."""
    model.policies, model.tile, model.clock.step = policies, tile, 0
    losses = [lorarun.loss(model, batch(packed, rows, seed)) for seed in (0, 1)]
    torch.autograd.backward(losses[0] + 2 * losses[1])
    return {"loss": torch.stack(losses).detach()} | take_gradients(model)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_policy_changes_no_bit(load, name, packed, dropout):
    model = load(name, dropout)
    expected = step(model, keep(model), packed)
    for policy in POLICIES:
        assert_equal(step(model, [policy] * len(model.policies), packed, tile=7), expected)


def keep(model):
    return ["keep"] * len(model.model.layers)


def short(model):
    """Its first and its last block alone: what a kernel does under the interpreter takes seconds."""
    model.model.layers = model.model.layers[::3]
    return model


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("name", "packed", "dropout", "tile", "bits"),
    [
        ("llama3", False, 0.1, None, None),
        ("qwen3", True, 0.1, 7, 4),
        ("gemma2", True, 0.0, None, None),
        ("gemma3-text", False, 0.1, 7, None),
    ],
)
def test_a_policy_changes_no_bit_in_kernels(load, name, packed, dropout, tile, bits):
    model = short(load(name, dropout, bits=bits))
    expected = step(model, ["keep", "keep"], packed, tile, rows=1)
    for policies in (["no_gate_up", "selective"], ["offload", "recompute"]):
        assert_equal(step(model, policies, packed, tile, rows=1), expected)


def mlp_gradients(model, tile, h):
    """Of the first block's MLP alone."""
    mlp = model.model.layers[0].mlp
    leaves = [h, *(p for p in mlp.parameters() if p.requires_grad)]
    with Running(Frame(save_products=False, tile=tile)):
        y = mlp(h, residual=h)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.kernel
@pytest.mark.parametrize("bits", [None, 4])
def test_tiles_are_the_whole_but_for_the_order_of_sums(load, device, bits):
    model = load("llama3", dropout=0.3, bits=bits)
    for rows, tiles in ((37, (16, 36, 37, 100)), (5, (1,))):
        h = torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        whole = mlp_gradients(model, None, h)
        for tile in tiles:
            for ours, expected in zip(mlp_gradients(model, tile, h), whole, strict=True):
                assert (ours - expected).norm() < 8 * 2**-24 * expected.norm(), tile


# --- what runs again ---


@pytest.mark.kernel
def test_what_runs_again(load, monkeypatch):
    """Calls on the way back, for a block that closes with its MLP and for one that norms the MLP's output."""
    calls = []

    def count(module, name, label):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: calls.append(label(args)) or original(*args))

    count(attention, "_forward", lambda args: "attention")
    count(project.Frozen, "mm", lambda args: f"{args[1].shape[1]}->{sum(args[0].sizes)}")
    qkv, gate_up, heads = "64->128", "64->320", "64->64"
    for name, down in (("llama3", []), ("gemma2", ["160->64"])):
        if name == "gemma2":
            qkv, heads = "64->256", "128->64"
        model = short(load(name))
        again = {
            "keep": [],
            "no_gate_up": [gate_up],
            "selective": [qkv, gate_up],
            "recompute": [qkv, "attention", heads, *(2 * [gate_up] if down else [gate_up]), *down],
        }
        for policies in (["keep", "no_gate_up"], ["selective", "recompute"]):
            model.policies = policies
            loss = lorarun.loss(model, batch(True, rows=1))
            calls.clear()
            loss.backward()
            first, last = (again[policy] for policy in policies)
            assert sorted(calls[: len(last)]) == sorted(last), (name, policies)
            assert sorted(calls[len(last) :]) == sorted(first), (name, policies)


class Alive(TorchDispatchMode):
    """Follows the storages of all that is made beside a model's parameters."""

    def __init__(self, model):
        super().__init__()
        self.device = model.device
        self.known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.found = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known and tensor.device == self.device:
                    self.found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def sizes(self):
        return [size for storage, size in self.found.values() if not storage.expired()]


@pytest.mark.kernel
def test_bytes_a_token_and_layer(load, device):
    """Two blocks hold what one holds, and what another one keeps."""
    d, qkv, o, gate_up, heads = 64, 128, 64, 320, 4
    few, column, rstd, lse = 3 * 16 + 16 + 2 * 16, 16, 1, heads  # u of q|k|v, o and gate|up; of down; of a norm
    expected = {
        "keep": 4 * d + qkv + o + gate_up + few + column + 2 * rstd + lse,
        "no_gate_up": 4 * d + qkv + o + few + column + 2 * rstd + lse,
        "selective": d + o + d + column + lse,
        "recompute": d + column,
    }
    tokens = torch.randint(3, 1000, (1, 12), device=device)
    for policy, elements in expected.items():
        sizes = []
        for blocks in (2, 1):
            model = load("llama3", dtype=torch.float32)
            model.model.layers = model.model.layers[-blocks:]
            model.policies = [policy] * len(model.model.layers)
            with Alive(model) as alive:
                hidden = model.hidden_states(tokens, documents=torch.zeros_like(tokens))
            if INTERPRETED:
                gc.collect()  # the interpreter holds tensors in cycles of its own
            sizes.append(sum(alive.sizes()))
            del hidden
        assert sizes[0] - sizes[1] == 12 * 4 * elements, (policy, (sizes[0] - sizes[1]) / 48 - elements)


def inputs_alive(model, policy):
    """Storages of the size of a block's input: after the forward, then in the backward of each of four blocks."""
    model.policies = [policy] * 4
    found = []
    with Alive(model) as alive:
        hidden = model.hidden_states(batch(False).ids.to(model.device))
        found.append(alive.sizes().count(2 * 10 * 64 * 4))
        for block in model.model.layers:
            weight = block.self_attn.q_proj.lora_A["default"].weight
            weight.register_hook(lambda grad: found.append(alive.sizes().count(2 * 10 * 64 * 4)))
        hidden.sum().backward()
    return found


def test_what_is_offloaded_is_on_the_device_twice_at_most(load):
    """Followed on the meta device, where memory is planned."""
    kept = inputs_alive(load("llama3").to("meta"), "recompute")
    left = inputs_alive(load("llama3").to("meta"), "offload")
    assert kept[0] - left[0] == 3  # the input of the last block stays
    second = kept[3]  # the block whose own input and the one before are all that is kept
    assert kept[1:4] == [second + 2, second + 1, second] and left[1:4] == [second] * 3


# --- autograd ---


@pytest.mark.parametrize("policy", OTHERS)
def test_autograd_grad_retained_graphs_and_hooks_on_gradients(load, policy):
    model = load("llama3", dropout=0.1)
    model.policies = [policy] * len(model.policies)
    parameters = list(lorarun.lora_parameters(model))
    seen = []
    parameters[0].register_hook(lambda grad: seen.append(grad))
    loss = lorarun.loss(model, batch(True))
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters, retain_graph=True)
    loss.backward()
    assert all(map(torch.equal, first, second)) and len(seen) == 3
    assert all(torch.equal(grad, p.grad) for grad, p in zip(first, parameters, strict=True))


@pytest.mark.parametrize("policy", OTHERS)
def test_an_error_on_the_way_back_leaves_nothing_behind(load, policy):
    model = load("qwen3", dropout=0.1)
    expected = step(model, keep(model), True)

    def fail(grad):
        raise RuntimeError("in the middle")

    broken = next(p for n, p in model.named_parameters() if "layers.2" in n and p.requires_grad).register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        step(model, [policy] * len(model.policies), True)
    broken.remove()
    model.zero_grad()
    assert_equal(step(model, [policy] * len(model.policies), True), expected)


@pytest.mark.parametrize("policy", OTHERS)
def test_hooks_in_a_block_see_and_change_what_they_would(load, policy):
    model = load("llama3", dropout=0.1)
    seen = []
    block = model.model.layers[1]
    block.mlp.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()) or torch.sin(out))
    block.self_attn.o_proj.register_forward_hook(lambda module, args, out: torch.tanh(out))
    expected = step(model, keep(model), True)
    forward = list(seen)
    seen.clear()
    assert_equal(step(model, [policy] * len(model.policies), True), expected)
    assert all(any(torch.equal(a, b) for b in forward) for a in seen)


@pytest.mark.kernel
def test_hooks_in_a_block_with_kernels(load):
    model = short(load("llama3"))
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: torch.sin(out))
    expected = step(model, ["keep", "keep"], False, rows=1)
    assert_equal(step(model, ["recompute", "selective"], False, rows=1), expected)


def test_first_step_from_zero_b_under_a_frozen_embedding(tiny):
    """Every block learns whatever is recomputed (https://github.com/huggingface/transformers/issues/26221)."""
    for bits in (16, 4):
        for policy in POLICIES:
            model = lorarun.add_lora(lorarun.load(tiny("llama3"), bits=bits, device="cpu"), r=4, seed=0)
            model.policies = [policy] * len(model.policies)
            optimizer = torch.optim.SGD(lorarun.lora_parameters(model), lr=1.0)
            for moved in (False, True):
                lorarun.loss(model, batch(False)).backward()
                for name, p in model.named_parameters():
                    if p.requires_grad:
                        assert bool(p.grad.any()) == (moved or ".lora_B." in name), (policy, name)
                optimizer.step()
                optimizer.zero_grad()


# --- decisions are those of the forward ---


def test_masks_under_somebody_elses_checkpoint(load):
    """Two losses before one backward: masks of the first must not become those of the second."""
    model = load("gemma3-text", dropout=0.5)
    expected = step(model, keep(model), True)
    for block in model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    assert_equal(step(model, keep(model), True), expected)


def late(model, policies, change, forced):
    """Gradients when something changes between a loss and its backward."""
    model.policies = policies
    with reference() if forced else contextlib.nullcontext():
        loss = lorarun.loss(model, batch(True, rows=1))
    change(model)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", OTHERS)
def test_mode_is_that_of_the_forward(load, policy):
    expected = late(load("llama3", dropout=0.2), ["keep"] * 4, lambda model: None, False)
    assert_equal(late(load("llama3", dropout=0.2), [policy] * 4, lambda model: model.eval(), False), expected)


@pytest.mark.kernel
@pytest.mark.parametrize("forced", [False, True])
def test_mode_and_reference_are_those_of_the_forward(load, forced):
    expected = late(short(load("llama3", dropout=0.2)), ["keep"] * 2, lambda model: None, forced)
    model = short(load("llama3", dropout=0.2))
    assert_equal(late(model, ["recompute", "selective"], lambda model: model.eval(), forced), expected)


@pytest.mark.kernel
def test_somebody_elses_checkpoint_around_a_policy(load):
    model = short(load("llama3", dropout=0.5))
    expected = step(model, keep(model), False, tile=4, rows=1)
    for block in model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for policies in (["keep", "no_gate_up"], ["selective", "recompute"]):
        assert_equal(step(model, policies, False, tile=4, rows=1), expected)


def test_one_mlp_alone_and_names_of_policies(load):
    model = load("llama3")
    y = model.model.layers[3].mlp(torch.randn(1, 3, 64, requires_grad=True))
    y.sum().backward()
    with pytest.raises(ValueError, match="one of keep, no_gate_up"):
        run_block("selectiv", model.model.layers[0], y)
    model.policies = ["recompute"] * 3
    with pytest.raises(ValueError, match="3 policies for 4 blocks; expected one for each"):
        lorarun.loss(model, batch(False, 2, 0))


# --- on an accelerator ---

WIDTH = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 5e5, "vocab_size": 4096,
}  # fmt: skip


def real_width(device, layers):
    """Blocks as wide as those of Llama-3.2-1B, in bf16, with an adapter that does something."""
    torch.manual_seed(0)
    with torch.device(device):
        model = build_model(WIDTH | {"num_hidden_layers": layers})
    for parameter in model.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5) if parameter.ndim == 2 else parameter.data.fill_(1.0)
    model.requires_grad_(False).to(torch.bfloat16)
    lorarun.add_lora(model, r=16, dropout=0.05, seed=1)
    for _, linear in linears(model):
        linear.factors("default")[1].data.normal_(std=0.01)
    return model


def long_batch(packed, seq):
    ids = torch.randint(3, 4096, (1, seq), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(seq) // 1000).unsqueeze(0) if packed else None
    return Batch(ids, ids, documents=documents)


@pytest.mark.gpu
def test_bits_on_an_accelerator(device):
    """Of packed documents; cuDNN, which serves dense rows, adds up in any order on the way back."""
    model = real_width(device, 4)
    for packed in (True, False):
        rows = long_batch(packed, 4096)
        found = {}
        for policy in POLICIES:
            model.policies, model.clock.step = [policy] * 4, 0
            lorarun.loss(model, rows).backward()
            found[policy] = take_gradients(model)
        for policy in OTHERS:
            if packed:
                assert_equal(found[policy], found["keep"])
            for name, expected in found["keep"].items():
                assert (found[policy][name] - expected).norm() < 0.01 * expected.norm(), (policy, name)


@pytest.mark.gpu
def test_tiles_on_an_accelerator(device):
    model = real_width(device, 2)
    rows = long_batch(True, 4096)
    found = []
    for tile in (None, 1024, 1500):
        model.policies, model.tile, model.clock.step = ["recompute"] * 2, tile, 0
        lorarun.loss(model, rows).backward()
        found.append(take_gradients(model))
    for tiled in found[1:]:
        for name, expected in found[0].items():
            assert (tiled[name] - expected).norm() < 0.01 * expected.norm(), name


@pytest.mark.gpu
def test_each_policy_takes_less_memory_than_the_one_before(device):
    model = real_width(device, 8)
    rows, torch_device = long_batch(True, 8192), torch.get_device_module(device)
    peaks = []
    for policy, tile in [*((policy, None) for policy in POLICIES), ("offload", 1024)]:
        model.policies, model.tile = [policy] * 8, tile
        for _ in range(2):  # the first one also takes what stays: workspaces and the like
            torch_device.reset_peak_memory_stats()
            lorarun.loss(model, rows).backward()
            torch_device.synchronize()
            model.zero_grad()
        peaks.append(torch_device.max_memory_allocated())
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks), [peak >> 20 for peak in peaks]


@pytest.mark.gpu
def test_offload_copies_while_it_computes(device):
    """It takes less time on top of ``recompute`` than half of the copies alone."""
    model = real_width(device, 8)
    rows, torch_device = long_batch(True, 8192), torch.get_device_module(device)

    def seconds(work):
        times = []
        for _ in range(6):
            torch_device.synchronize()
            start = time.perf_counter()
            work()
            torch_device.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    def train():
        lorarun.loss(model, rows).backward()
        model.zero_grad()

    spent = {}
    for policy in ("recompute", "offload"):
        model.policies = [policy] * 8
        spent[policy] = seconds(train)
    x = torch.empty(8192, 2048, dtype=torch.bfloat16, device=device)
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copies = 8 * seconds(lambda: host.copy_(x, non_blocking=True)) + 7 * seconds(
        lambda: x.copy_(host, non_blocking=True)
    )
    assert spent["offload"] - spent["recompute"] < 0.5 * copies, (spent, copies)
