"""Compares ONNX graphs, run by the runtime's onnxruntime backend, with the reference, as `edge_export.parity.gguf` does for GGUF.

Here the reference's assistant runs unchanged: with its sparse head, if it has one, and its own attention window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.tokenizer_vocabulary import TOKENIZER_NAME
from edge_export.errors import ParityError
from edge_export.onnx.request import WEIGHT_TYPES, KvKind, MediaWeights, OnnxWeights
from edge_export.parity.comparison import ROOM, Judgement, ParityLimits, check_tokenizer, compare_export, export_rowset
from edge_export.parity.media import Rows, measure_media_parity
from edge_export.parity.reference import MIN_CONTEXT, TEXT, ReferenceRequest, Rowset, why_not
from edge_runtime.bundle.manifest import AUDIO_ENCODER, VISION_ENCODER, CacheLayout, MediaInputs, OnnxGraphs, StaticGraphs
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.media.soft_rows import Media

_RANGE = "range."
# Both compute in float32 and differ only in the order of summation. On the reference pair the logits are within 1e-4.
LIMITS = ParityLimits(max_abs_difference=0.01, mean_kl=WEIGHT_TYPES["f32"].mean_kl, greedy_agreement=0.99, draft_agreement=0.99)
# Where activations are rounded to int8, the last bit of a float32 decides some levels.
ROUNDED_LIMITS = ParityLimits(max_abs_difference=2.0, mean_kl=0.02, greedy_agreement=0.9, draft_agreement=0.9)
# Of the encoders' soft rows, as shares of their norm. float16 weights are multiplied in float32; float16 holds bfloat16's but tiny ones.
ENCODER_LIMITS: dict[MediaWeights, float] = {"f32": 1e-3, "f16": 1e-3, "int8": 0.1}


@dataclass(frozen=True, kw_only=True)
class OnnxParityRequest(ReferenceRequest):
    """What is compared: `exported` are the bundle's files by role, `plain` the same with float32 weights (or the same files)."""

    plain: dict[str, Path]
    exported: dict[str, Path]
    layout: CacheLayout
    plain_layout: CacheLayout
    graphs: OnnxGraphs
    static: StaticGraphs | None = None
    hidden_size: int
    vocab_size: int
    weights: OnnxWeights
    kv: KvKind = "f32"
    rounded: bool = False


def onnx_why_not(request: ReferenceRequest) -> str | None:
    """Returns the reason why parity cannot be measured here, or None if it can."""
    if request.context < MIN_CONTEXT:
        return f"the comparison takes {MIN_CONTEXT} tokens, the target's context is {request.context}"
    return why_not(request.parameters, "onnxruntime", "onnx")


def measure_onnx_parity(request: OnnxParityRequest) -> dict[str, Any]:
    """Returns the figures for the manifest.

    Raises ParityError, naming the figure, the limit and --no-verify, if one is beyond its limit, or if the graphs do not run.
    """
    judgement = Judgement(
        library="onnxruntime",
        noun="graph",
        weight_type="f32",
        quantization=request.weights,
        limits=ROUNDED_LIMITS if request.rounded else LIMITS,
        kl_limit=max(WEIGHT_TYPES[name].mean_kl for name in (request.weights, request.kv)),
    )
    plain = partial(_rows, request, request.plain, request.plain_layout)
    final = None if request.plain == request.exported else partial(_rows, request, request.exported, request.layout)
    return compare_export(request, plain, final, judgement, as_llama=False)


def encoder_parity(
    reference: ReferenceRequest, files: Mapping[str, Path], weights: MediaWeights, inputs: MediaInputs, hidden_size: int
) -> dict[str, Any]:
    """Returns the figures of the encoders' graphs. Raises ParityError."""

    def encode(media: Sequence[Media]) -> list[Rows]:
        from edge_runtime.backends.onnx.loader import SessionOptions
        from edge_runtime.backends.onnx.media_encoder import OrtMediaEncoder

        opened = OrtMediaEncoder(files[VISION_ENCODER], files.get(AUDIO_ENCODER), SessionOptions(threads=reference.threads), hidden_size)
        return [opened.encode(item) for item in media]

    return measure_media_parity(reference, encode, inputs, quantization=weights, limit=ENCODER_LIMITS[weights])


