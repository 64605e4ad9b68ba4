"""GGUF files in and out, against the gguf library, transformers' reader of them, and folders of the same weights."""

from __future__ import annotations

import json
import runpy
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers

import lorarun
from lorarun import gguf as gguf_out
from lorarun.gguf_config import implied_scale
from lorarun.gguf_read import Gguf, open_gguf
from lorarun.gguf_vocab import Vocabulary, vocabulary_fields
from lorarun.nn import Model
from lorarun.quant.store import dequantize
from lorarun.tokenizer import Tokenizer

SERVED = [
    *("llama3", "llama-tied", "llama-bias", "llama-linear", "mistral", "qwen2", "qwen2-yarn", "qwen3"),
    *("gemma", "gemma2", "gemma3-text", "gemma3"),
]
REFUSED = {
    "llama-dynamic": "no rotary scaling 'dynamic'",
    "llama-yarn": "no rotary scaling 'yarn' as this model uses it",
    "mistral-sliding": "no sliding window",
    "qwen2-sliding": "no sliding window",
}
IDS = torch.randint(3, 1000, (2, 40), generator=torch.Generator().manual_seed(0))


def adapted(model: Model, **how: Any) -> Model:
    lorarun.add_lora(model, r=4, alpha=6, seed=0, **how)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found = model(IDS)
    return found if isinstance(found, torch.Tensor) else found.logits


