"""A Hugging Face hub on this machine: the requests of huggingface_hub's client for repositories that are folders.

With a `token` and a `root` it takes uploads: repositories are made below the root, large files come by git-lfs's protocol.

`cut_after` ends the first download of a file of this name after so many bytes; ranges are served, as the client resumes with them.
A hostile hub has `headers` in place of its own in answers about files, and `answers` in place of its JSON, by "revision", "tree",
"create", "preupload", "batch" or "commit".
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class FakeHub:
    """Folders by OWNER/NAME and by revision ("main" is the default), and what was asked for.

    `listed`: the repositories whose files were asked for with their sizes; `objects`: uploaded large files by sha256; `refused`: the
    status with which an object is refused, once.
    """

    repositories: dict[str, dict[str, Path]]
    cut_after: dict[str, int] = field(default_factory=dict)
    ranges: list[tuple[str, str | None]] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)
    token: str | None = None
    root: Path | None = None
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def commit(self, repository: str, revision: str) -> str | None:
        """The commit of a branch, or of itself."""
        for name in self.repositories.get(repository, {}):
            commit = hashlib.sha1(f"{repository}{name}".encode()).hexdigest()
            if revision in (name, commit):
                return commit
        return None

    def folder(self, repository: str, revision: str) -> Path | None:
        for name, folder in self.repositories.get(repository, {}).items():
            if self.commit(repository, name) == self.commit(repository, revision):
                return folder
        return None


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)  # its end waits for a poll
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def point_client_at(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes huggingface_hub's client ask this hub, with a cache of its own."""
    from huggingface_hub import constants

    for name, value in {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        # Its other way of uploading is a library of its own, which knows only the hub's own storage.
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        else:
            self._file(body=True)

    def _api(self, repository: str, rest: list[str]) -> None:
        kind, revision = rest[0] if rest else "revision", "/".join(rest[1:]) or "main"
        commit, folder = self.hub.commit(repository, revision), self.hub.folder(repository, revision)
        if repository not in self.hub.repositories:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if commit is None or folder is None:
            return self._json({"error": f"Invalid rev id: {revision}"}, 404, {"X-Error-Code": "RevisionNotFound"})
        if "blobs" in urlsplit(self.path).query:
            self.hub.listed.append(repository)
        if kind in self.hub.answers:
            return self._send(self.hub.answers[kind], 200, {})
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
        if kind == "tree":
            entries = [{"type": "file", "path": name, "size": size, "oid": _etag(folder / name)} for name, size in sizes.items()]
            return self._json(entries)
        siblings = [{"rfilename": name, "size": size, **self._lfs(folder / name)} for name, size in sizes.items()]
        private = repository in self.hub.private
        return self._json({"id": repository, "sha": commit, "siblings": siblings, "private": private, "tags": [], "downloads": 0})

    def _lfs(self, path: Path) -> dict[str, object]:
        oid = hashlib.sha256(path.read_bytes()).hexdigest()
        return {"lfs": {"sha256": oid, "size": path.stat().st_size, "pointerSize": 1}} if oid in self.hub.objects else {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.hub.token is None or self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._json({"error": "Invalid username or password."}, 401)
        kind = {"repos": "create", "validate-yaml": "yaml"}.get(parts[1], parts[4] if len(parts) > 4 else "")
        if parts[-1] == "batch":
            kind = "batch"
        if kind in self.hub.answers:
            return self._send(self.hub.answers[kind], 200, {})
        if kind == "yaml":
            return self._json({})
        if kind == "create":
            return self._create(json.loads(body))
        if kind == "batch":
            return self._json({"transfer": "basic", "objects": [self._action(each) for each in json.loads(body)["objects"]]})
        folder = self.hub.repositories["/".join(parts[2:4])]["main"]
        if kind == "preupload":
            return self._json({"files": [_upload_mode(folder, each) for each in json.loads(body)["files"]]})
        return self._commit("/".join(parts[2:4]), body)

    def _create(self, asked: dict[str, str]) -> None:
        repository = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.endpoint}/{repository}"}
        if repository in self.hub.repositories or self.hub.root is None:
            return self._json({"error": "You already created this model repo", **url}, 409)
        folder = self.hub.root / repository
        folder.mkdir(parents=True)
        self.hub.repositories[repository] = {"main": folder}
        if asked["visibility"] == "private":
            self.hub.private.add(repository)
        return self._json(url)

    def _action(self, asked: dict[str, object]) -> dict[str, object]:
        href = {"href": f"{self.hub.endpoint}/objects/{asked['oid']}"}
        return asked | ({} if asked["oid"] in self.hub.objects else {"actions": {"upload": href}})

    def do_PUT(self) -> None:
        oid, data = self.path.rpartition("/")[2], self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if status := self.hub.refused.pop(oid, None):
            return self._json({"error": "The connection was cut"}, status)
        self.hub.objects[oid] = data
        return self._json({})

    def _commit(self, repository: str, body: bytes) -> None:
        folder = self.hub.repositories[repository]["main"]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                (folder / value["path"]).write_bytes(self.hub.objects[value["oid"]])
        self._json({"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.hub.endpoint}/{repository}/commit/0"})

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, headers or {})

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, text in headers.items():
            self.send_header(key, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, *, body: bool) -> None:
        owner, name, _, revision, *rest = unquote(urlsplit(self.path).path).strip("/").split("/")
        folder, commit = self.hub.folder(f"{owner}/{name}", revision), self.hub.commit(f"{owner}/{name}", revision)
        path = folder / "/".join(rest) if folder is not None else None
        if path is None or not path.is_file():
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"} | self.hub.headers)
        data, asked = path.read_bytes(), self.headers.get("Range")
        begin = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        if body:
            self.hub.ranges.append((path.name, asked))
        self.send_response(206 if asked else 200)
        for key, text in ({"X-Repo-Commit": commit or "", "ETag": f'"{_etag(path)}"'} | self.hub.headers).items():
            self.send_header(key, text)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - begin))
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if body:
            end = begin + self.hub.cut_after.pop(path.name, len(data))
            self.wfile.write(data[begin:end])
            if end < len(data):
                self.close_connection = True
        return None


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _upload_mode(folder: Path, asked: dict[str, str]) -> dict[str, object]:
    """Large files go to git-lfs; of a file that is there the client gets the id, and sends it no more."""
    path = folder / asked["path"]
    large = "gguf" in asked["path"]
    data = path.read_bytes() if path.is_file() else None
    blob = None if data is None else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    oid = blob if data is None or not large else hashlib.sha256(data).hexdigest()
    return {"path": asked["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}
