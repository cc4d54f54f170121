"""Monitors a job on another device while it runs there, and finds out afterwards what happened to the device.

`python -m edge_devices.remote.job_monitor FILE -- COMMAND...` runs on the device. It keeps a phone awake, and writes one JSON object per
line. Each line is flushed to the disk before the next, so that the record survives an empty battery. Kinds of lines: `look` (a state
sample: t in seconds since the start, memory and free disk space in bytes, state), `waiting`, `begin`, `note` (a sentence for readers of the
figures), `end` (the exit code). When the file is collected, `read_job_history` reads it, and `find_incidents` says what happened.
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from edge_devices.children import signal_name
from edge_devices.errors import MeasurementError, byte_text, one_line
from edge_devices.files.typed_json import from_json, to_json
from edge_devices.machine.memory import available_memory_bytes
from edge_devices.machine.state import DeviceState, changes, read_state, throttling
from edge_devices.machine.system import System
from edge_devices.remote.jobs import JobState, JobStatus, running_job
from edge_devices.remote.transport import Transport

# Keeping a phone awake.
#
# Without a charger, Android suspends everything some time after the screen goes off. The shell user cannot take a wake lock. So the screen
# is kept on: its timeout is lengthened, and the phone is woken before each sample. The screen's watts are part of idle power too. Doze is
# disabled.
#
# The old settings are written to a file before they are changed. The run restores them at its end. If it was killed, or if the phone went
# off, the next command that collects a run, starts one or cleans up restores them.

SETTING = "screen_off_timeout"
TIMEOUT_MS = 24 * 3600 * 1000
WAKE = ("input", "keyevent", "KEYCODE_WAKEUP")
# Both scripts get the file as $1. If the file exists already, it has the values from before an earlier run, so it is kept. A setting that
# could not be read is not changed, because it could not be restored. Failures are printed.
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
    """Keeps a phone awake inside the block.

    Yields False, and does nothing, if this is not a phone or if there is no `file` for its settings. `report` gets a sentence for each
    failure.
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
    """Restores the settings that an interrupted run left changed, unless a run is still going on. Failures are reported to `log`."""
    if not transport.settings or running_job(transport):
        return
    done = transport.run(["sh", "-c", RESTORE, "sh", transport.settings])
    if done.code != 0:
        log(f"the phone's settings are still those of a run that was cut off: {done.first_line}")
    elif done.text:
        log("the screen's timeout and Doze are as they were before a run that was cut off")


# Recording the state while the command runs.

INTERVAL_SECONDS = 5.0
MAX_WAIT_SECONDS = 1800.0
SETTLING_SECONDS = 10.0  # after unplugging, the gauge still shows the charger's current for up to 7 s
STILL_CHARGING = 75  # exit code
BY_SIGNAL = 128  # a command that a signal ended has this plus the signal's number as its exit code


class StateRecorder:
    """Writes samples of a machine's state to an unbuffered file. If the disk is full, they are lost, but the measurement continues."""

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
        """Writes one record and flushes the file to the disk."""
        line = {"kind": kind, "t": round(self._system.clock() - self._begin, 3), **fields}
        with suppress(OSError):
            self._file.write(json.dumps(line).encode() + b"\n")
            os.fsync(self._file.fileno())


def _free_bytes() -> int | None:
    """Returns the free bytes of the disk to which the job writes; None if unknown."""
    try:
        return shutil.disk_usage(".").free
    except OSError:
        return None


def wait_for_unplugging(recorder: StateRecorder, system: System) -> bool:
    """Waits until no charger is connected and the gauge has settled. Returns False if a charger is still connected after 30 minutes."""
    end = system.clock() + MAX_WAIT_SECONDS
    recorder.write("waiting")
    while system.clock() < end:
        if recorder.sample().charger is None:
            system.sleep(SETTLING_SECONDS)
            return True
        system.sleep(1.0)
    return False


def run_monitored(command: Sequence[str], recorder: StateRecorder, interval_s: float, system: System, settings: str) -> int:
    """Runs a command to its end, and takes a sample every `interval_s` seconds.

    Returns the command's exit code. SIGTERM is passed on to the command. A phone is kept awake during the run; `settings` is the file for
    its old settings.
    """
    running: list[subprocess.Popen[bytes]] = []
    ended: list[int] = []

    def pass_on(number: int, _: object) -> None:
        ended.append(number)
        for process in running:
            process.terminate()

    recorder.sample()
    # Set before the command starts, because a signal may come in between.
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
    return code if code >= 0 else BY_SIGNAL - code


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


# Finding out what happened, after the record was collected.

MAX_LINE_CHARS = 1 << 16
MAX_LINES = 1_000_000
EMPTY_PERCENT = 5  # if a device went off at this charge or less, its battery was empty
SUSPENDED = 4  # a gap of more than this many usual intervals means that Android suspended the job
HANGUP, KILL, TERMINATE = 1, 9, 15
SCARCE_BYTES = 1 << 30  # if the last sample has more memory than this, the kernel probably did not kill the run
KEPT = "the results until then are kept"


@dataclass(frozen=True, kw_only=True)
class StateSample:
    """One sample of the device's state. `t` is seconds since the start. `memory` and `free` are free bytes of memory and disk, or None."""

    t: float
    state: DeviceState
    memory: int | None
    free: int | None = None


