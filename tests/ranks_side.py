"""Jobs that tests/test_distributed.py has done by 1, 2 and 4 processes, forked from this one, over gloo on the CPU.

    python ranks_side.py BASE OUT

Each leaves its results in OUT/<job>-<processes>-<rank>.pt; those that train, folders OUT/<job>-<processes> besides.
"""

import dataclasses
import json
import os
import random
import socket
import sys
import traceback
import warnings
from pathlib import Path

import torch
from resume_side import ROWS
from small import packed, padded, texts

import lorarun
from lorarun import distributed, loop, progress, train
from lorarun.optim import Optimizer

HOW = {"lr": 1e-2, "max_tokens": 60, "accumulate": 4, "warmup": 1, "eval_rows": ROWS[:5], "eval_every": 2}


def adapted(base, **lora):
    """A model with an adapter that already does something, with dropout."""
    model = lorarun.add_lora(
        lorarun.load(base, device="cpu", template="chatml"), **{"r": 4, "seed": 0, "dropout": 0.1, **lora}
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def learned(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def few():
    """Batches of every kind: one of them supervises nothing, one has weights."""
    found = [packed(9, 1, 17), texts(2), padded(), packed(20, 9, seed=1), texts(1, seed=3), packed(5, 22, seed=4)]
    found[3].labels.fill_(-100)
    weights = torch.rand(found[4].ids.shape, generator=torch.Generator().manual_seed(0))
    return found, [*found[:4], dataclasses.replace(found[4], weights=weights)]


def steps(base, out):
    """Steps of six, of five (weighted), of one and of no more than one supervised batch: what each of them gives."""
    model, (six, five) = adapted(base), few()
    optimizer = Optimizer(learned(model), clip=0.5)
    results = []
    for step in (six, five, six[1:2], [six[3], six[0]], [*six, *six]):
        mean, count = train.accumulated(model, step)
        grads = {name: p.grad.clone() for name, p in learned(model).items()}
        norm, broken = optimizer.step(1e-2)
        assert not broken
        after = {name: p.detach().clone() for name, p in learned(model).items()}
        results.append({"loss": mean, "count": count, "grads": grads, "norm": norm, "after": after})
    evaluation = lorarun.evaluate(model, six[:3])
    return {"steps": results, "clock": model.clock.step, "evaluation": list(evaluation)}


def narrow(base, out):
    """A gradient that is not finite on one process is refused by all; one that nobody has stays None."""
    model, (six, _) = adapted(base, layers=[1, 2]), few()
    optimizer = Optimizer(learned(model), clip=0.5, loss_scale=8.0)
    model.model.layers[2].register_forward_hook(lambda m, a, o: o * float("nan") if len(o) == 3 else None)
    mean, _ = train.accumulated(model, six, scale=optimizer.scale)  # the padded batch has three rows
    clock = model.clock.step
    norm, broken = optimizer.step(1e-2)
    why = loop.why_skipped(model, six, 0, broken, float(mean))
    first = next(iter(learned(model).values()))
    for p in learned(model).values():
        p.grad = None if p is first else torch.ones_like(p)
    distributed.sum_gradients(list(learned(model).values()), torch.zeros(()))
    return {
        "broken": len(broken), "why": why, "scale": optimizer.scale, "clock": [clock, model.clock.step],
        "none": first.grad is None, "sum": float(list(learned(model).values())[1].grad.max()),
    }  # fmt: skip


def run(base, out):
    """A whole run: packed rows, dropout, evaluations, checkpoints, samples; only one process writes."""
    result = lorarun.fit(adapted(base), ROWS, out, epochs=2, save_every=3, samples=["what"], **HOW)
    return {"result": json.loads(json.dumps(result, default=str)), "rank": distributed.rank()}


def broken(base, out):
    """The same, until something breaks in its fourth step."""
    real, calls = loop.accumulated, []

    def failing(*args):
        calls.append(None)
        if len(calls) == 4:
            raise RuntimeError("planted")
        return real(*args)

    loop.accumulated = failing
    try:
        lorarun.fit(adapted(base), ROWS, out, epochs=2, save_every=3, samples=["what"], **HOW)
    except RuntimeError as error:
        return str(error)
    finally:
        loop.accumulated = real


def resumed(base, out):
    """It goes on, with dropout, and generators that start elsewhere."""
    model = lorarun.add_lora(lorarun.load(base, device="cpu", template="chatml"), r=4, seed=7, dropout=0.1)
    result = lorarun.fit(model, ROWS, out, epochs=2, save_every=3, samples=["what"], resume=True, **HOW)
    return {"result": json.loads(json.dumps(result, default=str))}


def ahead(base, out):
    """Five steps of two batches with recomputation, adapters in some layers only, and a batch without targets."""
    model = adapted(base, layers=[0, 2])
    model.policies = ["recompute"] * len(model.policies)
    optimizer, (six, _) = Optimizer(learned(model)), few()
    losses = []
    for step in range(5):
        mean, _ = train.accumulated(model, [six[step % 3], six[3]])
        assert optimizer.step(1e-2)[1] == []
        losses.append(float(mean))
    return {"losses": losses, "after": {name: p.detach().clone() for name, p in learned(model).items()}}


def stream(base, out):
    result = lorarun.fit(adapted(base), ROWS, out, steps=4, buffer=5, lr=1e-2, max_tokens=60, accumulate=4)
    return {"losses": [result.first_loss, result.last_loss]}


def apart(base, out):
    """Processes that were given different rows, started with another adapter, or with too few batches for all."""
    rank, said = distributed.rank(), []
    for given in ({"rows": ROWS[rank:]}, {"lr": 0.1 * (1 + rank)}, {"accumulate": 1}):
        try:
            lorarun.fit(adapted(base), **{"rows": ROWS, "out": out, "steps": 2, "max_tokens": 60, **given})
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    model = adapted(base, seed=rank)
    lorarun.fit(model, ROWS, out, steps=1, max_tokens=60, lr=1e-12, warmup=0)
    return {"said": said, "seed": model.clock.seed, "after": {n: p.detach().clone() for n, p in learned(model).items()}}


JOBS = {"steps": steps, "narrow": narrow, "run": run, "ahead": ahead, "stream": stream, "apart": apart}


def child(rank, size, port, base, out):
    """All jobs of one process; four begin the runs that one and two go on with."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    random.seed(rank)
    torch.manual_seed(rank)
    progress.draw = lambda rows, folder: None  # pictures take longer than all the rest
    distributed.start()
    jobs = [(name, job, f"{name}-{size}") for name, job in JOBS.items()]
    if size == 4:
        jobs += [(f"broken-{fewer}", broken, f"resumed-{fewer}") for fewer in (1, 2)]
    else:
        jobs += [("resumed", resumed, f"resumed-{size}")]
    for name, job, folder in jobs:
        torch.save(job(base, out / folder), out / f"{name}-{size}-{rank}.pt")
    distributed.stop()


def fork(size, base, out):
    """Have all jobs done by so many processes; whether all of them ended well."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            try:
                child(rank, size, port, base, out)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    return not any(codes)


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    base, out = map(Path, sys.argv[1:])
    for size in (4, 2, 1):
        if not fork(size, base, out):
            sys.exit(f"{size} processes failed")


if __name__ == "__main__":
    main()
