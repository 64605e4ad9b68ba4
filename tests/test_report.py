"""The report against the model it describes, after each thing that can change what runs."""

import pytest
import torch

import lorarun
from lorarun import decode
from lorarun.answer import Row
from lorarun.cache import Cache
from lorarun.kernels.backend import reference
from lorarun.sampling import Sampling


def test_storage_counts_every_byte(tiny):
    model = lorarun.load(tiny("llama3"), dtype=torch.bfloat16)
    lorarun.add_lora(model, r=4)
    facts = lorarun.report(model).to_dict()
    assert facts["model"]["parameters"] == sum(p.numel() for n, p in model.named_parameters() if "lora_" not in n)
    assert facts["model"]["trainable"] == sum(p.numel() for p in lorarun.lora_parameters(model))
    sizes = {group: float(text.split()[0].replace(",", "")) for group, text in facts["storage"].items()}
    held = sum(p.nbytes for p in model.parameters()) / 2**20
    assert abs(sum(sizes.values()) - held) < 0.05 * len(sizes)  # each is printed to a tenth of a MiB
    assert "bfloat16" in facts["storage"]["projections"] and "float32" in facts["storage"]["adapters"]


def test_the_state_of_each_adapter(tiny):
    model = lorarun.load(tiny("qwen3"))
    assert "base model" in str(lorarun.report(model))
    lorarun.add_lora(model, r=4, alpha=8, name="one")
    lorarun.add_lora(model, r=2, targets=["q_proj"], name="two")

    def states():
        return {name: text.split(";")[0] for name, text in lorarun.report(model).to_dict()["adapters"].items()}

    assert states() == {"one": "off", "two": "live"}
    lorarun.use_adapter(model, "one")
    lorarun.merge(model)
    assert states() == {"one": "merged into the weights", "two": "off"}
    lorarun.unmerge(model)
    with lorarun.adapters_disabled(model):
        assert states() == {"one": "off", "two": "off"}
    assert states() == {"one": "live", "two": "off"}
    text = lorarun.report(model).to_dict()["adapters"]["one"]
    assert "r=4, scale=2" in text and "28 projections" in text


def test_stores_and_what_was_left_dense_are_named(tiny):
    model = lorarun.load(tiny("llama3"), bits=4, skip=["layers.1.mlp.down_proj"])
    storage = lorarun.report(model).to_dict()["storage"]
    assert "NF4" in storage["projections"]
    assert "model.layers.1.mlp.down_proj" in storage["projections left dense"]


@pytest.mark.parametrize(
    ("name", "asked", "projections", "rest"),
    [
        ("llama3", {}, ("dense float32", "dense bfloat16", "as stored, float32"), "dense bfloat16"),
        ("llama3", {"bits": 4}, ("NF4 in blocks of 64", "dense bfloat16", "bits=4, float32"), "dense bfloat16"),
        ("llama3", {"bits": 8}, ("FP8 e4m3, a scale a row", "dense bfloat16", "bits=8, float32"), "dense bfloat16"),
        ("llama3-bnb4", {}, ("NF4 in blocks of 64", "NF4 in blocks of 64", "as stored, float32"), "dense bfloat16"),
        ("llama3-bnb4", {"bits": 16}, ("dense float32", "NF4 in blocks of 64", "bits=16"), "dense bfloat16"),
        ("llama3-fp8", {}, ("FP8 e4m3, blocks", "FP8 e4m3, blocks of 128 × 128", "as stored"), "dense bfloat16"),
        ("q8_0", {}, ("dense float32", "GGUF Q8_0", "as stored, float32"), "GGUF Q8_0, dense float32"),
        ("f16", {"bits": 4}, ("NF4 in blocks of 64", "dense float16", "bits=4"), "dense float16, dense float32"),
    ],
)
def test_each_group_has_what_runs_what_is_stored_and_what_was_asked(tiny, tmp_path, name, asked, projections, rest):
    path = tmp_path / "model.gguf"
    if name in ("q8_0", "f16"):
        lorarun.save_gguf(lorarun.load(tiny("llama3"), device="cpu"), path, dtype=name)
    model = lorarun.load(path if path.exists() else tiny(name), device="cpu", **asked)
    storage = lorarun.report(model).to_dict()["storage"]
    runs, stored, wanted = projections
    held, _, origin = storage["projections"].partition(" (stored: ")
    assert runs in held and origin.startswith(stored) and f"asked: {wanted}" in origin
    held, _, origin = storage["embedding, head, final norm"].partition(" (stored: ")
    assert held.endswith("dense float32") and origin == f"{rest}; asked: float32)"
    stored_norms = "dense float32" if path.exists() else "dense bfloat16"
    assert storage["norms, biases"].endswith(f"dense float32 (stored: {stored_norms}; asked: float32)")


def test_operations_on_a_cpu_name_the_reason(tiny):
    facts = lorarun.report(lorarun.load(tiny("gemma3-text"))).to_dict()["operations"]
    assert "no Triton here" in facts["projections"] and "no Triton here" in facts["norm, rotary, gate"]
    assert {"attention, full", "attention, window 8"} <= facts.keys()
    assert facts["decoding"].startswith("steps one by one (graphs are captured on CUDA devices, not on cpu)")
    assert facts["decoding"].endswith("attention: torch")


def test_decoding_is_what_a_decoder_does(tiny, monkeypatch):
    """Where graphs are captured, what Python would do in a step is found and named, by report and decoder alike."""
    monkeypatch.setattr(decode, "capturable", lambda model: None)
    model = lorarun.load(tiny("llama3"), bits=4, device="cpu")

    def said():
        found = decode.Decoder(model, [Row([5], 0)], Cache(model, 1, 20), 12, Sampling()).obstacle
        text = lorarun.report(model).to_dict()["operations"]["decoding"]
        assert text.startswith("steps replayed as a CUDA graph;" if found is None else f"steps one by one ({found});")
        return found, text

    found, text = said()
    assert found is None and text.endswith("up to 64 rows from codes: 0 of 16 stored groups")
    hook = model.model.layers[1].register_forward_hook(lambda *args: None)
    assert "hooks" in said()[0]
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert said()[0] == "autocast is on"
    model = lorarun.load(tiny("llama-dynamic"), device="cpu")
    assert "dynamic" in said()[0]


@pytest.mark.gpu
def test_operations_on_a_gpu_follow_hooks_and_the_forced_reference(tiny, device):
    model = lorarun.load(tiny("llama3"), device=device)
    lorarun.add_lora(model, r=8)
    facts = lorarun.report(model).to_dict()["operations"]
    assert facts["projections"].startswith("16 of 16 groups") and facts["norm, rotary, gate"] == "Triton"
    assert facts["attention, full"].startswith("cuDNN") and "packed documents: Triton" in facts["attention, full"]
    model.model.layers[2].self_attn.k_proj.register_forward_hook(lambda *args: None)
    facts = lorarun.report(model).to_dict()["operations"]
    assert facts["projections"].startswith("15 of 16 groups") and "hook" in facts["projections"]
    assert facts["decoding"].startswith("steps one by one (a Linear has hooks")
    facts = lorarun.report(lorarun.load(tiny("llama3"), bits=8, device=device, dtype=torch.bfloat16)).to_dict()
    expected = "steps replayed as a CUDA graph; attention: Triton; up to 64 rows from codes: 16 of 16 stored groups"
    assert facts["operations"]["decoding"] == expected
    with reference():
        assert "it was asked for" in lorarun.report(model).to_dict()["operations"]["projections"]
