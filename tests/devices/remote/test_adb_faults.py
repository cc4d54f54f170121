"""What the user sees when a phone misbehaves, and what is left on it. The adb client is the real one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from edge_devices.errors import LinkError, TransportError
from edge_devices.remote import file_sync as tree
from edge_devices.remote.transport import AdbTransport, prepare_folder, usable_serials
from fake_adbd import FakeAdbd
from phones import Desk


@pytest.fixture
def phone(daemon: FakeAdbd) -> AdbTransport:
    return AdbTransport(daemon.serial)


def off_the_desk(desk: Desk, daemon: FakeAdbd) -> None:
    desk.adb("disconnect", daemon.serial)


def test_a_serial_that_is_not_there(desk: Desk) -> None:
    with pytest.raises(LinkError, match="not found; connect it"):
        AdbTransport("127.0.0.1:1").run(["true"])


def test_an_unauthorised_phone(desk: Desk) -> None:
    daemon = desk.phone(connect=False)
    daemon.faults.unauthorized = True
    desk.connect(daemon)
    with pytest.raises(LinkError, match="unlock the phone and accept"):
        AdbTransport(daemon.serial).run(["true"])
    output: list[str] = []
    other = desk.phone()
    assert daemon.serial not in usable_serials(output.append)
    assert other.serial in usable_serials()
    assert [text for text in output if text.startswith(f"left out: {daemon.serial} is not authorised; unlock")]
    off_the_desk(desk, daemon)


def test_a_phone_that_is_offline(desk: Desk, daemon: FakeAdbd, phone: AdbTransport) -> None:
    daemon.faults.silent = True
    daemon.unplug()
    with pytest.raises(LinkError, match=r"is offline|not found|the link broke"):
        phone.run(["true"])
    off_the_desk(desk, daemon)


def test_a_serial_with_a_blank_is_a_phone_too(desk: Desk, daemon: FakeAdbd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As adb itself names phones that it finds by mDNS: the real client, which knows our phone by such a name."""
    name = "adb-R3CN70 (2)._adb-tls-connect._tcp"
    (tmp_path / "adb").write_text(
        f"""#!/bin/sh
case "$1" in
  devices) {shutil.which("adb")} "$@" | sed 's/^{daemon.serial}/{name}/';;
  -s) test "$2" = '{name}' || exit 1; shift 2; exec {shutil.which("adb")} -s {daemon.serial} "$@";;
esac
"""
    )
    (tmp_path / "adb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert name in usable_serials()
    (tmp_path / "file").write_text("text")
    transport = AdbTransport(name)
    tree.push_tree(transport, tmp_path, "/data/local/tmp/named", names=["file"])
    assert transport.run(["cat", "/data/local/tmp/named/file"]).text == "text"


def test_exit_codes_survive_an_adb_that_loses_them(desk: Desk) -> None:
    daemon = desk.phone(connect=False)
    daemon.faults.features = "cmd,stat_v2"
    desk.connect(daemon)
    done = AdbTransport(daemon.serial).run(["sh", "-c", 'printf "%s" "$1"; echo bad >&2; exit 37', "sh", "it's\r\n \\ $x"])
    assert (done.code, done.text, done.errors) == (37, "it's\r\n \\ $x", "bad")


def test_a_link_that_breaks_in_a_push_costs_a_chunk(
    desk: Desk, daemon: FakeAdbd, phone: AdbTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "ATTEMPTS", 1)
    source = tmp_path / "model.gguf"
    source.write_bytes(bytes(range(256)) * 16_000)
    target = f"{prepare_folder(phone)}/model.gguf"
    daemon.faults.drop_after = [(5 << 20) // 2]
    with pytest.raises(LinkError, match="files on the device are kept"):
        tree.push_file(phone, source, target)
    desk.connect(daemon)
    left = tree.device_files(phone, prepare_folder(phone))
    assert "model.gguf" not in left
    assert set(left) <= {"model.gguf.partial", ".incoming"}
    sent: list[int] = []
    tree.push_file(phone, source, target, sent.append)
    assert sent[0] > 1 << 20  # not from the beginning
    assert tree.device_files(phone, prepare_folder(phone))["model.gguf"] == tree.sha256_of(source)


def test_a_folder_that_may_not_be_written_to(phone: AdbTransport) -> None:
    phone.folder = "/proc/edge-mtp"
    with pytest.raises(TransportError, match=r"(?i)/proc/edge-mtp|no such file|permission"):
        prepare_folder(phone)
