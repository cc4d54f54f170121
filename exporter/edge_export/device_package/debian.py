"""Takes Python, the C library and a small BLAS from Debian's packages. They are read as archives, without apt, dpkg or root."""

from __future__ import annotations

import io
import lzma
import posixpath
import re
import shutil
import struct
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from edge_devices.children import run_child
from edge_devices.errors import errors_as
from edge_devices.files.atomic_write import atomic_write
from edge_devices.files.limited_read import sha256_of
from edge_export.device_package.inventory import PYTHON, SITE, Component, Platform, keep_licence, string_table, write_file
from edge_export.errors import PackageError

# numpy's wheel has OpenBLAS with LAPACK, of 30 MB. It is replaced by Debian's BLIS, of 2 MB, because a device multiplies only small
# matrices and solves no equations. numpy calls its BLAS by names with a prefix and a suffix, which are shortened in place to the usual
# names. numpy's integers have 64 bits and those of BLIS have 32. Passed by value, in little endian, both are the same below 2^31, and numpy
# passes none by address. The only module that needs LAPACK is replaced by one that raises an error.

BLAS = "libblas.so.3"
PACKAGE = "libblis4-serial"
# The folder of the library in Debian's package.
PLACE = "blis-serial"
_NAME = re.compile(rb"(?<=\0)scipy_(cblas_\w+?)64_(?=\0)")
_LIBRARY = re.compile(rb"(?<=\0)libscipy_openblas64_[\w.-]*\.so(?=\0)")
# A section's kind, offset and size. The kind of the section of symbols. A symbol's name and section; section 0 means that it is undefined.
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
    """Makes numpy in this package use lib/libblas.so.3, and removes its own libraries. Raises PackageError."""
    site = folder / SITE
    modules = [*site.glob("numpy/_core/_multiarray_umath.*.so")]
    if not modules or not (folder / "lib" / BLAS).is_file():
        raise PackageError("numpy's wheel is not built as this version of edge-mtp expects; update edge-mtp")
    offered = string_table((folder / "lib" / BLAS).read_bytes(), BLAS)[1]
    for module in modules:
        module.write_bytes(_renamed(module.read_bytes(), module.name, offered))
    for path in (*site.glob("numpy.libs/*"), *site.glob("numpy/linalg/*.so")):
        path.unlink()
    write_file(site / "numpy/linalg/_umath_linalg.py", _LINALG.encode())


def _renamed(data: bytes, name: str, offered: bytes) -> bytes:
    """Returns a module whose undefined BLAS symbols have the usual, shorter names. The rest of a longer name's room is never read."""
    place, strings = string_table(data, name)
    shorter = _NAME.sub(lambda name: name[1].ljust(len(name[0]), b"\0"), strings)
    shorter = _LIBRARY.sub(lambda name: BLAS.encode().ljust(len(name[0]), b"\0"), shorter)
    asked = [match[1] for match in _NAME.finditer(strings)]
    missing = [symbol.decode() for symbol in asked if b"\0" + symbol + b"\0" not in offered]
    missing += [symbol.decode() for symbol in _undefined(data, name, shorter) if _OF_BLAS.search(symbol)]
    if missing or not asked:
        raise PackageError(f"{name} asks for {', '.join(missing) or 'another BLAS'} beyond Debian's {PACKAGE}; update edge-mtp")
    return data[:place] + shorter + data[place + len(strings) :]


def _undefined(data: bytes, name: str, strings: bytes) -> list[bytes]:
    """Returns the names of a library's undefined symbols."""
    with errors_as(
        PackageError, f"{name} is no library that can be read", "build the package again", struct.error, ValueError, StopIteration
    ):
        start, size, count = struct.unpack_from("<40xQ10xHH", data)
        sections = (_SECTION.unpack_from(data, start + place * size) for place in range(count))
        offset, length = next((offset, length) for kind, offset, length in sections if kind == _SYMBOLS)
        symbols = _SYMBOL.iter_unpack(data[offset : offset + length])
        return [strings[at : strings.index(b"\0", at)] for at, section in symbols if section == 0]


# A mirror's InRelease has the hash of its lists, and these those of the packages. Debian's signature of it is checked where gpgv and
# Debian's keyring are installed; elsewhere the mirror is trusted by its certificate, as pip trusts its index.

