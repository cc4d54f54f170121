"""Detached jobs: commands in their own session on the device. They survive unplugging, adb restarts and the end of this program.

A job is a folder on the device with these files: `boot` (the kernel's boot id), `pid` (its process, and when that started), `log` (both
outputs), `stopped` (written by `stop_job`), and `exit` (the exit code, written last). If the disk is full, the empty file `spare` is
renamed to `full.CODE` instead, which needs no space. A device runs one job at a time; its lock is a link to the job's folder.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from edge_devices.errors import TransportError
from edge_devices.files.limited_read import parse_integer
from edge_devices.remote.transport import Transport, shell

EXISTS, BUSY = 17, 18
BOOT_ID = "/proc/sys/kernel/random/boot_id"
# Shell functions that check whether the job in a folder still runs. After a restart or many processes, its process number may belong to
# another process, so the boot id and the start time are compared too.
LIVE = f"""
born() {{ cut -d' ' -f22 "/proc/$1/stat" 2>/dev/null; }}
live() {{
  {{ read -r p began < "$1/pid"; }} 2>/dev/null && test ! -e "$1/exit" || return 1
  test "$(cat "$1/boot" 2>/dev/null)" = "$(cat {BOOT_ID} 2>/dev/null)" || return 1
  case "$p" in ''|0|1|*[!0-9]*) return 1;; esac
  kill -0 "$p" 2>/dev/null && test "$began" = "$(born "$p")" && return 0
  {{ read -r next began < "$1/pid"; }} 2>/dev/null && test "$next" != "$p" && live "$1"
}}
"""
HOLDER = f"""{LIVE}
job="$(readlink "$1" 2>/dev/null)" && live "$job" && echo "$job"
exit 0
"""
# Until the job has its own process, this shell's process stands for it. Only one shell at a time may check and take the lock. For that it
# makes the folder `.taking`, which only one shell can do. If that still exists after 30 seconds, its shell must have died, so it is
# ignored.
START = f"""{LIVE}
mkdir -p "$(dirname "$1")" "$(dirname "$2")" || exit 1
lock="$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"; job="$2"
mkdir "$job" 2>/dev/null || exit {EXISTS}
cd "$job" || exit 1
shift 2
cat {BOOT_ID} > boot 2>/dev/null
echo "$$ $(born $$)" > pid
: > spare
left=300; while ! mkdir "$lock.taking" 2>/dev/null && test $left -gt 0; do left=$((left - 1)); sleep 0.1; done
other="$(readlink "$lock")"
if live "$other"; then rmdir "$lock.taking"; cd ..; rm -rf "$job"; echo "$other"; exit {BUSY}; fi
rm -f "$lock"; ln -s "$job" "$lock"; taken=$?; rmdir "$lock.taking"; test $taken = 0 || exit 1
session=setsid; command -v setsid > /dev/null || session=
$session nohup sh -c 'lock="$1"; shift
  echo "$$ $(cut -d" " -f22 "/proc/$$/stat" 2>/dev/null)" > pid.new; mv pid.new pid
  "$@"; code=$?
  {{ echo $code > exit.new && mv exit.new exit; }} 2>/dev/null || mv spare "full.$code"
  test "$(readlink "$lock")" = "$PWD" && rm -f "$lock"' sh "$lock" "$@" < /dev/null > log 2>&1 &
left=100; while read -r p began < pid && test "$p" = $$; do left=$((left - 1)); test $left -gt 0 || exit 1; sleep 0.05; done
"""
POLL = f"""{LIVE}
cd "$1" 2>/dev/null || {{ echo absent=1; exit 0; }}
echo "then=$(cat boot 2>/dev/null)"; echo "now=$(cat {BOOT_ID} 2>/dev/null)"
live . && echo alive=1
test -e stopped && echo stopped=1
echo "exit=$(cat exit 2>/dev/null)"
for f in full.*; do test -e "$f" && echo "exit=${{f#full.}}" && echo full=1; done
for f in "$2" "$2.partial"; do test -f "$f" && echo "lines=$(wc -l < "$f")" && break; done
echo log=; tail -n 5 log 2>/dev/null
exit 0
"""
# The job leads its session, so its process id is also the id of its process group. dash's kill does not accept "--".
STOP = f"""{LIVE}
cd "$1" 2>/dev/null || {{ echo absent; exit 0; }}
live . || {{ echo over; exit 0; }}
: > stopped
kill -TERM "-$p" 2>/dev/null || kill -TERM "$p" 2>/dev/null
left=100; while kill -0 "-$p" 2>/dev/null && test $left -gt 0; do left=$((left - 1)); sleep 0.1; done
kill -KILL "-$p" 2>/dev/null
exit 0
"""


class JobState(StrEnum):
    """The state of a job.

    `DIED` means that it ended without an exit code, for example because memory ran out. `RESTARTED` means that the device restarted.
    `STOPPED` means that `stop_job` ended it."""

    RUNNING = "running"
    FINISHED = "finished"
    DIED = "died"
    RESTARTED = "restarted"
    STOPPED = "stopped"
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The status of a job.

    `disk_full` means that the exit code could not be written because the device's disk was full. `records` is the number of lines in its
    result file so far. `log` has the last lines of its output."""

    state: JobState
    exit_code: int | None = None
    disk_full: bool = False
    records: int = 0
    log: tuple[str, ...] = ()


