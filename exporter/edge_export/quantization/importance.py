"""Importance of the input channels of matrices, error compensation when they are rounded, and llama.cpp's imatrix files."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import byte_text, errors_as
from edge_devices.files.limited_read import read_at_most
from edge_export.checkpoint.architecture import TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint, read_gguf_header
from edge_export.checkpoint.safetensors import StoredTensor
from edge_export.checkpoint.weight_formats import lies_on_grid
from edge_export.errors import CheckpointError, ExportError
from edge_export.gguf.keys import gguf_name, stays_float32
from edge_export.gguf.writer import array_tensor, write_raw_gguf
from edge_runtime.bundle.gguf_header import TYPE_NUMBERS, TensorInfo
from edge_runtime.bundle.manifest import ImportanceSource

# Error compensation rounds a matrix's columns in order. After each column, the columns that are not rounded yet are changed so that they
# compensate its error. It needs one matrix, a grid of levels for it, and the second moments H of its inputs. If row w is rounded to q, its
# error is (w - q) H (w - q)^T, which is the mean square of the difference in its output. Source of the method: Frantar, Ashkboos, Hoefler,
# Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.

Floats = NDArray[np.float32]
# How many columns are rounded one by one before their errors are compensated in all later columns at once.
_STEP = 64
# Triangles of at most this many rows are inverted directly.
_SMALL_TRIANGLE = 256


# A function from the index of a group of columns and its weights [group, N] to the group's scales and offsets, float32 [N].
GridOf = Callable[[int, Floats], tuple[Floats, Floats]]


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """A quantized matrix: a weight is scale * level + offset.

    `levels` is uint8 [N, K], from 0 to `top`. `scales` and `offsets` are float32 [N, groups], one for each `group` columns.
    """

    levels: NDArray[np.uint8]
    scales: Floats
    offsets: Floats
    group: int
    top: int

    def values(self) -> Floats:
        """The weights [N, K]."""
        columns = self.levels.shape[1]
        scales, offsets = (np.repeat(part, self.group, axis=1)[:, :columns] for part in (self.scales, self.offsets))
        values: Floats = self.levels.astype(np.float32) * scales + offsets
        return values


@dataclass(frozen=True, kw_only=True)
class Factor:
    """The damped second moments H [K, K] as float32 upper triangular matrices: root @ root.T = H, and inverse = root^-1."""

    root: Floats
    inverse: Floats


def factor_of(moments: Floats, damping: float) -> Factor | None:
    """Factors second moments [K, K], after it added `damping` times their mean diagonal to the diagonal.

    If they are not positive definite with that, the damping is increased. Returns None if they are all zero or not finite.
    """
    damped = moments.astype(np.float64)
    mean = float(np.trace(damped)) / len(damped)
    if not (mean > 0 and np.isfinite(damped).all()):
        return None
    damped[np.diag_indices_from(damped)] += damping * mean
    try:
        # Cholesky's method returns a lower triangle. With rows and columns reversed before and after, it becomes an upper one.
        root = np.ascontiguousarray(np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1])
    except np.linalg.LinAlgError:
        return factor_of(moments, 10 * damping)
    return Factor(root=root.astype(np.float32), inverse=_inverted(root).astype(np.float32))


def compensated(weights: Floats, plain: Rounded, factor: Factor, grid_of: GridOf | None = None) -> Rounded:
    """Rounds weights [N, K] with error compensation. Rows that have less error in `plain` are taken from it.

    `grid_of` chooses a group's scales for its weights as changed by the compensation so far. Without it, the scales of `plain` are kept.
    """
    # Weights near the limits of float32 overflow. Such rows stay plain, because NaN compares as not less.
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = _rounded_in_order(weights, plain, factor.inverse, grid_of)
        better = _errors(weights - rounded.values(), factor) < _errors(weights - plain.values(), factor)
    parts = {name: np.where(better[:, None], getattr(rounded, name), getattr(plain, name)) for name in ("levels", "scales", "offsets")}
    return replace(plain, **parts)


def _rounded_in_order(weights: Floats, plain: Rounded, inverse: Floats, grid_of: GridOf | None) -> Rounded:
    columns, rows = weights.shape[1], weights.shape[0]
    # Transposed, so that a column is contiguous, because columns are rounded one after another.
    left, scales, offsets = (np.array(part.T, order="C") for part in (weights, plain.scales, plain.offsets))
    levels = np.empty((columns, rows), np.uint8)
    errors = np.empty((_STEP, rows), np.float32)
    for first in range(0, columns, _STEP):
        last = min(first + _STEP, columns)
        for column in range(first, last):
            group = column // plain.group
            if grid_of is not None and column % plain.group == 0:
                scales[group], offsets[group] = grid_of(group, left[column : column + plain.group])
            level = np.clip(np.rint((left[column] - offsets[group]) * inverses(scales[group])), 0, plain.top)
            levels[column] = level
            error = errors[column - first]
            np.divide(left[column] - (level * scales[group] + offsets[group]), inverse[column, column], out=error)
            left[column + 1 : last] -= inverse[column, column + 1 : last, None] * error
        left[last:] -= inverse[first:last, last:].T @ errors[: last - first]
    return replace(plain, levels=np.ascontiguousarray(levels.T), scales=scales.T, offsets=offsets.T)


def inverses(scales: Floats) -> Floats:
    """Returns 1 / scales, or 0 where that is beyond float32, as for the scale 0 of an empty block."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=np.abs(scales) >= np.finfo(np.float32).tiny)


