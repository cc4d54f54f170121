"""What a device sends is text of somebody else's: never printed as it came, never trusted to be a number, never left running."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_bench.measure.progress import note
from edge_bench.report.tables import TextTable, print_tables
from edge_devices.energy.report import meter_lines
from edge_devices.errors import MeasurementError, TransportError, one_line, printable
from edge_devices.machine.system import CommandResult
from edge_devices.meters.base import present
from edge_devices.remote.file_sync import device_files, free_bytes
from edge_devices.remote.job_monitor import read_job_history
from edge_devices.remote.jobs import JobState, poll_job, start_job, stop_job
from edge_devices.remote.snapshot import MARK, take_snapshot
from edge_devices.remote.transport import SOCKET_PREFIX, SshTransport, prepare_folder, shell
from local_transport import LocalTransport
from polling import dead_process, wait

ESCAPE = "\x1b[2J\x1b]0;owned\x07Pixel\x9b1m"


def running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_name_with_a_line_end_leads_out_of_no_folder(tmp_path: Path) -> None:
    """As toybox lists a file whose name another user of the device has chosen."""
    zeros = "0" * 64

    class Listing(LocalTransport):
        def run(self, arguments: Sequence[str], *, seconds: float = 60.0) -> CommandResult:
            return CommandResult(code=0, output=f"{zeros}  ./x\n{zeros}  ./../../diary\n{zeros}  ./a/..\n{zeros}  ./..a\n".encode())

    assert device_files(Listing(tmp_path), "folder").keys() == {"x", "..a"}


def test_stopping_a_job_ends_its_children_too(tmp_path: Path) -> None:
    transport = LocalTransport(tmp_path)
    job = f"{prepare_folder(transport)}/runs/one"
    start_job(transport, job, ["sh", "-c", "sleep 61 & sleep 62 & wait"])
    group = int((Path(job) / "pid").read_text().split()[0])
    assert running(group)
    stop_job(transport, job)
    assert wait(lambda: not running(group))
    assert poll_job(transport, job, "res").state is JobState.STOPPED


def test_a_job_of_before_a_restart_is_nobody_elses_process(tmp_path: Path) -> None:
    transport = LocalTransport(tmp_path)
    with subprocess.Popen(["sleep", "63"], start_new_session=True) as other:
        job = tmp_path / "job"
        job.mkdir()
        (job / "pid").write_text(str(other.pid))
        (job / "boot").write_text("another boot\n")
        with pytest.raises(TransportError, match="is over already"):
            stop_job(transport, str(job))
        assert other.poll() is None
        for text in ("0", "1", "-1", "x; touch owned", ""):
            (job / "pid").write_text(text)
            with pytest.raises(TransportError, match="is over already"):
                stop_job(transport, str(job))
        assert not (job / "owned").exists()
        other.kill()


@pytest.mark.parametrize("name", ["-rf", "sub/-x", "relative"])
def test_folders_that_look_like_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    transport = LocalTransport(tmp_path)
    transport.folder = name
    assert prepare_folder(transport) == str(tmp_path / name)
    assert free_bytes(transport, name)
    assert shell(transport, 'test -d "$1" && echo yes', str(tmp_path / name)).strip() == "yes"


@pytest.mark.parametrize("code", ["²", "999999", "9" * 40, "", "-1"])
def test_odd_exit_codes(code: str, tmp_path: Path) -> None:
    class Answering(LocalTransport):
        def run(self, arguments: Sequence[str], *, seconds: float = 60.0) -> CommandResult:
            return CommandResult(code=0, output=f"{MARK}command {code} uname -m\naarch64\n".encode())

    assert take_snapshot(Answering(tmp_path)).architecture == "aarch64"


@pytest.mark.parametrize("memory", ["Infinity", "1e999", '"x"', "[]"])
def test_odd_records(tmp_path: Path, memory: str) -> None:
    path = tmp_path / "watch.jsonl"
    path.write_text(f'{{"kind": "look", "t": 1, "memory": {memory}, "state": {{}}}}\n')
    with pytest.raises(MeasurementError, match="is not a record of the job monitor"):
        read_job_history(path)


def test_no_escape_sequence_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    note(f"[pi] {ESCAPE}")
    print_tables([TextTable(name="a", title=ESCAPE, columns=("", ESCAPE), rows=((ESCAPE, "1"),), note=ESCAPE)])
    shown = "".join(capsys.readouterr()) + "".join(meter_lines([present("battery", ESCAPE, ESCAPE)]))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\x9b" not in shown
    assert "\\x1b[2J" in shown
    assert printable("two\nlines") == "two\nlines"
    assert one_line("two\nlines") == "two\\nlines"


@pytest.mark.skipif(shutil.which("ssh") is None or shutil.which("sftp") is None, reason="needs ssh (apt install openssh-client)")
def test_folders_of_killed_ssh_masters_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, own = tmp_path / f"{SOCKET_PREFIX}{dead_process()}-x", tmp_path / f"{SOCKET_PREFIX}{os.getpid()}-x"
    for folder in (old, own):
        folder.mkdir()
    SshTransport("pi").close()
    assert not old.exists()
    assert own.exists()
