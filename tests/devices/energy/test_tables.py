"""Tables as meters write them (tables.toml) and in dialects: each is read right, or refused with the column's name.

The dialects' layouts are those of programs, their figures made up.
"""

from __future__ import annotations

import math
import random
import tomllib

import pytest

from edge_devices.energy.external.columns import parse_choice
from edge_devices.energy.external.table import import_csv
from edge_devices.errors import MeasurementError, MeterError
from edge_devices.meters.base import Kind, Sample, Trace
from recordings import FIXTURES

TABLES = tomllib.loads((FIXTURES / "tables.toml").read_text(encoding="utf-8"))["table"]

# What a person chooses, and true watts, where they are none and 6.
COLUMNS = {
    "a device of two": "device=pi",
    "the number of a column of two with one name": "power=3",
    "one name twice": "power=Power (W)",
    "a device that is not there": "device=po",
    "a unit of something else, named": "power=Load",
    "energy named as power": "power=Power (Wh)",
}
WATTS = {
    "a unit beside each figure": 0.25,
    "noise around nothing": (30 * 1.6 - 10 * 0.0001) * 5 / 40,
    "decimal commas, three places": sum(5 + i % 3 + 0.1 * (i % 10) for i in range(40)) / 40,
}


def table(header: str, line, rows: int = 40) -> str:
    return header + "\n" + "".join(line(i) + "\n" for i in range(rows))


def read(tmp_path, text: str | bytes, columns: str = ""):
    path = tmp_path / "meter.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return import_csv(path, parse_choice(columns))


def watts_of(trace) -> float:
    if trace.facts.kind is Kind.COUNTER:
        return (trace.values[-1] - trace.values[0]) / (trace.times[-1] - trace.times[0])
    return sum(trace.values) / len(trace.values)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["name"])
def test_tables_of_real_meters(tmp_path, table):
    trace = read(tmp_path, table["text"], table.get("columns", ""))
    assert trace.times[-1] > trace.times[0]
    assert watts_of(trace) == pytest.approx(table.get("watts", 5.0))


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
    trace = import_csv(FIXTURES / "fnirsi.txt")
    assert trace.facts.kind is Kind.COUNTER  # joules are there, so they are taken
    assert trace.values[-1] == pytest.approx(0.1275)
    assert trace.times[4] == trace.times[3]  # a packet stamped in the past is held


def test_a_trace_refuses_what_is_no_time_line():
    trace = Trace(facts=import_csv(FIXTURES / "fnirsi.txt").facts)
    trace.add(Sample(1.0, 2.0))
    for bad in (Sample(0.5, 2.0), Sample(2.0, float("nan"))):
        with pytest.raises(MeasurementError, match="record it again"):
            trace.add(bad)
    with pytest.raises(MeasurementError, match="begins only after"):
        trace.index_at(0.5)


