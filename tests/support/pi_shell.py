"""What sshd runs in place of every command: the command on a fake Pi, with an emulated processor if one is named.

`python pi_shell.py ROOT [CPU]`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fake_phone import FakePhone

SFTP = "/usr/lib/openssh/sftp-server"


def main() -> int:
    pi = FakePhone(Path(sys.argv[1]), cpu="".join(sys.argv[2:]), fresh=False)
    line = os.environ.get("SSH_ORIGINAL_COMMAND", "")
    if "sftp" in line.split(" ", 1)[0]:
        os.execvpe("proot", [*pi.words(), SFTP], pi.environment())
    running = pi.start(line)
    assert running.process.stdin is not None
    running.process.stdin.close()
    code = running.relay(lambda data: _write(1, data), lambda data: _write(2, data), lambda: False)
    os._exit(code or 0)  # what was left in the background goes on, with proot as its parent


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
