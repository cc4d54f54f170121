"""A package's row kernels: those that a released wheel of edge-mtp carries, else compiled here by zig, whose compiler is a wheel too."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from edge_devices.errors import errors_as
from edge_export.device_package.inventory import copy_file
from edge_export.device_package.platforms import SITE, Platform
from edge_export.device_package.subprocesses import Step
from edge_export.device_package.wheels import own_requirements
from edge_export.errors import PackageError
from edge_runtime.backends.kernels.build import LIBRARIES, TARGETS, build, library_name, variants

IN_PACKAGE = f"{SITE}/edge_runtime/backends/kernels/lib"


def check_kernels(platform: Platform) -> None:
    """Raises PackageError where this installation neither has the platform's kernels nor can compile them."""
    if not _shipped(platform).is_file() and find_spec("ziglang") is None:
        zig = next((line for line in own_requirements("package") if line.startswith("ziglang")), "ziglang")
        raise PackageError(
            f"this installation has no row kernels for {platform.name}, and ziglang, which compiles them, is missing; pip install '{zig}', "
            "or give --without-kernels, with which standard operators run, which are slower"
        )


def add_kernels(folder: Path, platform: Platform, cache: Path, step: Step) -> tuple[str, ...]:
    """Puts the platform's library into the package, and returns its variants. `cache` keeps what zig compiles. Raises PackageError."""
    check_kernels(platform)
    shipped, target = _shipped(platform), TARGETS["Linux", platform.machine]
    if shipped.is_file():
        copy_file(shipped, folder / IN_PACKAGE / shipped.name)
    else:
        report = step(f"row kernels for {platform.machine} (minutes the first time, then kept)")
        with errors_as(PackageError, f"the row kernels cannot be built for {platform.name}", "report this error", RuntimeError, OSError):
            build(target, folder / IN_PACKAGE, cache=cache / "zig", report=report)
    return variants(target)


def _shipped(platform: Platform) -> Path:
    """Where a wheel has the platform's library, if it has one; for this machine's own platform, the library that runs here."""
    return LIBRARIES / library_name(TARGETS["Linux", platform.machine])
