"""Writes quantized GGUF files. llama.cpp's quantizer chooses scales and levels; then error compensation chooses better levels.

Only this module of the exporter imports llama-cpp-python. llama.cpp ends the process if an assertion fails, so it runs in a child process,
and its death becomes an ExportError. The child runs this module with the arguments SOURCE DESTINATION QUANTIZATION THREADS [IMPORTANCE].
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from edge_devices.children import import_paths, limited_command, run_child
from edge_export.checkpoint.checkpoint import Checkpoint, read_gguf_header
from edge_export.checkpoint.safetensors import FloatType, StoredTensor, read_rows
from edge_export.errors import ExportError
from edge_export.gguf.keys import gguf_name
from edge_export.quantization.importance import Factor, Floats, Importance, Rounded, compensated
from edge_runtime.bundle.gguf_header import OFFERED, QUANTIZATIONS, TYPE_NUMBERS, TensorInfo, tensor_type

# The float types, which our own converter writes without llama.cpp.
DIRECT: dict[str, FloatType] = {kind: kind for kind in get_args(FloatType) if kind in OFFERED}
# llama.cpp's default is 8 GiB of rows at once. The memory of an export must stay below its largest tensor + 500 MB.
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
    """Quantizes `source`, an unquantized GGUF, to `destination`. `progress` gets the bytes written since its last call.

    With `importance`, llama.cpp chooses scales that keep important channels more exactly; matrices without importance are quantized as
    usual. Raises ExportError with llama.cpp's message if it fails or dies; `destination` may then be incomplete.
    """
    check_quantization(quantization)
    if quantization in DIRECT:
        raise ExportError(f"{quantization} is not made by quantizing; write the GGUF with this weight type instead")
    command = [*limited_command("edge_export.quantization.gguf_quantization", str(source), str(destination), quantization, str(threads))]
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
    """Whether GGUF files should be written: llama-cpp-python is installed, or onnx is missing as well."""
    return find_spec("llama_cpp") is not None or find_spec("onnx") is None


def library_version() -> str:
    """Returns the version of llama-cpp-python without loading it. Raises ExportError if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("llama-cpp-python")
    except PackageNotFoundError as error:
        message = "quantizing needs llama-cpp-python, which is not installed; pip install 'edge-mtp[export]', or choose f16 or bf16"
        raise ExportError(message) from error


def _quantize_here(source: str, destination: str, quantization: str, threads: int, importance: str | None = None) -> int:
    """Quantizes in the child process. Prints what llama.cpp logs as errors, and returns the exit code."""
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
        # The array ends with an entry without a pattern. A pattern is a regular expression.
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
    """Returns importance for llama.cpp: an array of structures, the last without a name. It points into `arrays`, which must outlive it."""
    import ctypes

    matrix = (api.llama_model_imatrix_data * (len(arrays) + 1))()
    for index, (name, values) in enumerate(arrays.items()):
        matrix[index] = api.llama_model_imatrix_data(
            name=name.encode(), data=values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), size=values.size
        )
    return matrix


