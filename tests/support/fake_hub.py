"""A Hugging Face hub on this machine: the requests of huggingface_hub's client for repositories that are folders.

`cut_after` ends the first download of a file of this name after so many bytes; ranges are served, as the client resumes with them.
A hostile hub has `headers` in place of its own in answers about files, and `answers` in place of its JSON, by "revision" or "tree".
"""

from __future__ import annotations

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
    """Folders by OWNER/NAME and by revision ("main" is the default), and what was asked for."""

    repositories: dict[str, dict[str, Path]]
    cut_after: dict[str, int] = field(default_factory=dict)
    ranges: list[tuple[str, str | None]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)
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
    """Serves the hub on a free port."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def point_client_at(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes huggingface_hub's client ask this hub, with a cache of its own."""
    import huggingface_hub

    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


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
        if kind in self.hub.answers:
            return self._send(self.hub.answers[kind], 200, {})
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
        if kind == "tree":
            entries = [{"type": "file", "path": name, "size": size, "oid": _etag(folder / name)} for name, size in sizes.items()]
            return self._json(entries)
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        return self._json({"id": repository, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0})

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
