#!/usr/bin/env python3
"""Compare ways to train a real model on the same rows, over several seeds: curves of the loss on held-out rows.

    python scripts/compare.py .cache/models/smollm2-135m --data .cache/models/data/chatterbot.train.jsonl \
        --eval .cache/models/data/chatterbot.eval.jsonl --out out/compare

A seed gives an adapter its first values and the rows their order, the same for each kind. Writes curves.jsonl, and
where matplotlib is installed curves.png: the mean over the seeds, and the range from the best to the worst of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import lorarun
from lorarun.data import prepare, read_rows
from lorarun.nn import Model
from lorarun.optim import Optimizer, learning_rate
from lorarun.progress import plain_warnings
from lorarun.train import accumulated

RANK = 16
LORA: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}
KINDS = (*LORA, "full")  # every weight of the model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a local folder, a hub id or an alias")
    parser.add_argument("--data", required=True, help="file or folder to learn from")
    parser.add_argument("--eval", required=True, help="file of held-out rows")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=16, help="of frozen weights (full: always 16)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between two looks at the held-out rows")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens in a batch")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate of adapters")
    parser.add_argument("--full-lr", type=float, default=5e-5, help="the same where every weight is trained")
    parser.add_argument("--template", help="chat template for a model without one, such as chatml")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=Path("out/compare"))
    return parser.parse_args()


def ready(args: argparse.Namespace, kind: str, seed: int) -> Model:
    """The model with what ``kind`` trains."""
    bits = 16 if kind == "full" else args.bits
    model = lorarun.load(args.model, bits=bits, device=args.device, template=args.template)
    if kind == "full":
        return lorarun.train_all(model)
    return lorarun.add_lora(model, r=RANK, alpha=RANK, seed=seed, **LORA[kind])


def curve(args: argparse.Namespace, kind: str, seed: int) -> list[dict[str, Any]]:
    """Loss and accuracy on the held-out rows before the first step and after every few."""
    model = ready(args, kind, seed)
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    data = prepare(read_rows(args.data), model.tokenizer, max_tokens=args.max_tokens)
    held = list(lorarun.batches(read_rows(args.eval), model.tokenizer, args.max_tokens))
    passes = (
        lorarun.batches(data, model.tokenizer, args.max_tokens, shuffle=True, seed=epoch)
        for epoch in itertools.count(1000 * seed)
    )
    stream, optimizer = itertools.chain.from_iterable(passes), Optimizer(learning, clip=1.0)
    rate, found = args.full_lr if kind == "full" else args.lr, []
    for step in range(args.steps + 1):
        if step % args.every == 0 or step == args.steps:
            seen = lorarun.evaluate(model, held)
            found.append({"kind": kind, "seed": seed, "step": step, "loss": seen.loss, "accuracy": seen.accuracy})
        if step < args.steps:
            accumulated(model, [next(stream)])
            optimizer.step(learning_rate(step, args.steps, rate, args.steps // 20))
    return found


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> bool:
    """Curves of each kind's mean and range into a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError:
        return False
    losses: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        losses[row["kind"]][row["step"]].append(row["loss"])
    figure = Figure(figsize=(7, 4), dpi=120)
    axes = figure.add_axes((0.1, 0.12, 0.87, 0.8), xlabel="step", ylabel="loss on held-out rows", title=title)
    for kind, points in losses.items():
        steps, values = list(points), list(points.values())
        (line,) = axes.plot(steps, [statistics.mean(v) for v in values], "o-", markersize=3, label=kind)
        axes.fill_between(steps, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.2)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")
    return True


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    print(f"{'kind':<8}{'seed':>5}{'before':>9}{'best':>8}{'at step':>9}{'last':>8}{'accuracy':>10}")
    with (args.out / "curves.jsonl").open("w") as file:
        for kind, seed in itertools.product(args.kinds, range(args.seeds)):
            points = curve(args, kind, seed)
            rows += points
            file.writelines(json.dumps(point) + "\n" for point in points)
            file.flush()
            best, last = min(points, key=lambda point: point["loss"]), points[-1]
            print(
                f"{kind:<8}{seed:>5}{points[0]['loss']:>9.3f}{best['loss']:>8.3f}{best['step']:>9}{last['loss']:>8.3f}"
                f"{last['accuracy']:>10.1%}",
                flush=True,
            )
    for kind in args.kinds:
        ends = [row["loss"] for row in rows if row["kind"] == kind and row["step"] == args.steps]
        spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
        print(f"{kind}: loss on held-out rows after {args.steps} steps {statistics.mean(ends):.3f} ± {spread:.3f}")
    if draw(rows, args.out / "curves.png", f"{Path(args.model).name}, {args.seeds} seeds"):
        print(f"plot {args.out / 'curves.png'}")


if __name__ == "__main__":
    plain_warnings()
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
