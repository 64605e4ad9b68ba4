"""Text, messages or ids in, their continuation out.

A pad does not exist: rows keep their own lengths (:mod:`lorarun.cache`), so positions, attention and the repetition
penalty know nothing of what stands beside a row, and an answer does not depend on the rest of its batch.  The usual way
lets all of that hang on a mask that somebody has to pass.  How tokens are chosen is in :mod:`lorarun.sampling`, how
they are computed in :mod:`lorarun.decode`; here is what goes in and what comes out.

Nothing is left behind: modes, gradients, generators and the model's buffers are as they were, after an exception too.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.answer import Row, Text
from lorarun.cache import Cache, vector_bytes
from lorarun.decode import Decoder, aside, capacity, rows_with_adapters
from lorarun.linear import Mixed
from lorarun.load import free_memory
from lorarun.lora import check_not_merged
from lorarun.nn import Model
from lorarun.rotary import dynamic_limit
from lorarun.sampling import Sampling
from lorarun.tokenizer import Tokenizer, configs, end_ids
from lorarun.trained import beyond_projections

TOGETHER = 32_768  # tokens, answers included, that are decoded together on a CPU; more go one batch after the other
SHARE = 0.6  # of an accelerator's free memory that keys and values may take there


class Answer(NamedTuple):
    """An answer with ``logprobs=True``.  answer: what is returned without; ids: the new ids, the stop id as the last;
    logprobs: the logarithm of the model's probability of each."""

    answer: str | list[int]
    ids: list[int]
    logprobs: list[float]


def generate(
    model: Model,
    what: Any,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    repetition_penalty: float = 1.0,
    stop: Any = None,
    n: int = 1,
    stream: Callable[[str], object] | bool | None = None,
    seed: int | Sequence[int] | None = None,
    min_p: float = 0.0,
    logprobs: bool = False,
    adapters: Sequence[str | None] | None = None,
    cache: Cache | None = None,
    cache_dtype: str | None = None,
) -> Any:
    """Continue a prompt, or each of several.

    what: a text, taken as it is behind the tokenizer's begin token; a list of messages ({"role", "content"}), written
        with the chat template up to where the answer begins; a list of such texts and conversations; or ids, as a
        tensor [seq] or [batch, seq] (every id is a token: there is no padding) or as lists of ints of any lengths.
    temperature: 0 takes the most probable token, otherwise logits are divided by it, in fp32.
    top_k: draw from so many of the most probable tokens (0: all).
    top_p: of those, from the fewest that together have this probability, at least one in any case.
    min_p: of those, from the ones that are at least this fraction as probable as the most probable one.
    repetition_penalty: logits of tokens that the row has had, prompt included, are divided by it where positive and
        multiplied by it where negative (Keskar et al. 2019, arXiv:1909.05858, section 4.1).
    stop: None is every end id that the checkpoint names. A list replaces them, of ids and of texts that end the answer;
        with [] every row runs to max_new_tokens.
    n: answers to each prompt.
    stream: is called with each piece of text as it comes, of one answer to one prompt; True prints them.
    seed: decides the answer to the prompt at its place of the list, whatever the others are; without one, calls differ.
        A list has one for each prompt, and then its place does not matter either.
    logprobs: return an :class:`Answer` in place of each answer.
    adapters: the name of the adapter for each prompt, None for the model alone, instead of the active one for all.
    cache: a :class:`lorarun.cache.Cache` with a row for each answer, which is continued: tokens that a row holds
        already and that its prompt begins with are not computed again.  Another adapter begins anew; after a change of
        weights (a step of training, a merge) make another cache.
    cache_dtype: "fp8" keeps keys and values in half the memory of 16 bits, rounded to three bits of mantissa; a
        ``cache`` has a dtype of its own.

    Returns the text of the answer to a text or a conversation, up to and without what stopped it (of streamed pieces,
    all joined); for ids a list of the new ids, with the stop id as its last. A list of prompts gives a list of these;
    n > 1 gives a list of n in place of each. Modes, gradients and generators are as before, also after an exception.

    Raises ValueError for arguments and prompts that cannot be used, RuntimeError when logits are not finite.
    """
    sampling = Sampling(temperature, top_p, top_k, repetition_penalty, min_p)
    _check(sampling, max_new_tokens, n, seed)
    prompts, kinds, single = _prompts(model, what)
    stops, strings = _stops(model, stop)
    if stream and not (single and n == 1):
        raise ValueError(f"generate: stream shows one answer to one prompt; got {len(prompts)} prompts, n={n}.")
    if cache is not None and cache_dtype is not None:
        raise ValueError("generate: cache_dtype is for a cache made here; give yours its dtype where you make it.")
    if n > 1 and temperature == 0:
        warnings.warn(f"generate: n={n} answers at temperature 0 are {n} times the same one.", stacklevel=2)
    names = _adapters(model, adapters, len(prompts))
    seeds = _seeds(seed, len(prompts), n)
    write = partial(print, end="", flush=True) if stream is True else stream or None
    rows: list[Row] = []
    for prompt, kind, name in zip(prompts, kinds, names or [None] * len(prompts), strict=True):
        for _ in range(n):
            text = None
            if kind != "ids" or strings or write is not None:
                text = Text(_tokenizer(model), strings, write, after=[] if kind == "messages" else prompt[-4:])
            rows.append(Row(prompt, len(rows), text, seeds[len(rows)], name))
    limits = dynamic_limit(model.rotary), _together(model, cache_dtype)
    groups = _groups(rows, max_new_tokens, *limits) if cache is None else [rows]
    mixing = nullcontext() if names is None else rows_with_adapters(model, sorted({name for name in names if name}))
    with aside(model), mixing as mixed:
        for group in groups:
            _decode(model, group, stops, max_new_tokens, sampling, logprobs, mixed, cache, cache_dtype)
    if stream is True:
        print()
    answers: list[Any] = [row.new if row.text is None or "ids" in kinds else row.text.shown for row in rows]
    if logprobs:
        answers = [Answer(answer, row.new, row.logprobs) for answer, row in zip(answers, rows, strict=True)]
    if n > 1:
        answers = [answers[i : i + n] for i in range(0, len(answers), n)]
    return answers[0] if single else answers


