"""The loss of a batch, and a loop around it.

``loss`` is the one place that divides: whatever is accumulated, packed or spread over ranks, the mean is over the
supervised tokens of a whole step, never a mean of means.  ``fit`` is the loop that most people want, a function without
callbacks; ``scripts/finetune.py`` has the same one in the open, to copy and change, and shares the small functions
here.

What ``fit`` gives up: it trains one adapter with AdamW and nothing else, and does not resume.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorarun.adapter import save_adapter
from lorarun.bucket import Given, Inputs, sent
from lorarun.data import Batch, Batches, Prepared, as_batch, batches, prepare, supervised, targets
from lorarun.export import save_merged
from lorarun.graph import Steps
from lorarun.head import head_losses
from lorarun.kernels.cross_entropy import IGNORE
from lorarun.memory import follow
from lorarun.nn import Model
from lorarun.optim import SCHEDULES, Optimizer, learning_rate
from lorarun.progress import Progress
from lorarun.tokens import check_added, learns_row
from lorarun.trained import owner, weighted


def loss(model: Model, batch: Batch | Mapping[str, Any], denominator: float | Tensor | None = None) -> Tensor:
    """Mean cross-entropy over the supervised tokens of ``batch``, a scalar in fp32 that can be differentiated.

    batch: a :class:`lorarun.data.Batch` or a mapping with its keys; ids and labels [batch, seq] int64 on any device.
    The shift by one happens here; the first token of a document is never a target.
    denominator: what the sum of the losses is divided by, instead of the batch's own count: the supervised tokens of
    the whole accumulated step (:func:`lorarun.data.supervised` of each batch, added; over all ranks where there are
    several).

    Full logits are never held: rows without a target are dropped before the head, the rest goes through it in chunks.
    A small step is replayed as a CUDA graph from its second time on, see :mod:`lorarun.graph`; nothing else changes.
    A batch without a target gives 0 with zero gradients, whatever the denominator, and a warning when its step has none
    either.
    """
    batch = as_batch(batch)
    if batch.adapters is not None:
        raise ValueError(
            "loss: a different adapter for each row (batch.adapters) is not supported; switch with use_adapter."
        )
    goal = targets(batch)
    rows = (goal.flatten() != IGNORE).nonzero().squeeze(1)
    count = len(rows)
    wrong = goal.flatten()[rows]
    wrong = wrong[(wrong < 0) | (wrong >= model.config.vocab_size)]
    if len(wrong):
        raise ValueError(
            f"loss: {len(wrong)} labels are no ids of the model, such as {int(wrong[0])}; expected 0 to "
            f"{model.config.vocab_size - 1}, and {IGNORE} where nothing is learned."
        )
    if denominator is None:
        denominator = count
    if count == 0:
        if float(denominator) == 0:
            warnings.warn("loss: no token of this step is supervised; its loss is 0 and teaches nothing.", stacklevel=2)
        denominator = 1  # of a sum without terms
    follow(model, batch.ids.numel())
    model.clock.step += model.training
    if model.graphs is None:
        model.graphs = Steps()
    given = Given(batch.ids, batch.positions, batch.documents, goal, count, denominator)
    replayed: Tensor | None = model.graphs.loss(model, given, _mean)
    return _eager(model, given, rows) if replayed is None else replayed


def _mean(model: Model, inputs: Inputs) -> Tensor:
    """The loss of a batch that lies on the model's device."""
    hidden = model.hidden_states(inputs.ids, inputs.positions, inputs.documents)
    picked = hidden.flatten(0, 1)  # [tokens, hidden]
    if inputs.rows is not None:
        picked = picked.index_select(0, inputs.rows)  # [supervised, hidden]
    losses = head_losses(model, picked, inputs.goal)
    denominator = inputs.denominator
    return losses.sum() / (denominator.to(losses.dtype) if isinstance(denominator, Tensor) else denominator)


def _eager(model: Model, given: Given, rows: Tensor) -> Tensor:
    """The loss without a graph; where captured steps hold the memory that this one needs, they are dropped."""
    device = model.device
    inputs = Inputs(
        sent(given.ids, device),
        None if given.positions is None else sent(given.positions, device),
        None if given.documents is None else sent(given.documents, device),
        sent(rows, device),
        sent(given.goal.flatten()[rows], device),
        given.denominator,
    )
    try:
        return _mean(model, inputs)
    except torch.OutOfMemoryError:
        if not model.graphs.drop():
            raise
    return _mean(model, inputs)


