"""The MTP drafter as a graph of one step and fixed shapes, on the target's own K/V rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.base import Choose, GoOn
from edge_runtime.backends.ort_cache import MAX_ROWS
from edge_runtime.backends.ort_library import Call, Graph, SessionOptions, value_over
from edge_runtime.backends.ort_static_target import StaticOrtTarget, small_arrays
from edge_runtime.backends.ort_target import check_inputs
from edge_runtime.errors import RequestError


class StaticOrtDrafter:
    """Implements `backends.base.Drafter`. `least_probability` ends a draft before a token that the drafter itself gives less."""

    stepwise = True

    def __init__(self, path: Path, target: StaticOrtTarget, session: SessionOptions, *, least_probability: float = 0.0) -> None:
        self._target = target
        self._graph: Graph | None = Graph(path, session)
        self._arrays = small_arrays(self._graph, path, target.rows)
        width = (1, 1, target.hidden_size)
        check_inputs(self._graph, {"embedded": width, "hidden": width}, path)
        read = {name: value for name, value in target.rows.values.items() if name in self._graph.inputs}
        check_inputs(self._graph, {name: target.rows.arrays[name].shape for name in read}, path)
        self.least_probability = least_probability
        self._has_candidates = "candidates" in self._graph.outputs
        self.outputs = {
            name: np.zeros(shape, np.int64 if name == "candidates" else np.float32) for name, shape in self._graph.outputs.items()
        }
        inputs = {name: value_over(array) for name, array in self._arrays.items()}
        self._call: Call | None = self._graph.bind(inputs | read, {name: value_over(array) for name, array in self.outputs.items()})
        target._closers.append(self)

    def draft(self, last: int, draft_length: int, choose: Choose | None = None, go_on: GoOn | None = None) -> list[int]:
        """Returns `draft_length` tokens after `last`, fewer where the drafter is unsure, or none where the target has no hidden row.

        All steps stand at the same position, that of `last`, and write nothing to the cache.
        """
        if self._call is None:
            raise RequestError("the drafter is closed; open the bundle again")
        if draft_length >= MAX_ROWS:
            raise RequestError(f"a draft of {draft_length} tokens is longer than the {MAX_ROWS - 1} this pair was opened for")
        target, hidden = self._target, self._target.hidden_row
        if hidden is None or draft_length < 1:
            return []
        target.vocabulary.check(last)
        target.turns.fill(self._arrays, target.length)
        for kind in target.rows.rows:
            if f"mask_{kind}" in self._arrays:
                target.rows.drafter_mask(kind, self._arrays[f"mask_{kind}"], target.length)
        self._arrays["hidden"][0, 0] = hidden
        return self._steps(self._call, last, draft_length, choose, go_on)

    def assignments(self) -> dict[str, dict[str, int]]:
        """Per execution provider how many nodes of each operator it runs."""
        return self._graph.assignments() if self._graph else {}

    def close(self) -> None:
        """Frees the session. Harmless when done twice."""
        self._graph = self._call = None

    def _steps(self, call: Call, last: int, draft_length: int, choose: Choose | None, go_on: GoOn | None) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < draft_length:
            self._target.embedding.look_up(np.array([tokens[-1] if tokens else last]), self._arrays["embedded"])
            call.run()
            scores, candidates = self.outputs["scores"], self.outputs["candidates"] if self._has_candidates else None
            best = int(scores.argmax())
            probability = _share(scores, best) if self.least_probability > 0 or go_on is not None else 1.0
            likeliest = best if candidates is None else int(candidates[best])
            if probability < self.least_probability and choose is None and go_on is None:
                break
            chosen = likeliest if choose is None else choose(scores, candidates)
            if chosen is None:
                break
            tokens.append(chosen)
            if go_on is not None and not go_on(probability):
                break
            self._arrays["hidden"][...] = self.outputs["hidden_out"]
        return tokens


def _share(scores: NDArray[np.float32], best: int) -> float:
    """The softmax's value of the largest score."""
    return float(1 / np.exp(scores - scores[best]).sum())
