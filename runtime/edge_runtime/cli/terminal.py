"""The terminal of edge-run: streamed Markdown, typed messages, and what is printed about a request."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rich.cells import cell_len

from edge_runtime.backends.selection import CARDS
from edge_runtime.cli.prompts import printable
from edge_runtime.decoding.loop import Round
from edge_runtime.drafting.policies import DrafterKind
from edge_runtime.drafting.profit_policy import Decision
from edge_runtime.drafting.sources import MODEL
from edge_runtime.session.generation import Generation
from edge_runtime.session.monitor import DecodeStats
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import is_instruction_tuned

NOTHING_DRAFTED = "nothing was drafted, so this says nothing about drafts (give --draft-length 3, or a longer --max-tokens)"

_RESET, _BOLD, _CODE, _HEADING = "\x1b[0m", "\x1b[1m", "\x1b[36m", "\x1b[1;4m"
_ACCEPTED, _DEFAULT = "\x1b[32m", "\x1b[39m"
# Text that may become a fence, a heading or a bullet. It is held back until the next characters decide.
_UNDECIDED = re.compile(r" {0,3}(`{1,2}|`{3}[^\n]*|#{1,6})\Z| *[*+-]?\Z")
_FENCE = re.compile(r" {0,3}```[^\n]*\n")
# A style, the end of a line, spaces, or a part of a word.
_PARTS, _STYLE = re.compile(r"\x1b\[[0-9;]*m|\n|[ \t]+|[^\x1b\n \t]+|\x1b"), re.compile(r"\x1b\[[0-9;]*m")
_BULLET, _TITLE = re.compile(r"( *)[*+-] "), re.compile(r" {0,3}(#{1,6}) ")


class MarkdownPainter:
    """Adds a terminal's colours to text that arrives in pieces, and breaks lines of more than `columns` cells between words.

    It removes only the marks of bold text, code and headings. Lines of code between fences are not broken. A word appears when it is
    complete.
    """

    def __init__(self, columns: int | None = None) -> None:
        self._columns = columns
        # The cells of the line so far, the spaces after them, and the word that may still grow.
        self._cells, self._gap, self._word = 0, "", ""
        self._held, self._accepted = "", list[bool]()  # text, and for each character whether it comes from an accepted draft
        self._at_line_start = True
        self._fenced = self._bold = self._code = self._heading = False

    def feed(self, text: str, *, accepted: bool = False) -> str:
        """Returns the painted text that is final. Text of `accepted` drafts is green."""
        self._held += text
        self._accepted += [accepted] * len(text)
        return self._paint(final=False)

    def finish(self) -> str:
        """Returns the rest and switches all colours off."""
        painted = self._paint(final=True) + self._placed() + self._gap
        self._gap = ""
        return painted + (_RESET if self._fenced or self._bold or self._code or self._heading else "")

    def _paint(self, *, final: bool) -> str:
        painted = []
        while self._held:
            if self._at_line_start:
                if not final and _UNDECIDED.match(self._held):
                    break
                painted.append(self._broken(self._line_start()))
                continue
            if not final and self._held == "*":
                break
            painted.append(self._broken(self._next()))
        return "".join(painted)

    def _broken(self, painted: str) -> str:
        """Returns the part of a painted text that can no longer move to another line."""
        if self._columns is None:
            return painted
        parts = []
        for part in _PARTS.findall(painted):
            if part == "\n" or self._fenced:
                parts += [self._placed(), self._gap, part]
                self._gap = ""
                self._cells = 0 if part == "\n" else self._cells + cell_len(part)
            elif part[0] in " \t":
                parts.append(self._placed())
                self._gap += part
            else:
                self._word += part
        # Checked only after all parts, so that a colour inside a word does not split it.
        if cell_len(_STYLE.sub("", self._word)) >= self._columns:
            parts.append(self._placed())
        return "".join(parts)

    def _placed(self) -> str:
        """Returns the word after its spaces, or on a new line if it does not fit."""
        if not self._word or self._columns is None:
            return ""
        width = cell_len(_STYLE.sub("", self._word))
        if not width:  # only colours, which take no room: the spaces before them wait for a word
            placed, self._word = self._word, ""
            return placed
        fits = not self._cells or self._cells + len(self._gap) + width <= self._columns
        placed = f"{self._gap if fits else chr(10)}{self._word}"
        cells = (self._cells + len(self._gap) if fits else 0) + width
        # The terminal itself breaks a word that is wider than a line.
        self._cells = cells if cells <= self._columns else cells % self._columns or self._columns
        self._gap = self._word = ""
        return placed

    def _line_start(self) -> str:
        """Consumes a fence or the mark of a heading or bullet."""
        if fence := _FENCE.match(self._held):
            self._fenced = not self._fenced
            self._drop(fence.end())
            return _CODE if self._fenced else _RESET
        self._at_line_start = False
        if self._fenced:
            return ""
        if title := _TITLE.match(self._held):
            self._drop(title.end())
            self._heading = True
            return _HEADING
        if bullet := _BULLET.match(self._held):
            self._drop(bullet.end())
            return f"{bullet[1]}• "
        return ""

    def _next(self) -> str:
        """Consumes a mark, a line break, or the text before the next one."""
        if self._held[0] == "\n":
            ended = self._bold or self._code or self._heading
            self._drop(1)
            self._at_line_start = True
            self._bold = self._code = self._heading = False
            return _RESET + "\n" if ended else "\n"
        if not self._fenced and self._held[0] == "`":
            self._drop(1)
            self._code = not self._code
            return _CODE if self._code else self._style()
        if not self._fenced and not self._code and self._held.startswith("**"):
            self._drop(2)
            self._bold = not self._bold
            return self._style()
        stop = re.compile(r"\n" if self._fenced else r"[\n`]" if self._code else r"[\n`*]").search(self._held, 1)
        end = stop.start() if stop else len(self._held)
        painted = "".join(
            f"{_ACCEPTED}{part}{_CODE if self._code or self._fenced else _DEFAULT}" if accepted else part
            for accepted, part in self._parts(end)
        )
        self._drop(end)
        return painted

    def _parts(self, end: int) -> Iterator[tuple[bool, str]]:
        """Yields the held text up to `end` in parts, each with whether it comes from accepted drafts."""
        for accepted, characters in groupby(zip(self._accepted[:end], self._held[:end], strict=True), key=itemgetter(0)):
            yield accepted, "".join(character for _, character in characters)

    def _drop(self, characters: int) -> None:
        """Drops the first held characters, which were painted or were marks."""
        self._held, self._accepted = self._held[characters:], self._accepted[characters:]

    def _style(self) -> str:
        return _RESET + (_HEADING if self._heading else "") + (_BOLD if self._bold else "")


PROMPT, MORE = "> ", "... "
BLOCK = '"""'
# How many messages are kept. The file is cut to this number when it has twice as many.
MAX_MESSAGES = 1000
_PASTE_SECONDS = 0.02


