"""Checkpoints in four and eight bits: what is stored comes out bit for bit; what is not whole is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import packed
import pytest
import tiny as checkpoints
import torch
import transformers
from safetensors.torch import load_file, save_file

import lorarun
from lorarun.checkpoint import open_checkpoint
from lorarun.headers import INDEX
from lorarun.quant.store import FP8Store, NF4Store, stores

FILE = packed.FILE
Q = "model.layers.0.self_attn.q_proj.weight"


def copied(folder: Path, out: Path) -> Path:
    return Path(shutil.copytree(folder, out / folder.name))


def changed(folder: Path, out: Path, change) -> Path:
    """A copy whose tensors went through `change(tensors)`."""
    made = copied(folder, out)
    tensors = load_file(made / FILE)
    change(tensors)
    save_file(tensors, made / FILE, {"format": "pt"})
    return made


def logits(model, folder: Path):
    return model(load_file(folder / "reference.safetensors")["input_ids"])


def assert_bits_kept(model, folder: Path, count: int) -> None:
    """Each store holds the codes of the file, and stands for what the format's own library or formula says."""
    held, expected, tensors = dict(stores(model)), packed.dequantised(folder), load_file(folder / FILE)
    assert len(held) == count
    for name, store in held.items():
        stored = next(each for each in tensors if each.endswith(name))
        codes = tensors[stored].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(store.codes.view(-1), codes), name
        assert torch.equal(store.dequantize(torch.float32), expected[stored]), name


@pytest.mark.parametrize("kind", ["bnb4", "fp8"])
@pytest.mark.parametrize("name", checkpoints.RECIPES)
def test_logits_of_every_family(tiny, name, kind):
    folder = tiny(f"{name}-{kind}")
    model = lorarun.load(folder, device="cpu")
    assert_bits_kept(model, folder, 7 * model.config.num_hidden_layers)
    expected = load_file(folder / "reference.safetensors")["logits"]
    torch.testing.assert_close(logits(model, folder), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"block": 32},
        {"block": 256},
        {"nested": False},
        {"nested": False, "block": 128},
        {"storage": torch.bfloat16},
        {"skip": ("layers.1.mlp", "o_proj")},
    ],
    ids=str,
)
def test_nf4_as_bitsandbytes_writes_it(tiny, tmp_path, options, mmap):
    folder = copied(tiny("qwen2"), tmp_path)
    packed.quantise_bnb4(folder, **options)
    model = lorarun.load(folder, device="cpu", mmap=mmap)
    assert_bits_kept(model, folder, 28 - (3 + 4 if "skip" in options else 0))
    assert {store.block for _, store in stores(model)} == {options.get("block", 64)}
    if "skip" in options:
        left = lorarun.report(model).to_dict()["storage"]["projections left dense"]
        assert "model.layers.{0-3}.self_attn.o_proj" in left and "layers.1.mlp.gate_proj" in left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (48, 40), None], ids=str)