def _errors(differences: Floats, factor: Factor) -> Floats:
    """Returns the error [N] of each row for its differences [N, K]."""
    weighted = differences @ factor.root
    errors: Floats = np.einsum("nk,nk->n", weighted, weighted)
    return errors


def _inverted(upper: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverts an upper triangular matrix [K, K] recursively by halves."""
    size = len(upper)
    if size <= _SMALL_TRIANGLE:
        return np.triu(np.linalg.inv(upper))
    half = size // 2
    result = np.zeros_like(upper)
    result[:half, :half], result[half:, half:] = _inverted(upper[:half, :half]), _inverted(upper[half:, half:])
    result[:half, half:] = -(result[:half, :half] @ upper[:half, half:]) @ result[half:, half:]
    return result


# The importance of an input channel is the mean square of its values on some text. It weights the squared quantization errors in that
# column of a matrix, as in llama.cpp's importance matrix. Tensors have their GGUF names, in files of llama.cpp and in our own calibration.
# # The second moments [K, K] are the means, over the text's rows, of the products of all pairs of channels. They take K^2 floats for each
# matrix, so they are kept in files, and matrices that multiply the same rows share one.

# Wider matrices have no moments. Those of 12288 channels, the widest of E2B, take 604 MB of disk each; size and time grow with the square.
MAX_CHANNELS = 12288
# Damping from 0.001 to 0.05 of the mean diagonal makes little difference. The embedding has more, because it is not only the head but also
# looked up, where all its columns are equally important.
_DAMPING = 0.01
_TABLE, _TABLE_DAMPING = "token_embd.weight", 0.5
# This table is only looked up; no product uses it.
_LOOKED_UP = "per_layer_token_embd"
# Matrices that share the moments of another one, because they multiply the same rows. Q, K and V multiply the same rows too, but their rows
# are weighted differently.
_SHARED = {"ffn_up.weight": "ffn_gate.weight"}
# The minimum importance, relative to the mean. Weights of channels that the text never used must stay sensible too.
MIN_IMPORTANCE = 1e-6
_NAMED = 3
# How a quantization uses a calibration. With None, errors are only weighted. Otherwise they are also compensated, except in matrices of
# these kinds, which have so many bits that there is little to gain.
Uncompensated = frozenset[str] | None


def matrix_kind(name: str) -> str:
    """Returns the kind of the matrix with this GGUF name, such as attn_q for blk.3.attn_q.weight."""
    return name.removesuffix(".weight").rpartition(".")[2]


def compensates(name: str, columns: int, without: frozenset[str]) -> bool:
    """Whether errors of the matrix with this GGUF name and width are compensated, if kinds in `without` are not."""
    return columns <= MAX_CHANNELS and matrix_kind(name) not in without | {_LOOKED_UP}


def shared_name(name: str) -> str:
    """Returns the GGUF name under which the moments of the matrix with this GGUF name are kept."""
    head, dot, layer_and_matrix = name.partition(".")
    layer, _, matrix = layer_and_matrix.partition(".")
    return f"{head}.{layer}.{_SHARED[matrix]}" if dot and matrix in _SHARED else name


class SecondMoments:
    """The second moments of one model's matrices, in files in `folder`, which is created if it does not exist.

    Matrices of the kinds in `without`, such as ffn_down, have no moments.
    """

    def __init__(self, folder: Path, without: frozenset[str] = frozenset()) -> None:
        self._folder, self.without = folder, without
        folder.mkdir(exist_ok=True)
        self._last: tuple[Path, Factor | None] | None = None

    def check_space(self, needed: int) -> None:
        """Raises ExportError if the disk has no room for this many bytes of moments."""
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise ExportError(
                f"calibration keeps {byte_text(needed)} of second moments beside the bundle while it is made, {byte_text(free)} are free;"
                " free some space, choose another disk, or give an importance matrix (--imatrix), which needs none"
            )

    def takes(self, name: str, columns: int) -> bool:
        """Whether moments are kept under the GGUF name of this matrix of this width."""
        return shared_name(name) == name and compensates(name, columns, self.without)

    def add(self, name: str, moments: Floats) -> None:
        """Saves the moments [K, K] of the matrix with this GGUF name."""
        np.save(self._path(name), moments)

    def has(self, name: str) -> bool:
        """Whether the matrix with this GGUF name has moments."""
        return matrix_kind(name) not in self.without and self._path(name).is_file()

    def factor(self, name: str) -> Factor | None:
        """Returns the factored moments of the matrix with this GGUF name, which must have moments; None if they are all zero.

        The last result is kept in memory.
        """
        path = self._path(name)
        if self._last is None or self._last[0] != path:
            damping = _TABLE_DAMPING if name == _TABLE else _DAMPING
            self._last = path, factor_of(np.load(path, allow_pickle=False), damping)
        return self._last[1]

    def _path(self, name: str) -> Path:
        return self._folder / f"{shared_name(name)}.npy"


@dataclass(frozen=True, kw_only=True)
class ChannelSums:
    """The squares of a matrix's inputs, summed over `counts` rows.

    `sums` is float64 and has the channels of all experts, one expert after another. `counts` has one value per expert, or one for all.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]


