"""The Python examples of docs/python.md run, one after the other, on the reference pair."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
EXAMPLES = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(
    number: int,
    exported_pair: Path,
    probe_memory: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = EXAMPLES[number]
    if "split" in code and not list(exported_pair.glob("*head*")):
        pytest.skip("the pair has no split drafter")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported_pair, tmp_path / "my-bundle")
    exec(compile("import edge_runtime\n" + code, f"docs/python.md, example {number + 1}", "exec"), {})
    if "print" in code:
        assert capsys.readouterr().out
