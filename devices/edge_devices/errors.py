"""The root of all errors, the errors of the devices package, and what messages are written with.

Each message says what was wrong, with the value, and what to do.

EdgeError
  DeviceError
    MeterError        a meter that is missing, denied, frozen, or returns impossible values
      FrozenBatteryError  Android's battery service returns values that were set by hand
    MeasurementError  a recording that is damaged, too short, or taken in a state that forbids figures
    TransportError    a device that refuses: no room, no permission, no such tool, files that arrive damaged
      LinkError       a device that cannot be reached now, and may be again later

Messages quote files and devices, which may be hostile: `one_line` keeps such text from moving a terminal's cursor or filling its screen.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

# The exit code of a command that Ctrl-C ended.
INTERRUPTED = 130
_LONGEST = 1600
OUT_OF_MEMORY = "there is not enough memory; close other programs"


def tell_interrupted(sentence: str = "stopped") -> None:
    """Says on standard error that Ctrl-C ended the command; on a terminal in a line of its own, because a text or ^C stands in this one."""
    if sys.stderr is not None:
        print(("\n" if sys.stderr.isatty() else "") + sentence, file=sys.stderr)


def printable(text: str) -> str:
    """Returns a text with all control characters but line ends escaped, so that no device or file moves a terminal's cursor."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Returns a message with control characters escaped; of a very long one, only its beginning and its end."""
    text = printable(text).replace("\n", "\\n")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST * 3 // 4]} ... {text[-_LONGEST // 5 :]}"


def markdown_text(text: str) -> str:
    """Returns a text from elsewhere as words of a Markdown page: no markup, no line ends."""
    escaped = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "`": "'", "[": "\\["})
    return one_line(text).translate(escaped)


def first_line(error: BaseException) -> str:
    """What a library says of an error, without what follows."""
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
    """The meter cannot be read now, or its reading cannot be trusted."""


class FrozenBatteryError(MeterError):
    """Android's battery service returns values that `dumpsys battery unplug` or `set` fixed, not the gauge's."""


class MeasurementError(DeviceError):
    """The recording yields no valid figure: damaged, too short, or disturbed."""


class TransportError(DeviceError):
    """The device cannot do what was requested; a retry changes nothing."""


class LinkError(TransportError):
    """The device cannot be reached now: unplugged, offline, restarting, not authorised. Its files stay."""


@contextlib.contextmanager
def errors_as(kind: Callable[[str], Exception], wrong: str, remedy: str, *causes: type[Exception]) -> Iterator[None]:
    """Turns `causes`, without any OSError, into an error of `kind`: what is `wrong`, with the cause in brackets, then the remedy."""
    caught = causes or (OSError,)
    try:
        yield
    except caught as error:
        raise kind(f"{wrong} ({getattr(error, 'strerror', None) or error}); {remedy}") from error
