"""The chat of `edge-run BUNDLE`: at a terminal with a prompt and Ctrl-C, or line by line from a pipe, one turn each."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import click

from edge_devices.command_line import option_group
from edge_devices.energy.intervals import combined, of_error
from edge_devices.energy.live import EnergyWatch, RunEnergy
from edge_devices.energy.text import figure_text
from edge_devices.errors import EdgeError
from edge_devices.machine.system import System
from edge_runtime.cli.energy_options import energy_record
from edge_runtime.cli.summary import summary
from edge_runtime.errors import RequestError
from edge_runtime.session.chat import OVERFLOWS, Answer, Chat
from edge_runtime.text.channels import Event, Thought
from edge_runtime.text.tool_calls import ToolCall


def unwatched() -> EnergyWatch:
    """Returns a watch without a meter."""
    return EnergyWatch(System(), None)


PROMPT = "> "
# Characters of standard input that are taken for one prompt or turn: more than any context holds.
MAX_INPUT = 16 << 20
HELP = """\
/help          this list
/reset         forget the conversation
/system TEXT   set the system message; without TEXT remove it
/stats         figures of the last answer and of all
/save FILE     write the conversation and its settings as JSON
/load FILE     go on with a saved conversation
/exit          leave, as Ctrl-D does
Ctrl-C stops an answer; twice, at once. A message that begins with / is sent with a second one before it: //..."""
# What a terminal would obey instead of showing.
_UNSHOWABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
ENDED = {
    "length": "cut off at --max-tokens; say 'go on', or give a larger one",
    "context": "cut off: the context is full; /reset, or give a larger --context",
    "interrupted": "stopped",
}
chat_options = option_group(
    click.option("--system", help="Chat: the system message."),
    click.option("--thinking", is_flag=True, help="Chat: let the model think before it answers, if its template can."),
    click.option(
        "--overflow",
        type=click.Choice(OVERFLOWS),
        help="Chat: what happens when the conversation outgrows the context. [default: the configuration's]",
    ),
)


def chat_values(values: dict[str, Any], *, chatting: bool) -> dict[str, Any]:
    """Takes the options' values out of all the command's and returns them as arguments for `Chat`; a usage error outside of a chat."""
    chat = {name: values.pop(name) for name in ("system", "thinking", "overflow")}
    if not chatting and (chat["system"] is not None or chat["thinking"] or chat["overflow"] is not None):
        raise click.UsageError("--system, --thinking and --overflow are for a chat; leave PROMPT out, or leave them out")
    return chat


