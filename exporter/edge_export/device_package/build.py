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
from edge_devices.option_fields import option
from edge_export.device_package.blas import check_libraries, take_small_blas
from edge_export.device_package.debian import add_python, is_signature_checked
from edge_export.device_package.inventory import PACKAGE_NAME, Inventory, check_pages, cut_symbols, take_inventory
from edge_export.device_package.llama_build import add_llama, add_tools, open_toolchain
from edge_export.device_package.own_code import add_own_code, write_launchers
from edge_export.device_package.platforms import PLATFORMS
from edge_export.device_package.wheels import DISTRIBUTION, add_wheels
from edge_export.output.atomic_folder import FolderKind, check_output, partial_folder

BACKENDS = ("llama", "onnx")
# Many other folders have a package.json; only ours has a platform and backends.
PACKAGE = FolderKind(
    name="package",
    list_name=PACKAGE_NAME,
    unlisted=frozenset((PACKAGE_NAME,)),
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
    force: bool = option(default=False, help="Replace an existing package as soon as the new one is complete.")


def make_package(request: PackageRequest, step: Callable[[str], None], notify: Callable[[str], None] = lambda _: None) -> Inventory:
    """Builds the folder and returns its inventory; `step` gets a title for each step. Raises ExportError; then no file is left.

    Debian's lists, downloads and compiled files are kept in one folder, where one package is built at a time: `notify` gets a line where
    another process builds one.
    """
    check_output(request.output, request.force, PACKAGE)
    cache = cache_folder() / "packages"
    with contextlib.suppress(OSError):  # whoever writes there will say why
        cache.mkdir(parents=True, exist_ok=True)
    with locked(cache.resolve(), lambda: notify(f"Another package is being built with {cache}; waiting for its end.")):
        return _build(request, cache, step)


def _build(request: PackageRequest, cache: Path, step: Callable[[str], None]) -> Inventory:
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
        components += add_wheels(folder, platform, (*request.backends, *(("media",) if request.media else ())), scratch)
        take_small_blas(folder)
        if toolchain is not None and "llama" in request.backends:
            components.append(add_llama(folder, platform, toolchain, step))
        if toolchain is not None and request.tools:
            components += add_tools(folder, platform, toolchain, step)
        step("own code and launchers")
        components.append(add_own_code(folder, platform))
        write_launchers(folder, platform, request.backends)
        check_libraries(folder)
        checked = check_pages(folder, platform.page_bytes)
        cut = cut_symbols(folder) / 1e6
        step(f"{checked} programs and libraries suit pages of {platform.page_bytes // 1024} KiB, {cut:.1f} MB of symbols cut off; hashing")
        return take_inventory(folder, platform.name, version(DISTRIBUTION), request.backends, components)