SENSORS = ",".join(f'"Core {k} Clock [MHz]"' for k in range(300))
READ_RIGHT = {
    "HWiNFO": table(f'Date,Time,{SENSORS},"Total System Power [W]",', lambda i: f"1.6.2026,10:00:{i:02}.5,{'4500.0,' * 300}6.0,"),
    "HWiNFO, with its two last lines": (h := 'Date,Time,"CPU Package Power [W]","PL1 Power Limit [W]"')
    + "\n"
    + "".join(
        f"1.6.2026,23:59:{40 + i}.1,6.0,45.0\n" if i < 20 else f"2.6.2026,0:0{(i - 20) // 60}:{i - 20:02}.1,6.0,45\n" for i in range(40)
    )
    + h
    + "\n,,CPU [#0]: X,CPU [#0]: X\n",
    "of Windows, with its µ": table("Time (s);Strom (µA);Spannung (V)", lambda i: f"{i};1200000;5").encode("cp1252"),
    "UTF-16 of a shell": table("time,power_mW", lambda i: f"{i},6000").encode("utf-16"),
    "UTF-8 with a mark": b"\xef\xbb\xbf" + table("time,W", lambda i: f"{i},6").encode(),
    "nvidia-smi": table("timestamp, power.draw [W], power.limit [W]", lambda i: f"2026/06/01 10:00:{i:02}.000, 6.00 W, 70.00 W"),
    "units below the names": "Time;Voltage;Current\n[s];[V];[mA]\n" + "".join(f"{i};5;1200\n" for i in range(40)),
    "a unit that changes": table("time,power", lambda i: f"{i},{'5999.9 mW' if i % 2 else '6.0001 W'}"),
    "a unit beside each figure": table("time,power,unit", lambda i: f"{i},{250},mW"),
    "unit before its word": table("time_ms,mA current,V bus", lambda i: f"{i * 100},1200,5.0"),
    "present power": table("time,Current Power (W),Current Voltage (V)", lambda i: f"{i},6,230"),
    "units below the names, of the time too": "time,voltage,current\ns,V,mA\n" + "".join(f"{i},5,1200\n" for i in range(40)),
    "Shelly, of one phase": table(
        "Date/time UTC,Active energy Wh(A),Returned energy Wh(A),Max V", lambda i: f"2026-06-01 10:{i:02}:00,{i / 10:.1f},0,231"
    ),
    "INA219": table("time,bus_voltage_V,shunt_mV,current_mA,power_mW", lambda i: f"{i / 10},5.02,12.0,1195.2,6000"),
    "Arduino": table("millis,mA,V", lambda i: f"{1000 * i + 7},1200,5"),
    "Intel Power Gadget": table(
        "System Time,RDTSC,Elapsed Time (sec),Processor Power_0(Watt),Cumulative Processor Energy_0(Joules),Power Limit_0(Watt)",
        lambda i: f"10:00:{i:02}:500,{i},{i}.0,6.0,{6 * i}.0,45",
    )
    + "\nTotal Elapsed Time (sec) = 40.0\n",
    "Tasmota": table(
        "Time,TotalStartTime,Total,Yesterday,Today,Power,ApparentPower,ReactivePower,Factor,Voltage,Current",
        lambda i: f"2026-06-01T10:{i:02}:00,2026-01-01T00:00:00,1.2,0.1,0.1,6,11,9,0.55,230,0.048",
    ),
    "Shelly, counted": table(
        "timestamp,total_act_energy_Wh,total_act_ret_energy_Wh,min_voltage", lambda i: f"{1780000000 + 60 * i},{100 + i / 10:.1f},0,229"
    ),
    "noise around nothing": table("time (s),current (A),voltage (V)", lambda i: f"{i},{-0.0001 if i % 4 == 0 else 1.6},5"),
    "decimal commas, three places": table("Zeit;Leistung (W)", lambda i: f"{i};{5 + i % 3},{i % 10}00"),
    "decimal commas, always three places": table("Zeit;Leistung (W)", lambda i: f"10:00:{i:02};6,000"),
    "thousands": table("time,power (mW)", lambda i: f'{i},"{"6,900" if i % 2 else "5,100"}"'),
    "thousands and decimals": table("time,power (mW)", lambda i: f'{i},"6,000.0"'),
    "German thousands": table("Zeit;Leistung (mW)", lambda i: f"{i},0;6.000,0"),
    "French thousands": table("time;power (mW)", lambda i: f"{i};6\u202f000"),
    "bars": table("time|W", lambda i: f"{i}|6"),
    "blanks and units in brackets": table("Time (s)  Power (W)", lambda i: f"{i}   6.0"),
    "newest first": table("time,W", lambda i: f"2026-06-01 10:00:{39 - i:02},{6}"),
    "NaN now and then": table("time,W", lambda i: f"{i},{('nan', '', '--', 'NULL')[i // 10] if i % 10 == 9 else 6}"),
    "zeros now and then": table("time,W", lambda i: f"{i},{0 if i % 10 == 9 else 6}"),
    "off before and after": table("time,W", lambda i: f"{i},{6 if 10 <= i < 30 else 0}"),
    "a counter misread as 0": table("time,Energy (J)", lambda i: f"{i},{0 if i in (9, 20, 21) else 100 + 6 * i}"),
    "shunt the other way round": table("time,V,A", lambda i: f"{i},5,-1.2"),
    "minus sign of typesetters": table("time,V,A", lambda i: f"{i},5,\u22121.2"),
    "epoch in s": table("timestamp,W", lambda i: f"{1780000000 + i},6"),
    "epoch in ms that says s": table("timestamp (s),Energy (J)", lambda i: f"{1780000000000 + 1000 * i},{6 * i}"),
    "epoch in ms": table("ts,Energy (J)", lambda i: f"{1780000000000 + 1000 * i},{6 * i}"),
    "minutes and seconds of a spreadsheet": table("time,Energy (J)", lambda i: f"{(i + 50) // 60:02}:{(i + 50) % 60:02}.0,{6 * i}"),
    "half past eleven to one": table(
        "time,Energy (J)",
        lambda i: f"{(11 + (i + 30) // 60 - 1) % 12 + 1}:{(i + 30) % 60:02}:00 {'AM' if i < 30 else 'PM'},{360 * i}",
        90,
    ),
    "power over midnight": table("time,Energy (J)", lambda i: f"{(23 + (i + 50) // 60) % 24}:{(i + 50) % 60:02}:00,{360 * i}"),
    "each row twice": table("time,W", lambda i: f"{i // 2},{4 + 4 * (i // 2 % 2)}"),
    "ten rows with one stamp": table("time,W", lambda i: f"10:00:{i // 10:02},{6 + 0.01 * ((i * 7) % 5 - 2)}", 400),
    "a device of two": table("time,device,W", lambda i: f"{i // 2},{('pi', 'strip')[i % 2]},{(6, 40)[i % 2]}"),
    "the number of a column of two with one name": table("time,Power (W),Power (W)", lambda i: f"{i},40,6"),
    "watt-hours in words": table("Elapsed (hours),Energy (Watt-hours)", lambda i: f"{i},{6 * i}"),
    "a mode that changes once": table("time,W,mode", lambda i: f"{i},6,{'QC' if i < 20 else 'PD'}"),
}


