"""Adapters: attach, choose, switch off, list.

Small functions over a plain model.  ``add_lora`` puts two small matrices beside each projection it is asked for and
freezes everything else; the others say which adapter runs.  The arithmetic is in :mod:`lorarun.linear`; folding an
adapter into the weights is the business of :mod:`lorarun.merge`, files that of :mod:`lorarun.adapter`.

Compared with the usual wrappers there is no wrapped model: names, checkpoints and hooks stay what they were.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lorarun.initial import first_values
from lorarun.kernels.row_norms import row_norms
from lorarun.linear import INPUTS, Adapter
from lorarun.nn import Linear, Model
from lorarun.options import Lora, faults, of_pattern
from lorarun.quant.store import NF4Store, Store, dequantize
from lorarun.trained import TABLES, add_beside, inside_adapter, owner, parameters_of, plan_beside, switch, weighted

# The projections of a block, by the number of the input they read.  Those that share an input share its dropout mask.
INPUT_OF = {name: i for i, (_, *names) in enumerate(INPUTS) for name in names}


def add_lora(
    model: Model,
    r: int = 16,
    alpha: float = 16,
    targets: str | Sequence[str] = "all-linear",
    dropout: float = 0.0,
    bias: bool | str = False,
    rslora: bool = False,
    dora: bool = False,
    init: str = "default",
    freeze_a: bool = False,
    layers: int | Sequence[int] | None = None,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
    modules_to_save: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    name: str = "default",
    seed: int | None = None,
) -> Model:
    """Attach a low-rank adapter, make it the active one, freeze all else and switch the model to training mode.

    y = W·x + scale · B·A·drop(x), with A [r, in], B [out, r], and scale = alpha / r, or alpha / √r with ``rslora``.
    The model starts unchanged (but see ``init``).

    targets: "all-linear" (the seven projections of every block, never the head); another string is a regular
        expression that must match a module's whole name; a list has names that a module's name equals or ends in
        ("q_proj", "mlp.up_proj", "embed_tokens", "lm_head").
    layers: only these blocks, numbered from 0.
    rank_pattern, alpha_pattern: another r or alpha for some projections, by regular expressions for what their names
        end in, behind a dot: {"o_proj": 4, "layers.[01].mlp.up_proj": 32}.  The first that matches counts.
    dropout: probability for elements of the input; one mask serves all projections of one input (PEFT draws one for
        each).  With DoRA what is scaled sees the dropped input too, as in PEFT, which takes a second product.
    bias: True gives B a bias; "lora_only" trains the biases of the projections that have an adapter, "all" those of
        every projection.  They belong to the adapter: the base keeps its own, and has it back when the adapter is off.
    dora: learn the length of each row of the weight apart from its direction (Liu et al. 2024, arXiv:2402.09353):
        y = m · (W + scale · B·A)·x / ‖W + scale · B·A‖, row by row, m [out] starting as ‖W‖.
    init: of A and B: "default" (A uniform in ±1/√in, B zero), "gaussian", "pissa", "pissa_niter_N", "olora", or
        "loftq", with which NF4 weights start closer to what they were made from; see :mod:`lorarun.initial`.
    freeze_a: train B alone (LoRA-FA, Zhang et al. 2023, arXiv:2308.03303): projections then keep no input for backward.
    modules_to_save: modules that are trained whole, as copies, by what their names end in ("lm_head", "norm": all of
        them).  They get no low-rank update.  Tied tables stay tied: what is asked for one is had by both.
    dtype: of A and B and all else that is learned; of copies where it is wider than the weight.
    seed: for A's values and the dropout masks; without one, A comes from torch's global generator.

    Returns the model.  Raises ValueError for a target that matches nothing it could attach to, a name that is taken,
    and for what is not supported, alone or together.
    """
    wanted = targets if isinstance(targets, str) else list(targets)
    blocks = [layers] if isinstance(layers, int) else None if layers is None else sorted(set(layers))
    own = bias if isinstance(bias, str) else "none"
    lora = Lora(
        r, alpha, wanted, dropout, rslora, blocks, [], seed, dict(rank_pattern or {}), dict(alpha_pattern or {}),
        own, bias is True, dora, init, freeze_a,
    )  # fmt: skip
    if wrong := faults(lora, dtype):
        raise ValueError(f"add_lora: {'; '.join(wrong)}.")
    check_new(model, name, "add_lora")
    found = find_targets(model, wanted, blocks)
    plan_beside(model, lora, modules_to_save, chosen_tables(wanted), "add_lora")
    found = [(path, linear) for path, linear in found if path not in lora.copies]
    lora.modules = [path for path, _ in found]
    _check_fits(model, lora, found)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    parts = _first_parts(model, lora, found, dtype, generator)
    attach(model, name, lora, parts, dtype, generator=generator)
    return model.train()


def _check_fits(model: Model, lora: Lora, found: list[tuple[str, Linear]]) -> None:
    """Raise ValueError for arguments that this model cannot honour."""
    wrong = []
    for kind, pattern in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for key in pattern:
            if not any(of_pattern({key: 1}, path, 0) for path in (*lora.modules, *lora.tables)):
                wrong.append(f"{kind}: {key!r} matches none of the projections that get an adapter")
    plain = {"dora": lora.dora, "bias=True": lora.lora_bias, "freeze_a": lora.freeze_a}
    plain[f"init={lora.init!r}"] = lora.init != "default"
    if lora.tables and (asked := [option for option, there in plain.items() if there]):
        wrong.append(f"{', '.join(asked)} on {' and '.join(lora.tables)} is not supported; leave these out of targets")
    if lora.bias != "none" and not biased(model, lora):
        wrong.append(f"bias={lora.bias!r}: these projections have no bias to train; bias=True gives B one")
    if lora.init not in ("default", "gaussian"):
        large = [path for path, linear in found if lora.rank_of(path) > min(linear.weight.shape)]
        if large:
            wrong.append(f"init={lora.init!r} takes r from the weight's own, and {large[0]} has fewer")
    if lora.init == "loftq":
        other = [path for path, linear in found if not isinstance(linear.weight, NF4Store)]
        packed = [path for path, _ in found if not model.stored.get(f"{path}.weight", "dense").startswith("dense ")]
        if other or model.original is None:
            wrong.append("init='loftq' starts from what NF4 took from the weights; load the model with bits=4")
        elif packed:
            wrong.append(f"init='loftq' needs the weights before they were quantised, and {packed[0]} is stored so")
    if wrong:
        raise ValueError(f"add_lora: {'; '.join(wrong)}.")


def biased(model: Model, lora: Lora) -> dict[str, Linear]:
    """The projections whose own bias an adapter trains."""
    if lora.bias == "none":
        return {}
    every = {path: m for path, m in model.named_modules() if isinstance(m, Linear) and block_of(path) is not None}
    every = {path: m for path, m in every.items() if m.bias is not None and path not in lora.copies}
    return {path: m for path, m in every.items() if lora.bias == "all" or path in lora.modules}


def _first_parts(
    model: Model, lora: Lora, found: list[tuple[str, Linear]], dtype: torch.dtype, generator: torch.Generator | None
) -> Iterator[tuple[str, Linear, dict[str, Any]]]:
    """What :func:`attach` takes, as training begins."""
    own = biased(model, lora)
    for path, linear in found:
        scale, original = lora.scale_of(path), None
        if lora.init == "loftq":
            original = model.original(f"{path}.weight")
        a, b, start = first_values(lora.init, linear.weight, lora.rank_of(path), scale, dtype, generator, original)
        part: dict[str, Any] = {"a": a, "b": b, "start": start}
        if lora.lora_bias:
            part["b_bias"] = b.new_zeros(len(b))
        if lora.dora:
            w = dequantize(linear.weight, model.dtype) if isinstance(linear.weight, Store) else linear.weight
            whole = (a, b) if start is None else (torch.cat((a, start[0])), torch.cat((b, start[1]), 1))
            part["magnitude"] = row_norms(w, whole[0].to(w.device), whole[1].to(w.device), scale).to(dtype)
        if path in own:
            part["bias"] = _copied(linear.bias, dtype)
        yield path, linear, part
    for path, linear in own.items():
        if path not in lora.modules:
            yield path, linear, {"bias": _copied(linear.bias, dtype)}


def _copied(bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert bias is not None
    return bias.detach().to(dtype, copy=True)


def attach(
    model: Model,
    name: str,
    lora: Lora,
    parts: Iterable[tuple[str, Linear, dict[str, Any]]],
    dtype: torch.dtype | None = None,
    values: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Put an adapter in place, (module name, module, arguments of ``Linear.attach``) for each projection, and make it
    the active one.

    What ``add_lora``, ``load_adapter`` and ``combine_adapters`` share.  dtype, values, generator: of what it trains
    beside projections, see :func:`lorarun.trained.add_beside`.
    """
    model.requires_grad_(False)
    if lora.seed is not None:
        model.clock.seed = lora.seed
    for path, linear, part in parts:
        adapter = Adapter(lora.scale_of(path), lora.dropout, _stream(path), model.clock, lora.freeze_a)
        linear.attach(name, adapter, **{key: _to(value, linear.weight.device) for key, value in part.items()})
    add_beside(model, name, lora, dtype, values, generator)
    model.adapters[name] = lora
    use_adapter(model, name)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(each.to(device) for each in value)
    return None if value is None else value.to(device)


