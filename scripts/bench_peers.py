#!/usr/bin/env python3
"""The peers' side of the benchmarks, one peer a process, since some of them patch torch and transformers on import.

    python scripts/bench_peers.py kernels liger|unsloth [WORDS]   # their kernels at the shapes of bench_kernels.py
    python scripts/bench_peers.py train PEER SETTINGS             # training steps; SETTINGS is JSON, see bench_train.py
    python scripts/bench_peers.py decode PEER SETTINGS            # generated tokens, see bench_decode.py

Prints one JSON object a line; ``failed`` says why there is no figure.  Their functions are called as their own model
patches call them; gradients are asked for inputs only, as norms and heads are frozen under LoRA.  An object's ``row``
is the name of our row that does the same work.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

if any(word.startswith("unsloth") for word in sys.argv[2:3]):
    import unsloth  # noqa: F401  # before torch and transformers are used, as it asks for

import torch
from bench_models import CONFIGS, RANK, batches, same_adapters, warm_up
from bench_timing import (
    DEVICE,
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    INNER,
    KV,
    ROWS,
    VOCAB,
    begin,
    measure_either_way,
    random,
    reason,
    timed_steps,
    training_step,
)
from torch import Tensor

from lorarun.data import Batch

Call = Callable[[], Any]
Rows = Iterator[tuple[str, Callable[[], Call]]]  # a row's name, and what builds the call that is timed


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def backward(outputs: Any, inputs: list[Tensor], grads: Any) -> Call:
    return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)


def rotary_inputs(base: tuple[int, int] = (4, 2048)) -> tuple[list[Tensor], Tensor, Tensor]:
    """q and k [batch, heads, seq, head_dim] as transformers has them, views of [batch, seq, ...]; tables."""
    heads = [random(*base, count, DIM).transpose(1, 2).requires_grad_() for count in (HEADS, KV)]
    angles = torch.rand(base[1], DIM // 2, device=DEVICE) * 50
    angles = torch.cat((angles, angles), dim=-1)
    return heads, angles.cos().bfloat16(), angles.sin().bfloat16()


def liger_kernels() -> Rows:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Norm  # noqa: PLC0415
    from liger_kernel.ops.fused_linear_cross_entropy import (  # noqa: PLC0415
        LigerFusedLinearCrossEntropyFunction as Loss,
    )
    from liger_kernel.ops.rope import LigerRopeFunction as Rope  # noqa: PLC0415
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction as SwiGLU  # noqa: PLC0415

    x, delta, w = random(ROWS, HIDDEN).requires_grad_(), random(ROWS, HIDDEN).requires_grad_(), random(HIDDEN)

    def norm() -> Any:
        return Norm.apply(x, delta, w, 1e-5, 0.0, "llama", False)

    yield "add+norm forward", lambda: norm
    yield "add+norm backward", lambda: backward(norm(), [x, delta], [random(ROWS, HIDDEN) for _ in "ys"])
    gate, up = random(ROWS, INNER).requires_grad_(), random(ROWS, INNER).requires_grad_()
    yield "SwiGLU forward", lambda: lambda: SwiGLU.apply(gate, up)
    yield "SwiGLU backward", lambda: _liger_swiglu_backward(gate, up)
    heads, cos, sin = rotary_inputs()
    given = [h.detach() for h in heads]
    yield "rotary forward", lambda: lambda: Rope.apply(*given, cos[None], sin[None])
    # Its Function rotates in place, which leaves of a graph cannot be; the gradient takes the same kernel.
    yield "rotary backward", lambda: _liger_rope_backward(given, cos[None], sin[None])
    hidden, head = random(ROWS, HIDDEN).requires_grad_(), random(VOCAB, HIDDEN, scale=HIDDEN**-0.5)
    goal = torch.randint(VOCAB, (ROWS,), device=DEVICE)
    yield "linear + cross-entropy", lambda: lambda: Loss.apply(hidden, head, goal)


def _liger_swiglu_backward(gate: Tensor, up: Tensor) -> Call:
    from liger_kernel.ops.swiglu import swiglu_backward  # noqa: PLC0415

    a, b, dy = gate.detach(), up.detach(), random(ROWS, INNER)
    return lambda: swiglu_backward(a, b, dy)


def _liger_rope_backward(given: list[Tensor], cos: Tensor, sin: Tensor) -> Call:
    from liger_kernel.ops.rope import rope_backward  # noqa: PLC0415

    return lambda: rope_backward(*given, cos, sin)


def unsloth_kernels() -> Rows:
    import bitsandbytes.functional as bnb  # noqa: PLC0415
    from unsloth.kernels import rms_layernorm, rope_embedding, swiglu, utils  # noqa: PLC0415

    x, delta, w = random(ROWS, HIDDEN).requires_grad_(), random(ROWS, HIDDEN), random(HIDDEN)
    layer = SimpleNamespace(weight=w, variance_epsilon=1e-5)

    def norm(stream: Tensor) -> Tensor:
        y: Tensor = rms_layernorm.fast_rms_layernorm(layer, stream)
        return y

    def norm_backward() -> Call:
        y, dy = norm(x), random(ROWS, HIDDEN)
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)[0] + delta

    yield "add+norm forward", lambda: lambda: norm(x + delta)
    yield "add+norm backward", norm_backward
    gate, up, dy = (random(4, ROWS // 4, INNER) for _ in range(3))
    yield "SwiGLU forward", lambda: lambda: swiglu.swiglu_fg_kernel(gate, up)
    flat = [t.flatten(0, 1) for t in (dy, gate, up)]
    yield "SwiGLU backward", lambda: lambda: swiglu.swiglu_DWf_DW_dfg_kernel(*flat)
    heads, cos, sin = rotary_inputs()
    given = [h.detach() for h in heads]
    yield "rotary forward", lambda: lambda: rope_embedding.fast_rope_embedding(*given, cos, sin)

    def rope_backward() -> Call:
        out = rope_embedding.fast_rope_embedding(*heads, cos, sin)
        return backward(out, heads, [torch.randn_like(h) for h in heads])

    yield "rotary backward", rope_backward
    dense = [random(*shape, scale=0.02) for group in GROUPS for shape in group]
    held = [bnb.quantize_4bit(weight, compress_statistics=True, quant_type="nf4") for weight in dense]
    yield "NF4 dequantise, a layer", lambda: lambda: [utils.fast_dequantize(*each) for each in held]


def kernels(peer: str, words: list[str]) -> None:
    for name, build in {"liger": liger_kernels, "unsloth": unsloth_kernels}[peer]():
        if words and not any(word in name for word in words):
            continue
        try:
            ms, captured = measure_either_way(build())
            say(row=name, ms=ms, captured=captured)
        except Exception as problem:
            say(row=name, failed=reason(problem))


# --- training --------------------------------------------------------------------------------------------------------

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def unsloth_model(settings: dict[str, Any], checkpointing: bool) -> Any:
    """Unsloth's way; with checkpointing it is its own kind, the default."""
    from unsloth import FastLanguageModel  # noqa: PLC0415

    packed = settings["documents"] is not None
    model, _ = FastLanguageModel.from_pretrained(
        settings["folder"], max_seq_length=settings["seq"] * (settings["batch"] if packed else 1),
        dtype=torch.bfloat16, load_in_4bit=settings["bits"] == 4, load_in_8bit=settings["bits"] == 8,
        load_in_16bit=settings["bits"] == 16, use_exact_model_name=True,
    )  # fmt: skip
    return FastLanguageModel.get_peft_model(
        model, r=RANK, target_modules=TARGETS, lora_alpha=RANK, lora_dropout=settings["dropout"], bias="none",
        use_gradient_checkpointing="unsloth" if checkpointing else False, random_state=0,
    )  # fmt: skip


