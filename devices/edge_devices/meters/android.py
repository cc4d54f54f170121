"""Meters of Android devices: power rails from the kernel's files or from the power-stats service, and the battery's gauge.

Each kind has a section in this file, which ends with its `find` function. `SOURCES` at the end lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from edge_devices.errors import MeterError, errors_as
from edge_devices.files.protobuf_wire import WireError, fields_of
from edge_devices.machine.state import SUPPLIES, SUPPLY_FILES, Supply, external_power, parse_dumpsys, read_fields
from edge_devices.machine.system import CommandResult, System
from edge_devices.meters.base import Finding, Kind, MeterFacts, MeterSource, Preference, Scope, SumMeter, absent, present, tried, usable

# Two of the meters record short traces with the system's perfetto, which can read power rails and the battery's current from the hardware
# layers without root. Fields: protos/perfetto/trace/power/battery_counters.proto and power_rails.proto, trace_packet.proto and
# config/power/android_power_config.proto of perfetto.

PACKET, BATTERY_COUNTERS, CURRENT_UA = 1, 38, 3  # Trace.packet; TracePacket.battery; BatteryCounters.current_ua
POWER_RAILS, DESCRIPTOR, ENERGY = 40, 1, 2  # TracePacket.power_rails; PowerRails.rail_descriptor, .energy_data
COMMAND = ("perfetto", "--txt", "-c", "-", "-o", "-")
CONFIG = """
buffers {{ size_kb: 256 fill_policy: RING_BUFFER }}
data_sources {{ config {{ name: "android.power" android_power_config {{ battery_poll_ms: 250 {what} }} }} }}
duration_ms: {milliseconds}
"""


def record_current(system: System) -> int | None:
    """Returns the battery's newest current in the phone's unit and sign; None if perfetto records none. A read takes 0.6 s."""
    done = _record(system, "battery_counters: BATTERY_COUNTER_CURRENT", 0.6)
    return None if done.code != 0 else last_current(done.output)


def record_rails(system: System) -> CommandResult:
    """Records the power rails for half a second."""
    return _record(system, "collect_power_rails: true", 0.5)


def _record(system: System, what: str, seconds: float) -> CommandResult:
    return system.run(COMMAND, CONFIG.format(what=what, milliseconds=round(seconds * 1000)).encode(), seconds + 10)


def last_current(trace: bytes) -> int | None:
    """Returns the last current in a trace. Raises MeterError if it is damaged."""
    newest = None
    for counters in _packets(trace, BATTERY_COUNTERS):
        for number, value in _fields(counters):
            if number == CURRENT_UA and isinstance(value, int):
                newest = value - (1 << 64) if value >> 63 else value
    return newest


def parse_rail_trace(trace: bytes) -> dict[str, int]:
    """Returns the last microjoules of each rail in a trace, by name. Raises MeterError if it is damaged."""
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


# Power rail monitors of Pixel 6 and later, read from the kernel's iio files.
#
# Format (kernel driver s2mpg1x odpm, as quoted in Android's own power scripts): `t=<ms>`, then one line per channel
# `CH3(T=<ms>)[S2M_VDD_CPUCL2], <µW·s since start>`. Channels can be assigned to other rails, so a rail is identified by name. The battery
# feeds the rails, so their figures are valid while charging too.

RAIL_FILES = "sys/bus/iio/devices/iio:device*/energy_value"
RAIL_LINE = re.compile(r"CH\d+(?:\(T=\d+\))?\[([^\]]+)\],\s*(\d{1,18})\b")
RAILS = "android:rails"


def parse_rails(text: str) -> dict[str, int]:
    """Parses an energy_value file. Returns microjoules by rail name."""
    return {name: int(microjoules) for name, microjoules in RAIL_LINE.findall(text)}


def rails_meter(system: System, paths: list[str]) -> SumMeter:
    """Returns the meter of the sum of all monitored rails, in joules."""
    facts = MeterFacts(
        name=RAILS,
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


def find_rails(system: System) -> list[Finding]:
    """Returns the finding of the rail monitors; an empty list on other machines."""
    paths = system.paths(RAIL_FILES)
    if not paths:
        return [absent(RAILS, "no rail monitor (Pixel 6 and later have one)")] if system.is_android else []
    denied = f"/{paths[0]} is denied to this user", "adb root, where the build allows it; or use android:powerstats"
    return [tried(rails_meter(system, paths), denied)]


# Power rails of Android's power-stats service. Each read records a trace. `dumpsys powerstats` lists the channels without that cost.

POWERSTATS = "android:powerstats"
CHANNEL = re.compile(r"ChannelId:\s*(\d{1,18}),\s*ChannelName:\s*([^,\s]+)")


def parse_channels(text: str) -> dict[int, str]:
    """Parses the output of `dumpsys powerstats`. Returns rail names by channel number."""
    return {int(number): name for number, name in CHANNEL.findall(text)}


def service_meter(system: System) -> SumMeter:
    """Returns the meter of the sum of all rails that the service meters, in joules. A read records for half a second."""
    facts = MeterFacts(
        name=POWERSTATS,
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
        rails = parse_rail_trace(done.output)
        if not rails:
            raise MeterError("perfetto recorded no power rails; the maker's power-stats layer meters none; use android:battery")
        return rails.items()

    return SumMeter(system, facts, read, scale=1e-6)


def find_powerstats(system: System) -> list[Finding]:
    """Returns the finding of the power-stats service; an empty list on other machines."""
    if not system.is_android:
        return []
    channels = parse_channels(system.run(["dumpsys", "powerstats"]).text)
    if not channels:
        return [absent(POWERSTATS, "`dumpsys powerstats` lists no channels: this phone's maker meters no rails")]
    return [tried(service_meter(system))]


# The battery gauge of an Android device, read through the battery service, which works for the shell user, or from its sysfs files.
#
# The specification requires microamperes, positive while charging, but some makers use another unit or sign. So the sign is ignored, and
# the charging status gives the direction. The unit is the one in which an idle device takes 0.1 to 6 W (3 W in mA), which holds for only
# one unit.

AMPERES = {"µA": 1e-6, "mA": 1e-3}
# Watts of an idle device that is awake. If it slept, its microamperes could be taken as milliamperes, a thousand times as much, from 3 mW
# on.
PLAUSIBLE_WATTS = {"µA": (0.1, 6.0), "mA": (0.1, 3.0)}
UNSUPPORTED = -(1 << 31)
DISCHARGING = "3"  # BatteryManager.BATTERY_STATUS_DISCHARGING
CELL_VOLTS, MAX_CELL_VOLTS = 3.85, 5.0
PACK_VOLTS = (2.5, 10.0)  # one or two lithium cells in series
TWO_CELL_MAKERS = ("oneplus", "oppo", "realme", "vivo")
BATTERY, SYSFS = "android:battery", "android:battery-sysfs"
SYSFS_NAMES = ("battery", "bms", "main")
CURRENT_QUERY = ("cmd", "battery", "get", "-f", "current_now")
MAKER_QUERY = ("getprop", "ro.product.manufacturer")
_ATTEMPTS = 8  # readings, half a second apart, until the gauge shows a current
UNPLUG = "unplug the cable and measure on the device alone; never use `dumpsys battery unplug`, which only fakes it"


class Gauge(NamedTuple):
    """One reading of a gauge: the current in its own unit and sign, and volts. `current` is None if the gauge shows a false zero."""

    current: int | None
    volts: float


def volts_of(text: str) -> float:
    """Returns the voltage in volts. It is given in millivolts, on some systems in microvolts or whole volts.

    Whole volts are replaced by the mean voltage of the cells.
    """
    if not re.fullmatch(r"\d{1,8}", text) or not int(text):
        raise MeterError(f"the battery's voltage reads {text!r}, which is not a voltage; use another meter")
    number = int(text)
    volts = number * 1e-6 if number >= 1_000_000 else number * 1e-3 if number >= 100 else CELL_VOLTS * max(1, round(number / CELL_VOLTS))
    if not PACK_VOLTS[0] <= volts <= PACK_VOLTS[1]:
        raise MeterError(f"the battery's voltage reads {text!r}, {volts:g} V, which no phone's battery has; use another meter")
    return volts


def voltage_notes(text: str, maker: str) -> tuple[str, ...]:
    """Returns notes about the voltage with which the figures were computed, for their readers."""
    if re.fullmatch(r"\d{1,2}", text):
        return (f"the voltage is told in whole volts ({text}): {volts_of(text):g} V taken, up to 15 % off",)
    if volts_of(text) > MAX_CELL_VOLTS:
        return (f"{volts_of(text):.3g} V: two cells in series, and their power together",)
    if maker.lower() in TWO_CELL_MAKERS:
        return (f"{maker} builds phones with two cells in series: if this is one, its power is twice these figures; compare a USB meter's",)
    return ()


def require_unplugged(fields: dict[str, str]) -> None:
    """Raises MeterError unless the service reports that the device discharges and no charger powers it."""
    powered = sorted(k for k, v in fields.items() if k.endswith(" powered") and v == "true")
    if powered:
        raise MeterError(f"{powered[0]}: a battery's figures mean the load only while unplugged; {UNPLUG}")
    if fields.get("status") != DISCHARGING:
        raise MeterError(f"the battery's status is {fields.get('status')}, not {DISCHARGING} (discharging); {UNPLUG}")


def current_unit(current: int, volts: float) -> str:
    """Returns the only unit in which this current is a plausible power for an idle device. Raises MeterError if there is none."""
    for unit, amperes in AMPERES.items():
        low, high = PLAUSIBLE_WATTS[unit]
        if low <= abs(current) * amperes * volts <= high:
            return unit
    raise MeterError(
        f"a current of {current} at {volts:g} V is no idle power in microamperes (0.1 to 6 W) or milliamperes (0.1 to 3 W): "
        "it sleeps or works; turn the screen on, stop other work, and try again"
    )


def gauge_meter(system: System, name: str, source: str, read_gauge: Callable[[System], Gauge], notes: tuple[str, ...]) -> SumMeter:
    """Returns the meter of current × voltage of a gauge, in watts. The unit is found from the first current that is not 0."""
    unit = _first_unit(system, read_gauge)
    facts = MeterFacts(
        name=name,
        kind=Kind.SAMPLER,
        scope=Scope.DEVICE,
        source=source,
        # Values of one phone: new values every 2.0 s in the median, after 7 s at most; a load shows after up to 7 s. Characterisation
        # measures both.
        refresh_s=2.0,
        resolution=AMPERES[unit] * 4.0,
        poll_s=0.5,
        lag_s=7.0,
        needs="the cable unplugged",
        systematic="gauge gain 1-5 %",
        notes=(f"current taken as {unit}, sign dropped", "whole device: display and radios included", *notes),
    )

    def read() -> list[tuple[str, float]] | None:
        gauge = read_gauge(system)
        return [(f"{gauge.volts:g} V", abs(gauge.current) * AMPERES[unit] * gauge.volts)] if gauge.current else None

    return SumMeter(system, facts, read)


def _first_unit(system: System, read_gauge: Callable[[System], Gauge]) -> str:
    for _ in range(_ATTEMPTS):
        gauge = read_gauge(system)
        if gauge.current:
            return current_unit(gauge.current, gauge.volts)
        system.sleep(0.5)
    raise MeterError(f"the gauge answered no current {_ATTEMPTS} times; it may not measure one; use a meter in the supply line")


def read_service(system: System) -> Gauge:
    """Reads the battery service. Raises MeterError if it is frozen, if the device is charging, or if it reports no current."""
    state = system.run(["dumpsys", "battery"])
    if state.code != 0:
        raise MeterError(f"`dumpsys battery` failed: {state.errors.strip() or state.code}")
    fields = parse_dumpsys(state.text)
    require_unplugged(fields)
    return Gauge(_service_current(system, fields) or None, volts_of(fields.get("voltage", "")))


def _service_current(system: System, fields: dict[str, str]) -> int:
    """Returns the current from `cmd battery`, else from Samsung's line in `dumpsys battery`, else from perfetto."""
    answer = system.run(CURRENT_QUERY)
    text = answer.text.strip()
    if not re.fullmatch(r"-?\d{1,12}", text) or int(text) == UNSUPPORTED:
        text = fields.get("current now", "")
    if re.fullmatch(r"-?\d{1,12}", text):
        return int(text)
    current = record_current(system)
    if current is None:
        raise MeterError(
            f"`cmd battery get -f current_now` answered {answer.first_line!r}, and neither `dumpsys battery` nor perfetto has the current;"
            " use a meter in the supply line"
        )
    return current