def fields(path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def arrays(path: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_round_trip(tiny: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Written with a merged adapter in fp32 and read again, a model answers as it did."""
    model = adapted(lorarun.load(tiny(name)))
    path = tmp_path / "model.gguf"
    lorarun.save_gguf(model, path, dtype="f32")
    again = lorarun.load(path)
    # What the two compute differs by sums in another order, over some ten products a layer.
    live = logits(model)
    assert (logits(again) - live).abs().max() <= 1e-5 * live.abs().max()
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]
    stored, arch = fields(path), gguf_out.ARCHS[model.config.model_type]
    assert stored["general.architecture"] == arch
    assert stored[f"{arch}.block_count"] == model.config.num_hidden_layers
    assert stored[f"{arch}.attention.head_count_kv"] == model.config.num_key_value_heads
    assert stored[f"{arch}.rope.freq_base"] == gguf_out._ropes(model.config)[0]["rope_theta"]
    assert again.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert again.config.windows == model.config.windows


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tiny: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        lorarun.save_gguf(lorarun.load(tiny(name)), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])
def test_transformers_reads_the_file_alike(tiny: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    model = adapted(lorarun.load(tiny(name)))
    lorarun.save_gguf(model, tmp_path / "model.gguf", dtype="f32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    live = logits(model)
    assert (logits(theirs.eval()) - live).abs().max() <= 1e-5 * live.abs().max()


@pytest.mark.parametrize("dtype", gguf_out.DTYPES)
def test_types_are_what_the_library_makes_of_the_weights(
    tiny: Callable[[str], Path], tmp_path: Path, dtype: str
) -> None:
    model = lorarun.load(tiny("qwen2"))
    lorarun.save_gguf(model, tmp_path / "model.gguf", dtype=dtype)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    again = lorarun.load(tmp_path / "model.gguf").state_dict()
    assert again.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        expected = array if weight.ndim == 1 else gguf.dequantize(gguf.quantize(array, kind), kind)
        assert np.array_equal(again[name].numpy(), expected), name


def test_narrow_rows_are_kept_in_f16(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = lorarun.load(tiny("llama-bias"))
    model.model.layers[0].self_attn.o_proj.weight.data = torch.ones(64, 90)  # a block has 32 numbers
    lorarun.save_gguf(model, tmp_path / "model.gguf", dtype="q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    names = ("blk.0.attn_output.weight", "blk.1.attn_output.weight", "blk.0.attn_norm.weight")
    assert [kinds[name] for name in names] == ["F16", "Q8_0", "F32"]


def test_rows_of_q_and_k_and_norms(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Llama's rows alternate between a head's halves, the biases' too; Gemma's norms have the 1 added; others are
    as they are."""
    for name in ("llama-bias", "qwen2", "gemma"):
        model = lorarun.load(tiny(name))
        lorarun.save_gguf(model, tmp_path / "model.gguf", dtype="f32", adapter_only=False)
        stored, layer = arrays(tmp_path / "model.gguf"), model.model.layers[1]
        for ours, theirs, heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 1 if name == "gemma" else 2)):
            for leaf in ("weight", "bias") if name != "gemma" else ("weight",):
                before = getattr(getattr(layer.self_attn, ours), leaf).numpy()
                size = len(before) // heads
                order = [
                    h * size + half * size // 2 + i for h in range(heads) for i in range(size // 2) for half in (0, 1)
                ]
                expected = before[order] if name == "llama-bias" else before
                assert np.array_equal(stored[f"blk.1.{theirs}.{leaf}"], expected), (name, ours, leaf)
        offset = 1 if name == "gemma" else 0
        assert np.array_equal(stored["blk.1.attn_norm.weight"], layer.input_layernorm.weight.numpy() + offset)


def test_dora_and_biases_are_written_in_the_whole_model_alone(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = adapted(lorarun.load(tiny("qwen2")), dora=True, bias="lora_only")
    for name, parameter in model.named_parameters():
        if "lora_magnitude_vector" in name or "lora_bias" in name:
            parameter.data *= 1.3
    lorarun.save_gguf(model, tmp_path / "model.gguf", dtype="f32")
    live = logits(model)
    assert (logits(lorarun.load(tmp_path / "model.gguf")) - live).abs().max() <= 1e-5 * live.abs().max()
    with pytest.raises(ValueError, match="this one has DoRA or biases, so write the whole model"):
        lorarun.save_gguf(model, tmp_path / "adapter.gguf", adapter_only=True)
    model = adapted(lorarun.load(tiny("llama3")), bias=True)
    with pytest.raises(ValueError, match="none to add them to"):
        lorarun.save_gguf(model, tmp_path / "other.gguf")


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gemma3-text"])
def test_tables_and_copies_are_written_in_the_whole_model_alone(
    tiny: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    for case, arguments in enumerate(
        ({"modules_to_save": ["lm_head", "norm", "v_proj"]}, {"targets": ["q_proj", "embed_tokens"]})
    ):
        model = adapted(lorarun.load(tiny(name)), **({"targets": ["q_proj"]} | arguments))
        for parameter in lorarun.lora_parameters(model):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        lorarun.save_gguf(model, tmp_path / f"{case}.gguf", dtype="f32")
        live = logits(model)
        assert (logits(lorarun.load(tmp_path / f"{case}.gguf")) - live).abs().max() <= 1e-5 * live.abs().max()
        with pytest.raises(ValueError, match="hold low-rank updates of projections alone, and this one has"):
            lorarun.save_gguf(model, tmp_path / "adapter.gguf", adapter_only=True)


def test_four_bits_in_and_out(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A GGUF base is quantised as the folder is; what is exported is what was dequantised, with the adapter."""
    lorarun.save_gguf(lorarun.load(tiny("qwen3")), tmp_path / "base.gguf", dtype="bf16")
    model, folder = (adapted(lorarun.load(where, bits=4)) for where in (tmp_path / "base.gguf", tiny("qwen3")))
    assert torch.equal(logits(model), logits(folder))
    lorarun.save_gguf(model, tmp_path / "merged.gguf", dtype="f32")
    stored, linear = arrays(tmp_path / "merged.gguf"), model.model.layers[0].mlp.up_proj
    a, b = (factor.detach().double() for factor in linear.factors("default"))
    expected = dequantize(linear.weight, torch.float32).double() + 6 / 4 * b @ a
    assert np.abs(stored["blk.0.ffn_up.weight"] - expected.numpy()).max() <= 2e-6


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama3", {"rslora": True}), ("gemma2", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 9}}),
     ("qwen2", {"init": "olora"})],
)  # fmt: skip
def test_adapter_alone_adds_up_to_the_merged_model(
    tiny: Callable[[str], Path], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    model = adapted(lorarun.load(tiny(name)), **options)
    lorarun.save_gguf(model, tmp_path / "adapter.gguf", dtype="f32", adapter_only=True)
    lorarun.save_gguf(model, tmp_path / "merged.gguf", dtype="f32")
    lorarun.use_adapter(model, None)
    lorarun.save_gguf(model, tmp_path / "base.gguf", dtype="f32")
    stored = fields(tmp_path / "adapter.gguf")
    assert (stored["general.type"], stored["adapter.type"]) == ("adapter", "lora")
    adapter, merged, base = (arrays(tmp_path / f"{which}.gguf") for which in ("adapter", "merged", "base"))
    assert len(adapter) == 2 * 7 * 4
    for key, values in base.items():
        if f"{key}.lora_a" in adapter:
            a, b = adapter[f"{key}.lora_a"].astype(np.float64), adapter[f"{key}.lora_b"]
            values = values + stored["adapter.lora.alpha"] / len(a) * (b @ a)
            assert not np.array_equal(base[key], merged[key])
        assert np.abs(values - merged[key]).max() <= 2e-6, key
    with pytest.raises(ValueError, match="not a whole model"):
        lorarun.load(tmp_path / "adapter.gguf")


def test_adapter_of_a_gguf_base_finds_it_again(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    lorarun.save_gguf(lorarun.load(tiny("llama-tied")), tmp_path / "base.gguf", dtype="f32")
    model = adapted(lorarun.load(tmp_path / "base.gguf"))
    lorarun.save_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(lorarun.load(tmp_path / "adapter")), logits(model))
    with pytest.raises(ValueError, match="what this model was loaded from"):
        lorarun.save_gguf(model, tmp_path / "base.gguf")


def test_script_writes_what_its_name_says(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lorarun.save_adapter(adapted(lorarun.load(tiny("qwen2"))), tmp_path / "adapter")
    script = str(Path(__file__).parent.parent / "scripts" / "export.py")
    arguments = [script, str(tmp_path / "adapter"), str(tmp_path / "out.gguf")]
    for more, kind in (([], "model"), (["--dtype", "bf16", "--adapter-only"], "adapter")):
        monkeypatch.setattr("sys.argv", arguments + more)
        runpy.run_path(script, run_name="__main__")
        assert fields(tmp_path / "out.gguf")["general.type"] == kind
    monkeypatch.setattr("sys.argv", [*arguments, "--dtype", "bfloat16"])
    with pytest.raises(SystemExit):
        runpy.run_path(script, run_name="__main__")


def test_failure_leaves_the_old_file(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = lorarun.load(tiny("llama-tied")), tmp_path / "model.gguf"
    path.write_text("old")
    write = gguf.GGUFWriter.write_tensor_data
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", lambda self, tensor: write(self, tensor * 0))
    with pytest.raises(RuntimeError, match="not what was to be written"):
        lorarun.save_gguf(model, path, dtype="f32")
    monkeypatch.undo()
    free = shutil_usage(0)
    monkeypatch.setattr(gguf_out.shutil, "disk_usage", lambda where: free)
    with pytest.raises(OSError, match="GiB free"):
        lorarun.save_gguf(model, path)
    monkeypatch.undo()
    model.model.embed_tokens.weight.data[5, 5] = 1e6
    with pytest.raises(ValueError, match="not be finite"):
        lorarun.save_gguf(model, path)
    with pytest.raises(ValueError, match="dtype='q4_k' is not supported"):
        lorarun.save_gguf(model, path, dtype="q4_k")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def shutil_usage(free: int) -> Any:
    return gguf_out.shutil._ntuple_diskusage(1, 1, free)


@pytest.mark.parametrize(("dtype", "expected"), [("f32", "float32"), ("f16", "bfloat16"), ("q8_0", "bfloat16")])
def test_dtype_where_nobody_says(tiny: Callable[[str], Path], tmp_path: Path, dtype: str, expected: str) -> None:
    lorarun.save_gguf(lorarun.load(tiny("qwen2")), tmp_path / "model.gguf", dtype=dtype)
    assert open_gguf(tmp_path / "model.gguf").dtype == getattr(torch, expected)


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [float("nan")]])
def test_rotary_factors_are_checked(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: list[float]
) -> None:
    model, pieces = lorarun.load(tiny("llama3")), gguf_out._pieces

    def changed(*args: Any) -> dict[str, gguf_out.Piece]:
        wrong = torch.tensor(factors).nan_to_num(nan=3.0)
        return {**pieces(*args), "rope_freqs.weight": gguf_out.Piece((len(factors),), "f32", wrong.contiguous)}

    monkeypatch.setattr(gguf_out, "_pieces", changed)
    lorarun.save_gguf(model, tmp_path / "model.gguf")
    if factors[-1] != factors[-1]:  # NaN is refused on the way out, so it is put in by hand
        data, nan = (tmp_path / "model.gguf").read_bytes(), struct.pack("<f", float("nan"))
        start = open_gguf(tmp_path / "model.gguf").tensors["rope_freqs.weight"].start
        (tmp_path / "model.gguf").write_bytes(data[: start + 28] + nan + data[start + 32 :])
    with pytest.raises(ValueError, match="rotary factors, expected 8|factors is .*, expected a list of positive"):
        lorarun.load(tmp_path / "model.gguf")


# --- tokenizers ----------------------------------------------------------------------------------------------------

TEXTS = ("Hello  world 12345!\n\n don't  tést 日本語 🎉\t x", "<|im_end|>a<end_of_turn>" + " " * 40 + "\r\n", "\x00 é")


def vocabulary(folder: Path, arch: str, extra: int = 0) -> tuple[Vocabulary, Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    rows = tokenizer.vocab_size + extra
    stored = vocabulary_fields(tokenizer, rows)
    file = Gguf(folder=folder, entries={}, fields={"general.architecture": arch, **stored}, tensors={})
    return Vocabulary(file, rows), tokenizer, stored


@pytest.mark.parametrize(("name", "arch", "pre"), [("llama3.1", "llama", "llama-bpe"), ("qwen3", "qwen3", "qwen2")])
def test_real_byte_level_tokenizers(real: Callable[[str], Path], name: str, arch: str, pre: str) -> None:
    folder = real("tokenizers") / name
    found, tokenizer, stored = vocabulary(folder, arch, extra=64)
    theirs, ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), found.build()
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids
    assert stored["tokenizer.ggml.pre"] == pre and stored["tokenizer.chat_template"] == tokenizer.template
    assert stored["tokenizer.ggml.add_bos_token"] == (name == "llama3.1")
    assert {*tokenizer.stop_ids} <= {*found.stops()} and stored["tokenizer.ggml.token_type"][-64:] == [5] * 64


def test_real_gemma_tokenizer(real: Callable[[str], Path]) -> None:
    folder = real("tokenizers") / "gemma3"
    found, tokenizer, stored = vocabulary(folder, "gemma3")
    theirs, ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), found.build()
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids
    kinds = stored["tokenizer.ggml.token_type"]
    assert stored["tokenizer.ggml.model"] == "llama" and stored["tokenizer.ggml.add_space_prefix"] is False
    assert kinds[theirs.token_to_id("<end_of_turn>")] == 3 and kinds[theirs.token_to_id("<0x0A>")] == 6
    assert kinds[theirs.token_to_id("\n\n")] == 4 and kinds[theirs.token_to_id("the")] == 1
    assert found.stops() == list(tokenizer.stop_ids)


def small_tokenizer(folder: Path, **changes: Any) -> Path:
    """A byte-level BPE with three control tokens, an added one that is none, and `changes` to its tokenizer.json."""
    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    core = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("t", "h")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    core.add_tokens(["hello there"])
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(core.to_str()) | changes), encoding="utf-8")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": "{{ messages }}é\n"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 260]}), encoding="utf-8")
    return folder


def test_tokenizer_in_a_file(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = lorarun.load(tiny("llama-tied"))
    model.tokenizer = Tokenizer.load(small_tokenizer(tmp_path / "tokenizer"))
    lorarun.save_gguf(model, tmp_path / "model.gguf")
    stored = fields(tmp_path / "model.gguf")
    kinds, core = stored["tokenizer.ggml.token_type"], model.tokenizer._core
    assert [kinds[core.token_to_id(token)] for token in ("<s>", "<|im_end|>", "hello there", "th")] == [3, 3, 4, 1]
    assert kinds[core.get_vocab_size() :] == [5] * (1024 - core.get_vocab_size())
    ids = {key: stored[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "eot", "unknown")}
    assert ids == {"bos": 1, "eos": 2, "eot": core.token_to_id("<|im_end|>"), "unknown": 0}
    assert stored["tokenizer.ggml.pre"] == "gpt-2" and stored["tokenizer.chat_template"] == "{{ messages }}é\n"
    again = lorarun.load(tmp_path / "model.gguf").tokenizer
    assert again.encode("hello there, th<|im_end|> é") == model.tokenizer.encode("hello there, th<|im_end|> é")
    for name in ("stop_ids", "bos_id", "eos_id", "template", "adds_bos", "vocab_size"):
        assert getattr(again, name) == getattr(model.tokenizer, name), name


def test_unknown_rules_are_refused(tmp_path: Path) -> None:
    split = json.loads(pre_tokenizers.Whitespace().__getstate__())
    cases: dict[str, dict[str, Any]] = {
        "splits text by a rule that GGUF has no name for": {"pre_tokenizer": split},
        "is a Unigram tokenizer": {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}},
    }
    for message, changes in cases.items():
        tokenizer = Tokenizer.load(small_tokenizer(tmp_path / "tokenizer", **changes))
        with pytest.raises(ValueError, match=message):
            vocabulary_fields(tokenizer, 1024)
    with pytest.raises(ValueError, match="has token 261, and the model 100"):
        vocabulary_fields(Tokenizer.load(small_tokenizer(tmp_path / "tokenizer")), 100)


def test_space_in_front_of_a_text(tmp_path: Path) -> None:
    """Llama 2's tokenizer: the space comes by default."""
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "t", "h", "▁t", "▁th", "th"]
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁", "th")]
    core = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.save(str(tmp_path / "tokenizer.json"))
    found, _, stored = vocabulary(tmp_path, "llama")
    assert stored["tokenizer.ggml.add_space_prefix"] is True
    for text in ("th t h", " th", "é"):
        assert found.build().encode(text, add_special_tokens=False).ids == core.encode(text).ids
    assert found.build().decode(core.encode("th t h").ids) == "th t h"


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_model_equals_its_folder(real: Callable[[str], Path], name: str) -> None:
    file, folder = real(f"{name}-gguf") / "model.gguf", real(name)
    ours, theirs = (lorarun.load(where, dtype=torch.bfloat16) for where in (file, folder))
    assert ours.config == theirs.config and ours.state_dict().keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
    for attribute in ("stop_ids", "bos_id", "eos_id", "pad_id", "adds_bos", "vocab_size"):
        assert getattr(ours.tokenizer, attribute) == getattr(theirs.tokenizer, attribute), attribute
    for text in TEXTS:
        assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model, folder = lorarun.load(tiny("llama-tied")), tmp_path_factory.mktemp("good")
    model.tokenizer = Tokenizer.load(small_tokenizer(folder / "tokenizer"))
    lorarun.save_gguf(model, folder / "model.gguf")
    return (folder / "model.gguf").read_bytes()


def renamed(data: bytes, old: str, new: str) -> bytes:
    assert len(old) == len(new) and data.count(old.encode()) >= 1
    return data.replace(old.encode(), new.encode(), 1)


def with_number(data: bytes, key: str, value: int, form: str = "I") -> bytes:
    at = data.index(key.encode()) + len(key) + 4
    return data[:at] + struct.pack("<" + form, value) + data[at + struct.calcsize(form) :]


def with_type(data: bytes, key: str, kind: int) -> bytes:
    at = data.index(key.encode()) + len(key)
    return data[:at] + struct.pack("<I", kind) + data[at + 4 :]


def with_tensor(data: bytes, name: str, offset: int, value: int, form: str) -> bytes:
    """The entry of a tensor with one number changed, `offset` bytes behind its name: 0 dimensions, 4 and 12 the shape,
    20 type, 24 place."""
    at = data.index(struct.pack("<Q", len(name)) + name.encode() + b"\x02\0\0\0") + 8 + len(name) + offset
    return data[:at] + struct.pack("<" + form, value) + data[at + struct.calcsize(form) :]


TABLE = "token_embd.weight"
BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "is empty"),
    "magic": (lambda d: b"GGML" + d[4:], "begins with b'GGML'"),
    "pointer": (lambda d: b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    "version 1": (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version 1; 2 and 3"),
    "big-endian": (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "big-endian"),
    "cut in the magic": (lambda d: d[:3], "ends inside the header"),
    "cut in the header": (lambda d: d[:20], "ends inside the header"),
    "cut in a key": (lambda d: d[:30], "it ends before the metadata"),
    "cut in the metadata": (lambda d: d[:1500], "cannot be read as GGUF"),
    "cut in the tensors' table": (lambda d: d[: d.index(TABLE.encode()) + 30], "it ends before the tensors' table"),
    "cut in the data": (lambda d: d[:-100], "cut short by"),
    "2^60 fields": (lambda d: d[:16] + struct.pack("<Q", 2**60) + d[24:], "it ends before the metadata"),
    "2^60 tensors": (lambda d: d[:8] + struct.pack("<Q", 2**60) + d[16:], "it ends before the tensors' table"),
    "key of 2^62": (lambda d: d[:24] + struct.pack("<Q", 2**62) + d[32:], "ends inside field 0"),
    "key not UTF-8": (lambda d: d.replace(b"general.name", b"general.\xff\xff\xff\xff", 1), "not UTF-8"),
    "key twice": (
        lambda d: renamed(d, "ggml.bos_token_id", "ggml.eos_token_id"),
        "has 'tokenizer.ggml.eos_token_id' twice",
    ),
    "value of no type": (lambda d: with_type(d, "llama.block_count", 77), "a value of type 77"),
    "architecture": (lambda d: renamed(d, "\5\0\0\0\0\0\0\0llama", "\5\0\0\0\0\0\0\0bloom"), "architecture 'bloom'"),
    "no architecture": (lambda d: renamed(d, "general.architecture", "general.brchitecture"), "architecture None"),
    "no head count": (
        lambda d: renamed(d, "llama.attention.head_count", "llama.attention.head_kount"),
        "lacks llama.a",
    ),
    "no context": (lambda d: renamed(d, "llama.context_length", "llama.kontext_length"), "lacks llama.context_length"),
    "no tokens": (
        lambda d: renamed(d, "tokenizer.ggml.tokens", "tokenizer.ggml.tokenz"),
        "lacks tokenizer.ggml.tokens",
    ),
    "no pre": (lambda d: renamed(d, "tokenizer.ggml.pre", "tokenizer.ggml.prf"), "lacks tokenizer.ggml.pre"),
    "other pre": (lambda d: renamed(d, "gpt-2", "gpt-9"), "splits text by 'gpt-9'"),
    "list of lists": (lambda d: with_number(with_type(d, "llama.block_count", 9), "llama.block_count", 9), "of type 9"),
    "fraction of layers": (lambda d: with_type(d, "llama.block_count", 6), "must be of type int"),
    "eps": (lambda d: with_number(d, "llama.attention.layer_norm_rms_epsilon", 0), "rms_norm_eps is 0.0"),
    "eps NaN": (lambda d: with_number(d, "layer_norm_rms_epsilon", 0x7FC00000), "rms_norm_eps is nan"),
    "2^31 blocks": (lambda d: with_number(d, "llama.block_count", 2**31 - 1), "tensors of 4 blocks"),
    "no heads": (lambda d: with_number(d, "llama.attention.head_count", 0), "0 heads"),
    "heads of 2^31": (lambda d: with_number(d, "llama.attention.key_length", 2**31), "heads of 2147483648"),
    "hidden size": (lambda d: with_number(d, "llama.embedding_length", 32), "do not fit the model"),
    "no intermediate": (lambda d: with_number(d, "llama.feed_forward_length", 0), "intermediate_size is 0"),
    "begin token": (lambda d: with_number(d, "tokenizer.ggml.bos_token_id", 5000), "names others: bos 5000"),
    "dimensions": (lambda d: with_tensor(d, TABLE, 0, 9, "I"), "has 9 dimensions"),
    "shape": (lambda d: with_tensor(d, TABLE, 12, 2**50, "Q"), "overlap|cut short"),
    "row": (lambda d: with_tensor(d, TABLE, 4, 0, "Q"), "which its type cannot have"),
    "type": (lambda d: with_tensor(d, TABLE, 20, 4, "I"), "type 4, which the gguf package does not know"),
    "type not dequantised": (lambda d: with_tensor(d, TABLE, 20, 27, "I"), "overlap|cannot dequantise"),
    "place": (lambda d: with_tensor(d, TABLE, 24, 33, "Q"), "which its type cannot have"),
    "place outside": (lambda d: with_tensor(d, TABLE, 24, 2**50, "Q"), "cut short by"),
    "overlap": (lambda d: with_tensor(d, TABLE, 24, 32, "Q"), "overlap"),
    "unknown tensor": (lambda d: renamed(d, "blk.1.ffn_up.weight", "blk.1.ffn_uq.weight"), "unexpected: blk.1.ffn_uq"),
    "no embedding": (lambda d: renamed(d, TABLE, "token_embx.weight"), "lacks token_embd.weight"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_errors(good: bytes, tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(change(good))
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        lorarun.load(path)
    assert time.perf_counter() - start < 2 and (str(path) in str(caught.value) or "config.json" in str(caught.value))


def test_cut_anywhere(good: bytes, tmp_path: Path) -> None:
    """At no length does a file that is not whole pass, or anything but a ValueError come of it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(good)
    head = min(tensor.start for tensor in open_gguf(path).tensors.values())
    for end in [*range(1, head, 397), *range(head, len(good), len(good) // 20)]:
        path.write_bytes(good[:end])
        with pytest.raises(ValueError, match="cannot be read as GGUF"):
            open_gguf(path)


def test_the_largest_gemmas_scale_their_queries_by_the_width() -> None:
    """As their published configurations have it in query_pre_attn_scalar; the file does not say."""
    assert implied_scale("gemma2", layers=46, hidden=4608, heads=32, head_dim=128) == 144
    assert implied_scale("gemma3", layers=62, hidden=5376, heads=32, head_dim=128) == 168
    assert implied_scale("gemma2", layers=42, hidden=3584, heads=16, head_dim=256) == 256
