"""An exported bundle under a constraint: valid text from every kind of drafter, the same as without drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chat_words import chat_session

pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
jsonschema = pytest.importorskip("jsonschema", reason="needs edge-mtp[dev]")

from edge_runtime import Gbnf, JsonSchema, Regex, RequestError, SamplingParams, Session, open_session
from edge_runtime.cli.run import main
from edge_runtime.session.chat import Chat
from edge_runtime.session.open import open_sessions
from edge_runtime.session.self_checks import check_lossless
from edge_runtime.text.channels import Text
from simulated_rounds import flat_costs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "class", "module"]},
        "lines": {"type": "array", "items": {"type": "integer", "maximum": 999, "minimum": 0}, "maxItems": 4},
        "public": {"type": "boolean"},
    },
    "required": ["name", "kind", "lines", "public"],
    "additionalProperties": False,
}
LIST = 'root ::= "[" item (", " item){0,3} "]"\nitem ::= "\\"" [a-z_]{1,8} "\\""\n'
PROMPT = "def describe(thing):\n    return "
# A near-tie: two float16 paths that sum in another order may differ by this much.
NEAR_TIE = 0.05


def is_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def is_list(text: str) -> None:
    assert 1 <= len(json.loads(text)) <= 4


def is_date(text: str) -> None:
    assert re.fullmatch(r"[12][0-9]{3}-[01][0-9](-[0-3][0-9])?", text)


CASES: dict[str, tuple[Any, Callable[[str], None]]] = {
    "schema": (JsonSchema(SCHEMA), is_schema),
    "grammar": (Gbnf(LIST), is_list),
    "regex": (Regex(r"[12][0-9]{3}-[01][0-9](-[0-3][0-9])?"), is_date),
}


KINDS = ["dense", "split", "lookup"]


@pytest.fixture(scope="module", params=KINDS)
def session(request: pytest.FixtureRequest, exported_pair: Path, probe_memory: None) -> Iterator[Session]:
    with open_session(exported_pair, threads=1, drafter=request.param) as opened:
        yield opened


@pytest.mark.parametrize("name", CASES)
def test_greedy_output_is_valid_and_that_of_plain_decoding(session: Session, name: str) -> None:
    constraint, check = CASES[name]
    generation = session.generate(PROMPT, max_tokens=150, draft_length=4, constraint=constraint)
    text = generation.text()
    assert generation.complete
    check(text)
    report = check_lossless(session, generation)
    assert report.equal or abs(report.logit_gap or 1.0) < NEAR_TIE, report.sentence()
    if session.drafter_kind != "lookup":
        assert generation.stats.accepted > 0


@pytest.mark.parametrize("place", range(len(CASES)))
def test_sampled_output_is_valid(session: Session, place: int) -> None:
    """Each kind of drafter meets each constraint once, and both rules of acceptance."""
    acceptance: Any = ("block", "coupled")[place % 2]
    constraint, check = list(CASES.values())[(place + KINDS.index(str(session.drafter_kind))) % len(CASES)]
    for seed in range(4):
        options = SamplingParams(temperature=1.2, seed=seed)
        generation = session.generate(
            PROMPT, max_tokens=150, draft_length=3, constraint=constraint, sampling=options, acceptance=acceptance
        )
        text = generation.text()
        assert generation.complete
        check(text)


def test_a_text_cut_short_says_so(session: Session) -> None:
    generation = session.generate(PROMPT, max_tokens=3, draft_length=4, constraint=JsonSchema(SCHEMA))
    generation.text()
    assert len(generation.tokens) == 3
    assert not generation.complete


def test_an_invalid_constraint_is_refused_before_anything_runs(session: Session) -> None:
    with pytest.raises(RequestError, match="Unimplemented keys"):
        session.generate(PROMPT, constraint=JsonSchema({"type": "array", "uniqueItems": True}))


def run(bundle: Path, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["generate", str(bundle), "--threads", "1", "--drafter", "dense", *arguments, PROMPT])


def test_the_command_takes_schemas_and_grammars(exported_pair: Path, probe_memory: None, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "list.gbnf").write_text(LIST)
    runs = {
        "schema": ("--json-schema", str(tmp_path / "schema.json")),
        "grammar": ("--grammar", str(tmp_path / "list.gbnf")),
    }
    for name, option in runs.items():
        result = run(exported_pair, *option, "--verify-lossless")
        assert result.exit_code == 0, result.output
        CASES[name][1](result.stdout.strip())
        assert "lossless: all" in result.stderr or "first divergence" in result.stderr
    inline = run(exported_pair, "--json-schema", json.dumps(SCHEMA), "--json")
    record = json.loads(inline.stdout)
    is_schema(record["text"])
    assert record["whole"] is True
    assert "raise --max-tokens" in run(exported_pair, *runs["schema"], "--max-tokens", "2").stderr


def test_the_command_refuses_in_one_sentence(exported_pair: Path, probe_memory: None, tmp_path: Path) -> None:
    for arguments, code, words in (
        (("--json-schema", "{"), 1, "is not JSON"),
        (("--grammar", str(tmp_path / "none.gbnf")), 1, "none.gbnf cannot be read"),
        (("--grammar", "a", "--json-schema", "{}"), 2, "exclude each other"),
    ):
        result = run(exported_pair, *arguments)
        assert result.exit_code == code
        assert words in result.stderr
        assert "Traceback" not in result.output


def test_requests_at_once_keep_to_their_own_constraints(exported_pair: Path, probe_memory: None) -> None:
    for kind in KINDS:
        with open_sessions(exported_pair, 3, threads=1, drafter=kind) as sessions:
            running = [
                session.generate(PROMPT, max_tokens=150, draft_length=3, constraint=constraint)
                for session, (constraint, _) in zip(sessions.sessions, CASES.values(), strict=True)
            ]
            for _ in sessions.run(running):
                pass
            for generation, (_, check) in zip(running, CASES.values(), strict=True):
                assert generation.complete
                assert generation.finish_reason == "stop"
                check(generation.text())


def test_an_answer_of_a_chat_keeps_to_the_constraint() -> None:
    chat = Chat(chat_session("no JSON at all", drafts=True), constraint=Regex("(true|false|no)"))
    for _ in range(2):
        answer = chat.say("Yes?")
        assert "".join(event.text for event in answer if isinstance(event, Text)) == "no"
        assert answer.finish == "stop"


@pytest.mark.parametrize("session", ["split"], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_the_policy_that_weighs_costs_writes_what_plain_decoding_does(session: Session, name: str) -> None:
    constraint, check = CASES[name]
    parts = replace(session._parts, costs=flat_costs, acceptance_cache=None)
    own = Session(replace(parts, settings=session.settings, monitor=None))
    generation = own.generate(PROMPT, max_tokens=150, constraint=constraint)
    text = generation.text()
    check(text)
    plain = own.generate(PROMPT, max_tokens=150, constraint=constraint, draft_length=0)
    assert plain.text() == text
    assert generation.tokens == plain.tokens
