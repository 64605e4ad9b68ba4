"""From a name to a folder of files: a local folder, an alias, or a model of the Hugging Face hub.

A name means one thing. A folder that exists is that folder; an alias is a line of the table below, and its meaning is
printed; ``owner/name`` is that repo of the hub; anything else is an error with the nearest aliases. Unlike loaders that
switch to somebody's quantised or repaired copy of a repo, nothing is ever replaced by something else.

Of a repo come the JSON and jinja files first, then exactly the safetensors files that the checkpoint consists of: no
pickles, no ``original/`` or second copies in another format, and nothing large from a repo that could not be loaded
anyway. huggingface_hub does the transfer, with its cache, progress bars, token, endpoint and offline variables. What it
reports in a page of traceback becomes one sentence that says what to do.

Given up: repos without an owner (``gpt2``), sub-folders of repos, and files of other names than Hugging Face's own.
"""

from __future__ import annotations

import difflib
import errno
import glob
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub

from lorarun.headers import INDEX, SINGLE, abbreviate, is_plain_name, read_json

TIMEOUT = 10.0  # seconds until the hub must have answered a question, as huggingface_hub has it for a file's metadata
ADAPTER = "adapter_model.safetensors"

# alias, repo, sizes. An alias without a suffix is the repo of that name on the hub, or else the base model.
_TABLE = (
    ("llama-3-{}", "meta-llama/Meta-Llama-3-{}", "8B 70B"),
    ("llama-3-{}-instruct", "meta-llama/Meta-Llama-3-{}-Instruct", "8B 70B"),
    ("llama-3.1-{}", "meta-llama/Llama-3.1-{}", "8B 70B 405B"),
    ("llama-3.1-{}-instruct", "meta-llama/Llama-3.1-{}-Instruct", "8B 70B 405B"),
    ("llama-3.2-{}", "meta-llama/Llama-3.2-{}", "1B 3B"),
    ("llama-3.2-{}-instruct", "meta-llama/Llama-3.2-{}-Instruct", "1B 3B"),
    ("llama-3.3-{}-instruct", "meta-llama/Llama-3.3-{}-Instruct", "70B"),
    ("qwen2.5-{}", "Qwen/Qwen2.5-{}", "0.5B 1.5B 3B 7B 14B 32B 72B"),
    ("qwen2.5-{}-instruct", "Qwen/Qwen2.5-{}-Instruct", "0.5B 1.5B 3B 7B 14B 32B 72B"),
    ("qwen3-{}", "Qwen/Qwen3-{}", "0.6B 1.7B 4B 8B 14B 32B"),
    ("qwen3-{}-base", "Qwen/Qwen3-{}-Base", "0.6B 1.7B 4B 8B 14B"),
    ("qwen3-{}-instruct-2507", "Qwen/Qwen3-{}-Instruct-2507", "4B"),
    ("qwen3-{}-thinking-2507", "Qwen/Qwen3-{}-Thinking-2507", "4B"),
    ("gemma-2-{}", "google/gemma-2-{}", "2b 9b 27b"),
    ("gemma-2-{}-it", "google/gemma-2-{}-it", "2b 9b 27b"),
    ("gemma-2-{}-instruct", "google/gemma-2-{}-it", "2b 9b 27b"),
    ("gemma-3-{}", "google/gemma-3-{}", "270m"),
    ("gemma-3-{}", "google/gemma-3-{}-pt", "1b 4b 12b 27b"),
    ("gemma-3-{}-pt", "google/gemma-3-{}-pt", "1b 4b 12b 27b"),
    ("gemma-3-{}-it", "google/gemma-3-{}-it", "270m 1b 4b 12b 27b"),
    ("gemma-3-{}-instruct", "google/gemma-3-{}-it", "270m 1b 4b 12b 27b"),
    ("smollm2-{}", "HuggingFaceTB/SmolLM2-{}", "135M 360M 1.7B"),
    ("smollm2-{}-instruct", "HuggingFaceTB/SmolLM2-{}-Instruct", "135M 360M 1.7B"),
)
ALIASES: dict[str, str] = {
    alias.format(size.lower()): repo.format(size) for alias, repo, sizes in _TABLE for size in sizes.split()
}


class Source(NamedTuple):
    """Where a checkpoint came from: the name as given, the folder with its files and, when it is the hub's, the repo
    and the hash of the commit."""

    name: str
    folder: Path
    repo: str | None
    revision: str | None


