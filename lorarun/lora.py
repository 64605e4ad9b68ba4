"""Adapters: attach, choose, switch off, list.

Small functions over a plain model.  ``add_lora`` puts two small matrices beside each projection it is asked for and
freezes everything else; the others say which adapter runs.  The arithmetic is in :class:`lorarun.nn.Linear`; folding an
adapter into the weights is the business of :mod:`lorarun.merge`, files that of :mod:`lorarun.adapter`.

Compared with the usual wrappers there is no wrapped model: names, checkpoints and hooks stay what they were.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lorarun.linear import Adapter
from lorarun.nn import Linear, Model
from lorarun.quant.store import Store
from lorarun.trained import TABLES, add_beside, inside_adapter, owner, parameters_of, plan_beside, switch, weighted

# The projections of a block, by the input they read.  Those that share an input share its dropout mask.
INPUTS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}


@dataclass
class Lora:
    """What an adapter of a model is; fields as in PEFT's ``adapter_config.json`` where it has them."""

    r: int
    alpha: float
    targets: str | list[str]
    dropout: float
    rslora: bool
    layers: list[int] | None
    modules: list[str]  # full names of the projections that carry it
    seed: int | None = None
    tables: list[str] = field(default_factory=list)  # the embedding and the head, where they have a low-rank update
    modules_to_save: list[str] = field(default_factory=list)  # as asked
    copies: list[str] = field(default_factory=list)  # full names of the modules of which it holds copies
    tokens: dict[str, list[int]] = field(default_factory=dict)  # ids whose rows it trains, by table
    tied: bool = False  # whether what it has for the embedding serves a tied head too, and the other way round

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / √r with ``rslora`` (Kalajdzievski 2023, arXiv:2312.03732, section 3)."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


def add_lora(
    model: Model,
    r: int = 16,
    alpha: float = 16,
    targets: str | Sequence[str] = "all-linear",
    dropout: float = 0.0,
    bias: bool = False,
    rslora: bool = False,
    dora: bool = False,
    init: str = "default",
    layers: int | Sequence[int] | None = None,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
    modules_to_save: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    name: str = "default",
    seed: int | None = None,
) -> Model:
    """Attach a low-rank adapter, make it the active one, freeze all else and switch the model to training mode.

    y = W·x + scale · B·A·drop(x), with A [r, in] uniform in ±1/√in, B [out, r] zero (so the model starts unchanged),
    and scale = alpha / r, or alpha / √r with ``rslora``.

    targets: "all-linear" (the seven projections of every block, never the head); another string is a regular
        expression that must match a module's whole name; a list has names that a module's name equals or ends in
        ("q_proj", "mlp.up_proj", "embed_tokens", "lm_head").
    layers: only these blocks, numbered from 0.
    dropout: probability for elements of the input; one mask serves all projections of one input (PEFT draws one for
        each).
    modules_to_save: modules that are trained whole, as copies, by what their names end in ("lm_head", "norm": all of
        them).  They get no low-rank update.  Tied tables stay tied: what is asked for one is had by both.
    dtype: of A and B, and of copies where it is wider than the weight.
    seed: for A's values and the dropout masks; without one, A comes from torch's global generator.

    Returns the model.  Raises ValueError for a target that matches nothing it could attach to, a name that is taken,
    and for what is not supported: bias, dora, other initialisations, patterns.
    """
    _refuse(bias=bias, dora=dora, rank_pattern=rank_pattern, alpha_pattern=alpha_pattern)
    if init != "default":
        raise ValueError(f"add_lora: init={init!r} is not supported; 'default' is.")
    if isinstance(r, bool) or not isinstance(r, int) or r < 1:
        raise ValueError(f"add_lora: r is {r!r}; expected a whole number from 1 up.")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"add_lora: dropout is {dropout}; expected a probability from 0 up to, not including, 1.")
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2):
        raise ValueError(f"add_lora: dtype is {dtype!r}; expected a floating-point torch.dtype.")
    if not (isinstance(alpha, int | float) and 0.0 < alpha < math.inf):
        raise ValueError(f"add_lora: alpha is {alpha!r}; expected a number above 0.")
    check_new(model, name, "add_lora")
    wanted = targets if isinstance(targets, str) else list(targets)
    blocks = [layers] if isinstance(layers, int) else None if layers is None else sorted(set(layers))
    found = find_targets(model, wanted, blocks)
    lora = Lora(r, alpha, wanted, dropout, rslora, blocks, [], seed)
    plan_beside(model, lora, modules_to_save, chosen_tables(wanted), "add_lora")
    found = [(path, linear) for path, linear in found if path not in lora.copies]
    lora.modules = [path for path, _ in found]
    generator = None if seed is None else torch.Generator().manual_seed(seed)

    def factors(linear: Linear) -> tuple[Tensor, Tensor]:
        bound = 1.0 / math.sqrt(linear.in_features)
        a = torch.empty(r, linear.in_features, dtype=torch.float32, device="cpu")
        b = torch.zeros(linear.out_features, r, dtype=dtype, device="cpu")
        return a.uniform_(-bound, bound, generator=generator).to(dtype), b

    attach(model, name, lora, ((path, linear, *factors(linear)) for path, linear in found), dtype, generator=generator)
    return model.train()


