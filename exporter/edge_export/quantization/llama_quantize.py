"""Quantization by llama.cpp itself, in a child process. The only module of the exporter that imports llama-cpp-python.

llama.cpp ends the process on a failed assertion, so it runs in a child, whose death becomes an ExportError.
The child is this module, with the arguments SOURCE DESTINATION QUANTIZATION THREADS [IMPORTANCE].
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edge_devices.children import import_paths, limited_command, run_child
from edge_export.checkpoint.safetensors import FloatType
from edge_export.errors import ExportError
from edge_export.quantization.importance import Importance
from edge_runtime.bundle.gguf_header import OFFERED, QUANTIZATIONS, TYPE_NUMBERS

# Written by our own converter, without llama.cpp.
DIRECT: dict[str, FloatType] = {"f16": "f16", "bf16": "bf16"}
# llama.cpp's own default is 8 GiB of rows at once; an export must stay below its largest tensor + 500 MB.
MAX_BUFFER_BYTES = 192 << 20
# enum ggml_log_level in ggml/include/ggml.h
_LOG_ERROR, _LOG_CONTINUED = 4, 5


def check_quantization(quantization: str) -> None:
    """Raises ExportError unless the name is one of OFFERED."""
    if quantization not in OFFERED:
        raise ExportError(f"quantization {quantization!r} is unknown; choose one of {', '.join(OFFERED)}")


def quantize_gguf(
    source: Path,
    destination: Path,
    quantization: str,
    threads: int,
    progress: Callable[[int], None] = lambda _: None,
    importance: Importance | None = None,
) -> None:
    """Writes `source` (an unquantized GGUF) to `destination`; `progress` gets the bytes written since its last call.

    With `importance` llama.cpp chooses scales that keep the important channels (matrices without importance are quantized as usual).
    Raises ExportError with llama.cpp's own message if it fails or dies; `destination` may then be incomplete.
    """
    check_quantization(quantization)
    if quantization in DIRECT:
        raise ExportError(f"{quantization} is not made by quantizing; write the GGUF with this weight type instead")
    command = [*limited_command("edge_export.quantization.llama_quantize", str(source), str(destination), quantization, str(threads))]
    if not destination.parent.is_dir():
        raise ExportError(f"llama.cpp could not quantize {source.name}: {destination.parent} does not exist; create it first")
    written = 0

    def report() -> None:
        nonlocal written
        size = destination.stat().st_size if destination.exists() else 0
        progress(size - written)
        written = size

    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        if importance is not None:
            command.append(str(Path(folder) / "importance.npz"))
            np.savez(command[-1], **cast(Any, importance.values))
        child = run_child(command, environment=import_paths(), each_poll=report, failure=ExportError)
    if child.end:
        end = "" if child.code > 0 and child.reason else f" (it {child.end})"
        reason = f": {child.reason}" if child.reason else ""
        raise ExportError(f"llama.cpp could not quantize {source.name} to {quantization}{end}{reason}")


def gguf_can_be_written() -> bool:
    """Whether llama-cpp-python is installed, or the packages that ONNX graphs need are missing too."""
    return find_spec("llama_cpp") is not None or find_spec("onnx") is None


def library_version() -> str:
    """Returns the version of llama-cpp-python; raises ExportError if it is not installed. Loads no library."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("llama-cpp-python")
    except PackageNotFoundError as error:
        message = "quantizing needs llama-cpp-python, which is not installed; pip install 'edge-mtp[export]', or choose f16 or bf16"
        raise ExportError(message) from error


def _quantize_here(source: str, destination: str, quantization: str, threads: int, importance: str | None = None) -> int:
    """Runs in the child: prints what llama.cpp logs as errors, returns the exit code."""
    import ctypes

    try:
        import llama_cpp.llama_cpp as api
    except (ImportError, OSError, RuntimeError) as error:
        print(f"llama-cpp-python does not load ({error}); pip install 'edge-mtp[export]'", file=sys.stderr)
        return 1
    failing = False

    def keep_errors(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
        nonlocal failing
        failing = level == _LOG_ERROR or (failing and level == _LOG_CONTINUED)
        if failing:
            os.write(2, text)

    callback = api.llama_log_callback(keep_errors)
    api.llama_log_set(callback, ctypes.c_void_p(0))
    api.llama_backend_init()
    parameters, kind = api.llama_model_quantize_default_params(), QUANTIZATIONS[quantization]
    parameters.ftype, parameters.nthread, parameters.max_buf_size = kind.file_type, threads, MAX_BUFFER_BYTES
    if kind.raised:
        # An array that ends with one without a pattern, which is a regular expression.
        raised = (api.llama_model_tensor_override * (len(kind.raised) + 1))()
        for index, (part, type) in enumerate(kind.raised):
            raised[index] = api.llama_model_tensor_override(pattern=re.escape(part).encode(), type=TYPE_NUMBERS[type])
        parameters.tt_overrides = raised
    if importance is not None:
        with np.load(importance, allow_pickle=False) as file:
            arrays = {name: np.ascontiguousarray(file[name], np.float32) for name in file.files}
        matrix = importance_matrix(api, arrays)
        parameters.imatrix = ctypes.cast(matrix, ctypes.POINTER(api.llama_model_imatrix_data))
    return 1 if api.llama_model_quantize(os.fsencode(source), os.fsencode(destination), ctypes.byref(parameters)) else 0


def importance_matrix(api: Any, arrays: Mapping[str, NDArray[np.float32]]) -> Any:
    """Importance for llama.cpp: an array of structures, the last without a name. It points into `arrays`, which must outlive it."""
    import ctypes

    matrix = (api.llama_model_imatrix_data * (len(arrays) + 1))()
    for index, (name, values) in enumerate(arrays.items()):
        matrix[index] = api.llama_model_imatrix_data(
            name=name.encode(), data=values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), size=values.size
        )
    return matrix


if __name__ == "__main__":
    sys.exit(_quantize_here(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:6]))
