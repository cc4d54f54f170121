"""Meters of Macs: IOReport's counters, and the `powermetrics` command.

Each kind has a section in this file, which ends with its `find` function. `SOURCES` at the end lists them.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from edge_devices.errors import MeterError
from edge_devices.machine.system import NOT_FOUND, CommandResult, System
from edge_devices.meters.base import Finding, Kind, MeterFacts, MeterSource, Preference, Scope, SumMeter, absent, present, tried, usable

# Apple silicon: the energy counters of IOReport, the kernel's library of statistics. Unlike `powermetrics`, they do not need root.
#
# The library has no published header. Functions, types and the group's name are those that asitop's successors (socpowerbud, macmon) and
# uzu use. The group "Energy Model" has a counter for each cluster and unit, in mJ, uJ or nJ since the system started. A machine with
# several dies has a set for each. This code has not been run on a Mac yet; its test has made-up values in this form.

IOREPORT = "apple:ioreport"
GROUP, CHANNELS = "Energy Model", "IOReportChannels"
LIBRARY, FOUNDATION = "/usr/lib/libIOReport.dylib", "/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation"
JOULES = {"mJ": 1e-3, "uJ": 1e-6, "nJ": 1e-9}
# Counters of sums. They include the counters of a die's parts (ECPU0, PCPU, GPU SRAM), which are therefore not added.
COUNTED = re.compile(r"(DIE_\d+_)?(CPU Energy|GPU Energy|ANE\d*(_\d+)?|DRAM\d*(_\d+)?)")
MAX_CHANNELS = 4096
LONGEST_NAME = 256
_UTF8 = 0x08000100  # kCFStringEncodingUTF8


class Counter(NamedTuple):
    """One channel: its name, its unit, and its value since the system started."""

    name: str
    unit: str
    value: int


def open_counters() -> Callable[[], list[Counter]] | None:
    """Returns a function that reads all counters of the group; None if there is no such library, as on other systems.

    Raises MeterError if the library has no such counters.
    """
    if sys.platform != "darwin":
        return None
    try:
        return _Library(ctypes.CDLL(LIBRARY), ctypes.CDLL(FOUNDATION)).subscribe()
    except OSError:
        return None


class _Library:
    """The functions of IOReport, and those of CoreFoundation that its objects need."""

    def __init__(self, report: Any, foundation: Any) -> None:
        self._report, self._cf = report, foundation
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        for library, name, result, *arguments in (
            (foundation, "CFStringCreateWithCString", pointer, pointer, ctypes.c_char_p, ctypes.c_uint32),
            (foundation, "CFStringGetCString", ctypes.c_bool, pointer, ctypes.c_char_p, ctypes.c_long, ctypes.c_uint32),
            (foundation, "CFDictionaryGetValue", pointer, pointer, pointer),
            (foundation, "CFArrayGetCount", ctypes.c_long, pointer),
            (foundation, "CFArrayGetValueAtIndex", pointer, pointer, ctypes.c_long),
            (foundation, "CFRelease", None, pointer),
            (report, "IOReportCopyChannelsInGroup", pointer, pointer, pointer, number, number, number),
            (report, "IOReportCreateSubscription", pointer, pointer, pointer, ctypes.POINTER(pointer), number, pointer),
            (report, "IOReportCreateSamples", pointer, pointer, pointer, pointer),
            (report, "IOReportChannelGetChannelName", pointer, pointer),
            (report, "IOReportChannelGetUnitLabel", pointer, pointer),
            (report, "IOReportSimpleGetIntegerValue", ctypes.c_int64, pointer, ctypes.c_int32),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._channels_key = self._string(CHANNELS)

    def subscribe(self) -> Callable[[], list[Counter]]:
        """Returns a function that reads the group's counters. Raises MeterError."""
        wanted = self._report.IOReportCopyChannelsInGroup(self._string(GROUP), None, 0, 0, 0)
        subscribed = ctypes.c_void_p()
        subscription = self._report.IOReportCreateSubscription(None, wanted, ctypes.byref(subscribed), 0, None) if wanted else None
        if not subscription:
            raise MeterError(f"IOReport has no group {GROUP!r} on this Mac; use apple:powermetrics")

        def read() -> list[Counter]:
            samples = self._report.IOReportCreateSamples(subscription, subscribed, None)
            if not samples:
                raise MeterError("IOReport gave no samples; use apple:powermetrics")
            try:
                return self._counters(samples)
            finally:
                self._cf.CFRelease(samples)

        return read

    def _counters(self, samples: Any) -> list[Counter]:
        channels = self._cf.CFDictionaryGetValue(samples, self._channels_key)
        count = self._cf.CFArrayGetCount(channels) if channels else 0
        found = [self._cf.CFArrayGetValueAtIndex(channels, place) for place in range(min(count, MAX_CHANNELS))]
        return [
            Counter(
                self._text(self._report.IOReportChannelGetChannelName(channel)),
                self._text(self._report.IOReportChannelGetUnitLabel(channel)),
                self._report.IOReportSimpleGetIntegerValue(channel, 0),
            )
            for channel in found
        ]

    def _string(self, text: str) -> Any:
        return self._cf.CFStringCreateWithCString(None, text.encode(), _UTF8)

    def _text(self, string: Any) -> str:
        room = ctypes.create_string_buffer(LONGEST_NAME)
        if not string or not self._cf.CFStringGetCString(string, room, LONGEST_NAME, _UTF8):
            return ""
        return room.value.decode("utf-8", "replace").strip()


