"""How much memory an opened bundle will take: arithmetic on its manifest, done before anything is opened.

K/V rows and logits are exact for llama.cpp; what a forward computes with is an estimate from the widest block, since llama.cpp lays
its activations over each other. Weights are mapped: the system can drop them and read them again, unlike the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_runtime.bundle.kv_types import KV_TYPES, KvType, row_bytes
from edge_runtime.bundle.manifest import Architecture, BundleFile, CacheLayout, Manifest

# llama.cpp pads contexts and sliding caches to this (src/llama-context.cpp, src/llama-kv-cache-iswa.cpp).
CELL_STEP = 256
# The interpreter with numpy and llama.cpp's libraries, as measured.
PROCESS_BYTES = 48 << 20
# Bits per weight of the types that llama.cpp copies into an order of its own for the CPU (ggml/src/ggml-cpu/repack.cpp); which ones
# it really copies depends on the processor, and this counts all of them.
_REPACKED_BITS = {"q4_0": 4.5, "q4_k_m": 4.9, "q5_k_m": 5.7, "q6_k": 6.6, "q8_0": 8.5}
_FLOAT, _MASK = 4, 2
# llama.cpp's tables of a vocabulary, per token, as measured.
_TOKEN_BYTES = 128
# What a manifest does not say: no Gemma 4 block is wider than this many times the hidden size.
_WIDEST = 8
# The drafter's context is opened for this many (backends/llama_context.py, MAX_SEQUENCES).
_DRAFTER_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How a bundle is to be opened; sizes in tokens, per sequence. `drafters` are the kinds that are open at the same time."""

    context: int
    kv_type: KvType
    sequences: int
    batch: int
    verify_rows: int
    drafters: tuple[str, ...]
    repack: bool


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by what they are for: the process itself, mapped files, copies of weights in another order, K/V rows, and activations
    with logits."""

    process: int
    weights: int
    repacked: int
    cache: int
    buffers: int

    @property
    def total(self) -> int:
        """All bytes, as a process that has touched every page shows them."""
        return self.reserved + self.weights

    @property
    def reserved(self) -> int:
        """What the system cannot take back: everything but the mapped files."""
        return self.process + self.repacked + self.cache + self.buffers


def memory_plan(manifest: Manifest, opening: Opening) -> MemoryPlan:
    """Returns what the bundle takes when it is opened so."""
    files = _files(manifest.files, opening.drafters)
    return MemoryPlan(
        process=PROCESS_BYTES,
        weights=sum(file.bytes for file in files),
        repacked=_repacked(manifest, files) if opening.repack else 0,
        cache=cache_bytes(manifest.cache_layout, opening),
        buffers=_buffers(manifest, opening),
    )


def cache_bytes(layout: CacheLayout, opening: Opening) -> int:
    """Returns the bytes of all K/V rows that llama.cpp allocates."""
    full, sliding = _cells(layout, opening)
    total = full * row_bytes(layout.full, opening.kv_type) * len(layout.full.owner_layers)
    if layout.sliding is not None:
        total += sliding * row_bytes(layout.sliding, opening.kv_type) * len(layout.sliding.owner_layers)
    return total


def largest_context(manifest: Manifest, opening: Opening, fits: int, *, reserved_only: bool) -> int | None:
    """Returns the largest context, in steps of CELL_STEP and at most the one asked for, that takes at most `fits` bytes; None if none does."""

    def needed(context: int) -> int:
        plan = memory_plan(manifest, replace(opening, context=context))
        return plan.reserved if reserved_only else plan.total

    low, high = 0, -(-opening.context // CELL_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        if needed(middle * CELL_STEP) <= fits:
            low = middle
        else:
            high = middle - 1
    return min(low * CELL_STEP, opening.context) if low else None


def smaller_kv_type(manifest: Manifest, opening: Opening, fits: int, *, reserved_only: bool) -> KvType | None:
    """Returns the best KV type below the one asked for with which the context takes at most `fits` bytes; None if none does."""
    for kv_type in KV_TYPES[KV_TYPES.index(opening.kv_type) + 1 :]:
        plan = memory_plan(manifest, replace(opening, kv_type=kv_type))
        if (plan.reserved if reserved_only else plan.total) <= fits:
            return kv_type
    return None


def _cells(layout: CacheLayout, opening: Opening) -> tuple[int, int]:
    """Cells of a full and of a sliding layer (src/llama-kv-cache-iswa.cpp): the sliding ones hold each sequence's window and a batch."""
    full = _padded(opening.context) * opening.sequences
    window = layout.sliding.window if layout.sliding else None
    return full, _padded(min(full, (window or full) * opening.sequences + opening.batch)) if layout.sliding else 0


def _padded(cells: int) -> int:
    return -(-cells // CELL_STEP) * CELL_STEP


def _files(files: Sequence[BundleFile], drafters: Sequence[str]) -> list[BundleFile]:
    roles = {"target"}
    if "dense" in drafters:
        roles.add("drafter")
    if "split" in drafters:
        roles |= {"drafter_body", "drafter_head"}
    return [file for file in files if file.role in roles and file.format in ("gguf", "safetensors")]


def _repacked(manifest: Manifest, files: Sequence[BundleFile]) -> int:
    """Matrices are copied, tables that rows are looked up in are not."""
    own = manifest.architecture
    tables = {
        "target": own.vocab_size * (own.hidden_size + own.layers * (own.per_layer_size or 0)),
        "drafter": own.vocab_size * own.drafter_hidden_size,
    }
    weights = {"target": own.parameters, "drafter": own.drafter_parameters}
    bits = {file.role: _REPACKED_BITS.get(file.quantization or "", 0.0) for file in files}
    return sum(int(max(0, weights[role] - tables[role]) * bits.get(role, 0) / 8) for role in weights)


def _buffers(manifest: Manifest, opening: Opening) -> int:
    own = manifest.architecture
    cells = sum(_cells(manifest.cache_layout, opening))
    rows = min(opening.batch, _padded(opening.context) * opening.sequences)
    widest = own.feed_forward_size or _WIDEST * own.hidden_size
    target = 3 * widest + 3 * own.hidden_size + own.layers * (own.per_layer_size or 0)
    outputs = opening.verify_rows * opening.sequences
    total = rows * (target * _FLOAT + cells * _MASK) + _logits(own, outputs, own.vocab_size) + own.vocab_size * _TOKEN_BYTES
    for kind in opening.drafters:
        if kind in ("dense", "split"):
            widest = own.drafter_feed_forward_size or _WIDEST * own.drafter_hidden_size
            vocabulary = own.vocab_size if kind == "dense" else 0
            total += _DRAFTER_ROWS * ((3 * widest + 2 * own.hidden_size) * _FLOAT + cells * _MASK)
            total += _logits(own, opening.sequences, vocabulary) + vocabulary * _TOKEN_BYTES
    return total


def _logits(own: Architecture, rows: int, vocabulary: int) -> int:
    """A row is computed in one buffer and copied to another, with its hidden row."""
    return rows * (2 * vocabulary + own.hidden_size) * _FLOAT
