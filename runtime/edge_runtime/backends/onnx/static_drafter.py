"""The MTP drafter as a graph of one step and fixed shapes, on the target's own K/V rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.drafter import GraphDrafter
from edge_runtime.backends.onnx.loader import Call, Graph, value_over
from edge_runtime.backends.onnx.static_target import StaticOrtTarget, small_arrays
from edge_runtime.backends.onnx.target import check_inputs
from edge_runtime.interfaces import DraftSampler, ShouldContinue


class StaticOrtDrafter(GraphDrafter[StaticOrtTarget]):
    """A drafter whose graph is one step; the host goes from one to the next."""

    def _bind(self, graph: Graph, path: Path) -> Call:
        rows, width = self._target.rows, (1, 1, self._target.hidden_size)
        self._arrays = small_arrays(graph, path, rows)
        check_inputs(graph, {"embedded": width, "hidden": width}, path)
        read = {name: value for name, value in rows.values.items() if name in graph.inputs}
        check_inputs(graph, {name: rows.arrays[name].shape for name in read}, path)
        self._has_candidates = "candidates" in graph.outputs
        self.outputs = {name: np.zeros(shape, np.int64 if name == "candidates" else np.float32) for name, shape in graph.outputs.items()}
        inputs = {name: value_over(array) for name, array in self._arrays.items()}
        return graph.bind(inputs | read, {name: value_over(array) for name, array in self.outputs.items()})

    def _draft(
        self,
        call: Call,
        last: int,
        hidden: NDArray[np.float32],
        draft_length: int,
        sampler: DraftSampler | None,
        should_continue: ShouldContinue | None,
    ) -> list[int]:
        target = self._target
        target.turns.fill(self._arrays, target.length)
        for kind in target.rows.rows:
            if f"mask_{kind}" in self._arrays:
                target.rows.drafter_mask(kind, self._arrays[f"mask_{kind}"], target.length)
        self._arrays["hidden"][0, 0] = hidden
        return self._steps(call, last, draft_length, sampler, should_continue)

    def _steps(
        self, call: Call, last: int, draft_length: int, sampler: DraftSampler | None, should_continue: ShouldContinue | None
    ) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < draft_length:
            self._target.embedding.look_up(np.array([tokens[-1] if tokens else last]), self._arrays["embedded"])
            call.run()
            scores, candidates = self.outputs["scores"], self.outputs["candidates"] if self._has_candidates else None
            best = int(scores.argmax())
            probability = _share(scores, best) if self.least_probability > 0 or should_continue is not None else 1.0
            likeliest = best if candidates is None else int(candidates[best])
            if probability < self.least_probability and sampler is None and should_continue is None:
                break
            chosen = likeliest if sampler is None else sampler(scores, candidates)
            if chosen is None:
                break
            tokens.append(chosen)
            if should_continue is not None and not should_continue(probability):
                break
            self._arrays["hidden"][...] = self.outputs["hidden_out"]
        return tokens


def _share(scores: NDArray[np.float32], best: int) -> float:
    """The softmax's value of the largest score."""
    return float(1 / np.exp(scores - scores[best]).sum())
