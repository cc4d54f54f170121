"""What a session starts with: kept costs, else computed ones that its rounds replace; nothing is measured before the first token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_devices.machine.processors import MachineLoad
from edge_runtime.calibration import first_use, measured
from edge_runtime.calibration.first_use import (
    COSTS,
    THREADS,
    MeasuredPair,
    PairCosts,
    ThreadCounts,
    ThreadTimes,
    candidates,
    kept_threads,
    usual_threads,
)
from edge_runtime.calibration.measured import Known
from edge_runtime.drafting.cost_model import MAX_ROWS, SETTLED, MeasuredCosts
from edge_runtime.drafting.policies import DrafterKind, Timing
from edge_runtime.planning.speed import computed_costs
from edge_runtime.session.session import Session
from scripted import MANIFEST, ScriptedDrafter, ScriptedTarget, make_session, next_token
from simulated_rounds import LINEAR, STEEP

BUSY = MachineLoad(others=0.5, seconds=2.0)
QUIET = MachineLoad(others=0.0, seconds=2.0, waiting=0.0)
COMPUTED = MeasuredCosts(verify=LINEAR, step=1.0, overhead=0.5, timings=(0,) * MAX_ROWS)
MEASURED = MeasuredCosts(verify=STEEP, step=2.0)
ROWS = 9


class Machine:
    """A load, a cache folder, and scripted sessions on one pair; measuring fails unless `measures` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.load, self.measures, self.notes = QUIET, False, list[str]()
        patch.setenv(CACHE_VARIABLE, str(folder))
        patch.setattr(measured, "load_now", lambda: self.load)
        for module in (measured, first_use):
            patch.setattr(module, "LoadWatch", lambda: SimpleNamespace(load=lambda: self.load))
        patch.setattr(first_use, "measure_costs", self._measure)

    def _measure(self, *_: object, **__: object) -> MeasuredCosts:
        assert self.measures, "a probe ran"
        return MEASURED

    def costs(self, *, measure: bool = False) -> PairCosts:
        target = ScriptedTarget()
        drafter = ScriptedDrafter(target, lambda context, _: next_token(context))
        pair = MeasuredPair(target=target, drafter=drafter, token=1, rows=ROWS, objective="time", slowdown=None, facts=("pair",))
        self.measures = measure
        return PairCosts(pair, COMPUTED, None, self.notes.append, measure=measure)

    def session(self) -> Session:
        costs = self.costs()
        return make_session(costs=costs, keep_costs=costs.keep)

    def known(self) -> Known[MeasuredCosts]:
        (known,) = (COSTS.known(key) for key, _ in COSTS.kept())
        assert known is not None
        return known


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def learn(costs: PairCosts, factor: float, times: int, rows: int = ROWS) -> None:
    for _ in range(times):
        for n in range(1, rows + 1):
            costs().learn(Timing(length=100, steps=0, draft_seconds=0.0, rows=n, verify_seconds=factor * LINEAR[n - 1]))


def test_nothing_is_computed_by_the_pair_before_the_first_token(machine: Machine) -> None:
    session = machine.session()
    generation = session.generate([1, 2, 3], max_tokens=20)
    assert session.costs_are_provisional
    assert isinstance(session.target, ScriptedTarget)
    assert (session.target.rows, session.target.length) == ([], 0)
    list(generation.rounds())
    assert len(session.target.rows) == generation.stats.rounds, "each verify is one of a round"
    session.close()
    known = machine.known()
    assert known.provisional
    assert sum(known.value.timings) > 0


def test_a_fixed_draft_length_has_nothing_to_do_with_costs(machine: Machine) -> None:
    session = machine.session()
    list(session.generate([1, 2, 3], max_tokens=9, draft_length=0).rounds())
    assert session.costs_are_provisional is None
    session.close()
    assert list(COSTS.kept()) == []


def test_rounds_replace_what_was_computed_and_the_next_session_starts_with_it(machine: Machine) -> None:
    first = machine.costs()
    assert first().is_provisional
    assert first().verify(1) == LINEAR[0]
    learn(first, 3.0, SETTLED - 1)
    first.keep()
    known = machine.known()
    assert (known.provisional, known.value.timings[:ROWS]) == (True, (SETTLED - 1,) * ROWS)
    second = machine.costs()
    assert second().verify(4) == pytest.approx(3 * LINEAR[3])
    learn(second, 3.0, 1)
    second.keep()
    known = machine.known()
    assert (known.provisional, known.value.timings) == (False, ()), "every number of rows was timed on a quiet machine"
    assert not machine.costs()().is_provisional


