"""The commands of edge-run, edge-bench, edge-export and edge-devices: their options and help, and the short spellings of edge-run."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_bench.cli.main import main as bench
from edge_devices.cli import main as devices
from edge_devices.command_line import LazyCommands
from edge_export.cli.command import main as export
from edge_runtime.cli import options as cli_options
from edge_runtime.cli.run import main
from scripted import make_session

GROUPS: dict[str, click.Group] = {"edge-run": main, "edge-export": export, "edge-bench": bench, "edge-devices": devices}


def options(command: click.Command) -> set[str]:
    return {text for parameter in command.params if isinstance(parameter, click.Option) for text in parameter.opts}


@pytest.mark.parametrize(("name", "command"), [(name, command) for name, group in GROUPS.items() for command in group.commands])
def test_every_command_has_help_that_fits_in_a_pipe(name, command):
    shown = CliRunner().invoke(GROUPS[name], [command, "--help"], prog_name=name)
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"Usage: {name} {command} ")
    assert "\x1b" not in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 110


@pytest.mark.parametrize("command", ["chat", "generate", "serve"])
def test_help_lists_twelve_options_and_help_all_every_option(command):
    usual, whole = (CliRunner().invoke(main, [command, flag], prog_name="edge-run").stdout for flag in ("--help", "--help-all"))
    listed = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", usual.partition("Options")[2].partition("Examples")[0], re.MULTILINE))
    assert len(listed) == 13
    assert "--help-all" in listed
    assert {option for option in options(main.commands[command]) if not re.search(rf"{option}\b", whole)} == set()


@pytest.mark.parametrize(("name", "command"), [(name, command) for name, group in GROUPS.items() for command in (None, *group.commands)])
def test_help_all_shows_what_help_does_and_what_it_leaves_out(name, command):
    words = [command] if command else []
    usual, whole = (CliRunner().invoke(GROUPS[name], [*words, flag], prog_name=name) for flag in ("--help", "--help-all"))
    assert whole.exit_code == 0
    shows_more = command is not None and bool(getattr(GROUPS[name].commands[command], "usual", ()))
    assert (whole.stdout == usual.stdout, "--help-all" in usual.stdout) == (not shows_more, shows_more)


@pytest.mark.parametrize("name", GROUPS)
def test_help_is_a_list_of_commands(name):
    shown = CliRunner().invoke(GROUPS[name], ["--help"], prog_name=name).stdout
    assert all(f"  {command} " in shown for command in GROUPS[name].commands)
    assert len(shown.splitlines()) < 50


@pytest.mark.parametrize("name", [name for name, group in GROUPS.items() if isinstance(group.commands, LazyCommands)])
def test_the_list_has_the_first_sentence_of_each_command(name):
    commands = GROUPS[name].commands
    assert commands.sentences == {command: used.get_short_help_str(limit=200) for command, used in commands.items()}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(cli_options, "open_session", lambda *_, **__: make_session())
    monkeypatch.chdir(tmp_path)
    for folder in ("bundle", "chat"):
        (tmp_path / folder).mkdir()
    return lambda *words: CliRunner().invoke(main, list(words), prog_name="edge-run")


def test_a_bundle_alone_is_a_chat_and_with_a_prompt_a_request(run):
    assert run("bundle", "abc", "-n", "9").stdout == run("generate", "bundle", "abc", "-n", "9").stdout != ""
    assert "standard input is no terminal, and empty" in run("bundle").stderr
    assert run("bundle", "-n", "9", "--drafter", "dense", "abc").stdout == run("bundle", "abc", "-n", "9").stdout
    assert run("bundle", "--lines", "-n", "2").exit_code == 0


def test_a_prompt_with_a_dash_is_explained(run):
    for words in (("bundle", "x", "-1 + 2"), ("generate", "bundle", "-- and so on"), ("generate", "bundle", "-?")):
        result = run(*words)
        assert (result.exit_code, "write -- before a text" in result.stderr) == (2, True), words
    assert "write --" not in run("bundle", "x", "--no-such").stderr
    assert run("generate", "bundle", "--", "-1 + 2").exit_code == run("bundle", "--", "-1 + 2").exit_code == 0


def test_a_folder_named_like_a_command_needs_its_path(run):
    assert run("./chat", "abc", "-n", "2").exit_code == 0