def test_fp8_scales_of_every_kind(tiny, tmp_path, dtype, block):
    """The widths 64 and 160 leave partial blocks at the edges; None is one scale a weight."""
    folder = copied(tiny("qwen3"), tmp_path)
    packed.quantise_fp8(folder, block, dtype, skip=("layers.0.mlp",))
    model = lorarun.load(folder, device="cpu", mmap=block != (64, 64))
    assert_bits_kept(model, folder, 28 - 3)
    lorarun.add_lora(model, r=4, seed=0)
    model(torch.arange(3, 40).unsqueeze(0)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in lorarun.lora_parameters(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_compressed_tensors(tiny, tmp_path, capsys, strategy, dtype):
    folder = copied(tiny("llama3"), tmp_path)
    packed.quantise_compressed(folder, strategy, dtype)
    assert_bits_kept(lorarun.load(folder, device="cpu", mmap=dtype == torch.float32), folder, 28)
    assert "activations are not quantised" in capsys.readouterr().err


def test_rows_of_fbgemm_and_scales_of_activations(tiny, tmp_path, capsys):
    folder = copied(tiny("llama3"), tmp_path)
    packed.quantise_compressed(folder, "channel", torch.float32)
    packed.edit(folder, quantization_config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})
    model = lorarun.load(folder, device="cpu")
    assert len(dict(stores(model))) == 28 and "activations" in capsys.readouterr().err


def test_companions_in_other_shards(tiny, tmp_path):
    folder = copied(tiny("llama3-bnb4"), tmp_path)
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    parts = [{}, {}]
    for i, name in enumerate(sorted(tensors)):
        parts[i % 2][name] = tensors[name]
    weight_map = {}
    for i, part in enumerate(parts):
        save_file(part, folder / f"model-{i}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    assert len({file for name, file in weight_map.items() if name.startswith(Q)}) == 2
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    expected = load_file(folder / "reference.safetensors")["logits"]
    for mmap in (True, False):
        model = lorarun.load(folder, device="cpu", mmap=mmap)
        torch.testing.assert_close(logits(model, folder), expected, rtol=0, atol=1e-4)


def test_what_transformers_itself_quantised_and_saved(tmp_path):
    """Written and run by transformers and bitsandbytes; widths are multiples of the block, see packed.dequantised."""
    pytest.importorskip("bitsandbytes")
    config = transformers.LlamaConfig(**checkpoints.BASE | {"intermediate_size": 128, "num_hidden_layers": 2})
    model = transformers.LlamaForCausalLM(config)
    checkpoints.randomize(model, 0)
    model.save_pretrained(tmp_path / "plain")
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head", "model.layers.1.mlp.down_proj"],
    )
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
    )
    theirs.save_pretrained(tmp_path / "saved")
    ids = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        expected = theirs.train()(ids).logits  # in eval mode bitsandbytes computes in bfloat16 where a CPU has it
    model = lorarun.load(tmp_path / "saved", device="cpu")
    assert len(dict(stores(model))) == 13
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-4)


def test_fp8_as_transformers_reads_it(tiny, tmp_path):
    """On a CPU transformers dequantises such a checkpoint itself.  It takes the block to be the size over the number of
    scales, hence blocks without partial ones; it may round to bfloat16, hence the tolerance."""
    folder = copied(tiny("qwen3"), tmp_path)
    packed.quantise_fp8(folder, (32, 32))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map={"": "cpu"})
    ours = lorarun.load(folder, device="cpu")
    for name, store in stores(ours):
        rounding = {"rtol": 2**-8, "atol": 1e-6}
        torch.testing.assert_close(store.dequantize(torch.float32), theirs.get_parameter(name).float(), **rounding)


# --- requested against stored --------------------------------------------------------------------------------------


def test_as_stored_or_as_asked_and_always_said(tiny, capsys):
    four, eight = tiny("llama3-bnb4"), tiny("llama3-fp8")
    cases = [
        (four, None, NF4Store, 0, "stored: NF4 in blocks of 64, double quantisation; asked: as stored"),
        (four, 4, NF4Store, 0, "stored: NF4 in blocks of 64, double quantisation; asked: bits=4"),
        (four, 16, None, 0, "dense float32 (stored: NF4 in blocks of 64, double quantisation; asked: bits=16"),
        (eight, None, FP8Store, 0, "stored: FP8 e4m3, blocks of 128 × 128; asked: as stored"),
        (eight, 8, FP8Store, 0, "FP8 e4m3, blocks of 128 × 128 (stored: FP8 e4m3, blocks of 128 × 128; asked: bits=8"),
        (eight, 16, None, 0, "dense float32 (stored: FP8 e4m3, blocks of 128 × 128; asked: bits=16"),
        (eight, 4, NF4Store, 1, "NF4 in blocks of 64, double quantisation (stored: FP8 e4m3, blocks of 128 × 128"),
    ]
    for folder, bits, store, lossy, said in cases:
        capsys.readouterr()
        model = lorarun.load(folder, bits=bits, device="cpu")
        error = capsys.readouterr().err
        held = [each for _, each in stores(model)]
        assert {type(each) for each in held} == ({store} if store else set())
        assert said in lorarun.report(model).to_dict()["storage"]["projections"]
        kept = held and store.format[2:] in said.partition("stored: ")[2][:4]
        assert ("load: stored as" in error) == (not kept) and ("rounds them again" in error) == bool(lossy)
        expected = load_file(folder / "reference.safetensors")["logits"]
        if not lossy:
            torch.testing.assert_close(logits(model, folder), expected, rtol=0, atol=1e-4)
    path, again = next(iter(stores(model)))
    exact = open_checkpoint(eight).dense(path)
    assert torch.equal(again.dequantize(torch.float32), NF4Store.from_dense(exact).dequantize(torch.float32))


