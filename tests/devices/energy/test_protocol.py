"""The protocol in simulated time, its log, and the figures computed from it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from edge_bench.cli.main import main
from edge_bench.report.tables import energy_tables
from edge_devices.energy import protocol
from edge_devices.energy.external.table import import_csv
from edge_devices.energy.protocol import PhaseLoop, Plan, busy_load, characterise_meter, measure, planned_seconds
from edge_devices.energy.recorder import Characteristics, Recorder
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import RunLog, read_log, write_log
from edge_devices.energy.virtual_meters import PendingExternalMeter, with_external_meter
from edge_devices.energy.windows import PhaseWatts, share_out
from edge_devices.errors import MeasurementError, MeterError
from edge_devices.machine.processors import MachineLoad
from edge_devices.machine.state import DeviceState
from edge_devices.machine.system import System
from edge_devices.meters.base import Scope
from polling import wait
from simulated_session import IDLE_WATTS, PLAN, SimulatedMachine, run_protocol


def test_figures_of_a_counter(log):
    report = make_report(log, baseline="plain")
    plain, drafted = report.variants
    assert plain.joules_per_output_token.value == pytest.approx(12.0 * 2 / 50, rel=1e-3)
    assert plain.net_joules_per_output_token.value == pytest.approx((12.0 - IDLE_WATTS) * 2 / 50, rel=1e-3)
    assert plain.joules_per_request.value == pytest.approx(24.0, rel=1e-3)
    assert plain.watts.value == pytest.approx(12.0, rel=1e-3)
    assert plain.tokens_per_second == pytest.approx(25.0, rel=1e-2)
    assert drafted.ratio_to_baseline.value == pytest.approx(14 / 24, rel=1e-3)
    assert drafted.saves_energy is True
    assert plain.ratio_to_baseline is None
    with pytest.raises(MeasurementError, match="no variant 'lookup' to compare with; it has plain, drafted"):
        make_report(log, baseline="lookup")
    assert log.environment["processors"] >= 1
    assert report.idle.watts == pytest.approx(IDLE_WATTS, rel=1e-3)


def changed(log: RunLog, **fields) -> RunLog:
    """The log with the first run changed."""
    return replace(log, runs=[replace(log.runs[0], **fields), *log.runs[1:]])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"expected_s": 1.0}, "took"),
        ({"after": DeviceState(throttled=0x50005)}, "throttled"),
        ({"after": DeviceState(charger="AC")}, "power source changed"),
        ({"before": DeviceState(swap_used=0), "after": DeviceState(swap_used=1_000_000)}, "swapped"),
        ({"before": DeviceState(frequency_caps=(2400000,)), "after": DeviceState(frequency_caps=(1500000,))}, "cap changed"),
    ],
)
def test_disturbed_runs_do_not_count(log, fields, says):
    plain = make_report(changed(log, **fields)).variants[0]
    assert plain.n == 4
    assert says in plain.refused[0]


def test_short_runs_do_not_count(log):
    first = log.runs[0]
    plain = make_report(changed(log, end_s=first.start_s + 5)).variants[0]
    assert "too short: 5 s" in plain.refused[0]
    with pytest.raises(MeasurementError, match="no run counts: repeat 0: too short"):
        make_report(replace(log, runs=[replace(first, end_s=first.start_s + 5)]))


def test_no_win_is_claimed_when_the_interval_reaches_one():
    machine = SimulatedMachine()
    report = make_report(run_protocol(machine, {"plain": machine.workload(12.0), "same": machine.workload(12.0)}), baseline="plain")
    assert report.variants[1].saves_energy is False
    assert energy_tables(report)[1].rows[1][-3] == "no win claimed"
    assert "saves energy" not in energy_tables(report)[0].note


def test_net_figures_lost_in_noise_are_not_shown():
    machine = SimulatedMachine()
    log = run_protocol(machine, {"idle": machine.workload(IDLE_WATTS)})
    assert make_report(log).variants[0].net_joules_per_output_token is None


def test_phases_by_calibration_and_by_time():
    machine = SimulatedMachine()
    work = machine.workload(10.0, prefill_s=1.0, prefill_watts=20.0, decode_s=2.0)
    plain = make_report(run_protocol(machine, {"plain": work})).variants[0]
    assert plain.phase_method == "time_proportional"
    loops = {"calibrate:prefill": machine.workload(20.0, tokens=0), "calibrate:decode": machine.workload(10.0)}
    report = make_report(run_protocol(machine, {"plain": work, **loops}))
    assert report.to_json()["phase_watts"] == pytest.approx({"prefill": 20.0, "decode": 10.0}, rel=1e-3)
    plain = report.variants[0]
    assert plain.phase_method == "calibrated"
    assert plain.closes
    assert plain.joules_per_output_token.value == pytest.approx(10.0 * 2 / 50, rel=1e-3)
    assert plain.joules_per_prompt_token.value == pytest.approx(20.0 / 100, rel=1e-3)
    assert plain.prompt_tokens == 100


def test_phases_share_what_the_window_measured():
    powers = {"draft": PhaseWatts(watts=50.0), "verify": PhaseWatts(watts=150.0)}
    shares = share_out(100.0, {"draft": 1.0, "verify": 1.0}, powers)
    assert shares.joules == pytest.approx({"draft": 25.0, "verify": 75.0})
    assert not shares.closes
    assert shares.closure == pytest.approx(1.0)
    uncertain = share_out(100.0, {"draft": 1.0, "verify": 1.0}, {**powers, "verify": PhaseWatts(watts=150.0, error=60.0)})
    assert uncertain.closes
    assert share_out(100.0, {"draft": 1.0}, {}).method == "measured"


def test_time_in_no_phase_takes_between_idle_and_the_mean():
    shares = share_out(10.0, {"prefill": 1.0, "verify": 8.0}, {}, window_s=10.0, idle_watts=0.5)
    assert shares.joules["other"] == pytest.approx(10 * 0.75 / 9.75)
    assert sum(shares.joules.values()) == pytest.approx(10.0)
    assert shares.sensitivity({"verify"})["verify"] == pytest.approx(1 - shares.joules["verify"] / 10)


def test_what_prepares_a_loop_is_outside_its_window():
    machine = SimulatedMachine()

    def prefill() -> None:
        machine.workload(30.0, decode_s=5.0)()

    report = make_report(
        run_protocol(machine, {"plain": machine.workload(10.0), "calibrate:draft": PhaseLoop(prefill, machine.workload(7.0))})
    )
    assert report.phase_watts == pytest.approx({"draft": 7.0}, rel=1e-3)


def test_a_throttled_board_is_refused():
    machine = SimulatedMachine(files={"proc/device-tree/model": "Raspberry Pi 5"})
    machine.recording.commands["vcgencmd get_throttled"] = (0, "throttled=0x4")
    machine.recorder = Recorder(machine.system, machine)
    fast = Characteristics(refresh_s=0.001, longest_gap_s=0.001, lag_s=0.0, zero_rate=0.0, read_s=0.0)
    with pytest.raises(MeasurementError, match="throttled now"):
        measure(machine.system, machine.recorder, {}, fast)


def test_a_machine_that_never_settles_is_noted():
    machine = SimulatedMachine()
    heat = iter(range(10_000))

    def warmer():
        return machine.workload(12.0 * 1.01 ** next(heat))()

    limited = run_protocol(machine, {"plain": warmer}, replace(PLAN, repeats=2, max_soak_s=60.0))
    assert limited.runs[0].start_s < 200, "who names the minutes waits no longer"
    log = run_protocol(machine, {"plain": warmer}, replace(PLAN, repeats=2))
    assert log.runs[0].start_s - limited.runs[-1].end_s > 600
    for each, limit_s in ((limited, 60), (log, 600)):
        seconds = next(int(text.split()[-2]) for text in each.warnings if "were not steady" in text)
        assert limit_s <= seconds < limit_s + 40


class Tapped(SimulatedMachine):
    """Another meter in the line, with a clock of its own: 3 W more at all times, 20 readings a second."""

    def __init__(self, offset_s: float) -> None:
        self.rows, self._offset_s = ["time_s;power_W"], offset_s
        super().__init__()

    def _advance(self, to: float) -> None:
        t = math.ceil(self.now * 20) / 20
        while t < to:
            self.rows.append(f"{t + self._offset_s:.3f};{self.watts + 3 + 0.001 * (len(self.rows) % 3 - 1):.4f}")
            t += 0.05
        super()._advance(to)


def test_an_external_meter_finds_its_own_clock(tmp_path):
    tap = Tapped(5000.25)
    recorded = run_protocol(tap, {"plain": tap.workload(12.0)}, replace(PLAN, soak=False), tap.load)
    (tmp_path / "meter.csv").write_text("\n".join(tap.rows))
    table = import_csv(tmp_path / "meter.csv")
    observed = with_external_meter(recorded, table)
    assert observed.trace.times[0] - table.times[0] == pytest.approx(-5000.25, abs=0.06)
    report = make_report(observed)
    assert report.scope == Scope.EXTERNAL
    assert "the joules are from meter.csv, column 'power_W'" in report.warnings
    assert report.variants[0].joules_per_output_token.value == pytest.approx(15.0 * 2 / 50, rel=2e-3)


def test_what_was_made_of_a_table_stands_beside_its_figures(tmp_path):
    """A shunt the other way round, and a logger that lost a row in forty: the report says both."""
    tap = Tapped(-12.5)
    recorded = run_protocol(tap, {"plain": tap.workload(12.0)}, replace(PLAN, soak=False), tap.load)
    lost = [row if at % 40 else f"{row.partition(';')[0]};" for at, row in enumerate(tap.rows[1:], start=1)]
    (tmp_path / "meter.csv").write_text("\n".join([tap.rows[0], *(row.replace(";", ";-") for row in lost)]))
    report = make_report(with_external_meter(recorded, import_csv(tmp_path / "meter.csv")))
    assert any("is negative throughout" in warning for warning in report.warnings)
    assert any("rows have no figure and were left out: row 41 holds '-'" in warning for warning in report.warnings)
    assert report.variants[0].joules_per_output_token.value == pytest.approx(15.0 * 2 / 50, rel=2e-3)


def test_an_external_meter_alone_is_measured_with_and_read_afterwards(tmp_path):
    """No meter of its own, as on a Raspberry Pi 4: the log has marks, the table has the readings."""
    tap, meter = Tapped(-77.0), PendingExternalMeter()
    tap.recorder = Recorder(tap.system, meter)
    waiting = measure(tap.system, tap.recorder, {"plain": tap.workload(12.0)}, Characteristics.expected(meter.facts), PLAN, tap.load)
    write_log(tmp_path / "energy.jsonl", waiting)
    with pytest.raises(MeasurementError, match="give that meter's table with --external"):
        make_report(read_log(tmp_path / "energy.jsonl"))
    (tmp_path / "meter.csv").write_text("\n".join(tap.rows))
    result = CliRunner().invoke(main, ["report", str(tmp_path / "energy.jsonl"), "--external", str(tmp_path / "meter.csv"), "--json", "-"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["scope"] == "external_dc"
    assert report["variants"][0]["joules_per_output_token"]["value"] == pytest.approx(15.0 * 2 / 50, rel=2e-3)


def test_recorder_runs_beside_the_work_and_keeps_faults():
    class Flaky:
        facts = SimulatedMachine().facts
        reads = 0

        def read(self):
            self.reads += 1
            if self.reads == 2:
                raise MeterError("gone")
            return SimulatedMachine().read()

    meter = Flaky()
    recorder = Recorder(System(), meter, interval_s=0.005)
    with recorder, busy_load():
        assert wait(lambda: meter.reads > 4)
    assert [reason for _, reason in recorder.faults] == ["gone"]
    assert recorder.reads == len(recorder.trace.times) + 1


def test_every_step_is_reported_with_its_length_and_the_share_that_is_over():
    machine, steps = SimulatedMachine(), list[tuple[float, str]]()
    measured = characterise_meter(machine.system, machine, machine.load, lambda share, step="": steps.append((share, step)))
    assert [share for share, _ in steps] == [pytest.approx(i / 6) for i in range(6)]
    assert "how fast the meter is" in steps[0][1]
    steps.clear()
    machine.recorder = Recorder(machine.system, machine)
    machine.recorder.poll()
    workloads = {"plain": machine.workload(12.0), "drafted": machine.workload(14.0)}
    plan = Plan(repeats=2, rest_s=1.0)
    measure(machine.system, machine.recorder, workloads, measured, plan, report=lambda share, step="": steps.append((share, step)))
    shares, names = zip(*steps, strict=True)
    assert list(shares) == sorted(shares)
    assert shares[-1] < 1
    window_s = (
        planned_seconds(Plan(repeats=1, soak=False, rest_s=0.0), {"one": workloads["plain"]}, measured) - 2 * measured.shortest_idle_s
    )
    assert [name for name in names if "warm-up" not in name] == [
        f"idle, {measured.shortest_idle_s:.0f} s",
        *(f"{name}, {window_s:.0f} s, repeat 1 of 2" for name in ("plain", "drafted")),
        *(f"{name}, {window_s:.0f} s, repeat 2 of 2" for name in ("drafted", "plain")),
        f"idle again, {measured.shortest_idle_s:.0f} s",
    ]


def test_a_machine_that_is_busy_before_the_first_run_is_in_the_log(monkeypatch):
    busy = MachineLoad(others=0.02, waiting=0.4, seconds=30.0)
    monkeypatch.setattr(protocol, "LoadWatch", lambda: SimpleNamespace(load=lambda: busy))
    machine = SimulatedMachine()
    log = run_protocol(machine, {"plain": machine.workload(12.0)})
    assert any("before the first run, other programs used 2% of the processors and programs waited" in text for text in log.warnings)
    assert log.others == [busy]
