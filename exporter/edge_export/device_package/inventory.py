"""What a package is for and what is in it: its platform, package.json with hashes and licences, and checks of its ELF files."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from edge_devices.errors import errors_as
from edge_devices.files.limited_read import sha256_of
from edge_devices.machine.device_package import NAME, SCHEMA
from edge_export.errors import PackageError

PYTHON = "3.11"
SITE = "lib/python3/dist-packages"  # Debian's folder of Python packages, relative to the prefix


@dataclass(frozen=True, kw_only=True)
class Processors:
    """The processors of one build of llama.cpp's CPU library.

    The build is used if all `features` are in /proc/cpuinfo. `model` is zig's name for the same features.
    """

    name: str
    features: tuple[str, ...]
    model: str


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A platform for which packages are built.

    `processors` are sorted from the newest to those without required features. If there are none, llama.cpp is not built for the platform.
    `cpuinfo_key` is the line of /proc/cpuinfo with the features. `tools` is the name of the processors for which llama.cpp's static tools
    are built. `page_bytes` are the largest memory pages of kernels on which the package runs.
    """

    name: str
    debian: str
    machine: str
    loader: str
    wheel_tags: tuple[str, ...]
    shell: str
    cpuinfo_key: str
    processors: tuple[Processors, ...]
    tools: str
    page_bytes: int

    @property
    def triplet(self) -> str:
        """The name of the folder of libraries in Debian's packages."""
        return f"{self.machine}-linux-gnu"


_ARM_PROCESSORS = (
    Processors(name="dotprod", features=("asimddp", "asimdhp"), model="generic+v8_2a+dotprod+fullfp16"),
    Processors(name="armv8", features=(), model="generic"),
)


def _tags(machine: str) -> tuple[str, ...]:
    """Returns the manylinux tags whose C library is not newer than the package's own, which is Debian 12's 2.36."""
    return (*(f"manylinux_2_{minor}_{machine}" for minor in (34, 31, 28, 27, 26, 24, 17)), f"manylinux2014_{machine}")


def _arm(name: str, shell: str) -> Platform:
    return Platform(
        name=name,
        debian="arm64",
        machine="aarch64",
        loader="ld-linux-aarch64.so.1",
        wheel_tags=_tags("aarch64"),
        shell=shell,
        cpuinfo_key="Features",
        processors=_ARM_PROCESSORS,
        tools="dotprod",
        page_bytes=16384,
    )


PLATFORMS = {
    platform.name: platform
    for platform in (
        _arm("android-arm64", "/system/bin/sh"),
        _arm("linux-arm64", "/bin/sh"),
        Platform(
            name="linux-x64",
            debian="amd64",
            machine="x86_64",
            loader="ld-linux-x86-64.so.2",
            wheel_tags=_tags("x86_64"),
            shell="/bin/sh",
            cpuinfo_key="flags",
            processors=(),
            tools="",
            page_bytes=4096,
        ),
    )
}


LICENCES = "licences"
_NAMED_PARTS = ("numpy", "onnxruntime", "tokenizers", "llama_cpp", "edge_bench", "edge_runtime", "edge_devices")
MAGIC = b"\x7fELF"
CLASS_64, LITTLE_ENDIAN = 2, 1
LOAD, DYNAMIC = 1, 2
# Fields of 64-bit headers, by the System V ABI: of the file from e_phoff on, and of a segment; e_shoff, and e_shnum with e_shstrndx.
HEADER = struct.Struct("<32xQ14xHH6x")
SEGMENT = struct.Struct("<I4xQQ8xQ8xQ")
SECTIONS = ((40, 8), (60, 4))
# Entries of the dynamic section: a tag and its value.
_ENTRY = struct.Struct("<QQ")
_NEEDED, _STRINGS, _STRINGS_SIZE = 1, 5, 10


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component of the package. `texts` are paths of its licence texts below the package's root. `sha256` is that of its archive."""

    name: str
    version: str
    source: str
    licence: str
    texts: tuple[str, ...]
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class PackagedFile:
    """A file. `path` is relative to the package's root, with slashes."""

    path: str
    bytes: int
    sha256: str
    executable: bool


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The content of package.json, of which devices read a part (edge_devices.machine.device_package).

    `sizes` are bytes per part. package.json itself is not in `files`. `row_kernels` are the variants of the project's own kernels.
    """

    platform: str
    version: str
    backends: tuple[str, ...]
    files: tuple[PackagedFile, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    licences: tuple[Component, ...] = ()
    row_kernels: tuple[str, ...] = ()
    command: str = ""
    additions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA


def keep_licence(folder: Path, name: str, text: bytes) -> str:
    """Writes a licence text, and returns its path relative to the package's root."""
    write_file(folder / LICENCES / name, text)
    return f"{LICENCES}/{name}"


def write_file(path: Path, data: bytes, *, executable: bool = False) -> None:
    """Writes a file of the package, and creates its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o755 if executable else 0o644)


def copy_file(source: Path, destination: Path, *, executable: bool = False) -> None:
    """Copies a file into the package, and creates its folder if needed."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)
    destination.chmod(0o755 if executable else 0o644)


