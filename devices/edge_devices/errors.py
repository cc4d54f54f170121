"""What can go wrong on the device's floor. Each message says what was wrong, the value, and what to do.

DeviceError
  MeterError        a meter that is missing, denied, frozen, or says what cannot be
  MeasurementError  a recording that is damaged, too short, or made in a state that forbids figures
"""


class DeviceError(Exception):
    """Base of all errors that a command prints as one sentence, with exit code 1."""


class MeterError(DeviceError):
    """The meter cannot be read now, or its answer cannot be trusted."""


class MeasurementError(DeviceError):
    """The recording holds no honest figure: damaged, too short, or disturbed."""
