"""Exit codes that come back inside the output, and what is particular to ssh.

Each code is read exactly, and a link that breaks is never taken for a failed command. Of ssh, host keys are looked at, names are quoted for
sftp, and errors say what to do.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from edge_devices.errors import LinkError, TransportError
from edge_devices.machine.system import CommandResult
from edge_devices.remote.transport import FramedCommand, SshTransport, frame_command, sftp_word
from ssh_host import SshHost


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("code", [0, 5, 137])
def test_an_output_cut_anywhere_before_the_end_of_its_code_gives_no_code(separate: bool, code: int) -> None:
    framed = frame_command(["sh", "-c", f"echo out; echo bad >&2; exit {code}"], separate=separate)
    whole = subprocess.run(["sh", "-c", framed.line], capture_output=True, check=False).stdout
    end = whole.index(framed.mark) + len(framed.mark) + len(str(code)) + 1
    assert [framed.parse(whole[:cut], "") for cut in range(end)] == [None] * end
    actual = framed.parse(whole, "")
    assert actual == CommandResult(code=code, output=b"out\n", errors="" if separate else "bad")


@pytest.mark.parametrize("rest", ["x\n", "-1\n", "\n", "1e3\n", "9" * 19 + "\n"])
def test_a_code_that_is_no_number_is_a_broken_link(rest: str) -> None:
    assert FramedCommand("true", b"[mark]").parse(b"out[mark]" + rest.encode(), "") is None


def test_an_argument_with_a_nul_byte_is_refused_among_others() -> None:
    with pytest.raises(TransportError, match="an argument with a NUL byte cannot be passed to a command"):
        frame_command(["echo", "a\0b", "c"])


def test_markers_are_long_and_differ() -> None:
    marks = {frame_command(["true"]).mark for _ in range(50)}
    assert len(marks) == 50
    assert {len(mark) for mark in marks} == {18}


def test_an_unknown_host_key_is_refused(host: SshHost, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(host.config.read_text().replace(str(host.known), str(tmp_path / "none")))
    with pytest.raises(TransportError, match="the host's key is not known; connect once by hand"):
        SshTransport("pi", options=["-F", str(config)]).run(["true"])
    assert not (tmp_path / "none").exists()


def test_a_changed_host_key_is_refused(host: SshHost, tmp_path: Path) -> None:
    known, config = tmp_path / "known", tmp_path / "config"
    other = (host.known.parent / "user_key.pub").read_text().split()[1]
    known.write_text(f"{host.known.read_text().split()[0]} ssh-ed25519 {other}\n")
    config.write_text(host.config.read_text().replace(str(host.known), str(known)))
    with pytest.raises(TransportError, match="has changed"):
        SshTransport("pi", options=["-F", str(config)]).run(["true"])


def test_a_key_that_is_not_accepted(host: SshHost, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(host.config.read_text().replace("/user_key", "/host_key"))
    with pytest.raises(TransportError, match="ssh-copy-id"):
        SshTransport("pi", options=["-F", str(config)]).run(["true"])


def test_a_host_that_does_not_answer(host: SshHost, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host pi\n HostName 127.0.0.1\n Port 1\n")
    with pytest.raises(LinkError, match="the link broke"):
        SshTransport("pi", options=["-F", str(config)]).run(["true"])


@pytest.mark.parametrize("name", ["-oProxyCommand=id", "", " "])
def test_a_host_that_would_be_an_option(name: str) -> None:
    with pytest.raises(TransportError, match="is not a host"):
        SshTransport(name)


def test_sftp_takes_awkward_names(pi: SshTransport, tmp_path: Path) -> None:
    source = tmp_path / "so\"ur'ce *?[a]\\ $x"
    source.write_text("text")
    target = tmp_path / "ta\"rg'et *?[b]\\ $y"
    pi.put(source, str(target))
    assert target.read_text() == "text"
    with pytest.raises(TransportError, match="line end"):
        sftp_word("a\nb")
