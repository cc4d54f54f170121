"""Connections that send no whole request, or read no answer, are broken off: they need no key, and there is room for few."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from chat_server import Held, Scripted, scripted_server
from edge_runtime.server.http import body as http_body
from edge_runtime.server.http import connections
from edge_runtime.server.http.guard import Guard
from polling import wait

HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
PAGE = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{"


class Limits:
    """The seconds and bytes of the server's connections, long for a busy machine; a change counts from the next connection on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def set(self, *, head: float = 600, unread: float = 600, body: float = 600, arriving: int = http_body.MAX_ARRIVING) -> None:
        """Seconds for a head, for an answer that is not read, and for a body; bytes of all bodies that have not arrived."""
        self._patch.setattr(connections, "HEAD_SECONDS", head)
        self._patch.setattr(connections, "UNREAD_SECONDS", unread)
        self._patch.setattr(http_body, "READ_SECONDS", body)
        self._patch.setattr(http_body, "MAX_ARRIVING", arriving)


@pytest.fixture
def limits(monkeypatch) -> Limits:
    limits = Limits(monkeypatch)
    limits.set()
    return limits


@pytest.fixture
def server(limits):
    with scripted_server("hello") as scripted:
        yield scripted


@pytest.fixture
def narrow(limits):
    """A server with room for four connections; the system keeps little of what is not read."""
    with scripted_server("hello", buffer=4096, connections=4) as scripted:
        yield scripted


def connected(server: Scripted) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def connected_without_room(server: Scripted) -> socket.socket:
    item = socket.socket()
    item.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    address = urlsplit(server.url)
    item.connect((address.hostname, address.port))
    return item


