"""Access to the Hugging Face hub. Only this module imports huggingface_hub, and its functions must be called inside `hub_errors`.

The client turns parts of the hub's answers into paths in its cache. So each answer is checked before the client gets it.
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

# HTTP headers and JSON keys whose values huggingface_hub joins into paths.
_PATH_HEADERS = ("X-Repo-Commit", "X-Linked-ETag", "ETag", "X-Xet-Hash")
_PATH_KEYS = ("sha", "oid", "sha256", "blobId", "xetHash")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
_CLIENT_LOCK = threading.Lock()


@contextmanager
def hub_errors(missing: str, failed: str, advice: str) -> Iterator[None]:
    """Turns any error into a CheckpointError of one sentence: `missing` if the client is not installed, else `failed`."""
    try:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise CheckpointError(f"{missing}; pip install 'edge-mtp[export]'") from error
    try:
        _check_answers()
        yield
    except CheckpointError:
        raise
    except Exception as error:  # which error the client raises for a malformed answer differs between releases
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
    """Whether a connection failed. The client's HTTP library differs between releases, so its errors are recognized by name."""
    return any(base.__name__ == "TransportError" for base in type(error).__mro__)


def _check_answers() -> None:
    """Makes this process's client check each answer before it uses it; the client's other settings stay as they were."""
    from huggingface_hub import get_session, set_client_factory

    with _CLIENT_LOCK:
        session = get_session()
        if _check_answer in session.event_hooks.get("response", ()):
            return
        make = _client_factory(session)

        def checked() -> Any:  # also called when the client is replaced after a connection error
            client = make()
            client.event_hooks = client.event_hooks | {"response": [*client.event_hooks.get("response", ()), _check_answer]}
            return client

        set_client_factory(checked)


def _client_factory(session: Any) -> Callable[[], Any]:
    """Returns a factory of clients like this one.

    huggingface_hub has no public name for its own factory. In a release without the private name, the factory makes plain clients.
    """
    with suppress(ImportError, AttributeError):
        from huggingface_hub.utils import _http

        factory: Callable[[], Any] = _http._GLOBAL_CLIENT_FACTORY
        return factory
    kind, hooks = type(session), session.event_hooks
    return lambda: kind(event_hooks=hooks, follow_redirects=session.follow_redirects, timeout=session.timeout)


def _check_answer(response: Any) -> None:
    """Raises CheckpointError if a name in httpx's `response` could lead out of the cache. An ETag becomes a name only beside a commit."""
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
    """Returns names and sizes of the repository's files; empty if the hub cannot be reached, because all may be in the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        siblings = HfApi().model_info(repository, revision=revision, files_metadata=True).siblings
    except (HfHubHTTPError, CheckpointError):
        raise
    except Exception:  # noqa: BLE001 - the client's connection errors differ between releases
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
    """Downloads the files that match the patterns, unless they are cached, and returns their folder. `progress` gets the bytes."""
    from huggingface_hub import snapshot_download

    bars = {} if progress is None else {"tqdm_class": _bar(progress)}
    return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, **bars))


def _bar(progress: Progress) -> type[Any]:
    """Returns a tqdm class that shows nothing. It reports bytes of files to `progress`, and ignores the bar for transferred bytes."""
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
    """A repository after an upload: its address, whether it is private, and its files' sizes and, for large files, sha256."""

    address: str
    private: bool
    files: dict[str, tuple[int | None, str | None]]


def upload_files(folder: Path, names: Iterable[str], texts: dict[str, str], repository: str, *, private: bool, message: str) -> Repository:
    """Uploads files of a folder into a repository, then `texts` by file name.

    The repository is created if it does not exist; `private` matters only then. Files that it has already are not sent again. Raises
    CheckpointError if there is no token.
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
