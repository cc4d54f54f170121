"""Phones' gauges as makers let them answer, and rails. Layouts: a Samsung `dumpsys battery` found in public, AOSP's, perfetto's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_devices.errors import MeterError
from edge_devices.machine.system import CommandResult, System
from edge_devices.meters.android import (
    COMMAND,
    current_unit,
    find_powerstats,
    last_current,
    parse_channels,
    parse_rail_trace,
    voltage_notes,
    volts_of,
)
from edge_devices.meters.search import find_meters
from edge_devices.remote.snapshot import RecordedSystem, Recording
from protobuf_messages import message

SAMSUNG = """Current Battery Service state:
  AC powered: false
  USB powered: false
  Charge counter: 807642
  status: 3
  voltage: {voltage}
  temperature: 376
  technology: Li-ion
  LED Charging: true
  current now: {current}
  charge counter: 807642
  Adaptive Fast Charging Settings: true
"""
OLD = "\n".join(line for line in SAMSUNG.splitlines() if "current now" not in line)
TOO_OLD = {"cmd battery get -f current_now": (255, "Unknown get option: -f\n")}


def trace(*currents: int) -> bytes:
    return message(*((1, message((38, message((3, current))))) for current in currents))


def phone(text: str, *, traces: dict[str, bytes] | None = None, maker: str = "samsung"):
    commands = {"dumpsys battery": (0, text), "getprop ro.product.manufacturer": (0, maker), **TOO_OLD}
    system = RecordedSystem(
        Recording(files={"system/build.prop": ""}, commands=commands, traces=traces or {}), clock=lambda: 1.0, sleep=lambda _: None
    )
    return next(f for f in find_meters(system) if f.name == "android:battery")


def test_samsungs_line():
    result = phone(SAMSUNG.format(voltage=3685, current=-125))
    assert result.meter.read().value == pytest.approx(0.125 * 3.685)
    assert "mA" in result.meter.facts.notes[0]


def test_perfetto_has_the_current_where_the_service_does_not():
    result = phone(OLD.format(voltage=3900), traces={" ".join(COMMAND): trace(-310_000, -305_000)})
    assert result.meter.read().value == pytest.approx(0.305 * 3.9)
    nothing = phone(OLD.format(voltage=3900))
    assert "neither `dumpsys battery` nor perfetto" in nothing.reason
    with pytest.raises(MeterError, match="damaged"):
        last_current(trace(-310_000)[:-2])


@pytest.mark.parametrize(("text", "volts"), [("3964", 3.964), ("3964000", 3.964), ("3", 3.85), ("4", 3.85), ("8", 7.7), ("8700", 8.7)])
def test_voltages_by_maker(text, volts):
    assert volts_of(text) == pytest.approx(volts)


@pytest.mark.parametrize("text", ["", "0", "-1", "12000", "99", "x"])
def test_what_is_no_voltage(text):
    with pytest.raises(MeterError, match=r"not a voltage|no phone's battery"):
        volts_of(text)


def test_two_cells_in_series_are_named():
    assert "two cells in series, and their power together" in voltage_notes("8700", "x")[0]
    assert "twice these figures" in voltage_notes("4350", "OnePlus")[0]
    assert "whole volts" in voltage_notes("4", "samsung")[0]
    assert voltage_notes("4350", "samsung") == ()
    assert any("twice" in note for note in phone(SAMSUNG.format(voltage=3685, current=-125), maker="OnePlus").meter.facts.notes)


def test_a_sleeping_phones_microamperes_are_not_read_as_milliamperes():
    result = phone(SAMSUNG.format(voltage=3900, current=-3000))
    assert result.meter is None
    assert "it sleeps or works; turn the screen on" in result.reason


def test_the_unit_follows_from_the_power_of_an_idle_phone():
    for current, volts in ((-1200, 4.1), (5, 3.9)):
        with pytest.raises(MeterError, match="no idle power"):
            current_unit(current, volts)
    assert [current_unit(*each) for each in ((305, 3.9), (-26_000, 3.9), (-1_200_000, 4.1))] == ["mA", "µA", "µA"]


def rails_trace() -> bytes:
    descriptors = [(1, message((1, i), (2, name), (4, 10))) for i, name in enumerate([b"S2M_VDD_CPUCL2", b"S1M_VDD_MIF"])]
    early = [(2, message((1, i), (2, 1000), (3, 100 + i))) for i in range(2)]
    late = [(2, message((1, i), (2, 1250), (3, 30203502 + i))) for i in range(2)]
    return message(
        (1, message((8, 7), (40, message(*descriptors, *early)))), (1, message((38, b"\x08\x01"))), (1, message((40, message(*late))))
    )


def test_perfetto_rails():
    assert parse_rail_trace(rails_trace()) == {"S2M_VDD_CPUCL2": 30203502, "S1M_VDD_MIF": 30203503}
    assert parse_channels("  ChannelId: 3, ChannelName: S2M_VDD_CPUCL2, ChannelSubsystem: CPU(BIG)") == {3: "S2M_VDD_CPUCL2"}


def test_a_phones_trace_is_read_without_the_rest(tmp_path):
    other = message((1, message((45, message((3, b"google/oriole:14"))))))
    channels = b"ChannelId: 3, ChannelName: S2M_VDD_CPUCL2, ChannelSubsystem: CPU(BIG)\n"

    def run(arguments, answer=b"", seconds=10.0):
        if arguments[0] == "perfetto":
            assert b"collect_power_rails: true" in answer
            return CommandResult(code=0, output=other + rails_trace())
        return CommandResult(code=0, output=channels) if "powerstats" in arguments else CommandResult(code=127, output=b"")

    (tmp_path / "system").mkdir()
    (tmp_path / "system/build.prop").write_text("")
    phone = System(root=tmp_path, run=run, clock=lambda: 1.0)
    (found,) = find_powerstats(phone)
    assert found.meter.read().value == pytest.approx(60.407005)


@given(st.integers(0, len(rails_trace()) - 1))
def test_a_cut_trace_is_refused_or_read_in_part(size):
    try:
        assert parse_rail_trace(rails_trace()[:size]).keys() <= {"S2M_VDD_CPUCL2", "S1M_VDD_MIF"}
    except MeterError as error:
        assert "record it again" in str(error)  # noqa: PT017


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(trace):
    try:
        parse_rail_trace(trace)
    except MeterError:
        return
