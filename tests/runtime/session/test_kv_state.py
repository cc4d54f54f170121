from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.errors import RequestError
from edge_runtime.session.open import open_session
from edge_runtime.session.saved.kv_state_file import MAGIC
from edge_runtime.session.session import Session
from scripted import make_session

# The pair's sliding window is 128 tokens.
WINDOW = 128


def text(length: int) -> list[int]:
    """`length` tokens that no part of repeats the part before."""
    return [2, *(300 + (i * i * 7 + i * 13) % 3000 for i in range(length - 1))]


@pytest.fixture(scope="module", params=["llama", "onnx"])
def pair(request: pytest.FixtureRequest, probe_memory: None) -> Path:
    if request.param == "llama":
        return Path(request.getfixturevalue("exported_pair"))
    return Path(request.getfixturevalue("onnx_pair")("int4"))


# What is a matter of files alone needs no second backend.
one_backend = pytest.mark.parametrize("pair", ["onnx"], indirect=True)


@pytest.fixture(scope="module")
def sessions_apart(pair: Path) -> Iterator[list[Session]]:
    opened = [open_session(pair, threads=1) for _ in range(2)]
    for session in opened:
        session.profit()  # the first load_state measures costs, which empties the cache; here it is done before any test
    yield opened
    for session in opened:
        session.close()


@pytest.fixture
def session(sessions_apart: list[Session]) -> Session:
    return sessions_apart[0]


@pytest.fixture
def other(sessions_apart: list[Session]) -> Session:
    return sessions_apart[1]


def write(session: Session, prompt: list[int], tokens: int, *, reuse: bool = False) -> tuple[list[int], int, int]:
    """Greedy tokens, how many of the prompt were in the cache, how many were drafted."""
    generation = session.generate(prompt, max_tokens=tokens, draft_length=3, reuse_prefix=reuse)
    generation.text()
    return generation.tokens, generation.stats.reused_tokens, generation.stats.drafted


@pytest.fixture
def saved(session: Session, tmp_path: Path) -> Path:
    write(session, text(40), 8)
    session.save_state(tmp_path / "state")
    return tmp_path / "state"


@pytest.mark.parametrize("length", [20, 100, 3 * WINDOW, 800])
def test_a_restored_session_goes_on_as_the_uninterrupted_one(session: Session, other: Session, tmp_path: Path, length: int) -> None:
    prompt = text(length)
    begun, _, _ = write(session, prompt, 10)
    session.save_state(tmp_path / "state")
    longer = [*prompt, *begun]
    expected, reused, _ = write(session, longer, 40, reuse=True)
    assert reused == len(longer) - 1
    write(other, text(500)[::-1], 5)
    other.load_state(tmp_path / "state")
    assert other.target.length == len(longer) - 1
    assert other.target.tokens.tolist() == longer[:-1]
    assert other.drafter is not None
    assert other.drafter.draft(begun[-1], 3) == []  # no hidden row yet
    got, reused, drafted = write(other, longer, 40, reuse=True)
    assert reused == len(longer) - 1
    assert got == expected
    assert drafted > 0


def test_beyond_the_window_a_restored_state_rewinds_a_few_tokens_only(session: Session, other: Session, tmp_path: Path) -> None:
    write(session, text(3 * WINDOW), 1)
    session.save_state(tmp_path / "state")
    other.load_state(tmp_path / "state")
    length, floor = other.target.length, other.target.rollback_floor
    assert length - other.target.rewind_slack <= floor < length
    with pytest.raises(RequestError, match="cannot roll back"):
        other.target.rollback(floor - 1)
    other.target.verify(text(13))
    assert other.target.rollback_floor <= length
    other.target.rollback(length)  # the newest forward always comes off
    got, reused, _ = write(other, text(3 * WINDOW)[:-40], 5, reuse=True)
    assert reused == 0
    assert got == write(session, text(3 * WINDOW)[:-40], 5)[0]


@one_backend
def test_a_state_is_written_whole_or_not_at_all(session: Session, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RequestError, match=r"cannot be written to .*No space left"):
        session.save_state(saved)
    assert saved.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    with pytest.raises(RequestError, match="cannot be written"):
        session.save_state(tmp_path / "nowhere" / "state")


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[8:12], "little")
    return json.loads(data[12 : 12 + length]), data[12 + length :]


