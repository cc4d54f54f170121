"""The root of all errors, the errors of the devices package, and helpers for messages.

Each message says what was wrong, with the value, and what to do about it.

EdgeError
  DeviceError
    MeterError        a meter that is missing, denied, frozen, or returns impossible values
      FrozenBatteryError  Android's battery service returns values that were set by hand
    MeasurementError  a recording that is damaged, too short, or disturbed, so that it gives no figures
    TransportError    a device that refuses: no room, no permission, no such tool, files that arrive damaged
      LinkError       a device that cannot be reached now, but perhaps later

Messages quote files and devices, which may be hostile. `one_line` prevents such text from moving a terminal's cursor or filling its screen.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

# The exit code of a command that was ended by Ctrl-C.
INTERRUPTED = 130
_LONGEST = 1600
OUT_OF_MEMORY = "there is not enough memory; close other programs"


def tell_interrupted(sentence: str = "stopped") -> None:
    """Prints on standard error that Ctrl-C ended the command. On a terminal it begins a new line, because this one has a text or ^C."""
    if sys.stderr is not None:
        print(("\n" if sys.stderr.isatty() else "") + sentence, file=sys.stderr)


def printable(text: str) -> str:
    """Returns a text with all control characters except line ends escaped, so that it cannot move a terminal's cursor."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Returns a message with control characters escaped. If it is very long, only its beginning and end are kept."""
    text = printable(text).replace("\n", "\\n")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST * 3 // 4]} ... {text[-_LONGEST // 5 :]}"


def markdown_text(text: str) -> str:
    """Returns an untrusted text as plain words for a Markdown page, without markup and line ends."""
    escaped = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "`": "'", "[": "\\["})
    return one_line(text).translate(escaped)


def first_line(error: BaseException) -> str:
    """Returns the first line of a library's error message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def byte_text(count: int) -> str:
    """Returns a number of bytes as text: 512 B, 1.5 kB, 1.5 MB, 1.50 GB (decimal units)."""
    if count < 1000:
        return f"{count} B"
    for unit, size in (("kB", 1e3), ("MB", 1e6)):
        if count < size * 1000:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e9:.2f} GB"


class EdgeError(Exception):
    """Base of all errors that a command prints as one sentence, with exit code 1."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class DeviceError(EdgeError):
    """Base of the errors of the devices package."""


class MeterError(DeviceError):
    """A meter cannot be read now, or its reading cannot be trusted."""


class FrozenBatteryError(MeterError):
    """Android's battery service returns values that `dumpsys battery unplug` or `set` fixed, instead of the gauge's."""


class MeasurementError(DeviceError):
    """A recording gives no valid figure, because it is damaged, too short, or disturbed."""


class TransportError(DeviceError):
    """The device cannot do what was requested, and a retry would not help."""


class LinkError(TransportError):
    """The device cannot be reached now, because it is unplugged, offline, restarting or not authorised. Its files are kept."""


@contextlib.contextmanager
def errors_as(kind: Callable[[str], Exception], wrong: str, remedy: str, *causes: type[Exception]) -> Iterator[None]:
    """Turns `causes` (by default OSError) into an error of `kind`, whose message is `wrong`, the cause in brackets, and `remedy`."""
    caught = causes or (OSError,)
    try:
        yield
    except caught as error:
        raise kind(f"{wrong} ({getattr(error, 'strerror', None) or error}); {remedy}") from error