def transformers_model(settings: dict[str, Any], liger: bool, checkpointing: bool) -> Any:
    """transformers with PEFT, and bitsandbytes where weights are quantised; ``liger``: with its kernels in it."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: PLC0415

    if liger:
        import liger_kernel.transformers as kernels  # noqa: PLC0415

        getattr(kernels, f"apply_liger_kernel_to_{CONFIGS[settings['model']]['model_type']}")()
    stored = {
        4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        | {"bnb_4bit_compute_dtype": torch.bfloat16},
        8: {"load_in_8bit": True},
    }.get(settings["bits"])
    model = AutoModelForCausalLM.from_pretrained(
        settings["folder"], dtype=torch.bfloat16, device_map={"": DEVICE}, attn_implementation="sdpa",
        quantization_config=None if stored is None else BitsAndBytesConfig(**stored),
    )  # fmt: skip
    model.requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        model.enable_input_require_grads()
    lora = LoraConfig(
        r=RANK, lora_alpha=RANK, lora_dropout=settings["dropout"], target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, lora)


def peer_model(peer: str, settings: dict[str, Any]) -> Any:
    who, _, off = peer.partition("-")
    if who == "unsloth":
        model = unsloth_model(settings, not off)
    elif who in ("hf", "liger"):
        model = transformers_model(settings, who == "liger", not off)
    else:
        raise ValueError(f"no peer is named {peer}")
    same_adapters(model)
    return model.train()


def peer_loss(model: Any, batch: Batch, unsloth: bool) -> Tensor:
    """The mean loss by the stack's own training path; packed documents are told by their positions."""
    given = {"input_ids": batch.ids.to(DEVICE), "labels": batch.labels.to(DEVICE)}
    if batch.documents is not None and batch.positions is not None:
        given["position_ids"] = batch.positions.to(DEVICE)
        if unsloth:
            given["packed_seq_lengths"] = torch.unique_consecutive(batch.documents[0], return_counts=True)[1].int()
    # With its cache on, transformers looks past the positions and lets documents see each other.
    loss: Tensor = model(**given).loss if unsloth else model(**given, use_cache=False).loss
    return loss


