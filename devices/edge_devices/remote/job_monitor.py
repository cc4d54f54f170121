"""Runs a command on the device and records the device's state meanwhile: `python -m edge_devices.remote.job_monitor FILE -- COMMAND...`

One JSON object per line, synchronised to disk before the next, so that the record survives an empty battery.
Kinds: `look` (a state sample: t in seconds since the start, memory and free space of the disk in bytes, state), `waiting`, `begin`, `note`
(a sentence for readers of the figures), `end` (the exit code).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from edge_devices.files.typed_json import to_json
from edge_devices.machine.memory import available_memory_bytes
from edge_devices.machine.state import DeviceState, read_state
from edge_devices.machine.system import System
from edge_devices.remote.awake import kept_awake, wake

INTERVAL_SECONDS = 5.0
MAX_WAIT_SECONDS = 1800.0
SETTLING_SECONDS = 10.0  # after unplugging: the gauge shows the charger's current for up to 7 s
STILL_CHARGING = 75  # exit code


class StateRecorder:
    """Writes samples of a machine's state to a file without a buffer. On a full disk they are lost, and what is measured goes on."""

    def __init__(self, file: BinaryIO, system: System) -> None:
        self._file, self._system, self._begin = file, system, system.clock()

    def sample(self) -> DeviceState:
        """Reads the state, writes it and returns it."""
        state = read_state(self._system)
        self.write("look", memory=available_memory_bytes(self._system.root), free=_free_bytes(), state=to_json(state))
        return state

    def note(self, text: str) -> None:
        """Writes a sentence for readers of the figures."""
        self.write("note", text=text)

    def write(self, kind: str, **fields: Any) -> None:
        """Writes one record and synchronises the file to disk."""
        line = {"kind": kind, "t": round(self._system.clock() - self._begin, 3), **fields}
        with suppress(OSError):
            self._file.write(json.dumps(line).encode() + b"\n")
            os.fsync(self._file.fileno())


def _free_bytes() -> int | None:
    """Returns the free bytes of the disk that the job writes to; None where they are not known."""
    try:
        return shutil.disk_usage(".").free
    except OSError:
        return None


def wait_for_unplugging(recorder: StateRecorder, system: System) -> bool:
    """Waits until no charger is connected and the gauge has settled; returns False after 30 minutes on the charger."""
    end = system.clock() + MAX_WAIT_SECONDS
    recorder.write("waiting")
    while system.clock() < end:
        if recorder.sample().charger is None:
            system.sleep(SETTLING_SECONDS)
            return True
        system.sleep(1.0)
    return False


def run_monitored(command: Sequence[str], recorder: StateRecorder, interval_s: float, system: System, settings: str = "") -> int:
    """Runs a command to its end, with a sample every `interval_s` seconds; returns its exit code. SIGTERM is passed on to the command.

    A phone is kept awake meanwhile; `settings` is the file for what is changed on it.
    """
    running: list[subprocess.Popen[bytes]] = []
    ended: list[int] = []

    def pass_on(number: int, _: object) -> None:
        ended.append(number)
        for process in running:
            process.terminate()

    recorder.sample()
    # Set before the command begins: a signal may come between.
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        recorder.write("begin")
        awake = kept_awake(system, settings, recorder.note)
        with awake as phone, subprocess.Popen(list(command), stdin=subprocess.DEVNULL) as process:
            running.append(process)
            if ended:
                process.terminate()
            while True:
                try:
                    code = process.wait(timeout=interval_s)
                    break
                except subprocess.TimeoutExpired:
                    if phone:
                        wake(system)
                    recorder.sample()
    finally:
        signal.signal(signal.SIGTERM, before)
    recorder.sample()
    recorder.write("end", code=code)
    return code if code >= 0 else 128 - code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command after `--` and returns its exit code, or 75 if the device was never unplugged."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="edge_devices.remote.job_monitor")
    parser.add_argument("watch", type=Path, metavar="FILE")
    parser.add_argument("--every", type=float, default=INTERVAL_SECONDS)
    parser.add_argument("--wait-unplugged", action="store_true")
    parser.add_argument("--settings", default="")
    options, command = parser.parse_args(words[:at]), words[at + 1 :]
    if not command:
        parser.error("no command after --")
    system = System(clock=time.monotonic)
    with options.watch.open("wb", buffering=0) as file:
        recorder = StateRecorder(file, system)
        if options.wait_unplugged and not wait_for_unplugging(recorder, system):
            print(f"the device was still charging after {MAX_WAIT_SECONDS / 60:.0f} minutes", file=sys.stderr)
            return STILL_CHARGING
        return run_monitored(command, recorder, options.every, system, options.settings)


if __name__ == "__main__":
    sys.exit(main())
