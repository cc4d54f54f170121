"""Of several keys none can fill the queue or take all turns."""

from __future__ import annotations

import http.client
import threading

import pytest

from chat_server import CHAT, HI, Scripted, asked, scripted_server, send, settled
from edge_runtime.server.engine.schedule import FairPool, Places
from edge_runtime.server.errors import ApiError
from polling import wait

KEYS = ("first", "second")
BODY = {"messages": HI, "temperature": 0}


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
    return asked(server, BODY, authorization=f"Bearer {key}")


def answer(connection: http.client.HTTPConnection) -> int:
    try:
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


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
        status, headers, body = send(server, "POST", CHAT, BODY, authorization="Bearer first")
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "key_queue_full", "2")
        status, headers, body = send(server, "POST", "/v1/messages", BODY, authorization="Bearer first")
        assert (status, body["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "2")
        other = ask(server, "second")
        assert wait(lambda: sum(server.worker.load()) == 5)
        assert wait(lambda: len(server.worker._waiting) + server.worker._inbox.qsize() == 4)
        going.set()
        assert [answer(connection) for connection in (other, *waiting)] == [200] * 5
        settled(server)
    assert order == [0, 1, 0, 0, 0]  # the second key's turn is right after the request that ran
