"""Every family against transformers: tiny checkpoints layer by layer, real ones by recorded losses and gradients."""

import json
from pathlib import Path

import pytest
import tiny as checkpoints
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import lorarun
from lorarun.config import rope_parameters, stored_dtype, text_config
from lorarun.models import build_model
from lorarun.rotary import Rotary, frequencies

REFERENCE = Path(__file__).parent / "reference"


@pytest.mark.parametrize("name", checkpoints.NAMES)
def test_logits_and_every_layer_equal_transformers(tiny, name):
    model = lorarun.load(tiny(name))
    expected = load_file(tiny(name) / "reference.safetensors")
    states = model.hidden_states(expected["input_ids"], layers=True)
    assert len(states) == model.config.num_hidden_layers + 1
    for i, state in enumerate(states):
        torch.testing.assert_close(state, expected[f"hidden_states.{i}"], rtol=0, atol=1e-4)
    torch.testing.assert_close(model.head(states[-1]), expected["logits"], rtol=0, atol=1e-4)
    loss = lorarun.loss(model, {"ids": expected["input_ids"], "labels": expected["input_ids"]})
    torch.testing.assert_close(loss, expected["loss"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3-text"])
def test_bf16_is_as_close_to_exact_as_transformers_is(tiny, name):
    expected = load_file(tiny(name) / "reference.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        noise = (theirs(expected["input_ids"]).logits.float() - expected["logits"]).square().mean().sqrt()
    ours = lorarun.load(tiny(name), dtype=torch.bfloat16)(expected["input_ids"])
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - expected["logits"]).square().mean().sqrt() <= 2 * noise


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_models_give_the_recorded_numbers(real, name):
    recorded = json.loads((REFERENCE / f"{name}.json").read_text())
    manifest = json.loads((real(name) / "fetched.json").read_text())
    assert manifest["files"]["model.safetensors"]["sha256"] == recorded["weights_sha256"]
    model = lorarun.load(real(name))
    assert {case["name"] for case in recorded["cases"]} >= {"short", "news", "chat", "long"}
    for case in recorded["cases"]:
        ids = torch.tensor([case["ids"]])
        with torch.no_grad():
            logits = model(ids)[0]
        nll = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
        torch.testing.assert_close(nll, torch.tensor(case["nll"]), rtol=1e-3, atol=1e-3)
        assert logits[-1].topk(10).indices.tolist() == case["top_ids"]
        loss = lorarun.loss(model, {"ids": ids, "labels": ids})
        assert abs(loss.item() - case["mean_nll"]) < 1e-3
        if "grad_norms" in case:
            model.requires_grad_(True)
            lorarun.loss(model, {"ids": ids, "labels": ids}).backward()
            norms = {path: p.grad.norm().item() for path, p in model.named_parameters()}
            assert norms.keys() == case["grad_norms"].keys()
            for path, norm in case["grad_norms"].items():
                assert norms[path] == pytest.approx(norm, rel=2e-3), path
            model.requires_grad_(False)
            model.zero_grad()


# --- rotary scaling and the two spellings of a configuration ---

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_scaling_at_published_settings():
    """Frequencies that turn fewer than once over the original context are divided, those in between blended."""
    inv_freq, amplitude = frequencies(64, LLAMA31 | {"rope_theta": 5e5}, 131_072)
    expected = {0: 1.0, 14: 3.2114e-3, 15: 1.29055e-3, 16: 4.29557e-4, 17: 9.70829e-5, 18: 1.94616e-5, 31: 9.4183e-8}
    assert amplitude == 1.0
    for i, value in expected.items():
        assert inv_freq[i].item() == pytest.approx(value, rel=2e-5), i  # five published digits
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131_072,
        rope_parameters=LLAMA31 | {"rope_theta": 5e5},
    )
    positions = torch.tensor([[0, 1000, 20_000]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = Rotary(64, LLAMA31 | {"rope_theta": 5e5}, 131_072)(positions)
    torch.testing.assert_close(ours[0], cos[..., :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[1], sin[..., :32], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.2},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
)
@pytest.mark.parametrize("length", [100, 5000])
def test_rope_scalings_equal_transformers(rope, length):
    rope = rope | {"rope_theta": 1e4}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rope
    )
    positions = torch.arange(length).unsqueeze(0)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = Rotary(64, rope, 4096)(positions)
    torch.testing.assert_close(ours[0], cos[..., :32], rtol=0, atol=2e-4)  # fp32 angles of up to 5000 radians
    torch.testing.assert_close(ours[1], sin[..., :32], rtol=0, atol=2e-4)


def test_both_spellings_of_rope_and_the_family_default():
    older = {"rope_theta": 5e5, "rope_scaling": {k.replace("rope_type", "type"): v for k, v in LLAMA31.items()}}
    newer = {"rope_parameters": LLAMA31 | {"rope_theta": 5e5}}
    assert rope_parameters(older, 1e4) == rope_parameters(newer, 1e4) == LLAMA31 | {"rope_theta": 5e5}
    assert rope_parameters({}, 1e4) == {"rope_type": "default", "rope_theta": 1e4}
    gemma3 = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    old3 = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4)):
        assert rope_parameters(gemma3, theta, kind) == rope_parameters(old3, theta, kind)
        assert rope_parameters({}, theta, kind)["rope_theta"] == theta


