"""The server as a command, in a child process, on the reference pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

# Where drafts pay depends on the machine; here they are to be seen.
DRAFTS = ("--drafter", "split", "--policy", "fixed", "--draft-length", "3")


@pytest.fixture(scope="module")
def several(exported_pair: Path, probe_memory: Path) -> Iterator[str]:
    """The address of a server with four sessions."""
    yield from _served(exported_pair, "--sessions", "4", "--context", "512", *DRAFTS)


@pytest.fixture(scope="module")
def single(exported_pair: Path, probe_memory: Path) -> Iterator[str]:
    """The address of a server with one session."""
    yield from _served(exported_pair, "--context", "512", *DRAFTS)


@pytest.fixture(scope="module")
def exact(quantized_pair: Path, probe_memory: Path) -> Iterator[str]:
    """The same with weights that the row kernels multiply: four requests run at once."""
    yield from _served(quantized_pair, "--deterministic", "--sessions", "4", "--waiting", "64", "--context", "512", *DRAFTS)


@pytest.fixture(scope="module")
def deterministic(exported_pair: Path, probe_memory: Path) -> Iterator[str]:
    """The address of a server whose answers depend on their request alone: float16 rows are not exact, so one runs at a time."""
    yield from _served(exported_pair, "--deterministic", "--sessions", "4", "--waiting", "64", "--context", "512", *DRAFTS)


def _served(bundle: Path, *options: str) -> Iterator[str]:
    for library in ("uvicorn", "starlette"):
        pytest.importorskip(library, reason="needs edge-mtp[serve]")
    from chat_server import Child

    child = Child(bundle, *options)
    try:
        yield child.url
    finally:
        status = child.end()
        assert status == 0, child.lines
        assert child.lines[-1] == "ended\n"
        assert not [line for line in child.lines if "Traceback" in line]