def joules(counters: Sequence[Counter]) -> list[tuple[str, float]]:
    """Returns the joules of processor, graphics, neural engine and memory, by name. Raises MeterError if the processor's are missing."""
    parts = [(counter.name, counter.value * JOULES[counter.unit]) for counter in counters if _is_counted(counter)]
    if not any(name.endswith("CPU Energy") for name, _ in parts):
        named = ", ".join(sorted({counter.name for counter in counters})[:8]) or "nothing"
        raise MeterError(f"IOReport counts no processor energy in a unit that is known (it has {named}); use apple:powermetrics")
    return parts


def _is_counted(counter: Counter) -> bool:
    return counter.unit in JOULES and COUNTED.fullmatch(counter.name) is not None


def ioreport_meter(system: System, read: Callable[[], list[Counter]]) -> SumMeter:
    """Returns the meter of the package, in joules."""
    facts = MeterFacts(
        name=IOREPORT,
        kind=Kind.COUNTER,
        scope=Scope.PACKAGE,
        source=f"IOReport, group {GROUP!r}",
        refresh_s=0.1,
        resolution=0.001,
        poll_s=1.0,
        systematic="Apple's own model, not a sensor at the battery",
        notes=("with memory, without the display", "never seen on hardware by this project"),
    )
    return SumMeter(system, facts, lambda: joules(read()))


def find_ioreport(system: System, opened: Callable[[], Callable[[], list[Counter]] | None] = open_counters) -> list[Finding]:
    """Returns the finding of IOReport; an empty list on other machines."""
    if system.platform != "darwin":
        return []
    try:
        read = opened()
    except MeterError as error:
        return [present(IOREPORT, str(error))]
    return [absent(IOREPORT, "this system has no library of IOReport") if read is None else tried(ioreport_meter(system, read))]


# Macs: the `powermetrics` command, which estimates the power of processor, graphics and neural engine, without the display.
#
# Apple silicon prints `CPU Power: 947 mW` and so on, and a sum (`Package Power`, later `Combined Power (CPU + GPU + ANE)`) that some
# versions lack. Intel Macs print `Intel energy model derived package power (CPUs+GT+SA): 2.48W`. Numbers have the format of the user's
# region: 1.473 or 1,473.

POWERMETRICS = "apple:powermetrics"
LINE = re.compile(
    r"^\s*(CPU|GPU|ANE|DRAM|Package|Combined|Intel energy model derived package)(?: [Pp]ower)(?: \([\w +]+\))?:"
    r"\s*(\d[\d.,'\u00a0\u202f\u2019]{0,17})\s*(m?W)\s*$",
    re.MULTILINE,
)
INTEL = "Intel energy model derived package"
PERIOD_S = 1.0
REMEDY = "powermetrics needs root: run edge-bench and edge-devices with sudo"


def parse_powermetrics(text: str) -> dict[str, float]:
    """Parses the text of one sample. Returns watts by part."""
    return {part: _number(figure, unit) for part, figure, unit in LINE.findall(text)}


def _number(text: str, unit: str) -> float:
    """Returns the watts in a number of any region.

    The last point or comma is the decimal mark. But in milliwatts it separates thousands if three digits follow.
    """
    whole, rest = re.fullmatch(r"(.*?)(?:[.,](\d*))?", text).groups("")  # type: ignore[union-attr]
    digits = re.sub(r"\D", "", whole)
    grouped = unit == "mW" and len(rest) == 3 and digits.strip("0")
    return float(f"{digits}{rest}" if grouped else f"{digits or 0}.{rest or 0}") * (1e-3 if unit == "mW" else 1.0)


def package_watts(parts: dict[str, float]) -> float | None:
    """Returns the package's power as printed, else the sum of its parts; None if nothing is printed."""
    for total in ("Package", "Combined", INTEL):
        if total in parts:
            return parts[total]
    return sum(parts.values()) if parts else None


def powermetrics_meter(system: System) -> SumMeter:
    """Returns the meter of the package's mean power during the second that a read takes, in watts."""
    facts = MeterFacts(
        name=POWERMETRICS,
        kind=Kind.SAMPLER,
        scope=Scope.PACKAGE,
        source="powermetrics --samplers cpu_power",
        refresh_s=PERIOD_S,
        resolution=0.001,
        poll_s=PERIOD_S,
        lag_s=PERIOD_S,
        needs="root",
        systematic="Apple's own model, not a sensor at the battery",
        notes=("without the display; without memory on newer systems",),
    )

    def read() -> list[tuple[str, float]]:
        done = _run(system)
        watts = package_watts(parse_powermetrics(done.text))
        if watts is None:
            raise MeterError(f"powermetrics printed no power: {done.first_line}; {REMEDY}")
        return [("package", watts)]

    return SumMeter(system, facts, read)


def find_powermetrics(system: System) -> list[Finding]:
    """Returns the finding of powermetrics; an empty list on other machines."""
    if system.platform != "darwin":
        return []
    done = _run(system)
    if parse_powermetrics(done.text):
        return [usable(powermetrics_meter(system))]
    if done.code == NOT_FOUND:
        return [absent(POWERMETRICS, "no powermetrics command on this Mac")]
    if done.code == 0:
        reason, remedy = "powermetrics prints no power that this version reads", "report its output: powermetrics -n 1 -i 1000"
        return [present(POWERMETRICS, reason, remedy)]
    return [present(POWERMETRICS, "denied to this user", REMEDY)]


def _run(system: System) -> CommandResult:
    return system.run(["powermetrics", "-n", "1", "-i", f"{PERIOD_S * 1000:.0f}", "--samplers", "cpu_power"])


SOURCES = (
    MeterSource(name=IOREPORT, find=find_ioreport, preference=Preference.COUNTER),
    MeterSource(name=POWERMETRICS, find=find_powermetrics, preference=Preference.MODEL),
)
