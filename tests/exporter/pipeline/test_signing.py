"""Signed bundles: made by edge-export pair --sign, demanded by edge-run generate --verify-key.

What a key and a signature may be: tests/runtime/bundle/test_signature.py.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click import Command
from click.testing import CliRunner

pytest.importorskip("cryptography", reason="needs edge-mtp[sign]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edge_bench.cli.main import main as bench
from edge_export.cli.command import main as export
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.cli.run import main as run
from edge_runtime.errors import BundleError


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Writes a private and a public key."""
    folder.mkdir(exist_ok=True)
    key, private, public = Ed25519PrivateKey.generate(), folder / "key.pem", folder / "key.pub"
    private.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A signed export of the reference pair, and the public key."""
    folder = tmp_path_factory.mktemp("signed")
    private, public = write_pair(folder)
    arguments = ["reference", "-o", str(folder / "bundle"), "--target-quant", "f16", "--drafter-quant", "f16", "--no-verify"]
    result = CliRunner().invoke(export, [*arguments, "--sign", str(private)])
    assert result.exit_code == 0, result.output
    return folder / "bundle", public


def test_the_owners_signature_is_taken(signed: tuple[Path, Path]) -> None:
    assert open_bundle(signed[0], public_key=signed[1]).manifest.files


@pytest.mark.parametrize("harm", ["another key", "manifest", "no signature", "pipe", "link"])
def test_anything_else_is_not(signed: tuple[Path, Path], tmp_path: Path, harm: str) -> None:
    bundle, public = shutil.copytree(signed[0], tmp_path / "bundle"), signed[1]
    manifest, signature = bundle / "manifest.json", bundle / "manifest.json.sig"
    if harm == "another key":
        _, public = write_pair(tmp_path / "other")
    elif harm == "manifest":  # the same in every field, with another blank
        manifest.write_bytes(manifest.read_bytes() + b" ")
    elif harm == "link":
        signature.symlink_to(signature.rename(tmp_path / "elsewhere"))
    else:
        signature.unlink()
        if harm == "pipe":
            os.mkfifo(signature)
    with pytest.raises(BundleError, match=r"not signed|not a signature of this manifest"):
        open_bundle(bundle, public_key=public)
    result = CliRunner().invoke(run, ["generate", str(bundle), "--verify-key", str(public), "x"])
    assert (result.exit_code, result.output.count("\n")) == (1, 1), result.output


@pytest.mark.parametrize(("command", "words"), [(run, ("plan",)), (bench, ("run",))])
def test_a_key_beside_no_check_is_a_usage_error(signed: tuple[Path, Path], command: Command, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(command, [*words, str(signed[0]), "--verify-key", str(signed[1]), "--check", "none"])
    assert result.exit_code == 2, result.output
    assert "--check none, which does not compare" in result.output


def test_a_file_swapped_under_a_good_signature_is_refused(signed: tuple[Path, Path], tmp_path: Path) -> None:
    bundle, public = shutil.copytree(signed[0], tmp_path / "bundle"), signed[1]
    path = bundle / json.loads((bundle / "manifest.json").read_text())["files"][0]["path"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(bundle, public_key=public)


def test_a_key_that_cannot_sign_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    _, public = write_pair(tmp_path / "k")
    result = CliRunner().invoke(export, ["reference", "-o", str(tmp_path / "bundle"), "--sign", str(public)])
    assert (result.exit_code, "private key" in result.output) == (1, True), result.output
    assert not (tmp_path / "bundle").exists()
