"""A server whose time of day jumps by a day, back and forth, at every look at it: nothing expires, nothing waits a day.

`tests/test_wall_clock.py` reads our own sources; here the libraries under the server meet the jumps too.
"""

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

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    static unsigned count;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED) % 2 ? 86400 : -86400;
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
LOOK = "import time; print(abs(time.time() - time.time()) > 80000, time.monotonic() <= time.monotonic())"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
# A text, a template with tools, a grammar, and a large body.
BODIES = [
    {"messages": HI, "max_tokens": 4, **fields}
    for fields in ({}, {"tools": [TOOL]}, {"response_format": SCHEMA}, {"metadata": {"a": "x" * (1 << 20)}})
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the library that makes the time of day jump in the programs that load it."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs cc on Linux")
    source = tmp_path_factory.mktemp("clock") / "jumps.c"
    source.write_text(JUMPS)
    result = str(source.with_suffix(".so"))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", result, str(source), "-ldl"], check=True, capture_output=True)
    seen = subprocess.run([sys.executable, "-c", LOOK], env={"LD_PRELOAD": result}, capture_output=True, text=True, check=True)
    assert seen.stdout.split() == ["True", "True"], "the clock does not jump, so a test would see nothing"
    return result


def test_a_server_answers_whatever_time_it_is(library: str, exported_pair: Path, tmp_path: Path) -> None:
    """The second pass finds the prompts in the cache; the connection idles and goes on."""
    server = Child(exported_pair, "--context", "512", EDGE_MTP_CACHE=str(tmp_path), LD_PRELOAD=library)
    try:
        assert [send(server, "POST", CHAT, body)[0] for body in BODIES * 2] == [200] * 8
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        for body in BODIES[:2]:
            connection.request("POST", CHAT, json.dumps(body).encode())
            response = connection.getresponse()
            assert (response.status, b'"choices"' in response.read()) == (200, True)
            time.sleep(0.5)
        connection.close()
        assert send(server, "GET", "/health")[2] == {"status": "ok", "running": 0, "waiting": 0, "loaded": True}
    finally:
        assert server.end() == 0, server.lines
    assert not [line for line in server.lines if "Traceback" in line]
