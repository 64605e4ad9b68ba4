#!/usr/bin/env python3
"""Talk to a model in the terminal, with and without an adapter.

    python scripts/chat.py smollm2-135m-instruct --adapter out/adapter
    echo "Why is the sky blue?" | python scripts/chat.py smollm2-135m-instruct

While you talk: /adapter on|off, /system TEXT, /reset, /exit. Ctrl-C ends an answer, or at the prompt the chat.
Answers go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

import lorarun
from lorarun.cache import Cache
from lorarun.nn import Model
from lorarun.progress import plain_warnings

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (arrow keys at the prompt, where there is such a module)

ROOM = 1024  # tokens that a conversation has room for at first
HELP = "/adapter on|off   /system TEXT   /reset   /exit   (Ctrl-C ends an answer)"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a local folder, a hub id (owner/name) or an alias such as llama-3.2-1b-instruct")
    parser.add_argument("--adapter", help="folder or hub id of an adapter to put on it")
    parser.add_argument("--bits", type=int, help="4, 8 or 16, of the weights in memory (default: as in the checkpoint)")
    parser.add_argument("--cache", choices=("fp8",), help="keep keys and values in FP8, in half the memory")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the same answer (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="only the most probable tokens that make up this much")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of one answer (default: 512)")
    parser.add_argument("--seed", type=int, help="for the same answers at a temperature again")
    parser.add_argument("--template", help="chat template for a model without one, such as chatml")
    return parser.parse_args(argv)


def note(text: str) -> None:
    """Say something that is not the model's."""
    print(f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text, file=sys.stderr)


def prompt(model: Model, messages: list[dict[str, str]]) -> list[int]:
    """The ids of the conversation; where a template refuses a system message, it goes in front of the question."""
    try:
        return model.tokenizer.encode_prompt(messages)
    except ValueError:
        if model.tokenizer.template is None or messages[0]["role"] != "system":
            raise
        return model.tokenizer.encode_prompt(messages, fold_system=True)


def answer(model: Model, messages: list[dict[str, str]], args: argparse.Namespace, cache: Cache) -> str:
    """Stream an answer to the terminal and return it, or as much as there is when Ctrl-C ends it.  The cache knows the
    conversation then: of the next one, only what is new is computed."""
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        print(piece, end="", flush=True)

    ids, start = prompt(model, messages), time.perf_counter()
    how = {key: getattr(args, key) for key in ("temperature", "top_p", "max_new_tokens", "seed")}
    try:
        count, end = len(lorarun.generate(model, ids, stream=show, cache=cache, **how)), ""
    except KeyboardInterrupt:
        count, end = len(model.tokenizer.encode("".join(pieces), bos=False)), ", stopped"
    print(flush=True)
    note(f"[{count} tokens, {count / (time.perf_counter() - start):.1f} tokens/s{end}]")
    return "".join(pieces)


def switch(model: Model, wish: str) -> None:
    if not model.adapters:
        return note("There is no adapter; start with --adapter FOLDER to have one.")
    if wish not in ("", "on", "off"):
        return note(f"/adapter {wish}: expected /adapter on or /adapter off.")
    if wish:
        lorarun.use_adapter(model, next(iter(model.adapters)) if wish == "on" else None)
    note(f"The adapter is {'off' if model.active is None else 'on'}.")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    try:
        model = lorarun.load(args.model, bits=args.bits, adapter=args.adapter, template=args.template)
        if model.tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer.json, so there is no text to talk in.")
        start = [{"role": "system", "content": args.system}] if args.system else []
        prompt(model, [*start, {"role": "user", "content": "Hello"}])  # without a template: say so now
    except (ValueError, OSError) as error:
        raise SystemExit(f"chat: {error}".replace("template=", "--template ")) from None
    note(HELP)
    messages, cache = list(start), Cache(model, 1, sys.maxsize, args.cache, ROOM)  # it grows with the conversation
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            break
        command, _, rest = line.partition(" ")
        if command == "/exit":
            break
        if command == "/adapter":
            switch(model, rest.strip())
        elif command in ("/reset", "/system"):
            if command == "/system":
                start = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
            messages = list(start)
            note("A new conversation begins.")
        elif line.startswith("/"):
            note(HELP)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                messages = [*asked, {"role": "assistant", "content": answer(model, asked, args, cache)}]
            except (ValueError, RuntimeError) as error:
                note(str(error))


if __name__ == "__main__":
    plain_warnings()
    main()
