"""A process that tries things which may crash, hang or fill the memory, each in a child of its own.

Started as a script it imports lorarun once and then, for every line on its standard input, forks a child that makes
the attempt, and prints what came of it: the error, the CPU time, and how far memory rose above where the child began.
A fork costs some milliseconds, an import seconds.  ``Worker`` is the other end of the pipe.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAIT = 30.0  # seconds by the clock until an attempt is killed
MESSAGES = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "quick"}]


class Worker:
    """Asks the process; ``base`` is the checkpoint that adapters are put on."""

    def __init__(self, base: Path) -> None:
        root = Path(__file__).resolve().parent.parent
        self.base = base
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        )

    def __call__(self, kind: str, path: Path | str, wait: float = WAIT) -> dict[str, Any]:
        """{"error": [name, whether it is a ValueError or OSError, message] or None, "seconds": …, "mib": …}, or
        {"died": …}."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([kind, str(path), str(self.base), wait]) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


# --- the other end -------------------------------------------------------------------------------------------------


def spin() -> None:
    while time.process_time() < 3600:
        pass


def attempt(kind: str, path: str, base: Any) -> None:
    if kind == "planted":
        what = {"crash": os.abort, "hang": signal.pause, "memory": lambda: b"x" * (300 * 2**20), "spin": spin}
        what[path]()
        return
    if kind == "adapter":
        names = [name for name, _ in base.named_parameters()]
        try:
            lorarun.load_adapter(base, path)
        except (ValueError, OSError):
            assert not base.adapters and [name for name, _ in base.named_parameters()] == names, "half of it is there"
            raise
        return
    if kind == "nobody" and os.geteuid() == 0:
        os.setuid(65534)  # root may read everything
    model = lorarun.load(path, device="cpu")
    if kind == "chat":
        model.tokenizer.encode_chat(MESSAGES)


def resident() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) * 1024


def child(kind: str, path: str, base: Any, answer: int) -> None:
    """Write down what an attempt comes to.  The high-water mark of a forked process begins at what it holds then."""
    before, start, found = resident(), time.process_time(), None
    try:
        attempt(kind, path, base)
    except BaseException as error:
        found = [type(error).__name__, isinstance(error, (ValueError, OSError)), str(error)[:20_000]]
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    with os.fdopen(answer, "w") as stream:
        stream.write(json.dumps({"error": found, "seconds": seconds, "mib": peak / 2**20}))


def main() -> None:
    base = None
    for line in sys.stdin:
        kind, path, base_path, wait = json.loads(line)
        if kind == "adapter" and base is None:
            base = lorarun.load(base_path, device="cpu")
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            child(kind, path, base, writing)
            os._exit(0)
        os.close(writing)
        end, done = time.monotonic() + wait, 0
        while done == 0 and time.monotonic() < end:
            time.sleep(0.003)
            done = os.waitpid(pid, os.WNOHANG)[0]
        if done == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with os.fdopen(reading) as stream:
            answer = stream.read()
        print(answer or json.dumps({"died": "crashed" if done else "was still running"}), flush=True)


if __name__ == "__main__":
    import torch

    import lorarun
    import lorarun.template  # noqa: F401 - loaded late, and not what is measured

    torch.set_num_threads(1)
    main()
