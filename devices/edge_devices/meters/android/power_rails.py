"""On-device power rail monitors of Pixel 6 and later, through the kernel's iio files.

Format (kernel driver s2mpg1x odpm, as quoted in Android's own power scripts): `t=<ms>`, then one line per channel
`CH3(T=<ms>)[S2M_VDD_CPUCL2], <µW·s since start>`. Channels can be assigned to other rails, so a rail is identified by name. Rails are
behind the battery: their figures are valid while charging too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, tried

PATTERN = "sys/bus/iio/devices/iio:device*/energy_value"
LINE = re.compile(r"CH\d+(?:\(T=\d+\))?\[([^\]]+)\],\s*(\d{1,18})\b")
NAME = "android:rails"


def parse_rails(text: str) -> dict[str, int]:
    """Reads one energy_value file: rail name -> microjoules."""
    return {name: int(microjoules) for name, microjoules in LINE.findall(text)}


def rails_meter(system: System, paths: list[str]) -> SumMeter:
    """Returns the meter of all monitored rails of all monitors together, in joules."""
    facts = MeterFacts(
        name=NAME,
        kind=Kind.COUNTER,
        scope=Scope.RAILS,
        source=", ".join(f"/{p}" for p in paths),
        refresh_s=0.125,
        resolution=1e-6,
        poll_s=0.25,
        needs="read access to energy_value (root on some builds)",
        notes=("only the monitored rails, about 16 of them; not what the battery gives",),
    )

    def read() -> Iterable[tuple[str, float]]:
        rails: dict[str, int] = {}
        for path in paths:
            try:
                rails |= {f"{path.split('/')[-2]}/{name}": energy for name, energy in parse_rails(system.text(path)).items()}
            except OSError as error:
                raise MeterError(f"/{path} is no longer readable: {error.strerror}; measure again") from error
        if not rails:
            raise MeterError(f"/{paths[0]} lists no rails; the monitor may be off (see enabled_rails beside it)")
        return rails.items()

    return SumMeter(system, facts, read, scale=1e-6)


def find(system: System) -> list[Finding]:
    """Returns the finding of the rail monitors; an empty list on other machines."""
    paths = system.paths(PATTERN)
    if not paths:
        return [absent(NAME, "no rail monitor (Pixel 6 and later have one)")] if system.is_android else []
    denied = f"/{paths[0]} is denied to this user", "adb root, where the build allows it; or use android:powerstats"
    return [tried(rails_meter(system, paths), denied)]
