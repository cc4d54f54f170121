"""Power rails of Android's power-stats service, read by recording a short trace with the system's perfetto.

No file access is needed: perfetto reads the hardware layer. `dumpsys powerstats` lists the channels without the cost of a trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.android.perfetto import parse_rails, record_rails
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, tried

NAME = "android:powerstats"
CHANNEL = re.compile(r"ChannelId:\s*(\d{1,18}),\s*ChannelName:\s*([^,\s]+)")


def parse_channels(text: str) -> dict[int, str]:
    """Reads `dumpsys powerstats`: channel number -> rail name."""
    return {int(number): name for number, name in CHANNEL.findall(text)}


def service_meter(system: System) -> SumMeter:
    """Returns the meter of all rails that the service meters together, in joules. A read records for half a second."""
    facts = MeterFacts(
        name=NAME,
        kind=Kind.COUNTER,
        scope=Scope.RAILS,
        source="perfetto, data source android.power",
        refresh_s=0.25,
        resolution=1e-6,
        poll_s=5.0,
        lag_s=0.25,
        needs="Android 10 or later, and rails that the maker's power-stats layer meters",
        notes=("only the metered rails; a read takes half a second and some energy of its own",),
    )

    def read() -> Iterable[tuple[str, float]]:
        done = record_rails(system)
        if done.code != 0:
            raise MeterError(f"perfetto failed: {done.errors.strip().splitlines()[-1] if done.errors.strip() else done.code}")
        rails = parse_rails(done.output)
        if not rails:
            raise MeterError("perfetto recorded no power rails; the maker's power-stats layer meters none; use android:battery")
        return rails.items()

    return SumMeter(system, facts, read, scale=1e-6)


def find(system: System) -> list[Finding]:
    """Returns the finding of the power-stats service; an empty list on other machines."""
    if not system.is_android:
        return []
    channels = parse_channels(system.run(["dumpsys", "powerstats"]).text)
    if not channels:
        return [absent(NAME, "`dumpsys powerstats` lists no channels: this phone's maker meters no rails")]
    return [tried(service_meter(system))]
