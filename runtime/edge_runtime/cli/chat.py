"""`edge-run chat BUNDLE`: an interactive chat at a terminal. Input from a pipe is one message, or one turn per line."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import PanelCommand, takes
from edge_devices.energy.live import EnergyPool, EnergyWatch, RunEnergy
from edge_devices.errors import EdgeError, errors_as
from edge_devices.option_fields import option
from edge_runtime.cli.options import (
    BundlePath,
    Opening,
    energy_record,
    note,
    opens_bundle,
    refuse_greedy_filters,
    sampling_of,
    takes_sampling,
    unwatched,
)
from edge_runtime.cli.prompts import MAX_INPUT, MessageOptions, hub_bundle, printable
from edge_runtime.cli.terminal import History, MarkdownPainter, TypedInput, greeting, history_file, introduction, short_summary, summary
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.errors import RequestError
from edge_runtime.media.encoder_inputs import DEFAULT_BUDGET
from edge_runtime.media.reading import read_image, read_sound
from edge_runtime.media.soft_rows import Media
from edge_runtime.session.chat import MAX_TOKENS, Answer, Chat, ChatSettings
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import CallPiece, ToolCall

HELP = """\
/help          this list
/image FILE    send an image with the next message (jpeg, png, webp)
/audio FILE    send a sound with the next message (wav, flac, mp3)
/clear         start a new conversation
/regenerate    answer the last message again
/system TEXT   set the system message; without TEXT, remove it
/set NAME N    change a setting of the answers; without NAME, list them
/stats         statistics of the last answer and of all answers
/save FILE     write the conversation and its settings as JSON
/load FILE     continue a saved conversation
/bye           leave (also Ctrl-D, exit, quit)
Ctrl-C stops an answer after the current step; a second Ctrl-C stops it at once. To send a message that begins with /, type //.
Tab completes commands and files.
Several lines are one message: in a paste, after a backslash at a line's end, between \"\"\" and \"\"\", or with Alt-Enter."""
LEAVE = ("/bye", "/exit", "/quit", "exit", "quit")
SAMPLING = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float, "seed": int}
SWITCH = {"on": True, "off": False}
ENDED = {
    "length": "cut off at --max-tokens; write 'go on', or raise it: /set max-tokens N",
    "context": "cut off: the context is full; use /clear, or raise --context",
    "interrupted": "stopped",
}


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How a chat reads and prints."""

    max_tokens: int = option("-n", default=MAX_TOKENS, low=1, panel="Output", help="Maximum number of tokens of an answer.")
    as_json: bool = option("--json", default=False, panel="Output", help="Print one JSON object per turn instead of text.")
    lines: bool = option(
        default=False,
        panel="Messages",
        help="Each line of a pipe is a turn or a command.  [default: a pipe is one message; lines with --json]",
    )
    no_history: bool = option(default=False, panel="Messages", help="Keep no typed messages between starts (in ~/.local/state/edge-mtp).")


USUAL = (
    *("max_tokens", "system", "thinking", "temperature", "top_p", "seed"),
    *("draft_length", "backend", "context", "memory_limit", "no_history", "lines"),
)


@click.command(cls=PanelCommand, usual=USUAL)
@click.argument("bundle", type=BundlePath())
@takes("options", ChatOptions)
@takes("message", MessageOptions, only=("system", "thinking"))
@takes_sampling
@opens_bundle("image_rows", prompt_cache=True)
def chat(bundle: Path, options: ChatOptions, message: MessageOptions, sampling: SamplingParams, opening: Opening) -> None:
    """Chat with BUNDLE in the terminal. Piped input is one message."""
    refuse_greedy_filters(sampling)
    with opening.session(hub_bundle(bundle)) as session:
        conversation = Chat(
            session,
            max_tokens=options.max_tokens,
            draft_length=opening.draft_length,
            system=message.system,
            thinking=message.thinking,
            sampling=sampling_of(sampling, session.bundle),
        )
        TerminalChat(
            conversation,
            as_json=options.as_json,
            watch=opening.energy.watch,
            lines=options.lines,
            history=None if options.no_history else History(history_file()),
            image_rows=opening.load.image_rows,
        ).run()


class TerminalChat:
    """Reads turns and commands until the input ends. At a terminal, errors are printed; with a pipe, the first error ends the chat."""

    def __init__(
        self,
        chat: Chat,
        *,
        as_json: bool = False,
        watch: Callable[[], EnergyWatch] = unwatched,
        lines: bool = False,
        history: History | None = None,
        image_rows: int = DEFAULT_BUDGET,
    ) -> None:
        """`watch` returns the energy measurement of one answer. With `lines`, each line of a pipe is a turn. `image_rows` is an image's
        budget."""
        self._chat = chat
        self._lines, self._history = lines or as_json, history
        self._watch = watch
        self._energies: list[RunEnergy] = []
        self._pool = EnergyPool()
        self._as_json = as_json
        if sys.stdin is None:
            raise RequestError("standard input is closed, so a chat has no input; give a PROMPT")
        self._interactive = sys.stdout is not None and sys.stdin.isatty() and sys.stdout.isatty() and not as_json
        self._answers: list[Answer] = []
        self._media: tuple[Media, ...] = ()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: note(HELP),
            "/image": lambda name: self._attach(name, lambda path: read_image(path, image_rows)),
            "/audio": lambda name: self._attach(name, read_sound),
            "/clear": self._clear,
            "/regenerate": self._regenerate,
            "/system": self._system,
            "/set": self._set,
            "/stats": lambda _: note(self._figures()),
            "/save": self._save,
            "/load": self._load,
        }

    def run(self) -> None:
        """Runs until the end of the input. Raises EdgeError and KeyboardInterrupt unless it is interactive."""
        if self._interactive:
            note("\n".join(introduction(self._chat.session)))
            note(f"{greeting(self._chat.session)}; chat template: {self._chat.template.name}. /help lists the commands.")
        elif not self._lines:
            message = "".join(self._piped()).rstrip("\r\n")
            if not message.strip():
                raise click.UsageError("standard input is no terminal, and empty; give a PROMPT, or pipe a message")
            self._turn(message, verbatim=True)
            return
        for line in self._typed() if self._interactive else (line.rstrip("\r\n") for line in self._piped()):
            if line.strip() in LEAVE:
                return
            try:
                self._turn(line)
            except EdgeError as error:
                if not self._interactive:
                    raise
                note(f"Error: {error}")
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                note("\nstopped at once")

    def _typed(self) -> Iterator[str]:
        typed = TypedInput(self._history, [*self._commands, LEAVE[0]])
        while True:
            try:
                yield typed.read()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                note("\nCtrl-D or /bye ends the chat")
            except UnicodeDecodeError as error:
                note(f"Error: the input is not UTF-8 text ({error})")

    def _piped(self) -> Iterator[str]:
        """Yields the lines of standard input with their line breaks."""
        left = MAX_INPUT
        with errors_as(RequestError, "standard input is not UTF-8 text", "convert it", UnicodeDecodeError):
            while line := sys.stdin.readline(left + 1):
                if len(line) > left:
                    raise RequestError(f"standard input has more than {MAX_INPUT} characters in a message; give less")
                if not self._lines:
                    left -= len(line)
                yield line

    def _turn(self, line: str, *, verbatim: bool = False) -> None:
        """Runs a command or sends a message. A `verbatim` line is always a message."""
        if not line.strip():
            return
        if not verbatim and line.startswith("/") and not line.startswith("//"):
            name, _, argument = line.strip().partition(" ")
            if name not in self._commands:
                near = difflib.get_close_matches(name[:20], self._commands, n=1, cutoff=0.0)[0]
                raise RequestError(f"unknown command {name}; the nearest is {near}, and // sends a message that begins with /")
            self._commands[name](argument.strip())
            return
        text = line[1:] if line.startswith("//") and not verbatim else line
        answer = self._chat.say(text, self._media)
        self._media = ()
        self._print(text, answer)

    def _regenerate(self, _argument: str) -> None:
        answer = self._chat.regenerate()
        if not self._chat.settings.sampling.temperature:
            note("temperature 0 gives the same answer again; /set temperature 0.8 draws another one")
        self._print(next(str(message["content"]) for message in reversed(answer.prompt_messages) if message["role"] == "user"), answer)

    def _print(self, text: str, answer: Answer) -> None:
        """Prints the answer to `text` while it arrives."""
        self._answers.append(answer)
        watch = self._watch()
        try:
            with watch, _stopping_at_interrupt(answer) if self._interactive else contextlib.nullcontext():
                self._show(answer)
        finally:
            answer.close()
            self._energies.append(watch.energy(answer.stats.tokens))
            watch.add_to(self._pool, answer.stats.tokens)
        self._conclude(text, answer)

    def _show(self, answer: Answer) -> None:
        if answer.dropped_turns:
            note(f"[the context is full; dropped turns, oldest first: {answer.dropped_turns}]")
        painted = self._interactive and "NO_COLOR" not in os.environ
        painter = MarkdownPainter(shutil.get_terminal_size().columns) if painted else None
        for event in answer:
            shown = self._shown(event)
            if painter and isinstance(event, Text):
                shown = painter.feed(shown, accepted=answer.drafted)
            if not self._as_json and shown:
                click.echo(shown, nl=False)
        if painter:
            click.echo(painter.finish(), nl=False)

    def _shown(self, event: Event) -> str:
        if isinstance(event, CallPiece):
            return ""
        if isinstance(event, ToolCall):
            return "\n" + self._dimmed(printable(_call_line(event))) + "\n"
        if isinstance(event, Thought):
            # A pipe gets only the answer; --json includes the thoughts.
            return self._dimmed(printable(event.text)) if self._interactive else ""
        return printable(event.text) if self._interactive else event.text

    def _conclude(self, text: str, answer: Answer) -> None:
        if self._as_json:
            record = _record(text, answer, self._chat.session.drafter_kind) | energy_record(self._energies[-1])
            click.echo(json.dumps(record, ensure_ascii=False))
            return
        click.echo()
        if answer.finish in ENDED:
            note(f"[{ENDED[answer.finish]}]")
        if self._interactive:
            note(self._dimmed(short_summary(answer.stats, shutil.get_terminal_size().columns)))

    def _attach(self, name: str, read: Callable[[Path], Media]) -> None:
        if not name:
            raise RequestError("name a file, for example /image photo.jpg")
        media = read(Path(name).expanduser())
        rows = self._chat.session.media_rows(media)
        self._media = (*self._media, media)
        note(f"{name}: {rows} tokens of the context, with your next message")

    def _clear(self, _argument: str) -> None:
        self._chat.reset()
        note("new conversation")

    def _system(self, argument: str) -> None:
        self._chat.change(system=argument or None)
        note("the system message is set" if argument else "the system message is removed")

    def _set(self, argument: str) -> None:
        if argument:
            self._chat.change(**changed_setting(self._chat.settings, *argument.split()))
        note("\n".join(f"{name:<20}{value}" for name, value in shown_settings(self._chat.settings).items()))

    def _save(self, argument: str) -> None:
        self._chat.save(_file(argument, "/save"))
        note(f"{len(self._chat.messages)} messages saved to {argument}")

    def _load(self, argument: str) -> None:
        self._chat.load(_file(argument, "/load"))
        note(f"{len(self._chat.messages)} messages loaded from {argument}")

    def _figures(self) -> str:
        if not self._answers:
            return "no answer yet"
        last, drafter = self._answers[-1], self._chat.session.drafter_kind
        every = [answer.stats for answer in self._answers]
        seconds = sum(stats.decode_seconds for stats in every)
        tokens, rounds, drafted, accepted = (
            sum(getattr(stats, name) for stats in every) for name in ("tokens", "rounds", "drafted", "accepted")
        )
        lines = [
            f"last answer: {summary(last.stats, drafter)}",
            f"last prompt: {last.stats.prompt_tokens} of {self._chat.session.target.context} tokens of context,"
            f" {last.stats.reused_tokens} of them in the cache already, the rest in {last.stats.prefill_seconds:.2f} s",
            f"all {len(every)} answers: {tokens} tokens, {tokens / seconds if seconds else 0:.1f} tok/s",
        ]
        if drafted:
            lines[-1] += f", mean acceptance length {tokens / rounds:.2f}, {accepted / drafted:.1%} of drafts accepted"
        energies = {"the last answer": self._energies[-1], f"all {len(every)} answers": self._pool.energy()}
        measured = len(every) > 1 and self._energies[-1].facts is not None  # otherwise both rows say the same
        rows = [(*energy.row(), of) for of, energy in energies.items()][: 2 if measured else 1]
        return "\n".join([*lines, *(f"{label} of {of}: {text}" for label, text, of in rows)])

    def _dimmed(self, text: str) -> str:
        return click.style(text, dim=True) if self._interactive else text


def shown_settings(settings: ChatSettings) -> dict[str, str]:
    """Returns the settings that /set can change, by their names in /set, with their values as text."""
    values = {"max_tokens": settings.max_tokens, "thinking": "on" if settings.thinking else "off"}
    values |= {name: getattr(settings.sampling, name) for name in SAMPLING}
    return {name.replace("_", "-"): "random" if value is None else str(value) for name, value in values.items()}


def changed_setting(settings: ChatSettings, name: str, *values: str) -> dict[str, Any]:
    """Returns the fields of `ChatSettings` that `/set NAME VALUE` changes. Raises RequestError for an unknown name or a bad value."""
    names = shown_settings(settings)
    if name not in names:
        near = difflib.get_close_matches(name[:20], names, n=1, cutoff=0.0)[0]
        raise RequestError(f"{name} is no setting; the nearest is {near}, and /set lists all")
    field, value = name.replace("-", "_"), " ".join(values)
    if field == "thinking":
        if value not in SWITCH:
            raise RequestError(f"thinking is {value!r}; give on or off")
        return {field: SWITCH[value]}
    try:
        number = SAMPLING.get(field, int)(value)
    except ValueError as error:
        raise RequestError(f"{name} is {value!r}; give a number, for example /set {name} {names[name]}") from error
    if field == "max_tokens":
        if number < 1:
            raise RequestError(f"max-tokens is {number}; give 1 or more")
        return {field: number}
    return {"sampling": replace(settings.sampling, **{field: number})}


@contextlib.contextmanager
def _stopping_at_interrupt(answer: Answer) -> Iterator[None]:
    """Within the context, Ctrl-C stops the answer after its round, which keeps the cache valid. A second Ctrl-C interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted_once = False

    def interrupted(_number: int, _frame: Any) -> None:
        nonlocal interrupted_once
        if interrupted_once:
            raise KeyboardInterrupt
        interrupted_once = True
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


def _call_line(call: ToolCall) -> str:
    if call.partial is not None:
        return f"[a call that was cut off: {call.name} {call.partial}]"
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in (call.arguments or {}).items())
    return f"[call: {call.name}({arguments})]"


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
