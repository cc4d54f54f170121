"""Meters that write a row every ten seconds or so, as smart plugs do: longer load steps, and a line that says whether they show."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from edge_bench.measure.energy import find_meter
from edge_devices.energy.external.table import import_csv
from edge_devices.energy.protocol import load_steps, measure
from edge_devices.energy.recorder import Characteristics, Recorder
from edge_devices.energy.report import make_report
from edge_devices.energy.virtual_meters import external_meter, with_external_meter
from edge_devices.errors import MeasurementError, MeterError
from simulated_session import PLAN, SimulatedMachine

SUPPLY_WATTS, LOAD_WATTS = 4.0, 16.0


class Plug(SimulatedMachine):
    """A plug with a clock of its own: a row every `every_s`, late by up to a second, of the mean or of the moment, in steps of 0.1 W."""

    def __init__(self, path, *, every_s: float, means: bool, seed: int) -> None:
        self._path, self._every_s, self._means = path, every_s, means
        self._draw, self._rows = random.Random(seed), ["time (s),Plug power (W)"]
        self._next_s, self._then = self._draw.uniform(0, every_s), (0.0, 0.0)
        super().__init__()

    def _advance(self, to: float) -> None:
        while self._next_s <= to:
            super()._advance(max(self._next_s, self.now))
            seconds, joules = self.now - self._then[0], self.energy - self._then[1]
            watts = (joules / seconds if self._means and seconds else self.watts) + SUPPLY_WATTS
            self._then = self.now, self.energy
            self._rows.append(f"{self.now + 31_000.0:.2f},{watts * (1 + 0.004 * self._draw.gauss(0, 1)):.1f}")
            self._next_s += self._every_s + self._draw.uniform(-0.5, 0.5)
        super()._advance(max(to, self.now))

    def write(self):
        self._path.write_text("\n".join(self._rows) + "\n")
        return self._path


def recorded(plug: Plug, meter, seen=lambda _: None):
    """Measures with a `meter` that is still to be read; idles for a minute before and after, as the recording does."""
    plug.sleep(60.0)
    plug.recorder = Recorder(plug.system, meter)
    plan = replace(PLAN, soak=False, rest_s=5.0)
    log = measure(
        plug.system,
        plug.recorder,
        {"plain": plug.workload(LOAD_WATTS)},
        Characteristics.expected(meter.facts),
        plan,
        plug.load,
        steps_seen=seen,
    )
    plug.sleep(60.0)
    return log


@pytest.mark.parametrize(("every_s", "means"), [(10.0, False), (10.0, True), (30.0, True), (5.0, False)])
def test_a_plug_is_measured_right(tmp_path, every_s, means):
    truth, errors, held = (LOAD_WATTS + SUPPLY_WATTS) * 2 / 50, [], []
    for seed in range(8):
        plug = Plug(tmp_path / "plug.csv", every_s=every_s, means=means, seed=seed)
        meter = external_meter(f"external:{every_s:g}")
        log = recorded(plug, meter)
        figure = make_report(with_external_meter(log, import_csv(plug.write()))).variants[0].joules_per_output_token
        errors.append(figure.value / truth - 1)
        held.append(figure.low <= truth <= figure.high)
    print(f"{every_s:g} s: {fmean(errors):+.2%} {held}")
    assert abs(fmean(errors)) < 0.005
    assert max(map(abs, errors)) < 0.015
    assert sum(held) >= 6


def test_short_steps_are_refused_with_the_way_out(tmp_path):
    plug = Plug(tmp_path / "plug.csv", every_s=30.0, means=True, seed=1)
    log = recorded(plug, external_meter("external"))
    with pytest.raises(
        MeasurementError, match=r"no load step is visible .*a row [23]\d.* s; .*--meter external:10|fit the meter's recording at two"
    ):
        with_external_meter(log, import_csv(plug.write()))


def test_steps_follow_the_meters_rate():
    assert [load for load, _ in load_steps(1.0)] == [3, 5, 8]
    assert [load for load, _ in load_steps(10.0)] == [20, 40, 60]
    assert [load for load, _ in load_steps(30.0)] == [60, 120, 180]
    for refresh_s in (0.5, 4.0, 10.0, 60.0):
        lengths = [length for step in load_steps(refresh_s) for length in step]
        assert len(set(lengths)) == 6
        assert min(lengths) >= 2 * refresh_s


def test_a_line_says_whether_the_steps_show(tmp_path):
    """With a table that grows meanwhile; one of another device shows nothing; without a table it says what to look for."""
    says = []
    for watts in (None, 7.0):
        plug = Plug(tmp_path / "plug.csv", every_s=10.0, means=False, seed=3)
        plug.sleep(200.0)
        meter, _ = find_meter(f"external:{plug.write()}")
        assert meter.facts.refresh_s == pytest.approx(10, abs=0.5)

        def seen(loads, plug=plug, meter=meter, watts=watts):
            path = plug.write()
            if watts is not None:
                path.write_text(
                    "".join(f"{row.partition(',')[0]},{watts + i % 2}\n" if i else f"{row}\n" for i, row in enumerate(plug._rows))
                )
            says.append(meter.steps_sentence(loads))

        recorded(plug, meter, seen)
    assert says[0].startswith(f"the load steps are visible in {tmp_path / 'plug.csv'}, whose clock is +")
    assert says[1].startswith("the load steps are not visible in")
    assert "did not rise with each, stop here" in external_meter("external:10").steps_sentence([(0.0, 20.0), (40.0, 80.0)])


@pytest.mark.parametrize("name", ["external:0", "external:1000", "external:-5", "external:nan", "external:10:"])
def test_rates_that_cannot_be(name):
    if name.endswith(":"):
        with pytest.raises(MeterError):
            external_meter("external:nothing.csv")
        return
    with pytest.raises(MeterError, match="seconds between the meter's rows"):
        external_meter(name)


def test_other_names_are_no_external_meter():
    assert external_meter(None) is None
    assert external_meter("rapl:package") is None
