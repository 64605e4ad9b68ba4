"""Reading checkpoints: what is refused and how it is said, what is read compared with safetensors and transformers, and
how much memory it takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lorarun.checkpoint import fill, open_checkpoint, read_config
from lorarun.headers import DTYPES

ROOT = Path(__file__).resolve().parent.parent


def sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    full = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": full if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def three(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    shards = {f"model-{n}-of-3.safetensors": {f"model.layers.{n}.w": torch.full((4,), float(n))} for n in (1, 2, 3)}
    return sharded(folder, shards, weight_map)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


# --- headers -------------------------------------------------------------------------------------------------------


def test_every_dtype_reads_as_safetensors_reads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        f"t.{name}": torch.randint(0, 2, (3, 5)).to(dtype) if dtype is torch.bool else torch.randn(3, 5).abs().to(dtype)
        for name, dtype in DTYPES.items()
    }
    tensors |= {
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 7),
        "odd.bytes": torch.ones(3, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.entries) == set(tensors)
    for mmap in (True, False):
        read = dict(checkpoint.read(list(tensors), mmap))
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
            assert bits(read[name]).equal(bits(tensor))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert list(checkpoint.entries) == file.offset_keys()


def test_reading_is_in_file_order_and_only_of_what_is_asked(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(three(tmp_path))
    wanted = ["model.layers.3.w", "model.layers.1.w"]
    assert [name for name, _ in checkpoint.read(wanted)] == ["model.layers.1.w", "model.layers.3.w"]
    with pytest.raises(ValueError, match=r"holds no tensor model\.layers\.9\.w"):
        list(checkpoint.read(["model.layers.9.w"]))


def test_every_fault_of_every_shard_is_in_one_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shards = {f"model-{n}-of-6.safetensors": {f"model.layers.{n}.w": torch.ones(4)} for n in range(1, 7)}
    sharded(folder, shards)
    files = {n: folder / f"model-{n}-of-6.safetensors" for n in range(1, 7)}
    files[1].unlink()
    files[2].unlink()
    files[2].symlink_to(tmp_path / "removed-blob")
    files[3].write_bytes(b"")
    files[4].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    files[5].write_bytes(files[5].read_bytes()[:-3])
    with pytest.raises(ValueError) as caught:
        open_checkpoint(folder)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"The checkpoint in {folder} cannot be loaded:"
    assert lines[1:-1] == [
        "  - 2 of 6 shards are not there: model-1-of-6.safetensors, model-2-of-6.safetensors (a dangling link)",
        "  - model-3-of-6.safetensors is empty",
        "  - model-4-of-6.safetensors is a git-lfs pointer, not the weights (run `git lfs pull`)",
        "  - model-5-of-6.safetensors is cut short: 93 of 96 bytes, which cuts off 1 of its 1 tensors",
    ]
    assert lines[-1].startswith("Was a download interrupted?")


def shard_of(name: str, n: int) -> dict[str, str]:
    return {f"model.layers.{name}.w": f"model-{n}-of-3.safetensors"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (shard_of("1", 1) | shard_of("3", 3), None),  # a whole shard that the index does not name is not looked at
        (
            shard_of("2", 1) | shard_of("1", 1),
            r"in model-1-of-3\.safetensors what it does not hold: model\.layers\.2\.w",
        ),
        (
            shard_of("7", 2) | shard_of("2", 2),
            r"in model-2-of-3\.safetensors what it does not hold: model\.layers\.7\.w",
        ),
        (shard_of("7", 2), r"does not name 1 tensors that the shards hold: model\.layers\.2\.w"),
        (shard_of("1", 1) | shard_of("4", 4), r"1 of 2 shards are not there: model-4-of-3\.safetensors"),
    ],
)
def test_index_and_shards_must_agree(tmp_path: Path, weight_map: dict[str, str], message: str | None) -> None:
    """huggingface/huggingface_hub#4728 and NVIDIA/TensorRT-LLM#16437: what was left out silently became a default."""
    folder = three(tmp_path, weight_map)
    if message is None:
        assert list(open_checkpoint(folder).entries) == list(weight_map)
        return
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    folder = three(tmp_path)
    both = {f"model.layers.{n}.w": torch.ones(4) for n in (2, 3)}
    save_file(both, folder / "model-3-of-3.safetensors")
    with pytest.raises(
        ValueError, match=r"model-2-of-3\.safetensors and model-3-of-3\.safetensors both hold model\.la"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "w.bin", "c:w"])
