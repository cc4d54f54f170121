"""The draft store: what it keeps, for how long and for whom, files that are none, and requests that draft from it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from draft_store_stress import kept_texts, resurrected_texts
from edge_devices.files.temp_files import lock_open, locked
from edge_runtime.cli.run import main
from edge_runtime.drafting import draft_store
from edge_runtime.drafting.draft_store import HEADER, DraftStore, read_store
from edge_runtime.errors import RequestError
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from simulated_rounds import flat_costs

posix = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")


class Letters:
    """A vocabulary whose tokens are the text's characters."""

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        assert not add_bos
        return [ord(letter) for letter in text]


def store_at(path: Path, limit: int = 1 << 20) -> tuple[DraftStore, list[str]]:
    output: list[str] = []
    return DraftStore(path, Letters(), limit=limit, notify=output.append), output


def guessed(store: DraftStore, prompt: str, maximum: int = 5) -> str:
    return "".join(map(chr, store.source([ord(letter) for letter in prompt]).guess((), maximum).tokens))


@posix
def test_texts_are_kept_for_their_owner_alone_and_found_by_the_next_session(tmp_path):
    path = tmp_path / "memory"
    store, output = store_at(path)
    store.remember("the quick brown fox")
    assert path.stat().st_mode & 0o777 == 0o600
    again, _ = store_at(path)
    assert guessed(again, "a quick") == " brow"
    assert guessed(again, "zzz") == ""
    assert output == []


def test_a_copy_ends_with_its_text(tmp_path):
    store, _ = store_at(tmp_path / "memory")
    store.remember("one two")
    store.remember("three")
    assert guessed(store, "one t") == "wo"


def test_a_request_follows_its_own_tokens(tmp_path):
    store, _ = store_at(tmp_path / "memory")
    store.remember("abcdefgh")
    source = store.source([])
    source.add([ord("x"), ord("b"), ord("c")])
    assert [chr(token) for token in source.guess([ord("d")], 2).tokens] == ["e", "f"]
    assert source.guess([ord("z")], 2).tokens == ()


def test_the_oldest_texts_make_room(tmp_path):
    path = tmp_path / "memory"
    store, _ = store_at(path, limit=2000)
    for number in range(40):
        store.remember(f"{number} " + "x" * 90)
    assert path.stat().st_size <= 2100
    texts = read_store(path)
    assert texts[-1].startswith("39 ")
    assert not any(text.startswith("0 ") for text in texts)
    store.remember(texts[-1])
    store.remember("y" * 1500)
    assert read_store(path) == texts, "neither twice, nor more than half of the limit at once"


@posix
@pytest.mark.parametrize("content", [b"something else\n", b"\xff\xfe", b"edge-mtp memory 2\n"], ids=["other", "bytes", "later"])
def test_another_file_is_named_and_left_alone(tmp_path, content):
    path = tmp_path / "memory"
    path.write_bytes(content)
    path.chmod(0o600)
    store, output = store_at(path)
    store.remember("text")
    assert path.read_bytes() == content
    assert len(output) == 1
    assert "not used and not changed" in output[0]
    assert "\n" not in output[0]


@posix
@pytest.mark.parametrize(
    "rest",
    ["", "\n", "\n3\n", '\n"cut', f"\n{'[' * 10**5}\n", '\n"whole"\n"cu'],
    ids=["header", "empty", "number", "cut", "nested", "second"],
)
def test_what_a_killed_writer_left_is_skipped(tmp_path, rest):
    path = tmp_path / "memory"
    path.write_bytes(f"{HEADER}{rest}".encode())
    path.chmod(0o600)
    whole = ["whole"] if "whole" in rest else []
    store, output = store_at(path)
    assert len(store) == len(whole)
    store.remember("text")
    assert (read_store(path), output) == ([*whole, "text"], [])


@posix
def test_a_writer_killed_while_old_texts_make_room_loses_none_of_the_new(tmp_path):
    """The newest texts are copied over the oldest: cut that copy after each of its bytes."""
    path, texts = tmp_path / "memory", [f"{number} " + "x" * 90 for number in range(10)]
    content = "".join(f"{line}\n" for line in (HEADER, *map(json.dumps, texts))).encode()
    copied = b"".join(json.dumps(text).encode() + b"\n" for text in texts[-4:])
    path.touch(mode=0o600)
    for count in range(len(copied) + 1):
        begin = len(HEADER) + 1
        path.write_bytes(content[:begin] + copied[:count] + content[begin + count :])
        assert read_store(path)[-4:] == texts[-4:]


@posix
def test_a_file_of_another_user_is_not_used(tmp_path, monkeypatch):
    path = tmp_path / "memory"
    store_at(path)[0].remember("secret words")
    before, owner = path.read_bytes(), path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    store, output = store_at(path)
    store.remember("text")
    assert output == [
        f"the draft store {path} belongs to another user (number {owner}); name a file of your own; it is not used and not changed"
    ]
    assert (guessed(store, "secret"), path.read_bytes()) == ("", before)


