"""A benchmark on another machine: checks the device, copies package and bundle, starts `edge-bench` there, follows and collects it."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_bench.devices.results import ENERGY, LOG, RUNS, WATCH, DeviceResult, complete_result, note_device
from edge_devices.energy.virtual_meters import external_meter
from edge_devices.errors import LinkError, byte_text
from edge_devices.files.atomic_write import GROWING_SUFFIX
from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_devices.machine.device_package import DevicePackage
from edge_devices.meters.base import Scope
from edge_devices.meters.search import BATTERY_METERS, find_meters
from edge_devices.remote.file_sync import pull_file, push_file, push_tree, retried
from edge_devices.remote.job_monitor import (
    BY_SIGNAL,
    KEPT,
    MAX_WAIT_SECONDS,
    STILL_CHARGING,
    JobHistory,
    find_incidents,
    read_job_history,
    restore_settings,
)
from edge_devices.remote.jobs import JobState, JobStatus, busy, poll_job, remove, running_job, start_job, stop_job
from edge_devices.remote.snapshot import DeviceSnapshot, preflight_refusals, preflight_warnings, take_snapshot
from edge_devices.remote.transport import Transport, prepare_folder
from edge_devices.waiting import Report
from edge_runtime.bundle.bundle import SIGNATURE_NAME, CheckMode, open_bundle
from edge_runtime.bundle.manifest import MANIFEST_NAME
from edge_runtime.config.settings import CONFIG_NAME
from edge_runtime.errors import RequestError

BACKENDS = {"gguf": "llama", "onnx": "onnx"}  # by the format of a bundle's files
NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
POLL_SECONDS, WATCH_SECONDS = 5.0, 5.0
Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RemoteRequest:
    """What to run on a device. `options` are those of edge-bench there; a Path among them is a local file, which is sent too.

    `check` and `public_key` apply to the bundle before it is sent. With `against_package`, the package's llama.cpp tools are measured too.
    `patience_s` is how many seconds a device may be out of reach before RequestError is raised (None: no limit); the run on it continues.
    """

    bundle: Path
    package: DevicePackage
    name: str
    check: CheckMode = "fast"
    public_key: Path | None = None
    options: tuple[str | Path, ...] = ()
    energy: bool = False
    meter: str | None = None
    against_package: bool = False
    unplugged: bool = False
    clean: bool = False
    patience_s: float | None = None

    def __post_init__(self) -> None:
        """Raises RequestError for a name that is not a plain folder name."""
        check_name(self.name)


def check_name(run: str) -> None:
    """Raises RequestError unless `run` is a plain folder name."""
    if not NAMES.fullmatch(run):
        raise RequestError(f"{run!r} is not a valid run name; use letters, digits, dots and dashes")


def device_label(name: str) -> str:
    """Returns the name of the folder for a device's results on this machine."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "device"


def deploy(transport: Transport, request: RemoteRequest, log: Log) -> tuple[str, DeviceSnapshot, list[str]]:
    """Checks bundle and device, and copies package and bundle there. Returns the device's folder, its snapshot and the warnings.

    Raises EdgeError.
    """
    names = _bundle_files(request)
    folder = prepare_folder(transport)
    _refuse_beside_another(transport)
    snapshot = take_snapshot(transport)
    battery = request.energy and _at_battery(snapshot, request.meter)
    refusals = preflight_refusals(snapshot, platform=request.package.platform, at_battery=battery, waits_for_unplugging=request.unplugged)
    if refusals:
        raise RequestError(f"{transport.name}: " + "; ".join(refusals))
    weights = sum((request.bundle / name).stat().st_size for name in names)
    warnings = preflight_warnings(snapshot, model_bytes=weights, at_battery=battery)
    for text in warnings:
        log(f"note: {text}")
    bundle = f"bundles/{request.bundle.resolve().name}"
    for what, source, listed in (("package", request.package.folder, None), (bundle, request.bundle, names)):
        report = _percent(log, what)
        pushed = push_tree(transport, source, posixpath.join(folder, what), report, listed)
        log(f"{what}: {pushed.sent} files, {byte_text(pushed.bytes)} sent; {pushed.unchanged} unchanged")
    return folder, snapshot, warnings


