"""What every test may ask for: tiny checkpoints, real checkpoints, and an accelerator when there is one.

Checkpoints stay under `.cache/` between runs, because making or fetching them costs more than the tests that read them.
Nothing is skipped when they are missing: the fixtures make or fetch what they hand out, or fail.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import tiny as checkpoints
import torch
import transformers
from hub_server import HubServer

from lorarun.kernels.backend import INTERPRETED

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # tiny shapes are no faster on two, and many times slower on two busy cores
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config.addinivalue_line("markers", "gpu: needs an accelerator; deselected where there is none")
    config.addinivalue_line("markers", "timed: has a limit of processor time, which busy neighbours use up: runs alone")
    config.addinivalue_line("markers", "kernel: runs a Triton kernel, on an accelerator or under TRITON_INTERPRET=1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    accelerated = torch.accelerator.is_available()

    def runs(item: pytest.Item) -> bool:
        if item.get_closest_marker("gpu"):
            return accelerated
        if item.get_closest_marker("kernel"):
            return accelerated or INTERPRETED
        return not INTERPRETED  # an interpreted run is for the kernels alone: everything else would take hours

    if needless := [item for item in items if not runs(item)]:
        config.hook.pytest_deselected(items=needless)
        items[:] = [item for item in items if runs(item)]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the accelerator, else the CPU under Triton's interpreter."""
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Path]:
    """`tiny(name)` is the folder of that checkpoint of tests/tiny.py, reference included. Read-only."""
    # Whoever changes the recipes or transformers gets new folders; the old ones stay until .cache is deleted.
    files = (checkpoints.__file__, checkpoints.packed.__file__)
    recipes = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:8]
    out = CACHE / "tiny" / f"transformers-{transformers.__version__}-{recipes}"

    def folder(name: str) -> Path:
        return out / name if (out / name).is_dir() else checkpoints.make(name, out)

    return folder


@pytest.fixture(scope="session")
def real() -> Callable[[str], Path]:
    """`real(target)` is the folder of that target of scripts/fetch.py, such as "smollm2-135m". Read-only."""
    out = CACHE / "models"
    fetched: set[str] = set()

    def folder(target: str) -> Path:
        if target not in fetched:  # a target that is up to date takes no time, but must be checked once
            subprocess.run([sys.executable, ROOT / "scripts" / "fetch.py", target, "--out", out], check=True)
            fetched.add(target)
        return out / target

    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub to talk to, an empty cache and no token."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server
