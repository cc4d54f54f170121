"""Cores and threads by joules: on simulated machines of known power, through a session, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from edge_devices.machine.load import MachineLoad
from edge_runtime.calibration import first_use, measured
from edge_runtime.calibration.first_use import MeasuredPair, measured_placement
from edge_runtime.calibration.measured import TIMES
from edge_runtime.calibration.placement import FIGURES, SAVES, Placement, PlacementFigures, PlacementProbe, RoundEnergy, placements
from edge_runtime.calibration.thread_probe import ThreadCounts, candidates, measure_threads
from edge_runtime.config.schema import SpeculativeConfig, TuningConfig
from edge_runtime.session.open import open_session
from simulated_cores import Bench, Cluster, Cores, draw_cores

PHONE = Cores(
    clusters=(
        Cluster(cores=1, operations=10, bytes=14, watts=3.0),
        Cluster(cores=4, operations=6, bytes=9, watts=1.1),
        Cluster(cores=4, operations=1.8, bytes=3, watts=0.25),
    ),
    bytes=30,
    rows=0.5,
    barrier_s=2e-4,
    draft=0.03,
    idle_watts=0.9,
    shared_watts=0.8,
)


def best_by_time(bench: Bench) -> ThreadCounts:
    """What the probe of threads chooses on the same machine."""
    groups = bench.cores.groups

    def use(counts: ThreadCounts) -> None:
        first = placements(groups, ThreadCounts.same(counts.largest))[0]
        bench.use(Placement(processors=first.processors, threads=counts))

    return measure_threads(bench.target, bench.drafter, use, candidates(groups), 1, clock=bench.clock).best()


def chosen(cores: Cores, seed: int, slowdown: float | None, *, noise: float = 0.01, uses: int = TIMES) -> tuple[list[Placement], str, int]:
    """Returns the placements tried, the name of the one in use after so many uses, and how often it changed."""
    bench = Bench(cores, seed, noise=noise)
    placed, changes = placements(cores.groups, best_by_time(bench)), 0
    probe = PlacementProbe(
        target=bench.target, drafter=bench.drafter, token=1, placements=placed, use=bench.use, power=bench, clock=bench.clock
    )
    worth = probe.worth_measuring()
    known = PlacementFigures(rounds=probe.measured(worth), fastest=worth[0], chosen=worth[0]).decided(slowdown)
    for times in range(1, uses):
        again = known.with_again(probe.measured(known.worth_repeating(slowdown)), times).decided(slowdown)
        changes += again.chosen != known.chosen
        known = again
    assert bench.target.length == 0
    return placed, known.chosen, changes


def compared(seed: int, slowdown: float | None, noise: float) -> tuple[float, float, float, int]:
    """Time and joules of the choice / of the fastest, its joules / those of the best that keeps the promise, and changes of the choice."""
    cores = draw_cores(seed)
    placed, name, changes = chosen(cores, seed, slowdown, noise=noise)
    rounds = {each.name: cores.round(each) for each in placed}
    (seconds, joules), (first_s, first_j) = rounds[name], rounds[placed[0].name]
    best = min(j for s, j in rounds.values() if slowdown is None or s <= (1 + slowdown) * first_s)
    return seconds / first_s, joules / first_j, joules / best, changes


def test_joules_are_near_the_least_and_fewer_than_those_of_the_fastest() -> None:
    result = [compared(seed, None, 0.01) for seed in range(80)]
    _, joules, over_best, changes = zip(*result, strict=True)
    print(f"joules {fmean(joules):.3f} of the fastest's, {fmean(over_best):.3f} of the least")
    assert fmean(joules) < 0.9
    assert max(joules) < 1.02
    assert sorted(over_best)[75] < 1 + SAVES
    assert sum(changes) < 5


@pytest.mark.parametrize(("slowdown", "maximum"), [(0.05, 1.0), (0.3, 0.97)])
def test_the_promise_holds(slowdown: float, maximum: float) -> None:
    result = [compared(seed, slowdown, 0.01) for seed in range(40)]
    times, joules, over_best, _ = zip(*result, strict=True)
    print(f"time {fmean(times):.3f} at most {max(times):.3f}, joules {fmean(joules):.3f} of the fastest's")
    assert max(times) < 1 + slowdown + 0.02  # the clock's jitter
    assert fmean(joules) <= maximum
    assert sorted(over_best)[38] < 1 + SAVES


def test_a_phone_leaves_its_dearest_core_out() -> None:
    placed, name, _ = chosen(PHONE, 1, None)
    assert placed[0].name == "5 on 0,1,2,3,4"
    assert name == "4 on 1,2,3,4"
    assert chosen(PHONE, 1, 0.1)[1] == "5 on 0,1,2,3,4"


def figures(held: str = "a", **joules: float) -> PlacementFigures:
    rounds = {name: RoundEnergy(joules=j, seconds=1.0, error=0.001) for name, j in joules.items()}
    return PlacementFigures(rounds=rounds, fastest="a", chosen=held)


def test_the_choice_stays_until_another_saves_clearly_more() -> None:
    assert figures(a=1.0, b=0.96).decided(None).chosen == "a"
    assert figures(a=1.0, b=0.94).decided(None).chosen == "b"
    assert figures(held="b", a=0.96, b=1.0).decided(None).chosen == "b"
    assert figures(held="b", a=0.94, b=1.0).decided(None).chosen == "a"
    unsure = figures(a=1.0, b=0.94)
    blurred = {name: replace(item, error=0.04) for name, item in unsure.rounds.items()}
    assert replace(unsure, rounds=blurred).decided(None).chosen == "a", "the meter does not tell them apart"


def test_a_choice_that_breaks_the_promise_is_left() -> None:
    slow = figures(held="b", a=1.0, b=0.5)
    slow = replace(slow, rounds={**slow.rounds, "b": RoundEnergy(joules=0.5, seconds=1.3)})
    assert (slow.decided(None).chosen, slow.decided(0.2).chosen) == ("b", "a")
    assert slow.worth_repeating(0.2)[1:] == ["a"]


def test_the_mean_of_all_measurements_counts() -> None:
    again = figures(a=1.0, b=0.9).with_again({"b": RoundEnergy(joules=1.2, seconds=4.0)}, 2)
    assert (again.rounds["b"].joules, again.rounds["b"].seconds) == (pytest.approx(1.0), pytest.approx(2.0))
    assert again.rounds["a"].joules == 1.0


def test_figures_of_other_placements_do_not_fit() -> None:
    known = figures(a=1.0, b=0.9)
    assert known.are_of(["a", "b", "c"])
    assert not known.are_of(["b", "a"]), "another one is the fastest now"
    assert not known.are_of(["a"]), "other cores"
    assert not replace(known, chosen="c").are_of(["a", "b", "c"])
    for joules in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(ValueError, match="is no round"):
            RoundEnergy(joules=joules, seconds=1.0)


@pytest.fixture
def phone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Bench, list[tuple[int, ...]], Callable[..., tuple[Placement, float]]]:
    """A phone of known power in this machine's place: its meter, the processors that the process was kept on, and a use of a pair."""
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path))
    bench, kept = Bench(PHONE, 3), list[tuple[int, ...]]()

    def set_threads(counts: ThreadCounts) -> None:
        bench.use(Placement(processors=kept[-1], threads=counts))

    def threads(_pair, _set, _notify, **_) -> ThreadCounts:
        return best_by_time(bench)

    def use(slowdown: float | None = None, others: float = 0.0) -> tuple[Placement, float]:
        pair = MeasuredPair(
            target=bench.target, drafter=bench.drafter, token=1, rows=5, objective="energy", slowdown=slowdown, facts=("a pair",)
        )
        monkeypatch.setattr(measured, "LoadWatch", lambda: SimpleNamespace(load=lambda: MachineLoad(others=others, seconds=9.0)))
        return measured_placement(pair, set_threads, bench, lambda _: None, clock=bench.clock)

    monkeypatch.setattr(first_use, "processor_groups", lambda: PHONE.groups)
    monkeypatch.setattr(first_use, "measured_threads", threads)
    monkeypatch.setattr(first_use, "stay_on", lambda numbers: kept.append(tuple(numbers)))
    return bench, kept, use


