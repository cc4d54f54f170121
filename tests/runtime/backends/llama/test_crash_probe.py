from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_runtime.backends.llama import crash_probe as probe
from edge_runtime.backends.llama.crash_probe import probe_load_options
from edge_runtime.errors import BackendError

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

Q4_0, Q8_0, Q5_K = 2, 8, 13  # numbers of ggml

# Children that record that they ran and then do to themselves what a bad build would do.
RECORD = "import os, signal, sys, time; open(sys.argv[1], 'a').write('ran ' + ' '.join(sys.argv[2:]) + '\\n');"
ALIVE = RECORD + "print('{\"alive\": true}')"
REFUSES_REPACKING = "'\"use_extra_bufts\": false' in sys.argv[-1] or os.kill(os.getpid(), signal.SIGSEGV);"
DIES_WITH_REPACKING = f"{RECORD}{REFUSES_REPACKING} print('{{\"alive\": true}}')"
DIES = RECORD + "os.kill(os.getpid(), signal.SIGILL)"
HANGS = RECORD + "time.sleep(60)"
SILENT = RECORD
REFUSES = RECORD + 'print(\'{"error": "the file is damaged"}\'); sys.exit(1)'


def write_gguf(path: Path, kind: int) -> None:
    """A GGUF file of one tensor of this type."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    tensor = struct.pack("<Q", 1) + b"w" + struct.pack("<IQIQ", 1, 256, kind, 0)
    path.write_bytes((head + tensor).ljust(96, b"\0") + bytes(1024))


class Machine:
    """A folder with a cache and a log of the children that were started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.notes: list[str] = []
        self.files = folder / "target.gguf", folder / "drafter.gguf"
        self.hold(Q4_0, Q8_0)

    def hold(self, *kinds: int) -> None:
        for path, kind in zip(self.files, kinds, strict=True):
            write_gguf(path, kind)

    def ask(self, script: str, *, quantizations: tuple[str, ...] = ("Q4_0", "Q8_0"), **more: Any) -> probe.ProbeAnswer:
        command = [sys.executable, "-c", script, str(self.folder / "log")]
        return probe_load_options(*self.files, quantizations, notify=self.notes.append, child_command=command, **more)

    @property
    def children(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return Machine(tmp_path)


def test_a_living_child_is_asked_once(machine: Machine) -> None:
    first = machine.ask(ALIVE)
    assert first.use_extra_bufts
    assert len(machine.notes) == 1
    assert "First use with Q4_0 and Q8_0" in machine.notes[0]
    second = machine.ask(ALIVE)
    assert second == first
    assert len(machine.notes) == 1
    assert machine.children == [f"ran {json.dumps(dict(zip(('target', 'drafter'), map(str, machine.files), strict=True)))}"]


def test_a_crash_leads_to_safer_options_which_are_cached(machine: Machine) -> None:
    answer = machine.ask(DIES_WITH_REPACKING)
    assert not answer.use_extra_bufts
    assert "died of SIGSEGV" in answer.reason
    assert len(machine.notes) == 2
    assert "SIGSEGV" in machine.notes[1]
    assert "CMAKE_ARGS" in machine.notes[1]
    assert ["use_extra_bufts" in line for line in machine.children] == [False, True]
    assert not machine.ask(ALIVE).use_extra_bufts
    assert len(machine.children) == 2


def test_a_machine_where_nothing_works(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(
        BackendError, match=r'died of SIGILL, without repacking it died of SIGILL; .*CMAKE_ARGS="-DGGML_NATIVE=OFF .*AVX512'
    ):
        machine.ask(DIES)
    assert not machine.cache.exists()


def test_a_child_that_hangs_is_ended(machine: Machine) -> None:
    with pytest.raises(BackendError, match=r"gave no answer in 0.5 seconds, without repacking it gave no answer"):
        machine.ask(HANGS, timeout_seconds=0.5)


def test_an_exit_without_an_answer_is_no_answer(machine: Machine) -> None:
    with pytest.raises(BackendError, match="ended with exit code 0"):
        machine.ask(SILENT)


def test_a_sentence_of_the_child_is_passed_on(machine: Machine) -> None:
    with pytest.raises(BackendError, match=r"^the file is damaged$"):
        machine.ask(REFUSES)
    assert len(machine.children) == 1
    assert not machine.cache.exists()


def test_another_build_is_tried_anew(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.ask(ALIVE)
    monkeypatch.setattr(probe, "system_info", lambda: "AMX_INT8 = 1")
    assert not machine.ask(DIES_WITH_REPACKING).use_extra_bufts


def test_answers_are_kept_side_by_side(machine: Machine) -> None:
    machine.ask(ALIVE)
    machine.hold(Q5_K, Q8_0)
    machine.ask(DIES_WITH_REPACKING, quantizations=("Q5_K_M", "Q8_0"))
    machine.hold(Q4_0, Q8_0)
    assert machine.ask(ALIVE).use_extra_bufts
    machine.hold(Q5_K, Q8_0)
    assert not machine.ask(ALIVE, quantizations=("Q5_K_M", "Q8_0")).use_extra_bufts


def test_a_manifest_that_names_another_quantization_reuses_no_answer(machine: Machine) -> None:
    machine.ask(ALIVE, hashes=("1", "2"))
    machine.hold(Q5_K, Q8_0)
    assert not machine.ask(DIES_WITH_REPACKING, hashes=("3", "2")).use_extra_bufts
    assert machine.ask(DIES_WITH_REPACKING, hashes=("1", "2")).use_extra_bufts


def test_headers_of_known_files_are_not_read_again(machine: Machine) -> None:
    machine.ask(ALIVE, hashes=("1", "2"))
    for path in machine.files:
        path.unlink()
    assert machine.ask(DIES, hashes=("1", "2")).use_extra_bufts
    with pytest.raises(BackendError, match="is not a file"):
        machine.ask(DIES)


def test_the_child_decodes_the_pair_itself(machine: Machine, reference_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    answer = probe_load_options(reference_pair.target, reference_pair.drafter, ["F16", "F16"], notify=machine.notes.append)
    assert answer.use_extra_bufts
    with pytest.raises(BackendError, match="has the architecture 'gemma4-assistant', not 'gemma4'"):
        probe_load_options(reference_pair.drafter, None, ["F16"], notify=machine.notes.append)
