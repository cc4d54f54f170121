"""Apple silicon: the energy counters of IOReport, the kernel's own library of statistics. They need no root, unlike `powermetrics`.

The library has no published header. Functions, types and the group's name are those that asitop's successors (socpowerbud, macmon) and
uzu use: the group "Energy Model" has one counter for each cluster and unit, in mJ, uJ or nJ since the system started; a machine of several
dies has a set for each. Nobody has run this module on a Mac yet; its test has made-up values in that form.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, present, tried

NAME = "apple:ioreport"
GROUP, CHANNELS = "Energy Model", "IOReportChannels"
LIBRARY, FOUNDATION = "/usr/lib/libIOReport.dylib", "/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation"
JOULES = {"mJ": 1e-3, "uJ": 1e-6, "nJ": 1e-9}
# Sums of a die's parts: the parts themselves (ECPU0, PCPU, GPU SRAM) are in them.
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
    """Returns a function that reads all counters of the group; None where there is no such library, as on other systems.

    Raises MeterError where the library gives none.
    """
    if sys.platform != "darwin":
        return None
    try:
        return _Library(ctypes.CDLL(LIBRARY), ctypes.CDLL(FOUNDATION)).subscribe()
    except OSError:
        return None


class _Library:
    """IOReport's functions, with CoreFoundation's that its objects need."""

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
    """Returns the joules of processor, graphics, neural engine and memory, by name. Raises MeterError without the processor's."""
    parts = [(counter.name, counter.value * JOULES[counter.unit]) for counter in counters if _is_counted(counter)]
    if not any(name.endswith("CPU Energy") for name, _ in parts):
        named = ", ".join(sorted({counter.name for counter in counters})[:8]) or "nothing"
        raise MeterError(f"IOReport counts no processor energy in a unit that is known (it has {named}); use apple:powermetrics")
    return parts


def _is_counted(counter: Counter) -> bool:
    return counter.unit in JOULES and COUNTED.fullmatch(counter.name) is not None


def package_meter(system: System, read: Callable[[], list[Counter]]) -> SumMeter:
    """Returns the meter of the package, in joules."""
    facts = MeterFacts(
        name=NAME,
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


def find(system: System, opened: Callable[[], Callable[[], list[Counter]] | None] = open_counters) -> list[Finding]:
    """Returns the finding of IOReport; an empty list on other machines."""
    if system.platform != "darwin":
        return []
    try:
        read = opened()
    except MeterError as error:
        return [present(NAME, str(error))]
    return [absent(NAME, "this system has no library of IOReport") if read is None else tried(package_meter(system, read))]
