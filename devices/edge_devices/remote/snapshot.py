"""Fetches a device's files and command outputs with one command. Meters and state are then read from them as on the device.

`preflight_refusals` and `preflight_warnings` say what speaks against a run there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from edge_devices.errors import byte_text, one_line
from edge_devices.files.limited_read import parse_integer
from edge_devices.machine.memory import mem_available
from edge_devices.machine.state import (
    STATE_COMMANDS,
    STATE_FILES,
    DeviceState,
    read_phone,
    read_state,
    refusals,
    thermal_name,
    warnings,
)
from edge_devices.machine.system import NOT_FOUND, CommandResult, System
from edge_devices.meters.search import SOURCES
from edge_devices.remote.file_sync import free_bytes
from edge_devices.remote.transport import Transport, shell


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Texts of files and outputs of commands. `denied` are files that exist but are not readable. `traces` are binary outputs."""

    platform: str = "linux"
    files: dict[str, str] = field(default_factory=dict)
    denied: tuple[str, ...] = ()
    commands: dict[str, tuple[int, str]] = field(default_factory=dict)
    traces: dict[str, bytes] = field(default_factory=dict)


class RecordedSystem(System):
    """A machine whose files and commands come from a recording, of a remote device or in tests. Commands that are not in it are unknown."""

    def __init__(self, recording: Recording, **fields: Any) -> None:
        """`fields` are clock and sleep, if a test needs its own."""
        answers = recording.commands

        def run(arguments: Sequence[str], answer: bytes = b"", seconds: float = 10.0) -> CommandResult:  # noqa: ARG001
            command = " ".join(arguments)
            if command in recording.traces:
                return CommandResult(code=0, output=recording.traces[command])
            code, text = answers.get(command, (NOT_FOUND, ""))
            return CommandResult(code=code, output=text.encode("utf-8", "replace"))

        super().__init__(platform=recording.platform, run=run, **fields)
        object.__setattr__(self, "_recording", recording)
        object.__setattr__(self, "_paths", sorted({*recording.files, *recording.denied}))

    def text(self, path: str) -> str:
        """Returns a recorded file. Raises the same errors as on the device."""
        recording: Recording = vars(self)["_recording"]
        if path in recording.denied:
            raise PermissionError(13, "Permission denied", path)
        if path not in recording.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return recording.files[path].strip()

    def paths(self, pattern: str) -> list[str]:
        """Returns the recorded files and folders that match, sorted."""
        parts = pattern.split("/")
        heads = {tuple(p.split("/")[: len(parts)]) for p in vars(self)["_paths"]}
        return sorted("/".join(h) for h in heads if len(h) == len(parts) and all(map(fnmatchcase, h, parts)))

    def exists(self, path: str) -> bool:
        """Returns whether a file or folder was recorded."""
        return any(p == path or p.startswith(path + "/") for p in vars(self)["_paths"])


MODEL, PROCESSOR = ("getprop", "ro.product.model"), ("uname", "-m")
# The files and commands from which meters and the state of a machine are read.
FILES = tuple(dict.fromkeys([*STATE_FILES, *(file for source in SOURCES for file in source.files)]))
QUERIES = tuple(dict.fromkeys([*STATE_COMMANDS, *(command for source in SOURCES for command in source.commands), MODEL, PROCESSOR]))
MIN_FREE_BYTES = 64 << 20  # for results, logs and temporary files
FLAT, LOW = 10, 30  # percent
TOO_HOT, WARM = 45.0, 38.0  # °C of a phone's battery
# The names that `uname -m` prints for the processors of a package's platform.
PROCESSORS = {"arm64": ("aarch64", "arm64"), "x64": ("x86_64", "amd64")}
MARK = "\x01"  # precedes each file and command; sensors never print it
SCRIPT = f"""
cd / || exit 1
for f in {" ".join(FILES)} system/build.prop; do
  test -f "$f" || continue
  if ! test -r "$f"; then printf '{MARK}denied %s\\n' "$f"; continue; fi
  printf '{MARK}file %s\\n' "$f"; test "$f" = system/build.prop || head -c 65536 "$f" 2>/dev/null
done
for c in "$@"; do
  command -v "${{c%% *}}" > /dev/null || continue
  output="$($c 2>/dev/null)"; code=$?
  printf '{MARK}command %s %s\\n%s' "$code" "$c" "$output"
done
exit 0
"""


@dataclass(frozen=True, kw_only=True)
class DeviceSnapshot:
    """The facts and the state of a device at one moment.

    Values that it does not report are None. `free_bytes` and `memory_available` are in bytes. `frozen` means that the battery service is
    frozen.
    """

    model: str
    architecture: str
    android: bool
    state: DeviceState
    free_bytes: int | None
    memory_available: int | None
    frozen: bool
    system: RecordedSystem


