"""Models of real shapes with random weights, and tokens to train them on: the same for lorarun and its peers.

Speed and memory depend on shapes alone, so nothing is fetched.  Every tensor comes from a generator seeded by its name:
a model that is built here in its stores, one tensor at a time, and one that a peer reads from the checkpoint that
:func:`write` makes have the same weights, and their loss curves can be laid over each other.

Above 20 billion weights nothing dense is ever made: codes and scales are random (:func:`random_nf4`).
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_timing import DEVICE
from safetensors.torch import save_file
from torch import Tensor, nn

from lorarun.data import Batch
from lorarun.kernels.nf4 import NESTED, dynamic_map
from lorarun.lora import find_targets
from lorarun.models import build_model
from lorarun.nn import Model
from lorarun.quant.store import FP8Store, NF4Store, Store

LARGE = 20_000_000_000
STD = 0.02
RANK = 16  # of the adapters
ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": ROPE,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-3.1-70b": {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE | {"rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE | {"rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "tie_word_embeddings": True,
    },
}


def on_meta(config: dict[str, Any]) -> Model:
    with torch.device("meta"):
        return build_model(config)


def parameters(name: str) -> int:
    return sum(p.numel() for p in on_meta(CONFIGS[name]).parameters())


def values(name: str, shape: torch.Size, config: dict[str, Any], device: torch.device = DEVICE) -> Tensor:
    """The tensor of that name in bf16: normal numbers of STD; norms leave their input as it is, about."""
    if name.endswith("norm.weight"):
        return torch.full(shape, 0.0 if "gemma" in config["model_type"] else 1.0, dtype=torch.bfloat16, device=device)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return drawn.normal_(0.0, STD, generator=generator(name, device))


def generator(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def random_nf4(name: str, shape: torch.Size, device: torch.device = DEVICE) -> NF4Store:
    """A weight of about STD made of random codes and scales, with double quantisation, never dense."""
    drawn, count = generator(name, device), math.prod(shape)
    blocks = -(-count // 64)

    def codes(size: int) -> Tensor:
        return torch.randint(256, (size,), dtype=torch.uint8, device=device, generator=drawn)

    largest = STD / 0.55  # codes are even, and the root mean square of the 16 values is about 0.55
    nested = torch.full((-(-blocks // NESTED),), largest / 4, device=device)
    offset = torch.full((1,), largest, device=device)
    return NF4Store(codes((count + 1) // 2), codes(blocks), nested, dynamic_map().to(device), offset, shape=shape)


def build(config: dict[str, Any], bits: int, device: torch.device = DEVICE) -> Model:
    """The model, frozen, in bf16 with its projections in ``bits``; one dense tensor exists at a time."""
    model = on_meta(config)
    projections = {f"{path}.weight" for path, _ in find_targets(model, "all-linear")} if bits < 16 else set()
    codes = bits == 4 and sum(p.numel() for p in model.parameters()) > LARGE
    for name, meta in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        delattr(owner, leaf)
        held: Store | nn.Parameter
        if name not in projections:
            held = nn.Parameter(values(name, meta.shape, config, device), requires_grad=False)
        elif codes:
            held = random_nf4(name, meta.shape, device)
        else:
            held = {4: NF4Store, 8: FP8Store}[bits].from_dense(values(name, meta.shape, config, device))
        setattr(owner, leaf, held)
    model.tie()
    return model.requires_grad_(False).eval()


@torch.no_grad()
def same_adapters(module: nn.Module) -> None:
    """Draw each A anew from its projection's name, whoever made it: uniform in ±1/√in."""
    for name, parameter in module.named_parameters():
        if ".lora_A." in name:
            path = name[name.index("layers.") : name.index(".lora_A.")]
            drawn = torch.empty(parameter.shape, device=parameter.device)
            bound = parameter.shape[1] ** -0.5
            parameter.copy_(drawn.uniform_(-bound, bound, generator=generator(path, parameter.device)))


def write(config: dict[str, Any], folder: Path, shard: int = 4 << 30) -> None:
    """The same weights as a bf16 checkpoint, with a tokenizer of numbers (some peers want one)."""
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "dtype": "bfloat16"}
    (unfinished / "config.json").write_text(json.dumps(config | special, indent=1))
    held: dict[str, Tensor] = {}
    places: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(held, unfinished / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(held, name))
        held.clear()

    for name, meta in on_meta(config).named_parameters():
        held[name] = values(name, meta.shape, config).cpu()
        if sum(t.nbytes for t in held.values()) > shard:
            flush()
    flush()
    index = {"metadata": {"total_size": sum(f.stat().st_size for f in unfinished.glob("*.safetensors"))}}
    (unfinished / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": places}))
    _tokenizer(config["vocab_size"], unfinished)
    unfinished.rename(folder)


def _tokenizer(size: int, folder: Path) -> None:
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    vocab = {token: i for i, token in enumerate([*special, *(f"w{i}" for i in range(4, size))])}
    state = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False}
            for i, token in enumerate(special)
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(state))
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))


def checkpoint(name: str) -> Path:
    """Where the checkpoint of a model lies between runs."""
    return Path(tempfile.gettempdir()) / "lorarun-bench" / name


def warm_up(batch: int, seq: int) -> int:
    """How many steps come before those that are timed: each of the four batches once, unless that takes minutes."""
    return 4 if batch * seq <= 65_536 else 1


def batches(vocab: int, batch: int, seq: int, documents: int | None = None, count: int = 4) -> Iterator[Batch]:
    """``count`` batches of random ids, all supervised; endless by repeating them.

    documents: about how many tokens each has (half to one and a half times that); then a batch is one packed row of
    batch · seq tokens, otherwise [batch, seq].  The first token of a document is no label.
    """
    drawn = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        shape = (batch, seq) if documents is None else (1, batch * seq)
        ids = torch.randint(4, vocab, shape, generator=drawn)
        if documents is None:
            made.append(Batch(ids, ids.clone()))
            continue
        total, lengths = batch * seq, list[int]()
        while sum(lengths) < total:
            length = int(torch.randint(documents // 2, documents * 3 // 2 + 1, (), generator=drawn))
            lengths.append(min(length, total - sum(lengths)))
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        made.append(Batch(ids, ids.where(positions > 0, -100), positions, numbers))
    while True:
        yield from made
