#!/usr/bin/env python3
"""Fold an adapter into its base model: python scripts/export.py ADAPTER OUT [--base NAME] [--dtype DTYPE]

Writes a folder that transformers, vLLM and others load like any checkpoint, verified before it gets its name. ADAPTER
is a folder or a hub id; its configuration names the base, and `--base` gives it where that has moved.
"""

from __future__ import annotations

import argparse
import sys

import torch

from lorarun.export import save_merged
from lorarun.load import load

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fold an adapter into its base model.")
    parser.add_argument("adapter", help="the adapter's folder or hub id")
    parser.add_argument("out", help="the new folder")
    parser.add_argument("--base", help="the base model's folder, hub id or alias (default: what the adapter names)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the tensors written (default: as the base has them)")
    arguments = parser.parse_args()
    try:
        if arguments.base is None:
            model = load(arguments.adapter)
        else:
            model = load(arguments.base, adapter=arguments.adapter)
        save_merged(model, arguments.out, dtype=DTYPES.get(arguments.dtype))
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