def check_new(model: Model, name: str, call: str) -> None:
    """Raise ValueError unless an adapter of this name can be attached now; ``call`` is who asks."""
    if not name or "." in name or hasattr(nn.ModuleDict(), name):  # the last: a module's own attribute, as "train"
        raise ValueError(f"{call}: name is {name!r}; expected a name without dots that no torch module has itself.")
    if name in model.adapters:
        raise ValueError(f"{call}: there is an adapter named {name!r} already; choose another name=.")
    if model.whole:
        raise ValueError(
            f"{call}: train_all trains the model's own weights, and an adapter would be of weights that no checkpoint "
            "has; write them with save_merged and load that, or load the model afresh."
        )
    check_not_merged(model, call)


def _stream(path: str) -> int:
    """A number for the input that a projection reads: block × 4 + which of the block's four inputs."""
    return (block_of(path) or 0) * 4 + INPUT_OF[path.rpartition(".")[2]]


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
            if isinstance(targets, str) and targets in INPUT_OF
            else ""
        )
        raise ValueError(
            f"targets={targets!r} match no module; projections are named {', '.join(sorted(INPUT_OF))}.{hint}"
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
        return path.rpartition(".")[2] in INPUT_OF
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
        what = "No adapter is active" if name is None else f"There is no adapter {name!r}"
        raise ValueError(f"{what}; the model has {', '.join(model.adapters) or 'none: call add_lora'}.")
    return parameters_of(model, name)


def check_not_merged(model: Model, call: str) -> None:
    if any(module.merged is not None for _, module in weighted(model)):
        raise ValueError(f"{call}: the adapter {model.active!r} is merged into the weights; call unmerge(model) first.")