@torch.no_grad()
def evaluate(model: Model, held_out: Iterable[Batch | Mapping[str, Any]]) -> float:
    """Mean cross-entropy over the supervised tokens of several batches, in eval mode; the mode before is restored."""
    training = model.training
    model.eval()
    try:
        total, count = 0.0, 0
        for batch in held_out:
            total += float(loss(model, batch, denominator=1.0))
            count += supervised(batch)
        if not count:
            raise ValueError("evaluate: no token is supervised; is this an iterator that was used up before?")
        return total / count
    finally:
        model.train(training)


def accumulated(model: Model, step: Sequence[Batch | Mapping[str, Any]]) -> tuple[Tensor, int]:
    """The mean loss over the supervised tokens of all batches of a step, and their number; gradients are added to
    ``.grad``.

    However the same rows are split into batches, loss and gradients are the same: each batch's sum is divided by the
    count of the whole step.
    """
    count = sum(supervised(batch) for batch in step)
    total = torch.zeros((), device=model.device)
    for batch in step:
        part = loss(model, batch, denominator=count)
        torch.autograd.backward(part)
        total += part.detach()
    return total, count


class Fit(NamedTuple):
    """What :func:`fit` did: losses are means over supervised tokens, None where nothing was measured."""

    steps: int  # optimizer steps taken, the skipped ones not counted
    skipped: int  # steps left out because a gradient was not finite
    first_loss: float | None
    last_loss: float | None
    eval_before: float | None
    eval_after: float | None
    adapter: Path  # or the checkpoint, where every weight was trained
    metrics: Path
    plot: Path | None
    interrupted: bool


def fit(
    model: Model,
    rows: Iterable[Mapping[str, Any]],
    out: str | Path = "out",
    epochs: int = 1,
    steps: int | None = None,
    lr: float = 2e-4,
    max_tokens: int = 2048,
    accumulate: int = 1,
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
) -> Fit:
    """Train the active adapter on ``rows`` with AdamW (moments in fp32), and save it to ``out/adapter``; after
    ``train_all`` every weight, saved as a checkpoint in the new folder ``out/model``.

    rows, eval_rows: dicts as :func:`lorarun.data.prepare` describes them.  eval_fraction: take this part of ``rows``
    for evaluation instead; ``seed`` says which.  epochs: passes over the rows, each in a new order from ``seed``;
    steps: this many optimizer steps instead, over as many passes as they need. max_tokens: of one batch; pack,
    fold_system: see :func:`lorarun.data.batches`.  accumulate: batches of one optimizer step; its loss is the mean
    over the supervised tokens of all of them together.  The last step takes what is left. lr, schedule ("cosine",
    "linear", "constant"), warmup (an int is a number of steps, a float below 1 a fraction of all, to the nearest
    step): see :func:`learning_rate`.  clip: the largest norm of a step's gradient, None for no limit. eval_every:
    evaluate after each such number of steps; without it, only before the first and after the last.

    A step whose gradient is not finite changes nothing; it is named, counted, and its place in the schedule is spent.
    Ctrl-C ends the training, saves the adapter as it is, and the result says ``interrupted``.  ``out`` also gets
    ``metrics.jsonl`` (see :class:`lorarun.progress.Progress`) and ``loss.png`` when matplotlib is installed.

    Raises ValueError, before anything is trained, for arguments out of range, no active adapter and rows that cannot be
    used.
    """
    _check(epochs, steps, lr, accumulate, warmup, schedule, clip, weight_decay, eval_fraction, eval_every)
    if not torch.is_grad_enabled():
        raise ValueError("fit: gradients are switched off here (torch.no_grad); call it outside.")
    parameters = _trainable(model)
    if model.whole and (there := Path(out) / "model").exists():
        raise ValueError(
            f"fit: {there} exists already, and a checkpoint is written to a new folder; choose another out."
        )
    if eval_fraction:
        rows, eval_rows = _hold_out(list(rows), eval_rows, eval_fraction, seed)
    prepared = prepare(rows, model.tokenizer, max_tokens, fold_system)
    held = None if eval_rows is None else batches(eval_rows, model.tokenizer, max_tokens, pack, fold_system=fold_system)
    check_ids(model, *[prepared, held.prepared] if held else [prepared])
    passes: list[Batches] = []  # over the rows: plans without tensors
    while len(passes) < epochs if steps is None else sum(map(len, passes)) < steps * accumulate:
        passes.append(batches(prepared, model.tokenizer, max_tokens, pack, shuffle=True, seed=seed + len(passes)))
    if steps is None:
        steps = math.ceil(sum(map(len, passes)) / accumulate)
    ramp = warmup if isinstance(warmup, int) else round(warmup * steps)
    if not 0 <= ramp < steps:
        raise ValueError(f"fit: warmup={warmup} is {ramp} of {steps} steps; expected fewer, so that lr is reached.")

    print(f"training on {summary(prepared)}", file=sys.stderr)
    if held is not None:
        print(f"evaluating on {summary(held.prepared)}", file=sys.stderr)
    size = f"{accumulate} batches of up to {max_tokens:,} tokens" if accumulate > 1 else f"up to {max_tokens:,} tokens"
    print(f"{steps:,} steps of {size}; passes over the rows: {len(passes)}", file=sys.stderr)
    stream = itertools.chain.from_iterable(passes)
    work = (
        (learning_rate(step, steps, lr, ramp, schedule), list(itertools.islice(stream, accumulate)))
        for step in range(steps)
    )
    follow(model, max_tokens)
    optimizer = Optimizer(parameters, weight_decay, clip)
    return _train(model, optimizer, steps, work, held, eval_every or steps, Path(out))


