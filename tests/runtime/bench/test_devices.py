"""edge-bench on phones behind the real adb, and what it sends them; the runs are played. A real run, over ssh: tests/test_pi_walk.py."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import Result

from bench_records import whole_benchmark
from device_runs import bench, hold, in_background, ran, wait_for, when_running
from edge_bench.devices import remote_run
from edge_bench.devices.remote_run import RemoteRequest, deploy
from edge_bench.measure.records import line_of, read_records
from edge_devices.errors import EdgeError, LinkError
from edge_devices.machine.device_package import read_package
from edge_devices.remote.file_sync import retried
from edge_devices.remote.transport import AdbTransport
from edge_runtime.bundle.bundle import CheckMode
from fake_adbd import FakeAdbd
from fake_phone import PI, FakePhone
from local_transport import LocalTransport
from phones import Desk
from stub_package import stub_bundle, stub_package


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_run, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(remote_run, "WATCH_SECONDS", 0.2)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_package(tmp_path_factory.mktemp("packages") / "played")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_bundle(tmp_path_factory.mktemp("bundles") / "my bundle")


@pytest.fixture
def empty(desk: Desk) -> Iterator[FakeAdbd]:
    """A phone that has nothing of ours."""
    daemon = desk.phone()
    yield daemon
    desk.adb("disconnect", daemon.serial)


@pytest.fixture
def daemon(empty: FakeAdbd, package: Path, bundle: Path) -> FakeAdbd:
    """A phone that has package and bundle from an earlier run."""
    for there, source in (("package", package), (f"bundles/{bundle.name}", bundle)):
        shutil.copytree(source, empty.phone.path(f"{AdbTransport.FOLDER}/{there}"))
    return empty


def test_a_run_on_a_phone_from_one_command(empty: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "own prompts.json"
    prompts.write_text('["one", "two"]')
    where = "--adb", empty.serial, "--package", package, "--results", tmp_path / "results", "--run", "first"
    what = "--lengths", "2,3", "--check", "none", "--prompts", prompts
    result = ran("devices", bundle, *where, *what, "--json", tmp_path / "figures.json")
    assert "All domains" in result.stdout
    assert "package: " in result.stderr
    assert "run first started" in result.stderr
    assert "before the run: the frequency governor is schedutil" in result.stdout
    folder = tmp_path / "results/first" / f"adb-{empty.serial.replace(':', '-')}"
    assert {p.name for p in folder.iterdir()} == {"runs.jsonl", "watch.jsonl", "log", "device.json"}
    assert json.loads((tmp_path / "figures.json").read_text())["overall"][0]["label"] == "plain"
    job = empty.phone.path(f"{AdbTransport.FOLDER}/runs/first")
    words = (job / "arguments").read_text().split()
    prompts_there = f"{AdbTransport.FOLDER}/inputs/first/1.json"
    assert " ".join(words[3:]) == f"--runs runs.jsonl --prompts {prompts_there} --lengths 2,3 --check none"
    again = bench("devices", bundle, "--adb", empty.serial, "--package", package, "--results", tmp_path / "results", "--run", "second")
    assert "0 files, 0 B sent" in again.stderr


def test_several_phones_are_compared(desk: Desk, daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    other = desk.phone()
    other.phone.says("getprop ro.product.model", "Other <b>\n")
    arguments = ("--package", package, "--results", tmp_path / "results", "--run", "both", "--html", tmp_path / "page.html")
    result = ran("devices", bundle, "--adb", daemon.serial, "--adb", other.serial, *arguments)
    for name in (daemon.serial, other.serial, "Fake One", "Other <b>", "Doubts, warnings and incidents"):
        assert name in result.stdout
    assert "Other &lt;b&gt;" in (tmp_path / "page.html").read_text()
    compared = bench("compare", tmp_path / "results")
    assert compared.stdout == result.stdout
    desk.adb("disconnect", other.serial)


@pytest.mark.slow
def test_one_of_two_phones_fails(desk: Desk, daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    hot = desk.phone()
    hot.phone.battery(celsius=50)
    arguments = ("--package", package, "--results", tmp_path, "--run", "half")
    result = ran("devices", bundle, "--adb", daemon.serial, "--adb", hot.serial, *arguments)
    assert f"left out: adb:{hot.serial}: the phone is at 50 °C: let it cool below 45 °C" in result.stderr
    assert "All domains" in result.stdout
    alone = bench("devices", bundle, "--adb", hot.serial, *arguments)
    assert alone.exit_code == 1
    assert alone.stderr.splitlines()[-1] == f"Error: adb:{hot.serial}: the phone is at 50 °C: let it cool below 45 °C"
    assert not hot.phone.path(f"{AdbTransport.FOLDER}/package").exists()
    desk.adb("disconnect", hot.serial)


def test_a_restart_keeps_what_was_measured(desk: Desk, daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    hold(daemon)

    def restart() -> None:
        daemon.phone.battery(level=2)
        wait_for(daemon, '"charge_percent": 2,')
        daemon.reboot()
        time.sleep(0.3)
        desk.connect(daemon)

    thread = when_running(daemon, restart)
    result = bench("devices", bundle, "--adb", daemon.serial, "--package", package, "--results", tmp_path)
    thread.join()
    assert result.exit_code == 0, result.output
    assert "the battery ran empty: 2 %" in result.stdout
    assert len(read_records(next(tmp_path.rglob("runs.jsonl"))).runs) == 2


def test_a_benchmark_that_the_kernel_kills_keeps_its_records(daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    """The benchmark alone, as the kernel chooses it: its monitor lives on and sees it end."""
    hold(daemon, "oom")
    result = ran("devices", bundle, "--adb", daemon.serial, "--package", package, "--results", tmp_path)
    assert "All domains" in result.stdout
    assert "the run was killed from outside" in result.stdout
    assert "the results until then are kept" in result.stdout
    assert len(read_records(next(tmp_path.rglob("runs.jsonl"))).runs) == 2
    assert "the run was killed from outside" in bench("compare", tmp_path).stdout


def test_a_full_disk_is_no_kill(daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    hold(daemon, "full")
    result = bench("devices", bundle, "--adb", daemon.serial, "--package", package, "--results", tmp_path)
    assert result.exit_code == 1
    assert "All domains" in result.stdout, "what was measured is shown"
    assert "the device's disk was full when the run ended: delete files there" in result.stderr.splitlines()[-1]
    assert "kernel" not in result.output


def test_a_meter_that_fails_there_costs_no_speeds(daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    hold(daemon, "broken")
    result = bench("devices", bundle, "--adb", daemon.serial, "--package", package, "--results", tmp_path, "--energy")
    assert result.exit_code == 1
    assert "All domains" in result.stdout
    assert result.stderr.splitlines()[-1].endswith("it ended with an error: Error: the meter failed")


SCREEN = "system screen_off_timeout"


@pytest.mark.parametrize("ending", ["collecting", "cleaning"])
def test_a_phone_that_went_off_gets_its_settings_back(
    ending: str, desk: Desk, daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path
) -> None:
    phone = daemon.phone
    phone.write(f"/system/settings/{SCREEN}", "30000\n")
    phone.says("dumpsys deviceidle enabled all", "1\n")
    hold(daemon)

    def restart() -> None:
        assert phone.setting(SCREEN) == "86400000"
        daemon.reboot()
        time.sleep(0.3)
        if ending == "collecting":
            desk.connect(daemon)

    where = "devices", "--adb", daemon.serial, "--results", tmp_path
    thread = when_running(daemon, restart)
    if ending == "collecting":
        result = bench(*where, bundle, "--package", package)
        thread.join()
    else:
        follower = in_background(lambda: bench(*where, bundle, "--package", package, "--run", "cut"))
        thread.join()
        assert phone.setting(SCREEN) == "86400000"
        desk.connect(daemon)
        follower.join()
        phone.write(f"/system/settings/{SCREEN}", "86400000\n")  # as if nobody had collected it
        phone.write(AdbTransport(daemon.serial).settings, "timeout=30000\ndoze=1\n")
        result = bench(*where, "--clean")
    assert result.exit_code == 0, result.output
    assert "the screen's timeout and Doze are as they were" in result.stderr
    assert phone.setting(SCREEN) == "30000"
    assert phone.path("/system/says/dumpsys deviceidle enabled all").read_text() == "1\n"


def test_an_external_meter_keeps_the_speeds_and_says_what_joins_them(daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    arguments = "devices", bundle, "--adb", daemon.serial, "--package", package, "--results", tmp_path, "--energy", "--meter", "external"
    result = ran(*arguments)
    assert "the recording of the external meter must run from now until the end" in result.stderr
    log = next(tmp_path.rglob("energy.jsonl"))
    assert f"edge-bench report {log} --external TABLE" in result.stdout
    assert "All domains" in result.stdout
    compared = ran("compare", tmp_path)
    assert "--external TABLE" in compared.stdout


def test_one_damaged_result_keeps_no_others_out(tmp_path: Path) -> None:
    for name in ("good", "bad", "worse"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "runs.jsonl").write_text("".join(map(line_of, whole_benchmark())))
    (tmp_path / "run/bad/runs.jsonl").write_text("{}\n")
    (tmp_path / "run/worse/energy.jsonl").write_text("{}\n")
    result = ran("compare", tmp_path)
    assert "good" in result.stdout
    assert "no joules: " in result.stdout
    assert f"left out: {tmp_path / 'run/bad/runs.jsonl'}: line 1 is not a valid record" in result.stderr


@pytest.mark.parametrize(("breaks", "collected"), [(0, True), (2, True), (3, False)])
def test_collecting_bears_a_link_that_breaks_again(breaks: int, collected: bool) -> None:
    left = [LinkError("the link broke")] * breaks

    def collect() -> str:
        if left:
            raise left.pop()
        return "result"

    with nullcontext() if collected else pytest.raises(LinkError, match="the link broke"):
        assert retried(collect, 0.0) == "result"


@pytest.mark.slow
def test_unplugging_does_not_end_a_run(desk: Desk, daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    held = hold(daemon)

    def unplug() -> None:
        daemon.faults.silent = True
        daemon.unplug()
        held.unlink()
        time.sleep(1.5)
        daemon.faults.silent = False
        desk.connect(daemon)

    thread = when_running(daemon, unplug)
    result = bench("devices", bundle, "--adb", daemon.serial, "--package", package, "--results", tmp_path)
    thread.join()
    assert result.exit_code == 0, result.output
    assert "; waiting for the device, the run on it continues" in result.stderr
    assert "All domains" in result.stdout


@pytest.mark.slow
def test_a_run_waits_for_the_cable_to_be_pulled(daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    daemon.phone.battery(usb=True)
    job = daemon.phone.path(f"{AdbTransport.FOLDER}/runs/waiting")
    settle = package.parent / "settle"
    stub_package(settle)
    python = settle / "bin/edge-python"
    # The ten seconds that a gauge takes to settle are one here.
    python.write_text(
        python.read_text().replace(
            '"$@"', '-c "import sys, edge_devices.remote.job_monitor as j; j.SETTLING_SECONDS = 1; sys.exit(j.main(sys.argv[4:]))" "$@"'
        )
    )
    files = json.loads((settle / "package.json").read_text())
    files["files"] = []
    (settle / "package.json").write_text(json.dumps(files))

    def unplug() -> None:
        wait_for(daemon, "look", times=2)
        assert not (job / "arguments").exists()
        daemon.phone.battery(usb=False)

    thread = in_background(unplug)
    result = bench("devices", bundle, "--adb", daemon.serial, "--package", settle, "--results", tmp_path, "--unplugged", "--run", "waiting")
    thread.join()
    assert result.exit_code == 0, result.output
    assert "unplug the device now" in result.stderr
    assert "changed from USB" not in result.stdout  # waiting is no part of the run


def test_joules_come_home_with_their_scope(daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    arguments = ("devices", bundle, "--adb", daemon.serial, "--package", package, "--results", tmp_path, "--energy")
    daemon.phone.battery(usb=True)
    refused = bench(*arguments)
    assert refused.exit_code == 1
    assert "USB supplies power: unplug it to measure at the battery" in refused.stderr
    daemon.phone.battery()
    result = ran(*arguments)
    assert "scope package" in result.stdout
    assert "Joules per output token" in result.stdout
    assert next(tmp_path.rglob("energy.jsonl")).exists()
    assert "Joules per output token, scope package" in bench("compare", tmp_path).stdout


@pytest.mark.slow
def test_a_run_is_followed_by_name_and_cleaned_up(daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    held = hold(daemon)
    arguments = ("devices", bundle, "--adb", daemon.serial, "--package", package, "--results", tmp_path, "--run", "named")
    thread = in_background(lambda: bench(*arguments))
    when_running(daemon, held.unlink).join()
    thread.join()
    result = ran(*arguments, "--clean")
    assert "run named already exists: following it" in result.stderr
    assert "governor is schedutil" in result.stdout  # what was seen before the run is remembered
    assert not daemon.phone.path(AdbTransport.FOLDER).exists()


def test_a_second_run_is_refused_and_a_stop_is_a_stop(daemon: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    hold(daemon)
    where = "devices", "--adb", daemon.serial
    arguments = (*where, bundle, "--package", package, "--results", tmp_path)
    ended: list[Result] = []
    thread = in_background(lambda: ended.append(bench(*arguments, "--run", "long")))
    when_running(daemon, lambda: None).join()
    goes_on = "run long goes on there: `--run long` follows and collects it, and with --stop ends it"
    for words in (arguments, (*arguments, "--deploy-only"), (*where, "--clean")):
        refused = bench(*words)
        assert refused.exit_code == 1
        assert refused.stderr.splitlines()[-1] == f"Error: adb:{daemon.serial}: {goes_on}"
    stopped = ran(*where, "--stop", "--run", "long")
    assert "run long is stopped; `--run long` without --stop collects what it measured" in stopped.stderr
    thread.join()
    assert ended[0].exit_code == 0, ended[0].output
    assert "it was stopped with --stop after" in ended[0].stdout
    assert "killed" not in ended[0].stdout
    again = bench(*where, "--stop", "--run", "long")
    assert (again.exit_code, "run long is over already" in again.stderr) == (1, True)
    assert f"{AdbTransport.FOLDER} is removed" in bench(*where, "--clean").stderr
    assert not daemon.phone.path(AdbTransport.FOLDER).exists()


def test_deploying_only_starts_nothing_and_is_cleaned_without_a_bundle(
    empty: FakeAdbd, package: Path, bundle: Path, tmp_path: Path
) -> None:
    ran("devices", bundle, "--adb", empty.serial, "--package", package, "--results", tmp_path, "--deploy-only")
    folder = empty.phone.path(AdbTransport.FOLDER)
    assert (folder / "package/bin/edge-bench").stat().st_mode & 0o111
    assert (folder / "bundles/my bundle/target.gguf").stat().st_size == 100_000
    assert not (folder / "runs").exists()
    ran("devices", "--adb", empty.serial, "--clean")
    assert not folder.exists()


def test_a_benchmark_that_fails_there_says_why_here(daemon: FakeAdbd, bundle: Path, tmp_path: Path) -> None:
    failing = stub_package(tmp_path / "failing", code=1)
    result = bench("devices", bundle, "--adb", daemon.serial, "--package", failing, "--results", tmp_path / "results")
    assert result.exit_code == 1
    assert "the run returned no results: it ended with an error: Error: the model does not fit" in result.stderr.splitlines()[-1]


def test_a_full_phone_is_told_before_anything_runs(empty: FakeAdbd, package: Path, bundle: Path, tmp_path: Path) -> None:
    empty.faults.room = 5_000
    result = bench("devices", bundle, "--adb", empty.serial, "--package", package, "--results", tmp_path)
    assert result.exit_code == 1
    assert "no space left on the device" in result.stderr.splitlines()[-1]
    assert not empty.phone.path(f"{AdbTransport.FOLDER}/runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--adb", "X"), 1, "needs --package"),
        (("--adb", "X", "--package", "PACKAGE", "--run", "../x"), 1, "is not a valid run name"),
        (("--adb", "X", "--stop"), 1, "--stop needs the name"),
        (("--adb", "X", "--stop", "--run", "../x"), 1, "is not a valid run name"),
        (("--adb", "X", "--package", "NOWHERE"), 1, "is not a device package"),
        (("--adb", "X", "--package", "PACKAGE", "--lengths", "x"), 2, "draft lengths"),
        (("--ssh", "-oProxyCommand=id", "--package", "PACKAGE"), 1, "is not a host"),
    ],
)
def test_what_cannot_be_asked_of_a_device(
    arguments: tuple[str, ...], code: int, words: str, package: Path, bundle: Path, tmp_path: Path
) -> None:
    known = {"PACKAGE": str(package), "NOWHERE": str(tmp_path / "nowhere")}
    result = bench("devices", bundle, *(known.get(a, a) for a in arguments))
    assert result.exit_code == code
    assert words in result.stderr.splitlines()[-1]


def test_a_package_for_another_processor_is_refused(empty: FakeAdbd, bundle: Path, tmp_path: Path) -> None:
    arm = stub_package(tmp_path / "arm", platform="android-arm64")
    result = bench("devices", bundle, "--adb", empty.serial, "--package", arm, "--results", tmp_path / "results")
    assert result.exit_code == 1
    assert "the package is for android-arm64, but the device's processor is" in result.stderr


def test_comparing_nothing_is_refused(tmp_path: Path) -> None:
    assert "no runs.jsonl found below" in bench("compare", tmp_path).stderr
    assert bench("compare").exit_code == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["runs.jsonl", "energy.jsonl", "device.json"])
def test_a_pipe_among_results_is_not_waited_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").touch()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    results: list[Result] = []
    reader = threading.Thread(target=lambda: results.append(bench("compare", tmp_path)), daemon=True)
    reader.start()
    reader.join(20)
    assert [result.exit_code for result in results] == [1]
    assert f"{name} is not a regular file" in results[0].stderr


def test_a_board_whose_supply_sags_in_a_run_is_named(desk: Desk, package: Path, bundle: Path, tmp_path: Path) -> None:
    board = FakeAdbd(FakePhone(tmp_path / "pi", pi=PI))
    desk.phones.append(board)
    assert desk.plugged(board)
    held, results = hold(board), list[Result]()
    where = "--adb", board.serial, "--package", package, "--results", tmp_path / "results"
    thread = in_background(lambda: results.append(bench("devices", bundle, *where)))
    try:
        for now, seen in ((0x50005, '"begin"'), (0x50000, f'"throttled": {0x50005}')):
            wait_for(board, seen)
            board.phone.says("vcgencmd get_throttled", f"throttled={now:#x}\n")
    finally:
        held.unlink()
        thread.join()
    assert results[0].exit_code == 0, results[0].output
    assert "the board throttled (get_throttled 0x50005)" in results[0].stdout
    desk.adb("disconnect", board.serial)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalTransport:
    """A device that passes every check before a run."""
    monkeypatch.setattr(remote_run, "preflight_refusals", lambda *_, **__: [])
    monkeypatch.setattr(remote_run, "preflight_warnings", lambda *_, **__: [])
    return LocalTransport(tmp_path / "device")


def send(device: LocalTransport, bundle: Path, package: Path, check: CheckMode = "fast") -> set[str]:
    """Returns the names that the bundle has on the device."""
    deploy(device, RemoteRequest(bundle=bundle, package=read_package(package), name="one", check=check), lambda _: None)
    sent = Path(device.folder) / "bundles" / bundle.resolve().name
    return {path.relative_to(sent).as_posix() for path in sent.rglob("*") if path.is_file()}


def test_only_the_files_of_the_bundle_are_sent(device: LocalTransport, package: Path, tmp_path: Path) -> None:
    bundle, secret = stub_bundle(tmp_path / "bundle"), tmp_path / "id_ed25519"
    secret.write_text("a private key")
    (bundle / "README.txt").symlink_to(secret)
    (bundle / "notes").mkdir()
    (bundle / "notes/mine.txt").write_text("mine")
    assert send(device, bundle, package) == {"manifest.json", "target.gguf"}
    for name in ("config.yaml", "manifest.json.sig"):
        (bundle / name).write_text("{}")
    (tmp_path / "link").symlink_to(bundle)
    assert send(device, tmp_path / "link", package) == {"manifest.json", "manifest.json.sig", "config.yaml", "target.gguf"}


def test_a_whole_bundle_opens_on_the_device(device: LocalTransport, package: Path, exported_pair: Path) -> None:
    """What other programs read of the folder is nobody's business there: the manifest does not list it."""
    files = {path.relative_to(exported_pair).as_posix() for path in exported_pair.rglob("*") if path.is_file()}
    assert send(device, exported_pair, package) == files - {"Modelfile", "README.md", "models.ini"}


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json.sig", "target.gguf"])
def test_a_link_in_place_of_a_file_of_the_bundle_is_refused(device: LocalTransport, package: Path, tmp_path: Path, name: str) -> None:
    bundle, secret = stub_bundle(tmp_path / "bundle"), tmp_path / "secret"
    secret.write_bytes(bytes(100_000))
    (bundle / name).unlink(missing_ok=True)
    (bundle / name).symlink_to(secret)
    with pytest.raises(EdgeError, match=f"{name} is a symbolic link"):
        send(device, bundle, package)
    assert not list(Path(device.folder).rglob(name))


