"""What a machine says about being slowed down: a Raspberry Pi's firmware, Intel's counters, and the kernel's cooling devices.

Facts: `vcgencmd get_throttled` (Raspberry Pi documentation), arch/x86/kernel/cpu/mce/therm_throt.c and
Documentation/driver-api/thermal/sysfs-api.rst of Linux.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_devices.files.limited_read import parse_integer
from edge_devices.machine.system import System

# A shell without a login has no /opt/vc/bin in its PATH, where older systems keep it.
VCGENCMD = ("vcgencmd", "/usr/bin/vcgencmd", "/opt/vc/bin/vcgencmd")
VCGENCMD_REMEDY = "vcgencmd needs /dev/vcio: sudo usermod -aG video $USER, then log in again"
NOT_FOUND = 127
COUNTERS = "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count"
COOLING = "sys/class/thermal/cooling_device*"
# Types of cooling devices that slow a processor down: ACPI's, cpufreq's, Intel's idle injection. Fans and displays are none.
SLOWS = re.compile(r"processor|cpufreq|cpuidle|thermal-idle|powerclamp|cpu[-_](\d|cluster|isolate|hotplug)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Throttling:
    """`bits`: a Pi's get_throttled; `count`: how often Intel's processors were throttled since they started; `cooling`: what cools the
    processor now by slowing it. `unknown`: what is not known of it, and why; empty where all is.
    """

    bits: int | None = None
    count: int | None = None
    cooling: tuple[str, ...] = ()
    unknown: str = ""


def read_throttling(system: System) -> Throttling:
    """Reads what this machine says: a few files, on a Raspberry Pi one command. Never raises."""
    devices = _cooling_devices(system)
    cooling = tuple(name for name, state in devices if state > 0)
    if system.text_or("proc/device-tree/model").startswith("Raspberry Pi"):
        bits, reason = _firmware_bits(system)
        return Throttling(bits=bits, cooling=cooling, unknown=f"whether the board throttles ({reason})" if reason else "")
    counts = [count for path in system.paths(COUNTERS) if (count := parse_integer(system.text_or(path))) is not None]
    if counts:
        return Throttling(count=sum(counts), cooling=cooling)
    # Of x86 processors the kernel's cooling is only a part: they also slow themselves down.
    known = system.is_android or (bool(devices) and not system.exists("sys/devices/system/cpu/cpu0/microcode"))
    return Throttling(cooling=cooling, unknown="" if known else "whether the processor throttles (this system has no counter of it)")


def _firmware_bits(system: System) -> tuple[int | None, str]:
    """Returns what `vcgencmd get_throttled` says, or why it says nothing."""
    for command in VCGENCMD:
        done = system.run([command, "get_throttled"])
        if done.code == NOT_FOUND:
            continue
        match = re.search(r"throttled=0x([0-9a-fA-F]{1,8})\b", done.text) if done.code == 0 else None
        return (int(match[1], 16), "") if match else (None, f"vcgencmd get_throttled: {done.first_line}; {VCGENCMD_REMEDY}")
    return None, "vcgencmd is not installed; install Raspberry Pi OS's raspi-utils"


def _cooling_devices(system: System) -> list[tuple[str, int]]:
    """Returns the type and the state of each cooling device that slows the processor down; state 0 does not."""
    devices = []
    for folder in system.paths(COOLING):
        kind, state = system.text_or(f"{folder}/type"), parse_integer(system.text_or(f"{folder}/cur_state"))
        if SLOWS.search(kind) and state is not None:
            devices.append((kind, state))
    return devices
