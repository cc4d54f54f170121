"""How much memory a bundle and its encoder of images and sound will take, computed from the manifest; and the check that it fits.

For llama.cpp, the sizes of K/V rows and logits are exact. Activations are estimated from the widest block, because llama.cpp reuses their
memory. The system can drop weights that are mapped from the bundle's files or from the packed cache, and read them again; it cannot drop
the rest.

An encoder is checked before its first use. libmtmd copies its file into memory, and onnxruntime converts float16 weights to float32.
Activations are estimated from the sizes of the towers, by measurements; the memory for the largest media so far stays allocated.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edge_devices.errors import byte_text
from edge_runtime.bundle.gguf_header import KV_TYPES, QUANTIZATIONS, KvType, Quantization, row_bytes
from edge_runtime.bundle.manifest import (
    AUDIO_ENCODER,
    MEDIA_ENCODER,
    VISION_ENCODER,
    Architecture,
    BundleFile,
    CacheLayout,
    Manifest,
    Rotation,
)
from edge_runtime.config.schema import SIZE, bytes_of
from edge_runtime.errors import RequestError
from edge_runtime.media.encoder_inputs import POOLING, Image, Kind
from edge_runtime.media.soft_rows import Media, row_count

# How many float32 vectors per patch exist at the same time: of the feed-forward's width, and of the vision tower's.
_WIDE_VECTORS, _VECTORS = 3, 10
# Activations of the audio tower's first convolutions, per soft row. Their shapes are the same in all models.
_SOUND_ROW_BYTES = 160_000
_GROWTH = {"f16": 2.0}


def encoder_weight_bytes(manifest: Manifest, kind: Kind | None = None) -> int:
    """Returns the bytes of the loaded encoder of images or of sound; for `kind` None, those of a GGUF file that contains both."""
    if kind is None:
        return sum(file.bytes for file in manifest.files if file.role == MEDIA_ENCODER)
    role = {"image": VISION_ENCODER, "sound": AUDIO_ENCODER}[kind]
    files = [file for file in manifest.files if file.role.removesuffix("_data") == role]
    return int(sum(file.bytes * _GROWTH.get(file.quantization or "", 1.0) for file in files))


def encoder_activation_bytes(manifest: Manifest, kind: Kind, rows: int) -> int:
    """Returns the bytes of activations to encode an image or a sound of `rows` soft rows; 0 for a projection instead of a tower."""
    inputs = manifest.media
    if inputs is None:
        return 0
    if kind == "sound":
        return 0 if inputs.samples_per_row is not None else rows * _SOUND_ROW_BYTES
    size = inputs.vision
    if size is None or size.feed_forward_size is None:
        return 0
    return rows * POOLING**2 * _FLOAT * (_WIDE_VECTORS * size.feed_forward_size + _VECTORS * size.hidden_size)


class EncoderMemory:
    """Counts the memory that a session's encoders take, and decides whether the next image or sound fits.

    `one_file`: one file contains both encoders; otherwise each is loaded when it is needed. `limit` is for the whole process, in which the
    bundle takes `beside` bytes; without a limit, `available` returns what is free.
    """

    def __init__(
        self,
        manifest: Manifest,
        available: Callable[[], int | None],
        *,
        one_file: bool,
        limit: int | None = None,
        beside: int = 0,
    ) -> None:
        self._manifest, self._one_file, self._available = manifest, one_file, available
        self._limit, self._beside = limit, beside
        self._weights: dict[Kind | None, int] = {}
        self._activations = 0

    def admit(self, media: Media) -> None:
        """Counts an image or a sound before it is encoded. Raises RequestError if there is no memory for it."""
        inputs = self._manifest.media
        assert inputs is not None  # a bundle without media inputs has no encoder
        kind: Kind = "image" if isinstance(media, Image) else "sound"
        loaded = None if self._one_file else kind
        weights = self._weights | {loaded: encoder_weight_bytes(self._manifest, loaded)}
        activations = max(self._activations, encoder_activation_bytes(self._manifest, kind, row_count(media, inputs)))
        total = sum(weights.values()) + activations
        needed, fits, where = self._bounds(total)
        if fits is not None and needed > fits:
            raise RequestError(
                f"the encoder needs {byte_text(needed)} of memory for this {kind}, but {where}; ask for less detail, free some memory,"
                f" or leave the {kind} out"
            )
        self._weights, self._activations = weights, activations

    def _bounds(self, total: int) -> tuple[int, int | None, str]:
        """Returns the bytes that are needed, those that are free, and a clause about the latter."""
        if self._limit is not None:
            return (
                total,
                self._limit - self._beside,
                f"the limit of {byte_text(self._limit)} leaves {byte_text(max(0, self._limit - self._beside))}",
            )
        used, available = sum(self._weights.values()) + self._activations, self._available()
        return total - used, available, "" if available is None else f"{byte_text(available)} are available"


# llama.cpp pads contexts and sliding caches to multiples of this (src/llama-context.cpp, src/llama-kv-cache-iswa.cpp).
CELL_STEP = 256
# The number of rows in llama.cpp's largest forward.
BATCH = 512
# Measured: the interpreter with numpy and llama.cpp's libraries.
PROCESS_BYTES = 48 << 20
# Measured: the same with onnxruntime, the tokenizer and the graphs' plans, for the shipped and the widened pair.
_ONNX_PROCESS_BYTES = 85 << 20
# Measured on a Zen 5: the parts of these that are mapped from libraries.
_CODE_BYTES, _ONNX_CODE_BYTES = 26 << 20, 42 << 20
_FLOAT, _HALF, _MASK = 4, 2, 2
# Measured, per token of the vocabulary: llama.cpp's tables, and those of the tokenizer that is used with onnxruntime.
_TOKEN_BYTES, _TOKENIZER_BYTES = 128, 256
# For manifests without feed_forward_size: an upper bound of the width of a Gemma 4 block, as a multiple of the hidden size.
_WIDEST = 8
# The number of rows that the drafter's context is opened for (backends/llama/context.py, MAX_SEQUENCES).
_DRAFTER_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """The load options that decide how much memory is taken. Sizes are in tokens, per sequence. `drafter` is the kind that is loaded.

    `gives_back`: the pages of a file are released after repacking, as the row kernels do on Linux. `packed_cache`: repacked weights are
    mapped from a file in the user's cache.
    """

    context: int
    kv_type: KvType
    sequences: int
    batch: int
    verify_rows: int
    drafter: str | None
    repack: bool
    gives_back: bool
    packed_cache: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose.

    - `process`: the process itself; `code` of it is mapped from libraries.
    - `weights`: mapped files. `given_back` of them are released once they are repacked. `tables` of them are embedding tables, of which a
      token reads only one row, so most of their pages stay on the disk.
    - `repacked`: repacked copies of weights. `mapped_copies` of them are mapped from the packed cache, so that the system can drop
      them too; that is all but the drafter's.
    - `cache`: K/V rows.
    - `buffers`: activations and logits; `prompts` of it is used only by a prompt of many rows.
    """

    process: int
    weights: int
    repacked: int
    cache: int
    buffers: int
    given_back: int = 0
    tables: int = 0
    code: int = 0
    mapped_copies: int = 0
    prompts: int = 0

    @property
    def mapped(self) -> int:
        """All bytes of the address space that are taken."""
        return self.process + self.weights + self.repacked + self.cache + self.buffers

    @property
    def total(self) -> int:
        """The resident size of the process after every page was used, except those of tables and those given back after repacking."""
        return self.mapped - self.given_back - self.tables

    @property
    def reserved(self) -> int:
        """Bytes that the system cannot reclaim: everything that is not mapped from files."""
        return self.process - self.code + self.cache + self.buffers + self.repacked - self.mapped_copies

    @property
    def of_files(self) -> int:
        """Bytes of the total that are mapped from files, which the system can drop and read again."""
        return self.total - self.reserved

    @property
    def with_short_prompts(self) -> int:
        """The total without the memory that only long prompts use."""
        return self.total - self.prompts

    @property
    def enough(self) -> int:
        """Bytes with which no weight is read from disk twice: each is in memory once, as a mapped page or as a repacked copy."""
        return self.process + self.cache + self.buffers + max(self.weights - self.tables, self.repacked)

    def minimum(self, read_bytes: float) -> float:
        """Bytes with which the weights that a token reads (`read_bytes`; only active experts) stay in memory, without repacked copies."""
        own = min(read_bytes, self.weights) if self.weights > self.tables else self.repacked
        return self.process + self.cache + self.buffers + own