@pytest.mark.parametrize("name", READ_RIGHT)
def test_it_is_read_right(tmp_path, name):
    trace = read(tmp_path, READ_RIGHT[name], COLUMNS.get(name, ""))
    assert watts_of(trace) == pytest.approx(WATTS.get(name, 6.0), rel=1e-3)
    assert all(b >= a for a, b in zip(trace.times, trace.times[1:], strict=False))
    assert trace.times[-1] - trace.times[0] > 3 * 0.9 * trace.facts.refresh_s
    assert "column" in trace.facts.source


ASKED = {
    "a strip beside the Pi": (
        table("time,Power strip (W),Pi (W)", lambda i: f"{i},40,6"),
        "'Power strip \\(W\\)', 'Pi \\(W\\)'.*--columns power=",
    ),
    "two packages": (table("time,CPU 0 Power [W],CPU 1 Power [W]", lambda i: f"{i},40,6"), "2 columns may be the device's power"),
    "one name twice": (table("time,Power (W),Power (W)", lambda i: f"{i},40,6"), "numbers 2, 3"),
    "two currents": (table("time,Voltage (V),I in (A),I out (A)", lambda i: f"{i},5,2,1"), "'I in \\(A\\)', 'I out \\(A\\)'"),
    "two devices, named": (
        table("time,device,W", lambda i: f"{i // 2},{('pi', 'strip')[i % 2]},{(6, 40)[i % 2]}"),
        "'device' names 2 .*device=pi",
    ),
    "two devices, numbered": (table("time,channel,W", lambda i: f"{i // 2},{i % 2},{(6, 40)[i % 2]}"), "'channel' names 2"),
    "two devices, one after the other": (
        table("time,what,W", lambda i: f"{1780000000 + i % 20 * 10},{('a', 'b')[i // 20]},{(6, 40)[i // 20]}"),
        "'what'",
    ),
    "two devices without names": (table("time,W", lambda i: f"{i // 2},{(6, 40)[i % 2]}"), "2 rows have the same time.*column 'W'"),
    "a device that is not there": (table("time,device,W", lambda i: f"{i},pi,6"), "no row is of the device 'po'.*pi"),
    "charge and use": (table("time,W", lambda i: f"{i},{6 if i % 20 < 10 else -4}"), "column 'W' changes its sign"),
    "charge that a column tells": (
        table("time,A,V,status", lambda i: f"{i},1.2,5,{'Charging' if i < 9 else 'Discharging'}"),
        "'status' says Charging",
    ),
    "zeros everywhere": (table("time,W", lambda i: f"{i},{0 if i % 2 else 6}"), "column 'W' .*is 0 in"),
    "missing everywhere": (table("time,W", lambda i: f"{i},{'-' if i % 2 else 6}"), "20 of 40 rows have no figure.*column 'W'"),
    "over the range": (table("time,A,V", lambda i: f"{i},{'OL' if i == 9 else 1.2},5"), "row 11 holds 'OL' in the column 'A'"),
    "commas that may be either": (table("time;P (mW)", lambda i: f"{i};{'104,512' if i % 2 else '210,498'}"), "'P \\(mW\\)'.*decimal="),
    "points and commas": (
        table("time;W", lambda i: f"{i};{'6,5' if i % 2 else '6.5'}"),
        "column 'W' has decimal points and decimal commas",
    ),
    "decimal commas between commas": (table("time,W", lambda i: f"{i},0,6,5"), "row 2 has 4 cells and the header 2"),
    "another table below": (
        table("time,W", lambda i: f"{i},6") + table("time,V,A", lambda i: f"{i},6,1"),
        "row 42 is the header of another table",
    ),
    "energy of each minute": (
        table("time,Energy (Wh)", lambda i: f"{60 * i},{(0.1, 0.009)[i % 2]}"),
        "column .Energy \\(Wh\\)' goes back 2",
    ),
    "a counter that leaps": (
        table("time,Energy (J)", lambda i: f"{i},{6 * i + 900_000 * (i > 20)}"),
        "row 23 of column 'Energy \\(J\\)' counts",
    ),
    "milliseconds that nobody names": (
        table("time,Energy (J)", lambda i: f"{1003 * i},{6 * i}"),
        "column 'time', which names no unit.*time_unit=ms",
    ),
    "volts and amperes of the mains": (table("time,Voltage (V),Current (A)", lambda i: f"{i},230,0.05"), "of the mains"),
    "a share of power": (table("time,Power (%)", lambda i: f"{i},6"), "have no time with"),
    "apparent power alone": (table("time,Apparent Power (VA),Scheinleistung", lambda i: f"{i},6,6"), "have no time with"),
    "a limit alone": (table("time,PL1 Power Limit (W)", lambda i: f"{i},6"), "have no time with"),
    "a unit of something else, named": (table("time,Load (MHz)", lambda i: f"{i},6"), "no column 'Load'.*'Load \\(MHz\\)'"),
    "energy named as power": (table("time,Power (Wh)", lambda i: f"{i},6"), "'Power \\(Wh\\)' has the unit wh"),
    "a line without end": ("time,W\n" + "1" * 70_000 + ",5\n", "line 2 has more than 65536 characters"),
    "numbers with underscores": (table("time,W", lambda i: f"{i},1_0"), "column 'W'"),
}


