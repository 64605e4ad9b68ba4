"""Decoding: prompts into a cache, then token by token to the rows' ends.

Prompts are computed as training batches are: several of them packed into one row without padding, long ones in pieces
that see what the cache holds.  Equal prompts are computed once and their rows copied.

A step is a function of buffers that stay where they are: the last tokens, the cache with its lengths, the number of the
step, the tokens that were seen.  The choice of the next token is part of it.  So on an NVIDIA GPU the second step is
captured as a CUDA graph and the others are replayed, and what the host reads is one step late: while it looks whether
an answer has ended, the next step already runs.  Everywhere else the same function is called.

What this gives up: every row of a batch is computed until the last one has ended, and one step too many is computed
where answers end before their limit.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lorarun.answer import Row
from lorarun.bucket import sent
from lorarun.cache import Cache
from lorarun.capture import capturable, modes, record
from lorarun.dora import held
from lorarun.linear import Mixed
from lorarun.lora import linears
from lorarun.nn import Model, touched
from lorarun.rotary import dynamic_limit
from lorarun.sampling import Sampling, choose, log_probabilities, uniform

PREFILL = 4096  # tokens of prompts that are computed at a time
REPLAYS = 8  # a graph is captured where so many steps are ahead of it


class Decoder:
    """A batch of rows being decoded over ``cache``, a row of it for each.

    capture: in place of a CUDA graph, for tests: takes a callable and returns what replays it.  ``obstacle`` says why
    steps are not replayed, None where they are.
    """

    def __init__(
        self, model: Model, rows: list[Row], cache: Cache, steps: int, sampling: Sampling, logprobs: bool = False,
        mixed: Mixed | None = None, capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:  # fmt: skip
        device = model.device
        self.model, self.rows, self.cache, self.steps, self.sampling = model, rows, cache, steps, sampling
        self.mixed, self.capture = mixed, capture
        self.tokens = torch.zeros(len(rows), 1, dtype=torch.int64, device=device)  # the last ones, which come next
        self.chosen = torch.zeros(len(rows), dtype=torch.int64, device=device)  # the same, −1 for no choice
        self.logprobs = torch.zeros(len(rows), device=device) if logprobs else None
        self.number = torch.zeros(1, dtype=torch.int64, device=device)  # of the token that is chosen next
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(len(rows), model.config.vocab_size, dtype=torch.bool)
            for i, row in enumerate(rows):
                seen[i, row.prompt] = True
            self.seen = sent(seen, device)
        self.random: Tensor | None = None
        if sampling.temperature > 0:
            self.random = sent(uniform([row.stream for row in rows], steps), device)
        self.adapters: Tensor | None = None  # of each row, [rows, 1]
        if mixed is not None:
            self.adapters = sent(torch.tensor([[mixed.number(row.adapter)] for row in rows]), device)
        self.replay: Callable[[], None] | None = None
        self.warm = False  # whether a step has run as it would be captured
        self.obstacle = _unfit(model) if capture else obstacle(model)

    def prefill(self) -> None:
        """Compute what the cache does not hold of the prompts, and choose each row's first token."""
        leaders: dict[Any, int] = {}  # rows of equal prompts follow the first of them
        followers: dict[int, list[int]] = {}
        for i, row in enumerate(self.rows):
            key = (i,) if self.cache.lengths[i] else (row.adapter, *row.prompt)
            first = leaders.setdefault(key, i)
            if first != i:
                followers.setdefault(first, []).append(i)
        last: dict[int, Tensor] = {}
        for group in self._passes(list(leaders.values())):
            ids = torch.cat([torch.tensor(piece) for _, piece in group])[None]
            lengths = torch.tensor([len(piece) for _, piece in group])
            documents = torch.tensor([i for i, _ in group]).repeat_interleave(lengths)[None]
            if self.mixed is not None and self.adapters is not None:
                self.mixed.which = self.adapters[documents[0]].T
            hidden = self.model.hidden_states(sent(ids, self.model.device), documents=documents, cache=self.cache)
            for (i, _), end in zip(group, lengths.cumsum(0).tolist(), strict=True):
                last[i] = hidden[0, end - 1]
            del hidden
        for first, others in followers.items():
            self.cache.copy_row(first, others)
            last.update(dict.fromkeys(others, last[first]))
        if self.mixed is not None:
            self.mixed.which = self.adapters
        self._pick(torch.stack([last[i] for i in range(len(self.rows))]))

    def _passes(self, leaders: list[int]) -> Iterator[list[tuple[int, list[int]]]]:
        """(row, ids) of the pieces of each pass: whole prompts together, one that is long or begun alone."""
        group: list[tuple[int, list[int]]] = []
        for i in leaders:
            start, prompt = self.cache.lengths[i], self.rows[i].prompt
            if start or len(prompt) > PREFILL:
                for at in range(start, len(prompt), PREFILL):
                    yield [(i, prompt[at : at + PREFILL])]
                continue
            if group and sum(len(piece) for _, piece in group) + len(prompt) > PREFILL:
                yield group
                group = []
            group.append((i, prompt))
        if group:
            yield group

    def _pick(self, hidden: Tensor) -> None:
        """Choose the next token of each row from the final hidden states [rows, hidden] of the last one."""
        logits = self.model.head(hidden)
        random = None if self.random is None else self.random.index_select(1, self.number).squeeze(1)
        chosen = choose(logits, self.sampling, self.seen, random)
        self.chosen.copy_(chosen)
        self.tokens.copy_(chosen.clamp(min=0).unsqueeze(1))
        if self.logprobs is not None:
            self.logprobs.copy_(log_probabilities(logits, chosen.clamp(min=0)))
        if self.seen is not None:
            self.seen.scatter_(1, self.tokens, True)
        self.number += 1

    def _step(self) -> None:
        self._pick(self.model.hidden_states(self.tokens, cache=self.cache)[:, -1])

    def _full_step(self) -> None:
        """A step without the cache, for one row beyond the length from which on each token changes the rotation."""
        ids = torch.tensor([self.rows[0].prompt + self.rows[0].new], device=self.model.device)
        self._pick(self.model.hidden_states(ids)[:, -1])

    def run(self, stops: frozenset[int]) -> None:
        """Decode to the rows' ends: an id of ``stops``, a stop text, or as many new tokens as there are steps."""
        longest, limit = max(len(row.prompt) for row in self.rows), dynamic_limit(self.model.rotary)
        late = self.model.device.type == "cuda" and limit is None
        reader = Reader(self)
        for t in range(self.steps + 1):
            if t == 0:
                self._full_step() if limit is not None and longest > limit else self.prefill()
            elif t < self.steps:
                if limit is not None and longest + t > limit:
                    self._full_step()
                else:
                    self._next(t)
            if t < self.steps:
                reader.send()
            if (not late and t < self.steps) or (late and t > 0):
                tokens, logprobs = reader.read()
                seen = t - late  # the number of the tokens that are looked at
                for row, token, logprob in zip(self.rows, tokens, logprobs, strict=True):
                    if not row.done:
                        row.take(token, logprob, stops, last=seen == self.steps - 1)
                if all(row.done for row in self.rows):
                    return

    def _next(self, t: int) -> None:
        """Step number ``t``, replayed where that is possible; the one before a capture runs as what will be captured,
        so that its kernels are compiled and loaded by then."""
        if self.cache.full:
            self.replay, self.warm = None, False
        lasting = self.replay is None and self.obstacle is None and self.steps - (t + (not self.warm)) >= REPLAYS
        if lasting and self.warm:
            lengths = list(self.cache.lengths)
            try:
                with self.cache.anywhere():
                    self.replay = (self.capture or _graph)(self._step)
            except RuntimeError as error:
                self.obstacle = f"the capture failed: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
            self.cache.lengths = lengths  # nothing has run
        if self.replay is None:
            with self.cache.anywhere() if lasting and not self.warm else contextlib.nullcontext():
                self._step()
            self.warm = True
        else:
            self.cache.advance()
            self.replay()


