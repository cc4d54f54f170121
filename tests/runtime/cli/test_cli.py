"""The edge-run command over a scripted session: messages and bare text, streams, JSON, comparisons, refusals, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from chat_words import chat_session, with_template
from edge_devices.machine.processors import LoadWatch, MachineLoad
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import GenerationDefaults
from edge_runtime.cli import prompts
from edge_runtime.cli.prompts import MAX_INPUT, MessageOptions, sent_prompt
from edge_runtime.media.encoder_inputs import Image
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.monitor import Monitor
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import TURNS_TEMPLATE, is_instruction_tuned
from scripted import LetterVocabulary, make_session, next_token

MAIN = "from edge_runtime.cli.run import main; main()"


@pytest.fixture
def run(command):
    def call(*arguments: str, stdin: str | bytes | None = None, **session: Any) -> Result:
        command.opens(lambda _: make_session(**session))
        return command(*arguments, stdin=stdin)

    return call


def test_text_goes_out_and_figures_go_to_the_person(run):
    result = run("generate", "bundle", "abc", "--max-tokens", "12")
    assert result.exit_code == 0
    assert len(result.stdout.strip()) >= 6
    assert "tok/s" not in result.stdout
    assert "100.0% of dense drafts accepted" in result.stderr
    assert "12 tokens" in result.stderr


def test_plain_decoding_reports_no_acceptance(run):
    result = run("generate", "bundle", "abc", "--draft-length", "0")
    assert "accepted" not in result.stderr
    assert "mean acceptance length 1.00" in result.stderr


def test_a_full_context_says_why_it_stopped(run):
    result = run("generate", "bundle", "abc", "--max-tokens", "500", context=64)
    assert "stopped: the context of 64 tokens is full; raise --context or shorten the prompt" in result.stderr


def test_json_is_one_object(run):
    result = run("generate", "bundle", "abc", "--json", "--verify-lossless", "--max-tokens", "9")
    record = json.loads(result.stdout)
    assert record["prompt"] == "abc"
    assert record["stats"]["tokens"] == 9
    assert record["lossless"]["equal"] is True
    assert record["rows"]["verdict"] == "exact"
    assert json.loads(run("generate", "bundle", "abc", "--json", "--max-tokens", "9").stdout)["rows"] == record["rows"]


def test_compare_ends_in_a_table(run):
    result = run("compare", "bundle", "abc", "--max-tokens", "12", "--repeats", "2")
    assert result.exit_code == 0
    for row in (
        "tok/s",
        "speed-up over plain",
        "accepted at draft 2",
        "mean acceptance length",
        "time to first token",
        "peak memory",
        "same output",
    ):
        assert row in result.stdout
    assert json.loads(run("compare", "bundle", "abc", "--json", "--max-tokens", "8").stdout)["same_tokens"] is True


def test_compare_shows_no_control_characters_of_the_prompt(run):
    shown = run("compare", "bundle", "abc\x1b]0;title\x07\x9b2J\tend\n", "--max-tokens", "4", "--repeats", "1").stderr
    assert "abc\ufffd]0;title\ufffd\ufffd2J\tend\n" in shown
    assert not {"\x1b", "\x07", "\x9b"} & {*shown}


class Escapes(LetterVocabulary):
    """One whose tokens move the cursor."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"\x1b"


@pytest.mark.parametrize("terminal", [True, False])
def test_generate_shows_no_control_characters_on_a_terminal(run, monkeypatch, terminal):
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: terminal, raising=False)
    shown = run("generate", "bundle", "abc", "--max-tokens", "4", vocabulary=Escapes()).stdout
    assert shown == ("\ufffd" if terminal else "\x1b") * 4 + "\n"


