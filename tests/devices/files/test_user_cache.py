"""Where measurements are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_devices.errors import EdgeError
from edge_devices.files.user_cache import CACHE_VARIABLE, cache_folder, cache_put, read_entries


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    with pytest.raises(EdgeError, match="no home folder to keep measurements in; set EDGE_MTP_CACHE"):
        cache_folder()
    monkeypatch.undo()
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "edge-mtp"
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_folder() == tmp_path


def test_a_file_is_read_again_where_it_changed_and_no_caller_changes_what_others_get(tmp_path: Path) -> None:
    file = tmp_path / "cache.json"
    cache_put(file, "a", 1)
    read_entries(file)["b"] = 2
    assert read_entries(file) == {"a": 1}
    cache_put(file, "a", 3)
    assert read_entries(file) == {"a": 3}
    file.unlink()
    assert read_entries(file) == {}


@pytest.fixture
def other_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this process another user's than the files in the test's folder."""
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no owners in this form")
def test_entries_that_others_may_have_written_are_not_trusted(
    tmp_path: Path, other_user: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged checked.json would have a changed file of a bundle taken as checked."""
    file = tmp_path / "checked.json"
    cache_put(file, "a", 1)
    file.chmod(0o620)
    assert read_entries(file) == {}
    file.chmod(0o644)
    assert read_entries(file) == {"a": 1}
    other_user()
    assert read_entries(file) == {}
    os.mkfifo(tmp_path / "pipe")
    assert read_entries(tmp_path / "pipe") == {}
    monkeypatch.undo()
    assert read_entries(tmp_path / "pipe") == {}, "a pipe is not waited for"
    assert read_entries(file) == {"a": 1}


@pytest.mark.skipif(os.name != "posix", reason="Windows has no owners in this form")
def test_a_file_of_another_user_stays_and_what_is_not_read_is_said(
    tmp_path: Path, other_user: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo -E edge-run` left root's file with a single entry; on file systems with owners or modes of their own nothing is ever read."""
    file = tmp_path / "measured.json"
    cache_put(file, "a", 1)
    before = file.read_bytes()
    other_user()
    for path in (file, tmp_path / "new.json"):
        assert "belongs to another user" in str(cache_put(path, "b", 2))
    assert file.read_bytes() == before
    monkeypatch.undo()
    file.write_text("damaged")
    assert cache_put(file, "b", 2) is None
    assert read_entries(file) == {"b": 2}


def test_a_link_in_the_place_of_a_cache_file_costs_what_it_leads_to_nothing(tmp_path: Path) -> None:
    other, cache = tmp_path / "passwd", tmp_path / "cache" / "checked.json"
    other.write_text("root:x:0:0\n")
    cache.parent.mkdir()
    cache.symlink_to(other)
    assert cache_put(cache, "key", 1) is None
    assert other.read_text() == "root:x:0:0\n"
    assert (read_entries(cache), cache.is_symlink()) == ({"key": 1}, False)