def broken_off(connection: socket.socket, data: bytes, pause: float = 0.05) -> bool:
    """Whether the server ends the connection while more and more is sent."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            connection.sendall(data)
        except ConnectionError:
            return True
        except TimeoutError:
            continue
        time.sleep(pause)
    return False


def test_the_end_of_a_head_is_not_waited_for(server, limits):
    limits.set(head=0.3)
    with connected(server) as silent, connected(server) as slow:
        assert broken_off(slow, b"G"), "a byte now and then does not put it off"
        assert silent.recv(1) == b""


@pytest.mark.parametrize("begun", [HEALTH, HALF], ids=["a head", "a body"])
def test_connections_without_a_request_keep_nobody_out(server, begun):
    with contextlib.ExitStack() as held:
        for item in [held.enter_context(connected(server)) for _ in range(100)]:  # there is room for 64
            with contextlib.suppress(ConnectionError):
                item.sendall(begun)
        time.sleep(0.2)  # all have arrived
        for _ in range(3):
            with connected(server) as item:
                item.sendall(HEALTH + b"\r\n")
                assert item.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_body_that_nobody_asked_for_is_not_waited_for(server, limits):
    limits.set(head=0.3, body=0.3)
    with connected(server) as item:
        item.sendall(HEALTH + b"Content-Length: 1000\r\n\r\n")
        assert item.recv(4096).startswith(b"HTTP/1.1 200")
        assert broken_off(item, b"x")


def test_a_slow_body_is_refused(server, limits):
    limits.set(body=0.3)
    with connected(server) as item:
        item.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{")
        assert item.recv(4096).startswith(b"HTTP/1.1 408")


def test_who_does_not_read_is_not_waited_for(narrow, limits):
    limits.set(unread=0.3)
    with connected_without_room(narrow) as item:
        item.settimeout(0.1)
        assert broken_off(item, PAGE)


def test_connections_that_read_no_answer_keep_nobody_out(narrow):
    """100 of them, which need no key, got everybody else status 503 for 30 seconds."""
    with contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(connected_without_room(narrow)).sendall(PAGE * 8)
            time.sleep(0.5)  # the server has filled what the system keeps
        for _ in range(3):
            assert answered(narrow, HEALTH + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_a_connection_has_a_limited_number_of_requests_ahead(server):
    """160 of them with 4000 each had 40,000 pages served, and everybody else got status 503 for 20 seconds."""
    answer = answered(server, (HEALTH + b"\r\n") * 400)
    assert answer.count(b"HTTP/1.1 200") == connections.MAX_PIPELINED
    few = (HEALTH + b"\r\n") * (connections.MAX_PIPELINED - 1) + HEALTH + b"Connection: close\r\n\r\n"
    assert answered(server, few).count(b"HTTP/1.1 200") == connections.MAX_PIPELINED


def test_a_connection_that_sends_on_after_its_last_answer_is_not_reset(server, limits):
    """A reset drops answers that the client has not read."""
    with connected(server) as item:
        item.sendall((HEALTH + b"\r\n") * 30_000)  # more than is read at once
        answers = b"".join(iter(lambda: item.recv(4096), b""))
    assert answers.count(b"HTTP/1.1 200") == connections.MAX_PIPELINED
    limits.set(head=0.1)
    with connected(server) as item:
        assert broken_off(item, (HEALTH + b"\r\n") * 100, 0), "what is sent after it is not read for ever"


def test_where_there_is_no_room_the_connection_that_holds_most_is_ended(narrow):
    content = json.dumps({"content": "a"}).encode()
    waits = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
    with contextlib.ExitStack() as ended:
        encoding = Held(narrow.vocabulary, "encode")
        ended.callback(encoding.going.set)
        held = [ended.enter_context(connected(narrow)) for _ in range(3)]
        for ahead, item in zip((1, 9, 0), held, strict=True):
            item.sendall(waits + (HEALTH + b"\r\n") * ahead)
        assert wait(lambda: narrow.worker.load() == (0, 3))
        assert answered(narrow, HEALTH + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert held[1].recv(1) == b""
        encoding.going.set()
        assert [item.recv(4096)[:12] for item in (held[0], held[2])] == [b"HTTP/1.1 200"] * 2


def test_a_connection_is_kept_for_requests_that_come_in_time(server, limits):
    limits.set(head=4)
    with connected(server) as item:
        for _ in range(6):
            item.sendall(HEALTH + b"\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                piece = item.recv(4096)
                assert piece, "the connection was broken off"
                answer += piece
            time.sleep(0.8)


def test_bodies_that_do_not_arrive_are_limited_together_and_small_ones_have_room(server, limits):
    """The oldest of the large ones are given up, so nobody is kept out by bodies that are never sent to their ends."""
    limits.set(arriving=1 << 20)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
    with contextlib.ExitStack() as held:
        large = [held.enter_context(connected(server)) for _ in range(6)]
        for connection in large:
            connection.sendall(head % (1 << 20) + b" " * (400 << 10))
            time.sleep(0.2)  # it has arrived
        for connection in large[:4]:
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")
        small = held.enter_context(connected(server))
        small.sendall(head % 2 + b"{}")
        assert small.recv(4096).startswith(b"HTTP/1.1 400")
        large[5].sendall(b" " * ((1 << 20) - (400 << 10)))
        assert large[5].recv(4096).startswith(b"HTTP/1.1 400")
        assert large[4].recv(4096).startswith(b"HTTP/1.1 408")


def answered(server: Scripted, *pieces: bytes) -> bytes:
    answer = b""
    with connected(server) as item, contextlib.suppress(ConnectionError):
        for piece in pieces:
            item.sendall(piece)
        while piece := item.recv(4096):
            answer += piece
    return answer


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


def in_chunks(body: bytes, size: int) -> bytes:
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def test_a_body_in_very_many_small_chunks_is_refused(server):
    """Each takes the event loop as long as a short request: 600 kB of them took more than two seconds."""
    body = json.dumps({"content": "a" * 2000}).encode()
    answer = answered(server, CHUNKED + in_chunks(body, 1))
    assert answered(server, CHUNKED + in_chunks(body[:600] + b'"}', 2)).startswith(b"HTTP/1.1 200")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"small chunks; send few headers, and the body with a Content-Length" in answer
    large = json.dumps({"content": "a" * 2000, "prompt": " " * 2_000_000}).encode()
    assert answered(server, CHUNKED + in_chunks(large, 1500)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_a_head_of_very_many_lines_is_refused(server, end):
    head = end.join([b"POST /tokenize HTTP/1.1", b"Host: 127.0.0.1", b"Connection: close"])
    body = json.dumps({"content": "a", "tools": list(range(500))}, indent=1).encode()
    length = b"Content-Length: %d" % len(body)
    refused = answered(server, end.join([head, *[b"a:"] * 100, length, b"", body]))
    assert b"has a head of more than 100 lines" in refused
    # The lines of a body that comes with its head, or after a half of it, are none of the head.
    whole = end.join([head, *[b"a:"] * 90, length, b"", body])
    assert answered(server, whole).startswith(b"HTTP/1.1 200")
    assert answered(server, whole[:300], whole[300:]).startswith(b"HTTP/1.1 200")


def test_a_body_of_two_lengths_is_refused(server):
    """What follows it in the same connection would be another request to a proxy."""
    hidden = HEALTH + b"Connection: close\r\n\r\n"
    both = CHUNKED.replace(b"Connection: close", b"content-length: %d" % (5 + len(hidden))) + b"0\r\n\r\n" + hidden
    answer = answered(server, both)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"both Content-Length and Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_a_head_of_many_bytes_is_refused(server):
    head = HEALTH + b"Connection: close\r\nA: "
    assert b"16384 bytes" in answered(server, head + b"a" * 20_000 + b"\r\n\r\n")
    assert answered(server, head + b"a" * 10_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "room"),
    [(1024, 4096, 1024, 82), (256, 4096, 274, 82), (256, -1, 274, 82), (256, 256, 256, 64), (64, 64, 64, 8), (-1, -1, -1, 82)],
)
def test_no_more_connections_are_taken_than_there_are_descriptors(monkeypatch, soft, hard, limit, room):
    """With 64 of them, connections that did nothing stopped the server, and it wrote a million lines in 20 seconds."""
    resource = pytest.importorskip("resource")
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    config = connections.server_config(Guard(None, hosts=None), 82)
    assert (config.limit_concurrency, limits[-1][0]) == (room, limit)
    assert 4 * config.backlog < connections._OTHER_DESCRIPTORS
