"""The project's build step: compiles the kernels for the machine that builds, and marks the wheel with its platform.

With EDGE_MTP_KERNELS_FOR=all, as `make dist` sets it, a wheel gets the kernels of every platform that has any: it installs anywhere and
makes device packages without a compiler. Where there is no compiler or no kernel for the machine, the wheel is pure Python and the stock
operators run.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "EDGE_MTP_KERNELS_FOR"
KERNELS = Path("runtime") / "edge_runtime" / "backends" / "kernels"
IN_WHEEL = "edge_runtime/backends/kernels/lib"


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs runtime/edge_runtime/backends/kernels/build.py before a wheel or an editable install is put together."""

    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles: for an editable install into the checkout, else into a folder of its own, from which the wheel takes the libraries."""
        spec = importlib.util.spec_from_file_location("kernels_build", Path(self.root) / KERNELS / "build.py")
        assert spec is not None
        assert spec.loader is not None
        kernels = importlib.util.module_from_spec(spec)
        sys.modules["kernels_build"] = kernels
        spec.loader.exec_module(kernels)
        wanted = os.environ.get(VARIABLE, "")
        if wanted not in ("", "all"):
            raise ValueError(f"{VARIABLE}={wanted} is unknown; give all, or leave it out for this machine's kernels alone")
        if importlib.util.find_spec("ziglang") is None:
            if wanted:
                raise RuntimeError(f"{VARIABLE}={wanted} needs ziglang, which is not installed here; install requirements/build.txt")
            self.app.display_warning("edge-mtp: no kernels are compiled for this machine; the stock operators will run")
            return
        host = kernels.host_target()
        targets = list(kernels.TARGETS.values()) if wanted else [host] if host else []
        if not targets:
            self.app.display_warning("edge-mtp: there are no kernels for this machine; the stock operators will run")
        self._scratch = tempfile.TemporaryDirectory(prefix="edge-mtp-kernels-")
        folder = Path(self.root) / KERNELS / "lib" if version == "editable" else Path(self._scratch.name)
        for target in targets:
            library = kernels.build(target, folder, cache=Path(self._scratch.name) / "zig")
            build_data["force_include"][str(library)] = f"{IN_WHEEL}/{library.name}"
        if targets and not wanted:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform(host)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was compiled: the wheel has it."""
        del version, build_data, artifact_path
        if self._scratch is not None:
            self._scratch.cleanup()


def _platform(target: str) -> str:
    """The platform of the wheel's name."""
    architecture = target.partition("-")[0]
    if "linux" in target:
        return f"manylinux_2_17_{architecture}.manylinux2014_{architecture}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
