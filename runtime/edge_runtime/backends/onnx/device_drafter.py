"""A drafter on the device that keeps the target's rows: steps follow each other there, and the host reads a draft once, at its end.

Whether that or the drafter on the CPU is faster follows from the device, the link to it and the drafter's size: measured on first use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.device_draft_graph import (
    CANDIDATES,
    FIRST,
    HIDDEN,
    NEXT_HIDDEN,
    NEXT_RECENT,
    NEXT_TOKEN,
    RECENT,
    ROWS,
    SCORES,
    TOKEN,
    draft_step_graph,
    places_of,
)
from edge_runtime.backends.onnx.device_graph import HIDDEN_INDEX, PICKED, picking_graph
from edge_runtime.backends.onnx.device_target import DeviceTarget
from edge_runtime.backends.onnx.drafter_weights import OtherGraphError
from edge_runtime.backends.onnx.kv_cache import FULL, MAX_ROWS, SLIDING, check_length
from edge_runtime.backends.onnx.loader import Call, Graph, SessionOptions, value_over
from edge_runtime.bundle.integrity import read_part
from edge_runtime.bundle.manifest import CacheLayout
from edge_runtime.bundle.onnx_file import MAX_GRAPH_BYTES
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.interfaces import Drafter, DraftSampler, ShouldContinue

_LONGEST = MAX_ROWS - 1
# Steps that run before the host looks at their probabilities, where these decide how many follow.
_TOGETHER = 4
# What is timed: drafts of so many tokens behind a verify of so many, after a prompt; and how often, the fastest counts.
_DRAFT, _VERIFY, _PROMPT, _TIMES = 3, 4, 40, 5
_TOKENS = list(range(4, 4 + _PROMPT + _VERIFY))


class DeviceDrafter:
    """Implements `interfaces.Drafter` on the buffers of a `DeviceTarget`."""

    stepwise = True

    def __init__(self, path: Path, target: DeviceTarget, session: SessionOptions, layout: CacheLayout) -> None:
        """Raises OtherGraphError for a graph that is none of the patterns, BackendError if it does not open."""
        model = draft_step_graph(read_part(path, MAX_GRAPH_BYTES, "graph"), layout.buffers)
        if model is None:
            raise OtherGraphError
        self._target, self._window = target, target.cache.window
        self._graph: Graph | None = Graph(path, session, model)
        self._picking: Graph | None = Graph(path.with_name("picked-hidden.onnx"), session, picking_graph(()))
        place = target.cache.placed
        # A step reads one of two places, and writes to the other.
        self._places = [
            {
                TOKEN: place(np.zeros((1, 1), np.int64)),
                HIDDEN: place(np.zeros((1, 1, target.hidden_size), np.float32)),
                RECENT: place(np.zeros((2, _LONGEST), np.float32)),
            }
            for _ in range(2)
        ]
        rows = {places_of(kind): np.arange(target.cache.capacity[kind], dtype=np.float32) for kind in (FULL, SLIDING)}
        counts: dict[str, NDArray[Any]] = {"position_ids": np.zeros((1, 1), np.int64)}
        counts |= {name: np.zeros(1, np.float32) for name in (ROWS, FIRST)}
        own = {name: place(array) for name, array in counts.items()}
        own |= {name: place(array.reshape(1, 1, 1, -1)) for name, array in rows.items()}
        self._counts = {name: own[name] for name in counts}
        tables = {name: place(table) for name, table in target.rotations.tables.items() if name in self._graph.inputs}
        read = {**target.cache.on_device, **tables, **own}
        self._read = {name: value for name, value in read.items() if name in self._graph.inputs}
        self._calls: dict[tuple[int, bool], Call] = {}
        target.closers.append(self)

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        """As `interfaces.Drafter.draft`. Raises BackendError for a token that there is none of."""
        if self._graph is None:
            raise RequestError("the drafter is closed; open the bundle again")
        check_length(draft_length)
        if self._target.hidden_place is None or draft_length < 1:
            return []
        self._target.vocabulary.check(last)
        self._begin(last)
        if sampler is not None:
            return self._sampled(draft_length, sampler, should_continue)
        tokens: list[int] = []
        while len(tokens) < draft_length:
            count = min(draft_length - len(tokens), draft_length if should_continue is None else _TOGETHER)
            for number in range(len(tokens), len(tokens) + count):
                self._call(number).run()
            for token, probability in self._recent(len(tokens) + count, count):
                tokens.append(token)
                if should_continue is not None and not should_continue(probability):
                    return tokens
        return tokens

    def assignments(self) -> dict[str, dict[str, int]]:
        """Per execution provider how many nodes of each operator it runs."""
        return self._graph.assignments() if self._graph else {}

    def close(self) -> None:
        """Frees the session. Harmless when done twice."""
        self._calls.clear()
        self._graph = self._picking = None
        for held in (self._places, self._counts, self._read):
            held.clear()

    def _begin(self, last: int) -> None:
        """Sets what the first step reads."""
        target, first = self._target, self._places[0]
        length = target.length
        given, index = target.hidden_place or (0, 0)
        inputs = {HIDDEN: target.hidden_value(given), HIDDEN_INDEX: value_over(np.array([index]))}
        assert self._picking is not None
        self._picking.bind(inputs, {PICKED: first[HIDDEN]}, fixed=inputs).run()
        first[TOKEN].update_inplace(np.array([[last]]))
        attended = 0 if self._window is None else max(0, length - self._window - 1)
        for name, value in {"position_ids": np.array([[length]]), ROWS: _float(length), FIRST: _float(attended)}.items():
            self._counts[name].update_inplace(value)

    def _call(self, number: int, *, scored: bool = False) -> Call:
        """The call of a draft's step of this number."""
        key = number % 2, scored
        if key not in self._calls:
            assert self._graph is not None
            before, behind = self._places[key[0]], self._places[1 - key[0]]
            inputs = {**self._read, **{name: value for name, value in before.items() if name in self._graph.inputs}}
            outputs = {NEXT_TOKEN: behind[TOKEN], NEXT_HIDDEN: behind[HIDDEN], NEXT_RECENT: behind[RECENT]}
            listed = [name for name in (SCORES, CANDIDATES) if scored and name in self._graph.outputs]
            self._calls[key] = self._graph.bind(inputs, outputs | dict.fromkeys(listed), fixed=inputs)
        return self._calls[key]

    def _recent(self, number: int, count: int) -> list[tuple[int, float]]:
        """The tokens and probabilities of the last `count` steps of `number`."""
        tokens, shares = self._places[number % 2][RECENT].numpy()[:, -count:]
        if not (np.isfinite(tokens).all() and tokens.min() >= 0 and tokens.max() < self._target.vocabulary.size):
            raise BackendError("the drafter gives tokens that there are none of on this device; leave --device out")
        return [(int(token), float(share)) for token, share in zip(tokens, shares, strict=True)]

    def _sampled(self, draft_length: int, sampler: DraftSampler, should_continue: ShouldContinue | None) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < draft_length:
            number = len(tokens)
            call = self._call(number, scored=True)
            call.run()
            given = call.results()
            chosen = sampler(given[SCORES], given.get(CANDIDATES))
            if chosen is None:
                break
            tokens.append(chosen)
            self._places[(number + 1) % 2][TOKEN].update_inplace(np.array([[chosen]]))
            if should_continue is not None and not should_continue(self._recent(number + 1, 1)[0][1]):
                break
        return tokens


