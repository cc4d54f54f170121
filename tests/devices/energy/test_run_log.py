"""The raw record of a measurement: written, read again, refused when damaged."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from edge_devices.cli import main
from edge_devices.energy.report import make_report
from edge_devices.energy.run_log import read_log, write_log
from edge_devices.errors import EdgeError, MeasurementError


def test_everything_is_recomputed_from_the_log(log, tmp_path):
    path = tmp_path / "run.jsonl"
    write_log(path, log)
    assert make_report(read_log(path), baseline="plain").to_json() == make_report(log, baseline="plain").to_json()
    result = CliRunner().invoke(main, ["energy", str(path), "--baseline", "plain", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["variants"][1]["saves_energy"] is True
    text = CliRunner().invoke(main, ["energy", str(path), "--baseline", "plain"]).output
    assert "scope package" in text
    assert "saves energy" in text
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}\n",
        "no json\n",
        '{"kind": "header", "schema": 9, "meter": {}, "environment": {}}\n',
        '{"kind": "sample", "t": 0, "v": 0}\n',
        "[1]\n",
        '{"kind": "header", "schema": 1, "meter": {"name": "x", "kind": "counter", "scope": "nowhere"}, "environment": {}}\n',
    ],
)
def test_damaged_logs_are_refused(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(MeasurementError, match=r"run\.jsonl"):
        read_log(path)
    result = CliRunner().invoke(main, ["energy", str(path)])
    assert result.exit_code == 1
    assert "Traceback" not in result.output


def test_logs_with_figures_that_are_none_are_refused(tmp_path, log):
    path = tmp_path / "run.jsonl"
    write_log(path, log)
    lines = path.read_text().splitlines()
    run = next(line for line in lines if '"kind": "run"' in line)
    strange = [
        run.replace('"phases": {}', '"phases": {"draft": "x"}'),
        run.replace('"throttled": null', '"throttled": "x"'),
        run.replace('"expected_s": null', '"expected_s": "x"'),
    ]
    assert run not in strange
    for bad in ('{"kind": "sample", "t": 0, "v": NaN}', '{"kind": "sample", "t": -1e9, "v": 0}', *strange):
        path.write_text("\n".join([*lines, bad]))
        with pytest.raises(MeasurementError):
            read_log(path)


def test_a_log_that_cannot_be_written_leaves_nothing(log, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeError, match="cannot be written"):
        write_log(tmp_path / "file" / "run.jsonl", log)
