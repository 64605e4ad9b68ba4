#!/usr/bin/env python3
"""Fine-tune a model with LoRA, with the whole training loop in the open: copy this file and change what you need.

    python scripts/finetune.py llama-3.2-1b-instruct --data rows.jsonl --eval held_out.jsonl --question "Who are you?"
    torchrun --nproc-per-node 4 scripts/finetune.py …            # the same on four GPUs, each step shared among them

`lorarun.fit` has the same loop behind one call, and checkpoints to resume from, early stopping and samples besides.
Data are JSONL, JSON, CSV, Parquet, texts or folders; `lorarun.rows` lists the layouts. Ctrl-C stops and saves.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import signal
import sys
from pathlib import Path

import lorarun
from lorarun import distributed
from lorarun.checks import check_ids, summary, trainable
from lorarun.data import prepare, read_rows
from lorarun.optim import Optimizer, learning_rate, starting_scale
from lorarun.progress import Progress, plain_warnings
from lorarun.train import accumulated, tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a local folder (of a model or an adapter), a hub id (owner/name) or an alias")
    parser.add_argument("--data", required=True, action="append", help="file or folder to learn from; may be repeated")
    parser.add_argument("--eval", help="file of held-out rows, whose loss is measured before and after")
    parser.add_argument("--question", help="ask this before and after")
    parser.add_argument("--out", type=Path, default=Path("out"), help="new folder for what is written (default: out)")
    parser.add_argument("--template", help="chat template for a model without one, such as chatml")
    parser.add_argument("--fold-system", action="store_true", help="put system texts into the next user turn")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: the accelerator, else the CPU)")
    parser.add_argument("--bits", type=int, help="4, 8 or 16, of the weights in memory (default: as in the checkpoint)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (default: 16)")
    parser.add_argument("--alpha", type=float, default=16, help="its scale is alpha / rank (default: 16)")
    parser.add_argument("--lr", type=float, default=2e-4, help="peak learning rate (default: 2e-4)")
    parser.add_argument("--epochs", type=float, default=1, help="passes over the data (default: 1)")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of --epochs")
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens in a batch (default: 2048)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data and the adapter's first values")
    return parser.parse_args()


def ask(model: lorarun.nn.Model, question: str | None, when: str) -> None:
    if question is not None and distributed.rank() == 0:
        print(f"\n{when}\n  Q: {question}\n  A: ", end="", flush=True)
        lorarun.generate(model, [{"role": "user", "content": question}], max_new_tokens=64, stream=True)


def main() -> None:
    args = arguments()
    distributed.start()  # under torchrun; alone, nothing
    first, size, adapter = distributed.rank() == 0, distributed.size(), args.out / "adapter"
    if adapter.exists():
        raise ValueError(f"{adapter} is there: choose another --out, or remove it; as the MODEL it is trained further")
    if args.steps is not None and args.steps < 1 or not 0 < args.epochs < float("inf"):
        raise ValueError(f"--steps {args.steps} --epochs {args.epochs}: expected positive numbers")
    rows, held_rows = read_rows(*args.data), read_rows(args.eval) if args.eval else None  # a wrong name is said at once
    model = lorarun.load(args.model, bits=args.bits, device=args.device, template=args.template)
    if not model.adapters:  # the folder of an adapter brings one, which is trained further
        lorarun.add_lora(model, r=args.rank, alpha=args.alpha, seed=args.seed)
    how = {"max_tokens": args.max_tokens, "fold_system": args.fold_system}
    data = prepare(rows, model.tokenizer, **how)
    held = lorarun.batches(held_rows, model.tokenizer, **how) if held_rows is not None else None
    check_ids(model, data)
    count = math.ceil(len(lorarun.batches(data, model.tokenizer, args.max_tokens)) / size)
    steps, most = args.steps or max(1, round(args.epochs * count)), size * args.max_tokens
    if first:
        print(f"training on {summary(data)}, in {steps} steps of up to {most:,} tokens", file=sys.stderr)
    ask(model, args.question, "Before training")
    optimizer, taken = Optimizer(trainable(model), clip=1.0, loss_scale=starting_scale(model)), 0
    pack = functools.partial(lorarun.batches, data, model.tokenizer, args.max_tokens, shuffle=True)
    stream = itertools.chain.from_iterable(pack(seed=epoch) for epoch in itertools.count(args.seed))  # pass after pass
    with Progress(args.out, steps, mute=not first) as progress:
        before = progress.evaluated(**lorarun.evaluate(model, held)._asdict()) if held else 0.0
        try:
            for step in range(steps):
                batches = list(itertools.islice(stream, size))  # one for each process, in one optimizer step
                loss, learned = accumulated(model, batches, scale=optimizer.scale)  # the mean over all their tokens
                norm, broken = optimizer.step(rate := learning_rate(step, steps, args.lr, steps // 20))
                taken += not broken
                if broken:
                    progress.note(f"step {step + 1} is skipped: {len(broken)} gradients are not finite")
                progress.step(loss.item(), sum(map(tokens, batches)), lr=rate, grad_norm=norm, supervised=learned)
        except KeyboardInterrupt:
            if not taken:
                raise  # there is no adapter to speak of
            progress.note("stopped; saving the adapter as it is")
        finally:
            if taken and first:  # also when an error ends the run
                lorarun.save_adapter(model, adapter)
        after = progress.evaluated(**lorarun.evaluate(model, held)._asdict()) if held else 0.0
    distributed.stop()
    if not first:
        return
    ask(model, args.question, "After training")
    if held:
        print(f"\nevaluation loss: {before:.3f} before, {after:.3f} after ({after / before - 1:+.0%})")
    plot = progress.plot or "none: pip install matplotlib draws one"
    print(f"\nadapter  {adapter}\nmetrics  {progress.metrics}\nplot     {plot}\n\nNext, try:")
    chat, export = ("", "") if args.bits is None else (f" --bits {args.bits}", f" --load-bits {args.bits}")
    print(f"  python scripts/chat.py {adapter}{chat}   # and /adapter off")
    print(f"  python scripts/export.py {adapter} {args.out / 'merged'}{export}   # for other programs")
    print(f"  python scripts/finetune.py qwen3-0.6b --data {args.data[0]} --out {args.out}-qwen3   # another model")


if __name__ == "__main__":
    plain_warnings()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stop by the system saves as Ctrl-C does
    try:
        main()
    except (ValueError, OSError, KeyboardInterrupt) as error:
        sys.exit(f"error: {str(error) or 'stopped before the first step'}")