def _float(value: int) -> NDArray[np.float32]:
    return np.array([value], np.float32)


@dataclass(frozen=True, kw_only=True)
class DraftPlaces:
    """Seconds of a short draft on the device and on the CPU, or why the drafter does not run on the device, and if that may pass."""

    on_device: float = 0.0
    on_processor: float = 0.0
    failure: str = ""
    passing: bool = False

    @property
    def device_is_faster(self) -> bool:
        """Whether the drafter belongs on the device."""
        return not self.failure and self.on_device < self.on_processor

    def sentence(self, device: str) -> str:
        """Where drafts are made beside a target on `device`, and why."""
        if self.failure:
            return f"drafts are made on the CPU, since the drafter does not run on {device}: {self.failure}"
        times = f"a draft of {_DRAFT} takes {1e3 * self.on_device:.2f} ms on {device} and {1e3 * self.on_processor:.2f} ms on the CPU"
        return f"drafts are made on {device if self.device_is_faster else 'the CPU'}: {times}"


PLACES = MeasuredValue(
    kind="draft-place",
    value_class=DraftPlaces,
    doing="timing drafts on the device and on the CPU",
    times=1,
    disturbed_by_load=lambda places: not places.failure,
    passing=lambda places: places.passing,
)


def timed_places(target: DeviceTarget, on_device: Callable[[], Drafter], on_processor: Callable[[], Drafter], key: str) -> DraftPlaces:
    """Times a draft on both, or returns what is known of `key`, and then opens neither. Empties the cache.

    Raises BackendError where the target fails by itself.
    """

    def measure(*_: object) -> DraftPlaces:
        alone = True
        try:
            _verify_prompt(target)  # before a drafter takes memory
            alone = False
            seconds = _seconds(target, on_device())
        except FAILURES as error:
            if alone and isinstance(error, BackendError):
                raise
            return failed(error)
        finally:
            target.rollback(0)
        try:
            return DraftPlaces(on_device=seconds, on_processor=_seconds(target, on_processor()))
        finally:
            target.rollback(0)

    return PLACES.known_or_measured(key, measure, lambda _: None)


# What a drafter raises that does not run on a device.
FAILURES = (BackendError, OtherGraphError, RequestError)


def failed(error: Exception) -> DraftPlaces:
    """What is kept of a drafter that does not run on the device: for good where that follows from the graph; memory may be free later."""
    return DraftPlaces(failure=str(error) or "its graph has parts that were not tried there", passing=isinstance(error, BackendError))


def _verify_prompt(target: DeviceTarget) -> None:
    target.rollback(0)
    target.prefill(_TOKENS[:_PROMPT])
    target.verify(_TOKENS[_PROMPT:])


def _seconds(target: DeviceTarget, drafter: Drafter) -> float:
    best = np.inf
    _verify_prompt(target)
    for _ in range(_TIMES):
        target.rollback(_PROMPT)
        target.verify(_TOKENS[_PROMPT:])
        start = time.perf_counter()
        drafter.draft(_TOKENS[0], _DRAFT)
        best = min(best, time.perf_counter() - start)
    return float(best)
