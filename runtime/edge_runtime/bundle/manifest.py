"""manifest.json as dataclasses, with its own hash and all checks. Layout and every field: docs/design/manifest.md."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_devices.files.typed_json import StructureError, to_json
from edge_runtime.errors import BundleError

# The manifest's own hash is its last key: the SHA-256 of the whole file, with zeros in place of the hash's 64 digits. It covers the bytes
# of the file rather than the meaning of the JSON, so that every changed bit is found.

_KEY = "sha256"
_BLANK = "0" * 64
_END = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n')
_END_BYTES = len(f'"{_KEY}": "{_BLANK}"\n}}\n')
LARGEST = 1 << 53
# The first line of a section of figures that can be pasted into a model card (edge-bench run --markdown).
FIGURES_OF = "<!-- edge-bench: figures of the files {} -->"
# Fields that may be 0: ids, and counts that may be zero. Every other integer is at least 1, every other number above 0.
FROM_ZERO = frozenset(
    {
        "bytes",
        "per_layer_size",
        "rotated_pairs",
        "draft_length",
        "acceptance_before",
        "layer",
        "owner_layers",
        "layer_owners",
        "drafter_sources",
        "bos_token",
        "eos_token",
        "eog_tokens",
        "control_tokens",
        "temperature",
        "top_k",
        "min_p",
        "end_tokens",
        "suppress_tokens",
    }
)


def files_key(files: Iterable[Any]) -> str:
    """Returns a hash of the model files' roles, formats, quantizations and sizes, which identifies a bundle in its figures."""
    facts = sorted(f"{file.role} {file.format} {file.quantization} {file.bytes}" for file in files)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def with_hash(data: Mapping[str, Any]) -> str:
    """Returns the text of manifest.json with this data and its hash; a hash that the data contain is replaced."""
    content = {key: value for key, value in data.items() if key != _KEY}
    text = json.dumps({**content, _KEY: _BLANK}, indent=2) + "\n"
    before = text[: len(text) - _END_BYTES]
    return before + text[len(before) :].replace(_BLANK, hashlib.sha256(text.encode()).hexdigest())


def has_own_hash(raw: bytes) -> bool:
    """Whether these bytes of a manifest end with the right hash."""
    before = raw[:-_END_BYTES]
    end = _END.fullmatch(raw, len(before))
    if end is None:
        return False
    blanked = before + end[0].replace(end[1], _BLANK.encode())
    return hashlib.sha256(blanked).hexdigest().encode() == end[1]


