"""What is particular to ssh: host keys are looked at, names are quoted for sftp, errors say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_devices.errors import LinkError, TransportError
from edge_devices.remote.transport import SshTransport, sftp_word
from ssh_host import SshHost


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
