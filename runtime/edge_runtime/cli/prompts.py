"""The arguments of edge-run's commands: BUNDLE, which may be a hub name, and PROMPT, which is sent as bare text or as a message."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click

from edge_devices.errors import errors_as
from edge_devices.files.user_cache import cache_folder
from edge_devices.option_fields import option
from edge_runtime.bundle.bundle import hub_repository
from edge_runtime.bundle.manifest import MANIFEST_NAME
from edge_runtime.errors import RequestError
from edge_runtime.media.reading import read_image, read_sound
from edge_runtime.media.soft_rows import Media, MediaPrompt, user_message, without_media
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session
from edge_runtime.text.channels import ChannelParser, Event, Text, after_thoughts
from edge_runtime.text.chat_template import ROLE, ChatTemplate, bundle_template, is_instruction_tuned
from edge_runtime.text.constraints import ConstraintSource

# A hub name such as google/gemma-4-E2B-it stands for a bundle that `edge-export` makes once in the user's cache, after asking the user.

# Runs the exporter as a command, because this package does not import it.
_EXPORT = (sys.executable, "-P", "-c", "from edge_devices.entry_points import edge_export; edge_export()")


def hub_bundle(name: Path) -> Path:
    """Returns the folder of the bundle for a hub name, exported if necessary.

    Returns `name` itself if it is a path, if there is no terminal to ask the user, or in a device package, which has no exporter.

    On a terminal, the plan is shown first: whether the model fits this machine, and what the export takes. Ends the command if the answer
    is no, or with the exit code of a failed export.
    """
    if name.exists() or hub_repository(str(name)) is None:
        return name
    folder = cache_folder() / "bundles" / re.sub(r"[^\w.@=-]+", "--", str(name).replace(":", "="), flags=re.ASCII)
    if (folder / MANIFEST_NAME).is_file():
        return folder
    if not sys.stdin.isatty() or find_spec("edge_export") is None:
        return name
    click.echo(f"{name} is not here yet. What it would take on this machine:", err=True)
    subprocess.run([*_EXPORT, "plan", str(name)], check=False)
    click.confirm(f"Download {name} with its drafter and make a bundle of it in {folder}?", abort=True, err=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if code := subprocess.run([*_EXPORT, "pair", str(name), "--output", str(folder)], check=False).returncode:
        raise SystemExit(code)
    return folder


# The most characters of a prompt or turn from standard input; more than any context holds.
MAX_INPUT = 16 << 20
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class MessageOptions:
    """How PROMPT is sent. `raw` is None if the user did not choose. Raises a usage error for options that contradict each other."""

    system: str | None = option("-s", panel="Messages", help="The system message, which goes through the chat template.")
    thinking: bool = option(
        default=False, panel="Messages", help="Let the model think before it answers, if its chat template supports that."
    )
    raw: bool | None = option(
        "--raw/--templated",
        panel="Messages",
        help="Continue PROMPT as bare text, or send it through the chat template as a message."
        "  [default: templated for models that were taught to answer]",
    )

    def __post_init__(self) -> None:
        if self.raw and (self.system is not None or self.thinking):
            raise click.UsageError("--raw sends no message, so --system and --thinking have no effect; leave --raw or them out")


@dataclass(frozen=True, kw_only=True)
class MediaFiles:
    """Files that are sent before PROMPT."""

    images: Sequence[Path] = option(
        "--image", default=(), metavar="FILE", panel="Images and sound", help="Image before PROMPT: jpeg, png or webp. Repeatable."
    )
    sounds: Sequence[Path] = option(
        "--audio", default=(), metavar="FILE", panel="Images and sound", help="Sound before PROMPT: wav, flac or mp3. Repeatable."
    )

    def read(self, session: Session, rows: int) -> list[Media]:
        """Returns the files' contents; an image has at most `rows` soft rows. Raises RequestError if the bundle cannot take them."""
        if (self.images or self.sounds) and session.bundle.manifest.media is None:
            raise RequestError("this bundle has no encoder of images and sound; export it again with --media f16")
        return [*(read_image(path, rows) for path in self.images), *map(read_sound, self.sounds)]


@dataclass(frozen=True, kw_only=True)
class SentPrompt:
    """What is sent to the model; `template` is None for bare text."""

    sent: str | list[int] | MediaPrompt
    template: ChatTemplate | None
    thinking: bool = False

    def constraint(self, session: Session, constraint: ConstraintSource | None) -> ConstraintSource | None:
        """Returns the constraint of the answer. For a message, it applies after the thoughts."""
        if self.template is None or isinstance(self.sent, str):
            return constraint
        ids = self.sent.ids if isinstance(self.sent, MediaPrompt) else self.sent
        return after_thoughts(constraint, session.vocabulary, ids, thinking=self.thinking)

    def text(self, session: Session, generation: Generation, stop: Sequence[str]) -> Iterator[str]:
        """Yields the answer in pieces, for a message without thoughts. A tool call is text, because no tools are declared."""
        if self.template is None:
            yield from generation
            return
        parser = ChannelParser(session.vocabulary, (*stop, *self.template.stop), prompt=generation.prompt, calls=False)
        for done in generation.rounds():
            for token in done.tokens:
                yield from _texts(parser.feed(token))
            if parser.stopped_by is not None:
                break
        yield from _texts(parser.finish())


def read_prompt(prompt: str) -> str:
    """Returns PROMPT, or standard input for '-'. Raises RequestError if that is closed, not UTF-8 text, or too long."""
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise RequestError("standard input is closed; give the prompt as an argument")
    with errors_as(RequestError, "standard input is not UTF-8 text", "convert it", UnicodeDecodeError):
        text = sys.stdin.read(MAX_INPUT + 1)
    if len(text) > MAX_INPUT:
        raise RequestError(f"standard input has more than {MAX_INPUT} characters, too many for a prompt; give less")
    return text


def printable(text: str) -> str:
    """Returns a text that is safe to print at a terminal: control characters, except tab and line feed, are replaced."""
    return _CONTROL_CHARACTERS.sub("\ufffd", text)


def sent_prompt(session: Session, prompt: str, options: MessageOptions, *, media: Sequence[Media] = ()) -> SentPrompt:
    """Returns PROMPT in the form in which it is sent. Raises RequestError if the template refuses it."""
    chosen = not options.raw if options.raw is not None else options.system is not None or options.thinking
    if not (chosen or media) and (options.raw or not is_instruction_tuned(session.bundle, session.vocabulary)):
        return SentPrompt(sent=prompt, template=None)
    if media and not session.bundle.has(ROLE):
        return SentPrompt(sent=session.media_prompt(prompt, media), template=None)
    template = bundle_template(session.bundle, session.vocabulary)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages, _ = without_media([*system, user_message(prompt, media)])
    ids = template.encode(messages, thinking=options.thinking)
    return SentPrompt(sent=session.media_prompt(ids, media) if media else ids, template=template, thinking=options.thinking)


def _texts(events: list[Event]) -> Iterator[str]:
    for event in events:
        if isinstance(event, Text):
            yield event.text
