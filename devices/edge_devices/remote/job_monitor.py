"""A job on the device, watched there: the phone stays awake, and its state is recorded while the command runs.

`python -m edge_devices.remote.job_monitor FILE -- COMMAND...` writes one JSON object per line, synchronised to disk before the next, so
that the record survives an empty battery. Kinds: `look` (a state sample: t in seconds since the start, memory and free space of the disk
in bytes, state), `waiting`, `begin`, `note` (a sentence for readers of the figures), `end` (the exit code).
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from edge_devices.files.typed_json import to_json
from edge_devices.machine.memory import available_memory_bytes
from edge_devices.machine.state import DeviceState, read_state
from edge_devices.machine.system import System
from edge_devices.remote.jobs import running_job
from edge_devices.remote.transport import Transport

# Off the charger, Android suspends everything a while after the screen goes off. The shell user can take no wake lock, so the screen stays
# on: its timeout is lengthened, and the phone is woken before each sample. The screen's watts are in idle power too. Doze is disabled.
#
# What the settings were is written to a file before they are changed. Whoever comes next puts them back from it: the run itself, or, where
# that was killed or the phone went off, the next collecting, start or cleaning.

SETTING = "screen_off_timeout"
TIMEOUT_MS = 24 * 3600 * 1000
WAKE = ("input", "keyevent", "KEYCODE_WAKEUP")
# Both scripts get the file as $1. A file that is already there has the values of before an earlier run, and stays. What could not be read
# is not changed, as it could not be put back. What did not work is printed.
READ = f"""f="$1"
timeout_now() {{ settings get system {SETTING} 2>/dev/null; }}
read_settings() {{
  timeout="$(sed -n 's/^timeout=//p' "$f")"; doze="$(sed -n 's/^doze=//p' "$f")"
  case "$timeout" in null) ;; *[!0-9]*) timeout=;; esac
}}
"""
CHANGE = f"""{READ}
test -s "$f" || {{
  {{ echo "timeout=$(timeout_now)"; echo "doze=$(dumpsys deviceidle enabled all 2>/dev/null)"; }} > "$f.new" && sync && mv "$f.new" "$f"
}} || {{ echo "the phone's settings could not be written to $f, so that it is not kept awake"; exit 0; }}
read_settings
if test -z "$timeout"; then echo "the screen's timeout is not known and stays as it is, so that the phone may fall asleep"
else
  settings put system {SETTING} {TIMEOUT_MS}
  test "$(timeout_now)" = {TIMEOUT_MS} || echo "the screen's timeout could not be lengthened, so that the phone may fall asleep"
fi
if test "$doze" = 1; then dumpsys deviceidle disable all > /dev/null || echo "Doze could not be disabled and may suspend the run"; fi
exit 0
"""
RESTORE = f"""{READ}
test -s "$f" || exit 0
read_settings
case "$timeout" in
  null) settings delete system {SETTING} > /dev/null;;
  ?*) settings put system {SETTING} "$timeout" && test "$(timeout_now)" = "$timeout";;
esac || {{ echo "the screen's timeout could not be put back: settings put system {SETTING} $timeout"; exit 1; }}
if test "$doze" = 1; then
  dumpsys deviceidle enable all > /dev/null || {{ echo "Doze could not be put back: dumpsys deviceidle enable all"; exit 1; }}
fi
rm -f "$f" && echo restored
"""


@contextmanager
def kept_awake(system: System, file: str, report: Callable[[str], None]) -> Iterator[bool]:
    """Keeps a phone awake inside the block; yields whether this is one. Elsewhere, or without a `file` for its settings, it does nothing.

    `report` gets a sentence on each thing that did not work.
    """
    if not system.is_android or not file:
        yield False
        return
    for line in system.run(["sh", "-c", CHANGE, "sh", file]).text.splitlines():
        report(line)
    wake(system)
    try:
        yield True
    finally:
        done = system.run(["sh", "-c", RESTORE, "sh", file])
        if done.code != 0:
            report(done.first_line)


def wake(system: System) -> None:
    """Turns a phone's screen on."""
    system.run(list(WAKE))


def restore_settings(transport: Transport, log: Callable[[str], None]) -> None:
    """Puts back the settings that a run which was cut off left changed; does nothing while a run goes on. Failures go to `log`."""
    if not transport.settings or running_job(transport):
        return
    done = transport.run(["sh", "-c", RESTORE, "sh", transport.settings])
    if done.code != 0:
        log(f"the phone's settings are still those of a run that was cut off: {done.first_line}")
    elif done.text:
        log("the screen's timeout and Doze are as they were before a run that was cut off")


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


def run_monitored(command: Sequence[str], recorder: StateRecorder, interval_s: float, system: System, settings: str) -> int:
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
