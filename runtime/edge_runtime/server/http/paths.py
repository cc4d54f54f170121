"""The paths that clients write for the paths of this server."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

# Clients that are configured for llama-server, by host and port alone, leave the prefix out. Not /completions: there that is another API.
_BARE = re.compile(r"/(chat/completions|responses)(/input_tokens)?|/messages(/count_tokens)?|/models(/.*)?|/embeddings", re.DOTALL)
_PREFIX = "/v1"
_HEALTH = "/health"


def canonical(path: str) -> str:
    """Returns the path that a request means: without a slash at its end, and with the prefix of OpenAI's API."""
    path = re.sub("/{2,}", "/", path).rstrip("/") or "/"
    if _BARE.fullmatch(path):
        return _PREFIX + path
    return _HEALTH if path == _PREFIX + _HEALTH else path


def nearest(path: str, known: Collection[str]) -> str:
    """Returns what to do about a path that does not exist: the nearest one there is, or where to look."""
    near = difflib.get_close_matches(path[:200], known, n=1)
    return f"did you mean {near[0]}?" if near else "see GET /v1/models"
