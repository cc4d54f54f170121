"""A snapshot of a remote device: the files and command outputs that meters and state are read from, fetched with one command."""

from __future__ import annotations

from dataclasses import dataclass

from edge_devices.errors import one_line
from edge_devices.machine.android import read_phone
from edge_devices.machine.memory import mem_available
from edge_devices.machine.state import DeviceState, read_state
from edge_devices.meters.recorded_system import COMMANDS, FILES, RecordedSystem, Recording
from edge_devices.transports.base import Transport, parse_integer, shell
from edge_devices.transports.file_sync import free_bytes

QUERIES = (
    *COMMANDS["android"],
    *COMMANDS["raspberry"],
    ("dumpsys", "thermalservice"),
    ("dumpsys", "deviceidle", "enabled", "all"),
    ("getprop", "ro.product.model"),
    ("uname", "-m"),
)
MARK = "\x01"  # precedes each file and command; no sensor prints it
# Of `dumpsys power`, which is long and lists what else runs, only the screen state is fetched.
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
printf '{MARK}screen\\n'; dumpsys power 2>/dev/null | grep -m 1 -o 'mWakefulness=[A-Za-z]*'
exit 0
"""


@dataclass(frozen=True, kw_only=True)
class DeviceSnapshot:
    """A device at one moment; None where it reports nothing.

    `free_bytes`, `memory_available`: bytes; `screen`: Android's wakefulness (Awake, Asleep, Dozing);
    `frozen`: the battery service is frozen.
    """

    model: str
    architecture: str
    android: bool
    state: DeviceState
    free_bytes: int | None
    memory_available: int | None
    screen: str | None
    doze: bool | None
    frozen: bool
    system: RecordedSystem


def take_snapshot(transport: Transport) -> DeviceSnapshot:
    """Takes a snapshot without changing the device; raises LinkError if it cannot be reached."""
    recording, screen = _parse(shell(transport, SCRIPT, *(" ".join(c) for c in QUERIES)))
    system = RecordedSystem(recording, sleep=lambda _seconds: None)  # a recording always gives the same answer: no need to wait
    android = "system/build.prop" in recording.files
    doze = system.run(["dumpsys", "deviceidle", "enabled", "all"]).text.strip()
    model = system.run(["getprop", "ro.product.model"]).text.strip() if android else system.text_or("proc/device-tree/model").rstrip("\0")
    return DeviceSnapshot(
        model=one_line(model),
        architecture=one_line(system.run(["uname", "-m"]).text.strip()),
        android=android,
        state=read_state(system),
        free_bytes=free_bytes(transport, transport.folder),
        memory_available=mem_available(system.text_or("proc/meminfo")),
        screen=screen,
        doze={"1": True, "0": False}.get(doze),
        frozen=android and read_phone(system).frozen,
        system=system,
    )


def _parse(text: str) -> tuple[Recording, str | None]:
    files, denied, commands, screen = {}, [], {}, None
    for part in text.split(MARK)[1:]:
        head, _, body = part.partition("\n")
        kind, _, name = head.partition(" ")
        if kind == "file":
            files[name] = body.replace("\0", "")
        elif kind == "denied":
            denied.append(name)
        elif kind == "command":
            code, _, command = name.partition(" ")
            commands[command] = (parse_integer(code) or 0 if code.isascii() and code.isdigit() else 1, body)
        elif kind == "screen" and "=" in body:
            screen = body.strip().partition("=")[2]
    return Recording(platform="linux", files=files, denied=tuple(denied), commands=commands), screen