@dataclass(frozen=True, kw_only=True)
class JobHistory:
    """The state samples of a job since it began. `ended` says that the command's end was recorded. `notes` are the monitor's sentences."""

    samples: tuple[StateSample, ...]
    ended: bool
    notes: tuple[str, ...] = ()

    @property
    def hottest_c(self) -> float | None:
        """The highest temperature in °C; None if the device reports none."""
        return max((s.state.temperature_c for s in self.samples if s.state.temperature_c is not None), default=None)

    @property
    def charge_used(self) -> int | None:
        """The percent of charge used; None if a charger was connected or there is no battery."""
        levels = [s.state.charge_percent for s in self.samples if s.state.charge_percent is not None]
        on_charger = any(s.state.charger for s in self.samples)
        return levels[0] - levels[-1] if levels and not on_charger else None


def read_job_history(path: Path) -> JobHistory:
    """Reads a monitor's file, which may be cut off. Raises MeasurementError for any other file."""
    samples, notes, ended = list[StateSample](), list[str](), False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number in range(1, MAX_LINES):
                line = file.readline(MAX_LINE_CHARS)
                if not line.endswith("\n"):
                    break  # the end of the file, or a line that a power loss cut off
                try:
                    record = json.loads(line)
                    kind, t = record["kind"], float(record["t"])
                    if kind == "begin":
                        samples = samples[-1:]  # samples from before the start are not part of the run
                    elif kind == "look":
                        samples.append(_sample(t, record))
                    elif kind == "note":
                        notes.append(one_line(str(record["text"])))
                    ended = ended or kind == "end"
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                    reason = f"{path}: line {number} is not a record of the job monitor ({error!r})"
                    raise MeasurementError(f"{reason}; collect the run again") from error
    except OSError as error:
        raise MeasurementError(f"{path} cannot be read: {error.strerror}") from error
    return JobHistory(samples=tuple(samples), ended=ended, notes=tuple(notes))


def _sample(t: float, record: dict[str, Any]) -> StateSample:
    memory, free = (None if value is None else int(value) for value in (record["memory"], record.get("free")))
    return StateSample(t=t, state=from_json(DeviceState, record["state"], "state", exact=True), memory=memory, free=free)


def find_incidents(history: JobHistory, status: JobStatus) -> list[str]:
    """Returns the incidents of a run, one sentence each; an empty list for an undisturbed run."""
    return [*history.notes, *_changes(history.samples), *_ending(history, status)]


def _changes(samples: tuple[StateSample, ...]) -> list[str]:
    """Returns the changes between successive samples. A repeated change is reported once, with its count."""
    gaps = sorted(b.t - a.t for a, b in pairwise(samples))
    usual = gaps[len(gaps) // 2] if gaps else 0.0
    times: dict[str, list[float]] = {}
    for text in throttling(samples[0].state) if samples else ():
        times.setdefault(text, []).append(samples[0].t)
    for before, after in pairwise(samples):
        lost = [f"no longer known: {text}" for text in after.state.unknown if text not in before.state.unknown]
        for text in dict.fromkeys([*changes(before.state, after.state), *throttling(after.state), *lost]):
            times.setdefault(text, []).append(after.t)
        if len(gaps) > 2 and after.t - before.t > SUSPENDED * usual + 5:
            times.setdefault("the device suspended the run", []).append(before.t)
    return [f"after {at[0]:.0f} s: {text}" + (f" ({len(at)} times)" if len(at) > 1 else "") for text, at in times.items()]


def _ending(history: JobHistory, status: JobStatus) -> list[str]:
    last = history.samples[-1] if history.samples else None
    if status.disk_full:
        return [f"the device's disk was full when the run ended: delete files there; {KEPT}"]
    if status.state is JobState.RESTARTED:
        percent = last.state.charge_percent if last else None
        if last and percent is not None and percent <= EMPTY_PERCENT and last.state.charger is None:
            return [f"the battery ran empty: {percent} % in the last sample, after {last.t:.0f} s; {KEPT}"]
        when = f" after {last.t:.0f} s or more" if last else ""
        return [f"the device restarted{when}; {KEPT}"]
    if status.state is JobState.STOPPED:
        return ["it was stopped with --stop" + (f" after {last.t:.0f} s" if last else "")]
    by_signal = status.exit_code is not None and status.exit_code >= BY_SIGNAL
    if status.state is JobState.DIED or by_signal:
        return [f"{_killed(status.exit_code, last)}; {KEPT}"]
    if status.exit_code:
        words = [line for line in status.log if line.strip()]
        return [f"it ended with an error: {one_line(words[-1]) if words else f'exit code {status.exit_code}'}"]
    return []


def _killed(code: int | None, last: StateSample | None) -> str:
    """Returns how a run was ended from outside or crashed. Without an exit code, it is assumed to have been killed."""
    number = KILL if code is None else code - BY_SIGNAL
    if number not in (HANGUP, KILL, TERMINATE):
        return f"the run crashed ({signal_name(number)})"
    memory = last.memory if last else None
    scarce = number == KILL and (memory is None or memory < SCARCE_BYTES)
    cause = ", most likely by the kernel to reclaim memory" if scarce else ""
    disk = f" and {byte_text(last.free)} of the disk" if last and last.free is not None else ""
    left = f"; {byte_text(memory)} of memory{disk} were available in the last sample" if memory is not None else ""
    return f"the run was killed from outside{cause}{left}"


if __name__ == "__main__":
    sys.exit(main())
