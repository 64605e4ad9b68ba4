"""What adapters train beside low-rank updates of projections, in PEFT's files: copies of modules, updates and rows of
the tables.

    modules_to_save          …embed_tokens.weight, …input_layernorm.weight
    target_modules           …embed_tokens.lora_embedding_A and _B, lm_head.lora_A.weight and lora_B.weight
    trainable_token_indices  …embed_tokens.token_adapter.trainable_tokens_delta

PEFT also writes frozen tables into an adapter: whenever their low-rank update is trained, and when the vocabulary was
enlarged.  Those are compared with the model's, since an adapter that ran on other tables is another adapter; the rows
that they have beyond the model's are taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.headers import Entry, abbreviate
from lorarun.lora import selects
from lorarun.nn import Model
from lorarun.options import of_pattern
from lorarun.trained import EMBEDDING, HEAD, LOW_RANK, ROWS, TABLES, find_copies, is_tied

WRAPPED = re.compile(
    r"(?:(?:base_model|model|language_model|module|_orig_mod)\.)*(?P<own>(?:layers|embed_tokens|norm|lm_head)\..+)"
)
FROZEN = ("base_layer.weight", f"{ROWS.partition('.')[0]}.base_layer.weight", "original_module.weight", "weight")


def own_name(key: str) -> str:
    """A key of a file as the model here calls it, whatever stood around it there; the key itself for other modules."""
    found = WRAPPED.fullmatch(key)
    if found is None:
        return key
    return found["own"] if found["own"].startswith("lm_head.") else f"model.{found['own']}"


# --- writing -------------------------------------------------------------------------------------------------------


def beside_fields(lora: Any, nested: bool) -> dict[str, Any]:
    """The fields of adapter_config.json that are about what is trained beside projections."""
    fields: dict[str, Any] = {"modules_to_save": None}
    if lora.copies:
        names = [longer(path) for path in lora.copies] if nested else list(lora.modules_to_save)
        names += [path.rpartition(".")[2] for path in lora.copies if not nested and not path.endswith(tuple(names))]
        fields["modules_to_save"] = names
    if lora.tokens:
        only = list(lora.tokens) == [EMBEDDING]
        fields["trainable_token_indices"] = (
            lora.tokens[EMBEDDING] if only else {path.rpartition(".")[2]: ids for path, ids in lora.tokens.items()}
        )
    if lora.tied and (lora.tables or set(lora.copies).intersection(TABLES)):
        fields["ensure_weight_tying"] = True
    return fields


def longer(path: str) -> str:
    """A module's name in a multimodal model."""
    return path.replace("model.", "model.language_model.", 1)


def _shorter(name: str) -> str:
    """The name, or the end of one, of a module of a multimodal model as the text model has it."""
    return re.sub(r".*\blanguage_model\.(?:model\.)?", "model.", name).replace("model.lm_head", "lm_head")


def _table(name: str) -> str | None:
    """The table that is meant by a name, or the end of one."""
    return next((path for path in TABLES if path == _shorter(name) or path.endswith(f".{name}")), None)


def targets_with_tables(lora: Any, targets: str | list[str], nested: bool) -> str | list[str]:
    """``target_modules`` that also mean the tables that have a low-rank update."""
    lacking = [path for path in lora.tables if not selects(targets, path)]
    if not lacking and not nested:
        return targets
    modules = lora.modules if isinstance(targets, str) else targets
    return sorted({*(longer(path) if nested else path for path in lora.tables), *modules})


def beside_tensors(model: Model, name: str, lora: Any) -> Iterator[tuple[str, Tensor]]:
    """What the file holds, by the model's own names."""
    for path in lora.copies:
        copy = model.get_submodule(path).copy_of(name)  # type: ignore[operator]
        yield f"{path}.weight", copy.weight
        if copy.bias is not None:
            yield f"{path}.bias", copy.bias
    for path in lora.tables:
        factors = model.get_submodule(path).factors(name)  # type: ignore[operator]
        yield from zip((f"{path}.{key}" for key in LOW_RANK[path]), factors, strict=True)
    for path in lora.tokens:
        yield f"{path}.{ROWS}", model.get_submodule(path).rows_of(name)[1]  # type: ignore[operator]