def _train(
    model: Model,
    optimizer: Optimizer,
    steps: int,
    work: Iterator[tuple[float, list[Batch]]],
    held: Batches | None,
    eval_every: int,
    out: Path,
) -> Fit:
    """The loop of :func:`fit` over ``work``, the learning rate and the batches of each step."""
    training, interrupted, taken = model.training, False, 0
    saved = out / ("model" if model.whole else "adapter")
    optimizer.clear()  # gradients of a backward pass before this call
    with Progress(out, steps) as progress:
        if held is not None:
            progress.evaluated(evaluate(model, held))
        try:
            model.train()
            for step, (rate, micro) in enumerate(work, 1):
                mean, count = accumulated(model, micro)
                norm, broken = optimizer.step(rate)
                taken += not broken
                facts: dict[str, Any] = {"lr": rate, "grad_norm": norm, "supervised": count}
                if broken:
                    facts["skipped"] = f"{len(broken)} gradients not finite: {', '.join(broken[:3])}"
                    progress.note(f"step {step} is skipped: {facts['skipped']}")
                progress.step(float(mean), sum(map(tokens, micro)), **facts)
                if held is not None and (step % eval_every == 0 or step == steps):
                    progress.evaluated(evaluate(model, held))
        except KeyboardInterrupt:
            interrupted = True
            progress.note("interrupted: saving the adapter as it is")
        finally:
            model.train(training)
            optimizer.clear()
            if taken:  # also when an error ends the run
                (save_merged if model.whole else save_adapter)(model, saved)
            else:
                progress.note(f"no step was taken, so {saved} is left as it was")
    done = [row for row in progress.rows if row["step"] > 0]
    first, last = (done[0], done[-1]) if done else ({}, {})
    skipped = sum("skipped" in row for row in done)
    if skipped or (done and not math.isfinite(last["loss"])):
        progress.note(
            f"{skipped} of {len(done)} steps were skipped, the last loss is {last['loss']:.3g}: did it diverge?"
        )
    result = Fit(
        steps=len(done) - skipped,
        skipped=skipped,
        first_loss=first.get("loss"),
        last_loss=last.get("loss"),
        eval_before=progress.rows[0]["eval_loss"] if held is not None else None,
        eval_after=last.get("eval_loss"),
        adapter=saved,
        metrics=progress.metrics,
        plot=progress.plot,
        interrupted=interrupted,
    )
    print(
        f"{'model' if model.whole else 'adapter'} in {result.adapter}, each step in {result.metrics}", file=sys.stderr
    )
    if result.plot is not None:
        print(f"losses drawn in {result.plot}", file=sys.stderr)
    return result


# --- what fit checks and says first ----------------------------------------------------------------------------------


