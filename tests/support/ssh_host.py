"""A real sshd on a port of its own, with keys of its own in a temporary folder, that knows no other user than us."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
from pathlib import Path

from phones import free_port
from polling import wait

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
NEEDS = (
    "" if Path(SSHD).exists() and shutil.which("ssh") and shutil.which("ssh-keygen") else "needs sshd and ssh (apt install openssh-server)"
)


class SshHost:
    """`config` is a client configuration with the host as "pi"; `known` holds its known hosts. `command` replaces the requested command."""

    def __init__(self, folder: Path, command: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, port = folder, free_port()
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "authorized").write_text((folder / "user_key.pub").read_text())
        host_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        self.known = folder / "known_hosts"
        self.known.write_text(f"[127.0.0.1]:{port} {host_key}\n")
        self.config = folder / "config"
        self.config.write_text(
            f"Host pi\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n IdentityFile {folder}/user_key\n IdentitiesOnly yes\n"
            f" UserKnownHostsFile {self.known}\n GlobalKnownHostsFile /dev/null\n"
        )
        sshd = folder / "sshd_config"
        sshd.write_text(
            f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nPidFile {folder}/pid\nAuthorizedKeysFile {folder}/authorized\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nSubsystem sftp internal-sftp\n"
            + (f"ForceCommand {command}\n" if command else "")
        )
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where sshd, run by root, shuts its unprivileged part in
        self._daemon: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts the daemon and waits until it listens."""
        log = (self._folder / "log").open("ab")
        with log:
            self._daemon = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self._folder / "sshd_config")], stderr=log, stdin=subprocess.DEVNULL
            )
        if not wait(lambda: "Server listening" in (self._folder / "log").read_text()):
            raise RuntimeError((self._folder / "log").read_text())

    def stop(self) -> None:
        if self._daemon:
            self._daemon.terminate()
            self._daemon.wait()
            self._daemon = None
