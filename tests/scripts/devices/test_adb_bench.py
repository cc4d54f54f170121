"""scripts/devices/adb_bench.py as somebody copies it: a loop of their own on a phone behind the real adb."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_bench.cli.main import main as edge_bench
from edge_bench.measure.records import read_records
from edge_devices.remote.transport import AdbTransport
from fake_adbd import FakeAdbd
from phones import Desk
from stub_package import stub_package

SCRIPT = Path(__file__).parents[3] / "scripts/devices/adb_bench.py"
COMMANDS = Path(sys.executable).parent


@pytest.fixture
def daemon(desk: Desk) -> FakeAdbd:
    return desk.phone()


def start(script: Path, *arguments: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = os.environ | environment | {"PATH": f"{COMMANDS}:{os.environ['PATH']}", "COLUMNS": "200"}
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, cwd=folder, env=own, check=False)


@pytest.mark.slow(20)
def test_a_loop_of_ones_own_runs_on_the_phone(desk: Desk, daemon: FakeAdbd, exported_pair: Path, tmp_path: Path) -> None:
    """A copy whose prompt and lengths are changed, and then one that ends in an error in its middle."""
    stub_package(tmp_path / "phone-package", real=True)
    mine = tmp_path / "mine.py"
    mine.write_text(
        SCRIPT.read_text().replace("lengths=[2, 4]", "lengths=[1]").replace("range(5)", "range(2)").replace("tokens=32", "tokens=8")
    )
    where = "--serial", daemon.serial
    done = start(mine, exported_pair, "record.jsonl", *where, folder=tmp_path, **desk.environment)
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "record.jsonl")
    assert [run.variant.label for run in records.runs].count("plain") == 2
    assert len(records.runs) == 4
    assert records.header.weights
    assert "All domains" in CliRunner().invoke(edge_bench, ["report", str(tmp_path / "record.jsonl")]).stdout
    assert not list(daemon.phone.path(f"{AdbTransport.FOLDER}/runs").iterdir()), "nothing is left of it"

    mine.write_text(
        mine.read_text().replace("                file.add(result)\n", "                file.add(result)\n                1 / repeat\n")
    )
    broken = start(mine, exported_pair, "cut.jsonl", *where, folder=tmp_path, **desk.environment)
    assert broken.returncode == 1
    assert "ZeroDivisionError" in broken.stderr
    assert len(read_records(tmp_path / "cut.jsonl").runs) == 1, "what was measured is fetched"


def test_the_script_is_short_enough_to_be_copied() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 80