# --- reading -------------------------------------------------------------------------------------------------------


def wrong_fields(raw: Mapping[str, Any]) -> list[str]:
    """Fields that are not what PEFT writes there."""

    def ids(value: Any) -> bool:
        whole = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        return whole and len(set(value)) == len(value) and all(i >= 0 for i in value)

    saved, rows, tied = (raw.get(k) for k in ("modules_to_save", "trainable_token_indices", "ensure_weight_tying"))
    wrong = []
    if saved is not None and not (isinstance(saved, list) and all(isinstance(name, str) and name for name in saved)):
        wrong.append(f"modules_to_save is {saved!r}")
    tables = isinstance(rows, dict) and all(_table(name) is not None and ids(each) for name, each in rows.items())
    if rows is not None and not (ids(rows) or tables):
        wrong.append(f"trainable_token_indices is {rows!r}")
    if tied not in (None, False, True):
        wrong.append(f"ensure_weight_tying is {tied!r}")
    return wrong


def understand_beside(model: Model, lora: Any, raw: Mapping[str, Any], problems: list[str]) -> None:
    """Fill in what an adapter's configuration trains beside projections."""
    saved = raw.get("modules_to_save") or []
    lora.modules_to_save = list(saved)
    if saved:
        try:
            lora.copies = find_copies(model, [_shorter(name) for name in saved], "load_adapter")
        except ValueError as error:
            problems.append(str(error))
    targets = lora.targets
    chosen = [path for path in TABLES if selects(targets, path) or selects(targets, longer(path))]
    lora.tables = [path for path in chosen if path not in lora.copies and lora.layers is None]
    for pattern in (lora.rank_pattern, lora.alpha_pattern) if model.nested else ():
        for path in lora.tables:
            if value := of_pattern(pattern, longer(path), 0):
                pattern.setdefault(path, value)
    rows = raw.get("trainable_token_indices") or {}
    rows = {EMBEDDING: rows} if isinstance(rows, list) else rows
    lora.tokens = {path: ids for name, ids in rows.items() if ids and (path := _table(name)) is not None}
    tied = is_tied(model)
    if tied and lora.tokens.get(HEAD) == lora.tokens.get(EMBEDDING):
        lora.tokens.pop(HEAD, None)
    whole = set(lora.copies).intersection(TABLES) | set(lora.tables)
    lora.tied = tied and (raw.get("ensure_weight_tying") is True or not (whole or HEAD in lora.tokens))
    if lora.tied and whole:
        for kind in (lora.copies, lora.tables):
            if set(kind).intersection(TABLES):
                kind[:] = [*(path for path in kind if path not in TABLES), *TABLES]
    if both := [path for path in lora.tokens if path in whole or (tied and whole)]:
        problems.append(f"rows of tokens together with a copy or an update of the table are not supported: {both[0]}")


class Beside(NamedTuple):
    """What a file holds beside projections: keys by the model's own names, of what is trained and of frozen tables;
    and how many rows the tables have there."""

    keys: dict[str, str]
    frozen: dict[str, str]
    size: int