def test_the_first_uses_measure_and_later_ones_take_what_was_chosen(phone) -> None:
    bench, kept, use = phone
    windows = []
    for _ in range(TIMES + 1):
        placement, slower = use()
        windows.append(bench.windows)
        assert placement.name == "4 on 1,2,3,4"
        assert kept[-1] == (1, 2, 3, 4)
        assert bench.placement == placement
        assert slower == pytest.approx(1.15, abs=0.05)
    assert windows[0] > 3
    assert [b - a for a, b in pairwise(windows)] == [2] * (TIMES - 1) + [0]
    assert use(slowdown=0.1)[0].name == "5 on 0,1,2,3,4", "another promise needs no other measurement"
    assert bench.windows == windows[-1]


def test_what_a_busy_machine_measured_is_used_and_provisional(phone) -> None:
    bench, _, use = phone
    assert use(others=0.5)[0].name == "4 on 1,2,3,4"
    windows = bench.windows
    assert use(others=0.5)[0].name == "4 on 1,2,3,4"
    assert bench.windows == windows
    (kept,) = FIGURES.kept()
    assert kept[1].chosen == "4 on 1,2,3,4"


def test_a_session_runs_on_what_takes_the_fewest_joules(exported_pair: Path, probe_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real backend: one thread takes half the watts here, and the promise of the rest is what drafting may use."""
    used: list[int] = []

    class Meter(Bench):
        def phases(self, *_arguments):
            from edge_runtime.drafting.phase_power import PhasePower

            return PhasePower(draft=2.0, verify=4.0)

        def energy_of(self, work):
            work()
            return RoundEnergy(joules=used[-1] * 1.0, seconds=0.01)

    monkeypatch.setattr(first_use, "processor_groups", lambda: [[0, 1]])
    from edge_runtime.backends.llama.pair import LlamaSequenceBatch

    real = LlamaSequenceBatch.set_threads
    monkeypatch.setattr(LlamaSequenceBatch, "set_threads", lambda self, counts: (used.append(counts.verify), real(self, counts))[1])
    config = SpeculativeConfig(tuning=TuningConfig(objective="energy"))
    with open_session(exported_pair, config=config, power=Meter(PHONE, 1)) as session:
        assert "".join(session.generate("def area(r):", max_tokens=8))
    assert used[-1] == 1
