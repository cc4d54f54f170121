"""The same benchmark on the phones of many hosts: Dask sends the work out; each phone's records return and are added to Parquet files.

Every worker's host needs edge-mtp, adb, its phones, and the bundle and package at the same paths. Scheduling is left to Dask.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_bench.devices.remote_run import RemoteRequest, bench_on
from edge_bench.devices.results import DEVICE, ENERGY, LOG, RUNS, WATCH, DeviceResult, read_result
from edge_bench.measure.progress import note
from edge_devices.errors import DeviceError, EdgeError
from edge_devices.transports.adb import AdbTransport, usable_serials
from edge_runtime.errors import RequestError

ALL = "all"
# A phone that stays out of reach must not hold up the whole fleet.
PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class FleetTask:
    """One phone of one worker."""

    request: RemoteRequest
    serial: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class FleetResult:
    """A phone's result files by name, or why there are none."""

    host: str
    serial: str
    files: dict[str, bytes]
    failure: str = ""


def phones_here() -> tuple[str, ...]:
    """Runs on a worker: returns the serials attached to its host; none where adb is missing or lists none."""
    try:
        return tuple(usable_serials())
    except DeviceError:
        return ()


def bench_phone(task: FleetTask) -> FleetResult:
    """Runs on a worker: runs the benchmark on one of its phones."""
    host = socket.gethostname()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            bench_on(AdbTransport(task.serial, task.folder), task.request, Path(scratch), lambda _text: None)
        except EdgeError as error:
            return FleetResult(host=host, serial=task.serial, files={}, failure=str(error))
        folder = next(Path(scratch).rglob(RUNS)).parent
        names = [name for name in (RUNS, ENERGY, WATCH, LOG, DEVICE) if (folder / name).exists()]
        return FleetResult(host=host, serial=task.serial, files={name: (folder / name).read_bytes() for name in names})


def run_fleet(address: str, request: RemoteRequest, results: Path, *, serials: Sequence[str], folder: str | None) -> list[DeviceResult]:
    """Measures on all phones of all workers, or on those named, and writes RESULTS/RUN and RESULTS/parquet as they come in.

    Raises RequestError when the scheduler cannot be reached, there is no usable phone, or none returns results.
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
    try:
        client = distributed.Client(address, timeout=20)
    except (OSError, ValueError) as error:
        raise RequestError(f"the scheduler {address} cannot be reached ({error}); start one with dask scheduler") from error
    collected: list[DeviceResult] = []
    with client:
        futures = []
        for worker, attached in client.run(phones_here).items():
            for serial in attached:
                if not serials or ALL in serials or serial in serials:
                    task = FleetTask(request=resolved, serial=serial, folder=folder or AdbTransport.FOLDER)
                    futures.append(client.submit(bench_phone, task, workers=[worker], allow_other_workers=False, pure=False))
        if not futures:
            raise RequestError(f"no worker of {address} has a usable phone; run `adb devices -l` on its host")
        note(f"run {request.name}: {len(futures)} phones")
        for future in distributed.as_completed(futures):
            outcome = _result_of(future)
            if outcome.failure:
                note(f"left out: {outcome.host}: {outcome.failure}")
                continue
            result = _store(outcome, results / request.name)
            write_parquet(results / "parquet", result)
            collected.append(result)
            note(f"{result.device}: done ({len(collected)} of {len(futures)})")
    if not collected:
        raise RequestError("no device returned results; see the messages above")
    return sorted(collected, key=lambda result: result.device)


def _result_of(future: Any) -> FleetResult:
    try:
        outcome: FleetResult = future.result()
    except Exception as error:  # noqa: BLE001 - whatever made a worker fail: the others continue
        return FleetResult(host="a worker", serial="", files={}, failure=f"{type(error).__name__}: {error}")
    return outcome


def _store(outcome: FleetResult, folder: Path) -> DeviceResult:
    """Writes a phone's files and reads them. The host is part of the name: two hosts may have phones of the same serial."""
    target = folder / f"{outcome.host}-{outcome.serial}".replace(":", "-").replace("/", "-")
    target.mkdir(parents=True, exist_ok=True)
    for name, data in outcome.files.items():
        (target / name).write_bytes(data)
    result = read_result(target)
    return replace(result, device=f"{outcome.host}/{outcome.serial}")


def _distributed() -> Any:
    try:
        import distributed
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise RequestError(f"--fleet needs {error.name}; pip install 'edge-mtp[fleet]'") from error
    return distributed
