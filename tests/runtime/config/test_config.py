"""The configuration: what is refused and how, files that come back as they were, layers over layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.config.schema import (
    BLOCK,
    PRESET_NAMES,
    SECTIONS,
    CacheConfig,
    DrafterConfig,
    SpeculativeConfig,
    StreamingConfig,
    TuningConfig,
    VerifierConfig,
    bytes_of,
)
from edge_runtime.config.settings import MAX_CONFIG_BYTES, PRESETS, config_text, expanded, parse_config, preset_of, read_config
from edge_runtime.drafting.policies import POLICIES
from edge_runtime.errors import ConfigError

maybe = st.none()
texts = maybe | st.text(min_size=1, max_size=40)
lengths = st.lists(st.integers(0, 12), min_size=3, max_size=3).map(sorted)


@st.composite
def tunings(draw: st.DrawFn) -> TuningConfig:
    shortest, first, longest = draw(lengths)
    return TuningConfig(
        preset=draw(maybe | st.sampled_from(PRESET_NAMES)),
        policy=draw(maybe | st.sampled_from(POLICIES)),
        min_horizon=draw(maybe | st.just(shortest)),
        draft_length=draw(maybe | st.just(first)),
        max_horizon=draw(maybe | st.just(max(longest, 1))),
        longest_draft=draw(maybe | st.integers(max(longest, 1), 12)),
        acceptance_threshold=draw(maybe | st.floats(0, 1)),
        rejection_penalty=draw(maybe | st.floats(0.01, 12)),
        monitoring_window=draw(maybe | st.integers(5, 10_000)),
    )


@st.composite
def configs(draw: st.DrawFn) -> SpeculativeConfig:
    return SpeculativeConfig(
        drafter=DrafterConfig(
            model=draw(texts),
            precision=draw(texts),
            sparse_output=draw(maybe | st.booleans()),
            max_candidates=draw(maybe | st.integers(1, 1 << 24)),
        ),
        verifier=VerifierConfig(model=draw(texts), precision=draw(texts)),
        cache=CacheConfig(
            max_context_length=draw(maybe | st.integers(1, 1 << 24)),
            kv_type=draw(maybe | st.sampled_from(["f16", "q8_0", "q4_0"])),
            memory_limit=draw(maybe | st.integers(1, 1 << 60) | st.sampled_from(["2GB", "1.5 GiB", "900"])),
            overflow=draw(maybe | st.sampled_from(["stop", "drop_oldest"])),
        ),
        tuning=draw(tunings()),
        streaming=StreamingConfig(chunk_size=draw(maybe | st.integers(1, 4096))),
    )


def keys_of(config: SpeculativeConfig) -> dict[tuple[str, str], object]:
    return {
        (name, each.name): value
        for name in SECTIONS
        for each in dataclasses.fields(getattr(config, name))
        if (value := getattr(getattr(config, name), each.name)) is not None
    }


@given(configs())
def test_a_written_file_reads_as_what_was_written(config):
    text = config_text(config)
    assert text.isascii()
    assert parse_config(text, "file") == config


@given(configs(), configs(), configs())
def test_what_is_said_above_holds_and_what_is_said_at_all_stays_said(upper, middle, lower):
    merged = upper.over(middle).over(lower)
    assert keys_of(upper).items() <= keys_of(merged).items()
    assert keys_of(merged).keys() == keys_of(upper).keys() | keys_of(middle).keys() | keys_of(lower).keys()
    tuning = merged.tuning
    if None not in (tuning.min_horizon, tuning.draft_length, tuning.max_horizon, tuning.longest_draft):
        assert tuning.min_horizon <= tuning.draft_length <= tuning.max_horizon <= tuning.longest_draft <= MAX_DRAFT_LENGTH


@given(configs(), configs())
def test_lower_values_move_only_where_they_must(upper, lower):
    moved = {key for key, value in keys_of(upper.over(lower)).items() if key not in keys_of(upper) and keys_of(lower)[key] != value}
    assert moved <= {("tuning", name) for name in ("min_horizon", "draft_length", "max_horizon", "longest_draft")}
    if not upper.tuning.lengths and upper.tuning.longest_draft is None:
        assert not moved


@given(configs())
def test_a_config_under_or_over_nothing_is_itself(config):
    assert config.over(SpeculativeConfig()) == SpeculativeConfig().over(config) == config


def test_a_range_moves_the_lower_layers_start():
    lower = SpeculativeConfig(tuning=TuningConfig(draft_length=3, min_horizon=1, max_horizon=8, longest_draft=8))

    def over(**tuning: int) -> tuple[int | None, ...]:
        merged = SpeculativeConfig(tuning=TuningConfig(**tuning)).over(lower).tuning
        return merged.min_horizon, merged.draft_length, merged.max_horizon, merged.longest_draft

    assert over(max_horizon=2) == (1, 2, 2, 8)
    assert over(min_horizon=5) == (5, 5, 8, 8)
    assert over(draft_length=10) == (1, 10, 10, 10)
    assert over(draft_length=0) == (0, 0, 8, 8)
    assert over(longest_draft=2) == (1, 2, 2, 2)


def test_keys_of_older_files_are_read_by_their_new_names():
    old = "speculative_decoding: {verifier: {parallel_batch_size: 9}, tuning: {initial_horizon: 3}, cache: {shared_kv: true}}"
    assert parse_config(old, "file") == SpeculativeConfig(tuning=TuningConfig(draft_length=3, longest_draft=8))
    both = "speculative_decoding: {tuning: {initial_horizon: 3, draft_length: 4}}"
    with pytest.raises(ConfigError, match=r"initial_horizon is the older name of .*draft_length, which has another value"):
        parse_config(both, "file")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("tuning: {max_horizn: 3}", "speculative_decoding.tuning.max_horizn is not known; the nearest known key is max_horizon"),
        ("tuningg: {}", "speculative_decoding.tuningg is not known; the nearest known key is tuning"),
        ("tuning: {chunk_size: 3}", "tuning.chunk_size is not known; it belongs under speculative_decoding.streaming"),
        ("tuning: {max_horizon: 13}", "max_horizon is 13; write an integer from 1 to 12"),
        ("tuning: {max_horizon: true}", "max_horizon is true; write an integer"),
        ("tuning: {acceptance_threshold: .nan}", "acceptance_threshold is nan; write a number from 0 to 1"),
        ("tuning: {policy: clever}", "policy is 'clever'; choose one of profit, fixed, rolling, stepped"),
        ("tuning: {draft_length: 5, max_horizon: 4}", "draft_length 5, max_horizon 4; min_horizon <= draft_length"),
        ("tuning: {initial_horizon: '5'}", "draft_length is '5'; write an integer"),
        ("{tuning: {max_horizon: 6}, verifier: {parallel_batch_size: 4}}", "max_horizon 6, longest_draft 3; .*<= longest_draft must hold"),
        ("drafter: {sparse_output: 'no'}", "sparse_output is 'no'; write true or false"),
        ("cache: {kv_type: lru}", "kv_type is 'lru'; choose one of f16"),
        ("cache: {memory_limit: 2 parsecs}", "memory_limit is '2 parsecs'; write a number of bytes"),
        ("cache: {memory_limit: 99999999999999 TB}", "memory_limit is"),
        ("drafter: {model: 4}", "model is 4; write a text"),
        ("drafter: {precision: ''}", "precision is ''; write a text"),
        ("tuning: 3", "speculative_decoding.tuning is 3, not keys with values"),
        ("[1]", r"speculative_decoding is \[1\], not keys with values"),
        ("tuning: {max_horizon: 3, max_horizon: 4}", "max_horizon stands in line 1 and again in line 1"),
        ("tuning: &a {max_horizon: 3}", "anchors and aliases"),
        ("tuning: {<<: {max_horizon: 3}}", "a key must be a plain word"),
        ("tuning: {2: 3}", "tuning.2 is not known"),
        ("tuning: !!python/object/apply:os.system ['echo']", "the tag .* is not allowed"),
        ("tuning: {max_horizon: " + "9" * 5000 + "}", "cannot be read"),
        ("tuning: {max_horizon: 2026-02-31}", "cannot be read"),
        ("tuning: " + "[" * 2000, "nested deeper"),
        ("tuning: {", "is not YAML"),
    ],
)
def test_refusals_name_file_place_value_and_what_to_do(body, words):
    with pytest.raises(ConfigError, match=f"^my.yaml.*{words}"):
        parse_config(f"{BLOCK}: {body if body[0] in '{[' else '{' + body + '}'}", "my.yaml")


def test_keys_at_the_top_are_told_where_they_belong():
    for text, words in (
        ("tuning: {}", "belongs under speculative_decoding"),
        ("speculative: {}", "nearest known key is speculative_decoding"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_config(text, "file")


@pytest.mark.parametrize("text", ["", "# nothing", f"{BLOCK}:", f"{BLOCK}: {{tuning: , cache: null}}", "---\n"])
def test_a_file_that_says_nothing_is_no_error(text):
    assert parse_config(text, "file") == SpeculativeConfig()


@given(st.text(max_size=200) | st.text(st.sampled_from("{}[]:,&*!|>-\n '\"a1?%@`<"), max_size=80))
def test_any_text_is_read_or_refused_in_one_sentence(text):
    message = ""
    try:
        parse_config(f"{BLOCK}: {text}", "file")
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 700


def test_an_alias_bomb_is_refused_before_it_grows():
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(ConfigError, match="anchors and aliases"):
        parse_config("\n".join(lines), "file")


def test_files_are_bounded_text_files(tmp_path: Path):
    big, odd, good = (tmp_path / name for name in ("big.yaml", "odd.yaml", "good.yaml"))
    big.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    odd.write_bytes(b"\xff\xfe")
    good.write_text("\ufeff" + config_text(preset_of("code")), encoding="utf-8")
    for path, words in ((big, "has more than"), (odd, "save it as UTF-8"), (tmp_path / "none", "not a file"), (tmp_path, "not a file")):
        with pytest.raises(ConfigError, match=words):
            read_config(path)
    assert read_config(good) == PRESETS["code"]


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2_000_000_000), ("1.5 GiB", 3 << 29), ("4096", 4096), ("3 kb", 3000), (17, 17), ("1TiB", 1 << 40)]
)
def test_sizes(text, size):
    CacheConfig(memory_limit=text)
    assert bytes_of(text) == size


@pytest.mark.parametrize(
    ("name", "start", "shortest", "longest"), [("code", 3, 2, 3), ("chat", 6, 5, 8), ("edge", 3, 2, 4), ("batch", 8, 8, 10)]
)
def test_presets(name, start, shortest, longest):
    tuning = expanded(SpeculativeConfig(tuning=TuningConfig(preset=name))).tuning
    assert (tuning.draft_length, tuning.min_horizon, tuning.max_horizon) == (start, shortest, longest)
    assert set(PRESETS) == set(PRESET_NAMES)


def test_what_stands_beside_a_preset_goes_over_it():
    tuning = expanded(parse_config(f"{BLOCK}: {{tuning: {{preset: chat, max_horizon: 4}}}}", "file")).tuning
    assert (tuning.draft_length, tuning.min_horizon, tuning.max_horizon) == (4, 4, 4)


def test_unknown_presets_are_refused():
    with pytest.raises(ConfigError, match="'fast' is unknown; choose one of code, chat, edge, batch"):
        preset_of("fast")