def resolve(
    name: str | os.PathLike[str], revision: str | None = None, check: Callable[[Path], object] | None = None
) -> Source:
    """The folder of a model (or, when the repo holds only that, of an adapter), fetched if need be.

    ``name`` is a local folder, an alias of ``ALIASES`` (in any case of letters) or a hub id ``owner/name``.
    ``revision`` is a branch, tag or commit of the hub's repo (default: ``main``). ``check(folder)`` is called as soon
    as ``config.json`` and its like are there and before the weights are: what it raises saves the transfer.

    Raises ``ValueError`` for what the caller can correct in the name or revision (a private repo looks like none to
    strangers), ``PermissionError`` for a gated repo or a refused token, ``ConnectionError`` without network,
    ``FileNotFoundError`` when offline and not cached, ``OSError`` for a full disk.
    """
    return _resolve(name, revision, False, check)


def resolve_adapter(name: str | os.PathLike[str], revision: str | None = None) -> Source:
    """The folder of an adapter (``adapter_config.json``, ``adapter_model.safetensors``), also from a repo that holds a
    model as well. Arguments and errors as ``resolve``."""
    return _resolve(name, revision, True, None)


def _resolve(
    name: str | os.PathLike[str], revision: str | None, adapter: bool, check: Callable[[Path], object] | None
) -> Source:
    text = os.fspath(name)
    path = Path(os.path.expanduser(text))
    if not text or not os.path.exists(path):  # which is False, and no error, for names that no file can have
        repo = _repo(text, adapter)
        folder = _fetch(repo, revision, adapter, check)
        return Source(text, folder, repo, folder.name)
    if not path.is_dir() and (adapter or path.suffix != ".gguf"):
        raise ValueError(f"{text} is a file; give the folder that holds it.")
    if revision is not None:
        kind = "folder" if path.is_dir() else "file"
        raise ValueError(f"{text} is a local {kind}, so revision={revision!r} has no meaning; leave it out.")
    if not path.is_dir():
        return Source(text, path, None, None)
    wanted = ["adapter_config.json"] if adapter else ["config.json", "adapter_config.json"]
    if not any((path / file).exists() for file in wanted):
        if adapter and (path / "config.json").exists():
            raise ValueError(
                f"{text} holds a model, not an adapter: expected a folder with {wanted[0]} and {ADAPTER}, as "
                "save_adapter writes it."
            )
        on_hub = text.lower() in ALIASES or re.fullmatch(_HUB_ID, text)
        hint = f" To get {text} from the hub, start Python elsewhere: this folder hides it." if on_hub else ""
        if not adapter and (files := sorted(path.glob("*.gguf"))):
            hint = f" To load a GGUF file, name the file itself, such as {files[0]}."
        elif inside := sorted(found.parent for file in wanted for found in path.glob(f"*/{file}")):
            hint = f" Did you mean {inside[0]}?"
        raise ValueError(f"The folder {text} has no {' or '.join(wanted)}, so it is no checkpoint.{hint}")
    if text.lower() in ALIASES:
        print(f"{text} -> the folder {path.resolve()} (not the alias of that name)", file=sys.stderr)
    if check is not None:
        check(path)
    return Source(text, path, None, None)


# --- names ---------------------------------------------------------------------------------------------------------

_HUB_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*"


def _repo(text: str, adapter: bool) -> str:
    """The hub id that a name stands for, when no such folder exists."""
    if text.lower() in ALIASES and not adapter:
        print(f"{text} -> {ALIASES[text.lower()]}", file=sys.stderr)
        return ALIASES[text.lower()]
    accepted = "a local folder, a hub id such as Qwen/Qwen3-0.6B, or an alias such as llama-3.1-8b-instruct"
    if adapter:
        accepted = f"the folder of an adapter, with adapter_config.json and {ADAPTER} in it, or a hub id (owner/name)"
    page = re.fullmatch(rf"https?://[^/]+/({_HUB_ID})(/.*)?", text)
    if page:
        raise ValueError(f"{text} is an address; for that repo write {page[1]!r} (and revision=... for a branch).")
    if text.endswith(".gguf"):  # before it is taken for a hub id, which out/model.gguf looks like
        raise ValueError(f"There is no file {text} (seen from {Path.cwd()}); expected a GGUF file, or {accepted}.")
    if text.startswith((".", "/", "~")) or text.endswith("/") or "\\" in text or text.count("/") > 1:
        raise ValueError(f"There is no folder {text} (seen from {Path.cwd()}); expected {accepted}.")
    if re.fullmatch(_HUB_ID, text):
        return text
    if adapter:
        raise ValueError(f"{text!r} names no adapter (seen from {Path.cwd()}): expected {accepted}.")
    low = text.lower()
    near = [alias for alias in reversed(ALIASES) if low and (low.startswith(alias) or alias.startswith(low))]
    near += [alias for alias in difflib.get_close_matches(low, ALIASES, n=4) if alias not in near]
    meant = f" Did you mean {' or '.join(near[:4])}?" if near else ""
    raise ValueError(f"{text!r} names no model: expected {accepted}.{meant}")


