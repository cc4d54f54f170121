"""Hub names, against a hub on this machine and huggingface_hub's own client."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs edge-mtp[export]")

from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.hub import HubName, chosen_gguf, fetch, fetch_config, hub_name, own_drafter, with_revision
from edge_export.checkpoint.sources import resolve_pair
from edge_export.checkpoint.tokenizer_vocabulary import read_vocabulary
from edge_export.errors import CheckpointError
from edge_export.gguf.writer import plan_gguf
from fake_hub import FakeHub, point_client_at, serving
from progress_log import ProgressLog

Folders = Callable[[str], Path]
TARGET, DRAFTER = "gemma-4-E2B-it-qat-UD-Q4_K_XL.gguf", "MTP/mtp-gemma-4-E2B-it.gguf"


@pytest.fixture(scope="module")
def files(member_folder: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a repository of GGUF files; to be left as they are."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "MTP").mkdir()
    for member, name in (("e2b", TARGET), ("e2b-assistant", DRAFTER)):
        checkpoint = open_checkpoint(member_folder(member))
        plan_gguf(checkpoint, "bf16", read_vocabulary(checkpoint.folder)).write(folder / name, lambda _: None)
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def old(member_folder: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An earlier revision of a checkpoint."""
    folder = Path(shutil.copytree(member_folder("e2b"), tmp_path_factory.mktemp("old"), dirs_exist_ok=True))
    (folder / "chat_template.jinja").write_text("old template")
    return folder


