"""The battery's current from perfetto, which reads the health layer since Android 10 where the battery service's command does not.

Fields: protos/perfetto/trace/power/battery_counters.proto, config/power/android_power_config.proto and trace_packet.proto of perfetto.
"""

from __future__ import annotations

from collections.abc import Iterator

from edge_devices.errors import MeterError
from edge_devices.files.protobuf_wire import WireError, fields_of
from edge_devices.machine.system import System

PACKET, BATTERY, CURRENT_UA = 1, 38, 3  # Trace.packet; TracePacket.battery; BatteryCounters.current_ua
RECORD_S = 0.6
COMMAND = ("perfetto", "--txt", "-c", "-", "-o", "-")
CONFIG = f"""
buffers {{ size_kb: 64 fill_policy: RING_BUFFER }}
data_sources {{ config {{ name: "android.power" android_power_config {{
  battery_poll_ms: 250 battery_counters: BATTERY_COUNTER_CURRENT }} }} }}
duration_ms: {RECORD_S * 1000:.0f}
"""


def read_current(system: System) -> int | None:
    """Returns the newest current in the phone's unit and sign; None where perfetto records none. A read takes 0.6 s."""
    done = system.run(COMMAND, CONFIG.encode(), RECORD_S + 10)
    return None if done.code != 0 else last_current(done.output)


def last_current(trace: bytes) -> int | None:
    """Returns the last current of a trace. Raises MeterError for a damaged one."""
    found = None
    try:
        for packet in _messages(trace, PACKET):
            for counters in _messages(packet, BATTERY):
                for number, value in fields_of(counters):
                    if number == CURRENT_UA and isinstance(value, int):
                        found = value - (1 << 64) if value >> 63 else value
    except WireError as error:
        raise MeterError(f"the trace is damaged ({error}); record it again") from error
    return found


def _messages(message: bytes, wanted: int) -> Iterator[bytes]:
    yield from (value for number, value in fields_of(message) if number == wanted and isinstance(value, bytes))
