"""A benchmark on another machine: preflight, deploy, start, follow, collect. The run itself is `edge-bench` on the device."""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_devices.errors import LinkError
from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_devices.meters.base import Scope
from edge_devices.meters.search import find_meters
from edge_devices.remote.incidents import JobHistory, find_incidents, read_job_history
from edge_devices.remote.job_monitor import STILL_CHARGING
from edge_devices.remote.preflight import preflight_refusals, preflight_warnings
from edge_devices.remote.snapshot import DeviceSnapshot, take_snapshot
from edge_devices.transports.base import Transport, prepare_folder
from edge_devices.transports.file_sync import pull_file, push_file, push_tree
from edge_devices.transports.jobs import JobState, JobStatus, poll_job, remove, start_job, stop_job
from edge_runtime.bench.devices.package import DevicePackage
from edge_runtime.bench.devices.results import ENERGY, LOG, RUNS, WATCH, DeviceResult, complete_result, note_device
from edge_runtime.errors import RequestError

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
POLL_SECONDS, WATCH_SECONDS = 5.0, 5.0
BATTERY_METERS = ("battery", "android:battery", "android:battery-sysfs")
Said = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RemoteRequest:
    """What to run on a device. `options` are edge-bench's own; a Path among them is a file of ours, which is sent too.

    `patience_s`: how long a device may be out of reach until we give up; the run on it goes on. None: for ever.
    """

    bundle: Path
    package: DevicePackage
    name: str
    options: tuple[str | Path, ...] = ()
    energy: bool = False
    meter: str | None = None
    unplugged: bool = False
    clean: bool = False
    patience_s: float | None = None

    def __post_init__(self) -> None:
        """Raises RequestError for a name that is no plain name of a folder."""
        if not NAMES.fullmatch(self.name):
            raise RequestError(f"{self.name!r} is no name for a run; take letters, digits, dots and dashes")


def device_label(transport: Transport) -> str:
    """Returns a name for the device's folder at home."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", transport.name).strip("-.") or "device"


def deploy(transport: Transport, request: RemoteRequest, said: Said) -> tuple[str, DeviceSnapshot, list[str]]:
    """Looks at the device and brings package, bundle and inputs there. Returns its folder, the look and the warnings. Raises EdgeError."""
    folder = prepare_folder(transport)
    seen = take_snapshot(transport)
    battery = request.energy and _at_battery(seen, request.meter)
    against = preflight_refusals(seen, platform=request.package.platform, at_battery=battery, waits_for_unplugging=request.unplugged)
    if against:
        raise RequestError(f"{transport.name}: " + "; ".join(against))
    weights = sum(path.stat().st_size for path in request.bundle.rglob("*") if path.is_file())
    warnings = preflight_warnings(seen, model_bytes=weights, at_battery=battery)
    for text in warnings:
        said(f"note: {text}")
    for what, source in (("package", request.package.folder), (f"bundles/{request.bundle.resolve().name}", request.bundle)):
        report = _percent(said, what)
        pushed = push_tree(transport, source, posixpath.join(folder, what), report)
        said(f"{what}: {pushed.sent} files, {pushed.bytes / 1e6:.1f} MB sent; {pushed.unchanged} were there")
    return folder, seen, warnings


def bench_on(transport: Transport, request: RemoteRequest, results: Path, said: Said) -> DeviceResult:
    """Runs the benchmark and brings its results into `results`; a run of this name that is there already is only followed and collected.

    Raises EdgeError; what is on the device stays then, and the same call goes on with it.
    """
    home = results / request.name / device_label(transport)
    folder = prepare_folder(transport)
    job = posixpath.join(folder, "runs", request.name)
    if poll_job(transport, job, RUNS).state is JobState.ABSENT:
        folder, seen, warnings = deploy(transport, request, said)
        note_device(home, device=transport.name, model=seen.model, warnings=warnings)
        start_job(transport, job, _command(transport, request, folder))
        said(_started(request))
    else:
        said(f"run {request.name} is there already: following it")
    status = _follow(transport, job, request, said)
    return _collect(transport, job, request, home, status)


def end_run(transport: Transport, name: str) -> None:
    """Ends a run on the device; what it measured stays there."""
    stop_job(transport, posixpath.join(prepare_folder(transport), "runs", name))


def clean(transport: Transport) -> None:
    """Removes everything of ours from the device: package, bundles, runs."""
    remove(transport, transport.folder)


def _started(request: RemoteRequest) -> str:
    if request.unplugged:
        return "waiting for the cable: unplug the device now; it measures by itself and is followed again when it is back (or over Wi-Fi)"
    return f"run {request.name} has begun; it goes on if the device is unplugged or this program ends"


def _command(transport: Transport, request: RemoteRequest, folder: str) -> list[str]:
    """The job: the watch, and below it edge-bench with its outputs in the job's own folder."""
    python, bench = (posixpath.join(folder, "package/bin", name) for name in ("edge-python", "edge-bench"))
    options: list[str] = []
    for number, option in enumerate(request.options):
        if isinstance(option, Path):
            target = posixpath.join(folder, "inputs", request.name, f"{number}{option.suffix}")
            push_file(transport, option, target)
            option = target
        options.append(option)
    if request.energy:
        options += ["--energy", ENERGY] + (["--meter", request.meter] if request.meter else [])
    waiting = ["--wait-unplugged"] if request.unplugged else []
    bundle = posixpath.join(folder, "bundles", request.bundle.resolve().name)
    return [
        "env",
        f"{CACHE_VARIABLE}={folder}/cache",
        f"TMPDIR={folder}",
        python,
        "-m",
        "edge_devices.remote.job_monitor",
        "--every",
        str(WATCH_SECONDS),
        *waiting,
        WATCH,
        "--",
        bench,
        bundle,
        "--runs",
        RUNS,
        *options,
    ]


