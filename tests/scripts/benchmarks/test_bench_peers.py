"""The README's comparison table from a file of measurements."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import bench_peers
from bench_records import whole_benchmark
from edge_bench.measure.records import RecordFile


@pytest.fixture
def records(tmp_path):
    with RecordFile(tmp_path / "peers.jsonl") as file:
        for record in whole_benchmark():
            file.add(record)
    return tmp_path / "peers.jsonl"


def test_the_table_has_a_line_per_setting_and_columns_per_side(records):
    result = CliRunner().invoke(bench_peers.main, ["--report", str(records)])
    assert result.exit_code == 0
    lines = [line for line in result.output.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {8}
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines}
    assert list(cells) == ["draft length", "--:", "plain", "2", "4", "rolling"]
    assert cells["plain"] == ["9.1", "-", "-", "9.1", "1.00 [1.00, 1.00]", "-"]
    assert cells["2"][1:] == ["1.50 [1.50, 1.50]", "50.0%", "4.5", "0.50 [0.50, 0.50]", "-"]
    assert cells["4"][3:] == ["", "", ""]


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--report", "x", "--runs", "y"], 2), (["--report", "missing"], 1)])
def test_refusals(arguments, code):
    assert CliRunner().invoke(bench_peers.main, arguments).exit_code == code


def test_tools_that_are_there_are_not_built_again(tmp_path, monkeypatch):
    (tmp_path / "llama-speculative-simple").touch()
    monkeypatch.setattr(bench_peers, "run", lambda *_: pytest.fail("built"))
    assert bench_peers.tools_folder(tmp_path) == tmp_path.resolve()


def test_measuring_goes_through_edge_bench(tmp_path, monkeypatch, records):
    bundle, tools, asked = tmp_path / "bundle", tmp_path / "bin", []
    bundle.mkdir()
    tools.mkdir()
    (tools / "llama-speculative-simple").touch()
    monkeypatch.setattr(bench_peers, "run", lambda command, **environment: asked.append((list(map(str, command)), environment)))
    arguments = [str(bundle), "--tools", str(tools), "--runs", str(records), "--lengths", "1-4", "--drafters", "dense,split"]
    assert CliRunner().invoke(bench_peers.main, arguments).exit_code == 0
    ((command, environment),) = asked
    assert command[3:8] == ["run", str(bundle), "--against", f"llama.cpp={tools}", "--contexts"]
    assert command[8:] == ["none", "--runs", str(records), "--lengths", "1-4", "--drafters", "dense,split"]
    assert environment == {"LLAMA_CPP_LIB_PATH": str(tools)}
