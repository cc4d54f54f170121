"""What can go wrong on the device's floor. Each message says what was wrong, the value, and what to do.

DeviceError
  MeterError        a meter that is missing, denied, frozen, or says what cannot be
  MeasurementError  a recording that is damaged, too short, or made in a state that forbids figures
  TransportError    a device that refuses: no room, no permission, no such tool, files that arrive damaged
    LinkError       a device that cannot be reached now, and may be again later
"""

_LONGEST = 1600


class DeviceError(Exception):
    """Base of all errors that a command prints as one sentence, with exit code 1."""

    def __str__(self) -> str:
        """Messages quote what devices say: control characters are written out, so that none moves a terminal's cursor."""
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST * 3 // 4]} ... {text[-_LONGEST // 5 :]}"


class MeterError(DeviceError):
    """The meter cannot be read now, or its answer cannot be trusted."""


class MeasurementError(DeviceError):
    """The recording holds no honest figure: damaged, too short, or disturbed."""


class TransportError(DeviceError):
    """The device cannot do what is asked; asking again changes nothing."""


class LinkError(TransportError):
    """The device cannot be reached now: unplugged, offline, restarting, not authorised. What is on it stays."""
