"""edge-run without a prompt: from a pipe, as JSON, and at a terminal with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from chat_words import chat_session, with_template
from edge_runtime.cli.terminal import introduction
from edge_runtime.text.chat_template import TURNS_TEMPLATE

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals on this system")

CALL = '<|tool_call>call:now{zone:<|"|>UTC<|"|>,n:2}<tool_call|>'
# An answer that no one waits for, a token every 10 ms.
SLOW = """
import time
from chat_words import chat_session
from edge_runtime.cli import options, run
session = chat_session("<|channel>thought\\nhm<channel|>\\x1b[31mred", "z" * 1500, "still here")
verify = session.target.verify
session.target.verify = lambda tokens: (time.sleep(0.01), verify(tokens))[1]
options.open_session = lambda *_, **__: session
run.main()
"""


CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """Runs `command` at a pseudo-terminal of its own, so that Ctrl-C is a signal. `output` is all it wrote so far."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.output = ""
        self._read_to = 0
        self._child = subprocess.Popen(command, preexec_fn=lambda: os.login_tty(slave), env=dict(environment), close_fds=True)
        os.close(slave)

    def type(self, text: str | bytes) -> None:
        os.write(self._master, text.encode() if isinstance(text, str) else text)

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        """Returns what it wrote since the last match up to the end of `pattern`."""
        deadline = time.monotonic() + seconds
        while (result := re.compile(pattern).search(self.output, self._read_to)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.output[self._read_to :]!r}"
            if not self._read(deadline):
                raise AssertionError(f"it ended without {pattern!r}: {self.output[self._read_to :]!r}")
        text = self.output[self._read_to : result.end()]
        self._read_to = result.end()
        return text

    def type_until(self, text: bytes, pattern: str) -> None:
        """Types again every second until `pattern` was written."""
        for _ in range(60):
            self.type(text)
            again = time.monotonic() + 1
            while time.monotonic() < again and self._read(again):
                if re.compile(pattern).search(self.output, self._read_to):
                    self.wait_for(pattern)
                    return
        raise AssertionError(f"no {pattern!r} in {self.output[self._read_to :]!r}")

    def exit_code(self, seconds: float = 60.0) -> int:
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            assert time.monotonic() < deadline, "it does not end"
        return self._child.wait(seconds)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        os.close(self._master)

    def _read(self, deadline: float) -> bool:
        """Reads what is there; False once the child has closed the terminal."""
        if not select.select([self._master], [], [], max(deadline - time.monotonic(), 0))[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # EIO: nobody holds the other side
            return False
        self.output += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(data)


@pytest.fixture
def run(command):
    def call(stdin: str | bytes, *arguments: str, replies: Any = ("one", "two"), whole: bool = False, **session: Any) -> Result:
        command.opens(lambda _: chat_session(*replies, **session))
        return command("chat", "bundle", *([] if whole else ["--lines"]), *arguments, stdin=stdin)

    return call


def test_a_pipe_is_one_message(run):
    result = run("/stats\n\nand?\n", whole=True)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one\n", "")
    assert run(b"\xff", whole=True).exit_code == 1


def test_a_pipe_is_one_turn_per_line_on_request(run):
    result = run("hi\n\n  \nand?\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one\ntwo\n", "")


def test_no_input_is_no_error(run):
    assert run("").exit_code == 0


def test_json_is_one_object_per_turn(run):
    result = run("hi\n//so\n", "--json", replies=("<|channel>thought\nhm<channel|>one" + CALL, "two"))
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["user"], first["text"], first["thoughts"], first["finish"]) == ("hi", "one", "hm", "stop")
    assert [(call["name"], call["arguments"]) for call in first["tool_calls"]] == [("now", {"zone": "UTC", "n": 2})]
    assert first["stats"]["tokens"] > 3
    assert (second["user"], second["text"], second["dropped_turns"], second["drafter"]) == ("/so", "two", 0, "dense")


def test_thoughts_stay_out_of_a_pipe_and_calls_are_shown(run):
    result = run("hi\n", replies=["<|channel>thought\nhm<channel|>\x1b one" + CALL + "<|tool_call>junk<tool_call|>"])
    assert result.stdout == '\x1b one\n[call: now(zone="UTC", n=2)]\njunk\n'


def test_commands(run, tmp_path):
    path = tmp_path / "talk with spaces.json"
    result = run(f"/stats\nhi\n/system Be brief.\n/save {path}\n/clear\n/stats\n/load {path}\nand?\n/system\n/help\n/bye\nnever\n")
    assert (result.exit_code, result.stdout) == (0, "one\ntwo\n"), result.stderr
    lines = result.stderr.splitlines()
    assert lines[:5] == [
        "no answer yet",
        "the system message is set",
        f"2 messages saved to {path}",
        "new conversation",
        lines[4],
    ]
    assert lines[4].startswith("last answer: 4 tokens")
    assert "all 1 answers: 4 tokens" in result.stderr
    assert f"2 messages loaded from {path}" in lines
    assert "/save FILE" in result.stderr
    assert json.loads(path.read_text())["settings"]["system"] == "Be brief."


