"""Prompts that are paid once: rows from the prompt cache are those that computing would have made, and nothing in it fails a request."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from edge_runtime.bundle.gguf_header import KvType
from edge_runtime.cli.run import main
from edge_runtime.cli.terminal import History, history_file
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import KvRows
from edge_runtime.server.serve import client_names
from edge_runtime.session import prompt_cache
from edge_runtime.session.open import open_session, open_sessions
from edge_runtime.session.prompt_cache import MAX_TOKENS, MIN_TOKENS, PromptCache, RowSegment, segments, shrink
from edge_runtime.session.session import Session

PaysFrom = Callable[[float], None]


@pytest.fixture(autouse=True)
def pays_from(monkeypatch: pytest.MonkeyPatch) -> PaysFrom:
    """Sets how many times as fast as computing reading must be; at first it always pays, as it depends on the load with tiny pairs."""

    def set_to(speedup: float) -> None:
        monkeypatch.setattr(prompt_cache, "SPEEDUP", speedup)

    set_to(0.0)
    return set_to


@pytest.fixture(scope="module", params=["llama", "onnx"])
def pair(request: pytest.FixtureRequest, probe_memory: None) -> Path:
    if request.param == "llama":
        return Path(request.getfixturevalue("exported_pair"))
    return Path(request.getfixturevalue("onnx_pair")("int4"))


# What is a matter of files alone needs no second backend.
one_backend = pytest.mark.parametrize("pair", ["onnx"], indirect=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def opened(pair: Path, folder: Path, notes: list[str]) -> Callable[..., Session]:
    options: dict[str, Any] = {"threads": 1, "context": 2048, "prompt_cache": folder, "notify": notes.append}
    return lambda **changes: open_session(pair, **options | changes)


def text(length: int, seed: int = 7) -> list[int]:
    """`length` tokens that no part of repeats the part before."""
    return [2, *(300 + (i * i * seed + i * 13) % 3000 for i in range(length - 1))]


def answer(session: Session, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """The greedy tokens, and how many of the prompt were not computed."""
    generation = session.generate(prompt, **{"max_tokens": 12, "draft_length": 3, "reuse_prefix": True} | options)
    generation.text()
    return generation.tokens, generation.stats.reused_tokens


def computed(session: Session, prompt: list[int]) -> np.ndarray[Any, Any]:
    """The logits behind a prompt that was computed or read, and behind a few tokens more."""
    session.generate(prompt, reuse_prefix=True).prefill()
    return np.concatenate([session.target.verify(prompt[-1:]).copy(), session.target.verify([400, 401, 402, 403])])


@pytest.mark.parametrize("length", [MIN_TOKENS + 1, 300, MAX_TOKENS + 1, MAX_TOKENS + 2, 1300])
def test_what_follows_a_restored_prompt_has_the_bits_of_a_computed_one(opened: Callable[..., Session], length: int) -> None:
    prompt = text(length)
    with opened(prompt_cache=None) as session:
        expected, tokens = computed(session, prompt), answer(session, [*prompt, 5])[0]
    with opened() as session:
        np.testing.assert_array_equal(computed(session, prompt), expected)
    with opened() as session:
        np.testing.assert_array_equal(computed(session, prompt), expected)
    with opened() as session:
        last = (length - 1) % MAX_TOKENS
        kept = length - 1 - (last if last < MIN_TOKENS else 0)
        assert answer(session, prompt)[1] == kept
        session.target.rollback(0)
        assert answer(session, [*prompt, 5]) == (tokens, kept)


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_quantized_rows_of_llama_cpp(exported_pair: Path, folder: Path, kv_type: KvType) -> None:
    tokens = []
    for cache in (None, folder, folder):
        with open_session(exported_pair, threads=1, kv_type=kv_type, context=1024, prompt_cache=cache) as session:
            tokens.append(answer(session, text(700)))
    assert tokens[0][0] == tokens[1][0] == tokens[2][0]
    assert [reused for _, reused in tokens] == [0, 0, 699]
    with open_session(exported_pair, threads=1, context=1024, prompt_cache=folder) as session:
        assert answer(session, text(700))[1] == 0  # other rows are not found


@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_rows_of_other_types_of_onnxruntime(onnx_pair: Callable[..., Path], folder: Path, kv: str) -> None:
    tokens = []
    for cache in (None, folder, folder):
        with open_session(onnx_pair("int4", kv=kv), threads=1, context=1024, prompt_cache=cache) as session:
            tokens.append(answer(session, text(700)))
    assert tokens[0][0] == tokens[1][0] == tokens[2][0]
    assert [reused for _, reused in tokens] == [0, 0, 699]


def test_texts_that_begin_alike_share_what_they_begin_with(opened: Callable[..., Session], folder: Path) -> None:
    system = text(MAX_TOKENS + 100)
    first, second = [*system, *text(90, 11)], [*system, *text(80, 17)]
    with opened() as session:
        answer(session, first)
    files = {path.name for _, _, path in segments(folder)}
    with opened() as session:
        got, reused = answer(session, second)
        assert reused == MAX_TOKENS  # the piece behind it is of both texts
    with opened(prompt_cache=None) as session:
        assert answer(session, second)[0] == got
    assert files < {path.name for _, _, path in segments(folder)}
    with opened() as session:  # shorter than what was stored
        assert answer(session, system[: MAX_TOKENS + 20])[1] == MAX_TOKENS
        assert answer(session, system[: MAX_TOKENS - 20])[1] in (0, MAX_TOKENS - 21)  # it may be in memory still


def test_a_conversation_goes_on_where_it_ended(opened: Callable[..., Session]) -> None:
    with opened() as session:
        tokens, _ = answer(session, text(200), max_tokens=60)
        memory = answer(session, [*text(200), *tokens, *text(40, 11)])
        assert memory[1] == 200 + len(tokens) - 1
    with opened() as session:
        assert answer(session, [*text(200), *tokens, *text(40, 11)]) == (memory[0], 239 + len(tokens))


def test_what_is_gone_from_sliding_layers_is_not_read(opened: Callable[..., Session], folder: Path) -> None:
    """A long answer leaves parts without sliding rows; only ends that can be gone on from are."""
    with opened() as session:
        tokens, _ = answer(session, text(100), max_tokens=MAX_TOKENS + 300)
    begin = [*text(100), *tokens[: MAX_TOKENS + 50]]
    assert any(path.name.endswith("-0.kv") for _, _, path in segments(folder))
    with opened() as session:
        assert answer(session, begin)[1] == 99
    with opened() as session:
        assert answer(session, [*text(100), *tokens, 5])[1] == 99 + len(tokens)


@one_backend
def test_each_client_has_its_own(opened: Callable[..., Session]) -> None:
    first, second = client_names(["a", "b"])
    assert len({first, second, *client_names([]), ""}) == 4
    with opened() as session:
        for client, reused in ((first, 0), (second, 0), ("", 0), (first, 299), (second, 299)):
            session.target.rollback(0)
            assert answer(session, text(300), client=client)[1] == reused
            session._parts.prompt_cache.close()


def test_several_requests_at_once_read_and_keep(exported_pair: Path, folder: Path) -> None:
    prompts = [text(200 + 150 * number, 7 + number % 2) for number in range(4)]
    with open_session(exported_pair, threads=1, context=1024) as session:
        expected = [answer(session, prompt)[0] for prompt in prompts]
    for reused in (False, True):
        with open_sessions(exported_pair, 4, threads=1, context=1024, prompt_cache=folder) as sessions:
            generations = [
                session.generate(prompt, max_tokens=12, draft_length=3, reuse_prefix=True)
                for session, prompt in zip(sessions.sessions, prompts, strict=True)
            ]
            for _ in sessions.run(generations):
                pass
            assert [generation.tokens for generation in generations] == expected
            assert all(generation.stats.reused_tokens == len(generation.prompt) - 1 for generation in generations) or not reused


@one_backend
def test_what_would_not_pay_is_neither_read_nor_kept(
    opened: Callable[..., Session], folder: Path, pays_from: Callable[[float], None]
) -> None:
    with opened() as session:
        tokens = answer(session, text(700))
    kept_files = segments(folder)
    pays_from(1e12)
    with opened() as session:
        assert answer(session, text(700)) == (tokens[0], 0)
        answer(session, text(700, 11))
    assert [path for _, _, path in segments(folder)] == [path for _, _, path in kept_files]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@one_backend
@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (damage, "does not have the sha256"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"first": 0', b'"first": 8')), "not the one that its name says"),
        (lambda path: path.chmod(0o644), "open to others"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_sentence_and_replaced(
    opened: Callable[..., Session], folder: Path, notes: list[str], harm: Callable[[Path], object], sentence: str
) -> None:
    with opened() as session:
        tokens, _ = answer(session, text(300))
    (path,) = (path for _, _, path in segments(folder))
    harm(path)
    with opened() as session:
        assert answer(session, text(300)) == (tokens, 0)
    assert [note for note in notes if sentence in note] == notes[-1:]
    with opened() as session:
        assert answer(session, text(300)) == (tokens, 299)
    assert path.stat().st_mode & 0o777 == 0o600


@one_backend
def test_a_link_is_not_followed(opened: Callable[..., Session], folder: Path, tmp_path: Path) -> None:
    with opened() as session:
        tokens, _ = answer(session, text(300))
    (path,) = (path for _, _, path in segments(folder))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with opened() as session:
        assert answer(session, text(300)) == (tokens, 0)
    assert (tmp_path / "elsewhere").exists()


@one_backend
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_files_and_folders_of_other_users_are_left_alone(opened: Callable[..., Session], folder: Path, notes: list[str]) -> None:
    with opened() as session:
        tokens, _ = answer(session, text(300))
    (path,) = (path for _, _, path in segments(folder))
    os.chown(path, 12345, 12345)
    with opened() as session:
        assert answer(session, text(300)) == (tokens, 0)
    assert "another user's" in notes[-1]
    os.chown(folder, 12345, 12345)
    with opened() as session:
        assert answer(session, text(300)) == (tokens, 0)
    assert "belongs to another user (number 12345); this run goes on without it" in notes[-1]


@one_backend
def test_a_folder_that_others_may_write_or_that_is_none_is_not_used(opened: Callable[..., Session], folder: Path, notes: list[str]) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with opened() as session:
        answer(session, text(300))
    assert "may be written by others (mode 777); this run goes on without it" in notes[-1]
    assert not segments(folder)
    with opened(prompt_cache=folder / "file" / "below") as session:
        folder.rmdir()
        folder.write_text("a file")
        answer(session, text(300))
    assert "cannot be written" in notes[-1]
    with opened(prompt_cache=folder) as session:
        answer(session, text(300))
    assert "is not a folder; this run goes on without it" in notes[-1]


@one_backend
def test_a_full_disk_is_said_once_and_the_run_goes_on(
    opened: Callable[..., Session], folder: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as session:
        tokens, _ = answer(session, text(300))
    before = {path: path.read_bytes() for _, _, path in segments(folder)}

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prompt_cache, "write_segment", full)
    with opened() as session:
        assert answer(session, text(300)) == (tokens, 299)
        answer(session, text(400, 11))
        answer(session, text(500, 13))
    assert [note for note in notes if "No space left on device" in note] == notes[-1:]
    assert "this run goes on without keeping prompts" in notes[-1]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@one_backend
def test_what_a_killed_process_left_is_removed(opened: Callable[..., Session], folder: Path) -> None:
    folder.mkdir(mode=0o700)
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    left, running = folder / f".ab-1.kv.partial-{ended}-ab", folder / f".ab-1.kv.partial-{os.getppid()}-ab"
    for path in (left, running):
        path.write_bytes(b"half a file")
    with opened() as session:
        answer(session, text(100))
    assert (left.exists(), running.exists()) == (False, True)


FACTS = {"bundle": "b", "engine": "llama", "kv_type": "f16", "rows": "8+4", "kernels": "k"}


class Rows:
    """A target of rows without a model."""

    row_bytes, sliding_rows, context, rewind_slack, rollback_floor, kv_type = (8, 4), 10, 4096, 12, 0, "f16"

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.length = np.asarray(tokens, np.int32), len(tokens)
        self.restored: KvRows | None = None

    def state(self, first: int = 0) -> KvRows:
        full, sliding = (np.repeat(self.tokens[first:, None], width, 1).astype(np.uint8) for width in self.row_bytes)
        return KvRows(full, sliding)

    def restore(self, _: list[int], rows: KvRows) -> None:
        self.restored = rows

    prefill = verify = rollback = close = state


@pytest.fixture
def cache(folder: Path) -> Iterator[PromptCache]:
    made = PromptCache(folder, FACTS, limit=1 << 20)
    yield made
    made.close()


def kept(cache: PromptCache, tokens: list[int], client: str = "") -> None:
    cache.request(Rows(tokens), tokens, client).keep(len(tokens), 1.0, complete=True)
    cache.close()


def read(cache: PromptCache, tokens: list[int], client: str = "") -> int:
    *_, length = [0, *cache.request(target := Rows(tokens), tokens, client).reading(0)]
    if target.restored is not None:
        np.testing.assert_array_equal(target.restored.full[:, 0], np.asarray(tokens[:length]).astype(np.uint8))
        np.testing.assert_array_equal(target.restored.sliding[-10:, 0], np.asarray(tokens[:length]).astype(np.uint8)[-10:])
    return length


def test_the_least_recently_used_goes(cache: PromptCache, folder: Path) -> None:
    texts = [text(1000, seed) for seed in (7, 11, 13)]
    for number, tokens in enumerate(texts):
        kept(cache, tokens)
        for _, _, path in segments(folder):
            if path.stat().st_mtime > 10_000:
                os.utime(path, (number, number))
    assert read(cache, texts[0]) == 1000
    size = sum(size for _, size, _ in segments(folder))
    files, gone = shrink(folder, size - 1)
    assert (files, read(cache, texts[1]) < 1000) == (1, True)
    assert (read(cache, texts[0]), read(cache, texts[2])) == (1000, 1000)
    assert sum(size for _, size, _ in segments(folder)) == size - gone


def test_the_folder_keeps_its_limit(folder: Path) -> None:
    with pytest.raises(RequestError, match="the prompt cache's limit is 30000 bytes; give at least 1048576"):
        PromptCache(folder, FACTS, limit=30_000)
    cache = PromptCache(folder, FACTS, limit=1 << 20)
    for seed in range(7, 67):
        kept(cache, text(2000, seed))
    assert 1 << 19 < sum(size for _, size, _ in segments(folder)) <= 1 << 20
    assert read(cache, text(2000, 66)) == 2000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork")
def test_processes_at_once_write_one_file_of_each(folder: Path) -> None:
    def write() -> None:
        cache = PromptCache(folder, FACTS, limit=1 << 22, notify=lambda _: os._exit(1))
        for seed in (7, 9, 11):
            kept(cache, text(2000, seed))
        os._exit(0 if [read(cache, text(2000, seed)) for seed in (7, 9, 11)] == [2000] * 3 else 2)

    processes = [multiprocessing.get_context("fork").Process(target=write) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert all(path.suffix == ".kv" for path in folder.iterdir())
    assert len(segments(folder)) == 3 * 4


def test_a_file_that_goes_while_it_is_read_is_not_complained_of(cache: PromptCache, folder: Path) -> None:
    kept(cache, text(2000))
    reading = cache.request(Rows(text(2000)), text(2000)).reading(0)
    assert next(reading) == 0
    paths = [path for _, _, path in segments(folder)]
    for path in paths:
        if int(path.name.split("-")[2]) < MAX_TOKENS:  # the last one
            path.unlink()
    *_, length = reading
    assert length == 2000 // MAX_TOKENS * MAX_TOKENS


def test_names_that_lie_lead_nowhere(cache: PromptCache, folder: Path) -> None:
    kept(cache, text(100))
    (path,) = (path for _, _, path in segments(folder))
    after, key, *_ = path.name.split("-")
    for name in (f"{after}-{key}-0-0.kv", f"{after}-{key}-999999999-5.kv", f"{after}-{key}-90-90.kv", f"{key}-{key}-100-100.kv", "x.kv"):
        (folder / name).write_bytes(path.read_bytes())
    assert read(cache, text(100)) == 100
    assert read(cache, text(100), "another") == 0


class WithImages(Rows):
    """Such a target, in whose images rows attend to later ones."""

    whole_rows = 512
    prefill_rows = Rows.state


def test_nothing_goes_on_inside_of_an_image(cache: PromptCache, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [*text(100), *range(-1, -301, -1), *text(100)]
    for length in (50, 200, 400, 450):  # ends in the text, in the image, at its end, behind it
        monkeypatch.setattr(prompt_cache, "MAX_TOKENS", length)
        kept(cache, tokens[:length])
    for made, expected in ((Rows, 200), (WithImages, 50)):
        *_, length = cache.request(made(tokens[:350]), tokens[:350]).reading(0)
        assert length == expected
    *_, length = cache.request(WithImages(tokens[:400]), tokens[:400]).reading(0)
    assert length == 400


def test_the_disk_is_not_waited_for(cache: PromptCache, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What is computed faster than it is written is kept in part, from the beginning."""
    monkeypatch.setattr(prompt_cache, "_WAITING", 2 * sum(Rows.row_bytes) * MAX_TOKENS)
    go = threading.Event()
    write = prompt_cache.write_segment

    def slow(path: Path, segment: RowSegment, facts: Any, context: int) -> int:
        go.wait(30)
        return write(path, segment, facts, context)

    monkeypatch.setattr(prompt_cache, "write_segment", slow)
    tokens = text(2000)
    request = cache.request(Rows(tokens), tokens)
    for length in range(MAX_TOKENS, 2000, MAX_TOKENS):
        request.target.tokens = np.asarray(tokens[:length], np.int32)  # type: ignore[misc]
        request.keep(MAX_TOKENS, 1.0, complete=True)
    go.set()
    cache.close()
    assert read(cache, tokens) == 2 * MAX_TOKENS


