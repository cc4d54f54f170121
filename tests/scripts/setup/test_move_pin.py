"""Moving a pin: all files that name a version agree afterwards, and with the checkout as it is now."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from move_pin import PINS, move

ROOT = Path(__file__).parents[3]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in {"pyproject.toml", *(name for module, _, others in PINS.values() for name in (module, *others))}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def ranges(root: Path, library: str) -> set[str]:
    return set(re.findall(rf'"{library}(>=[0-9.]+,<[0-9.]+)"', (root / "pyproject.toml").read_text()))


def constants(root: Path, library: str) -> list[str]:
    return re.findall(r"^(?:FIRST|END)_VERSION = (.*)$", (root / PINS[library][0]).read_text(), re.MULTILINE)


def test_all_places_have_the_new_version(copy: Path) -> None:
    move(copy, "llama-cpp-python", "0.4.2", keep_older=False)
    assert ranges(copy, "llama-cpp-python") == {">=0.4.2,<0.4.3"}
    assert constants(copy, "llama-cpp-python") == ["(0, 4, 2)", "(0, 4, 3)"]
    assert 'VERSION = "0.4.2"' in (copy / PINS["llama-cpp-python"][2][0]).read_text()


def test_older_versions_can_be_kept(copy: Path) -> None:
    before = constants(copy, "onnxruntime")[0]
    move(copy, "onnxruntime", "1.33.0", keep_older=True)
    assert ranges(copy, "onnxruntime") == {">=1.31.0,<1.34"}
    assert constants(copy, "onnxruntime") == [before, "(1, 34)"]


@pytest.mark.parametrize("library", PINS)
def test_the_checkout_is_consistent(library: str) -> None:
    (result,) = ranges(ROOT, library)
    first, end = (tuple(map(int, part.split("."))) for part in re.fullmatch(r">=(.*),<(.*)", result).groups())  # type: ignore[union-attr]
    assert constants(ROOT, library) == [str(first[: PINS[library][1]]), str(end)]