def test_an_index_cannot_reach_outside_its_folder(tmp_path: Path, file: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"names files that are not plain names in this folder: " + re.escape(file)):
        open_checkpoint(sharded(tmp_path / "m", {}, {"w": file}))


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": []}', '{"weight_map": {"w": 3}}', '{"metadata": {}}'])
def test_an_index_that_is_none_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    says = r'index\.json (is not valid JSON|must hold a JSON object|must have a "weight_map" from)'
    with pytest.raises(ValueError, match=says):
        open_checkpoint(tmp_path)


def test_two_checkpoints_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = three(tmp_path)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds both model\.safetensors and .* remove it"):
        open_checkpoint(folder)
    sharded(folder, {"model.safetensors": {"w": torch.ones(2)}})  # an index of that one file is fine
    assert list(open_checkpoint(folder).entries) == ["w"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "pytorch_model.bin",
            r"holds pickles \(pytorch_model\.bin\), which run code when they are opened and are never",
        ),
        ("adapter_model.safetensors", r"it is an adapter: load its base model and pass this folder as adapter="),
        ("model-00001-of-00002.safetensors", r"of which no index says what belongs together"),
        ("README.md", r"expected a folder as Hugging Face's save_pretrained writes it"),
    ],
)
def test_a_folder_without_a_checkpoint_says_what_it_is(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(
        ValueError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json; .*" + message
    ):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere is not a folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"has no config\.json; expected a folder with"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no config\.json; it is an adapter"):
        read_config(tmp_path)
    for text, message in (
        ("version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        ('{"a": ', "is not valid JSON"),
        ("[1]", "must hold a JSON object, got a list"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path)
    path.write_text('{"model_type": "llama", "rope_scaling": null}')
    assert read_config(str(tmp_path)) == {"model_type": "llama", "rope_scaling": None}


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_cut_after_it_was_checked_is_an_exception(tmp_path: Path, mmap: bool) -> None:
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    reading = checkpoint.read(["a", "b"], mmap)
    assert next(reading)[0] == "a"
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(6000)
    with pytest.raises(
        OSError, match=r"model\.safetensors (changed while b was read|ended after \d+ of the 4000 bytes)"
    ):
        next(reading)


MEASURE = """
import sys, json, torch
from torch import nn
from lorarun.checkpoint import fill, open_checkpoint
torch.set_num_threads(2)

def peak():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) * 1024

def reads():
    return int(dict(line.split(":") for line in open("/proc/self/io"))["syscr"])

checkpoint = open_checkpoint(sys.argv[1])
with torch.device("meta"):
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(e.shape)) for name, e in checkpoint.entries.items()})
small = torch.zeros(8).to(torch.bfloat16)  # whatever torch sets up for a cast
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before, calls = peak(), reads()
fill(model, checkpoint, getattr(torch, sys.argv[2]), "cpu", mmap=sys.argv[3] == "mmap")
print(json.dumps({"peak": peak() - before, "reads": reads() - calls}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's own count of a process's peak")
@pytest.mark.parametrize(("mode", "dtype"), [("mmap", "float32"), ("mmap", "bfloat16"), ("plain", "float32")])
def test_host_memory_stays_below_the_model_and_its_largest_tensor(tmp_path: Path, mode: str, dtype: str) -> None:
    """300 MB of fp32 in two files, the model in the same dtype or in half of it. A mapping of a whole shard, or a
    second copy, would be 150 MB or more above what is allowed."""
    rows, columns, count = 3072, 1024, 24
    size = rows * columns * 4
    for shard in (1, 2):
        names = [f"layer{n}" for n in range(count) if n % 2 == shard % 2]
        spec = {"dtype": "F32", "shape": [rows, columns]}
        header = {name: spec | {"data_offsets": [i * size, (i + 1) * size]} for i, name in enumerate(names)}
        text = json.dumps(header).encode()
        with open(tmp_path / f"model-{shard}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size * len(names))  # zeros that take no disk
    weight_map = {f"layer{n}": f"model-{1 if n % 2 else 2}.safetensors" for n in range(count)}
    sharded(tmp_path, {}, weight_map)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), dtype, mode],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    used = json.loads(done.stdout)
    model = count * size if dtype == "float32" else count * size // 2
    slack = 8 * 2**20  # the allocator's and Python's own
    assert 0.9 * model < used["peak"] < model + size + slack
    if mode == "plain":  # the file is read in one piece per tensor, whatever the network makes of it
        assert used["reads"] < count + 30


# --- into a model --------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(6, 3)
        self.layers = nn.ModuleList([Layer(), Layer()])


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.model = Inner()
        self.lm_head = nn.Linear(3, 6, bias=False)
        self.tied = tied
        if tied:
            self.tie()

    def tie(self) -> None:
        self.lm_head.weight = self.model.embed_tokens.weight


def meta(tied: bool = False) -> Model:
    with torch.device("meta"):
        return Model(tied)


def weights(tied: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    state = {name: torch.randn_like(tensor) for name, tensor in Model().state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    return state


def saved(folder: Path, tensors: dict[str, torch.Tensor], config: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(config)
    return folder


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fill_puts_every_tensor_in_its_place(tmp_path: Path, dtype: torch.dtype, mmap: bool) -> None:
    state = weights()
    model = meta()
    fill(model, open_checkpoint(saved(tmp_path, state)), dtype, "cpu", mmap)
    with open(tmp_path / "model.safetensors", "r+b") as file:  # the model does not live in the file
        file.write(b"\xff" * (tmp_path / "model.safetensors").stat().st_size)
    for name, tensor in model.state_dict().items():
        assert tensor.equal(state[name].to(dtype)) and tensor.dtype == dtype
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("mmap", [True, False])
def test_fill_puts_every_tensor_on_the_device(tmp_path: Path, mmap: bool) -> None:
    state = weights()
    model = meta()
    fill(model, open_checkpoint(saved(tmp_path, state)), torch.bfloat16, "cuda", mmap)
    for name, tensor in model.state_dict().items():
        assert tensor.is_cuda and tensor.cpu().equal(state[name].to(torch.bfloat16))


def test_every_misfit_is_in_one_error_before_anything_is_read(tmp_path: Path) -> None:
    state = weights()
    del state["model.layers.0.up.weight"], state["model.layers.1.up.weight"]
    state["model.layers.0.up.bias"] = torch.ones(5)
    state["model.layers.1.up.bias"] = torch.ones(5)
    state["lm_head.weight"] = torch.ones(6, 3, dtype=torch.int32)
    state["model.layers.2.up.bias"] = torch.ones(4)
    model = meta()
    with pytest.raises(ValueError) as caught:
        fill(model, open_checkpoint(saved(tmp_path, state)), torch.float32, "cpu")
    assert str(caught.value).splitlines()[1:] == [
        "  - 2 of 6 tensors are missing: model.layers.{0-1}.up.weight",
        "  - 1 tensors are unexpected: model.layers.2.up.bias",
        "  - shape [5] instead of [4]: model.layers.{0-1}.up.bias",
        "  - dtype int32 instead of a floating-point one: lm_head.weight",
    ]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_old_rotary_entries_are_ignored(tmp_path: Path) -> None:
    extra = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in (0, 1)}
    fill(meta(), open_checkpoint(saved(tmp_path, weights() | extra)), torch.float32, "cpu")


@pytest.mark.parametrize("stored", [("embed",), ("head",), ("embed", "head")])
def test_tied_heads(tmp_path: Path, stored: tuple[str, ...]) -> None:
    state = weights(tied=True)
    table = state.pop("model.embed_tokens.weight")
    if "embed" in stored:
        state["model.embed_tokens.weight"] = table.clone()
    if "head" in stored:
        state["lm_head.weight"] = table.clone()
    model = meta(tied=True)
    fill(model, open_checkpoint(saved(tmp_path, state)), torch.float32, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.equal(table)


def test_a_head_that_is_tied_and_differs_is_an_error(tmp_path: Path) -> None:
    state = weights(tied=True)
    head = state["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1e-6 * head[-1, -1].abs() + 1e-6
    with pytest.raises(
        ValueError, match=r"model\.embed_tokens\.weight and lm_head\.weight differ|lm_head\.weight and model"
    ):
        fill(meta(True), open_checkpoint(saved(tmp_path, state | {"lm_head.weight": head})), torch.float32, "cpu")
    del state["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"1 of 5 tensors are missing: model\.embed_tokens\.weight"):
        fill(meta(True), open_checkpoint(saved(tmp_path, state)), torch.float32, "cpu")


@pytest.mark.parametrize("layout", ["language_model.model", "model.language_model"])
def test_a_text_model_in_a_multimodal_checkpoint(tmp_path: Path, layout: str) -> None:
    """sgl-project/sglang#11260: both layouts that Gemma 3 was published in."""
    state = weights()
    head = "language_model.lm_head.weight" if layout.startswith("language") else "lm_head.weight"
    stored = {
        name.replace("model.", layout + ".", 1): tensor for name, tensor in state.items() if "lm_head" not in name
    }
    outer = "" if layout.startswith("language") else "model."
    vision = {f"{outer}vision_tower.patch.weight": torch.ones(2), f"{outer}multi_modal_projector.w": torch.ones(2)}
    checkpoint = open_checkpoint(saved(tmp_path, stored | vision | {head: state["lm_head.weight"]}))
    model = meta()
    fill(model, checkpoint, torch.float32, "cpu", nested=True)
    assert all(tensor.equal(state[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match=r"tensors are unexpected: .*vision_tower"):
        fill(meta(), checkpoint, torch.float32, "cpu")
    twice = stored | {"model.embed_tokens.weight": torch.ones(6, 3), head: state["lm_head.weight"]}
    with pytest.raises(
        ValueError, match=r"embed_tokens\.weight and .*embed_tokens\.weight are the same tensor of the mod"
    ):
        fill(meta(), open_checkpoint(saved(tmp_path, twice)), torch.float32, "cpu", nested=True)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"lm_head.weight": torch.ones(9, dtype=torch.uint8)}, "{}", r"uint8: lm_head\.weight"),
        ({"lm_head.weight": torch.ones(6, 3).to(torch.float8_e4m3fn)}, "{}", r"float8_e4m3fn: lm_head\.weight"),
        ({}, '{"quantization_config": {"quant_method": "gptq"}}', r"quantised checkpoint \(gptq\)"),
        ({}, '{"text_config": {"quantization_config": {"quant_method": "awq"}}}', r"quantised checkpoint \(awq\)"),
    ],
)
def test_quantised_checkpoints_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: str, message: str
) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, weights() | tensors, config))
    with pytest.raises(ValueError, match=message):
        fill(meta(), checkpoint, torch.float32, "cpu")


