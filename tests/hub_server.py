"""A hub of our own on 127.0.0.1: enough of the Hugging Face Hub's HTTP API to list and fetch models.

Tests of fetching need a hub that is gated, private, renamed, slow to finish or down on request, and must not need the
network. Patching huggingface_hub's functions would test our idea of them; this answers the requests that they really
send, so the client's own cache, redirects, retries and error classes take part. What it gives up: datasets,
spaces, xet and LFS storage.

    GET  /api/models/OWNER/NAME[/revision/REV]        commit and list of files
    GET  /api/models/OWNER/NAME/tree/REV              the same with sizes and hashes
    HEAD, GET  /OWNER/NAME/resolve/REV/PATH           small files as they are, safetensors by a redirect to
    HEAD, GET  /cdn/SHA256                            the bytes, with ranges
    POST /api/repos/create                            a new repo, private or not
    POST /api/models/OWNER/NAME/preupload/REV         every file goes into the commit itself
    POST /api/models/OWNER/NAME/commit/REV            lines of JSON: header, file, deletedFile

Errors carry X-Error-Code (RepoNotFound, RevisionNotFound, EntryNotFound, GatedRepo) and X-Error-Message as the hub's
do. Source: the client's own code and https://huggingface.co/docs/hub/api.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Repo:
    """Commits (hash -> path -> bytes), names of commits, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False  # everybody sees the list, only the token holder gets files
    private: bool = False  # only the token holder sees that it exists
    moved_to: str | None = None


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str, **more: str) -> None:
        super().__init__(message)
        self.status, self.code, self.more = status, code, more