@pytest.mark.parametrize("name", ASKED)
def test_it_is_asked_about(tmp_path, name):
    text, says = ASKED[name]
    with pytest.raises(MeterError, match=says):
        read(tmp_path, text, COLUMNS.get(name, ""))


@pytest.mark.parametrize("seed", range(30))
def test_drawn_regions_have_one_figure(tmp_path, seed):
    """Any separator, mark of decimals, unit, unit's place, sign and missing cell: the same watts, or a question; never other watts."""
    draw = random.Random(seed)
    separator, decimal = draw.choice([(",", "."), (";", ","), (";", "."), ("\t", ",")])
    unit, factor = draw.choice([("W", 1.0), ("mW", 1e-3), ("kW", 1e3), ("uW", 1e-6)])
    name = draw.choice(["Power ({u})", "{u} power", "power_{u}", "Leistung [{u}]", "P / {u}"]).format(u=unit)
    places, sign = draw.randrange(6), draw.choice([1, -1])
    truth = [5 + 2 * math.sin(i / 3) for i in range(200)]
    lines = []
    for i, watts in enumerate(truth):
        figure = f"{sign * watts / factor:.{max(places, 4 if factor > 1 else 0)}f}".replace(".", decimal)
        lines.append(separator.join([f"{i}", "" if draw.random() < 0.05 else figure]))
    trace = read(tmp_path, "\n".join([separator.join(["time (s)", name]), *lines]) + "\n")
    assert watts_of(trace) == pytest.approx(sum(truth) / len(truth), rel=0.12)