@pytest.mark.parametrize("name", ["qwen3-bnb4", "gemma2-fp8"])
def test_adapters_learn_on_it_as_on_its_dense_weights(tiny, name):
    grads = []
    for bits in (None, 16):
        model = lorarun.add_lora(lorarun.load(tiny(name), bits=bits, device="cpu"), r=4, seed=0)
        for i, parameter in enumerate(lorarun.lora_parameters(model)):
            parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(i))
        logits(model, tiny(name)).log_softmax(-1)[..., 7].sum().backward()
        grads.append([parameter.grad for parameter in lorarun.lora_parameters(model)])
    for ours, dense in zip(*grads, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-5 * dense.abs().max().item())


def test_bits_16_rounds_once(tiny):
    folder = tiny("qwen3-bnb4")
    model = lorarun.load(folder, bits=16, dtype=torch.bfloat16, device="cpu")
    for name, weight in packed.dequantised(folder).items():
        assert torch.equal(model.get_parameter(name), weight.bfloat16())


def test_what_contradicts_itself_is_refused(tiny):
    with pytest.raises(ValueError, match="bits=8 on a 4-bit checkpoint"):
        lorarun.load(tiny("llama3-bnb4"), bits=8)
    with pytest.raises(ValueError, match="skip"):
        lorarun.load(tiny("llama3-bnb4"), bits=16, skip=["down_proj"])
    with pytest.raises(ValueError, match="revision"):
        lorarun.load(tiny("llama3-bnb4"), revision="main")


def test_skip_dequantises_and_what_was_left_dense_stays(tiny, tmp_path, capsys):
    folder = copied(tiny("qwen2"), tmp_path)
    packed.quantise_bnb4(folder, skip=("layers.1.mlp",))
    model = lorarun.load(folder, bits=4, skip=["o_proj"], device="cpu")
    assert len(dict(stores(model))) == 28 - 3 - 4
    said = capsys.readouterr().err
    assert "made dense: model.layers.{0-3}.self_attn.o_proj.weight" in said
    assert "left in 16 bits, and so they stay: model.layers.1.mlp.gate_proj.weight" in said
    expected = packed.dequantised(folder)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.o_proj.weight"):
        assert torch.equal(model.get_parameter(name), expected[name])


def test_a_quantised_head_runs_dense_and_says_so(tiny, tmp_path, capsys, monkeypatch):
    folder = copied(tiny("llama3"), tmp_path)
    monkeypatch.setattr(packed, "is_projection", lambda name: name.endswith(("_proj.weight", "lm_head.weight")))
    packed.quantise_bnb4(folder)
    model = lorarun.load(folder, device="cpu")
    assert torch.equal(model.lm_head.weight, packed.dequantised(folder)["lm_head.weight"])
    assert "made dense: lm_head.weight" in capsys.readouterr().err


def test_blocks_of_64_hold_with_an_adapter_on_off_and_merged(tiny, tmp_path):
    folder = copied(tiny("llama3"), tmp_path)
    packed.quantise_fp8(folder, (64, 64))
    base = logits(lorarun.load(folder, device="cpu"), folder)
    for bits in (None, 16):
        model = lorarun.add_lora(lorarun.load(folder, bits=bits, device="cpu"), r=4, seed=0).eval()
        states = [logits(model, folder)]
        with lorarun.adapters_disabled(model):
            states.append(logits(model, folder))
        if bits == 16:
            lorarun.merge(model)
            states.append(logits(model, folder))
            lorarun.unmerge(model)
            states.append(logits(model, folder))
        for state in states:
            torch.testing.assert_close(state, base, rtol=0, atol=1e-5)


# --- what is not whole, or not supported ---------------------------------------------------------------------------

STATE = f"{Q}.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    "part", ["", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4"]
)
def test_every_companion_that_is_lost_is_named(tiny, tmp_path, part):
    folder = changed(tiny("llama3-bnb4"), tmp_path, lambda tensors: tensors.pop(Q + part))
    key = part.removeprefix(".") or "codes"
    with pytest.raises(ValueError, match=rf"{key} is missing: {Q}"):
        lorarun.load(folder)


