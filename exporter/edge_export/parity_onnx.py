"""Do the ONNX graphs compute what the checkpoint computes? As `parity`, with the runtime's onnxruntime backend.

The reference's assistant runs as it is here: with its sparse head, if it has one, and its own attention window.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_export.divergence import Divergence, divergence
from edge_export.errors import ParityError
from edge_export.onnx_request import OnnxWeights
from edge_export.parity import (
    DRAFT_LENGTH,
    MIN_CONTEXT,
    ROWS,
    TEXT,
    Limits,
    ReferenceRequest,
    Rowset,
    check_tokenizer,
    demand,
    export_rowset,
    installed,
    parity_tokens,
    reference_rows,
    why_not,
)
from edge_runtime.bundle import CacheLayout, OnnxGraphs, StaticGraphs
from edge_runtime.errors import EdgeRuntimeError

# Both sides compute in float32; what is left is the order of summation. On the reference pair the logits are within 1e-4.
LIMITS = Limits(max_abs_difference=0.01, mean_kl=1e-4, greedy_agreement=0.99, draft_agreement=0.99)
# Mean KL of quantized graphs in nats, as parity.QUANTIZED_KL_LIMITS.
QUANTIZED_KL_LIMITS: dict[OnnxWeights, float] = {"f32": LIMITS.mean_kl, "f16": 0.02, "int8": 0.1, "int4": 1.0}


@dataclass(frozen=True, kw_only=True)
class OnnxParityRequest(ReferenceRequest):
    """What is compared: `exported` are the bundle's files by role, `plain` the same with float32 weights (or the same files)."""

    plain: dict[str, Path]
    exported: dict[str, Path]
    layout: CacheLayout
    graphs: OnnxGraphs
    static: StaticGraphs | None = None
    hidden_size: int
    vocab_size: int
    weights: OnnxWeights


def onnx_why_not(request: ReferenceRequest) -> str | None:
    """Returns the reason why parity cannot be measured here, or None if it can."""
    if request.context < MIN_CONTEXT:
        return f"the comparison takes {MIN_CONTEXT} tokens, the target's context is {request.context}"
    return why_not(request.parameters, "onnxruntime", "onnx")


def measure_onnx_parity(request: OnnxParityRequest) -> dict[str, Any]:
    """Returns the figures for the manifest.

    Raises ParityError, naming the figure, the limit and --no-verify, if one is beyond its limit, or if the graphs do not run.
    """
    tokens = parity_tokens(request)
    try:
        plain = _rows(request, request.plain, tokens)
        final = plain if request.plain == request.exported else _rows(request, request.exported, tokens)
    except EdgeRuntimeError as error:
        raise ParityError(f"the export does not run in onnxruntime: {error}; correct that, or export with --no-verify") from error
    logits, agreements = reference_rows(request, tokens, [plain, final], as_llama=False)
    return _judged(request, len(tokens), divergence(logits, plain.logits), divergence(logits, final.logits), agreements)


def _judged(request: OnnxParityRequest, length: int, plain: Divergence, final: Divergence, agreements: list[float]) -> dict[str, Any]:
    kl_limit = QUANTIZED_KL_LIMITS[request.weights]
    demand("largest logit difference of the f32 graph", plain.max_abs_difference, most=LIMITS.max_abs_difference)
    demand("mean KL of the f32 graph", plain.mean_kl, most=LIMITS.mean_kl)
    demand("greedy agreement of the f32 graph", plain.greedy_agreement, least=LIMITS.greedy_agreement)
    demand("share of the f32 graph's drafts that are the reference assistant's", agreements[0], least=LIMITS.draft_agreement)
    demand(f"mean KL of the {request.weights} graph", final.mean_kl, most=kl_limit)
    return {
        "reference": "transformers in float32",
        "versions": {name: installed(name) for name in ("torch", "transformers", "onnxruntime")},
        "tokens": length,
        "rows": ROWS,
        "unquantized": {"weight_type": "f32", **asdict(plain)},
        "quantized": {"quantization": request.weights, **asdict(final)},
        "drafts": {"draft_length": DRAFT_LENGTH, "unquantized_agreement": agreements[0], "quantized_agreement": agreements[1]},
        "limits": {"unquantized": asdict(LIMITS), "quantized": {"mean_kl": kl_limit}},
    }


def _rows(request: OnnxParityRequest, files: dict[str, Path], tokens: list[int]) -> Rowset:
    from edge_runtime.backends.ort_open import OrtOptions, PairFiles, StaticParts, open_pair

    static = None
    if request.static is not None:
        static = StaticParts(
            facts=request.static, prefill=files["target_prefill"], row=files["target_row"], embedding=files["embedding"],
            per_layer_embedding=files.get("per_layer_embedding"),
        )  # fmt: skip
    pair = PairFiles(
        target=files["target"], target_head=files.get("target_head"), drafter=files["drafter"],
        tokenizer=request.tokenizer_folder / "tokenizer.json", layout=request.layout, graphs=request.graphs,
        hidden_size=request.hidden_size, vocab_size=request.vocab_size, static=static,
    )  # fmt: skip
    target, drafter = open_pair(pair, OrtOptions(context=len(tokens), threads=request.threads))
    with target:
        check_tokenizer(request, target.vocabulary.encode(TEXT, add_bos=False), "the runtime")
        return export_rowset(target, drafter, tokens)
