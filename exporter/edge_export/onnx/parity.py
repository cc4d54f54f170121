"""Compares ONNX graphs with the reference, as `edge_export.parity.gguf` does for GGUF. The runtime's onnxruntime backend runs them.

The reference's assistant runs unchanged here: with its sparse head, if it has one, and with its own attention window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.sources import ResolvedSource
from edge_export.checkpoint.tokenizer_vocabulary import TOKENIZER_NAME
from edge_export.errors import ParityError
from edge_export.onnx.request import WEIGHT_TYPES, MediaWeights, OnnxFiles, OnnxRequest
from edge_export.parity.comparison import (
    ROOM,
    Judgement,
    ParityLimits,
    check_tokenizer,
    compare_export,
    export_rowset,
    measure_media_parity,
)
from edge_export.parity.reference import TEXT, Reference, Rows, Rowset
from edge_runtime.bundle.manifest import AUDIO_ENCODER, VISION_ENCODER, MediaInputs
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.media.soft_rows import Media

_RANGE = "range."
# Both compute in float32 and differ only in the order of summation. On the reference pair the logits are within 1e-4.
LIMITS = ParityLimits(max_abs_difference=0.01, mean_kl=WEIGHT_TYPES["f32"].mean_kl, greedy_agreement=0.99, draft_agreement=0.99)
# Limits where activations are rounded to int8: there, a difference in the last bit of a float32 can change a level.
ROUNDED_LIMITS = ParityLimits(max_abs_difference=2.0, mean_kl=0.02, greedy_agreement=0.9, draft_agreement=0.9)
# Limits of the error of the encoders' soft rows, relative to their norm. float16 weights are multiplied in float32, and float16 holds
# all bfloat16 weights exactly except tiny ones, so f16 has the same limit as f32.
ENCODER_LIMITS: dict[MediaWeights, float] = {"f32": 1e-3, "f16": 1e-3, "int8": 0.1}


def measure_onnx_parity(
    reference: Reference,
    plain: OnnxFiles,
    exported: OnnxFiles,
    request: OnnxRequest,
    *,
    rounded: bool,
    better: str | None,
    uncalibrated: OnnxFiles | None,
) -> dict[str, Any]:
    """Compares two sets of graphs: `exported`, as requested, and `plain`, with float32 weights (the same files if float32 was requested).

    `uncalibrated` are the graphs as they would be without calibration. `rounded` says that activations are rounded to int8. `better` names
    the next better weight type, for an error message. Returns the figures for the manifest. Raises ParityError if the graphs do not run or
    a figure is beyond its limit; the message then names the figure, the limit and --no-verify.
    """
    judgement = Judgement(
        library="onnxruntime",
        noun="graph",
        weight_type="f32",
        quantization=request.target,
        limits=ROUNDED_LIMITS if rounded else LIMITS,
        kl_limit=request.kl_limit,
        better=better,
        calibrates=uncalibrated is None and request.target == "int4" and not rounded and not request.on_grid,
    )
    final = None if plain == exported else partial(_rows, reference, exported)
    before = None if uncalibrated is None else partial(_rows, reference, uncalibrated)
    return compare_export(reference, partial(_rows, reference, plain), final, judgement, as_llama=False, uncalibrated=before)


def encoder_parity(
    reference: Reference, files: Mapping[str, Path], weights: MediaWeights, inputs: MediaInputs, hidden_size: int
) -> dict[str, Any]:
    """Compares the encoders' graphs and returns the figures. Raises ParityError."""

    def encode(media: Sequence[Media]) -> list[Rows]:
        from edge_runtime.backends.onnx.media_encoder import OrtMediaEncoder

        opened = OrtMediaEncoder(files[VISION_ENCODER], files.get(AUDIO_ENCODER), reference.threads, hidden_size)
        return [opened.encode(item) for item in media]

    return measure_media_parity(reference, encode, inputs, quantization=weights, limit=ENCODER_LIMITS[weights])