def attach(
    model: Model,
    name: str,
    lora: Lora,
    parts: Iterable[tuple[str, Linear, Tensor, Tensor]],
    dtype: torch.dtype | None = None,
    values: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Put an adapter's matrices in place, (module name, module, A, B) for each projection, and make it the active one.

    What ``add_lora`` and ``load_adapter`` share.  dtype, values, generator: of what it trains beside projections, see
    :func:`lorarun.trained.add_beside`.
    """
    model.requires_grad_(False)
    if lora.seed is not None:
        model.clock.seed = lora.seed
    for path, linear, a, b in parts:
        adapter = Adapter(lora.scale, lora.dropout, _stream(path), model.clock)
        linear.attach(name, adapter, a.to(linear.weight.device), b.to(linear.weight.device))
    add_beside(model, name, lora, dtype, values, generator)
    model.adapters[name] = lora
    use_adapter(model, name)


def check_new(model: Model, name: str, call: str) -> None:
    """Raise ValueError unless an adapter of this name can be attached now; ``call`` is who asks."""
    if not name or "." in name or hasattr(nn.ModuleDict(), name):  # the last: a module's own attribute, as "train"
        raise ValueError(f"{call}: name is {name!r}; expected a name without dots that no torch module has itself.")
    if name in model.adapters:
        raise ValueError(f"{call}: there is an adapter named {name!r} already; choose another name=.")
    check_not_merged(model, call)


def _stream(path: str) -> int:
    """A number for the input that a projection reads: block × 4 + which of the block's four inputs."""
    return (block_of(path) or 0) * 4 + INPUTS[path.rpartition(".")[2]]


def _refuse(**unsupported: Any) -> None:
    active = [key for key, value in unsupported.items() if value]
    if active:
        raise ValueError(f"add_lora: {', '.join(active)} {'is' if len(active) == 1 else 'are'} not supported.")


def find_targets(model: Model, targets: str | list[str], layers: list[int] | None = None) -> list[tuple[str, Linear]]:
    """The projections that ``targets`` means, with their names, in the model's order; see :func:`add_lora` for the
    rules.  The tables, which it may mean too, are :func:`chosen_tables`'s."""
    blocks = len(model.model.layers)
    if layers is not None and (not layers or not all(isinstance(i, int) and 0 <= i < blocks for i in layers)):
        raise ValueError(f"layers={layers}: expected numbers of blocks from 0 to {blocks - 1}.")
    modules = {
        path: module
        for path, module in model.named_modules()
        if path and not inside_adapter(path) and not isinstance(module, Store)
    }
    matched = [path for path in modules if selects(targets, path)]
    if not matched:
        hint = (
            f" A string is a regular expression for the whole name; write [{targets!r}]."
            if isinstance(targets, str) and targets in INPUTS
            else ""
        )
        raise ValueError(
            f"targets={targets!r} match no module; projections are named {', '.join(sorted(INPUTS))}.{hint}"
        )
    below = [path for path in matched if path not in TABLES]
    wrong = [path for path in below if not isinstance(modules[path], Linear)]
    if wrong:
        shown = ", ".join(f"{path} ({type(modules[path]).__name__})" for path in wrong[:3])
        raise ValueError(f"targets={targets!r} match {len(wrong)} modules that are no projections, such as {shown}.")
    if not isinstance(targets, str):
        if unmatched := [target for target in targets if not any(selects([target], path) for path in matched)]:
            warnings.warn(f"targets {', '.join(unmatched)} match no module of this model.", stacklevel=3)
    chosen = [path for path in below if layers is None or block_of(path) in layers]
    if not chosen and layers is not None:
        raise ValueError(f"targets={targets!r} match no module of layers {layers}.")
    return [(path, module) for path in chosen if isinstance(module := modules[path], Linear)]


def chosen_tables(targets: str | list[str]) -> list[str]:
    """The embedding and the head, where ``targets`` means them."""
    return [path for path in TABLES if selects(targets, path)]


def selects(targets: str | list[str], path: str) -> bool:
    """Whether ``targets`` means the module of this name; the rules are PEFT's, see :func:`add_lora`."""
    if targets == "all-linear":
        return path.rpartition(".")[2] in INPUTS
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, path) is not None
        except re.error as error:
            raise ValueError(f"targets={targets!r} is not a regular expression: {error}.") from None
    return any(path == target or path.endswith(f".{target}") for target in targets)