def read_sysfs(system: System, folder: str) -> Gauge:
    """Reads the gauge's files. Raises MeterError if access is denied, the device is charging, or values are missing."""
    try:
        supply = Supply(name=folder.rpartition("/")[2], fields=read_fields(system, folder))
    except PermissionError as error:
        raise MeterError(f"/{folder} is denied to this user") from error
    charger = external_power(system)
    if charger:
        raise MeterError(f"{charger} supplies power; {UNPLUG}")
    if supply.status not in ("Discharging", "Unknown"):
        raise MeterError(f"/{folder} says {supply.status}; {UNPLUG}")
    current, microvolts = supply.number("CURRENT_NOW"), supply.number("VOLTAGE_NOW")
    if current is None or not microvolts:
        raise MeterError(f"/{folder} tells no current_now with voltage_now; use another meter")
    return Gauge(current or None, microvolts * 1e-6)


def find_service_gauge(system: System) -> list[Finding]:
    """Returns the finding of the gauge that the battery service reads; an empty list on other machines."""
    if not system.is_android:
        return []
    return [_finding(system, BATTERY, "cmd battery get -f current_now, dumpsys battery or perfetto", read_service)]


def find_sysfs_gauge(system: System) -> list[Finding]:
    """Returns the finding of the gauge that is read from files; an empty list on other machines."""
    if not system.is_android:
        return []
    folder = next((f"{SUPPLIES}/{name}" for name in SYSFS_NAMES if system.exists(f"{SUPPLIES}/{name}")), None)
    if folder is None:
        return [absent(SYSFS, f"none of {', '.join(SYSFS_NAMES)} below /{SUPPLIES}")]
    return [_finding(system, SYSFS, f"/{folder}", lambda here: read_sysfs(here, folder))]