def history_file() -> Path:
    """Returns the file of the history, in the user's state folder ($XDG_STATE_HOME, ~/.local/state)."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "edge-mtp" / "chat-history.jsonl"


class History:
    """Typed messages in a file that only its user may read, one JSON string per line. A file that cannot be used is ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[str]:
        messages: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            messages = [text for line in self._path.read_text(encoding="utf-8").splitlines() if isinstance(text := json.loads(line), str)]
            if len(messages) > 2 * MAX_MESSAGES:
                messages = messages[-MAX_MESSAGES:]
                self._path.write_text("".join(json.dumps(text) + "\n" for text in messages), encoding="utf-8")
        return messages[-MAX_MESSAGES:]

    def add(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps(text) + "\n")


class TypedInput:
    """Reads messages, with line editing if readline is available. `history` None keeps no messages between starts.

    A paste is one message, even before the first prompt. A message continues on the next line after a backslash at a line's end, and
    between three quotes and three quotes. With readline, Alt-Enter begins a new line, and Tab completes files and `commands`, which begin
    with a slash.
    """

    def __init__(self, history: History | None, commands: Sequence[str] = ()) -> None:
        self._history = history
        self._commands = commands
        self._pastes_whole = False
        self._first = True
        self._readline = None
        with contextlib.suppress(ImportError):
            import readline

            self._readline = readline
            self._pastes_whole = "libedit" not in (readline.__doc__ or "")
            readline.set_auto_history(False)
            if self._pastes_whole:
                readline.parse_and_bind("set enable-bracketed-paste on")
                readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')
            # Only spaces end a word, so that the slash of a command or path belongs to it.
            readline.set_completer_delims(" \t\n")
            readline.set_completer(self._completion)
            readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
            for text in history.load() if history else ():
                readline.add_history(text)

    def read(self) -> str:
        """Returns the next message. Raises EOFError, KeyboardInterrupt and UnicodeDecodeError."""
        text = self._line(PROMPT)
        if text.lstrip().startswith(BLOCK):
            text = text.lstrip().removeprefix(BLOCK)
            while BLOCK not in text:
                text += "\n" + self._line(MORE)
            text = text.partition(BLOCK)[0].strip("\n")
        while text.endswith("\\"):
            text = f"{text[:-1]}\n{self._line(MORE)}"
        if text.strip():
            if self._readline:
                self._readline.add_history(text)
            if self._history:
                self._history.add(text)
        return text

    def _completion(self, word: str, number: int) -> str | None:
        """Returns completion `number` of a word; None after the last. It completes commands at the line's start, else files."""
        line = self._readline.get_line_buffer().lstrip() if self._readline else word
        if line == word and word.startswith("/"):
            matches = [f"{command} " for command in self._commands if command.startswith(word)]
        else:
            matches = _files(word)
        return sorted(matches)[number] if number < len(matches) else None

    def _line(self, prompt: str) -> str:
        """Returns a line, or all lines of a paste."""
        text = input(prompt)
        # Text that was pasted before there was a prompt has no bracketed-paste marks.
        early, self._first = self._first, False
        while (early or not self._pastes_whole) and select.select([sys.stdin], [], [], _PASTE_SECONDS)[0]:
            try:
                text += "\n" + input()
            except EOFError:
                break
        return text


