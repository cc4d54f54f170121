"""Power of an emulated device, known at every moment: idle watts, and watts for each processor second that its programs use.

The device has a /proc/stat and a /proc/pressure of its own, so that other programs of this machine are none of the device's.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fake_phone import FakePhone, traced

EVERY_S, SEARCH_S = 0.1, 1.0
TICKS = os.sysconf("SC_CLK_TCK")
PROCESSORS = 4
RIPPLE = 0.003  # standard deviation of the watts
# As a Pi 5 prints them: these two rails carry what its programs take, the others stay.
PMIC = """     3V3_SYS_A current(1)=0.06245952A
     1V8_SYS_A current(2)=0.16102850A
    VDD_CORE_A current(7)={amperes:.8f}A
     3V3_SYS_V volt(9)=3.30632200V
     1V8_SYS_V volt(10)=1.79828900V
    VDD_CORE_V volt(15)=0.89745940V
"""
PMIC_REST = 0.06245952 * 3.306322 + 0.1610285 * 1.798289
PMIC_VOLTS = 0.8974594


class DevicePower:
    """`joules` since the start; `show` gets them and the watts of the moment, and writes what the device's meter shows."""

    def __init__(self, device: FakePhone, show: Callable[[float, float], None], *, idle_watts: float, core_watts: float) -> None:
        self._device, self._show, self._idle, self._core = device, show, idle_watts, core_watts
        self.joules, self._busy_s = 0.0, 0.0
        self._known: dict[int, float] = {}
        self._ended, self._random = threading.Event(), random.Random(1)
        pressure = device.root / "proc/pressure"
        pressure.mkdir()
        (pressure / "cpu").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
        self._update(0.0)
        self._thread = threading.Thread(target=self._run, name="power of a device", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        last = searched = time.monotonic()
        while not self._ended.wait(EVERY_S):
            now = time.monotonic()
            if now - searched > SEARCH_S:
                searched = now
                self._known = {number: self._known.get(number, 0.0) for number in traced_below(self._device.root)}
            self._update(now - last)
            last = now

    def _update(self, seconds: float) -> None:
        used = 0.0
        for number, before in self._known.items():
            now = processor_seconds(number)
            used += max(0.0, now - before)
            self._known[number] = max(now, before)
        self._busy_s += used
        watts = (self._idle + (self._core * used / seconds if seconds else 0.0)) * self._random.gauss(1.0, RIPPLE)
        self.joules += watts * seconds
        self._show(self.joules, watts)
        ticks = round(self._busy_s * TICKS)
        lines = [f"cpu  {ticks} 0 0 0 0 0 0 0 0 0", *(f"cpu{n} {ticks // PROCESSORS} 0 0 0 0 0 0 0 0 0" for n in range(PROCESSORS))]
        fresh = self._device.root / "proc/stat.fresh"
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self._device.root / "proc/stat")


def pmic(device: FakePhone) -> Callable[[float, float], None]:
    """The supply chip of a Pi 5."""
    return lambda _joules, watts: device.says("vcgencmd pmic_read_adc", PMIC.format(amperes=(watts - PMIC_REST) / PMIC_VOLTS))


def rails(device: FakePhone) -> Callable[[float, float], None]:
    """The rail monitor of a Pixel: microjoules since its start."""
    path = "/sys/bus/iio/devices/iio:device0/energy_value"

    def show(joules: float, _watts: float) -> None:
        share = round(joules * 1e6 / 4)
        device.write(path, f"t=349894\nCH3(T=349894)[S2M_VDD_CPUCL2], {3 * share}\nCH7(T=349894)[S1M_VDD_MIF], {share}\n")

    return show


def traced_below(root: Path) -> list[int]:
    """Returns the numbers of all processes that run on the device whose disk is `root`: those that its proots trace."""
    tracers = set[int]()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            program, *words = command.read_text().split("\0")
            if program.endswith("proot") and any(str(root) in word for word in words):
                tracers.add(int(command.parent.name))
    return traced(tracers)


def processor_seconds(number: int) -> float:
    """Returns the processor seconds of a process; 0 when it has ended."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0