def onnx_memory_plan(manifest: Manifest, request: MemoryRequest) -> MemoryPlan:
    """Returns the bytes that the bundle's ONNX graphs take.

    All weights are copied, except tables, which are mapped and read by rows. K/V rows are float32. A prompt's rows of the feed-forward's
    width exist only once at a time, because gate and up projections are one operator.
    """
    own = manifest.architecture
    wide = (own.feed_forward_size or _WIDEST * own.hidden_size) + 3 * own.hidden_size + 2 * own.layers * (own.per_layer_size or 0)
    activations, few = request.batch * wide * _FLOAT, request.verify_rows * wide * _FLOAT
    graphs = [file for file in manifest.files if file.format in ("onnx", "onnx_data")]
    files, drafter = sum(file.bytes for file in graphs), sum(file.bytes for file in graphs if file.role.startswith("drafter"))
    per_layer, rotations = (
        int(files * _table_share(own)),
        rotation_bytes(manifest.onnx.rotations if manifest.onnx else (), manifest.cache_layout, request.context),
    )
    return MemoryPlan(
        process=_ONNX_PROCESS_BYTES + own.vocab_size * _TOKENIZER_BYTES,
        code=_ONNX_CODE_BYTES,
        weights=per_layer,
        repacked=files - per_layer,
        tables=per_layer,
        mapped_copies=files - per_layer - drafter if request.packed_cache else 0,
        cache=2 * cache_bytes(manifest.cache_layout, replace(request, kv_type="f16")),
        buffers=activations + _logits(own, request.verify_rows, own.vocab_size) + rotations,
        prompts=max(0, activations - few),
    )