def measure_ranges(target: ResolvedSource, files: OnnxFiles) -> dict[str, NDArray[np.float32]]:
    """Runs static graphs that output ranges over the test text. Returns the lowest and highest input and output of each matrix, [4].

    Raises ParityError.
    """
    try:
        return _value_ranges(target, files)
    except EdgeRuntimeError as error:
        raise ParityError(f"the graphs to calibrate with do not run in onnxruntime: {error}; choose another --device") from error


def measure_rows(source: ResolvedSource, files: OnnxFiles) -> dict[str, NDArray[Any]]:
    """Runs the target over as much of the test text as a window holds. Returns its K/V rows [kv_heads, n, head_dim] by buffer name.

    Raises ParityError.
    """
    layout = files.layout
    window = layout.sliding.window if layout.sliding else None
    context = min(layout.full.capacity, window or layout.full.capacity)
    try:
        target, _ = _opened(source, files, context, 1)
        with target:
            tokens = target.vocabulary.encode(TEXT)[:context]
            target.prefill(tokens)
            return {name: target.cache.array(name)[0, :, : len(tokens)].copy() for name in target.cache.names}
    except EdgeRuntimeError as error:
        raise ParityError(f"the graphs to calibrate with do not run in onnxruntime: {error}; choose another --onnx-kv") from error


def _value_ranges(source: ResolvedSource, files: OnnxFiles) -> dict[str, NDArray[np.float32]]:
    from edge_runtime.backends.onnx.static_target import StaticOrtTarget

    context = files.layout.full.capacity
    target, drafter = _opened(source, files, context, 1)
    ranges: dict[str, NDArray[np.float32]] = {}
    assert isinstance(target, StaticOrtTarget)
    assert files.static is not None
    assert drafter is not None
    rows = files.static.verify_rows
    with target:
        tokens = target.vocabulary.encode(TEXT)[:context]
        for end in range(rows, len(tokens), rows):
            target.verify(tokens[end - rows : end])
            _widen(ranges, target.outputs(rows))
            for length in (1, 2, 3):
                drafter.draft(tokens[end], length)
                _widen(ranges, drafter.outputs)
    return ranges


def _widen(ranges: dict[str, NDArray[np.float32]], outputs: dict[str, NDArray[Any]]) -> None:
    for name, ends in outputs.items():
        if name.startswith(_RANGE):
            known = ranges.setdefault(name.removeprefix(_RANGE), ends.copy())
            known[0::2] = np.minimum(known[0::2], ends[0::2])
            known[1::2] = np.maximum(known[1::2], ends[1::2])


def _opened(source: ResolvedSource, files: OnnxFiles, context: int, threads: int) -> tuple[Any, Any]:
    """Opens written graphs of this target."""
    from edge_runtime.backends.onnx.open import open_pair
    from edge_runtime.backends.onnx.target import OrtOptions, PairFiles, StaticParts

    static, paths, model = None, files.paths, source.checkpoint.architecture
    if files.static is not None:
        static = StaticParts(
            facts=files.static,
            prefill=paths["target_prefill"],
            row=paths["target_row"],
            embedding=paths["embedding"],
            per_layer_embedding=paths.get("per_layer_embedding"),
        )
    assert source.tokenizer is not None  # only a GGUF source has no tokenizer here
    opened = PairFiles(
        target=paths["target"],
        target_head=paths.get("target_head"),
        drafter=paths["drafter"],
        tokenizer=source.tokenizer.folder / TOKENIZER_NAME,
        layout=files.layout,
        graphs=files.graphs,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        static=static,
    )
    return open_pair(opened, OrtOptions(context=context, threads=threads))


def _rows(reference: Reference, files: OnnxFiles, tokens: list[int], texts: Mapping[str, list[int]]) -> Rowset:
    target, drafter = _opened(reference.target, files, min(len(tokens) + ROOM, files.layout.full.capacity), reference.threads)
    with target:
        check_tokenizer(reference, target.vocabulary.encode(TEXT, add_bos=False), "the runtime")
        return export_rowset(target, drafter, tokens, texts)
