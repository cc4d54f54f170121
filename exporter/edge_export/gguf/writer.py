"""Writes a checkpoint as GGUF, tensor by tensor in small pieces. Also writes the file of a drafter's sparse head."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.architecture import CENTROIDS, TextArchitecture
from edge_export.checkpoint.checkpoint import CENTROIDS_PER_PIECE, Checkpoint, read_gguf_header, token_order
from edge_export.checkpoint.safetensors import FloatType, StoredTensor, read_rows, read_values
from edge_export.checkpoint.tokenizer_vocabulary import GgufVocabulary, read_vocabulary
from edge_export.checkpoint.weight_formats import BLOCK, find_grid, lies_on_grid
from edge_export.errors import CheckpointError, ExportError
from edge_export.gguf.keys import (
    ROPE_FREQUENCIES,
    Entry,
    add_general,
    architecture_entries,
    architecture_name,
    gguf,
    gguf_name,
    stays_float32,
    unfit_values,
    vocabulary_entries,
)
from edge_runtime.bundle.gguf_header import QUANTIZATIONS, TENSOR_TYPES, TYPE_NUMBERS, TensorInfo

# A checkpoint that was trained for q4_0 has matrices on its grid (see checkpoint/weight_formats.py). These are written as q4_0 without
# loss, and its other matrices as q8_0.

ALIGNMENT: int = gguf.GGUF_DEFAULT_ALIGNMENT
# A frequency factor this large stops the rotation of a pair. Full layers rotate only the first pairs (proportional RoPE).
UNROTATED = 1e30
# How many matrices of a checkpoint are tested to decide whether it was trained for q4_0.
_TRIED = 6


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor to be written: its shape (rows first), its ggml type number, and a function that yields its bytes in pieces.

    The next piece may overwrite the memory of the one before it.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    pieces: Callable[[], Iterator[Any]]

    @property
    def bytes(self) -> int:
        """Size of its data without padding."""
        kind = TENSOR_TYPES[self.type]
        return prod(self.shape) // kind.weights * kind.bytes


def float_tensor(name: str, stored: StoredTensor, kind: FloatType, shape: tuple[int, ...] | None = None) -> GgufTensor:
    """Returns a tensor of a checkpoint in this float type. `shape` replaces its shape, with the same values."""

    def pieces() -> Iterator[Any]:
        return (piece.view(np.uint8).data for piece in read_rows(stored, kind))

    return GgufTensor(name=name, shape=shape or stored.shape, type=TYPE_NUMBERS[kind], pieces=pieces)


def array_tensor(name: str, shape: tuple[int, ...], type_name: str, values: Callable[[], NDArray[Any]]) -> GgufTensor:
    """Returns a tensor of this ggml type. `values` is called when the tensor is written, and gguf-py rounds the result to the type."""
    kind = TYPE_NUMBERS[type_name]

    def pieces() -> Iterator[Any]:
        made = values()
        rounded = made if made.dtype.kind == "i" else gguf.quants.quantize(made.reshape(shape), gguf.GGMLQuantizationType(kind))
        yield np.ascontiguousarray(rounded).data.cast("B")

    return GgufTensor(name=name, shape=shape, type=kind, pieces=pieces)


@dataclass(frozen=True, kw_only=True)
class GgufPlan:
    """A GGUF file before it is written: its header (some MB for a large vocabulary) and its tensors in order."""

    header: bytes
    tensors: tuple[GgufTensor, ...]

    @property
    def bytes(self) -> int:
        """The exact size of the file."""
        return sum(_padded(size) for size in (len(self.header), *(tensor.bytes for tensor in self.tensors)))

    def write(self, path: Path, progress: Callable[[int], None]) -> None:
        """Writes the file. `progress` gets the bytes written since its last call. An unfinished file is removed."""
        part = path.with_name(path.name + ".part")
        try:
            with part.open("wb") as file:
                progress(file.write(self.header) + _pad(file, len(self.header)))
                for tensor in self.tensors:
                    for piece in tensor.pieces():
                        progress(file.write(piece))
                    progress(_pad(file, tensor.bytes))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def plan_gguf(checkpoint: Checkpoint, weight_type: FloatType, vocabulary: GgufVocabulary) -> GgufPlan:
    """Plans the file that llama.cpp's own converter would write. Reads no weights.

    Matrices get `weight_type`; vectors, norms, scales and routers get float32. Raises CheckpointError if the sizes of tokenizer and model
    differ, or if a value of the checkpoint's files does not fit its key.
    """
    pieces, rows = len(vocabulary.pieces), checkpoint.architecture.vocab_size
    if pieces != rows:
        raise CheckpointError(f"{vocabulary.folder}: the tokenizer has {pieces} tokens, the model {rows}; give the model's own tokenizer")
    return _plan(checkpoint, weight_type, vocabulary, lambda name, stored: float_tensor(name, stored, weight_type))


def plan_exact(checkpoint: Checkpoint, vocabulary: GgufVocabulary, report: ExactReport) -> GgufPlan:
    """Plans a q4_0 file of a checkpoint that was trained for it. `report` counts the values as they are written. Raises CheckpointError."""
    return _plan(checkpoint, "q4_0", vocabulary, report.tensor)


def _plan(
    checkpoint: Checkpoint, quantization: str, vocabulary: GgufVocabulary, matrix: Callable[[str, StoredTensor], GgufTensor]
) -> GgufPlan:
    """Plans a model's file. `matrix` plans each of its matrices."""
    model = checkpoint.architecture
    factors = rope_factors(model)
    tensors = [array_tensor(ROPE_FREQUENCIES, factors.shape, "f32", lambda: factors)]
    for name, stored in checkpoint.tensors.items():
        if (short := gguf_name(name)) is not None:
            rounded = not stays_float32(short, len(stored.shape))
            tensors.append(matrix(short, stored) if rounded else float_tensor(short, stored, "f32"))
    entries = architecture_entries(checkpoint, QUANTIZATIONS[quantization].file_type)
    header = header_of(architecture_name(model), gguf.GGUFType.MODEL, checkpoint, tensors, entries, last=vocabulary_entries(vocabulary))
    return GgufPlan(header=header, tensors=tuple(tensors))