class TerminalChat:
    """Reads turns and commands until the input ends. A person sees errors and goes on; a pipe's first error ends it."""

    def __init__(self, chat: Chat, *, as_json: bool = False, watch: Callable[[], EnergyWatch] = unwatched) -> None:
        """`watch` gives a watch over the energy of each answer."""
        self._chat = chat
        self._watch = watch
        self._energies: list[RunEnergy] = []
        self._as_json = as_json
        if sys.stdin is None:
            raise RequestError("standard input is closed, so there is nobody to chat with; give a PROMPT")
        self._interactive = sys.stdout is not None and sys.stdin.isatty() and sys.stdout.isatty() and not as_json
        self._answers: list[Answer] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._note(HELP),
            "/reset": self._reset,
            "/system": self._system,
            "/stats": lambda _: self._note(self._figures()),
            "/save": self._save,
            "/load": self._load,
        }

    def run(self) -> None:
        """Returns at the end of the input. Raises EdgeRuntimeError, and KeyboardInterrupt, when nobody sits at a terminal."""
        if self._interactive:
            architecture = self._chat.session.bundle.manifest.architecture
            self._note(
                f"{architecture.family}, {architecture.parameters:,} parameters; {self._chat.template.name}. /help lists the commands."
            )
        for line in self._typed() if self._interactive else self._piped():
            if line.strip() == "/exit":
                return
            try:
                self._turn(line)
            except EdgeError as error:
                if not self._interactive:
                    raise
                self._note(f"Error: {error}")
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._note("\nstopped at once")

    def _typed(self) -> Iterator[str]:
        with contextlib.suppress(ImportError):  # not on every platform; it gives the line a history and editing
            import readline  # noqa: F401
        while True:
            try:
                yield input(PROMPT)
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                self._note("\nCtrl-D or /exit leaves")
            except UnicodeDecodeError as error:
                self._note(f"Error: what you typed is not UTF-8 text ({error})")

    def _piped(self) -> Iterator[str]:
        try:
            while line := sys.stdin.readline(MAX_INPUT + 1):
                if len(line) > MAX_INPUT:
                    raise RequestError(f"a line of standard input has more than {MAX_INPUT} characters; give less")
                yield line.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 text ({error}); convert it") from error

    def _turn(self, line: str) -> None:
        if not line.strip():
            return
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line.strip().partition(" ")
            if name not in self._commands:
                raise RequestError(f"there is no command {name}; /help lists them, //... sends a message that begins with /")
            self._commands[name](argument.strip())
            return
        text = line[1:] if line.startswith("//") else line
        answer = self._chat.say(text)
        self._answers.append(answer)
        watch = self._watch()
        try:
            with watch, _stopping_at_interrupt(answer) if self._interactive else contextlib.nullcontext():
                self._show(answer)
        finally:
            answer.close()
            self._energies.append(watch.energy(answer.stats.tokens))
        self._conclude(text, answer)

    def _show(self, answer: Answer) -> None:
        if answer.dropped_turns:
            self._note(f"[the context is full; oldest turns forgotten: {answer.dropped_turns}]")
        for event in answer:
            if not self._as_json and (shown := self._shown(event)):
                click.echo(shown, nl=False)

    def _shown(self, event: Event) -> str:
        if isinstance(event, ToolCall):
            return "\n" + self._dimmed(_showable(_call_line(event))) + "\n"
        if isinstance(event, Thought):
            # A pipe gets the answer alone; --json has the thoughts.
            return self._dimmed(_showable(event.text)) if self._interactive else ""
        return _showable(event.text) if self._interactive else event.text

    def _conclude(self, text: str, answer: Answer) -> None:
        if self._as_json:
            record = _record(text, answer, self._chat.session.drafter_kind) | energy_record(self._energies[-1])
            click.echo(json.dumps(record, ensure_ascii=False))
            return
        click.echo()
        if answer.finish in ENDED:
            self._note(f"[{ENDED[answer.finish]}]")
        if self._interactive:
            self._note(self._dimmed(summary(answer.stats, self._chat.session.drafter_kind)))

    def _reset(self, _argument: str) -> None:
        self._chat.reset()
        self._note("the conversation is forgotten")

    def _system(self, argument: str) -> None:
        self._chat.set_system(argument or None)
        self._note("the system message is set" if argument else "there is no system message")

    def _save(self, argument: str) -> None:
        self._chat.save(_file(argument, "/save"))
        self._note(f"{len(self._chat.messages)} messages saved to {argument}")

    def _load(self, argument: str) -> None:
        self._chat.load(_file(argument, "/load"))
        self._note(f"{len(self._chat.messages)} messages loaded from {argument}")

    def _figures(self) -> str:
        if not self._answers:
            return "there is no answer yet"
        last, drafter = self._answers[-1], self._chat.session.drafter_kind
        every = [answer.stats for answer in self._answers]
        seconds = sum(stats.decode_seconds for stats in every)
        tokens, drafted, accepted = (sum(getattr(stats, name) for stats in every) for name in ("tokens", "drafted", "accepted"))
        lines = [
            f"last answer: {summary(last.stats, drafter)}",
            f"last prompt: {last.stats.prompt_tokens} of {self._chat.session.target.context} tokens of context,"
            f" {last.stats.reused_tokens} of them in the cache already, the rest in {last.stats.prefill_seconds:.2f} s",
            f"all {len(every)} answers: {tokens} tokens, {tokens / seconds if seconds else 0:.1f} tok/s",
        ]
        if drafted:
            lines[-1] += f", {accepted / drafted:.1%} of drafts accepted"
        return "\n".join([*lines, f"energy of the last answer: {self._energies[-1].sentence()}", *self._total_energy()])

    def _total_energy(self) -> list[str]:
        """One line of all answers that have a figure; none without any."""
        told = [
            (energy.joules, answer.stats.tokens)
            for energy, answer in zip(self._energies, self._answers, strict=True)
            if energy.joules_per_token and energy.joules
        ]
        tokens = sum(count for _, count in told)
        if len(told) < 2 or not tokens:
            return []
        facts = self._energies[-1].facts
        mark = "ESTIMATE, nothing was measured: " if facts and facts.is_estimate else ""
        error, freedom = combined([(joules.error, joules.freedom) for joules, _ in told])
        mean = of_error(sum(joules.value for joules, _ in told) / tokens, error / tokens, freedom, 1)
        scope = f", scope {facts.scope}" if facts else ""
        return [
            f"energy of {len(told)} answers with a figure: {mark}{figure_text(mean)} J/token{scope}, idle power while answering included"
        ]

    def _dimmed(self, text: str) -> str:
        return click.style(text, dim=True) if self._interactive else text

    def _note(self, text: str) -> None:
        click.echo(text, err=True)


@contextlib.contextmanager
def _stopping_at_interrupt(answer: Answer) -> Iterator[None]:
    """Inside, Ctrl-C asks the answer to stop after its round, so that the cache stays good; a second one does not wait for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def interrupted(_number: int, _frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        answer.stop()

    previous = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _file(argument: str, command: str) -> str:
    if not argument:
        raise RequestError(f"{command} needs the name of a file: {command} FILE")
    return argument


def _showable(text: str) -> str:
    return _UNSHOWABLE.sub("\ufffd", text)


def _call_line(call: ToolCall) -> str:
    if call.arguments is None:
        return f"[a tool call that cannot be read: {call.raw}]"
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"[calls {call.name}({arguments})]"


def _record(text: str, answer: Answer, drafter: str) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": call.arguments, "raw": call.raw} for call in answer.tool_calls]
    return {
        "user": text,
        "text": answer.text,
        "thoughts": answer.thoughts,
        "tool_calls": calls,
        "finish": answer.finish,
        "dropped_turns": answer.dropped_turns,
        "drafter": drafter,
        "stats": answer.stats.to_json(),
    }