def take_snapshot(transport: Transport) -> DeviceSnapshot:
    """Takes a snapshot without changing the device. Raises LinkError if it cannot be reached."""
    recording = _parse(shell(transport, SCRIPT, *(" ".join(c) for c in QUERIES)))
    system = RecordedSystem(recording, sleep=lambda _seconds: None)  # a recording never changes, so waiting is pointless
    android = "system/build.prop" in recording.files
    model = system.run(MODEL).text.strip() if android else system.text_or("proc/device-tree/model").rstrip("\0")
    return DeviceSnapshot(
        model=one_line(model),
        architecture=one_line(system.run(PROCESSOR).text.strip()),
        android=android,
        state=read_state(system),
        free_bytes=free_bytes(transport, transport.folder),
        memory_available=mem_available(system.text_or("proc/meminfo")),
        frozen=android and read_phone(system).frozen,
        system=system,
    )


def _parse(text: str) -> Recording:
    files, denied, commands = {}, [], {}
    for part in text.split(MARK)[1:]:
        head, _, body = part.partition("\n")
        kind, _, name = head.partition(" ")
        if kind == "file":
            files[name] = body.replace("\0", "")
        elif kind == "denied":
            denied.append(name)
        elif kind == "command":
            code, _, command = name.partition(" ")
            commands[command] = (1 if (number := parse_integer(code)) is None else number, body)
    return Recording(platform="linux", files=files, denied=tuple(denied), commands=commands)


def preflight_refusals(snapshot: DeviceSnapshot, *, platform: str, at_battery: bool, waits_for_unplugging: bool = False) -> list[str]:
    """Returns the reasons against a run as sentences. `at_battery` says that energy is read from the device's own battery."""
    sentences = []
    names = PROCESSORS.get(platform.rpartition("-")[2], ())
    if names and snapshot.architecture and snapshot.architecture not in names:
        sentences.append(f"the package is for {platform}, but the device's processor is {snapshot.architecture}: build a package for it")
    if snapshot.free_bytes is not None and snapshot.free_bytes < MIN_FREE_BYTES:
        sentences.append(
            f"{byte_text(snapshot.free_bytes)} are free on the device, and {byte_text(MIN_FREE_BYTES)} are needed for results: delete files"
        )
    if snapshot.frozen and at_battery:
        sentences.append("the battery service is frozen and reports fixed values: run `dumpsys battery reset` on the device")
    percent = snapshot.state.charge_percent
    if percent is not None and percent < FLAT and (not snapshot.state.charger or waits_for_unplugging):
        sentences.append(f"the battery is at {percent} %: charge it first, or it runs empty during the run")
    if snapshot.android and snapshot.state.temperature_c is not None and snapshot.state.temperature_c >= TOO_HOT:
        sentences.append(f"the phone is at {snapshot.state.temperature_c:.0f} °C: let it cool below {TOO_HOT:.0f} °C")
    reasons = refusals(snapshot.state, at_battery=at_battery)
    # A job that waits for unplugging is checked again after that.
    return sentences + [refusal.sentence for refusal in reasons if not (waits_for_unplugging and refusal.code == "charger")]


def preflight_warnings(snapshot: DeviceSnapshot, *, model_bytes: int, at_battery: bool) -> list[str]:
    """Returns warnings for readers of the figures. `model_bytes` is the size of the files that a run maps into memory."""
    notes = warnings(snapshot.state)
    state = snapshot.state
    facts = {
        "the device's processor": snapshot.architecture or None,
        "the free space on the device": snapshot.free_bytes,
        "the memory available": snapshot.memory_available,
    }
    notes += [f"not known: {name}" for name, value in facts.items() if value is None]
    if snapshot.memory_available is not None and snapshot.memory_available < model_bytes:
        notes.append(
            f"{byte_text(snapshot.memory_available)} of memory are available and the model has {byte_text(model_bytes)}: "
            "it will be read from storage repeatedly"
        )
    if state.charger and not at_battery and snapshot.android:
        notes.append(f"{state.charger} charges the phone, which heats it")
    if state.charge_percent is not None and FLAT <= state.charge_percent < LOW and not state.charger:
        notes.append(f"the battery is at {state.charge_percent} %, where the voltage sags")
    if snapshot.android and state.temperature_c is not None and WARM <= state.temperature_c < TOO_HOT:
        notes.append(f"the phone is already at {state.temperature_c:.0f} °C")
    if state.thermal_status == 1:
        notes.append(f"the phone's thermal status is {thermal_name(1)}")
    return notes
