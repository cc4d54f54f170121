"""Version and features of the installed backends, from a child process: a build that does not suit the processor dies on loading."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import click

from edge_devices.children.commands import limited_command
from edge_devices.children.running import run_child
from edge_runtime.backends.selection import BACKENDS, BackendKind
from edge_runtime.errors import BackendError, EdgeRuntimeError

CHILD_COMMAND = limited_command("edge_runtime.calibration.backend_info")
TIMEOUT_SECONDS = 60.0


def ask_backend(
    kind: BackendKind, child_command: Sequence[str] = CHILD_COMMAND, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, Any]:
    """Returns the version and features of a backend, or {"error": a sentence} if it cannot be used.

    llama: `version`, `system_info`, `probes` (`quantizations`, `use_extra_bufts`), `stock_reason` (why llama.cpp's own kernels multiply).
    onnx: `version`, `execution_providers`, `only_fixed_shapes` (the version runs only graphs of fixed shapes). Both: `row_kernels` (the
    variant of the project's own kernels that multiplies, None for stock ones). Raises BackendError if no child process can be started.
    """
    child = run_child([*child_command, kind], seconds=timeout_seconds, failure=BackendError)
    if isinstance(child.answer.get("error"), str):
        return {"error": child.answer["error"]}
    if child.end is not None or "version" not in child.answer:
        return {"error": f"its library {child.end or 'gave no answer'} when it was loaded"}
    return child.answer


def _llama() -> dict[str, Any]:
    from edge_runtime.backends.llama.loader import library_version, llama_library, system_info
    from edge_runtime.calibration.crash_probe import cached_probes

    return {
        "version": library_version(),
        "system_info": system_info(),
        "probes": [asdict(one) for one in cached_probes()],
        "row_kernels": llama_library().row_kernels,
        "stock_reason": llama_library().stock_reason,
    }


def _onnx() -> dict[str, Any]:
    from edge_runtime.backends.kernels.loader import variant
    from edge_runtime.backends.onnx.loader import check_version, execution_providers, library_version

    check_version(static=True)
    try:
        check_version(static=False)
        only_static = False
    except BackendError:
        only_static = True
    return {
        "version": library_version(),
        "execution_providers": execution_providers(),
        "only_fixed_shapes": only_static,
        "row_kernels": variant(),
    }


_ANSWERS: dict[BackendKind, Callable[[], dict[str, Any]]] = {"llama": _llama, "onnx": _onnx}


@click.command()
@click.argument("kind", type=click.Choice(BACKENDS))
def main(kind: BackendKind) -> None:
    """Loads the library of one backend and prints its version and features, or {"error": "..."} with exit code 1."""
    try:
        click.echo(json.dumps(_ANSWERS[kind]()))
    except EdgeRuntimeError as error:
        click.echo(json.dumps({"error": str(error)}))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