def _files(beginning: str) -> list[str]:
    """Returns the paths that begin with `beginning`; folders end with a slash."""
    path = Path(beginning).expanduser()
    folder, name = (path, "") if not beginning or beginning.endswith("/") else (path.parent, path.name)
    with contextlib.suppress(OSError, ValueError):
        return [f"{entry}/" if entry.is_dir() else str(entry) for entry in folder.iterdir() if entry.name.startswith(name)]
    return []


# Name and width of each column of --explain.
COLUMNS = (
    ("step", 5),
    ("mode", 6),
    ("drafted", 7),
    ("checked", 7),
    ("tokens", 6),
    ("accepted", 8),
    ("expected", 8),
    ("emitted", 7),
    ("cost", 9),
    ("took ms", 8),
    ("gain", 6),
    ("from", 9),
    ("sure", 0),
)
UNITS = {"time": "ms", "energy": "mJ"}
NONE = "-"


def summary(stats: DecodeStats, drafter: DrafterKind) -> str:
    """Returns a request's figures in one line. It names the `drafter` if that drafted."""
    parts = [
        f"{stats.tokens} tokens",
        f"{stats.tokens_per_second:.1f} tok/s",
        f"mean acceptance length {stats.mean_acceptance_length:.2f}",
    ]
    if stats.acceptance_rate is not None:
        by_position = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
        parts.append(f"{stats.acceptance_rate:.1%} of {drafter} drafts accepted (by position {by_position})")
        if others := {source: count for source, count in stats.accepted_from.items() if source != MODEL}:
            parts[-1] += ", of these " + ", ".join(f"{count} from the {source}" for source, count in sorted(others.items()))
    if stats.media_rows:
        parts.append(f"{stats.media_rows} tokens of images and sound encoded in {stats.encode_seconds * 1000:.0f} ms")
    parts.append(f"first token after {stats.first_token_seconds * 1000:.0f} ms")
    return ", ".join(parts)