@dataclass(frozen=True, kw_only=True)
class OnnxPair:
    """Written graphs, by role, and the facts needed to run them."""

    files: dict[str, Path]
    layout: CacheLayout
    graphs: OnnxGraphs
    static: StaticGraphs | None
    tokenizer: Path
    hidden_size: int
    vocab_size: int


def measure_ranges(pair: OnnxPair) -> dict[str, NDArray[np.float32]]:
    """Runs static graphs that output their ranges over the test text; returns per matrix the least and greatest input and output, [4].

    Raises ParityError.
    """
    try:
        return _value_ranges(pair)
    except EdgeRuntimeError as error:
        raise ParityError(f"the graphs to calibrate with do not run in onnxruntime: {error}; choose another --device") from error


def measure_rows(pair: OnnxPair) -> dict[str, NDArray[Any]]:
    """Runs the target over the test text, as much of it as a window holds; returns its K/V rows [kv_heads, n, head_dim] by buffer.

    Raises ParityError.
    """
    window = pair.layout.sliding.window if pair.layout.sliding else None
    context = min(pair.layout.full.capacity, window or pair.layout.full.capacity)
    try:
        target, _ = _opened(pair, context, 1)
        with target:
            tokens = target.vocabulary.encode(TEXT)[:context]
            target.prefill(tokens)
            return {name: target.cache.array(name)[0, :, : len(tokens)].copy() for name in target.cache.names}
    except EdgeRuntimeError as error:
        raise ParityError(f"the graphs to calibrate with do not run in onnxruntime: {error}; choose another --onnx-kv") from error


def _value_ranges(pair: OnnxPair) -> dict[str, NDArray[np.float32]]:
    from edge_runtime.backends.onnx.static_target import StaticOrtTarget

    context = pair.layout.full.capacity
    target, drafter = _opened(pair, context, 1)
    ranges: dict[str, NDArray[np.float32]] = {}
    assert isinstance(target, StaticOrtTarget)
    assert pair.static is not None
    assert drafter is not None
    rows = pair.static.verify_rows
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


def _opened(pair: OnnxPair, context: int, threads: int) -> tuple[Any, Any]:
    from edge_runtime.backends.onnx.open import OrtOptions, PairFiles, StaticParts, open_pair

    static, files = None, pair.files
    if pair.static is not None:
        static = StaticParts(
            facts=pair.static,
            prefill=files["target_prefill"],
            row=files["target_row"],
            embedding=files["embedding"],
            per_layer_embedding=files.get("per_layer_embedding"),
        )
    opened = PairFiles(
        target=files["target"],
        target_head=files.get("target_head"),
        drafter=files["drafter"],
        tokenizer=pair.tokenizer,
        layout=pair.layout,
        graphs=pair.graphs,
        hidden_size=pair.hidden_size,
        vocab_size=pair.vocab_size,
        static=static,
    )
    return open_pair(opened, OrtOptions(context=context, threads=threads))


def _rows(request: OnnxParityRequest, files: dict[str, Path], layout: CacheLayout, tokens: list[int]) -> Rowset:
    pair = OnnxPair(
        files=files,
        layout=layout,
        graphs=request.graphs,
        static=request.static,
        hidden_size=request.hidden_size,
        vocab_size=request.vocab_size,
        tokenizer=request.tokenizer_folder / TOKENIZER_NAME,
    )
    target, drafter = _opened(pair, min(len(tokens) + ROOM, layout.full.capacity), request.threads)
    with target:
        check_tokenizer(request, target.vocabulary.encode(TEXT, add_bos=False), "the runtime")
        return export_rowset(target, drafter, tokens)