RELEASE = "bookworm"
_SUITES = (("debian", RELEASE), ("debian-security", f"{RELEASE}-security"))
_ADVICE = "check the network and Debian's servers, then try again"
_ROOM = "make room, or name another cache by EDGE_MTP_CACHE"
_SECONDS = 60.0
# If gpgv prints one of these words, the text must not be used.
_REFUSED = {"BADSIG", "ERROR", "NODATA", "UNEXPECTED"}
# The most bytes of an unpacked list, and of the files in a package.
_MAX_LIST, _MAX_UNPACKED = 512 << 20, 256 << 20
# The libraries to take from each package. If there are none, only its licence texts are taken.
_LIBRARIES = {
    "libc6": "libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1 libutil.so.1 libresolv.so.2 libnss_dns.so.2 libnss_files.so.2",
    "libgcc-s1": "libgcc_s.so.1",
    "libstdc++6": "libstdc++.so.6",
    "gcc-12-base": "",
    "zlib1g": "libz.so.1",
    "libexpat1": "libexpat.so.1",
    "libffi8": "libffi.so.8",
    "libssl3": "libcrypto.so.3 libssl.so.3",
    "libbz2-1.0": "libbz2.so.1.0",
    "liblzma5": "liblzma.so.5",
    "libuuid1": "libuuid.so.1",
    "libsqlite3-0": "libsqlite3.so.0",
    PACKAGE: BLAS,
}
_PYTHON_PACKAGES = (f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", f"python{PYTHON}-minimal")
# The package with the texts of licences that other packages only name.
_LICENCE_PACKAGE = "base-files"
# Left out of the standard library: modules whose libraries are not in the package, tests, tools for installing packages and for developers,
# servers and clients of old protocols, and East Asian encodings other than Unicode.
_LEFT_OUT = re.compile(
    r"(test|lib2to3|idlelib|ensurepip|venv|turtledemo|pydoc_data|__pycache__|curses|dbm|distutils|wsgiref|xmlrpc)/|EXTERNALLY-MANAGED$"
    r"|(sitecustomize|turtle|_pydecimal|_pyio|cgi|cgitb|doctest|ftplib|imaplib|mailbox|nntplib|pdb|poplib|pydoc|smtpd|smtplib"
    r"|telnetlib|webbrowser)\.py$"
    r"|lib-dynload/(_codecs_\w+|_multibytecodec|_curses|_curses_panel|readline|_dbm|_crypt|nis|ossaudiodev|_test\w*|_xxtestfuzz|xxlimited\w*"
    r"|_ctypes_test)\."
)


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A source of packages, with the keyring for its signatures, and the most bytes that a file there may have."""

    url: str = "https://deb.debian.org"
    keyring: Path = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    max_bytes: int = 64 << 20

    @property
    def is_signature_checked(self) -> bool:
        """Whether Debian's signature can be checked here."""
        return shutil.which("gpgv") is not None and self.keyring.is_file()


DEBIAN = Mirror()


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """An entry of a mirror's list: the package's address, version and hash."""

    url: str
    version: str
    sha256: str

    @property
    def order(self) -> list[tuple[int, str]]:
        """A key that sorts versions within one release, which differ only in their numbers."""
        return [(int(digits or 0), text) for digits, text in re.findall(r"(\d+)|(\D+)", self.version)]


class DebianArchive:
    """The files of a package in memory. Symbolic links are resolved here, because not every system supports them.

    Raises PackageError if the package cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, bytes] = {}
        self._links: dict[str, str] = {}
        damaged = f"{path.name} is no package of Debian that can be read"
        with errors_as(PackageError, damaged, _ADVICE, OSError, ValueError, EOFError, lzma.LZMAError, tarfile.TarError):
            left = _MAX_UNPACKED
            with tarfile.open(fileobj=io.BytesIO(_data_member(path.read_bytes()))) as archive:
                for member in archive:
                    name = posixpath.normpath(member.name)
                    if member.issym():
                        self._links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
                    elif member.isfile() and (data := archive.extractfile(member)):
                        if (left := left - member.size) < 0:
                            raise ValueError(f"more than {_MAX_UNPACKED} bytes in it")
                        self.files[name] = data.read()

    def names(self, folder: str) -> list[str]:
        """Returns the files and links below a folder, sorted."""
        return sorted(name for name in (*self.files, *self._links) if name.startswith(folder + "/"))

    def read(self, name: str) -> bytes | None:
        """Returns a file's bytes; None if it is not a file, or is a link that leads out of the package."""
        for _ in range(8):
            if name not in self._links:
                break
            name = self._links[name]
        return self.files.get(name)


def _data_member(archive: bytes) -> bytes:
    """Returns the tar archive of the files in a .deb, which is an ar archive with headers of 60 bytes and members at even offsets."""
    place = 8
    while archive.startswith(b"!<arch>\n") and place + 60 <= len(archive):
        name, size = archive[place : place + 16], int(archive[place + 48 : place + 58])
        if size < 0:
            raise ValueError(f"a member of {size} bytes")
        if name.startswith(b"data.tar"):
            return archive[place + 60 : place + 60 + size]
        place += 60 + size + size % 2
    raise ValueError("it has no data.tar")


def add_python(folder: Path, platform: Platform, cache: Path) -> list[Component]:
    """Adds Python, its standard library and the C library to `folder`. `cache` keeps the downloads. Raises PackageError."""
    paths = fetch_archives((*_LIBRARIES, *_PYTHON_PACKAGES, _LICENCE_PACKAGE), platform.debian, cache)
    archives = {name: DebianArchive(path) for name, path in paths.items()}
    components = [_component(folder, name, archives) for name in archives]
    for name, libraries in _LIBRARIES.items():
        for library in libraries.split():
            write_file(folder / "lib" / library, _library(archives[name], platform, library))
    write_file(folder / "lib" / platform.loader, _library(archives["libc6"], platform, platform.loader), executable=True)
    python = f"usr/bin/python{PYTHON}"
    write_file(folder / f"bin/python{PYTHON}", _file(archives[f"python{PYTHON}-minimal"], python), executable=True)
    for name in _PYTHON_PACKAGES[:2]:
        _take_library_tree(archives[name], f"usr/lib/python{PYTHON}", folder / f"lib/python{PYTHON}")
    _take_common_licences(folder, archives[_LICENCE_PACKAGE])
    return components


def fetch_archives(names: Sequence[str], architecture: str, cache: Path, mirror: Mirror = DEBIAN) -> dict[str, Path]:
    """Downloads Debian's packages for an architecture ("arm64") into `cache`, and returns the file of each.

    `cache` also keeps the lists. Raises PackageError if a download fails, if a hash is wrong, or if Debian's signature is checked and
    wrong.
    """
    home = cache / f"debian-{RELEASE}-{architecture}"
    with errors_as(PackageError, f"{home} cannot be written", _ROOM):
        home.mkdir(parents=True, exist_ok=True)
    listed: dict[str, _Listed] = {}
    for place, suite in _SUITES:
        for name, entry in _entries(_list_file(mirror, place, suite, architecture, home), f"{mirror.url}/{place}", names).items():
            if name not in listed or entry.order > listed[name].order:
                listed[name] = entry
    if missing := [name for name in names if name not in listed]:
        raise PackageError(f"Debian's lists have no {', '.join(missing)}; {_ADVICE}")
    return {name: _fetched(listed[name].url, home / posixpath.basename(listed[name].url), listed[name].sha256, mirror) for name in names}


def _list_file(mirror: Mirror, place: str, suite: str, architecture: str, home: Path) -> Path:
    """Returns the list of a suite's packages, with the hash that InRelease names."""
    release, listing = f"{mirror.url}/{place}/dists/{suite}", f"main/binary-{architecture}/Packages.xz"
    signed = home / f"{suite}.InRelease"
    _download(f"{release}/InRelease", signed, mirror)
    text = _signed_text(signed, mirror.keyring) if mirror.is_signature_checked else signed.read_text(encoding="utf-8", errors="replace")
    line = re.search(rf"^ ([0-9a-f]{{64}}) +\d+ {re.escape(listing)}$", text, re.MULTILINE)
    if line is None:
        raise PackageError(f"{release}/InRelease names no {listing}; {_ADVICE}")
    return _fetched(f"{release}/{listing}", home / f"{suite}.xz", line[1], mirror)


def _signed_text(signed: Path, keyring: Path) -> str:
    """Returns the text of an InRelease that was signed by a key in Debian's keyring.

    Several keys sign it, and an older keyring lacks the newest ones. gpgv then ends as if the signature were wrong, so its status words are
    evaluated instead. A file with two texts is refused, because the key may have signed the other one. Raises PackageError.
    """
    done = run_child(["gpgv", "--quiet", "--status-fd", "2", "--keyring", keyring, "--output", "-", signed], failure=PackageError)
    words = re.findall(r"^\[GNUPG:\] (\w+)", done.errors.decode("utf-8", "replace"), re.MULTILINE)
    refused = sorted(_REFUSED & {*words})
    if not refused and "GOODSIG" not in words and {"NO_PUBKEY", "EXPKEYSIG"} & {*words}:
        raise PackageError(f"Debian's keyring here has no valid key for {signed.name}; upgrade the package debian-archive-keyring")
    if refused or done.code not in (0, 2) or "GOODSIG" not in words or words.count("PLAINTEXT") != 1:
        raise PackageError(f"Debian's signature of {signed.name} is wrong (gpgv: {', '.join(refused) or 'none is good'}); {_ADVICE}")
    return done.output.decode("utf-8", "replace")


def _entries(listing: Path, root: str, names: Sequence[str]) -> dict[str, _Listed]:
    with (
        errors_as(PackageError, f"{listing.name} cannot be read", _ADVICE, OSError, EOFError, lzma.LZMAError),
        lzma.open(listing) as packed,
    ):
        text = packed.read(_MAX_LIST).decode("utf-8", "replace")
    alternatives = "|".join(map(re.escape, names))
    entries = {}
    for stanza in re.finditer(rf"^Package: ({alternatives})\n(?:.+\n)+", text, re.MULTILINE):
        fields = dict(re.findall(r"^(Version|Filename|SHA256): (\S+)$", stanza[0], re.MULTILINE))
        if len(fields) == 3 and re.fullmatch(r"pool/[\w./+%~:-]+\.deb", fields["Filename"]):
            url = f"{root}/{fields['Filename']}"
            entries[stanza[1]] = _Listed(url=url, version=fields["Version"], sha256=fields["SHA256"])
    return entries


def _fetched(url: str, path: Path, sha256: str, mirror: Mirror) -> Path:
    """Returns `path`, to which the file is downloaded unless it is there already with the right hash."""
    if not path.is_file() or sha256_of(path) != sha256:
        _download(url, path, mirror)
        if sha256_of(path) != sha256:
            path.unlink()
            raise PackageError(f"{url} is not what Debian's lists say: its sha256 is another; {_ADVICE}")
    return path


def _download(url: str, path: Path, mirror: Mirror) -> None:
    with errors_as(PackageError, f"{path} cannot be written", _ROOM):
        atomic_write(path, _pieces(url, mirror.max_bytes), mode=0o644)


def _pieces(url: str, max_bytes: int) -> Iterator[bytes]:
    failed = errors_as(PackageError, f"{url} cannot be fetched", _ADVICE, OSError, HTTPException)
    with failed, urlopen(url, timeout=_SECONDS) as answer:
        left = max_bytes
        while data := answer.read(1 << 20):
            if (left := left - len(data)) < 0:
                raise OSError(f"more than {max_bytes} bytes")
            yield data


def _component(folder: Path, name: str, archives: dict[str, DebianArchive]) -> Component:
    archive = archives[name]
    texts = archive.read(f"usr/share/doc/{name}/copyright")
    if texts is None:  # a symbolic link to the package with the text for all packages of one source
        texts = _file(archives["gcc-12-base"], "usr/share/doc/gcc-12-base/copyright")
    return Component(
        name=name,
        version=archive.path.stem.split("_")[1].replace("%3a", ":"),
        source=f"Debian {RELEASE}, {archive.path.name}",
        licence="see its text",
        texts=(keep_licence(folder, f"debian-{name}.txt", texts),),
        sha256=sha256_of(archive.path),
    )


def _file(archive: DebianArchive, *names: str) -> bytes:
    for name in names:
        if (data := archive.read(name)) is not None:
            return data
    file = posixpath.basename(names[0])
    raise PackageError(f"Debian's {archive.path.name} has no {file}; this version of edge-mtp supports {RELEASE}'s packages, update it")


def _library(archive: DebianArchive, platform: Platform, name: str) -> bytes:
    return _file(
        archive,
        *(
            f"{place}/{name}"
            for place in (f"lib/{platform.triplet}", f"usr/lib/{platform.triplet}", f"usr/lib/{platform.triplet}/{PLACE}", "lib64")
        ),
    )


def _take_library_tree(archive: DebianArchive, source: str, destination: Path) -> None:
    for name in archive.names(source):
        relative = name.removeprefix(f"{source}/")
        if not _LEFT_OUT.search(relative) and (data := archive.read(name)) is not None:
            write_file(destination / relative, data)


def _take_common_licences(folder: Path, archive: DebianArchive) -> None:
    """Keeps the licences that the copyright texts of Debian's packages refer to by their path on a Debian system."""
    kept = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted((folder / "licences").glob("debian-*.txt")))
    named = set(re.findall(r"/usr/share/common-licenses/([A-Za-z]+(?:-[0-9.]*[0-9])?)", kept))
    for name in archive.names("usr/share/common-licenses"):
        if posixpath.basename(name) in named and (data := archive.read(name)) is not None:
            keep_licence(folder, f"common-licenses/{posixpath.basename(name)}", data)
