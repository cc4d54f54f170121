"""Compares exported GGUF files with the reference on the same tokens.

The runtime's own backend runs them in llama.cpp. Only this module and the comparison of ONNX graphs may open a backend in the exporter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edge_devices.errors import byte_text
from edge_export.checkpoint.safetensors import FloatType
from edge_export.parity.comparison import (
    ROOM,
    Judgement,
    ParityLimits,
    check_tokenizer,
    compare_export,
    export_rowset,
    measure_media_parity,
)
from edge_export.parity.reference import MIN_CONTEXT, TEXT, Reference, Rows, Rowset, why_not
from edge_runtime.bundle.gguf_header import OFFERED, QUANTIZATIONS
from edge_runtime.bundle.manifest import MediaInputs
from edge_runtime.media.soft_rows import Media

# Unlike transformers, llama.cpp rounds activations to the weights' type for products, and keeps K/V in float16. This moves logits, which
# are capped at +-30, by less than the limits below. A wrong tensor moves them by whole units, and KL by tenths of a nat.
UNQUANTIZED_LIMITS = {
    "f32": ParityLimits(max_abs_difference=0.25, mean_kl=0.002, greedy_agreement=0.95, draft_agreement=0.95),
    "f16": ParityLimits(max_abs_difference=0.5, mean_kl=0.005, greedy_agreement=0.95, draft_agreement=0.95),
    "bf16": ParityLimits(max_abs_difference=2.0, mean_kl=0.02, greedy_agreement=0.9, draft_agreement=0.9),
}
# In a model with experts, rounding to 16 bits may choose another expert where two are nearly tied. That changes a row, and through K/V the
# rows after it. In the worst random pairs at f16, logits moved by 2.1, mean KL was 0.007, and 71% of the drafts and 92% of the greedy
# tokens were equal. In float32, the two of them that were examined have a mean KL of 1e-7. So with experts the median KL has the limit that
# the mean has otherwise, and the other limits are loose.
EXPERTS_LIMITS = {
    kind: ParityLimits(
        max_abs_difference=8 * limits.max_abs_difference, mean_kl=4 * limits.mean_kl, greedy_agreement=0.75, draft_agreement=0.5
    )
    for kind, limits in UNQUANTIZED_LIMITS.items()
    if kind != "f32"
}


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """The files of one half. `exported` is in the bundle; `unquantized` is the file it was quantized from, or the same file."""

    quantization: str
    weight_type: FloatType
    unquantized: Path
    exported: Path


Compared = tuple[ComparedModel, ComparedModel]


def measure_parity(
    reference: Reference, models: Compared, notify: Callable[[str], None] = lambda _: None, uncalibrated: Callable[[], Path] | None = None
) -> dict[str, Any]:
    """Compares target and drafter. Returns the figures for the manifest, or {"skipped": reason}.

    `uncalibrated` writes the target's file as it would be without calibration. It is called only if the comparison can run.

    Raises ParityError if the export does not run or a figure is beyond its limit; the message then names the figure, the limit and
    --no-verify.
    """
    if (reason := why_not(reference, "llama-cpp-python", "llama")) is not None:
        return {"skipped": reason}
    target, drafter = models

    def plain(tokens: list[int], texts: Mapping[str, list[int]]) -> Rowset:
        types = [model.weight_type for model in models]
        return _export_rows(reference, target.unquantized, drafter.unquantized, types, tokens, texts, notify)

    def quantized(path: Path, tokens: list[int], texts: Mapping[str, list[int]]) -> Rowset:
        types = [model.quantization for model in models]
        return _export_rows(reference, path, drafter.exported, types, tokens, texts, notify)

    same = all(model.unquantized == model.exported for model in models)
    judgement = replace(
        judgement_of(models, reference.architecture.experts),
        better=_better(reference, target.quantization),
        calibrates=uncalibrated is None and QUANTIZATIONS[target.quantization].weighed,
    )
    final = None if same else partial(quantized, target.exported)
    before = None if uncalibrated is None else lambda *what: quantized(uncalibrated(), *what)
    return compare_export(reference, plain, final, judgement, as_llama=True, uncalibrated=before)


def encoder_parity(
    reference: Reference, target: Path, encoder: Path, inputs: MediaInputs, *, quantization: str, limit: float
) -> dict[str, Any]:
    """Compares an encoder's file and returns the figures. llama.cpp needs the target too. Raises ParityError beyond `limit`."""

    def encode(media: Sequence[Media]) -> list[Rows]:
        from edge_runtime.backends.llama.context import LlamaOptions
        from edge_runtime.backends.llama.target import LlamaTarget

        options = LlamaOptions(context=MIN_CONTEXT, threads=reference.threads, use_extra_bufts=False, draft=False)
        with LlamaTarget(target, options) as opened:
            file = opened.shared.open_encoder(encoder)
            return [file.encode(each) for each in media]

    return measure_media_parity(reference, encode, inputs, quantization=quantization, limit=limit)


def _better(reference: Reference, quantization: str) -> str | None:
    """Returns the option for the next better type, with its approximate size; None for an unquantized type."""
    if quantization in UNQUANTIZED_LIMITS:
        return None
    better, model = QUANTIZATIONS[OFFERED[OFFERED.index(quantization) + 1]], reference.target.checkpoint
    return f"--target-quant {better.name}, {byte_text(better.file_bytes(model.parameters, model.architecture.table_weights))}"


def judgement_of(models: Compared, experts: int) -> Judgement:
    """Returns the limits for these files. `experts` is the number of experts in a layer of the target; 0 means none."""
    target, _ = models
    limits = unquantized_limits(target.weight_type, experts)
    drafts = min(unquantized_limits(model.weight_type, experts).draft_agreement for model in models)
    return Judgement(
        library="llama-cpp-python",
        noun="export",
        weight_type=target.weight_type,
        quantization=target.quantization,
        limits=replace(limits, draft_agreement=drafts),
        kl_limit=max(QUANTIZATIONS[target.quantization].kl_limit or 0.0, limits.mean_kl),
        median_kl=UNQUANTIZED_LIMITS[target.weight_type].mean_kl if experts else float("inf"),
    )


def unquantized_limits(weight_type: str, experts: int) -> ParityLimits:
    """Returns the limits for a file of this type whose layers have this number of experts."""
    limits = UNQUANTIZED_LIMITS[weight_type]
    return EXPERTS_LIMITS.get(weight_type, limits) if experts else limits


def _export_rows(
    reference: Reference,
    target_path: Path,
    drafter_path: Path,
    types: Sequence[str],
    tokens: list[int],
    texts: Mapping[str, list[int]],
    notify: Callable[[str], None],
) -> Rowset:
    """Runs a pair of files in llama.cpp. Raises EdgeRuntimeError, ParityError."""
    from edge_runtime.backends.llama.context import LlamaOptions
    from edge_runtime.backends.llama.crash_probe import probe_load_options
    from edge_runtime.backends.llama.pair import open_pair

    answer = probe_load_options(target_path, drafter_path, list(types), notify=notify)
    context = min(len(tokens) + ROOM, reference.context)
    options = LlamaOptions(context=context, threads=reference.threads, use_extra_bufts=answer.use_extra_bufts)
    target, drafter = open_pair(target_path, drafter_path, options)
    with target:
        check_tokenizer(reference, target.vocabulary.encode(TEXT, add_bos=False), "llama.cpp")
        return export_rowset(target, drafter, tokens, texts)
