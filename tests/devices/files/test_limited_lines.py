"""Files of lines that people name: read to the end, if that is near."""

from __future__ import annotations

import pytest

from edge_devices.errors import DeviceError
from edge_devices.files.bounded import lines_at_most
from edge_devices.meters.recorded_system import LARGEST, read_recording


def test_lines_are_cut_and_counted(tmp_path):
    path = tmp_path / "lines"
    path.write_text("abcd\nef\n")
    with path.open() as file:
        assert list(lines_at_most(file, 3, 3)) == ["abc", "d\n", "ef\n"]
    with path.open() as file, pytest.raises(OSError, match="it has more than 1 lines"):
        list(lines_at_most(file, 10, 1))


def test_a_recording_is_not_read_beyond_its_limit(tmp_path):
    path = tmp_path / "recording.json"
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(DeviceError, match="has more than"):
        read_recording(path)