def bench_on(transport: Transport, request: RemoteRequest, results: Path, log: Log) -> DeviceResult:
    """Runs the benchmark and collects its results in `results`. An existing run of this name is only followed and collected.

    Raises EdgeError. After an error, the device keeps its files, and the same call resumes the run.
    """
    home = results / request.name / device_label(transport.name)
    folder = prepare_folder(transport)
    job = posixpath.join(folder, "runs", request.name)
    if poll_job(transport, job, RUNS).state is JobState.ABSENT:
        restore_settings(transport, log)
        folder, snapshot, warnings = deploy(transport, request, log)
        note_device(home, device=transport.name, model=snapshot.model, warnings=warnings)
        start_job(transport, job, _command(transport, request, folder))
        log(_started(request))
    else:
        log(f"run {request.name} already exists: following it")
    status = _follow(transport, job, request, log)

    def collect() -> DeviceResult:
        restore_settings(transport, log)
        return _collect(transport, job, request, home, status)

    result = retried(collect, POLL_SECONDS)  # a device that has just restarted may disconnect once more
    if request.clean:
        try:
            clean(transport, log)
        except RequestError as error:  # the results were already collected
            log(str(error))
    return result


def end_run(transport: Transport, name: str, log: Log) -> None:
    """Ends a run on the device, which keeps its records. Raises RequestError for an invalid name, TransportError if it does not run."""
    check_name(name)
    stop_job(transport, posixpath.join(prepare_folder(transport), "runs", name))
    restore_settings(transport, log)
    log(f"run {name} is stopped; `--run {name}` without --stop collects what it measured")


def clean(transport: Transport, log: Log) -> None:
    """Removes everything that edge-bench put on the device: package, bundles, runs. Raises RequestError while a run is active."""
    _refuse_beside_another(transport)
    restore_settings(transport, log)
    remove(transport, transport.folder)
    log(f"{transport.folder} is removed")


def _refuse_beside_another(transport: Transport) -> None:
    """Raises RequestError if another run is active on the device, because two would share its power and processors."""
    job = running_job(transport)
    if job:
        raise RequestError(busy(transport, job))


def _bundle_files(request: RemoteRequest) -> list[str]:
    """Checks the bundle and returns the names of its files. Other files in its folder may be private and are not sent."""
    files = open_bundle(request.bundle, check=request.check, public_key=request.public_key).manifest.files
    needed = {BACKENDS[entry.format] for entry in files if entry.role == "target" and entry.format in BACKENDS}
    if needed and request.package.backends and not needed & set(request.package.backends):
        need = " or ".join(sorted(needed))
        raise RequestError(
            f"{request.package.folder} has no {need}, and {request.bundle} needs it; build the package with --backend {need},"
            f" or export the bundle with --format {'onnx' if need == 'llama' else 'gguf'}"
        )
    listed = [entry.path for entry in files]
    own = [name for name in (MANIFEST_NAME, SIGNATURE_NAME, CONFIG_NAME) if os.path.lexists(request.bundle / name)]
    return list(dict.fromkeys(own + listed))


def _started(request: RemoteRequest) -> str:
    recording = "; the recording of the external meter must run from now until the end" if _awaits_table(request) else ""
    if request.unplugged:
        return f"waiting: unplug the device now; it measures on its own and is followed again once reconnected (or over Wi-Fi){recording}"
    return f"run {request.name} started; it continues if the device is unplugged or this program ends{recording}"


def _awaits_table(request: RemoteRequest) -> bool:
    """Whether the joules come from the table of an external meter, which is read after the run."""
    return request.energy and external_meter(request.meter) is not None


def _command(transport: Transport, request: RemoteRequest, folder: str) -> list[str]:
    """Returns the job's command: a monitor that runs edge-bench, with its outputs in the job's folder."""
    python, bench = (posixpath.join(folder, "package/bin", name) for name in ("edge-python", "edge-bench"))
    options: list[str] = []
    for number, option in enumerate(request.options):
        if isinstance(option, Path):
            target = posixpath.join(folder, "inputs", request.name, f"{number}{option.suffix}")
            push_file(transport, option, target)
            option = target
        options.append(option)
    if request.against_package:
        options += ["--against", f"llama.cpp={posixpath.join(folder, 'package', 'tools')}"]
    if request.energy:
        options += ["--energy", ENERGY] + (["--meter", request.meter] if request.meter else [])
    waiting = ["--wait-unplugged"] if request.unplugged else []
    bundle = posixpath.join(folder, "bundles", request.bundle.resolve().name)
    environment = ["env", f"{CACHE_VARIABLE}={folder}/cache", f"TMPDIR={folder}"]
    settings = ["--settings", transport.settings] if transport.settings else []
    monitor = [python, "-P", "-m", "edge_devices.remote.job_monitor", "--every", str(WATCH_SECONDS), *waiting, *settings, WATCH]
    return [*environment, *monitor, "--", bench, "run", bundle, "--runs", RUNS, *options]


