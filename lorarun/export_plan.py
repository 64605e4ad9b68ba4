"""What a merged checkpoint holds: for each tensor of the source, and for those that it does not have, what is written.

Mostly the source's own bytes.  A weight that the adapter changes is computed in fp32 from the source's or the live
model's and rounded once.  Two things change the list of tensors itself: tables that were enlarged for new tokens, and
a tied head of which the adapter made another table than the embedding, which is then written as its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lorarun.checkpoint import DENSE, Checkpoint, open_checkpoint, stored_names
from lorarun.headers import Entry
from lorarun.linear import Linear
from lorarun.lora import linears
from lorarun.merge import merged_bias, merged_weight
from lorarun.nn import Model
from lorarun.quant.store import Store, dequantize
from lorarun.trained import HEAD, TABLES, changes, is_tied, touches_tables, weighted, with_adapter
from lorarun.weighted import Weighted


@dataclass
class Export:
    """What is to be written, and what was noticed on the way.  Names are those of the source, and alike."""

    model: Model
    adapter: str | None  # None: the model's own weights were trained
    source: Checkpoint
    entries: dict[str, Entry]  # of what is written; offsets are the source's
    origin: dict[str, str]  # the source's tensor behind one that the source does not have
    original: bool  # whether W is the source's weight even where the live model rounded or quantised it
    dtype: torch.dtype | None
    live: dict[str, Tensor]  # the live model's dense weights, without adapter
    rewritten: dict[str, Weighted]  # the modules that have an adapter, or whose weight is another than the source's
    biases: dict[str, Linear]  # those whose bias the adapter changes, by the bias's name
    config: dict[str, Any]  # fields of config.json that change
    changed: list[str] = field(default_factory=list)  # live weights that are not the source's
    infinite: list[str] = field(default_factory=list)  # tensors that the chosen dtype cannot hold
    same: list[str] = field(default_factory=list)  # modules that the adapter does not change
    asked: float = 0.0  # |update|², and its product with what is left of it after rounding, over all weights
    kept: float = 0.0

    def dtype_of(self, entry: Entry) -> torch.dtype:
        return entry.dtype if self.dtype is None or not entry.dtype.is_floating_point else self.dtype

    def size_of(self, entry: Entry) -> int:
        """The bytes that a tensor takes as it is written."""
        return math.prod(entry.shape) * self.dtype_of(entry).itemsize

    def read(self, name: str) -> Tensor:
        """The source's tensor, with the rows that the live model has beyond it."""
        ((_, stored),) = self.source.read([self.origin.get(name, name)])
        missing = self.entries[name].shape[0] - stored.shape[0] if stored.dim() else 0
        if not missing:
            return stored
        wide = torch.promote_types(stored.dtype, self.live[name].dtype)
        return torch.cat((stored.to(wide), self.live[name][-missing:].to(stored.device, wide)))

    def base(self, name: str, stored: Tensor) -> Tensor:
        """The weight without adapter: as stored, or as the live model has it."""
        if self.original or name not in self.rewritten:
            return stored
        weight = self.rewritten[name].weight
        return dequantize(weight, torch.float32).cpu() if isinstance(weight, Store) else stored.to(weight.dtype)

    def exact(self, name: str, base: Tensor) -> Tensor:
        """The weight, or bias, with the adapter in it, not rounded yet."""
        if self.adapter is None:
            return self.live[name].cpu() if name in self.live else base
        if name in self.biases:
            linear = self.biases[name]
            if (copy := linear.copy_of(self.adapter)) is not None:
                assert copy.bias is not None
                return copy.bias.detach().cpu()
            bias = merged_bias(base.to(linear.weight.device), linear, self.adapter)
            assert bias is not None
            return bias.cpu()
        if not self.merges(name):
            return base
        module = self.rewritten[name]
        if changes(module, self.adapter):
            return with_adapter(base, module, self.adapter)
        assert isinstance(module, Linear)
        return merged_weight(base, module, self.adapter)

    def value(self, name: str, stored: Tensor) -> Tensor:
        """What is written for a stored tensor."""
        return self.exact(name, self.base(name, stored)).to(self.dtype_of(self.entries[name]))

    def merges(self, name: str) -> bool:
        """Whether the adapter, or training, changes the weight of this name."""
        if self.adapter is None:
            return name in self.live
        module = self.rewritten.get(name)
        if isinstance(module, Linear) and module.active == self.adapter and "a" in module.parts(self.adapter):
            return True
        return module is not None and changes(module, self.adapter)


