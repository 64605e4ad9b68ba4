"""Malformed checkpoints, adapters and GGUF files: each is a named error, soon, in little memory, and nothing else.

A loader is shown files that were cut short, mixed up or made to do harm.  What must not happen is a crash, a hang, an
exhausted machine, a message that names nothing, or worst a model that runs on half of what was there.  Each row of the
table changes one good folder and says which words the error must have.  All rows run in children that a long-lived
worker forks after its imports, so that a row that crashes or hangs takes nothing with it and memory is measured from
where the imports ended.  CPU time is what has the limit of two seconds, since the machine may be busy with other
things; a row that waits and burns nothing is stopped by the clock.  The last tests plant each misbehaviour to see that
it is caught.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from attempts import Worker
from spoil import (
    ADAPTER,
    CONFIG,
    INDEX,
    POINTER,
    SHARD,
    TOKENIZER,
    WEIGHTS,
    A,
    Change,
    Q,
    as_file,
    circle,
    cut,
    dangling,
    emptied,
    fields,
    folder_at,
    header,
    instead,
    nest,
    nothing,
    number,
    pickled,
    put,
    put_at,
    set_to,
    shard,
    shard_tensor,
    sparse,
    spliced,
    spoilt,
    state,
    template,
    tensors,
    vocabulary,
    weight_map,
    with_length,
    without,
)
from toy import make

import lorarun

SECONDS, MIB = 2.0, 200  # of CPU, above the imports
pytestmark = pytest.mark.timed

# --- good folders --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind, small, with a tokenizer; "adapter" belongs to "model"."""
    root = tmp_path_factory.mktemp("good")
    names = {"model": "llama3", "sharded": "llama3-sharded", "nf4": "llama3-bnb4", "fp8": "llama3-fp8"}
    found = {kind: root / kind for kind in (*names, "adapter", "gguf")}
    for kind, name in names.items():
        shutil.copytree(tiny(name), root / kind, ignore=shutil.ignore_patterns("reference.safetensors"))
        make(root / kind, template="{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}")
    found["chat"] = found["model"]
    model = lorarun.load(found["model"], device="cpu")
    found["gguf"].mkdir()
    lorarun.save_gguf(model, found["gguf"] / "model.gguf", dtype="bf16")
    lorarun.add_lora(model, r=2, targets=["q_proj", "v_proj"], seed=0)
    for parameter in lorarun.lora_parameters(model):
        parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    lorarun.save_adapter(model, found["adapter"])
    return found


@pytest.fixture(scope="module")
def worker(good: dict[str, Path]) -> Iterator[Worker]:
    worker = Worker(good["model"])
    yield worker
    worker.close()


class Bad(NamedTuple):
    """A good folder of this kind, changed so, is an error that has these words (a regular expression)."""

    kind: str
    change: Change
    says: str