def test_settings_change_between_answers(run, tmp_path):
    path = tmp_path / "talk.json"
    settings = "/set max-tokens 2\n/set thinking on\n/set temperature 0.5"
    result = run(f"/set\nhi\n{settings}\nand?\n/regenerate\n/save {path}\nquit\nno\n", replies=("first", "second"))
    assert (result.exit_code, result.stdout) == (0, "first\nse\nse\n"), result.stderr
    assert "max-tokens          1024\nthinking            off\ntemperature         0.0" in result.stderr
    kept = json.loads(path.read_text())
    assert [message["content"] for message in kept["messages"]] == ["hi", "first", "and?", "se"], "an answer takes its predecessor's place"
    assert (kept["settings"]["thinking"], kept["settings"]["sampling"]["temperature"]) == (True, 0.5)


def test_a_greedy_answer_that_is_made_again_is_the_same(run):
    assert "temperature 0 gives the same answer again" in run("hi\n/regenerate\n").stderr


def test_a_model_that_cannot_chat_has_an_introduction(tmp_path):
    session = with_template(chat_session("one"), TURNS_TEMPLATE, tmp_path)
    assert introduction(session) == []
    manifest = replace(session.bundle.manifest, description="an example\x1b[2J")
    session.bundle = replace(session.bundle, manifest=manifest)
    first, second, third = introduction(session)
    assert first == "This model is an example\ufffd[2J."
    assert "edge-export reference --chat" in second
    assert "edge-export pair google/gemma-4-E2B-it" in third
    released = replace(manifest, architecture=replace(manifest.architecture, family="E2B"))
    session.bundle = replace(session.bundle, manifest=released)
    assert introduction(session) == [first, third], "one that answers needs no other example"


def test_options_reach_the_chat(run, tmp_path):
    path = tmp_path / "talk.json"
    result = run(f"hi\n/save {path}\n", "--system", "s", "--thinking", "--max-tokens", "2", "--seed", "5")
    assert result.stdout == "on\n"
    assert "cut off at --max-tokens" in result.stderr
    settings = json.loads(path.read_text())["settings"]
    assert (settings["system"], settings["thinking"]) == ("s", True)
    assert (settings["max_tokens"], settings["sampling"]["seed"]) == (2, 5)


def test_nothing_to_say_is_wrong_usage(run):
    result = run("\n", whole=True)
    assert (result.exit_code, "standard input is no terminal, and empty" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ("/dance\n", "unknown command /dance; the nearest is /save"),
        ("/regenerate\n", "there is no message to answer again"),
        ("/set top_k 5\n", "top_k is no setting; the nearest is top-k"),
        ("/set temperature hot\n", "temperature is 'hot'; give a number, for example /set temperature 0.0"),
        ("/set temperature -1\n", "temperature is -1"),
        ("/set max-tokens 0\n", "max-tokens is 0; give 1 or more"),
        ("/set thinking maybe\n", "give on or off"),
        ("/save\n", "/save needs the name of a file"),
        ("/load nowhere.json\n", "nowhere.json cannot be read"),
        ("x" * 3000 + "\n", "shorten it"),
        (b"\xff\n", "not UTF-8"),
    ],
)
def test_a_pipes_first_error_ends_it_with_exit_1(run, stdin, message):
    result = run(stdin + ("hi\n" if isinstance(stdin, str) else b"hi\n"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["--repeats", "2"], ["--verify-lossless"], ["--raw"], ["x"]])
def test_options_of_the_other_kind_exit_2(run, arguments):
    assert run("", *arguments).exit_code == 2


def test_forgotten_turns_are_told(run):
    result = run("one\ntwo\nthree\n", "--max-tokens", "50", replies=["y" * 40], context=180)
    assert "[the context is full; dropped turns, oldest first: 1]" in result.stderr


def test_a_path_with_a_null_character_is_refused(run):
    assert "cannot be saved" in run("hello\n/save a\0b\n").stderr
    assert "cannot be read" in run("/load a\0b\n").stderr


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TERM": "xterm",
        "EDGE_MTP_CACHE": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "INPUTRC": os.devnull,
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture
def slow(environment: dict[str, str]) -> Iterator[Terminal]:
    with Terminal([sys.executable, "-c", SLOW, "chat", "bundle", "--max-tokens", "1600"], environment) as terminal:
        terminal.wait_for("/help lists the commands")
        terminal.wait_for("> ")
        yield terminal


def test_a_talk_at_a_terminal(slow):
    slow.type("hi\n")
    answer = slow.wait_for("tok/s")
    assert "\x1b[2mh\x1b[0m\x1b[2mm\x1b[0m" in answer, "thoughts are dim"
    assert "\ufffd[31mred" in answer, "what the model says cannot command the terminal"
    slow.type("/dance\n")
    slow.wait_for("Error: unknown command /dance")
    slow.type("tell me more\n")
    slow.wait_for("zzzz")
    slow.type(CTRL_C)
    slow.wait_for(r"\[stopped\]")
    slow.wait_for("> ")
    slow.type("go on\n")
    slow.wait_for(r"still here[^>]*tok/s[^>]*> ")
    # CPython's readline hears nothing of a signal that comes between its prompt and its wait.
    slow.type_until(CTRL_C, "Ctrl-D or /bye ends the chat")
    slow.type("/stats\n")
    slow.wait_for(r"all 3 answers[^>]*> ")
    slow.type(CTRL_D)
    assert slow.exit_code() == 0
    assert "Traceback" not in slow.output


