#!/usr/bin/env python3
"""Fold an adapter into its base model: python scripts/export.py ADAPTER OUT [--base NAME] [--dtype DTYPE] [--bits 4]

Writes a folder that transformers, vLLM and others load like any checkpoint, verified before it gets its name. ADAPTER
is a folder or a hub id; its configuration names the base, and `--base` gives it where that has moved. `--bits 4` writes
bitsandbytes NF4, `--bits 8` FP8. `--load-bits` keeps the base in as many while it is read, as it may have been in
training: then that is what the adapter is merged into, unless `--original` asks for the base as it is stored.

Where OUT ends in .gguf, that file is written for llama.cpp, with `--dtype f16`, `q8_0` ...; `--adapter-only` leaves the
base out. Nothing is uploaded but with `--push owner/name`, a private repository of the hub.
"""

from __future__ import annotations

import argparse
import sys

import torch

from lorarun.export import save_merged
from lorarun.gguf import DTYPES as GGUF_DTYPES
from lorarun.gguf import save_gguf
from lorarun.hub import resolve_adapter
from lorarun.load import load
from lorarun.progress import plain_warnings
from lorarun.publish import push_to_hub

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help="the adapter's folder or hub id")
    parser.add_argument("out", help="the new folder, or a file NAME.gguf")
    parser.add_argument("--base", help="the base model's folder, hub id or alias (default: what the adapter names)")
    parser.add_argument("--load-bits", type=int, choices=[4, 8, 16], help="of the base in memory (default: as stored)")
    parser.add_argument("--original", action="store_true", help="merge into the base as stored, not as loaded")
    parser.add_argument("--bits", type=int, choices=[4, 8, 16], default=16, help="of written projections (default: 16)")
    parser.add_argument("--dtype", choices=[*DTYPES, *GGUF_DTYPES], help="of the tensors (default: the base's, or f16)")
    parser.add_argument("--adapter-only", action="store_true", help="of a GGUF file: the adapter without its base")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to this private repository of the hub")
    arguments = parser.parse_args()
    gguf = arguments.out.endswith(".gguf")
    if arguments.dtype not in (None, *(GGUF_DTYPES if gguf else DTYPES)) or (arguments.adapter_only and not gguf):
        parser.error("--dtype bfloat16, float16 and float32 are for folders, the others and --adapter-only for .gguf")
    if gguf and (arguments.bits != 16 or arguments.original or arguments.push):
        parser.error("--bits, --original and --push are for folders; --dtype q8_0, q4_0 ... are a GGUF file's bits")
    if arguments.push and arguments.push.count("/") != 1:
        parser.error(f"--push {arguments.push}: expected owner/name")
    try:
        if not gguf or arguments.adapter_only:
            resolve_adapter(arguments.adapter)  # before a base is read; a model without one can become a GGUF file
        if arguments.base is None:
            model = load(arguments.adapter, bits=arguments.load_bits)
        else:
            model = load(arguments.base, bits=arguments.load_bits, adapter=arguments.adapter)
        if gguf:
            return save_gguf(model, arguments.out, arguments.dtype or "f16", arguments.adapter_only)
        base = "original" if arguments.original else "dequantized"
        save_merged(model, arguments.out, base, DTYPES.get(arguments.dtype), arguments.bits)
        if arguments.push:
            print(push_to_hub(arguments.out, arguments.push, model=model))
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    plain_warnings()
    main()
