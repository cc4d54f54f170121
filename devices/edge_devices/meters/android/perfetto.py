"""Short traces of the system's perfetto: the battery's current and the power rails, from the health and power-stats layers, without root.

Fields: protos/perfetto/trace/power/battery_counters.proto and power_rails.proto, config/power/android_power_config.proto and
trace_packet.proto of perfetto.
"""

from __future__ import annotations

from collections.abc import Iterator

from edge_devices.errors import MeterError, errors_as
from edge_devices.files.protobuf_wire import WireError, fields_of
from edge_devices.machine.system import CommandResult, System

PACKET, BATTERY, CURRENT_UA = 1, 38, 3  # Trace.packet; TracePacket.battery; BatteryCounters.current_ua
POWER_RAILS, DESCRIPTOR, ENERGY = 40, 1, 2  # TracePacket.power_rails; PowerRails.rail_descriptor, .energy_data
COMMAND = ("perfetto", "--txt", "-c", "-", "-o", "-")
CONFIG = """
buffers {{ size_kb: 256 fill_policy: RING_BUFFER }}
data_sources {{ config {{ name: "android.power" android_power_config {{ battery_poll_ms: 250 {what} }} }} }}
duration_ms: {milliseconds}
"""


def record_current(system: System) -> int | None:
    """Returns the battery's newest current in the phone's unit and sign; None where perfetto records none. A read takes 0.6 s."""
    done = _record(system, "battery_counters: BATTERY_COUNTER_CURRENT", 0.6)
    return None if done.code != 0 else last_current(done.output)


def record_rails(system: System) -> CommandResult:
    """Records the power rails for half a second."""
    return _record(system, "collect_power_rails: true", 0.5)


def _record(system: System, what: str, seconds: float) -> CommandResult:
    return system.run(COMMAND, CONFIG.format(what=what, milliseconds=round(seconds * 1000)).encode(), seconds + 10)


def last_current(trace: bytes) -> int | None:
    """Returns the last current of a trace. Raises MeterError for a damaged one."""
    newest = None
    for counters in _packets(trace, BATTERY):
        for number, value in _fields(counters):
            if number == CURRENT_UA and isinstance(value, int):
                newest = value - (1 << 64) if value >> 63 else value
    return newest


def parse_rails(trace: bytes) -> dict[str, int]:
    """Reads a trace: rail -> its last microjoules. Raises MeterError for a damaged one."""
    names: dict[int, str] = {}
    latest: dict[int, int] = {}
    for kind, message in (field for rails in _packets(trace, POWER_RAILS) for field in _fields(rails)):
        fields = dict(_fields(message)) if isinstance(message, bytes) else {}
        index, name, energy = fields.get(1, 0), fields.get(2), fields.get(3, 0)
        if kind == DESCRIPTOR and isinstance(index, int) and isinstance(name, bytes):
            names[index] = name.decode("utf-8", "replace")
        elif kind == ENERGY and fields and isinstance(index, int) and isinstance(energy, int):
            latest[index] = max(energy, latest.get(index, 0))
    return {names.get(i, f"rail{i}"): energy for i, energy in latest.items()}


def _packets(trace: bytes, kind: int) -> Iterator[bytes]:
    for number, packet in _fields(trace):
        if number == PACKET and isinstance(packet, bytes):
            yield from (value for field, value in _fields(packet) if field == kind and isinstance(value, bytes))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    with errors_as(MeterError, "the trace is damaged", "record it again", WireError):
        yield from fields_of(message)
