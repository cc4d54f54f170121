"""Reads request bodies, with limits on size, values, nesting depth and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from edge_runtime.server.errors import ApiError, invalid
from edge_runtime.server.json_text import MAX_VALUES, parse_object

READ_SECONDS = 30.0


@dataclass(frozen=True)
class BodyLimit:
    """The most bytes and JSON values of a body."""

    size: int
    values: int


# Room for images and sound in base64.
MEDIA_BODY = BodyLimit(16 << 20, MAX_VALUES)
# Room for 32 prompts of 16384 token ids, which are values.
TEXT_BODY = BodyLimit(8 << 20, 1 << 19)


async def read_body(pieces: AsyncIterator[bytes], announced: str | None, limit: BodyLimit = MEDIA_BODY) -> bytes:
    """Returns the body; `announced` is its Content-Length. Raises ApiError if it is too large or arrives too slowly."""
    if announced is not None and announced.isdecimal() and int(announced[:20]) > limit.size:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for piece in pieces:
                body += piece
                if len(body) > limit.size:
                    raise _too_large(limit)
    except TimeoutError as error:
        raise ApiError(408, f"the request body took more than {READ_SECONDS:.0f} seconds to arrive; send it faster") from error
    return bytes(body)


def parse_json(body: bytes, limit: BodyLimit = MEDIA_BODY) -> dict[str, Any]:
    """Parses a JSON object. Raises ApiError if `body` is not one, or beyond a limit."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
    except ValueError as error:
        raise invalid(f"the body is not JSON ({error}); send an object", code="invalid_json") from error
    return parse_object(text, "the body", values=limit.values)


def _too_large(limit: BodyLimit) -> ApiError:
    return ApiError(413, f"the body has more than {limit.size} bytes; send less")
