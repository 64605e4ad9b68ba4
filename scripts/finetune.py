#!/usr/bin/env python3
"""Fine-tune a model with LoRA, with the whole training loop in the open: copy this file and change what you need.

    python scripts/finetune.py llama-3.2-1b-instruct --data rows.jsonl --eval held_out.jsonl --question "Who are you?"

`lorarun.fit` has the same loop behind one call, and accumulation, pauses for evaluation and checks of the data besides.
Data are JSONL, JSON, CSV, Parquet, texts or folders; `lorarun.rows` lists the layouts. Ctrl-C stops and saves.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import lorarun
from lorarun.data import Batch, Prepared, prepare, read_rows, supervised
from lorarun.nn import Model
from lorarun.optim import learning_rate
from lorarun.progress import Progress
from lorarun.train import check_ids, evaluate, summary, tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a local folder, a hub id (owner/name) or an alias such as llama-3.2-1b-instruct")
    parser.add_argument("--data", required=True, action="append", help="file or folder to learn from; may be repeated")
    parser.add_argument("--eval", help="file of held-out rows, whose loss is measured before and after")
    parser.add_argument("--question", help="ask this before and after")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for what is written (default: out)")
    parser.add_argument("--template", help="chat template for a model without one, such as chatml")
    parser.add_argument("--fold-system", action="store_true", help="put system texts into the next user turn")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: the accelerator, else the CPU)")
    parser.add_argument("--bits", type=int, help="how the weights are stored (default: as in the checkpoint)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=16)
    parser.add_argument("--lr", type=float, default=2e-4, help="peak learning rate (default: 2e-4)")
    parser.add_argument("--epochs", type=float, default=1, help="passes over the data (default: 1)")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of --epochs")
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens in a batch (default: 2048)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data and the adapter's first values")
    return parser.parse_args()


def endless(data: Prepared, model: Model, max_tokens: int, seed: int) -> Iterator[Batch]:
    """Batches of packed rows, pass after pass, each in another order."""
    for epoch in itertools.count(seed):
        yield from lorarun.batches(data, model.tokenizer, max_tokens, shuffle=True, seed=epoch)


def ask(model: Model, question: str, when: str) -> None:
    print(f"\n{when}\n  Q: {question}\n  A: ", end="", flush=True)
    lorarun.generate(model, [{"role": "user", "content": question}], max_new_tokens=64, stream=True)
    print()


def main() -> None:
    args = arguments()
    model = lorarun.load(args.model, bits=args.bits, device=args.device, template=args.template)
    lorarun.add_lora(model, r=args.rank, alpha=args.alpha, seed=args.seed)
    how = {"max_tokens": args.max_tokens, "fold_system": args.fold_system}
    data = prepare(read_rows(*args.data), model.tokenizer, **how)
    held = lorarun.batches(read_rows(args.eval), model.tokenizer, **how) if args.eval else None
    check_ids(model, data)
    count = len(lorarun.batches(data, model.tokenizer, args.max_tokens))
    if args.steps is not None and args.steps < 1 or not 0 < args.epochs < float("inf"):
        raise ValueError(f"--steps {args.steps} --epochs {args.epochs}: expected positive numbers")
    steps = max(1, round(args.epochs * count)) if args.steps is None else args.steps
    print(f"training on {summary(data)}, in {steps} steps of up to {args.max_tokens:,} tokens", file=sys.stderr)
    if args.question:
        ask(model, args.question, "Before training")
    parameters = lorarun.lora_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.0, fused=True)
    with Progress(args.out, steps) as progress:
        before = progress.evaluated(evaluate(model, held)) if held else None
        try:
            for step, batch in zip(range(steps), endless(data, model, args.max_tokens, args.seed), strict=False):
                rate = optimizer.param_groups[0]["lr"] = learning_rate(step, steps, args.lr, steps // 20)
                loss = lorarun.loss(model, batch)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0)
                if norm.isfinite():
                    optimizer.step()
                else:
                    progress.note(f"step {step + 1} is skipped: its gradient is not finite")
                optimizer.zero_grad()
                facts = {"lr": rate, "grad_norm": norm.item(), "supervised": supervised(batch)}
                progress.step(loss.item(), tokens(batch), **facts)
        except KeyboardInterrupt:
            progress.note("stopped; saving the adapter as it is")
        finally:
            if optimizer.state:  # at least one step was taken; also when an error ends the run
                lorarun.save_adapter(model, args.out / "adapter")
        after = progress.evaluated(evaluate(model, held)) if held else None

    if args.question:
        ask(model, args.question, "After training")
    if before and after:
        print(f"\nevaluation loss: {before:.3f} before, {after:.3f} after ({(after - before) / before:+.0%})")
    print(f"\nadapter  {args.out / 'adapter'}\nmetrics  {progress.metrics}")
    print(f"plot     {progress.plot or 'none: pip install matplotlib draws one'}")
    print(
        "\nNext, try:\n"
        f"  python scripts/chat.py {args.model} --adapter {args.out / 'adapter'}   # and /adapter off\n"
        f"  python scripts/export.py {args.out / 'adapter'} {args.out / 'merged'}   # for other programs\n"
        f"  python scripts/finetune.py qwen3-0.6b --data {args.data[0]}   # another model"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stop by the system saves as Ctrl-C does
    try:
        main()
    except (ValueError, OSError, KeyboardInterrupt) as error:
        sys.exit(f"error: {str(error) or 'stopped before the first step'}")
