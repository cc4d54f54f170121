"""Fake phones behind the real adb client, with an adb server of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from fake_adbd import FakeAdbd
from fake_phone import FakePhone
from polling import wait

MISSING = [tool for tool in ("adb", "proot") if shutil.which(tool) is None]
NEEDS = f"needs {' and '.join(MISSING)} (apt install {' '.join(MISSING)})" if MISSING else ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Desk:
    """An adb server on a port of its own, and the phones connected to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.phones: list[FakeAdbd] = []
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        # The server makes its key in HOME.
        self.environment = {"ANDROID_ADB_SERVER_PORT": str(self.port), "HOME": str(folder)}
        self.adb("start-server")

    def adb(self, *words: str) -> str:
        done = subprocess.run(["adb", *words], capture_output=True, text=True, timeout=30, env=os.environ | self.environment, check=False)
        return done.stdout + done.stderr

    def phone(self, *, cpu: str = "", connect: bool = True) -> FakeAdbd:
        daemon = FakeAdbd(FakePhone(self._folder / f"phone{len(self.phones)}", cpu=cpu))
        self.phones.append(daemon)
        if connect and not self.plugged(daemon):
            raise RuntimeError(f"adb did not take {daemon.serial}: {self.connect(daemon).strip()}")
        return daemon

    def plugged(self, daemon: FakeAdbd) -> bool:
        """Whether adb has the phone; plugs it in where it has not."""
        return wait(lambda: self._has(daemon) or (bool(self.connect(daemon)) and self._has(daemon)), seconds=20)

    def _has(self, daemon: FakeAdbd) -> bool:
        return self.adb("-s", daemon.serial, "get-state").strip() == "device"

    def connect(self, daemon: FakeAdbd) -> str:
        self.adb("disconnect", daemon.serial)
        return self.adb("connect", daemon.serial)

    def close(self) -> None:
        for daemon in self.phones:
            self.adb("disconnect", daemon.serial)
            daemon.close()
        self.adb("kill-server")
