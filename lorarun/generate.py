"""Decoding: text, messages or ids in, their continuation out.

One loop over plain batches. Rows of unequal length are padded on the left, and a pad is no more than a place in a
tensor: it is marked by number, never by its id, no token sees it, positions do not count it, and the repetition penalty
does not know it. So an answer does not depend on what else is in its batch. The usual way lets all of that hang on a
mask that somebody has to pass.

Randomness is computed, not drawn: the number that decides token t of answer a is a function of (seed, a, t), the same
on every device. No generator is read or moved, so a training run that looks at samples on its way stays the same run.

What this gives up: every row of a batch is computed until the last one has ended, and a token must be known on the host
before the next step starts, as it may be the last one.
"""

from __future__ import annotations

import math
import secrets
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lorarun.cache import Cache
from lorarun.dora import held
from lorarun.kernels.dropout import philox
from lorarun.lora import linears
from lorarun.nn import Model
from lorarun.rotary import Rotary
from lorarun.tokenizer import Stream, Tokenizer, configs, end_ids

# Tokens, answers included, that are decoded together: 4 GiB of keys and values for an 8B Llama. More go one batch after
# the other.
TOGETHER = 32_768


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
    seed: int | None = None,
) -> Any:
    """Continue a prompt, or each of several.

    what: a text, taken as it is behind the tokenizer's begin token; a list of messages ({"role", "content"}), written
        with the chat template up to where the answer begins; a list of such texts and conversations; or ids, as a
        tensor [seq] or [batch, seq] (every id is a token: there is no padding) or as lists of ints of any lengths.
    temperature: 0 takes the most probable token, otherwise logits are divided by it, in fp32.
    top_k: draw from so many of the most probable tokens (0: all).
    top_p: of those, from the fewest that together have this probability, at least one in any case.
    repetition_penalty: logits of tokens that the row has had, prompt included, are divided by it where positive and
        multiplied by it where negative (Keskar et al. 2019, arXiv:1909.05858, section 4.1).
    stop: None is every end id that the checkpoint names. A list replaces them, of ids and of texts that end the answer;
        with [] every row runs to max_new_tokens.
    n: answers to each prompt.
    stream: is called with each piece of text as it comes, of one answer to one prompt; True prints them.
    seed: decides the answer to the prompt at its place of the list, whatever the others are; without one, calls differ.

    Returns the text of the answer to a text or a conversation, up to and without what stopped it (of streamed pieces,
    all joined); for ids a list of the new ids, with the stop id as its last. A list of prompts gives a list of these;
    n > 1 gives a list of n in place of each. Modes, gradients and generators are as before, also after an exception.

    Raises ValueError for arguments and prompts that cannot be used, RuntimeError when logits are not finite.
    """
    sampling = Sampling(temperature, top_p, top_k, repetition_penalty)
    _check(sampling, max_new_tokens, n, seed)
    prompts, kinds, single = _prompts(model, what)
    stops, strings = _stops(model, stop)
    if stream and not (single and n == 1):
        raise ValueError(f"generate: stream shows one answer to one prompt; got {len(prompts)} prompts, n={n}.")
    if n > 1 and temperature == 0:
        warnings.warn(f"generate: n={n} answers at temperature 0 are {n} times the same one.", stacklevel=2)
    write = partial(print, end="", flush=True) if stream is True else stream or None
    rows: list[Row] = []
    for prompt, kind in zip(prompts, kinds, strict=True):
        for _ in range(n):
            text = None
            if kind != "ids" or strings or write is not None:
                text = Text(_tokenizer(model), strings, write, after=[] if kind == "messages" else prompt[-4:])
            rows.append(Row(prompt, len(rows), text))
    seed = secrets.randbits(64) if seed is None else seed
    with _aside(model):
        for group in _groups(rows, max_new_tokens, _dynamic_limit(model)):
            _decode(model, group, stops, max_new_tokens, sampling, seed)
    if stream is True:
        print()
    answers: list[Any] = [row.new if row.text is None or "ids" in kinds else row.text.shown for row in rows]
    if n > 1:
        answers = [answers[i : i + n] for i in range(0, len(answers), n)]
    return answers[0] if single else answers


# --- arguments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the fields are arguments of :func:`generate`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


