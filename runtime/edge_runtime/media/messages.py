"""Images and sound in the messages of a conversation.

Chat templates write a placeholder for each part of the type image or audio; the media themselves are kept beside, under the key `media`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.media.image import Image
from edge_runtime.media.soft_rows import Media

MEDIA = "media"


def user_message(text: str, media: Sequence[Media] = ()) -> dict[str, Any]:
    """Returns a user's message: the media, then the text."""
    if not media:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [*map(part_of, media), {"type": "text", "text": text}], MEDIA: tuple(media)}


def part_of(media: Media) -> dict[str, str]:
    """Returns the part of a message's content for which templates write the placeholder."""
    return {"type": "image" if isinstance(media, Image) else "audio"}


def without_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Media]]:
    """Returns the messages as templates take them, and the media of all in order."""
    sent = [{key: value for key, value in message.items() if key != MEDIA} for message in messages]
    return sent, [media for message in messages for media in message.get(MEDIA, ())]
