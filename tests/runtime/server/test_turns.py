"""No key waits for another key's long answers, and no client for another client that reads slowly."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from chat_server import CHAT, HI, Held, Scripted, asked, scripted_server, send, settled
from edge_runtime.server.engine import schedule
from edge_runtime.server.engine.jobs import MAX_UNREAD
from edge_runtime.server.engine.schedule import Turns
from polling import wait

KEYS = ("first", "second")
LONG = "".join(f"word {number} " for number in range(150))


@dataclass(frozen=True)
class Holding:
    client: int
    since: float = 0.0
    stalled: bool = False


@pytest.mark.parametrize(
    ("held", "waiting", "suspended"),
    [
        ([Holding(0)], 1, 0),
        ([Holding(0)], 0, None),
        ([Holding(0, since=9.9)], 1, None),
        ([Holding(0, since=3), Holding(0, since=2), Holding(0, since=4)], 1, 1),
        ([Holding(0), Holding(0), Holding(1)], 1, None),
        ([Holding(0), Holding(0), Holding(0), Holding(1)], 1, 0),
        ([Holding(0), Holding(1)], 2, 0),
        ([Holding(0), Holding(1, since=1), Holding(1, since=2)], 2, 1),
        ([Holding(0), Holding(0, since=5, stalled=True)], 0, 1),
    ],
    ids=[
        "the only one",
        "not for its own key",
        "not before its turn is over",
        "the one that ran longest",
        "not for as many sessions less one",
        "for two less",
        "of keys with one each the first",
        "of the key with most",
        "one that waits for its reader, for anybody",
    ],
)
def test_who_gives_way(held: Sequence[Holding], waiting: int, suspended: int | None) -> None:
    chosen = Turns(len(held)).gives_way(held, waiting, 10.0)
    assert chosen == (None if suspended is None else held[suspended])


def test_the_key_with_fewest_sessions_is_next_and_of_equals_the_one_that_waits_longest() -> None:
    turns = Turns(4)
    assert turns.next_of([1, 0], []) == 1
    turns.took(1)
    assert turns.next_of([1, 0], []) == 0
    assert turns.next_of([1, 0], [Holding(0)]) == 1


def test_a_turn_is_long_where_copies_of_rows_take_long() -> None:
    turns, seconds = Turns(2), []
    for swap in (0.001, 0.02, 9.0):
        turns.swapped(swap)
        seconds.append(turns.seconds)
    assert seconds == [schedule.SHORTEST_TURN, 20 * 0.02, schedule.LONGEST_TURN]


@contextmanager
def slow_server(*replies: str, seconds: float = 0.003, **options: object) -> Iterator[Scripted]:
    """A server whose rounds take so long, whose rows can be copied."""
    with scripted_server(*replies, savable=True, **options) as server:
        server.batch.before_forward = lambda: time.sleep(seconds)
        yield server


def text(connection: http.client.HTTPConnection) -> str:
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    assert response.status == 200, body
    return body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_short_chat_of_another_key_ends_long_before_long_answers(sessions: int) -> None:
    with slow_server(LONG, keys=KEYS, count=sessions, waiting=8) as server:
        long = [asked(server, {"messages": HI}, authorization="Bearer first") for _ in range(3)]
        assert wait(lambda: server.worker.load()[0] == sessions)
        for _ in range(3):
            status, _, body = send(server, "POST", CHAT, {"messages": HI, "max_tokens": 4}, authorization="Bearer second")
            assert (status, body["choices"][0]["message"]["content"]) == (200, LONG[:4])
            assert sum(server.worker.load()) == 3, "the long answers are not there yet"
        server.batch.before_forward = lambda: None
        assert [text(connection) for connection in long] == [LONG] * 3
        settled(server)
        assert server.notes == []


def test_one_key_waits_for_its_own_answers() -> None:
    with slow_server(LONG, keys=["first"]) as server:
        long = asked(server, {"messages": HI}, authorization="Bearer first")
        assert wait(lambda: server.worker.load()[0] == 1)
        send(server, "POST", CHAT, {"messages": HI, "max_tokens": 4}, authorization="Bearer first")
        assert server.worker.load() == (0, 0)
        assert text(long) == LONG


@pytest.mark.parametrize("options", [{"alone": True, "deterministic": True}, {"savable": False}], ids=["alone", "not copied"])
def test_where_nothing_is_suspended_the_answer_comes_first(options: dict[str, bool]) -> None:
    with scripted_server(LONG, keys=KEYS, **{"savable": True, **options}) as server:
        server.batch.before_forward = lambda: time.sleep(0.001)
        long = asked(server, {"messages": HI}, authorization="Bearer first")
        assert wait(lambda: server.worker.load()[0] == 1)
        status, _, _ = send(server, "POST", CHAT, {"messages": HI, "max_tokens": 4}, authorization="Bearer second")
        assert (status, server.worker.load()) == (200, (0, 0))
        assert text(long) == LONG


def test_a_client_that_leaves_while_its_request_is_suspended_frees_its_place() -> None:
    with slow_server(LONG, keys=KEYS, seconds=0.01) as server:
        long = asked(server, {"messages": HI}, authorization="Bearer first")
        assert wait(lambda: server.worker.load()[0] == 1)
        other = asked(server, {"messages": HI}, authorization="Bearer second")
        assert wait(lambda: server.worker._suspended)
        long.close()
        assert wait(lambda: sum(server.worker.load()) == 1)
        server.batch.before_forward = lambda: None
        assert text(other) == LONG
        settled(server)


@pytest.mark.parametrize(("keys", "exact", "short"), [(KEYS, True, True), (KEYS, False, False), (KEYS[:1], True, False)])
def test_a_key_waits_for_short_pieces_of_anothers_prompt_where_that_changes_no_row(keys: Sequence[str], exact: bool, short: bool) -> None:
    with scripted_server("Hello.", keys=keys, exact=exact) as server:
        pieces = Held(server.batch.targets[0], "prefill", lambda _: False).arguments
        body = {"messages": [{"role": "user", "content": "a" * 1000}]}
        assert send(server, "POST", CHAT, body, authorization=f"Bearer {keys[0]}")[0] == 200
    assert (len(pieces[0]) < 100) == short


def test_an_operator_limits_answers() -> None:
    with scripted_server("Hello there.", max_tokens=5) as server:
        for asked_for, words in ((None, "Hello"), (9, "Hello"), (2, "He")):
            _, _, body = send(server, "POST", CHAT, {"messages": HI} | ({"max_tokens": asked_for} if asked_for else {}))
            choice = body["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (words, "length")


SCROLL = "".join(f"line {number}\n" for number in range(70))
SMALL = 4096


class Reader:
    """A client that reads its answer, of more bytes than buffers hold, when it is told to."""

    def __init__(self, server: Scripted, **fields: object) -> None:
        address = urlsplit(server.url)
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        own.settimeout(60)
        own.connect((address.hostname, address.port))
        self.connection = http.client.HTTPConnection(address.netloc)
        self.connection.sock = own
        body = {"messages": HI, "logprobs": True, "top_logprobs": 20, **fields}
        self.connection.request("POST", CHAT, json.dumps(body).encode())
        self._streams = bool(fields.get("stream"))

    def text(self) -> str:
        with contextlib.closing(self.connection):
            body = self.connection.getresponse().read()
        if not self._streams:
            return str(json.loads(body)["choices"][0]["message"]["content"])
        events = [json.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def rounds_of(server: Scripted) -> int:
    return len(server.batch.targets[0].rows)


def stopped(server: Scripted) -> bool:
    """Whether no round runs any more, of an answer that has begun."""
    before = rounds_of(server)
    time.sleep(0.2)
    return MAX_UNREAD <= before == rounds_of(server)


def short_chat(server: Scripted) -> str:
    return str(send(server, "POST", CHAT, {"messages": HI, "max_tokens": 4})[2]["choices"][0]["message"]["content"])


def test_the_rounds_of_an_answer_stop_until_its_reader_goes_on() -> None:
    with scripted_server(SCROLL, buffer=SMALL) as server:
        reader = Reader(server, stream=True)
        assert wait(lambda: stopped(server))
        assert rounds_of(server) < len(SCROLL) // 2
        assert server.worker.load() == (1, 0), "its place is taken"
        assert reader.text() == SCROLL
        assert rounds_of(server) == len(SCROLL) + 1
        settled(server)


def test_others_have_the_session_of_a_slow_reader() -> None:
    with scripted_server(SCROLL, savable=True, buffer=SMALL) as server:
        reader = Reader(server, stream=True)
        assert wait(lambda: stopped(server))
        assert [short_chat(server), short_chat(server)] == ["line", "line"]
        assert sum(server.worker.load()) == 1
        assert reader.text() == SCROLL
        settled(server)


def test_a_slow_reader_that_leaves_is_forgotten() -> None:
    with scripted_server(SCROLL, buffer=SMALL) as server:
        reader = Reader(server, stream=True)
        assert wait(lambda: stopped(server))
        reader.connection.close()
        settled(server)
        assert short_chat(server) == "line"


def test_a_whole_answer_keeps_its_place_until_it_is_sent() -> None:
    with scripted_server(SCROLL, buffer=SMALL) as server:
        reader = Reader(server)
        assert wait(lambda: server.worker.load() == (0, 1)), "its session is free, its place is not"
        assert short_chat(server) == "line"
        assert sum(server.worker.load()) == 1
        assert reader.text() == SCROLL
        settled(server)


def test_answers_of_one_request_that_are_read_end_whatever_their_number() -> None:
    with scripted_server("Hello there. " * 20, count=2, waiting=8) as server:
        _, _, body = send(server, "POST", CHAT, {"messages": HI, "n": 6})
        assert [choice["message"]["content"] for choice in body["choices"]] == ["Hello there. " * 20] * 6
        settled(server)
