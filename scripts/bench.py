#!/usr/bin/env python3
"""Measure lorarun on a GPU. The last line is JSON.

    python scripts/bench.py kernels             # every kernel: a correctness gate, time, share of the ceiling, peers
    python scripts/bench.py kernels norm NF4    # those whose names contain one of these words
    python scripts/bench.py train llama-3.1-8b --bits 4 --batch 4 --seq 2048 --peers unsloth,unsloth-off
    python scripts/bench.py decode llama-3.1-8b --batch 1 8 64 --prompt 64 4096 --peers hf,unsloth

Peers (bitsandbytes, Liger, Unsloth, what torch brings) are timed in the same run where they are installed; one that is
missing or fails is named, with the reason. Nothing here is used by lorarun itself.
"""

from __future__ import annotations

import argparse
import sys

import bench_decode
import bench_kernels
import bench_train
import torch


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = made.add_subparsers(dest="what", required=True)
    kernels = what.add_parser("kernels", help="every kernel beside its ceiling and its peers")
    kernels.add_argument("words", nargs="*", help="only rows whose names contain one of these")
    train = what.add_parser("train", help="training steps of a model of real shape with random weights")
    bench_train.add_arguments(train)
    decode = what.add_parser("decode", help="tokens that a model of real shape generates a second")
    bench_decode.add_arguments(decode)
    return made


def main() -> None:
    args = parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: the benchmark needs an NVIDIA GPU, and torch sees none.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if args.what == "kernels":
        failed = bench_kernels.main(args.words)
    else:
        failed = {"train": bench_train, "decode": bench_decode}[args.what].main(args)
    if failed:
        sys.exit(f"error: {failed} of our own rows failed, see the table.")


if __name__ == "__main__":
    main()
