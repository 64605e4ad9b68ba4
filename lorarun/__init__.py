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
from lorarun.lora import adapters_disabled, add_lora, lora_parameters, merge, unmerge, use_adapter
from lorarun.memory import plan
from lorarun.preview import preview
from lorarun.publish import push_to_hub
from lorarun.report import report
from lorarun.train import evaluate, loss

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Cache",
    "adapters_disabled",
    "add_lora",
    "batches",
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
    "unmerge",
    "use_adapter",
]
