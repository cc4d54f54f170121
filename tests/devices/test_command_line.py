"""Groups of options, and how errors end a command."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from edge_devices.command_line import CommandWithModes, one_sentence_errors, option_group
from edge_devices.errors import OUT_OF_MEMORY, DeviceError, EdgeError
from edge_export.errors import ExportError
from edge_runtime.errors import EdgeRuntimeError

pair = option_group(click.option("--first"), click.option("--second"))


def test_a_group_keeps_its_options_in_order():
    @click.command()
    @pair
    def command(first: str, second: str) -> None:
        click.echo(f"{first} {second}")

    assert [parameter.name for parameter in command.params] == ["first", "second"]
    assert CliRunner().invoke(command, ["--second", "b", "--first", "a"]).output == "a b\n"


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (EdgeError("no room\x1b"), 1, "Error: no room\\x1b\n"),
        (DeviceError("no meter"), 1, "Error: no meter\n"),
        (EdgeRuntimeError("no bundle"), 1, "Error: no bundle\n"),
        (ExportError("no checkpoint"), 1, "Error: no checkpoint\n"),
        (MemoryError(), 1, f"Error: {OUT_OF_MEMORY}\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_an_error_ends_the_command_with_one_sentence(error: BaseException, code: int, printed: str):
    @click.command()
    @one_sentence_errors()
    def command() -> None:
        raise error

    for _ in range(2):  # a decorated command can be run again
        result = CliRunner().invoke(command)
        assert (result.exit_code, result.stderr) == (code, printed)


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), one_sentence_errors():
        1 / 0  # noqa: B018


def test_a_sub_command_does_not_name_the_options_it_stands_for():
    @click.command(cls=CommandWithModes)
    @click.option("--dry", is_flag=True, help="Change nothing.")
    @click.option("--form", help="With --dry: the form of the list.")
    @click.option("--into", help="Where to write to; required unless --dry.")
    def command(**_: object) -> None: ...

    assert isinstance(command, CommandWithModes)
    command.add_mode("list", "List.", ["form", "into"], dry=True)
    command.add_mode("write", "Write.", ["dry", "form", "into"])
    own, implied, named = (CliRunner().invoke(command, words.split()).output for words in ("--help-all", "list --help", "write --help"))
    assert "The form of the list." in implied
    assert "to; required." in implied
    for page in (own, named):
        assert "With --dry: the form" in page
        assert "unless --dry" in page
