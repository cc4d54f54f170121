"""Checks how the parts of a manifest fit together: owners of rows, and ids and sizes that other parts use. Needs no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH, MAX_HEAD_DIM, Architecture, CacheLayout, Manifest, MediaTokens
from edge_runtime.errors import BundleError

_LONGEST_NAME = 200


def check_manifest(folder: Path, manifest: Manifest) -> None:
    """Raises BundleError for a manifest whose parts do not fit together. `folder` is that of the bundle."""
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
    """Widths of heads, from which tables and buffers are made before a graph is read."""
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
    """The token ids that a manifest names, and where."""
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
    """The names that errors repeat, and that a graph or a file is asked for."""
    yield from (name for buffer in manifest.cache_layout.buffers for name in (buffer.key, buffer.value, buffer.kind, buffer.dtype))
    yield from (name for file in manifest.files for name in (file.role, file.format, file.quantization or "none"))
    if manifest.onnx is not None:
        yield from (*(rotation.kind for rotation in manifest.onnx.rotations), *manifest.onnx.contrib_ops)
