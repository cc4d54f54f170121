"""Signatures and keys: what is taken, and that each kind of wrong key or signature is refused with what to do."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs edge-mtp[sign]")
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edge_runtime.bundle.bundle import check_signature, read_signing_key, sign_file
from edge_runtime.errors import BackendError, BundleError

DATA = b"what was signed"


def pem_of(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    protection = form.BestAvailableEncryption(password) if password else form.NoEncryption()
    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, protection)


def public_pem_of(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def key(tmp_path: Path) -> Ed25519PrivateKey:
    """A key pair in key.pem and key.pub, and a signed file."""
    made = Ed25519PrivateKey.generate()
    (tmp_path / "key.pem").write_bytes(pem_of(made))
    (tmp_path / "key.pub").write_bytes(public_pem_of(made))
    (tmp_path / "manifest.json").write_bytes(DATA)
    assert sign_file(tmp_path / "manifest.json", made) == tmp_path / "manifest.json.sig"
    return made


def test_a_manifest_has_the_signature_of_its_bytes(key: Ed25519PrivateKey, tmp_path: Path) -> None:
    check_signature(tmp_path, DATA, tmp_path / "key.pub")
    with pytest.raises(BundleError, match=r"manifest\.json\.sig is not a signature of this manifest by .*do not use this bundle"):
        check_signature(tmp_path, DATA + b" ", tmp_path / "key.pub")


def test_the_key_file_is_read_as_openssl_wrote_it(key: Ed25519PrivateKey, tmp_path: Path) -> None:
    read = read_signing_key(tmp_path / "key.pem")
    assert read.sign(DATA) == key.sign(DATA)
    raw = key.sign(DATA)
    (tmp_path / "raw").write_bytes(raw)
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(tmp_path / "key.pub"), "-rawin"]
    done = subprocess.run(
        [*command, "-in", str(tmp_path / "manifest.json"), "-sigfile", str(tmp_path / "raw")], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert base64.b64decode((tmp_path / "manifest.json.sig").read_bytes()) == raw


WRONG: dict[str, Callable[[bytes], bytes]] = {
    **{f"byte {place} flipped": lambda raw, place=place: flipped(raw, place) for place in range(0, 64, 9)},
    **{f"{length} bytes": lambda raw, length=length: base64.b64encode((raw * 2)[:length]) for length in (0, 63, 65)},
    "a letter that is no base64": lambda raw: b"*" + base64.b64encode(raw),
}


def flipped(raw: bytes, place: int) -> bytes:
    return base64.b64encode(bytes([*raw[:place], raw[place] ^ 1, *raw[place + 1 :]]))


@pytest.mark.parametrize("wrong", WRONG)
def test_any_other_signature_is_refused(key: Ed25519PrivateKey, tmp_path: Path, wrong: str) -> None:
    (tmp_path / "manifest.json.sig").write_bytes(WRONG[wrong](key.sign(DATA)))
    with pytest.raises(BundleError, match="is not a signature of this manifest"):
        check_signature(tmp_path, DATA, tmp_path / "key.pub")


@pytest.mark.parametrize("blanks", ["", "\n", "\r\n", " \n\n"])
def test_blanks_around_a_signature_do_not_matter(key: Ed25519PrivateKey, tmp_path: Path, blanks: str) -> None:
    text = (tmp_path / "manifest.json.sig").read_text().strip()
    (tmp_path / "manifest.json.sig").write_text(blanks + text + blanks)
    check_signature(tmp_path, DATA, tmp_path / "key.pub")


def test_a_signature_file_may_be_4_kB_and_no_more(key: Ed25519PrivateKey, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json.sig"
    text = path.read_bytes().strip()
    path.write_bytes(text.ljust(4096))
    check_signature(tmp_path, DATA, tmp_path / "key.pub")
    path.write_bytes(text.ljust(4097))
    with pytest.raises(BundleError, match=r"cannot be read \(it has more than 4096 bytes\)"):
        check_signature(tmp_path, DATA, tmp_path / "key.pub")
    path.unlink()
    with pytest.raises(BundleError, match=r"the signature .*manifest\.json\.sig cannot be read .*this bundle is not signed"):
        check_signature(tmp_path, DATA, tmp_path / "key.pub")


def test_wrong_public_keys_are_named(key: Ed25519PrivateKey, tmp_path: Path) -> None:
    other = tmp_path / "other.pub"
    for content, output in (
        (public_pem_of(Ed25519PrivateKey.generate()), "is not a signature of this manifest by the owner of"),
        (public_pem_of(ec.generate_private_key(ec.SECP256R1())), "is not an Ed25519 key; make a pair with: openssl genpkey"),
        (pem_of(key), "is not a public key in PEM format; make one with: openssl pkey"),
        (b"", "is not a public key in PEM format"),
    ):
        other.write_bytes(content)
        with pytest.raises(BundleError, match=output):
            check_signature(tmp_path, DATA, other)
    with pytest.raises(BundleError, match=r"the public key .*none cannot be read \(No such file"):
        check_signature(tmp_path, DATA, tmp_path / "none")


def test_wrong_private_keys_are_named(key: Ed25519PrivateKey, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    for content, output in (
        (pem_of(key, b"secret"), "is no private key in PEM without a password"),
        (public_pem_of(key), "is no private key in PEM"),
        (b"\0", "is no private key in PEM"),
        (pem_of(ec.generate_private_key(ec.SECP256R1())), "is no Ed25519 key; make one: openssl genpkey"),
    ):
        other.write_bytes(content)
        with pytest.raises(BundleError, match=output):
            read_signing_key(other)
    with pytest.raises(BundleError, match=r"the private key .*none cannot be read \(No such file"):
        read_signing_key(tmp_path / "none")


@pytest.mark.parametrize("name", ["key.pem", "key.pub"])
def test_at_most_16_kB_of_a_key_file_are_read(key: Ed25519PrivateKey, tmp_path: Path, name: str) -> None:
    """What stands behind them is not seen, so that a key may be a pipe."""
    path, maximum = tmp_path / name, 16384
    content = path.read_bytes()

    def read() -> None:
        read_signing_key(path) if name == "key.pem" else check_signature(tmp_path, DATA, path)

    path.write_bytes(b"\n" * (maximum - len(content)) + content)
    read()
    path.write_bytes(b"\n" * (maximum - len(content) + 30) + content)
    with pytest.raises(BundleError, match="in PEM"):
        read()


def test_a_public_key_may_come_from_a_pipe(key: Ed25519PrivateKey, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, (tmp_path / "key.pub").read_bytes())
    os.close(writing)
    check_signature(tmp_path, DATA, Path(f"/dev/fd/{reading}"))
    os.close(reading)


def test_without_the_library_both_ways_say_how_to_install_it(
    key: Ed25519PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendError, match=r"signing needs cryptography.*pip install 'edge-mtp\[sign\]'"):
        read_signing_key(tmp_path / "key.pem")
    with pytest.raises(BackendError, match=r"checking signatures needs cryptography.*pip install 'edge-mtp\[sign\]'"):
        check_signature(tmp_path, DATA, tmp_path / "key.pub")
