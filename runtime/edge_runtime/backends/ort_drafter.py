"""The MTP drafter on onnxruntime: a whole draft in one call, on the target's own K/V rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_runtime.backends.base import Choose, GoOn
from edge_runtime.backends.ort_cache import MAX_ROWS
from edge_runtime.backends.ort_library import Call, Graph, SessionOptions, scalar
from edge_runtime.backends.ort_target import OrtTarget, shared_inputs
from edge_runtime.errors import BackendError, RequestError

# A probability that every token has.
_ANY = float(np.finfo(np.float32).tiny)
_OUTPUTS = ("drafts", "probabilities", "hidden_out", "scores", "candidates")


class OrtDrafter:
    """Implements `backends.base.Drafter`. `least_probability` ends a draft before a token that the drafter itself gives less."""

    stepwise = True

    def __init__(self, path: Path, target: OrtTarget, session: SessionOptions, *, least_probability: float = 0.0) -> None:
        self._target = target
        self._graph: Graph | None = Graph(path, session)
        width = self._graph.inputs.get("hidden", (0,))[-1]
        if width != target.hidden_size:
            raise BackendError(f"{path.name} reads hidden rows of {width}, the target gives {target.hidden_size}; export the pair again")
        self.least_probability = least_probability
        self._token, token = scalar(np.int64, 1, 1)
        self._hidden, hidden = scalar(np.float32, 1, 1, target.hidden_size)
        self._length, length = scalar(np.int64)
        self._least, least = scalar(np.float32)
        self._with_scores, with_scores = scalar(np.bool_)
        self._position, position = scalar(np.int64, 1, 1)
        inputs = {
            "token": token, "hidden": hidden, "draft_length": length, "least_probability": least, "with_scores": with_scores,
            "position_ids": position, **shared_inputs(target), **target.cache.values,
        }  # fmt: skip
        bound = {name: value for name, value in inputs.items() if name in self._graph.inputs}
        self._call: Call | None = self._graph.bind(bound, dict.fromkeys(_OUTPUTS))
        target._closers.append(self)

    def draft(self, last: int, draft_length: int, choose: Choose | None = None, go_on: GoOn | None = None) -> list[int]:
        """Returns `draft_length` tokens after `last`, fewer where the drafter is unsure, or none where the target has no hidden row.

        All steps stand at the same position, that of `last`, and write nothing to the cache.
        """
        if self._call is None:
            raise RequestError("the drafter is closed; open the bundle again")
        if draft_length >= MAX_ROWS:
            raise RequestError(f"a draft of {draft_length} tokens is longer than the {MAX_ROWS - 1} this pair was opened for")
        hidden = self._target.hidden_row
        if hidden is None or draft_length < 1:
            return []
        self._target.vocabulary.check(last)
        self._target.cache.set_counts(self._target.length)
        self._position[...] = self._target.length
        self._token[...], self._hidden[0, 0] = last, hidden
        if choose is None and go_on is None:
            return self._all_steps(self._call, draft_length)
        return self._single_steps(self._call, draft_length, choose, go_on)

    def assignments(self) -> dict[str, dict[str, int]]:
        """Per execution provider how many nodes of each operator it runs."""
        return self._graph.assignments() if self._graph else {}

    def close(self) -> None:
        """Frees the session. Harmless when done twice."""
        self._graph = self._call = None

    def _all_steps(self, call: Call, draft_length: int) -> list[int]:
        self._length[...], self._least[...], self._with_scores[...] = draft_length, self.least_probability, False
        call.run()
        drafts, probabilities = call.outputs()[:2]
        sure = len(drafts) - int(probabilities[-1] < self.least_probability)
        tokens: list[int] = drafts[:sure].tolist()
        return tokens

    def _single_steps(self, call: Call, draft_length: int, choose: Choose | None, go_on: GoOn | None) -> list[int]:
        """One step per call: the host picks each token from the scores, or says after each whether to go on."""
        # The graph computes probabilities only where it is asked for a least one.
        self._length[...], self._least[...], self._with_scores[...] = 1, _ANY if go_on else 0.0, choose is not None
        tokens: list[int] = []
        while len(tokens) < draft_length:
            call.run()
            drafts, probabilities, hidden, scores, candidates = call.outputs()
            chosen = int(drafts[0]) if choose is None else choose(scores[0], candidates[0] if candidates.size else None)
            if chosen is None:
                break
            tokens.append(chosen)
            if go_on is not None and not go_on(float(probabilities[0])):
                break
            self._token[...], self._hidden[...] = chosen, hidden
        return tokens
