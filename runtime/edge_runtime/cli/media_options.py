"""The options for images and sound, and the prompt that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import option_group, take
from edge_runtime.cli.chat import ChatValues
from edge_runtime.errors import RequestError
from edge_runtime.media.image import BUDGETS, DEFAULT_BUDGET
from edge_runtime.media.reading import read_image, read_sound
from edge_runtime.media.soft_rows import Media, MediaPrompt
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import ROLE, bundle_template

_FILE = click.Path(path_type=Path)

media_options = option_group(
    click.option(
        "--image", "images", type=_FILE, multiple=True, metavar="FILE", help="Image before PROMPT: jpeg, png or webp. Can be repeated."
    ),
    click.option(
        "--audio", "sounds", type=_FILE, multiple=True, metavar="FILE", help="Sound before PROMPT: wav, flac or mp3. Can be repeated."
    ),
    click.option(
        "--image-rows",
        type=click.Choice([str(budget) for budget in BUDGETS]),
        default=str(DEFAULT_BUDGET),
        help="The most rows that an image takes in the context: more show more, and take longer. A server's requests choose their own;"
        " for 12B and larger it is the most that they may choose.",
    ),
    panel="Images and sound",
)


@dataclass(frozen=True, kw_only=True)
class MediaValues:
    """Values of the options above."""

    images: tuple[Path, ...]
    sounds: tuple[Path, ...]
    image_rows: str


def media_values(values: dict[str, Any], *, once: bool) -> MediaValues:
    """Takes the options' values. Raises a usage error where no single prompt runs."""
    media = take(values, MediaValues)
    if (media.images or media.sounds) and not once:
        raise click.UsageError("--image and --audio need a PROMPT that runs once, not a chat or --compare; leave them out")
    return media


def with_media(session: Session, prompt: str, values: MediaValues, chat: ChatValues) -> MediaPrompt | None:
    """Returns the prompt with its media as a user's message in the bundle's chat template; None without media. Raises RequestError."""
    if not (values.images or values.sounds):
        return None
    if session.bundle.manifest.media is None:
        raise RequestError("this bundle has no encoder of images and sound; export it again with --media f16")
    budget = int(values.image_rows)
    media: list[Media] = [read_image(path, budget) for path in values.images]
    media += [read_sound(path) for path in values.sounds]
    return session.media_prompt(_message(session, prompt, values, chat), media)


def _message(session: Session, prompt: str, values: MediaValues, chat: ChatValues) -> str | Sequence[int]:
    if not session.bundle.has(ROLE):
        return prompt
    parts = [{"type": "image"}] * len(values.images) + [{"type": "audio"}] * len(values.sounds)
    message = {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}
    return bundle_template(session.bundle, session.vocabulary).encode([*chat.system_message(), message], thinking=chat.thinking)
