#!/usr/bin/env python3
"""Fold an adapter into its base model: python scripts/export.py ADAPTER OUT [--base NAME] [--dtype DTYPE]

Writes a folder that transformers, vLLM and others load like any checkpoint, verified before it gets its name. ADAPTER
is a folder or a hub id; its configuration names the base, and `--base` gives it where that has moved. Where OUT ends in
.gguf, that file is written for llama.cpp, with `--dtype f16`, `q8_0` ...; `--adapter-only` leaves the base out.
"""

from __future__ import annotations

import argparse
import sys

import torch

from lorarun.export import save_merged
from lorarun.gguf import DTYPES as GGUF_DTYPES
from lorarun.gguf import save_gguf
from lorarun.load import load

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fold an adapter into its base model.")
    parser.add_argument("adapter", help="the adapter's folder or hub id")
    parser.add_argument("out", help="the new folder, or a file NAME.gguf")
    parser.add_argument("--base", help="the base model's folder, hub id or alias (default: what the adapter names)")
    parser.add_argument("--dtype", choices=[*DTYPES, *GGUF_DTYPES], help="of the tensors (default: the base's, f16)")
    parser.add_argument("--adapter-only", action="store_true", help="of a GGUF file: the adapter without its base")
    arguments = parser.parse_args()
    gguf = arguments.out.endswith(".gguf")
    if arguments.dtype not in (None, *(GGUF_DTYPES if gguf else DTYPES)) or (arguments.adapter_only and not gguf):
        parser.error("--dtype bfloat16, float16 and float32 are for folders, the others and --adapter-only for .gguf")
    try:
        if arguments.base is None:
            model = load(arguments.adapter)
        else:
            model = load(arguments.base, adapter=arguments.adapter)
        if gguf:
            return save_gguf(model, arguments.out, arguments.dtype or "f16", arguments.adapter_only)
        save_merged(model, arguments.out, dtype=DTYPES.get(arguments.dtype))
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