# --- what a repo must hold -----------------------------------------------------------------------------------------


def _choose(repo: str, files: list[str], adapter: bool) -> tuple[list[str], str]:
    """From a repo's file list: the small files, and the file that is, or names, the weights."""
    is_model = "config.json" in files and (SINGLE in files or INDEX in files)
    if adapter or ("adapter_config.json" in files and not is_model):
        needed, weights = ["adapter_config.json", ADAPTER], ADAPTER
        what = "an adapter"
    else:
        # transformers too prefers the single file; an index beside it belongs to something else
        needed, weights = ["config.json"], SINGLE if SINGLE in files or INDEX not in files else INDEX
        needed.append(weights)
        what = "a model"
    lacking = [file for file in needed if file not in files]
    if lacking:
        pickles = [file for file in files if file.endswith((".bin", ".pt", ".pth"))]
        if any(file.endswith(".safetensors") for file in lacking) and pickles:
            raise ValueError(
                f"{repo} holds its weights only as pickles ({abbreviate(pickles, 3)}), which run code when they are "
                "opened and are never loaded: give the revision of a safetensors version (often refs/pr/1, made by the "
                "hub's safetensors/convert space) or another repo."
            )
        gguf = any(file.endswith(".gguf") for file in files)
        raise ValueError(
            f"{repo} cannot be loaded as {what}: it lacks {' and '.join(lacking)} and holds "
            f"{abbreviate(files, 6) or 'nothing'}; "
            + ("use the repo that the GGUF files were made from." if gguf else "check the name or the revision.")
        )
    small = [
        file
        for file in files
        if re.fullmatch(r"[^/]+\.(json|jinja)|additional_chat_templates/[^/]+\.jinja", file)
        and not (file == INDEX and weights == SINGLE)
    ]
    return small, weights


def _shards(index: Path) -> list[str]:
    """The files that an index names."""
    weight_map = read_json(index).get("weight_map")
    files = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not files or not all(isinstance(file, str) and is_plain_name(file) for file in files):
        raise ValueError(f'{index} must have a "weight_map" from tensor names to names of files beside it.')
    return sorted(set(files))


# --- fetching ------------------------------------------------------------------------------------------------------


def _fetch(repo: str, revision: str | None, adapter: bool, check: Callable[[Path], object] | None) -> Path:
    """The snapshot's folder (its name is the commit), complete."""
    files, problem = _list_files(repo, revision, adapter)
    if files is None:
        folder, missing = _cached(repo, revision, adapter)
        if missing:
            raise (problem or _not_cached(repo, revision, missing)) from None
        if problem:
            print(f"{problem} Going on with the cached copy at {folder.name}.", file=sys.stderr)
        if check is not None:
            check(folder)
        return folder
    small, weights = _choose(repo, files, adapter)
    folder = _download(repo, revision, small)
    if check is not None:
        check(folder)
    shards = _shards(folder / INDEX) if weights == INDEX else [weights]
    absent = [shard for shard in shards if shard not in files]
    if absent:
        raise ValueError(f"{repo} is incomplete: its {INDEX} names {abbreviate(absent)}, which the repo does not hold.")
    return _download(repo, folder.name, shards)


def _list_files(repo: str, revision: str | None, adapter: bool) -> tuple[list[str] | None, Exception | None]:
    """The files of a repo; or None, and why the hub did not tell (None: it was not to be asked)."""
    if _offline():
        return None, None
    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=TIMEOUT)
    except Exception as error:
        problem = _explain(error, repo, revision, adapter)
        if problem is None:
            raise
        if isinstance(error, _errors().RevisionNotFoundError):
            raise problem from None
        return None, problem
    return [sibling.rfilename for sibling in info.siblings or ()], None


