"""Transfers that do not wait, in small chunks."""

from __future__ import annotations

import pytest

from edge_devices.remote import file_sync

CHUNK_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PAUSE_SECONDS": 0.1, "CHUNK_BYTES": CHUNK_BYTES}.items():
        monkeypatch.setattr(file_sync, name, value)