def test_the_dtype_of_a_checkpoint_is_that_of_most_weights(tmp_path: Path) -> None:
    mixed = {"norm": torch.ones(4), "w": torch.ones(4, 4, dtype=torch.bfloat16), "code": torch.ones(99).to(torch.int8)}
    assert open_checkpoint(saved(tmp_path, mixed)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="holds no floating-point tensor"):
        _ = open_checkpoint(saved(tmp_path, {"code": torch.ones(4).to(torch.int8)})).dtype


# --- checkpoints that transformers wrote, into models that transformers built ---------------------------------------


@pytest.mark.parametrize("name", ["llama3", "llama3-sharded", "llama-tied", "qwen3-sharded"])
@pytest.mark.parametrize("mmap", [True, False])
def test_fill_agrees_with_transformers(tiny: Callable[[str], Path], name: str, mmap: bool) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32)
    with torch.device("meta"):
        ours = transformers.AutoModelForCausalLM.from_config(theirs.config)
    tied = theirs.config.tie_word_embeddings
    if tied:
        ours.lm_head.weight = ours.model.embed_tokens.weight
        ours.tie = lambda: setattr(ours.lm_head, "weight", ours.model.embed_tokens.weight)
    fill(ours, open_checkpoint(tiny(name)), torch.float32, "cpu", mmap)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in ours.state_dict().items())
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied


def test_a_nested_checkpoint_agrees_with_transformers(tiny: Callable[[str], Path]) -> None:
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tiny("gemma3"), dtype=torch.float32)
    with torch.device("meta"):
        ours = transformers.Gemma3ForCausalLM(theirs.config.text_config)
    ours.lm_head.weight = ours.model.embed_tokens.weight
    ours.tie = lambda: setattr(ours.lm_head, "weight", ours.model.embed_tokens.weight)
    fill(ours, open_checkpoint(tiny("gemma3")), torch.float32, "cpu", nested=True)
    text = theirs.model.language_model.state_dict()
    assert all(tensor.equal(text[name]) for name, tensor in ours.model.state_dict().items())