def _download(repo: str, revision: str | None, files: list[str]) -> Path:
    """Fetch these files; returns the snapshot's folder. With ``revision`` None the cache also notes what ``main``
    is."""
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=[glob.escape(file) for file in files]
            )
        )
        missing = [file for file in files if not (folder / file).exists()]  # it makes do with what was cached before
        if missing:
            raise ConnectionError(f"{abbreviate(missing)} did not arrive")
    except Exception as error:
        problem = _explain(error, repo, revision)
        if problem is None:
            raise
        raise problem from None
    return folder


def _offline() -> str | None:
    """The variable that forbids asking the hub. huggingface_hub reads both only when it is imported."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return variable
    return None


def _cached(repo: str, revision: str | None, adapter: bool) -> tuple[Path, list[str]]:
    """The cached snapshot and which of the files that it must have are missing. Asks nobody."""
    configs = ["adapter_config.json"] if adapter else ["config.json", "adapter_config.json"]
    for config in configs:
        found = huggingface_hub.try_to_load_from_cache(repo, config, revision=revision)
        if isinstance(found, str):
            folder = Path(found).parent
            if config == "adapter_config.json":
                needed = [ADAPTER]
            elif (folder / INDEX).exists() and not (folder / SINGLE).exists():
                needed = _shards(folder / INDEX)
            else:
                needed = [SINGLE]
            return folder, [file for file in needed if not (folder / file).exists()]
    return Path(), configs[:1]


def _not_cached(repo: str, revision: str | None, missing: list[str]) -> Exception:
    return FileNotFoundError(
        f"{repo} at revision {revision or 'main'} is not complete in the cache {huggingface_hub.constants.HF_HUB_CACHE}"
        f" ({abbreviate(missing)} missing) and {_offline()} forbids asking the hub: unset it once to download, or give "
        f"a local folder (there is none {repo} here)."
    )


def _errors() -> Any:
    """huggingface_hub's exceptions, which bring an HTTP client with them: a quarter of what importing lorarun cost."""
    return importlib.import_module("huggingface_hub.errors")


def _explain(error: Exception, repo: str, revision: str | None, adapter: bool = False) -> Exception | None:
    """huggingface_hub's exception as one sentence that says what to do; None for what is not about the hub."""
    errors, page = _errors(), f"https://huggingface.co/{repo}"
    who = "the token in use has no access" if huggingface_hub.get_token() else "no token was given"
    login = "log in with `hf auth login` or set HF_TOKEN"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return PermissionError(f"{repo} is gated and {who}: accept its terms at {page}, then {login}.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ValueError(
            f"There is no folder {repo} here and no such {'adapter' if adapter else 'model or adapter'} on the hub, or "
            f"it is private and {who}: check the spelling at {page}, or {login}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ValueError(f"{repo} has no revision {revision!r}: give a branch, tag or commit of {page}/commits.")
    if status in (401, 403):
        return PermissionError(
            f"The hub refused access to {repo} ({status}) and {who}: {login}, or unset a stale token."
        )
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    cache = huggingface_hub.constants.HF_HUB_CACHE
    if full:
        return OSError(
            errno.ENOSPC,
            f"the disk of {cache} is full: free some space or set HF_HOME to another disk, then run again; what was "
            f"fetched of {repo} is kept",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ConnectionError(f"HF_HUB_OFFLINE forbids asking the hub for {repo}: unset it or give a local folder.")
    if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionError(f"The cache {cache} cannot be written ({error}): set HF_HOME to a folder of yours.")
    if isinstance(error, (errors.HTTPError, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)):
        root = error.__cause__ or error
        text = str(root).strip().partition("\n")[0][:200].rstrip(".")
        cause = f"it answered {status}" if status else f"{type(root).__name__}: {text}"
        return ConnectionError(
            f"There is no folder {repo} here (seen from {Path.cwd()}), and the hub at "
            f"{huggingface_hub.constants.ENDPOINT} could not be asked for it ({cause}): check the "
            "network and proxy settings and run again (what was fetched is kept), or give "
            f"{'the folder of an adapter' if adapter else 'a local folder'}."
        )
    return None