class Reader:
    """What was chosen, on its way to the host, which nobody waits for before it is read."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.waiting: list[tuple[Tensor, Tensor | None, Any]] = []

    def send(self) -> None:
        chosen, logprobs = self.decoder.chosen, self.decoder.logprobs
        if chosen.device.type != "cuda":
            self.waiting.append((chosen.clone(), None if logprobs is None else logprobs.clone(), None))
            return
        here = [None if t is None else torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (chosen, logprobs)]
        assert here[0] is not None
        here[0].copy_(chosen, non_blocking=True)
        if here[1] is not None and logprobs is not None:
            here[1].copy_(logprobs, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.waiting.append((here[0], here[1], event))

    def read(self) -> tuple[list[int], list[float | None]]:
        """The oldest tokens that were sent, and their log-probabilities where these are wanted."""
        chosen, logprobs, event = self.waiting.pop(0)
        if event is not None:
            event.synchronize()
        tokens: list[int] = chosen.tolist()
        return tokens, [None] * len(tokens) if logprobs is None else logprobs.tolist()


def obstacle(model: Model) -> str | None:
    """Why this model's steps are not replayed as they stand now, None where they are."""
    return _unfit(model) or modes(model.device) or capturable(model)


def _unfit(model: Model) -> str | None:
    """Why this model's steps are not replayed: what Python does in them would be left out."""
    if dynamic_limit(model.rotary) is not None:
        return "dynamic rotary scaling looks at the positions"
    for module in model.modules():
        if touched(module) or not type(module).__module__.startswith(("lorarun.", "torch.nn.")):
            return f"a {type(module).__name__} has hooks or is none of lorarun's modules"
    return None


