"""What edge-bench runs and in which order: prompts, variants, interleaving."""

from __future__ import annotations

import json
from dataclasses import replace

import click
import pytest

from edge_bench.measure.records import BASELINE, CHOOSING_POLICIES, edge_variants, parse_lengths, parse_names, parse_numbers, peer_variants
from edge_bench.measure.request import DOMAINS, BenchRequest, Prompt, long_prompt, option_words, prepare, read_prompts, shipped_prompts
from edge_bench.measure.runners import Schedule, context_schedule, mixed
from edge_devices.command_line import takes
from edge_runtime.drafting.policies import POLICIES
from edge_runtime.errors import RequestError
from edge_runtime.session.load_options import LoadOptions
from scripted import make_session

PROMPTS = tuple(Prompt(domain="d", number=n, ids=(n, n + 1), text=str(n)) for n in range(3))


def test_every_domain_ships_prompts_and_they_differ():
    prompts = shipped_prompts(DOMAINS, 99)
    assert {prompt.domain for prompt in prompts} == set(DOMAINS)
    assert len({prompt.text for prompt in prompts}) == len(prompts) >= 3 * len(DOMAINS)
    assert len(shipped_prompts(DOMAINS, 1)) == len(DOMAINS)


def test_own_prompts_are_read_from_lists_objects_and_texts(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(["a", "b", "c"]))
    (tmp_path / "sets.json").write_text(json.dumps({"left": ["a"], "right": ["b"]}))
    (tmp_path / "letter.txt").write_text("Dear all,\n")
    assert [(p.domain, p.number, p.text) for p in read_prompts(tmp_path / "mine.json", 2)] == [("mine", 0, "a"), ("mine", 1, "b")]
    assert [p.domain for p in read_prompts(tmp_path / "sets.json", 2)] == ["left", "right"]
    assert [(p.domain, p.text) for p in read_prompts(tmp_path / "letter.txt", 2)] == [("letter", "Dear all,\n")]


OTHERS = {
    "mt_bench.jsonl": """{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}
{"question_id": 111, "category": "math", "turns": ["Add."]}
""",
    "spec_bench.txt": """{"question_id": 1, "category": "qa", "turns": ["Who?\u2028When?"]}

{"question_id": 2, "category": "qa", "turns": ["What?"]}""",
    "share.json": """[{"conversations": []}, {"conversations": [{"from": "gpt", "value": "Hello"}]},
{"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}]}]""",
    "parts.jsonl": """{"messages": [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "Hi"}]}]}""",
    "chat.ndjson": """{"messages": [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}]}\n""",
    "plain.jsonl": """{"prompt": "Once", "category": 3}\n"upon"\n""",
}


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("mt_bench.jsonl", [("writing", "Write.", True), ("math", "Add.", True)]),
        ("spec_bench.txt", [("qa", "Who?\u2028When?", True), ("qa", "What?", True)]),
        ("share.json", [("share", "Hi", True)]),
        ("parts.jsonl", [("parts", "Hi", True)]),
        ("chat.ndjson", [("chat", "Hi", True)]),
        ("plain.jsonl", [("plain", "Once", False), ("plain", "upon", False)]),
    ],
)
def test_questions_of_others_are_read_by_category(tmp_path, name, prompts):
    (tmp_path / name).write_text(OTHERS[name], encoding="utf-8")
    assert [(p.domain, p.text, p.is_turn) for p in read_prompts(tmp_path / name, 2)] == prompts


@pytest.mark.parametrize("text", ["[1] Smith, 2001\n[2] Jones", '{"name": "Ada",\n', "{ x }\n{ y }", '[TODO]\n{"a": 1}'])
def test_a_text_that_begins_with_a_bracket_is_a_text(tmp_path, text):
    (tmp_path / "notes.txt").write_text(text)
    assert [(p.domain, p.text) for p in read_prompts(tmp_path / "notes.txt", 2)] == [("notes", text)]


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("other.jsonl", '{"instruction": "Write."}\n', 1),
        ("other.txt", '{"instruction": "Write."}\n{"instruction": "Add."}', 1),
        ("cut.jsonl", '{"prompt": "a"}\n{"prompt": "b', 2),
        ("cut.txt", '{"prompt": "a"}\n{"prompt": "b', 2),
    ],
)
def test_json_that_is_not_understood_is_no_prompt(tmp_path, name, text, number):
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=f"entry {number} has no text that could be a prompt; give a JSON list or lines"):
        read_prompts(tmp_path / name, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "[",
        "[1]",
        '[""]',
        "[]",
        "3",
        '{"a": "b"}',
        '{"": ["b"]}',
        '[{"messages": [{"role": "assistant", "content": "a"}]}]',
        '{"' + "x" * 99 + '": ["b"]}',
        "[" * 5000,
    ],
)
def test_files_that_hold_no_prompts_are_refused(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(RequestError, match=r"bad\.json"):
        read_prompts(tmp_path / "bad.json", 2)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    for name in ("bad.txt", "missing.txt"):
        with pytest.raises(RequestError, match="cannot be read as UTF-8"):
            read_prompts(tmp_path / name, 2)


def test_prompts_become_ids():
    (prompt,) = prepare(shipped_prompts(["code"], 1), make_session())
    assert prompt.ids == tuple(ord(c) % 17 for c in prompt.text)


def test_long_prompts_have_exactly_the_length_asked_for():
    assert long_prompt(PROMPTS, 8) == (0, 1, 1, 2, 2, 3, 0, 1)
    assert long_prompt(PROMPTS, 2) == (0, 1)


@pytest.mark.parametrize(("text", "lengths"), [("3", (3,)), ("1-8", tuple(range(1, 9))), ("4, 2,2", (2, 4)), ("none", ())])
def test_lengths_are_read(text, lengths):
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "13", "1-13", "-1", "3-", "5-2", "a", "1,,2", "1-99999999999", "²"])
def test_lengths_that_cannot_be_are_refused(text):
    with pytest.raises(RequestError, match="draft lengths"):
        parse_lengths(text)


