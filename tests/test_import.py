"""`import lorarun` is cheap, and leaves everything that is not lorarun as it was.

Each test asks a fresh interpreter, because this one has long imported everything.
"""

from __future__ import annotations

import compileall
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What lorarun uses only where it is needed, or (the last three) never.
NOT_LOADED = ["triton", "bitsandbytes", "matplotlib", "gguf", "pyarrow", "transformers", "peft", "accelerate"]


def run(code: str, *arguments: str) -> Any:
    """Run `code` in a new interpreter and return what its last line of output says in JSON."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timed
def test_costs_at_most_half_a_second_beyond_torch() -> None:
    code = """
import time, torch
start = time.process_time()
import lorarun
print(time.process_time() - start)
"""
    # Processor time, and the best of several: what else the machine is doing is not lorarun's cost.  Compiled before,
    # as installing does.
    assert compileall.compile_dir(ROOT / "lorarun", quiet=1)
    assert min(run(code) for _ in range(3)) <= 0.5


def test_loads_no_optional_library() -> None:
    code = f"""
import json, sys, torch
before = set(sys.modules)
import lorarun
print(json.dumps(sorted(({{name.partition(".")[0] for name in set(sys.modules) - before}}) & set({NOT_LOADED}))))
"""
    assert run(code) == []


# Compares by identity and keeps what it saw alive, so that nothing can be replaced by a look-alike at the same address.
SNAPSHOT = """
import json, logging, os, random, signal, sys, warnings
import huggingface_hub, jinja2, numpy, peft, safetensors.torch, tokenizers, torch, torch.utils.checkpoint, transformers
import transformers.models.gemma3.modeling_gemma3, transformers.models.llama.modeling_llama

def flags():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "import path": list(sys.path),
        "exception hook": sys.excepthook,
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warning filters": list(warnings.filters),
        "root logger": (logging.root.level, list(logging.root.handlers)),
        "python's random state": random.getstate(),
        "numpy's random state": str(numpy.random.get_state()),
        "torch's random state": torch.get_rng_state().tolist(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_inference_mode_enabled()),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "matmul": [
            getattr(cuda.matmul, "allow_" + name)
            for name in ("tf32", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction")
        ],
        "attention": [getattr(cuda, name + "_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")],
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
    }

def attributes():
    seen = {}
    for module in list(sys.modules.values()):
        if not isinstance(module, type(sys)) or module.__name__ == "__main__":
            continue
        for name, value in list(vars(module).items()):
            seen[module.__name__, name] = value
            owner = type.__repr__(value) if isinstance(value, type) else ""
            if owner.startswith(OTHERS):
                seen |= {(owner, inner): thing for inner, thing in vars(value).items()}
    return seen

names = ("torch", "transformers", "peft", "tokenizers", "safetensors", "huggingface_hub", "jinja2")
OTHERS = tuple(f"<class '{name}." for name in names)
flags_before, before, modules = flags(), attributes(), set(sys.modules)
import lorarun
flags_after, after = flags(), attributes()

changed = [name for name, value in flags_before.items() if flags_after[name] != value]
changed += [f"{owner}.{name}" for owner, name in before.keys() - after.keys()]
owners = {owner for owner, _ in before}
submodules = set(sys.modules) - modules  # each becomes an attribute of its package when it is imported
for (owner, name), value in after.items():
    if owner in owners and f"{owner}.{name}" not in submodules and before.get((owner, name), before) is not value:
        changed.append(f"{owner}.{name}")
print(json.dumps(changed))
"""


def test_changes_nothing_that_is_not_its_own() -> None:
    assert run(SNAPSHOT) == []


def test_would_notice_a_change() -> None:
    meddle = """
import lorarun
torch.nn.Linear.forward = lambda self, x: x
torch.nn.functional.extra = 1
sys.modules["transformers.models.llama.modeling_llama"].LlamaMLP.forward = None
torch.set_num_threads(torch.get_num_threads() + 1)
torch.backends.cuda.matmul.allow_tf32 ^= True
os.environ["LORARUN"] = "1"
"""
    noticed = run(SNAPSHOT.replace("\nimport lorarun\n", meddle))
    assert sorted(noticed) == [
        "<class 'torch.nn.modules.linear.Linear'>.forward",
        "<class 'transformers.models.llama.modeling_llama.LlamaMLP'>.forward",
        "environment",
        "matmul",
        "matmul precision",  # the same setting under another name
        "threads",
        "torch.nn.functional.extra",
    ]


def test_works_where_optional_libraries_are_missing(tiny: Callable[[str], Path]) -> None:
    code = f"""
import json, sys
sys.modules |= dict.fromkeys({NOT_LOADED})  # None there makes an import of it fail
import torch, lorarun
missing = [name for name in lorarun.__all__ if not hasattr(lorarun, name)]
model = lorarun.load(sys.argv[1], device="cpu")
lorarun.add_lora(model)
ids = torch.arange(3, 35).view(2, 16)
lorarun.loss(model, lorarun.Batch(ids=ids, labels=ids)).backward()
without_gradient = sum(parameter.grad is None for parameter in lorarun.lora_parameters(model))
print(json.dumps([missing, without_gradient]))
"""
    assert run(code, str(tiny("llama-tied"))) == [[], 0]
