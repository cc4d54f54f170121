"""Messages that are typed or pasted at a terminal, of one or several lines, with a history that is kept between starts."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

PROMPT, MORE = "> ", "... "
BLOCK = '"""'
# Messages that are kept; the file is cut to these when it has twice as many.
MAX_MESSAGES = 1000
_PASTE_SECONDS = 0.02


def history_file() -> Path:
    """Returns the file of the history, in the user's folder for state ($XDG_STATE_HOME, ~/.local/state)."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "edge-mtp" / "chat-history.jsonl"


class History:
    """Typed messages in a file that only its user may read, a JSON string each. A file that cannot be used is left alone."""

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
    """Reads messages with line editing where readline is there; `history` None keeps none between starts.

    A paste is one message. A line that ends with a backslash goes on in the next, and so does what begins with three quotes until three
    quotes end it; with readline, Alt-Enter begins a new line, and Tab completes `commands`, which begin with a slash, and files. Lines that
    were pasted before the first prompt are one message too.
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
            # Words end at spaces alone, so that a command's slash and a path belong to one.
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
        """Returns the completion `number` of a word, None after the last: of a command at the line's start, else of a file."""
        line = self._readline.get_line_buffer().lstrip() if self._readline else word
        if line == word and word.startswith("/"):
            matches = [f"{command} " for command in self._commands if command.startswith(word)]
        else:
            matches = _files(word)
        return sorted(matches)[number] if number < len(matches) else None

    def _line(self, prompt: str) -> str:
        """Returns a line, or all lines of a paste."""
        text = input(prompt)
        # What was pasted before there was a prompt came without a paste's brackets.
        early, self._first = self._first, False
        while (early or not self._pastes_whole) and select.select([sys.stdin], [], [], _PASTE_SECONDS)[0]:
            try:
                text += "\n" + input()
            except EOFError:
                break
        return text


def _files(beginning: str) -> list[str]:
    """Returns the paths that begin like this, folders with a slash."""
    path = Path(beginning).expanduser()
    folder, name = (path, "") if not beginning or beginning.endswith("/") else (path.parent, path.name)
    with contextlib.suppress(OSError, ValueError):
        return [f"{entry}/" if entry.is_dir() else str(entry) for entry in folder.iterdir() if entry.name.startswith(name)]
    return []