# Sums by GGUF tensor name.
Entries = dict[str, ChannelSums]


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """How errors of one matrix are weighted, by the importance [K] of its input channels, and compensated, by their factored moments."""

    channels: NDArray[np.float32] | None = None
    factor: Factor | None = None


@dataclass(frozen=True, kw_only=True)
class Importance:
    """The importance of one model's input channels.

    `values` holds float32 [matrices, K] by GGUF tensor name, all above 0. A tensor has one matrix, or one per expert. `moments` exist only
    after a calibration, and only if the quantization uses them.
    """

    source: ImportanceSource
    values: dict[str, NDArray[np.float32]]
    moments: SecondMoments | None = None

    def of(self, name: str) -> NDArray[np.float32] | None:
        """Returns the importance [matrices, K] of the tensor with this checkpoint name (model.layers.0...); None if there is none."""
        return self.values.get(gguf_name(name) or "")

    def factor(self, name: str, tensor: StoredTensor) -> Factor | None:
        """Returns the factored second moments of the inputs of the tensor with this checkpoint name; None if there are none.

        Also returns None if the tensor's weights lie on a grid, because quantization must keep them.
        """
        short = gguf_name(name)
        if self.moments is None or short is None or not self.moments.has(short) or lies_on_grid(tensor):
            return None
        return self.moments.factor(short)


