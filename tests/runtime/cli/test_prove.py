"""edge-run prove over a scripted session: what it counts, its record and signature, its exit code."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

import pytest

from edge_runtime.cli import prove as proving
from edge_runtime.session.self_checks import LosslessReport, check_lossless
from scripted import make_session


@pytest.fixture
def run(command):
    command.opens(lambda _: make_session())
    return lambda *words: command("prove", "bundle", *words)


def test_equal_texts_are_counted(run):
    shown = run("-n", 130)
    assert shown.exit_code == 0, shown.output
    assert "130 of 130 tokens are those of plain decoding, " in shown.stdout
    assert "tokens have the same logits, bit for bit" in shown.stdout


def test_another_text_ends_in_exit_code_1_and_counts_up_to_it(run, monkeypatch: pytest.MonkeyPatch):
    calls = itertools.count()

    def compared(session, generation) -> LosslessReport:
        report = check_lossless(session, generation)
        return (
            report
            if next(calls) % 2
            else LosslessReport(equal=False, tokens=report.tokens, position=3, plain_token=1, draft_token=2, logit_gap=0.01)
        )

    monkeypatch.setattr(proving, "check_lossless", compared)
    shown = run("-n", 130, "--json")
    record = json.loads(shown.stdout)
    assert (shown.exit_code, "drafts changed the text" in shown.stderr) == (1, True)
    different = len(record["differences"])
    assert different > 0
    assert record["equal_tokens"] < record["tokens"] == 130
    assert record["differences"][0]["position"] == 3


def test_a_record_is_signed_and_has_no_text(run, tmp_path: Path):
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519", reason="needs edge-mtp[sign]")
    from cryptography.hazmat.primitives import serialization as forms

    key = ed25519.Ed25519PrivateKey.generate()
    private, record = tmp_path / "key.pem", tmp_path / "proof.json"
    private.write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()))
    assert run("-n", 20, "--record", record, "--sign", private).exit_code == 0
    data = record.read_bytes()
    key.public_key().verify(base64.b64decode(record.with_name("proof.json.sig").read_bytes()), data)
    assert {"schema", "bundle", "processor", "backend", "tokens", "rows", "differences"} <= json.loads(data).keys()
    assert run("--sign", private).exit_code == 2
