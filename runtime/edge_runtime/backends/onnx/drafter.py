"""MTP drafters on ONNX Runtime: what all graphs share, and the graph that computes a complete draft in one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.kv_cache import MAX_ROWS
from edge_runtime.backends.onnx.loader import Call, Graph, SessionOptions, scalar
from edge_runtime.backends.onnx.target import OrtTarget, shared_inputs
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import DraftSampler, ShouldContinue

# A least probability that every token reaches.
_ANY = float(np.finfo(np.float32).tiny)
_OUTPUTS = ("drafts", "probabilities", "hidden_out", "scores", "candidates")

T = TypeVar("T", bound=OrtTarget)


class GraphDrafter(ABC, Generic[T]):
    """Implements `interfaces.Drafter`. `least_probability` ends a draft before a token that the drafter itself gives less."""

    stepwise = True

    def __init__(self, path: Path, target: T, session: SessionOptions, *, least_probability: float = 0.0) -> None:
        self._target = target
        self.least_probability = least_probability
        graph = Graph(path, session)
        self._graph: Graph | None = graph
        self._call: Call | None = self._bind(graph, path)
        target._closers.append(self)

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """Returns `draft_length` tokens after `last`, fewer where the drafter is unsure, or none where the target has no hidden row.

        All steps are at the same position, that of `last`, and write nothing to the cache.
        """
        if self._call is None:
            raise RequestError("the drafter is closed; open the bundle again")
        if draft_length >= MAX_ROWS:
            raise RequestError(f"a draft of {draft_length} tokens is longer than the {MAX_ROWS - 1} this pair was opened for")
        hidden = self._target.hidden_row
        if hidden is None or draft_length < 1:
            return []
        self._target.vocabulary.check(last)
        return self._draft(self._call, last, hidden, draft_length, sampler, should_continue)

    def assignments(self) -> dict[str, dict[str, int]]:
        """Per execution provider how many nodes of each operator it runs."""
        return self._graph.assignments() if self._graph else {}

    def close(self) -> None:
        """Frees the session. Harmless when done twice."""
        self._graph = self._call = None

    @abstractmethod
    def _bind(self, graph: Graph, path: Path) -> Call:
        """Prepares the call. Raises BackendError, BundleError if the graph does not fit the target."""

    @abstractmethod
    def _draft(
        self,
        call: Call,
        last: int,
        hidden: NDArray[np.float32],
        draft_length: int,
        sampler: DraftSampler | None,
        should_continue: ShouldContinue | None,
    ) -> list[int]:
        """Drafts after `last` from the hidden row before it, for a length and a token that were checked."""


class OrtDrafter(GraphDrafter[OrtTarget]):
    """A drafter whose graph is a loop over draft steps."""

    def _bind(self, graph: Graph, path: Path) -> Call:
        target, width = self._target, graph.inputs.get("hidden", (0,))[-1]
        if width != target.hidden_size:
            raise BackendError(f"{path.name} reads hidden rows of {width}, the target gives {target.hidden_size}; export the pair again")
        self._inputs = graph.inputs
        self._token, token = scalar(np.int64, 1, 1)
        self._hidden, hidden = scalar(np.float32, 1, 1, target.hidden_size)
        self._length, length = scalar(np.int64)
        self._least, least = scalar(np.float32)
        self._with_scores, with_scores = scalar(np.bool_)
        self._position, position = scalar(np.int64, 1, 1)
        inputs = {
            "token": token,
            "hidden": hidden,
            "draft_length": length,
            "least_probability": least,
            "with_scores": with_scores,
            "position_ids": position,
            **shared_inputs(target),
            **target.cache.values,
        }
        return graph.bind({name: value for name, value in inputs.items() if name in graph.inputs}, dict.fromkeys(_OUTPUTS))

    def _draft(
        self,
        call: Call,
        last: int,
        hidden: NDArray[np.float32],
        draft_length: int,
        sampler: DraftSampler | None,
        should_continue: ShouldContinue | None,
    ) -> list[int]:
        self._target.cache.set_counts(self._target.length)
        self._target.cache.place_drafter_rows(call, self._inputs, self._target.length)
        self._position[...] = self._target.length
        self._token[...], self._hidden[0, 0] = last, hidden
        if sampler is None and should_continue is None:
            return self._all_steps(call, draft_length)
        return self._single_steps(call, draft_length, sampler, should_continue)

    def _all_steps(self, call: Call, draft_length: int) -> list[int]:
        self._length[...], self._least[...], self._with_scores[...] = draft_length, self.least_probability, False
        call.run()
        drafts, probabilities = call.outputs()[:2]
        sure = len(drafts) - int(probabilities[-1] < self.least_probability)
        tokens: list[int] = drafts[:sure].tolist()
        return tokens

    def _single_steps(
        self, call: Call, draft_length: int, sampler: DraftSampler | None, should_continue: ShouldContinue | None
    ) -> list[int]:
        """Runs one step per call: the host picks each token from the scores, or decides after each whether to continue."""
        # The graph computes probabilities only with a least probability above 0.
        self._length[...], self._least[...], self._with_scores[...] = 1, _ANY if should_continue else 0.0, sampler is not None
        tokens: list[int] = []
        while len(tokens) < draft_length:
            call.run()
            drafts, probabilities, hidden, scores, candidates = call.outputs()
            chosen = int(drafts[0]) if sampler is None else sampler(scores[0], candidates[0] if candidates.size else None)
            if chosen is None:
                break
            tokens.append(chosen)
            if should_continue is not None and not should_continue(float(probabilities[0])):
                break
            self._token[...], self._hidden[...] = chosen, hidden
        return tokens