def test_several_lines_are_one_message_and_are_kept(environment, tmp_path):
    program = """
from chat_words import chat_session
from edge_runtime.cli import options, run
options.open_session = lambda *_, **__: chat_session("one", "two", "three", "four")
run.main()
"""
    with Terminal([sys.executable, "-c", program, "chat", "bundle"], environment) as terminal:
        terminal.wait_for("context \\d+, drafter dense")
        terminal.wait_for("> ")
        terminal.type("\x1b[200~first\rsecond\x1b[201~\r")
        terminal.wait_for("one[^>]*tok/s[^>]*> ")
        terminal.type('"""a block\n')
        terminal.wait_for(r"\.\.\. ")
        terminal.type('ends here"""\n')
        terminal.wait_for("two[^>]*tok/s[^>]*> ")
        terminal.type("a backslash\\\n")
        terminal.wait_for(r"\.\.\. ")
        terminal.type("goes on\n")
        terminal.wait_for("three[^>]*tok/s[^>]*> ")
        terminal.type(f"/save {tmp_path / 'talk.json'}\n")
        terminal.wait_for("6 messages saved[^>]*> ")  # a cooked terminal would take what is typed before
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
    messages = [entry["content"] for entry in json.loads((tmp_path / "talk.json").read_text())["messages"] if entry["role"] == "user"]
    assert messages == ["first\nsecond", "a block\nends here", "a backslash\ngoes on"]
    kept = tmp_path / "state" / "edge-mtp" / "chat-history.jsonl"
    assert [json.loads(line) for line in kept.read_text().splitlines()][:3] == messages
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o077) == (0o600, 0)
    with Terminal([sys.executable, "-c", program, "chat", "bundle", "--no-history"], environment) as terminal:
        terminal.wait_for("> ")
        terminal.type("not kept\n")
        terminal.wait_for("one[^>]*tok/s[^>]*> ")
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
    assert "not kept" not in kept.read_text()


def test_a_second_ctrl_c_does_not_wait(environment):
    stuck = SLOW.replace("time.sleep(0.01)", "print('busy', flush=True), [time.sleep(0.05) for _ in range(4000)]")
    with Terminal([sys.executable, "-c", stuck, "chat", "bundle"], environment) as terminal:
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("busy")
        for _ in range(2):
            terminal.type(CTRL_C)
            terminal.wait_for(r"\^C")
            time.sleep(0.5)  # two signals that wait together are one
        terminal.wait_for("stopped at once")
        terminal.wait_for("> ")
        terminal.type("/save .\n")
        terminal.wait_for("Error: the conversation cannot be saved")
        terminal.type("/bye\n")
        assert terminal.exit_code() == 0


def test_ctrl_c_without_a_terminal_exits_130(run):
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    assert run("hi\n", replies=[interrupt]).exit_code == 130


def test_ctrl_c_during_a_text_is_said_on_a_line_of_its_own(exported_pair, environment):
    program = "from edge_devices.entry_points import edge_run; edge_run()"
    options = "--context 4096 --max-tokens 3900 --threads 1 --draft-length 3"
    command = [sys.executable, "-c", program, "generate", str(exported_pair), "def area(radius):", *options.split()]
    with Terminal(command, environment) as terminal:
        terminal.wait_for(r"\n[^\n]+\n[^\n]+\n")
        terminal.type(CTRL_C)
        terminal.wait_for(r"\nstopped\r?\n")
        assert terminal.exit_code() == 130
    assert "Traceback" not in terminal.output


def test_the_reference_pair_at_a_terminal(exported_pair, environment):
    program = "from edge_runtime.cli.run import main; main()"
    # A draft length, so that no costs are measured, which Ctrl-C would interrupt.
    options = "--context 4096 --max-tokens 3900 --threads 1 --draft-length 3"
    command = [sys.executable, "-c", program, "chat", str(exported_pair), *options.split()]
    with Terminal(command, environment) as terminal:
        terminal.wait_for(r"8,498,\d+ parameters[\s\S]*/help\s+lists\s+the\s+commands")
        terminal.wait_for("> ")
        terminal.type("def area(radius):\n")
        terminal.wait_for(r"\n[^\n]+\n[^\n]+\n")
        terminal.type(CTRL_C)
        terminal.wait_for(r"\[stopped\]")
        assert 0 < int(terminal.wait_for(r"(\d+) tokens, ").split()[-2].removeprefix("\x1b[2m")) < 3900
        terminal.type("/clear\n")
        terminal.wait_for("new conversation")
        terminal.type("/bye\n")
        assert terminal.exit_code() == 0
