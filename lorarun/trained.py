"""What an adapter trains beside low-rank updates of projections: whole copies, rows of the tables, updates of them.

The functions below work on a model as those of :mod:`lorarun.lora` do, which calls them; the modules are in
:mod:`lorarun.weighted`.  The *tables* are the embedding and the head.

**A tied table is one table.**  Where a checkpoint ties its head to the embedding, a copy, rows or a low-rank update of
either serve both, as with PEFT's ``ensure_weight_tying``: the merged model is tied as its base is, and other programs
load it.  PEFT's default is the other way: it trains the one that is named, apart from the other.  Adapters that were
made so are read, run and trained as they are, and merging them gives the head a table of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lorarun.linear import Adapter, Linear
from lorarun.nn import Embedding, Model
from lorarun.quant.store import Store
from lorarun.weighted import Copy, TokenRows, Weighted

EMBEDDING, HEAD = TABLES = ("model.embed_tokens", "lm_head")
# In a parameter's name, and in a module's.
OWNER = re.compile(r"\.(?:lora_[^.]+|modules_to_save|trainable_tokens_delta)\.(?P<adapter>[^.]+)(?:\.|$)")
INSIDE = re.compile(r"\.(?:lora_[^.]+|modules_to_save|token_adapter)(?:\.|$)")
ROWS = "token_adapter.trainable_tokens_delta"  # in files
LOW_RANK = {EMBEDDING: ("lora_embedding_A", "lora_embedding_B"), HEAD: ("lora_A.weight", "lora_B.weight")}
HEAD_STREAM = 2**30  # of dropout for the head's input, which no block shares


class _Transposed(nn.Module):
    """A matrix of the embedding's adapter as the tied head reads it: the same parameter, the other way round."""

    bias = None

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.of = parameter

    @property
    def weight(self) -> Tensor:
        return self.of.T

    def whole(self, dim: int) -> Tensor:
        return self.weight


# --- which ---------------------------------------------------------------------------------------------------------


def weighted(model: nn.Module) -> Iterator[tuple[str, Weighted]]:
    """Every module with a weight that can be trained, by name."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, Weighted))


def find_copies(model: Model, names: Sequence[str], call: str) -> list[str]:
    """The modules that ``modules_to_save`` means: those whose name ends in one of ``names``, as in PEFT ("norm" is
    every norm), and those inside them; in the model's order.

    Raises ValueError for a name that means nothing here, and for quantised weights.
    """
    if isinstance(names, str):
        raise ValueError(f"{call}: modules_to_save={names!r}; expected a list of names.")
    paths = [path for path, _ in model.named_modules() if path and not inside_adapter(path)]
    unknown = [name for name in names if not name or not any(path.endswith(name) for path in paths)]
    if unknown:
        raise ValueError(f"{call}: modules_to_save: no module of this model is called {', '.join(map(repr, unknown))}.")
    roots = tuple(path for path in paths if any(path.endswith(name) for name in names))
    found = {
        path: module
        for path, module in weighted(model)
        if path in roots or path.startswith(tuple(f"{root}." for root in roots))
    }
    stored = [path for path, module in found.items() if isinstance(module.weight, Store)]
    if stored:
        raise ValueError(
            f"{call}: modules_to_save means {len(stored)} quantised weights, {', '.join(stored[:3])} …, and whole "
            "weights of few bits cannot be trained: load with bits=16 or skip=, or give them a low-rank adapter."
        )
    return list(found)


def is_tied(model: Model) -> bool:
    """Whether the head is the embedding's table."""
    return model.lm_head.weight is model.model.embed_tokens.weight


def inside_adapter(path: str) -> bool:
    """Whether a module of this name is a part of an adapter."""
    return INSIDE.search(path) is not None


def owner(name: str) -> str | None:
    """The adapter that a parameter of this name belongs to."""
    found = OWNER.search(name)
    return found["adapter"] if found else None


