"""Writes a checkpoint as GGUF, tensor by tensor in small pieces."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.architecture import TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import FLOAT_BYTES, FloatType, StoredTensor, read_float_chunks
from edge_export.checkpoint.tokenizer_vocabulary import GgufVocabulary, read_vocabulary
from edge_export.errors import CheckpointError
from edge_export.gguf.exact_q4 import ExactReport, block_bytes, block_pieces, block_type
from edge_export.gguf.loader import gguf
from edge_export.gguf.metadata import Entry, architecture_entries, architecture_name, read_generation, vocabulary_entries
from edge_export.gguf.model_card import name_or_path, read_card, unfit_values
from edge_export.gguf.tensor_names import ROPE_FREQUENCIES, gguf_name, stays_float32
from edge_runtime.bundle.gguf_types import QUANTIZATIONS, TYPE_NUMBERS

# Fields of gguf.Metadata and their names in generation_config.json.
_GENERATION_KEYS = {
    "sampling_sequence": "sequence",
    "sampling_top_k": "top_k",
    "sampling_top_p": "top_p",
    "sampling_min_p": "min_p",
    "sampling_xtc_probability": "xtc_probability",
    "sampling_xtc_threshold": "xtc_threshold",
    "sampling_temp": "temperature",
    "sampling_penalty_last_n": "penalty_last_n",
    "sampling_penalty_repeat": "penalty_repeat",
    "sampling_mirostat": "mirostat",
    "sampling_mirostat_tau": "mirostat_tau",
    "sampling_mirostat_eta": "mirostat_eta",
}
ALIGNMENT: int = gguf.GGUF_DEFAULT_ALIGNMENT
# A frequency factor this large stops the rotation of a pair: full layers rotate only the first pairs (proportional RoPE).
UNROTATED = 1e30


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor of a checkpoint to be written: its GGUF name, shape (rows first), type, and where its values come from."""

    name: str
    shape: tuple[int, ...]
    type: FloatType
    source: StoredTensor | NDArray[np.float32]

    @property
    def bytes(self) -> int:
        """Size of its data without padding."""
        return prod(self.shape) * FLOAT_BYTES[self.type]

    def pieces(self) -> Iterator[Any]:
        """Yields its bytes in order, in buffers that the next piece may overwrite."""
        chunks: Iterable[NDArray[Any]] = (
            read_float_chunks(self.source, self.type) if isinstance(self.source, StoredTensor) else [self.source]
        )
        return (chunk.data.cast("B") for chunk in chunks)


@dataclass(frozen=True, kw_only=True)
class RawTensor:
    """A tensor whose bytes exist already, quantized or not: shape (rows first), ggml type number, size, and its bytes in pieces."""

    name: str
    shape: tuple[int, ...]
    type: int
    bytes: int
    pieces: Callable[[], Iterator[Any]]


@dataclass(frozen=True, kw_only=True)
class GgufPlan:
    """A GGUF file that is not written yet: its header (some MB for a large vocabulary) and its tensors in order."""

    header: bytes
    tensors: tuple[PlannedTensor | RawTensor, ...]

    @property
    def bytes(self) -> int:
        """Size of the file, exactly."""
        return sum(_padded(size) for size in (len(self.header), *(tensor.bytes for tensor in self.tensors)))

    def write(self, path: Path, progress: Callable[[int], None]) -> None:
        """Writes the file; `progress` gets the bytes written since its last call. A file that was not finished is removed."""
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


def raw_tensor(name: str, values: NDArray[Any], type_name: Literal["f16", "q4_0", "i32"]) -> RawTensor:
    """A tensor of `values` [rows first] in this ggml type, rounded to it where they are floats."""
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    data = np.ascontiguousarray(values if type_name == "i32" else gguf.quants.quantize(values, kind))
    return RawTensor(name=name, shape=values.shape, type=int(kind), bytes=data.nbytes, pieces=lambda: iter([data.data.cast("B")]))


def plan_gguf(checkpoint: Checkpoint, weight_type: FloatType, vocabulary: GgufVocabulary) -> GgufPlan:
    """Plans the file that llama.cpp's own converter would write. Reads no weights.

    Matrices get `weight_type`; vectors, norms, scales and routers float32. Raises CheckpointError if the vocabulary has another size than
    the model, or if a value of the checkpoint's files fits no key.
    """
    pieces, rows = len(vocabulary.pieces), checkpoint.architecture.vocab_size
    if pieces != rows:
        raise CheckpointError(
            f"{vocabulary.folder}: the tokenizer has {pieces} pieces, the model {rows} rows; give the model's own tokenizer"
        )
    tensors = tuple(_planned(checkpoint, weight_type))
    return GgufPlan(header=_header(checkpoint, QUANTIZATIONS[weight_type].file_type, vocabulary, tensors), tensors=tensors)


def plan_exact(checkpoint: Checkpoint, vocabulary: GgufVocabulary, report: ExactReport) -> GgufPlan:
    """Plans a q4_0 file of a checkpoint that was trained for it; what is written exactly goes into the report. Raises CheckpointError."""
    tensors = tuple(_exact(tensor, report) for tensor in _planned(checkpoint, "f16"))
    return GgufPlan(header=_header(checkpoint, QUANTIZATIONS["q4_0"].file_type, vocabulary, tensors), tensors=tensors)