def write_gguf(checkpoint: Checkpoint, path: Path, weight_type: FloatType, progress: Callable[[int], None]) -> None:
    """Plans and writes a file with the checkpoint's own tokenizer. Raises CheckpointError."""
    plan_gguf(checkpoint, weight_type, read_vocabulary(checkpoint.folder)).write(path, progress)


def write_raw_gguf(path: Path, architecture: str, entries: list[Entry], tensors: list[GgufTensor], progress: Callable[[int], None]) -> None:
    """Writes tensors with only the architecture and `entries` as keys. An unfinished file is removed."""
    writer = _writer(architecture, tensors)
    _add_entries(writer, entries)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    GgufPlan(header=_header_bytes(writer), tensors=tuple(tensors)).write(path, progress)


def header_of(
    architecture: str,
    kind: str,
    checkpoint: Checkpoint,
    tensors: Sequence[GgufTensor],
    entries: Sequence[Entry],
    *,
    last: Sequence[Entry] = (),
) -> bytes:
    """Returns the header of a file with these tensors. `last` are keys that follow the quantization's version.

    Raises CheckpointError if a value of the checkpoint's files does not fit its key.
    """
    writer = _writer(architecture, tensors)
    with unfit_values(checkpoint.folder):
        add_general(writer, checkpoint.folder, checkpoint.config, kind)
        _add_entries(writer, entries)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_entries(writer, last)
        return _header_bytes(writer)


def _writer(architecture: str, tensors: Sequence[GgufTensor]) -> Any:
    writer = gguf.GGUFWriter(path=None, arch=architecture)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType(tensor.type)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, raw_dtype=kind)
    return writer


