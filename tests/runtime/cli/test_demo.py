"""edge-run demo over a scripted session: colours, figures, the sentence at its end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click
import pytest

from edge_devices.energy.intervals import Interval
from edge_devices.energy.live import RunEnergy
from edge_devices.energy.virtual_meters import virtual_meter
from edge_devices.machine.system import System
from edge_devices.meters.base import Scope
from edge_runtime.cli.demo import TEXTS, Demo, DemoResult
from edge_runtime.cli.options import unwatched
from edge_runtime.session.session import Session
from scripted import LetterVocabulary, make_session


@pytest.fixture
def run(command):
    command.opens(lambda _: make_session())
    return command


def described(description: str, **parts: Any) -> Session:
    session = make_session(**parts)
    manifest = replace(session.bundle.manifest, description=description)
    session.bundle = replace(session.bundle, manifest=manifest)
    return session


def result() -> DemoResult:
    return Demo(make_session(), max_tokens=12, repeats=2, write=lambda _: None, watch=unwatched).run()


def test_it_ends_in_one_sentence(run):
    shown = run("demo", "bundle", "-n", "12", "--repeats", "1")
    assert shown.exit_code == 0
    assert all(f"--- {name} ---" in shown.stdout for name in TEXTS)
    last, after = shown.stdout.strip().splitlines()[-2:]
    assert "times as fast as without drafts" in last
    assert last.endswith("the same output.")
    assert after == "Next: edge-run chat bundle"
    assert "\x1b" not in shown.stdout
    assert "warning" not in shown.stderr


def test_an_example_that_cannot_chat_ends_in_the_one_that_can(command):
    command.opens(lambda _: described("an example"))
    shown = command("demo", "bundle", "-n", "4", "--repeats", "1")
    assert shown.stdout.strip().endswith("Next: edge-export reference --chat --output small-chat, and edge-run chat small-chat")


class Commands(LetterVocabulary):
    """One whose tokens write to the terminal's clipboard."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"\x1b]52;c;AAAA\x07"


def test_neither_a_description_nor_an_answer_moves_the_cursor():
    """The terminal obeyed what a stranger's bundle wrote: its clipboard, its title, lines above the prompt."""
    session, written = described("an example\x1b[2J\x9b", vocabulary=Commands()), list[str]()
    Demo(session, max_tokens=4, repeats=1, write=written.append, watch=unwatched).run()
    shown = click.unstyle("".join(written))
    assert "an example\ufffd[2J\ufffd.\n" in shown
    assert shown.count("\ufffd]52;c;AAAA\ufffd") == 4 * len(TEXTS)
    assert not {"\x1b", "\x07", "\x9b"} & {*shown}


def test_json_has_every_run(run):
    record = json.loads(run("demo", "bundle", "-n", "12", "--repeats", "2", "--json").stdout)
    assert record["same_tokens"] is True
    assert [len(kind["plain"]) for kind in record["kinds"]] == [2] * len(TEXTS)
    assert record["speed_up"] > 0
    assert {"energy", "machine_load", "sentence"} <= set(record)


def test_accepted_drafts_are_green():
    written: list[str] = []
    Demo(make_session(), max_tokens=12, repeats=1, write=written.append, watch=unwatched).run()
    assert any(piece == click.style(click.unstyle(piece), fg="green") for piece in written if click.unstyle(piece))


def test_another_output_is_said():
    item = result()
    kinds = (replace(item.kinds[0], same_tokens=False), *item.kinds[1:])
    assert f"the same output for {len(kinds) - 1} of {len(kinds)} kinds of text" in replace(item, kinds=kinds).sentence()


def test_an_energy_figure_is_named_for_what_it_is():
    figure = Interval(value=0.2, low=0.15, high=0.25, error=0.02, freedom=5, n=3)
    estimate = virtual_meter(System(), "estimate:2,1")
    assert estimate is not None
    energy = RunEnergy(facts=estimate.facts, joules=figure, joules_per_token=figure, seconds=1.0)
    half = replace(figure, value=0.1, low=0.075, high=0.125)
    item = replace(result(), plain_energy=energy, drafted_energy=replace(energy, joules_per_token=half))
    sentence = item.energy_sentence()
    assert "0.50 times the joules per token, an ESTIMATE: 0.100 [0.075, 0.125] J instead of 0.200" in sentence
    assert "nothing was measured (model: 2 W idle + 1 W per busy core" in sentence
    measured = RunEnergy(facts=replace(estimate.facts, scope=Scope.PACKAGE), joules=figure, joules_per_token=figure, seconds=1.0)
    overlapping = replace(item, drafted_energy=replace(energy, joules_per_token=replace(half, high=0.2)))
    assert (overlapping.energy_sentence(), overlapping.energy_is_comparable) == ("", False)
    sentence = replace(item, plain_energy=measured, drafted_energy=measured).energy_sentence()
    assert "1.00 times the joules per token, measured: 0.200" in sentence
