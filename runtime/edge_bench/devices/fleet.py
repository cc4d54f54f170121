"""The benchmark on the phones of many hosts. Dask distributes the work; each phone's records are returned and added to Parquet files.

Every worker's host needs edge-mtp, adb, its phones, and the bundle and package at the same paths. Dask does the scheduling.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_bench.devices.remote_run import RemoteRequest, bench_on
from edge_bench.devices.results import DEVICE, ENERGY, LOG, RUNS, WATCH, DeviceResult, read_result
from edge_bench.measure.progress import note
from edge_devices.errors import DeviceError, EdgeError, errors_as
from edge_devices.remote.transport import AdbTransport, usable_serials
from edge_runtime.errors import RequestError

ALL = "all"
FILES = (RUNS, ENERGY, WATCH, LOG, DEVICE)
# How long a phone may be out of reach. Without a limit, it would hold up the whole fleet.
PATIENCE_SECONDS = 1800.0
# Seconds between checks of the workers, and without a heartbeat before a worker counts as lost.
WATCH_SECONDS, SILENT_SECONDS = 5.0, 30.0


def phones_here() -> tuple[list[str], list[str]]:
    """Runs on a worker. Returns the serials of its host's usable phones, and sentences about why others, or all, are left out."""
    remarks: list[str] = []
    try:
        return usable_serials(remarks.append), remarks
    except DeviceError as error:
        return [], [f"left out: {error}"]


def bench_phone(request: RemoteRequest, serial: str, folder: str) -> tuple[str, dict[str, bytes]]:
    """Runs on a worker: benchmarks one of its phones. Returns the phone's name in the fleet, and its result files by name.

    Raises RequestError, which names the host.
    """
    host = socket.gethostname()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            bench_on(AdbTransport(serial, folder), request, Path(scratch), lambda _text: None)
        except EdgeError as error:
            raise RequestError(f"{host}: {error}") from error
        home = next(Path(scratch).rglob(RUNS)).parent
        return f"{host}/{serial}", {name: (home / name).read_bytes() for name in FILES if (home / name).exists()}


def run_fleet(address: str, request: RemoteRequest, results: Path, *, serials: Sequence[str], folder: str | None) -> list[DeviceResult]:
    """Measures on all phones of all workers, or on the named ones. Writes each result to RESULTS/RUN and RESULTS/parquet as it arrives.

    Raises RequestError if the scheduler cannot be reached, there is no usable phone, or none returns results.
    """
    distributed = _distributed()
    from edge_bench.devices.parquet import write_parquet

    resolved = replace(
        request,
        bundle=request.bundle.resolve(),
        package=replace(request.package, folder=request.package.folder.resolve()),
        public_key=request.public_key.resolve() if request.public_key else None,
        options=tuple(option.resolve() if isinstance(option, Path) else option for option in request.options),
        patience_s=PATIENCE_SECONDS,
    )
    with errors_as(RequestError, f"the scheduler {address} cannot be reached", "start one with dask scheduler", OSError, ValueError):
        # A client for an invalid address would stay half open, and could delay the next client whenever it ends.
        distributed.comm.resolve_address(address)
        client = distributed.Client(address, timeout=20)
    collected: list[DeviceResult] = []
    with client:
        fleet = _Fleet(client, resolved, folder or AdbTransport.FOLDER)
        fleet.start(lambda serial: not serials or ALL in serials or serial in serials, note)
        if not fleet.runs:
            raise RequestError(f"no worker of {address} has a usable phone; run `adb devices -l` on its host")
        count = len(fleet.runs)
        note(f"run {request.name}: {count} phones")
        while fleet.runs:
            for future in fleet.wait():
                try:
                    phone, files = future.result()
                except Exception as error:  # noqa: BLE001 - a worker may fail in any way; the others continue
                    note(f"left out: {error if isinstance(error, EdgeError) else f'a worker: {type(error).__name__}: {error}'}")
                    continue
                result = _store(phone, files, results / request.name)
                write_parquet(results / "parquet", result)
                collected.append(result)
                note(f"{result.device}: done ({len(collected)} of {count})")
        for serial in sorted(fleet.lost):
            note(f"left out: {serial}: no other worker has this phone")
    if not collected:
        raise RequestError("no device returned results; see the messages above")
    return sorted(collected, key=lambda result: result.device)


