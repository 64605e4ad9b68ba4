"""Merged checkpoints in four and eight bits, and merged ones out of quantised and GGUF sources.

What is written is read by transformers, with bitsandbytes for four bits and compressed-tensors for eight, and by
lorarun, and both must answer alike.  The recipes here have widths that are multiples of 64, since bitsandbytes' CPU
code is wrong for others (its CUDA code is not), and transformers dequantises FP8 with partial blocks wrongly.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed
import pytest
import tiny as checkpoints
import torch
import toy
import transformers
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme
from merging import adapted, leftovers, logits, same_bits, tensors_of
from peft_side import FAMILIES, PROJECTIONS, fill_b, off, reference
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import lorarun
from lorarun import export, export_weights
from lorarun.checkpoint import open_checkpoint
from lorarun.export import save_merged
from lorarun.headers import INDEX
from lorarun.load import load
from lorarun.lora import linears, lora_parameters
from lorarun.nn import Model
from lorarun.quant.store import FP8Store, stores

pytestmark = pytest.mark.filterwarnings(
    "ignore:_check_is_size|.*`is_gradient_checkpointing`|You passed `quantization_config`"
)
Tiny = Callable[[str], Path]
ALL = [*FAMILIES, "gemma3"]
FP32 = torch.float32


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`even(name)` is a checkpoint of tests/tiny.py with widths that are multiples of 64."""
    out = tmp_path_factory.mktemp("even")

    def folder(name: str) -> Path:
        if not (out / name).is_dir():
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(checkpoints, "RECIPES", {k: widened(r) for k, r in checkpoints.RECIPES.items()})
                checkpoints.make(name, out)
        return out / name

    return folder


def widened(recipe: checkpoints.Recipe) -> checkpoints.Recipe:
    def wide(part: dict[str, Any]) -> dict[str, Any]:
        """A copy: recipes share parts."""
        sizes = {"intermediate_size": 128, "head_dim": 32}
        return part | {key: size for key, size in sizes.items() if key in part and "intermediate_size" in part}

    fields = wide(dict(recipe.fields))
    if "text_config" in fields:
        fields["text_config"] = wide(fields["text_config"])
    return recipe._replace(fields=fields)


def copied(folder: Path, out: Path) -> Path:
    return Path(shutil.copytree(folder, out / folder.name))


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def exactly(folder: Path) -> Any:
    """transformers' model, bitsandbytes' products in the dtype that was asked for and not in bfloat16."""
    model = reference(folder)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def complete(folder: Path, dtype: torch.dtype = FP32, **how: Any) -> Any:
    """transformers' model of a folder that has all that it looks for, and nothing else."""
    auto = transformers.AutoModelForCausalLM
    model, said = auto.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True, **how
    )
    assert not any(said.values()), said
    return model.eval()


def dequantising() -> Any:
    return transformers.CompressedTensorsConfig(dequantize=True)


def projections(model: Any) -> set[str]:
    """Those that are quantised, by transformers' names."""
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    return {n for n in names if n.rpartition(".")[2] in PROJECTIONS and ".layers." in n and "vision" not in n}


