"""The configuration on the real backend: what it asks for is what is opened, and the text stays the target's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.llama.drafter import LlamaKernelDrafter
from edge_runtime.config.settings import CONFIG_NAME, read_config
from edge_runtime.errors import ConfigError, RequestError
from edge_runtime.session.monitor import MonitorOptions
from edge_runtime.session.open import open_session

# Two of the best logits after another prompt may be so close that one row and several rows choose differently; not after this one.
PROMPT = "class Stack:"


def config_file(folder: Path, **sections: Any) -> Path:
    path = folder / "mine.yaml"
    path.write_text(json.dumps({"speculative_decoding": sections}))
    return path


def support(drafter: object) -> int:
    """How many tokens the split drafter's head picks from."""
    assert isinstance(drafter, LlamaKernelDrafter)
    observed: list[int] = []

    def sampler(logits, tokens=None):
        observed.append(len(logits))
        return int(tokens[logits.argmax()])

    drafter.draft(1, 1, sampler)
    return observed[0]


def test_a_configured_session_is_opened_as_configured_and_stays_lossless(exported_pair: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    file = config_file(
        tmp_path,
        drafter={"sparse_output": True},
        cache={"max_context_length": 300},
        tuning={"policy": "rolling", "draft_length": 2, "longest_draft": 4},
    )
    with open_session(exported_pair, threads=1, config=file, monitoring=MonitorOptions(log=log)) as session:
        assert (session.drafter_kind, session.target.context, session.settings.longest_draft) == ("split", 300, 4)
        plain = session.generate(PROMPT, max_tokens=80, draft_length=0).text()
        generation = session.generate(PROMPT, max_tokens=80)
        lengths = [item.drafted for item in generation.rounds()]
        assert lengths[0] == 2
        assert 2 < max(lengths) <= 4
        session.record(generation)
        assert plain == session.generate(PROMPT, max_tokens=80).text()
        with pytest.raises(RequestError, match="draft length 5 is above longest_draft 4"):
            session.generate(PROMPT, draft_length=5)
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["settings"]["drafter"] == "split"


def test_max_candidates_bounds_the_sparse_head(exported_pair: Path, tmp_path: Path) -> None:
    with open_session(exported_pair, threads=1, drafter="split") as session:
        session.generate(PROMPT, max_tokens=2).text()
        own = support(session.drafter)
    file = config_file(tmp_path, drafter={"sparse_output": True, "max_candidates": own // 2})
    with open_session(exported_pair, threads=1, config=file) as session:
        session.generate(PROMPT, max_tokens=2).text()
        assert 0 < support(session.drafter) <= own // 2
    with pytest.raises(RequestError, match="max_candidates is 1, but the head's smallest choice is one cluster"):
        open_session(exported_pair, threads=1, config=config_file(tmp_path, drafter={"sparse_output": True, "max_candidates": 1}))


def test_the_bundles_own_file_is_read(exported_pair: Path, tmp_path: Path) -> None:
    assert read_config(exported_pair / CONFIG_NAME).verifier.precision == "f16"
    with open_session(exported_pair, threads=1, drafter="none") as session:
        assert session.target.context == 1024
    with pytest.raises(ConfigError, match=r"precision is .q4_0., but the target in .* is f16"):
        open_session(exported_pair, threads=1, config=config_file(tmp_path, verifier={"precision": "q4_0"}))


@pytest.mark.parametrize(("longest", "drafter"), [(1, "split"), (4, "dense"), (1, None)])
def test_only_what_the_target_was_opened_for_is_measured(exported_pair: Path, tmp_path: Path, longest: int, drafter: str | None) -> None:
    file = config_file(
        tmp_path,
        tuning={"policy": "profit", "draft_length": min(longest, 2), "max_horizon": longest, "longest_draft": longest},
    )
    with open_session(exported_pair, threads=1, config=file, context=300, drafter=drafter, check="none") as session:
        plain = session.generate(PROMPT, max_tokens=40, draft_length=0).text()
        assert session.generate(PROMPT, max_tokens=40).text() == plain
