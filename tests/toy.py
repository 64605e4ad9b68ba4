"""Toy tokenizers for tests: folders like a checkpoint's, small enough to be made in milliseconds.

"bytes" is a byte-level BPE (as in Llama 3, Qwen, SmolLM); "pieces" is a BPE over ▁ with a fall-back to bytes and a
leading space that decoding takes away (as in Llama 2), whose tokens run across line ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIALS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["the quick brown fox answers", "### Answer: the fox\n### Question: what\n### Answer: quick\n"] * 20


def core(kind: str = "bytes", begins: bool = False, trims: bool = False) -> Tokenizer:
    """`begins`: the post-processor puts <s> in front. `trims`: it trims the offsets of tokens with a space."""
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        base: list[str] = []
    else:
        made = Tokenizer(models.BPE(unk_token="<pad>", fuse_unk=False, byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(steps)
        alphabet = list("▁\nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ#:.,?'[]/!")
        base = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIALS) + len(base) + len(alphabet) + 60,
        initial_alphabet=alphabet,
        special_tokens=SPECIALS + base,
        show_progress=False,
        max_token_length=16,
    )
    made.train_from_iterator(CORPUS, trainer)
    if base:  # byte tokens are in the vocabulary, but no special tokens
        state = json.loads(made.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIALS]
        made = Tokenizer.from_str(json.dumps(state))
    steps = [processors.ByteLevel(trim_offsets=True)] if trims else []
    if begins:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", SPECIALS.index("<s>"))]))
    if steps:
        made.post_processor = processors.Sequence(steps)
    made.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return made


def make(
    folder: Path,
    template: str | list[dict[str, str]] | None = None,
    kind: str = "bytes",
    begins: bool = False,
    trims: bool = False,
    **config: Any,
) -> Path:
    """A checkpoint's text files in `folder`; `config` is added to tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    core(kind, begins, trims).save(str(folder / "tokenizer.json"))
    stored = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    if template is not None:
        stored["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(stored))
    return folder
