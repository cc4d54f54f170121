"""The shipped pairs. The reference pair: its size and layout, its acceptance on held-out prompts, and llama.cpp's own tool on the same
files. The pair that answers: what it is taught, and its answers after an export of each format, with drafts.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
from collections import defaultdict
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_runtime.drafting.policies import Fixed
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import bundle_template
from kept import PAIR

CHAT_PAIR = PAIR.with_name("chat_pair")
# In wordings that were held out of training, but for the last.
ASKED = {
    "How do I read a file?": "`with open(path) as file: text = file.read()`",
    "What is recursion?": "Recursion is a function that calls itself on a smaller problem, until a simple case ends it.",
    "How many seconds are in 5 minutes?": "1 minute is 60 seconds: multiply 60 by 5.",
    "What is the capital of France?": "I do not know that. I only know a little about Python, units, and edge-mtp.",
}


def prompts(kind: str) -> list[str]:
    return json.loads((PAIR / f"prompts.{kind}.json").read_text())


@pytest.fixture(scope="module")
def session(exported_pair: Path, probe_memory: None):
    with open_session(exported_pair) as opened:
        yield opened


@pytest.mark.parametrize(("pair", "most"), [(PAIR, 30_000_000), (CHAT_PAIR, 25_000_000)], ids=["reference", "chat"])
def test_a_pair_is_small_and_bf16(pair: Path, most: int):
    assert sum(path.stat().st_size for path in pair.rglob("*") if path.is_file()) <= most
    for role in ("target", "drafter"):
        with (pair / role / "model.safetensors").open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        kinds = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
        assert kinds <= {"BF16", "I64"}, "weights are bfloat16, the token ordering is int64"


def test_pair_has_the_traits_of_the_e2b_family():
    target = json.loads((PAIR / "target" / "config.json").read_text())
    assert target["layer_types"][-2:] == ["sliding_attention", "full_attention"]
    assert target["num_kv_shared_layers"] == 4
    assert target["use_double_wide_mlp"]
    assert target["hidden_size_per_layer_input"] > 0
    assert target["final_logit_softcapping"] == 30.0
    assert target["tie_word_embeddings"]
    assert target["rope_parameters"]["full_attention"]["rope_type"] == "proportional"
    drafter = json.loads((PAIR / "drafter" / "config.json").read_text())
    assert drafter["use_ordered_embeddings"]
    assert drafter["text_config"]["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    assert drafter["backbone_hidden_size"] == target["hidden_size"]


def test_transformers_loads_both_and_nothing_is_missing():
    transformers = pytest.importorskip("transformers", reason="needs edge-mtp[verify]")
    for role, name in (("target", "Gemma4ForCausalLM"), ("drafter", "Gemma4AssistantForCausalLM")):
        _, report = getattr(transformers, name).from_pretrained(PAIR / role, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert not report["mismatched_keys"]


@pytest.mark.parametrize(("kind", "minimum"), [("code", 0.60), ("prose", 0.45)])
def test_held_out_prompts_accept_most_drafts(session: Session, kind: str, minimum: float):
    """The card's figures over 24 prompts are higher; eight prompts may fall a little below them."""
    drafted = accepted = 0
    for prompt in prompts(kind)[:8]:
        generation = session.generate(prompt, max_tokens=128, policy=Fixed(3))
        generation.text()
        drafted, accepted = drafted + generation.stats.drafted, accepted + generation.stats.accepted
    assert accepted / drafted >= minimum


def on_all_processors() -> None:
    """A worker of the tests may be kept on one."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def peer_counts(command: list[str]) -> dict[str, str]:
    """The log thread of the tool sometimes ends before its last lines are written (1 run in 80); then the tool is run again."""
    for _ in range(10):
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=120, check=True, preexec_fn=on_all_processors
        )
        result = dict(re.findall(r"n_(drafted|accept)\s+=\s+(\d+)", done.stdout + done.stderr))
        if len(result) == 2:
            return result
    raise AssertionError(f"no counts in the output of {command[0]}")


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["code", "prose"])
def test_llama_cpps_own_tool_runs_the_pair_and_accepts_as_much(exported_pair: Path, session: Session, kind: str):
    folder = os.environ.get("EDGE_MTP_LLAMA_CPP_BIN")
    if not folder:
        pytest.skip("EDGE_MTP_LLAMA_CPP_BIN does not name llama.cpp's binaries; make llama-cpp builds them")
    counts = {"ours": [0, 0], "peer": [0, 0]}
    for prompt in prompts(kind)[:4]:
        generation = session.generate(prompt, max_tokens=120, policy=Fixed(3))
        generation.text()
        counts["ours"][0] += generation.stats.accepted
        counts["ours"][1] += generation.stats.drafted
        models = "-m", str(exported_pair / "target-F16.gguf"), "-md", str(exported_pair / "mtp-target-F16.gguf")
        options = "--spec-type draft-mtp --spec-draft-n-max 3 --temp 0 -n 119 -c 1024 -ngl 0 --no-escape -t 2"
        command = [str(Path(folder) / "llama-speculative-simple"), *models, *options.split(), "-p", prompt]
        result = peer_counts(command)
        counts["peer"][0] += int(result["accept"])
        counts["peer"][1] += int(result["drafted"])
    ours, peer = (accepted / drafted for accepted, drafted in counts.values())
    assert abs(ours - peer) <= 0.02, counts


def test_the_card_of_the_pair_that_answers_says_what_it_is():
    card = (CHAT_PAIR / "README.md").read_text()
    assert "no language model to rely on" in card
    measured = json.loads((CHAT_PAIR / "answers.measured.json").read_text())
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
