"""The comparison with other engines: its tables from records, workers as they answer and fail, and what cannot be measured."""

from __future__ import annotations

import contextlib
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import bench_peers
import peer_edge_mtp
from bench_peers import OURS_LLAMA, PeerProcess, Peers, Side, draft_notes, measured
from bench_records import PEER_PLAIN, header, run
from edge_bench.measure.records import BASELINE, DEFAULT, OURS, PLAIN, Note, RecordFile, Run, Variant
from edge_bench.measure.request import Prompt
from edge_bench.measure.runners import EdgeRunner, Schedule
from edge_devices.files.typed_json import to_json
from edge_runtime.errors import BackendError
from scripted import make_session

OUR_DEFAULT = Variant(side=OURS, drafter="split", policy="profit")
THEIR_DEFAULT = Variant(side="LiteRT-LM int4", drafter="none", policy=DEFAULT)
THEIR_PLAIN = replace(THEIR_DEFAULT, policy=PLAIN)
PROMPT = Prompt(domain="code", number=0, text="def", ids=(1, 2, 3))
STUB = """
import contextlib, sys
print("noise of an engine")
def answer(request):
    if "lengths" in request:
        return {"prompts": [{"domain": name, "number": 0, "text": "def", "ids": [1, 2, 3]} for name in ("code", "64")]}
    if request["tokens"] == 1:
        raise ValueError("too few tokens")
    if request["tokens"] == 3:
        print("the last words", file=sys.stderr)
        sys.exit(3)
    return {"prompt_tokens": 3, "tokens": request["tokens"], "seconds": 0.5, "first_token_seconds": 0.1, "drafted": 0, "accepted": 0}
@contextlib.contextmanager
def engine():
    yield {"version": "stub 1", "flags": "none"}, answer
    print("x.cc:298] MTP Drafter - Success rate: 0.5", file=sys.stderr)
"""


@pytest.fixture
def records(tmp_path: Path) -> Path:
    lines = [header(engines={OURS: "edge-mtp 0 on onnxruntime 1", "LiteRT-LM int4": "LiteRT-LM 0.18.1"})]
    for repeat in range(3):
        for variant, seconds in ((BASELINE, 1.0), (OUR_DEFAULT, 0.25), (THEIR_PLAIN, 1.0), (THEIR_DEFAULT, 0.5), (PEER_PLAIN, 2.0)):
            lines.append(run(variant, repeat=repeat, seconds=seconds, output=None))
        for length, ours, theirs in (("64", 0.1, 0.2), ("512", 0.4, 0.2)):
            for variant, seconds in ((BASELINE, ours), (THEIR_PLAIN, theirs)):
                lines.append(
                    run(variant, part="contexts", domain=length, repeat=repeat, prompt_tokens=int(length), first_token=seconds, output=None)
                )
    with RecordFile(tmp_path / "peers.jsonl") as file:
        for record in [*lines, Note(text="LiteRT-LM int8 was not measured: no file")]:
            file.add(record)
    return tmp_path / "peers.jsonl"


def cells(text: str, start: str) -> list[list[str]]:
    """The cells behind the first one of the lines that begin so."""
    lines = [line for line in text.splitlines() if line.startswith(f"│ {start} ")]
    return [[cell.strip() for cell in line.strip("│").split("│")[1:]] for line in lines]


def test_a_report_has_speeds_first_tokens_versions_and_what_is_missing(records):
    result = CliRunner().invoke(bench_peers.main, ["--report", str(records)])
    assert result.exit_code == 0, result.output
    assert cells(result.output, "split profit")[0][:2] == ["40.0", "4.00 [4.00, 4.00]"]
    assert cells(result.output, "LiteRT-LM int4")[-1] == ["200.0", "200.0", "2.00 [2.00, 2.00]", "0.50 [0.50, 0.50]"]
    assert "LiteRT-LM int4 LiteRT-LM 0.18.1" in result.output
    assert "LiteRT-LM int8 was not measured: no file" in result.output


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 2), (["--report", "x", "--runs", "y"], 2), (["--report", "missing"], 1), (["--runs", "y"], 2)]
)
def test_refusals(arguments, code):
    assert CliRunner().invoke(bench_peers.main, arguments).exit_code == code


def started(folder: Path, name: str, log: Path) -> PeerProcess:
    (folder / "stub_engine.py").write_text(STUB)
    code = f"import sys; sys.path.append({str(folder)!r}); import peer_protocol; peer_protocol.main('stub_engine')"
    return PeerProcess(name, [sys.executable, "-c", code], log)


