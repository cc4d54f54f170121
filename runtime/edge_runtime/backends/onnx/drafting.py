"""What the MTP drafters on onnxruntime have in common, whatever their graph is: which drafts are refused, and how they end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.kv_cache import MAX_ROWS
from edge_runtime.backends.onnx.library import Call, Graph, SessionOptions
from edge_runtime.backends.onnx.target import OrtTarget
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import DraftSampler, ShouldContinue

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
