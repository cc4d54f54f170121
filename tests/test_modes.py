"""The sub-commands of edge-run, edge-bench and edge-export beside the flat spelling that has all options at once."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_bench.cli.main import main as bench
from edge_devices.cli import main as devices
from edge_devices.command_line import CommandWithModes
from edge_export.cli.command import main as export
from edge_runtime.cli import run as cli
from scripted import make_session

COMMANDS: dict[str, CommandWithModes] = {"edge-run": cli.main}
GROUPS: dict[str, click.Group] = {"edge-export": export, "edge-bench": bench, "edge-devices": devices}
# The spellings of all options of each sub-command: an option comes, goes or is renamed together with a change of this file.
OPTIONS = Path(__file__).parent / "data" / "command_options.json"
MODES = [(name, mode) for name, command in COMMANDS.items() for mode in command.modes]
MODES += [(name, command) for name, group in GROUPS.items() for command in group.commands]
# What chooses a sub-command in the flat spelling; `pieces` below are options, not parameters.
CHOOSING = {f"--{name}" for name in ["serve", "plan", "compare", "doctor", "demo"]}
CHOOSING |= {"--version", "--help-all"}


def options(command: click.Command) -> set[str]:
    return {text for parameter in command.params if isinstance(parameter, click.Option) for text in parameter.opts}


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_every_mode_has_help_that_fits_in_a_pipe(name, mode):
    shown = CliRunner().invoke((COMMANDS | GROUPS)[name], [mode, "--help"], prog_name=name)
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"Usage: {name} {mode} ")
    assert "\x1b" not in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 110


@pytest.mark.parametrize("name", GROUPS)
def test_each_command_has_the_options_of_the_list(name):
    assert {command: sorted(options(taken)) for command, taken in GROUPS[name].commands.items()} == json.loads(OPTIONS.read_text())[name]


@pytest.mark.parametrize("name", GROUPS)
def test_help_is_a_list_of_commands(name):
    shown = CliRunner().invoke(GROUPS[name], ["--help"], prog_name=name).stdout
    assert all(f"  {command} " in shown for command in GROUPS[name].commands)
    assert len(shown.splitlines()) < 50


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_belongs_to_a_mode(name):
    command = COMMANDS[name]
    assert options(command) - set().union(*map(options, command.modes.values())) <= CHOOSING


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_a_list_of_commands_and_help_all_has_every_option(name):
    short, long = (CliRunner().invoke(COMMANDS[name], [word], prog_name=name).stdout for word in ("--help", "--help-all"))
    assert all(f"  {mode} " in short for mode in COMMANDS[name].modes)
    assert len(short.splitlines()) < 50
    assert [option for option in options(COMMANDS[name]) if option not in long] == []


def test_a_folder_named_like_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan").mkdir()
    result = CliRunner().invoke(cli.main, ["plan", "x", "--max-tokens", "8"], prog_name="edge-run")
    assert (result.exit_code, "write ./plan for the folder" in result.stderr) == (2, True)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "open_session", lambda *_, **__: make_session())
    return lambda *words: CliRunner().invoke(cli.main, list(words), prog_name="edge-run")


def test_modes_of_edge_run_do_what_the_flags_do(run):
    text = run("bundle", "abc", "--max-tokens", "9").stdout
    assert run("generate", "bundle", "abc", "-n", "9").stdout == text
    compared = run("compare", "bundle", "abc", "-n", "8", "--json", "--repeats", "1")
    assert json.loads(compared.stdout)["same_tokens"] is True
    assert json.loads(run("generate", "bundle", "abc", "--json", "--verify-lossless", "-n", "9").stdout)["lossless"]["equal"] is True


def test_an_option_of_another_mode_is_refused(run):
    assert (run("compare", "bundle", "x", "--port", "1").exit_code, run("generate", "bundle").exit_code) == (2, 2)
    assert "edge-run serve" in run("serve", "bundle", "--max-tokens", "3").stderr


def test_a_prompt_with_a_dash_is_explained(run):
    for words in (("bundle", "-1 + 2"), ("generate", "bundle", "-- and so on"), ("bundle", "-?")):
        result = run(*words)
        assert (result.exit_code, "write -- before a text" in result.stderr) == (2, True), words
    assert "write --" not in run("bundle", "x", "--no-such").stderr
    assert run("generate", "bundle", "--", "-1 + 2").exit_code == 0


def test_a_folder_named_like_a_mode_needs_its_path(run):
    assert run("./chat", "abc", "-n", "2").exit_code == 0