def _decode(
    model: Model, rows: list[Row], stops: frozenset[int], max_new_tokens: int, sampling: Sampling, logprobs: bool,
    mixed: Mixed | None, cache: Cache | None, cache_dtype: str | None,
) -> None:  # fmt: skip
    """Run rows to their ends, together; what ``cache`` holds of them stays there for the next call."""
    if cache is None:
        own = Cache(model, len(rows), capacity(model, rows, max_new_tokens), cache_dtype)
        Decoder(model, rows, own, max_new_tokens, sampling, logprobs, mixed).run(stops)
        return
    if not cache.belongs_to(model):
        raise ValueError(
            "generate: the cache was made for another model, or before this one was cast or moved; make another cache."
        )
    if cache.batch != len(rows):
        raise ValueError(f"generate: the cache has {cache.batch} rows, and there are {len(rows)} answers to decode.")
    if (wanted := capacity(model, rows, max_new_tokens)) > cache.capacity:
        raise ValueError(f"generate: the cache holds {cache.capacity} tokens a row; prompt and answer take {wanted}.")
    limit = dynamic_limit(model.rotary)
    if len(rows) > 1 and limit is not None and max(len(row.prompt) for row in rows) + max_new_tokens > limit:
        raise ValueError(
            f"generate: beyond {limit} tokens the length changes this model's rotation, and rows go alone."
        )
    for i, row in enumerate(rows):
        made_by = model.active if mixed is None else row.adapter
        if made_by != cache.adapters[i]:
            cache.clear(i)
        cache.adapters[i] = made_by
        pairs = zip(cache.ids[i], row.prompt[:-1], strict=False)  # the last token must run, for what follows it
        common = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(cache.ids[i]), len(row.prompt) - 1))
        if not cache.rewind(i, common):
            cache.clear(i)
        cache.ids[i] = []  # until the answers are there
    Decoder(model, rows, cache, max_new_tokens, sampling, logprobs, mixed).run(stops)
    for i, row in enumerate(rows):
        held = (row.prompt + row.new)[: cache.lengths[i]]
        held = held[: len(row.prompt) + len(row.new) - 1]  # the last token has not run
        cache.ids[i] = held
        if not cache.rewind(i, len(held)):
            cache.clear(i)


