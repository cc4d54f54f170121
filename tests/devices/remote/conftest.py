"""A phone and a host to talk to; transfers that do not wait, in small chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge_devices.remote import file_sync
from edge_devices.remote.transport import SshTransport
from fake_adbd import FakeAdbd
from phones import Desk
from ssh_host import SshHost


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PAUSE_SECONDS": 0.1, "CHUNK_BYTES": 1 << 20}.items():
        monkeypatch.setattr(file_sync, name, value)


@pytest.fixture
def daemon(desk: Desk) -> FakeAdbd:
    return desk.phone()


@pytest.fixture
def pi(host: SshHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTransport]:
    """A transport to that host, with a folder of its own."""
    transport = SshTransport("pi", str(tmp_path_factory.mktemp("pi") / "own"), ["-F", str(host.config)])
    transport.lock = f"{transport.folder}.lock"
    yield transport
    transport.close()
