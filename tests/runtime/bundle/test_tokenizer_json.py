"""A tokenizer.json changes no prompt's length but by Gemma's own rules, and holds nothing that grows, turns for ever or panics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="needs edge-mtp[onnx]")

from edge_runtime.backends.onnx.target import TokenizerVocabulary
from edge_runtime.bundle import tokenizer_json as tokenizer_file
from edge_runtime.bundle.manifest import OnnxGraphs
from edge_runtime.errors import BundleError

PAIR = Path(__file__).parents[3] / "exporter" / "edge_export" / "reference_pair" / "target" / "tokenizer.json"
SOUND = json.loads(PAIR.read_text(encoding="utf-8"))
GRAPHS = OnnxGraphs(
    opset=23, contrib_ops=(), rotations=(), context=64, bos_token=2, eos_token=1, eog_tokens=(1,), control_tokens=(0, 1, 2, 3)
)
TEXT = "def area(r):\n    return 3.14 * r * r  # of a circle\n"
Open = Callable[..., TokenizerVocabulary]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    def made(**changes: Any) -> TokenizerVocabulary:
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(SOUND | changes), encoding="utf-8")
        return TokenizerVocabulary(path, GRAPHS, 4096)

    return made


def replaced(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def split(pattern: dict[str, str]) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def test_prompts_are_neither_cut_off_nor_filled_up(opened: Open) -> None:
    whole = opened().encode(TEXT)
    cut = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    filled = {
        "strategy": {"Fixed": 1000},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    assert len(whole) > 8
    assert opened(truncation=cut).encode(TEXT) == whole
    assert opened(truncation=cut | {"stride": 9}).encode(TEXT) == whole, "the library panics where the stride is longer"
    assert opened(padding=filled).encode(TEXT) == whole


def test_the_forms_in_which_gemma_was_published_are_read(opened: Open) -> None:
    whole = opened().encode(TEXT)
    lists = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
    assert opened(**{place: {"type": "Sequence", inner: [SOUND[place]]} for place, inner in lists.items()}).encode(TEXT) == whole
    assert opened(pre_tokenizer=None, post_processor=None, decoder=None).encode(TEXT) == whole
    named = SOUND["model"]["vocab"] | {"type": 4096, "Regex": 4097}
    assert opened(model=SOUND["model"] | {"vocab": named}).encode(TEXT) == whole


@pytest.mark.parametrize("pattern", ["[^\n]+|[\n]+", r"[^\n]+|[\n]+", r"[a-z0-9_]+|\s|[^a-z]", "x"])
def test_a_split_in_linear_time_is_run(pattern: str, opened: Open, tmp_path: Path) -> None:
    """llama.cpp's own rule for Gemma 4 is one: runs of newlines apart from the rest."""
    vocabulary = opened(pre_tokenizer=split({"Regex": pattern}))
    assert b"".join(map(vocabulary.piece, vocabulary.encode(TEXT, add_bos=False))).decode() == TEXT
    tokenizer_file.check_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "pattern",
    ["[^\n]+[\n]+", "(a+)+", "a++", "a*", "[a-z]{2,}", "[a&&b]+", "[[:alpha:]]+", "a+?", r"\Ka", "a|", "", "a|ab", "[a-z]+$", "(?i)a"],
)
def test_a_split_that_may_take_longer_is_refused(pattern: str, opened: Open, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="Gemma's tokenizers do not have"):
        opened(pre_tokenizer=split({"Regex": pattern}))
    with pytest.raises(BundleError, match="Gemma's tokenizers do not have"):
        tokenizer_file.check_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"pre_tokenizer": 1}', '{"decoder": {"type": "Sequence"}}', '{"normalizer": {"type": "Replace"}}']
)
def test_a_malformed_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(BundleError, match=r"take the tokenizer\.json of the checkpoint|copy the bundle again"):
        tokenizer_file.check_file(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [replaced("a", "a" * 100)] * 6}},
        {"normalizer": {"type": "Sequence", "normalizers": [replaced("a", "aa")] * 4}},
        {"normalizer": {"type": "Sequence", "normalizers": [replaced("a", "b")] * 9}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [replaced("a", "a" * 9)]}]}},
        {"normalizer": replaced("", "x")},
        {"normalizer": replaced("(a|a|aa)*c", "x", "Regex")},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 1_000_000}},
        {"pre_tokenizer": split({"Regex": "(a+)+$|(a|aa)+$"})},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}},
        {"decoder": {"type": "Sequence", "decoders": [replaced("a", "a" * 100)] * 4}},
        {"post_processor": SOUND["post_processor"] | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 5000}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    ],
)
def test_parts_that_gemma_does_not_have_are_refused(changes: dict[str, Any], opened: Open) -> None:
    with pytest.raises(BundleError, match=r"Gemma's tokenizers do not have|makes a text up to|at most 65536 are read"):
        opened(**changes)


def test_a_part_that_has_the_library_panic_never_reaches_it(opened: Open, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BundleError, match="the component 'Precompiled'"):
        opened(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    assert capfd.readouterr().err == ""


def test_an_escaped_name_is_found_in_the_opened_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    text = json.dumps(SOUND | {"normalizer": {"type": "NFC"}}).replace('"type": "NFC"', '"\\u0074ype": "NFC"')
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BundleError, match="the component 'NFC'"):
        TokenizerVocabulary(path, GRAPHS, 4096)


def test_files_that_are_missing_or_too_long_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        TokenizerVocabulary(tmp_path / "none", GRAPHS, 4096)
    monkeypatch.setattr(tokenizer_file, "MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(BundleError, match=r"cannot be read as a tokenizer .it has more than"):
        TokenizerVocabulary(PAIR, GRAPHS, 4096)