def test_a_worker_answers_goes_on_after_a_request_that_fails_and_leaves_its_last_words(tmp_path):
    with contextlib.closing(started(tmp_path, "stub", tmp_path / "log")) as stub:
        assert stub.about == {"version": "stub 1", "flags": "none"}
        with pytest.raises(BackendError, match="stub: ValueError: too few tokens"):
            stub.run(THEIR_PLAIN, PROMPT, 1)
        run = stub.run(THEIR_PLAIN, PROMPT, 20, repeat=4)
        assert (run.variant, run.domain, run.repeat, run.tokens, run.first_token_seconds) == (THEIR_PLAIN, "code", 4, 20, 0.1)
        for _ in range(2):
            with pytest.raises(BackendError, match="stub: it ended with exit code 3: the last words"):
                stub.run(THEIR_PLAIN, PROMPT, 3)


def test_a_worker_that_does_not_start_says_why(tmp_path):
    with pytest.raises(BackendError, match=r"x: it ended with exit code 1: .*no_such_engine"):
        PeerProcess("x", [sys.executable, "-c", "import no_such_engine"], tmp_path / "log")


class Scripted:
    """An engine that fails from its second request on."""

    def __init__(self, good: int) -> None:
        self.good = good

    def run(self, variant: Variant, prompt: Prompt, tokens: int, *, part: str = "domains", repeat: int = 0) -> Run:
        self.good -= 1
        if self.good < 0:
            raise BackendError("it is gone")
        return run(variant, domain=prompt.domain, repeat=repeat, part=part)


def test_a_side_that_fails_is_left_out_and_the_others_go_on():
    sides = [
        Side(name=name, runner=Scripted(good), about="", variants=(variant,))
        for name, good, variant in ((OURS, 99, BASELINE), ("LiteRT-LM int4", 2, THEIR_PLAIN))
    ]
    plan = Schedule(part="domains", variants=(BASELINE, THEIR_PLAIN), prompts=(PROMPT,), repeats=3, tokens=8)
    records = list(measured(sides, [plan], 1))
    assert [record.variant.side for record in records if isinstance(record, Run)] == [OURS, "LiteRT-LM int4", OURS, OURS]
    (note,) = (record.text for record in records if isinstance(record, Note))
    assert note == "LiteRT-LM int4 was left out after prompt 0 of code: it is gone"


def test_engines_that_are_not_there_are_named(tmp_path):
    (tmp_path / "litert-lm-int8").mkdir()
    (tmp_path / "litert-lm-int8" / "model.litertlm").touch()
    with ExitStack() as stack:
        every = Peers(stack=stack, logs=tmp_path, threads=1, context=64)
        assert list(every.others(tmp_path)) == []
    assert [text.partition(":")[0] for text in every.notes] == [f"LiteRT-LM {kind} was not measured" for kind in ("int4", "int8")]
    assert "run scripts/setup/build_peers.sh" in every.notes[0]
    assert "No such file or directory" in every.notes[1]


def test_accepted_drafts_are_read_from_the_log_of_a_peer(tmp_path):
    every = Peers(stack=ExitStack(), logs=tmp_path, threads=1, context=64)
    sides = [Side(name=name, runner=Scripted(0), about="", variants=()) for name in ("LiteRT-LM int4", "silent", OURS_LLAMA)]
    every.log("LiteRT-LM int4").write_text("x.cc:298] MTP Drafter - Success rate: 0.1\nx.cc:298] MTP Drafter - Success rate: 0.388889\n")
    every.log("silent").write_text("nothing\n")
    assert list(draft_notes(every, sides)) == ["LiteRT-LM int4 accepted 38.9% of its drafts, by its log"]


def test_this_program_as_a_worker_runs_requests_and_makes_prompts_of_a_length():
    session = make_session()
    session.vocabulary.bos = -1
    runner = EdgeRunner(session)
    reply = peer_edge_mtp.answer(session, runner, {"variant": to_json(BASELINE), "prompt": to_json(PROMPT), "tokens": 8})
    assert (reply["tokens"], reply["prompt_tokens"]) == (8, 3)
    assert not {"variant", "domain"} & reply.keys()
    reply = peer_edge_mtp.answer(session, runner, {"domains": ["code"], "per_domain": 1, "lengths": [16, 40]})
    prompts = [(prompt["domain"], len(prompt["ids"])) for prompt in reply["prompts"]]
    assert [domain for domain, _ in prompts] == ["code", "16", "40"]
