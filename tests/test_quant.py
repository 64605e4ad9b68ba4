"""Weights in four and eight bits: stores that nothing casts, and models that run on them as on the dense weights that
they stand for."""

import copy
import io
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

from lorarun.adapter import save_adapter
from lorarun.kernels.nf4 import nf4_quantize
from lorarun.load import load, load_adapter
from lorarun.lora import add_lora, find_targets, linears, lora_parameters
from lorarun.merge import merge
from lorarun.models import build_model
from lorarun.nn import Linear
from lorarun.quant.store import (
    FP8Store,
    NF4Store,
    Store,
    dense_side_by_side,
    dequantize,
    dequantize_side_by_side,
    stores,
)
from lorarun.report import report
from lorarun.train import loss

FAMILIES = ["llama3", "llama-bias", "mistral-sliding", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"]
KINDS = {4: NF4Store, 8: FP8Store}


def weight(rows=33, cols=65, seed=0):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def made():
    """A store of each kind."""
    codes = (20 * weight(200, 300)).to(torch.float8_e4m3fn)
    return {
        "nf4": NF4Store.from_dense(weight()),
        "nf4 plain": NF4Store.from_dense(weight(), block=128, nested=False),
        "fp8": FP8Store.from_dense(weight()),
        "fp8 blocks": FP8Store(codes, weight(2, 3).abs(), (128, 128)),
    }


def bits(store):
    """Its tensors as bytes."""
    return {n: (p.dtype, p.detach().contiguous().view(-1).view(torch.uint8)) for n, p in store.named_parameters()}


def assert_same(a, b):
    one, other = bits(a), bits(b)
    assert one.keys() == other.keys() and a.shape == b.shape and a.kind == b.kind
    for name, (dtype, content) in one.items():
        assert other[name][0] == dtype and torch.equal(other[name][1], content), name


def dense_twin(model, folder, **options):
    """The model loaded dense, its weights those that the stores of ``model`` stand for."""
    twin = load(folder, **options)
    for path, store in stores(model):
        twin.get_parameter(path).data.copy_(store.dequantize(torch.float32))
    return twin


def ids_for(model):
    return torch.randint(3, 1000, (2, 24), generator=torch.Generator().manual_seed(1))


# --- stores --------------------------------------------------------------------------------------------------------


CASTS = {
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "to like": lambda m: m.to(torch.zeros(1, dtype=torch.float64)),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float16),
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("kind", made())
def test_a_store_moves_but_is_never_cast(kind, cast):
    linear = Linear(65, 33, bias=True)
    del linear.weight
    linear.weight = made()[kind]
    after = CASTS[cast](linear)
    assert_same(made()[kind], after.weight)
    if cast not in ("float", "deepcopy", "pickle"):
        assert after.bias.dtype != torch.float32  # what is dense is cast
    assert not any(parameter.requires_grad for parameter in after.weight.parameters())


@pytest.mark.parametrize("kind", made())
def test_state_dict_and_meta(kind):
    store = made()[kind]
    file = io.BytesIO()
    torch.save(store.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(store)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same(store, other)

    meta = copy.deepcopy(store).to("meta")
    assert meta.device.type == "meta" and [p.dtype for p in meta.parameters()] == [p.dtype for p in store.parameters()]
    out = meta.dequantize(torch.bfloat16)
    assert out.is_meta and out.shape == store.shape and out.dtype == torch.bfloat16
    shapes = [[p.shape for p in each.parameters()] for each in (meta.to_empty(device="cpu"), store)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", KINDS.values())
def test_made_without_memory(kind):
    store = kind.from_dense(torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16))
    size = sum(parameter.nbytes for parameter in store.parameters())
    assert store.device.type == "meta" and abs(size * 8 / store.numel() - kind.bits) < 0.01


def test_dequantised_into_what_is_asked_for():
    for store in made().values():
        exact = store.dequantize(torch.float32)
        assert exact.shape == store.shape and not exact.requires_grad
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            out = torch.full(store.shape, float("nan"), dtype=dtype)
            assert store.dequantize(dtype, out).data_ptr() == out.data_ptr()
            assert torch.equal(out, exact.to(dtype)) and torch.equal(dequantize(store, dtype), out)
    dense = weight()
    assert dequantize(dense, torch.float32).data_ptr() == dense.data_ptr()
    assert torch.equal(dequantize(dense, torch.float16, torch.empty(33, 65, dtype=torch.float16)), dense.half())


def test_side_by_side_whatever_they_are():
    nf4 = [NF4Store.from_dense(weight(rows, 65, rows)) for rows in (33, 7, 1, 64)]
    others = [NF4Store.from_dense(weight(5, 65), 32), NF4Store.from_dense(weight(5, 65), nested=False)]
    fp8 = [FP8Store.from_dense(weight(rows, 65, rows)) for rows in (33, 7)]
    for group in (nf4, nf4[:1], [*nf4, others[1]], [*nf4, others[0]], fp8, [*nf4, *fp8, weight(3, 65)]):
        joined = dequantize_side_by_side(group, torch.bfloat16)
        assert torch.equal(joined, torch.cat([dequantize(w, torch.bfloat16) for w in group]))


def test_kept_copies_are_made_once_and_given_up(tiny):
    model = load(tiny("llama3"), bits=4)
    part = model.model.layers[0].self_attn
    group = [part.q_proj.weight, part.k_proj.weight, part.v_proj.weight]
    assert dense_side_by_side(group, torch.bfloat16) is not dense_side_by_side(group, torch.bfloat16)
    model.keep_dense = True
    copies = dense_side_by_side(group, torch.bfloat16)
    assert dense_side_by_side(group, torch.bfloat16) is copies
    assert torch.equal(copies, dequantize_side_by_side(group, torch.bfloat16))
    said = report(model).to_dict()["storage"]["kept for the run"]
    assert said == f"{copies.nbytes / 2**20:,.1f} MiB, 1 dequantised"
    assert copy.deepcopy(model).model.layers[0].self_attn.q_proj.weight.dense is None
    assert "dense" not in str(model.state_dict().keys())
    wide = dense_side_by_side(group, torch.float32)
    assert wide.dtype == torch.float32
    other = NF4Store.from_dense(weight(*group[1].shape))
    group[1].load_state_dict(other.state_dict())
    assert torch.equal(dense_side_by_side(group, torch.float32), dequantize_side_by_side(group, torch.float32))
    assert not torch.equal(dense_side_by_side(group, torch.float32), wide)
    model.to(torch.bfloat16)
    assert group[0].dense is None
    dense_side_by_side(group, torch.bfloat16)
    model.keep_dense = False
    assert group[0].dense is None
    assert dense_side_by_side(group, torch.bfloat16) is not dense_side_by_side(group, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_block_scales_of_every_dtype(dtype):
    """200 × 300 in blocks of 128 × 128, scales in fp32, bf16 or as powers of two, whose byte b means 2^(b − 127)."""
    codes, raw = (20 * weight(200, 300)).to(torch.float8_e4m3fn), torch.tensor([[0.5, 2.0, 1.0], [0.25, 8.0, 2**-20]])
    scale = raw.to(dtype)
    if dtype == torch.float8_e8m0fnu:
        assert scale.view(torch.uint8).tolist() == [[126, 128, 127], [125, 130, 107]]
    store = FP8Store(codes, scale, (128, 128))
    wide = raw.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(store.dequantize(torch.float32), codes.float() * wide)
    linear = Linear(300, 200)
    del linear.weight
    linear.weight = store
    x = weight(5, 300).requires_grad_()
    y = linear(x)
    y.sum().backward()
    torch.testing.assert_close(y, x @ store.dequantize(torch.float32).T)
    torch.testing.assert_close(x.grad, store.dequantize(torch.float32).sum(0).expand(5, 300))


def test_made_from_what_bitsandbytes_holds():
    functional = pytest.importorskip("bitsandbytes.functional")
    w = weight(64, 96)
    for storage in (torch.uint8, torch.bfloat16):
        codes, state = functional.quantize_4bit(w, compress_statistics=True, quant_type="nf4", quant_storage=storage)
        held = state.as_dict()
        store = NF4Store(
            codes,
            held["absmax"],
            held["nested_absmax"],
            held["nested_quant_map"],
            torch.tensor(held["nested_offset"]),
            shape=held["shape"],
            block=held["blocksize"],
        )
        ours = NF4Store.from_dense(w)
        torch.testing.assert_close(store.dequantize(torch.float32), ours.dequantize(torch.float32), rtol=0.02, atol=0)


def test_parts_that_do_not_fit_are_refused_together():
    part = nf4_quantize(weight())
    codes = "codes has 1073 elements of torch.uint8 instead of 1056 of torch.uint8"
    with pytest.raises(ValueError, match=rf"NF4 weight \[33, 64\] in blocks of 64: {codes}; absmax has 34 elements"):
        NF4Store(*part, shape=(33, 64))
    for name in ("nested_absmax", "nested_map", "offset"):
        with pytest.raises(ValueError, match=f"{name} is missing"):
            NF4Store(*part._replace(**{name: None}), shape=(33, 65))
    with pytest.raises(ValueError, match="absmax has 34 elements of torch.uint8 instead of 34 of torch.float32"):
        NF4Store(part.codes, part.absmax, shape=(33, 65))
    with pytest.raises(ValueError, match="block size is 48"):
        NF4Store(*part, shape=(33, 65), block=48)
    codes = weight(200, 300).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"blocks of 128 × 128: scales are \[1, 2\] instead of \[2, 3\]"):
        FP8Store(codes, weight(1, 2), (128, 128))
    with pytest.raises(ValueError, match=r"a scale a row: scales are \[300\] instead of \[200, 1\]"):
        FP8Store(codes, torch.ones(300))
    with pytest.raises(ValueError, match="codes are torch.uint8"):
        FP8Store(codes.view(torch.uint8), torch.ones(200))


@pytest.mark.parametrize("kind", KINDS.values())
def test_nan_and_infinity_have_no_code(kind):
    for bad in (float("nan"), float("inf")):
        w = weight()
        w[20, 11] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            kind.from_dense(w)


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_adapter_gradients_are_those_of_the_dense_weights(tiny, name, width):
    model = load(tiny(name), bits=width)
    twin = dense_twin(model, tiny(name))
    assert len(dict(stores(model))) == 7 * model.config.num_hidden_layers
    assert all(isinstance(store, KINDS[width]) for _, store in stores(model))
    ids = ids_for(model)
    torch.testing.assert_close(model(ids), twin(ids), rtol=0, atol=1e-4)
    grads = []
    for each in (model, twin):
        add_lora(each, r=4, seed=0, dropout=0.1)
        for i, (_, linear) in enumerate(linears(each)):
            linear.factors("default")[1].data.normal_(generator=torch.Generator().manual_seed(i)).mul_(0.05)
        each(ids).float().log_softmax(-1)[..., 7].sum().backward()
        grads.append([p.grad for p in lora_parameters(each)])
        assert all(p.grad is None for n, p in each.named_parameters() if "lora_" not in n)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("width", KINDS)
def test_gradients_through_recompute(tiny, width):
    model = load(tiny("qwen3"), bits=width)
    add_lora(model, r=4, seed=0)
    for _, linear in linears(model):
        linear.factors("default")[1].data.normal_(std=0.05)
    x = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    block, tables = model.model.layers[0], model.rotary(torch.arange(12).unsqueeze(0))
    leaves = [x, *(p for p in block.parameters() if p.requires_grad)]
    plain = torch.autograd.grad(block(x, tables, None, None).square().sum(), leaves)
    again = checkpoint(block, x, tables, None, None, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(again.square().sum(), leaves), strict=True):
        assert torch.equal(a, b)


def test_autograd_keeps_no_dequantised_weight():
    linear = Linear(64, 96)
    del linear.weight
    linear.weight = NF4Store.from_dense(weight(96, 64))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = linear(weight(5, 64).requires_grad_())
    assert y.requires_grad and kept == []


def test_biases_of_qwen2_stay(tiny, tmp_path):
    """q, k and v have biases of any size, o has none, and config.json does not say so (ANEForge#253)."""
    folder = tmp_path / "biased"
    shutil.copytree(tiny("qwen2"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".bias")]:
        tensors[name] = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(len(name))).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for width in KINDS:
        model = load(folder, bits=width)
        for block in model.model.layers:
            assert block.self_attn.o_proj.bias is None
        for name, value in tensors.items():
            if name.endswith(".bias"):
                assert torch.equal(model.get_parameter(name), value.float())
        ids = ids_for(model)
        torch.testing.assert_close(model(ids), dense_twin(model, folder)(ids), rtol=0, atol=1e-4)


def test_gemma_beyond_the_range_of_float16(tiny, tmp_path):
    """Activations past 65,504 in bf16 over NF4: a loss within 1 % of fp32 (transformers#39972, unsloth-zoo#600)."""
    folder = tmp_path / "loud"
    shutil.copytree(tiny("gemma3-text"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("down_proj.weight")]:
        tensors[name] *= 40_000
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = add_lora(load(folder, bits=4, dtype=dtype), r=4, seed=0)
        ids, sizes = ids_for(model), []
        for block in model.model.layers:
            block.mlp.register_forward_hook(lambda module, args, out, sizes=sizes: sizes.append(out.abs().max()))
        losses[dtype] = loss(model, {"ids": ids, "labels": ids})
        losses[dtype].backward()
        assert max(sizes) > 65_504 and all(p.grad.isfinite().all() for p in lora_parameters(model))
    torch.testing.assert_close(losses[torch.bfloat16], losses[torch.float32], rtol=0.01, atol=0)


@pytest.mark.parametrize("width", KINDS)
def test_inputs_of_any_rank(width):
    """One vector, no rows at all, several batches: as torch's own linear takes them, with gradients or without."""
    linear = Linear(64, 48, bias=False)
    dense = weight(48, 64)
    del linear.weight
    linear.weight = KINDS[width].from_dense(dense)
    for shape in ((64,), (0, 64), (2, 3, 64)):
        x = weight(1, 384).flatten()[: torch.Size(shape).numel()].view(shape)
        expected = torch.nn.functional.linear(x, linear.weight.dequantize(torch.float32))
        torch.testing.assert_close(linear(x), expected)
        with torch.no_grad():
            torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("width", KINDS)
def test_products_run_in_the_dtype_of_the_input_or_of_autocast(width):
    store = KINDS[width].from_dense(weight(96, 64))
    linear, dense = Linear(64, 96, bias=True), Linear(64, 96, bias=True)
    dense.load_state_dict({"weight": store.dequantize(torch.float32), "bias": weight(1, 96)[0]})
    del linear.weight
    linear.weight, linear.bias = store, dense.bias
    x = weight(5, 64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = linear(x.to(dtype))
        assert y.dtype == dtype
        assert torch.equal(y, copy.deepcopy(dense).to(dtype)(x.to(dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        a = x.clone().requires_grad_()
        y = linear(a)
        b = x.clone().requires_grad_()
        assert torch.equal(y, dense(b))
    y.sum().backward()
    dense(b).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=0.02, atol=0.02)


# --- loading -------------------------------------------------------------------------------------------------------


def test_what_is_quantised_and_what_the_report_says(tiny, capsys):
    dense = load(tiny("llama3"))
    model = load(tiny("llama3"), bits=4, skip=["down_proj", "layers.1.mlp.up_proj"])
    assert "4-bit weights work on a CPU, but slowly" in capsys.readouterr().err
    left = {path for path, m in model.named_modules() if isinstance(m, Linear) and not isinstance(m.weight, Store)}
    layers = range(model.config.num_hidden_layers)
    assert left == {"lm_head", "model.layers.1.mlp.up_proj", *(f"model.layers.{i}.mlp.down_proj" for i in layers)}
    assert all(p.dtype == torch.float32 for n, p in model.named_parameters() if ".weight." not in n)
    facts = report(model).to_dict()
    assert facts["model"]["parameters"] == report(dense).to_dict()["model"]["parameters"]
    size = sum(p.nbytes for _, store in stores(model) for p in store.parameters()) / 2**20
    origin = " (stored: dense bfloat16; asked: bits=4, float32)"
    assert facts["storage"]["projections"] == f"{size:,.1f} MiB NF4 in blocks of 64, double quantisation{origin}"
    assert facts["storage"]["projections left dense"].endswith(
        f"MiB dense float32: model.layers.{{0-3}}.mlp.down_proj, model.layers.1.mlp.up_proj{origin}"
    )
    assert "FP8 e4m3, a scale a row" in str(report(load(tiny("llama3"), bits=8)))
    assert "left dense" not in str(report(dense)) + str(report(load(tiny("llama3"), bits=8)))


def test_the_stored_values_are_quantised_whatever_the_dtype(tiny):
    for options in ({"dtype": torch.float16}, {"dtype": torch.bfloat16}, {"mmap": False}):
        one, other = load(tiny("qwen3"), bits=4), load(tiny("qwen3"), bits=4, **options)
        assert other.dtype == options.get("dtype", torch.float32)
        for (_, a), (_, b) in zip(stores(one), stores(other), strict=True):
            assert_same(a, b)
    stored = load_file(tiny("qwen3") / "model.safetensors")
    for path, store in stores(one):
        assert_same(store, NF4Store.from_dense(stored[path]))


def test_a_quantised_model_is_cast_around_its_stores(tiny):
    model = load(tiny("llama3"), bits=4)
    before = copy.deepcopy(model)
    model.to(torch.bfloat16)
    for (_, a), (_, b) in zip(stores(before), stores(model), strict=True):
        assert_same(a, b)
    assert model.dtype == torch.bfloat16 and model(ids_for(model)).dtype == torch.bfloat16
    twin = pickle.loads(pickle.dumps(before))
    twin.load_state_dict(before.state_dict())
    assert torch.equal(twin(ids_for(model)), before(ids_for(model)))


def test_adapters_on_a_quantised_model(tiny, tmp_path):
    model = load(tiny("llama3"), bits=4)
    assert find_targets(model, r".*\.q_proj.*") == [(p, m) for p, m in model.named_modules() if p.endswith("q_proj")]
    add_lora(model, r=4, seed=0)
    linear = next(linear for _, linear in linears(model))
    linear.factors("default")[1].data.fill_(0.02)
    ids = ids_for(model)
    with pytest.raises(ValueError, match="merge: 28 projections are quantised.*save_merged, or load with bits=16"):
        merge(model)
    assert linear.merged is None
    save_adapter(model, tmp_path / "adapter")
    other = load(tiny("llama3"), bits=4)
    load_adapter(other, tmp_path / "adapter")
    assert torch.equal(model.eval()(ids), other.eval()(ids))
    assert "28 projections" in str(report(model))


def test_adapters_merge_where_their_projections_are_dense(tiny):
    model = load(tiny("llama3"), bits=8, skip=["q_proj"])
    add_lora(model, r=4, targets=["q_proj"], seed=0)
    merge(model)
    assert all(linear.merged is not None for _, linear in linears(model))


def test_weights_that_are_not_finite_are_named_together(tiny, tmp_path):
    shutil.copytree(tiny("llama3"), tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    names = ["model.layers.0.mlp.down_proj.weight", "model.layers.2.self_attn.k_proj.weight"]
    tensors[names[0]][3, 5], tensors[names[1]][0, 0] = float("nan"), float("inf")
    save_file(tensors, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    for width in (None, *KINDS):
        with pytest.raises(ValueError, match="cannot be loaded") as caught:
            load(tmp_path / "broken", bits=width)
        assert all(f"{name}: the weight holds NaN or infinity" in str(caught.value) for name in names)


def test_arguments_that_mean_nothing(tiny):
    with pytest.raises(ValueError, match="bits=3 is not supported"):
        load(tiny("llama3"), bits=3)
    with pytest.raises(ValueError, match="skip=.*bits=8 or 4"):
        load(tiny("llama3"), skip=["down_proj"])
    with pytest.raises(ValueError, match="skip names nonsense, wn_proj"):
        load(tiny("llama3"), bits=4, skip=["down_proj", "nonsense", "wn_proj"])


def test_a_quantised_checkpoint_is_still_refused(tiny, tmp_path):
    shutil.copytree(tiny("llama3"), tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    for width in (None, 8):
        with pytest.raises(ValueError, match="quantised checkpoint"):
            load(tmp_path / "fp8", bits=width)


@pytest.mark.gpu
@pytest.mark.parametrize("width", KINDS)
def test_device_memory_holds_one_dense_tensor_at_a_time(device, tmp_path, width):
    config = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8192, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        parameters = dict(build_model(config).named_parameters())
    values = {name: torch.randn(p.shape, dtype=torch.bfloat16) for name, p in parameters.items()}
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    load(tmp_path, bits=width, device=device)  # kernels are compiled
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(tmp_path, bits=width, device=device)
    final = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= final + max(value.nbytes for value in values.values()) * 1.25  # and what its scales take meanwhile
    names = dict(stores(model))
    quantised = sum(value.numel() for name, value in values.items() if name in names)
    dense = sum(value.nbytes for name, value in values.items() if name not in names)
    assert final <= (dense + quantised * KINDS[width].bits / 8) * 1.01 + 2**20