def _exact(tensor: PlannedTensor, report: ExactReport) -> PlannedTensor | RawTensor:
    if tensor.type == "f32" or not isinstance(tensor.source, StoredTensor):
        return tensor
    kind = block_type(tensor.name, tensor.source, report)
    if kind is None:
        return tensor
    pieces = partial(block_pieces, tensor.name, tensor.source, kind, report)
    return RawTensor(name=tensor.name, shape=tensor.shape, type=int(kind), bytes=block_bytes(tensor.shape, kind), pieces=pieces)


def write_gguf(
    checkpoint: Checkpoint, path: Path, weight_type: FloatType, progress: Callable[[int], None], *, tokenizer_folder: Path | None = None
) -> None:
    """Plans and writes a file; the tokenizer is the checkpoint's own, or that of `tokenizer_folder`. Raises CheckpointError."""
    plan_gguf(checkpoint, weight_type, read_vocabulary(tokenizer_folder or checkpoint.folder)).write(path, progress)


def write_raw_gguf(path: Path, architecture: str, entries: list[Entry], tensors: list[RawTensor], progress: Callable[[int], None]) -> None:
    """Writes tensors unchanged, with no keys but the architecture and `entries`; a file that was not finished is removed."""
    writer = gguf.GGUFWriter(path=None, arch=architecture)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType(tensor.type)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, raw_dtype=kind)
    _add_entries(writer, entries)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    GgufPlan(header=_header_bytes(writer), tensors=tuple(tensors)).write(path, progress)


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT


def _pad(file: BinaryIO, size: int) -> int:
    """Pads data of `size` bytes to the alignment; returns the number of padding bytes."""
    return file.write(bytes(_padded(size) - size))


def _planned(checkpoint: Checkpoint, weight_type: FloatType) -> Iterator[PlannedTensor]:
    factors = rope_factors(checkpoint.architecture)
    yield PlannedTensor(name=ROPE_FREQUENCIES, shape=factors.shape, type="f32", source=factors)
    for name, tensor in checkpoint.tensors.items():
        short = gguf_name(name)
        if short is not None:
            kind: FloatType = "f32" if stays_float32(short, len(tensor.shape)) else weight_type
            yield PlannedTensor(name=short, shape=tensor.shape, type=kind, source=tensor)


def rope_factors(model: TextArchitecture) -> NDArray[np.float32]:
    """Frequency factors [full_head_dim / 2] of full layers: 1 for rotated pairs, UNROTATED for the rest."""
    pairs = model.full_head_dim // 2
    factors = np.full(pairs, UNROTATED, dtype=np.float32)
    factors[: int(model.full_head_dim * model.full_rotary_share / 2)] = 1.0
    return factors


def _header(checkpoint: Checkpoint, file_type: int, vocabulary: GgufVocabulary, tensors: tuple[PlannedTensor | RawTensor, ...]) -> bytes:
    return header_of(
        architecture_name(checkpoint.architecture),
        gguf.GGUFType.MODEL,
        checkpoint,
        tensors,
        types=[tensor.type if isinstance(tensor, RawTensor) else TYPE_NUMBERS[tensor.type] for tensor in tensors],
        entries=architecture_entries(checkpoint, file_type),
        last=vocabulary_entries(vocabulary),
    )


def header_of(
    architecture: str,
    kind: str,
    checkpoint: Checkpoint,
    tensors: Sequence[PlannedTensor | RawTensor],
    *,
    types: Sequence[int],
    entries: list[Entry],
    last: Sequence[Entry] = (),
) -> bytes:
    """Returns the header of a file of tensors in these ggml types; `last` are keys behind the quantization's version.

    Raises CheckpointError if a value of the checkpoint's files fits no key.
    """
    writer = gguf.GGUFWriter(path=None, arch=architecture)
    for tensor, number in zip(tensors, types, strict=True):
        raw = gguf.GGMLQuantizationType(number)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, raw_dtype=raw)
    with unfit_values(checkpoint.folder):
        add_general(writer, checkpoint.folder, checkpoint.config, kind)
        _add_entries(writer, entries)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_entries(writer, list(last))
        return _header_bytes(writer)


def _header_bytes(writer: Any) -> bytes:
    """Returns the header, keys and tensor infos of a GGUFWriter. Sets its file, so that it opens none."""
    file = io.BytesIO()
    writer.fout, writer.state = [file], gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return file.getvalue()


def add_general(writer: Any, folder: Path, config: dict[str, Any], kind: str = gguf.GGUFType.MODEL) -> None:
    """Adds the general.* keys, as llama.cpp's converter writes them; `config` is its config.json.

    Raises CheckpointError for a file beyond the limits; values that fit no key are found only when the header is written (`unfit_values`).
    """
    total, shared, expert, experts = writer.get_total_parameter_count()
    named = {"_name_or_path": name_or_path(config, folder)}
    metadata = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), read_card(folder), named, folder, total)
    generation = read_generation(folder)
    for field, key in _GENERATION_KEYS.items():
        setattr(metadata, field, generation.get(key))
    if metadata.sampling_penalty_repeat is None:
        # llama.cpp's own copy of gguf reads this spelling, gguf 0.19 does not.
        metadata.sampling_penalty_repeat = generation.get("repetition_penalty")
    metadata.name = metadata.name if metadata.name is not None else folder.name
    if metadata.size_label is None and total > 0:
        metadata.size_label = gguf.size_label(total, shared, expert, experts)
    writer.add_type(kind)
    metadata.set_gguf_meta_model(writer)


def _add_entries(writer: Any, entries: list[Entry]) -> None:
    for key, kind, value in entries:
        getattr(writer, f"add_{kind}")(key, value)
