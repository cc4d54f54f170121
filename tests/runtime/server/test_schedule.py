"""Which request goes to which session, and when: no key fills the queue or waits for another's long answers, nobody for a slow reader."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from chat_server import CHAT, HI, Held, Scripted, asked, scripted_server, send, settled
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.server.engine import schedule
from edge_runtime.server.engine.jobs import MAX_UNREAD, Job
from edge_runtime.server.engine.schedule import MAX_PASSED_OVER, FairPool, Places, Slot, Turns, choose_slot
from edge_runtime.server.errors import ApiError
from edge_runtime.server.requests.completions import CompletionRequest
from polling import wait
from scripted import ScriptedTarget


def slot(number: int, cache: Sequence[int], last_used: int = 0) -> Slot:
    target = ScriptedTarget()
    target.prefill(cache)
    return Slot(number=number, target=target, last_used=last_used, client=0)


def job(*ids: int, seed: int | None = None) -> Job:
    sampling = SamplingParams(seed=seed)
    asked = CompletionRequest(prompt=ids, max_tokens=1, sampling=sampling, stop=())
    made = Job(asked, lambda _: None)
    made.prompt = list(ids)
    return made


def chosen(slots: Sequence[Slot], waiting: Sequence[Job]) -> tuple[int, int]:
    item, other = choose_slot(slots, waiting, lambda job: not job.request.repeatable)
    return item.number, waiting.index(other)


PROMPT = list(range(1, 60))  # the scripted target goes back 12 rows at most


@pytest.mark.parametrize(
    ("caches", "waiting", "choice"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [9]], [job(1, 2, 3, 4, 5, 6, 7)], (1, 0)),
        ([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [9]], [job(8), job(1, 2, 3, 4, 5, 6, 7)], (1, 1)),
        ([[1, 2, 3, 4], [5]], [job(1, 6, 7, 8)], (1, 0)),
        ([[], []], [job(1, 2), job(3, 4)], (1, 0)),
        ([PROMPT, []], [job(*PROMPT[:30], 77)], (1, 0)),
        ([[1, 2, 3], []], [job(1, 2, 3, 4, seed=1)], (1, 0)),
    ],
    ids=["the longest prefix", "before the first come", "a short prefix", "no prefix", "rows that are gone", "a seed"],
)
def test_the_longest_prefix_wins_or_the_session_used_longest_ago(caches, waiting, choice):
    """The first session was used last."""
    slots = [slot(number, cache, last_used=9 - number) for number, cache in enumerate(caches)]
    assert chosen(slots, waiting) == choice


def test_nobody_is_passed_over_for_ever():
    slots, first = [slot(0, [1, 2, 3])], job(7, 8)
    for _ in range(MAX_PASSED_OVER):
        assert chosen(slots, [first, job(1, 2, 3, 4)]) == (0, 1)
    assert chosen(slots, [first, job(1, 2, 3, 4)]) == (0, 0)


KEYS = ("first", "second")
LONG = "".join(f"word {number} " for number in range(150))


def statuses_of(places: Places, *clients: int) -> list[int]:
    """The status that each of these, in turn, is refused with, 200 for a place."""

    def take(client: int) -> int:
        try:
            places.take(client)
        except ApiError as error:
            return error.status
        return 200

    return [take(client) for client in clients]


@pytest.mark.parametrize(
    ("clients", "order", "statuses"),
    [
        (1, [0, 0, 0, 0], [200, 200, 200, 503]),
        (2, [0, 0, 0, 1, 1], [200, 200, 429, 200, 503]),
        (2, [1, 0, 0, 0], [200, 200, 200, 503]),
        (3, [0, 0, 1, 1, 2], [200, 429, 200, 429, 200]),
        (5, [0, 0, 1, 2, 3], [200, 429, 200, 200, 503]),
    ],
)
def test_a_key_leaves_a_place_for_each_that_has_none(clients: int, order: list[int], statuses: list[int]) -> None:
    assert statuses_of(Places(3, clients), *order) == statuses


def test_a_place_that_is_given_back_is_free() -> None:
    places = Places(3, 2)
    assert statuses_of(places, 0, 0, 0) == [200, 200, 429]
    places.give_back(0)
    assert statuses_of(places, 0, 1) == [200, 200]
    assert places.total() == 3


def test_more_answers_than_there_ever_are_places_are_no_reason_to_try_again() -> None:
    with pytest.raises(ApiError, match="3 answers; this server queues at most 2") as caught:
        Places(3, 2).take(0, 3)
    assert caught.value.status == 400


def test_threads_take_work_of_each_client_in_turn() -> None:
    pool, going, done = FairPool(1, "test"), threading.Event(), []
    pool.submit(0, going.wait)
    futures = [
        pool.submit(client, lambda name=name: done.append(name)) for client, name in [(0, "a"), (0, "b"), (0, "c"), (1, "d"), (2, "e")]
    ]
    assert futures[1].cancel()
    going.set()
    pool.shutdown()
    assert done == ["a", "d", "e", "c"]


def test_an_error_is_the_result_of_its_work_alone() -> None:
    pool = FairPool(1, "test")
    failing, other = pool.submit(0, lambda: 1 // 0), pool.submit(0, lambda: 1)
    pool.shutdown()
    assert isinstance(failing.exception(), ZeroDivisionError)
    assert other.result() == 1


def ask(server: Scripted, key: str) -> http.client.HTTPConnection:
    return asked(server, {"messages": HI}, authorization=f"Bearer {key}")


def text(connection: http.client.HTTPConnection) -> str:
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    assert response.status == 200, body
    return body["choices"][0]["message"]["content"]


def short_chat(server: Scripted, key: str = "first") -> str:
    _, _, body = send(server, "POST", CHAT, {"messages": HI, "max_tokens": 4}, authorization=f"Bearer {key}")
    return str(body["choices"][0]["message"]["content"])


def test_a_key_that_sends_all_it_can_delays_another_by_one_request() -> None:
    """Five places: the first key gets four, the second the fifth, and the next turn."""
    order: list[int] = []
    with scripted_server("Hello.", keys=KEYS) as server:
        begun, going = threading.Event(), threading.Event()

        def before_forward() -> None:
            begun.set()
            going.wait(30)

        server.batch.before_forward = before_forward
        give = server.worker._give
        server.worker._give = lambda slot, client: (order.append(client), give(slot, client))  # type: ignore[method-assign]
        waiting = [ask(server, "first") for _ in range(4)]
        assert begun.wait(30)
        assert wait(lambda: sum(server.worker.load()) == 4)
        status, headers, body = send(server, "POST", CHAT, {"messages": HI}, authorization="Bearer first")
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "key_queue_full", "2")
        status, headers, body = send(server, "POST", "/v1/messages", {"messages": HI}, authorization="Bearer first")
        assert (status, body["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "2")
        other = ask(server, "second")
        assert wait(lambda: sum(server.worker.load()) == 5)
        assert wait(lambda: len(server.worker._waiting) + server.worker._inbox.qsize() == 4)
        going.set()
        assert [text(connection) for connection in (other, *waiting)] == ["Hello."] * 5
        settled(server)
    assert order == [0, 1, 0, 0, 0]  # the second key's turn is right after the request that ran


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


@contextlib.contextmanager
def slow_server(*replies: str, seconds: float = 0.003, **options: object) -> Iterator[Scripted]:
    """A server whose rounds take so long, whose rows can be copied."""
    with scripted_server(*replies, savable=True, **options) as server:
        server.batch.before_forward = lambda: time.sleep(seconds)
        yield server


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_short_chat_of_another_key_ends_long_before_long_answers(sessions: int) -> None:
    with slow_server(LONG, keys=KEYS, count=sessions, waiting=8) as server:
        long = [ask(server, "first") for _ in range(3)]
        assert wait(lambda: server.worker.load()[0] == sessions)
        for _ in range(3):
            assert short_chat(server, "second") == LONG[:4]
            assert sum(server.worker.load()) == 3, "the long answers are not there yet"
        server.batch.before_forward = lambda: None
        assert [text(connection) for connection in long] == [LONG] * 3
        settled(server)
        assert server.notes == []


def test_one_key_waits_for_its_own_answers() -> None:
    with slow_server(LONG, keys=["first"]) as server:
        long = ask(server, "first")
        assert wait(lambda: server.worker.load()[0] == 1)
        short_chat(server)
        assert server.worker.load() == (0, 0)
        assert text(long) == LONG


@pytest.mark.parametrize("options", [{"alone": True, "deterministic": True}, {"savable": False}], ids=["alone", "not copied"])
def test_where_nothing_is_suspended_the_answer_comes_first(options: dict[str, bool]) -> None:
    with scripted_server(LONG, keys=KEYS, **{"savable": True, **options}) as server:
        server.batch.before_forward = lambda: time.sleep(0.001)
        long = ask(server, "first")
        assert wait(lambda: server.worker.load()[0] == 1)
        assert (short_chat(server, "second"), server.worker.load()) == (LONG[:4], (0, 0))
        assert text(long) == LONG


def test_a_client_that_leaves_while_its_request_is_suspended_frees_its_place() -> None:
    with slow_server(LONG, keys=KEYS, seconds=0.01) as server:
        long = ask(server, "first")
        assert wait(lambda: server.worker.load()[0] == 1)
        other = ask(server, "second")
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
