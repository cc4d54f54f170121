"""The errors of an export. Each message says what was wrong, with the value, and what to do about it.

ExportError
  CheckpointError   a checkpoint that is missing, damaged, or not a Gemma 4 pair
  ParityError       an export that does not compute what its checkpoint computes
  PackageError      a device package that cannot be made here: a tool or a download is missing
"""

from edge_devices.errors import EdgeError


class ExportError(EdgeError):
    """Base of the errors of the exporter."""


class CheckpointError(ExportError):
    """A source that cannot be read, or is not what the user declared it to be."""


class ParityError(ExportError):
    """The exported files differ from the reference by more than the limits."""


class PackageError(ExportError):
    """A device package cannot be made on this machine."""
