"""A training run in a process of its own, which may kill itself: tests/test_resume.py starts it.

    python resume_side.py BASE OUT '{"resume": true, …}' [WHERE]

WHERE: "forward 9" kills in the ninth pass through the model, "fsync 3" before the third time that a file is synced,
"rename 2" before the second checkpoint takes its place, "remove" while an old one is removed.
"""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import torch

import lorarun

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"what {'quick ' * (i % 5)}fox {i}"},
            {"role": "assistant", "content": f"the brown fox {i % 3}"},
        ]
    }
    for i in range(24)
]
HOW = {
    "steps": 10, "lr": 1e-2, "max_tokens": 60, "accumulate": 2, "warmup": 2, "eval_rows": ROWS[:3], "eval_every": 5,
    "save_every": 4, "keep": 1, "samples": ["what fox"], "weight_decay": 0.1,
}  # fmt: skip


def make(base, dropout=0.1, **lora):
    """A model with dropout, and a hook that draws from both global generators."""
    model = lorarun.add_lora(lorarun.load(base, device="cpu", template="chatml"), **{"r": 4, "seed": 0, **lora})

    def noise(module, args, out):
        return out + 1e-2 * random.random() * torch.randn_like(out) if module.training else None

    model.model.layers[1].register_forward_hook(noise)
    return model


def die(calls, number):
    calls.append(None)
    if len(calls) == number:
        os.kill(os.getpid(), signal.SIGKILL)


def arm(model, where):
    """Have the process killed there."""
    place, number = where.split()[0], int((where.split()[1:] or ["1"])[0])
    calls = []
    if place == "forward":
        model.model.norm.register_forward_hook(lambda *_: die(calls, number))
        return
    owner, name = {"fsync": (os, "fsync"), "rename": (Path, "rename"), "remove": (shutil, "rmtree")}[place]
    real = getattr(owner, name)

    def planted(*args, **kwargs):
        if place != "remove" or ".old" in str(args[0]) and Path(args[0]).exists():
            if place == "remove":
                os.remove(Path(args[0]) / "state.pt")  # half of it is gone
            die(calls, number)
        return real(*args, **kwargs)

    setattr(owner, name, planted)


def main():
    torch.set_num_threads(1)
    random.seed(5)
    torch.manual_seed(5)
    base, out, more, *where = sys.argv[1:]
    model = make(base)
    if where:
        arm(model, where[0])
    lorarun.fit(model, ROWS, out, **{**HOW, **json.loads(more)})


if __name__ == "__main__":
    main()
