"""A few of the faults of scripts/faults.py, whose long campaigns are in docs/security.md."""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("the limits and signals are Linux's", allow_module_level=True)
pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from faults import KINDS, Outcome, campaign


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_that_fails_leaves_the_old_bundle_or_the_new_one(kind: str) -> None:
    outcomes: list[Outcome] = []
    campaign(kind, 3, 3, outcomes.append)
    assert len(outcomes) == 3
    if kind in ("kill", "interrupt"):
        assert {outcome.left for outcome in outcomes} <= {"old", "new", "none"}
    else:
        assert "old" in {outcome.left for outcome in outcomes}, "at least one limit was hit"
