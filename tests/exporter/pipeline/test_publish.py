"""`edge-export publish`, with huggingface_hub's own client against a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("huggingface_hub", reason="needs edge-mtp[export]")

from edge_export.cli.command import main
from edge_export.output.atomic_folder import check_output
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import Manifest
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


def figures_of(bundle: Path, **changes: Any) -> dict[str, Any]:
    """What `edge-bench run --json` writes of a bundle, as far as a card takes it."""
    files = [
        {"role": e.role, "format": e.format, "quantization": e.quantization, "bytes": e.bytes} for e in open_bundle(bundle).manifest.files
    ]
    row = {
        "label": "dense profit",
        "variant": {"side": "edge-mtp", "drafter": "dense", "policy": "profit", "length": None},
        "domain": None,
        "tokens_per_second": 31.25,
        "first_token_seconds": 0.5,
        "speed_up": {"value": 2.5, "low": 2.25, "high": 2.75},
        "acceptance_rate": 0.625,
        "acceptance_by_position": [0.75, 0.5],
        "mean_acceptance_length": 2.25,
        "equal": 5,
        "compared": 5,
    }
    energy = {
        "meter": "linux:rapl",
        "scope": "package",
        "estimate": False,
        "variants": [{"name": "plain", "joules_per_output_token": {"value": 1.5, "low": 1.25, "high": None}}],
    }
    return {
        "header": {
            "version": "0.1.0",
            "created_at": "2026-11-24T01:02:03+00:00",
            "files": files,
            "machine": {"processor": "A76 | <b>x</b>"},
            "settings": {"threads": 4, "repeats": 6, "backend": "llama"},
            "engines": {"llama-cpp-python": "0.3.36"},
        },
        "overall": [row],
        "by_domain": [row | {"domain": "code"}],
        "cost_curves": [{"length": 32, "verify_seconds": [0.125, 0.25], "draft_step_seconds": 0.0625}],
        "energy": energy,
        "notes": ["the figures are disturbed"],
    } | changes


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


def test_the_card_has_figures_with_their_machine(bundle: Path, tmp_path: Path, hub: FakeHub) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(figures_of(bundle)))
    result = publish(bundle, "--figures", str(path), "--dry-run")
    assert result.exit_code == 0, result.output
    for line in (
        "## Measured on A76 \\| &lt;b&gt;x&lt;/b&gt;, 2026-11-24: llama, 4 threads, 6 repeats (edge-mtp 0.1.0, llama-cpp-python 0.3.36)",
        "- the figures are disturbed",
        "| code | 31.2 | 2.5 (2.25 to 2.75) | 62% | 2.25 | 500 | 5 of 5 |",
        "| dense profit | 75% | 50% |",
        "Cost curve after 32 tokens; a draft step takes 62.5 ms:",
        "| ms | 125 | 250 |",
        "Joules per output token: measured, linux:rapl, scope package, idle power included.",
        "| plain | 1.5 |",
    ):
        assert line in result.stdout.splitlines()
    assert hub.repositories == {}, "a dry run asks nothing"
    path.write_text(json.dumps(figures_of(bundle, energy=None, cost_curves=[], overall=[], by_domain=[])))
    card = publish(bundle, "--figures", str(path), "--dry-run").stdout
    for sentence in ("Speed and acceptance by kind of text: not measured.", "Cost curve: not measured.", "Joules per token: not measured."):
        assert sentence in card


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no figures"),
        ("[" * 100_000, "holds no figures"),
        ("{}", "holds no figures"),
        ('{"header": 5}', "holds no figures"),
        (None, "measures another bundle"),
        ("1e400", "holds no figures"),
        ("value", "no benchmark measures"),
    ],
)
def test_other_figures_are_refused(bundle: Path, tmp_path: Path, text: str | None, message: str) -> None:
    path, figures = tmp_path / "figures.json", figures_of(bundle)
    if text is None:
        figures["header"]["files"][0]["bytes"] += 1
    elif text == "value":
        figures["overall"][0]["tokens_per_second"] = -1.0
    path.write_text(json.dumps(figures) if text in (None, "value") else text)
    result = publish(bundle, "--figures", str(path), "--dry-run")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr
    assert message in result.stderr


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


@pytest.mark.parametrize("kind", ["create", "preupload", "batch", "commit", "revision"])
@pytest.mark.parametrize(
    "answer", [b"", b"5", b"{}", b'{"files": 5, "objects": 5, "url": 5}', b'{"id": "a/b", "sha": "../x"}', b"[" * 100_000]
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
    evil = "a\n---\nlicense: mit\n---\n<script>`[x](http://evil)\x1b[2J"
    files = (replace(manifest.files[0], path=odd, quantization=evil), *manifest.files[1:])
    sources = {role: replace(source, origin=evil) for role, source in manifest.sources.items()}
    facts = {"path": "extra", "role": "target", "format": "onnx\nlicense: mit", "bytes": 0, "sha256": hashlib.sha256().hexdigest()}
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
