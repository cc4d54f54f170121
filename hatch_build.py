"""The package's build step: compiles the kernels for the machine that builds, and marks the wheel with its platform.

Where there is no compiler or no kernel for the machine, the wheel is pure Python and the stock operators run.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("runtime") / "edge_runtime" / "backends" / "kernels"


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs runtime/edge_runtime/backends/kernels/build.py before a wheel or an editable install is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and adds the library to the wheel."""
        del version
        spec = importlib.util.spec_from_file_location("kernels_build", Path(self.root) / KERNELS / "build.py")
        assert spec is not None
        assert spec.loader is not None
        kernels = importlib.util.module_from_spec(spec)
        sys.modules["kernels_build"] = kernels
        spec.loader.exec_module(kernels)
        target = kernels.host_target()
        if target is None or importlib.util.find_spec("ziglang") is None:
            self.app.display_warning("edge-mtp: no kernels are compiled for this machine; the stock operators will run")
            return
        kernels.build(target, Path(self.root) / KERNELS / "lib")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(target)}"
        build_data["artifacts"].append(f"{KERNELS.as_posix()}/lib/*")


def _platform(target: str) -> str:
    """The platform of the wheel's name."""
    architecture = target.partition("-")[0]
    if "linux" in target:
        return f"manylinux_2_17_{architecture}.manylinux2014_{architecture}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
