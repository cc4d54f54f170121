"""What the server says of the machine's heat."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from edge_devices.machine.state import DeviceState
from edge_devices.machine.system import System
from edge_runtime.server.heat import HeatWatch, described, differs
from edge_runtime.session.monitor import exposition
from polling import wait

COOL = DeviceState(temperature_c=50.0, clock_mhz=2400.0)
ZONE, CLOCK, COOLING = "sys/class/thermal/thermal_zone0", "sys/devices/system/cpu/cpufreq/policy0", "sys/class/thermal/cooling_device0"


def write(root: Path, folder: str, **files: object) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (root / folder / name).write_text(f"{value}\n")


def test_changes_are_told_while_requests_run(tmp_path: Path) -> None:
    write(tmp_path, ZONE, temp=50_000)
    write(tmp_path, CLOCK, scaling_cur_freq=2_400_000)
    write(tmp_path, COOLING, type="cpufreq-cpu0", cur_state=0)
    lines: list[str] = []
    seen: list[None] = []
    runs = True

    def busy() -> bool:
        seen.append(None)
        return runs

    def read_twice() -> bool:
        count = len(seen)
        return wait(lambda: len(seen) >= count + 2)

    system = System(root=tmp_path, platform="linux")
    with contextlib.closing(HeatWatch(lines.append, busy, system=system, seconds=0.01)) as heat:
        assert read_twice()
        assert lines == [], "nothing has changed"
        write(tmp_path, ZONE, temp=71_000)
        write(tmp_path, CLOCK, scaling_cur_freq=1_200_000)
        write(tmp_path, COOLING, cur_state=2)
        assert read_twice()
        assert any("the processor throttled (cpufreq-cpu0)" in line for line in lines)
        assert lines[-1].endswith("71 °C at 1.20 GHz, the processor throttled (cpufreq-cpu0)")
        text = exposition(heat.metrics())
        assert "edge_mtp_temperature_celsius 71" in text
        assert "edge_mtp_clock_megahertz 1200" in text
        assert "edge_mtp_throttled 1" in text
        told, runs = len(lines), False
        write(tmp_path, CLOCK, scaling_cur_freq=400_000)
        assert read_twice()
        assert len(lines) == told, "an idle clock says nothing"


@pytest.mark.parametrize(
    ("after", "tells"),
    [
        (DeviceState(temperature_c=59.0, clock_mhz=2000.0), False),
        (DeviceState(temperature_c=60.0, clock_mhz=2400.0), True),
        (DeviceState(temperature_c=40.0, clock_mhz=2400.0), True),
        (DeviceState(temperature_c=50.0, clock_mhz=1800.0), True),
        (DeviceState(temperature_c=50.0, clock_mhz=3300.0), True),
        (DeviceState(temperature_c=50.0, clock_mhz=2400.0, throttle_count=1), True),
        (DeviceState(temperature_c=50.0, clock_mhz=2400.0, cooling=("cpufreq",)), True),
        (DeviceState(), False),
    ],
)
def test_small_changes_are_not_told(after: DeviceState, tells: bool) -> None:
    assert differs(COOL, after) == tells


def test_a_state_is_described_by_what_is_known() -> None:
    assert described(COOL) == "50 °C at 2.40 GHz"
    assert described(DeviceState(throttle_count=3)) == "throttled 3 times since it started"
    assert described(DeviceState()) == "nothing known"
