"""The planner: the tracer against sequences worked out by hand, predictions against real runs, and the choice."""

import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

import lorarun
from lorarun import memory
from lorarun.kernels import backend
from lorarun.kernels.backend import shapes_only
from lorarun.memory import GIB, Choice, Predictor, choose
from lorarun.models import build_model
from lorarun.nn import Linear
from lorarun.quant.store import NF4Store
from lorarun.recompute import POLICIES
from lorarun.trace import MIB, Reserved, Tracer, peak

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "num_hidden_layers": 32, "rope_theta": 5e5,
}  # fmt: skip


def in_shapes(raw, bits=4, r=16):
    """A decoder in bf16 on the meta device, its projections in NF4, with an adapter."""
    with torch.device("meta"):
        model = build_model(raw)
    model.requires_grad_(False).to(torch.bfloat16)
    for path, module in model.named_modules():
        if bits == 4 and isinstance(module, Linear) and ".layers." in path:
            weight = module.weight.data
            del module.weight
            module.weight = nf4(weight)
    lorarun.add_lora(model, r=r)
    return model


def nf4(weight):
    """A store in shapes; encoding shapes would go through a large weight in many chunks."""
    blocks = weight.numel() // 64
    kinds = [(weight.numel() // 2, torch.uint8), (blocks, torch.uint8)]
    kinds += [(-(-blocks // 256), torch.float32), (256, torch.float32), (1, torch.float32)]
    return NF4Store(*(torch.empty(n, dtype=dtype, device="meta") for n, dtype in kinds), shape=weight.shape)


# --- the tracer and the allocator ---


def test_the_tracer_sees_births_and_deaths_in_order():
    with Tracer() as trace:
        a = torch.empty(1000, device="meta")  # 4,000 bytes: 8 blocks of 512
        view = a[10:]
        b = a + 1
        del a  # the view holds it
        c = torch.empty(3, dtype=torch.bfloat16, device="meta")
        del b
        torch.empty(4)  # elsewhere
        del view, c
    assert trace.events == [(1, 4096), (2, 4096), (3, 512), (2, -4096), (1, -4096), (3, -512)]
    assert peak(trace.events) == 4096 * 2 + 512


def test_the_tracer_follows_what_autograd_holds():
    x = torch.empty(256, device="meta", requires_grad=True)
    with Tracer() as trace:
        y = x * x  # saves x, which was there before
        z = y.exp()  # saves its output
        w = z.sum()
        del y, z
        w.backward()
    sizes = [size for _, size in trace.events]
    assert sizes[:4] == [1024, 1024, 512, -1024]  # y, z, w; y dies, z is held
    assert sum(sizes) == 512 + 1024  # w and the gradient
    assert trace.alive() == [512, 1024]


@pytest.mark.parametrize(("heads", "groups", "dim", "mib"), [(32, 8, 128, 257.0), (8, 4, 256, 128.25)])
def test_workspace_of_cudnn(heads, groups, dim, mib):
    """Of the backward of 4 × 2048 tokens, as torch's allocator noted it on an H200."""

    def meta(count):
        return torch.empty(4, count, 2048, dim, dtype=torch.bfloat16, device="meta")

    q, k, v = meta(heads), meta(groups), meta(groups)
    lse, seed = torch.empty(4, heads, 2048, 1, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    with Tracer() as trace:
        backward(q, q, k, v, q, lse, seed, seed, None, None, None, 2048, 2048, 0.0, True)
    born, freed = [size for size in (e[1] for e in trace.events) if abs(size) == int(mib * MIB)]
    assert born == -freed > 0


def test_the_allocator_rounds_splits_and_joins():
    allocator = Reserved()
    allocator.run([("a", 512), ("b", MIB)])
    assert allocator.total == 2 * MIB  # one segment of small blocks
    allocator.run([("c", 6 * MIB), ("d", 6 * MIB), ("e", 6 * MIB)])
    assert allocator.total == 22 * MIB
    allocator.run([("f", 11 * MIB + 512)])
    assert allocator.total == 34 * MIB  # its own, in whole 2 MiB
    allocator.run([("c", -1), ("d", -1), ("g", 12 * MIB)])
    assert allocator.total == 34 * MIB  # c and d were neighbours
    allocator.run([("f", -1), ("h", 11 * MIB), ("i", 9 * MIB)])
    assert allocator.total == 54 * MIB  # the rest of f's is 1 MiB and was not split off
    allocator.run([("a", -1), ("b", -1), ("j", MIB), ("k", MIB)])
    assert allocator.total == 54 * MIB


# --- predictions ---


def tiny_run(model, tokens):
    """The peak of real steps on the CPU, weights included, by the same tracer."""
    batch = {"ids": torch.randint(3, 900, (1, tokens)), "labels": torch.randint(3, 900, (1, tokens))}
    model.train()
    optimizer = torch.optim.AdamW(lorarun.lora_parameters(model), lr=1e-4, fused=True)
    weights = sum(-(-p.nbytes // 512) * 512 for p in {id(p): p for p in model.parameters()}.values())
    held = Tracer("cpu")
    with held:
        for _ in range(3):
            lorarun.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights + peak(held.events)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma2", "gemma3-text"])
def test_prediction_of_a_real_run(tiny, name, policy):
    model = lorarun.load(tiny(name))
    lorarun.add_lora(model, r=4, dropout=0.1 if name == "llama3" else 0.0)
    with sdpa_kernel(SDPBackend.MATH):  # what torch does on meta tensors
        lorarun.plan(model, 96, policy=policy)
        measured = tiny_run(model, 96)
    assert model.planned.allocated == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("trained", [[2, 3], [0]])
def test_prediction_where_only_some_blocks_are_trained(tiny, trained):
    model = lorarun.load(tiny("llama3"))
    lorarun.add_lora(model, r=4, layers=trained)
    with sdpa_kernel(SDPBackend.MATH):
        lorarun.plan(model, 96, policy="keep")
        measured = tiny_run(model, 96)
    assert model.planned.allocated == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    "arguments",
    [
        {"modules_to_save": ["lm_head", "norm"]},
        {"modules_to_save": ["embed_tokens"]},
        {"targets": ["q_proj", "embed_tokens", "lm_head"]},
    ],
)
def test_prediction_where_more_than_projections_is_trained(tiny, arguments):
    model = lorarun.load(tiny("llama3"))
    lorarun.add_lora(model, r=4, **({"targets": ["q_proj"]} | arguments))
    with sdpa_kernel(SDPBackend.MATH):
        lorarun.plan(model, 96, policy="keep")
        measured = tiny_run(model, 96)
    assert model.planned.allocated == pytest.approx(measured, rel=0.01)


def test_prediction_where_every_weight_is_trained(tiny, monkeypatch):
    model = lorarun.train_all(lorarun.load(tiny("gemma2")))
    monkeypatch.setattr(lorarun, "lora_parameters", lambda model: list(model.parameters()))
    with sdpa_kernel(SDPBackend.MATH):
        lorarun.plan(model, 96, policy="selective")
        measured = tiny_run(model, 96)
    assert model.planned.allocated == pytest.approx(measured, rel=0.01)


def test_8b_against_the_arithmetic_of_its_design():
    """108 KiB a token and block are kept; so much of the rest is weights."""
    predictor = Predictor(in_shapes(LLAMA_8B))
    few, many = (predictor.predict(tokens, Choice(["keep"] * 32))[0] for tokens in (8192, 16384))
    slope = (many - few) / 8192 / 32 / 1024
    assert 108 < slope < 120  # the rest is the working set of one block
    dense = predictor.predict(512, Choice(["keep"] * 32, keep_dense=True))[0]
    copies = sum(w.numel() for w in predictor.sketch.blocks[0].modules() if isinstance(w, NF4Store)) * 32 * 2
    assert dense - predictor.predict(512, Choice(["keep"] * 32))[0] == pytest.approx(copies, rel=0.03)


def test_70b_is_planned_without_memory(capsys):
    raw = LLAMA_8B | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
    }  # fmt: skip
    made = lorarun.plan(in_shapes(raw), 2048, policy="offload", budget=80 * GIB)
    assert 38 * GIB < made.allocated < 46 * GIB
    assert "80 offload" in capsys.readouterr().err


# --- the choice ---


def test_less_memory_never_makes_a_plan_faster():
    predictor = Predictor(in_shapes(LLAMA_8B | {"num_hidden_layers": 8}))
    order = {policy: i for i, policy in enumerate(POLICIES)}
    ranks, fits = [], []
    for budget in (40, 20, 14, 11, 9, 8, 7, 6, 5.5, 5, 4.5, 4, 3.5):
        found = choose(predictor, 8192, "auto", budget * GIB)
        if found is not None:
            assert found[1][1] <= budget * GIB
            ranks.append(sum(order[policy] for policy in found[0].policies))
        fits.append(found is not None)
    assert ranks == sorted(ranks) and len(set(ranks)) >= 4 and ranks[0] == 0
    assert fits == sorted(fits, reverse=True) and not fits[-1]


def test_what_is_asked_for_is_obeyed_or_refused(tiny):
    model = lorarun.load(tiny("llama3"))
    with pytest.raises(ValueError, match="add_lora"):
        lorarun.plan(model, 96)
    lorarun.add_lora(model, r=4)
    made = lorarun.plan(model, 96, policy="selective")
    assert model.planned is made and model.policies == ["selective"] * 4 and "4 selective" in str(lorarun.report(model))
    for wrong in ({"policy": "fast"}, {"compute": "fp4"}, {"budget": 0}, {"budget": float("nan")}):
        with pytest.raises(ValueError, match="plan: "):
            lorarun.plan(model, 96, **wrong)
    assert model.planned is made


def test_loss_follows_a_plan(tiny, monkeypatch, capsys):
    """As on an accelerator: planned at the first batch, again for a longer one, and not at all where that fails."""
    batch = {"ids": torch.arange(3, 103)[None], "labels": torch.arange(3, 103)[None]}
    model = lorarun.load(tiny("llama3"))
    lorarun.add_lora(model, r=4)
    lorarun.loss(model, batch)
    assert model.planned is None  # on a CPU
    monkeypatch.setattr(memory, "HOSTS", ("meta",))
    with torch.no_grad():
        lorarun.loss(model, batch)
    assert model.planned is None
    lorarun.loss(model, batch)
    assert model.planned.tokens == 128 and "128" in capsys.readouterr().err
    made = model.planned
    lorarun.loss(model, batch)
    assert model.planned is made and not capsys.readouterr().err
    lorarun.plan(model, 64, policy="recompute", budget=GIB)
    lorarun.loss(model, batch)
    assert "longer than the 64 planned" in capsys.readouterr().err
    assert model.planned.tokens == 128 and model.policies == ["recompute"] * 4 and model.planned.budget == GIB

    model.planned = None
    rows = model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + float(out.sum()) * 0)
    lorarun.loss(model, batch)
    assert model.planned.tokens == 128  # hooks are not run for a prediction
    rows.remove()
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda *args, **kwargs: type(mlp).forward(mlp, *args, **kwargs)  # bound to real weights
    model.planned = None
    assert torch.isfinite(lorarun.loss(model, batch))
    assert "cannot be predicted" in capsys.readouterr().err and "nothing: " in str(lorarun.report(model))


@pytest.mark.parametrize(
    ("max_tokens", "budget"), [(1e3, None), (0, None), (True, None), ("512", None), (512, 0), (512, -1.0)]
)
def test_a_plan_wants_a_number_of_tokens(max_tokens, budget):
    with pytest.raises(ValueError, match="a whole number of tokens"):
        lorarun.plan(in_shapes(LLAMA_8B | {"num_hidden_layers": 1}), max_tokens, budget=budget)


def test_too_large_says_what_would_fit():
    model = in_shapes(LLAMA_8B | {"num_hidden_layers": 4})
    with pytest.raises(ValueError, match=r"65,536 tokens need .* max_tokens=\d+ would fit") as error:
        lorarun.plan(model, 65_536, budget=6 * GIB)
    said = int(re.search(r"max_tokens=(\d+)", str(error.value))[1])
    lorarun.plan(model, said, budget=6 * GIB)
    with pytest.raises(ValueError, match="would fit"):
        lorarun.plan(model, int(said * 1.02), budget=6 * GIB)
    with pytest.raises(ValueError, match="Not even 128 tokens fit"):
        lorarun.plan(model, 8192, budget=1 * GIB)


# --- kernels on meta tensors ---


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("name", "dora"), [("llama3", False), ("llama3", True), ("qwen3", False), ("gemma3-text", False)]
)
def test_kernels_allocate_on_meta_what_they_allocate(tiny, device, name, dora, monkeypatch):
    """One block through its kernels, under the interpreter or on a GPU, and in shapes."""
    kernel = backend._kernel_class()
    launch = kernel.__getitem__

    def unseen(self, grid):
        def run(*args, **options):
            with _disable_current_modes():  # the interpreter copies what it is given
                launch(self, grid)(*args, **options)

        return run

    monkeypatch.setattr(kernel, "__getitem__", unseen)
    events = []
    for where in (device.type, "meta"):
        model = lorarun.load(tiny(name), device=device, bits=4)
        lorarun.add_lora(model, r=4, dora=dora)
        model.model.layers, model.policies = model.model.layers[:1], ["keep"]
        model.train().to(where)
        ids, seen = torch.zeros(1, 32, dtype=torch.int64, device=where), Tracer(where)
        with shapes_only():  # real tensors do not care
            model.hidden_states(ids[:, :16]).sum().backward()  # tables and other things made once
            model.zero_grad()
            with seen:
                hidden = model.hidden_states(ids)
                if device.type == "cpu":  # on a GPU backward runs in a thread that the tracer does not see
                    hidden.backward(torch.empty_like(hidden))
        events.append(seen.events)
    real, shapes = ([size for _, size in each if size > 0] for each in events)
    assert real == shapes  # when they die differs: the interpreter holds on to arguments
