"""The Python examples of docs/python.md and of README run, each on the reference pair."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
EXAMPLES = [code for page in ("docs/python.md", "README.md") for code in EXAMPLE.findall((ROOT / page).read_text(encoding="utf-8"))]
BUNDLES = ("my-bundle", "demo-bundle-onnx")  # as the pages call it


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
    for name in BUNDLES:
        if name in code:
            shutil.copytree(exported_pair, tmp_path / name)
    exec(compile("import edge_runtime\n" + code, f"example {number + 1}", "exec"), {})
    if "print" in code:
        assert capsys.readouterr().out
