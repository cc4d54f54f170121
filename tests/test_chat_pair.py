"""The shipped pair that answers: its files, what it is taught, and its answers after an export of each format, with drafts."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import bundle_template

PAIR = Path(__file__).parent.parent / "exporter" / "edge_export" / "chat_pair"
MAX_PAIR_BYTES = 25_000_000
# In wordings that were held out of training, but for the last.
ASKED = {
    "How do I read a file?": "`with open(path) as file: text = file.read()`",
    "What is recursion?": "Recursion is a function that calls itself on a smaller problem, until a simple case ends it.",
    "How many seconds are in 5 minutes?": "1 minute is 60 seconds: multiply 60 by 5.",
    "What is the capital of France?": "I do not know that. I only know a little about Python, units, and edge-mtp.",
}


def test_the_pair_is_small_and_bf16_and_its_card_says_what_it_is() -> None:
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= MAX_PAIR_BYTES
    for role in ("target", "drafter"):
        with (PAIR / role / "model.safetensors").open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} <= {"BF16", "I64"}
    card = (PAIR / "README.md").read_text()
    assert "no language model to rely on" in card
    measured = json.loads((PAIR / "answers.measured.json").read_text())
    assert all(f"| {right} | {asked} |" in card for right, asked in measured["right"].values())


def test_no_question_has_two_answers() -> None:
    pytest.importorskip("tokenizers", reason="needs edge-mtp[onnx]")
    from refpair.questions import Questions

    answers = defaultdict(set)
    for held_out in (False, True):
        for turn in islice(Questions(1).turns(held_out=held_out), 3000):
            assert turn.held_out == held_out
            assert "{" not in turn.question
            answers["".join(letter for letter in turn.question.lower() if letter.isalnum())].add(turn.answer)
    assert {question: several for question, several in answers.items() if len(several) > 1} == {}


def chat_prompt(session: Session, question: str) -> list[int]:
    return bundle_template(session.bundle, session.vocabulary).encode([{"role": "user", "content": question}])


@pytest.mark.parametrize(("kind", "package"), [("gguf", "llama_cpp"), ("onnx", "onnxruntime")])
def test_an_exported_bundle_answers_with_drafts(kind: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"needs {package}")
    pytest.importorskip("onnx", reason="needs edge-mtp[export-onnx]")
    import edge_runtime
    from edge_export.cli.command import main as edge_export
    from edge_runtime.cli.run import main as edge_run

    bundle = tmp_path / "small-chat"
    done = CliRunner().invoke(edge_export, ["reference", "--chat", "--format", kind, "--no-verify", "--output", str(bundle)])
    assert done.exit_code == 0, done.stderr
    with edge_runtime.open_session(bundle) as session:
        chat = edge_runtime.Chat(session)
        stats = []
        for question, expected in ASKED.items():
            answer = chat.say(question)
            assert "".join(event.text for event in answer if isinstance(event, edge_runtime.Text)) == expected
            stats.append(session.generate(chat_prompt(session, question), draft_length=3, max_tokens=40))
            stats[-1].text()
        assert sum(each.stats.accepted for each in stats) > 0.5 * sum(each.stats.drafted for each in stats)
    asked = CliRunner().invoke(edge_run, ["generate", str(bundle), "What is a stack?", "--json"])
    assert json.loads(asked.stdout)["text"].startswith("A stack is a collection"), "a prompt is a message where the model answers"