def _check(
    epochs: int,
    steps: int | None,
    lr: float,
    accumulate: int,
    warmup: float,
    schedule: str,
    clip: float | None,
    weight_decay: float,
    eval_fraction: float,
    eval_every: int | None,
) -> None:
    """Every argument out of range, in one error."""

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1

    limits = (
        ("epochs", epochs, whole(epochs), "a whole number from 1 up"),
        ("steps", steps, steps is None or whole(steps), "a whole number from 1 up, or None for whole epochs"),
        ("lr", lr, lr > 0 and math.isfinite(lr), "a positive number"),
        ("accumulate", accumulate, whole(accumulate), "how many batches make a step, from 1 up"),
        (
            "warmup",
            warmup,
            0.0 <= warmup < 1.0 or (isinstance(warmup, int) and warmup >= 0),
            "a fraction below 1.0 of all steps, or a whole number of steps",
        ),
        ("schedule", schedule, schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
        ("clip", clip, clip is None or clip > 0, "a positive norm, or None for no limit"),
        ("weight_decay", weight_decay, weight_decay >= 0, "a number from 0 up"),
        ("eval_fraction", eval_fraction, 0.0 <= eval_fraction < 1.0, "a fraction from 0 up to, not including, 1"),
        ("eval_every", eval_every, eval_every is None or whole(eval_every), "a number of steps from 1 up, or None"),
    )
    wrong = [f"{name} is {value!r}; expected {expected}" for name, value, right, expected in limits if not right]
    if wrong:
        raise ValueError(f"fit: {'; '.join(wrong)}.")


def _trainable(model: Model) -> dict[str, nn.Parameter]:
    """The parameters of the active adapter, by name; ValueError where training would have no effect or be lost."""
    if any(module.merged is not None for _, module in weighted(model)):
        raise ValueError(
            "fit: the adapter is merged into the weights, where it does not learn; call unmerge(model) first."
        )
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    foreign = [name for name in found if owner(name) is None]
    if foreign and not model.whole:
        raise ValueError(
            f"fit: it trains and saves an adapter, but {len(foreign)} other parameters require gradients too "
            f"({', '.join(foreign[:3])}): freeze them, or write a loop as in scripts/finetune.py."
        )
    if not found or (model.active is None and not model.whole):
        raise ValueError("fit: there is nothing to train; call add_lora(model) first, or use_adapter to choose one.")
    return found


def _hold_out(rows: list[Any], eval_rows: object, fraction: float, seed: int) -> tuple[list[Any], list[Any]]:
    """The rows to train on and the held-out ones, each in their order."""
    if eval_rows is not None:
        raise ValueError("fit: give eval_rows or eval_fraction, not both.")
    count = max(1, round(fraction * len(rows)))
    if count >= len(rows):
        raise ValueError(f"fit: eval_fraction={fraction} of {len(rows)} rows leaves none to train on.")
    held = set(random.Random(seed).sample(range(len(rows)), count))
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]


def check_ids(model: Model, *data: Prepared) -> None:
    """Look for ids in the data that the model cannot know, before it meets them.

    Raises ValueError for ids beyond the embedding's table; warns once of those whose row in it is all zero, as
    checkpoints have for reserved tokens.  Nothing is altered.
    """
    table = model.model.embed_tokens.weight.detach()
    ids = torch.unique(torch.cat([torch.unique(document.ids) for part in data for document in part.documents]))
    beyond = ids[(ids < 0) | (ids >= len(table))].tolist()
    if beyond:
        raise ValueError(
            f"The data has ids {beyond[:10]}, but the model's table ends at {len(table) - 1}: this is another model's "
            "tokenizer."
        )
    check_added(model, ids.tolist())
    empty = ids[(table[ids.to(table.device)] == 0).all(dim=-1).cpu()].tolist()
    empty = [i for i in empty if not learns_row(model, i)]
    if empty:
        more = f" and {len(empty) - 20} more" if len(empty) > 20 else ""
        warnings.warn(
            f"The data has tokens whose embedding was never trained (all zero): ids {', '.join(map(str, empty[:20]))}"
            f"{more}. An adapter cannot tell them apart; use a template with tokens that the checkpoint knows, or "
            "train their rows (add_tokens).",
            stacklevel=3,
        )


def summary(prepared: Prepared) -> str:
    """How much there is to learn from, in words."""
    used = prepared.rows - len(prepared.too_long) - len(prepared.nothing) - len(prepared.control)
    total = sum(len(document.ids) for document in prepared.documents)
    learned = sum(int((document.labels[1:] != IGNORE).sum()) for document in prepared.documents)
    return f"{used:,} rows: {total:,} tokens, {learned:,} of them supervised"


def tokens(batch: Batch) -> int:
    """How many tokens a batch has, padding not counted."""
    return batch.ids.numel() if batch.documents is None else int((batch.documents >= 0).sum())
