"""A host to talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge_devices.remote.transport import SshTransport
from ssh_host import SshHost


@pytest.fixture
def pi(host: SshHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTransport]:
    """A transport to that host, with a folder of its own."""
    transport = SshTransport("pi", str(tmp_path_factory.mktemp("pi") / "own"), ["-F", str(host.config)])
    transport.lock = f"{transport.folder}.lock"
    yield transport
    transport.close()
