"""K/V rows that leave a cache: put into another one, and in a file, whose header may lie."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.errors import RequestError
from edge_runtime.interfaces import KvRows
from edge_runtime.session.open import open_session
from edge_runtime.session.prompt_cache import MAGIC, RowSegment, SegmentFile, write_segment
from edge_runtime.session.session import Session

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


@pytest.fixture(scope="module")
def sessions_apart(pair: Path) -> Iterator[list[Session]]:
    opened = [open_session(pair, threads=1) for _ in range(2)]
    yield opened
    for session in opened:
        session.close()


def write(session: Session, prompt: list[int], tokens: int, *, reuse: bool = False) -> tuple[list[int], int, int]:
    """Greedy tokens, how many of the prompt were in the cache, how many were drafted."""
    generation = session.generate(prompt, max_tokens=tokens, draft_length=3, reuse_prefix=reuse)
    generation.text()
    return generation.tokens, generation.stats.reused_tokens, generation.stats.drafted


def move(session: Session, other: Session) -> None:
    """Puts the rows of a session into another one's cache."""
    with other.exclusive():
        other.target.restore(session.target.tokens.tolist(), session.target.state())


@pytest.mark.parametrize("length", [20, 100, 3 * WINDOW, 800])
def test_a_restored_session_goes_on_as_the_uninterrupted_one(sessions_apart: list[Session], length: int) -> None:
    session, other = sessions_apart
    prompt = text(length)
    begun, _, _ = write(session, prompt, 10)
    write(other, text(500)[::-1], 5)
    move(session, other)
    longer = [*prompt, *begun]
    expected, reused, _ = write(session, longer, 40, reuse=True)
    assert reused == len(longer) - 1
    assert other.target.length == len(longer) - 1
    assert other.target.tokens.tolist() == longer[:-1]
    assert other.drafter is not None
    assert other.drafter.draft(begun[-1], 3) == []  # no hidden row yet
    got, reused, drafted = write(other, longer, 40, reuse=True)
    assert reused == len(longer) - 1
    assert got == expected
    assert drafted > 0


def test_beyond_the_window_a_restored_state_rewinds_a_few_tokens_only(sessions_apart: list[Session]) -> None:
    session, other = sessions_apart
    write(session, text(3 * WINDOW), 1)
    move(session, other)
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


SIZES = (16, 8)
FACTS = {"bundle": "ab" * 32, "engine": "llama", "kv_type": "f16", "rows": "16+8", "kernels": "cd" * 32}
TOKENS = np.arange(1, 41)
ROWS = KvRows(*(np.arange(count * size).astype(np.uint8).reshape(count, size) for count, size in zip((40, 20), SIZES, strict=True)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write_segment(tmp_path / "state", RowSegment(tokens=TOKENS, rows=ROWS), FACTS, 64)
    return tmp_path / "state"


def read(path: Path) -> tuple[list[int], list[bytes]]:
    with SegmentFile(path, FACTS, SIZES) as file:
        full, sliding = (
            np.empty((count, size), np.uint8) for count, size in zip((file.header.tokens, file.header.sliding), SIZES, strict=True)
        )
        tokens = file.read_full(full).tolist()
        file.read_sliding(sliding)
    return tokens, [full.tobytes(), sliding.tobytes()]


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[8:12], "little")
    return json.loads(data[12 : 12 + length]), data[12 + length :]


def rewrite(path: Path, header: dict[str, Any], body: bytes) -> None:
    data = json.dumps(header).encode()
    path.write_bytes(MAGIC + len(data).to_bytes(4, "little") + data + body)


def test_a_file_gives_back_what_was_written(saved: Path) -> None:
    assert read(saved) == (TOKENS.tolist(), [part.tobytes() for part in ROWS])
    header, body = parts(saved)
    assert header["tokens_sha256"] == hashlib.sha256(body[: 40 * 20]).hexdigest()


def test_a_file_is_written_whole_or_not_at_all(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_segment(saved, RowSegment(tokens=TOKENS[:2], rows=KvRows(ROWS.full[:2], ROWS.sliding[:2])), FACTS, 64)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "has version 3"),
        ({"facts": {"bundle": "0" * 64}}, "is of another bundle"),
        ({"facts": {"engine": "other"}}, "is of another engine"),
        ({"facts": {"kv_type": "q2"}}, "is of another K/V type"),
        ({"facts": {"rows": "1+1"}}, "is of another cache layout"),
        ({"facts": {"kernels": "0" * 64}}, "is of other kernels"),
        ({"tokens": 10**12}, "its header says"),
        ({"sliding": 10**9}, "it is damaged"),
        ({"seconds": 1e300}, "it is damaged"),
        ({"tokens_sha256": "0" * 64}, "does not have the sha256"),
        ({"sliding_sha256": "0" * 64}, "does not have the sha256"),
        ({"tokens": "many"}, "damaged header"),
    ],
)
def test_headers_that_lie_are_refused(saved: Path, change: dict[str, Any], message: str) -> None:
    header, body = parts(saved)
    if "facts" in change:
        change = {"facts": {**header["facts"], **change["facts"]}}
    rewrite(saved, {**header, **change}, body)
    with pytest.raises(RequestError, match=message):
        read(saved)


def test_files_that_hold_no_rows_are_refused(saved: Path) -> None:
    data = saved.read_bytes()
    for damage, message in [
        (b"", "is not a file of a KV cache"),
        (b"GGUF" + data, "is not a file of a KV cache"),
        (data[:8] + b"\xff\xff\xff\xff" + data[12:], "a header of"),
        (data[:-1], "its header says"),
        (data + b"x", "its header says"),
        (data[:9], "a header of"),
        (data[:-1] + bytes([data[-1] ^ 1]), "does not have the sha256"),
    ]:
        saved.write_bytes(damage)
        with pytest.raises(RequestError, match=message):
            read(saved)
