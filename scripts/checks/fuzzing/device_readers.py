"""The readers of edge_devices: recorded machines, which reach the parser of every meter, answers of adb, and tables of measurements."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from edge_devices.energy.external.table import import_csv
from edge_devices.energy.run_log import read_log
from edge_devices.errors import DeviceError, errors_as
from edge_devices.machine.detection import detect_device
from edge_devices.machine.state import read_state
from edge_devices.machine.system import CommandResult
from edge_devices.meters import windows_emi
from edge_devices.meters.android import parse_channels, parse_rail_trace
from edge_devices.meters.search import find_meters
from edge_devices.remote.file_sync import device_files, free_bytes
from edge_devices.remote.jobs import poll_job
from edge_devices.remote.snapshot import RecordedSystem, Recording
from edge_devices.remote.transport import frame_command, parse_devices, prepare_folder
from fuzzing.readers import PARSED, Read, Reader, from_file

_READS = 2
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def _recording(path: Path) -> None:
    """Reads everything that the commands read from a machine; a single meter may refuse."""
    with errors_as(DeviceError, "it is no recording", "make one", *_MALFORMED):
        fields = json.loads(path.read_bytes().decode())
        recording = Recording(
            platform=str(fields["platform"]),
            files={key: str(text) for key, text in fields["files"].items()},
            denied=tuple(map(str, fields["denied"])),
            commands={str(each["command"]): (int(each["code"]), str(each["output"])) for each in fields["commands"]},
        )
    clock = itertools.count()
    system = RecordedSystem(recording, clock=lambda: float(next(clock)), sleep=lambda _: None)
    detect_device(system)
    read_state(system)
    for finding in find_meters(system):
        finding.to_json()
        for _ in range(_READS if finding.meter else 0):
            try:
                finding.meter.read()  # type: ignore[union-attr]
            except DeviceError:
                break


def _emi(_: Path, __: object) -> Read:
    def read(data: bytes) -> None:
        names = windows_emi.parse_metadata(1 + len(data) % 2, data)
        windows_emi.parse_measurement(data, len(names))

    return read


def _trace(_: Path, __: object) -> Read:
    def read(data: bytes) -> None:
        parse_channels(data.decode("utf-8", "replace"))
        parse_rail_trace(data)

    return read


class _Answers:
    """A device with one answer to every command: the input is its exit code and its output. Implements Transport."""

    name, folder = "adb:fuzz", "/data/local/tmp/edge-mtp"

    def __init__(self, answer: bytes) -> None:
        self._code, _, self._output = answer.partition(b"\n")

    def run(self, arguments: Sequence[str], *, seconds: float = 0.0) -> CommandResult:  # noqa: ARG002
        framed = frame_command(arguments)
        done = framed.parse(self._output + framed.mark + self._code + b"\n", "")
        if done is None:
            raise DeviceError("the link broke; plug it in again")
        return done

    def put(self, source: Path, target: str) -> None:
        """Accepts every file."""


def _adb(_: Path, __: object) -> Read:
    def read(data: bytes) -> None:
        device = _Answers(data)
        parse_devices(data.decode("utf-8", "replace"))
        prepare_folder(device)
        device_files(device, device.folder)
        free_bytes(device, device.folder)
        poll_job(device, "job", "run.jsonl")

    return read


READERS = (
    Reader(name="adb-answer", make=_adb, memory_factor=PARSED),
    Reader(name="meters", make=from_file("recording.json", _recording), structured=True, memory_factor=PARSED),
    Reader(name="perfetto-trace", make=_trace, memory_factor=PARSED),
    Reader(name="emi-answer", make=_emi, memory_factor=PARSED),
    Reader(name="meter-table", make=from_file("meter.csv", import_csv), memory_factor=PARSED),
    Reader(name="run-log", make=from_file("run.jsonl", read_log), memory_factor=PARSED),
)
