"""A tokenizer as GGUF's metadata keeps it, from and to the ``tokenizer.json`` that the tokenizers package reads.

GGUF lists tokens, their types and either merges (model "gpt2": byte-level BPE) or scores (model "llama": SentencePiece
BPE).  How text is split before the merges it only names, and llama.cpp has the rule under that name.  So has this file,
for the few names that the served families use.  The name is chosen by the rule itself, never by a digest of what a
tokenizer does to a sample text, which changes with every added token; a rule that has no name here is an error, since a
wrong split trains and answers, only worse.

Lost in GGUF: whether an added token swallows the spaces beside it, and chat templates beside the default one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lorarun import tokenizer as own
from lorarun.gguf_read import Gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # values of tokenizer.ggml.token_type
SPACE = "\u2581"  # SentencePiece's
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The names of splits with their regular expressions; the other two are put together from the package's parts.
REGEX = {"llama-bpe": rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}", "qwen2": rf"{LETTERS}|\p{{N}}|{REST}"}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
# Tokens that end a turn or a text wherever they exist, whatever the metadata says (llama.cpp looks for them too).
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>")
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def split_rules() -> dict[str, Any]:
    """tokenizer.ggml.pre -> the pre-tokenizer of that name."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules = {"gpt-2": plain, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])}
    for name, regex in REGEX.items():
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rules[name] = pre_tokenizers.Sequence([split, level])
    return rules


# --- from GGUF -----------------------------------------------------------------------------------------------------