def train(peer: str, settings: dict[str, Any]) -> None:
    model = peer_model(peer, settings)
    made = batches(CONFIGS[settings["model"]]["vocab_size"], settings["batch"], settings["seq"], settings["documents"])
    parameters = [p for p in model.parameters() if p.requires_grad]
    step = training_step(parameters, lambda: peer_loss(model, next(made), peer.startswith("unsloth")))
    found = timed_steps(step, settings["steps"], warm_up(settings["batch"], settings["seq"]))
    say(**found, trained=sum(p.numel() for p in parameters))


def decode(peer: str, settings: dict[str, Any]) -> None:
    """Tokens a second of whole calls, by batch × prompt."""
    model = peer_model(peer, settings).eval()
    if peer == "unsloth":
        from unsloth import FastLanguageModel  # noqa: PLC0415

        FastLanguageModel.for_inference(model)
    found = {}
    for length in settings["prompt"]:
        for batch in settings["batch"]:
            ids = torch.randint(4, CONFIGS[settings["model"]]["vocab_size"], (batch, length), device=DEVICE)
            how = {"max_new_tokens": settings["new"], "min_new_tokens": settings["new"], "do_sample": False}

            def call(ids: Tensor = ids, how: dict[str, Any] = how) -> None:
                with torch.inference_mode():
                    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)
                torch.cuda.synchronize()

            call()
            start = time.perf_counter()
            call()
            found[f"{batch}x{length}"] = batch * settings["new"] / (time.perf_counter() - start)
    say(**found)


def main() -> None:
    what, peer, *rest = sys.argv[1:]
    try:
        if what == "train":
            train(peer, json.loads(rest[0]))
        elif what == "decode":
            decode(peer, json.loads(rest[0]))
        else:
            begin()
            kernels(peer, rest)
    except Exception as problem:
        say(failed=reason(problem))
        sys.exit(1)


if __name__ == "__main__":
    main()
