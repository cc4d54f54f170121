"""The edge-run command over a scripted session: streams, JSON, refusals, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from click.testing import Result

from edge_runtime.cli.prompts import MAX_INPUT
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.monitor import Monitor
from edge_runtime.session.session import Session
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