@functools.cache
def _captures(device: int) -> Any:
    """The stream on which steps are captured.  One for all: cuBLAS keeps a workspace for each that it meets, and takes
    this one's now, since inside a capture it would lie in the memory of the first graph and keep that for ever."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        x = torch.ones((16, 16), device=stream.device)
        torch.mm(x, x)
    return stream


def _graph(run: Callable[[], None]) -> Callable[[], None]:
    """Capture ``run`` as a CUDA graph with memory of its own."""
    here, stream = torch.cuda.current_stream(), _captures(torch.cuda.current_device())
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        replay = record(run, torch.cuda.graph_pool_handle())
    here.wait_stream(stream)
    return replay


@contextmanager
def aside(model: Model) -> Iterator[None]:
    """Eval mode without gradients and without rows' own adapters; what was is put back at the end, whatever happens.

    A callback that streams may generate as well: then all of this is on already.
    """
    modes = [(module, module.training) for module in model.modules()]
    carriers = [linear for _, linear in linears(model)]
    mixed = [linear.mixed for linear in carriers]
    try:
        model.eval()
        for linear in carriers:
            linear.mixed = None
        with torch.no_grad(), held([linear.norms for linear in carriers]):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for linear, before in zip(carriers, mixed, strict=True):
            linear.mixed = before


@contextmanager
def rows_with_adapters(model: Model, names: list[str]) -> Iterator[Mixed]:
    """Inside, each token takes the adapter whose number ``which`` of what this gives says, −1 for none."""
    mixed = Mixed(names)
    carriers = [linear for _, linear in linears(model)]
    try:
        for linear in carriers:
            linear.mixed = mixed
        yield mixed
    finally:
        for linear in carriers:
            linear.mixed = None


def capacity(model: Model, rows: list[Row], max_new_tokens: int) -> int:
    """The slots of a cache for these rows: the last token is never looked up again."""
    longest = max(len(row.prompt) for row in rows) + max_new_tokens - 1
    return min(longest, dynamic_limit(model.rotary) or sys.maxsize)
