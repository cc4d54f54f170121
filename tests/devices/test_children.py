"""Commands in limited children: each way to end is a result with a sentence, and nothing of a child outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edge_devices.children import ChildBudget, Limits, import_paths, limited_command, run_child
from edge_devices.errors import DeviceError
from polling import is_running, wait

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("pass", None),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", "died of SIGSEGV"),
        ("import time; time.sleep(60)", "gave no answer in 1 seconds"),
        ("print('x' * 2000)", "wrote more than 1000 bytes"),
    ],
)
def test_each_end_is_a_predicate(code: str, end: str | None) -> None:
    child = run_child(python(code), seconds=1 if "sleep" in code else 60, output_bytes=1000)
    assert (child.end, child.late, child.cut) == (end, "sleep" in code, "print" in code)
    assert len(child.output) <= 1000


def test_an_answer_is_the_last_line_and_a_reason_the_line_with_an_error() -> None:
    code = "import sys; print('x'); print('{\"a\": 1}'); print('Error: b is missing\\nbye', file=sys.stderr)"
    child = run_child(python(code))
    assert child.answer == {"a": 1}
    assert child.reason == "b is missing"
    assert run_child(python("print('[1]')")).answer == {}
    assert run_child(python("print('a\\nlast')")).reason == "last"


def test_a_command_that_does_not_start_is_named() -> None:
    with pytest.raises(DeviceError, match=r"could not be started .* /nonexistent/python can be run"):
        run_child(["/nonexistent/python"])


@pytest.mark.parametrize(
    ("work", "end"),
    [
        ("while True: pass", "died of SIGKILL"),
        ("bytearray(1 << 30)", "ended with exit code 1"),
        ("open(__file__ + '.new', 'w').write('x')", "died of SIGXFSZ"),
    ],
)
@needs_linux
def test_limits_are_the_systems(work: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n{work}\n")
    limits = Limits(memory_bytes=512 << 20, cpu_seconds=0.5, writes_files=False)
    child = run_child(limited_command("hostile", limits=limits), seconds=60, environment=paths(tmp_path))
    assert child.end == end


def paths(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}:{import_paths()['PYTHONPATH']}"}


@needs_linux
def test_children_of_a_limited_child_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(
        "from edge_devices.children import limited_command, run_child\nrun_child(limited_command('inner'))\n"
    )
    (tmp_path / "inner.py").write_text(f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(60)\n")
    noted = tmp_path / "pid"

    def interrupt() -> None:
        if noted.exists() and noted.read_text():
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run_child(limited_command("outer"), environment=paths(tmp_path), each_poll=interrupt)
    assert wait(lambda: not is_running(noted.read_text())), "the grandchild still runs"


def test_calls_share_a_budget_of_processor_time() -> None:
    budget = ChildBudget(1.0)
    code = "import time\nwhile time.process_time() < 0.6: pass"
    assert run_child(python(code), budget=budget).end is None
    assert 0 < budget.cpu_seconds_left < 0.4
    run_child(python(code), budget=budget)
    assert budget.cpu_seconds_left == 0
    last = run_child(python(code), budget=budget)
    assert last.cancelled
    assert last.end == "was not started, as nothing is left of its budget"


def test_cancelling_ends_the_child_that_runs_and_starts_no_other() -> None:
    budget = ChildBudget()
    threading.Timer(0.3, budget.cancel).start()
    assert run_child(python("import time; time.sleep(600)"), budget=budget).end == "was cancelled"
    assert run_child(python("pass"), budget=budget).cancelled


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_thread_that_does_not_start_is_a_lack_of_memory_and_ends_the_child(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """As a process with little address space finds it. Neither the child, nor a thread, nor a pipe is left."""
    started: list[threading.Thread] = []
    children: list[subprocess.Popen[bytes]] = []
    start, popen = threading.Thread.start, subprocess.Popen

    def limited(thread: threading.Thread) -> None:
        if len(started) == room:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **options: children.append(popen(*words, **options)) or children[-1])
    with pytest.raises(MemoryError, match="can't start new thread"):
        run_child(python("import time; time.sleep(60)"))
    child = children[0]
    assert child.returncode == -signal.SIGKILL
    for thread in started:
        thread.join(10)
    assert all(pipe is not None and pipe.closed for pipe in (child.stdin, child.stdout, child.stderr))


def test_a_grandchild_that_keeps_the_output_open_is_not_waited_for() -> None:
    child = run_child(["sh", "-c", "sleep 5 & exit 0"], seconds=0.5)
    assert child.late
    assert isinstance(child.code, int)


def test_what_is_given_is_read_while_output_is_written() -> None:
    assert run_child(["cat"], bytes(1_000_000)).output == bytes(1_000_000)


@pytest.mark.skipif(sys.platform == "win32", reason="needs process groups")
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_child_is_ended_with_its_children(stubborn: bool, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
    grandchild = f"{ignore}import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    child = python("import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])", grandchild)

    def stop() -> None:
        if begun.exists() and begun.read_text():
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        run_child(child, with_children=True, each_poll=stop)
    assert wait(lambda: not is_running(begun.read_text()))