def _table_share(own: Architecture) -> float:
    """Returns the share of a target's bytes that its table of per-layer embeddings takes, assuming the mean bits of all weights for it.

    The other embedding table does not count as a table, because it is the output head too.
    """
    return min(1.0, own.vocab_size * own.layers * (own.per_layer_size or 0) / max(1, own.parameters))


def rotation_bytes(rotations: Sequence[Rotation], layout: CacheLayout, positions: int) -> int:
    """Returns the bytes of the tables of cosines and sines in float32, and also in float16 if there are float16 buffers."""
    each = 2 * (_FLOAT + _HALF * any(buffer.dtype == "f16" for buffer in layout.buffers))
    return sum(each * positions * (rotation.head_dim // 2) for rotation in rotations)


def memory_plan(manifest: Manifest, request: MemoryRequest) -> MemoryPlan:
    """Returns the bytes that the bundle takes when loaded with these options."""
    files = _files(manifest.files, request.drafter)
    weights, repacked = sum(file.bytes for file in files), _repacked(manifest, files) if request.repack else 0
    # Without the packed cache, llama.cpp reads whole files ahead to pack their weights (kernels/src/ggml/register.cpp).
    mapped = request.packed_cache and request.gives_back and repacked > 0
    target = sum(file.bytes for file in files if file.role == "target")
    tables = min(int(target * _table_share(manifest.architecture)), max(0, weights - repacked)) if mapped else 0
    return MemoryPlan(
        process=PROCESS_BYTES,
        code=_CODE_BYTES,
        weights=weights,
        repacked=repacked,
        given_back=min(weights, repacked) if request.gives_back else 0,
        tables=tables,
        mapped_copies=_repacked(manifest, [file for file in files if file.role == "target"]) if mapped else 0,
        cache=cache_bytes(manifest.cache_layout, request),
        buffers=_buffers(manifest, request),
        prompts=_buffers(manifest, request) - _buffers(manifest, replace(request, batch=min(request.batch, request.verify_rows))),
    )


def cache_bytes(layout: CacheLayout, request: MemoryRequest) -> int:
    """Returns the bytes of all K/V rows that llama.cpp allocates."""
    full, sliding = _cells(layout, request)
    total = full * row_bytes(layout.full, request.kv_type) * len(layout.full.owner_layers)
    if layout.sliding is not None:
        total += sliding * row_bytes(layout.sliding, request.kv_type) * len(layout.sliding.owner_layers)
    return total


def largest_context(manifest: Manifest, request: MemoryRequest, fits: Callable[[MemoryPlan], bool]) -> int | None:
    """Returns the largest context, in steps of CELL_STEP and at most the requested one, whose plan fits; else None."""
    low, high = 0, -(-request.context // CELL_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(memory_plan(manifest, replace(request, context=middle * CELL_STEP))):
            low = middle
        else:
            high = middle - 1
    return min(low * CELL_STEP, request.context) if low else None


def smaller_kv_type(manifest: Manifest, request: MemoryRequest, fits: Callable[[MemoryPlan], bool]) -> KvType | None:
    """Returns the most precise KV type below the requested one whose plan fits; None if none does."""
    below = KV_TYPES[KV_TYPES.index(request.kv_type) + 1 :]
    return next((kind for kind in below if fits(memory_plan(manifest, replace(request, kv_type=kind)))), None)


def memory_bytes(limit: str | int) -> int:
    """Returns the bytes of a limit such as "2GB", "512 MiB" or a number of bytes. Raises ConfigError for anything else."""
    SIZE("the memory limit", limit)
    return bytes_of(limit)


@dataclass(frozen=True, kw_only=True)
class MemoryRoom:
    """The bytes that a bundle may take. None: no limit, or unknown.

    `limit` was set by the user for the process; without it, `available` is what the machine has free. `address_space` is how much more the
    system lets this process map.
    """

    limit: int | None = None
    available: int | None = None
    address_space: int | None = None


def check_memory(
    manifest: Manifest, request: MemoryRequest, room: MemoryRoom, notify: Callable[[str], None] = lambda _: None
) -> MemoryPlan:
    """Returns the plan. Raises RequestError if its reserved bytes exceed the limit (without a limit, the available memory), or if its
    mapped bytes exceed the address space.

    Mapped weights count only against the address space, because the system can drop them and read them again. That is slow, so `notify`
    gets a warning if they will not all stay in memory.
    """
    plan = memory_plan(manifest, request)
    if request.repack:
        for file in _models(_files(manifest.files, request.drafter)):
            if _known_mix(file) is None:
                notify(f"{file.path} is of the unknown type {file.quantization!r}: a repacked copy is planned as large as the file.")
    available = room.available if room.limit is None else None
    address_space = None if room.address_space is None else room.address_space + plan.process  # the process itself is mapped already
    for fits, size, where in (
        (address_space, "mapped", "{} of address space are left for it (ulimit -v)"),
        (room.limit, "reserved", "the limit is {}"),
        (available, "reserved", "{} are available"),
    ):
        if fits is not None and getattr(plan, size) > fits:
            raise RequestError(_refusal(manifest, request, operator.attrgetter(size), fits, where.format(byte_text(fits))))
    if available is not None and plan.total > available:
        notify(
            f"The bundle takes {byte_text(plan.total)}, but {byte_text(available)} are available: weights will be read from disk again"
            " and again."
        )
    return plan


def check_memory_without_copies(
    manifest: Manifest, request: MemoryRequest, room: MemoryRoom, notify: Callable[[str], None] = lambda _: None
) -> bool:
    """Checks as `check_memory` does. If the bundle does not fit only because of repacked copies of the weights, accepts it without them.

    Under a limit of the user, it must fit with copies. Returns whether copies may be made.
    """
    try:
        check_memory(manifest, request, room, notify)
    except RequestError as refusal:
        if not request.repack or room.limit is not None:
            raise
        plain, notes = replace(request, repack=False), list[str]()
        try:
            check_memory(manifest, plain, room, notes.append)
        except RequestError:
            raise refusal from None
        notify("There is no memory for repacked copies of the weights, which are quicker; the mapped files are used.")
        for note in notes:
            notify(note)
        return False
    return request.repack


def _cells(layout: CacheLayout, request: MemoryRequest) -> tuple[int, int]:
    """Returns the cells of a full and of a sliding layer, which has each sequence's window and a batch (src/llama-kv-cache-iswa.cpp)."""
    full = _padded(request.context) * request.sequences
    window = layout.sliding.window if layout.sliding else None
    return full, _padded(min(full, (window or full) * request.sequences + request.batch)) if layout.sliding else 0


def _padded(cells: int) -> int:
    return -(-cells // CELL_STEP) * CELL_STEP


def _files(files: Sequence[BundleFile], drafter: str | None) -> list[BundleFile]:
    roles = {"target"}
    if drafter in ("dense", "split"):
        roles.add("drafter")
    if drafter == "split":
        roles.add("drafter_head")
    return [file for file in files if file.role in roles and file.format == "gguf"]


def _repacked(manifest: Manifest, files: Sequence[BundleFile]) -> int:
    """Returns the bytes of repacked copies. Matrices are repacked, including the head, but not the target's embedding tables.

    For an unknown mix of types, the copy is assumed to be as large as the file.
    """
    own = manifest.architecture
    tables = {"target": own.vocab_size * (own.hidden_size + own.layers * (own.per_layer_size or 0)), "drafter": 0}
    weights = {"target": own.parameters, "drafter": own.drafter_parameters}
    heads = {"target": own.vocab_size * own.hidden_size, "drafter": 0}
    total = 0
    for file in _models(files):
        kind, matrices = _known_mix(file), max(0, weights[file.role] - tables[file.role])
        total += file.bytes if kind is None else kind.copy_bytes(matrices, heads[file.role])
    return total


def _models(files: Sequence[BundleFile]) -> list[BundleFile]:
    return [file for file in files if file.role in ("target", "drafter") and file.format == "gguf"]


def _known_mix(file: BundleFile) -> Quantization | None:
    kind = QUANTIZATIONS.get(file.quantization or "")
    return kind if kind is not None and kind.matrices else None


def _buffers(manifest: Manifest, request: MemoryRequest) -> int:
    own = manifest.architecture
    cells = sum(_cells(manifest.cache_layout, request))
    rows = min(request.batch, _padded(request.context) * request.sequences)
    widest = own.feed_forward_size or _WIDEST * own.hidden_size
    target = 3 * widest + 3 * own.hidden_size + own.layers * (own.per_layer_size or 0)
    outputs = request.verify_rows * request.sequences
    total = rows * (target * _FLOAT + cells * _MASK) + _logits(own, outputs, own.vocab_size) + own.vocab_size * _TOKEN_BYTES
    if request.drafter in ("dense", "split"):
        widest = own.drafter_feed_forward_size or _WIDEST * own.drafter_hidden_size
        total += _DRAFTER_ROWS * ((3 * widest + 2 * own.hidden_size) * _FLOAT + cells * _MASK)
        total += _logits(own, request.sequences, own.vocab_size) + own.vocab_size * _TOKEN_BYTES
    return total


def _logits(own: Architecture, rows: int, vocabulary: int) -> int:
    """Returns the bytes of logits: each row is computed in one buffer and copied to another, together with its hidden row."""
    return rows * (2 * vocabulary + own.hidden_size) * _FLOAT


def _refusal(manifest: Manifest, request: MemoryRequest, size: Callable[[MemoryPlan], int], room: int, where: str) -> str:
    context = largest_context(manifest, request, lambda plan: size(plan) <= room)
    kv_type = smaller_kv_type(manifest, request, lambda plan: size(plan) <= room)
    needed = size(memory_plan(manifest, request))
    changes = [f"a context of at most {context}"] if context is not None else []
    changes += [f"KV type {kv_type}"] if kv_type is not None else []
    advice = f"ask for {' or '.join(changes)}" if changes else "no context is small enough: use a smaller bundle, or give it more memory"
    several = f" for each of {request.sequences} sequences" if request.sequences > 1 else ""
    return (
        f"a context of {request.context}{several} with KV type {request.kv_type} needs {byte_text(needed)} of memory, but {where}; {advice}"
    )
