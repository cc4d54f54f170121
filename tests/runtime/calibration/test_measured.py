"""What is measured on first use stands once: known, busy, measured, kept, provisional; and a file that several processes write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_devices.files.user_cache import CACHE_VARIABLE, MAX_CACHE_BYTES, MAX_ENTRIES, cache_put, read_entries
from edge_devices.machine.processors import MachineLoad
from edge_devices.waiting import Report
from edge_runtime.backends import selection
from edge_runtime.backends.llama import crash_probe
from edge_runtime.calibration import measured
from edge_runtime.calibration.measured import RETRY_SECONDS, TIMES, Known, MeasuredValue, cache_file, without_repeats

BUSY = MachineLoad(others=0.5, seconds=2.0)
QUIET = MachineLoad(others=0.0, seconds=2.0, waiting=0.05)
WAITING = MachineLoad(others=0.06, seconds=2.0, waiting=0.8)
UNKNOWN = MachineLoad(others=None, seconds=2.0)
PROVISIONAL = "This machine is busy: what is measured now is provisional and will be measured again later ("


@dataclass(frozen=True)
class Figure:
    """A value that is never negative."""

    seconds: float

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError(self.seconds)


FIGURES = MeasuredValue(kind="figures", value_class=Figure, doing="measuring a figure")


class Machine:
    """A folder, a load before and during each measurement, a clock, and how often was measured."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.now, self.before, self.meanwhile = 1e9, QUIET, QUIET
        self.count, self.notes = 0, list[str]()
        patch.setenv(CACHE_VARIABLE, str(folder))
        patch.setattr(measured, "load_now", lambda: self.before)
        for module in (measured, crash_probe):
            patch.setattr(module, "LoadWatch", lambda: SimpleNamespace(load=lambda: self.meanwhile))
        patch.setattr(measured, "time", SimpleNamespace(time=lambda: self.now))

    def start(self, before: MachineLoad = QUIET, meanwhile: MachineLoad = QUIET, seconds: float = 1.0) -> tuple[float, int]:
        """One use of FIGURES, a second later; returns the value and how often was measured so far. Combined is the sum."""
        self.now += 1
        self.before, self.meanwhile = before, meanwhile

        def measure(_: Report, known: Known[Figure] | None) -> Figure:
            self.count += 1
            return Figure(seconds + (known.value.seconds if known else 0.0))

        return FIGURES.known_or_measured("key", measure, self.notes.append).seconds, self.count


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_the_first_quiet_uses_measure_and_what_they_gave_is_combined(machine: Machine) -> None:
    assert [machine.start() for _ in range(TIMES + 2)] == [(1.0, 1), (2.0, 2), (3.0, 3), (3.0, 3), (3.0, 3)]
    assert machine.notes == []
    assert list(read_entries(cache_file())) == ["figures key"]


@pytest.mark.parametrize(("before", "meanwhile"), [(BUSY, QUIET), (QUIET, BUSY), (QUIET, WAITING)])
def test_what_a_busy_machine_gave_is_used_at_once_and_by_the_next_starts(machine: Machine, before, meanwhile) -> None:
    """No two starts in a row measure because of load, however it comes and goes."""
    assert machine.start(before, meanwhile, 9.0) == (9.0, 1)
    (note,) = machine.notes
    assert note.startswith(PROVISIONAL)
    assert [machine.start(*load) for load in ((QUIET, QUIET), (BUSY, BUSY), (QUIET, BUSY))] == [(9.0, 1)] * 3
    machine.now += RETRY_SECONDS
    assert machine.start(BUSY) == (9.0, 1), "still busy"
    assert machine.start(QUIET, BUSY, 8.0) == (8.0, 2), "disturbed again, so provisional again"
    assert machine.start() == (8.0, 2)
    machine.now += RETRY_SECONDS
    assert machine.start() == (1.0, 3), "nothing of a provisional value is left"
    assert machine.start() == (2.0, 4)


def test_a_clock_that_went_back_keeps_nothing_provisional_for_years(machine: Machine) -> None:
    machine.start(BUSY, BUSY, 9.0)
    machine.now -= 1e8
    assert machine.start() == (1.0, 2)


def test_a_load_that_is_not_known_disturbs_nothing(machine: Machine) -> None:
    assert [machine.start(UNKNOWN, UNKNOWN) for _ in range(TIMES + 1)] == [(1.0, 1), (2.0, 2), (3.0, 3), (3.0, 3)]


