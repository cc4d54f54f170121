"""Runs a command on the device and records the device's state meanwhile: `python -m edge_devices.remote.job_monitor FILE -- COMMAND...`

One JSON object per line, synchronised to disk before the next, so that the record survives an empty battery.
Kinds: `look` (a state sample: t in seconds since the start, memory in bytes, state), `waiting`, `begin`, `end` (the exit code).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from edge_devices.files.typed_json import to_json
from edge_devices.machine.memory import available_memory_bytes
from edge_devices.machine.state import DeviceState, read_state
from edge_devices.machine.system import System

INTERVAL_SECONDS = 5.0
MAX_WAIT_SECONDS = 1800.0
SETTLING_SECONDS = 10.0  # after unplugging: the gauge shows the charger's current for up to 7 s
STILL_CHARGING = 75  # exit code
TIMEOUT_MS = 24 * 3600 * 1000
WAKE = ("input", "keyevent", "KEYCODE_WAKEUP")


class StateRecorder:
    """Writes samples of a machine's state to a file."""

    def __init__(self, file: TextIO, system: System) -> None:
        self._file, self._system, self._begin = file, system, system.clock()

    def sample(self) -> DeviceState:
        """Reads the state, writes it and returns it."""
        state = read_state(self._system)
        self.write("look", memory=available_memory_bytes(self._system.root), state=to_json(state))
        return state

    def write(self, kind: str, **fields: Any) -> None:
        """Writes one record and synchronises the file to disk."""
        line = {"kind": kind, "t": round(self._system.clock() - self._begin, 3), **fields}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


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


@contextmanager
def kept_awake(system: System) -> Iterator[bool]:
    """Keeps a phone awake inside the block; yields whether this is one. Elsewhere it does nothing.

    Off the charger, Android suspends everything a while after the screen goes off. The shell user can take no wake lock, so the screen
    stays on: its timeout is lengthened, and the phone is woken before each sample. The screen's watts are in idle power too. Doze is
    disabled. Both settings are put back at the end.
    """
    if not system.is_android:
        yield False
        return
    before = system.run(["settings", "get", "system", "screen_off_timeout"]).text.strip()
    doze = system.run(["dumpsys", "deviceidle", "enabled", "all"]).text.strip() == "1"
    system.run(["settings", "put", "system", "screen_off_timeout", str(TIMEOUT_MS)])
    system.run(list(WAKE))
    if doze:
        system.run(["dumpsys", "deviceidle", "disable", "all"])
    try:
        yield True
    finally:
        if re.fullmatch(r"\d{1,10}", before):
            system.run(["settings", "put", "system", "screen_off_timeout", before])
        else:
            system.run(["settings", "delete", "system", "screen_off_timeout"])
        if doze:
            system.run(["dumpsys", "deviceidle", "enable", "all"])


def run_monitored(command: Sequence[str], recorder: StateRecorder, interval_s: float, system: System) -> int:
    """Runs a command to its end, with a sample every `interval_s` seconds; returns its exit code. SIGTERM is passed on to the command.

    A phone is kept awake meanwhile.
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
        with kept_awake(system) as phone, subprocess.Popen(list(command), stdin=subprocess.DEVNULL) as process:
            running.append(process)
            if ended:
                process.terminate()
            while True:
                try:
                    code = process.wait(timeout=interval_s)
                    break
                except subprocess.TimeoutExpired:
                    if phone:
                        system.run(list(WAKE))
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
    options, command = parser.parse_args(words[:at]), words[at + 1 :]
    if not command:
        parser.error("no command after --")
    system = System(clock=time.monotonic)
    with options.watch.open("w", encoding="utf-8") as file:
        recorder = StateRecorder(file, system)
        if options.wait_unplugged and not wait_for_unplugging(recorder, system):
            print(f"the device was still charging after {MAX_WAIT_SECONDS / 60:.0f} minutes", file=sys.stderr)
            return STILL_CHARGING
        return run_monitored(command, recorder, options.every, system)


if __name__ == "__main__":
    sys.exit(main())
