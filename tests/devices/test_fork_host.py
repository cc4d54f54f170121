"""Limited children: time, memory and crashes end one job with one error, and nothing else."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from edge_devices import fork_host
from edge_devices.errors import DeviceError
from edge_devices.fork_host import ChildError, Host
from polling import is_running, wait

pytestmark = pytest.mark.skipif(not fork_host.AVAILABLE or sys.platform != "linux", reason="needs Linux")


@pytest.fixture
def host() -> Host:
    return Host("limited_work", b"shared ")


def test_children_share_what_was_prepared_and_nothing_else(host):
    first, second = host.new_child(), host.new_child()
    answers = [first.ask(b"a"), second.ask(b"a"), first.ask(b"b")]
    assert all(answer.startswith(b"shared ") for answer in answers)
    pids = [int(answer[8:]) for answer in answers]
    assert pids[0] == pids[2] != pids[1]


@pytest.mark.parametrize("work", [b"spin in C", b"allocate", b"crash", b"write"])
def test_a_job_beyond_its_limits_ends_alone(host, work):
    beside, job = host.new_child(), host.new_child()
    pid = int(job.ask(b"")[7:])
    with pytest.raises(ChildError):
        job.ask(work)
    with pytest.raises(ChildError):
        job.ask(b"again")
    assert wait(lambda: not is_running(pid))
    assert beside.ask(b"x").startswith(b"shared x")
    assert host.new_child().ask(b"y").startswith(b"shared y")


def test_time_without_work_is_not_counted(host):
    child = host.new_child()
    child.ask(b"a")
    time.sleep(0.5)
    assert child.ask(b"b").startswith(b"shared b")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_child_ends_with_its_object_and_all_with_the_host(host):
    dropped, kept = host.new_child(), host.new_child()
    pids = [int(child.ask(b"")[7:]) for child in (dropped, kept)]
    del dropped
    gc.collect()
    assert wait(lambda: not is_running(pids[0]))
    assert is_running(pids[1])
    parent = parent_of(pids[1])
    host._end()
    kept.close()
    assert wait(lambda: not is_running(pids[1]))
    assert wait(lambda: not is_running(parent))


def test_a_host_that_died_is_started_again(host):
    child = host.new_child()
    parent = parent_of(int(child.ask(b"")[7:]))
    os.kill(parent, signal.SIGKILL)
    assert wait(lambda: not is_running(parent))
    assert host.new_child().ask(b"z").startswith(b"shared z")
    assert child.ask(b"a").startswith(b"shared a")


def test_ctrl_c_is_for_the_main_process(host):
    child = host.new_child()
    os.kill(int(child.ask(b"")[7:]), signal.SIGINT)
    assert child.ask(b"a").startswith(b"shared a")


def test_a_message_that_is_too_long_is_refused(monkeypatch):
    import socket

    monkeypatch.setattr(fork_host, "MAX_BYTES", 10)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fork_host.send(theirs, b"x" * 100)
        with pytest.raises(ValueError, match="100 bytes"):
            fork_host.receive(ours)


def test_a_python_that_does_not_start_is_named(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(DeviceError, match="/nonexistent/python"):
        Host("limited_work", b"")