# Error compensation in a file that llama.cpp quantized. It keeps the scales and chooses the levels of the blocks anew.

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Bits:
    """Where a block stores `bits` bits of each level: from byte `at` on, in runs of `run` bytes.

    The lowest `bits` bits of a run's bytes hold the first `run` levels, one per byte. The next `bits` bits of the same bytes hold the next
    `run` levels, and so on.
    """

    at: int
    bits: int
    run: int

    def read(self, blocks: Bytes, weights: int) -> Bytes:
        """Returns these bits of the levels [n, weights] of blocks [n, bytes]."""
        packed = blocks[:, self.at : self._end(weights)].reshape(len(blocks), -1, 1, self.run)
        levels: Bytes = ((packed >> self._shifts) & np.uint8((1 << self.bits) - 1)).reshape(len(blocks), weights)
        return levels

    def write(self, blocks: Bytes, levels: Bytes) -> None:
        """Writes the lowest `bits` bits of levels [n, weights] into blocks [n, bytes]."""
        apart = (levels & np.uint8((1 << self.bits) - 1)).reshape(len(blocks), -1, 8 // self.bits, self.run)
        blocks[:, self.at : self._end(levels.shape[1])] = np.bitwise_or.reduce(apart << self._shifts, axis=2).reshape(len(blocks), -1)

    @property
    def _shifts(self) -> Bytes:
        return np.arange(0, 8, self.bits, dtype=np.uint8)[:, None]

    def _end(self, weights: int) -> int:
        return self.at + weights * self.bits // 8


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """A ggml type whose weights are scale * level + offset, with one scale and offset for each `group` weights.

    `levels` says where a level's bits are, the lowest bits first. `scales` returns the scales and offsets of blocks [n, bytes], each
    float32 [n, groups].
    """

    name: str
    group: int
    levels: tuple[Bits, ...]
    scales: Callable[[Bytes], tuple[Floats, Floats]]

    @property
    def weights(self) -> int:
        """The number of weights in a block."""
        return tensor_type(self.name).weights

    @property
    def bytes(self) -> int:
        """The number of bytes of a block."""
        return tensor_type(self.name).bytes

    @property
    def top(self) -> int:
        """The highest level."""
        return (1 << sum(part.bits for part in self.levels)) - 1

    def read_levels(self, blocks: Bytes) -> Bytes:
        """Returns the levels [n, weights] of blocks [n, bytes]."""
        levels, shift = self.levels[0].read(blocks, self.weights), self.levels[0].bits
        for part in self.levels[1:]:
            levels, shift = levels | part.read(blocks, self.weights) << np.uint8(shift), shift + part.bits
        return levels

    def with_levels(self, blocks: Bytes, levels: Bytes) -> Bytes:
        """Returns blocks [n, bytes] with the same scales and these levels [n, weights]."""
        made = blocks.copy()
        for part in self.levels:
            part.write(made, levels)
            levels = levels >> np.uint8(part.bits)
        return made


def _half_floats(blocks: Bytes, at: int) -> Floats:
    """Returns the float16 number at byte `at` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _around(level: int) -> Callable[[Bytes], tuple[Floats, Floats]]:
    """Returns the `scales` function of types with one scale, where `level` represents 0."""

    def scales(blocks: Bytes) -> tuple[Floats, Floats]:
        scale = _half_floats(blocks, 0)
        return scale, scale * np.float32(-level)

    return scales


def _scale_and_offset(blocks: Bytes) -> tuple[Floats, Floats]:
    return _half_floats(blocks, 0), _half_floats(blocks, 2)


def _six_bits(blocks: Bytes) -> tuple[Floats, Floats]:
    """8 scales and 8 minima of 6 bits, each set times a float16. The upper 2 bits of the last four are above the 6 bits of the first."""
    scales, mins, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    all_scales = np.concatenate([scales & 63, both & 15 | (scales >> 2) & 48], axis=1)
    all_mins = np.concatenate([mins & 63, both >> 4 | (mins >> 2) & 48], axis=1)
    return _half_floats(blocks, 0) * all_scales.astype(np.float32), -_half_floats(blocks, 2) * all_mins.astype(np.float32)


def _signed_bytes(blocks: Bytes) -> tuple[Floats, Floats]:
    """16 signed 8-bit scales, times a float16. Level 32 represents 0."""
    scales = _half_floats(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scales, scales * np.float32(-32)


# The types whose errors can be compensated, by ggml's numbers. Tensors of other types stay as llama.cpp wrote them.
# Layouts: llama.cpp, ggml/src/ggml-common.h (block_q4_0 and so on) and ggml-quants.c.
BLOCK_TYPES = {
    TYPE_NUMBERS[kind.name]: kind
    for kind in (
        BlockType(name="q4_0", group=32, levels=(Bits(2, 4, 16),), scales=_around(8)),
        BlockType(name="q4_1", group=32, levels=(Bits(4, 4, 16),), scales=_scale_and_offset),
        BlockType(name="q5_0", group=32, levels=(Bits(6, 4, 16), Bits(2, 1, 1)), scales=_around(16)),
        BlockType(name="q4_K", group=32, levels=(Bits(16, 4, 32),), scales=_six_bits),
        BlockType(name="q5_K", group=32, levels=(Bits(48, 4, 32), Bits(16, 1, 32)), scales=_six_bits),
        BlockType(name="q6_K", group=16, levels=(Bits(0, 4, 64), Bits(128, 2, 32)), scales=_signed_bytes),
    )
}


def compensate_gguf(path: Path, checkpoint: Checkpoint, importance: Importance, progress: Callable[[int], None] = lambda _: None) -> None:
    """Rewrites the levels of those matrices that have second moments. `progress` gets the bytes done since its last call.

    Sizes, types and scales do not change. Raises CheckpointError if the file or the checkpoint cannot be read.
    """
    sources = {gguf_name(name): (name, tensor) for name, tensor in checkpoint.tensors.items()}
    for info in read_gguf_header(path).tensors:
        if info.type in BLOCK_TYPES and info.name in sources:
            name, tensor = sources[info.name]
            factor = importance.factor(name, tensor) if len(tensor.shape) == 2 else None
            if factor is not None:
                _rewrite(path, info, tensor, factor)
        progress(info.bytes)


def _rewrite(path: Path, info: TensorInfo, tensor: StoredTensor, factor: Factor) -> None:
    rows, columns = tensor.shape
    type = BLOCK_TYPES[info.type]
    blocks = np.memmap(path, np.uint8, "r+", info.offset, (rows, columns // type.weights, type.bytes))
    at = 0
    for weights in read_rows(tensor):
        here = blocks[at : at + len(weights)]
        here[:] = _levels_anew(type, np.array(here).reshape(-1, type.bytes), weights, factor).reshape(here.shape)
        at += len(weights)
    blocks.flush()


def _levels_anew(type: BlockType, blocks: Bytes, weights: Floats, factor: Factor) -> Bytes:
    """Returns blocks [rows * blocks, bytes] of weights [rows, columns] with compensated levels."""
    rows = len(weights)
    scales, offsets = (part.reshape(rows, -1) for part in type.scales(blocks))
    plain = Rounded(levels=type.read_levels(blocks).reshape(rows, -1), scales=scales, offsets=offsets, group=type.group, top=type.top)
    return type.with_levels(blocks, compensated(weights, plain, factor).levels.reshape(len(blocks), -1))


if __name__ == "__main__":
    sys.exit(_quantize_here(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:6]))
