"""Reads request bodies, with limits on size, values, nesting depth and time."""

from __future__ import annotations

import asyncio
import codecs
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from edge_devices.machine.memory import return_freed_memory
from edge_runtime.server.errors import ApiError, invalid
from edge_runtime.server.json_text import MAX_VALUES, PIECE, parse_object

READ_SECONDS = 30.0
# The most bytes of all bodies that are still arriving. Small bodies are not counted, so large ones never displace them.
MAX_ARRIVING = 64 << 20
SMALL_BODY = 64 << 10
TRIM_SECONDS = 5.0
TRIM_INTERVAL = 60.0  # a trim takes malloc's locks, and all threads wait for them
_NOW = 0.0  # a time in the past: a timeout rescheduled to it expires at once
_arriving: dict[asyncio.Timeout, int] = {}  # oldest first


@dataclass(frozen=True)
class BodyLimit:
    """The most bytes and JSON values of a body."""

    size: int
    values: int


# Enough for images and sound in base64.
MEDIA_BODY = BodyLimit(16 << 20, MAX_VALUES)
# Enough for 32 prompts of 16384 token ids; each id is a value.
TEXT_BODY = BodyLimit(8 << 20, 1 << 19)


async def read_body(pieces: AsyncIterator[bytes], announced: str | None, limit: BodyLimit) -> bytearray:
    """Returns the body; `announced` is its Content-Length. Raises ApiError if it is too large or arrives too slowly."""
    if announced is not None and announced.isdecimal() and int(announced[:20]) > limit.size:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(READ_SECONDS) as timeout:
            async for piece in pieces:
                body += piece
                if len(body) > limit.size:
                    raise _too_large(limit)
                _make_room(timeout, len(body))
    except TimeoutError as error:
        reason = f"took more than {READ_SECONDS:.0f} seconds to arrive, or was the oldest of too many that had not arrived"
        raise ApiError(408, f"the request body {reason}; send it faster") from error
    finally:
        _arriving.pop(timeout, None)
    return body


class Trimmer:
    """Returns freed memory to the system after large bodies. Otherwise glibc keeps hundreds of megabytes in the gaps of its heap."""

    def __init__(self) -> None:
        self._due = False
        self._earliest = 0.0

    def after_request(self) -> None:
        """Schedules a trim for a while after this task ends, since it holds the request's memory. Trims at most once in each interval."""
        if task := asyncio.current_task():
            task.add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[object]) -> None:
        if not self._due:
            self._due = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time() + TRIM_SECONDS, self._earliest), self._trim)

    def _trim(self) -> None:
        self._due = False
        self._earliest = asyncio.get_running_loop().time() + TRIM_INTERVAL
        threading.Thread(target=return_freed_memory, name="edge-mtp trim", daemon=True).start()


def _make_room(timeout: asyncio.Timeout, size: int) -> None:
    """Records how much of a body has arrived. If all arriving bodies together are too large, lets the oldest time out."""
    if size > SMALL_BODY and timeout.when() != _NOW:
        _arriving[timeout] = size
    while sum(_arriving.values()) > MAX_ARRIVING:
        oldest = next(iter(_arriving))
        del _arriving[oldest]
        oldest.reschedule(_NOW)


def parse_json(body: bytes | bytearray, limit: BodyLimit = MEDIA_BODY) -> dict[str, Any]:
    """Parses a JSON object. Raises ApiError if `body` is not one, or exceeds a limit."""
    try:
        decoder = codecs.getincrementaldecoder(json.detect_encoding(body))("surrogatepass")
        text = "".join(decoder.decode(body[start : start + PIECE], start + PIECE >= len(body)) for start in range(0, len(body), PIECE))
    except ValueError as error:
        raise invalid(f"the body is not JSON ({error}); send an object", code="invalid_json") from error
    return parse_object(text, "the body", values=limit.values)


def _too_large(limit: BodyLimit) -> ApiError:
    return ApiError(413, f"the body has more than {limit.size} bytes; send less")