def block_of(path: str) -> int | None:
    """The number of the block that a module belongs to, None outside the blocks."""
    found = re.search(r"\.layers\.(\d+)\.", f".{path}")
    return int(found[1]) if found else None


def linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Every projection that carries adapters, with its name."""
    return ((path, m) for path, m in model.named_modules() if isinstance(m, Linear) and m.adapters)


def use_adapter(model: Model, name: str | None) -> None:
    """Make one adapter the active one (it runs, and its parameters are trainable), or none with None."""
    if name is not None and name not in model.adapters:
        raise ValueError(f"There is no adapter {name!r}; the model has {', '.join(model.adapters) or 'none'}.")
    check_not_merged(model, "use_adapter")
    model.active = name
    for _, linear in linears(model):
        linear.active = name if name in linear.adapters else None
    switch(model, name)


@contextmanager
def adapters_disabled(model: Model) -> Iterator[None]:
    """Run the base model alone inside a ``with`` block; afterwards all is as before, whatever happened in it."""
    check_not_merged(model, "adapters_disabled")
    active, carriers = model.active, [module for _, module in weighted(model)]
    running = [(module.active, module.trained) for module in carriers]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.active = None
        for module in carriers:
            module.active = module.trained = None
        yield
    finally:
        model.active = active
        for module, (adapter, trained) in zip(carriers, running, strict=True):
            module.active, module.trained = adapter, trained  # also where something was attached inside
        for name, parameter in model.named_parameters():
            if owner(name) is not None:
                parameter.requires_grad_(False)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def lora_parameters(model: Model, name: str | None = None) -> list[nn.Parameter]:
    """Everything that an adapter trains (the active one by default), in the model's order: what an optimizer is given.

    Its matrices, and where it has them its copies of modules and its rows of tokens.
    """
    name = model.active if name is None else name
    if name not in model.adapters:
        raise ValueError(
            f"There is no adapter {name!r}; the model has {', '.join(model.adapters) or 'none: call add_lora'}."
        )
    return parameters_of(model, name)


def check_not_merged(model: Model, call: str) -> None:
    if any(module.merged is not None for _, module in weighted(model)):
        raise ValueError(f"{call}: the adapter {model.active!r} is merged into the weights; call unmerge(model) first.")
