"""Any order of calls and any suspension ends in the text that a request has alone, or in one clear exception."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_runtime import Chat, LoadOptions, RequestError, Session, Sessions, open_sessions
from edge_runtime.session.generation import PREFILL_ROWS, Generation
from scripted import VOCABULARY, SavableScriptedTarget, plain_greedy, scripted_sessions

PROMPTS = ("class Stack:\n    def push(", "def add(a, b):\n    return", "import os\n\nfor name in os.", "# The quick brown fox")
MESSAGES = ("What is a stack?", "Write a loop.", "Hello!")
MAXIMUM = 24
ACTS = (
    *("generate", "piece", "text") * 3,
    *("event", "round", "batch", "say", "event", "read", "reset", "profit", "forget"),
)
# Of a worker that has the decoder to itself.
STEPS = ("join", "step", "step", "remove")


REFUSALS = ("another request began", "is closed", "the chat went on", "cannot share a sequence", "was removed")


@contextlib.contextmanager
def refusals(counts: Counter[str]) -> Iterator[None]:
    """Takes a RequestError that says why something cannot go on; any other error is a failure."""
    try:
        yield
    except RequestError as error:
        if not any(words in str(error) for words in REFUSALS):
            raise
        counts["refused"] += 1


class World:
    """Sessions with the requests and answers that were begun on them. `alone` are the texts of requests that had a session of their own."""

    def __init__(self, sessions: Sessions, chance: random.Random, alone: dict[Any, str], chats: list[Chat]) -> None:
        self.sessions, self.chance, self.alone, self.chats = sessions, chance, alone, chats
        self.requests: list[tuple[str, Generation, Iterator[str]]] = []
        self.answers: list[tuple[str, Any]] = []
        self.counts: Counter[str] = Counter()

    def act(self, name: str) -> None:
        """Does one thing. Any error but RequestError is a failure; so is a text that is not the one alone."""
        with refusals(self.counts):
            getattr(self, f"_{name}")()
            self.counts[name] += 1

    def check(self) -> None:
        """What ended has its own text; what did not has the beginning of it."""
        for prompt, generation, _ in self.requests:
            text = generation.text() if generation.finish_reason else "".join(generation._pieces)
            assert self.alone[prompt].startswith(text), (prompt, text)
            if generation.finish_reason:
                assert text == self.alone[prompt]
                self.counts["ended"] += 1
        for message, answer in self.answers:
            assert self.alone[message].startswith(answer.text), (message, answer.text)
            if answer.finish in ("stop", "length"):
                assert answer.text == self.alone[message]
                self.counts["answered"] += 1

    def _generate(self) -> None:
        prompt = self.chance.choice(PROMPTS)
        session: Session = self.chance.choice(self.sessions.sessions)
        generation = session.generate(prompt, max_tokens=MAXIMUM, draft_length=self.chance.choice((0, 1, 3, 6)))
        self.requests.append((prompt, generation, iter(generation)))

    def _piece(self) -> None:
        if self.requests:
            next(self.chance.choice(self.requests[-4:])[2], None)

    def _round(self) -> None:
        if self.requests:
            next(self.chance.choice(self.requests[-4:])[1].rounds(), None)

    def _text(self) -> None:
        if self.requests:
            prompt, generation, _ = self.chance.choice(self.requests[-2:])
            assert generation.text() == generation.text() == self.alone[prompt]

    def _batch(self) -> None:
        chosen = [item for _, item, _ in self.chance.sample(self.requests, min(2, len(self.requests)))]
        for _ in self.sessions.run(chosen):
            if self.chance.random() < 0.2:
                return

    def _join(self) -> None:
        if self.requests:
            self.sessions.decoder.join(self.chance.choice(self.requests[-4:])[1])

    def _step(self) -> None:
        self.sessions.decoder.step()

    def _remove(self) -> None:
        if running := self.sessions.decoder.running:
            self.sessions.decoder.remove(self.chance.choice(running))

    def _say(self) -> None:
        message = self.chance.choice(MESSAGES)
        chat = self.chance.choice(self.chats)
        with chat.session.claim.lock.held():  # the text alone is that of a first message
            chat.reset()
            self.answers.append((message, chat.say(message)))

    def _event(self) -> None:
        if self.answers:
            next(self.chance.choice(self.answers[-3:])[1], None)

    def _read(self) -> None:
        if self.answers:
            message, answer = self.chance.choice(self.answers)
            if answer.read() != self.alone[message]:
                assert answer.finish == "interrupted"

    def _reset(self) -> None:
        self.chance.choice(self.chats).reset()

    def _profit(self) -> None:
        self.chance.choice(self.sessions.sessions).profit()

    def _forget(self) -> None:
        if len(self.requests) > 5:
            del self.requests[0]


Opened = Callable[[], tuple[Sessions, dict[Any, str]]]


@pytest.fixture(scope="module", params=["llama", "llama-3", "onnx"])
def opened(request: pytest.FixtureRequest, exported_pair: Path, probe_memory: None) -> Opened:
    """Opens a bundle anew for each example; the texts alone are computed once."""
    kind, _, count = request.param.partition("-")
    if kind == "llama":
        pytest.importorskip("llama_cpp")
        folder, backend = exported_pair, "llama"
    else:
        folder, backend = request.getfixturevalue("onnx_pair")("f32"), "onnx"

    def open_bundle() -> Sessions:
        return open_sessions(folder, int(count or 1), context=256, threads=1, backend=backend)

    alone: dict[Any, str] = {}
    with open_bundle() as sessions:
        session = sessions.sessions[0]
        for prompt in PROMPTS:
            alone[prompt] = session.generate(prompt, max_tokens=MAXIMUM, draft_length=0).text()
        for message in MESSAGES:
            alone[message] = chat_on(session).say(message).read()
    return lambda: (open_bundle(), alone)


def chat_on(session: Session) -> Chat:
    return Chat(session, max_tokens=MAXIMUM, draft_length=3, reuse_prefix=False)


@pytest.mark.parametrize("seed", range(3))
def test_calls_in_any_order(opened: Opened, seed: int) -> None:
    sessions, alone = opened()
    chance = random.Random(seed)
    world = World(sessions, chance, alone, [chat_on(chance.choice(sessions.sessions)) for _ in range(2)])
    for _ in range(80):
        world.act(chance.choice(ACTS + STEPS))
    world.check()
    sessions.close()
    for act in ACTS[:-1]:  # after the end nothing runs, and nothing crashes
        world.act(act)
    world.check()
    print(dict(world.counts))
    assert world.counts["refused"] >= 1
    assert world.counts["ended"] >= 1


@pytest.mark.parametrize("seed", range(2))
def test_threads_that_share_sessions(opened: Opened, seed: int) -> None:
    sessions, alone = opened()
    failures: list[BaseException] = []
    worlds = [World(sessions, random.Random(10 * seed + i), alone, [chat_on(sessions.sessions[0])]) for i in range(3)]

    def work(world: World) -> None:
        try:
            for _ in range(25):
                world.act(world.chance.choice(ACTS))
        except BaseException as error:  # noqa: BLE001 - the thread that tests reports it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    if seed:
        sessions.close()  # while they run
    for thread in threads:
        thread.join()
    assert failures == []
    for world in worlds:
        world.check()
    sessions.close()


def test_threads_that_ask_for_whole_texts_wait_for_each_other(opened: Opened) -> None:
    sessions, alone = opened()
    texts: dict[str, str] = {}

    def ask(prompt: str) -> None:
        texts[prompt] = sessions.sessions[0].generate(prompt, max_tokens=MAXIMUM).text()

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    with sessions:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {prompt: alone[prompt] for prompt in PROMPTS}


MOVES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(("generate", "round", "round", "text", "run", "add", "join", "step", "step", "remove", "close-session", "close")),
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
        st.integers(1, 25),
        st.integers(0, 6),
    ),
    min_size=8,
    max_size=60,
)


ON_ONE: dict[str, Callable[[Sessions, Generation], object]] = {
    "round": lambda _, item: next(item.rounds(), None),
    "text": lambda _, item: item.text(),
    "run": lambda sessions, item: list(sessions.run([item])),
    "add": lambda sessions, item: sessions.decoder.add(item),
    "join": lambda sessions, item: sessions.decoder.join(item),
    "remove": lambda sessions, item: sessions.decoder.remove(item),
}


@settings(max_examples=150, deadline=None)
@given(moves=MOVES)
# One that the decoder runs is iterated to its end; another one of its session begins.
@example(
    [(1, "generate", [0], 1, 0), (0, "add", [0], 1, 0), (1, "generate", [0, 0], 1, 0), (0, "round", [0], 2, 0), (0, "round", [0], 1, 0)]
)
# Another one of its session begins while it runs.
@example([(0, "generate", [0], 2, 0), (0, "generate", [1], 1, 0), (0, "round", [0], 2, 0), (0, "add", [0], 2, 0), (0, "round", [0], 1, 0)])
def test_scripted_calls_in_any_order(moves) -> None:
    """The same on scripted sequences, where an example takes a millisecond."""
    _, sessions = scripted_sessions(3, context=64)
    begun: list[tuple[Generation, list[int], int]] = []
    for number, move, prompt, maximum, draft_length in moves:
        session = sessions.sessions[number]
        item = begun[(len(prompt) * maximum) % len(begun)][0] if begun else None
        with refusals(Counter()):
            match move:
                case "generate":
                    begun.append((session.generate(prompt, max_tokens=maximum, draft_length=draft_length), prompt, maximum))
                case "close-session":
                    session.close()
                case "close":
                    sessions.close()
                case "step":
                    sessions.decoder.step()
                case _ if item:
                    ON_ONE[move](sessions, item)
        assert move != "remove" or item not in sessions.decoder.running
        for running in sessions.decoder.running:
            with contextlib.suppress(RequestError):
                running.require_claim()  # one whose session has begun another is refused by the next step
                if running.tokens:  # before, the rows may still be those of the request before
                    text = [*running.prompt, *running.tokens]
                    assert running.target.tokens.tolist() == text[: running.target.length], "rows of another's tokens"
    for generation, prompt, maximum in begun:
        alone = plain_greedy(prompt, maximum)
        assert generation.tokens == alone[: len(generation.tokens)]
        if generation.finish_reason == "length":
            assert generation.tokens == alone


def swapped(sessions: Sessions, requests: Sequence[Generation], seed: int) -> int:
    """Runs requests, of which there are more than sessions: each has one for some rounds. Returns how often one was suspended."""
    chance, count = random.Random(seed), 0
    waiting, on = [*requests], dict[int, Generation]()
    while waiting or on:
        for place, session in enumerate(sessions.sessions):
            if place not in on and waiting:
                on[place] = waiting.pop(chance.randrange(len(waiting)))
                session.resume(on[place])
                sessions.decoder.join(on[place])
        for _ in range(chance.randrange(1, 8)):
            sessions.decoder.step()
            assert not sessions.decoder.failures
        on = {place: request for place, request in on.items() if request in sessions.decoder.running}
        for place in [place for place in on if chance.random() < 0.7]:
            on[place].suspend()
            sessions.decoder.remove(on[place])
            waiting.append(on.pop(place))
            count += 1
    return count


@pytest.mark.parametrize("seed", range(5))
def test_scripted_requests_are_what_they_are_alone(seed: int) -> None:
    _, sessions = scripted_sessions(2, context=4096, kind=SavableScriptedTarget)
    prompts = [[1, 2, 3], [i % 17 for i in range(2 * PREFILL_ROWS + 100)], [4], [9, 9, 1, 5], [5] * 40]
    requests = [sessions.sessions[0].generate(prompt, max_tokens=60) for prompt in prompts]
    assert swapped(sessions, requests, seed) > 3
    assert [request.tokens for request in requests] == [plain_greedy(prompt, 60) for prompt in prompts]


@pytest.fixture(params=["llama", "onnx"])
def swapping(request: pytest.FixtureRequest, quantized_pair: Path, onnx_pair: Callable[..., Path]) -> Sessions:
    llama = request.param == "llama"
    bundle = quantized_pair if llama else onnx_pair("int4")
    with open_sessions(bundle, 3 if llama else 1, LoadOptions(backend=request.param, threads=1, context=1024, drafter="split")) as sessions:
        yield sessions


def test_real_requests_are_what_they_are_alone(swapping: Sessions) -> None:
    """Prompts of one piece and of several; texts beyond the sliding window; requests that begin on one session, whose policy learns."""
    first = swapping.sessions[0]
    if first.row_kernels is None:
        pytest.skip("rows are exact on the project's own kernels alone, which have no variant for this processor")
    prompts = [f"class Stack{number}:\n    def push(self, item):\n" + "x = 1\n" * (number * 30) for number in range(6)]
    alone = [first.generate(prompt, max_tokens=150).text() for prompt in prompts]
    requests = [first.generate(prompt, max_tokens=150) for prompt in prompts]
    assert swapped(swapping, requests, 1) > 3
    assert [request.text() for request in requests] == alone
    assert any(request.stats.accepted for request in requests)


def test_a_seed_draws_the_same_tokens() -> None:
    _, sessions = scripted_sessions(1, context=4096, kind=SavableScriptedTarget)
    (session,) = sessions.sessions
    options = {"max_tokens": 40, "temperature": 20.0, "seed": 3}
    alone = session.generate([1, 2, 3], **options)
    alone.text()
    requests = [session.generate([1, 2, 3], **options) for _ in range(3)]
    swapped(sessions, requests, 2)
    assert [request.tokens for request in requests] == [alone.tokens] * 3


def test_a_suspended_request_waits_for_its_session() -> None:
    _, sessions = scripted_sessions(1, kind=SavableScriptedTarget)
    (session,) = sessions.sessions
    request = session.generate([1, 2, 3], max_tokens=20)
    next(request.rounds())
    request.suspend()
    with pytest.raises(RequestError, match="another request began"):
        request.text()
    other = session.generate([4], max_tokens=5)
    assert other.text()
    session.resume(request)
    request.text()
    assert request.tokens == plain_greedy([1, 2, 3], 20)


def test_a_request_whose_rows_cannot_be_copied_goes_on() -> None:
    _, sessions = scripted_sessions(1)
    request = sessions.sessions[0].generate([1, 2, 3], max_tokens=20)
    next(request.rounds())
    with pytest.raises(RequestError, match="cannot copy the cache"):
        request.suspend()
    request.text()
    assert request.tokens == plain_greedy([1, 2, 3], 20)