def parameters_of(model: Model, adapter: str) -> list[nn.Parameter]:
    """Everything that an adapter trains, each parameter once, in the model's order."""
    still = {id(parameter) for parameter in _frozen(model, adapter)}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if owner(name) == adapter and id(parameter) not in still
    ]


def _frozen(model: Model, adapter: str | None) -> list[nn.Parameter]:
    """What stays as it began of an adapter (A of LoRA-FA)."""
    return [
        module.lora_A[adapter].weight
        for _, module in weighted(model)
        if isinstance(module, Linear) and adapter in module.adapters and module.adapters[adapter].freeze_a
    ]


# --- attach --------------------------------------------------------------------------------------------------------


def first_rows(model: Model, path: str, ids: Sequence[int]) -> Tensor:
    """What the rows of these tokens in a table begin with, [ids, hidden] in fp32 or wider: what the table has, and for
    new tokens the mean over all that were there before them."""
    table: Tensor = model.get_submodule(path).weight.detach()  # type: ignore[operator]
    wide = torch.promote_types(table.dtype, torch.float32)
    rows = table[torch.tensor(ids, dtype=torch.int64, device=table.device)].to(wide)
    new = torch.tensor([model.added.get(i, False) for i in ids], device=table.device)
    if new.any():
        known = min(i for i, fresh in model.added.items() if fresh)
        rows[new] = table[:known].mean(0, dtype=wide)
    return rows


def first_table(model: Model, path: str) -> Tensor:
    """A whole table as training it begins."""
    table: Tensor = model.get_submodule(path).weight.detach()  # type: ignore[operator]
    new = [i for i, fresh in model.added.items() if fresh]
    if not new:
        return table
    return table.index_copy(0, torch.tensor(new, device=table.device), first_rows(model, path, new).to(table.dtype))


