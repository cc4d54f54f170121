"""The server as a command, in a child process, on the reference pair."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Where drafts pay depends on the machine; here they are to be seen.
DRAFTS = ("--drafter", "split", "--draft-length", "3")
DETERMINISTIC = ("--deterministic", "--sessions", "4", "--waiting", "64", "--context", "512", *DRAFTS)


@pytest.fixture(scope="session", autouse=True)
def closed_clients() -> Iterator[None]:
    """Closes the clients of all tests."""
    yield
    if chat_server := sys.modules.get("chat_server"):
        for client in chat_server.clients:
            client.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Starts a server on a bundle with these options, once, and returns its address. What it measures stays out of the user's own cache."""
    from chat_server import Child

    cache = str(tmp_path_factory.mktemp("cache"))
    children: dict[tuple[Path | str, ...], Child] = {}

    def start(bundle: Path, *options: str) -> str:
        if (bundle, *options) not in children:
            children[bundle, *options] = Child(bundle, *options, EDGE_MTP_CACHE=cache)
        return children[bundle, *options].url

    yield start
    for child in children.values():
        status = child.end()
        assert status == 0, child.lines
        assert child.lines[-1] == "stopped\n"
        assert not [line for line in child.lines if "Traceback" in line]


@pytest.fixture
def several(served: Callable[..., str], exported_pair: Path) -> str:
    """The address of a server with four sessions."""
    return served(exported_pair, "--sessions", "4", "--context", "512", *DRAFTS)


@pytest.fixture
def single(served: Callable[..., str], exported_pair: Path) -> str:
    """The address of a server with one session."""
    return served(exported_pair, "--context", "512", *DRAFTS)


@pytest.fixture
def deterministic(served: Callable[..., str], exported_pair: Path) -> str:
    """The address of a server whose answers depend on their request alone: float16 rows are not exact, so one runs at a time."""
    return served(exported_pair, *DETERMINISTIC)


@pytest.fixture
def exact(served: Callable[..., str], quantized_pair: Path) -> str:
    """The same with weights that the row kernels multiply: four requests run at once."""
    return served(quantized_pair, *DETERMINISTIC)
