"""MTP drafters on the target's own K/V rows: the kernels' own, and graphs on ONNX Runtime, step by step, where these do not run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.draft import ArrayRows, NativeDraft, can_draft
from edge_runtime.backends.onnx.drafter_weights import OtherGraphError, channel_scales, read_weights, sources_of
from edge_runtime.backends.onnx.kv_cache import MAX_ROWS, check_length
from edge_runtime.backends.onnx.loader import Call, Graph, SessionOptions, scalar, value_over
from edge_runtime.backends.onnx.static_target import StaticOrtTarget, small_arrays
from edge_runtime.backends.onnx.target import GraphTarget, OrtTarget, PairFiles, check_inputs, shared_inputs
from edge_runtime.bundle.manifest import CacheBuffer, CacheLayout
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import DraftSampler, ShouldContinue

# A least probability that every token reaches.
_ANY = float(np.finfo(np.float32).tiny)
_OUTPUTS = ("drafts", "probabilities", "hidden_out", "scores", "candidates")

T = TypeVar("T", bound=GraphTarget)


class Step(NamedTuple):
    """What a draft step gives: `scores` [n] of all tokens, or of the `candidates` [n]; the likeliest token and its probability."""

    likeliest: int
    probability: float
    scores: NDArray[np.float32]
    candidates: NDArray[np.int64] | None


class GraphDrafter(ABC, Generic[T]):
    """Implements `interfaces.Drafter`, step by step."""

    stepwise = True

    def __init__(self, path: Path, target: T, session: SessionOptions) -> None:
        self._target = target
        graph = Graph(path, session)
        self._graph: Graph | None = graph
        self._call: Call | None = self._bind(graph, path)
        target.closers.append(self)

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """Returns `draft_length` tokens after `last`, fewer where `sampler` or `should_continue` ends the draft.

        Returns none where the target has no hidden row.

        All steps are at the same position, that of `last`, and write nothing to the cache.
        """
        if self._call is None:
            raise RequestError("the drafter is closed; open the bundle again")
        check_length(draft_length)
        hidden = self._target.hidden_row
        if hidden is None or draft_length < 1:
            return []
        self._target.vocabulary.check(last)
        self._sampled = sampler is not None
        self._begin(hidden)
        tokens: list[int] = []
        while len(tokens) < draft_length:
            step = self._step(tokens[-1] if tokens else last, probability=should_continue is not None)
            chosen = step.likeliest if sampler is None else sampler(step.scores, step.candidates)
            if chosen is None:
                break
            tokens.append(chosen)
            if should_continue is not None and not should_continue(step.probability):
                break
        return tokens

    def assignments(self) -> dict[str, dict[str, int]]:
        """Per execution provider how many nodes of each operator it runs."""
        return self._graph.assignments() if self._graph else {}

    @property
    def lacks_kernels(self) -> bool:
        """As that of its graph."""
        return self._graph is not None and self._graph.lacks_kernels

    def close(self) -> None:
        """Frees the session. Harmless when done twice."""
        self._graph = self._call = None

    def _run(self) -> Call:
        """Runs the graph."""
        assert self._call is not None
        self._call.run()
        return self._call

    @abstractmethod
    def _bind(self, graph: Graph, path: Path) -> Call:
        """Prepares the call. Raises BackendError, BundleError if the graph does not fit the target."""

    @abstractmethod
    def _begin(self, hidden: NDArray[np.float32]) -> None:
        """Sets the inputs of a draft from the hidden row before it."""

    @abstractmethod
    def _step(self, token: int, *, probability: bool) -> Step:
        """Runs one step behind `token`; the next one goes on from its hidden row.

        The probability may be 1 where it is not asked for, and the scores may be missing unless the draft is sampled.
        """


class OrtDrafter(GraphDrafter[OrtTarget]):
    """A drafter whose graph is a loop over draft steps, of which each run takes one."""

    def _bind(self, graph: Graph, path: Path) -> Call:
        target, width = self._target, graph.inputs.get("hidden", (0,))[-1]
        if width != target.hidden_size:
            raise BackendError(f"{path.name} reads hidden rows of {width}, the target gives {target.hidden_size}; export the pair again")
        self._inputs = graph.inputs
        self._token, token = scalar(np.int64, 1, 1)
        self._hidden, hidden = scalar(np.float32, 1, 1, target.hidden_size)
        self._length, length = scalar(np.int64)
        self._threshold, threshold = scalar(np.float32)
        self._with_scores, with_scores = scalar(np.bool_)
        self._position, position = scalar(np.int64, 1, 1)
        inputs = {
            "token": token,
            "hidden": hidden,
            "draft_length": length,
            "least_probability": threshold,
            "with_scores": with_scores,
            "position_ids": position,
            **shared_inputs(target),
            **target.cache.values,
        }
        return graph.bind({name: value for name, value in inputs.items() if name in graph.inputs}, dict.fromkeys(_OUTPUTS))

    def _begin(self, hidden: NDArray[np.float32]) -> None:
        target = self._target
        target.cache.set_counts(target.length)
        assert self._call is not None
        target.cache.place_drafter_rows(self._call, self._inputs, target.length)
        self._position[...], self._hidden[0, 0] = target.length, hidden

    def _step(self, token: int, *, probability: bool) -> Step:
        # The graph computes probabilities only with a least probability above 0.
        self._token[...], self._length[...] = token, 1
        self._threshold[...], self._with_scores[...] = _ANY if probability else 0.0, self._sampled
        drafts, probabilities, hidden, scored, candidates = self._run().outputs()
        self._hidden[...] = hidden
        return Step(int(drafts[0]), float(probabilities[0]), scored[0], candidates[0] if candidates.size else None)


class StaticOrtDrafter(GraphDrafter[StaticOrtTarget]):
    """A drafter whose graph is one step of fixed shapes; the host goes from one to the next."""

    def _bind(self, graph: Graph, path: Path) -> Call:
        rows, width = self._target.rows, (1, 1, self._target.hidden_size)
        self._arrays = small_arrays(graph, path, rows)
        check_inputs(graph, {"embedded": width, "hidden": width}, path)
        read = {name: value for name, value in rows.values.items() if name in graph.inputs}
        check_inputs(graph, {name: rows.arrays[name].shape for name in read}, path)
        self.outputs = {name: np.zeros(shape, np.int64 if name == "candidates" else np.float32) for name, shape in graph.outputs.items()}
        inputs = {name: value_over(array) for name, array in self._arrays.items()}
        return graph.bind(inputs | read, {name: value_over(array) for name, array in self.outputs.items()})

    def _begin(self, hidden: NDArray[np.float32]) -> None:
        target = self._target
        target.rotate(self._arrays, target.length)
        for kind in target.rows.rows:
            if f"mask_{kind}" in self._arrays:
                target.rows.drafter_mask(kind, self._arrays[f"mask_{kind}"], target.length)
        self._next_hidden = hidden.reshape(1, 1, -1)

    def _step(self, token: int, *, probability: bool) -> Step:
        self._target.embedding.lookup(np.array([token]), self._arrays["embedded"])
        self._arrays["hidden"][...] = self._next_hidden
        self._run()
        self._next_hidden = self.outputs["hidden_out"]
        values, candidates = self.outputs["scores"], self.outputs.get("candidates")
        best = int(values.argmax())
        share = float(1 / np.exp(values - values[best]).sum()) if probability else 1.0
        return Step(best if candidates is None else int(candidates[best]), share, values, candidates)


class KernelDrafter:
    """Implements `interfaces.Drafter` with the graph's weights in the kernels' own drafter, on the target's K/V rows where they lie."""

    stepwise = True

    def __init__(self, path: Path, target: OrtTarget, layout: CacheLayout, threads: int) -> None:
        """Raises OtherGraphError, ValueError where the kernels do not compute this graph: then `OrtDrafter` does."""
        self._target = target
        weights = read_weights(path, layout)
        if weights.after.outputs != target.hidden_size:
            raise OtherGraphError
        self._draft: NativeDraft | None = NativeDraft(weights, longest=MAX_ROWS - 1, threads=threads)
        self._buffers = [next(buffer for buffer in layout.buffers if buffer.layer == layer) for layer in sources_of(layout)]
        try:
            self._sources = [self._source(number, buffer, path) for number, buffer in enumerate(self._buffers)]
        except BaseException:
            self.close()
            raise
        target.closers.append(self)

    def _source(self, number: int, buffer: CacheBuffer, path: Path) -> ArrayRows:
        cache, tables = self._target.cache, self._target.rotations.tables
        assert self._draft is not None
        scales = channel_scales(path, buffer.key, buffer.value) if buffer.dtype == "i8" else ()
        arrays = cache.array(buffer.key), cache.array(buffer.value)
        return ArrayRows(self._draft, number, arrays, (tables[f"cosine_{buffer.kind}"], tables[f"sine_{buffer.kind}"]), scales)

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """As `GraphDrafter.draft` does."""
        if self._draft is None:
            raise RequestError("the drafter is closed; open the bundle again")
        check_length(draft_length)
        target = self._target
        hidden = target.hidden_row
        if hidden is None or draft_length < 1:
            return []
        target.vocabulary.check(last)
        for source, buffer in zip(self._sources, self._buffers, strict=True):
            source.select(*target.cache.drafter_rows(buffer.kind, target.length), target.length)
        return self._draft.run(last, draft_length, hidden, sampler, should_continue)

    def assignments(self) -> dict[str, dict[str, int]]:
        """No execution provider runs it."""
        return {}

    def close(self) -> None:
        """Frees the weights. Harmless when done twice."""
        if self._draft is not None:
            self._draft.close()
            self._draft = None


AnyOrtDrafter = KernelDrafter | OrtDrafter | StaticOrtDrafter


def open_drafter(path: Path, target: OrtTarget | StaticOrtTarget, session: SessionOptions, files: PairFiles) -> AnyOrtDrafter:
    """Opens the graph at `path` as the drafter of this target, where it drafts fastest. Raises BackendError, BundleError."""
    if not isinstance(target, OrtTarget):
        return StaticOrtDrafter(path, target, session)
    if target.row_kernels and can_draft():
        with suppress(OtherGraphError, ValueError):
            return KernelDrafter(path, target, files.layout, session.threads)
    return OrtDrafter(path, target, session)
