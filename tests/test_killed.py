"""A process that dies while it saves: what stands under the final name is the old file or folder, the new one, or
nothing, never a part.

The kernel's SIGKILL comes at every point where the process is about to open, rename, remove or flush something in the
folder that it writes to, which Python's audit events tell, and in each file that it has opened and not yet written to.
Adapters alone have such a test beside their others, in test_adapter.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import make

import lorarun
from lorarun.gguf_read import open_gguf

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import os, shutil, signal, sys, threading
from pathlib import Path
import torch
from tqdm import tqdm
torch.set_num_threads(1)
tqdm.set_lock(threading.RLock())  # its own is shared between processes, and the dead would keep it
import lorarun

what, base, old, root, every = *map(str, sys.argv[1:5]), int(sys.argv[5])
model = lorarun.add_lora(lorarun.load(base), r=2, targets=["q_proj"], seed=0)
for i, parameter in enumerate(lorarun.lora_parameters(model)):
    parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(i))
ROW = {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "quick"}]}
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.fsync"}
WRITES = {"write", "writelines", "tofile", "flush", "close"}


def act(folder):
    if what == "gguf":
        lorarun.save_gguf(model, folder / "model.gguf")
    elif what == "gguf adapter":
        lorarun.save_gguf(model, folder / "model.gguf", adapter_only=True)
    elif what == "merged":
        lorarun.save_merged(model, folder / "merged")
    else:
        lorarun.fit(model, [ROW], folder, epochs=2, max_tokens=64)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def before(left, folder):
    # instead of the event of this number
    def seen(event, arguments):
        nonlocal left
        if event in EVENTS and (event == "os.fsync" or str(folder) in str(arguments[0])):
            if left == 0:
                die()
            left -= 1

    fsync = os.fsync
    os.fsync = lambda *arguments: (seen("os.fsync", arguments), fsync(*arguments))
    sys.addaudithook(seen)


def within(left, folder):
    # instead of the first write to the file that is opened for writing as the one of this number
    def seen(event, arguments):
        nonlocal left
        if event == "open" and str(folder) in str(arguments[0]) and set(arguments[1] or "") & set("wax+"):
            if left == 0:
                sys.setprofile(lambda frame, kind, what: kind == "c_call" and what.__name__ in WRITES and die())
            left -= 1

    sys.addaudithook(seen)


(Path(root) / "warm").mkdir()
act(Path(root) / "warm")  # what is imported and cached at first use need not be so in each child
shutil.rmtree(Path(root) / "warm")
for die_at in (before, within):
    for step in range(0, 1000, every if die_at is before else 1):
        folder = Path(root) / f"{die_at.__name__} {step:03}"
        shutil.copytree(old, folder)
        child = os.fork()
        if child == 0:
            die_at(step, folder)
            act(folder)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            break
    assert status == 0 and step > 0
"""


def killed(what: str, base: Path, old: Path, root: Path, every: int = 1) -> list[Path]:
    """What is left of each run; the last one was not killed."""
    root.mkdir()
    command = [sys.executable, "-c", SCRIPT, what, base, old, root, str(every)]
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True, capture_output=True)
    found = sorted(root.iterdir())
    assert len(found) > 3
    return found


@pytest.fixture
def base(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = shutil.copytree(tiny("llama-tied"), tmp_path / "base")
    return make(folder, template="{% for m in messages %}{{ m['role'] + m['content'] + '</s>' }}{% endfor %}")


@pytest.mark.parametrize("what", ["gguf", "gguf adapter"])
def test_a_gguf_file_is_the_old_or_the_new_one(what: str, base: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.gguf").write_bytes(b"old")
    folders = killed(what, base, tmp_path / "old", tmp_path / "runs")
    contents = [(folder / "model.gguf").read_bytes() for folder in folders]
    assert set(contents) == {b"old", contents[-1]} and contents[0] == b"old"
    assert open_gguf(folders[-1] / "model.gguf", adapter=what != "gguf").tensors
    assert [path.name for path in folders[-1].iterdir()] == ["model.gguf"]


def test_a_merged_folder_is_whole_or_not_there(base: Path, tmp_path: Path) -> None:
    (tmp_path / "old" / "merged").mkdir(parents=True)  # an empty folder is taken for none
    folders = killed("merged", base, tmp_path / "old", tmp_path / "runs", every=4)
    kept = load_file(folders[-1] / "merged" / "model.safetensors")
    states = set()
    for folder in folders:
        names = {path.name for path in folder.glob("merged/*")}
        states.add(bool(names))
        if names:
            assert names == {path.name for path in folders[-1].glob("merged/*")}
            held = load_file(folder / "merged" / "model.safetensors")
            assert held.keys() == kept.keys() and all(torch.equal(held[name], kept[name]) for name in kept)
    assert states == {True, False}


def test_a_training_run_leaves_whole_lines_pictures_and_adapters(base: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    lorarun.save_adapter(lorarun.add_lora(lorarun.load(base), r=3, targets=["v_proj"], seed=7), old / "adapter")
    (old / "loss.png").write_bytes(b"old")
    (old / "metrics.jsonl").write_text('{"step": 99}\n')
    adapters, pictures, lengths = set(), set(), set()
    for folder in killed("fit", base, old, tmp_path / "runs"):
        text = (folder / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]  # each is whole
        assert text == "" or text.endswith("\n")
        lengths.add(len(lines))
        assert [line["step"] for line in lines] in ([99], list(range(1, len(lines) + 1)))
        picture = (folder / "loss.png").read_bytes()
        pictures.add("old" if picture == b"old" else "new" if picture.endswith(b"IEND\xaeB`\x82") else "part")
        if (folder / "adapter" / "adapter_config.json").exists():
            model = lorarun.load(base, adapter=folder / "adapter")  # strict: raises if its two files do not match
            adapters.add(model.adapters["default"].r)
    assert adapters == {2, 3} and pictures == {"old", "new"} and len(lengths) > 1
