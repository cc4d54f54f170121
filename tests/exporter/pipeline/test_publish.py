"""`edge-export publish`, with huggingface_hub's own client against a hub on this machine."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("huggingface_hub", reason="needs edge-mtp[export]")

from edge_export.cli.command import main
from edge_export.output import check_output
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import FIGURES_OF, Manifest, files_key
from fake_hub import FakeHub, point_client_at, serving

NAME = "me/gemma-pair"
QUALITY = {"rows": 5, "mean_kl": 0.1, "perplexity": 2.0, "reference_perplexity": 2.0, "greedy_agreement": 0.9}


@pytest.fixture
def bundle(quantized_pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quantized_pair, tmp_path / "pair"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(FakeHub({}, token="hf_right", root=tmp_path / "hub")) as running:
        point_client_at(running, tmp_path / "cache", monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        yield running


def publish(bundle: Path, *words: str, name: str = NAME) -> Result:
    return CliRunner().invoke(main, ["publish", str(bundle), name, *words])


def there(hub: FakeHub) -> dict[str, bytes]:
    folder = hub.repositories[NAME]["main"]
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_bundle_is_published_whole_and_private(bundle: Path, hub: FakeHub) -> None:
    (bundle / "my-notes.txt").write_text("not part of the bundle")
    result = publish(bundle)
    assert (result.exit_code, result.stdout.split()) == (0, [f"{hub.endpoint}/{NAME}"]), result.output
    files = there(hub)
    assert hub.private == {NAME}
    assert files.keys() == {path.name for path in bundle.iterdir()} - {"my-notes.txt"}
    assert all(data == (bundle / name).read_bytes() for name, data in files.items() if name != "README.md")
    card = files["README.md"].decode()
    assert f"hf download {NAME}" in card
    assert "Not measured: speed, acceptance by kind of text, cost curve, joules per token." in card
    open_bundle(hub.repositories[NAME]["main"], check="full")
    check_output(bundle.with_name("other"), force=False)


def test_what_is_there_is_not_sent_again_and_strangers_files_stay(bundle: Path, hub: FakeHub) -> None:
    assert publish(bundle, "--public").exit_code == 0
    (hub.repositories[NAME]["main"] / "old.gguf").write_bytes(b"old")
    before = dict(hub.objects)
    result = publish(bundle)
    assert result.exit_code == 0
    assert "stays beside the bundle: old.gguf." in result.stderr
    assert "public as before" in result.stderr
    assert hub.objects == before


def test_an_interrupted_upload_goes_on(bundle: Path, hub: FakeHub) -> None:
    target = open_bundle(bundle).file("target")
    hub.refused[target.sha256] = 403
    result = publish(bundle)
    assert result.exit_code == 1
    assert "repeat the command, which goes on where it stopped" in result.stderr
    assert "403" in result.stderr
    assert not there(hub), "no commit without all files"
    kept = set(hub.objects)
    assert kept
    assert publish(bundle).exit_code == 0
    assert hub.objects.keys() - kept == {target.sha256}, "only what was missing was sent"


def test_the_card_has_sections_of_figures_of_this_bundle_alone(bundle: Path, tmp_path: Path, hub: FakeHub) -> None:
    path, own = tmp_path / "figures.md", FIGURES_OF.format(files_key(open_bundle(bundle).manifest.files))
    path.write_text(f"{own}\n## Measured: A76, 2026-11-24\n\n| | tok/s |\n")
    result = publish(bundle, "--figures", str(path), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "\n## Measured: A76, 2026-11-24\n\n| | tok/s |\n" in result.stdout
    assert "Not measured: speed" not in result.stdout
    assert hub.repositories == {}, "a dry run asks nothing"
    for text, message in ((b"", "as figures of this bundle's files do"), (FIGURES_OF.encode(), "bundle's files"), (b"\xff", "be read")):
        path.write_bytes(text)
        result = publish(bundle, "--figures", str(path), "--dry-run")
        assert (result.exit_code, result.stderr.count("\n"), message in result.stderr) == (1, 1, True), result.stderr


def test_what_cannot_be_published_is_one_sentence(bundle: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pair", "me/pair@v1", "me/pair:Q4_0", "me/a/b", "../x", "me/"):
        assert "is no OWNER/NAME of a hub repository" in publish(bundle, name=name).stderr
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    result = publish(bundle)
    assert result.exit_code == 1
    assert "401" in result.stderr
    assert "check the token" in result.stderr
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "there is no token for the Hugging Face hub; run hf auth login" in publish(bundle).stderr
    target = bundle / open_bundle(bundle).file("target").path
    target.write_bytes(target.read_bytes()[:-1] + b"\xff\xff"[:1])
    assert publish(bundle).exit_code == 1
    assert hub.objects == {}


@pytest.mark.parametrize("name", ["models.ini", "config.yaml", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_not_followed(bundle: Path, tmp_path: Path, hub: FakeHub, name: str) -> None:
    secret = tmp_path / "secret"
    (bundle / name).replace(secret)
    (bundle / name).symlink_to(secret)
    result = publish(bundle)
    assert result.exit_code == 1
    assert "link" in result.stderr
    assert not hub.repositories


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        *itertools.product(("create", "preupload", "batch", "commit", "revision"), (b"5", b"{}")),
        *itertools.product(("preupload", "batch"), (b'{"files": 5, "objects": 5}', b"[" * 100_000)),
        ("revision", b'{"id": "a/b", "sha": "../x"}'),
    ],
)
def test_a_malformed_answer_to_an_upload_is_one_sentence(bundle: Path, hub: FakeHub, kind: str, answer: bytes) -> None:
    hub.answers = {kind: answer}
    result = publish(bundle)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(("Error: me/gemma-pair could not be published", "Error: the hub http://127.0.0.1"))


def test_a_hub_that_ignores_or_exchanges_files_is_noticed(bundle: Path, hub: FakeHub) -> None:
    assert publish(bundle).exit_code == 0
    folder = hub.repositories[NAME]["main"]
    siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in folder.iterdir()]
    lost = [each for each in siblings if each["rfilename"] != "manifest.json"]
    longer = [each | {"size": each["size"] + (each["rfilename"] == "manifest.json")} for each in siblings]
    for listing, state in ((lost, "lacks manifest.json"), (longer, "holds other contents under the name of manifest.json")):
        hub.answers = {"revision": json.dumps({"id": NAME, "sha": "0" * 40, "siblings": listing, "private": True}).encode()}
        assert state in publish(bundle).stderr


def test_names_of_a_strangers_bundle_are_words_of_the_card_and_of_its_commands(bundle: Path) -> None:
    """Its manifest may name anything: markup, a second block of metadata, commands that readers would paste."""
    odd = "x[/b]$(id)<img src=a>`|.gguf"
    manifest = open_bundle(bundle).manifest
    (bundle / "x[").mkdir()
    (bundle / manifest.files[0].path).rename(bundle / odd)
    evil = "a --- license: mit --- <script>`[x](http://evil)"
    files = (replace(manifest.files[0], path=odd, quantization=evil), *manifest.files[1:])
    sources = {role: replace(source, origin=evil) for role, source in manifest.sources.items()}
    facts = {"path": "extra", "role": "target", "format": "onnx license: mit", "bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    extra = replace(manifest.files[-1], **facts)
    (bundle / "extra").touch()
    parity = {"skipped": evil, "quality": 5, "onnx": [1]}
    changed = replace(manifest, files=(*files, extra), sources=sources, description=evil, created_by=evil, created_at=evil, parity=parity)
    (bundle / "manifest.json").write_text(changed.to_json())
    result, command = publish(bundle, "--dry-run"), f"    llama-server -m {shlex.quote(odd)} "
    assert result.exit_code == 0, result.output
    _, metadata, card = result.stdout.split("---\n", 2)
    assert "license" not in metadata
    for words in ("\n---", "<script", "<img", "\x1b", "\nlicense", "'[x]("):
        assert words not in re.sub("(?m)^    .*$", "", card), "blocks of code show what they hold"
    assert command in card


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: replace(m, sources={}), "does not name what target and drafter were made from"),
        (lambda m: replace(m, files=tuple(replace(f, role="head") if f.role == "drafter" else f for f in m.files)), "without its drafter"),
        (lambda m: replace(m, parity={"quality": QUALITY, "drafts": [1]}), ""),
        (lambda m: replace(m, parity={"quality": QUALITY, "drafts": {"quantized_agreement": "<b>"}}), ""),
    ],
)
def test_a_manifest_that_lacks_what_a_card_says_is_one_sentence(bundle: Path, change: Callable[[Manifest], Manifest], words: str) -> None:
    (bundle / "manifest.json").write_text(change(open_bundle(bundle).manifest).to_json())
    result = publish(bundle, "--dry-run")
    assert result.exit_code == bool(words), result.output
    assert words in result.stderr
    assert not isinstance(result.exception, Exception)


def test_names_that_the_hub_sends_move_no_cursor(bundle: Path, hub: FakeHub) -> None:
    assert publish(bundle).exit_code == 0
    (hub.repositories[NAME]["main"] / "old\x1b[2J.gguf").write_bytes(b"old")
    result = publish(bundle)
    assert "\x1b" not in result.stderr
    assert "old\\x1b[2J.gguf." in result.stderr
