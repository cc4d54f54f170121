"""A child process at a pseudo-terminal, typed at and read as a person would."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """Runs `command` with a controlling terminal of its own, so that Ctrl-C is a signal. `output` is all it wrote so far."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
