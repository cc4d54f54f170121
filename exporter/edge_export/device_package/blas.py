"""numpy with a small BLAS: Debian's BLIS, of 2 MB, in the place of the OpenBLAS with LAPACK of its wheel, of 30 MB.

A device multiplies small matrices and solves nothing. numpy asks for its BLAS by names with a prefix and a suffix, which are shortened in
place to the usual ones. Its integers have 64 bits and BLIS' have 32: by value and in little endian both are the same below 2^31, and numpy
passes none by address. The one module that needs LAPACK is replaced by one that says so.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from edge_devices.errors import errors_as
from edge_export.device_package.inventory import load_segments, write_file
from edge_export.device_package.platforms import SITE
from edge_export.errors import PackageError

BLAS = "libblas.so.3"
PACKAGE = "libblis4-serial"
# The folder of the library in Debian's package.
PLACE = "blis-serial"
_NAME = re.compile(rb"(?<=\0)scipy_(cblas_\w+?)64_(?=\0)")
_LIBRARY = re.compile(rb"(?<=\0)libscipy_openblas64_[\w.-]*\.so(?=\0)")
# Fields of a 64-bit ELF file, by the System V ABI: of the dynamic section, and the tags of the table of strings and its size.
_ENTRY = struct.Struct("<QQ")
_STRINGS, _STRINGS_SIZE, _NEEDED, _DYNAMIC = 5, 10, 1, 2
_SEGMENT = struct.Struct("<I4xQQ8xQ16x")
# Kind, offset and size of a section, the kind of that of names asked for and offered; name and section of each, 0 if it is asked for.
_SECTION, _SYMBOLS, _SYMBOL = struct.Struct("<4xI16xQQ24x"), 11, struct.Struct("<I2xH16x")
_OF_BLAS = re.compile(rb"openblas|scipy_|lapack", re.IGNORECASE)
_LINALG = '''\
"""In the place of LAPACK, which this package does not hold."""

_ilp64 = False


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotImplementedError(f"numpy.linalg's {name} needs LAPACK, which is not in this package of edge-mtp")
'''


def take_small_blas(folder: Path) -> None:
    """Makes numpy in this package use lib/libblas.so.3, and removes what it came with. Raises PackageError."""
    site = folder / SITE
    modules = [*site.glob("numpy/_core/_multiarray_umath.*.so")]
    if not modules or not (folder / "lib" / BLAS).is_file():
        raise PackageError("numpy's wheel is not built as this version of edge-mtp expects; update edge-mtp")
    offered = _strings((folder / "lib" / BLAS).read_bytes(), BLAS)
    for module in modules:
        module.write_bytes(_renamed(module.read_bytes(), module.name, offered))
    for path in (*site.glob("numpy.libs/*"), *site.glob("numpy/linalg/*.so")):
        path.unlink()
    write_file(site / "numpy/linalg/_umath_linalg.py", _LINALG.encode())


def _renamed(data: bytes, name: str, offered: bytes) -> bytes:
    """The module with the usual names of what it asks for. Shorter names leave room; what follows a name's end is read by nobody."""
    place, strings = _string_table(data, name)
    shorter = _NAME.sub(lambda name: name[1].ljust(len(name[0]), b"\0"), strings)
    shorter = _LIBRARY.sub(lambda name: BLAS.encode().ljust(len(name[0]), b"\0"), shorter)
    asked = [match[1] for match in _NAME.finditer(strings)]
    missing = [symbol.decode() for symbol in asked if b"\0" + symbol + b"\0" not in offered]
    missing += [symbol.decode() for symbol in _undefined(data, name, shorter) if _OF_BLAS.search(symbol)]
    if missing or not asked:
        raise PackageError(f"{name} asks for {', '.join(missing) or 'another BLAS'} beyond Debian's {PACKAGE}; update edge-mtp")
    return data[:place] + shorter + data[place + len(strings) :]


def needed(path: Path) -> list[str]:
    """The libraries that an ELF file names. Raises PackageError for one that cannot be read."""
    data = path.read_bytes()
    entries = _dynamic(data, path.name)
    if not any(tag == _STRINGS for tag, _ in entries):  # a static program, or the loader
        return []
    strings = _strings(data, path.name)
    return [strings[at : strings.index(b"\0", at)].decode() for tag, at in entries if tag == _NEEDED]


def check_libraries(folder: Path) -> None:
    """Raises PackageError for a library that a file of the package names and that is not in it."""
    elves = {path: load_segments(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    there = {path.name for path, segments in elves.items() if segments is not None}
    for path, segments in elves.items():
        if missing := [name for name in (needed(path) if segments else ()) if name not in there]:
            raise PackageError(f"{path.relative_to(folder).as_posix()} needs {', '.join(missing)}, which the package lacks; report this")


def _strings(data: bytes, name: str) -> bytes:
    return _string_table(data, name)[1]


def _string_table(data: bytes, name: str) -> tuple[int, bytes]:
    """The table of names, and its place in the file."""
    tags = dict(_dynamic(data, name))
    with errors_as(PackageError, f"{name} is no library that can be read", "build the package again", KeyError, StopIteration):
        address, size = tags[_STRINGS], tags[_STRINGS_SIZE]
        place = next(address - at + offset for kind, offset, at, bytes_ in _segments(data) if kind == 1 and at <= address < at + bytes_)
    return place, data[place : place + size]


def _dynamic(data: bytes, name: str) -> list[tuple[int, int]]:
    with errors_as(PackageError, f"{name} is no library that can be read", "build the package again", struct.error):
        for kind, offset, _, size in _segments(data):
            if kind == _DYNAMIC:
                return list(_ENTRY.iter_unpack(data[offset : offset + size]))
    return []


def _undefined(data: bytes, name: str, strings: bytes) -> list[bytes]:
    """The names that a library asks for."""
    with errors_as(
        PackageError, f"{name} is no library that can be read", "build the package again", struct.error, ValueError, StopIteration
    ):
        start, size, count = struct.unpack_from("<40xQ10xHH", data)
        sections = (_SECTION.unpack_from(data, start + place * size) for place in range(count))
        offset, length = next((offset, length) for kind, offset, length in sections if kind == _SYMBOLS)
        symbols = _SYMBOL.iter_unpack(data[offset : offset + length])
        return [strings[at : strings.index(b"\0", at)] for at, section in symbols if section == 0]


def _segments(data: bytes) -> list[tuple[int, int, int, int]]:
    """Kind, offset, address and size of each segment."""
    start, size, count = struct.unpack_from("<32xQ14xHH", data)
    return [_SEGMENT.unpack_from(data, start + place * size) for place in range(count)]
