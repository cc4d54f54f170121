"""Checks the memory that the graphs of a pair need at their largest forwards, before onnxruntime is given them."""

from __future__ import annotations

from edge_runtime.backends.onnx.graph_memory.operator_shapes import Shape
from edge_runtime.backends.onnx.graph_memory.peak import check_graph_memory
from edge_runtime.backends.onnx.kv_cache import MAX_ROWS, SLIDING, check_buffers
from edge_runtime.backends.onnx.target import PREFILL_ROWS, PREFILL_SCORES, PairFiles


def check_pair_memory(files: PairFiles, context: int) -> int:
    """Returns the most bytes of values that one graph of the pair needs. Raises as `check_graph_memory` does.

    A target has two largest forwards: a whole chunk of a prefill, and a few rows at the end of the context.
    """
    check_buffers(files.layout)
    if files.static is not None:  # their shapes are in the graphs
        paths = [files.static.prefill, files.static.row, files.target, files.drafter]
        return max(check_graph_memory(path, {}) for path in paths if path is not None)
    forwards = ((PREFILL_ROWS, min(context, PREFILL_SCORES // PREFILL_ROWS)), (MAX_ROWS, context))
    needed = [check_graph_memory(files.target, _target(files, context, rows, length)) for rows, length in forwards]
    if files.target_head is not None:
        needed.append(check_graph_memory(files.target_head, {"hidden": (1, MAX_ROWS, files.hidden_size)}))
    if files.drafter is not None:
        needed.append(check_graph_memory(files.drafter, _shared(files, context, context)))
    return max(needed)


def _target(files: PairFiles, context: int, rows: int, length: int) -> dict[str, Shape]:
    return {"input_ids": (1, rows), "position_ids": (1, rows), **_shared(files, context, length + rows)}


def _shared(files: PairFiles, context: int, length: int) -> dict[str, Shape]:
    """Buffers of so many rows, and the tables of rotations."""
    shapes: dict[str, Shape] = {}
    for buffer in files.layout.buffers:
        rows = min(buffer.rows, length) if buffer.kind == SLIDING else length
        shapes |= dict.fromkeys((buffer.key, buffer.value), (1, buffer.kv_heads, rows, buffer.head_dim))
    for rotation in files.graphs.rotations:
        for word in ("cosine", "sine"):
            table = (context + MAX_ROWS, rotation.head_dim // 2)
            shapes |= {f"{word}_{rotation.kind}": table, f"{word}_{rotation.kind}_f16": table}
    return shapes
