"""Tables as meters write them (fixtures/tables.toml), and those that cannot be right."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from edge_devices.energy.external.columns import parse_choice
from edge_devices.energy.external.table import import_csv
from edge_devices.errors import MeterError
from edge_devices.meters.base import Kind

TABLES = tomllib.loads((Path(__file__).parent / "fixtures" / "tables.toml").read_text(encoding="utf-8"))["table"]


def read(tmp_path: Path, text: str, columns: str = ""):
    path = tmp_path / "meter.csv"
    path.write_text(text, encoding="utf-8")
    return import_csv(path, parse_choice(columns))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["name"])
def test_tables_of_real_meters(tmp_path, table):
    trace, watts = read(tmp_path, table["text"], table.get("columns", "")), table.get("watts", 5.0)
    span = trace.times[-1] - trace.times[0]
    assert span > 0
    if trace.facts.kind is Kind.COUNTER:
        assert (trace.values[-1] - trace.values[0]) / span == pytest.approx(watts)
    else:
        assert sum(trace.values) / len(trace.values) == pytest.approx(watts)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "have no time"),
        ("time,voltage\n0,5\n1,5\n", "have no time"),
        ("time,W\n0,1\n", "1 rows"),
        ("time,W\n0,1\n1,\n", "row 3"),
        ("time;W\n0;1\n1;1,5 X\n", "row 3"),
        ("time,W\n0,1\n1,inf\n", "row 3"),
        ("time,voltage,current\n0,5.1,1200\n1,5.1,1200\n", "6.12e[+]03 W on average.*unit=mA"),
        ("time,power\n0,5100\n1,5100\n", "5.1e[+]03 W on average.*mW"),
        ("time,energy\n0,0\n3600,0.005\n", "'energy' names no unit"),
        ("Timestamp(ms),Current(uA)\n0,5000\n1,5000\n", "amperes and no volts.*volts=5.1"),
        ("0,5,1\n1,5,1\n", "has no header"),
        ("time,Energy (J)\n0,100\n1,90\n2,95\n", "less energy than the row before"),
        ("entity_id,state,last_changed\nsensor.a_power,1,2026-01-01T00:00:00Z\nsensor.b_power,2,2026-01-01T00:00:01Z\n", "2 sensors"),
        ("entity_id,state,last_changed\nsensor.a_energy,1,2026-01-01T00:00:00Z\nsensor.a_energy,2,2026-01-01T00:00:01Z\n", "unit=kWh"),
    ],
)
def test_what_cannot_be_right_is_asked_about(tmp_path, text, says):
    with pytest.raises(MeterError, match=says):
        read(tmp_path, text)


def test_a_counter_that_begins_again_is_continued(tmp_path):
    trace = read(tmp_path, "time,Energy (J)\n" + "".join(f"{t},{(t % 50) * 5}\n" for t in range(100)))
    assert trace.values[-1] == pytest.approx(49 * 5 * 2)
    assert "began again 1 times" in trace.facts.notes[0]


DAY, BEGIN = 86400, 1_700_000_000


def rows_of(stamps):
    return "time,W\n" + "".join(f"{stamp},{5 + number % 2}\n" for number, stamp in enumerate(stamps))


@pytest.mark.parametrize("jump", [DAY, -DAY, -DAY - 2, -DAY + 2, -3600, -61, 7 * DAY, -7 * DAY, DAY - 30 * 60])
def test_a_meter_whose_clock_is_set_goes_on(tmp_path, jump):
    """A day either way, the end of daylight saving time, a correction of a minute: no reading is lost, and the note says so."""
    trace = read(tmp_path, rows_of([BEGIN + 0.5 * i + jump * (i >= 30) for i in range(100)]))
    assert [time - trace.times[0] for time in trace.times] == pytest.approx([0.5 * i for i in range(100)])
    assert len(trace.facts.notes) == 1
    assert trace.facts.notes[0].startswith("the meter's clock was set 1 times (")


def test_a_clock_that_is_set_forth_and_back_goes_on(tmp_path):
    stamps = [BEGIN + i + DAY * (20 <= i < 40) + DAY * (60 <= i < 80) for i in range(100)]
    trace = read(tmp_path, rows_of(stamps))
    assert [time - trace.times[0] for time in trace.times] == pytest.approx(list(range(100)))
    assert "was set 4 times (+86401 s, -86399 s, +86401 s)" in trace.facts.notes[0]


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        (["23:59:58", "23:59:59", "00:00:00", "00:00:01", "00:00:02"], [0, 1, 2, 3, 4]),
        (["22:00:00", "23:00:00", "00:00:00", "10:00:00", "21:00:00", "02:00:00"], [0, 3600, 7200, 43200, 82800, 100800]),
        ([0, 1, 0.9, 0.95, 2], [0, 1, 1, 1, 2]),
        ([0, 1, 3601, 3602], [0, 1, 3601, 3602]),
    ],
)
def test_midnight_packets_and_pauses_are_no_jumps(tmp_path, stamps, expected):
    trace = read(tmp_path, rows_of(stamps))
    assert [time - trace.times[0] for time in trace.times] == pytest.approx(expected)
    assert trace.facts.notes == ()


@pytest.mark.parametrize("columns", ["time", "colour=red", "unit=parsec", "volts=230000", "volts=x", "power=nothing"])
def test_wrong_columns(tmp_path, columns):
    with pytest.raises(MeterError):
        read(tmp_path, "time,W\n0,5\n1,5\n", columns)


def test_a_missing_table(tmp_path):
    with pytest.raises(MeterError, match="cannot be read"):
        import_csv(tmp_path / "nothing.csv")


def test_fnirsi_log():
    trace = import_csv(Path(__file__).parent / "fixtures" / "fnirsi.txt")
    assert trace.facts.kind is Kind.COUNTER  # joules are there, so they are taken
    assert trace.values[-1] == pytest.approx(0.1275)
    assert trace.times[4] == trace.times[3]  # a packet stamped in the past is held
