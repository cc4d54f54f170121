"""The hub's client: the only module that imports huggingface_hub, whose functions are called inside of `hub_errors`.

A hub's answers become paths in the client's cache, so each answer is checked before the client gets it.
"""

from __future__ import annotations

import glob
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_devices.waiting import Progress
from edge_export.errors import CheckpointError

# Headers that huggingface_hub joins into paths, and keys of JSON whose values it does.
_PATH_HEADERS = ("X-Repo-Commit", "X-Linked-ETag", "ETag", "X-Xet-Hash")
_PATH_KEYS = ("sha", "oid", "sha256", "blobId", "xetHash")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
_CLIENT_LOCK = threading.Lock()


@contextmanager
def hub_errors(missing: str, failed: str, advice: str) -> Iterator[None]:
    """Makes one sentence of whatever goes wrong. Raises CheckpointError: `missing` if the client is not installed, else `failed`."""
    try:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise CheckpointError(f"{missing}; pip install 'edge-mtp[export]'") from error
    try:
        _check_answers()
        yield
    except CheckpointError:
        raise
    except Exception as error:  # what the client makes of a malformed answer differs from release to release
        known = (HfHubHTTPError, HFValidationError, OSError, ValueError)
        cause = next((each for each in _causes(error) if str(each).strip() and (isinstance(each, known) or _of_transport(each))), None)
        reason = (str(cause or error).strip().splitlines() or [""])[0]
        if cause is None:
            reason = f"its answer is malformed: {type(error).__name__}: {reason}"
        raise CheckpointError(f"{failed} ({reason}); {advice}") from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and the errors that caused it."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__


def _of_transport(error: BaseException) -> bool:
    """Whether a connection failed. The HTTP library below the client changes between releases, so its errors are known by name."""
    return any(base.__name__ == "TransportError" for base in type(error).__mro__)


def _check_answers() -> None:
    """Makes the client of this process check each answer before it is used; the client is otherwise as it was set."""
    from huggingface_hub import get_session, set_client_factory

    with _CLIENT_LOCK:
        session = get_session()
        if _check_answer in session.event_hooks.get("response", ()):
            return
        make = _client_factory(session)

        def checked() -> Any:  # also called for a new client after an error of the connection
            client = make()
            client.event_hooks = client.event_hooks | {"response": [*client.event_hooks.get("response", ()), _check_answer]}
            return client

        set_client_factory(checked)


def _client_factory(session: Any) -> Callable[[], Any]:
    """Returns what makes clients like this one. The client has no public name for it; in a release without ours, a plain one is made."""
    with suppress(ImportError, AttributeError):
        from huggingface_hub.utils import _http

        factory: Callable[[], Any] = _http._GLOBAL_CLIENT_FACTORY
        return factory
    kind, hooks = type(session), session.event_hooks
    return lambda: kind(event_hooks=hooks, follow_redirects=session.follow_redirects, timeout=session.timeout)


def _check_answer(response: Any) -> None:
    """Raises CheckpointError for a name that leaves its folder; `response` is httpx's. Its ETag is a name where a commit comes with it."""
    named: list[tuple[str, Any]] = []
    if "X-Repo-Commit" in response.headers:
        named = [(key, response.headers[key].removeprefix("W/").strip('"')) for key in _PATH_HEADERS if key in response.headers]
    files: list[Any] = []
    if "/api/models/" in response.url.path and response.is_success:
        response.read()
        answer = response.json()
        entries = answer if isinstance(answer, list) else [answer, *(answer.get("siblings") or ())]
        for entry in [*entries, *(entry["lfs"] for entry in entries if entry.get("lfs"))]:
            named += [(key, entry[key]) for key in _PATH_KEYS if entry.get(key) is not None]
            files += [entry[key] for key in ("path", "rfilename") if key in entry]
    for key, value in named:
        if not isinstance(value, str) or not _SAFE_NAME.fullmatch(value):
            raise _unsafe(response, key, value)
    for file in files:
        if not isinstance(file, str) or {"..", ""} & set(re.split(r"[/\\]", file)) or re.match("[A-Za-z]:", file):
            raise _unsafe(response, "file name", file)


def _unsafe(response: Any, key: str, value: Any) -> CheckpointError:
    hub = f"{response.url.scheme}://{response.url.netloc.decode()}"
    return CheckpointError(
        f"the hub {hub} sent {key} {repr(value)[:80]}, which is no name inside the cache, so nothing of it was written;"
        " check HF_ENDPOINT and the network, or give a local folder"
    )


def listing(repository: str, revision: str | None) -> dict[str, int]:
    """Names and sizes of the repository's files; empty if the hub cannot be reached, as all may be in the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        siblings = HfApi().model_info(repository, revision=revision, files_metadata=True).siblings
    except (HfHubHTTPError, CheckpointError):
        raise
    except Exception:  # noqa: BLE001 - the client's own errors of connections differ from release to release
        return {}
    return {file.rfilename: file.size or 0 for file in siblings or ()}


def cache_folder() -> Path:
    """Where downloads are kept."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def is_cached(repository: str, revision: str | None, file: str) -> bool:
    """Whether a file is in the cache."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repository, file, revision=revision), str)


def download(repository: str, revision: str | None, patterns: list[str], progress: Progress | None) -> Path:
    """Downloads the files that fit, unless they are in the cache, and returns their folder; `progress` gets the bytes."""
    from huggingface_hub import snapshot_download

    bars = {} if progress is None else {"tqdm_class": _bar(progress)}
    return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, **bars))


def _bar(progress: Progress) -> type[Any]:
    """A tqdm class that shows nothing and reports the bytes of the one bar that counts files as they will be."""
    from huggingface_hub.utils import tqdm

    class Reported(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("unit") == "B" and not str(options.get("name")).endswith(".transfer")
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                progress.advance(int(n or 0))

    return Reported


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository after an upload: its address, whether only its owner can read it, and bytes and sha256 (of large ones) of its files."""

    address: str
    private: bool
    files: dict[str, tuple[int | None, str | None]]


def upload_files(folder: Path, names: Iterable[str], texts: dict[str, str], repository: str, *, private: bool, message: str) -> Repository:
    """Uploads files of a folder, then `texts` by name, into a repository that is made if there is none; `private` is for a new one.

    What is there already is not sent again. Raises CheckpointError without a token.
    """
    from huggingface_hub import HfApi, constants, get_token

    if not get_token():
        raise CheckpointError("there is no token for the Hugging Face hub; run hf auth login, or set HF_TOKEN to one that may write")
    hub = HfApi()
    hub.create_repo(repository, private=private, exist_ok=True)
    hub.upload_folder(repo_id=repository, folder_path=folder, allow_patterns=[glob.escape(name) for name in names], commit_message=message)
    for name, text in texts.items():
        hub.upload_file(repo_id=repository, path_or_fileobj=text.encode(), path_in_repo=name, commit_message=message)
    facts = hub.model_info(repository, files_metadata=True)
    files = {each.rfilename: (each.size, each.lfs.sha256 if each.lfs else None) for each in facts.siblings or ()}
    return Repository(address=f"{constants.ENDPOINT}/{repository}", private=bool(facts.private), files=files)
