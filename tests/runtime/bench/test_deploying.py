"""What edge-bench sends to a device: the files of a bundle that opens, and of a package, and never what a link leads to."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from edge_bench.devices import remote_run
from edge_bench.devices.remote_run import RemoteRequest, deploy
from edge_devices.errors import EdgeError
from edge_devices.machine.device_package import read_package
from edge_runtime.bundle.bundle import CheckMode
from local_transport import LocalTransport
from stub_package import stub_bundle, stub_package


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalTransport:
    """A device that passes every check before a run."""
    monkeypatch.setattr(remote_run, "preflight_refusals", lambda *_, **__: [])
    monkeypatch.setattr(remote_run, "preflight_warnings", lambda *_, **__: [])
    return LocalTransport(tmp_path / "device")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return stub_package(tmp_path / "package")


def send(device: LocalTransport, bundle: Path, package: Path, check: CheckMode = "fast") -> set[str]:
    """Returns the names that the bundle has on the device."""
    deploy(device, RemoteRequest(bundle=bundle, package=read_package(package), name="one", check=check), lambda _: None)
    sent = Path(device.folder) / "bundles" / bundle.resolve().name
    return {path.relative_to(sent).as_posix() for path in sent.rglob("*") if path.is_file()}


def test_only_the_files_of_the_bundle_are_sent(device: LocalTransport, package: Path, tmp_path: Path) -> None:
    bundle, secret = stub_bundle(tmp_path / "bundle"), tmp_path / "id_ed25519"
    secret.write_text("a private key")
    (bundle / "README.txt").symlink_to(secret)
    (bundle / "notes").mkdir()
    (bundle / "notes/mine.txt").write_text("mine")
    assert send(device, bundle, package) == {"manifest.json", "target.gguf"}
    for name in ("config.yaml", "manifest.json.sig"):
        (bundle / name).write_text("{}")
    (tmp_path / "link").symlink_to(bundle)
    assert send(device, tmp_path / "link", package) == {"manifest.json", "manifest.json.sig", "config.yaml", "target.gguf"}


def test_a_whole_bundle_opens_on_the_device(device: LocalTransport, package: Path, exported_pair: Path) -> None:
    """What other programs read of the folder is nobody's business there: the manifest does not list it."""
    files = {path.relative_to(exported_pair).as_posix() for path in exported_pair.rglob("*") if path.is_file()}
    assert send(device, exported_pair, package) == files - {"Modelfile", "README.md", "models.ini"}


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json.sig", "target.gguf"])
def test_a_link_in_place_of_a_file_of_the_bundle_is_refused(device: LocalTransport, package: Path, tmp_path: Path, name: str) -> None:
    bundle, secret = stub_bundle(tmp_path / "bundle"), tmp_path / "secret"
    secret.write_bytes(bytes(100_000))
    (bundle / name).unlink(missing_ok=True)
    (bundle / name).symlink_to(secret)
    with pytest.raises(EdgeError, match=f"{name} is a symbolic link"):
        send(device, bundle, package)
    assert not list(Path(device.folder).rglob(name))


def test_a_bundle_that_does_not_open_is_not_sent(device: LocalTransport, package: Path, tmp_path: Path) -> None:
    bundle = stub_bundle(tmp_path / "bundle")
    (bundle / "target.gguf").write_bytes(b"x" * 100_000)
    with pytest.raises(EdgeError, match="does not have the sha256 of the manifest"):
        send(device, bundle, package)
    assert not Path(device.folder).exists()
    assert send(device, bundle, package, "none") == {"manifest.json", "target.gguf"}


@pytest.mark.parametrize("target", ["secret", "folder", "nothing"])
def test_links_in_a_package_are_refused(device: LocalTransport, package: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_text("a private key")
    (tmp_path / "folder").mkdir()
    (package / "lib").symlink_to(tmp_path / target)
    with pytest.raises(EdgeError, match="lib is a symbolic link, and what it leads to is not sent"):
        send(device, stub_bundle(tmp_path / "bundle"), package)
    assert not (Path(device.folder) / "package").exists()


@pytest.mark.parametrize(("backends", "refused"), [(("onnx",), True), (("llama", "onnx"), False), (("llama",), False)])
def test_a_bundle_that_the_package_cannot_run_is_not_sent(
    device: LocalTransport, package: Path, tmp_path: Path, backends: tuple[str, ...], refused: bool
) -> None:
    bundle = stub_bundle(tmp_path / "bundle")
    record = json.loads((package / "package.json").read_text())
    (package / "package.json").write_text(json.dumps({**record, "backends": backends}))
    words = r"has no llama, and .* needs it; build the package with --backend llama, or export the bundle with --format onnx"
    with pytest.raises(EdgeError, match=words) if refused else nullcontext():
        send(device, bundle, package)
