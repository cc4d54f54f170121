"""Reads request bodies, with limits on size, nesting depth and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from edge_runtime.server.errors import ApiError, invalid

# Room for images and sound in base64.
MAX_BODY_BYTES = 16 << 20
MAX_DEPTH = 64
READ_SECONDS = 30.0


async def read_body(pieces: AsyncIterator[bytes], announced: str | None) -> bytes:
    """Returns the body; `announced` is its Content-Length. Raises ApiError if it is too large or arrives too slowly."""
    if announced is not None and announced.isdecimal() and int(announced[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for piece in pieces:
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        raise ApiError(408, f"the request body took more than {READ_SECONDS:.0f} seconds to arrive; send it faster") from error
    return bytes(body)


def parse_json(body: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises ApiError if `body` is not one, or is nested too deeply."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise invalid(f"the body is not JSON ({error}); send an object", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid(f"the body is a JSON {type(value).__name__}; send an object", code="invalid_json")
    _check_depth(value)
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner for outer in level if isinstance(outer, dict | list) for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise _too_deep()


def _too_large() -> ApiError:
    return ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes; send less")


def _too_deep() -> ApiError:
    return invalid(f"the body is nested more than {MAX_DEPTH} levels deep; reduce the nesting")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
