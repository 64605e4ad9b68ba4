"""The loop that most people want, as one function without callbacks.

``scripts/finetune.py`` has the same loop in the open, to copy and change.  The step is the unit of everything, of the
rate, the clip, the checkpoint and the metrics; how many batches and processes a step is spread over changes none of
them, and a run that was killed goes on from its last checkpoint as if it had not been.

What ``fit`` gives up: it trains one adapter, or every weight of a model, with AdamW and nothing else.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lorarun import distributed
from lorarun.checks import check_arguments, check_ids, check_schedule, hold_out, summary, trainable
from lorarun.data import Batches, Prepared, Streamed, batches, prepare
from lorarun.loop import Fit, Plan, folder_of, train
from lorarun.memory import follow
from lorarun.nn import Model
from lorarun.optim import Optimizer, as_steps, starting_scale
from lorarun.resume import check_identity, checkpoints, clear_partial, digest_of, identity_of, read_checkpoint
from lorarun.watch import WATCHERS


def fit(
    model: Model,
    rows: Iterable[Mapping[str, Any]],
    out: str | Path = "out",
    epochs: int = 1,
    steps: int | None = None,
    lr: float = 2e-4,
    max_tokens: int = 2048,
    accumulate: int | None = None,
    warmup: float = 0.03,
    schedule: str = "cosine",
    clip: float | None = 1.0,
    weight_decay: float = 0.0,
    eval_rows: Iterable[Mapping[str, Any]] | None = None,
    eval_fraction: float = 0.0,
    eval_every: int | None = None,
    pack: bool = True,
    fold_system: bool = False,
    seed: int = 0,
    decay: float | None = None,
    optimizer: str = "adamw",
    b_ratio: float = 1.0,
    embedding_lr: float | None = None,
    smoothing: float = 0.0,
    patience: int | None = None,
    samples: Sequence[Any] = (),
    save_every: int | None = None,
    keep: int = 2,
    resume: bool = False,
    buffer: int | None = None,
    watch: Sequence[str] = (),
) -> Fit:
    """Train the active adapter on ``rows`` with AdamW, and save it to ``out/adapter``.  After ``train_all`` the model
    itself is trained, and saved to ``out/model`` by ``save_merged``, in the dtype that it is trained in.

    Data.  rows, eval_rows: dicts as :func:`lorarun.data.prepare` describes them.  eval_fraction: take this part of
    ``rows`` for evaluation instead; ``seed`` says which.  epochs: passes over the rows, each in a new order from
    ``seed``; steps: this many optimizer steps instead, over as many passes as they need.  max_tokens: of one batch;
    pack, fold_system: see :func:`lorarun.data.batches`.  buffer: read the rows while training, for more than memory
    holds, and shuffle so many documents among themselves; needs ``steps``, and an iterator ends the run when it ends.

    Steps.  accumulate: batches of one optimizer step, over all processes (default: one for each); its loss is the mean
    over the supervised tokens of all of them together.  The last step takes what is left.  lr, schedule ("cosine",
    "linear", "constant"), warmup, decay (an int is a number of steps, a float below 1 a fraction of all, to the nearest
    step): see :func:`lorarun.optim.learning_rate`.  clip: the largest norm of a step's gradient, None for no limit.
    optimizer: one of :data:`lorarun.optim.OPTIMIZERS`.  b_ratio: the rate of B over that of A (LoRA+); embedding_lr:
    the rate of what is trained in the embedding or the head.  smoothing: of the labels.

    Watching.  eval_every: evaluate after each such number of steps; without it, only before the first and after the
    last.  What had the lowest loss is in ``out/best``; patience: stop after so many evaluations without a lower
    one.  samples: prompts (texts or messages) that are answered whenever the model is evaluated, or would be, into
    ``out/samples.jsonl``.  ``out`` also gets ``metrics.jsonl`` (see :class:`lorarun.progress.Progress`) and pictures
    when matplotlib is installed.  watch: "tensorboard", "wandb".

    Stopping and going on.  save_every: write a checkpoint after each such number of steps and after the last, the
    newest ``keep`` of which stay.  resume: go on from the newest in ``out``, or start where there is none.  A step
    whose gradient is not finite changes nothing; it is named, counted, and its place in the schedule is spent.  Ctrl-C
    ends the training, saves what there is, and the result says ``interrupted``.

    Several processes (``torchrun``, :mod:`lorarun.distributed`) give the result of one; only the first writes.

    Raises ValueError, before anything is trained, for arguments out of range, no active adapter, rows that cannot be
    used, and a checkpoint of another run.
    """
    check_arguments(
        epochs=epochs, steps=steps, lr=lr, accumulate=accumulate, warmup=warmup, schedule=schedule, clip=clip,
        weight_decay=weight_decay, eval_fraction=eval_fraction, eval_every=eval_every, decay=decay, optimizer=optimizer,
        b_ratio=b_ratio, embedding_lr=embedding_lr, smoothing=smoothing, patience=patience, save_every=save_every,
        keep=keep, buffer=buffer, watch=watch,
    )  # fmt: skip
    if not torch.is_grad_enabled():
        raise ValueError("fit: gradients are switched off here (torch.no_grad); call it outside.")
    distributed.check_started("fit")
    parameters = trainable(model)
    out = Path(out)
    stored = _stored(model, out, resume)
    accumulate = _accumulate(accumulate, stored)
    if eval_fraction:
        rows, eval_rows = hold_out(list(rows), eval_rows, eval_fraction, seed)
    how = {"max_tokens": max_tokens, "pack": pack, "fold_system": fold_system}
    held = None if eval_rows is None else batches(eval_rows, model.tokenizer, **how)  # type: ignore[call-overload]
    passes, prepared, steps = _data(model, rows, how, seed, epochs, steps, accumulate, buffer)
    if prepared:
        check_ids(model, *[prepared, held.prepared] if held else [prepared])
    ramp, fall = as_steps(warmup, steps), None if decay is None else as_steps(decay, steps)
    check_schedule(steps, ramp, fall, warmup, decay)
    settings = {
        "rows": "a stream" if prepared is None else summary(prepared),
        "rows' digest": None if prepared is None else digest_of(prepared.documents),
        "steps": steps, "accumulate": accumulate, "lr": lr, "warmup": ramp, "decay": fall, "schedule": schedule,
        "clip": clip, "weight_decay": weight_decay, "optimizer": optimizer, "b_ratio": b_ratio,
        "embedding_lr": embedding_lr, "smoothing": smoothing, "seed": seed, "buffer": buffer,
        **how, **identity_of(model),
    }  # fmt: skip
    identity = {key: str(value) for key, value in settings.items()}
    _agree(identity)
    if stored:
        check_identity(stored["identity"], identity, stored["folder"])
    plan = Plan(
        steps, accumulate, lr, ramp, fall, schedule, smoothing, passes, held, eval_every or steps,
        patience, samples, save_every, keep, identity, out,
    )  # fmt: skip
    _announce(plan, prepared, max_tokens)
    follow(model, max_tokens)
    distributed.spread(list(parameters.values()))
    model.clock.seed, model.clock.step = distributed.gathered((model.clock.seed, model.clock.step))[0]
    made = Optimizer(
        parameters, weight_decay, clip, optimizer, b_ratio, (embedding_lr or lr) / lr, starting_scale(model)
    )
    watchers = [WATCHERS[name](out, settings) for name in watch] if distributed.rank() == 0 else []
    return train(model, made, plan, stored, watchers)


def _stored(model: Model, out: Path, resume: bool) -> dict[str, Any] | None:
    """The newest checkpoint of the run in ``out`` where it is to go on, and its folder."""
    found = checkpoints(out)
    if not resume:
        if found:
            raise ValueError(
                f"fit: {out} has checkpoints of a run, the last of them {found[-1].name}; resume=True goes on from "
                "there. For another run, choose another folder or remove the checkpoints."
            )
        if (folder := folder_of(model, out)).exists():
            _say(f"{folder} of an earlier run will be replaced")
        return None
    if distributed.rank() == 0:
        clear_partial(out)
    if not found:
        _say(f"no checkpoint in {out}: starting from the beginning")
        return None
    _say(f"going on from {found[-1]}")
    return {**read_checkpoint(found[-1]), "folder": found[-1]}


def _accumulate(given: int | None, stored: dict[str, Any] | None) -> int:
    """How many batches make a step: by default as many as in the run that goes on, or one for each process."""
    size = distributed.size()
    if given is None:
        return int(stored["identity"]["accumulate"]) if stored else size
    if given < size:
        raise ValueError(
            f"fit: accumulate={given} batches make a step, so of {size} processes {size - given} would have nothing to "
            "do; give at least as many, or leave it out."
        )
    return given


def _data(
    model: Model, rows: Iterable[Mapping[str, Any]], how: dict[str, Any], seed: int, epochs: int, steps: int | None,
    accumulate: int, buffer: int | None,
) -> tuple[Iterable[Batches | Streamed], Prepared | None, int]:  # fmt: skip
    """As many passes over the rows as are needed, the rows as documents, and the number of steps.

    Passes over a stream come one after the other without end, or one where it can be read only once.
    """
    tokenizer = model.tokenizer
    if buffer is not None:
        assert steps is not None
        numbers = range(1) if iter(rows) is rows else itertools.count()
        many = (batches(rows, tokenizer, shuffle=True, seed=seed + n, buffer=buffer, **how) for n in numbers)
        return many, None, steps
    prepared = prepare(rows, tokenizer, how["max_tokens"], how["fold_system"])
    passes: list[Batches] = []  # plans without tensors
    while len(passes) < epochs if steps is None else sum(map(len, passes)) < steps * accumulate:
        passes.append(batches(prepared, tokenizer, shuffle=True, seed=seed + len(passes), **how))
    return passes, prepared, math.ceil(sum(map(len, passes)) / accumulate) if steps is None else steps


def _agree(identity: dict[str, str]) -> None:
    """ValueError where the processes were given different runs."""
    for rank, other in enumerate(distributed.gathered(identity)):
        wrong = [f"{key} is {other[key]}, not {own}" for key, own in identity.items() if other[key] != own]
        if wrong:
            raise ValueError(f"fit: process {rank} was given another run than this one: {'; '.join(wrong)}.")


def _announce(plan: Plan, prepared: Prepared | None, max_tokens: int) -> None:
    """How much there is to learn from, and in how many steps."""
    _say(f"training on {summary(prepared)}" if prepared else "training on rows that are read on the way")
    if plan.held is not None:
        _say(f"evaluating on {summary(plan.held.prepared)}")
    size = f"up to {max_tokens:,} tokens"
    if plan.accumulate > 1:
        size = f"{plan.accumulate} batches of {size}"
    ranks = f", over {distributed.size()} processes" if distributed.size() > 1 else ""
    passes = f"; passes over the rows: {len(plan.passes)}" if isinstance(plan.passes, list) else ""
    _say(f"{plan.steps:,} steps of {size}{ranks}{passes}")


def _say(text: str) -> None:
    if distributed.rank() == 0:
        print(text, file=sys.stderr)
