"""Python and the C library from Debian's packages, fetched by apt, which checks them against Debian's signature. Needs no root."""

from __future__ import annotations

import getpass
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edge_devices.files.limited_read import sha256_of
from edge_export.device_package.inventory import Component, copy_file, keep_licence
from edge_export.device_package.platforms import PYTHON, Platform
from edge_export.device_package.subprocesses import program_path, run
from edge_export.errors import PackageError

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
RELEASE = "bookworm"
_ADVICE = "check the network and Debian's servers, then try again"
_NEED_APT = "packages are made on Debian or a relative of it (apt install apt dpkg)"
# The libraries to take from each package; none: only its licence texts.
_LIBRARIES = {
    "libc6": "libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1 libutil.so.1 libresolv.so.2 libnss_dns.so.2 libnss_files.so.2",
    "libgcc-s1": "libgcc_s.so.1",
    "libstdc++6": "libstdc++.so.6",
    "gcc-12-base": "",
    "zlib1g": "libz.so.1",
    "libexpat1": "libexpat.so.1",
    "libffi8": "libffi.so.8",
    "libssl3": "libssl.so.3 libcrypto.so.3",
    "libbz2-1.0": "libbz2.so.1.0",
    "liblzma5": "liblzma.so.5",
    "libuuid1": "libuuid.so.1",
    "libsqlite3-0": "libsqlite3.so.0",
}
_PYTHON_PACKAGES = (f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", f"python{PYTHON}-minimal")
# Texts of the licences that other packages only name.
_LICENCE_PACKAGE = "base-files"
# Left out of the standard library: modules whose libraries are missing here, tests, and tools for installing packages.
_LEFT_OUT = re.compile(
    r"(test|lib2to3|idlelib|ensurepip|venv|turtledemo|pydoc_data|__pycache__)/|EXTERNALLY-MANAGED$|sitecustomize\.py$|turtle\.py$"
    r"|lib-dynload/(_curses|_curses_panel|readline|_dbm|_crypt|nis|ossaudiodev|_test\w*|_xxtestfuzz|xxlimited\w*|_ctypes_test)\."
)


def add_python(folder: Path, platform: Platform, cache: Path, scratch: Path) -> list[Component]:
    """Puts Python, its standard library and the C library into `folder`. `cache` keeps apt's downloads; the caller removes `scratch`.

    Raises PackageError if apt or Debian's keyring is missing, or the download fails.
    """
    archives = fetch_archives((*_LIBRARIES, *_PYTHON_PACKAGES, _LICENCE_PACKAGE), platform.debian, cache)
    for name, archive in archives.items():
        run(["dpkg-deb", "-x", archive, scratch / name], _ADVICE)
    components = [_component(folder, name, archive, scratch / name) for name, archive in archives.items()]
    for name, libraries in _LIBRARIES.items():
        for library in libraries.split():
            copy_file(_library(scratch / name, platform, library), folder / "lib" / library)
    copy_file(_library(scratch / "libc6", platform, platform.loader), folder / "lib" / platform.loader, executable=True)
    copy_file(scratch / f"python{PYTHON}-minimal/usr/bin/python{PYTHON}", folder / f"bin/python{PYTHON}", executable=True)
    for name in _PYTHON_PACKAGES[:2]:
        _take_library_tree(scratch / name / f"usr/lib/python{PYTHON}", folder / f"lib/python{PYTHON}")
    _take_common_licences(folder, scratch)
    return components


def fetch_archives(names: Sequence[str], architecture: str, cache: Path) -> dict[str, Path]:
    """Downloads Debian's packages for an architecture ("arm64") into `cache`, and returns the archive of each.

    apt keeps its lists there, so that it fetches only changes. Raises PackageError if apt or Debian's keyring is missing, or the
    download fails.
    """
    for program in ("apt-get", "dpkg-deb"):
        program_path(program, _NEED_APT)
    if not KEYRING.is_file():
        raise PackageError(f"{KEYRING} is missing, which verifies Debian's packages; apt install debian-archive-keyring")
    home = cache / f"debian-{RELEASE}-{architecture}"
    for path in (home / "state/lists/partial", home / "cache/archives/partial"):
        path.mkdir(parents=True, exist_ok=True)
    signed = f"deb [arch={architecture} signed-by={KEYRING}]"
    (home / "sources.list").write_text(
        f"{signed} http://deb.debian.org/debian {RELEASE} main\n{signed} http://deb.debian.org/debian-security {RELEASE}-security main\n"
    )
    (home / "apt.conf").write_text(
        f'APT::Architecture "{architecture}";\nAPT::Architectures {{ "{architecture}"; }};\n'
        f'Dir::State "{home}/state";\nDir::State::status "/dev/null";\nDir::Cache "{home}/cache";\n'
        f'Dir::Etc::sourcelist "{home}/sources.list";\nDir::Etc::sourceparts "/dev/null";\n'
        f'APT::Sandbox::User "{getpass.getuser()}";\nAcquire::Languages "none";\n'
    )
    environment = {"APT_CONFIG": str(home / "apt.conf"), "LC_ALL": "C"}
    run(["apt-get", "-qq", "--error-on=any", "update"], _ADVICE, environment=environment)
    # apt checks hashes of downloads, but not of files that exist already: so each time a new folder.
    archives = Path(tempfile.mkdtemp(prefix="archives-", dir=home))
    try:
        run(["apt-get", "-qq", "download", *names], _ADVICE, folder=archives, environment=environment)
        return _kept({path.name.partition("_")[0]: path for path in archives.glob("*.deb")}, names, home / "archives")
    finally:
        shutil.rmtree(archives)


def _kept(downloaded: dict[str, Path], names: Sequence[str], place: Path) -> dict[str, Path]:
    if missing := [name for name in names if name not in downloaded]:
        raise PackageError(f"apt did not fetch {', '.join(missing)}; {_ADVICE}")
    place.mkdir(exist_ok=True)
    return {name: downloaded[name].rename(place / downloaded[name].name) for name in names}


def _component(folder: Path, name: str, archive: Path, unpacked: Path) -> Component:
    version = archive.stem.split("_")[1].replace("%3a", ":")
    texts = unpacked / "usr/share/doc" / name / "copyright"
    if not texts.is_file():  # a symbolic link to the package with the text for all packages of one source
        texts = unpacked.parent / "gcc-12-base/usr/share/doc/gcc-12-base/copyright"
    return Component(
        name=name,
        version=version,
        source=f"Debian {RELEASE}, {archive.name}",
        licence="see its text",
        texts=(keep_licence(folder, f"debian-{name}.txt", texts.read_bytes()),),
        sha256=sha256_of(archive),
    )


def _library(unpacked: Path, platform: Platform, name: str) -> Path:
    for place in (f"lib/{platform.triplet}", f"usr/lib/{platform.triplet}", "lib64"):
        path = unpacked / place / name
        if path.exists():
            return path
    raise PackageError(f"Debian's {unpacked.name} has no {name}; this version of edge-mtp supports {RELEASE}'s packages, update it")


def _take_library_tree(source: Path, destination: Path) -> None:
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source).as_posix()
        if path.is_file() and not _LEFT_OUT.search(relative):
            copy_file(path, destination / relative)


def _take_common_licences(folder: Path, scratch: Path) -> None:
    """The licences that the copyright texts of Debian's packages name by their place on a Debian system."""
    kept = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted((folder / "licences").glob("debian-*.txt")))
    named = set(re.findall(r"/usr/share/common-licenses/([A-Za-z]+(?:-[0-9.]*[0-9])?)", kept))
    for path in sorted((scratch / _LICENCE_PACKAGE / "usr/share/common-licenses").iterdir()):
        if path.name in named:
            keep_licence(folder, f"common-licenses/{path.name}", path.read_bytes())
