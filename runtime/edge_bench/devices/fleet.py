"""The same benchmark on the phones of many hosts: Dask sends the work out; each phone's records return and are added to Parquet files.

Every worker's host needs edge-mtp, adb, its phones, and the bundle and package at the same paths. Scheduling is left to Dask.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_bench.devices.remote_run import RemoteRequest, bench_on
from edge_bench.devices.results import DEVICE, ENERGY, LOG, RUNS, WATCH, DeviceResult, read_result
from edge_bench.measure.progress import note
from edge_devices.errors import DeviceError, EdgeError, errors_as
from edge_devices.transports.adb import AdbTransport, usable_serials
from edge_runtime.errors import RequestError

ALL = "all"
FILES = (RUNS, ENERGY, WATCH, LOG, DEVICE)
# A phone that stays out of reach must not hold up the whole fleet.
PATIENCE_SECONDS = 1800.0


def phones_here() -> tuple[str, ...]:
    """Runs on a worker: returns the serials attached to its host; none where adb is missing or lists none."""
    try:
        return tuple(usable_serials())
    except DeviceError:
        return ()


def bench_phone(request: RemoteRequest, serial: str, folder: str) -> tuple[str, dict[str, bytes]]:
    """Runs on a worker: runs the benchmark on one of its phones. Returns its name in the fleet, and its result files by name.

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
    with errors_as(RequestError, f"the scheduler {address} cannot be reached", "start one with dask scheduler", OSError, ValueError):
        client = distributed.Client(address, timeout=20)
    collected: list[DeviceResult] = []
    with client:
        futures = []
        for worker, attached in client.run(phones_here).items():
            for serial in attached:
                if not serials or ALL in serials or serial in serials:
                    task = resolved, serial, folder or AdbTransport.FOLDER
                    futures.append(client.submit(bench_phone, *task, workers=[worker], allow_other_workers=False, pure=False))
        if not futures:
            raise RequestError(f"no worker of {address} has a usable phone; run `adb devices -l` on its host")
        note(f"run {request.name}: {len(futures)} phones")
        for future in distributed.as_completed(futures):
            try:
                phone, files = future.result()
            except Exception as error:  # noqa: BLE001 - whatever made a worker fail: the others continue
                note(f"left out: {error if isinstance(error, EdgeError) else f'a worker: {type(error).__name__}: {error}'}")
                continue
            result = _store(phone, files, results / request.name)
            write_parquet(results / "parquet", result)
            collected.append(result)
            note(f"{result.device}: done ({len(collected)} of {len(futures)})")
    if not collected:
        raise RequestError("no device returned results; see the messages above")
    return sorted(collected, key=lambda result: result.device)


def _store(phone: str, files: dict[str, bytes], folder: Path) -> DeviceResult:
    """Writes a phone's files and reads them. The host is part of the name: two hosts may have phones of the same serial."""
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
