"""The protocol in simulated time, its log, and the figures computed from it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from click.testing import CliRunner

from edge_devices.cli import main
from edge_devices.energy.characteristics import Characteristics
from edge_devices.energy.external_meter import import_csv, with_external_meter
from edge_devices.energy.intervals import Interval, combined, mean_interval, of_error, ratio_interval, t_quantile
from edge_devices.energy.live import EnergyWatch
from edge_devices.energy.protocol import BusyLoad, Plan, characterise_meter, measure
from edge_devices.energy.recorder import Recorder
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import RunLog, read_log, write_log
from edge_devices.energy.text import figure_text, report_lines
from edge_devices.energy.virtual_meters import EstimateMeter, PendingExternalMeter, ReplayMeter, virtual_meter
from edge_devices.energy.windows import measure_window, share_out
from edge_devices.errors import DeviceError, MeasurementError, MeterError
from edge_devices.machine.state import DeviceState
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, Scope
from edge_devices.meters.trace import Trace
from simulated_session import IDLE_WATTS, SimulatedMachine

PLAN = Plan(repeats=5, rest_s=3.0, warm_ups=1)


def session(machine: SimulatedMachine, workloads, plan: Plan = PLAN, load_step=None) -> RunLog:
    measured = characterise_meter(machine.system, machine, machine.load)
    machine.recorder = Recorder(machine.system, machine)
    machine.recorder.poll()
    return measure(machine.system, machine.recorder, workloads, measured, plan, load_step)


@pytest.fixture(scope="module")
def log() -> RunLog:
    """Plain decoding at 12 W, 2 s for 50 tokens; drafting at 14 W, 1 s."""
    machine = SimulatedMachine()
    workloads = {"plain": machine.workload(12.0), "drafted": machine.workload(14.0, decode_s=1.0)}
    return session(machine, workloads, load_step=machine.load)


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


def test_repeats_alternate(log):
    assert [r.variant for r in log.runs[:4]] == ["plain", "drafted", "drafted", "plain"]
    assert [r.repeat for r in log.runs[:4]] == [0, 0, 1, 1]


def test_figures_of_a_sampler():
    machine = SimulatedMachine(Kind.SAMPLER, refresh_s=0.2)
    report = make_report(session(machine, {"plain": machine.workload(12.0)}))
    assert report.variants[0].joules_per_output_token.value == pytest.approx(0.48, rel=1e-3)


def test_everything_is_recomputed_from_the_log(log, tmp_path):
    path = tmp_path / "run.jsonl"
    write_log(path, log)
    assert make_report(read_log(path), baseline="plain").to_json() == make_report(log, baseline="plain").to_json()
    result = CliRunner().invoke(main, ["energy", str(path), "--baseline", "plain", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["variants"][1]["saves_energy"] is True
    text = CliRunner().invoke(main, ["energy", str(path), "--baseline", "plain"]).output
    assert "scope package" in text
    assert "saves energy" in text
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}\n",
        "no json\n",
        '{"kind": "header", "schema": 9, "meter": {}, "environment": {}}\n',
        '{"kind": "sample", "t": 0, "v": 0}\n',
        "[1]\n",
        '{"kind": "header", "schema": 1, "meter": {"name": "x", "kind": "counter", "scope": "nowhere"}, "environment": {}}\n',
    ],
)
def test_damaged_logs_are_refused(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(MeasurementError, match=r"run\.jsonl"):
        read_log(path)
    result = CliRunner().invoke(main, ["energy", str(path)])
    assert result.exit_code == 1
    assert "Traceback" not in result.output


def test_logs_with_figures_that_are_none_are_refused(tmp_path, log):
    path = tmp_path / "run.jsonl"
    write_log(path, log)
    lines = path.read_text().splitlines()
    run = next(line for line in lines if '"kind": "run"' in line)
    strange = [
        run.replace('"phases": {}', '"phases": {"draft": "x"}'),
        run.replace('"throttled": null', '"throttled": "x"'),
        run.replace('"expected_s": null', '"expected_s": "x"'),
    ]
    assert run not in strange
    for bad in ('{"kind": "sample", "t": 0, "v": NaN}', '{"kind": "sample", "t": -1e9, "v": 0}', *strange):
        path.write_text("\n".join([*lines, bad]))
        with pytest.raises(MeasurementError):
            read_log(path)


def test_a_log_that_cannot_be_written_leaves_nothing(log, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="cannot be written"):
        write_log(tmp_path / "file" / "run.jsonl", log)


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


def test_a_meter_that_failed_spoils_the_run(log):
    start_s = log.runs[0].start_s
    plain = make_report(replace(log, faults=[(start_s + 1, "the battery is gone")])).variants[0]
    assert plain.refused == ["repeat 0: the meter failed: the battery is gone"]


def test_no_win_is_claimed_when_the_interval_reaches_one():
    machine = SimulatedMachine()
    report = make_report(session(machine, {"plain": machine.workload(12.0), "same": machine.workload(12.0)}), baseline="plain")
    assert report.variants[1].saves_energy is False
    assert "no win claimed" in "\n".join(report_lines(report))


def test_net_figures_lost_in_noise_are_not_shown():
    machine = SimulatedMachine()
    log = session(machine, {"idle": machine.workload(IDLE_WATTS)})
    assert make_report(log).variants[0].net_joules_per_output_token is None


def test_phases_by_calibration_and_by_time():
    machine = SimulatedMachine()
    work = machine.workload(10.0, prefill_s=1.0, prefill_watts=20.0, decode_s=2.0)
    plain = make_report(session(machine, {"plain": work})).variants[0]
    assert plain.phase_method == "time_proportional"
    loops = {"calibrate:prefill": machine.workload(20.0, tokens=0), "calibrate:decode": machine.workload(10.0)}
    report = make_report(session(machine, {"plain": work, **loops}))
    assert report.to_json()["phase_watts"] == pytest.approx({"prefill": 20.0, "decode": 10.0}, rel=1e-3)
    plain = report.variants[0]
    assert plain.phase_method == "calibrated"
    assert plain.closes
    assert plain.joules_per_output_token.value == pytest.approx(10.0 * 2 / 50, rel=1e-3)
    assert plain.joules_per_prompt_token.value == pytest.approx(20.0 / 100, rel=1e-3)


def test_shares_that_do_not_close_are_flagged():
    assert not share_out(100.0, {"draft": 1.0, "verify": 1.0}, {"draft": (50.0, 0.0), "verify": (80.0, 0.0)}).closes
    assert share_out(100.0, {"draft": 1.0, "verify": 1.0}, {"draft": (50.0, 0.0), "verify": (80.0, 20.0)}).closes
    assert share_out(100.0, {"draft": 1.0}, {}).method == "measured"


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

    log = session(machine, {"plain": warmer}, replace(PLAN, repeats=2))
    assert any("did not come to rest" in text for text in log.warnings)


def test_an_external_meter_finds_its_own_clock(tmp_path):
    """Another clock, another meter in the line: 3 W more at all times, 20 readings a second."""
    rows = ["time_s;power_W"]

    class Tap(SimulatedMachine):
        def _advance(self, to: float) -> None:
            t = math.ceil(self.now * 20) / 20
            while t < to:
                rows.append(f"{t + 5000.25:.3f};{self.watts + 3 + 0.001 * (len(rows) % 3 - 1):.4f}")
                t += 0.05
            super()._advance(to)

    tap = Tap()
    recorded = session(tap, {"plain": tap.workload(12.0)}, replace(PLAN, soak=False), tap.load)
    (tmp_path / "meter.csv").write_text("\n".join(rows))
    table = import_csv(tmp_path / "meter.csv")
    seen = with_external_meter(recorded, table)
    assert seen.trace.times[0] - table.times[0] == pytest.approx(-5000.25, abs=0.06)
    report = make_report(seen)
    assert report.scope == Scope.EXTERNAL
    assert report.variants[0].joules_per_output_token.value == pytest.approx(15.0 * 2 / 50, rel=2e-3)


def test_an_external_meter_alone_is_measured_with_and_read_afterwards(tmp_path):
    """No meter of its own, as on a Raspberry Pi 4: the log has marks, the table has the readings."""
    rows = ["time_s;power_W"]

    class Tap(SimulatedMachine):
        def _advance(self, to: float) -> None:
            t = math.ceil(self.now * 20) / 20
            while t < to:
                rows.append(f"{t - 77:.3f};{self.watts + 3 + 0.001 * (len(rows) % 3 - 1):.4f}")
                t += 0.05
            super()._advance(to)

    tap, meter = Tap(), PendingExternalMeter()
    tap.recorder = Recorder(tap.system, meter)
    waiting = measure(tap.system, tap.recorder, {"plain": tap.workload(12.0)}, Characteristics.expected(meter.facts), PLAN, tap.load)
    write_log(tmp_path / "energy.jsonl", waiting)
    with pytest.raises(MeasurementError, match="give that meter's table with --external"):
        make_report(read_log(tmp_path / "energy.jsonl"))
    (tmp_path / "meter.csv").write_text("\n".join(rows))
    result = CliRunner().invoke(main, ["energy", str(tmp_path / "energy.jsonl"), "--external", str(tmp_path / "meter.csv"), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["scope"] == "external_dc"
    assert report["variants"][0]["joules_per_output_token"]["value"] == pytest.approx(15.0 * 2 / 50, rel=2e-3)


def test_meters_made_from_what_a_person_says(log, tmp_path):
    write_log(tmp_path / "run.jsonl", log)
    assert virtual_meter(System(), f"replay:{tmp_path / 'run.jsonl'}").facts.name == "replay:simulated"
    assert virtual_meter(System(), "estimate:2.5,4").facts.is_estimate
    assert virtual_meter(System(), "rapl:package") is None
    assert virtual_meter(System(), None) is None
    for bad in ("estimate", "estimate:2", "estimate:a,b", "estimate:-1,2"):
        with pytest.raises(MeterError, match="power model"):
            virtual_meter(System(), bad)
    with pytest.raises(DeviceError, match="cannot be read"):
        virtual_meter(System(), f"replay:{tmp_path / 'nothing'}")


def test_replay_repeats_a_recording(log):
    now = [100.0]
    meter = ReplayMeter(System(clock=lambda: now[0]), log.trace)
    assert meter.facts.name == "replay:simulated"
    now[0] = 100.0 + log.trace.times[50] - log.trace.times[0] + 1e-9
    assert meter.read().value == log.trace.values[50]
    now[0] = 1e9
    with pytest.raises(MeterError, match="recording ends"):
        meter.read()
    with pytest.raises(MeterError, match="no samples"):
        ReplayMeter(System(), Trace(facts=log.facts))


def test_recorder_runs_beside_the_work_and_keeps_faults():
    class Flaky:
        facts = SimulatedMachine().facts
        reads = 0

        def read(self):
            self.reads += 1
            if self.reads == 2:
                raise MeterError("gone")
            return SimulatedMachine().read()

    recorder = Recorder(System(), Flaky(), interval_s=0.005)
    with recorder, BusyLoad():
        System().sleep(0.1)
    assert [reason for _, reason in recorder.faults] == ["gone"]
    assert len(recorder.trace.times) >= 3
    assert recorder.reads == len(recorder.trace.times) + 1


def test_windows_outside_the_recording_are_refused(log):
    characteristics = log.characteristics
    with pytest.raises(MeasurementError, match="no length"):
        measure_window(log.trace, 5.0, 5.0, characteristics)
    with pytest.raises(MeasurementError, match="0 new values"):
        measure_window(log.trace, 1e6, 1e6 + 10, characteristics)


def test_student_t():
    for freedom, value in [(1, 12.7062), (2, 4.3027), (8, 2.3060), (30, 2.0423), (math.inf, 1.9600)]:
        assert t_quantile(freedom) == pytest.approx(value, abs=1e-4)
    assert t_quantile(0) == math.inf


def test_mean_interval_by_hand():
    interval = mean_interval([1.0, 2.0, 3.0], [0, 1, 2])
    assert (interval.value, interval.freedom) == (2.0, 2)
    assert interval.half == pytest.approx(4.3027 / math.sqrt(3), abs=1e-3)
    drifting = mean_interval([1.0, 2.1, 2.9, 4.0, 5.0], [0, 1, 2, 3, 4])
    assert drifting.value == pytest.approx(3.0)
    assert drifting.half < 0.15  # the drift is not scatter
    assert mean_interval([1.0, 1.0], [0, 1], resolution=0.1).half > 0.1
    with pytest.raises(MeasurementError, match="1 repeat"):
        mean_interval([1.0], [0])


def test_ratio_interval_by_hand():
    interval = ratio_interval([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.5, 0.5, 0.5))
    with pytest.raises(MeasurementError, match="no pairs"):
        ratio_interval([1.0], [1.0])


def test_errors_combine():
    assert combined([(3.0, 5), (4.0, 5)])[0] == 5.0
    assert combined([(3.0, 5)]) == pytest.approx((3.0, 5.0))
    assert combined([(0.0, 7)]) == (0.0, 7)


def test_no_more_digits_than_the_interval_supports():
    assert figure_text(of_error(0.48123, 0.0005, math.inf, 10)) == "0.48123 [0.48025, 0.48221] (n=10)"
    assert figure_text(of_error(0.5, 0.01, math.inf, 1)).endswith("(n=1: the reading's error alone, not how runs differ)")
    assert figure_text(of_error(123.456, 5.0, math.inf, 10)) == "123.5 [113.7, 133.3] (n=10)"
    assert figure_text(Interval(value=1.0, low=-math.inf, high=math.inf, n=1, error=math.inf, freedom=1)) == "1 (n=1, no interval)"


def watched(machine: SimulatedMachine, seconds: float, tokens: int):
    watch = EnergyWatch(machine.system, machine)
    with watch:
        machine.watts = 10.0
        machine.sleep(seconds)
    return watch.energy(tokens)


def test_energy_of_one_run():
    found = watched(SimulatedMachine(), 4.0, 100)
    assert found.joules_per_token.value == pytest.approx(0.4, rel=1e-3)
    assert "J/token, scope package" in found.sentence()
    assert found.to_json()["joules"]["value"] == pytest.approx(40.0, rel=1e-3)


def test_energy_of_one_run_that_cannot_be_told():
    assert "too short" in watched(SimulatedMachine(refresh_s=1.0), 4.0, 100).sentence()
    assert "no token" in watched(SimulatedMachine(), 4.0, 0).sentence()
    machine = SimulatedMachine()
    watch = EnergyWatch(machine.system, None)
    with watch:
        pass
    assert watch.energy(5).sentence() == "no energy meter on this machine"
    assert watch.energy(5).to_json()["meter"] is None


def test_estimates_say_so_in_every_output(log):
    meter = EstimateMeter(System(), idle_watts=5.0, core_watts=10.0)
    estimate = replace(log, facts=meter.facts, trace=Trace(facts=meter.facts, times=log.trace.times, values=log.trace.values))
    report = make_report(estimate)
    assert report.to_json()["estimate"] is True
    assert report_lines(report)[0].startswith("ESTIMATE, nothing was measured")
    watch = EnergyWatch(System(), meter)
    with watch:
        System().sleep(0.15)
    assert watch.energy(10).sentence().startswith("ESTIMATE")