def test_all_that_is_lost_is_one_error(tiny, tmp_path):
    def lose(tensors):
        for i in range(4):
            del tensors[Q.replace("0", str(i)) + ".absmax"]
        for name in [name for name in tensors if name.startswith("model.layers.2.mlp.up_proj.weight.")]:
            del tensors[name]

    with pytest.raises(ValueError, match=r"absmax is missing: model\.layers\.\{0-3\}\.self_attn") as caught:
        lorarun.load(changed(tiny("llama3-bnb4"), tmp_path, lose))
    assert "of uint8: model.layers.2.mlp.up_proj.weight" in str(caught.value)


def state_with(**fields):
    def change(tensors):
        state = json.loads(bytes(tensors[STATE].tolist()))
        text = json.dumps({**state, **fields}).encode()
        tensors[STATE] = torch.tensor(list(text), dtype=torch.uint8)

    return change


def put(name, value):
    return lambda tensors: tensors.update({name: value(tensors) if callable(value) else value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (state_with(quant_type="fp4"), "quant_type is 'fp4' instead of 'nf4'"),
        (state_with(blocksize=48), "blocksize is 48"),
        (state_with(blocksize=True), "blocksize is True"),
        (state_with(blocksize=128), "absmax has 64 elements of uint8 instead of 32"),
        (state_with(shape=[64, 63]), "codes have 2048 bytes instead of 2016"),
        (state_with(shape=[32, 128]), r"shape \[32, 128\] instead of \[64, 64\]"),
        (state_with(shape=[10**30, 2]), "shape is"),
        (state_with(shape=None), "shape is None"),
        (state_with(nested_blocksize=128), "nested_blocksize is 128 instead of 256"),
        (state_with(nested_offset=float("nan")), "nested_offset is nan"),
        (state_with(nested_offset=None), "nested_offset is None"),
        (state_with(nested_offset=10**400), "nested_offset is 1000"),
        (state_with(nested_dtype="bfloat16"), "nested_dtype"),
        (put(STATE, torch.tensor(list(b'{"quant_type": "nf4"'), dtype=torch.uint8)), "is not a JSON object"),
        (put(STATE, torch.tensor(list(b"[" * 9000), dtype=torch.uint8)), "is not a JSON object"),
        (put(STATE, torch.zeros(1 << 17, dtype=torch.uint8)), "is not a JSON object"),
        (put(f"{Q}.quant_map", torch.zeros(16)), "quant_map does not hold the values of NF4"),
        (put(f"{Q}.quant_map", torch.zeros(15)), "quant_map has 15 elements of float32 instead of 16"),
        (put(f"{Q}.nested_quant_map", torch.linspace(-1, 1, 256)), "dynamic map"),
        (put(f"{Q}.absmax", torch.ones(64)), "absmax has 64 elements of float32 instead of 64 of uint8"),
        (put(f"{Q}.nested_absmax", torch.ones(2)), "nested_absmax has 2 elements"),
        (put(f"{Q}.nested_absmax", torch.tensor([float("nan")])), "q_proj.weight: the scales hold NaN"),
        (put(Q, lambda tensors: tensors[Q][:-1].clone()), "codes have 2047 bytes instead of 2048"),
        (put(f"{Q}.quant_state.bitsandbytes__fp4", lambda t: t.pop(STATE)), "bitsandbytes__fp4 instead of"),
    ],
)
def test_a_quant_state_that_does_not_fit_is_refused(tiny, tmp_path, change, says):
    with pytest.raises(ValueError, match=says) as caught:
        lorarun.load(changed(tiny("llama3-bnb4"), tmp_path, change))
    assert Q in str(caught.value)