def check_numbers(value: Any, where: str, name: str = "") -> None:
    """Raises StructureError for the first number in `value`, at any depth, that is out of range. Free-form objects are skipped."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            check_numbers(getattr(value, field.name), f"{where}.{field.name}", field.name)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            check_numbers(item, f"{where}[{i}]", name)
    elif isinstance(value, dict):
        for key, item in value.items():
            if dataclasses.is_dataclass(item):
                check_numbers(item, f"{where}.{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check(value, where, name in FROM_ZERO)


def _check(number: float, where: str, from_zero: bool) -> None:
    if number < 0 or (number == 0 and not from_zero) or number > LARGEST:
        minimum = "0" if from_zero else "1" if isinstance(number, int) else "above 0"
        raise StructureError(f"{where} is {number}, not {minimum} to 2^53")


SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
# The longest draft (see docs/design/manifest.md, rewind slack).
MAX_DRAFT_LENGTH = 12
# The widest head. A limit is needed, because buffers and tables are allocated by the sizes in a manifest.
MAX_HEAD_DIM = 8192
# The roles of the encoders of images and sound: one GGUF file for both, or one ONNX graph for each.
MEDIA_ENCODER, VISION_ENCODER, AUDIO_ENCODER = "media_encoder", "vision_encoder", "audio_encoder"


@dataclass(frozen=True, kw_only=True)
class BundleFile:
    """One file of the bundle. `path` is relative, with forward slashes; `role` is one of those in docs/design/manifest.md.

    `bits_per_weight` is the mean size of a weight in it, None for files without model weights.
    """

    path: str
    role: str
    format: str
    bytes: int
    sha256: str
    quantization: str | None = None
    bits_per_weight: float | None = None

    @property
    def weights(self) -> str:
        """The quantization and its bits, e.g. "q4_k_m, 7.8 bits per weight"; empty for a file without weights."""
        bits = "" if self.bits_per_weight is None else f", {self.bits_per_weight:.2g} bits per weight"
        return f"{self.quantization}{bits}" if self.quantization else ""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source checkpoint, at the time of the export."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The origin of a model."""

    origin: str
    model_type: str
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, kw_only=True)
class ImportanceSource:
    """Where a quantization took the importance of weights from: `kind` is imatrix (a file in llama.cpp's format) or calibration (a text).

    `tokens` is how many tokens of the text were run, None for a file.
    """

    kind: str
    name: str
    bytes: int
    sha256: str
    tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class DrafterTuning:
    """How the drafter was tuned (`edge-export pair --tune-drafter`): on the user's text, and on what the target wrote after parts of it.

    The acceptances are those of drafts of `draft_length` tokens on text that tuning did not see, with the original drafter
    (`acceptance_before`) and with the tuned one.
    """

    name: str
    bytes: int
    sha256: str
    texts: int
    steps: int
    minutes: float
    draft_length: int
    acceptance_before: float
    acceptance: float


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The K/V rows of one kind of layer. A row is [kv_heads, head_dim] of `dtype`, for each of K and V.

    `owner_layers` are the target's layers that write rows; `window` is the attention window in rows (None: all rows); `capacity` is how
    many rows are kept.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    capacity: int
    window: int | None
    owner_layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CacheBuffer:
    """The two buffers of an owner layer in the ONNX graphs: inputs named `key` and `value`, [1, kv_heads, rows, head_dim] of `dtype`.

    `kind` is "sliding" or "full". `rows` is the number of rows at the bundle's context; a sliding layer has some to spare. `read` is what
    the target's graph gets: the whole "buffer", or only the existing "rows". `drafter_read` is the same for the drafter's graph
    (docs/design/manifest.md).
    """

    layer: int
    kind: str
    key: str
    value: str
    kv_heads: int
    head_dim: int
    dtype: str
    rows: int
    read: str = "buffer"
    drafter_read: str = "buffer"


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Which layers own K/V rows, and which layers read them.

    `layer_owners[i]` is the target's layer whose rows its layer i attends to: i itself, unless the layer shares K/V rows.
    `drafter_sources[i]` is the target's layer whose rows the drafter's layer i attends to; the drafter owns no rows.
    `rewind_slack` is how many rows can be rolled back, at least the longest draft. `buffers` are those of the ONNX graphs, if any.
    """

    sliding: LayerCache | None
    full: LayerCache
    layer_owners: tuple[int, ...]
    drafter_sources: tuple[int, ...]
    rewind_slack: int
    buffers: tuple[CacheBuffer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rotary embedding of one kind of layer: pair i of head_dim/2 is rotated by position / base^(2i/head_dim).

    Only the first `rotated_pairs` pairs are rotated.
    """

    kind: str
    base: float
    head_dim: int
    rotated_pairs: int


