"""Commands that go on without us: started on the device in a session of their own, they survive unplugging, adb restarts and our own end.

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
LOOK = f"""
cd "$1" 2>/dev/null || {{ echo absent=1; exit 0; }}
echo "then=$(cat boot 2>/dev/null)"; echo "now=$(cat {BOOT_ID} 2>/dev/null)"
kill -0 "$(cat pid 2>/dev/null)" 2>/dev/null && echo alive=1
echo "exit=$(cat exit 2>/dev/null)"
for f in "$2" "$2.partial"; do test -f "$f" && echo "lines=$(wc -l < "$f")" && break; done
echo log=; tail -n 5 log 2>/dev/null
exit 0
"""
# The job is the leader of its session, so its number is that of the whole group.
STOP = 'cd "$1" && p="$(cat pid)" && { kill -TERM -- "-$p" || kill -TERM "$p"; } 2>/dev/null; exit 0'


class JobState(StrEnum):
    """What became of a job. `DIED`: it is gone without an exit code, as when the kernel needed its memory; `RESTARTED`: the device was."""

    RUNNING = "running"
    FINISHED = "finished"
    DIED = "died"
    RESTARTED = "restarted"
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """One look at a job. `records`: lines in its result file so far; `log`: its last words."""

    state: JobState
    exit_code: int | None = None
    records: int = 0
    log: tuple[str, ...] = ()


def start_job(transport: Transport, job: str, command: Sequence[str]) -> None:
    """Starts a command in the new folder `job` and returns at once. Raises TransportError when there is such a job already."""
    done = transport.run(["sh", "-c", START, "sh", job, *command])
    if done.code == EXISTS:
        raise TransportError(f"{transport.name}: {job} is there already; give the run another name, or collect it first")
    if done.code != 0:
        raise TransportError(f"{transport.name}: {job} could not be started; see that the device has room and its folder may be written to")


def poll_job(transport: Transport, job: str, results: str) -> JobStatus:
    """Looks at a job; `results` is the file in its folder whose lines are counted, also while it is named *.partial."""
    head, _, log = shell(transport, LOOK, job, results).partition("log=\n")
    said = dict(line.partition("=")[::2] for line in head.splitlines())
    code = parse_integer(said.get("exit", ""))
    return JobStatus(
        state=_state(said, code), exit_code=code, records=parse_integer(said.get("lines", "").strip()) or 0, log=tuple(log.splitlines())
    )


def _state(said: dict[str, str], code: int | None) -> JobState:
    if "absent" in said:
        return JobState.ABSENT
    if code is not None:
        return JobState.FINISHED
    if said.get("then") != said.get("now"):
        return JobState.RESTARTED
    return JobState.RUNNING if "alive" in said else JobState.DIED


def stop_job(transport: Transport, job: str) -> None:
    """Asks a job and all its children to end."""
    shell(transport, STOP, job)


def remove(transport: Transport, path: str) -> None:
    """Removes a file or folder below the transport's own folder, or that itself. Raises TransportError for any other."""
    inside = posixpath.normpath(path)
    own = posixpath.normpath(transport.folder)
    if inside != own and not inside.startswith(own + "/"):
        raise TransportError(f"{transport.name}: {path} is not below {transport.folder} and is not removed")
    shell(transport, 'rm -rf -- "$1"', inside, seconds=600)