def test_prompt_from_standard_input(run):
    assert json.loads(run("generate", "bundle", "-", "--json", stdin="cab").stdout)["prompt"] == "cab"


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "bundle", "x", "--draft-length", "13"),
        ("generate", "bundle", "x", "--max-tokens", "0"),
        ("generate", "bundle", "x", "--drafter", "fast"),
        ("generate", "bundle", "x", "--top-p", "0.9"),
        ("generate", "bundle", "x", "--verify-lossless", "--temperature", "1"),
        ("generate", "bundle", "x", "--port", "1"),
        ("generate", "bundle"),
        ("compare", "bundle", "x", "--verify-lossless"),
        ("compare", "bundle", "x", "--temperature", "1"),
        ("demo", "bundle", "x"),
        ("serve", "bundle", "x"),
        ("nowhere", "x"),
    ],
)
def test_usage_errors_exit_2(run, arguments):
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "bundle", "hello", "world"), "several words needs quotes: '... world'"),
        (("generate", "bundle", "x", "-d", "abc"), "'abc' is not a whole number of 0 or more, at most 12"),
        (("generate", "bundle", ""), "PROMPT is empty"),
        (("generate", "bundle", "x", "-c", "99999999"), "of 16 or more, at most 16777216"),
        (("genrate", "bundle", "x"), "the nearest is generate"),
        (("records",), "no such command 'records': there are chat, generate, "),
        (("list",), "a bundle is a folder"),
        (("pull", "gemma"), "edge-export pair OWNER/TARGET --output BUNDLE"),
        (("serve", "bundle", "x"), "Got unexpected extra argument (x)\n"),
    ],
)
def test_usual_mistakes_get_the_way_out(run, arguments, words):
    result = run(*arguments)
    assert (result.exit_code, words in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(("arguments", "asked"), [((), None), (("--drafter", "lookup"), "lookup")])
def test_the_drafter_that_is_asked_for_is_opened(run, command, arguments, asked):
    result = run("generate", "bundle", "abc", "--json", *arguments)
    assert [options.drafter for options in command.opened] == [asked]
    assert json.loads(result.stdout)["drafter"] == "dense", "the session's own word counts"


def test_help_has_examples(run):
    assert "edge-run chat my-bundle" in run("--help").stdout


def tokens_of(result: Result) -> str:
    assert result.exit_code == 0, result.stderr
    text: str = json.loads(result.stdout)["text"]
    return text


def test_a_seed_makes_sampling_repeatable(run):
    sampled = ("generate", "bundle", "abc", "--json", "--temperature", "1.5", "--top-k", "12", "--seed")
    assert tokens_of(run(*sampled, "7")) == tokens_of(run(*sampled, "7")) != tokens_of(run(*sampled, "8"))


def test_options_reach_the_sampler(run):
    drawn = ("generate", "bundle", "abc", "--json", "--temperature", "1.5", "--seed", "7", "--top-k")
    assert tokens_of(run(*drawn, "1")) == tokens_of(run("generate", "bundle", "abc", "--json")) != tokens_of(run(*drawn, "40"))


def test_text_ends_before_a_stop_string(run):
    plain = tokens_of(run("generate", "bundle", "abc", "--json"))
    assert tokens_of(run("generate", "bundle", "abc", "--json", "--stop", "#", "--stop", plain[9:12])) == plain.partition(plain[9:12])[0]


def test_a_seeded_run_can_be_verified(run):
    result = run("generate", "bundle", "abc", "--temperature", "1", "--seed", "1", "--verify-lossless", "--max-tokens", "20")
    assert "lossless: all 20 tokens equal" in result.stderr


def test_bad_values_are_refused_with_the_value(run):
    result = run("generate", "bundle", "abc", "--temperature", "-1")
    assert result.exit_code == 2
    assert "temperature is -1.0" in result.stderr


def wrong_drafts(options: LoadOptions) -> Session:
    return make_session(guess=lambda context, _: (next_token(context) + 1) % 17, monitor=Monitor(options.monitoring))


def test_the_command_line_goes_over_the_config_file(run, command, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("speculative_decoding: {tuning: {preset: chat, rejection_penalty: 2}}")
    run("generate", "bundle", "abc", "--config", str(file), "--draft-length", "4")
    tuning = command.opened[0].config.tuning
    assert (tuning.policy, tuning.draft_length, tuning.min_horizon, tuning.max_horizon) == ("fixed", 4, 4, 8)
    assert tuning.rejection_penalty == 2


def test_a_bad_config_file_is_one_sentence(run, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("speculative_decoding: {streaming: {chunk_size: 0}}")
    result = run("generate", "bundle", "abc", "--config", str(file))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {file}: speculative_decoding.streaming.chunk_size is 0; write an integer")


def test_warnings_go_to_the_person_where_no_policy_heeds_what_was_rejected(command):
    command.opens(wrong_drafts)
    result = command("generate", "bundle", "abc", "--draft-length", "2", "--max-tokens", "60", "--json")
    assert result.stderr.count("warning: 100% of the last 50 drafted tokens were rejected, more than 30%") == 1
    assert json.loads(result.stdout)["stats"]["tokens"] == 60
    result = command("generate", "bundle", "abc", "--max-tokens", "200", "--json")
    stats = json.loads(result.stdout)["stats"]
    assert stats["drafted_tokens"] - stats["accepted_tokens"] > 50
    assert [line for line in result.stderr.splitlines() if line.endswith("rejected, more than 30%")] == []
    assert "drafts have at most" in result.stderr, "what changes in drafting is still told"


def test_too_many_threads_are_a_usage_error(run):
    result = run("generate", "bundle", "abc", "--threads", "100000")
    assert result.exit_code == 2
    assert "'100000' is not a whole number of 1 or more, at most 512" in result.stderr
    processors = os.cpu_count() or 1
    result = run("generate", "bundle", "abc", "--threads", str(processors + 1))
    assert (result.exit_code, f"more than the {processors} processors of this machine" in result.stderr) == (2, True)
    assert run("generate", "bundle", "abc", "-t", str(processors)).exit_code == 0


@pytest.mark.skipif(os.name != "posix", reason="closes standard input with a POSIX shell")
@pytest.mark.parametrize("words", [("chat",), ("generate", "--", "-")])
def test_a_closed_standard_input_is_one_sentence(exported_pair, words):
    program = [sys.executable, "-c", MAIN, words[0], str(exported_pair), "--threads", "1", *words[1:]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *program], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, "standard input is closed" in done.stderr, "Traceback" in done.stderr) == (1, True, False)


@pytest.mark.parametrize("words", [("chat", "bundle"), ("chat", "bundle", "--lines"), ("generate", "bundle", "-")])
def test_an_endless_standard_input_is_left(run, words):
    result = run(*words, stdin="a" * (MAX_INPUT + 1))
    assert (result.exit_code, f"has more than {MAX_INPUT} characters" in result.stderr) == (1, True)
    assert "not UTF-8" in run(*words, stdin=b"\xff").stderr


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
