"""Which weights a merged checkpoint has, and where each comes from.

Mostly they are the source's, in its order.  Two things change the list itself: tables that were enlarged for new
tokens, and a tied head of which the adapter made another table than the embedding, which is then written as its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lorarun.checkpoint import Checkpoint, open_checkpoint, read_config, stored_names
from lorarun.export_weights import Export
from lorarun.gguf_config import published_config
from lorarun.gguf_read import open_gguf
from lorarun.headers import Entry
from lorarun.linear import Linear
from lorarun.lora import find_targets, linears
from lorarun.nn import Model
from lorarun.packing import Form, form_of
from lorarun.quant.store import FP8Store, NF4Store, Store
from lorarun.trained import EMBEDDING, HEAD, TABLES, changes, is_tied, touches_tables, weighted
from lorarun.trained_files import longer
from lorarun.weighted import Weighted

FORMS = {4: Form(NF4Store, 64, True), 8: Form(FP8Store, None)}


def prepare(model: Model, base: str, dtype: torch.dtype | None, bits: int) -> Export:
    """Open the source again, compare it with the live model and decide what becomes of each weight.  Raises ValueError
    where it is another one than was loaded."""
    folder = model.source.folder
    if folder.is_file():
        source: Checkpoint = (file := open_gguf(folder))
        config = published_config(file)
    else:
        source, config = open_checkpoint(folder), read_config(folder)
    stored, problems = stored_names(source, model.nested)
    adapter, entries, origin = model.active, dict(source.entries), dict[str, str]()
    tied = is_tied(model) or model.untied
    apart = tied and adapter is not None and touches_tables(model, adapter) and not model.adapters[adapter].tied
    if apart:
        _add_other_table(stored, entries, origin)
    own = dict(weighted(model))
    live = {file: value for name, file in stored.items() if (value := _without_adapter(own, name)) is not None}
    if tied and not apart:  # one table, under either name
        own[HEAD] = own[EMBEDDING]
    modules = {stored[f"{path}.weight"]: module for path, module in own.items() if f"{path}.weight" in stored}
    there = set(map(id, modules.values()))
    lost = [
        module
        for module in own.values()
        if adapter and (module.active == adapter or changes(module, adapter)) and id(module) not in there
    ]
    shapes = {name: tuple(weight.shape) for name, weight in live.items()}
    shapes |= {name: tuple(module.weight.shape) for name, module in modules.items()}
    _enlarge(shapes, entries, source, {stored[n] for path in TABLES if (n := f"{path}.weight") in stored}, origin)
    known = {name: source.shape(name) if name in source.packed else entries[name].shape for name in shapes}
    if problems or lost or known != shapes:
        raise ValueError(f"save_merged: {folder} is no longer the checkpoint that this model was loaded from.")
    original = base == "original"
    held = {name: m.weight for name, m in modules.items() if isinstance(m.weight, Store)}
    if original:  # where the source's codes were taken as they are, they are the same
        held = {n: s for n, s in held.items() if n in source.packed and source.packed[n].store is type(s)}
    fields: dict[str, Any] = {"tie_word_embeddings": False} if apart else {}
    if any(entry.shape != source.entries[origin.get(name, name)].shape for name, entry in entries.items()):
        fields["vocab_size"] = model.config.vocab_size
    names = [name for name in source.in_file_order(source.entries) if name not in source.quantised.beside]
    for place, name in origin.items():
        names.insert(names.index(name) + 1, place)
    paths = {place: name.removesuffix(".weight") for name, place in stored.items()}
    export = Export(
        model, adapter, source, entries, origin, config, fields, original, dtype, names, live, modules,
        _biases(model, stored), paths, held, {},
    )  # fmt: skip
    if bits in FORMS:
        blocks = [stored[f"{path}.weight"] for path, _ in find_targets(model, "all-linear")]
        _choose(export, FORMS[bits], blocks)
    return export


def _enlarge(
    shapes: Mapping[str, tuple[int, ...]], entries: dict[str, Entry], source: Checkpoint, tables: set[str],
    origin: Mapping[str, str],
) -> None:  # fmt: skip
    """Give tables that were enlarged for new tokens the rows that they have now."""
    for name in tables & shapes.keys():
        rows, width = shapes[name]
        before = source.shape(origin.get(name, name))
        if before[0] < rows and before[1:] == (width,):
            entries[name] = entries[name]._replace(shape=shapes[name])


def _add_other_table(stored: dict[str, str], entries: dict[str, Entry], origin: dict[str, str]) -> None:
    """Give the one of two tied tables that the source does not have a place behind the other's."""
    names = [f"{path}.weight" for path in TABLES]
    there = next(name for name in names if name in stored)
    (other,) = (name for name in names if name != there)
    if other in stored:
        return
    file = stored[there]
    if file.startswith("language_model."):  # as older files have it
        place = f"language_model.{other}"
    else:
        place = longer(other) if any("language_model." in name for name in entries) else other
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


def _choose(export: Export, form: Form, blocks: list[str]) -> None:
    """Which of the blocks' projections are written in few bits, those that were, else all; and how."""
    stores = {n: w for n in blocks if isinstance(w := export.modules[n].weight, Store)}
    if form.store is FP8Store and len(found := {w.block for w in stores.values() if isinstance(w, FP8Store)}) == 1:
        form = form._replace(block=found.pop())
    for name in list(stores) or [n for n in blocks if n in export.source.packed] or blocks:
        held = export.held.get(name)
        keeps = isinstance(held, NF4Store) and form.store is NF4Store and not export.merges(name)
        export.forms[name] = form_of(held) if keeps and held is not None else form