def _at_battery(snapshot: DeviceSnapshot, meter: str | None) -> bool:
    if meter is not None:
        return meter in BATTERY_METERS
    usable = [finding.meter.facts for finding in find_meters(snapshot.system) if finding.meter]
    return usable[0].scope is Scope.DEVICE if usable else snapshot.android


def _percent(log: Log, what: str) -> Report:
    reported = 0.0

    def report(share: float, step: str = "") -> None:
        nonlocal reported
        if share >= reported + 0.1:
            reported = share
            log(f"{what}: {step}, {share:.0%}")

    return report


def _follow(transport: Transport, job: str, request: RemoteRequest, log: Log) -> JobStatus:
    """Polls until the run ends. Waits for a device that is out of reach."""
    lost_since: float | None = None
    reported = ""
    while True:
        try:
            status = poll_job(transport, job, RUNS)
        except LinkError as error:
            if lost_since is None:
                log(f"{error}; waiting for the device, the run on it continues")
            lost_since = lost_since or time.monotonic()
            if request.patience_s is not None and time.monotonic() - lost_since > request.patience_s:
                raise LinkError(
                    f"{error}; stopped waiting after {request.patience_s:.0f} s: collect the run later with --run {request.name}"
                ) from error
            time.sleep(POLL_SECONDS)
            continue
        lost_since = None
        if status.state is not JobState.RUNNING:
            return status
        now = f"{status.records} records" + (f"; {status.log[-1]}" if status.log else "")
        if now != reported:
            log(now)
            reported = now
        time.sleep(POLL_SECONDS)


def _collect(transport: Transport, job: str, request: RemoteRequest, folder: Path, status: JobStatus) -> DeviceResult:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (LOG, WATCH):
        _pull_if_present(transport, posixpath.join(job, name), folder / name)
    if not _pull_if_present(transport, posixpath.join(job, RUNS), folder / RUNS):
        _pull_if_present(transport, posixpath.join(job, f"{RUNS}{GROWING_SUFFIX}"), folder / RUNS)
        _cut_last_line(folder / RUNS)
    if request.energy:
        name = posixpath.join(job, ENERGY)
        if not _pull_if_present(transport, name, folder / ENERGY):
            _pull_if_present(transport, name + GROWING_SUFFIX, folder / ENERGY)
    history = read_job_history(folder / WATCH) if (folder / WATCH).exists() else JobHistory(samples=(), ended=False)
    incidents = find_incidents(history, status)
    _raise_for(transport, status, folder, incidents)
    return complete_result(
        folder,
        device=transport.name,
        incidents=incidents,
        hottest_c=history.hottest_c,
        charge_used=history.charge_used,
        failed=status.state is JobState.FINISHED and 0 < (status.exit_code or 0) < BY_SIGNAL,
    )


def _pull_if_present(transport: Transport, source: str, target: Path) -> bool:
    if transport.run(["test", "-s", source]).code != 0:
        return False
    pull_file(transport, source, target)
    return True


def _cut_last_line(path: Path) -> None:
    """Removes an incomplete last line, which an interrupted writer may leave."""
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def _raise_for(transport: Transport, status: JobStatus, folder: Path, incidents: Sequence[str]) -> None:
    """Raises RequestError if the run left no records from which figures can be computed."""
    runs = folder / RUNS
    if status.state is JobState.FINISHED and status.exit_code == STILL_CHARGING:
        raise RequestError(
            f"{transport.name}: the device was still charging after {MAX_WAIT_SECONDS / 60:.0f} minutes; start again with another --run"
        )
    if runs.exists() and runs.read_bytes().count(b"\n") > 1:
        return
    reason = "; ".join(text.removesuffix(f"; {KEPT}") for text in incidents) or f"exit code {status.exit_code}"
    raise RequestError(f"{transport.name}: the run returned no results: {reason} (its log: {folder / LOG})")
