"""What drafts and verifies cost by the sizes of a pair's files: what a session starts with where nothing was measured.

A forward of one row reads every weight once, so it takes the bytes over the bandwidth; a further row takes a share of that, by the kernels
that multiply. The proportions decide how much is drafted. The first rounds replace all of it, so none of it needs to be exact.
"""

from __future__ import annotations

from edge_runtime.bundle.manifest import Manifest
from edge_runtime.drafting.cost_model import MAX_ROWS, MIN_SECONDS, MeasuredCosts
from edge_runtime.drafting.drafter_kinds import DrafterKind, is_model
from edge_runtime.planning.speed import SPARSE_SHARE, read_parameters

# Bytes per second that forwards of one row read on two cores of a Xeon (docs/onnx.md); assumed of all processors.
BANDWIDTH = 20e9
# What a further row takes of the first one: with the project's kernels on integer products of 64 bytes or of matrices, with its other
# kernels, and with stock ones. The first and the last are measured (docs/onnx.md), the second is assumed.
WIDE_KERNELS = ("avx512vnni", "avxvnni", "i8mm")
WIDE_ROW, NARROW_ROW, STOCK_ROW = 0.07, 0.2, 0.25
# How many times as long stock kernels take for one row, by the format of the files (E2B's shapes, docs/onnx.md).
STOCK_FIRST = {"gguf": 2.0, "onnx": 1.7}
# Seconds of starting a draft and of each of its steps, beside reading the drafter's weights; assumed from one small pair.
DRAFT_SECONDS, STEP_SECONDS = 0.5e-3, 0.2e-3
# A drafter that is no model copies from the text.
COPY_SECONDS = 10e-6


def computed_costs(manifest: Manifest, format: str, drafter: DrafterKind, row_kernels: str | None) -> MeasuredCosts:
    """Returns the costs by the files of a `format`, such as gguf; `row_kernels` names the kernels that multiply, None for stock ones."""
    sizes = {file.role: file.bytes for file in manifest.files if file.format.startswith(format) or file.role == "drafter_head"}
    architecture = manifest.architecture
    target = sum(size for role, size in sizes.items() if role.startswith("target"))
    read_share = min(1.0, read_parameters(architecture) / max(1, architecture.parameters))
    first = max(target * read_share / BANDWIDTH, MIN_SECONDS) * (STOCK_FIRST[format] if row_kernels is None else 1.0)
    further = STOCK_ROW if row_kernels is None else WIDE_ROW if row_kernels in WIDE_KERNELS else NARROW_ROW
    step, overhead = COPY_SECONDS, 0.0
    if is_model(drafter):
        split = sizes.get("drafter_body", 0) + SPARSE_SHARE * sizes.get("drafter_head", 0)
        read = split if "drafter_body" in sizes and drafter == "split" else sizes.get("drafter", 0) + sizes.get("drafter_data", 0)
        step, overhead = STEP_SECONDS + read / BANDWIDTH, DRAFT_SECONDS
    verify = tuple(first * (1 + further * n) for n in range(MAX_ROWS))
    return MeasuredCosts(verify=verify, step=step, overhead=overhead, timings=(0,) * MAX_ROWS)
