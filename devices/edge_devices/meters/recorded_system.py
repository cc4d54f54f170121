"""Recordings of the files and command outputs that meters read, so that meters can be tested on devices that are not at hand.

Only the files and commands below are captured, all of them about power, clocks and temperatures. Serial numbers are left out; names of
users, networks, files or programs are in none of them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from edge_devices.errors import MeterError
from edge_devices.files.atomic_write import write_text
from edge_devices.machine.system import CommandResult, System
from edge_devices.meters.android.perfetto import COMMAND, only_rails, record_rails

SCHEMA = 1
NAME = "recording.json"
_NAMES = {
    "sys/class/powercap/intel-rapl*": "name energy_uj max_energy_range_uj",
    "sys/class/power_supply/*": "uevent type status online *_now charge_counter",
    "sys/bus/iio/devices/iio:device*": "energy_value enabled_rails sampling_rate",
    "sys/class/hwmon/hwmon*": "name *_input *_average *_average_interval *_label update_interval",
    "sys/bus/i2c/drivers/ina3221*/*/hwmon/hwmon*": "*_input *_label",
    "sys/bus/i2c/drivers/ina238/*/hwmon/hwmon*": "*_input *_label",
    "sys/bus/i2c/drivers/ina3221x/*/iio:device*": "rail_name_* in_power*_input",
    "sys/devices/system/cpu/cpufreq/policy*": "*_max_freq scaling_cur_freq scaling_governor related_cpus",
    "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle": "*_throttle_count",
    "sys/devices/system/cpu/cpu0/microcode": "version",
    "sys/class/thermal/thermal_zone*": "type temp",
    "sys/class/thermal/cooling_device*": "type cur_state",
    "proc": "device-tree/model cpuinfo meminfo",
}
FILES = tuple(f"{folder}/{name}" for folder, names in _NAMES.items() for name in names.split())
COMMANDS = {
    "android": (
        ("dumpsys", "battery"),
        ("cmd", "battery", "get", "-f", "current_now"),
        ("dumpsys", "powerstats"),
        ("getprop", "ro.soc.model"),
        ("getprop", "ro.product.manufacturer"),
    ),
    "raspberry": (("vcgencmd", "pmic_read_adc"), ("vcgencmd", "get_throttled"), ("vcgencmd", "measure_temp")),
    "darwin": (("powermetrics", "-n", "1", "-i", "1000", "--samplers", "cpu_power"),),
}
PRIVATE = re.compile(r"serial|uuid|address|owner", re.IGNORECASE)
POWERSTATS_LINE = re.compile(r"ChannelId:|PowerStats")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Texts of files and outputs of commands. `denied`: files that exist but are not readable; `traces`: binary outputs."""

    platform: str = "linux"
    files: dict[str, str] = field(default_factory=dict)
    denied: tuple[str, ...] = ()
    commands: dict[str, tuple[int, str]] = field(default_factory=dict)
    traces: dict[str, bytes] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        commands = [{"command": c, "code": code, "output": text} for c, (code, text) in self.commands.items()]
        traces = {command: base64.b64encode(trace).decode() for command, trace in self.traces.items()}
        record = {"schema": SCHEMA, "platform": self.platform, "files": self.files, "denied": list(self.denied), "commands": commands}
        return record | ({"traces": traces} if traces else {})


class RecordedSystem(System):
    """A machine that is only a recording; every command not in it is unknown."""

    def __init__(self, recording: Recording, **fields: Any) -> None:
        """`fields`: clock and sleep, where a test needs its own."""
        answers = recording.commands

        def run(arguments: Sequence[str], answer: bytes = b"", seconds: float = 10.0) -> CommandResult:  # noqa: ARG001
            command = " ".join(arguments)
            if command in recording.traces:
                return CommandResult(code=0, output=recording.traces[command])
            code, text = answers.get(command, (127, ""))
            return CommandResult(code=code, output=text.encode("utf-8", "replace"))

        super().__init__(platform=recording.platform, run=run, **fields)
        object.__setattr__(self, "_recording", recording)
        object.__setattr__(self, "_paths", sorted({*recording.files, *recording.denied}))

    def text(self, path: str) -> str:
        """Returns a recorded file; raises as on the device."""
        recording: Recording = vars(self)["_recording"]
        if path in recording.denied:
            raise PermissionError(13, "Permission denied", path)
        if path not in recording.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return recording.files[path].strip()

    def paths(self, pattern: str) -> list[str]:
        """Returns the recorded files and their folders that match, sorted."""
        parts = pattern.split("/")
        heads = {tuple(p.split("/")[: len(parts)]) for p in vars(self)["_paths"]}
        return sorted("/".join(h) for h in heads if len(h) == len(parts) and all(map(fnmatchcase, h, parts)))

    def exists(self, path: str) -> bool:
        """Returns whether a file or folder was there."""
        return any(p == path or p.startswith(path + "/") for p in vars(self)["_paths"])


def record(system: System) -> Recording:
    """Records what the meters would read on this machine."""
    files: dict[str, str] = {}
    denied = []
    for pattern in FILES:
        for path in system.paths(pattern):
            try:
                files[path] = _without_private(system.text(path))
            except PermissionError:
                denied.append(path)
            except OSError:
                continue  # a sensor without a value: nothing to record
    if system.is_android:
        files["system/build.prop"] = ""  # only its existence matters
    commands = {}
    for arguments in _commands(system, files):
        done = system.run(arguments)
        if done.code != 127:
            commands[" ".join(arguments)] = (done.code, _answer(arguments, done.text))
    traces = _power_trace(system) if system.is_android else {}
    return Recording(platform=system.platform, files=files, denied=tuple(sorted(denied)), commands=commands, traces=traces)


def _power_trace(system: System) -> dict[str, bytes]:
    """The rails of the power-stats service, where there are any."""
    try:
        rails = only_rails(record_rails(system).output)
    except MeterError:
        rails = b""
    return {" ".join(COMMAND): rails} if rails else {}


def _commands(system: System, files: dict[str, str]) -> list[tuple[str, ...]]:
    kinds = []
    if system.is_android:
        kinds.append("android")
    if files.get("proc/device-tree/model", "").startswith("Raspberry Pi"):
        kinds.append("raspberry")
    if system.platform == "darwin":
        kinds.append("darwin")
    return [c for kind in kinds for c in COMMANDS[kind]]


def _without_private(text: str) -> str:
    return "\n".join(line for line in text.replace("\0", "").splitlines() if not PRIVATE.search(line))


def _answer(arguments: Sequence[str], text: str) -> str:
    """The rest of `dumpsys powerstats` lists what ran on the device; only its channels are recorded."""
    if "powerstats" in arguments:
        return "\n".join(line for line in text.splitlines() if POWERSTATS_LINE.search(line))
    return _without_private(text)


def write_recording(folder: Path, recording: Recording) -> Path:
    """Writes `recording.json` into a folder atomically; returns its path."""
    path = folder / NAME
    write_text(path, [json.dumps(recording.to_json(), indent=1, ensure_ascii=False), "\n"], parents=True)
    return path