def rewrite(path: Path, header: dict[str, Any], body: bytes, *, sign: bool = False) -> None:
    if sign:
        end = len(body) - header["sliding"] * int(header["facts"]["rows"].split("+")[1])
        hashes = [hashlib.sha256(part).hexdigest() for part in (body[:end], body[end:])]
        header = header | dict(zip(("tokens_sha256", "sliding_sha256"), hashes, strict=True))
    text = json.dumps(header).encode()
    path.write_bytes(MAGIC + len(text).to_bytes(4, "little") + text + body)


@one_backend
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "has version 3"),
        ({"facts": {"bundle": "0" * 64}}, "is of another bundle"),
        ({"facts": {"engine": "other"}}, "is of another engine; open with --backend other"),
        ({"facts": {"kv_type": "q2"}}, "open with --kv-type q2"),
        ({"facts": {"rows": "1+1"}}, "is of another layout"),
        ({"facts": {"kernels": "0" * 64}}, "is of other kernels"),
        ({"tokens": 10**12}, "its header says"),
        ({"tokens": -1}, "holds -1 tokens"),
        ({"sliding": 10**9}, "it is damaged"),
        ({"sliding": 0}, "its header says"),
        ({"first": 7}, "a prompt cache, from token 7"),
        ({"seconds": float("nan")}, "damaged header"),
        ({"seconds": 1e300}, "it is damaged"),
        ({"tokens_sha256": "0" * 64}, "does not have the sha256"),
        ({"sliding_sha256": "0" * 64}, "does not have the sha256"),
        ({"tokens": "many"}, "damaged header"),
        ({"version": True}, "damaged header"),
        ({"facts": []}, "damaged header"),
    ],
)
def test_headers_that_lie_are_refused_and_nothing_changes(session: Session, saved: Path, change: dict[str, Any], message: str) -> None:
    header, body = parts(saved)
    if isinstance(facts := change.get("facts"), dict):
        change = {"facts": {**header["facts"], **facts}}
    rewrite(saved, {**header, **change}, body)
    write(session, text(30), 3)
    kept = session.target.tokens.tolist()
    with pytest.raises(RequestError, match=message):
        session.load_state(saved)
    assert session.target.tokens.tolist() == kept
    assert write(session, text(30), 3, reuse=True)[1] == 29


@one_backend
def test_files_that_are_no_states_are_refused(session: Session, saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    for damage, message in [
        (b"", "is not a saved KV state"),
        (b"GGUF" + data, "is not a saved KV state"),
        (data[:8] + b"\xff\xff\xff\xff" + data[12:], "a header of"),
        (data[:-1], "its header says"),
        (data + b"x", "its header says"),
        (data[:9], "a header of"),
        (data[:-1] + bytes([data[-1] ^ 1]), "does not have the sha256"),
    ]:
        saved.write_bytes(damage)
        with pytest.raises(RequestError, match=message):
            session.load_state(saved)
    with pytest.raises(RequestError, match="is not a file"):
        session.load_state(tmp_path)


@one_backend
def test_tokens_and_rows_that_lie_are_refused(session: Session, saved: Path) -> None:
    """The sha256 is right in each: a file may come from anybody."""
    header, body = parts(saved)
    write(session, text(30), 3)
    for lie in (struct.pack("<i", -5), struct.pack("<i", 10**9)):
        rewrite(saved, header, lie + body[4:], sign=True)
        with pytest.raises(RequestError, match="tokens outside"):
            session.load_state(saved)
    rows = header["sliding"] - 20
    cut = body[: len(body) - 20 * session.target.row_bytes[1]]
    rewrite(saved, {**header, "sliding": rows}, cut, sign=True)
    with pytest.raises(RequestError, match="it is damaged"):
        session.load_state(saved)
    assert write(session, text(30), 3, reuse=True)[1] == 29


def test_a_longer_text_than_the_context_is_refused(pair: Path, session: Session, tmp_path: Path) -> None:
    write(session, text(600), 1)
    session.save_state(tmp_path / "state")
    with open_session(pair, threads=1, context=512, drafter="none") as small:
        with pytest.raises(RequestError, match="has 600 tokens, the context 512; open with --context 1024"):
            small.load_state(tmp_path / "state")
        with pytest.raises(RequestError, match="the KV cache is empty"):
            small.save_state(tmp_path / "empty")


def test_a_backend_that_cannot_save_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="this backend cannot save or load a KV state"):
        make_session().save_state(tmp_path / "state")