def _trained_in(weight: Tensor, value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of what is trained in the place of a weight, from ``value``: see :func:`add_copies`."""
    if dtype is not None:
        return torch.promote_types(weight.dtype, dtype)
    return torch.promote_types(torch.promote_types(weight.dtype, value.dtype), torch.float32)


def add_copies(
    model: Model,
    name: str,
    paths: Sequence[str],
    tied: bool,
    dtype: torch.dtype | None,
    values: Mapping[str, Tensor],
) -> None:
    """Give an adapter copies of these modules' parameters, or of ``values`` (by parameter) where they are given.

    dtype: of the copies; never narrower than the weight.  None: fp32, or that of the values or weight if it is wider.
    """

    def own(path: str, part: str, base: Tensor) -> Tensor:
        value = values.get(f"{path}.{part}")
        if value is None:
            value = first_table(model, path) if path in TABLES else base.detach()
        return value.to(base.device, _trained_in(base, value, dtype), copy=True)

    for path in paths:
        module = model.get_submodule(path)
        assert isinstance(module, Weighted)
        bias = getattr(module, "bias", None)
        if "modules_to_save" not in module._modules:
            module.modules_to_save = nn.ModuleDict()
        if path == HEAD and tied and EMBEDDING in paths:
            module.modules_to_save[name] = model.model.embed_tokens.modules_to_save[name]
            continue
        copy = Copy(own(path, "weight", module.weight), None if bias is None else own(path, "bias", bias))
        module.modules_to_save[name] = copy


def add_rows(
    model: Model,
    name: str,
    tokens: Mapping[str, Sequence[int]],
    dtype: torch.dtype | None,
    values: Mapping[str, Tensor],
) -> None:
    """Let an adapter train the rows of these ids, by table, from ``values`` [ids, hidden] or the initial ones."""
    for path, ids in tokens.items():
        module = model.get_submodule(path)
        assert isinstance(module, Embedding | Linear)
        table: Tensor = module.weight.detach()
        order = torch.tensor(ids, dtype=torch.int64, device=table.device)
        value = values[path].to(table.device) if path in values else first_rows(model, path, ids)
        order, by = order.sort()
        rows = value[by].to(_trained_in(table, value, dtype), copy=True)
        if "token_adapter" not in module._modules:
            module.token_adapter = TokenRows()
        module.token_adapter.add(name, order, rows)
    if is_tied(model) and EMBEDDING in tokens and HEAD not in tokens:
        if "token_adapter" not in model.lm_head._modules:
            model.lm_head.token_adapter = TokenRows()
        order, parameter = model.model.embed_tokens.token_adapter.of(name)
        model.lm_head.token_adapter.add(name, order, parameter)  # the same rows


def add_table(model: Model, name: str, path: str, adapter: Adapter, a: Tensor, b: Tensor, tied: bool) -> None:
    """Put a low-rank update on a table: on the embedding with A [rank, vocab] and B [hidden, rank], which a tied head
    reads the other way round; on a head of its own with A [rank, hidden] and B [vocab, rank]."""
    head, embedding = model.lm_head, model.model.embed_tokens
    (head if path == HEAD else embedding).attach(name, adapter, a.to(model.device), b.to(model.device))
    if tied:
        if not head.adapters:
            head.lora_A, head.lora_B = nn.ModuleDict(), nn.ModuleDict()
        first, second = embedding.factors(name)
        head.adapters[name] = adapter
        head.lora_A[name], head.lora_B[name] = _Transposed(second), _Transposed(first)


def plan_beside(model: Model, lora: Any, modules_to_save: Sequence[str], tables: list[str], call: str) -> None:
    """Find what an adapter trains beside projections, and note it in ``lora`` (a :class:`lorarun.options.Lora`): copies
    of modules, low-rank updates of ``tables``, and rows of the tokens that were added to the model.

    Where a table is tied, so is what serves it.  Raises ValueError for what cannot be together.
    """
    lora.tied = is_tied(model)
    copies = set(find_copies(model, modules_to_save, call) if modules_to_save else ())
    lora.modules_to_save = list(modules_to_save)
    if tables and lora.layers is not None:
        raise ValueError(
            f"{call}: targets mean {' and '.join(tables)}, which are in no layer; leave out layers=, or name the "
            "layers in a pattern."
        )
    if lora.tied and copies.intersection(TABLES):
        copies.update(TABLES)
    lora.copies = [path for path, _ in weighted(model) if path in copies]
    lora.tables = [path for path in tables if path not in copies]
    if lora.tied and lora.tables:
        lora.tables = list(TABLES)
    if lora.tied and lora.tables and len({(lora.rank_of(path), lora.alpha_of(path)) for path in TABLES}) > 1:
        raise ValueError(
            f"{call}: the tables are tied, and patterns give them several ranks or alphas; name both alike."
        )
    fresh = sorted(model.added)
    places = [path for path in TABLES if path not in copies and not (lora.tied and path == HEAD)]
    lora.tokens = dict.fromkeys(places, fresh) if fresh else {}
    if both := [path for path in lora.tokens if path in lora.tables]:
        raise ValueError(
            f"{call}: {' and '.join(both)} would have a low-rank update and rows of {len(fresh)} added tokens; leave "
            "it out of targets, or train the whole table with modules_to_save."
        )


def add_beside(
    model: Model,
    name: str,
    lora: Any,
    dtype: torch.dtype | None = None,
    values: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Attach what :func:`plan_beside` found, with the values given (by name in the adapter's file, without PEFT's
    wrappers) or the initial ones."""
    given = values or {}
    add_copies(model, name, lora.copies, lora.tied, dtype, given)
    rows = {path: given[key] for path in lora.tokens if (key := f"{path}.{ROWS}") in given}
    add_rows(model, name, lora.tokens, dtype, rows)
    for path in lora.tables:
        if lora.tied and path == HEAD:
            continue  # the embedding's
        adapter = Adapter(lora.scale_of(path), lora.dropout, HEAD_STREAM, model.clock)
        r = lora.rank_of(path)
        first, second = (f"{path}.{key}" for key in LOW_RANK[path])
        vocab, hidden = model.model.embed_tokens.weight.shape
        if first in given:
            a, b = given[first], given[second]
        elif path == EMBEDDING:  # zero times normal, as in PEFT
            a, b = torch.zeros(r, vocab), torch.empty(hidden, r).normal_(generator=generator)
        else:
            bound = 1.0 / math.sqrt(hidden)
            a, b = torch.empty(r, hidden).uniform_(-bound, bound, generator=generator), torch.zeros(vocab, r)
        kind = torch.promote_types(a.dtype, torch.float32) if dtype is None else dtype
        add_table(model, name, path, adapter, a.to(kind, copy=True), b.to(kind, copy=True), lora.tied)


# --- switch --------------------------------------------------------------------------------------------------------


def switch(model: Model, name: str | None) -> None:
    """Let the copies, rows and table updates of one adapter run, or none; its parameters are trainable, all others of
    adapters not."""
    for _, module in weighted(model):
        held = module.copy_of(name) is not None or module.rows_of(name) is not None
        module.trained = name if held else None
        if isinstance(module, Embedding):
            module.active = name if name in module.adapters else None
    for path, parameter in model.named_parameters():
        if (belongs := owner(path)) is not None:
            parameter.requires_grad_(belongs == name)
    for parameter in _frozen(model, name):
        parameter.requires_grad_(False)


def beyond_projections(lora: Any) -> bool:
    """Whether an adapter (a :class:`lorarun.options.Lora`) has more than low-rank updates of projections."""
    return bool(lora.copies or lora.tables or lora.tokens)


def beyond(model: Model) -> str | None:
    """What is trained that a captured step does not know; None where it knows everything."""
    embedding, head = model.model.embed_tokens, model.lm_head
    if any(module.trained is not None and module.merged is None for module in (embedding, head)):
        return "a table, or rows of it, are trained"
    if embedding.active is not None or head.active is not None:
        return "a table has an adapter"
    return None


# --- merge ---------------------------------------------------------------------------------------------------------


def changes(module: nn.Module, name: str | None) -> bool:
    """Whether an adapter's copy, rows or update of the embedding decide what this module's weight is."""
    if not isinstance(module, Weighted) or name is None:
        return False
    return module.trained == name or (isinstance(module, Embedding) and module.active == name)


@torch.no_grad()
def with_adapter(weight: Tensor, module: Weighted, name: str) -> Tensor:
    """A module's weight with an adapter's copy, rows or embedding update in it: [out, in] in fp32 (fp64 for a weight
    of that), on the weight's device, and not rounded yet."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    if (copy := module.copy_of(name)) is not None:
        return copy.weight.detach().to(weight.device, wide)
    value = weight.to(wide)
    if (held := module.rows_of(name)) is not None:
        tokens, rows = held
        value = value.index_copy(0, tokens.to(value.device), rows.detach().to(value))
    if isinstance(module, Embedding) and name in module.adapters:
        a, b = (factor.detach().to(value) for factor in module.factors(name))
        value = value + module.adapters[name].scale * (b @ a).T
    return value


def bias_in(module: Weighted) -> Tensor:
    """A projection's bias, which is there."""
    assert isinstance(module, Linear) and module.bias is not None
    return module.bias


def untie(model: Model) -> None:
    """Give a tied head a table of its own, equal to the embedding's."""
    if is_tied(model):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
        model.untied = True


def touches_tables(model: Model, name: str | None) -> bool:
    """Whether an adapter changes the embedding or the head."""
    return any(changes(model.get_submodule(path), name) for path in TABLES) or model.lm_head.active == name


@torch.no_grad()
def merge_trained(model: Model, name: str) -> None:
    """Put an adapter's copies, rows and embedding update into the weights; those before are kept in host memory."""
    for _, module in weighted(model):
        if module.merged is None and changes(module, name):
            weight, copy = module.weight, module.copy_of(name)
            value = with_adapter(weight.detach(), module, name)
            module.merged = (name, weight.detach().to("cpu", copy=True))
            weight.copy_(value)
            if copy is not None and copy.bias is not None:
                module.bias_before = bias_in(module).to("cpu", copy=True)
                bias_in(module).copy_(copy.bias)
