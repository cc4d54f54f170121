"""Completion in the shell: click's own, for all four commands; bundles as their first argument."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_bench.cli.main import main as bench
from edge_devices.cli import main as devices
from edge_export.cli.command import main as export
from edge_runtime.cli.run import main as run

COMMANDS: dict[str, click.Command] = {"edge-export": export, "edge-run": run, "edge-bench": bench, "edge-devices": devices}


def variable(name: str) -> str:
    return f"_{name.upper().replace('-', '_')}_COMPLETE"


def completions(name: str, *words: str) -> list[str]:
    """What is offered for the last word."""
    environment = {variable(name): "bash_complete", "COMP_WORDS": shlex.join([name, *words]), "COMP_CWORD": str(len(words))}
    result = CliRunner().invoke(COMMANDS[name], [], prog_name=name, env=environment)
    assert result.exit_code == 0
    return [line.partition(",")[2] for line in result.stdout.splitlines()]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_writes_its_completion(name):
    result = CliRunner().invoke(COMMANDS[name], [], prog_name=name, env={variable(name): "zsh_source"})
    assert result.exit_code == 0
    assert f"{variable(name)}=zsh_complete" in result.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_options_are_offered(name):
    offered = completions(name, "--")
    assert "--help" in offered
    assert {
        option
        for p in COMMANDS[name].params
        if isinstance(p, click.Option) and not p.hidden
        for option in p.opts
        if option.startswith("--")
    } <= {
        *offered,
        "--version",
    }


def test_choices_are_offered():
    assert completions("edge-run", "bundle", "--drafter", "") == ["dense", "split", "lookup", "none"]
    assert completions("edge-run", "plan", "--profile", "raspberry") == ["raspberry-pi-4", "raspberry-pi-5"]
    assert completions("edge-devices", "me") == ["meters"]
    assert completions("edge-run", "ch") == ["chat"]
    assert completions("edge-run", "plan", "bundle", "--profile", "raspberry") == ["raspberry-pi-4", "raspberry-pi-5"]
    assert completions("edge-bench", "r") == ["run", "report"]
    assert completions("edge-export", "ref") == ["reference"]


@pytest.mark.parametrize("words", [("edge-run",), ("edge-bench", "run")], ids="-".join)
def test_bundles_are_offered_and_other_folders_left_to_the_shell(words, tmp_path, monkeypatch):
    for folder in ("gemma-one", "gemma two", "gemma-empty", "other"):
        (tmp_path / folder).mkdir()
        if folder != "gemma-empty":
            (tmp_path / folder / "manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert completions(*words, "gem") == ["gemma two", "gemma-one"]
    assert completions(*words, f"{tmp_path}/o") == [f"{tmp_path}/other"]
    assert completions(*words, "./gemma-o") == ["./gemma-one"]
    assert completions(*words, "gemma-e") == ["gemma-e"]
    assert completions(*words, "nowhere/") == ["nowhere/"]


def test_bash_completes(tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    program = tmp_path / "edge-run"
    program.write_text(f"#!{sys.executable}\nfrom edge_runtime.cli.run import main\nmain()\n")
    program.chmod(0o755)
    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "manifest.json").write_text(json.dumps({}))
    script = """
        eval "$(_EDGE_RUN_COMPLETE=bash_source edge-run)"
        COMP_WORDS=(edge-run gem) COMP_CWORD=1; _edge_run_completion edge-run; echo "${COMPREPLY[@]}"
        COMPREPLY=() COMP_WORDS=(edge-run gemma --drafter "") COMP_CWORD=3; _edge_run_completion edge-run; echo "${COMPREPLY[@]}"
        complete -p edge-run
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([bash, "--norc", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    # compopt wants a completion that readline started; nothing else may be complained of.
    assert [line for line in done.stderr.splitlines() if "compopt" not in line] == []
    assert done.stdout.splitlines() == ["gemma", "dense split lookup none", "complete -o nosort -F _edge_run_completion edge-run"]
