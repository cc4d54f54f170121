"""One PROMPT: as a message through the chat template, or as bare text; and comparisons that say when they mean nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from chat_words import chat_session, with_template
from edge_devices.machine.load import LoadWatch, MachineLoad
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import GenerationDefaults
from edge_runtime.cli import prompts
from edge_runtime.cli.prompts import MessageOptions, sent_prompt
from edge_runtime.media.encoder_inputs import Image
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import TURNS_TEMPLATE, is_instruction_tuned
from scripted import make_session


def tuned(session: Session, folder: Path, template: str = TURNS_TEMPLATE) -> Session:
    """Has the session's bundle answer messages: it is of a released size, and has a chat template."""
    manifest = with_template(session, template, folder).bundle.manifest
    released = replace(manifest, architecture=replace(manifest.architecture, family="E2B"))
    session.bundle = Bundle(folder, released)
    return session


@pytest.fixture
def ask(command):
    def call(*arguments: str, name: str = "generate", session: Session | None = None) -> Result:
        command.opens(lambda _: session or chat_session("hello <|channel>thought\nhm<channel|>you"))
        return command(name, "bundle", *arguments)

    return call


def asked(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_an_instruction_tuned_bundle_gets_a_message(ask, tmp_path) -> None:
    record = asked(ask("Hi", "--json", session=tuned(chat_session("hello <|channel>thought\nhm<channel|>you"), tmp_path)))
    assert (record["text"], record["templated"]) == ("hello you", True)


def test_the_answer_has_no_thoughts_and_all_of_its_text(ask, tmp_path) -> None:
    reply = "<|channel>thought\nhm<channel|>so <|tool_call>call:f{a:1}<tool_call|>"
    session = tuned(chat_session(reply), tmp_path, TURNS_TEMPLATE + "{{ '<|channel>thought\n' }}")
    assert asked(ask("Hi", "--json", session=session))["text"] == "so call:f{a:1}"


def test_an_answer_by_a_schema_comes_behind_its_thoughts(ask) -> None:
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    session = chat_session("<|channel>thought\nhm<channel|>12")
    record = asked(ask("Hi", "--json", "--thinking", "--json-schema", '{"type": "integer", "minimum": 10}', session=session))
    assert (record["text"], record["whole"]) == ("12", True)


@pytest.mark.parametrize("option", [["--templated"], ["--system", "Be brief."], ["--thinking"]])
def test_options_of_a_message_ask_for_the_template(ask, option: list[str]) -> None:
    assert asked(ask("Hi", "--json", *option))["templated"]


def test_bare_text_stays_bare(ask, tmp_path) -> None:
    for session, words in ((make_session(), ()), (tuned(make_session(), tmp_path), ("--raw",))):
        assert not asked(ask("abc", "--json", "--max-tokens", "5", *words, session=session))["templated"]


def test_bare_text_has_no_system_message(ask) -> None:
    result = ask("x", "--raw", "--system", "s")
    assert result.exit_code == 2
    assert "--raw sends no message" in result.stderr


def test_tuned_is_what_has_a_template_and_is_a_released_size_or_ends_its_turns(tmp_path) -> None:
    session = chat_session("x")
    bare, vocabulary = session.bundle.manifest, session.vocabulary
    with_one = with_template(session, TURNS_TEMPLATE, tmp_path).bundle.manifest
    ending = GenerationDefaults(end_tokens=(1, vocabulary.control_tokens["<turn|>"]))
    for manifest, tells in ((bare, [False, False, False]), (with_one, [False, True, True])):
        released = replace(manifest, architecture=replace(manifest.architecture, family="E2B"))
        bundles = [Bundle(tmp_path, each) for each in (manifest, released, replace(manifest, generation=ending))]
        assert [is_instruction_tuned(bundle, vocabulary) for bundle in bundles] == tells


def test_a_comparison_without_drafts_gives_no_ratio(ask) -> None:
    options = ("abc", "--draft-length", "0", "--repeats", "1", "--max-tokens", "6")
    result = ask(*options, name="compare", session=make_session())
    assert "nothing drafted" in result.stdout
    assert "nothing was drafted, so this says nothing about drafts" in result.stderr
    record = asked(ask(*options, "--json", name="compare", session=make_session()))
    assert (record["speed_up"], record["drafted_tokens"]) == (None, 0)
    lossless = ask("abc", "--verify-lossless", "--draft-length", "0", "--max-tokens", "6", session=make_session())
    assert "nothing was drafted" in lossless.stderr


def test_a_busy_machine_is_noticed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 0 0 0 0 0 0 0 0\ncpu0 100 0 0 0 0 0 0 0 0 0\n")
    watch = LoadWatch(stat, tmp_path / "no-pressure")
    watch._begin = replace(watch._begin, clock=watch._begin.clock - 10)  # ten seconds ago
    stat.write_text("cpu  900 0 0 0 0 0 0 0 0 0\ncpu0 900 0 0 0 0 0 0 0 0 0\n")
    load = watch.load()
    assert load.is_busy
    assert load.others == pytest.approx(0.8, abs=0.05)
    assert load.waiting is None
    assert "close other programs and run again" in load.sentence()
    assert not MachineLoad(others=None, seconds=1).is_busy
    assert LoadWatch(tmp_path / "nothing").load().others is None


def test_pressure_shows_one_busy_program_among_many_processors(tmp_path) -> None:
    stat, pressure = tmp_path / "stat", tmp_path / "pressure"
    processors = "".join(f"cpu{i} 100 0 0 0 0 0 0 0 0 0\n" for i in range(64))

    def write(used: int, waited: int) -> None:
        stat.write_text(f"cpu  {used} 0 0 0 0 0 0 0 0 0\n{processors}")
        pressure.write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")

    write(100, 1_000_000)
    watch = LoadWatch(stat, pressure)
    watch._begin = replace(watch._begin, clock=watch._begin.clock - 10)
    write(1100, 9_000_000)  # one processor for ten seconds; a thread of ours waited eight of them
    load = watch.load()
    assert load.others == pytest.approx(1 / 64, abs=0.01)
    assert load.waiting == pytest.approx(0.8, abs=0.01)
    assert load.is_busy
    assert "programs waited for a processor in 80% of the time" in load.sentence()
    assert load.to_json().keys() == {"others", "seconds", "waiting", "busy"}
    pressure.write_text("nonsense")
    assert watch.load().waiting is None


def test_system_message_and_thinking_reach_a_message_with_an_image(monkeypatch) -> None:
    session = chat_session("seen")
    messages: list[Any] = []
    template = SimpleNamespace(encode=lambda given, **options: messages.append((given, options)))
    monkeypatch.setattr(Bundle, "has", lambda *_: True)
    monkeypatch.setattr(prompts, "bundle_template", lambda *_: template)
    monkeypatch.setattr(Session, "media_prompt", lambda *_: None)
    picture = Image(rgb=np.zeros((8, 8, 3), np.uint8))
    sent_prompt(session, "What is this?", MessageOptions(system="Be brief.", thinking=True), media=[picture])
    (system, user), options = messages[0]
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    assert options == {"thinking": True}
