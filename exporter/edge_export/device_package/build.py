"""Builds a package with all its parts and a README, as a folder that appears complete or not at all."""

from __future__ import annotations

import contextlib
import re
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from edge_devices.files.atomic_write import locked
from edge_devices.files.user_cache import cache_folder
from edge_devices.machine.device_package import NAME
from edge_devices.option_fields import option
from edge_export.device_package.debian import DEBIAN, add_python, take_small_blas
from edge_export.device_package.inventory import (
    PLATFORMS,
    Inventory,
    Platform,
    check_libraries,
    check_pages,
    cut_symbols,
    take_inventory,
    write_file,
)
from edge_export.device_package.native_libraries import Step, add_kernels, add_llama, add_tools, check_kernels, open_toolchain
from edge_export.device_package.wheels import DISTRIBUTION, add_own_code, add_wheels, write_launchers
from edge_export.output import FolderKind, check_output, partial_folder

README = "README.md"
_TEXT = """\
# edge-mtp VERSION for PLATFORM

This folder runs bundles on a device where nothing is installed. A bundle is a folder that `edge-export`
made of a model and its drafter; it must have FORMATS files. A small one to begin with:
`edge-export reference --chat --format FORMAT -o my-bundle`.

Copy this folder and a bundle to the device:

    COPY

Then, on the deviceSHELL, chat:

    PACKAGE/bin/edge-run chat my-bundle

Serve on the local network; the page is at http://ADDRESS:8080, the OpenAI API at http://ADDRESS:8080/v1:

    PACKAGE/bin/edge-run serve my-bundle --host 0.0.0.0 --api-key CHOOSE-A-KEY

Measure what drafts bring; `edge-bench report runs.jsonl` shows the records on a computer with edge-mtp:

    PACKAGE/bin/edge-bench run my-bundle --runs runs.jsonl

`PACKAGE/bin/edge-run doctor` says what works on the device. KERNELS
"""
_COPY = {
    "android-arm64": "adb push PACKAGE my-bundle /data/local/tmp/",
    "linux-arm64": "scp -r PACKAGE my-bundle pi@raspberrypi:",
    "linux-x64": "scp -r PACKAGE my-bundle USER@HOST:",
}


def copy_command(platform: Platform, package: str) -> str:
    """Returns the command that copies a package with this name, and a bundle, to a device."""
    return _COPY[platform.name].replace("PACKAGE", shlex.quote(package))


def write_readme(folder: Path, platform: Platform, package: str, version: str, backends: tuple[str, ...], kernels: tuple[str, ...]) -> None:
    """Writes the README of a package whose folder will have the name `package`."""
    formats = [format for backend, format in (("onnx", "ONNX"), ("llama", "GGUF")) if backend in backends]
    values = {
        "COPY": copy_command(platform, package),
        "PACKAGE": shlex.quote(package),
        "VERSION": version,
        "PLATFORM": platform.name,
        "FORMATS": " or ".join(formats),
        "FORMAT": formats[0].lower(),
        "SHELL": " (`adb shell`, then `cd /data/local/tmp`)" if platform.name.startswith("android") else "",
        "KERNELS": f"{kernels_sentence(kernels)}.",
    }
    write_file(folder / README, re.sub("|".join(values), lambda word: values[word[0]], _TEXT).encode())


def kernels_sentence(kernels: tuple[str, ...]) -> str:
    """Returns a sentence, without a full stop, that says which kernels are used."""
    return f"Row kernels: {', '.join(kernels)}; the processor decides which runs" if kernels else "No row kernels: standard operators"


BACKENDS = ("llama", "onnx")
# The extras that every package has in addition to its backends.
_ALWAYS = ("grammar", "serve")
# Many other folders contain a package.json, but only ours has a platform and backends.
PACKAGE = FolderKind(
    name="package",
    list_name=NAME,
    unlisted=frozenset((NAME,)),
    is_ours=lambda listed: str(listed.get("platform")) in PLATFORMS and isinstance(listed.get("backends"), list),
)


