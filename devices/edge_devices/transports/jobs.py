"""Detached jobs: commands in a session of their own on the device, which survive unplugging, adb restarts and the end of this program.

A job is a folder on the device: `boot` (the kernel's boot id), `pid`, `log` (both outputs), `exit` (the code, written last).
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from edge_devices.errors import TransportError
from edge_devices.transports.base import Transport, parse_integer, shell

EXISTS = 17
BOOT_ID = "/proc/sys/kernel/random/boot_id"
START = f"""
mkdir -p "$(dirname "$1")" || exit 1
mkdir "$1" 2>/dev/null || exit {EXISTS}
cd "$1" || exit 1
shift
cat {BOOT_ID} > boot 2>/dev/null
session=setsid; command -v setsid > /dev/null || session=
$session nohup sh -c 'echo $$ > pid; "$@"; echo $? > exit.new; mv exit.new exit' sh "$@" < /dev/null > log 2>&1 &
left=100; while ! test -s pid; do left=$((left - 1)); test $left -gt 0 || exit 1; sleep 0.05; done
"""
POLL = f"""
cd "$1" 2>/dev/null || {{ echo absent=1; exit 0; }}
echo "then=$(cat boot 2>/dev/null)"; echo "now=$(cat {BOOT_ID} 2>/dev/null)"
kill -0 "$(cat pid 2>/dev/null)" 2>/dev/null && echo alive=1
echo "exit=$(cat exit 2>/dev/null)"
for f in "$2" "$2.partial"; do test -f "$f" && echo "lines=$(wc -l < "$f")" && break; done
echo log=; tail -n 5 log 2>/dev/null
exit 0
"""
# The job leads its session, so its process id is also that of the process group. dash's kill takes no "--". After a restart of the device
# the number belongs to another process.
STOP = f"""
cd "$1" 2>/dev/null || exit 0
p="$(cat pid 2>/dev/null)"
case "$p" in ''|0|1|*[!0-9]*) exit 0;; esac
test "$(cat boot 2>/dev/null)" = "$(cat {BOOT_ID} 2>/dev/null)" || exit 0
kill -TERM "-$p" 2>/dev/null || kill -TERM "$p" 2>/dev/null
left=100; while kill -0 "-$p" 2>/dev/null && test $left -gt 0; do left=$((left - 1)); sleep 0.1; done
kill -KILL "-$p" 2>/dev/null
exit 0
"""


class JobState(StrEnum):
    """The state of a job. `DIED`: ended without an exit code, as after an out-of-memory kill; `RESTARTED`: the device restarted."""

    RUNNING = "running"
    FINISHED = "finished"
    DIED = "died"
    RESTARTED = "restarted"
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The status of a job. `records`: lines in its result file so far; `log`: the last lines of its output."""

    state: JobState
    exit_code: int | None = None
    records: int = 0
    log: tuple[str, ...] = ()


def start_job(transport: Transport, job: str, command: Sequence[str]) -> None:
    """Starts a command in the new folder `job` and returns at once. Raises TransportError if the folder exists."""
    done = transport.run(["sh", "-c", START, "sh", job, *command])
    if done.code == EXISTS:
        raise TransportError(f"{transport.name}: {job} already exists; give the run another name, or collect it first")
    if done.code != 0:
        raise TransportError(
            f"{transport.name}: {job} could not be started; check that the device has free space and that its folder is writable"
        )


def poll_job(transport: Transport, job: str, results: str) -> JobStatus:
    """Returns the status of a job. `results`: the file in its folder whose lines are counted, also while it is named *.partial."""
    head, _, log = shell(transport, POLL, job, results).partition("log=\n")
    fields = dict(line.partition("=")[::2] for line in head.splitlines())
    code = parse_integer(fields.get("exit", ""))
    return JobStatus(
        state=_state(fields, code), exit_code=code, records=parse_integer(fields.get("lines", "").strip()) or 0, log=tuple(log.splitlines())
    )


def _state(fields: dict[str, str], code: int | None) -> JobState:
    if "absent" in fields:
        return JobState.ABSENT
    if code is not None:
        return JobState.FINISHED
    if fields.get("then") != fields.get("now"):
        return JobState.RESTARTED
    return JobState.RUNNING if "alive" in fields else JobState.DIED


def stop_job(transport: Transport, job: str) -> None:
    """Sends SIGTERM to a job and all its children, and SIGKILL to those that still run after 10 seconds."""
    shell(transport, STOP, job)


def remove(transport: Transport, path: str) -> None:
    """Removes a file or folder below the transport's folder, or the folder itself. Raises TransportError for other paths."""
    inside = posixpath.normpath(path)
    own = posixpath.normpath(transport.folder)
    if inside != own and not inside.startswith(own + "/"):
        raise TransportError(f"{transport.name}: {path} is outside {transport.folder} and is not removed")
    shell(transport, 'rm -rf -- "$1"', inside, seconds=600)
