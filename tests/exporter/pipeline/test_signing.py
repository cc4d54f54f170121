"""Signed bundles: made by edge-export pair --sign, demanded by edge-run generate --verify-key, and readable by openssl."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from click import Command
from click.testing import CliRunner

pytest.importorskip("cryptography", reason="needs edge-mtp[sign]")
pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from edge_bench.cli.main import main as bench
from edge_export.cli.command import main as export
from edge_export.errors import ExportError
from edge_export.pipeline.bundle_files import read_signing_key
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.cli.run import main as run
from edge_runtime.errors import BundleError

PLAIN = form.NoEncryption()


def write_pair(folder: Path, key=None, encryption: form.KeySerializationEncryption = PLAIN) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    key = key or Ed25519PrivateKey.generate()
    private, public = folder / "key.pem", folder / "key.pub"
    private.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, encryption))
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


@pytest.mark.parametrize("harm", ["another key", "manifest", "signature", "no signature", "empty", "long", "pipe", "link"])
def test_anything_else_is_not(signed: tuple[Path, Path], tmp_path: Path, harm: str) -> None:
    bundle, public = shutil.copytree(signed[0], tmp_path / "bundle"), signed[1]
    manifest, signature = bundle / "manifest.json", bundle / "manifest.json.sig"
    if harm == "another key":
        _, public = write_pair(tmp_path / "other")
    elif harm == "manifest":  # the same in every field, with another blank
        manifest.write_bytes(manifest.read_bytes() + b" ")
    elif harm == "signature":
        raw = bytearray(base64.b64decode(signature.read_bytes()))
        raw[7] ^= 1
        signature.write_bytes(base64.b64encode(raw))
    elif harm == "no signature":
        signature.unlink()
    elif harm == "pipe":
        signature.unlink()
        os.mkfifo(signature)
    elif harm == "link":
        signature.symlink_to(signature.rename(tmp_path / "elsewhere"))
    else:
        signature.write_bytes(b"" if harm == "empty" else signature.read_bytes() + b" " * 4096)
    with pytest.raises(BundleError, match=r"not signed|not a signature of this manifest"):
        open_bundle(bundle, public_key=public)
    result = CliRunner().invoke(run, ["generate", str(bundle), "--verify-key", str(public), "x"])
    assert (result.exit_code, result.output.count("\n")) == (1, 1), result.output


@pytest.mark.parametrize(("command", "words"), [(run, ("plan",)), (bench, ("run",))])
def test_a_key_beside_no_check_is_a_usage_error(signed: tuple[Path, Path], command: Command, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(command, [*words, str(signed[0]), "--verify-key", str(signed[1]), "--check", "none"])
    assert result.exit_code == 2, result.output
    assert "--check none, which does not compare" in result.output


def test_the_owner_s_signature_is_taken_and_a_key_may_come_through_a_pipe(signed: tuple[Path, Path], tmp_path: Path) -> None:
    assert open_bundle(signed[0], public_key=signed[1]).manifest.files
    os.mkfifo(tmp_path / "key")
    writer = threading.Thread(target=lambda: (tmp_path / "key").write_bytes(signed[1].read_bytes()))
    writer.start()
    assert open_bundle(signed[0], public_key=tmp_path / "key").manifest.files
    writer.join()


def test_a_file_swapped_under_a_good_signature_is_refused(signed: tuple[Path, Path], tmp_path: Path) -> None:
    bundle, public = shutil.copytree(signed[0], tmp_path / "bundle"), signed[1]
    path = bundle / json.loads((bundle / "manifest.json").read_text())["files"][0]["path"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(bundle, public_key=public)


def test_openssl_makes_keys_and_checks_the_signature(signed: tuple[Path, Path], tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to compare with")
    bundle, public = signed
    (tmp_path / "sig").write_bytes(base64.b64decode((bundle / "manifest.json.sig").read_bytes()))
    command = ["openssl", *["pkeyutl", "-verify", "-pubin", "-rawin", "-inkey"], public, "-in", bundle / "manifest.json", "-sigfile"]
    command.append(tmp_path / "sig")
    assert b"Success" in subprocess.run(command, capture_output=True, check=True).stdout
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / "own.pem"], check=True)
    assert read_signing_key(tmp_path / "own.pem").sign(b"x")


@pytest.mark.parametrize("wrong", ["missing", "no key", "password", "another kind", "public"])
def test_a_key_that_cannot_sign_is_refused_before_anything_is_made(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "k" / "key.pem"
    if wrong == "password":
        write_pair(tmp_path / "k", encryption=form.BestAvailableEncryption(b"secret"))
    elif wrong == "another kind":
        write_pair(tmp_path / "k", key=X25519PrivateKey.generate())
    elif wrong == "public":
        path = write_pair(tmp_path / "k")[1]
    elif wrong == "no key":
        (tmp_path / "k").mkdir()
        path.write_text("no key")
    with pytest.raises(ExportError, match=r"key"):
        read_signing_key(path)
    result = CliRunner().invoke(export, ["reference", "-o", str(tmp_path / "bundle"), "--sign", str(path)])
    assert result.exit_code == 1
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("wrong", ["missing", "no key", "another kind"])
def test_a_public_key_that_is_none(signed: tuple[Path, Path], tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "k" / "key.pub"
    if wrong == "another kind":
        write_pair(tmp_path / "k", key=X25519PrivateKey.generate())
    elif wrong == "no key":
        (tmp_path / "k").mkdir()
        path.write_text("no key")
    with pytest.raises(BundleError, match=r"key"):
        open_bundle(signed[0], public_key=path)
