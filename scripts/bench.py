#!/usr/bin/env python3
"""Measure lorarun on a GPU. The last line is JSON.

    python scripts/bench.py kernels             # every kernel: a correctness gate, time, share of the ceiling, peers
    python scripts/bench.py kernels norm NF4    # those whose names contain one of these words

Peers (bitsandbytes, Liger, Unsloth, what torch brings) are timed in the same run where they are installed; one that is
missing or fails is named, with the reason. Nothing here is used by lorarun itself.
"""

from __future__ import annotations

import argparse
import sys

import bench_kernels
import torch


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = made.add_subparsers(dest="what", required=True)
    kernels = what.add_parser("kernels", help="every kernel beside its ceiling and its peers")
    kernels.add_argument("words", nargs="*", help="only rows whose names contain one of these")
    return made


def main() -> None:
    args = parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: the benchmark needs an NVIDIA GPU, and torch sees none.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if failed := bench_kernels.main(args.words):
        sys.exit(f"error: {failed} rows failed, see the table.")


if __name__ == "__main__":
    main()
