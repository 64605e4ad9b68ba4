"""lorarun: fine-tune Llama, Qwen and Gemma with LoRA on one GPU, and read how it works.

    model = lorarun.load("llama-3.1-8b-instruct")
    lorarun.add_lora(model, r=16)
    loss = lorarun.loss(model, batch)

Everything is a plain function over a plain ``torch.nn.Module``.  Importing this package changes nothing outside it.
"""

from lorarun.adapter import save_adapter
from lorarun.cache import Cache
from lorarun.data import Batch, batches, supervised
from lorarun.export import save_merged
from lorarun.fit import fit
from lorarun.generate import generate
from lorarun.gguf import save_gguf
from lorarun.load import load, load_adapter
from lorarun.logprobs import logprobs
from lorarun.lora import adapters_disabled, add_lora, lora_parameters, use_adapter
from lorarun.memory import plan
from lorarun.merge import combine_adapters, merge, unmerge
from lorarun.preview import preview
from lorarun.publish import push_to_hub
from lorarun.report import report
from lorarun.tokens import add_tokens, train_all
from lorarun.train import evaluate, loss

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Cache",
    "adapters_disabled",
    "add_lora",
    "add_tokens",
    "batches",
    "combine_adapters",
    "evaluate",
    "fit",
    "generate",
    "load",
    "load_adapter",
    "lora_parameters",
    "logprobs",
    "loss",
    "merge",
    "plan",
    "preview",
    "push_to_hub",
    "report",
    "save_adapter",
    "save_gguf",
    "save_merged",
    "supervised",
    "train_all",
    "unmerge",
    "use_adapter",
]