# --- arguments -------------------------------------------------------------------------------------------------------


def _check(sampling: Sampling, max_new_tokens: int, n: int, seed: Any) -> None:
    """Every argument out of range, in one error."""

    def whole(value: Any, least: float = -math.inf) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    seeds = [] if seed is None else seed if isinstance(seed, (list, tuple)) else [seed]
    t, p, k, penalty = sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty
    limits = (
        ("temperature", t, 0 <= t < math.inf, "0 or more"),
        ("top_p", p, 0 <= p <= 1, "a probability from 0 to 1"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "a fraction from 0 to 1"),
        ("top_k", k, whole(k, 0), "a whole number, 0 for all tokens"),
        ("repetition_penalty", penalty, 0 < penalty < math.inf, "more than 0, 1 for none"),
        ("max_new_tokens", max_new_tokens, whole(max_new_tokens, 1), "a whole number from 1 up"),
        ("n", n, whole(n, 1), "a whole number from 1 up"),
        ("seed", seed, all(map(whole, seeds)), "a whole number, a list of them, or None"),
    )
    wrong = [f"{name} is {value!r}, expected {expected}" for name, value, right, expected in limits if not right]
    if wrong:
        raise ValueError(f"generate: {'; '.join(wrong)}.")


def _kind(what: Any) -> str:
    """What one prompt is: text, messages or ids; "" when it is none of these."""
    if isinstance(what, str):
        return "text"
    if isinstance(what, Tensor):
        return "ids" if what.ndim == 1 and not (what.is_floating_point() or what.dtype == torch.bool) else ""
    if isinstance(what, Sequence) and all(isinstance(item, int) and not isinstance(item, bool) for item in what):
        return "ids"
    return "messages" if isinstance(what, Sequence) and all(isinstance(item, Mapping) for item in what) else ""


def _prompts(model: Model, what: Any) -> tuple[list[list[int]], list[str], bool]:
    """The ids of each prompt, what kind each was given as, and whether it was a single one."""
    single = bool(_kind(what)) and (isinstance(what, str) or len(what) > 0)
    if not single and not (what.ndim == 2 if isinstance(what, Tensor) else isinstance(what, Sequence)):
        got = f"a tensor of shape {list(what.shape)}" if isinstance(what, Tensor) else f"a {type(what).__name__}"
        got += ", where a message alone goes into a list" * isinstance(what, Mapping)
        raise ValueError(f"generate: expected a text, a list of messages, ids, or a list of these; got {got}.")
    items = [what] if single else list(what)
    kinds = [_kind(item) for item in items]
    if "" in kinds or ("ids" in kinds and set(kinds) != {"ids"}):
        got = ", ".join(kind or type(item).__name__ for item, kind in zip(items[:4], kinds, strict=False))
        raise ValueError(f"generate: expected a list of texts and conversations, or of lists of ids; got {got}.")
    vocab, longest = model.config.vocab_size, model.config.max_position_embeddings
    prompts: list[list[int]] = []
    for i, (item, kind) in enumerate(zip(items, kinds, strict=True)):
        if kind == "ids":
            prompt = [int(token) for token in item]
        else:
            prompt = _tokenizer(model).encode(item) if kind == "text" else _tokenizer(model).encode_prompt(item)
        if not prompt:
            raise ValueError(f"generate: prompt {i} is empty, and no begin token stands in front; give it some text.")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocab:
            raise ValueError(f"generate: prompt {i} has ids from {low} to {high}; the model's are 0 to {vocab - 1}.")
        prompts.append(prompt)
    most = max(map(len, prompts), default=0)
    if most > longest and dynamic_limit(model.rotary) is None:
        warnings.warn(
            f"generate: a prompt has {most} tokens, and this model is made for {longest} (max_position_embeddings); "
            "its answer may be poor.",
            stacklevel=3,
        )
    return prompts, kinds, single


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise ValueError("generate: this model has no tokenizer; give ids, and neither stream= nor texts as stop=.")
    return model.tokenizer


