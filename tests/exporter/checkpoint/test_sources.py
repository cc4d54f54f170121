"""What the user names is opened, checked, and refused with a sentence; a GGUF gives the same facts as the checkpoint it came from."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_export.checkpoint.checkpoint import open_checkpoint, open_gguf, read_gguf_header
from edge_export.checkpoint.hub import own_drafter
from edge_export.checkpoint.sources import manifest_source, resolve_pair
from edge_export.errors import CheckpointError
from edge_export.gguf.writer import write_gguf
from edge_export.pipeline.bundle_files import architecture, cache_layout
from tiny_members import MEMBERS, TARGETS

Folders = Callable[[str], Path]
# A GGUF does not say these: whether the config had a tied head written down, and the sparse head, which it does not carry.
NOT_IN_GGUF = {"ordered_embeddings": False, "centroids": 0, "top_centroids": 0}


@pytest.fixture
def gguf_of(member_folder: Folders, tmp_path: Path) -> Folders:
    def made(name: str) -> Path:
        path = tmp_path / f"{name}.gguf"
        if not path.exists():
            write_gguf(open_checkpoint(member_folder(name)), path, "bf16", lambda _: None)
        return path

    return made


def comparable(model: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(model)
    # Written as float32.
    fields["norm_epsilon"] = pytest.approx(fields["norm_epsilon"])
    fields["k_eq_v"] = fields["full_kv_heads"] != fields["kv_heads"] or fields["k_eq_v"]
    return fields | {key: value for key, value in NOT_IN_GGUF.items() if key in fields}


# The tokenizer of e2b-text is another one than its assistant's.
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "e2b-text"])
def test_a_gguf_tells_what_its_checkpoint_told(name: str, member_folder: Folders, gguf_of: Folders) -> None:
    drafter = f"{name}-assistant"
    plain = [open_checkpoint(member_folder(part)) for part in (name, drafter)]
    used = [open_gguf(gguf_of(part))[0] for part in (name, drafter)]
    ours, theirs = (comparable(pair[0].architecture) for pair in (plain, used))
    assert ours == theirs
    assert cache_layout(plain[0], plain[1], 100) == cache_layout(used[0], used[1], 100)
    assert cache_layout(plain[0], used[1], 100) == cache_layout(used[0], plain[1], 100)
    facts = [architecture(*pair, 100) for pair in (plain, used)]
    ordered = MEMBERS[drafter].ordered
    assert facts[0].ordered_embeddings == ordered
    assert facts[1].ordered_embeddings is False
    # The centroids are weights of the checkpoint that the GGUF leaves out.
    centroids = sum(t.shape[0] * t.shape[1] for n, t in plain[1].tensors.items() if n == "masked_embedding.centroids.weight")
    assert facts[1].parameters == facts[0].parameters
    assert facts[1].prompt_parameters == facts[0].prompt_parameters
    assert facts[1].drafter_parameters == facts[0].drafter_parameters - centroids


def test_halves_of_any_kind_make_a_pair(member_folder: Folders, gguf_of: Folders) -> None:
    folder, drafter = str(member_folder("e2b")), str(member_folder("e2b-assistant"))
    for pair in ((folder, drafter), (str(gguf_of("e2b")), drafter), (folder, str(gguf_of("e2b-assistant")))):
        target, second = resolve_pair(*pair)
        assert (target.role, second.role) == ("target", "drafter")
        assert [part.gguf is not None for part in (target, second)] == [origin.endswith(".gguf") for origin in pair]
    assert resolve_pair(folder, drafter)[0].stored_type == "bf16"


def test_a_drafter_without_a_tokenizer_takes_the_targets(member_folder: Folders, copy: Folders) -> None:
    bare = copy("e2b-assistant")
    (bare / "tokenizer.json").unlink()
    assert resolve_pair(str(member_folder("e2b")), str(bare))[1].tokenizer.folder == member_folder("e2b")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", ""])
def test_a_source_that_may_not_be_read_is_named(name: str, member_folder: Folders, copy: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("e2b-text")
    forbidden, is_file, opened = folder / name, Path.is_file, Path.open

    def denied(path: Path) -> None:
        # As a real mode of 000 does it, which root's tests would not see.
        if path == forbidden if name else path.parent == folder:
            raise PermissionError(13, "Permission denied", str(path))

    def open_denied(path: Path, *arguments: Any, **named: Any) -> Any:
        denied(path)
        return opened(path, *arguments, **named)

    def is_file_denied(path: Path) -> bool:
        if not name:
            denied(path)
        return is_file(path)

    monkeypatch.setattr(Path, "open", open_denied)
    monkeypatch.setattr(Path, "is_file", is_file_denied)
    with pytest.raises(
        CheckpointError, match=rf"e2b-text/{name or 'config.json'} cannot be read \(Permission denied\); check the checkpoint"
    ):
        resolve_pair(str(folder), str(member_folder("e2b-assistant")))


def test_the_home_of_nobody_does_not_exist(member_folder: Folders) -> None:
    with pytest.raises(CheckpointError, match="the target ~no-such-user/model does not exist"):
        resolve_pair("~no-such-user/model", str(member_folder("e2b-assistant")))


def linked(folder: Path, copy: Path, name: str, target: Path) -> Path:
    """A copy of a checkpoint folder in which the file `name` is a link to `target`, where it was moved or already is."""
    shutil.copytree(folder, copy)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(copy / name if (copy / name).exists() else copy / "config.json", target)
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(target)
    return copy


@pytest.mark.parametrize("name", ["chat_template.jinja", "README.md", "config.json", "tokenizer.json", "generation_config.json"])
def test_a_link_out_of_the_folder_is_refused(name: str, member_folder: Folders, tmp_path: Path) -> None:
    folder = linked(member_folder("e2b-text"), tmp_path / "copy", name, tmp_path / "elsewhere" / "secret")
    with pytest.raises(CheckpointError, match=r"is a link to .*elsewhere/secret', outside of .*copy; put the file itself"):
        resolve_pair(str(folder), str(member_folder("e2b-assistant")))


def test_a_gguf_that_is_a_link_out_of_the_folder_is_refused(gguf_of: Folders, tmp_path: Path) -> None:
    """It was copied into the bundle, which may be published."""
    folder = tmp_path / "models--google--x" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    shutil.copy(gguf_of("e2b"), folder / "e2b.gguf")
    (folder / "mtp-e2b.gguf").symlink_to(gguf_of("e2b-assistant"))
    with pytest.raises(CheckpointError, match=r"mtp-e2b.gguf' is a link to .*e2b-assistant.gguf', outside of .*models--google--x; put"):
        resolve_pair(str(folder), str(folder))
    with pytest.raises(CheckpointError, match=r"mtp-e2b.gguf' is a link to"):
        own_drafter(str(folder / "e2b.gguf"))
    (folder.parents[1] / "blobs").mkdir()
    gguf_of("e2b-assistant").rename(folder.parents[1] / "blobs" / "1")
    (folder / "mtp-e2b.gguf").unlink()
    (folder / "mtp-e2b.gguf").symlink_to("../../blobs/1")
    assert resolve_pair(str(folder), str(folder))
    assert own_drafter(str(folder / "e2b.gguf")) == str(folder / "mtp-e2b.gguf")


def test_files_of_the_hubs_cache_may_lie_in_a_folder_of_the_revision(tmp_path: Path) -> None:
    repository = tmp_path / "models--google--x"
    folder = repository / "snapshots" / "abc" / "BF16"
    for path in (folder / "e2b.gguf", folder / "mtp-e2b.gguf"):
        path.parent.mkdir(parents=True, exist_ok=True)
        blob = repository / "blobs" / path.name
        blob.parent.mkdir(exist_ok=True)
        blob.touch()
        path.symlink_to(f"../../../blobs/{path.name}")
    assert own_drafter(str(folder / "e2b.gguf")) == str(folder / "mtp-e2b.gguf")
    (repository / "blobs" / "mtp-e2b.gguf").rename(tmp_path / "elsewhere")
    (folder / "mtp-e2b.gguf").unlink()
    (folder / "mtp-e2b.gguf").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"outside of .*models--google--x; put"):
        own_drafter(str(folder / "e2b.gguf"))


def test_a_dangling_or_circular_link_is_refused(member_folder: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(member_folder("e2b-text"), folder)
    (folder / "README.md").unlink(missing_ok=True)
    for target in (tmp_path / "nowhere", Path("README.md")):
        (folder / "README.md").symlink_to(target)
        with pytest.raises(CheckpointError, match="is a link to"):
            resolve_pair(str(folder), str(member_folder("e2b-assistant")))
        (folder / "README.md").unlink()


def test_links_inside_the_folder_and_to_the_folder_are_followed(member_folder: Folders, tmp_path: Path) -> None:
    folder = linked(member_folder("e2b"), tmp_path / "copy", "config.json", tmp_path / "copy" / "blobs" / "1")
    (tmp_path / "link").symlink_to(folder)
    (folder / "unrelated").symlink_to("/etc/passwd")
    for source in (folder, tmp_path / "link"):
        assert resolve_pair(str(source), str(member_folder("e2b-assistant")))


def test_the_hubs_cache_links_to_its_blobs(member_folder: Folders, tmp_path: Path) -> None:
    repository = tmp_path / "models--google--x"
    folder = linked(member_folder("e2b"), repository / "snapshots" / "abc", "config.json", repository / "blobs" / "1")
    assert resolve_pair(str(folder), str(member_folder("e2b-assistant")))
    other = tmp_path / "models--google--y" / "snapshots" / "abc"
    other = linked(member_folder("e2b"), other, "config.json", repository / "blobs" / "1")
    with pytest.raises(CheckpointError, match="models--google--y"):
        resolve_pair(str(other), str(member_folder("e2b-assistant")))


def test_sources_are_hashed_file_by_file(member_folder: Folders) -> None:
    target, _ = resolve_pair(str(member_folder("e2b")), str(member_folder("e2b-assistant")))
    counted: list[int] = []
    source = manifest_source(target, counted.append)
    assert sum(counted) == sum(file.bytes for file in source.files)
    for file in source.files:
        assert hashlib.sha256((member_folder("e2b") / file.name).read_bytes()).hexdigest() == file.sha256
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {file.name for file in source.files}


@pytest.mark.parametrize(
    ("target", "drafter", "sentence"),
    [
        ("e2b-assistant", "e2b-assistant", "is an assistant, not a full model"),
        ("e2b", "e2b", "not an MTP assistant"),
        ("e2b", "31b-assistant", "is not the assistant of"),
    ],
)
@pytest.mark.parametrize("as_gguf", [False, True])
def test_halves_that_do_not_belong_together(
    target: str, drafter: str, sentence: str, as_gguf: bool, member_folder: Folders, gguf_of: Folders
) -> None:
    place = gguf_of if as_gguf else member_folder
    with pytest.raises(CheckpointError, match=sentence):
        resolve_pair(str(place(target)), str(place(drafter)))


def test_another_vocabulary_of_the_same_size_is_noticed(member_folder: Folders, gguf_of: Folders) -> None:
    drafter = gguf_of("e2b-assistant")
    drafter.write_bytes(drafter.read_bytes().replace(b"<|think|>", b"<|thank|>"))
    with pytest.raises(CheckpointError, match="vocabularies differ"):
        resolve_pair(str(member_folder("e2b")), str(drafter))


def test_the_underscore_architecture_is_refused_with_the_reason(member_folder: Folders, gguf_of: Folders) -> None:
    drafter = gguf_of("e2b-assistant")
    drafter.write_bytes(drafter.read_bytes().replace(b"gemma4-assistant", b"gemma4_assistant"))
    with pytest.raises(CheckpointError, match=r"'gemma4_assistant', an early spelling that llama.cpp refuses"):
        resolve_pair(str(member_folder("e2b")), str(drafter))
    target = gguf_of("e2b")
    target.write_bytes(target.read_bytes().replace(b"gemma4", b"gemma3"))
    with pytest.raises(CheckpointError, match=r"'gemma3', not 'gemma4'"):
        resolve_pair(str(target), str(member_folder("e2b-assistant")))


def test_a_cut_gguf_is_refused_wherever_it_is_cut(gguf_of: Folders, tmp_path: Path) -> None:
    data = gguf_of("e2b-assistant").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 200), *range(200, len(data), len(data) // 60), len(data) - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_gguf_header(cut)


@pytest.mark.parametrize(
    ("key", "value"), [(b"gemma4.block_count", 1 << 31), (b"gemma4.block_count", 0), (b"gemma4.embedding_length", 1 << 31)]
)
def test_absurd_values_in_keys(key: bytes, value: int, gguf_of: Folders) -> None:
    path = gguf_of("e2b")
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4
    data[at : at + 4] = struct.pack("<I", value)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{key.decode()} is {value}, not an integer"):
        open_gguf(path)
