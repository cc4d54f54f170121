"""Groups of options, and how errors end a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner

from edge_devices.command_line import PanelGroup, declared_options, one_sentence_errors, option_group, takes
from edge_devices.errors import OUT_OF_MEMORY, DeviceError, EdgeError
from edge_devices.option_fields import option
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


@dataclass(frozen=True, kw_only=True)
class Trip:
    """What a command below takes."""

    length: int | None = option("-l", low=0, high=9, help="Kilometres.")
    pace: Literal["walk", "run"] = option(default="walk", help="How fast.", panel="Speed")
    places: Sequence[Path] = option("--place", default=(), help="Where to.")
    back: bool | None = option("--back/--stay", help="Return.")
    sleep: bool = option(default=False, help="Rest.")
    seats: int = option(default=4, choices=(2, 4), help="How many.")
    budget: str | int | None = option(help="What it costs.", metavar="EURO")
    driver: str = "nobody"


@click.group(cls=PanelGroup, out_of_memory="no room")
def travel() -> None:
    """Travel."""


@travel.command()
@click.argument("start")
@takes("trip", Trip, only=("length", "pace", "places", "back", "seats", "budget"))
def go(start: str, trip: Trip) -> None:
    """Go from START."""
    if start == "nowhere":
        raise EdgeError("there is no way")
    click.echo(f"{start} {trip}")


@travel.command()
@takes("trip", Trip(length=3, driver="me"), only=("length", "sleep"))
def drive(trip: Trip) -> None:
    """Drive."""
    click.echo(trip)


def travelled(words: str) -> str:
    return CliRunner().invoke(travel, words.split(), prog_name="travel").output


def test_a_command_receives_the_object_that_its_options_make():
    assert travelled("go home") == f"home {Trip()}\n"
    value = travelled("go home -l 2 --pace run --place a --place b --stay --seats 2 --budget 7")
    assert value == f"home {Trip(length=2, pace='run', places=(Path('a'), Path('b')), back=False, seats=2, budget='7')}\n"
    assert travelled("drive --sleep") == f"{Trip(length=3, driver='me', sleep=True)}\n"


@pytest.mark.parametrize(
    "words", ["go home -l 10", "go home --pace fly", "go home --seats 3", "go home --sleep", "drive --pace run", "fly"]
)
def test_values_and_options_that_are_not_declared_are_refused(words):
    assert CliRunner().invoke(travel, words.split()).exit_code == 2


def test_a_name_that_is_no_option_is_an_error():
    with pytest.raises(KeyError, match="driver"):
        declared_options(Trip, only=("driver",))


def test_a_group_lists_commands_in_order_and_ends_errors_in_a_sentence():
    page = travelled("-h")
    assert page.index("go  ") < page.index("drive  ")
    assert "  -l" not in page
    help_of_go = travelled("go -h")
    assert help_of_go.index("Speed:") < help_of_go.index("--pace") < help_of_go.index("Other options:") < help_of_go.index("-l, --length")
    assert travelled("go nowhere") == "Error: there is no way\n"
    assert "write -- before a text" in travelled("go -1+2")