def changed(folder, change):
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    with torch.device("meta"):
        return build_model(raw)


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("llama3", "model_type", "gpt2", "gpt2.*supported are llama"),
        ("llama3", "model_type", "qwen3_moe", "qwen3_moe"),
        ("llama3", "attention_dropout", 0.1, "attention_dropout 0.1"),
        ("llama3", "hidden_act", "relu2", "relu2.*silu"),
        ("llama3", "rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}, "longrope.*llama3"),
        ("llama3", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "needs factor"),
        ("llama3", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama3", "num_key_value_heads", 3, "4 attention heads over 3"),
        ("qwen2", "layer_types", ["linear_attention"] * 4, "linear_attention"),
        ("gemma2", "hidden_activation", "swish9", "swish9"),
        ("gemma3-text", "use_bidirectional_attention", True, "bidirectional"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tiny, name, field, value, says):
    with pytest.raises(ValueError, match=says):
        changed(tiny(name), lambda raw: raw.__setitem__(field, value))


def test_a_missing_size_is_named(tiny):
    with pytest.raises(ValueError, match="lacks intermediate_size"):
        changed(tiny("llama3"), lambda raw: raw.pop("intermediate_size"))


@pytest.mark.parametrize("name", ["qwen3", "gemma", "llama-bias"])
def test_head_dim_is_its_own_or_derived(tiny, name):
    model = lorarun.load(tiny(name))
    attention = model.model.layers[0].self_attn
    raw = json.loads((tiny(name) / "config.json").read_text())
    assert attention.head_dim == raw["head_dim"] != raw["hidden_size"] // raw["num_attention_heads"]
    assert attention.q_proj.weight.shape == (4 * raw["head_dim"], 64)
    derived = changed(tiny("llama3"), lambda raw: raw.pop("head_dim", None))
    assert derived.model.layers[0].self_attn.head_dim == 16


@pytest.mark.parametrize("hidden", [640, 1152, 2560, 3072, 5376])
def test_gemma_scales_embeddings_by_the_rounded_root(hidden):
    raw = {"model_type": "gemma3_text", "hidden_size": hidden, "num_hidden_layers": 1, "vocab_size": 8}
    with torch.device("meta"):
        model = build_model(raw)
    known = {640: 25.25, 1152: 34.0, 2560: 50.5, 3072: 55.5, 5376: 73.5}
    for dtype, root in ((torch.bfloat16, known[hidden]), (torch.float32, hidden**0.5)):
        table = torch.nn.Parameter(torch.randn(8, hidden).to(dtype))
        model.model.embed_tokens.weight = table
        ids = torch.arange(8).unsqueeze(0)
        expected = table[ids] * torch.tensor(root, dtype=dtype)
        assert torch.equal(model.model.embed_tokens(ids), expected)
    assert known[hidden] == torch.tensor(hidden**0.5).bfloat16().item()


@pytest.mark.parametrize(
    ("kind", "fields", "act"),
    [
        ("gemma", {"hidden_act": "gelu"}, "gelu_pytorch_tanh"),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, "gelu_pytorch_tanh"),
        ("gemma2", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ("gemma3_text", {}, "gelu_pytorch_tanh"),
    ],
)
def test_gemma_means_the_tanh_approximation(kind, fields, act):
    with torch.device("meta"):
        model = build_model({"model_type": kind, "num_hidden_layers": 1, **fields})
    assert model.model.layers[0].mlp.act == act


def test_qwen2_has_biases_that_no_field_announces(tiny):
    raw = json.loads((tiny("qwen2") / "config.json").read_text())
    assert not any("bias" in key for key in raw)
    attention = lorarun.load(tiny("qwen2")).model.layers[0].self_attn
    assert all(
        p.bias is not None and p.bias.abs().max() > 0 for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    assert attention.o_proj.bias is None


@pytest.mark.parametrize("name", ["gemma2", "gemma3-text"])
def test_gemma_in_fp16_is_refused_before_it_overflows(tiny, name):
    for bits in (16, 4):
        with pytest.raises(ValueError, match="float16.*bfloat16"):
            lorarun.load(tiny(name), bits=bits, dtype=torch.float16)


def test_a_text_config_may_leave_fields_to_the_defaults(tiny):
    raw = json.loads((tiny("gemma3") / "config.json").read_text())
    for field in ("rms_norm_eps", "hidden_activation", "rope_parameters"):
        raw["text_config"].pop(field, None)
    with torch.device("meta"):
        config = build_model(raw).config
    theirs = AutoConfig.for_model("gemma3_text")
    assert config.rms_norm_eps == theirs.rms_norm_eps and config.hidden_activation == theirs.hidden_activation
    assert {k: v["rope_theta"] for k, v in config.ropes.items()} == {"full_attention": 1e6, "sliding_attention": 1e4}


def test_family_defaults_are_those_of_transformers():
    """A field that a checkpoint leaves out means what the library that wrote it takes it to mean."""
    for kind in ("gemma", "gemma2", "gemma3_text"):
        with torch.device("meta"):
            config = build_model({"model_type": kind}).config
        theirs = AutoConfig.for_model(kind)
        for field in vars(config):
            if hasattr(theirs, field) and field not in ("ropes", "hidden_activation"):
                assert getattr(config, field) == getattr(theirs, field), (kind, field)


def test_hidden_states_and_packed_documents_are_the_documents_alone(tiny):
    for name in ("llama3", "gemma3-text", "qwen2-sliding"):
        model = lorarun.load(tiny(name))
        texts = [torch.randint(3, 900, (1, n)) for n in (5, 1, 14)]
        packed = torch.cat(texts, dim=1)
        documents = torch.tensor([[0] * 5 + [1] + [2] * 14])
        together = model(packed, documents=documents)
        alone = torch.cat([model(ids) for ids in texts], dim=1)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("hidden_size", "64", "hidden_size is '64'"),
        ("vocab_size", 1.5, "vocab_size is 1.5"),
        ("num_attention_heads", -4, "num_attention_heads is -4"),
        ("num_hidden_layers", 10**12, "num_hidden_layers is 1000000000000"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
        ("tie_word_embeddings", "x", "tie_word_embeddings is 'x'.*true or false"),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": -1}, "rope_parameters.factor is -1"),
        ("rope_parameters", [1], "rope_parameters is .1."),
        ("layer_types", ["full_attention"] * 5, "layer_types has 5 entries for num_hidden_layers 4"),
        ("layer_types", "full", "layer_types is 'full'"),
    ],
)
def test_values_that_a_field_cannot_have_are_refused(tiny, field, value, says):
    with pytest.raises(ValueError, match=says):
        changed(tiny("qwen3"), lambda raw: raw.__setitem__(field, value))


def test_what_stands_beside_a_text_config_and_inside():
    """sgl-project/sglang#11260: the outer level has what the text model's leaves out; its own word wins.
    deepspeedai/DeepSpeed#8341: the dtype in both spellings."""
    outer = {"tie_word_embeddings": False, "torch_dtype": "float16"}
    assert text_config(outer | {"text_config": {"vocab_size": 3}}) == outer | {"vocab_size": 3}
    assert text_config(outer | {"text_config": {"tie_word_embeddings": True}})["tie_word_embeddings"] is True
    assert stored_dtype(outer | {"text_config": {"dtype": None}}) == torch.float16
    assert stored_dtype({"dtype": "bfloat16"}) == stored_dtype({"torch_dtype": "torch.bfloat16"}) == torch.bfloat16
    assert stored_dtype({}) is None


def test_null_means_the_default_also_for_gemma_and_text_config(tiny):
    assert changed(tiny("gemma2"), lambda raw: raw.update(head_dim=None, rms_norm_eps=None)).config.head_dim == 256
    assert (
        changed(tiny("gemma2"), lambda raw: raw.update(attn_logit_softcapping=None)).config.attn_logit_softcapping
        is None
    )
    assert changed(tiny("llama3"), lambda raw: raw.update(text_config=None)).config.model_type == "llama"
    with pytest.raises(ValueError, match="text_config is 'x'"):
        changed(tiny("llama3"), lambda raw: raw.update(text_config="x"))


def test_empty_ids_are_named(tiny):
    model = lorarun.load(tiny("llama3"))
    for shape in ((0, 5), (1, 0), (5,)):
        with pytest.raises(ValueError, match="expected .batch, seq. with at least one token"):
            model(torch.zeros(shape, dtype=torch.int64))