@dataclass(frozen=True, kw_only=True)
class OnnxGraphs:
    """Facts that a reader of the ONNX graphs needs: operator sets, contrib operators of onnxruntime, and the tokens that begin and end a
    text (None: there is none). `control_tokens` have no text of their own. `context` is the longest context of the target, in tokens.
    """

    opset: int
    contrib_ops: tuple[str, ...]
    rotations: tuple[Rotation, ...]
    context: int
    bos_token: int | None
    eos_token: int | None
    eog_tokens: tuple[int, ...]
    control_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StaticGraphs:
    """More facts, for graphs with fixed shapes: rows per forward, and the factors of looked-up embeddings.

    `device` is the profile that they were exported for. `per_layer_scale` is None if there are no per-layer embeddings.
    """

    device: str
    prefill_rows: int
    verify_rows: int
    embedding_scale: float
    per_layer_scale: float | None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Facts about the pair that a reader may need before it loads a model.

    `feed_forward_size` is the width of the widest feed-forward block, `per_layer_size` that of a per-layer embedding (0: none).
    `prompt_parameters` is the number of weights that a prompt's token is multiplied with to get its K/V rows. `experts` is the number of
    experts in a layer of the target, None if it has none. In older bundles the optional fields are missing.
    """

    family: str
    hidden_size: int
    layers: int
    vocab_size: int
    context_length: int
    parameters: int
    drafter_hidden_size: int
    drafter_layers: int
    drafter_parameters: int
    ordered_embeddings: bool
    feed_forward_size: int | None = None
    per_layer_size: int | None = None
    drafter_feed_forward_size: int | None = None
    prompt_parameters: int | None = None
    experts: int | None = None


@dataclass(frozen=True, kw_only=True)
class MediaTokens:
    """The tokens around an image or a sound, and the `placeholder` that a chat template writes for it."""

    begin: int
    placeholder: int
    end: int


@dataclass(frozen=True, kw_only=True)
class VisionSize:
    """Sizes of the vision tower, to predict its time. A model with a single projection instead has `hidden_size` only."""

    hidden_size: int
    layers: int | None = None
    feed_forward_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class MediaInputs:
    """The inputs of the target besides text. `bidirectional`: the rows of an image attend to each other in both directions.

    `samples_per_row`: how many samples of sound at 16 kHz make a soft row, if there is no audio tower; None: there is one.
    """

    image: MediaTokens
    audio: MediaTokens | None = None
    bidirectional: bool = False
    samples_per_row: int | None = None
    vision: VisionSize | None = None


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Settings that the exporter recommends; the configuration and the command line override them."""

    draft_length: int = 3
    context: int = 4096


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """The settings in the target's generation_config.json and config.json; None where they have none. `temperature` 0 is greedy.

    `end_tokens` end a generation, in addition to the vocabulary's own; `suppress_tokens` are never generated.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    end_tokens: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of manifest.json. `description` is a sentence for people: what the model can do, and what it cannot.

    `acceptance` has acceptance counts that were measured before the export, in the form of `parity.drafts.confidence`, which has those that
    the export measured.
    """

    schema_version: int
    created_by: str
    created_at: str
    sources: dict[str, ModelSource]
    architecture: Architecture
    cache_layout: CacheLayout
    files: tuple[BundleFile, ...]
    left_out: tuple[str, ...] = ()
    parity: dict[str, Any] | None = None
    acceptance: dict[str, Any] | None = None
    importance: dict[str, ImportanceSource] = field(default_factory=dict)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    onnx: OnnxGraphs | None = None
    static: StaticGraphs | None = None
    media: MediaInputs | None = None
    generation: GenerationDefaults | None = None
    tuning: DrafterTuning | None = None
    description: str | None = None

    def to_json(self) -> str:
        """Returns the exact text of manifest.json, with its hash, ending in a newline."""
        data = to_json(self)
        for name in ("acceptance", "importance", "onnx", "static", "media", "generation", "tuning", "description"):
            if not data[name]:
                del data[name]
        if self.onnx is None:
            del data["cache_layout"]["buffers"]
        return with_hash(data)


# Checks that the parts of a manifest fit together: owners of rows, and ids and sizes that other parts refer to. Needs no model.

_LONGEST_NAME = 200