class _Fleet:
    """The runs on the workers' phones. `runs` maps each future to its worker's address and phone; `lost` has phones whose worker is gone.

    Lost workers are detected here, because Dask waits forever for a worker that a task is bound to.
    """

    def __init__(self, client: Any, request: RemoteRequest, folder: str) -> None:
        self.runs: dict[Any, tuple[str, str]] = {}
        self.lost: set[str] = set()
        self._client, self._request, self._folder = client, request, folder
        self._workers: dict[str, Any] = {}  # the scheduler's facts about each worker, by address
        self._alive: dict[str, tuple[object, float]] = {}  # each worker's last heartbeat, and when it was first seen here

    def start(self, is_meant: Callable[[str], bool], report: Callable[[str], None] = lambda _text: None) -> None:
        """Starts the run on each phone that `is_meant` and has no run yet. `report` gets why phones or workers are left out."""
        begun = {serial for _, serial in self.runs.values()}
        workers = self._reachable()
        answers = self._client.run(phones_here, workers=workers, on_error="ignore")
        for worker in workers:
            if worker not in answers:
                report(f"left out: the worker {worker} does not answer")
        for worker, (attached, remarks) in answers.items():
            for text in remarks:
                report(f"{text} (worker {worker})")
            for serial in attached:
                if is_meant(serial) and (worker, serial) not in self.runs.values():
                    if serial in self.lost:
                        if serial in begun:
                            continue
                        note(f"{serial}: taken over by the worker {worker}, which follows its run")
                        self.lost.discard(serial)
                    task = self._request, serial, self._folder
                    future = self._client.submit(bench_phone, *task, workers=[worker], allow_other_workers=False, pure=False)
                    self.runs[future] = worker, serial

    def wait(self) -> list[Any]:
        """Returns the futures that are done, after waiting a few seconds. Gives up runs of lost workers, and starts them elsewhere."""
        distributed = _distributed()
        try:
            done = list(distributed.wait(list(self.runs), timeout=WATCH_SECONDS, return_when="FIRST_COMPLETED").done)
        except distributed.TimeoutError:
            done = []
        for future in done:
            del self.runs[future]
        reachable = self._reachable()
        for future, (worker, serial) in list(self.runs.items()):
            if worker not in reachable:
                del self.runs[future]
                future.cancel(force=True)
                self.lost.add(serial)
                name = self._request.name
                note(f"the worker {worker} is lost; the run on its phone {serial} goes on: `--run {name}` collects it where the phone is")
        if self.lost:
            self.start(lambda serial: serial in self.lost)
        return done

    def _reachable(self) -> list[str]:
        """Returns the addresses of the scheduler's workers that sent a heartbeat within the last `SILENT_SECONDS`."""
        with suppress(OSError):  # the scheduler is out of reach for a moment; the heartbeats grow old meanwhile
            # Not `scheduler_info()`: another thread of the client replaces its result every two seconds, without the workers.
            self._workers = self._client.sync(self._client.scheduler.identity, n_workers=-1)["workers"]
        now, workers = time.monotonic(), self._workers
        for address, facts in workers.items():
            known, _ = self._alive.get(address, (None, now))
            if known != facts["last_seen"]:
                self._alive[address] = facts["last_seen"], now
        return [address for address in workers if now - self._alive[address][1] < SILENT_SECONDS]


def _store(phone: str, files: dict[str, bytes], folder: Path) -> DeviceResult:
    """Writes a phone's files and reads them as a result. The name has the host, because phones of two hosts may have the same serial."""
    target = folder / phone.replace(":", "-").replace("/", "-")
    target.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (target / name).write_bytes(data)
    return replace(read_result(target), device=phone)


def _distributed() -> Any:
    try:
        import distributed
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise RequestError(f"--fleet needs {error.name}; pip install 'edge-mtp[fleet]'") from error
    return distributed
