"""Images and sound in requests: data: URLs and base64. Nothing is fetched."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from edge_devices.children.running import ChildBudget
from edge_runtime.media.reading import read_image, read_sound
from edge_runtime.media.soft_rows import Media
from edge_runtime.server.requests.fields import Fields

# Of one request. The context has no room for more, and each is decoded in a process of its own.
MAX_MEDIA = 16
_BUDGETS = {"low": 70, "auto": 280, "high": 1120}
_SOUNDS = ("wav", "mp3", "flac")
_DATA_URL = re.compile(r"data:image/(?:jpeg|jpg|png|webp);base64,")


@dataclass(frozen=True)
class SentMedia:
    """The bytes of an image, at most `budget` soft rows of it, or of a sound; `place` is where it is in the request."""

    kind: str
    data: bytes
    budget: int
    place: str

    def decoded(self, children: ChildBudget) -> Media:
        """Returns the decoded media, within what the request has left of its processor time. Raises RequestError."""
        return read_image(self.data, self.budget, children) if self.kind == "image" else read_sound(self.data, children)


def read_part(part: Fields) -> SentMedia:
    """Returns the media of a part of the type image_url or input_audio. Raises ApiError."""
    if part.text("type") == "input_audio":
        inner = part.inner("input_audio")
        inner.choice("format", _SOUNDS)
        return SentMedia("sound", _bytes(inner, "data", inner.text("data") or ""), 0, part.place("input_audio"))
    image: Any = part.get("image_url")
    inner = Fields(image if isinstance(image, dict) else {"url": image}, part.place("image_url"))
    detail = inner.text("detail") or part.text("detail", "auto") or "auto"
    if detail not in _BUDGETS:
        raise inner.wrong("detail", f"is {detail[:40]!r}; it must be one of {', '.join(_BUDGETS)}")
    url = inner.text("url") or ""
    begin = _DATA_URL.match(url)
    if begin is None:
        raise inner.wrong("url", f"is {url[:40]!r}; this server fetches nothing, send data:image/png;base64,... (jpeg, png or webp)")
    return SentMedia("image", _bytes(inner, "url", url[begin.end() :]), _BUDGETS[detail], inner.place("url"))


def _bytes(fields: Fields, name: str, text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data:
        raise fields.wrong(name, "is not base64; encode the file's bytes")
    return data
