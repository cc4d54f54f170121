"""Compares exported GGUF files, run in llama.cpp by the runtime's own backend, with the reference on the same tokens.

With the comparison of ONNX graphs, the only module of the exporter that may open a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edge_export.parity.comparison import ROOM, Judgement, ParityLimits, check_tokenizer, compare_export, export_rowset
from edge_export.parity.media import Rows, measure_media_parity
from edge_export.parity.reference import MIN_CONTEXT, TEXT, ReferenceRequest, Rowset, why_not
from edge_runtime.bundle.gguf_types import QUANTIZATIONS
from edge_runtime.bundle.manifest import MediaInputs
from edge_runtime.media.soft_rows import Media

# llama.cpp multiplies with activations rounded to the weights' type and keeps K/V in float16, transformers does not. Logits are capped
# at +-30; a wrong tensor moves them by whole units and KL by tenths of a nat, rounding by less than the limits below.
UNQUANTIZED_LIMITS = {
    "f32": ParityLimits(max_abs_difference=0.25, mean_kl=0.002, greedy_agreement=0.95, draft_agreement=0.95),
    "f16": ParityLimits(max_abs_difference=0.5, mean_kl=0.005, greedy_agreement=0.95, draft_agreement=0.95),
    "bf16": ParityLimits(max_abs_difference=2.0, mean_kl=0.02, greedy_agreement=0.9, draft_agreement=0.9),
}
# With experts, rounding to 16 bits may choose another one where two are nearly tied: in a row, and through K/V in those after it. In the
# worst random pairs at f16, logits moved by 2.1, mean KL was 0.007, 71% of the drafts and 92% of the greedy tokens were equal; in float32,
# the two that were looked into have a mean KL of 1e-7. So the median of the rows is judged as the mean is elsewhere, the rest loosely.
EXPERTS_LIMITS = {
    kind: ParityLimits(
        max_abs_difference=8 * limits.max_abs_difference, mean_kl=4 * limits.mean_kl, greedy_agreement=0.75, draft_agreement=0.5
    )
    for kind, limits in UNQUANTIZED_LIMITS.items()
    if kind != "f32"
}
# Of an encoder's soft rows, as shares of their norm: twice what tiny random members show, whose weights amplify rounding more than
# trained ones do. Products with bf16 and q8_0 weights round their activations to these types.
ENCODER_LIMITS = {"f32": 5e-3, "f16": 5e-3, "bf16": 0.04, "q8_0": 0.1}


@dataclass(frozen=True, kw_only=True)
class ParityRequest(ReferenceRequest):
    """The files to compare. `exported_*` are the bundle's files, `unquantized_*` what they were quantized from (or the same).

    `weight_types` are those of the unquantized target and drafter; `experts` counts those of a layer of the target, 0 for a dense one.
    """

    unquantized_target: Path
    unquantized_drafter: Path
    exported_target: Path
    exported_drafter: Path
    weight_types: tuple[str, str]
    quantizations: tuple[str, str]
    experts: int = 0


def measure_parity(request: ParityRequest, notify: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Returns the figures for the manifest, or {"skipped": reason}.

    Raises ParityError, naming the figure, the limit and --no-verify, if one is beyond its limit, or if the export does not run.
    """
    reason = why_not(request.parameters)
    if request.context < MIN_CONTEXT:
        reason = f"the comparison takes {MIN_CONTEXT} tokens, the target's context is {request.context}"
    if reason is not None:
        return {"skipped": reason}
    plain = partial(_export_rows, request, request.unquantized_target, request.unquantized_drafter, request.weight_types, notify)
    final = partial(_export_rows, request, request.exported_target, request.exported_drafter, request.quantizations, notify)
    same = request.unquantized_target == request.exported_target and request.unquantized_drafter == request.exported_drafter
    return compare_export(request, plain, None if same else final, judgement_of(request), as_llama=True)


def encoder_parity(request: ParityRequest, encoder: Path, quantization: str, inputs: MediaInputs) -> dict[str, Any]:
    """Returns the figures of an encoder's file, which runs beside the exported target. Raises ParityError."""

    def encode(media: Sequence[Media]) -> list[Rows]:
        from edge_runtime.backends.llama.context import LlamaOptions
        from edge_runtime.backends.llama.target import LlamaTarget

        options = LlamaOptions(context=MIN_CONTEXT, threads=request.threads, use_extra_bufts=False, draft=False)
        with LlamaTarget(request.exported_target, options) as target:
            opened = target.shared.open_encoder(encoder)
            return [opened.encode(each) for each in media]

    return measure_media_parity(request, encode, inputs, quantization=quantization, limit=ENCODER_LIMITS[quantization])


def judgement_of(request: ParityRequest) -> Judgement:
    """Returns the limits for these files."""
    weight_type, quantization = request.weight_types[0], request.quantizations[0]
    limits = unquantized_limits(weight_type, request.experts)
    drafts = min(unquantized_limits(kind, request.experts).draft_agreement for kind in request.weight_types)
    return Judgement(
        library="llama-cpp-python",
        noun="export",
        weight_type=weight_type,
        quantization=quantization,
        limits=replace(limits, draft_agreement=drafts),
        kl_limit=max(QUANTIZATIONS[quantization].kl_limit or 0.0, limits.mean_kl),
        median_kl=UNQUANTIZED_LIMITS[weight_type].mean_kl if request.experts else float("inf"),
    )


def unquantized_limits(weight_type: str, experts: int) -> ParityLimits:
    """Returns the limits for a file in that type whose layers have so many experts."""
    limits = UNQUANTIZED_LIMITS[weight_type]
    return EXPERTS_LIMITS.get(weight_type, limits) if experts else limits


def _export_rows(
    request: ParityRequest,
    target_path: Path,
    drafter_path: Path,
    quantizations: tuple[str, str],
    notify: Callable[[str], None],
    tokens: list[int],
) -> Rowset:
    """Runs one pair of files in llama.cpp. Raises EdgeRuntimeError, ParityError."""
    from edge_runtime.backends.llama.context import LlamaOptions
    from edge_runtime.backends.llama.crash_probe import probe_load_options
    from edge_runtime.backends.llama.pair import open_pair

    answer = probe_load_options(target_path, drafter_path, list(quantizations), notify=notify)
    options = LlamaOptions(
        context=min(len(tokens) + ROOM, request.context), threads=request.threads, use_extra_bufts=answer.use_extra_bufts
    )
    target, drafter = open_pair(target_path, drafter_path, options)
    with target:
        check_tokenizer(request, target.vocabulary.encode(TEXT, add_bos=False), "llama.cpp")
        return export_rowset(target, drafter, tokens)