def fitted(entries: Entries, checkpoint: Checkpoint, source: ImportanceSource) -> Importance:
    """Converts the sums of a file or a calibration to importance in the shapes of the checkpoint's tensors.

    Raises ExportError, with the tensor's name, if the model does not have it, if its size differs, if its values cannot be mean squares, or
    if the entries lack a matrix of the model's blocks.
    """
    tensors = {gguf_name(name): tensor for name, tensor in checkpoint.tensors.items()}
    values: dict[str, NDArray[np.float32]] = {}
    for name, entry in entries.items():
        tensor = tensors.get(name)
        if tensor is None or len(tensor.shape) < 2:
            raise ExportError(
                f"{source.name} has importance for {name}, which {checkpoint.folder} does not have; give the file of this model"
            )
        values[name] = _means(name, entry, tensor, source)
    lacking = [name for name in _block_matrices(checkpoint) if name not in values]
    if lacking:
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise ExportError(
            f"{source.name} has no importance for {', '.join(lacking[:_NAMED])}{more} of {checkpoint.folder};"
            " give the file of exactly this model, made from text that uses all of it"
        )
    return Importance(source=source, values=values)


def _block_matrices(checkpoint: Checkpoint) -> list[str]:
    """Returns the GGUF names of the matrices in the model's blocks that are used in products and quantized."""
    names = []
    for name, tensor in checkpoint.tensors.items():
        short = gguf_name(name)
        if short is None or not short.startswith("blk.") or stays_float32(short, len(tensor.shape)):
            continue
        if not _unused(short, checkpoint.architecture):
            names.append(short)
    return names


def _unused(name: str, model: TextArchitecture) -> bool:
    """Whether this is a K or V matrix of a layer that shares another layer's rows, so that it is never used."""
    _, layer, matrix = name.split(".", 2)
    return int(layer) >= model.owning_layers and matrix in ("attn_k.weight", "attn_v.weight")


def _means(name: str, entry: ChannelSums, tensor: StoredTensor, source: ImportanceSource) -> NDArray[np.float32]:
    matrices, width = prod(tensor.shape[:-2]), tensor.shape[-1]
    if entry.sums.size != matrices * width or entry.counts.size not in (1, matrices):
        raise ExportError(
            f"{source.name} has {entry.sums.size} values for {name}, its shape {list(tensor.shape)} asks for {matrices * width};"
            " give the importance of this model"
        )
    if not (np.isfinite(entry.sums).all() and np.isfinite(entry.counts).all()) or (entry.sums < 0).any() or (entry.counts < 0).any():
        raise ExportError(f"{source.name} has values for {name} that are negative or not finite; make the file again")
    counts = np.broadcast_to(entry.counts.reshape(-1, 1), (matrices, 1))
    means = entry.sums.reshape(matrices, width) / np.maximum(counts, 1)
    floor = MIN_IMPORTANCE * means.mean(axis=1, keepdims=True)
    # If an expert had no input, or only zeros, all its channels are equally important.
    with np.errstate(over="ignore"):
        result = np.where((counts > 0) & (floor > np.finfo(np.float32).tiny), np.maximum(means, floor), 1.0).astype(np.float32)
    if not np.isfinite(result).all():
        raise ExportError(f"{source.name} has values for {name} beyond float32; make the file again")
    return result


# Both formats of llama.cpp's importance matrices are read, with checks, and the newer one is written. Source of the facts: llama.cpp,
# common/imatrix-loader.cpp and tools/imatrix/imatrix.cpp. # The newer format is a GGUF with two float32 tensors per matrix: NAME.in_sum2,
# the sums of squares of the inputs, and NAME.counts, the number of rows in the sums, for all experts or for each. The older format is an
# int32 number of entries, then for each entry int32 length, name, int32 calls, int32 number of values, and float32 values, which are means
# times calls.

