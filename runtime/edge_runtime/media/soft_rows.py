"""Images and sound inside a prompt: spans of soft rows, whose ids identify their content.

A soft row has no token. In its place, the prompt has a negative id that is made from a digest of the media and the encoder. So two prompts
have equal ids exactly where they have equal rows. Code that compares ids (reused prefixes, saved states) never confuses two pictures.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_devices.machine.memory import return_freed_memory
from edge_runtime.bundle.manifest import MediaInputs, MediaTokens
from edge_runtime.errors import RequestError
from edge_runtime.media.encoder_inputs import Image, Sound

Media = Image | Sound
# How many encoded media are kept. On E2B, the rows of an image with the budget 280 take 1.6 MB.
KEPT = 4


class Encoder(Protocol):
    """Computes the soft rows of media."""

    def encode(self, media: Media) -> NDArray[np.float32]:
        """Returns the rows [rows, hidden size] of an image or a sound."""

    def close(self) -> None:
        """Frees the model. Can be called twice."""


class Room(Protocol):
    """The memory that an encoder may take."""

    def admit(self, media: Media) -> None:
        """Reserves memory for encoding media. Raises RequestError if there is not enough."""


class LazyEncoder:
    """An encoder that is loaded on first use, and the rows of the newest media. `sha256` is the hash of the encoder's file.

    `memory` is asked before the encoder is loaded or runs.
    """

    def __init__(self, load: Callable[[], Encoder], sha256: str, memory: Room | None = None) -> None:
        self._load = load
        self._memory = memory
        self._sha256 = sha256
        self._encoder: Encoder | None = None
        self._kept: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def digest(self, media: Media, client: int = 0) -> bytes:
        """Returns a digest that identifies the media's rows. It differs by client, so that timing does not reveal other clients' media."""
        digest = hashlib.sha256(f"{type(media).__name__} {self._sha256} {client or ''}".encode())
        values: NDArray[np.uint8] | NDArray[np.float32] = media.rgb if isinstance(media, Image) else media.samples
        digest.update(str(values.shape).encode())
        digest.update(np.ascontiguousarray(values).data)
        return digest.digest()

    def rows(self, media: Media, digest: bytes | None = None, count: int | None = None) -> NDArray[np.float32]:
        """Returns the rows [rows, hidden size], encoded now or earlier. The caller may pass the media's `digest` if it has it.

        Raises RequestError if the number of rows is not `count`.
        """
        digest = digest or self.digest(media)
        if digest not in self._kept:
            if self._memory is not None:
                self._memory.admit(media)
            if self._encoder is None:
                self._encoder = self._load()
            rows = self._encoder.encode(media)
            if count is not None and len(rows) != count:
                raise RequestError(f"the encoder made {len(rows)} tokens of media that have {count}; export the bundle again")
            self._kept[digest] = rows
        self._kept.move_to_end(digest)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[digest]

    def close(self) -> None:
        """Frees the encoder and the kept rows. Can be called twice."""
        self._kept.clear()
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None
            return_freed_memory()


@dataclass(frozen=True, eq=False)
class Span:
    """The soft rows of one image or sound: `count` rows from position `first` on. `rows` returns them, and encodes them if necessary.

    The rows of a `whole` span attend to each other in both directions, so they must be computed together.
    """

    first: int
    count: int
    rows: Callable[[], NDArray[np.float32]]
    whole: bool = False


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """A prompt with media. Soft rows have negative `ids`, and `spans` says where they are. The prompt ends with a token."""

    ids: list[int]
    spans: tuple[Span, ...]

    @property
    def text_ids(self) -> list[int]:
        """The ids of tokens, without those of soft rows."""
        return [token for token in self.ids if token >= 0]


def row_count(media: Media, inputs: MediaInputs) -> int:
    """Returns the number of soft rows of an image or a sound."""
    if isinstance(media, Sound) and inputs.samples_per_row is not None:
        return -(-len(media.samples) // inputs.samples_per_row)
    return media.rows


def checked_rows(media: Media, inputs: MediaInputs, whole_rows: int) -> int:
    """Returns the number of soft rows. Raises RequestError for sound if there is no encoder for it, and for an image that is too large.

    `whole_rows` is the most rows of an image that must fit one batch; 0 means no limit.
    """
    if isinstance(media, Sound) and inputs.audio is None:
        raise RequestError("this bundle's encoder takes images only; leave the sound out")
    rows = row_count(media, inputs)
    if isinstance(media, Image) and 0 < whole_rows < rows:
        raise RequestError(
            f"the image has {rows} tokens, but this model's images must fit a batch, which was opened for {whole_rows};"
            " ask for less detail, or open the bundle with larger image_rows (--image-rows)"
        )
    return rows


def row_ids(digest: bytes, count: int) -> list[int]:
    """Returns `count` negative ids, each made from 31 bits of a hash stream of the digest."""
    stream = np.frombuffer(hashlib.shake_256(digest).digest(4 * count), "<u4")
    return [-1 - int(value) for value in stream >> 1]


def media_prompt(ids: Sequence[int], media: Sequence[Media], inputs: MediaInputs, encoder: LazyEncoder, client: int = 0) -> MediaPrompt:
    """Replaces each placeholder among `ids` by the begin token, the soft rows of the next media, and the end token.

    Raises RequestError unless each placeholder has exactly one image or sound of its kind.
    """
    kinds: dict[int, tuple[type[Image] | type[Sound], MediaTokens]] = {inputs.image.placeholder: (Image, inputs.image)}
    if inputs.audio is not None:
        kinds[inputs.audio.placeholder] = (Sound, inputs.audio)
    places = sum(token in kinds for token in ids)
    if places != len(media):
        raise RequestError(f"the prompt has {places} places for media, but there are {len(media)}; give one for each")
    result: list[int] = []
    spans: list[Span] = []
    left = iter(media)
    for token in ids:
        if token not in kinds:
            result.append(token)
            continue
        kind, tokens = kinds[token]
        item = next(left)
        if not isinstance(item, kind):
            raise RequestError(f"media {len(spans) + 1} is a {type(item).__name__.lower()}, its place is for another kind; exchange them")
        result.append(tokens.begin)
        digest, count = encoder.digest(item, client), row_count(item, inputs)
        spans.append(Span(len(result), count, partial(encoder.rows, item, digest, count), whole=inputs.bidirectional and kind is Image))
        result += [*row_ids(digest, count), tokens.end]
    return MediaPrompt(result, tuple(spans))


def with_places(ids: list[int], media: Sequence[Media], inputs: MediaInputs, bos: int) -> list[int]:
    """Returns ids with a placeholder for each image or sound between the beginning-of-sequence token and the text."""
    audio = inputs.audio or inputs.image
    places = [(inputs.image if isinstance(item, Image) else audio).placeholder for item in media]
    start = 1 if bos >= 0 and ids[:1] == [bos] else 0
    return [*ids[:start], *places, *ids[start:]]


def pieces(first: int, end: int, spans: Sequence[Span], longest: int) -> Iterator[tuple[int, int, Span | None]]:
    """Yields (start, end, span) for the parts of a prompt from `first` to `end`. Each part is in one span, or in none (None).

    A part has at most `longest` positions, except that a `whole` span is always one part.
    """
    at = first
    for span in (*spans, None):
        start, stop = (end, end) if span is None else (span.first, span.first + span.count)
        for limit, inside in ((min(start, end), None), (min(stop, end), span)):
            while at < limit:
                stop_at = limit if inside is not None and inside.whole else min(at + longest, limit)
                yield at, stop_at, inside
                at = stop_at


MEDIA = "media"


def user_message(text: str, media: Sequence[Media]) -> dict[str, Any]:
    """Returns a user's message: parts for the media, for which templates write placeholders, then the text."""
    if not media:
        return {"role": "user", "content": text}
    parts = [{"type": "image" if isinstance(item, Image) else "audio"} for item in media]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}], MEDIA: tuple(media)}


def without_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Media]]:
    """Returns the messages as templates take them, and all their media in order."""
    sent = [{key: value for key, value in message.items() if key != MEDIA} for message in messages]
    return sent, [media for message in messages for media in message.get(MEDIA, ())]
