"""Uploads, through huggingface_hub's own client to a hub of ours: only what was asked for, and nothing is deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import HubServer
from peft_side import fill_b
from safetensors.torch import load

import lorarun
from lorarun.nn import Model

Tiny = Callable[[str], Path]


@pytest.fixture
def signed_in(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    return hub


def adapted(folder: Path) -> Model:
    model = lorarun.add_lora(lorarun.load(folder, dtype=torch.float32), r=4, alpha=8, seed=0)
    fill_b(model)
    return model


def files_of(hub: HubServer, repo: str) -> dict[str, bytes]:
    return hub.repos[repo].commits[hub.repos[repo].refs["main"]]


def test_an_adapter(signed_in: HubServer, tiny: Tiny, tmp_path: Path) -> None:
    hub = signed_in
    commit = hub.add("meta/base", tiny("llama-tied"))
    model = lorarun.add_lora(lorarun.load("meta/base", dtype=torch.float32), r=4, alpha=8, seed=0)
    fill_b(model)
    assert not [path for method, path in hub.requests if method == "POST"]  # nothing before it is asked for
    url = lorarun.push_to_hub(model, "me/adapter", data="a hundred letters")
    files = files_of(hub, "me/adapter")
    assert hub.repos["me/adapter"].private and url.startswith(hub.url)
    a = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    written = load(files["adapter_model.safetensors"])
    assert torch.equal(written[a], dict(model.named_parameters())[a[17:].replace("A.w", "A.default.w")].detach())
    card = huggingface_hub.ModelCard(files["README.md"].decode())
    stated = (card.data.base_model, card.data.library_name, card.data.to_dict()["revision"])
    assert stated == ("meta/base", "peft", commit)
    assert "a hundred letters" in card.text and "- r: `4`" in card.text and "operations" in card.text
    assert str(tmp_path) not in card.content


def test_a_merged_folder_beside_what_is_there(signed_in: HubServer, tiny: Tiny, tmp_path: Path) -> None:
    hub = signed_in
    model = adapted(tiny("qwen3-sharded"))
    lorarun.save_merged(model, tmp_path / "merged")
    hub.add("me/merged", {"notes.txt": b"mine", "config.json": b"{}"})
    with pytest.raises(ValueError, match="me/merged is public"):
        lorarun.push_to_hub(tmp_path / "merged", "me/merged", model=model)
    assert files_of(hub, "me/merged").keys() == {"notes.txt", "config.json"}
    lorarun.push_to_hub(tmp_path / "merged", "me/merged", private=False, model=model)
    files = files_of(hub, "me/merged")
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir()}
    assert {name: files[name] for name in wanted} == wanted and files["notes.txt"] == b"mine"
    card = huggingface_hub.ModelCard(files["README.md"].decode())
    assert card.data.library_name == "transformers" and card.data.base_model is None  # the base is a folder here
    assert str(tiny("qwen3-sharded")) not in card.content
    hub.add("me/merged", files | {"README.md": b"my own words"})
    lorarun.push_to_hub(tmp_path / "merged", "me/merged", private=False, data="else")
    assert files_of(hub, "me/merged")["README.md"] == b"my own words"


def test_what_is_refused(signed_in: HubServer, tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected owner/name"):
        lorarun.push_to_hub(tmp_path, "adapter")
    with pytest.raises(ValueError, match="no adapter is active"):
        lorarun.push_to_hub(lorarun.load(tiny("llama-tied")), "me/adapter")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secrets.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match=r"neither adapter_config\.json nor config\.json"):
        lorarun.push_to_hub(tmp_path / "other", "me/adapter")
    assert not signed_in.requests
