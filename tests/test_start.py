"""The four commands from their first moment: Ctrl-C while modules load or before a command begins, and an output that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

COMMANDS = ["edge-run", "edge-bench", "edge-devices", "edge-export"]
FULL = Path("/dev/full")


def start(
    command: str, *arguments: str, before: str = "", output: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    function = command.replace("-", "_")
    code = f"{before}\nfrom edge_devices.entry_points import {function}; {function}()"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.run([sys.executable, "-c", code, *arguments], stdout=output, stderr=subprocess.PIPE, text=True, env=env, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_installed_command_begins_there(command):
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert project["project"]["scripts"][command] == f"edge_devices.entry_points:{command.replace('-', '_')}"


@pytest.mark.parametrize(("command", "unbuffered"), [*((command, "") for command in COMMANDS), ("edge-devices", "1")])
def test_a_full_output_is_one_sentence(command, unbuffered):
    if not FULL.exists():
        pytest.skip("needs /dev/full")
    if command == "edge-export":
        pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    with FULL.open("wb") as full:
        done = start(command, "--help", output=full.fileno(), PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (1, "Error: standard output cannot be written (No space left on device)\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_is_no_error(unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert start("edge-devices", "profiles", output=writing, PYTHONUNBUFFERED=unbuffered).stderr == ""
    finally:
        os.close(writing)


def test_a_closed_output_is_no_error():
    done = start("edge-devices", "profiles", before="import os, sys; os.close(1); sys.stdout = None")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_memory_for_modules_is_one_sentence(command):
    before = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("edge_devices.cli", "edge_runtime", "edge_bench", "edge_export"):
            raise MemoryError
sys.meta_path.insert(0, Finder())"""
    done = start(command, "--help", before=before)
    sentence = "Error: there is not enough memory to start; close other programs, or raise the limit (ulimit -v)\n"
    assert (done.returncode, done.stderr) == (1, sentence)


def test_other_faults_are_not_taken_for_the_outputs():
    done = start(
        "edge-devices",
        "profiles",
        before="import edge_devices.cli as c\ndef fail(): raise OSError(5, 'our own mistake')\nc.profiles = fail",
    )
    assert "our own mistake" in done.stderr
    assert "standard output" not in done.stderr


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("edge-run", "click"),
        ("edge-run", "edge_runtime.cli.run"),
        ("edge-bench", "edge_bench.cli.main"),
        ("edge-devices", "click"),
        ("edge-export", "edge_export.cli.command"),
    ],
)
def test_ctrl_c_while_modules_load(command, module):
    interrupting = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
"""
    done = start(command, "--help", before=interrupting)
    assert (done.returncode, done.stderr) == (130, "stopped\n")


def test_next_to_nothing_is_imported_before_ctrl_c_is_answered():
    code = "import sys; before = {*sys.modules}; import edge_devices.entry_points; print(*sorted({*sys.modules} - before))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert {*done.stdout.split()} - {"__future__"} == {"edge_devices", "edge_devices.entry_points"}


@pytest.mark.parametrize(
    ("before", "expected"),
    [("", (0, "")), ("import edge_devices.cli as c\ndef stop(): raise KeyboardInterrupt\nc.profiles = stop\n", (130, "stopped\n"))],
    ids=["done", "stopped"],
)
def test_ctrl_c_after_the_end_is_not_answered(before, expected):
    again = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    done = start("edge-devices", "profiles", before=f"{before}{again}")
    assert (done.returncode, done.stderr) == expected


@pytest.mark.parametrize(
    ("command", "argument", "place"),
    [
        ("edge-run", "doctor", "edge_runtime.cli.doctor.diagnose"),
        ("edge-devices", "detect", "edge_devices.cli.detect_device"),
        ("edge-devices", "meters", "edge_devices.cli.find_meters"),
    ],
)
def test_ctrl_c_ends_commands_that_do_not_hear_it_themselves(command, argument, place):
    module, _, name = place.rpartition(".")
    before = f"import {module} as module\ndef interrupted(*_, **__): raise KeyboardInterrupt\nmodule.{name} = interrupted"
    done = start(command, argument, before=before)
    assert (done.returncode, done.stderr.strip()) == (130, "stopped")


def test_usage_errors_are_clicks_own():
    done = start("edge-devices", "nothing")
    assert done.returncode == 2
    assert "no such command 'nothing'" in done.stderr


def test_a_working_directory_that_is_gone_is_one_sentence():
    before = (
        "import os, tempfile; place = tempfile.mkdtemp(); os.chdir(place); os.rmdir(place)\n"
        "import edge_devices.cli as c\nc.profiles = os.getcwd"
    )
    done = start("edge-devices", "profiles", before=before)
    assert (done.returncode, done.stderr) == (1, "Error: the working directory no longer exists; change to one that does\n")


def test_too_little_memory_is_one_sentence():
    before = "import edge_devices.cli as c\ndef fail(*_): raise MemoryError\nc.detect_device = fail"
    done = start("edge-devices", "detect", before=before)
    assert (done.returncode, done.stderr) == (1, "Error: there is not enough memory; close other programs\n")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("megabytes", [60, 100, 140])
def test_an_address_space_without_room_for_numpy_is_one_sentence(megabytes):
    """numpy raises at the first, its OpenBLAS ends the process at the second, and by SIGINT near the third."""
    before = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({megabytes << 20},) * 2)"
    done = start("edge-run", "generate", "no-bundle", "text", before=before)
    assert (done.returncode, done.stderr.count("\n"), done.stderr.partition(": ")[0]) == (1, 1, "Error")
