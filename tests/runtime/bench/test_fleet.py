"""A fleet of two hosts with two phones each: real Dask workers, each with an adb server and fake phones of its own. The runs are played."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

import phones
from bench_records import whole_benchmark
from device_runs import bench, hold, in_background, ran
from edge_bench.devices import fleet
from edge_bench.measure.records import Run
from edge_devices.remote.transport import AdbTransport
from polling import wait
from stub_package import ROOT, stub_bundle, stub_package

distributed = pytest.importorskip("distributed", reason="needs edge-mtp[fleet]")
pytest.importorskip("pyarrow", reason="needs edge-mtp[fleet]")
pytestmark = pytest.mark.slow(8)
WORKER = """
import sys
from edge_bench.devices import remote_run
remote_run.POLL_SECONDS = 0.3
from distributed.cli.dask_worker import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def desks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[phones.Desk]]:
    if phones.NEEDS:
        pytest.skip(phones.NEEDS)
    made = [phones.Desk(tmp_path_factory.mktemp(f"desk{n}")) for n in range(2)]
    for desk in made:
        for _ in range(2):
            desk.phone()
    yield made
    for desk in made:
        desk.close()


def start_worker(address: str, desk: phones.Desk, scratch: Path) -> subprocess.Popen[bytes]:
    """A worker with the phones of a desk."""
    floors = os.pathsep.join(str(ROOT / floor) for floor in ("exporter", "runtime", "devices"))
    words = ["--nthreads", "2", "--no-nanny", "--no-dashboard", "--local-directory", str(scratch)]
    environment = os.environ | {"ANDROID_ADB_SERVER_PORT": str(desk.port), "PYTHONPATH": floors}
    null = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-c", WORKER, address, *words], env=environment, stdout=null, stderr=null)


@pytest.fixture(scope="module")
def workers() -> list[subprocess.Popen[bytes]]:
    """The processes of the workers, in the order of their desks."""
    return []


@pytest.fixture(scope="module")
def scheduler(desks: list[phones.Desk], workers: list[subprocess.Popen[bytes]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a scheduler with a worker per desk."""
    with distributed.LocalCluster(n_workers=0, dashboard_address=None, protocol="tcp") as cluster, distributed.Client(cluster) as client:
        address = cluster.scheduler_address
        workers.extend(start_worker(address, desk, tmp_path_factory.mktemp("worker")) for desk in desks)
        client.wait_for_workers(2, timeout=60)
        yield address
        for worker in workers:
            worker.terminate()
            worker.wait()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return stub_bundle(tmp_path / "pair")


def test_four_phones_of_two_hosts_land_in_one_parquet_folder(
    desks: list[phones.Desk], scheduler: str, bundle: Path, tmp_path: Path
) -> None:
    import pyarrow.dataset as ds

    package = stub_package(tmp_path / "package")
    arguments = ("devices", bundle, "--fleet", scheduler, "--package", package, "--results", tmp_path / "fleet")
    result = ran(*arguments, "--run", "one")
    serials = {daemon.serial for desk in desks for daemon in desk.phones}
    rows = ds.dataset(tmp_path / "fleet/parquet/requests").to_table().to_pylist()
    assert {row["device"].rpartition("/")[2] for row in rows} == serials
    assert len(rows) == 4 * sum(isinstance(record, Run) for record in whole_benchmark())
    assert {p.name for p in (tmp_path / "fleet/one").glob("*/*")} == {"runs.jsonl", "watch.jsonl", "log", "device.json"}
    assert "Fleet" in result.stdout
    for serial in serials:
        assert serial in result.stdout

    hot, other = desks[0].phones[0], desks[1].phones[0]
    hot.phone.battery(celsius=50)
    again = bench(*arguments, "--run", "two", "--adb", hot.serial, "--adb", other.serial)
    hot.phone.battery()
    assert again.exit_code == 0, again.output
    assert "left out" in again.stderr
    assert "let it cool" in again.stderr
    assert len(list((tmp_path / "fleet/parquet/requests").iterdir())) == 4 + 1
    compared = ran("compare", tmp_path / "fleet")
    assert "Fleet" in compared.stdout


def test_a_fleet_that_cannot_be(desks: list[phones.Desk], scheduler: str, bundle: Path, tmp_path: Path) -> None:
    package, locked = stub_package(tmp_path / "package"), desks[0].phones[0]
    locked.faults.unauthorized = True
    locked.unplug()
    desks[0].connect(locked)
    nobody = bench("devices", bundle, "--fleet", scheduler, "--adb", "not-there", "--package", package, "--results", tmp_path)
    locked.faults.unauthorized = False
    assert desks[0].plugged(locked)
    assert nobody.exit_code == 1
    assert f"left out: {locked.serial} is not authorised" in nobody.stderr
    assert "has a usable phone" in nobody.stderr
    unknown = bench("devices", bundle, "--fleet", "nonsense://x", "--package", package, "--results", tmp_path)
    assert unknown.exit_code == 1
    assert "cannot be reached" in unknown.stderr.splitlines()[-1]


def test_a_lost_worker_is_named_and_its_phone_taken_over(
    desks: list[phones.Desk],
    scheduler: str,
    workers: list[subprocess.Popen[bytes]],
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One phone of the worker that ends is then plugged into the other host, one is nowhere."""
    package, (moved, gone) = stub_package(tmp_path / "package"), desks[0].phones
    everything = [daemon for desk in desks for daemon in desk.phones]
    held = [hold(daemon) for daemon in everything]
    arguments = ("devices", bundle, "--fleet", scheduler, "--package", package, "--results", tmp_path / "fleet", "--run", "three")
    results: list[Result] = []
    lines: list[str] = []
    monkeypatch.setattr(fleet, "note", lines.append)
    thread = in_background(lambda: results.append(bench(*arguments)))

    def await_or_say(what: str, condition: Callable[[], bool]) -> None:
        came = wait(lambda: results or condition())
        assert not results, f"the run ended before {what}: {lines} {results[0].output} {traceback.format_exception(*results[0].exc_info)}"
        assert came, f"waited until {what}; the run said {lines}"

    try:
        for daemon in everything:
            watch = daemon.phone.path(f"{AdbTransport.FOLDER}/runs/three/watch.jsonl")
            await_or_say(f"{daemon.serial} has begun", lambda watch=watch: watch.exists() and '"begin"' in watch.read_text())  # type: ignore[misc]
        workers[0].kill()
        workers[0].wait()
        desks[0].adb("disconnect", moved.serial)
        assert desks[1].plugged(moved)
        await_or_say(f"{moved.serial} is taken over", lambda: any(f"{moved.serial}: taken over by the worker" in line for line in lines))
    finally:
        for path in held:
            path.unlink()
        thread.join()
    assert results[0].exit_code == 0, results[0].output
    for serial in (moved.serial, gone.serial):
        assert [f"is lost; the run on its phone {serial} goes on: `--run three` collects it" in line for line in lines].count(True) == 1
    assert lines[-1] == f"left out: {gone.serial}: no other worker has this phone"
    assert len({path.parent.name for path in (tmp_path / "fleet/three").rglob("runs.jsonl")}) == 3
    desks[1].adb("disconnect", moved.serial)
    assert desks[0].plugged(moved)
    with distributed.Client(scheduler) as client:
        workers[0] = start_worker(scheduler, desks[0], tmp_path / "worker")
        client.wait_for_workers(2, timeout=60)
