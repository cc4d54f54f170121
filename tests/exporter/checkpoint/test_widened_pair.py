"""The widened twin of the shipped pair: its file, the output that stays, and bundles that hold no path of their maker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from edge_export.checkpoint.safetensors import read_header, read_values
from edge_export.checkpoint.sources import reference_pair, widen_target

pytest.importorskip("onnx", reason="needs edge-mtp[export]")


def test_new_rows_and_columns_are_zeros_and_take_no_space(tmp_path: Path) -> None:
    source = reference_pair()[0]
    widen_target(source, tmp_path / "wide", 3)
    old, new = (read_header(folder / "model.safetensors") for folder in (source, tmp_path / "wide"))
    assert set(old) == set(new)
    widened = 0
    for name, tensor in new.items():
        before, after = read_values(old[name]), read_values(tensor)
        rows = tuple(slice(0, size) for size in before.shape)
        assert np.array_equal(after[rows], before), name
        if after.shape != before.shape:
            widened += 1
            assert np.count_nonzero(after) == np.count_nonzero(before), name
    assert widened == 3 * 8
    status = (tmp_path / "wide" / "model.safetensors").stat()
    if hasattr(status, "st_blocks") and status.st_blocks * 512 < status.st_size:
        assert status.st_blocks * 512 < 1.5 * (source / "model.safetensors").stat().st_size


def test_the_output_stays_and_the_bundle_has_no_path_of_its_maker(
    onnx_pair: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edge_export.cli.command import main
    from edge_runtime.session.open import open_session

    monkeypatch.setattr(widen_target, "__defaults__", (2,))
    output, forms = tmp_path / "bundle", "--format onnx --onnx-target f32 --onnx-drafter f32 --no-verify"
    result = CliRunner().invoke(main, ["reference", "--widened", *forms.split(), "-o", str(output)])
    assert result.exit_code == 0, result.output
    texts = []
    for folder in (onnx_pair("f32"), output):
        with open_session(folder, threads=1, context=256, drafter="none") as session:
            texts.append(session.generate("def area(width, height):", max_tokens=24).text())
    for file in output.iterdir():
        content = file.read_bytes()
        for path in (str(tmp_path), "edge-export-", str(reference_pair()[0].parent)):
            assert path.encode() not in content, file
    assert texts[0] == texts[1]
