"""What can go wrong in the runtime. Each message says what was wrong, the value, and what to do.

EdgeRuntimeError
  BundleError     a bundle that cannot be honoured
  BackendError    a backend that is missing, too old, or failed
  RequestError    a prompt or an option that cannot be served
  ConfigError     a configuration that cannot be honoured

Messages quote what files say, and files may be hostile: `one_line` keeps such text from moving a terminal's cursor or filling its screen.
"""

_LONGEST = 1600
OUT_OF_MEMORY = "there is not enough memory; close other programs, or ask for less (a shorter context, a smaller model)"


def one_line(text: str) -> str:
    """Returns a message with control characters written out, and with its middle left out if it is endless."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST * 3 // 4]} ... {text[-_LONGEST // 5 :]}"


class EdgeRuntimeError(Exception):
    """Base of all errors that a command prints as one sentence, with exit code 1."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class BundleError(EdgeRuntimeError):
    """The bundle is missing, damaged, newer than this reader, or asks for what cannot be honoured."""


class BackendError(EdgeRuntimeError):
    """The library behind a backend is missing, unfit, or refused to load or decode."""


class RequestError(EdgeRuntimeError):
    """The request does not fit the model: empty prompt, context overflow, draft longer than the rewind slack."""


class ConfigError(EdgeRuntimeError):
    """The `speculative_decoding:` block has an unknown key, a value out of range, or asks for what would break the design."""