def on_a_gpu(folder: Path) -> Any:
    """The modules into which transformers would read FP8 blocks on a GPU, without values."""
    config = transformers.AutoConfig.from_pretrained(folder)
    fields = {k: v for k, v in config.quantization_config.items() if k != "quant_method"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        quantizer = FineGrainedFP8HfQuantizer(transformers.FineGrainedFP8Config(**fields), pre_quantized=True)
        quantizer.preprocess_model(model)
    return model


def kinds(model: Any) -> dict[str, str]:
    """The class of every module of transformers' that is a Linear of some kind."""
    return {n: type(m).__name__ for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


def path_of(stored: str) -> str:
    """What a text weight is called in the model, without ``.weight``."""
    inner = stored.removesuffix(".weight").removeprefix("model.").removeprefix("language_model.")
    return "model." + inner.removeprefix("model.")


def wide(model: Model, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The merged weights in fp32, which tests/test_export.py holds against PEFT's."""
    save_merged(model, tmp_path / "wide", dtype=FP32)
    return tensors_of(tmp_path / "wide")


# --- four bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_four_bits_in_transformers(name: str, even: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    model = adapted(even(name))
    merged = wide(model, tmp_path)
    save_merged(model, tmp_path / "four", dtype=FP32, bits=4)
    four, dequantised = tensors_of(tmp_path / "four"), packed.dequantised(tmp_path / "four")
    assert dequantised.keys() == merged.keys()
    flipped = total = 0
    for key, weight in merged.items():
        if not packed.is_projection(key):
            assert same_bits(four[key], weight), key
            continue
        codes, _ = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        flipped, total = flipped + int((codes != four[key]).sum()), total + codes.numel()
        # A code is the nearest value: half of the widest gap between values, of a block's largest number; and the
        # 256 steps of double quantisation move that number by up to 1/256 of how far scales spread.
        assert ((dequantised[key] - weight).abs() <= 0.16 * weight.abs().max()).all(), key
        assert off(dequantised[key], weight) < 0.12
    assert flipped <= 1e-4 * total  # x · (1 / absmax) beside x / absmax, at the middle between two codes

    theirs = exactly(tmp_path / "four")
    assert {n for n, kind in kinds(theirs).items() if kind == "Linear4bit"} == projections(theirs)
    ours = load(tmp_path / "four", dtype=FP32)
    assert len(dict(stores(ours))) == 7 * model.config.num_hidden_layers
    # fp32 sums in another order, through half a dozen layers
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-4)
    assert off(logits(ours), logits(model.eval())) > 1e-3  # four bits are not sixteen
    assert "how much of the adapter's update is in it" in capsys.readouterr().err


def test_what_was_left_in_sixteen_bits_stays_so_and_is_named(even: Tiny, tmp_path: Path) -> None:
    """A list of skipped layers that is lost, or null, makes a program build another topology on reload."""
    source = copied(even("qwen3"), tmp_path)
    packed.quantise_bnb4(source, skip=("layers.1.mlp", "layers.3.self_attn.o_proj"))
    model = adapted(source, targets=["q_proj", "up_proj", "o_proj"])
    save_merged(model, tmp_path / "four", bits=4)
    dense = [f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")]
    dense += ["model.layers.3.self_attn.o_proj"]
    skip = config_of(tmp_path / "four")["quantization_config"]["llm_int8_skip_modules"]
    assert set(skip) == {*dense, "lm_head", "model.embed_tokens"}
    found = kinds(exactly(tmp_path / "four"))
    assert {n for n, kind in found.items() if kind == "Linear"} == {*dense, "lm_head"}
    ours = load(tmp_path / "four", dtype=FP32)
    assert not {f"{path}.weight" for path in dense} & dict(stores(ours)).keys()
    theirs = reference(packed.dense_copy(tmp_path / "four", tmp_path / "dense"))
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-4)
    # and once more, out of what was written
    save_merged(adapted(tmp_path / "four"), tmp_path / "again", bits=4)
    assert config_of(tmp_path / "again")["quantization_config"] == config_of(tmp_path / "four")["quantization_config"]


@pytest.mark.parametrize("skip", [[], None])
def test_an_empty_list_and_none_are_both_written_out(skip: Any, even: Tiny, tmp_path: Path) -> None:
    """Null means a program's default and [] nothing: what is dense here is named either way."""
    source = copied(even("llama3"), tmp_path)
    packed.quantise_bnb4(source)
    config = config_of(source)["quantization_config"] | {"llm_int8_skip_modules": skip}
    packed.edit(source, quantization_config=config)
    save_merged(adapted(source), tmp_path / "four", bits=4)
    written = config_of(tmp_path / "four")["quantization_config"]["llm_int8_skip_modules"]
    assert written == ["lm_head", "model.embed_tokens"]


@pytest.mark.parametrize("options", [{}, {"nested": False, "block": 128}], ids=str)
def test_codes_that_nothing_changed_are_kept(options: dict[str, Any], even: Tiny, tmp_path: Path) -> None:
    source = copied(even("llama3"), tmp_path)
    packed.quantise_bnb4(source, **options)
    for base in ("dequantized", "original"):
        save_merged(adapted(source, targets=["q_proj"]), tmp_path / base, base=base, bits=4)
        before, after = tensors_of(source), tensors_of(tmp_path / base)
        assert before.keys() == after.keys() or options
        for key in before:
            if "q_proj" in key:
                assert key.endswith("quant_map") or not key.endswith("weight") or not same_bits(before[key], after[key])
            elif "quant_state" in key:
                states = [json.loads(bytes(each[key].tolist())) for each in (before, after)]
                assert states[0] == states[1]
            else:
                assert same_bits(before[key], after[key]), key
    assert (tmp_path / "original" / packed.FILE).read_bytes() == (tmp_path / base / packed.FILE).read_bytes()


# --- eight bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_eight_bits_a_row(name: str, tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny(name))
    merged = wide(model, tmp_path)
    save_merged(model, tmp_path / "eight", dtype=FP32, bits=8)
    eight, dequantised = tensors_of(tmp_path / "eight"), packed.dequantised(tmp_path / "eight")
    assert dequantised.keys() == merged.keys()
    for key, weight in merged.items():
        if not packed.is_projection(key):
            assert same_bits(eight[key], weight), key
            continue
        scale = eight[f"{key}_scale"]
        assert eight[key].dtype == torch.float8_e4m3fn and scale.shape == (len(weight), 1)
        # Three bits of mantissa: half a step is 2⁻⁴ of a number, and 2⁻¹⁰ scales of the smallest; a hair for the scale.
        step = torch.maximum(weight.abs() * 2**-4, scale * 2**-10)
        assert ((dequantised[key] - weight).abs() <= step * 1.0001).all(), key
    config = config_of(tmp_path / "eight")["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and "lm_head" in config["ignore"]
    ours = load(tmp_path / "eight", dtype=FP32)
    assert {type(store) for _, store in stores(ours)} == {FP8Store}
    theirs = reference(packed.dense_copy(tmp_path / "eight", tmp_path / "dense"))
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-4)
    assert 1e-3 < off(logits(ours), logits(model.eval())) < 0.3


@pytest.mark.parametrize("name", ALL)
def test_eight_bits_a_row_in_transformers(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """By its own quantizer and the compressed-tensors package: dequantised on loading, and as it comes.

    A weight is a code times a scale, rounded to fp32 once, whoever does it: they are equal to the bit.  As it comes,
    the first pass dequantises weights, and inputs of projections are rounded to FP8, on a CPU too: that is the only
    other thing in it.
    """
    save_merged(adapted(tiny(name)), tmp_path / "eight", dtype=FP32, bits=8)
    copy = reference(packed.dense_copy(tmp_path / "eight", tmp_path / "dense"))
    ours, expected = load(tmp_path / "eight", dtype=FP32), logits(copy)
    dense, theirs = complete(tmp_path / "eight", quantization_config=dequantising()), complete(tmp_path / "eight")
    quantised = {n for n, m in theirs.named_modules() if hasattr(m, "quantization_scheme")}
    assert quantised == projections(theirs) and len(quantised) == len(dict(stores(ours)))
    assert {theirs.get_submodule(path).weight.dtype for path in quantised} == {torch.float8_e4m3fn}

    rounded = logits(theirs)
    for model in (dense, theirs):
        for path, weight in copy.named_parameters():
            assert torch.equal(model.get_parameter(path), weight), path
    # fp32 sums, in another order through half a dozen layers for ours
    torch.testing.assert_close(logits(dense), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(ours), logits(dense), rtol=0, atol=1e-4)
    for path in quantised:
        copy.get_submodule(path).register_forward_pre_hook(lambda module, inputs: packed.by_token(inputs[0]))
    torch.testing.assert_close(rounded, logits(copy), rtol=0, atol=1e-5)
    assert 0.02 < off(rounded, expected) < 0.2  # e4m3 is off by 2⁻⁴ at most, by 0.026 on average, and there are 28


def test_eight_bits_in_the_arithmetic_of_bfloat16(tiny: Tiny, tmp_path: Path) -> None:
    """transformers rounds scales to the dtype that it computes in, unless it dequantises on loading."""
    save_merged(adapted(tiny("qwen3")), tmp_path / "eight", bits=8)
    expected = packed.dequantised(tmp_path / "eight")
    dense = complete(tmp_path / "eight", torch.bfloat16, quantization_config=dequantising())
    theirs = complete(tmp_path / "eight", torch.bfloat16)
    logits(theirs)
    for path in projections(theirs):
        weight = expected[f"{path}.weight"]
        assert torch.equal(dense.get_submodule(path).weight, weight.bfloat16()), path
        got = theirs.get_submodule(path).weight
        assert got.dtype == torch.bfloat16
        # 2⁻⁸ for each of two roundings
        assert ((got.float() - weight).abs() <= (2**-7 + 2**-16) * weight.abs()).all(), path
    ours = load(tmp_path / "eight", dtype=torch.bfloat16)
    noise = off(logits(dense), logits(load(tmp_path / "eight", dtype=FP32)))
    assert off(logits(ours), logits(dense)) < 2 * noise < 0.1


def test_the_configuration_is_what_vllm_documents(tiny: Tiny, tmp_path: Path) -> None:
    """Its FP8 W8A8 is the scheme FP8_DYNAMIC of compressed-tensors, with which it reads config.json."""
    save_merged(adapted(tiny("llama3")), tmp_path / "eight", bits=8)
    config = QuantizationConfig.model_validate(config_of(tmp_path / "eight")["quantization_config"])
    assert config.format == "float-quantized" and config.quantization_status == QuantizationStatus.COMPRESSED
    (group,) = config.config_groups.values()
    scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    for part in ("targets", "output_activations"):
        assert getattr(group, part) == getattr(scheme, part)
    for part in ("weights", "input_activations"):
        got, expected = (getattr(each, part).model_dump(exclude={"observer"}) for each in (group, scheme))
        assert got == expected


@pytest.mark.parametrize("kind", ["four", "eight", "blocks"])
@pytest.mark.parametrize("level", ["vision_tower.", "vision_tower.vision_model."])
def test_a_vision_tower_stays_dense(level: str, kind: str, even: Tiny, tmp_path: Path) -> None:
    """Published files of Gemma 3 have one level more in its names than transformers' modules and what that saves."""
    source = copied(even("gemma3"), tmp_path)
    tensors = {name.replace("vision_tower.", level): tensor for name, tensor in tensors_of(source).items()}
    save_file(tensors, source / packed.FILE, {"format": "pt"})
    if kind == "blocks":
        packed.quantise_fp8(source, (32, 16))
    save_merged(adapted(source), tmp_path / "out", dtype=FP32, bits=4 if kind == "four" else 8)
    theirs = complete(tmp_path / "out")
    for name, tensor in tensors.items():
        if "vision" in name:
            path = f"model.{name.replace('vision_tower.vision_model.', 'vision_tower.')}"
            assert same_bits(theirs.get_parameter(path).detach(), tensor.float()), path
    if kind == "blocks":
        theirs = on_a_gpu(tmp_path / "out")
    marks = {"four": "Linear4bit", "eight": "quantization_scheme", "blocks": "FP8Linear"}
    linear = {n: m for n, m in theirs.named_modules() if isinstance(m, torch.nn.Linear)}
    assert {n for n, m in linear.items() if marks[kind] in (type(m).__name__, *vars(m))} == projections(theirs)


@pytest.mark.parametrize("name", ALL)
def test_fp8_blocks_stay_blocks(name: str, even: Tiny, tmp_path: Path) -> None:
    """In the blocks of the source, as transformers dequantises them; what was not merged is not touched.

    transformers multiplies with blocks by kernels from the hub that are for GPUs alone (DeepGEMM's and Triton's), and
    without a GPU its quantizer dequantises on loading: that is what is compared.  What it would load on one is held
    against the file by names, shapes and dtypes.
    """
    source = copied(even(name), tmp_path)
    packed.quantise_fp8(source, (32, 16))
    model = adapted(source, targets=["q_proj", "down_proj"])
    save_merged(model, tmp_path / "eight", dtype=FP32, bits=8)
    merged = wide(model, tmp_path)
    before, after = tensors_of(source), tensors_of(tmp_path / "eight")
    assert before.keys() == after.keys()
    for key, tensor in after.items():
        if "q_proj" not in key and "down_proj" not in key and before[key].dtype in (torch.float8_e4m3fn, FP32):
            assert same_bits(tensor, before[key]), key
        elif key.endswith("_scale_inv") and "vision" not in key:
            codes, scale = packed.fp8(merged[key.removesuffix("_scale_inv")], 32, 16)
            torch.testing.assert_close(tensor, scale, rtol=1e-6, atol=0)
            same = after[key.removesuffix("_scale_inv")].view(torch.uint8) == codes.view(torch.uint8)
            assert same.float().mean() > 0.999  # w · (448 / absmax) beside w / scale, at the middle between two codes
    config = config_of(tmp_path / "eight")["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [32, 16])
    ours, theirs = load(tmp_path / "eight", dtype=FP32), complete(tmp_path / "eight")
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-4)
    dense = reference(packed.dense_copy(tmp_path / "eight", tmp_path / "dense"))
    torch.testing.assert_close(logits(theirs), logits(dense), rtol=0, atol=1e-5)
    gpu = on_a_gpu(tmp_path / "eight")
    blocks = {n: m for n, m in gpu.named_modules() if isinstance(m, FP8Linear)}
    assert blocks.keys() == projections(gpu)
    stored = {path_of(key): tensor for key, tensor in after.items()}
    for path, module in blocks.items():
        for part in (".weight", ".weight_scale_inv"):
            got, wanted = stored[path_of(path) + part.removesuffix(".weight")], module.get_parameter(part[1:])
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), path


def test_blocks_of_64_hold_in_what_is_written(even: Tiny, tmp_path: Path) -> None:
    """The block size is the checkpoint's in every state of an adapter: on, off and merged, in memory or in a file."""
    source = copied(even("llama3"), tmp_path)
    packed.quantise_fp8(source, (64, 64))
    model = adapted(source)
    for b in lora_parameters(model)[1::2]:
        b.data.zero_()
    live = logits(model.eval())
    with pytest.warns(UserWarning, match="leaves 28 of 28 projections as they were"):
        save_merged(model, tmp_path / "wide", dtype=FP32)
    with pytest.warns(UserWarning, match="leaves 28 of 28 projections as they were"):
        save_merged(model, tmp_path / "eight", bits=8)
    assert config_of(tmp_path / "eight")["quantization_config"]["weight_block_size"] == [64, 64]
    for folder in ("wide", "eight"):
        torch.testing.assert_close(logits(load(tmp_path / folder, dtype=FP32)), live, rtol=0, atol=1e-5)


# --- quantised and GGUF sources ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bnb4", "fp8"])
@pytest.mark.parametrize("name", ALL)
def test_sixteen_bits_out_of_a_quantised_source(name: str, kind: str, tiny: Tiny, tmp_path: Path) -> None:
    """No code, no scale and no claim of them is left; what was not merged is bfloat16(dequantised)."""
    source = tiny(f"{name}-{kind}")
    model = adapted(source, targets=["q_proj"])
    before = packed.dequantised(source)
    update = {f"{path}.weight": linear for path, linear in linears(model)}
    for base in ("dequantized", "original"):
        save_merged(model, tmp_path / base, base=base)
        after, config = tensors_of(tmp_path / base), config_of(tmp_path / base)
        assert "quantization_config" not in config and after.keys() == before.keys()
        assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
        for key, tensor in after.items():
            expected = before[key]
            if linear := update.get(f"{path_of(key)}.weight"):
                a, b = linear.factors("default")
                expected = expected + 2.0 * (b @ a).detach()
                assert (tensor != before[key].bfloat16()).any()
            assert torch.equal(tensor, expected.bfloat16()), key
    theirs = reference(tmp_path / "dequantized")
    noise = off(logits(reference(tmp_path / "dequantized", torch.bfloat16)), logits(theirs))
    assert off(logits(theirs), logits(model.eval())) < 2 * noise < 0.2
    ours = load(tmp_path / "dequantized", dtype=FP32)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_compressed_tensors_and_scales_of_activations(strategy: str, tiny: Tiny, tmp_path: Path) -> None:
    source = copied(tiny("qwen2"), tmp_path)
    if strategy == "tensor":
        packed.quantise_fp8(source, None)
        assert any("input_scale" in name for name in tensors_of(source))
    else:
        packed.quantise_compressed(source, strategy)
    model = adapted(source, bits=16)
    save_merged(model, tmp_path / "merged")
    after = tensors_of(tmp_path / "merged")
    assert not [name for name in after if "scale" in name] and {t.dtype for t in after.values()} == {torch.bfloat16}
    assert off(logits(reference(tmp_path / "merged")), logits(model.eval())) < 0.05
    save_merged(adapted(source), tmp_path / "eight", bits=8)
    assert not [name for name in tensors_of(tmp_path / "eight") if "input_scale" in name]
    ours = load(tmp_path / "eight", dtype=FP32)
    theirs = reference(packed.dense_copy(tmp_path / "eight", tmp_path / "dense"))
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=1e-4)


def test_from_one_format_to_the_other(tiny: Tiny, tmp_path: Path) -> None:
    """NF4 in, FP8 out; FP8 in, trained in NF4, out in either: always what was trained on, unless the original is."""
    model = adapted(tiny("llama3-bnb4"))
    save_merged(model, tmp_path / "eight", bits=8)
    assert off(logits(load(tmp_path / "eight", dtype=FP32)), logits(model.eval())) < 0.3
    model = adapted(tiny("llama3-fp8"), bits=4, targets=["v_proj"])
    live = dict(stores(model))["model.layers.0.mlp.up_proj.weight"].dequantize(FP32)
    key = "model.layers.0.mlp.up_proj.weight"
    save_merged(model, tmp_path / "four", bits=4)
    assert torch.equal(packed.dequantised(tmp_path / "four")[key], live)
    save_merged(model, tmp_path / "original", base="original")
    stored = packed.dequantised(tiny("llama3-fp8"))[key]
    assert torch.equal(tensors_of(tmp_path / "original")[key], stored.bfloat16()) and not torch.equal(stored, live)


def test_files_are_of_a_bearable_size(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out of one packed file is four times as large: it is split, and the index says where all is."""
    monkeypatch.setattr(export_weights, "SHARD", 100_000)
    model = adapted(tiny("qwen3-bnb4"))
    save_merged(model, tmp_path / "merged")
    files = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert len(files) > 3 and all(file.stat().st_size < 150_000 for file in files)
    index = json.loads((tmp_path / "merged" / INDEX).read_text())
    assert index["weight_map"] == {n: f.name for f in files for n in tensors_of_file(f)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(tmp_path / "merged").values())
    assert off(logits(reference(tmp_path / "merged")), logits(model.eval())) < 0.05
    save_merged(adapted(tmp_path / "merged"), tmp_path / "four", bits=4)  # the same files, smaller
    assert [f.name for f in sorted((tmp_path / "four").glob("*.safetensors"))] == [file.name for file in files]
    index = json.loads((tmp_path / "four" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(tmp_path / "four").values())
    assert len(dict(stores(load(tmp_path / "four")))) == 28


def tensors_of_file(file: Path) -> list[str]:
    return [name for name, entry in open_checkpoint(file.parent).entries.items() if entry.file == file.name]


@pytest.mark.parametrize("name", ["llama3", "llama-tied", "qwen2", "qwen3", "gemma", "gemma2", "gemma3-text"])
def test_a_gguf_source(name: str, even: Tiny, tmp_path: Path) -> None:
    lorarun.save_gguf(load(even(name), dtype=FP32), tmp_path / "base.gguf", dtype="q8_0")
    model = adapted(tmp_path / "base.gguf")
    save_merged(model, tmp_path / "merged")
    after = tensors_of(tmp_path / "merged")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert config_of(tmp_path / "merged")["dtype"] == "bfloat16"
    theirs = reference(tmp_path / "merged")
    noise = off(logits(reference(tmp_path / "merged", torch.bfloat16)), logits(theirs))
    assert off(logits(theirs), logits(model.eval())) < 2 * noise < 0.2
    save_merged(model, tmp_path / "wide", dtype=FP32)
    torch.testing.assert_close(logits(reference(tmp_path / "wide")), logits(model), rtol=0, atol=1e-4)
    save_merged(model, tmp_path / "four", dtype=FP32, bits=4)
    ours = load(tmp_path / "four", dtype=FP32)
    torch.testing.assert_close(logits(exactly(tmp_path / "four")), logits(ours), rtol=0, atol=1e-4)
    source = open_checkpoint(tmp_path / "wide").entries.keys()
    assert source == open_checkpoint(even(name)).entries.keys()


def test_rotary_factors_and_the_tokenizer_of_a_gguf_source(even: Tiny, tmp_path: Path) -> None:
    """A file has factors where a config.json has Llama 3.1's settings: they come back, or are refused by name."""
    source = copied(even("llama3"), tmp_path)
    toy.make(source)
    lorarun.save_gguf(load(source, dtype=FP32, template="chatml"), tmp_path / "base.gguf", dtype="f32")
    model = adapted(tmp_path / "base.gguf")
    save_merged(model, tmp_path / "merged")
    expected = checkpoints.RECIPES["llama3"].fields["rope_parameters"]
    got = config_of(tmp_path / "merged")
    assert got["rope_scaling"] | {"rope_theta": got["rope_theta"]} == expected
    assert got["architectures"] == ["LlamaForCausalLM"] and got["dtype"] == "float32"
    chat = [{"role": "user", "content": "fox"}]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged").apply_chat_template(chat, tokenize=False)
    assert theirs == model.tokenizer.render(chat) == load(tmp_path / "merged").tokenizer.render(chat)

    factors = 1.0 + torch.arange(8.0)
    packed.edit(source, rope_parameters={"rope_type": "factors", "factors": factors.tolist(), "rope_theta": 1e4})
    lorarun.save_gguf(load(source, dtype=FP32), tmp_path / "other.gguf", dtype="f32")
    with pytest.raises(ValueError, match="rotary factors of its own, which a config.json cannot say"):
        save_merged(adapted(tmp_path / "other.gguf"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


# --- what is left of the update ------------------------------------------------------------------------------------


def divergence(model: Any, live: Any) -> float:
    """Mean KL of a model's next tokens to the live model's, over 64 prompts."""
    ids = torch.randint(3, 1000, (64, 12), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        p, q = (m(ids)[:, -1].double().log_softmax(-1) for m in (live, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


def small(folder: Path, size: float, **how: Any) -> Model:
    model = adapted(folder, **how)
    fill_b(model, size)
    return model


def test_which_base_a_run_in_four_bits_is_merged_into(
    even: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Onto what was trained on, nothing is lost; onto the original, it is another model; in codes again, the update is
    gone, which is said."""
    model = small(even("llama3"), 1e-3, bits=4)
    save_merged(model, tmp_path / "trained", dtype=FP32)
    capsys.readouterr()
    save_merged(model, tmp_path / "original", dtype=FP32, base="original")
    assert "logits differ from the live model's by" in capsys.readouterr().err
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"requantising to 4 bits kept (-?\d+)% of the adapter's update") as said:
        kept = save_merged(model, tmp_path / "again", bits=4)
    assert "--bits 16" in str(said[0].message) and said[0].filename == __file__
    live = model.eval()
    off_by = {n: divergence(load(tmp_path / n, dtype=FP32), live) for n in ("trained", "original", "again")}
    with lorarun.adapters_disabled(live):
        base = load(even("llama3"), dtype=FP32, bits=4)
        assert divergence(base, live) == 0
    update = divergence(base, live)  # what the whole adapter does
    assert off_by["trained"] < 1e-3 * update and off_by["original"] > 10 * update
    assert off_by["again"] > 0.5 * update
    assert export_weights.total(kept.values()).share < 0.3


@pytest.mark.parametrize(("bits", "held"), [(4, 4), (8, 8), (4, None), (8, None), (16, None), (8, 4)])
def test_what_is_kept_is_measured_on_what_is_written(
    bits: int, held: int | None, even: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small(even("qwen2"), 0.01, bits=held)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = save_merged(model, tmp_path / "out", bits=bits)
    printed = capsys.readouterr().err
    after = packed.dequantised(tmp_path / "out") if bits < 16 else tensors_of(tmp_path / "out")
    if bits < 16:  # the same without the adapter
        idle = small(even("qwen2"), 0.0, bits=held)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_merged(idle, tmp_path / "base", bits=bits)
        without = packed.dequantised(tmp_path / "base")
    assert list(kept) == [path for path, _ in linears(model)]
    rows: dict[str, list[tuple[float, float, str, torch.Tensor]]] = {}
    for path, linear in linears(model):
        a, b = linear.factors("default")
        w = linear.weight.dequantize(FP32) if held else linear.weight.detach()
        w, u, v = (x.double() for x in (w, 2.0 * (b @ a).detach(), after[f"{path}.weight"]))
        if held == bits or bits == 16 and not held:
            plain = w  # its own codes, or numbers of its own dtype
        else:
            plain = without[f"{path}.weight"].double()
        sums = torch.stack([w.square().sum(), u.square().sum(), (u * (v - plain)).sum()])
        sums = torch.cat([sums, (v - plain - u).square().sum().view(1)])
        # W + U is rounded to fp32 on the way, 1e-7 of W beside U, which is 3 % of it.
        torch.testing.assert_close(torch.tensor(kept[path]).double(), sums, rtol=1e-4, atol=1e-5 * float(sums[1]))
        w, u, along, away = sums
        rows.setdefault(path.split(".")[-1], []).append((float((away / u).sqrt()), float(along / u), path, sums))
    assert len(rows) == 7
    for kind, layers in rows.items():
        layers.sort()
        w, u, _, _ = sum(sums for *_, sums in layers)
        line = f"{kind:<12} {(u / w).sqrt():>14.3%}"
        for far, share, *_ in (layers[2], layers[3]):  # of four
            line += f" {share:>6.0%} {far:>11.2f}x"
        line += f"  in {layers[3][2].split('.')[2]}\n"
        assert (line in printed) == (bits < 16), line
    w, u, along, away = sum(sums for layers in rows.values() for *_, sums in layers)
    line = f"{'all':<12} {(u / w).sqrt():>14.3%} {along / u:>6.0%} {(away / u).sqrt():>11.2f}x\n"
    assert (line in printed) == (bits < 16), line
    share = export_weights.total(kept.values()).share
    # On the grid of its own codes an update of a fraction of a step is lost; elsewhere it is there on average.
    assert share < 0.9 if bits == held else 0.9 < share < 1.1


def test_a_layer_that_is_off_by_its_whole_update_is_named(even: Tiny, tmp_path: Path) -> None:
    """On average all of a small update is in codes that W was not on, but each weight by itself is mostly noise."""
    model = small(even("llama3"), 0.1)
    tiny = dict(linears(model))["model.layers.2.mlp.up_proj"]
    tiny.factors("default")[1].data.mul_(0.05)
    with pytest.warns(UserWarning, match="requantising to 8 bits erred by") as said:
        kept = save_merged(model, tmp_path / "eight", bits=8)
    times = kept["model.layers.2.mlp.up_proj"].off
    assert times > 1 and export_weights.total(kept.values()).share > 0.9
    words = f"in 1 of 28 projections (model.layers.2.mlp.up_proj: {times:.1f} times). bits=16"
    assert len(said) == 1 and words in str(said[0].message) and said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_merged(model, tmp_path / "wide", dtype=FP32)


def test_an_adapter_that_does_nothing_has_nothing_to_lose(even: Tiny, tmp_path: Path) -> None:
    model = small(even("llama-tied"), 0.0, targets=["v_proj"])
    with pytest.warns(UserWarning, match="leaves 4 of 4 projections as they were") as said:
        kept = save_merged(model, tmp_path / "four", bits=4)
    assert {value.share for value in kept.values()} == {1.0} and len(said) == 1


# --- what is noticed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_a_flipped_bit_in_codes_or_scales_is_found(
    bits: int, even: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export._write
    key = "model.layers.2.mlp.up_proj.weight" + {4: ".absmax", 8: "_scale"}[bits]

    def flips_a_bit(job: Any, partial: Path) -> None:
        write(job, partial)
        data = bytearray((partial / packed.FILE).read_bytes())
        data[open_checkpoint(partial).entries[key].start] ^= 1
        (partial / packed.FILE).write_bytes(data)

    monkeypatch.setattr(export, "_write", flips_a_bit)
    with pytest.raises(RuntimeError, match=f"what was read back is not what was to be written: {key};"):
        save_merged(adapted(even("llama3")), tmp_path / "out", bits=bits)
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mistake", ["another rope", "not applied", "transposed update", "codes of another weight"])
def test_codes_do_not_hide_a_mistake(
    mistake: str, bits: int, even: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four bits move logits much farther than a small update does, and still it must not be lost in them."""
    model = small(even("llama3"), 0.01, targets=["q_proj", "o_proj"])
    if mistake == "another rope":
        right = export._config
        monkeypatch.setattr(export, "_config", lambda job: right(job) | {"rope_parameters": {"rope_theta": 10.0}})
    elif mistake == "codes of another weight":
        encode = export_weights.Form.encode
        monkeypatch.setattr(
            export_weights.Form, "encode", lambda form, w: encode(form, w if w.is_meta else w.roll(1, 0))
        )
    else:
        merged = export_weights.merged_weight

        def wrong(weight: torch.Tensor, *rest: Any) -> torch.Tensor:
            update = merged(weight, *rest) - weight.float()
            return weight.float() + (update.t() if mistake == "transposed update" else 1e-3 * update)

        monkeypatch.setattr(export_weights, "merged_weight", wrong)
    said = "codes of other numbers" if mistake == "codes of another weight" else "answers differently from the live one"
    with pytest.raises(RuntimeError, match=said):
        save_merged(model, tmp_path / "out", bits=bits)
    assert not leftovers(tmp_path)


def test_what_has_no_code_is_refused(even: Tiny, tmp_path: Path) -> None:
    for bits in (4, 8):
        model = adapted(even("llama3"), targets=["q_proj"])
        lora_parameters(model)[1].data[0, 0] = float("inf")
        with pytest.raises(ValueError, match="would not be finite numbers: model.layers.0.self_attn.q_proj.weight"):
            save_merged(model, tmp_path / "out", bits=bits)
    assert not leftovers(tmp_path)


@pytest.mark.parametrize(("name", "bits"), [("qwen3", 16), ("qwen3", 4), ("qwen3", 8), ("qwen3-bnb4", 16)])
def test_room_is_asked_for_what_is_written(
    name: str, bits: int, even: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the source takes: four bits need a quarter of it, and a packed source becomes four times as large."""
    model = adapted(even(name))
    save_merged(model, tmp_path / "out", bits=bits)
    size = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    with pytest.raises(OSError, match="the merged model takes"):
        save_merged(model, tmp_path / "again", bits=bits)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size + 2**20))  # a MiB is to be spare
    save_merged(model, tmp_path / "again", bits=bits)
