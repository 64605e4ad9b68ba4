"""An adapter or a merged folder on the Hugging Face Hub, with a card that says what it is.

The usual way uploads as a side effect of saving or training, to a public repository, with a card of blanks to fill in.
Here nothing leaves the machine but by :func:`push_to_hub`; the repository is private unless asked otherwise, what lies
there already is not deleted, and the card states what is known: base, revision, data, settings and the report.
Unknown things are left out, and so are paths of this machine.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub

from lorarun.adapter import save_adapter
from lorarun.nn import Model
from lorarun.report import Report, report

CARD = "README.md"
LOCAL = ("folder", "name")  # rows of the report's source that may be paths
SETTINGS = ("r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora", "use_dora", "bias", "modules_to_save")


def push_to_hub(
    what: Model | str | os.PathLike[str],
    repo: str,
    private: bool = True,
    data: str | None = None,
    model: Model | None = None,
) -> str:
    """Upload to the repository ``repo`` ("owner/name"), made if it is not there; returns the commit's address.

    what: a model, whose active adapter is uploaded, or a folder that ``save_adapter`` or ``save_merged`` wrote.
    private: of a new repository; one that exists stays as it is, and has to be private too.  data: what it was trained
    on, in words, for the card.  model: for a folder, the model that it came from, so that the card can state base and
    report.  A card (README.md) in the folder or in the repository is kept instead.

    Raises ValueError for a model without active adapter, a folder that is neither and a public repository where a
    private one is wanted, and huggingface_hub's errors.
    """
    if "/" not in repo:
        raise ValueError(f"push_to_hub: repo={repo!r}; expected owner/name.")
    with tempfile.TemporaryDirectory() as scratch:
        if isinstance(what, Model):
            if what.active is None:
                raise ValueError("push_to_hub: no adapter is active; use_adapter chooses one, or give a folder.")
            folder, model = Path(scratch) / "adapter", what
            save_adapter(what, folder)
        else:
            folder = Path(what)
        text = card(folder, data, model)
        api = huggingface_hub.HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise ValueError(f"push_to_hub: {repo} is public; private=False says that this is meant.")
        files: list[Any] = [
            huggingface_hub.CommitOperationAdd(file.relative_to(folder).as_posix(), file)
            for file in sorted(folder.rglob("*"))
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        ]
        if not (folder / CARD).exists() and not api.file_exists(repo, CARD):
            files.append(huggingface_hub.CommitOperationAdd(CARD, text.encode()))
        commit = api.create_commit(repo, files, commit_message=f"Upload with lorarun: {len(files)} files")
    return str(commit.commit_url)


def card(folder: Path, data: str | None = None, model: Model | None = None) -> str:
    """The model card of a folder, as Markdown with YAML front matter."""
    adapter = (folder / "adapter_config.json").is_file()
    if not adapter and not (folder / "config.json").is_file():
        raise ValueError(f"push_to_hub: {folder} has neither adapter_config.json nor config.json; nothing to upload.")
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")) if adapter else {}
    source = model.source if model is not None else None
    base = settings.get("base_model_name_or_path") if source is None else source.repo
    if base is not None and (os.path.isabs(base) or base.count("/") != 1 or Path(base).exists()):
        base = None  # a folder of this machine
    revision = settings.get("revision") if source is None else source.revision
    front = huggingface_hub.ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else "adapter" if adapter else "finetune",
        library_name="peft" if adapter else "transformers",
        revision=revision if base else None,
        tags=["lora", "lorarun"],
    )
    parts = [f"---\n{front.to_yaml()}\n---", "# " + ("LoRA adapter" if adapter else "Merged model")]
    if base:
        parts.append(f"Base model: `{base}`" + (f", revision `{revision}`." if revision else "."))
    if data:
        parts.append(f"## Data\n\n{data}")
    if adapter:
        rows = "\n".join(f"- {key}: `{settings[key]}`" for key in SETTINGS if settings.get(key) not in (None, []))
        parts.append(f"## Settings\n\n{rows}")
    if model is not None:
        facts = report(model).to_dict()
        facts["source"] = {k: v for k, v in facts["source"].items() if k not in LOCAL}
        parts.append(f"## Report\n\n```\n{Report(facts)}\n```")
    return "\n\n".join(parts) + "\n"
