"""Whether the kernel of a device can map a package's programs and libraries: alignment of the segments in ELF files.

A kernel with pages of 16 KiB (a Raspberry Pi 5's, phones with Android 15 and later) loads no file whose segments are aligned to 4 KiB.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from edge_export.errors import PackageError

MAGIC = b"\x7fELF"
CLASS_64, LITTLE_ENDIAN, LOAD = 2, 1, 1
# Fields of 64-bit headers, by the System V ABI: of the file from e_phoff on, and of a segment.
HEADER = struct.Struct("<32xQ14xHH6x")
SEGMENT = struct.Struct("<I4xQQ24xQ")


@dataclass(frozen=True, kw_only=True)
class LoadSegment:
    """A part of a file that is mapped: where in the file, at which address, and to what both are aligned."""

    offset: int
    address: int
    align: int

    def suits(self, page_bytes: int) -> bool:
        """Whether a kernel with such pages can map it."""
        return self.align % page_bytes == 0 and (self.address - self.offset) % page_bytes == 0 and self.align > 0


def check_pages(folder: Path, page_bytes: int) -> int:
    """Returns how many ELF files below the folder were checked. Raises PackageError for one that such a kernel does not load."""
    checked = 0
    for path in sorted(folder.rglob("*")):
        segments = load_segments(path) if path.is_file() else None
        if segments is None:
            continue
        checked += 1
        wrong = next((segment for segment in segments if not segment.suits(page_bytes)), None)
        if wrong is not None:
            raise PackageError(
                f"{path.relative_to(folder).as_posix()} is aligned to {wrong.align} bytes and does not load on kernels with pages of"
                f" {page_bytes}; report this file with its version"
            )
    return checked


def load_segments(path: Path) -> list[LoadSegment] | None:
    """Returns the segments of an ELF file that are mapped; None for any other file. Raises PackageError for one that cannot be read."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
        if head[:4] != MAGIC:
            return None
        if len(head) < HEADER.size or head[4:6] != bytes((CLASS_64, LITTLE_ENDIAN)):
            raise PackageError(f"{path.name} is no 64-bit ELF file in little endian, as all platforms have; build the package again")
        start, size, count = HEADER.unpack(head)
        file.seek(start)
        table = file.read(size * count)
    if size != SEGMENT.size or len(table) < size * count:
        raise PackageError(f"{path.name} is no complete ELF file: it has no table of {count} segments; build the package again")
    entries = list(SEGMENT.iter_unpack(table))
    return [LoadSegment(offset=offset, address=address, align=align) for kind, offset, address, align in entries if kind == LOAD]
