"""Devices to talk to: phones behind the real adb, a host behind the real ssh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phones
import ssh_host
from edge_devices.transports.ssh import SshTransport


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[phones.Desk]:
    """An adb server, and the phones that tests put on the desk."""
    if phones.NEEDS:
        pytest.skip(phones.NEEDS)
    made = phones.Desk(tmp_path_factory.mktemp("desk"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANDROID_ADB_SERVER_PORT", str(made.port))
        yield made
    made.close()


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_host.SshHost]:
    """A host that ssh knows as "pi" with `-F host.config`."""
    if ssh_host.NEEDS:
        pytest.skip(ssh_host.NEEDS)
    made = ssh_host.SshHost(tmp_path_factory.mktemp("sshd"))
    yield made
    made.stop()


@pytest.fixture
def pi(host: ssh_host.SshHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTransport]:
    """A transport to that host, with a folder of its own."""
    transport = SshTransport("pi", str(tmp_path_factory.mktemp("pi") / "own"), ["-F", str(host.config)])
    yield transport
    transport.close()