@pytest.fixture
def hub(member_folder: Folders, files: Path, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    repositories = {
        "google/gemma-4-E2B-it": {"main": member_folder("e2b"), "refs/pr/1": old},
        "google/gemma-4-E2B-it-assistant": {"main": member_folder("e2b-assistant")},
        "unsloth/gemma-4-E2B-it-GGUF": {"main": files},
    }
    with serving(FakeHub(repositories)) as running:
        point_client_at(running, tmp_path / "cache", monkeypatch)
        yield running


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes the hub off the network."""
    return lambda: point_client_at(FakeHub({}, port=9), tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("google/gemma-4-E2B-it", HubName("google/gemma-4-E2B-it")),
        ("google/gemma-4-E2B-it@refs/pr/1", HubName("google/gemma-4-E2B-it", "refs/pr/1")),
        ("unsloth/x-GGUF:MTP/mtp-x.gguf", HubName("unsloth/x-GGUF", None, "MTP/mtp-x.gguf")),
        ("unsloth/x-GGUF@v1.0:x Q4.gguf", HubName("unsloth/x-GGUF", "v1.0", "x Q4.gguf")),
        ("unsloth/x-GGUF:Q4_K_M", HubName("unsloth/x-GGUF", tag="Q4_K_M")),
        *((text, None) for text in ("gemma", "a/b/c", "a/b@", "a/b:", "a/b:file.bin", "a/b:Q4/0", "/a/b", "../a/b", "a/b@x y")),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert hub_name(text) == name
    assert name is None or str(name) == text


def test_a_revision_joins_a_name_without_one() -> None:
    assert with_revision("a/b", None) == "a/b"
    assert with_revision("a/b:f.gguf", "v1") == "a/b@v1:f.gguf"
    for text, revision in (("folder", "v1"), ("a/b@v1", "v2"), ("a/b", "not one")):
        with pytest.raises(CheckpointError, match="does not fit"):
            with_revision(text, revision)


def test_a_pair_is_fetched_once_and_found_again_without_the_hub(hub: FakeHub, away: Callable[[], None]) -> None:
    names, log = ("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant"), ProgressLog()
    target, drafter = resolve_pair(*names, log)
    assert (target.origin, drafter.origin) == names
    assert [title for title, _ in log.steps] == [f"Fetch {name}" for name in names]
    assert log.done == [total for _, total in log.steps]
    assert hub.listed == [*names]
    asked = len(hub.ranges)
    assert resolve_pair(*names)[0].path == target.path
    assert len(hub.ranges) == asked, "all is in the cache"
    away()
    assert resolve_pair(*names)[0].path == target.path


def test_a_revision_is_another_snapshot(hub: FakeHub) -> None:
    repository = "google/gemma-4-E2B-it"
    revisions = (None, "refs/pr/1", hub.commit(repository, "refs/pr/1"))
    folders = [fetch(HubName(repository, revision), "target") for revision in revisions]
    assert [(folder / "chat_template.jinja").read_text() == "old template" for folder in folders] == [False, True, True]
    with pytest.raises(CheckpointError, match="could not be fetched"):
        fetch(HubName("google/gemma-4-E2B-it", "v9"), "target")


def test_a_cut_connection_is_resumed(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    name, log = HubName("unsloth/gemma-4-E2B-it-GGUF", None, TARGET), ProgressLog()
    # Bytes count once a whole chunk of them is there; the client's are 10 MB.
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    hub.cut_after[TARGET] = 100_000
    path = fetch(name, "target", log)
    assert hub.ranges == [(TARGET, None), (TARGET, "bytes=100000-")]
    assert path.read_bytes() == (hub.repositories[name.repository]["main"] / TARGET).read_bytes()
    assert (log.steps, log.done) == ([(f"Fetch {name}", path.stat().st_size)], [path.stat().st_size])


def test_a_download_that_was_ended_leaves_nothing_wrong(hub: FakeHub, tmp_path: Path) -> None:
    name = HubName("unsloth/gemma-4-E2B-it-GGUF", None, TARGET)

    class Ended(ProgressLog):
        def advance(self, done_bytes: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(name, "target", Ended())
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    assert fetch(name, "target").read_bytes() == (hub.repositories[name.repository]["main"] / TARGET).read_bytes()


def test_a_pair_of_published_gguf_files(hub: FakeHub) -> None:
    """Both halves lie in one repository; each role has one file that fits it."""
    repository = "unsloth/gemma-4-E2B-it-GGUF"
    target, drafter = resolve_pair(repository, repository)
    assert (target.path.name, drafter.path.name) == (TARGET, Path(DRAFTER).name)
    assert hub.listed == [repository], "asked once for both"
    named = resolve_pair(f"{repository}:{TARGET}", f"{repository}:{DRAFTER}")
    assert [source.path for source in named] == [target.path, drafter.path]


def test_a_tag_names_a_quantization(hub: FakeHub, files: Path, tmp_path: Path) -> None:
    repository, more = "unsloth/gemma-4-E2B-it-GGUF", Path(shutil.copytree(files, tmp_path / "files"))
    shutil.copy(files / TARGET, more / "gemma-4-E2B-it-Q8_0.gguf")
    hub.repositories[repository]["main"] = more
    assert fetch(HubName(repository), "target").name == "gemma-4-E2B-it-Q8_0.gguf"
    assert fetch(HubName(repository, tag="q4_k_xl"), "target").name == TARGET
    with pytest.raises(CheckpointError, match=r"holds no GGUF file of Q5_0 for a target \(MTP/mtp-.*; name one, such as .*:FILE\.gguf"):
        fetch(HubName(repository, tag="Q5_0"), "target")
    with pytest.raises(CheckpointError, match=r"has no file other\.gguf; it has MTP/mtp"):
        fetch(HubName(repository, None, "other.gguf"), "target")
    with pytest.raises(CheckpointError, match=r"is no repository of GGUF files, so :Q4_0 names nothing in it"):
        fetch(HubName("google/gemma-4-E2B-it", tag="Q4_0"), "target")


def test_a_hub_that_has_not_the_repository(hub: FakeHub, away: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"google/gemma is not a local folder and could not be fetched from the Hugging Face hub"):
        resolve_pair("google/gemma", "google/gemma-4-E2B-it-assistant")
    away()
    with pytest.raises(CheckpointError, match="complete files are kept"):
        resolve_pair("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant")
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    with pytest.raises(CheckpointError, match=r"huggingface_hub, which would fetch it, is not installed"):
        fetch(HubName("google/gemma"), "target")


OUT = "../" * 5 + "x"


@pytest.mark.parametrize(
    ("headers", "answers"),
    [
        ({"ETag": f'"{OUT}"'}, {}),
        ({"ETag": f'W/"{OUT}"'}, {}),
        ({"X-Linked-ETag": OUT}, {}),
        ({"ETag": '"/tmp/x"'}, {}),
        ({"X-Repo-Commit": OUT}, {}),
        ({"X-Repo-Commit": ".."}, {}),
        ({}, {"revision": {"id": "a/b", "sha": OUT, "siblings": []}}),
        ({}, {"revision": {"id": "a/b", "sha": "0" * 40, "siblings": [{"rfilename": f"{OUT}.gguf", "size": 1}]}}),
        ({}, {"tree": [{"type": "file", "path": f"{OUT}.json", "size": 1, "oid": "0" * 40}]}),
        ({}, {"tree": [{"type": "file", "path": "C:x.json", "size": 1, "oid": "0" * 40}]}),
        ({}, {"tree": [{"type": "file", "path": "x.json", "size": 1, "oid": "0" * 40, "lfs": {"oid": OUT, "size": 1, "pointerSize": 1}}]}),
    ],
)
def test_a_hostile_hub_writes_nothing(hub: FakeHub, tmp_path: Path, headers: dict[str, str], answers: dict[str, object]) -> None:
    """Also from a client that was in use before."""
    before = set(tmp_path.rglob("*"))
    hub.headers, hub.answers = headers, {kind: json.dumps(answer).encode() for kind, answer in answers.items()}
    with pytest.raises(CheckpointError, match=r"^the hub http://127\.0\.0\.1:\d+ sent .* is no name inside the cache"):
        fetch(HubName("google/gemma-4-E2B-it"), "target", ProgressLog())
    outside = set(tmp_path.rglob("*")) - before - set((tmp_path / "cache").rglob("*"))
    assert outside <= {tmp_path / "cache"}
    assert not list((tmp_path / "cache").rglob("blobs/*"))


def test_a_client_that_others_set_up_is_kept_and_its_answers_are_checked(hub: FakeHub) -> None:
    """The client makes itself anew after an error of the connection."""
    from huggingface_hub.utils import _http

    made: list[object] = []

    def own() -> object:
        made.append(_http.default_client_factory())
        return made[-1]

    huggingface_hub.set_client_factory(own)
    huggingface_hub.get_session()
    assert fetch_config(HubName("google/gemma-4-E2B-it")).is_dir()
    assert huggingface_hub.get_session() in made
    hub.headers = {"ETag": f'"{OUT}"'}
    for _ in range(2):
        with pytest.raises(CheckpointError, match="is no name inside the cache"):
            fetch(HubName("google/gemma-4-E2B-it"), "target")
        huggingface_hub.close_session()
    hub.headers = {}
    assert fetch_config(HubName("google/gemma-4-E2B-it")).is_dir()


@pytest.mark.parametrize("kind", ["revision", "tree"])
@pytest.mark.parametrize(
    "answer",
    [b"{", b"null", b"[" * 100_000, b'{"siblings": 5}', b'[{"path": 5}]'],
    ids=["cut", "null", "deep", "a number for files", "a number for a path"],
)
def test_a_malformed_answer_is_one_sentence(hub: FakeHub, kind: str, answer: bytes) -> None:
    hub.answers = {kind: answer}
    with pytest.raises(CheckpointError, match=r"HF_ENDPOINT|could not be fetched from the Hugging Face hub") as caught:
        fetch(HubName("google/gemma-4-E2B-it"), "target", ProgressLog())
    assert "\n" not in str(caught.value)


def test_tags_that_are_names_are_taken(hub: FakeHub) -> None:
    """A file store's ETag without a commit is no name; those of other hubs may be weak, MD5 or have a part's number."""
    for tag in ('W/"d41d8cd98f00b204e9800998ecf8427e"', '"abc-12"', '"q83vEg==" '):
        hub.headers = {"ETag": tag}
        assert fetch_config(HubName("google/gemma-4-E2B-it")).is_dir()


@pytest.mark.parametrize("size", ["E2B", "E4B", "12B", "26B-A4B", "31B"])
@pytest.mark.parametrize(
    ("kind", "assistant"),
    [
        ("", "-assistant"),
        ("@main", "-assistant"),
        *((f"-qat-{kind}", "-qat-q4_0-unquantized-assistant") for kind in ("q4_0-unquantized", "q4_0-gguf", "w4a16-ct", "mobile-ct")),
    ],
)
def test_a_published_target_has_its_assistant(size: str, kind: str, assistant: str) -> None:
    assert own_drafter(f"google/gemma-4-{size}-it{kind}") == f"google/gemma-4-{size}-it{assistant}"


@pytest.mark.parametrize("target", ["google/gemma-4-E2B", "google/gemma-4-E2B-it-assistant", "someone/gemma-4-E2B-it", "./gemma-4-E2B-it"])
def test_other_targets_have_none(target: str) -> None:
    assert own_drafter(target) is None


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("someone/x-GGUF", "someone/x-GGUF"),
        ("someone/x:Q4_0", "someone/x:Q4_0"),
        ("someone/x@v1:sub/x-Q8_0.gguf", "someone/x@v1:Q8_0"),
        ("someone/x:x.gguf", "someone/x"),
        ("someone/x:UD-Q4_K_XL", "someone/x:UD-Q4_K_XL"),
        ("google/gemma-4-E2B:gemma-4-E2B_q4_0-it.gguf", "google/gemma-4-E2B:q4_0"),
    ],
)
def test_the_drafter_of_a_gguf_repository_lies_in_it(target: str, drafter: str) -> None:
    assert own_drafter(target) == drafter


@pytest.mark.parametrize(("target", "drafter"), [("x-mtp.gguf", "x.gguf"), ("a.gguf", "MTP/X-MTP.gguf"), ("assistant.gguf", "mmproj.gguf")])
def test_the_headers_of_a_folder_decide(target: str, drafter: str, files: Path, tmp_path: Path) -> None:
    for source, name in ((TARGET, target), (DRAFTER, drafter)):
        path = tmp_path / "downloaded" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(files / source, path)
    folder = tmp_path / "downloaded"
    first, second = resolve_pair(str(folder), str(folder))
    assert (first.path, second.path) == (folder / target, folder / drafter)
    assert own_drafter(str(folder / target)) == str(folder / drafter)


def test_parts_of_a_gguf_are_refused_before_they_are_fetched() -> None:
    parts = [f"BF16/g-BF16-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in (HubName("someone/x-GGUF", tag="BF16"), HubName("someone/x-GGUF", file=parts[0])):
        with pytest.raises(CheckpointError, match=r"00001-of-00002.gguf in someone/x-GGUF is one of 2 parts of a GGUF; .*--merge"):
            chosen_gguf([*parts, "g-Q4_0.gguf"], name, "target")
    assert chosen_gguf([*parts, "g-Q4_0.gguf"], HubName("someone/x-GGUF", tag="Q4_0"), "target") == "g-Q4_0.gguf"


def test_a_folder_of_gguf_files_is_a_pair(files: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(files, tmp_path / "downloaded"))
    assert own_drafter(str(folder)) == str(folder)
    assert own_drafter(str(folder / TARGET)) == str(folder / DRAFTER)
    target, drafter = resolve_pair(str(folder), str(folder))
    assert (target.path, drafter.path) == (folder / TARGET, folder / DRAFTER)
    (folder / DRAFTER).unlink()
    with pytest.raises(CheckpointError, match="holds no GGUF file for a drafter"):
        resolve_pair(str(folder), str(folder))


def test_nothing_is_fetched_if_one_half_is_missing_or_the_disk_is_full(hub: FakeHub, disk_with: Any) -> None:
    with pytest.raises(CheckpointError, match="could not be fetched"):
        resolve_pair("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-asistant")
    with disk_with(1000), pytest.raises(CheckpointError, match=r"needs 0\.\d GB of downloads, .* free some space"):
        resolve_pair("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant")
    assert hub.ranges == []
