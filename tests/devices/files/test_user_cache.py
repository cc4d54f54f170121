"""Where measurements are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_devices.errors import EdgeError
from edge_devices.files.user_cache import CACHE_VARIABLE, cache_folder


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    with pytest.raises(EdgeError, match="no home folder to keep measurements in; set EDGE_MTP_CACHE"):
        cache_folder()
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_folder() == tmp_path / "home" / ".cache" / "edge-mtp"
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_folder() == tmp_path