def plan_export(model: Model, base: str, dtype: torch.dtype | None) -> Export:
    """Compare the source with the live model, and decide what becomes of each tensor.  Raises ValueError where the
    source is no longer what the model was loaded from."""
    source = open_checkpoint(model.source.folder)
    stored, problems = stored_names(source, model.nested)
    adapter = model.active
    tied = is_tied(model) or model.untied
    apart = tied and adapter is not None and touches_tables(model, adapter) and not model.adapters[adapter].tied
    entries, origin = dict(source.entries), dict[str, str]()
    if apart:
        _add_other_table(stored, entries, origin)
    modules = dict(weighted(model))
    live = {file: value for name, file in stored.items() if (value := _without_adapter(modules, name)) is not None}
    rewritten = {
        f"{path}.weight": module
        for path, module in modules.items()
        if model.whole
        or changes(module, adapter)
        or (isinstance(module, Linear) and adapter is not None and module.active == adapter)
        or (base == "dequantized" and isinstance(module.weight, Store))
    }
    if tied and not apart:  # one table, under either name
        names = [f"{path}.weight" for path in TABLES]
        one = rewritten.pop(names[0], None)
        rewritten.pop(names[1], None)
        rewritten |= {name: one for name in names if one is not None and name in stored}
    anew = {stored[name]: module for name, module in rewritten.items() if name in stored}
    shapes = {name: tuple(weight.shape) for name, weight in live.items()}
    shapes |= {name: tuple(module.weight.shape) for name, module in anew.items()}
    there = {name: source.shape(origin.get(name, name)) for name in shapes}
    tables = {stored[name] for path in TABLES if (name := f"{path}.weight") in stored}
    for name in tables & shapes.keys():
        rows, width = shapes[name]
        if there[name][0] < rows and there[name][1:] == (width,):  # enlarged for new tokens
            there[name] = shapes[name]
            entries[name] = entries[name]._replace(shape=shapes[name])
    if problems or len(anew) < len(rewritten) or there != shapes:
        raise ValueError(f"save_merged: {source.folder} is no longer the checkpoint that this model was loaded from.")
    if any(entries[name].dtype not in DENSE for name in shapes):
        raise ValueError(f"save_merged: {source.folder} is quantised itself, which is not supported.")
    config: dict[str, Any] = {"tie_word_embeddings": False} if apart else {}
    if any(entry.shape != source.entries[origin.get(name, name)].shape for name, entry in entries.items()):
        config["vocab_size"] = model.config.vocab_size
    return Export(
        model, adapter, source, entries, origin, base == "original", dtype, live, anew, _biases(model, stored), config
    )


def _add_other_table(stored: dict[str, str], entries: dict[str, Entry], origin: dict[str, str]) -> None:
    """Give the one of two tied tables that the source does not have a place behind the other's."""
    names = [f"{path}.weight" for path in TABLES]
    there = next(name for name in names if name in stored)
    (other,) = (name for name in names if name != there)
    if other in stored:
        return
    file = stored[there]
    if other.startswith(HEAD):
        place = f"language_model.{other}" if file.startswith("language_model.") else other
    else:
        older, nested = file.startswith("language_model."), any("language_model." in name for name in entries)
        place = (
            f"language_model.{other}"
            if older
            else other.replace("model.", "model.language_model.", 1)
            if nested
            else other
        )
    stored[other], origin[place] = place, file
    entries[place] = entries[file]


def _without_adapter(modules: Mapping[str, Weighted], name: str) -> Tensor | None:
    """A dense weight or bias of the live model as it is without the adapter that may be merged into it."""
    path, _, leaf = name.rpartition(".")
    module = modules.get(path)
    if module is None or leaf not in ("weight", "bias") or isinstance(module.weight, Store) and leaf == "weight":
        return None
    before = module.bias_before if leaf == "bias" else None if module.merged is None else module.merged[1]
    value: Tensor | None = getattr(module, leaf) if before is None else before
    return None if value is None else value.detach()


def _biases(model: Model, stored: dict[str, str]) -> dict[str, Linear]:
    """The projections whose bias the adapter changes, by the bias's stored name."""
    found = {
        stored[f"{path}.bias"]: linear
        for path, linear in linears(model)
        if linear.bias is not None and linear.active and {"bias", "b_bias"} & linear.parts(linear.active).keys()
    }
    for path, module in weighted(model):
        if isinstance(module, Linear) and module.bias is not None and module.copy_of(model.active) is not None:
            found[stored[f"{path}.bias"]] = module
    return found
