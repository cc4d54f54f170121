"""A stranger's folder may be the current one: no child process takes a file in it for a module."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edge_devices.children import module_command

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("devices", "runtime", "exporter") for path in (ROOT / folder).rglob("*.py")]
_NAMED = re.compile(r'(?:module|limited)_command\(\s*"(edge_[\w.]+)"')
CHILDREN = sorted({name for path in SOURCES for name in _NAMED.findall(path.read_text(encoding="utf-8"))})


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder whose dataclasses.py notes that it was imported, and ends the process."""
    (tmp_path / "dataclasses.py").write_text("import os, pathlib\npathlib.Path('noted').touch()\nos._exit(77)\n")
    return tmp_path


def ran(command: tuple[str, ...], folder: Path) -> bool:
    """Whether the planted module ran in a child that is started in its folder."""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=folder, env=environment, input=b"", capture_output=True, timeout=120, check=False)
    assert b"No module named" not in done.stderr
    return (folder / "noted").exists()


@pytest.mark.parametrize("name", CHILDREN)
def test_a_planted_module_is_not_run(name: str, planted: Path) -> None:
    assert not ran(module_command(name), planted)


def test_without_the_option_it_is(planted: Path) -> None:
    safe = module_command("edge_runtime.backends.selection")
    assert ran(tuple(word for word in safe if word != "-P"), planted)


def test_all_children_are_started_so() -> None:
    assert len(CHILDREN) >= 5
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'\b(?:executable|python),\s*"-[mc]"|edge-python" -[mc]\b', text), path
