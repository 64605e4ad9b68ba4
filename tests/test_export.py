"""Merged checkpoints: the source, byte for byte, but for W + scale · B·A; refused or verified, never half there."""

from __future__ import annotations

import errno
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
import transformers
from hub_server import HubServer
from merging import adapted, leftovers, logits, same_bits, tensors_of
from peft_side import FAMILIES, PROJECTIONS, fill_b, off, reference, with_adapter
from safetensors import safe_open
from safetensors.torch import load_file

from lorarun import export, export_check, export_weights
from lorarun.adapter import save_adapter
from lorarun.export import save_merged
from lorarun.headers import INDEX, read_header
from lorarun.load import load
from lorarun.lora import adapters_disabled, add_lora, lora_parameters, use_adapter
from lorarun.merge import merge

Tiny = Callable[[str], Path]
ROOT = Path(__file__).resolve().parent.parent


# --- what is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, "gemma3", "gemma3-v4config", "qwen3-sharded"])
def test_a_merged_checkpoint(name: str, tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """https://github.com/unslothai/unsloth/issues/869: merged must not be the base, nor anything but base + adapter."""
    source, out = tiny(name), tmp_path / "merged"
    model = adapted(source)
    save_adapter(model, tmp_path / "adapter")
    save_merged(model, out)
    assert model.training  # the verification put it back
    said = capfd.readouterr().err
    assert "writing" in said and "reading back" in said and f"{out} is complete and verified" in said

    # The oracle: PEFT's own product, added in fp32, rounded once to what is stored.
    other = with_adapter(source, tmp_path / "adapter")
    update = {
        path.removeprefix("base_model.model."): module.get_delta_weight("default")
        for path, module in other.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    before, after = tensors_of(source), tensors_of(out)
    assert list(before) == list(after)
    merged = 0
    for key, tensor in after.items():
        path = key.removesuffix(".weight").replace("language_model.model.", "model.language_model.")
        if path not in update:
            assert same_bits(tensor, before[key]), key
            continue
        merged += 1
        exact = before[key].double() + update.pop(path).double()
        assert not torch.equal(tensor, before[key]) and tensor.dtype == torch.bfloat16
        # Half a step of bf16, and a hair for the order in which fp32 sums were added up.
        step = torch.finfo(torch.bfloat16).eps / 2 * 2 ** exact.abs().log2().floor()
        assert ((tensor.double() - exact).abs() <= step * 1.001).all()
    assert merged == len(model.model.layers) * len(PROJECTIONS) and not update
    for file in source.iterdir():
        if file.suffix == ".json" and file.name != INDEX:
            assert (out / file.name).read_bytes() == file.read_bytes()

    # What transformers makes of the folder is the live model but for the rounding of weights.
    model.eval()
    reloaded = logits(reference(out))
    noise = off(logits(reference(out, torch.bfloat16)), reloaded)
    assert off(reloaded, logits(model)) < 2 * noise < 0.2


@pytest.mark.parametrize("name", ["llama-tied", "gemma3"])
def test_in_fp32_the_logits_are_the_live_ones(name: str, tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny(name)).eval()
    save_merged(model, tmp_path / "merged", dtype=torch.float32)
    assert {t.dtype for t in tensors_of(tmp_path / "merged").values()} == {torch.float32}
    other = reference(tmp_path / "merged", dtype="auto")
    assert other.dtype == torch.float32  # config.json says so
    assert (logits(other) - logits(model)).abs().max() < 1e-4


def test_shards_index_and_headers(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("llama3-sharded")
    for dtype, size in ((None, 2), (torch.float32, 4)):
        out = tmp_path / str(dtype)
        save_merged(adapted(source), out, dtype=dtype)
        assert leftovers(out) == [name for name in leftovers(source) if name != "reference.safetensors"]
        index = json.loads((out / INDEX).read_text())
        assert index["weight_map"] == json.loads((source / INDEX).read_text())["weight_map"]
        assert index["metadata"]["total_size"] == sum(t.numel() * size for t in tensors_of(source).values())
        for file in sorted(source.glob("model-*.safetensors")):
            entries = [read_header(folder / file.name, []) for folder in (source, out)]
            assert list(entries[0]) == list(entries[1])  # the order of offsets
            sizes = [entry.end - entry.start for entry in entries[1].values()]
            assert sum(sizes) == sum(size * t.numel() for t in load_file(file).values())
            with safe_open(out / file.name, framework="pt") as opened:
                assert opened.metadata() == {"format": "pt"}
            if dtype is None:
                assert (out / file.name).stat().st_size == file.stat().st_size


def test_the_state_of_the_live_adapter_makes_no_difference(tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny("qwen2"), dtype=torch.bfloat16, rslora=True, targets=["v_proj", "gate_proj"])
    add_lora(model, name="idle", seed=3)
    fill_b(model)
    use_adapter(model, "default")
    save_merged(model, tmp_path / "live")
    merge(model)
    save_merged(model, tmp_path / "in memory")
    file = "model.safetensors"
    assert (tmp_path / "live" / file).read_bytes() == (tmp_path / "in memory" / file).read_bytes()
    before, after = tensors_of(tiny("qwen2")), tensors_of(tmp_path / "live")
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {
        f"model.layers.{i}.{part}.weight" for i in range(4) for part in ("self_attn.v_proj", "mlp.gate_proj")
    }


def test_a_model_loaded_narrower_than_it_is_stored(tiny: Tiny, tmp_path: Path) -> None:
    """By default W is what the adapter was trained on, the rounded weight; `base="original"` takes the stored one."""
    source = tmp_path / "fp32"
    wide = reference(tiny("llama3"))
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.mul_(1 + 1e-4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    wide.save_pretrained(source)
    model = adapted(source, dtype=torch.bfloat16, targets=["q_proj"])
    save_merged(model, tmp_path / "trained on")
    save_merged(model, tmp_path / "original", base="original")
    key = "model.layers.0.self_attn.q_proj.weight"
    stored = tensors_of(source)[key]
    a, b = lora_parameters(model)[:2]
    update = 2.0 * (b @ a).detach()
    for name, base in (("trained on", stored.bfloat16().float()), ("original", stored)):
        assert torch.allclose(tensors_of(tmp_path / name)[key], base + update, rtol=0, atol=1e-6), name
    assert off(stored.bfloat16(), stored) > 1e-4
    embeddings = [tensors_of(folder)["model.embed_tokens.weight"] for folder in (source, tmp_path / "trained on")]
    assert same_bits(*embeddings)


QUANTISED = [("qwen3", 8), *((name, 4) for name in ("llama3", "qwen2", "qwen3", "gemma2", "gemma3-text"))]


@pytest.mark.parametrize(("name", "bits"), QUANTISED)
def test_a_base_that_was_quantised_at_loading(
    name: str, bits: int, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """https://github.com/huggingface/peft/issues/2105: merge into what was trained on, and say so when asked not to.

    What is not a target stays byte for byte, biases of q, k and v among it (https://github.com/unslothai/unsloth/issues/869).
    """
    model = add_lora(load(tiny(name), bits=bits), r=4, alpha=8, targets=["q_proj", "up_proj"], seed=0)
    fill_b(model)
    save_merged(model, tmp_path / "merged")
    before, after = tensors_of(tiny(name)), tensors_of(tmp_path / "merged")
    assert before.keys() == after.keys() and {t.dtype for t in after.values()} == {torch.bfloat16}
    for path, linear in model.named_modules():
        if not path.endswith("_proj"):
            continue
        weight = linear.weight.dequantize(torch.float32)
        if linear.adapters:
            a, b = linear.factors("default")
            weight = weight + 2.0 * (b @ a).detach()
        assert torch.equal(after.pop(f"{path}.weight"), weight.bfloat16()), path
    assert all(same_bits(tensor, before[key]) for key, tensor in after.items())
    model.eval()
    reloaded = logits(reference(tmp_path / "merged"))
    assert off(reloaded, logits(model)) < 2 * off(logits(reference(tmp_path / "merged", torch.bfloat16)), reloaded)

    capsys.readouterr()
    save_merged(model, tmp_path / "original", base="original")
    assert "logits differ from the live model's by" in capsys.readouterr().err
    again = tensors_of(tmp_path / "original")
    key = "model.layers.0.self_attn.q_proj.weight"
    a, b = model.model.layers[0].self_attn.q_proj.factors("default")
    assert torch.equal(again[key], (before[key].float() + 2.0 * (b @ a).detach()).bfloat16())
    assert same_bits(again["model.layers.0.self_attn.v_proj.weight"], before["model.layers.0.self_attn.v_proj.weight"])


def test_views_and_tied_tables(tiny: Tiny, tmp_path: Path) -> None:
    """The live model's memory may be laid out in any way: https://github.com/safetensors/safetensors/issues/202"""
    model = adapted(tiny("llama-tied"), targets=["q_proj", "k_proj"])
    save_merged(model, tmp_path / "plain")
    for block in model.model.layers:
        parts = [block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj]
        fused = torch.cat([part.weight.data for part in parts])
        for part, view in zip(parts, fused.split([part.out_features for part in parts]), strict=True):
            part.weight.data = view
        block.mlp.up_proj.weight.data = block.mlp.up_proj.weight.data.t().contiguous().t()
    for factor in lora_parameters(model):
        factor.data = factor.data.t().contiguous().t()
    save_merged(model, tmp_path / "views")
    save_merged(adapted(tmp_path / "views", targets=["o_proj"]), tmp_path / "again")
    file = "model.safetensors"
    assert (tmp_path / "views" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert set(tensors_of(tmp_path / "views")) == set(tensors_of(tiny("llama-tied")))
    assert "lm_head.weight" not in tensors_of(tmp_path / "views")  # written once, as it was stored


def test_other_files_of_the_folder(tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny("llama-tied"), tmp_path / "source")
    toy.make(source)
    (source / "additional_chat_templates").mkdir()
    wanted = ["vocab.json", "merges.txt", "tokenizer.model", "LICENSE", "preprocessor_config.json"]
    wanted += ["additional_chat_templates/tool.jinja", "generation_config.json", "tokenizer.json"]
    for name in wanted:
        if not (source / name).exists():
            (source / name).write_bytes(b"{}\r\n")
    for name in ("pytorch_model.bin", "README.md", "adapter_config.json", "model.gguf", "pytorch_model.bin.index.json"):
        (source / name).write_text("{}")
    model = add_lora(load(source, template="chatml"), targets=["q_proj"], seed=0)
    fill_b(model)
    save_merged(model, tmp_path / "merged")
    out = tmp_path / "merged"
    made = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert made == {*wanted, "config.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"}
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in [*wanted, "tokenizer_config.json"])
    chat = [{"role": "user", "content": "fox"}]
    theirs = transformers.AutoTokenizer.from_pretrained(out).apply_chat_template(chat, tokenize=False)
    assert theirs == model.tokenizer.render(chat) == load(out).tokenizer.render(chat)


# --- what is refused before any work -------------------------------------------------------------------------------


def test_refusals(tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny("llama3"), targets=["q_proj"])
    out = tmp_path / "merged"
    for arguments, message in (
        ({"bits": 2}, "bits=2 is not supported; 16, 8 and 4 are"),
        ({"base": "nf4"}, "base='nf4' is not known; expected 'dequantized' or 'original'"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            save_merged(model, out, **arguments)
    with adapters_disabled(model), pytest.raises(ValueError, match="no adapter is active; the model has default"):
        save_merged(model, out)
    with pytest.raises(ValueError, match="no adapter is active; the model has none"):
        save_merged(load(tiny("llama3")), out)
    gemma = adapted(tiny("gemma2"), targets=["q_proj"])
    gemma.fp16 = False
    with pytest.raises(ValueError, match="this model overflows in float16"):
        save_merged(gemma, out, dtype=torch.float16)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").touch()
    for taken in ("full", "file"):
        with pytest.raises(ValueError, match=f"{taken} exists already; give a new folder"):
            save_merged(model, tmp_path / taken)
    model.source = None
    with pytest.raises(ValueError, match="not loaded from a checkpoint"):
        save_merged(model, out)
    assert leftovers(tmp_path) == ["file", "full"] and leftovers(tmp_path / "full") == ["notes.txt"]


def test_a_full_disk_is_noticed_before_writing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    monkeypatch.setattr(export, "_write", None)  # must not be reached
    with pytest.raises(OSError, match="the merged model takes 0.00 GiB and the disk of .* has 0.00 GiB free") as caught:
        save_merged(adapted(tiny("llama3")), tmp_path / "merged")
    assert caught.value.errno == errno.ENOSPC and not leftovers(tmp_path)


# --- what is noticed on the way ------------------------------------------------------------------------------------


def test_weights_changed_by_hand_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny("llama-tied"), targets=["q_proj"])
    model.model.norm.weight.data[3] += 0.5
    model.model.layers[2].self_attn.q_proj.weight.data[0, 0] += 0.5
    with pytest.raises(ValueError) as caught:
        save_merged(model, tmp_path / "merged")
    assert "2 weights of this model are not those of" in str(caught.value)
    assert "model.norm.weight" in str(caught.value) and "model.layers.2.self_attn.q_proj.weight" in str(caught.value)
    assert not leftovers(tmp_path)


def test_another_source_than_at_loading_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny("llama3"), tmp_path / "source")
    model = adapted(source, targets=["q_proj"])
    for kind, message in (("qwen3", "is no longer the checkpoint"), ("gemma", "is no longer the checkpoint")):
        shutil.copyfile(tiny(kind) / "model.safetensors", source / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            save_merged(model, tmp_path / "merged")
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no model.safetensors"):
        save_merged(model, tmp_path / "merged")
    assert leftovers(tmp_path) == ["source"]


def test_values_that_a_dtype_cannot_hold_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny("llama3"), targets=["q_proj"])
    lora_parameters(model)[1].data[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"would not be finite numbers: model.layers.0.self_attn.q_proj.weight"):
        save_merged(model, tmp_path / "merged", dtype=torch.float16)
    lora_parameters(model)[1].data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="would not be finite"):
        save_merged(model, tmp_path / "merged")
    assert not leftovers(tmp_path)


def test_an_untrained_adapter_is_told(tiny: Tiny, tmp_path: Path) -> None:
    model = add_lora(load(tiny("llama3")), targets=["q_proj", "v_proj"])
    lora_parameters(model)[1].data.fill_(0.1)
    with pytest.warns(UserWarning, match="leaves 7 of 8 projections as they were") as caught:
        save_merged(model, tmp_path / "merged")
    assert caught[0].filename == __file__


# --- verification --------------------------------------------------------------------------------------------------


def test_a_small_update_that_rounding_eats_is_measured(
    tiny: Tiny, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = adapted(tiny("llama3"))
    for parameter in lora_parameters(model)[1::2]:
        parameter.data.mul_(1e-4)
    with pytest.warns(UserWarning, match=r"rounding to 16 bits kept (\d+)% of the adapter's update") as said:
        save_merged(model, tmp_path / "half")
    wanted = kept = 0.0
    before, after = tensors_of(tiny("llama3")), tensors_of(tmp_path / "half")
    for path, linear in model.named_modules():
        if hasattr(linear, "factors") and linear.adapters:
            update = linear.adapters["default"].scale * (linear.factors("default")[1] @ linear.factors("default")[0])
            wanted += float(update.square().sum())
            kept += float((update * (after[f"{path}.weight"].float() - before[f"{path}.weight"].float())).sum())
    assert f"kept {kept / wanted:.0%} of" in str(said[0].message) and kept < 0.9 * wanted
    recwarn.clear()
    save_merged(model, tmp_path / "full", dtype=torch.float32)
    assert not [w for w in recwarn if "rounding" in str(w.message)]


def test_a_file_that_is_not_what_was_written(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = export._write

    def flips_a_bit(job: Any, partial: Path) -> None:
        write(job, partial)
        data = bytearray((partial / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (partial / "model.safetensors").write_bytes(data)

    monkeypatch.setattr(export, "_write", flips_a_bit)
    with pytest.raises(RuntimeError, match="what was read back is not what was to be written: model.norm.weight;"):
        save_merged(adapted(tiny("llama3")), tmp_path / "merged")
    assert not leftovers(tmp_path)


@pytest.mark.parametrize(
    ("mistake", "dtype"),
    [
        ("not applied", torch.float32),
        ("half as strong", torch.float32),
        ("half as strong", torch.bfloat16),
        ("transposed", torch.bfloat16),
        ("wrong rope", torch.float32),
    ],
)
def test_logits_unmask_a_wrong_merge(
    mistake: str, dtype: torch.dtype, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written and read back without fault, but not the live model."""
    model = adapted(tiny("llama3"), dtype=dtype, targets=["q_proj", "o_proj"], layers=[1, 2])
    if mistake == "wrong rope":
        copy = export._write_small_files

        def spoils_config(job: Any, partial: Path) -> None:
            copy(job, partial)
            text = (partial / "config.json").read_text()
            (partial / "config.json").write_text(text.replace("500000.0", "10000.0"))

        monkeypatch.setattr(export, "_write_small_files", spoils_config)
    else:
        right = export_weights.merged_weight

        def wrong(weight: torch.Tensor, *rest: Any) -> torch.Tensor:
            update = right(weight, *rest) - weight.float()
            factor = {"not applied": 1e-3, "half as strong": 0.5, "transposed": 1.0}[mistake]
            return weight.float() + factor * (update.t() if mistake == "transposed" else update)

        monkeypatch.setattr(export_weights, "merged_weight", wrong)
    with pytest.raises(RuntimeError, match="answers differently from the live one"):
        save_merged(model, tmp_path / "merged")
    assert not leftovers(tmp_path)


def test_without_memory_for_a_second_model_it_says_so(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export_check, "free_memory", lambda device: 1000.0)
    save_merged(adapted(tiny("llama3"), targets=["q_proj"]), tmp_path / "merged")
    assert "no memory for a second model, so logits were not compared" in capsys.readouterr().err
    assert load(tmp_path / "merged")


# --- interruptions -------------------------------------------------------------------------------------------------


def test_an_interruption_leaves_nothing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(tiny("llama3"), targets=["q_proj"])

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    for step in ("_write_weight", "_write_small_files", "check_written", "check_logits"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(export, step, stop)
            save_merged(model, tmp_path / "merged")
        assert not leftovers(tmp_path)


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from lorarun.export import save_merged
from lorarun.load import load
from lorarun.lora import add_lora

model = add_lora(load(Path(sys.argv[1])), targets=["q_proj"], seed=0)
model.model.layers[0].self_attn.q_proj.factors("default")[1].data.fill_(0.1)
folder, bits, how = sys.argv[2], int(sys.argv[3]), sys.argv[4]
CHANGES = ("os.mkdir", "os.rmdir", "os.remove", "os.rename", "shutil.copyfile")

def run(stop, out):
    seen = 0
    def watch(event, arguments):
        nonlocal seen
        changes = event in CHANGES or event == "open" and arguments[1] and set(arguments[1]) & set("wxa+")
        there = event == "os.mkdir" and os.path.isdir(arguments[0])  # which mkdir(exist_ok=True) forgives
        if changes and folder in str(arguments[:2]) and not there:
            seen += 1
            if seen == stop:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(28, "No space left on device")
    sys.addaudithook(watch)
    try:
        save_merged(model, out, bits=bits)
    except OSError:
        os._exit(3)
    os._exit(0)

save_merged(model, Path(folder) / "first", bits=bits)  # so that what is imported late is there for all
shutil.rmtree(Path(folder) / "first")
for stop in range(1, 100):
    out = Path(folder) / str(stop)
    if stop % 2:
        out.mkdir()  # an empty folder may be there before
    if not (child := os.fork()):
        run(stop, out)
    if os.waitpid(child, 0)[1] == 0:
        break
print(stop)
"""


@pytest.mark.parametrize(
    ("name", "bits", "how"),
    [("qwen3-sharded", 16, "kill"), ("qwen3-sharded", 16, "no room"), ("llama-tied", 4, "kill")],
)
def test_the_folder_is_whole_or_not_there_wherever_it_ends(
    name: str, bits: int, how: str, tiny: Tiny, tmp_path: Path
) -> None:
    """Killed, or out of disk, at every file that is opened for writing and every name that is made or changed."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED, tiny(name), tmp_path, str(bits), how]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    last = int(done.stdout.split()[-1])
    files = len(leftovers(tiny(name))) - 1  # without the reference
    assert last >= files + 3  # the folder, its files, its name, and then it ends by itself
    for stop in range(1, last):
        out = tmp_path / str(stop)
        assert not out.exists() or not leftovers(out), stop
    assert leftovers(tmp_path / str(last)) == [n for n in leftovers(tiny(name)) if n != "reference.safetensors"]
    partial = [name for name in leftovers(tmp_path) if name.startswith(".")]
    assert (len(partial) >= last - 2) if how == "kill" else not partial
    for stop in (1, last - 1):
        save_merged(adapted(tiny("llama3")), tmp_path / str(stop))  # the next run is not hindered by what is left
        assert load(tmp_path / str(stop)) and f".{stop}.partial" not in leftovers(tmp_path)


# --- the script ----------------------------------------------------------------------------------------------------


def test_the_script(tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny("llama-tied"), tmp_path / "base")
    model = adapted(source)
    save_adapter(model, tmp_path / "adapter")

    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "scripts" / "export.py", *arguments]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})

    done = run(tmp_path / "adapter", tmp_path / "one", "--dtype", "float32")
    assert done.returncode == 0 and "complete and verified" in done.stderr, done.stderr
    save_merged(model, tmp_path / "here", dtype=torch.float32)
    file = "model.safetensors"
    assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "here" / file).read_bytes()
    source.rename(tmp_path / "moved")
    done = run(tmp_path / "adapter", tmp_path / "one", "--base", tmp_path / "moved")  # the base is found
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.strip().endswith("one exists already; give a new folder, or delete it first.")
    for wrong, says in (
        ("moved", "holds a model, not an adapter: expected a folder with adapter_config"),
        ("none", "expected the folder of an adapter"),
    ):
        done = run(tmp_path / wrong, tmp_path / "two", "--base", tmp_path / "moved")
        assert done.returncode == 1 and says in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_the_script_in_few_bits_and_onto_the_hub(
    hub: HubServer, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    model = adapted(tiny("qwen3"), bits=4)
    save_adapter(model, tmp_path / "adapter")

    def run(out: str, *arguments: str) -> None:
        script = str(ROOT / "scripts" / "export.py")
        monkeypatch.setattr("sys.argv", [script, str(tmp_path / "adapter"), str(tmp_path / out), *arguments])
        runpy.run_path(script, run_name="__main__")

    run("eight", "--load-bits", "4", "--bits", "8")
    save_merged(model, tmp_path / "here", bits=8)
    file = "model.safetensors"
    assert (tmp_path / "eight" / file).read_bytes() == (tmp_path / "here" / file).read_bytes()
    run("original", "--load-bits", "4", "--original")
    save_merged(model, tmp_path / "there", base="original")
    assert (tmp_path / "original" / file).read_bytes() == (tmp_path / "there" / file).read_bytes()
    assert (tmp_path / "original" / file).read_bytes() != (tmp_path / "here" / file).read_bytes()
    assert not hub.requests  # nothing is asked of the hub, still less given to it
    run("four", "--bits", "4", "--push", "me/merged")
    repo = hub.repos["me/merged"]
    pushed = repo.commits[repo.refs["main"]]
    assert repo.private and pushed[file] == (tmp_path / "four" / file).read_bytes()
    assert json.loads(pushed["config.json"])["quantization_config"]["load_in_4bit"]
    assert hub.url in capsys.readouterr().out
    for out, wrong in (("a", ["--push", "merged"]), ("a.gguf", ["--bits", "4"]), ("a.gguf", ["--push", "me/merged"])):
        with pytest.raises(SystemExit) as caught:
            run(out, *wrong)
        assert caught.value.code == 2
    assert not (tmp_path / "a").exists()


@pytest.mark.gpu
def test_on_an_accelerator(tiny: Tiny, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        model = add_lora(load(tiny("qwen3"), dtype=dtype, device="cuda"), r=4, seed=0)
        fill_b(model)
        save_merged(model, tmp_path / str(dtype))
    files = [(tmp_path / str(dtype) / "model.safetensors").read_bytes() for dtype in (torch.bfloat16, torch.float32)]
    assert files[0] == files[1]
    for bits in (4, 8):  # codes are the same wherever they are made
        save_merged(model, tmp_path / f"gpu-{bits}", bits=bits)
        save_merged(adapted(tiny("qwen3"), r=4, alpha=16), tmp_path / f"cpu-{bits}", bits=bits)
        gpu, cpu = (tensors_of(tmp_path / f"{where}-{bits}") for where in ("gpu", "cpu"))
        assert all(same_bits(gpu[name], cpu[name]) or "absmax" in name or "quant_state" in name for name in cpu)