def _stops(model: Model, stop: Any) -> tuple[frozenset[int], list[str]]:
    """The ids and the texts that end an answer."""
    if stop is None:
        if model.tokenizer is not None:
            return frozenset(model.tokenizer.stop_ids), []
        return frozenset(() if model.source is None else end_ids(configs(model.source.folder))), []
    given = [stop] if isinstance(stop, (int, str)) else list(stop)
    if not all(type(item) is int or (isinstance(item, str) and item) for item in given):
        raise ValueError(f"generate: stop is {stop!r}; expected a list of ids and of texts (not empty), or None.")
    strings = [item for item in given if isinstance(item, str)]
    controls = {text: token for text in strings if (token := _control(_tokenizer(model), text)) is not None}
    ids = {item for item in given if isinstance(item, int)} | set(controls.values())
    return frozenset(ids), [text for text in strings if text not in controls]


def _control(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of the control token that is written ``text``, which no answer's text would show."""
    ids = tokenizer.encode(text, bos=False)
    one = len(ids) == 1 and tokenizer.decode(ids, skip_special=False) == text and not tokenizer.decode(ids)
    return ids[0] if one else None


def _seeds(seed: Any, prompts: int, n: int) -> list[tuple[int, int]]:
    """What the randomness of each answer depends on: a seed and a number."""
    if isinstance(seed, (list, tuple)):
        if len(seed) != prompts:
            raise ValueError(f"generate: {len(seed)} seeds for {prompts} prompts; expected one for each.")
        return [(each, number) for each in seed for number in range(n)]
    seed = secrets.randbits(64) if seed is None else seed
    return [(seed, number) for number in range(prompts * n)]


def _adapters(model: Model, adapters: Sequence[str | None] | None, prompts: int) -> list[str | None] | None:
    """The adapter of each prompt; None where all take the active one."""
    if adapters is None:
        return None
    names: list[str | None] = [adapters] if isinstance(adapters, str) else list(adapters)
    unknown = sorted({str(name) for name in names if name is not None and name not in model.adapters})
    if unknown or len(names) != prompts:
        there = ", ".join(model.adapters) or "none"
        raise ValueError(
            f"generate: adapters={names} for {prompts} prompts; expected a name (there are: {there}) or None for each."
        )
    there_too = [name for name in {*names, model.active} if name is not None]
    if whole := [name for name in there_too if beyond_projections(model.adapters[name])]:
        raise ValueError(
            f"generate: adapters= mixes low-rank updates of projections, and {whole[0]!r} has copies of modules or "
            "parts of the tables; switch with use_adapter, and generate for it alone."
        )
    check_not_merged(model, "generate")
    return names


# --- running ---------------------------------------------------------------------------------------------------------


def _together(model: Model, cache_dtype: str | None) -> int:
    """Tokens, answers included, that are decoded together."""
    config = model.config
    if model.device.type == "cpu" or not config.windows:
        return TOGETHER
    each = 2 * len(config.windows) * config.num_key_value_heads * vector_bytes(model, cache_dtype)
    return max(TOGETHER, int(SHARE * free_memory(model.device) / each))


def _groups(rows: Iterable[Row], max_new_tokens: int, limit: int | None, together: int) -> Iterator[list[Row]]:
    """As many rows together as ``together`` allows; alone where the length changes the rotation."""
    group: list[Row] = []
    longest = 0
    for row in sorted(rows, key=lambda row: len(row.prompt)):  # each row gets the slots of the longest
        longest = len(row.prompt) + max_new_tokens
        if group and ((len(group) + 1) * longest > together or (limit is not None and longest > limit)):
            yield group
            group = []
        group.append(row)
    if group:
        yield group