def short_summary(stats: DecodeStats, columns: int) -> str:
    """Returns an answer's figures in one line of at most `columns`; the last figures are left out if they do not fit."""
    parts = [f"{stats.tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s", f"{stats.mean_acceptance_length:.2f} tokens per step"]
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of drafts accepted")
    parts.append(f"first after {stats.first_token_seconds * 1000:.0f} ms")
    while len(parts) > 2 and len(", ".join(parts)) > columns:
        parts.pop()
    return ", ".join(parts)


def greeting(session: Session) -> str:
    """Returns a line about what runs: model, quantization, backend, context and drafter."""
    architecture = session.bundle.manifest.architecture
    kinds = sorted({file.quantization for file in session.bundle.manifest.files if file.role == "target" and file.quantization})
    model = f"{architecture.family}, {architecture.parameters:,} parameters" + (f" in {' and '.join(kinds)}" if kinds else "")
    backend = [CARDS[session.backend].title] if session.backend in CARDS else []
    parts = [model, *backend, f"context {session.target.context}", f"drafter {session.drafter_kind}"]
    return ", ".join(parts)


# The exporter's command that screens of the shipped example model suggest.
EXAMPLE_THAT_ANSWERS = "edge-export reference --chat --output small-chat"


def introduction(session: Session) -> list[str]:
    """Returns lines for a user who begins a chat with an example model: what it is, and how to get a model that can chat."""
    if (description := session.bundle.manifest.description) is None:
        return []
    lines = [
        f"This model is {printable(description)}.",
        "A real Gemma 4: edge-export pair google/gemma-4-E2B-it --output gemma-e2b (edge-export plan E2B: download, memory, speed here).",
    ]
    if not is_instruction_tuned(session.bundle, session.vocabulary):
        lines.insert(1, f"An example that answers: {EXAMPLE_THAT_ANSWERS}")
    return lines


def remarks(generation: Generation) -> list[str]:
    """Returns remarks for the user: that the context is full, and how much of the prompt came from the prompt cache."""
    sentences, stats = [], generation.stats
    if generation.finish_reason == "context":
        sentences.append(f"stopped: the context of {generation.target.context} tokens is full; raise --context or shorten the prompt")
    if stats.reused_tokens:
        sentences.append(f"{stats.reused_tokens} of the prompt's {stats.prompt_tokens} tokens came from the prompt cache")
    return sentences


class Explain:
    """A callback for rounds that prints one line for each, after a line with the column names.

    `decision` returns the policy's decision for the latest round, or None if the policy records none. Its costs are in seconds, or in
    joules if the `objective` is energy.
    """

    def __init__(self, decision: Callable[[], Decision | None], objective: str, write: Callable[[str], None]) -> None:
        self._decision, self._unit, self._write = decision, UNITS[objective], write
        self._rounds = 0

    def __call__(self, done: Round) -> None:
        """Prints the line of a finished round."""
        if not self._rounds:
            self._write(_line([f"{name} {self._unit}" if name == "cost" else name for name, _ in COLUMNS]))
        self._rounds += 1
        self._write(_line(_cells(self._rounds, done, self._decision())))


def _cells(number: int, done: Round, decision: Decision | None) -> list[str]:
    took = f"{(done.draft_seconds + done.verify_seconds) * 1000:.2f}"
    accepted, emitted = str(done.accepted) if done.drafted else NONE, str(len(done.tokens))
    if decision is None:
        mode = "draft" if done.drafted else "plain"
        verified = [NONE, str(done.drafted), str(done.drafted + 1), accepted]
        return [str(number), mode, *verified, NONE, emitted, NONE, took, NONE, _sources(done), NONE]
    return [
        str(number),
        decision.mode,
        str(decision.drafted),
        str(decision.verified),
        str(decision.verified + decision.padding + 1),
        accepted,
        f"{decision.expected:.2f}",
        emitted,
        f"{decision.cost * 1000:.2f}",
        took,
        f"{decision.best_rate / decision.plain_rate:.2f}",
        _sources(done),
        " ".join(f"{confidence:.2f}" for confidence in decision.confidences) or NONE,
    ]


def _sources(done: Round) -> str:
    """Returns how many tokens of each source were accepted, such as "drafter 2, memory 4"."""
    return ", ".join(f"{source} {count}" for source, count in Counter(done.sources).items()) or NONE


def _line(cells: list[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))