MAX_BYTES = 256 << 20
_MAX_NAME = 1 << 10
_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: Path) -> tuple[Entries, ImportanceSource]:
    """Returns the sums by GGUF tensor name, and the file's entry for the manifest. Raises ExportError if it is no imatrix or damaged."""
    with errors_as(ExportError, f"{path} cannot be read", "give an importance matrix made by llama-imatrix"):
        data = read_at_most(path, MAX_BYTES)
    entries = _read_gguf(path, data) if data[:4] == b"GGUF" else _read_older(path, data)
    digest = hashlib.sha256(data).hexdigest()
    return entries, ImportanceSource(kind="imatrix", name=path.name, bytes=len(data), sha256=digest, tokens=None)


def write_imatrix(path: Path, entries: Entries, dataset: str, tokens: int, chunk: int) -> None:
    """Writes the newer format, which llama-imatrix and llama-quantize can read. `chunk` is the number of tokens per piece of text."""
    tensors = []
    for name, entry in sorted(entries.items()):
        rows = entry.counts.size
        for ending, values in ((_SUMS, entry.sums), (_COUNTS, entry.counts)):
            tensors.append(array_tensor(name + ending, (rows, values.size // rows), "f32", partial(values.astype, "<f4")))
    keys: list[Any] = [
        ("general.type", "string", "imatrix"),
        ("imatrix.datasets", "array", [dataset]),
        ("imatrix.chunk_count", "uint32", max(1, tokens // chunk)),
        ("imatrix.chunk_size", "uint32", chunk),
    ]
    write_raw_gguf(path, "imatrix", keys, tensors, lambda _: None)


def _read_gguf(path: Path, data: bytes) -> Entries:
    try:
        header = read_gguf_header(path)
    except CheckpointError as error:
        raise ExportError(f"{error} (it was given as an importance matrix)") from error
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = sorted({name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)})
    if not names:
        raise ExportError(f"{path} is a GGUF without importance ({_SUMS} tensors); give one made by llama-imatrix")
    entries = {}
    for name in names:
        sums, counts = tensors[name + _SUMS], tensors.get(name + _COUNTS)
        if counts is None or {sums.type, counts.type} != {TYPE_NUMBERS["f32"]}:
            raise ExportError(f"{path} is damaged: {name} has no {_COUNTS}, or values that are not float32; make the file again")
        entries[name] = ChannelSums(sums=_values(data, sums), counts=_values(data, counts))
    return entries


def _values(data: bytes, tensor: TensorInfo) -> NDArray[np.float64]:
    return np.frombuffer(data, "<f4", count=tensor.bytes // 4, offset=tensor.offset).astype(np.float64)


def _read_older(path: Path, data: bytes) -> Entries:
    """Reads the older format. It never reads past the end, and ignores data after the entries."""
    at = 0

    def wrong(what: str) -> ExportError:
        return ExportError(f"{path} is no importance matrix of llama.cpp, or is damaged: {what}; make it again with llama-imatrix")

    def read(count: int) -> bytes:
        nonlocal at
        if count > len(data) - at:
            raise wrong(f"it ends at byte {len(data)}, {at + count} are announced")
        at += count
        return data[at - count : at]

    def number(what: str, maximum: int, minimum: int = 1) -> int:
        value = int.from_bytes(read(4), "little", signed=True)
        if not minimum <= value <= maximum:
            raise wrong(f"it claims {value} {what}")
        return value

    entries: Entries = {}
    for _ in range(number("entries", len(data) // 16)):
        name = read(number("letters of a name", _MAX_NAME)).decode("utf-8", "replace")
        # Some old files have 0 calls.
        calls = number("calls", (1 << 31) - 1, minimum=0)
        values = np.frombuffer(read(4 * number("values", len(data) // 4)), "<f4").astype(np.float64)
        if name in entries:
            raise ExportError(f"{path} is damaged: {name} comes twice; make the file again")
        entries[name] = ChannelSums(sums=values, counts=np.array([max(calls, 1)], np.float64))
    return entries