SCALE = f"{Q}_scale_inv"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop(SCALE), "weight_scale_inv and weight_scale are missing"),
        (lambda tensors: tensors.pop(Q), "the weight is not there"),
        (put(Q, torch.ones(64, 64).bfloat16()), "the weight is bfloat16 instead of float8_e4m3fn"),
        (put(Q, torch.ones(64, 64).to(torch.float8_e5m2)), "the weight is float8_e5m2"),
        (put(f"{Q}_scale", torch.ones(1, 1)), "two scales"),
        (put(SCALE, torch.ones(2, 1)), r"shape \[2, 1\] instead of \[1, 1\] for blocks of 128 × 128"),
        (put(SCALE, torch.ones(64, 1)), r"shape \[64, 1\] instead of \[1, 1\]"),
        (put(SCALE, torch.ones(1, 1).double()), "the scale is float64"),
        (put(SCALE, torch.full((1, 1), float("inf"))), "the scales hold NaN or infinity"),
        (put(Q, torch.full((64, 64), float("nan")).to(torch.float8_e4m3fn)), "the weight holds NaN"),
        (put(Q, torch.ones(64, 32).to(torch.float8_e4m3fn)), r"shape \[64, 32\] instead of \[64, 64\]"),
        (put("model.norm.weight", torch.ones(64, dtype=torch.uint8)), "of uint8: model.norm.weight"),
    ],
)
def test_fp8_that_does_not_fit_is_refused(tiny, tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        lorarun.load(changed(tiny("llama3-fp8"), tmp_path, change))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"\(gptq\)"),
        ({"quant_method": "awq"}, r"\(awq\)"),
        ({"quant_method": "mxfp4"}, r"\(mxfp4\)"),
        ({"quant_method": "modelopt"}, r"\(modelopt\)"),
        ({"quant_method": ["fp8"]}, r"\['fp8'\]"),
        ("fp8", "unnamed"),
        ({"bits": 4}, "unnamed"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8"),
        ({"load_in_8bit": True}, "LLM.int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}, "contradict"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "'fp4'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {}}},
            "pack-quantiz",
        ),
    ],
)
def test_other_formats_are_refused_before_weights_are_fetched(hub, tiny, config, says):
    raw = json.loads((tiny("llama3") / "config.json").read_text()) | {"quantization_config": config}
    hub.add("owner/model", {"config.json": json.dumps(raw).encode(), FILE: b"x" * 5000})
    with pytest.raises(ValueError, match=says):
        lorarun.load("owner/model")
    assert not any("safetensors" in name for name in hub.fetched())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weights": {"num_bits": 4, "type": "float", "strategy": "channel"}}, "num_bits 8"),
        ({"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}, "type 'float'"),
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "group"}}, "tensor, channel or block"),
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}, "tensor, channel or block"),
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": False}}, "symmetric"),
        ({"weights": None}, "weights None"),
        ({"format": "int-quantized"}, "int-quantized"),
    ],
)
def test_compressed_tensors_of_other_kinds_are_refused(tiny, tmp_path, change, says):
    folder = copied(tiny("llama3"), tmp_path)
    packed.quantise_compressed(folder, "channel")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"] |= change
    packed.edit(folder, quantization_config=config)
    with pytest.raises(ValueError, match=says):
        lorarun.load(folder)
    for name in ("sparsity_config", "transform_config"):
        config["config_groups"]["group_0"] = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        packed.edit(folder, quantization_config=config | {name: {"format": "sparse-24-bitmask"}})
        with pytest.raises(ValueError, match=name):
            lorarun.load(folder)


def test_config_and_tensors_must_agree(tiny, tmp_path):
    folder = copied(tiny("llama3"), tmp_path)
    packed.edit(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ValueError, match="no tensor is quantised"):
        lorarun.load(folder)
    for name in ("llama3-bnb4", "llama3-fp8"):
        folder = copied(tiny(name), tmp_path)
        packed.edit(folder, quantization_config=None)
        with pytest.raises(ValueError, match="no quantization_config"):
            lorarun.load(folder)


def test_any_damage_to_a_quant_state_is_a_value_error(tiny, tmp_path):
    folder = copied(tiny("llama3-bnb4"), tmp_path)
    entry = open_checkpoint(folder).entries[STATE]
    generator = torch.Generator().manual_seed(0)
    content = bytearray((folder / FILE).read_bytes())
    refused = 0
    for _ in range(150):
        where = entry.start + int(torch.randint(entry.nbytes, (), generator=generator))
        before, content[where] = content[where], int(torch.randint(256, (), generator=generator))
        (folder / FILE).write_bytes(content)
        content[where] = before
        try:
            _ = open_checkpoint(folder).packed
        except ValueError as error:
            assert Q in str(error)
            refused += 1
    assert refused > 75  # a digit of the offset may be another digit