@posix
def test_copies_that_killed_writers_of_earlier_versions_left_go(tmp_path):
    copy = tmp_path / f".memory.partial-{2**22 + 1}-{'0' * 16}"
    copy.write_text("secret words")
    store_at(tmp_path / "memory")[0].remember("text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["memory"]


@posix
def test_a_writer_that_was_stopped_does_not_hold_up_the_others(tmp_path, monkeypatch):
    """The first text waits for it, those after it do not; texts are remembered again when it lets go."""
    path = tmp_path / "memory"
    store, output = store_at(path)
    store.remember("text")
    waits: list[float] = []
    monkeypatch.setattr(draft_store, "lock_open", lambda file, seconds: (waits.append(seconds), lock_open(file))[1])
    with locked(path):
        for number in range(3):
            store.remember(f"more {number}")
    assert (read_store(path), waits) == (["text"], [draft_store.STILL_SECONDS, 0.0, 0.0])
    assert len(output) == 1
    assert "another process holds" in output[0]
    store.remember("again")
    assert read_store(path) == ["text", "again"]


@posix
def test_a_file_that_others_write_is_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "memory"
    store, output = store_at(path)
    store.remember("text")
    tries = iter(range(3))

    def other_writes(file: int, seconds: float) -> None:
        if (number := next(tries)) < 2:
            with path.open("a") as other:
                other.write(f'"other {number}"\n')
            raise BlockingIOError
        lock_open(file)

    monkeypatch.setattr(draft_store, "lock_open", other_writes)
    store.remember("more")
    assert (read_store(path), output) == (["text", "other 0", "other 1", "more"], [])


@posix
def test_writers_lose_nothing_and_what_is_forgotten_stays_so_under_kills(tmp_path):
    """A short run of the long check."""
    assert kept_texts(tmp_path / "kept", writers=4, texts=60) == 240
    assert resurrected_texts(tmp_path / "forgotten", forgets=30) == (30, 0)


@posix
def test_links_and_files_that_others_may_read_are_not_used(tmp_path):
    path, link = tmp_path / "memory", tmp_path / "link"
    store_at(path)[0].remember("secret words")
    link.symlink_to(path)
    assert len(store_at(link)[1]) == 1
    path.chmod(0o644)
    store, output = store_at(path)
    assert "chmod 600" in output[0]
    assert guessed(store, "secret") == ""


def test_what_is_forgotten_is_neither_drafted_nor_written_again(tmp_path):
    path = tmp_path / "memory"
    store, output = store_at(path)
    store.remember("secret words")
    assert guessed(store, "secret") == " word"
    path.unlink()
    assert guessed(store, "secret") == ""
    store.remember("other words")
    assert read_store(path) == ["other words"]
    path.unlink()
    store.remember("third text")
    assert (read_store(path), output) == (["third text"], [])


def test_two_that_use_one_file_take_over_each_others_texts(tmp_path):
    path = tmp_path / "memory"
    item, two = store_at(path)[0], store_at(path)[0]
    item.remember("the first text")
    two.remember("a second one")
    assert guessed(item, "a sec") == "ond o"
    item.remember("number three")
    assert guessed(two, "the fir") == "st te"
    assert read_store(path) == ["the first text", "a second one", "number three"]


@posix
def test_a_file_that_becomes_another_is_left_alone_then(tmp_path):
    path = tmp_path / "memory"
    store, output = store_at(path)
    store.remember("secret words")
    path.write_bytes(b"something else\n")
    assert guessed(store, "secret") == ""
    store.remember("other words")
    assert path.read_bytes() == b"something else\n"
    assert len(output) == 1


def test_a_file_that_cannot_be_written_is_said_once(tmp_path):
    store, output = store_at(tmp_path / "missing" / "memory")
    store.remember("one")
    store.remember("two")
    assert len(output) == 1


@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_limits_out_of_range_are_refused(tmp_path, limit):
    with pytest.raises(RequestError, match="limit"):
        store_at(tmp_path / "memory", limit=limit)


def with_flat_costs(session: Session) -> Session:
    parts = replace(session._parts, costs=lambda: flat_costs(step=1.0, overhead=1.0), acceptance_cache=None)
    return Session(replace(parts, settings=session.settings, monitor=None))


@pytest.mark.parametrize("drafter", ["none", "dense"])
def test_the_pair_copies_what_it_wrote_before(exported_pair, tmp_path, drafter):
    """The text is the same as without a store."""
    path, prompt = tmp_path / "memory", "class Stack:\n    def push("
    with open_session(exported_pair, context=512, drafter=drafter, check="none", threads=1, draft_store=path) as opened:
        session = with_flat_costs(opened)
        expected = session.generate(prompt, max_tokens=80, draft_length=0).text()
        again = session.generate(prompt, max_tokens=80)
        assert again.text() == expected
        assert again.stats.accepted_from["stored"] > 0
    assert [json.loads(line) for line in path.read_text().splitlines()[1:]] == [expected]


@pytest.mark.parametrize("drafter", ["none", "lookup", "dense"])
def test_a_prediction_is_drafted_from_the_first_token_on(exported_pair, drafter):
    with open_session(exported_pair, context=512, drafter=drafter, check="none", threads=1) as opened:
        session, prompt = with_flat_costs(opened), "import os\n\nfor name in os."
        expected = session.generate(prompt, max_tokens=80, draft_length=0).text()
        predicted = session.generate(prompt, max_tokens=80, prediction=expected)
        assert predicted.text() == expected
        assert predicted.stats.accepted_from["memory"] > 40
        wrong = session.generate(prompt, max_tokens=80, prediction="something else entirely, " * 20)
        assert wrong.text() == expected


def test_the_command_keeps_its_answer(exported_pair, tmp_path):
    memory = tmp_path / "memory"
    options = ["generate", str(exported_pair), "def area(", "--max-tokens", "8", "--threads", "1", "--draft-store", str(memory)]
    assert CliRunner().invoke(main, options).exit_code == 0
    assert len(read_store(memory)) == 1
