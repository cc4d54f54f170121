"""Runs a program in an empty home folder and lists the names it resolved, the addresses it connected to, and the files it left.

A library that is loaded before the C library reports every `getaddrinfo` and every `connect` to an internet address, and fails them: what
C code does is seen too, and nothing leaves the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from edge_devices import SWITCHES

_WATCH = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void note(const char *what, const char *name) {
  const char *path = getenv("NETWORK_LOG");
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
  char line[300];
  if (file < 0) return;
  int length = snprintf(line, sizeof line, "%s %.200s\n", what, name);
  if (write(file, line, length) != length) abort();
  close(file);
}
static int local(const char *name) {
  return !name || !strcmp(name, "localhost") || !strcmp(name, "::1") || !strncmp(name, "127.", 4) || !strcmp(name, "0.0.0.0");
}
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
  int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) = dlsym(RTLD_NEXT, "getaddrinfo");
  if (local(name)) return real(name, service, hints, found);
  note("resolve", name);
  return EAI_FAIL;
}
int connect(int socket, const struct sockaddr *address, socklen_t length) {
  int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
  char text[64] = "";
  if (address->sa_family == AF_INET) inet_ntop(AF_INET, &((struct sockaddr_in *)address)->sin_addr, text, sizeof text);
  else if (address->sa_family == AF_INET6) inet_ntop(AF_INET6, &((struct sockaddr_in6 *)address)->sin6_addr, text, sizeof text);
  else return real(socket, address, length);
  if (local(text)) return real(socket, address, length);
  note("connect", text);
  errno = ENETUNREACH;
  return -1;
}
"""
# What makes libraries silent by itself, so that a test would see nothing where a user sees something.
_SILENT_ANYWAY = ("CI", "TF_BUILD", "GITHUB_ACTIONS", "ORT_RUNNING_UNIT_TESTS", "HF_HUB_OFFLINE", "MPLCONFIGDIR", "EDGE_MTP_CACHE")


@dataclass(frozen=True)
class Watched:
    """What a program did. `files` are relative to its home."""

    network: list[str]
    files: list[str]
    output: str


class Watcher:
    """Watches programs; its folder holds the library and the homes."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None or sys.platform != "linux":
            pytest.skip("needs Linux and a C compiler (apt install gcc)")
        self._folder, self._library, self._runs = folder, folder / "watch.so", count(1)
        source = folder / "watch.c"
        source.write_text(_WATCH)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(source), "-ldl"], check=True)

    def run(self, *arguments: str, **variables: str) -> Watched:
        """Runs Python with these arguments in a home of its own, without the variables that switch telemetry off; any thread may."""
        number = next(self._runs)
        home, log = self._folder / f"home{number}", self._folder / f"log{number}"
        home.mkdir()
        unset = {*_SILENT_ANYWAY, *SWITCHES, "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"}
        env = {key: value for key, value in os.environ.items() if key not in unset} | {
            "HOME": str(home),
            "NETWORK_LOG": str(log),
            "LD_PRELOAD": str(self._library),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command, both = [sys.executable, *arguments], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, env=env | variables, cwd=home, text=True, check=False, **both)
        assert done.returncode == 0, done.stdout
        files = sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if not path.is_dir())
        return Watched(network=log.read_text().splitlines() if log.exists() else [], files=files, output=done.stdout)