def _finding(system: System, name: str, source: str, read_gauge: Callable[[System], Gauge]) -> Finding:
    try:
        return usable(gauge_meter(system, name, source, read_gauge, _notes(system)))
    except MeterError as error:
        denied = isinstance(error.__cause__, PermissionError)
        return present(name, str(error), "use android:battery, which the shell user may read; or root" if denied else "")


def _notes(system: System) -> tuple[str, ...]:
    maker = system.run(MAKER_QUERY).text.strip()
    try:
        return voltage_notes(parse_dumpsys(system.run(["dumpsys", "battery"]).text).get("voltage", ""), maker[:32])
    except MeterError:  # the service is frozen or missing, which the gauge's reading reports itself
        return ()


SOURCES = (
    MeterSource(name=RAILS, find=find_rails, preference=Preference.COUNTER, files=(RAIL_FILES,)),
    MeterSource(name=POWERSTATS, find=find_powerstats, preference=Preference.COUNTER, commands=(("dumpsys", "powerstats"),)),
    MeterSource(
        name=BATTERY,
        find=find_service_gauge,
        preference=Preference.BATTERY,
        commands=(("dumpsys", "battery"), CURRENT_QUERY, MAKER_QUERY),
    ),
    MeterSource(
        name=SYSFS,
        find=find_sysfs_gauge,
        preference=Preference.BATTERY,
        files=SUPPLY_FILES,
        commands=(("dumpsys", "battery"), MAKER_QUERY),
    ),
)
