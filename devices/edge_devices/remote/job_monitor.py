"""Runs a command on the device and watches the device meanwhile: `python -m edge_devices.remote.job_monitor WATCH -- COMMAND...`

One JSON object a line, each on the disk before the next look, so that what happened before a battery ran empty can be read afterwards.
Kinds: `look` (t in seconds since the start, memory in bytes, state), `waiting`, `begin`, `end` (the command's exit code).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from edge_devices.machine.memory import available_memory_bytes
from edge_devices.machine.state import DeviceState, read_state
from edge_devices.machine.system import System

EVERY_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 1800.0
SETTLING_SECONDS = 10.0  # after unplugging: the gauge shows the charger's current for up to 7 s
STILL_CHARGING = 75


class Watch:
    """Looks at a machine and writes down what it sees."""

    def __init__(self, file: TextIO, system: System) -> None:
        self._file, self._system, self._begin = file, system, system.clock()

    def look(self) -> DeviceState:
        """Writes down one look."""
        state = read_state(self._system)
        self.say("look", memory=available_memory_bytes(self._system.root), state=state.to_json())
        return state

    def say(self, kind: str, **fields: Any) -> None:
        """Writes a line that outlives the power."""
        line = {"kind": kind, "t": round(self._system.clock() - self._begin, 3), **fields}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def wait_for_unplugging(watch: Watch, system: System) -> bool:
    """Waits until nothing charges the device any more, and its gauge has noticed; False when nobody unplugs it."""
    end = system.clock() + LONGEST_WAIT_SECONDS
    watch.say("waiting")
    while system.clock() < end:
        if watch.look().charger is None:
            system.sleep(SETTLING_SECONDS)
            return True
        system.sleep(1.0)
    return False


def run_monitored(command: Sequence[str], watch: Watch, every_s: float) -> int:
    """Runs a command to its end, looking every so often; returns its exit code. SIGTERM ends it too."""
    watch.look()
    watch.say("begin")
    with subprocess.Popen(list(command), stdin=subprocess.DEVNULL) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            while True:
                try:
                    code = process.wait(timeout=every_s)
                    break
                except subprocess.TimeoutExpired:
                    watch.look()
        finally:
            signal.signal(signal.SIGTERM, before)
    watch.look()
    watch.say("end", code=code)
    return code if code >= 0 else 128 - code


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. What stands after `--` is run."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="edge_devices.remote.job_monitor")
    parser.add_argument("watch", type=Path)
    parser.add_argument("--every", type=float, default=EVERY_SECONDS)
    parser.add_argument("--wait-unplugged", action="store_true")
    given, command = parser.parse_args(words[:at]), words[at + 1 :]
    if not command:
        parser.error("there is no command after --")
    system = System(clock=time.monotonic)
    with given.watch.open("w", encoding="utf-8") as file:
        watch = Watch(file, system)
        if given.wait_unplugged and not wait_for_unplugging(watch, system):
            print(f"nobody unplugged the device in {LONGEST_WAIT_SECONDS / 60:.0f} minutes", file=sys.stderr)
            return STILL_CHARGING
        return run_monitored(command, watch, given.every)


if __name__ == "__main__":
    sys.exit(main())