def _add_entries(writer: Any, entries: Sequence[Entry]) -> None:
    for key, kind, value in entries:
        getattr(writer, f"add_{kind}")(key, value)


def _header_bytes(writer: Any) -> bytes:
    """Returns the header, keys and tensor infos of a GGUFWriter. Gives it a file in memory, so that it opens none."""
    file = io.BytesIO()
    writer.fout, writer.state = [file], gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return file.getvalue()


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT


def _pad(file: BinaryIO, size: int) -> int:
    """Pads data of `size` bytes to the alignment; returns the number of padding bytes."""
    return file.write(bytes(_padded(size) - size))


def rope_factors(model: TextArchitecture) -> NDArray[np.float32]:
    """Returns the frequency factors [full_head_dim / 2] of full layers: 1 for rotated pairs, UNROTATED for the others."""
    pairs = model.full_head_dim // 2
    factors = np.full(pairs, UNROTATED, dtype=np.float32)
    factors[: int(model.full_head_dim * model.full_rotary_share / 2)] = 1.0
    return factors


@dataclass(frozen=True, kw_only=True)
class ExactReport:
    """Counts what was written: blocks by tensor, those of them that are equal bit for bit, and the tensors on no grid, which are q8_0."""

    values: dict[str, int] = field(default_factory=dict)
    equal: dict[str, int] = field(default_factory=dict)
    off_grid: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Returns the counts for the manifest: matrices on the grid, their blocks, blocks that are equal bit for bit, matrices in q8_0."""
        blocks, equal = sum(self.values.values()), sum(self.equal.values())
        return {"matrices": len(self.values), "blocks": blocks, "equal_blocks": equal, "off_grid": len(self.off_grid)}

    def sentence(self) -> str:
        total, equal = self.counts()["blocks"], self.counts()["equal_blocks"]
        blocks = f"{equal / total:.2%} of their blocks bit for bit" if total else "no blocks"
        text = f"{len(self.values)} matrices lie on the grid of q4_0 and are written as such, {blocks}"
        if self.off_grid:
            text += f"; {len(self.off_grid)} do not and are q8_0: {', '.join(self.off_grid[:4])}{', ...' if len(self.off_grid) > 4 else ''}"
        return text + "."

    def tensor(self, name: str, stored: StoredTensor) -> GgufTensor:
        """Plans a matrix, which adds itself to the report when it is written. It is float16 if its rows are not whole blocks."""
        if stored.shape[-1] % BLOCK:
            return float_tensor(name, stored, "f16")
        exact = lies_on_grid(stored)
        if not exact:
            self.off_grid.append(name)

        def pieces() -> Iterator[Any]:
            if exact:
                self.values[name] = self.equal[name] = 0
            for piece in read_rows(stored):
                blocks = piece.reshape(-1, BLOCK)
                rounded = self._packed(blocks, name) if exact else gguf.quants.quantize(blocks, gguf.GGMLQuantizationType.Q8_0)
                yield np.ascontiguousarray(rounded).data.cast("B")

        return GgufTensor(name=name, shape=stored.shape, type=TYPE_NUMBERS["q4_0" if exact else "q8_0"], pieces=pieces)

    def _packed(self, blocks: NDArray[np.float32], name: str) -> NDArray[np.uint8]:
        """Packs blocks as q4_0 (ggml-common.h, block_q4_0): a float16 scale, then 16 bytes with values k (low half) and k + 16 (high)."""
        grid = find_grid(blocks, half_scales=True)
        self.values[name] += len(blocks)
        self.equal[name] += int(grid.exact.sum())
        levels = (grid.levels + np.int8(8)).view(np.uint8)
        packed = np.empty((len(blocks), 18), np.uint8)
        packed[:, :2] = grid.scales.astype("<f2")[:, None].view(np.uint8)
        packed[:, 2:] = levels[:, :16] | (levels[:, 16:] << np.uint8(4))
        return packed


def matrices(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Returns the tensors that are quantized in a GGUF, by their GGUF names."""
    named = {gguf_name(name): tensor for name, tensor in checkpoint.tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None and not stays_float32(name, len(tensor.shape))}