class HubServer:
    """`with HubServer() as hub:` serves at `hub.url` until the block ends; `hub.requests` lists what was asked."""

    token = "hf_the_only_valid_token"

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.down = False  # answer 503 to everything
        self.cut: set[str] = set()  # SHA-256 of files whose next transfer breaks in the middle
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.storage = self.url.replace("127.0.0.1", "localhost")  # another host, as the hub's storage is

    def add(self, name: str, files: dict[str, bytes] | Path, branch: str = "main", **properties: Any) -> str:
        """A new commit of repo `name` on `branch`; returns its hash."""
        if isinstance(files, Path):
            files = {str(p.relative_to(files)): p.read_bytes() for p in sorted(files.rglob("*")) if p.is_file()}
        repo = self.repos.setdefault(name, Repo())
        for key, value in properties.items():
            setattr(repo, key, value)
        commit = hashlib.sha1(repr((name, branch, len(repo.commits), sorted(files))).encode()).hexdigest()
        repo.commits[commit] = files
        repo.refs[branch] = commit
        self.blobs.update({hashlib.sha256(data).hexdigest(): data for data in files.values()})
        return commit

    def fetched(self) -> list[str]:
        """The names of the files that were transferred, in order of their requests."""
        names = []
        for method, path in self.requests:
            if method == "GET" and "/resolve/" in path:
                names.append(unquote(path.split("/resolve/", 1)[1].split("/", 1)[1]))
        return names

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    # --- what is asked, without the transport ---

    def repo(self, name: str, authorised: bool) -> Repo:
        repo = self.repos.get(name)
        if repo is None or (repo.private and not authorised):
            if authorised:
                raise Refusal(404, "RepoNotFound", "Repository not found")
            raise Refusal(401, "RepoNotFound", "Invalid username or password.")
        return repo

    def commit(self, repo: Repo, revision: str) -> str:
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def info(self, name: str, revision: str, authorised: bool) -> dict[str, Any]:
        repo = self.repo(name, authorised)
        commit = self.commit(repo, revision)
        return {
            "_id": hashlib.sha1(name.encode()).hexdigest()[:24],
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": path} for path in repo.commits[commit]],
        }

    def tree(self, name: str, revision: str, authorised: bool) -> list[dict[str, Any]]:
        repo = self.repo(name, authorised)
        rows = []
        for path, data in repo.commits[self.commit(repo, revision)].items():
            row: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_hash(data)}
            if is_large(path):
                row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            rows.append(row)
        return rows

    def file(self, name: str, revision: str, path: str, authorised: bool) -> tuple[str, bytes]:
        repo = self.repo(name, authorised)
        if repo.gated and not authorised:
            message = f"Access to model {name} is restricted. You must have access to it and be authenticated."
            raise Refusal(401, "GatedRepo", message)
        commit = self.commit(repo, revision)
        if path not in repo.commits[commit]:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        return commit, repo.commits[commit][path]

    # --- what is uploaded, by the token holder only ---

    def post(self, path: str, body: bytes, authorised: bool) -> dict[str, Any]:
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if not authorised:
            raise Refusal(401, "", "Invalid username or password.")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.repos:
                raise Refusal(409, "", "You already created this model repo", url=f"{self.url}/{name}")
            self.add(name, {}, private=asked.get("visibility") == "private")
            return {"url": f"{self.url}/{name}"}
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/]+)", path)
        if match is None:
            raise Refusal(404, "", f"this server does not know {path}")
        repo = self.repo(match[1], authorised)
        if match[2] == "preupload":
            wanted = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in wanted]}
        files = dict(repo.commits[self.commit(repo, match[3])])
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        commit = self.add(match[1], files, match[3])
        return {"commitUrl": f"{self.url}/{match[1]}/commit/{commit}", "commitOid": commit}


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".gguf"))


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append((self.command, path))
            try:
                if hub.down:
                    raise Refusal(503, "", "The hub is down")
                self.route(path)
            except Refusal as error:
                body = json.dumps({"error": str(error), **error.more}).encode()
                headers = {"X-Error-Message": str(error), "Content-Type": "application/json"}
                self.reply(error.status, body, headers | ({"X-Error-Code": error.code} if error.code else {}))

        def do_POST(self) -> None:
            self.do_GET()

        def route(self, path: str) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            header = self.headers.get("Authorization")
            authorised = header == f"Bearer {hub.token}"
            if header and not authorised:
                raise Refusal(401, "", "Invalid credentials in Authorization header")
            if self.command == "POST":
                self.json(hub.post(path, body, authorised))
                return
            if match := re.fullmatch(r"/cdn/([0-9a-f]{64})", path):
                self.data(hub.blobs[match[1]], {"ETag": f'"{match[1]}"'}, match[1] in hub.cut)
                hub.cut.discard(match[1] if self.command == "GET" else "")
                return
            named = re.fullmatch(r"(/api/models)?/([^/]+/[^/]+)(/.*)?", path)
            if named and named[2] in hub.repos and (moved := hub.repos[named[2]].moved_to):
                self.reply(307, b"", {"Location": path.replace(named[2], moved, 1)})
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
                self.json(hub.info(match[1], unquote(match[2] or "main"), authorised))
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path):
                self.json(hub.tree(match[1], unquote(match[2]), authorised))
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                name, file = match[1], unquote(match[3])
                commit, data = hub.file(name, unquote(match[2]), file, authorised)
                headers = {"X-Repo-Commit": commit, "ETag": f'"{git_hash(data)}"'}
                if not is_large(file):
                    self.data(data, headers, False)
                    return
                sha = hashlib.sha256(data).hexdigest()
                headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(data))}
                self.reply(302, b"", headers | {"Location": f"{hub.storage}/cdn/{sha}"})
            else:
                raise Refusal(404, "", f"this server does not know {path}")

        def json(self, body: Any) -> None:
            self.reply(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def data(self, body: bytes, headers: dict[str, str], cut: bool) -> None:
            span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(span[1]) if span else 0
            if span:
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self.reply(206 if span else 200, body[start:], headers | {"Accept-Ranges": "bytes"}, cut)

        def reply(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.close_connection = True

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler


def block_sockets(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """From now on connecting fails; the list grows with each attempt."""
    attempts: list[object] = []

    def refuse(self: socket.socket, address: object) -> None:
        attempts.append(address)
        raise OSError(errno.ENETUNREACH, "blocked by the test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    return attempts