def _check(sampling: Sampling, max_new_tokens: int, n: int, seed: int | None) -> None:
    """Every argument out of range, in one error."""

    def whole(value: Any, least: float = -math.inf) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    t, p, k, penalty = sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty
    limits = (
        ("temperature", t, 0 <= t < math.inf, "0 or more"),
        ("top_p", p, 0 <= p <= 1, "a probability from 0 to 1"),
        ("top_k", k, whole(k, 0), "a whole number, 0 for all tokens"),
        ("repetition_penalty", penalty, 0 < penalty < math.inf, "more than 0, 1 for none"),
        ("max_new_tokens", max_new_tokens, whole(max_new_tokens, 1), "a whole number from 1 up"),
        ("n", n, whole(n, 1), "a whole number from 1 up"),
        ("seed", seed, seed is None or whole(seed), "a whole number or None"),
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
    if most > longest and _dynamic_limit(model) is None:
        warnings.warn(
            f"generate: a prompt has {most} tokens, and this model is made for {longest} (max_position_embeddings); "
            "its answer may be poor.",
            stacklevel=3,
        )
    return prompts, kinds, single


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise ValueError("generate: this model has no tokenizer; give ids, and neither stream= nor texts as stop=.")
    tokenizer: Tokenizer = model.tokenizer
    return tokenizer


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


# --- answers ---------------------------------------------------------------------------------------------------------


class Text:
    """An answer's text as it grows, cut before the first stop text; ``write`` gets what can no longer be cut.

    ``after`` are the last ids of a text that this one continues: some tokenizers drop the space of a first token.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: list[str], write: Callable[[str], object] | None, after: Sequence[int] = ()
    ) -> None:
        self.shown, self._written, self._stops, self._write = "", 0, stops, write
        self._stream: Stream | None = Stream(tokenizer)  # None: a stop text is complete
        self._stream.put(*after)
        self._stream.end()

    def put(self, token: int) -> bool:
        """Add a token; True when a stop text is complete."""
        return self._stream is None or self._add(self._stream.put(token), final=False)

    def end(self) -> None:
        """Add what waited for the rest of a character, and write what waited for the rest of a stop text."""
        self._add("" if self._stream is None else self._stream.end(), final=True)

    def _add(self, piece: str, final: bool) -> bool:
        before = len(self.shown)
        self.shown += piece
        found = [at for stop in self._stops if (at := self.shown.find(stop, max(0, before - len(stop)))) >= 0]
        if found:
            self.shown, self._stream = self.shown[: min(found)], None
        starts = [n for stop in self._stops for n in range(1, len(stop)) if self.shown.endswith(stop[:n])]
        safe = len(self.shown) - (0 if final or found else max(starts, default=0))
        if self._write is not None and safe > self._written:
            self._write(self.shown[self._written : safe])
            self._written = safe
        return bool(found)


@dataclass
class Row:
    """One answer in the making; ``number`` is its place among all, which its randomness depends on."""

    prompt: list[int]
    number: int
    text: Text | None = None
    new: list[int] = field(default_factory=list)
    done: bool = False

    def take(self, token: int, stops: frozenset[int], last: bool) -> None:
        """Add a chosen token and see whether it ends the answer."""
        if token < 0:
            raise RuntimeError(
                f"generate: the logits of answer {self.number} are not finite at its new token {len(self.new)}; look "
                "for NaN in the weights, and if they are float16 load them in bfloat16 or float32."
            )
        self.new.append(token)
        self.done = last or token in stops
        if self.text is not None:
            # A stop id is no text, even where it is an ordinary token.
            self.done = (token not in stops and self.text.put(token)) or self.done
            if self.done:
                self.text.end()


def _groups(rows: Iterable[Row], max_new_tokens: int, limit: int | None) -> Iterator[list[Row]]:
    """Rows of similar length together, as many as TOGETHER allows; alone where the length changes the rotation."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.prompt)):
        length = len(row.prompt) + max_new_tokens
        if group and ((len(group) + 1) * length > TOGETHER or (limit is not None and length > limit)):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


# --- decoding --------------------------------------------------------------------------------------------------------


@contextmanager
def _aside(model: Model) -> Iterator[None]:
    """Eval mode without gradients; every module's own mode is put back at the end, whatever happens."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), held([linear.norms for _, linear in linears(model)]):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _dynamic_limit(model: Any) -> int | None:
    """The length beyond which the rotary frequencies depend on the length (dynamic scaling); None: there is none."""
    tables: list[Rotary] = list(model.rotary.values()) if isinstance(model.rotary, dict) else [model.rotary]
    return min((table.max_positions for table in tables if table.dynamic), default=None)


def _decode(
    model: Model, rows: list[Row], stops: frozenset[int], max_new_tokens: int, sampling: Sampling, seed: int
) -> None:
    """Run rows to their ends, together.

    Beyond a dynamic limit (there is one row then, see ``_groups``) each step is a full forward: keys in a cache were
    rotated by the frequencies of a shorter text.
    """
    device, longest, limit = model.device, max(len(row.prompt) for row in rows), _dynamic_limit(model)
    ids, documents = torch.zeros(len(rows), longest, dtype=torch.int64), torch.full((len(rows), longest), -1)
    seen = torch.zeros(len(rows), model.config.vocab_size, dtype=torch.bool)
    for i, row in enumerate(rows):
        start = longest - len(row.prompt)
        ids[i, start:], documents[i, start:], seen[i, row.prompt] = torch.tensor(row.prompt), 0, True
    first = documents.to(device) if bool((documents < 0).any()) else None
    step, seen = ids.to(device), seen.to(device)
    random = _uniform(rows, max_new_tokens, seed, device) if sampling.temperature > 0 else None
    cache = Cache(model, len(rows), min(longest + max_new_tokens - 1, limit or sys.maxsize))
    for t in range(max_new_tokens):
        if limit is not None and longest + t > limit:
            hidden = model.hidden_states(torch.tensor([rows[0].prompt + rows[0].new], device=device))
        else:
            hidden = model.hidden_states(step, documents=first if t == 0 else None, cache=cache)
        chosen = choose(model.head(hidden[:, -1]), sampling, seen, None if random is None else random[:, t])
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if not row.done:
                row.take(token, stops, last=t == max_new_tokens - 1)
        if all(row.done for row in rows):
            return
        step = chosen.clamp(min=0).unsqueeze(1)
        seen.scatter_(1, step, True)


def _uniform(rows: list[Row], count: int, seed: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1), fp32 [rows, count]; as multiples of 2⁻²³, times any total they stay below that total."""
    bits = torch.stack([philox(seed, row.number, count, torch.device("cpu")) for row in rows])
    return ((bits >> 9).float() * 2.0**-23).to(device)


def choose(logits: Tensor, sampling: Sampling, seen: Tensor, random: Tensor | None) -> Tensor:
    """The next id of each row: int64 [rows] for logits [rows, vocab]; −1 where a row's logits are not finite.

    seen: bool [rows, vocab], ids that the repetition penalty is for. random: fp32 [rows] in [0, 1), needed above
    temperature 0: the token at which the sum of the probabilities (from the most probable on, where top_k or top_p ask
    for an order) passes that number.
    """
    scores = logits.float()
    if (penalty := sampling.repetition_penalty) != 1:
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    top, picked = scores.max(dim=-1, keepdim=True)
    if random is not None:
        # The maximum goes first and the divisor stays above 0, so the best token has exp(0) at any temperature.
        scores = (scores - top) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
        picked = _draw(scores, random.unsqueeze(1), sampling.top_p, sampling.top_k)
    return torch.where(top.isfinite(), picked, -1).squeeze(1)


def _draw(scores: Tensor, random: Tensor, top_p: float, top_k: int) -> Tensor:
    """Ids [rows, 1] from softmax(scores [rows, vocab]) cut to top_k, then top_p, with random [rows, 1]."""
    order = None
    if 0 < top_k < scores.shape[1]:
        scores, order = scores.topk(top_k, dim=-1)
    elif top_p < 1:
        scores, order = scores.sort(dim=-1, descending=True)
    probabilities = scores.softmax(dim=-1)
    total = probabilities.cumsum(dim=-1)
    end = total[:, -1:]
    if top_p < 1:
        kept = (total - probabilities < top_p).sum(dim=-1, keepdim=True)  # tokens before which top_p is not reached
        end = total.gather(1, kept.clamp(min=1) - 1)
    index = torch.searchsorted(total, random * end, right=True).clamp(max=scores.shape[1] - 1)
    return index if order is None else order.gather(1, index)