def test_a_bundle_that_does_not_open_is_not_sent(device: LocalTransport, package: Path, tmp_path: Path) -> None:
    bundle = stub_bundle(tmp_path / "bundle")
    (bundle / "target.gguf").write_bytes(b"x" * 100_000)
    with pytest.raises(EdgeError, match="does not have the sha256 of the manifest"):
        send(device, bundle, package)
    assert not Path(device.folder).exists()
    assert send(device, bundle, package, "none") == {"manifest.json", "target.gguf"}


@pytest.mark.parametrize("target", ["secret", "folder", "nothing"])
def test_links_in_a_package_are_refused(device: LocalTransport, tmp_path: Path, target: str) -> None:
    package = stub_package(tmp_path / "package")
    (tmp_path / "secret").write_text("a private key")
    (tmp_path / "folder").mkdir()
    (package / "lib").symlink_to(tmp_path / target)
    with pytest.raises(EdgeError, match="lib is a symbolic link, and what it leads to is not sent"):
        send(device, stub_bundle(tmp_path / "bundle"), package)
    assert not (Path(device.folder) / "package").exists()


@pytest.mark.parametrize(("backends", "refused"), [(("onnx",), True), (("llama", "onnx"), False), (("llama",), False)])
def test_a_bundle_that_the_package_cannot_run_is_not_sent(
    device: LocalTransport, tmp_path: Path, backends: tuple[str, ...], refused: bool
) -> None:
    bundle, package = stub_bundle(tmp_path / "bundle"), stub_package(tmp_path / "package")
    record = json.loads((package / "package.json").read_text())
    (package / "package.json").write_text(json.dumps({**record, "backends": backends}))
    words = r"has no llama, and .* needs it; build the package with --backend llama, or export the bundle with --format onnx"
    with pytest.raises(EdgeError, match=words) if refused else nullcontext():
        send(device, bundle, package)