def test_a_sound_value_outlasts_load(machine: Machine) -> None:
    machine.start()
    assert machine.start(BUSY) == (1.0, 1), "what is known is not measured while the machine is busy"
    assert machine.start(QUIET, BUSY, 9.0) == (10.0, 2), "used once"
    assert machine.start(BUSY) == (1.0, 2)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100000,
        b" " * (2 << 20),
        b'{"figures key": 5}',
        b'{"figures key": {"value": {"seconds": 7.0}}}',
        *(
            json.dumps({"figures key": {"value": {"seconds": 7.0}, "times": 3, "measured_at": 1e9, "provisional": False} | change}).encode()
            for change in ({"value": {"seconds": -1.0}}, {"value": {"seconds": "7"}}, {"value": None}, {"times": 0}, {"times": 2.0})
        ),
        b'{"figures key": {"value": {"seconds": NaN}, "times": 3, "measured_at": 1e9, "provisional": false}}',
        b'{"other key": {"value": {"seconds": 7.0}, "times": 3, "measured_at": 1e9, "provisional": false}}',
    ],
)
def test_a_damaged_entry_is_measured_again(machine: Machine, damage: bytes) -> None:
    cache_file().write_bytes(damage)
    assert list(FIGURES.kept()) == []
    assert machine.start() == (1.0, 1)
    assert [figure for _, figure in FIGURES.kept()] == [Figure(1.0)]
    assert [path.name for path in cache_file().parent.iterdir()] == ["measured.json"]


def test_a_value_that_does_not_fit_is_measured_again(machine: Machine) -> None:
    machine.start()
    result = FIGURES.known_or_measured("key", lambda *_: Figure(5.0), machine.notes.append, fits=lambda known: known.seconds > 1)
    assert result == Figure(5.0)


def test_a_file_that_cannot_be_written_is_only_noted(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert machine.start() == (1.0, 1)
    assert machine.start() == (1.0, 2)
    assert all("could not be kept in" in note and CACHE_VARIABLE in note for note in machine.notes)


def test_the_wait_has_a_title_and_an_end(machine: Machine) -> None:
    shown: list[object] = []

    @contextmanager
    def wait(title: str) -> Iterator[Callable[..., None]]:
        shown.append(title)
        yield lambda share, *_: shown.append(share)
        shown.append("end")

    def measure(report: Report, _: object) -> Figure:
        report(0.5)
        return Figure(1.0)

    FIGURES.known_or_measured("key", measure, machine.notes.append, waiting=wait)
    assert shown == ["measuring a figure", 0.5, "end"]


def test_a_sentence_comes_once_though_its_figures_change() -> None:
    output: list[str] = []
    notify = without_repeats(output.append)
    for sentence in ("It is busy (50% used).", "First use.", "It is busy (60% used).", "First use.", "It is not (70% used)."):
        notify(sentence)
    assert output == ["It is busy (50% used).", "First use.", "It is not (70% used)."]


def test_the_oldest_entries_are_forgotten_and_the_file_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "new" / "measured.json"
    for number in range(MAX_ENTRIES + 5):
        cache_put(path, f"n{number}", number)
    assert list(read_entries(path)) == [f"n{number}" for number in range(5, MAX_ENTRIES + 5)]
    for number in range(4):
        cache_put(path, f"large {number}", "x" * (MAX_CACHE_BYTES // 3))
    assert path.stat().st_size <= MAX_CACHE_BYTES
    assert list(read_entries(path))[-1] == "large 3"


def test_processes_that_write_at_once_lose_no_entry(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from edge_devices.files.user_cache import cache_put\n"
        "sys.stdin.readline()\n"
        "for n in range(25): assert cache_put(Path(sys.argv[1]), f'{sys.argv[2]} {n}', n) is None"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / "measured.json")]
    children = [subprocess.Popen([*command, name], stdin=subprocess.PIPE, env=environment, text=True) for name in "ab"]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [child.wait(300) for child in children] == [0, 0]
    for child in children:
        child.stdin.close()  # type: ignore[union-attr]
    assert set(read_entries(tmp_path / "measured.json")) == {f"{name} {n}" for name in "ab" for n in range(25)}


def test_the_backend_that_was_faster_on_a_busy_machine_is_provisional(machine: Machine) -> None:
    for meanwhile, rates in ((BUSY, {"llama": 2.0, "onnx": 1.0}), (QUIET, {"llama": 1.0, "onnx": 2.0})):
        machine.meanwhile = meanwhile
        chosen = selection.measured_rates("pair", ["a"], ["llama", "onnx"], rates.__getitem__, machine.notes.append)
        assert chosen.rates == rates
        machine.now += 2 * RETRY_SECONDS
    assert any(note.startswith(PROVISIONAL) for note in machine.notes)
    assert [choice.rates for choice in selection.cached_choices()] == [{"llama": 1.0, "onnx": 2.0}]


@pytest.mark.parametrize("load", [BUSY, QUIET])
def test_a_late_child_proves_something_on_a_quiet_machine_only(load: MachineLoad, machine: Machine, monkeypatch) -> None:
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    machine.meanwhile = load
    ends = iter([("gave no answer in 120 seconds", True), (None, False), (None, False)])
    monkeypatch.setattr(crash_probe, "_run", lambda *_: next(ends))
    monkeypatch.setattr(crash_probe, "weight_types", lambda _: "q4_0")

    def probed() -> bool:
        return crash_probe.probe_load_options(Path("target.gguf"), None, ["Q4_0"], notify=machine.notes.append).use_extra_bufts

    assert not probed()
    assert not probed()
    machine.now += 2 * RETRY_SECONDS
    assert probed() is (load is BUSY), "tried again where the machine was busy"