@dataclass(frozen=True, kw_only=True)
class PackageRequest:
    """What to build: `platform` is a key of PLATFORMS, `backends` are some of BACKENDS.

    `tools` adds llama.cpp's own tools, which do not need Python.
    """

    platform: str
    output: Path
    backends: tuple[str, ...] = option(
        "--backend",
        default=("onnx",),
        choices=BACKENDS,
        help="A backend to include; may be repeated. llama needs a compiler.  [default: onnx]",
    )
    tools: bool = option("--with-llama-tools", default=False, help="Add llama.cpp's own tools as static programs, which need no Python.")
    media: bool = option("--with-media", default=False, help="Add what decodes images and sound: Pillow and soundfile.")
    without_kernels: bool = option(
        default=False, help="Leave the row kernels out, which read weights once for a whole step: standard operators run."
    )
    force: bool = option(default=False, help="Replace an existing package as soon as the new one is complete.")

    @property
    def extras(self) -> tuple[str, ...]:
        """The extras of edge-mtp whose libraries are in the package."""
        return (*self.backends, *_ALWAYS, *(("media",) if self.media else ()))

    @property
    def command(self) -> str:
        """The command that makes a package like this one."""
        flags = {"--with-llama-tools": self.tools, "--with-media": self.media, "--without-kernels": self.without_kernels}
        words = ["edge-export", "package", self.platform, "-o", "FOLDER", *(f"--backend {kind}" for kind in self.backends)]
        return " ".join(words + [flag for flag, given in flags.items() if given])

    def additions(self) -> dict[str, str]:
        """Returns, by extra, the option that adds it to the package; "" if it is included already."""
        possible = {kind: f"--backend {kind}" for kind in possible_backends(PLATFORMS[self.platform])} | {"media": "--with-media"}
        return possible | dict.fromkeys(self.extras, "")


def possible_backends(platform: Platform) -> tuple[str, ...]:
    """Returns the backends that a package for the platform can have."""
    return BACKENDS if platform.processors else ("onnx",)


def make_package(request: PackageRequest, step: Step, notify: Callable[[str], None] = lambda _: None) -> Inventory:
    """Builds the package's folder and returns its inventory.

    `step` gets a title for each step. Debian's lists, downloads and compiled files are kept in one folder, with which only one package is
    built at a time. `notify` gets a line if another process is building one. Raises ExportError; then no unfinished package is left."""
    check_output(request.output, request.force, PACKAGE)
    if not request.without_kernels:
        check_kernels(PLATFORMS[request.platform])
    cache = cache_folder() / "packages"
    with contextlib.suppress(OSError):  # later writes to the folder report the reason
        cache.mkdir(parents=True, exist_ok=True)
    with locked(cache.resolve(), lambda: notify(f"Another package is being built with {cache}; waiting for its end.")):
        return _build(request, cache, step)


def _build(request: PackageRequest, cache: Path, step: Step) -> Inventory:
    platform = PLATFORMS[request.platform]
    with partial_folder(request.output, request.force, PACKAGE) as folder, tempfile.TemporaryDirectory(prefix="edge-package-") as name:
        scratch = Path(name)
        toolchain = open_toolchain(cache) if "llama" in request.backends or request.tools else None
        step(
            "Python and the C library from Debian"
            + ("" if DEBIAN.is_signature_checked else ", by its certificate: no gpgv with Debian's keyring")
        )
        components = add_python(folder, platform, cache)
        step("wheels")
        components += add_wheels(folder, platform, request.extras, scratch)
        take_small_blas(folder)
        if toolchain is not None and "llama" in request.backends:
            components.append(add_llama(folder, platform, toolchain, step))
        if toolchain is not None and request.tools:
            components += add_tools(folder, platform, toolchain, step)
        step("own code and launchers")
        components.append(add_own_code(folder, request.extras))
        write_launchers(folder, platform, request.backends)
        kernels = () if request.without_kernels else add_kernels(folder, platform, cache, step)
        write_readme(folder, platform, request.output.resolve().name, version(DISTRIBUTION), request.backends, kernels)
        check_libraries(folder)
        checked = check_pages(folder, platform.page_bytes)
        cut = cut_symbols(folder) / 1e6
        step(f"{checked} programs and libraries suit pages of {platform.page_bytes // 1024} KiB, {cut:.1f} MB of symbols cut off; hashing")
        inventory = Inventory(
            platform=platform.name,
            version=version(DISTRIBUTION),
            backends=request.backends,
            licences=tuple(components),
            row_kernels=kernels,
            command=request.command,
            additions=request.additions(),
        )
        return take_inventory(folder, inventory)
