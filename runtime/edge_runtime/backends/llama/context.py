"""Models and contexts of llama.cpp: options, loading, batches, views of arrays that C owns, and the format of saved K/V rows."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.interface import CPU
from edge_runtime.backends.kernels.ggml import failure_check
from edge_runtime.backends.llama.loader import LlamaLibrary, llama_library, offloaded_to
from edge_runtime.bundle.gguf_gemma4 import check_model, owned_rows
from edge_runtime.bundle.gguf_header import DEFAULT_KV_TYPE, KV_TYPES, TENSOR_TYPES, TYPE_NUMBERS, GgufHeader, KvType
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import KvRows
from edge_runtime.planning.memory import BATCH

# With fewer rows per batch, a rollback of the longest draft would not always be possible (see `rewind_slack`).
MIN_BATCH = 32
# llama.cpp pads contexts to a multiple of this (src/llama-context.cpp, n_ctx). We ask for the padded size, or it may reduce n_batch.
_CONTEXT_STEP = 256
# A batch of the default size has room for the longest verify of this many sequences.
MAX_SEQUENCES = 32
# include/llama.h, llama_decode
_DECODE_CODES = {
    1: "no room in the KV cache for the batch",
    2: "an operation of the row kernels had no work memory",  # only the row kernels' check aborts a computation (`open_context`)
    -1: "the batch was refused as invalid",
    -2: "out of memory",
    -3: "the computation failed",
}


@dataclass(frozen=True, kw_only=True)
class LlamaOptions:
    """How to open a pair. Raises RequestError if a number is out of range.

    - `context`, `batch`: in tokens. The context holds `sequences` texts of `context` tokens each.
    - `use_extra_bufts`: lets llama.cpp repack weights for the CPU.
    - `draft`: keeps the target's hidden rows, which only a drafter needs.
    - `max_draft_length`: the longest draft; a verify has at most one row more.
    - `max_candidates`: the most tokens that the split drafter's head scores; None keeps the number in the head file.
    - `bidirectional`: the rows of an image attend to each other in both directions, so `batch` must hold all of them.
    - `device`: computes the last `device_layers` layers of a model (-1: all), and holds their K/V rows.
    """

    context: int
    threads: int
    batch: int = BATCH
    use_extra_bufts: bool = True
    draft: bool = True
    max_draft_length: int = MAX_DRAFT_LENGTH
    sequences: int = 1
    max_candidates: int | None = None
    kv_type: KvType = DEFAULT_KV_TYPE
    bidirectional: bool = False
    device: str = CPU
    device_layers: int = -1

    def __post_init__(self) -> None:
        if self.context < 1:
            raise RequestError(f"the context must be at least 1 token, not {self.context}; set --context")
        if self.threads < 1:
            raise RequestError(f"the number of threads must be at least 1, not {self.threads}; set --threads")
        if self.kv_type not in KV_TYPES:
            raise RequestError(f"KV type {self.kv_type!r} is unknown; choose one of {', '.join(KV_TYPES)}")
        if not 1 <= self.sequences <= MAX_SEQUENCES:
            raise RequestError(f"{self.sequences} sequences are not in 1..{MAX_SEQUENCES}; choose a number in that range")
        if self.batch < self.sequences * (self.max_draft_length + 1):
            raise RequestError(
                f"batch {self.batch} cannot hold a step of {self.sequences} sequences; "
                f"ask for at least {self.sequences * (self.max_draft_length + 1)}"
            )
        if self.batch < MIN_BATCH:
            raise RequestError(f"batch {self.batch} is too small to rewind the sliding cache; ask for at least {MIN_BATCH}")
        if not 0 <= self.max_draft_length <= MAX_DRAFT_LENGTH:
            raise RequestError(f"draft length {self.max_draft_length} is not in 0..{MAX_DRAFT_LENGTH}; choose one in that range")


class Batch:
    """A reusable llama_batch over NumPy arrays. With a `width` above 0, each row has an embedding [width] as well as a token."""

    def __init__(self, api: Any, rows: int, width: int = 0, *, sequences: int = 1) -> None:
        self._tokens = np.zeros(rows, dtype=np.int32)
        self._positions = np.zeros(rows, dtype=np.int32)
        self._flags = np.zeros(rows, dtype=np.int8)
        self._sequences = np.zeros(rows, dtype=np.int32)
        self._embeddings = np.zeros((rows, width), dtype=np.float32)
        self.structure = api.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=self._embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if width else None,
            pos=self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            logits=self._flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        # Null sequence ids mean sequence 0 (src/llama-batch.cpp, llama_batch_compat).
        if sequences > 1:
            self._counts = np.ones(rows, dtype=np.int32)
            addresses = self._sequences.ctypes.data + np.arange(rows, dtype=np.uintp) * self._sequences.itemsize
            self._addresses = addresses.astype(np.uintp)
            self.structure.n_seq_id = self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            self.structure.seq_id = self._addresses.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))

    @property
    def flags(self) -> NDArray[np.int8]:
        """By row, 1 if its logits and hidden row are computed, else 0."""
        return self._flags

    def clear(self) -> None:
        """Removes all rows."""
        self.structure.n_tokens = 0

    def add(self, tokens: NDArray[np.int64], position: int, flagged: int, sequence: int = 0) -> None:
        """Adds `tokens` of a sequence at the positions from `position` on; flags the last `flagged` of their rows."""
        start = self.structure.n_tokens
        end = start + len(tokens)
        self._tokens[start:end] = tokens
        self._positions[start:end] = np.arange(position, position + len(tokens))
        self._sequences[start:end] = sequence
        self._flags[start : end - flagged] = 0
        self._flags[end - flagged : end] = 1
        self.structure.n_tokens = end

    def add_rows(self, rows: NDArray[np.float32], position: int, sequence: int) -> None:
        """Sets the contents of the batch to rows [n, width] without tokens, at the positions from `position` on."""
        count = len(rows)
        self._embeddings[:count] = rows
        self._positions[:count] = np.arange(position, position + count)
        self._sequences[:count] = sequence
        self._flags[:count] = 0
        self.structure.token = None
        self.structure.n_tokens = count

    def add_step(self, token: int, embedding: NDArray[np.float32], position: int, sequence: int) -> None:
        """Adds one flagged row with a token and an embedding [width]."""
        row = self.structure.n_tokens
        self._tokens[row], self._positions[row], self._sequences[row], self._flags[row] = token, position, sequence, 1
        self._embeddings[row] = embedding
        self.structure.n_tokens = row + 1


def floats(pointer: Any, rows: int, width: int) -> NDArray[np.float32]:
    """Returns a view [rows, width] of floats that llama.cpp owns. Raises BackendError for a null pointer."""
    if not pointer:
        raise BackendError("llama.cpp computed no rows to read; this build does not fit edge-mtp, install a release")
    # ctypes.cast would create a reference cycle in each forward, which only the garbage collector frees.
    return _view(ctypes.addressof(pointer.contents), rows, width)


@lru_cache(maxsize=128)
def _view(address: int, rows: int, width: int) -> NDArray[np.float32]:
    # Cached, because llama.cpp writes each forward's rows to the same address. A new view takes a fifth of the Python time of a draft step.
    array = (ctypes.c_float * (rows * width)).from_address(address)
    return np.frombuffer(memoryview(array), dtype=np.float32).reshape(rows, width)


def load_model(library: LlamaLibrary, path: Path, options: LlamaOptions) -> Any:
    """Returns the model's pointer. The caller has checked the file. Raises BackendError with llama.cpp's reason if it does not load."""
    params = library.api.llama_model_default_params()
    params.use_extra_bufts = options.use_extra_bufts
    # Without a list, llama.cpp uses all devices of the build.
    handles = offloaded_to(options.device)
    params.devices = ctypes.addressof(handles)
    params.n_gpu_layers = 0 if options.device == CPU else options.device_layers
    library.log.clear()
    model = library.api.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        error = library.quoted_error()
        raise BackendError(f"llama.cpp could not load {path}{error}; {'free some memory' if 'allocate' in error else 'export it again'}")
    return model


def context_params(library: LlamaLibrary, options: LlamaOptions, max_rows: int) -> Any:
    """Returns llama_context_params for forwards with at most `max_rows` flagged rows, whose logits are computed."""
    params = library.api.llama_context_default_params()
    params.n_ctx = -(-options.context // _CONTEXT_STEP) * _CONTEXT_STEP * options.sequences
    params.n_seq_max = options.sequences
    # With one unified cache, sequences with different numbers of rows can share a forward (src/llama-kv-cache-iswa.cpp, init_batch).
    params.kv_unified = options.sequences > 1
    params.n_batch = params.n_ubatch = options.batch
    # The default, n_batch, would reserve logits of the whole vocabulary for each row of a prefill.
    params.n_outputs_max = max_rows
    params.n_threads = params.n_threads_batch = options.threads
    params.swa_full = False
    # The drafter's context reads its target's K/V rows, so both have the same type. A quantized V needs flash attention, which the default,
    # "auto", then turns on or fails (src/llama-context.cpp, llama_init_from_model).
    kinds = {"f16": library.api.GGML_TYPE_F16, "q8_0": library.api.GGML_TYPE_Q8_0, "q4_0": library.api.GGML_TYPE_Q4_0}
    params.type_k = params.type_v = kinds[options.kv_type]
    return params


def open_context(library: LlamaLibrary, model: Any, params: Any, path: Path) -> Any:
    """Returns the context's pointer. Raises BackendError with llama.cpp's reason if it cannot be created."""
    library.log.clear()
    context = library.api.llama_init_from_model(model, params)
    if not context:
        raise BackendError(f"llama.cpp could not open {path.name} with a context of {params.n_ctx}{library.quoted_error()}; try less")
    if (check := failure_check()) is not None:
        library.api.llama_set_abort_callback(context, ctypes.cast(check, library.api.ggml_abort_callback), None)
    return context


def rewind_slack(context: int, window: int, ubatch: int) -> int:
    """Returns how many rows below the greatest length so far a rollback can always go, whatever forwards came before.

    With swa_full off, the sliding cache has at least window + ubatch cells, or the whole context if that is smaller
    (src/llama-kv-cache-iswa.cpp). A cell is overwritten only when it is outside the window of the row after the newest one, and the oldest
    cell first (src/llama-kv-cache.cpp, find_slot). So the rows of the newest batch can always be removed. But if the r removed rows wrap
    around the end of the ring, the write position moves to its start, and up to r cells stay empty for one turn. Hence only half of ubatch
    is promised.
    """
    return context if window == 0 else min(context, ubatch // 2)


def decode_error(library: LlamaLibrary, role: str, code: int, rows: int) -> BackendError:
    """Returns the error for a llama_decode that did not return 0."""
    meaning = _DECODE_CODES.get(code, "an unknown failure")
    return BackendError(f"llama.cpp failed on {rows} tokens of the {role} with code {code}, {meaning}{library.quoted_error()}; try again")


class LlamaModel:
    """A model of llama.cpp and a context on it, freed exactly once. Close it, or use it as a context manager."""

    def __init__(self, path: Path, architecture: str, options: LlamaOptions) -> None:
        """Raises BackendError if the file is damaged, has another architecture, or does not load."""
        self._library = llama_library()
        self._api = self._library.api
        self._pointer: Any = None
        self.header = check_model(path, architecture)
        self._model: Any = load_model(self._library, path, options)

    def close(self) -> None:
        """Frees the context and the model. Can be called twice."""
        if self._pointer is not None:
            self._api.llama_free(self._pointer)
            self._pointer = None
        if self._model is not None:
            self._api.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# llama.cpp's format of a sequence's saved state, converted to plain K/V rows and back.
#
# The format is that of llama_kv_cache::state_write (src/llama-kv-cache.cpp), for the full cache and then for the sliding one. llama.cpp
# does not check the positions in a state: a wrong one crashes the process or falsifies attention. So a state is always built here, with
# counts, positions and sizes that this process computed; rows from a file only supply the values of K and V.

_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
# The state begins with magic and sequence id (src/llama-context.cpp, io_magic and state_seq_get_data).
_PREFIX = struct.Struct("<Ii")
_MAGIC = 0xAF143CD8
# Headers in each cache. Before the cells: numbers of streams and of cells. Before the layers: whether V is transposed, and their number.
# Before the rows of each layer: their type, and the bytes of a row.
_CELLS, _LAYERS, _ROWS = struct.Struct("<II"), struct.Struct("<II"), struct.Struct("<iQ")


@dataclass(frozen=True, kw_only=True)
class CacheForm:
    """One of llama.cpp's two caches: the ggml type of its rows, and by layer the bytes of a row of K, which V has too."""

    type: int
    layers: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one position: K and V in all layers."""
        return 2 * sum(self.layers)


def cache_forms(header: GgufHeader, kv_type: KvType) -> tuple[CacheForm, CacheForm]:
    """Returns the forms of a target's full and sliding caches."""
    number = TYPE_NUMBERS[kv_type]
    stored = TENSOR_TYPES[number]
    rows = owned_rows(header)
    full, sliding = (
        CacheForm(
            type=number, layers=tuple(heads * width * stored.bytes // stored.weights for slides, heads, width in rows if slides == kind)
        )
        for kind in (False, True)
    )
    return full, sliding


def rows_of(state: NDArray[np.uint8], forms: tuple[CacheForm, CacheForm], length: int, first: int) -> KvRows:
    """Reads the K/V rows from position `first` on out of the state of a sequence of `length` rows.

    Of the sliding layers, the state has the newest rows only. Raises BackendError if the state does not have these forms.
    """
    try:
        if _PREFIX.unpack_from(state.data)[0] != _MAGIC:
            raise ValueError("another magic")
        full, place = _cache_rows(state, _PREFIX.size, forms[0], length, first)
        sliding, place = _cache_rows(state, place, forms[1], length, first)
        if place != len(state) or len(full) != length - first:
            raise ValueError(f"{len(full)} rows from {first} to {length}, {len(state) - place} bytes left over")
    except (ValueError, struct.error) as error:
        raise BackendError(f"llama.cpp's state is not of the form that this version reads ({error}); install a release") from error
    return KvRows(full=full, sliding=sliding)


def _cache_rows(state: NDArray[np.uint8], place: int, form: CacheForm, length: int, first: int) -> tuple[NDArray[np.uint8], int]:
    """Returns the rows [rows, bytes] of one cache from position `first` on, sorted by position, and the offset of the next cache."""
    streams, count = _CELLS.unpack_from(state.data, place)
    cells = np.frombuffer(state, _CELL, count, place + _CELLS.size)
    order = np.argsort(cells["position"])
    if streams != 1 or not count or (cells["position"][order] != np.arange(length - count, length)).any():
        raise ValueError(f"{count} cells in {streams} streams")
    place += _CELLS.size + cells.nbytes
    if _LAYERS.unpack_from(state.data, place) != (0, len(form.layers)):
        raise ValueError(f"transposed and layers are {_LAYERS.unpack_from(state.data, place)}")
    place += _LAYERS.size
    in_order, order = bool((order[1:] > order[:-1]).all()), order[max(0, count - (length - first)) :]
    rows, column = np.empty((len(order), form.row_bytes), np.uint8), 0
    for width in form.layers * 2:  # K of each layer, then V of each
        if _ROWS.unpack_from(state.data, place) != (form.type, width):
            raise ValueError(f"a row's type and bytes are {_ROWS.unpack_from(state.data, place)}")
        place += _ROWS.size
        layer = state[place : place + count * width].reshape(count, width)
        rows[:, column : column + width] = layer[count - len(order) :] if in_order else layer[order]
        place, column = place + count * width, column + width
    return rows, place


def state_of(rows: KvRows, forms: tuple[CacheForm, CacheForm]) -> NDArray[np.uint8]:
    """Builds the state of a sequence from its K/V rows: all rows of the full layers, the newest ones of the sliding layers."""
    length = len(rows.full)
    parts = [np.frombuffer(_PREFIX.pack(_MAGIC, 0), np.uint8)]
    for form, own in zip(forms, (rows.full, rows.sliding), strict=True):
        cells = np.zeros(len(own), _CELL)
        cells["position"], cells["sequences"] = np.arange(length - len(own), length), 1
        parts += [np.frombuffer(_CELLS.pack(1, len(own)), np.uint8), cells.view(np.uint8)]
        parts.append(np.frombuffer(_LAYERS.pack(0, len(form.layers)), np.uint8))
        column = 0
        for width in form.layers * 2:
            parts.append(np.frombuffer(_ROWS.pack(form.type, width), np.uint8))
            parts.append(own[:, column : column + width])
            column += width
    state, place = np.empty(sum(part.size for part in parts), np.uint8), 0
    for part in parts:
        state[place : place + part.size].reshape(part.shape)[...] = part
        place += part.size
    return state