def test_numbers_and_names_are_read():
    assert parse_numbers("128,8192", "lengths") == (128, 8192)
    assert parse_names("b,a,b", ("a", "b"), "name") == ("b", "a")
    assert parse_names("none", ("a",), "name") == ()
    with pytest.raises(RequestError, match="name 'c' is unknown; choose from a, b"):
        parse_names("a,c", ("a", "b"), "name")


def test_variants_have_different_names_and_begin_with_plain():
    variants = [*edge_variants(["dense", "lookup"], [1, 2], CHOOSING_POLICIES), *peer_variants([1, 2])]
    assert variants[0] == BASELINE
    assert len({v.label for v in variants}) == len(variants) == 1 + 2 * (2 + len(CHOOSING_POLICIES)) + 4
    assert set(CHOOSING_POLICIES) == set(POLICIES) - {"fixed"}


@pytest.mark.parametrize("repeats", [2, 6])
def test_each_variant_stands_as_early_as_late(repeats):
    variants = tuple(edge_variants(["dense"], [1, 2, 3], []))
    plan = Schedule(part="domains", variants=variants, prompts=PROMPTS, repeats=repeats, tokens=5)
    steps = list(plan.requests())
    assert len(steps) == len(plan) == repeats * 3 * 4
    assert len({(repeat, prompt.number, variant) for repeat, prompt, variant in steps}) == len(steps)
    groups = [steps[i : i + 4] for i in range(0, len(steps), 4)]
    for prompt in PROMPTS:
        orders = [[variant for _, _, variant in group] for group in groups if group[0][1] == prompt]
        mean_place = {v: sum(order.index(v) for order in orders) / len(orders) for v in variants}
        assert set(mean_place.values()) == {1.5}
    assert all(len({(repeat, prompt) for repeat, prompt, _ in group}) == 1 for group in groups), "a prompt's variants follow each other"


def test_nobody_always_comes_after_the_same_neighbour():
    """A verify of many rows leaves a hot machine to the next: a fixed order would charge it to the same variant each time."""
    variants = edge_variants(["dense"], [1, 3, 6], ["profit"])
    turns = [mixed(variants, turn, place) for turn in range(4) for place in range(5)]
    assert all(set(turn) == set(variants) for turn in turns)
    before = {variant: {turn[turn.index(variant) - 1] for turn in turns if turn.index(variant)} for variant in variants}
    assert all(len(neighbours) == len(variants) - 1 for neighbours in before.values())
    assert turns == [mixed(variants, turn, place) for turn in range(4) for place in range(5)], "the same in every measurement"


def test_warm_up_runs_each_variant_on_the_first_prompt_only():
    plan = Schedule(part="domains", variants=tuple(edge_variants(["dense"], [1, 2], [])), prompts=PROMPTS, repeats=3, tokens=5)
    steps = list(plan.warm_up(2))
    assert len(steps) == 6
    assert {prompt.number for _, prompt, _ in steps} == {0}
    assert list(plan.warm_up(0)) == []


def test_context_plan_has_a_prompt_of_each_length():
    plan = context_schedule(PROMPTS, [BASELINE], [4, 9], repeats=1, tokens=5)
    assert [(prompt.domain, len(prompt.ids)) for _, prompt, _ in plan.requests()] == [("4", 4), ("9", 9)]


def request_of(*words: str) -> BenchRequest:
    requests: list[BenchRequest] = []
    click.command()(takes("request", BenchRequest)(lambda request: requests.append(request))).main([*words], standalone_mode=False)
    return requests[0]


def test_thorough_measures_longer_and_leaves_what_is_asked_for(tmp_path):
    usual, thorough = request_of(), request_of("--repeats", "3", "--thorough")
    assert (usual.lengths, usual.policies, usual.contexts) == ((1, 3, 6), ("profit",), (128, 512))
    assert (thorough.lengths, thorough.policies, thorough.tokens) == (tuple(range(1, 9)), CHOOSING_POLICIES, 96)
    assert thorough.repeats == usual.repeats == 3
    sent = request_of(*map(str, option_words(thorough)))
    assert sent == replace(thorough, thorough=False)
    assert option_words(LoadOptions(packed_cache=False, context=64)) == ["--context", "64", "--no-packed-cache"]
