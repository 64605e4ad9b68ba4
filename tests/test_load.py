"""Loading as a whole: from the hub and offline, with an adapter, and what is refused before memory is spent."""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest
import torch
from hub_server import HubServer, block_sockets
from safetensors.torch import load_file
from toy import make

import lorarun


def served(hub: HubServer, tiny, tmp_path, name: str, repo: str, **properties) -> str:
    """A tiny checkpoint with a tokenizer as a repository; the commit it got."""
    folder = tmp_path / "made" / repo
    shutil.copytree(tiny(name), folder, ignore=shutil.ignore_patterns("reference.safetensors"))
    make(folder)
    return hub.add(repo, folder, **properties)


def logits(model, tiny, name):
    return model(load_file(tiny(name) / "reference.safetensors")["input_ids"])


def test_from_the_hub_at_a_revision_and_again_offline(hub, tiny, tmp_path, monkeypatch):
    first = served(hub, tiny, tmp_path, "llama3-sharded", "owner/model")
    model = lorarun.load("owner/model", device="cpu")
    assert model.source.repo == "owner/model" and model.source.revision == first
    assert model.tokenizer is not None
    expected = load_file(tiny("llama3-sharded") / "reference.safetensors")["logits"]
    torch.testing.assert_close(logits(model, tiny, "llama3-sharded"), expected, rtol=0, atol=1e-4)
    assert not any(name.endswith((".bin", ".pt", "reference.safetensors")) for name in hub.fetched())

    lorarun.add_lora(model, r=4, seed=0)
    for parameter in lorarun.lora_parameters(model):
        parameter.data.normal_()
    live = logits(model.eval(), tiny, "llama3-sharded")
    lorarun.save_adapter(model, tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "owner/model" and written["revision"] == first
    hub.add("owner/adapter", tmp_path / "adapter")
    # The base moves on; an adapter keeps to the revision that it was trained on.
    shutil.rmtree(tmp_path / "made")
    second = served(hub, tiny, tmp_path, "llama-linear", "owner/model")
    assert second != first
    again = lorarun.load("owner/adapter", device="cpu")
    assert again.source.revision == first
    torch.testing.assert_close(logits(again, tiny, "llama3-sharded"), live, rtol=0, atol=1e-5)

    attempts = block_sockets(monkeypatch)
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
        for offline in (
            lorarun.load("owner/adapter", device="cpu"),
            lorarun.load("owner/model", revision=first, adapter="owner/adapter", device="cpu"),
        ):
            torch.testing.assert_close(logits(offline, tiny, "llama3-sharded"), live, rtol=0, atol=1e-5)
            assert offline.tokenizer is not None
        with pytest.raises(FileNotFoundError, match="owner/other"):
            lorarun.load("owner/other")
        monkeypatch.delenv(variable)
    assert attempts == []


def test_an_unsupported_model_costs_no_weights(hub, tmp_path):
    hub.add("owner/strange", {"config.json": b'{"model_type": "mamba"}', "model.safetensors": b"x" * 5000})
    with pytest.raises(ValueError, match="mamba"):
        lorarun.load("owner/strange")
    assert not any("safetensors" in name for name in hub.fetched())
    assert huggingface_hub.constants.HF_HUB_CACHE.startswith(str(tmp_path))


def test_dtype_bits_and_mode(tiny):
    model = lorarun.load(tiny("qwen3"), device="cpu")
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    half = lorarun.load(tiny("qwen3"), device="cpu", dtype=torch.bfloat16, bits=16, mmap=False)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    for a, b in zip(model.parameters(), half.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)
    assert half.lm_head.weight is half.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"bits": 3}, "bits=3"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"dtype": "bfloat16"}, "torch.bfloat16"),
        ({"revision": "main"}, "revision"),
        ({"bits": 4, "skip": ["no_such_proj"]}, "no_such_proj"),
        ({"adapter": "no/where/at/all"}, "no/where"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tiny, arguments, says):
    with pytest.raises((ValueError, OSError), match=says):
        lorarun.load(tiny("llama3"), **arguments)


def test_what_contradicts_itself_is_refused(tiny, tmp_path):
    model = lorarun.add_lora(lorarun.load(tiny("llama-tied"), device="cpu"), r=2)
    lorarun.save_adapter(model, tmp_path / "adapter")
    lorarun.save_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="is an adapter itself; give its base as the name"):
        lorarun.load(tmp_path / "adapter", adapter=tmp_path / "adapter")
    with pytest.raises(ValueError, match="is a local folder, so revision='v2' has no meaning"):
        lorarun.load_adapter(model, tmp_path / "adapter", name="two", revision="v2")
    with pytest.raises(ValueError, match="is a local file, so revision='v2' has no meaning"):
        lorarun.load(tmp_path / "model.gguf", revision="v2")
    with pytest.raises(ValueError, match="holds a model, not an adapter"):
        lorarun.load_adapter(model, tiny("llama-tied"), name="two")
    with pytest.raises(
        ValueError, match=r"does not fit this model:(.|\n)*It names .*llama-tied as its base; this model is"
    ):
        lorarun.load(tiny("qwen3"), adapter=tmp_path / "adapter", device="cpu")
    assert list(model.adapters) == ["default"]


def test_a_vision_tower_is_left_aside_and_counted(tiny, capsys):
    """sgl-project/sglang#11260"""
    folder = tiny("gemma3")
    lorarun.load(folder, device="cpu")
    names = load_file(folder / "model.safetensors").keys()
    count = sum("vision" in name or "projector" in name for name in names)
    assert count > 0 and f"load: {count} tensors of a vision tower are left aside" in capsys.readouterr().err
    lorarun.load(tiny("gemma3-text"), device="cpu")
    assert "vision" not in capsys.readouterr().err


def test_no_tokenizer_is_said_by_the_calls_that_need_one(tiny):
    model = lorarun.load(tiny("llama3"), device="cpu")
    assert model.tokenizer is None
    with pytest.raises(ValueError, match="tokenizer"):
        lorarun.generate(model, "Hello", max_new_tokens=2)
    with pytest.raises(ValueError, match="tokenizer"):
        lorarun.batches([{"text": "Hello"}], model.tokenizer)
