"""The loop of ``lorarun.fit``: a step, a look at how it goes, a checkpoint, until the plan is done.

Everything that is decided before the first step comes in a :class:`Plan`; what changes is in a :class:`Run`, in the
optimizer and in the model, and all of that goes into a checkpoint.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lorarun import distributed
from lorarun.adapter import save_adapter
from lorarun.data import Batch, Batches, Streamed
from lorarun.export import save_merged
from lorarun.generate import generate
from lorarun.nn import Model
from lorarun.optim import Optimizer, learning_rate
from lorarun.progress import Progress, written_rows
from lorarun.resume import chained, random_state, restore_random, write_checkpoint
from lorarun.train import accumulated, evaluate, first_not_finite, tokens
from lorarun.watch import Watcher

SAMPLE_TOKENS = 64  # of an answer that is written during training


class Fit(NamedTuple):
    """What :func:`lorarun.fit` did: losses are means over supervised tokens, None where nothing was measured."""

    steps: int  # optimizer steps taken, the skipped ones not counted
    skipped: int  # steps left out because a gradient was not finite
    first_loss: float | None
    last_loss: float | None
    eval_before: float | None
    eval_after: float | None
    adapter: Path  # after train_all the whole model, a checkpoint
    metrics: Path
    plot: Path | None
    interrupted: bool
    best: Path | None  # as ``adapter``, at the lowest evaluation loss; None where none was below that before training
    best_loss: float | None
    stopped: bool  # by patience


class Plan(NamedTuple):
    """What a run does; the arguments of :func:`lorarun.fit`, with fractions and defaults settled."""

    steps: int
    accumulate: int
    lr: float
    ramp: int  # steps of the warm-up
    fall: int | None  # steps of the decay
    schedule: str
    smoothing: float
    passes: Iterable[Batches | Streamed]
    held: Batches | None
    eval_every: int
    patience: int | None
    samples: Sequence[Any]
    save_every: int | None
    keep: int
    identity: dict[str, str]  # all that would make it another run
    out: Path


@dataclass
class Run:
    """How far a run has come."""

    step: int = 0  # optimizer steps done, the skipped ones too
    taken: int = 0  # those that changed something
    used: int = 0  # batches
    digest: str = ""  # of a stream's batches so far
    best: float = math.inf  # the lowest evaluation loss
    best_step: int = 0
    stale: int = 0  # evaluations since then


def train(
    model: Model, optimizer: Optimizer, plan: Plan, stored: Mapping[str, Any] | None, watchers: Sequence[Watcher]
) -> Fit:
    """Do what ``plan`` says, from the start or from what a checkpoint has ``stored``."""
    run, rows = (Run(), []) if stored is None else _go_on(model, optimizer, plan, stored)
    training, interrupted, folder = model.training, False, folder_of(model, plan.out)
    optimizer.clear()  # gradients of a backward pass before this call
    _cut_samples(plan, run)
    with Progress(plan.out, plan.steps, rows, watchers, mute=distributed.rank() > 0) as progress:
        try:
            if run.step == 0:
                _look(model, plan, run, progress)
            model.train()
            stream = _batches(plan, run, len(model.model.embed_tokens.weight))
            step = _next(plan, run, stream)
            while step:
                _step(model, optimizer, plan, run, progress, step)
                step = _next(plan, run, stream)
                last = not step
                if last or run.step % plan.eval_every == 0:
                    _look(model, plan, run, progress)
                    if _stopped(plan, run):
                        progress.note(f"stopped: {run.stale} evaluations without a lower loss than {run.best:.4f}")
                        last, step = True, []
                if plan.save_every and (last or run.step % plan.save_every == 0):
                    _save(model, optimizer, plan, run, progress)
            if run.step < plan.steps and not _stopped(plan, run):
                progress.note(f"the rows ended after {run.step} of {plan.steps} steps")
        except KeyboardInterrupt:
            interrupted = True
            progress.note(f"interrupted: saving the {folder.name} as it is")
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(_out_of_memory(model, plan, run, error)) from error
        finally:
            model.train(training)
            optimizer.clear()
            if run.taken == 0:
                progress.note(f"no step was taken, so {folder} is left as it was")
            elif distributed.rank() == 0:  # also when an error ends the run
                _write(model, folder)
    if not interrupted:
        distributed.gathered(None)  # nobody returns before it is there
    return _result(plan, run, progress, interrupted, folder)


def folder_of(model: Model, out: Path) -> Path:
    """Where what is trained is saved: an adapter, or after ``train_all`` the model."""
    return out / ("model" if model.whole else "adapter")


def _write(model: Model, folder: Path) -> None:
    """Save what is trained in the place of an earlier one; a model in the dtype that it was trained in."""
    if not model.whole:
        return save_adapter(model, folder)
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    save_merged(model, fresh, dtype=None if model.dtype == torch.float64 else model.dtype)
    old = folder.with_name(f".{folder.name}.old")  # goes when the new one is there
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _out_of_memory(model: Model, plan: Plan, run: Run, error: BaseException) -> str:
    """What a step that did not fit says: where it was, what is kept, what would help."""
    made = model.planned
    expected = f" {made.reserved / 2**30:.2f} GiB were planned for {made.tokens:,} tokens." if made else ""
    folder = folder_of(model, plan.out)
    saved = f"the {folder.name} of {run.taken} steps is in {folder}" if run.taken else "no step was taken"
    if plan.save_every and run.step >= plan.save_every:
        saved += ", and resume=True goes on from the last checkpoint"
    return (
        f"fit: out of memory in step {run.step + 1} ({str(error).splitlines()[0]}{expected}); {saved}. A smaller "
        "max_tokens needs less; so does lorarun.plan(model, max_tokens, budget=BYTES), called before, which then "
        "computes more again. Is another program on this device?"
    )


def _go_on(
    model: Model, optimizer: Optimizer, plan: Plan, stored: Mapping[str, Any]
) -> tuple[Run, list[dict[str, Any]]]:
    """Put everything back to where a checkpoint was written; the run so far, and its rows of metrics."""
    rows = written_rows(plan.out / "metrics.jsonl", stored["rows"])
    optimizer.restore(stored["optimizer"])
    model.clock.seed, model.clock.step = stored["clock"]
    if distributed.rank() < len(stored["random"]):
        restore_random(stored["random"][distributed.rank()])
    return Run(**stored["run"]), rows


def _batches(plan: Plan, run: Run, vocab: int) -> Iterator[Batch]:
    """The batches that are left.  Those before are not made again, but of a stream, which is read up to where it was;
    ValueError where it reads differently now, and for ids of a stream that the model does not know."""
    skip, digest = run.used, ""
    for each in plan.passes:
        if isinstance(each, Batches):
            yield from (each[i] for i in range(min(skip, len(each)), len(each)))
            skip = max(0, skip - len(each))
            continue
        for batch in each:
            if int(batch.ids.max()) >= vocab:
                raise ValueError(f"fit: the rows have id {int(batch.ids.max())}, the model's table ends at {vocab - 1}")
            if skip == 0:
                yield batch
                continue
            digest, skip = chained(digest, batch), skip - 1
            if skip == 0 and digest != run.digest:
                raise ValueError(f"fit: the rows are not the checkpoint's, whose {run.used} batches read otherwise")
    if skip:
        raise ValueError(f"fit: the rows are not the checkpoint's: they end {skip} batches before it")


def _next(plan: Plan, run: Run, stream: Iterator[Batch]) -> list[Batch]:
    """The batches of the next step, of all processes; none where the run ends."""
    if run.step >= plan.steps or _stopped(plan, run):
        return []
    return list(itertools.islice(stream, plan.accumulate))


def _stopped(plan: Plan, run: Run) -> bool:
    return plan.patience is not None and run.stale >= plan.patience


def _step(model: Model, optimizer: Optimizer, plan: Plan, run: Run, progress: Progress, step: list[Batch]) -> None:
    """One optimizer step."""
    rate = learning_rate(run.step, plan.steps, plan.lr, plan.ramp, plan.schedule, plan.fall)
    clock = model.clock.step
    mean, count = accumulated(model, step, plan.smoothing, optimizer.scale)
    norm, broken = optimizer.step(rate)
    run.step, run.taken, run.used = run.step + 1, run.taken + (not broken), run.used + len(step)
    if not isinstance(plan.passes, list):
        for batch in step:
            run.digest = chained(run.digest, batch)
    facts: dict[str, Any] = {"lr": rate, "grad_norm": norm, "supervised": count}
    if optimizer.scaled:
        facts["loss_scale"] = optimizer.scale  # of the next step
    if broken:
        facts["skipped"] = why_skipped(model, step, clock, broken, float(mean))
        progress.note(f"step {run.step} is skipped: {facts['skipped']}")
    progress.step(float(mean), sum(map(tokens, step)), **facts)


def why_skipped(model: Model, step: Sequence[Batch], clock: int, broken: Sequence[str], mean: float) -> str:
    """Where a step that is not finite first was not, in words: on the way forward, or else on the way back.

    clock: ``model.clock.step`` before the step.  broken: the parameters whose gradients are not finite, in the model's
    order.
    """
    if math.isfinite(mean) and broken == ["their norm"]:
        return "the norm of the gradient is not finite, though all its parts are"
    if math.isfinite(mean):
        return f"on the way back {broken[-1]} is the first of {len(broken)} gradients that are not finite"
    after, where = model.clock.step, None
    for place, batch in distributed.share(step):
        model.clock.step = clock + (place + 1) * model.training
        where = where or first_not_finite(model, batch)
    model.clock.step = after
    found = [layer for layer in distributed.gathered(where) if layer]
    first = f"{found[0]} is the first that is not" if found else "all layers are"
    return f"the loss is not finite; on the way forward {first}"


def _look(model: Model, plan: Plan, run: Run, progress: Progress) -> None:
    """Evaluate, keep the best, write samples."""
    if plan.held is not None:
        found = evaluate(model, plan.held)
        progress.evaluated(**found._asdict())
        run.stale += 1
        if found.loss < run.best:
            run.best, run.best_step, run.stale = found.loss, run.step, 0
            if run.step and distributed.rank() == 0:
                _write(model, plan.out / "best")
    if plan.samples and distributed.rank() == 0:
        answers = generate(model, list(plan.samples), max_new_tokens=SAMPLE_TOKENS)
        with (plan.out / "samples.jsonl").open("a", encoding="utf-8") as file:
            for prompt, answer in zip(plan.samples, answers, strict=True):
                line = {"step": run.step, "prompt": prompt, "answer": answer}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        progress.note(f"sample after step {run.step}: {answers[0]!r}")
    progress.pause()


def _cut_samples(plan: Plan, run: Run) -> None:
    """Leave of the samples those of this run that were written before the checkpoint."""
    path = plan.out / "samples.jsonl"
    if distributed.rank() == 0 and path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if run.step and line.endswith("\n") and json.loads(line)["step"] <= run.step]
        partial = path.with_name(".samples.jsonl.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)
        if not kept:
            path.unlink()


def _save(model: Model, optimizer: Optimizer, plan: Plan, run: Run, progress: Progress) -> None:
    """Write a checkpoint; where that fails, say so and train on."""
    rows = progress.flush()
    state = {
        "identity": plan.identity,
        "run": asdict(run),
        "optimizer": optimizer.state(),
        "clock": [model.clock.seed, model.clock.step],
        "random": distributed.gathered(random_state()),
        "rows": rows,
    }
    if distributed.rank() == 0:
        try:
            write_checkpoint(model, plan.out, run.step, state, plan.keep)
        except OSError as error:
            progress.note(str(error))
    progress.pause()


def _result(plan: Plan, run: Run, progress: Progress, interrupted: bool, folder: Path) -> Fit:
    """What came of it, also in words."""
    done = [row for row in progress.rows if row["step"] > 0]
    first, last = (done[0], done[-1]) if done else ({}, {})
    skipped = sum("skipped" in row for row in done)
    loss = last.get("loss")
    if skipped or (done and (loss is None or not math.isfinite(loss))):
        progress.note(f"{skipped} of {len(done)} steps were skipped, the last loss is {loss}: did it diverge?")
    before = progress.rows[0] if progress.rows and progress.rows[0]["step"] == 0 else {}
    result = Fit(
        steps=len(done) - skipped,
        skipped=skipped,
        first_loss=first.get("loss"),
        last_loss=loss,
        eval_before=before.get("eval_loss"),
        eval_after=last.get("eval_loss"),
        adapter=folder,
        metrics=progress.metrics,
        plot=progress.plot,
        interrupted=interrupted,
        best=plan.out / "best" if run.best_step else None,
        best_loss=run.best if run.best_step else None,
        stopped=_stopped(plan, run),
    )
    if distributed.rank() == 0:
        print(f"{folder.name} in {folder}, each step in {result.metrics}", file=sys.stderr)
        if result.best is not None:
            print(f"the best, of step {run.best_step}, in {result.best}", file=sys.stderr)
        if result.plot is not None:
            print(f"losses drawn in {result.plot}", file=sys.stderr)
    return result
