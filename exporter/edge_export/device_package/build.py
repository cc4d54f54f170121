"""Builds a package: puts every part into a folder that appears complete or not at all."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from edge_devices.files.temp_files import locked
from edge_devices.files.user_cache import cache_folder
from edge_devices.machine.device_package import NAME
from edge_devices.option_fields import option
from edge_export.device_package.blas import check_libraries, take_small_blas
from edge_export.device_package.debian import add_python, is_signature_checked
from edge_export.device_package.inventory import Inventory, check_pages, cut_symbols, take_inventory
from edge_export.device_package.llama_build import add_llama, add_tools, open_toolchain
from edge_export.device_package.own_code import add_own_code, write_launchers
from edge_export.device_package.platforms import PLATFORMS, Platform
from edge_export.device_package.readme import write_readme
from edge_export.device_package.row_kernels import add_kernels, check_kernels
from edge_export.device_package.subprocesses import Step
from edge_export.device_package.wheels import DISTRIBUTION, add_wheels
from edge_export.output.atomic_folder import FolderKind, check_output, partial_folder

BACKENDS = ("llama", "onnx")
# The extras that every package has beside its backends.
_ALWAYS = ("grammar", "serve")
# Many other folders have a package.json; only ours has a platform and backends.
PACKAGE = FolderKind(
    name="package",
    list_name=NAME,
    unlisted=frozenset((NAME,)),
    is_ours=lambda listed: str(listed.get("platform")) in PLATFORMS and isinstance(listed.get("backends"), list),
)


@dataclass(frozen=True, kw_only=True)
class PackageRequest:
    """What to build: `platform` is a key of PLATFORMS, `backends` are some of BACKENDS.

    `tools` adds llama.cpp's own tools, which need no Python.
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
        default=False, help="Leave the row kernels out, which read weights once for a whole verify: standard operators run."
    )
    force: bool = option(default=False, help="Replace an existing package as soon as the new one is complete.")

    @property
    def extras(self) -> tuple[str, ...]:
        """The extras of edge-mtp whose libraries are in the package."""
        return (*self.backends, *_ALWAYS, *(("media",) if self.media else ()))

    @property
    def command(self) -> str:
        """The command that makes the same package."""
        flags = {"--with-llama-tools": self.tools, "--with-media": self.media, "--without-kernels": self.without_kernels}
        words = ["edge-export", "package", self.platform, "-o", "FOLDER", *(f"--backend {kind}" for kind in self.backends)]
        return " ".join(words + [flag for flag, given in flags.items() if given])

    def additions(self) -> dict[str, str]:
        """Returns the options, by extra, that add to the package what it lacks; "" for what is in it."""
        possible = {kind: f"--backend {kind}" for kind in possible_backends(PLATFORMS[self.platform])} | {"media": "--with-media"}
        return possible | dict.fromkeys(self.extras, "")


def possible_backends(platform: Platform) -> tuple[str, ...]:
    """Returns the backends that a package for the platform can have."""
    return BACKENDS if platform.processors else ("onnx",)


def make_package(request: PackageRequest, step: Step, notify: Callable[[str], None] = lambda _: None) -> Inventory:
    """Builds the folder and returns its inventory; `step` gets a title for each step. Raises ExportError; then no file is left.

    Debian's lists, downloads and compiled files are kept in one folder, where one package is built at a time: `notify` gets a line where
    another process builds one.
    """
    check_output(request.output, request.force, PACKAGE)
    if not request.without_kernels:
        check_kernels(PLATFORMS[request.platform])
    cache = cache_folder() / "packages"
    with contextlib.suppress(OSError):  # whoever writes there will say why
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
            + ("" if is_signature_checked() else ", by its certificate: no gpgv with Debian's keyring")
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
