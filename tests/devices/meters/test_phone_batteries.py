"""Phones' gauges as makers let them answer. Layouts: a Samsung `dumpsys battery` found in public, AOSP's, and perfetto's messages."""

from __future__ import annotations

import pytest

from edge_devices.errors import MeterError
from edge_devices.meters.android.perfetto import COMMAND, last_current
from edge_devices.meters.android.phone_battery import voltage_notes, volts_of
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
