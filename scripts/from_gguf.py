"""Turn a GGUF file of SmolLM2 or Gemma 3 into the folder that a model hub would give.

The package registries carry these two only as GGUF. lorarun reads such files itself; the demo and the tests want a
folder, as most models come. So this writes what lorarun makes of the file: `config.json`, bfloat16 weights and the
tokenizer. The weights are pinned by their digest in `tests/reference`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from lorarun.gguf_config import gguf_config
from lorarun.gguf_read import open_gguf
from lorarun.gguf_vocab import write_files

ARCHITECTURES = {"llama": "LlamaForCausalLM", "gemma3": "Gemma3ForCausalLM"}
# The file holds the pretrained model, which has no template. With this one, which is Gemma's documented turn format (a
# system message goes before the first user turn), it can learn to answer.
GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(prefix='') -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {%- if not loop.first -%}
            {{- raise_exception('A system message must come first') -}}
        {%- endif -%}
        {%- set ns.prefix = message['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
        {{- '<start_of_turn>' + role + '\\n' + ns.prefix -}}
        {{- message['content'] | trim + '<end_of_turn>\\n' -}}
        {%- set ns.prefix = '' -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""


def convert(path: Path, folder: Path) -> None:
    """Write the model in the GGUF file `path`, of SmolLM2 or Gemma 3, to the existing `folder`."""
    file = open_gguf(path)
    config = {"architectures": [ARCHITECTURES[file.arch]], **gguf_config(file)}
    write_files(file, config, folder, GEMMA_TEMPLATE if file.arch == "gemma3" else None)
    bar = tqdm(file.read(file.entries), "  dequantising", len(file.entries), unit=" tensors", disable=None)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in bar}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