def check_manifest(folder: Path, manifest: Manifest) -> None:
    """Raises BundleError if the parts of the manifest do not fit together. `folder` is the bundle's, for the message."""
    for name in _names(manifest):
        if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
            raise BundleError(f"{folder}: the manifest has the name {name[:80]!r}, which none is; do not use this bundle")
    _check_layout(folder, manifest.cache_layout, manifest.architecture)
    _check_heads(folder, manifest)
    size = manifest.architecture.vocab_size
    if wrong := next(((where, token) for where, token in _tokens(manifest) if token >= size), None):
        raise BundleError(f"{folder}: {wrong[0]} name a token beyond the vocabulary of {size} ({wrong[1]}); export it again")


def _check_layout(folder: Path, layout: CacheLayout, architecture: Architecture) -> None:
    owners = set(layout.full.owner_layers) | set(layout.sliding.owner_layers if layout.sliding else ())
    if len(layout.layer_owners) != architecture.layers or not set(layout.layer_owners) <= owners:
        named = sorted(set(layout.layer_owners))
        raise BundleError(f"{folder}: the cache layout names K/V owners {named} that own no rows; export it again")
    if len(layout.drafter_sources) != architecture.drafter_layers or not set(layout.drafter_sources) <= owners:
        read = sorted(set(layout.drafter_sources))
        raise BundleError(f"{folder}: the drafter reads layers {read} that own no rows; export it again")
    if layout.rewind_slack < MAX_DRAFT_LENGTH:
        raise BundleError(f"{folder}: rewind slack {layout.rewind_slack} is below the longest draft {MAX_DRAFT_LENGTH}; export it again")


def _check_heads(folder: Path, manifest: Manifest) -> None:
    """Checks the widths of heads, since tables and buffers of these sizes are allocated before a graph is read."""
    layout, rotations = manifest.cache_layout, manifest.onnx.rotations if manifest.onnx else ()
    for part in (layout.full, *((layout.sliding,) if layout.sliding else ()), *layout.buffers, *rotations):
        if part.head_dim > MAX_HEAD_DIM:
            raise BundleError(f"{folder}: heads of {part.head_dim} are wider than any, {MAX_HEAD_DIM} at most; do not use this bundle")
    widths = {buffer.kind: buffer.head_dim for buffer in layout.buffers}
    for rotation in rotations:
        if rotation.rotated_pairs > rotation.head_dim // 2:
            raise BundleError(
                f"{folder}: the {rotation.kind} rotation turns {rotation.rotated_pairs} pairs of heads of {rotation.head_dim};"
                " at most half as many are there, export it again"
            )
    own = {rotation.kind: rotation.head_dim for rotation in rotations}
    if len(own) != len(rotations) or any(own.get(buffer.kind) != buffer.head_dim for buffer in layout.buffers):
        raise BundleError(f"{folder}: the rotations are for heads of {own}, the buffers' are of {widths}; export it again")


def _tokens(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Yields all token ids in the manifest, each with the part that names it."""
    if (defaults := manifest.generation) is not None:
        yield from (("the generation defaults", token) for token in (*defaults.end_tokens, *defaults.suppress_tokens))
    if (graphs := manifest.onnx) is not None:
        both = [token for token in (graphs.bos_token, graphs.eos_token) if token is not None]
        yield from (("the facts of the graphs", token) for token in (*both, *graphs.eog_tokens, *graphs.control_tokens))
    if manifest.media is not None:
        for tokens in (manifest.media.image, manifest.media.audio):
            if isinstance(tokens, MediaTokens):
                yield from (("the media inputs", token) for token in (tokens.begin, tokens.placeholder, tokens.end))


def _names(manifest: Manifest) -> Iterator[str]:
    """Yields all names in the manifest that messages quote, or that are looked up in a graph or a file."""
    yield from (name for buffer in manifest.cache_layout.buffers for name in (buffer.key, buffer.value, buffer.kind, buffer.dtype))
    yield from (name for file in manifest.files for name in (file.role, file.format, file.quantization or "none"))
    if manifest.onnx is not None:
        yield from (*(rotation.kind for rotation in manifest.onnx.rotations), *manifest.onnx.contrib_ops)