def _at_battery(seen: DeviceSnapshot, meter: str | None) -> bool:
    if meter is not None:
        return meter in BATTERY_METERS
    usable = [finding.meter.facts for finding in find_meters(seen.system) if finding.meter]
    return usable[0].scope is Scope.DEVICE if usable else seen.android


def _percent(said: Said, what: str) -> Callable[[int, int], None]:
    told = 0

    def hear(done: int, total: int) -> None:
        nonlocal told
        percent = 100 * done // total if total else 100
        if percent >= told + 10:
            told = percent
            said(f"{what}: {percent} % of {total / 1e6:.1f} MB")

    return hear


def _follow(transport: Transport, job: str, request: RemoteRequest, said: Said) -> JobStatus:
    """Polls until the run is over. A device out of reach is waited for."""
    lost_since: float | None = None
    told = ""
    while True:
        try:
            status = poll_job(transport, job, RUNS)
        except LinkError as error:
            if lost_since is None:
                said(f"{error}; waiting for it, the run goes on there")
            lost_since = lost_since or time.monotonic()
            if request.patience_s is not None and time.monotonic() - lost_since > request.patience_s:
                raise LinkError(f"{error}; given up after {request.patience_s:.0f} s: --run {request.name} collects it later") from error
            time.sleep(POLL_SECONDS)
            continue
        lost_since = None
        if status.state is not JobState.RUNNING:
            return status
        now = f"{status.records} records" + (f"; {status.log[-1]}" if status.log else "")
        if now != told:
            said(now)
            told = now
        time.sleep(POLL_SECONDS)


def _collect(transport: Transport, job: str, request: RemoteRequest, folder: Path, status: JobStatus) -> DeviceResult:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (LOG, WATCH):
        _pull_if_there(transport, posixpath.join(job, name), folder / name)
    if not _pull_if_there(transport, posixpath.join(job, RUNS), folder / RUNS):
        _pull_if_there(transport, posixpath.join(job, f"{RUNS}.partial"), folder / RUNS)
        _cut_last_line(folder / RUNS)
    if request.energy:
        _pull_if_there(transport, posixpath.join(job, ENERGY), folder / ENERGY)
    history = read_job_history(folder / WATCH) if (folder / WATCH).exists() else JobHistory(samples=(), ended=False)
    incidents = find_incidents(history, status)
    _raise_for(transport, status, folder, incidents)
    result = complete_result(
        folder, device=transport.name, incidents=incidents, hottest_c=history.hottest_c, charge_used=history.charge_used
    )
    if request.clean:
        clean(transport)
    return result


def _pull_if_there(transport: Transport, source: str, target: Path) -> bool:
    if transport.run(["test", "-s", source]).code != 0:
        return False
    pull_file(transport, source, target)
    return True


def _cut_last_line(path: Path) -> None:
    """Of a file whose writer was stopped, the last line may be half."""
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def _raise_for(transport: Transport, status: JobStatus, folder: Path, incidents: Sequence[str]) -> None:
    """Raises RequestError where there is nothing to make figures of."""
    runs = folder / RUNS
    whole = runs.exists() and runs.read_bytes().count(b"\n") > 1
    if status.state is JobState.FINISHED and status.exit_code == STILL_CHARGING:
        raise RequestError(f"{transport.name}: nobody unplugged the device; start again with another --run")
    if whole and (status.exit_code == 0 or status.state is not JobState.FINISHED):
        return
    words = [line for line in status.log if line.strip()]
    reason = "; ".join(incidents) or (words[-1] if words else f"exit code {status.exit_code}")
    raise RequestError(f"{transport.name}: the run brought no figures: {reason} (its log: {folder / LOG})")