def write_files(file: Gguf, config: Mapping[str, Any], folder: Path, template: str | None = None) -> None:
    """Write ``config.json``, ``generation_config.json`` and the tokenizer's files as a hub would give them.

    template: for a model that carries none.  Nothing of a tokenizer is written where the file has none.
    """
    files: dict[str, Any] = {"config.json": dict(config)}
    if file.get("tokenizer.ggml.model", str, "none") != "none":
        vocabulary = Vocabulary(file, config["vocab_size"])
        core = vocabulary.build()
        core.save(str(folder / "tokenizer.json"))
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # the class that takes tokenizer.json as it is
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **{f"{role}_token": vocabulary.tokens[i] for role, i in vocabulary.roles.items()},
            "chat_template": file.get("tokenizer.chat_template", str, template),
        }
        ids = {f"{role}_token_id": vocabulary.roles[role] for role in ("bos", "pad") if role in vocabulary.roles}
        stops = vocabulary.stops()
        files["generation_config.json"] = {**ids, "eos_token_id": stops[0] if len(stops) == 1 else stops}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class Vocabulary:
    """The tokens of a GGUF file."""

    def __init__(self, file: Gguf, rows: int) -> None:
        self.file = file
        self.kind = file.get("tokenizer.ggml.model", str)
        tokens = file.get("tokenizer.ggml.tokens", list)
        kinds = file.get("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
        if len(kinds) != len(tokens) or len(tokens) > rows or not all(isinstance(token, str) for token in tokens):
            raise ValueError(f"{file.folder}: {len(tokens)} tokens, {len(kinds)} types and {rows} rows do not match.")
        filler = [i for i, kind in enumerate(kinds) if kind == UNUSED and re.fullmatch(r"\[PAD\d+\]", tokens[i])]
        end = len(tokens)
        while filler and filler[-1] == end - 1:  # what fills the table up is no token
            end = filler.pop()
        self.tokens, self.kinds = tokens[:end], kinds[:end]
        ids = {role: file.get(f"tokenizer.ggml.{key}_token_id", int, None) for role, key in ROLES.items()}
        self.roles = {role: i for role, i in ids.items() if i is not None}
        wrong = [f"{role} {i}" for role, i in self.roles.items() if not 0 <= i < end]
        if wrong or not self.tokens:
            raise ValueError(f"{file.folder} has {end} tokens and names others: {', '.join(wrong)}.")

    def build(self) -> Tokenizer:
        if self.kind == "gpt2":
            core, begins = self._byte_level()
        elif self.kind == "llama":
            core, begins = self._sentencepiece(), True
        else:
            raise ValueError(f"{self.file.folder} has a tokenizer {self.kind!r:.40}; served are 'gpt2' and 'llama'.")
        bos = self.roles.get("bos")
        if bos is not None and self.file.get("tokenizer.ggml.add_bos_token", bool, begins):
            text = self.tokens[bos]
            core.post_processor = processors.TemplateProcessing(
                single=f"{text} $A", pair=f"{text} $A {text}:1 $B:1", special_tokens=[(text, bos)]
            )
        kinds = (CONTROL, USER_DEFINED, UNKNOWN)
        added = [(token, kind) for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]
        special = {token for token, kind in added if kind != USER_DEFINED}
        if self.file.arch.startswith("gemma"):  # the converter calls 6,242 <unusedN> control tokens; the model does not
            special = {self.tokens[i] for i in self.roles.values()}
            special |= {f"<{edge}_of_{what}>" for edge in ("start", "end") for what in ("turn", "image")}
        core.add_special_tokens([AddedToken(token, normalized=False) for token, _ in added if token in special])
        core.add_tokens([AddedToken(token, normalized=False) for token, _ in added if token not in special])
        return core

    def stops(self) -> list[int]:
        """Every id that ends an answer or a text; what the metadata names first."""
        keys = [self.file.get(f"tokenizer.ggml.{key}_token_id", int, None) for key in ("eos", "eot", "eom")]
        named = [i for i, token in enumerate(self.tokens) if token in ENDS and i != self.roles.get("unk")]
        return list(dict.fromkeys(i for i in [*keys, *named] if i is not None and 0 <= i < len(self.tokens)))

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        """Byte-level BPE, and whether texts begin with the begin token where the file does not say."""
        pre = self.file.get("tokenizer.ggml.pre", str)
        name, rules = ALIASES.get(pre, pre), split_rules()
        if name not in rules:
            raise ValueError(f"{self.file.folder} splits text by {pre!r:.40}; served are {', '.join(rules)}.")
        lines = self.file.get("tokenizer.ggml.merges", list)
        merges: list[Any] = [tuple(line.split(" ", 1)) for line in lines if isinstance(line, str)]
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        if len(merges) != len(lines) or any(len(m) != 2 or not {*m, "".join(m)} <= vocabulary.keys() for m in merges):
            raise ValueError(f"{self.file.folder} has merges of what are no tokens: convert it afresh.")
        core = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
        core.normalizer = normalizers.NFC() if name == "qwen2" else None
        core.pre_tokenizer = rules[name]
        core.decoder = decoders.ByteLevel()
        return core, name == "llama-bpe"

    def _sentencepiece(self) -> Tokenizer:
        # llama.cpp's converter writes the spaces of user-defined tokens as they are typed, and replaces their scores,
        # which are 0 (the best); in the model's own vocabulary a space is always U+2581.
        self.tokens = [token.replace(" ", SPACE) for token in self.tokens]
        scores = self.file.get("tokenizer.ggml.scores", list)[: len(self.tokens)]
        if len(scores) != len(self.tokens) or not all(isinstance(score, float) for score in scores):
            raise ValueError(f"{self.file.folder} has {len(scores)} scores for {len(self.tokens)} tokens.")
        known = zip(scores, self.kinds, strict=True)
        scores = [0.0 if kind in (CONTROL, USER_DEFINED) else score for score, kind in known]
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        unknown = self.tokens[self.roles.get("unk", 0)]
        merges = sentencepiece_merges(self.tokens, scores)
        core = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.file.get("tokenizer.ggml.add_space_prefix", bool, True):
            core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
            back.append(decoders.Strip(" ", 1, 0))
        else:
            core.normalizer = normalizers.Replace(" ", SPACE)
            core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        core.decoder = decoders.Sequence(back)
        return core


def sentencepiece_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """The BPE merges that reproduce the scores of a SentencePiece BPE model.

    A token can be made by every split into two tokens. Better scores come first; ties, which are the splits of one
    token, go by the longer left half.
    """
    known = set(tokens)
    merges = [
        (-score, -cut, cut - len(token), token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
    merges.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in merges]


# --- to GGUF -------------------------------------------------------------------------------------------------------


def vocabulary_fields(tokenizer: own.Tokenizer, rows: int) -> dict[str, Any]:
    """The ``tokenizer.*`` metadata of a tokenizer for a model with ``rows`` embeddings.

    Raises ValueError for a tokenizer that llama.cpp has no name for.
    """
    path = tokenizer.folder / "tokenizer.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    model, added = stored["model"], {token["id"]: token for token in stored.get("added_tokens") or []}
    if model.get("type", "BPE") != "BPE":
        raise ValueError(
            f"save_gguf: {path} is a {model['type']} tokenizer; byte-level and SentencePiece BPE are served."
        )
    merges = [m.split(" ", 1) if isinstance(m, str) else list(m) for m in model["merges"]]
    if not merges:
        raise ValueError(f"save_gguf: {path} has no merges, which GGUF cannot do without.")
    pieces = bool(model.get("byte_fallback"))
    by_id = {i: token for token, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    if max(by_id) >= rows:
        raise ValueError(f"save_gguf: {path} has token {max(by_id)}, and the model {rows} embeddings.")
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    kinds = [_type(i, by_id.get(i), added.get(i), pieces) for i in range(rows)]
    fields: dict[str, Any] = {"tokenizer.ggml.model": "llama" if pieces else "gpt2", "tokenizer.ggml.token_type": kinds}
    if pieces:
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault("".join(merge), rank)
        fields["tokenizer.ggml.scores"] = [-float(ranks.get(token, 0)) for token in tokens]
        fields["tokenizer.ggml.add_space_prefix"] = _prepends(path, stored)
        typed = [t.replace(SPACE, " ") if k == USER_DEFINED else t for t, k in zip(tokens, kinds, strict=True)]
        fields |= {"tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": typed}
    else:
        fields["tokenizer.ggml.pre"] = _split_name(path, stored["pre_tokenizer"])
        fields |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}
    ids = {token: i for i, token in by_id.items()}
    if (unknown := ids.get(model.get("unk_token") or tokenizer._tokens.get("unk_token"))) is not None:
        fields["tokenizer.ggml.unknown_token_id"] = unknown
    return fields | _roles(tokenizer, by_id)


def _type(i: int, token: str | None, added: dict[str, Any] | None, pieces: bool) -> int:
    if token is None:
        return UNUSED
    if added is not None:
        return CONTROL if added["special"] else USER_DEFINED
    return BYTE if pieces and re.fullmatch(r"<0x[0-9A-F]{2}>", token) else NORMAL


def _roles(tokenizer: own.Tokenizer, by_id: dict[int, str]) -> dict[str, Any]:
    """The ids of control tokens, whether a text begins with one, and the chat template."""
    found: dict[str, Any] = {"tokenizer.ggml.add_bos_token": tokenizer.adds_bos}
    others = [i for i in tokenizer.stop_ids if i != tokenizer.eos_id]
    eom = [i for i in others if by_id.get(i) == "<|eom_id|>"]
    turns = [i for i in others if i not in eom]
    turns.sort(key=lambda i: ENDS.index(by_id[i]) if by_id.get(i) in ENDS else len(ENDS))
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "padding": tokenizer.pad_id}
    ids |= {"eot": turns[0] if turns else None, "eom": eom[0] if eom else None}
    found |= {f"tokenizer.ggml.{role}_token_id": i for role, i in ids.items() if i is not None}
    if tokenizer.template is not None:
        found["tokenizer.chat_template"] = tokenizer.template
    return found


def _split_name(path: Path, split: Any) -> str:
    """llama.cpp's name of a pre-tokenizer."""
    for name, rule in split_rules().items():
        if _bare(json.loads(rule.__getstate__())) == _bare(split):
            return name
    raise ValueError(
        f"save_gguf: {path} splits text by a rule that GGUF has no name for here ({json.dumps(split):.200}); known are "
        f"those of {', '.join(split_rules())}."
    )


def _bare(rule: Any) -> Any:
    """A rule without what does not change the tokens."""
    if isinstance(rule, dict):
        return {key: _bare(value) for key, value in rule.items() if key != "trim_offsets"}
    return [_bare(value) for value in rule] if isinstance(rule, list) else rule


def _prepends(path: Path, stored: dict[str, Any]) -> bool:
    """Whether a SentencePiece tokenizer puts a space in front of a text."""
    normalizer, split = stored.get("normalizer") or {}, stored.get("pre_tokenizer")
    steps = normalizer.get("normalizers", [normalizer])
    kinds = [step.get("type") for step in steps]
    if kinds == ["Replace"] and (split is None or split.get("type") == "Split"):
        return False
    if kinds == ["Prepend", "Replace"] and split is None:
        return True
    raise ValueError(f"save_gguf: {path} prepares text by {kinds}, which GGUF's SentencePiece tokenizer does not.")