BAD: dict[str, Bad] = {
    # --- safetensors: cut, lengths, layout, dtypes
    "weights: nothing": Bad("model", put(WEIGHTS, b""), "model.safetensors is empty"),
    "weights: 7 bytes": Bad("model", cut(lambda data: 7), "has 7 bytes and claims a header of"),
    "weights: only the length": Bad("model", cut(lambda data: 8), "cut short, or not safetensors"),
    "weights: half the header": Bad("model", cut(lambda data: 100), "has 100 bytes and claims a header"),
    "weights: no data": Bad("model", cut(lambda data: 8 + int.from_bytes(data[:8], "little")), "cuts off .* tensors"),
    "weights: half the data": Bad("model", cut(lambda data: len(data) // 2), "is cut short: .* cuts off"),
    "weights: one byte less": Bad("model", cut(lambda data: len(data) - 1), "cuts off 1 of its"),
    "weights: a byte more": Bad("model", put(WEIGHTS, lambda data: data + b"x"), "1 bytes after its last tensor"),
    "weights: header of 0": Bad("model", with_length(0), "claims a header of 0"),
    "weights: header of 2^40": Bad("model", with_length(2**40), "claims a header of 1099511627776"),
    "weights: header of 2^63": Bad("model", with_length(2**63), "claims a header of 9223372036854775808"),
    "weights: header of 64 GiB": Bad("model", instead(WEIGHTS, sparse), "claims a header of 0"),
    "weights: large header that is there": Bad(
        "model",
        lambda folder: (sparse(folder / WEIGHTS), put_at(folder / WEIGHTS)),
        "claims a header of 1073741824 bytes; that of a model",
    ),
    "weights: overlap": Bad(
        "model", header(lambda held: held[Q].update(data_offsets=[64, 64 + 64 * 64 * 2])), "overlap|leave a gap"
    ),
    "weights: hole": Bad("model", header(lambda held: held.pop(Q) and None), "leave a gap|after its last"),
    "weights: dtype F4": Bad("model", header(lambda held: held[Q].update(dtype="F4")), "dtype 'F4'; known are"),
    "weights: dtype of another size": Bad(
        "model", header(lambda held: held[Q].update(dtype="F64")), "which takes 32768"
    ),
    "weights: whole numbers": Bad("model", set_to(Q, lambda w: w.to(torch.int32)), "dtype int32 instead of a floating"),
    "weights: shape": Bad("model", set_to(Q, lambda w: w[:63]), r"shape \[63, 64\] instead of \[64, 64\]"),
    "weights: shape of 2^40 twice": Bad(
        "model", header(lambda held: held[Q].update(shape=[2**40, 2**40])), "which takes 2417851639229258349412352"
    ),
    "weights: negative shape": Bad(
        "model", header(lambda held: held[Q].update(shape=[-64, -64])), "lacks a valid shape"
    ),
    "weights: offsets as text": Bad(
        "model", header(lambda held: held[Q].update(data_offsets=["0", "8"])), "lacks a valid"
    ),
    "weights: no offsets": Bad(
        "model", header(lambda held: held[Q].pop("data_offsets") and None), "lacks a valid shape or data"
    ),
    "weights: metadata that is no text": Bad(
        "model", header(lambda held: held.update(__metadata__={"format": 1})), "corrupt header: .*expected a string"
    ),
    "weights: a name twice": Bad(
        "model",
        put(WEIGHTS, lambda d: d.replace(b"layers.1.self_attn.q_proj", b"layers.0.self_attn.q_proj")),
        "more than once",
    ),
    "weights: header not UTF-8": Bad("model", put(WEIGHTS, lambda d: d[:10] + b"\xff\xfe" + d[12:]), "'utf-8' codec"),
    "weights: header of brackets": Bad(
        "model", put(WEIGHTS, (100_000).to_bytes(8, "little") + b"[" * 100_000), "corrupt header: .*recursion"
    ),
    "weights: lists in lists": Bad(
        "model", header(lambda held: held.update(deep=json.loads("[" * 500 + "]" * 500))), "nested more than 64 deep"
    ),
    "weights: a missing tensor": Bad("model", without(Q), "1 of .* tensors are missing: " + Q),
    "weights: a strange tensor": Bad("model", set_to("strange", torch.ones(2)), "1 tensors are unexpected: strange"),
    "weights: NaN": Bad("model", set_to(Q, spoilt(float("nan"))), Q + ": the weight holds NaN or infinity"),
    "weights: infinity": Bad("sharded", shard_tensor(float("-inf")), ".weight: the weight holds NaN or infinity"),
    "weights: a pickle instead": Bad("model", pickled, "holds pickles .* never loaded"),
    "weights: a pointer instead": Bad("model", put(WEIGHTS, POINTER), "git-lfs pointer"),
    "weights: a folder": Bad("model", instead(WEIGHTS, folder_at), "cannot be read .Is a directory"),
    "weights: a pipe": Bad("model", instead(WEIGHTS, os.mkfifo), "it is no regular file"),
    "weights: a dangling link": Bad("model", instead(WEIGHTS, dangling), "a dangling link"),
    "weights: a link to itself": Bad("model", instead(WEIGHTS, circle), "a dangling link"),
    # --- the index
    "index: a shard is gone": Bad("sharded", shard(nothing), "shards are not there: " + SHARD),
    "index: a shard dangles": Bad("sharded", shard(dangling), "dangling link"),
    "index: a shard is a pointer": Bad("sharded", shard(lambda path: path.write_bytes(POINTER)), "git-lfs pointer"),
    "index: a shard is a folder": Bad("sharded", shard(folder_at), "Is a directory"),
    "index: a shard is a pipe": Bad("sharded", shard(os.mkfifo), "no regular file"),
    "index: path upwards": Bad("sharded", weight_map(lambda m: m.update(w="../model.safetensors")), "not plain names"),
    "index: absolute path": Bad("sharded", weight_map(lambda m: m.update(w="/etc/m.safetensors")), "not plain names"),
    "index: a backslash": Bad("sharded", weight_map(lambda m: m.update(w="..\\m.safetensors")), "not plain names"),
    "index: a tensor elsewhere": Bad(
        "sharded", weight_map(lambda m: m.update(dict.fromkeys(m, m[Q]))), "does not hold"
    ),
    "index: a name less": Bad("sharded", weight_map(lambda m: m.pop(Q)), "does not name 1 tensors"),
    "index: a list": Bad("sharded", put(INDEX, "[]"), "must hold a JSON object, got a list"),
    "index: no map": Bad("sharded", put(INDEX, '{"weight_map": []}'), 'must have a "weight_map"'),
    "index: a pointer": Bad("sharded", put(INDEX, POINTER), "git-lfs pointer"),
    "index: a pipe": Bad("sharded", instead(INDEX, os.mkfifo), "pipe or device, expected a file"),
    "index: brackets": Bad("sharded", put(INDEX, "[" * 10**6), "not valid JSON"),
    "index: UTF-16": Bad("sharded", put(INDEX, '{"weight_map": {}}'.encode("utf-16")), "is not UTF-8"),
    # --- config.json
    "config: gone": Bad("model", instead(CONFIG, nothing), "no config.json"),
    "config: empty": Bad("model", put(CONFIG, ""), "not valid JSON"),
    "config: cut": Bad("model", cut(lambda data: 40, CONFIG), "not valid JSON"),
    "config: a list": Bad("model", put(CONFIG, "[1]"), "must hold a JSON object, got a list"),
    "config: a pointer": Bad("model", put(CONFIG, POINTER), "git-lfs pointer"),
    "config: a folder": Bad("model", instead(CONFIG, folder_at), "is a folder, expected a file"),
    "config: a pipe": Bad("model", instead(CONFIG, os.mkfifo), "is a pipe or device, expected a file"),
    "config: a dangling link": Bad("model", instead(CONFIG, dangling), "no config.json|dangling link"),
    "config: not UTF-8": Bad("model", put(CONFIG, b'{"model_type": "\xff"}'), "is not UTF-8"),
    "config: 64 GiB": Bad("model", instead(CONFIG, sparse), "more than the 4,194,304 bytes"),
    "config: brackets": Bad("model", put(CONFIG, "[" * 10**6), "not valid JSON"),
    "config: 500 lists in lists": Bad("model", put(CONFIG, nest(500)), "nested more than 64 deep"),
    "config: 4 MB of lists": Bad("model", put(CONFIG, '{"a": [' + "[]," * 1_350_000 + "0]}"), "model_type None"),
    "config: 10,000 digits": Bad("model", put(CONFIG, f'{{"vocab_size": {"9" * 10_000}}}'), "not valid JSON .*limit"),
    "config: two values": Bad(
        "model", spliced(CONFIG, '"vocab_size"', '"vocab_size": 7, "vocab_size"'), "two values for vocab_size"
    ),
    "config: 1e999": Bad(
        "model", spliced(CONFIG, '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e999'), "rms_norm_eps is inf"
    ),
    "config: NaN": Bad("model", fields(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "config: 10^400": Bad("model", fields(rms_norm_eps=10**400), "rms_norm_eps is 1000"),
    "config: vocabulary of 2^40": Bad(
        "model", fields(vocab_size=2**40), "vocab_size is 1099511627776, expected from 1"
    ),
    "config: vocabulary of 2^31": Bad("model", fields(vocab_size=2**31 - 1), r"instead of \[2147483647, 64\]"),
    "config: width of 2^30": Bad("model", fields(hidden_size=2**30), "hidden_size is 1073741824, expected from 1"),
    "config: heads of 2^31": Bad("model", fields(head_dim=2**31 - 2), "head_dim is 2147483646, expected from 1 to"),
    "config: odd heads": Bad("model", fields(head_dim=15), "head_dim is 15 .*an even number"),
    "config: a million layers": Bad("model", fields(num_hidden_layers=10**6), "num_hidden_layers is 1000000, expected"),
    "config: 500 layers": Bad("model", fields(num_hidden_layers=500), r"tensors are missing: model.layers.\{4-499\}"),
    "config: no heads": Bad("model", fields(num_attention_heads=0), "num_attention_heads is 0"),
    "config: a list of types": Bad("model", fields(model_type=["llama"]), "model_type is .'llama'., expected a text"),
    "config: another family": Bad(
        "model", fields(model_type="mamba"), "config.json: model_type 'mamba' is not supported"
    ),
    "config: a type inside": Bad(
        "model", fields(model_type=[], text_config={"model_type": "llama"}), r"config.json: model_type \[\] is not"
    ),
    "config: rope of a type that is a list": Bad(
        "model",
        fields(rope_parameters={"rope_type": ["yarn"]}),
        "rope_parameters.rope_type is .'yarn'., expected a text",
    ),
    "config: base of 1": Bad(
        "model",
        fields(rope_parameters={"rope_type": "yarn", "factor": 2, "rope_theta": 1}),
        "rope_theta is 1, expected",
    ),
    "config: llama3 without a blend": Bad(
        "model",
        lambda folder: fields(
            rope_parameters=json.loads((folder / CONFIG).read_text())["rope_parameters"] | {"high_freq_factor": 1}
        )(folder),
        "low_freq_factor 1.0 must be below high_freq_factor 1",
    ),
    "config: dtype that is none": Bad("model", fields(dtype="Tensor"), "dtype is 'Tensor'"),
    "folder: empty": Bad("model", emptied, "has no config.json"),
    "folder: a file": Bad("model", as_file, "is a file; give the folder"),
    # --- bitsandbytes and FP8
    **{
        f"NF4: no {part or 'codes'}": Bad("nf4", without(Q + part), f"{part[1:] or 'codes'} is missing: {Q}")
        for part in ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
    },
    "NF4: no state": Bad("nf4", without(f"{Q}.quant_state.bitsandbytes__nf4"), "bitsandbytes__nf4 is missing: " + Q),
    "NF4: shape of 2^40": Bad("nf4", state(shape=[2**40, 2**40]), "shape is .1099511627776, 1099511627776. instead of"),
    "NF4: shape of 2^31": Bad("nf4", state(shape=[2**31 - 1, 2**31 - 1]), "instead of"),
    "NF4: block of 10^400": Bad("nf4", state(blocksize=10**400), "blocksize is 1000"),
    "NF4: offset NaN": Bad("nf4", state(nested_offset=float("nan")), "nested_offset is nan instead of a number"),
    "NF4: state of brackets": Bad(
        "nf4",
        set_to(f"{Q}.quant_state.bitsandbytes__nf4", torch.full((60_000,), 91, dtype=torch.uint8)),
        "not a JSON object",
    ),
    "NF4: scales NaN": Bad("nf4", set_to(f"{Q}.nested_absmax", lambda t: t * float("nan")), "the scales hold NaN"),
    "NF4: no config": Bad("nf4", fields(quantization_config=None), "no quantization_config in config.json"),
    "FP8: no scale": Bad("fp8", without(Q + "_scale_inv"), "weight_scale_inv and weight_scale are missing: " + Q),
    "FP8: no weight": Bad("fp8", without(Q), "there is a scale, but the weight is not there"),
    "FP8: scale of another shape": Bad("fp8", set_to(Q + "_scale_inv", torch.ones(3, 3)), r"scale has shape \[3, 3\]"),
    "FP8: scale of infinity": Bad("fp8", set_to(Q + "_scale_inv", torch.full((1, 1), float("inf"))), "scales hold NaN"),
    "FP8: blocks of 0": Bad(
        "fp8",
        fields(quantization_config={"quant_method": "fp8", "weight_block_size": [0, 0]}),
        "weight_block_size .0, 0.",
    ),
    # --- adapters
    "adapter: no config": Bad("adapter", instead(ADAPTER, nothing), "has no adapter_config.json"),
    "adapter: config cut": Bad("adapter", cut(lambda data: 30, ADAPTER), "not valid JSON"),
    "adapter: config not UTF-8": Bad("adapter", put(ADAPTER, b"\xff\xfe{}"), "is not UTF-8"),
    "adapter: config a pipe": Bad("adapter", instead(ADAPTER, os.mkfifo), "pipe or device"),
    "adapter: config a pointer": Bad("adapter", put(ADAPTER, POINTER), "git-lfs pointer"),
    "adapter: rank 10^30": Bad(
        "adapter", fields(ADAPTER, r=10**30), r"instead of \[1000000000000000000000000000000, 64"
    ),
    "adapter: rank of text": Bad("adapter", fields(ADAPTER, r="2"), "r is '2'"),
    "adapter: alpha 10^400": Bad("adapter", fields(ADAPTER, lora_alpha=10**400), "lora_alpha is 1000"),
    "adapter: alpha NaN": Bad("adapter", fields(ADAPTER, lora_alpha=float("nan")), "lora_alpha is nan"),
    "adapter: targets that are no pattern": Bad(
        "adapter", fields(ADAPTER, target_modules="(("), "not a regular expression"
    ),
    "adapter: targets of numbers": Bad("adapter", fields(ADAPTER, target_modules=[1]), r"target_modules is \[1\]"),
    "adapter: 500 lists in lists": Bad(
        "adapter", put(ADAPTER, nest(500, "target_modules")), "nested more than 64 deep"
    ),
    "adapter: no weights": Bad(
        "adapter", instead("adapter_model.safetensors", nothing), "no adapter_model.safetensors"
    ),
    "adapter: a pickle": Bad(
        "adapter", lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "as a pickle .* never"
    ),
    "adapter: weights a pointer": Bad("adapter", put("adapter_model.safetensors", POINTER), "git-lfs pointer"),
    "adapter: weights a dangling link": Bad("adapter", instead("adapter_model.safetensors", dangling), "dangling link"),
    "adapter: weights cut": Bad("adapter", cut(lambda d: len(d) - 9, "adapter_model.safetensors"), "is cut short"),
    "adapter: metadata that is no text": Bad(
        "adapter",
        header(lambda held: held.update(__metadata__=[]), "adapter_model.safetensors"),
        "corrupt header: .*expected a map",
    ),
    "adapter: of another rank": Bad("adapter", fields(ADAPTER, r=3), r"shape \[2, 64\] instead of \[3, 64\]"),
    "adapter: a matrix too few": Bad(
        "adapter", tensors(lambda held: held.pop(A), "adapter_model.safetensors"), "1 of 16 tensors are missing"
    ),
    "adapter: three dimensions": Bad(
        "adapter",
        tensors(lambda held: held.update({A: held[A][None]}), "adapter_model.safetensors"),
        r"shape \[1, 2, 64\]",
    ),
    "adapter: bytes": Bad(
        "adapter",
        tensors(lambda held: held.update({A: held[A].to(torch.int8)}), "adapter_model.safetensors"),
        "dtype int8",
    ),
    "adapter: a name that climbs": Bad(
        "adapter",
        tensors(lambda held: held.update({"../../../etc/x.lora_A.weight": held[A] + 0}), "adapter_model.safetensors"),
        "1 tensors are unexpected: ../../../etc/x",
    ),
    "adapter: NaN": Bad(
        "adapter",
        tensors(lambda held: held.update({A: spoilt(float("nan"))(held[A])}), "adapter_model.safetensors"),
        "holds NaN or infinity in 1 tensors: " + A,
    ),
    "adapter: a base of 5000 letters": Bad(
        "adapter alone", fields(ADAPTER, base_model_name_or_path="a" * 5000), "hub|names no model|There is no folder"
    ),
    "adapter: a base that is none": Bad("adapter alone", fields(ADAPTER, base_model_name_or_path="../\0"), "no folder"),
    "adapter: a folder that is a file": Bad("adapter", as_file, "is a file; give the folder"),
    "adapter: empty": Bad("adapter", emptied, "has no adapter_config.json"),
    # --- tokenizers and templates
    "tokenizer: cut": Bad("model", cut(lambda data: 900, TOKENIZER), "tokenizer.json cannot be read by tokenizers"),
    "tokenizer: a pointer": Bad("model", put(TOKENIZER, POINTER), "git-lfs pointer"),
    "tokenizer: not UTF-8": Bad("model", put(TOKENIZER, lambda d: d[:50] + b"\xff" + d[51:]), "cannot be read by"),
    "tokenizer: a pipe": Bad("model", instead(TOKENIZER, os.mkfifo), "pipe or device"),
    "tokenizer: a dangling link": Bad("model", instead(TOKENIZER, dangling), "a dangling link to blobs/0123"),
    "tokenizer: a folder": Bad("model", instead(TOKENIZER, folder_at), "is a folder, expected a file"),
    "tokenizer: 64 GiB": Bad("model", instead(TOKENIZER, sparse), "has 68,719,476,736 bytes"),
    "tokenizer: of no kind": Bad(
        "model", vocabulary(lambda held: held["model"].update(type="Magic")), "cannot be read by"
    ),
    "tokenizer: a prefix that does not fit": Bad(  # the package panics, and then in its clean-up
        "model",
        vocabulary(lambda held: held["model"].update(continuing_subword_prefix="##")),
        "has a continuing_subword",
    ),
    "tokenizer: an unknown token that is none": Bad(
        "chat",
        vocabulary(lambda held: held["model"].update(unk_token="?!", merges=[]) or held["model"]["vocab"].pop("f")),
        "cannot encode 'userthe fox.*Unk token",
    ),
    "tokenizer: its config a list": Bad("model", put("tokenizer_config.json", "[]"), "must hold a JSON object"),
    "tokenizer: its config a pipe": Bad("model", instead("tokenizer_config.json", os.mkfifo), "pipe or device"),
    "tokenizer: a map not UTF-8": Bad("model", put("special_tokens_map.json", b'{"a": "\xff"}'), "is not UTF-8"),
    "tokenizer: generation_config cut": Bad(
        "model", put("generation_config.json", '{"eos_token_id": '), "not valid JSON"
    ),
    "template: not UTF-8": Bad("chat", put("chat_template.jinja", b"\xff\xfe"), "is not UTF-8"),
    "template: a pipe": Bad("chat", instead("chat_template.jinja", os.mkfifo), "pipe or device"),
    "template: of numbers": Bad("chat", fields("tokenizer_config.json", chat_template=7), "must be a text, or a list"),
    "template: without an end": Bad("chat", template("{% for m in messages %}"), "not valid jinja2: line 1"),
    "template: loops for ever": Bad(
        "chat",
        template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        "loops or calls more than",
    ),
    "template: calls itself": Bad("chat", template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "recursion"),
    "template: reaches for a class": Bad("chat", template("{{ messages.__class__.__mro__ }}"), "unsafe"),
    "template: reaches for globals": Bad("chat", template("{{ raise_exception.__globals__['sys'] }}"), "unsafe"),
    "template: imports": Bad("chat", template("{% include '/etc/passwd' %}"), "the chat template refused"),
    "template: writes without end": Bad(
        "chat", template("{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}"), "grows beyond"
    ),
    "template: a power": Bad("chat", template("{{ 10 ** 10 ** 9 }}"), "power in the template is too large"),
    "template: nested without end": Bad("chat", template("{{" + "(" * 5000 + ")" * 5000 + "}}"), "chat template"),
    # --- GGUF; tests/test_gguf.py has more
    "GGUF: empty": Bad("gguf", put("model.gguf", b""), "is empty"),
    "GGUF: magic": Bad("gguf", put("model.gguf", lambda d: b"GGML" + d[4:]), "begins with b'GGML'"),
    "GGUF: version": Bad("gguf", put("model.gguf", lambda d: d[:4] + b"\1\0\0\0" + d[8:]), "has version 1"),
    "GGUF: 2^60 fields": Bad(
        "gguf", put("model.gguf", lambda d: d[:16] + struct.pack("<Q", 2**60) + d[24:]), "to be 1152"
    ),
    "GGUF: 2^60 tensors": Bad(
        "gguf", put("model.gguf", lambda d: d[:8] + struct.pack("<Q", 2**60) + d[16:]), "to be 1152"
    ),
    "GGUF: a key of 2^62": Bad(
        "gguf", put("model.gguf", lambda d: d[:24] + struct.pack("<Q", 2**62) + d[32:]), "inside field 0"
    ),
    "GGUF: cut in a key": Bad("gguf", cut(lambda d: 30, "model.gguf"), "cannot be read as GGUF"),
    "GGUF: cut in the metadata": Bad("gguf", cut(lambda d: 600, "model.gguf"), "cannot be read as GGUF"),
    "GGUF: cut in the table": Bad(
        "gguf", cut(lambda d: d.index(b"blk.0.attn_q.w") + 20, "model.gguf"), "tensors' table"
    ),
    "GGUF: cut in the data": Bad("gguf", cut(lambda d: len(d) - 99, "model.gguf"), "is cut short by 99 bytes"),
    "GGUF: 64 GiB of nothing": Bad("gguf", instead("model.gguf", sparse), "begins with"),
    "GGUF: a text of 32 GiB": Bad(
        "gguf",
        lambda f: (number("general.architecture", 2**35, "Q")(f), os.truncate(f / "model.gguf", 2**36)),
        "the first 32 MiB",
    ),
    "GGUF: a list of 2^33": Bad(
        "gguf",
        lambda f: (number("tokenizer.ggml.tokens", 2**33, "Q", 8)(f), os.truncate(f / "model.gguf", 2**36)),
        "the first 32 MiB",
    ),
    "GGUF: a type that is none": Bad("gguf", number("llama.block_count", 77, at=0), "a value of type 77"),
    "GGUF: another type": Bad("gguf", number("llama.block_count", 6, at=0), "must be of type int"),
    "GGUF: 2^31 blocks": Bad("gguf", number("llama.block_count", 2**31 - 1), "block_count 2147483647"),
    "GGUF: a pointer": Bad("gguf", put("model.gguf", POINTER), "git-lfs pointer"),
    "GGUF: a folder": Bad("gguf", instead("model.gguf", folder_at), "has no config.json"),
    "GGUF: a pipe": Bad("gguf", instead("model.gguf", os.mkfifo), "is no file"),
    "GGUF: a dangling link": Bad("gguf", instead("model.gguf", dangling), "There is no file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_named_error_soon_and_in_little_memory(
    case: str, good: dict[str, Path], worker: Worker, tmp_path: Path
) -> None:
    kind, change, says = BAD[case]
    folder = tmp_path / "given"
    shutil.copytree(good[kind.partition(" ")[0]], folder)
    change(folder)
    found = worker(kind, folder / "model.gguf" if kind == "gguf" else folder)
    assert "died" not in found, f"{case}: it {found['died']}"
    assert found["error"] is not None, "it was accepted"
    name, wanted, message = found["error"]
    assert wanted and re.search(says, message, re.DOTALL) and name not in ("UnicodeDecodeError", "JSONDecodeError"), (
        found
    )
    named = ("given", "config.json", "chat template", "targets=")
    assert any(text in message for text in named), f"nothing in it says where to look: {message}"
    for _ in range(2):  # on a busy machine the same work takes more of a processor's time, too
        if found["seconds"] >= SECONDS:
            found = worker(kind, folder / "model.gguf" if kind == "gguf" else folder)
    assert found["seconds"] < SECONDS and found["mib"] < MIB, found


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, TOKENIZER, "tokenizer_config.json", None])
def test_what_may_not_be_read_is_named(name: str | None, good: dict[str, Path], worker: Worker) -> None:
    with tempfile.TemporaryDirectory() as root:  # pytest's own folders are closed to others
        os.chmod(root, 0o755)
        folder = shutil.copytree(good["model"], Path(root) / "given")
        for path in folder.iterdir():
            path.chmod(0 if path.name == name else 0o644)
        found = worker("nobody", folder)
    if name is None:
        assert found["error"] is None, found
    else:
        assert found["error"][1] and name in found["error"][2] and "ermission" in found["error"][2], found


def test_the_good_ones_are_good(good: dict[str, Path], worker: Worker) -> None:
    for kind, folder in good.items():
        found = worker(kind, folder / "model.gguf" if kind == "gguf" else folder)
        assert found["error"] is None and found["mib"] < MIB, (kind, found)


def test_a_byte_order_mark_and_equal_values_do_no_harm(good: dict[str, Path], worker: Worker, tmp_path: Path) -> None:
    shutil.copytree(good["sharded"], tmp_path / "given")
    for name in (CONFIG, INDEX, "tokenizer_config.json"):
        put(name, lambda data: b"\xef\xbb\xbf" + data)(tmp_path / "given")
    spliced(CONFIG, '"vocab_size"', '"vocab_size": 1024, "vocab_size"')(tmp_path / "given")
    assert worker("model", tmp_path / "given")["error"] is None


def test_what_goes_wrong_is_seen(worker: Worker) -> None:
    """Each misbehaviour on purpose; the worker survives it."""
    assert worker("planted", "crash") == {"died": "crashed"}
    assert worker("planted", "hang", wait=0.5) == {"died": "was still running"}
    assert worker("planted", "spin", wait=0.5) == {"died": "was still running"}
    assert 295 <= worker("planted", "memory")["mib"] < 320
    assert worker("planted", "nothing")["error"] == ["KeyError", False, "'nothing'"]
