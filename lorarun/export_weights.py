"""What a merged checkpoint holds in the place of each of its source's weights, and how much of the update is in it.

A weight of the result is one of these: the source's, byte for byte; W + scale · B·A (or what else the adapter makes of
it) rounded once to its dtype; the same in the codes of a format of few bits; or, where nothing was merged and the live
model has it in that format already, the live codes as they are, since codes that are dequantised and quantised again
are other codes.  Which weights there are is the business of :mod:`lorarun.export_plan`.

How much of an update survives is measured on what is written: V with it, against what would be written without it, V₀.

    kept = ⟨U, V − V₀⟩ / ⟨U, U⟩     off = |V − V₀ − U| / |U|     U = scale · B·A

Neither says it alone.  Where W lies on the grid of the codes, as after training on quantised weights, V₀ is W, and an
update of less than half a step vanishes: kept is 0, and off is 1.  Where W does not, a small update moves a few weights
by a whole step each and the others not at all: on average all of it is there, kept is near 1 (above it where many
weights lie in the middle between two codes), with as much noise of its own as off tells.  What rounding does to the
base, with or without an update, is in neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.checkpoint import Checkpoint
from lorarun.config import stored_dtype
from lorarun.gguf_read import Gguf
from lorarun.headers import Entry
from lorarun.linear import Linear
from lorarun.lora import block_of
from lorarun.merge import merged_bias, merged_weight
from lorarun.nn import Model
from lorarun.packing import Form, form_of, parts
from lorarun.quant.store import NF4Store, Store, dequantize
from lorarun.trained import changes, with_adapter
from lorarun.weighted import Weighted

# Nearest codes are off by less than this share of the weights (root mean square).  The worst for NF4 in blocks of 64:
# one is 1 and 63 numbers just become 0, 0.0398: 0.30.  FP8 has 2⁻⁴.
FARTHEST = 0.4
SHARD = 5 * 10**9  # bytes of a file, where the source's files are not kept


class Kept(NamedTuple):
    """What became of an update U on a base W: sums of squares (or a product) over weights."""

    base: float  # |W|²
    update: float  # |U|²
    along: float  # ⟨U, V − V₀⟩
    away: float  # |V − V₀ − U|²

    @property
    def size(self) -> float:
        """The update beside the weights."""
        return math.sqrt(self.update / self.base) if self.base else 0.0

    @property
    def share(self) -> float:
        """How much of the update is in what was written: 1, all of it; 0, nothing."""
        return self.along / self.update if self.update else 1.0

    @property
    def off(self) -> float:
        """What is wrong with the difference that it makes, beside the update."""
        return math.sqrt(self.away / self.update) if self.update else 0.0


def total(values: Iterable[Kept]) -> Kept:
    """Several projections as one."""
    return Kept(*map(sum, zip(Kept(0.0, 0.0, 0.0, 0.0), *values, strict=True)))


def table(kept: Mapping[str, Kept]) -> str:
    """How much of the updates is in what was written: by kind of projection, with the layers that are in the middle and
    last by ``off``, and for all as one."""
    kinds: dict[str, list[str]] = {}
    for path in kept:
        kinds.setdefault(path.rpartition(".")[2], []).append(path)
    lines = [
        "                              median layer         worst layer",
        "projection   update/weights   kept   off/update    kept   off/update",
    ]
    for kind, paths in kinds.items():
        paths.sort(key=lambda path: kept[path].off)
        middle, worst, block = paths[len(paths) // 2], paths[-1], block_of(paths[-1])
        cells = _row(kind, total(kept[path] for path in paths).size, kept[middle], kept[worst])
        lines.append(cells if block is None else f"{cells}  in {block}")
    one = total(kept.values())
    return "\n".join([*lines, _row("all", one.size, one)])


def _row(name: str, size: float, *values: Kept) -> str:
    return f"{name:<12} {size:>14.3%}" + "".join(f" {value.share:>6.0%} {value.off:>11.2f}x" for value in values)


@dataclass
class Export:
    """What is to be written, and what was noticed on the way.  Names are those of the source."""

    model: Model
    adapter: str | None  # None: the model's own weights were trained
    source: Checkpoint
    entries: dict[str, Entry]  # of what is written; offsets are the source's
    origin: dict[str, str]  # the source's tensor behind one that the source does not have
    config: dict[str, Any]  # the source's
    fields: dict[str, Any]  # those of it that change
    original: bool  # whether W is the source's weight even where the live model rounded or quantised it
    dtype: torch.dtype | None  # asked for
    names: list[str]  # of the weights to be written, in file order
    live: dict[str, Tensor]  # the live model's dense weights, without adapter
    modules: dict[str, Weighted]  # whose weight a name is
    biases: dict[str, Linear]  # those whose bias the adapter changes, by the bias's name
    paths: dict[str, str]  # what weights are called in the model
    held: dict[str, Store]  # those quantised weights of the live model that are W
    forms: dict[str, Form]  # of what is written in few bits
    changed: list[str] = field(default_factory=list)  # live weights that are not the source's
    infinite: list[str] = field(default_factory=list)  # weights that the chosen format cannot hold
    same: list[str] = field(default_factory=list)  # modules that the adapter does not change
    unlike: list[str] = field(default_factory=list)  # weights whose codes are those of other numbers
    kept: dict[str, Kept] = field(default_factory=dict)  # by the projections' names in the model

    @property
    def form(self) -> Form | None:
        """The format of what is written in few bits; its NF4 weights may differ in their blocks."""
        return next(iter(self.forms.values()), None)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a weight that is written dense."""
        entry = self.entries[name]
        if name in self.source.packed or isinstance(self.source, Gguf):
            return self.dtype or stored_dtype(self.config) or self.source.dtype
        return entry.dtype if self.dtype is None or not entry.dtype.is_floating_point else self.dtype

    def read(self, name: str) -> Tensor:
        """The source's weight on the CPU: as stored, or dequantised exactly, in fp32; with the rows that the live model
        has beyond it."""
        if name in self.source.packed:
            return self.source.dense(name)
        ((_, stored),) = self.source.read([self.origin.get(name, name)])
        missing = self.entries[name].shape[0] - stored.shape[0] if stored.dim() else 0
        if not missing:
            return stored
        wide = torch.promote_types(stored.dtype, self.live[name].dtype)
        return torch.cat((stored.to(wide), self.live[name][-missing:].to(stored.device, wide)))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name) if name in self.source.packed else self.entries[name].shape

    def merges(self, name: str) -> bool:
        """Whether the adapter, or training, changes the weight of this name."""
        if self.adapter is None:
            return name in self.live
        module = self.modules.get(name)
        if isinstance(module, Linear) and module.active == self.adapter and "a" in module.parts(self.adapter):
            return True
        return module is not None and changes(module, self.adapter)

    def as_it_is(self, name: str) -> bool:
        """Whether a weight is written in the codes that it has."""
        held = self.held.get(name)
        return held is not None and not self.merges(name) and form_of(held) == self.forms.get(name)

    def base(self, name: str, stored: Tensor) -> Tensor:
        """The weight without adapter: as stored, or as the live model has it."""
        if name in self.held:
            return self.held[name].dequantize(torch.float32).cpu()
        if self.original or not self.merges(name):
            return stored
        live = self.live.get(name)
        return stored if live is None else stored.to(live.dtype)

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
        module = self.modules[name]
        if changes(module, self.adapter):
            return with_adapter(base, module, self.adapter)
        assert isinstance(module, Linear)
        return merged_weight(base, module, self.adapter)

    def value(self, name: str, exact: Tensor) -> Tensor | Store:
        """What is written of it.  Raises ValueError for numbers that have no code."""
        if name not in self.forms:
            return exact.to(self.dtype_of(name)).contiguous()
        if self.as_it_is(name):
            return self.held[name]
        return self.forms[name].encode(exact.to(self.model.device))

    def parts(self, name: str, value: Tensor | Store) -> dict[str, Tensor]:
        """The tensors that a value is in the file."""
        return parts(name, value, self.dtype_of(name)) if isinstance(value, Store) else {name: value}

    def merged(self, name: str) -> Tensor:
        """The weight with the adapter in it, computed from the source."""
        return self.exact(name, self.base(name, self.read(name)))

    def expected(self, name: str) -> dict[str, Tensor]:
        """The tensors of a weight, on the CPU, computed from the source."""
        parts = self.parts(name, self.value(name, self.merged(name)))
        return {part: tensor.cpu() for part, tensor in parts.items()}

    def layout(self, name: str) -> dict[str, Tensor]:
        """The same on the meta device, without values."""
        shape = self.shape(name)
        if name not in self.forms:
            return {name: torch.empty(shape, dtype=self.dtype_of(name), device="meta")}
        if self.as_it_is(name):
            return {part: tensor.to("meta") for part, tensor in self.parts(name, self.held[name]).items()}
        return self.parts(name, _blank(self.forms[name], shape))

    def files(self) -> dict[str, list[str]]:
        """File -> the weights in it: the source's files, or new ones where weights come out of packed ones."""
        files: dict[str, list[str]] = {}
        if not self.source.packed and not isinstance(self.source, Gguf):
            for name in self.names:
                files.setdefault(self.entries[name].file, []).append(name)
            return files
        shards: list[list[str]] = [[]]
        size = 0
        for name in self.names:
            nbytes = sum(tensor.nbytes for tensor in self.layout(name).values())
            if shards[-1] and size + nbytes > SHARD:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += nbytes
        if len(shards) == 1:
            return {"model.safetensors": shards[0]}
        return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}

    def dense_modules(self) -> set[str]:
        """The modules with matrices that are written dense, by every name that other programs may have for them."""
        found = {"lm_head"}
        for name in self.names:
            module, _, leaf = name.rpartition(".")
            if name not in self.forms and leaf == "weight" and len(self.shape(name)) == 2:
                found.update(_spellings(module) if self.model.nested else [module])
        return found

    def compute(self, name: str) -> dict[str, Tensor]:
        """The tensors of a weight on the CPU; what is to be said about it is noted."""
        stored, live = self.read(name), self.live.get(name)
        like = live is None or torch.equal(stored.to(live.device, live.dtype), live)
        if self.adapter is not None and not like:
            self.changed.append(name)
        before = self.base(name, stored)
        exact = self.exact(name, before)
        try:
            value = self.value(name, exact)
        except ValueError:
            self.infinite.append(name)
            return {part: torch.empty_like(tensor, device="cpu") for part, tensor in self.layout(name).items()}
        if isinstance(value, Store):
            off = value.dequantize(torch.float32).cpu() - exact
            if off.square().mean().sqrt() > FARTHEST * exact.square().mean().sqrt():
                self.unlike.append(name)
        else:
            anew = self.merges(name) or name in self.biases or value.dtype != stored.dtype
            if anew and not torch.isfinite(value).all():
                self.infinite.append(name)
        if self.merges(name):
            self._measure(name, before, exact, value)
        return {part: tensor.cpu() for part, tensor in self.parts(name, value).items()}

    def _measure(self, name: str, before: Tensor, exact: Tensor, value: Tensor | Store) -> None:
        update, held, form = exact - before, self.held.get(name), self.forms.get(name)
        if form is None:
            without = before.to(self.dtype_of(name)).to(exact.dtype)
        elif isinstance(held, form.store) and (isinstance(held, NF4Store) or form_of(held) == form):
            without = before  # it would have been written as it is
        else:
            without = form.encode(before.to(self.model.device)).dequantize(exact.dtype).cpu()
        change = dequantize(value, exact.dtype).cpu() - without
        if not update.any() or not change.any():
            self.same.append(name)
        self.kept[self.paths[name]] = Kept(
            float(before.to(exact.dtype).square().sum()),
            float(update.square().sum()),
            float((update * change).sum()),
            float((change - update).square().sum()),
        )


@cache
def _blank(form: Form, shape: tuple[int, ...]) -> Store:
    """A store on the meta device; a model has few shapes, and many weights of each."""
    return form.encode(torch.empty(shape, device="meta"))


def _spellings(module: str) -> list[str]:
    """A module of a multimodal checkpoint as older and newer files, transformers and vLLM call it."""
    inner = module.removeprefix("model.")
    if not inner.startswith("language_model."):  # published towers have a level that newer transformers leave out
        short = inner.replace("vision_tower.vision_model.", "vision_tower.")
        long = short.replace("vision_tower.", "vision_tower.vision_model.")
        return [short, f"model.{short}", long, f"model.{long}"]
    text = inner.removeprefix("language_model.").removeprefix("model.")
    return [f"language_model.model.{text}", f"model.language_model.{text}"] if text != "lm_head" else [inner, text]