def test_commands_keep_prompts_and_forget_them(exported_pair: Path, folder: Path, tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        result = CliRunner().invoke(main, [*words], prog_name="edge-run")
        assert result.exit_code == 0, result.output
        return result

    prompt = "def area(r): return 3 * r * r\n" * 20
    request = ("generate", str(exported_pair), "-b", "llama", "-t", "1", "-n", "4", "--prompt-cache", str(folder), prompt)
    if json.loads(run(*request[:-2], "off", prompt, "--json").stdout)["row_kernels"] is None:
        pytest.skip("generate leaves the prompt cache alone on stock kernels")
    first, second = run(*request), run(*request)
    assert first.stdout == second.stdout
    assert "came from the prompt cache" in second.stderr
    assert "came from the prompt cache" not in first.stderr
    assert json.loads(run(*request, "--json").stdout)["stats"]["reused_tokens"] > 100
    off = run(*request[:-2], "off", prompt)
    assert (off.stdout, "prompt cache" in off.stderr) == (first.stdout, False)
    (folder / "notes.txt").write_text("of somebody")
    output = json.loads(run("forget", "--prompt-cache", str(folder), "--json").stdout)
    assert (output["files"] > 0, output["bytes"] > 10_000) == (True, True)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert "0 files of 0.0 MB removed" in run("forget", "--prompt-cache", str(folder)).stdout


def test_forgetting_leaves_nothing_of_killed_writers_and_of_chats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A writer that was killed leaves a whole prompt beside the segments; what was typed lies in another folder."""
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder, hexes = prompt_cache.default_folder(), "0" * 32
    folder.mkdir(parents=True)
    (folder / f"{hexes}-{hexes}-100-100.kv").write_bytes(b"rows")
    (folder / f".{hexes}-{hexes}-100-100.kv.partial-999999999-00ff").write_bytes(b"tokens of a secret")
    (folder / ".notes.partial-999999999").write_bytes(b"of another program")
    History(history_file()).add("a secret")
    result = CliRunner().invoke(main, ["forget"])
    assert result.exit_code == 0, result.output
    assert "1 files" in result.stdout
    assert f"history of chats {history_file()}: removed" in result.stdout
    assert [path.name for path in folder.iterdir()] == [".notes.partial-999999999"]
    assert not history_file().exists()
    History(history_file()).add("another")
    assert CliRunner().invoke(main, ["forget", "--prompt-cache", str(folder)]).exit_code == 0
    assert history_file().exists(), "a folder of its own is forgotten alone"


def test_a_folder_that_cannot_be_read_is_not_called_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    result = CliRunner().invoke(main, ["forget", "--prompt-cache", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "cannot be emptied" in result.output
