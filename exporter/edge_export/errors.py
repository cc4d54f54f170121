"""What can go wrong in an export. Each message says what was wrong, the value, and what to do.

ExportError
  CheckpointError   a checkpoint that is missing, damaged, or not a Gemma 4 pair
  ParityError       an export that does not compute what its checkpoint computes
  PackageError      a device package that cannot be made here: a tool or a download is missing
"""

from edge_runtime.errors import one_line


class ExportError(Exception):
    """Base of all errors that the command prints as one sentence, with exit code 1."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class CheckpointError(ExportError):
    """A source that cannot be read or is not what it was given as."""


class ParityError(ExportError):
    """The exported files differ from the reference by more than the limits."""


class PackageError(ExportError):
    """A device package cannot be made on this machine."""