def take_inventory(folder: Path, inventory: Inventory) -> Inventory:
    """Hashes every file of the package, and writes package.json. Returns the inventory with files and sizes."""
    files = [
        PackagedFile(
            path=path.relative_to(folder).as_posix(),
            bytes=path.stat().st_size,
            sha256=sha256_of(path),
            executable=_is_started(path.relative_to(folder).as_posix()),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    sizes: dict[str, int] = {}
    for file in files:
        sizes[_part(file.path)] = sizes.get(_part(file.path), 0) + file.bytes
    inventory = replace(inventory, files=tuple(files), sizes=dict(sorted(sizes.items())))
    write_file(folder / NAME, (json.dumps(asdict(inventory), indent=1) + "\n").encode())
    return inventory


def _is_started(path: str) -> bool:
    """Whether a device must be able to execute this file. Windows, where packages are built too, does not record that."""
    return path.startswith(("bin/", "tools/", "lib/ld-linux-"))


def _part(path: str) -> str:
    """Returns the part of the package to which a file belongs: a Python package, or the top folder."""
    words = path.split("/")
    if words[-1].startswith("libedge_rows"):
        return "row kernels"
    if words[:3] == ["lib", "python3", "dist-packages"]:
        name = words[3].partition(".")[0].partition("-")[0]
        return name if name in _NAMED_PARTS else "other packages"
    if words[0] == "lib" and words[1].startswith("llama-"):
        return "llama_cpp"
    if words[0] in (LICENCES, "tools"):
        return words[0]
    if words[:2] == ["lib", "python3.11"] or words[-1] == "python3.11":
        return "python"
    return "launchers" if words[0] == "bin" else "system libraries" if words[0] == "lib" else words[0]


@dataclass(frozen=True, kw_only=True)
class LoadSegment:
    """A part of an ELF file that is mapped into memory: its offset in the file, address, size and alignment."""

    offset: int
    address: int
    bytes: int
    align: int

    def suits(self, page_bytes: int) -> bool:
        """Whether a kernel with pages of this size can map the segment."""
        return self.align % page_bytes == 0 and (self.address - self.offset) % page_bytes == 0 and self.align > 0


def check_pages(folder: Path, page_bytes: int) -> int:
    """Checks all ELF files below the folder, and returns their number.

    Raises PackageError for a file that a kernel with these pages does not load. With pages of 16 KiB (Raspberry Pi 5, phones with Android
    15 and later), a kernel does not load files whose segments are aligned to 4 KiB.
    """
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


def cut_symbols(folder: Path) -> int:
    """Cuts parts that are never mapped off all ELF files: debug symbols and the section table. Returns the bytes. Raises PackageError."""
    cut = 0
    for path in folder.rglob("*"):
        segments = load_segments(path) if path.is_file() else None
        end = max((segment.offset + segment.bytes for segment in segments or ()), default=0)
        if not HEADER.size < end < path.stat().st_size:
            continue
        cut += path.stat().st_size - end
        with path.open("r+b") as file:
            for place, size in SECTIONS:
                file.seek(place)
                file.write(bytes(size))
            file.truncate(end)
    return cut


def load_segments(path: Path) -> list[LoadSegment] | None:
    """Returns the mapped segments of an ELF file; None for any other file. Raises PackageError if an ELF file cannot be read."""
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
    return [LoadSegment(offset=place, address=at, bytes=size, align=align) for kind, place, at, size, align in entries if kind == LOAD]


def check_libraries(folder: Path) -> None:
    """Raises PackageError for a library that a file of the package names and that is not in it."""
    elves = {path: load_segments(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    there = {path.name for path, segments in elves.items() if segments is not None}
    for path, segments in elves.items():
        if missing := [name for name in (needed(path) if segments else ()) if name not in there]:
            raise PackageError(f"{path.relative_to(folder).as_posix()} needs {', '.join(missing)}, which the package lacks; report this")


def needed(path: Path) -> list[str]:
    """The libraries that an ELF file names. Raises PackageError for one that cannot be read."""
    data = path.read_bytes()
    entries = _dynamic(data, path.name)
    if not any(tag == _STRINGS for tag, _ in entries):  # a static program, or the loader
        return []
    _, strings = string_table(data, path.name)
    return [strings[at : strings.index(b"\0", at)].decode() for tag, at in entries if tag == _NEEDED]


def string_table(data: bytes, name: str) -> tuple[int, bytes]:
    """The table of names in an ELF file's bytes, and its place there; `name` is for messages. Raises PackageError."""
    tags = dict(_dynamic(data, name))
    with errors_as(PackageError, f"{name} is no library that can be read", "build the package again", KeyError, StopIteration):
        address, size = tags[_STRINGS], tags[_STRINGS_SIZE]
        loaded = (segment for segment in _segments(data) if segment[0] == LOAD)
        place = next(address - at + offset for _, offset, at, length, _ in loaded if at <= address < at + length)
    return place, data[place : place + size]


def _dynamic(data: bytes, name: str) -> list[tuple[int, int]]:
    with errors_as(PackageError, f"{name} is no library that can be read", "build the package again", struct.error):
        for kind, offset, _, size, _ in _segments(data):
            if kind == DYNAMIC:
                return list(_ENTRY.iter_unpack(data[offset : offset + size]))
    return []


def _segments(data: bytes) -> list[tuple[int, int, int, int, int]]:
    """Kind, offset, address, size and alignment of each segment."""
    start, size, count = HEADER.unpack_from(data)
    return [SEGMENT.unpack_from(data, start + place * size) for place in range(count)]
