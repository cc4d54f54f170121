"""A server whose time of day jumps by a day, back and forth, at every look at it: nothing expires, nothing waits a day."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from chat_server import CHAT, HI, Child, send

# What libfaketime does, for the time of day alone.
JUMPS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static long jump(void) {
    static unsigned count;
    return __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED) % 2 ? 86400 : -86400;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += jump();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (place) *place = exact.tv_sec;
    return exact.tv_sec;
}
"""
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs cc on Linux")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "jumps.c").write_text(JUMPS)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "jumps.so"), str(folder / "jumps.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "jumps.so"


def test_the_clock_of_a_child_jumps(library: Path) -> None:
    """Else the test below would pass without a jump."""
    code = "import time; print(abs(time.time() - time.time()) > 80000, time.monotonic() <= time.monotonic())"
    done = subprocess.run([sys.executable, "-c", code], env={"LD_PRELOAD": str(library)}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_a_server_answers_whatever_time_it_is(library: Path, exported_pair: Path, tmp_path: Path) -> None:
    """Texts, a template with tools, a grammar, a large body, and a connection that idles and goes on."""
    server = Child(exported_pair, "--context", "512", EDGE_MTP_CACHE=str(tmp_path), LD_PRELOAD=str(library))
    try:
        bodies = [
            {"messages": HI, "max_tokens": 4},
            {"messages": HI, "max_tokens": 4, "tools": [TOOL]},
            {"messages": HI, "max_tokens": 4, "response_format": SCHEMA},
            {"messages": HI, "max_tokens": 4, "metadata": {"a": "x" * (1 << 20)}},
        ]
        assert [send(server, "POST", CHAT, body)[0] for body in bodies * 2] == [200] * 8
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        for body in bodies[:2]:
            connection.request("POST", CHAT, json.dumps(body).encode())
            response = connection.getresponse()
            assert (response.status, b'"choices"' in response.read()) == (200, True)
            time.sleep(0.5)
        connection.close()
        assert send(server, "GET", "/health")[2] == {"status": "ok", "running": 0, "waiting": 0, "loaded": True}
    finally:
        assert server.end() == 0, server.lines
    assert not [line for line in server.lines if "Traceback" in line]
