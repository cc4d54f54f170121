"""Power rails of Android's power-stats service, read by recording a short trace with the system's perfetto.

No file access is needed: perfetto reads the hardware layer. Fields: protos/perfetto/trace/power/power_rails.proto and trace_packet.proto of
perfetto. `dumpsys powerstats` lists the channels without the cost of a trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from edge_devices.errors import MeterError
from edge_devices.files.protobuf_wire import WireError, bytes_field, fields_of
from edge_devices.machine.system import CommandResult, System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Sample, Scope, absent, present, usable
from edge_devices.meters.counter_wrap import Unwrapped

NAME = "android:powerstats"
CHANNEL = re.compile(r"ChannelId:\s*(\d{1,18}),\s*ChannelName:\s*([^,\s]+)")
PACKET, POWER_RAILS, DESCRIPTOR, ENERGY = 1, 40, 1, 2  # Trace.packet; TracePacket.power_rails; PowerRails.rail_descriptor, .energy_data
RECORD_S = 0.5
COMMAND = ("perfetto", "--txt", "-c", "-", "-o", "-")
CONFIG = f"""
buffers {{ size_kb: 256 fill_policy: RING_BUFFER }}
data_sources {{ config {{ name: "android.power" android_power_config {{ battery_poll_ms: 250 collect_power_rails: true }} }} }}
duration_ms: {RECORD_S * 1000:.0f}
"""


def parse_channels(text: str) -> dict[int, str]:
    """Reads `dumpsys powerstats`: channel number -> rail name."""
    return {int(number): name for number, name in CHANNEL.findall(text)}


def parse_trace(trace: bytes) -> dict[str, int]:
    """Reads a perfetto trace: rail -> its last microjoules. Raises MeterError for a damaged trace."""
    names: dict[int, str] = {}
    latest: dict[int, int] = {}
    for rails in _power_rails(trace):
        _read_rails(rails, names, latest)
    return {names.get(i, f"rail{i}"): energy for i, energy in latest.items()}


def _read_rails(rails: bytes, names: dict[int, str], latest: dict[int, int]) -> None:
    for kind, message in _fields(rails):
        if kind not in (DESCRIPTOR, ENERGY) or not isinstance(message, bytes):
            continue
        fields = dict(_fields(message))
        index = fields.get(1, 0)
        name, energy = fields.get(2), fields.get(3, 0)
        if not isinstance(index, int):
            continue
        if kind == DESCRIPTOR and isinstance(name, bytes):
            names[index] = name.decode("utf-8", "replace")
        elif kind == ENERGY and isinstance(energy, int):
            latest[index] = max(energy, latest.get(index, 0))


def only_rails(trace: bytes) -> bytes:
    """Returns a trace reduced to its power rails; other packets identify the system. Raises MeterError for a damaged trace."""
    return b"".join(bytes_field(PACKET, bytes_field(POWER_RAILS, rails)) for rails in _power_rails(trace))


def _power_rails(trace: bytes) -> Iterator[bytes]:
    for packet in _messages(trace, PACKET):
        yield from _messages(packet, POWER_RAILS)


def _messages(message: bytes, wanted: int) -> Iterator[bytes]:
    yield from (value for number, value in _fields(message) if number == wanted and isinstance(value, bytes))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    try:
        yield from fields_of(message)
    except WireError as error:
        raise MeterError(f"the trace is damaged ({error}); record it again") from error


def record_trace(system: System) -> CommandResult:
    """Records a short trace."""
    return system.run(COMMAND, CONFIG.encode(), RECORD_S + 10)


class PowerStatsMeter:
    """The sum of all rails the service meters, in joules. A read records for half a second."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._registers: dict[str, Unwrapped] = {}
        self.facts = MeterFacts(
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

    def read(self) -> Sample:
        """Records a short trace; joules."""
        done = record_trace(self._system)
        if done.code != 0:
            raise MeterError(f"perfetto failed: {done.errors.strip().splitlines()[-1] if done.errors.strip() else done.code}")
        rails = parse_trace(done.output)
        if not rails:
            raise MeterError("perfetto recorded no power rails; the maker's power-stats layer meters none; use android:battery")
        if self._registers and self._registers.keys() != rails.keys():
            raise MeterError("the metered rails changed while measuring; measure again")
        for name in rails:
            self._registers.setdefault(name, Unwrapped(name, None))
        total = sum(self._registers[name].total(value) for name, value in rails.items())
        return Sample(self._system.clock(), total * 1e-6, " ".join(f"{n}={v}" for n, v in rails.items()))


def find(system: System) -> list[Finding]:
    """Returns the finding of the power-stats service; an empty list on other machines."""
    if not system.is_android:
        return []
    channels = parse_channels(system.run(["dumpsys", "powerstats"]).text)
    if not channels:
        return [absent(NAME, "`dumpsys powerstats` lists no channels: this phone's maker meters no rails")]
    meter = PowerStatsMeter(system)
    try:
        meter.read()
    except MeterError as error:
        return [present(NAME, str(error))]
    return [usable(meter)]
