"""Names and fetching, against a hub of our own that huggingface_hub talks to as it talks to the real one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import HubServer, block_sockets
from safetensors.torch import save

from lorarun import hub as names
from lorarun.hub import ALIASES, resolve, resolve_adapter

WEIGHTS = save({"model.embed_tokens.weight": torch.arange(4096, dtype=torch.float32).reshape(64, 64)})
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": WEIGHTS,
}
SHARDS = {f"model-0000{n}-of-00002.safetensors": save({f"model.layers.{n}.w": torch.full((8,), n)}) for n in (1, 2)}
INDEX = {"weight_map": {f"model.layers.{n}.w": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
SHARDED = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(INDEX).encode(), **SHARDS}
ADAPTER = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": WEIGHTS}


# --- names ---------------------------------------------------------------------------------------------------------


def test_aliases_name_the_hub_s_own_repos() -> None:
    for alias, repo in {
        "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
        "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
        "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
        "llama-3.3-70b-instruct": "meta-llama/Llama-3.3-70B-Instruct",
        "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
        "qwen2.5-72b": "Qwen/Qwen2.5-72B",
        "qwen3-0.6b": "Qwen/Qwen3-0.6B",
        "qwen3-14b-base": "Qwen/Qwen3-14B-Base",
        "gemma-2-9b-it": "google/gemma-2-9b-it",
        "gemma-3-270m": "google/gemma-3-270m",
        "gemma-3-270m-instruct": "google/gemma-3-270m-it",
        "gemma-3-27b": "google/gemma-3-27b-pt",
        "smollm2-1.7b-instruct": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    }.items():
        assert ALIASES[alias] == repo
    makers = {"meta-llama", "Qwen", "google", "HuggingFaceTB"}  # nobody's copies
    assert {repo.partition("/")[0] for repo in ALIASES.values()} == makers
    assert all(alias == alias.lower() and "/" not in alias for alias in ALIASES)
    for repo in ALIASES.values():  # a repo's own name, in small letters, never means another repo
        own = repo.partition("/")[2].lower().removeprefix("meta-")
        assert ALIASES[own] == repo


def test_an_alias_is_fetched_from_its_repo_and_says_so(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    commit = hub.add("HuggingFaceTB/SmolLM2-135M", MODEL)
    source = resolve("SmolLM2-135M")
    assert source[0] == "SmolLM2-135M" and source[2:] == ("HuggingFaceTB/SmolLM2-135M", commit)
    assert capsys.readouterr().err.startswith("SmolLM2-135M -> HuggingFaceTB/SmolLM2-135M\n")


def test_a_local_folder_needs_no_hub(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = block_sockets(monkeypatch)
    folder = tmp_path / "out" / "merged"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for name in (folder, str(folder), "out/merged", "./out/merged", "out/merged/"):
        assert resolve(name)[1:] == (Path(name), None, None)
    with pytest.raises(ValueError, match=r"out/merged is a local folder, so revision='main' has no meaning"):
        resolve("out/merged", revision="main")
    with pytest.raises(ValueError, match=r"config\.json is a file; give the folder"):
        resolve("out/merged/config.json")
    with pytest.raises(ValueError, match=r"The folder out has no config\.json or adapter_config\.json"):
        resolve("out")
    shutil.copytree(folder, tmp_path / "qwen3-8b")
    capsys.readouterr()
    assert resolve("qwen3-8b").repo is None
    assert "not the alias" in capsys.readouterr().err
    (tmp_path / "qwen3-4b").mkdir()
    with pytest.raises(ValueError, match="this folder hides it"):
        resolve("qwen3-4b")
    shutil.copytree(folder, tmp_path / "qwen3-4b" / "merged")
    with pytest.raises(ValueError, match=r"is no checkpoint\. Did you mean qwen3-4b/merged\?"):
        resolve("qwen3-4b")
    (tmp_path / "qwen3-4b" / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"name the file itself, such as qwen3-4b/model\.gguf"):
        resolve("qwen3-4b")
    assert attempts == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-3.1-8b-instuct", r"names no model: .*Did you mean llama-3\.1-8b or llama-3\.1-8b-instruct or"),
        ("qwen3-8b-instruct", r"Did you mean .*qwen3-8b"),
        ("gpt2", r"'gpt2' names no model: expected a local folder, a hub id such as"),
        ("", r"'' names no model"),
        ("./missing", r"There is no folder \./missing \(seen from "),
        ("/missing/model", r"There is no folder /missing/model"),
        ("runs/july/model", r"There is no folder runs/july/model"),
        (r"C:\models\llama", r"There is no folder C:\\models\\llama"),
        ("out/missing.gguf", r"There is no file out/missing\.gguf \(seen from .*expected a GGUF file"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", r"is an address; for that repo write 'Qwen/Qwen3-8B'"),
    ],
)
def test_anything_else_is_refused_with_a_hint(hub: HubServer, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(name)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["adapter", "./adapter", "runs/july/adapter", "qwen3-0.6b", ""])
def test_an_adapter_that_is_not_there_is_no_missing_model(hub: HubServer, name: str) -> None:
    with pytest.raises(
        ValueError, match=r"expected the folder of an adapter, with adapter_config\.json and adapter_mo"
    ):
        resolve_adapter(name)
    assert hub.requests == []


# --- what is fetched -----------------------------------------------------------------------------------------------


def test_only_the_files_of_the_checkpoint_are_fetched(hub: HubServer) -> None:
    other = {
        "README.md": b"read me",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": WEIGHTS + b" ",
        "original/consolidated.00.pth": b"pickle",
        "original/params.json": b"{}",
        "onnx/model.onnx": b"onnx",
        "model-q4.gguf": b"gguf",
        "modeling_custom.py": b"print('never run')",
    }
    extra = {"chat_template.jinja": b"{{ messages }}", "additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    commit = hub.add("acme/sharded", SHARDED | extra | other)
    source = resolve("acme/sharded")
    found = {str(path.relative_to(source.folder)): path for path in source.folder.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == SHARDED | extra
    assert source[2:] == ("acme/sharded", commit)
    assert set(hub.fetched()) <= SHARDED.keys() | extra.keys()


def test_a_single_file_wins_over_a_stale_index(hub: HubServer) -> None:
    hub.add("acme/both", SHARDED | MODEL)
    folder = resolve("acme/both").folder
    assert {path.name for path in folder.iterdir()} == MODEL.keys()


def test_the_revision_asked_for_is_the_one_fetched(hub: HubServer) -> None:
    old = hub.add("acme/tiny", MODEL | {"config.json": b'{"old": 1}'})
    new = hub.add("acme/tiny", MODEL)
    pull = hub.add("acme/tiny", MODEL | {"config.json": b'{"pull": 1}'}, branch="refs/pr/1")
    for revision, commit in ((None, new), ("main", new), (old, old), ("refs/pr/1", pull)):
        source = resolve("acme/tiny", revision=revision)
        assert source.revision == commit
        assert (source.folder / "config.json").read_bytes() == hub.repos["acme/tiny"].commits[commit]["config.json"]
    with pytest.raises(ValueError, match=r"^acme/tiny has no revision 'v9': give a branch, tag or commit"):
        resolve("acme/tiny", revision="v9")


def test_a_renamed_repo_is_followed(hub: HubServer) -> None:
    commit = hub.add("acme/new", MODEL)
    hub.add("acme/old", {}, moved_to="acme/new")
    assert resolve("acme/old")[2:] == ("acme/old", commit)


def test_a_broken_transfer_is_taken_up_again(hub: HubServer) -> None:
    hub.add("acme/tiny", MODEL)
    hub.cut.add(hashlib.sha256(WEIGHTS).hexdigest())
    folder = resolve("acme/tiny").folder
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert sum(method == "GET" and path.startswith("/cdn/") for method, path in hub.requests) == 2


def test_a_refused_config_saves_the_weights(hub: HubServer) -> None:
    hub.add("acme/tiny", MODEL)

    def check(folder: Path) -> None:
        raise ValueError(f"unsupported: {(folder / 'config.json').read_text()}")

    with pytest.raises(ValueError, match="unsupported: .*llama"):
        resolve("acme/tiny", check=check)
    assert not any(path.startswith("/cdn/") for _, path in hub.requests)


def test_adapter_repos(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add("acme/adapter", ADAPTER | {"training_args.bin": b"pickle"})
    for source in (resolve("acme/adapter"), resolve_adapter("acme/adapter")):
        assert {path.name for path in source.folder.iterdir()} == ADAPTER.keys()
        assert source.revision == commit
    hub.add("acme/full", MODEL | ADAPTER)
    full = resolve("acme/full").folder
    assert {path.name for path in full.iterdir()} == MODEL.keys() | {"adapter_config.json"}
    assert (resolve_adapter("acme/full").folder / "adapter_model.safetensors").read_bytes() == WEIGHTS
    hub.add("acme/tiny", MODEL)
    with pytest.raises(
        ValueError, match=r"cannot be loaded as an adapter: it lacks adapter_config\.json and adapter_mo"
    ):
        resolve_adapter("acme/tiny")
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        resolve_adapter(full.parent)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b""}, r"only as pickles \(pytorch_model\.bin\).*revision"),
        (ADAPTER | {"adapter_model.safetensors": None, "adapter_model.bin": b""}, r"only as pickles \(adapter_model"),
        ({"model-q4.gguf": b""}, r"lacks config\.json and model\.safetensors and holds model-q4\.gguf; use the repo"),
        ({"config.json": b"{}", "README.md": b""}, r"lacks model\.safetensors and holds config\.json, README\.md"),
        ({"model.safetensors": WEIGHTS}, r"it lacks config\.json and holds model\.safetensors"),
        ({}, r"holds nothing"),
        (
            {name: data for name, data in SHARDED.items() if "00002-of" not in name},
            r"incomplete: its model\.safetensors\.index\.json names model-00002-of-00002\.safetensors",
        ),
        (
            SHARDED | {"model.safetensors.index.json": b'{"weight_map": {"w": "../../other/model.safetensors"}}'},
            r'must have a "weight_map" from tensor names to names of files beside it',
        ),
    ],
)
def test_an_unusable_repo_is_refused_before_its_weights(
    hub: HubServer, files: dict[str, bytes | None], message: str
) -> None:
    hub.add("acme/odd", {name: data for name, data in files.items() if data is not None})
    with pytest.raises(ValueError, match=message):
        resolve("acme/odd")
    assert not any(path.startswith("/cdn/") for _, path in hub.requests)


# --- refusals of the hub -------------------------------------------------------------------------------------------


def test_gated_private_missing_and_tokens(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/gated", MODEL, gated=True)
    hub.add("acme/private", MODEL, private=True)
    with pytest.raises(
        PermissionError, match=r"^acme/gated is gated and no token was given: accept its terms at https"
    ):
        resolve("acme/gated")
    for repo in ("acme/private", "acme/missing"):
        with pytest.raises(ValueError, match=rf"no folder {repo} here and no such model or adapter on the hub, or it"):
            resolve(repo)
        with pytest.raises(
            ValueError, match=rf"no folder {repo} here and no such adapter on the hub, or it is private"
        ):
            resolve_adapter(repo)
    monkeypatch.setenv("HF_TOKEN", "hf_stale")
    with pytest.raises(
        PermissionError, match=r"refused access to acme/gated \(401\) and the token in use has no access"
    ):
        resolve("acme/gated")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    for repo in ("acme/gated", "acme/private"):
        assert (resolve(repo).folder / "model.safetensors").read_bytes() == WEIGHTS
    with pytest.raises(ValueError, match=r"acme/missing here .* the token in use has no access"):
        resolve("acme/missing")


def test_without_network_the_cache_serves_or_one_sentence_says_why(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.add("acme/tiny", MODEL)
    hub.add("acme/other", MODEL)
    resolve("acme/tiny")
    hub.down = True
    with pytest.raises(ConnectionError, match=r"could not be asked for it \(it answered 503\): check the network"):
        resolve("acme/other")
    with pytest.raises(ConnectionError, match=r"or give the folder of an adapter\.$"):
        resolve_adapter("acme/other")
    hub.down = False
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    capsys.readouterr()
    assert resolve("acme/tiny").revision == commit
    assert "could not be asked for it (ConnectError: " in (notice := capsys.readouterr().err)
    assert f"Going on with the cached copy at {commit}." in notice
    with pytest.raises(ConnectionError, match=r"could not be asked for it \(ConnectError: .*check the network"):
        resolve("acme/other")


def test_losing_the_network_in_the_middle(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/tiny", MODEL)
    with pytest.raises(ConnectionError, match=r"could not be asked for it.*what was fetched is kept"):
        resolve("acme/tiny", check=lambda folder: block_sockets(monkeypatch))


def test_a_full_disk_says_so(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/tiny", MODEL)

    def no_space(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", no_space)
    with pytest.raises(OSError, match=r"the disk of .*/cache is full: free some space or set HF_HOME") as caught:
        resolve("acme/tiny")
    assert caught.value.errno == errno.ENOSPC


def test_our_own_mistakes_are_not_disguised_as_the_hub_s(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names._explain(ZeroDivisionError(), "acme/tiny", None) is None
    assert names._explain(huggingface_hub.errors.HFValidationError("bad name"), "acme/tiny", None) is None


# --- offline -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_reads_the_cache_and_asks_nobody(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    old = hub.add("acme/sharded", SHARDED)
    new = hub.add("acme/sharded", SHARDED | {"config.json": b'{"new": 1}'})
    hub.add("acme/adapter", ADAPTER)
    folder = resolve("acme/sharded").folder
    resolve("acme/sharded", revision=old)
    resolve("acme/adapter")
    attempts = block_sockets(monkeypatch)
    hub.requests.clear()  # an open connection could be used again without connecting
    monkeypatch.setenv(variable, "1")
    assert resolve("acme/sharded") == ("acme/sharded", folder, "acme/sharded", new)
    assert resolve("acme/sharded", revision=old).revision == old
    assert resolve("acme/adapter").folder == resolve_adapter("acme/adapter").folder
    with pytest.raises(
        FileNotFoundError,
        match=rf"^acme/none at .*\(config\.json missing\) and {variable} .*there is none acme/none here",
    ):
        resolve("acme/none")
    with pytest.raises(FileNotFoundError, match=r"^acme/sharded at revision v2 is not complete in the cache .*/cache"):
        resolve("acme/sharded", revision="v2")
    with pytest.raises(FileNotFoundError, match=r"\(adapter_config\.json missing\)"):
        resolve_adapter("acme/sharded")
    os.remove((folder / "model-00002-of-00002.safetensors").resolve())  # the link stays and dangles
    with pytest.raises(FileNotFoundError, match=r"\(model-00002-of-00002\.safetensors missing\)"):
        resolve("acme/sharded")
    assert attempts == [] and hub.requests == []


def test_the_environment_alone_decides_where_and_as_whom(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add("acme/gated", MODEL, gated=True)
    code = "import socket\nfrom lorarun.hub import resolve\nprint(resolve('acme/gated').folder)\n"
    block = "def refuse(*_): raise SystemExit('a connection was tried')\nsocket.socket.connect = refuse\n"
    root = Path(__file__).resolve().parent.parent
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    online = plain | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token}
    offline = plain | {"HF_HOME": str(tmp_path / "home"), "TRANSFORMERS_OFFLINE": "1"}
    for text, environment in ((code, online), (code.replace("\n", "\n" + block, 1), offline)):
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=root, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert ("Fetching" in done.stderr) == (environment is online)  # progress is shown
        expected = tmp_path / "home" / "hub" / "models--acme--gated" / "snapshots" / commit
        assert Path(done.stdout.strip()) == expected
