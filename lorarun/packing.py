"""Weights in four or eight bits as the tensors of a file: the other direction of :mod:`lorarun.quantised`.

A store becomes the tensors that its format has, under the names and with the dtypes that other programs look for, and
a folder gets the ``quantization_config`` that says so.  Three formats are written:

    bitsandbytes NF4      what ``QuantState.as_dict`` there makes of a weight.  Read by transformers, PEFT, vLLM.
    FP8, a scale a row    compressed-tensors' "float-quantized" by channel, activations quantised by token as they come.
                          It is the scheme FP8_DYNAMIC, which vLLM documents as FP8 W8A8.  Read by vLLM, and by
                          transformers with the compressed-tensors package.
    FP8 in blocks         as DeepSeek and Qwen3 publish it.  Read by vLLM and transformers.

With FP8 inputs of projections are rounded, too: vLLM multiplies codes by codes, which is what makes it fast, and logits
move farther than by the weights alone.  Rows in transformers: the first pass dequantises weights, inputs are rounded to
FP8 and back, on a CPU as well, and scales are rounded to the model's dtype; loading with
``quantization_config=CompressedTensorsConfig(dequantize=True)`` leaves inputs as they are and rounds weights once.
Blocks in transformers: without a GPU, weights are dequantised on loading and inputs left as they are.

Which layers are not quantised is written out by name, every one.  The programs have defaults for a list that is left
out (the head, mostly), and a layer that is dense in the file and not on their list is quantised a second time or filled
with something else, in silence.

Given up: scales of activations measured in advance, which FP8 may have and which need data to run.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorarun.kernels.nf4 import NESTED, VALUES
from lorarun.quant.store import FP8Store, NF4Store, Store
from lorarun.quantised import STATE

BLOB = 256  # bytes of a quant state: its JSON, filled with spaces, so that a file's layout is known before its values


class Form(NamedTuple):
    """A format of few bits.  ``block`` is a number of weights for NF4, (rows, columns) or None, a scale a row, for FP8;
    ``nested`` is NF4's double quantisation."""

    store: type[Store]
    block: Any
    nested: bool = False

    def encode(self, w: Tensor) -> Store:
        """Quantise ``w`` where it is.  Raises ValueError when it holds NaN or infinity."""
        if issubclass(self.store, NF4Store):
            return self.store.from_dense(w, self.block, self.nested)
        assert issubclass(self.store, FP8Store)
        return self.store.from_dense(w, self.block)


def form_of(store: Store) -> Form:
    """The form that a store has."""
    if isinstance(store, NF4Store):
        return Form(NF4Store, store.block, store.offset is not None)
    assert isinstance(store, FP8Store)
    return Form(FP8Store, store.block)


def parts(name: str, store: Store, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of the weight ``name``, where the store is; one on the meta device gives their shapes and dtypes.

    dtype: what other programs dequantise it to.
    """
    if isinstance(store, FP8Store):
        scale = f"{name}_scale" if store.block is None else f"{name}_scale_inv"
        return {name: store.codes.view(torch.float8_e4m3fn), scale: store.scale}
    assert isinstance(store, NF4Store)
    device = store.codes.device
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": store.block,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(store.shape),
    }
    tensors = {"": store.codes.view(-1, 1), ".absmax": store.absmax}
    if store.nested_absmax is not None and store.nested_map is not None and store.offset is not None:
        tensors |= {".nested_absmax": store.nested_absmax, ".nested_quant_map": store.nested_map}
        offset = 0.0 if store.offset.is_meta else store.offset.item()
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
    blob = json.dumps(state).encode().ljust(BLOB)
    assert len(blob) == BLOB, state
    tensors[".quant_map"] = torch.tensor(VALUES, dtype=torch.float32).to(device)
    tensors[f".{STATE}nf4"] = torch.tensor(list(blob), dtype=torch.uint8).to(device)
    return {name + part: tensor.detach() for part, tensor in tensors.items()}


def quantization_config(form: Form, dense: Collection[str], dtype: torch.dtype) -> dict[str, Any]:
    """What ``config.json`` says of weights in this form, with the modules that are not quantised.

    dtype: of what is dense, and of the arithmetic.
    """
    skip = sorted(dense)
    if issubclass(form.store, NF4Store):
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,  # for what is not quantised yet; each weight's state says it of itself
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": skip,
        }
    if form.block is not None:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(form.block),
            "modules_to_not_convert": skip,
        }
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "block_structure": None, "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": skip,
    }