def take(
    model: Model, lora: Any, entries: dict[str, Entry], prefix: str, extended: bool, problems: list[str]
) -> Beside:
    """Take out of ``entries`` the tensors that are trained beside projections, and frozen tables.

    extended: whether tokens were added to the base's, so that tables of other sizes are no mistake.  Notes what is
    missing or has a wrong shape.
    """
    by_name: dict[str, str] = {}
    for key in entries:
        by_name.setdefault(own_name(key.removeprefix(prefix)), key)
    size = _size(model, lora, {name: entries[key].shape for name, key in by_name.items()}, extended)
    shapes = dict(_shapes(model, lora, size))
    tied = {f"{HEAD}.{rest}" for rest in ("weight", ROWS)} if lora.tied else set()  # may be left out, or there twice
    found = {name: by_name[name] for name in shapes if name in by_name}
    if missing := [name for name in shapes if name not in found and name not in tied]:
        problems.append(f"{len(missing)} tensors are missing: {abbreviate(missing)}")
    problems += mismatches({key: (entries[key], shapes[name]) for name, key in found.items()})
    frozen = {
        path: by_name[name]
        for path in TABLES
        for kind in FROZEN
        if (name := f"{path}.{kind}") in by_name
        and name not in shapes
        and entries[by_name[name]].shape[1:] == (model.config.hidden_size,)
    }
    again = [name for path in lora.copies for name in (f"{path}.modules_to_save.weight",) if name in by_name]
    again += [name for name in tied if name in by_name and name not in found]
    if lora.copies and model.nested:  # a vision tower has norms too
        again += [name for name in by_name if re.search(r"(^|\.)vision", name) and "lora_" not in name]
    for key in {*found.values(), *frozen.values(), *(by_name[name] for name in again)}:
        del entries[key]
    return Beside(found, frozen, size)


def mismatches(found: Mapping[str, tuple[Entry, tuple[int, ...]]]) -> list[str]:
    """Tensors by key that have not the shape beside them, or a dtype that is none of adapters; those that are wrong
    alike in one line."""
    alike: dict[str, list[str]] = {}
    for key, (entry, shape) in found.items():
        if entry.shape != shape:
            alike.setdefault(f"shape {list(entry.shape)} instead of {list(shape)}", []).append(key)
        elif not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            dtype = str(entry.dtype).removeprefix("torch.")
            alike.setdefault(f"dtype {dtype} instead of float32, bfloat16 or float16", []).append(key)
    return [f"{wrong}: {abbreviate(keys)}" for wrong, keys in alike.items()]


def _size(model: Model, lora: Any, shapes: Mapping[str, tuple[int, ...]], extended: bool) -> int:
    """How many rows the tables had where an adapter was trained."""
    hidden = model.config.hidden_size
    sizes = [model.config.vocab_size, *(max(ids) + 1 for ids in lora.tokens.values())]
    for path in TABLES:
        if extended and path in lora.tables:
            along = shapes.get(f"{path}.{LOW_RANK[path][path == HEAD]}", ())
            sizes += [max(along)] if len(along) == 2 else []
        kinds = [kind for kind in FROZEN if extended or kind != "weight" or path not in lora.copies]
        sizes += [shape[0] for kind in kinds if (shape := shapes.get(f"{path}.{kind}", ()))[1:] == (hidden,)]
    return max(sizes)


def _shapes(model: Model, lora: Any, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What an adapter has beside projections: its tensors by name."""
    hidden = model.config.hidden_size
    for path in lora.copies:
        module: Any = model.get_submodule(path)
        yield f"{path}.weight", (size, hidden) if path in TABLES else tuple(module.weight.shape)
        if getattr(module, "bias", None) is not None:
            yield f"{path}.bias", tuple(module.bias.shape)
    for path in lora.tables:
        r = lora.rank_of(EMBEDDING if lora.tied else path)
        wide, narrow = (size, hidden) if path == EMBEDDING else (hidden, size)
        yield from zip((f"{path}.{key}" for key in LOW_RANK[path]), ((r, wide), (narrow, r)), strict=True)
    for path, ids in lora.tokens.items():
        yield f"{path}.{ROWS}", (len(ids), hidden)


def other_tables(model: Model, frozen: Mapping[str, Tensor]) -> list[str]:
    """Which of an adapter's frozen tables are not this model's, as far as that goes."""
    wrong = []
    for path, table in frozen.items():
        own: Tensor = model.get_submodule(path).weight  # type: ignore[assignment]
        if len(table) < len(own) or not torch.equal(table[: len(own)].to(own), own):
            wrong.append(path)
    return wrong