def trained_for_q4(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint was trained for q4_0: most matrices of a sample must lie on its grid. Raises CheckpointError."""
    named = sorted(matrices(checkpoint).items())
    tried = [tensor for _, tensor in named[:: max(1, len(named) // _TRIED)]][:_TRIED]
    return 2 * sum(lies_on_grid(tensor) for tensor in tried) > len(tried)


# The file of a drafter's sparse head (transformers, Gemma4AssistantMaskedEmbedder). See docs/design/manifest.md.
#
# Output rows have the same bytes as in the exported drafter. They are in cluster order, so that each cluster is contiguous.

HEAD_ARCHITECTURE, HEAD_FORMAT = "edge-mtp-drafter-head", 3
_MAX_FLOAT16 = float(np.finfo(np.float16).max)
_ROWS = "token_embd.weight"


def head_bytes(drafter: Checkpoint, row_bytes: int) -> int:
    """Returns the size of the head's file to within a few kB. `row_bytes` is the size of an output row of the exported drafter."""
    model = drafter.assistant
    return model.vocab_size * (row_bytes + 4) + 2 * model.hidden_size * model.centroids + 1024


def write_head(drafter: Checkpoint, finished: Path, path: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Writes `path` from the checkpoint and `finished`, the bundle's drafter GGUF.

    `progress` gets the bytes written since its last call. Raises CheckpointError if the token order is not a permutation, the clusters do
    not have equal sizes, or a value is beyond float16. Raises ExportError if `finished` has no output rows.
    """
    ordering, model, stored = token_order(drafter), drafter.assistant, drafter.tensors
    clusters = ordering.reshape(model.centroids, -1)
    tensors = [
        _clustered(output_rows(finished), finished, clusters),
        array_tensor("token_ordering", clusters.shape, "i32", lambda: clusters),
        _half("centroids", read_values(stored[CENTROIDS]), drafter),
    ]
    entries: list[Entry] = [("drafter_head.format", "uint32", HEAD_FORMAT), ("drafter_head.top_centroids", "uint32", model.top_centroids)]
    write_raw_gguf(path, HEAD_ARCHITECTURE, entries, tensors, progress)


def output_rows(finished: Path) -> TensorInfo:
    """Returns the info of the exported drafter's output rows. Raises ExportError if it has none."""
    for tensor in read_gguf_header(finished).tensors:
        if tensor.name == _ROWS:
            return tensor
    raise ExportError(f"{finished} lacks {_ROWS}; export it again")


def _clustered(rows: TensorInfo, finished: Path, ordering: NDArray[np.int32]) -> GgufTensor:
    """Returns the output rows in cluster order, written a few clusters at a time. `ordering` is [centroids, tokens of each]."""
    hidden, count = rows.shape
    centroids, per_centroid = ordering.shape

    def pieces() -> Iterator[Any]:
        # The file is mapped because rows are not read in the order in which they are stored. The page cache keeps as many as fit.
        table = np.memmap(finished, np.uint8, "r", rows.offset, (count, rows.bytes // count))
        for first in range(0, centroids, CENTROIDS_PER_PIECE):
            yield np.ascontiguousarray(table[ordering[first : first + CENTROIDS_PER_PIECE].reshape(-1)]).data.cast("B")

    return GgufTensor(name="rows", shape=(centroids, per_centroid, hidden), type=rows.type, pieces=pieces)


def _half(name: str, values: NDArray[Any], drafter: Checkpoint) -> GgufTensor:
    """Returns a matrix as float16, which is exact for bfloat16 values of at least 2^-14."""
    if not np.abs(values).max() <= _MAX_FLOAT16:
        raise CheckpointError(f"{drafter.folder}: {name} holds values beyond float16's {_MAX_FLOAT16:.0f}; download the checkpoint again")
    return array_tensor(name, values.shape, "f16", lambda: values)