def test_what_a_busy_machine_taught_stays_provisional_until_a_quiet_one_teaches(machine: Machine) -> None:
    machine.load = BUSY
    busy = machine.costs()
    learn(busy, 9.0, 2 * SETTLED)
    busy.keep()
    known = machine.known()
    assert known.provisional
    assert known.value.timings[:ROWS] == (SETTLED - 1,) * ROWS, "a quiet machine has to time each"
    machine.load = QUIET
    quiet = machine.costs()
    assert quiet().verify(1) == pytest.approx(9 * LINEAR[0]), "used as it is"
    learn(quiet, 1.0, 60)
    assert quiet().verify(4) < 1.5 * LINEAR[3]
    quiet.keep()
    assert not machine.known().provisional


def test_measured_costs_stay(machine: Machine) -> None:
    tuned = machine.costs(measure=True)
    assert [tuned().verify(n) for n in (1, 4)] == [STEEP[0], STEEP[3]]
    assert not tuned().is_provisional
    later = machine.costs()
    learn(later, 5.0, 9)
    later.keep()
    assert machine.known().value == MEASURED


def test_measured_costs_of_a_busy_machine_are_provisional_and_rounds_replace_them(machine: Machine) -> None:
    machine.load = BUSY
    machine.costs(measure=True)()
    machine.load = QUIET
    costs = machine.costs()
    assert costs().is_provisional
    ratio = costs().verify(4) / costs().verify(1)
    assert LINEAR[3] / LINEAR[0] < ratio < STEEP[3] / STEEP[0], "one timing of each number of rows, beside what was computed"
    learn(costs, 1.0, 2 * SETTLED)
    costs.keep()
    assert not machine.known().provisional


def test_measuring_takes_the_place_of_what_rounds_taught(machine: Machine) -> None:
    costs = machine.costs()
    learn(costs, 2.0, 1)
    costs.keep()
    assert machine.costs(measure=True)().verify(4) == STEEP[3]
    assert machine.costs()().verify(4) == STEEP[3]


def test_threads_are_kept_ones_or_the_usual_ones(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [[0], [1, 2, 3, 4], [5, 6, 7, 8]]
    monkeypatch.setattr(first_use, "processor_groups", lambda: groups)
    kept_on: list[int] = []
    monkeypatch.setattr(first_use, "keep_to_fastest", lambda count, _: kept_on.append(count))
    pair, used = replace(machine.costs()._pair), list[ThreadCounts]()
    assert kept_threads(pair, used.append) == ThreadCounts(prefill=5, verify=5, draft=2)
    times = ThreadTimes(seconds={phase: {n: 1.0 / n for n in numbers} for phase, numbers in candidates(groups).items()})
    THREADS.keep(pair.key, times, machine.notes.append)
    assert kept_threads(pair, used.append) == times.best()
    assert kept_on == [5, 9]
    assert len(used) == 2
    monkeypatch.setattr(first_use, "processor_groups", lambda: groups[:2])
    assert kept_threads(pair, used.append) == usual_threads(groups[:2]), "other processors than those measured"


@pytest.mark.parametrize(
    ("groups", "forward"), [([[0]], 1), ([[0, 1, 2, 3]], 4), ([[0], [1]], 2), ([[0, 1], [2, 3, 4, 5]], 2), ([[0], [1], [2]], 2)]
)
def test_the_usual_threads_leave_out_the_slowest_cluster(groups: list[list[int]], forward: int) -> None:
    assert usual_threads(groups) == ThreadCounts(prefill=forward, verify=forward, draft=min(2, forward))


def test_computed_costs_follow_sizes_kernels_and_drafters() -> None:
    """They are rough, and the first rounds replace them: only what is dearer than what counts."""

    def of(kernels: str | None = "avx2", *, target: int = 2 * 10**9, format: str = "gguf", drafter: DrafterKind = "dense") -> MeasuredCosts:
        sizes = {"target": target, "drafter": 4 * 10**7}
        files = (SimpleNamespace(role=role, bytes=size, format=format) for role, size in sizes.items())
        return computed_costs(replace(MANIFEST, files=tuple(files)), format, drafter, kernels)

    def further_row(costs: MeasuredCosts) -> float:
        """Beside the first one."""
        return (costs.verify[8] / costs.verify[0] - 1) / 8

    assert of().timings == (0,) * MAX_ROWS
    assert of(target=4 * 10**9).verify[0] > 1.5 * of().verify[0]
    assert of(target=1000).verify[0] > 0, "a forward of nothing is not free"
    assert 0 < further_row(of("avx512vnni")) < further_row(of("avx2")) < further_row(of(None)) < 1
    assert [of(None, format=format).verify[0] > of(format=format).verify[0] for format in ("gguf", "onnx")] == [True, True]
    assert of(drafter="dense").draft(3) > of(drafter="split").draft(3) > of(drafter="lookup").draft(3) > 0