def start_job(transport: Transport, job: str, command: Sequence[str]) -> None:
    """Starts a command in the new folder `job` and returns at once. Raises TransportError if the folder exists or another job runs."""
    done = transport.run(["sh", "-c", START, "sh", transport.lock, job, *command])
    if done.code == EXISTS:
        raise TransportError(f"{transport.name}: {job} already exists; give the run another name, or collect it first")
    if done.code == BUSY:
        raise TransportError(busy(transport, done.text.strip()))
    if done.code != 0:
        raise TransportError(
            f"{transport.name}: {job} could not be started; check that the device has free space and that its folder is writable"
        )


def running_job(transport: Transport) -> str:
    """Returns the folder of the job that runs on the device, no matter who started it; empty if there is none."""
    return shell(transport, HOLDER, transport.lock).strip()


def busy(transport: Transport, job: str) -> str:
    """Returns a sentence about the job that runs there, and what can be done about it."""
    home, name = posixpath.dirname(posixpath.dirname(job)), posixpath.basename(job)
    where = "" if home in ("", transport.folder) or home.endswith("/" + transport.folder) else f" --device-folder {home}"
    return f"{transport.name}: run {name} goes on there: `--run {name}{where}` follows and collects it, and with --stop ends it"


def poll_job(transport: Transport, job: str, results: str) -> JobStatus:
    """Returns the status of a job. `results` is the file in its folder whose lines are counted, also while it is named *.partial."""
    head, _, log = shell(transport, POLL, job, results).partition("log=\n")
    fields = dict(line.partition("=")[::2] for line in head.splitlines())
    code = parse_integer(fields.get("exit", ""))
    return JobStatus(
        state=_state(fields, code),
        exit_code=code,
        disk_full="full" in fields,
        records=parse_integer(fields.get("lines", "").strip()) or 0,
        log=tuple(log.splitlines()),
    )


def _state(fields: dict[str, str], code: int | None) -> JobState:
    if "absent" in fields:
        return JobState.ABSENT
    if code is not None:
        return JobState.STOPPED if code and "stopped" in fields else JobState.FINISHED
    if fields.get("then") != fields.get("now"):
        return JobState.RESTARTED
    if "stopped" in fields and "alive" not in fields:
        return JobState.STOPPED
    return JobState.RUNNING if "alive" in fields else JobState.DIED


def stop_job(transport: Transport, job: str) -> None:
    """Sends SIGTERM to a job and all its children, and SIGKILL to those that still run after 10 seconds.

    Raises TransportError if there is no such job, or if it has ended.
    """
    outcome, name = shell(transport, STOP, job).strip(), posixpath.basename(job)
    if outcome == "absent":
        raise TransportError(f"{transport.name}: there is no run {name}; check its name")
    if outcome == "over":
        raise TransportError(f"{transport.name}: run {name} is over already; `--run {name}` collects it")


def remove(transport: Transport, path: str) -> None:
    """Removes a file or folder below the transport's folder, or the folder itself. Raises TransportError for other paths."""
    inside = posixpath.normpath(path)
    own = posixpath.normpath(transport.folder)
    if inside != own and not inside.startswith(own + "/"):
        raise TransportError(f"{transport.name}: {path} is outside {transport.folder} and is not removed")
    shell(transport, 'rm -rf -- "$1"', inside, seconds=600)
