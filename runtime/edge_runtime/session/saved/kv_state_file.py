"""A session's KV state as a file: a header that identifies the target, the tokens, and the backend's rows.

Layout: MAGIC, the header's length (uint32, little endian), the header (JSON), the tokens (int32, little endian), the rows.
The file is untrusted: every size in it is checked against the size of the file before it is used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edge_devices.files.atomic_write import atomic_write
from edge_devices.files.typed_json import StructureError, from_json, to_json
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import SavableTarget, Target

MAGIC = b"EDGEMTPS"
VERSION = 1
MAX_HEADER_BYTES = 4096
_TOKEN = np.dtype("<i4")


@dataclass(frozen=True, kw_only=True)
class StateHeader:
    """The target and context of a saved state; `sha256` is of tokens and rows."""

    version: int
    target_sha256: str
    kv_type: str
    context: int
    tokens: int
    state_bytes: int
    sha256: str


def save_state(path: Path, target: Target, bundle: Bundle) -> None:
    """Writes the target's committed rows to `path`, atomically. Raises RequestError if that is not possible."""
    savable = _savable(target)
    if not savable.length:
        raise RequestError("the KV cache is empty, so there is no state to save; generate something first")
    tokens, state = savable.tokens.astype(_TOKEN).tobytes(), savable.state()
    header = StateHeader(
        version=VERSION,
        target_sha256=bundle.file("target").sha256,
        kv_type=savable.kv_type,
        context=savable.context,
        tokens=savable.length,
        state_bytes=len(state),
        sha256=_digest(tokens, state),
    )
    text = json.dumps(to_json(header)).encode()
    _write(path, (MAGIC, len(text).to_bytes(4, "little"), text, tokens, state))


def load_state(path: Path, target: Target, bundle: Bundle) -> None:
    """Puts the rows of a file into the target's cache. Raises RequestError if it is damaged or does not fit this target and context."""
    savable = _savable(target)
    if not path.is_file():
        raise RequestError(f"the state {path} is not a file; check the path")
    try:
        with path.open("rb") as file:
            header = _read_header(path, file)
            _check_fit(path, header, savable, bundle)
            tokens, state = file.read(header.tokens * _TOKEN.itemsize), file.read(header.state_bytes)
    except OSError as error:
        raise RequestError(f"the state {path} cannot be read ({error.strerror}); check the path") from error
    if _digest(tokens, state) != header.sha256:
        raise RequestError(f"the state {path} does not have the sha256 of its header; it is damaged, save it again")
    savable.restore(_ids(path, tokens, bundle).tolist(), state)


def _savable(target: Target) -> SavableTarget:
    if not isinstance(target, SavableTarget):
        raise RequestError("this backend cannot save or load a KV state; use the llama.cpp backend")
    return target


def _read_header(path: Path, file: BinaryIO) -> StateHeader:
    size = path.stat().st_size
    if file.read(len(MAGIC)) != MAGIC:
        raise RequestError(f"{path} is not a saved KV state; save one with --save-state")
    length = int.from_bytes(file.read(4), "little")
    if length > min(MAX_HEADER_BYTES, size):
        raise RequestError(
            f"the state {path} has a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed; it is damaged, save it again"
        )
    try:
        header = from_json(StateHeader, json.loads(file.read(length)), "header")
    except (ValueError, RecursionError, StructureError) as error:
        raise RequestError(f"the state {path} has a damaged header ({error}); save it again") from error
    if header.version != VERSION:
        raise RequestError(
            f"the state {path} has version {header.version}, this reader supports {VERSION}; upgrade edge-mtp, or save it again"
        )
    if header.tokens < 1 or header.state_bytes < 1:
        raise RequestError(f"the state {path} holds {header.tokens} tokens in {header.state_bytes} bytes; it is damaged, save it again")
    expected = file.tell() + header.tokens * _TOKEN.itemsize + header.state_bytes
    if size != expected:
        raise RequestError(f"the state {path} has {size} bytes, its header says {expected}; it is damaged, save it again")
    return header


def _check_fit(path: Path, header: StateHeader, target: SavableTarget, bundle: Bundle) -> None:
    if header.target_sha256 != bundle.file("target").sha256:
        raise RequestError(f"the state {path} is of another target; open the bundle it was saved with, or save it again")
    if header.kv_type != target.kv_type:
        raise RequestError(
            f"the state {path} has KV type {header.kv_type[:20]!r}, this session {target.kv_type};"
            f" open with --kv-type {header.kv_type[:20]}"
        )
    if header.tokens > target.context:
        raise RequestError(
            f"the state {path} has {header.tokens} tokens, the context {target.context}; open with --context {header.context}"
        )


def _ids(path: Path, tokens: bytes, bundle: Bundle) -> NDArray[np.int64]:
    ids = np.frombuffer(tokens, _TOKEN).astype(np.int64)
    size = bundle.manifest.architecture.vocab_size
    # Negative ids stand for the rows of images and sound.
    if (ids.min() < 0 and bundle.manifest.media is None) or ids.max() >= size:
        raise RequestError(f"the state {path} has tokens outside of 0..{size - 1}; it is damaged, save it again")
    return ids


def _digest(tokens: bytes, state: bytes) -> str:
    digest = hashlib.sha256(tokens)
    digest.update(state)
    return digest.hexdigest()


def _write(path: Path, parts: tuple[bytes, ...]) -> None:
    try:
        atomic_write(path, parts)
    except OSError as error:
        raise RequestError(f"the state cannot be written to {path} ({error.strerror}); choose another file") from error
