"""Heat around a measurement: what is written of it, who rests, and which runs do not count. The machine is simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench_records import BASELINE, fixed, header, noisy_runs, run
from device_runs import bench, ran
from edge_bench.measure import command
from edge_bench.measure.conditions import ConditionsWatch, MachineConditions, undisturbed
from edge_bench.measure.energy import energy_figures
from edge_bench.measure.records import Concurrency, CostRecord, ImageCost, KvTypeCost, Record, collect, line_of, read_records
from edge_bench.measure.request import BenchRequest
from edge_bench.report.figures import figures
from edge_devices.errors import MeasurementError
from edge_devices.machine.state import DeviceState
from edge_devices.machine.system import CommandResult, System
from edge_runtime.session.load_options import LoadOptions
from simulated_session import SimulatedMachine, two_variants

FINE, HOT = MachineConditions(temperature_c=50.0), MachineConditions(temperature_c=90.0, bad=("the processor throttled",))


class Board:
    """A Raspberry Pi whose heat rises while it works and falls while it sleeps; above 80 °C it is throttled. `answers`: vcgencmd does."""

    def __init__(self, root: Path, *, degrees: float = 40.0, ambient: float = 30.0, answers: bool = True) -> None:
        self.now, self.degrees, self._ambient, self._answers = 0.0, degrees, ambient, answers
        self.ever = False
        files = {
            "proc/device-tree/model": "Raspberry Pi 5 Model B",
            "sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "performance",
            "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq": "2400000",
            "sys/class/thermal/thermal_zone0/temp": "",
            "proc/meminfo": "SwapTotal: 0 kB\nSwapFree: 0 kB\n",
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        self._zone = root / "sys/class/thermal/thermal_zone0/temp"
        self.system = System(root=root, run=self._run, clock=lambda: self.now, sleep=self.sleep)
        self._show()

    def work(self, seconds: float, degrees_per_second: float = 1.0) -> None:
        self._pass(seconds, degrees_per_second)

    def sleep(self, seconds: float) -> None:
        self._pass(seconds, -1.0)

    def _pass(self, seconds: float, degrees_per_second: float) -> None:
        self.now += seconds
        self.degrees = max(self._ambient, self.degrees + seconds * degrees_per_second)
        self.ever = self.ever or self.degrees >= 80
        self._show()

    def _show(self) -> None:
        self._zone.write_text(f"{round(1000 * self.degrees)}\n")

    def _run(self, arguments: list[str], **_: object) -> CommandResult:
        if arguments[1:] != ["get_throttled"] or not self._answers:
            return CommandResult(code=255 if arguments[1:] == ["get_throttled"] else 127, output=b"Can't open device file: /dev/vcio\n")
        bits = (0x4 if self.degrees >= 80 else 0) | (0x40000 if self.ever else 0)
        return CommandResult(code=0, output=f"throttled={bits:#x}\n".encode())


def test_a_calm_machine_writes_its_clock_and_temperature(tmp_path):
    board = Board(tmp_path)
    watch = ConditionsWatch(board.system)
    assert watch.remarks == []
    board.work(3.0)
    assert watch.next() == MachineConditions(clock_mhz=2400.0, temperature_c=43.0)
    assert watch.next() is None, "nothing passed since"
    assert watch.rested() == ""


def test_a_machine_that_throttles_rests_and_the_next_run_counts(tmp_path):
    board = Board(tmp_path, degrees=78.0)
    watch = ConditionsWatch(board.system)
    board.work(3.0)
    found = watch.next()
    assert found.bad == ("the board throttled (get_throttled 0x40004)",)
    assert found.temperature_c == 81.0
    assert board.degrees < 80, "it has rested"
    board.work(2.0)
    assert watch.next().bad == ()
    assert watch.rested() == "the device was warm and rested once, 5 s in all"


def test_a_machine_that_stays_hot_does_not_rest_for_ever(tmp_path):
    board = Board(tmp_path, degrees=95.0, ambient=85.0)
    watch = ConditionsWatch(board.system)
    for _ in range(20):
        board.work(2.0)
        assert watch.next().bad
    assert "was still warm, so that it did not rest again" in watch.rested()
    assert board.now < 200


def test_what_is_no_longer_known_is_written(tmp_path):
    board = Board(tmp_path)
    watch = ConditionsWatch(board.system)
    board._answers = False
    board.work(2.0)
    (lost,) = watch.next().unknown
    assert "whether the board throttles" in lost


def test_runs_too_short_for_their_own_conditions_have_those_of_the_next():
    runs = [run(BASELINE, repeat=n) for n in range(6)]
    written = [None, HOT, None, FINE, HOT, None]
    good, reasons = undisturbed([replace(each, conditions=its) for each, its in zip(runs, written, strict=True)])
    assert [each.repeat for each in good] == [2, 3, 5]
    assert reasons == {"the processor throttled": 3}


def test_throttled_runs_are_no_part_of_the_figures():
    runs = noisy_runs({"code": 2.0}, repeats=4, seed=1, noise=0.001)
    hot = [replace(each, seconds=9 * each.seconds, conditions=HOT) if each.repeat == 2 else replace(each, conditions=FINE) for each in runs]
    actual, calm = figures(collect([header(), *hot])), figures(collect([header(), *runs]))
    assert actual.overall[0].tokens_per_second == pytest.approx(calm.overall[0].tokens_per_second, rel=0.01)
    assert [row.runs for row in actual.overall] == [3, 3]
    assert actual.records.notes[-1] == "left out: 2 of 8 measurements: the processor throttled"
    assert actual.doubts == ()


def test_where_every_run_of_a_variant_throttled_nothing_is_claimed():
    runs = noisy_runs({"code": 2.0}, repeats=4, seed=1, noise=0.001)
    hot = [replace(each, conditions=HOT if each.variant == fixed(3) else FINE) for each in runs]
    actual = figures(collect([header(), *hot]))
    assert [row.runs for row in actual.overall] == [4, 4], "they are shown"
    assert actual.doubts == ("disturbed: 4 of 8 measurements: the processor throttled",)
    assert actual.overall[1].claim == "disturbed"


def heats(board: Board) -> SimpleNamespace:
    """A benchmark that heats a board."""

    def records():
        yield header()
        for repeat in range(4):
            for variant in (BASELINE, fixed(3)):
                board.work(4.0)
                yield run(variant, repeat=repeat)

    return SimpleNamespace(records=records, energy_workloads=lambda _: {})


@pytest.fixture
def played_on(played):
    """Has runs measure a board that a benchmark heats."""

    def on(board: Board) -> None:
        played.benchmark(lambda *_: heats(board))
        played.machine(board.system)

    return on


def test_a_local_run_asks_for_throttling(tmp_path, played_on):
    """From the board to the file and the tables, by the command."""
    played_on(Board(tmp_path / "board", degrees=70.0))
    result = ran("run", "bundle", "--runs", tmp_path / "run.jsonl")
    records = read_records(tmp_path / "run.jsonl")
    assert [each.conditions.temperature_c for each in records.runs] == [74.0, 78.0, 82.0, 81.0, 80.0, 79.0, 83.0, 82.0]
    assert [bool(each.conditions.bad) for each in records.runs] == [False, False, True, True, True, False, True, True]
    assert "left out: 5 of 8 measurements: the board throttled (get_throttled 0x40004)" in result.stdout
    assert "the device was warm and rested 5 times" in result.stdout


def test_every_kind_of_timed_record_has_its_own_heat(tmp_path, played):
    """Costs of rows, types of cache, clients and images as well as requests; what is too short for its own has none."""
    board = Board(tmp_path / "board")
    timed: list[Record] = [
        run(BASELINE),
        CostRecord(drafter="dense", length=64, verify_seconds=(0.1,), draft_step_seconds=0.01),
        KvTypeCost(
            kv_type="f16", cache_bytes=1, tokens=1, acceptance_rate=0.5, tokens_per_second=1.0, kl_mean=0.0, kl_max=0.0, same_best=1.0
        ),
        Concurrency(
            clients=2,
            variant=BASELINE,
            repeat=0,
            requests=2,
            tokens=8,
            seconds=1.0,
            request_seconds=(1.0, 1.0),
            token_seconds=(0.1,),
            equal=2,
            compared=2,
        ),
        ImageCost(budget=70, repeat=1, rows=64, encode_seconds=0.5, prefill_seconds=0.5),
    ]

    def records():
        yield header()
        for record in timed:
            board.work(4.0)
            yield record
        yield run(BASELINE, repeat=1)

    played.benchmark(lambda *_: SimpleNamespace(records=records))
    played.machine(board.system)
    command.measure_speeds(Path("bundle"), BenchRequest(), LoadOptions(), tmp_path / "run.jsonl")
    written = read_records(tmp_path / "run.jsonl")
    (first, short), others = written.runs, (*written.cost_curves, *written.kv_types, *written.concurrency, *written.images)
    expected = [MachineConditions(clock_mhz=2400.0, temperature_c=degrees) for degrees in (44.0, 48.0, 52.0, 56.0, 60.0)]
    assert [each.conditions for each in (first, *others)] == expected
    assert short.conditions is None


def test_a_machine_that_speeds_have_left_hot_rests_before_its_joules(tmp_path, played_on, monkeypatch):
    """The protocol refuses a board that is throttled now, and minutes of speeds are what throttles it."""
    board, seen = Board(tmp_path / "board", degrees=85.0), []

    def joules(*_, **__):
        seen.append(board.degrees)
        raise MeasurementError("enough")

    played_on(board)
    monkeypatch.setattr(command, "measure_energy", joules)
    with pytest.raises(MeasurementError, match="enough"):
        command.measure_joules(Path("bundle"), BenchRequest(), LoadOptions(), tmp_path / "log", SimulatedMachine(), None, "run")
    assert seen[0] < 80


def test_a_local_run_says_what_it_cannot_know(tmp_path, played_on):
    played_on(Board(tmp_path / "board", answers=False))
    result = bench("run", "bundle", "--runs", tmp_path / "run.jsonl")
    assert "not known: whether the board throttles (vcgencmd get_throttled: Can't open device file: /dev/vcio" in result.stdout
    assert any("whether the board throttles" in text for text in read_records(tmp_path / "run.jsonl").notes)


def test_joules_say_what_was_no_longer_known():
    log = two_variants()
    usual, missing = (DeviceState(unknown=("the temperature", *more)) for more in ((), ("whether the board throttles",)))
    log.runs = [replace(each, before=usual, after=usual) for each in log.runs]
    log.runs[1] = replace(log.runs[1], after=missing)
    warnings = energy_figures(log).warnings
    assert [text for text in warnings if text.startswith("no longer known")] == ["no longer known: whether the board throttles"]


def test_records_of_earlier_versions_have_no_conditions(tmp_path):
    (tmp_path / "run.jsonl").write_text("".join(map(line, [header(), run(BASELINE)])))
    assert read_records(tmp_path / "run.jsonl").runs[0].conditions is None


def line(record: Record) -> str:
    data = json.loads(line_of(record))
    data.pop("conditions", None)
    return json.dumps(data) + "\n"
