"""A phone is kept awake while it measures, and gets its settings back, also where nobody was left to put them back."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_devices.machine.system import System, run_command
from edge_devices.remote.job_monitor import kept_awake, restore_settings
from edge_devices.remote.jobs import start_job
from edge_devices.remote.transport import AdbTransport
from fake_phone import FakePhone

pytestmark = pytest.mark.skipif(shutil.which("proot") is None, reason="needs proot (apt install proot)")
FILE = "/data/local/tmp/.edge-mtp-settings"
TIMEOUT, DOZE = "system screen_off_timeout", "/system/says/dumpsys deviceidle enabled all"
DAY_MS = "86400000"


@pytest.fixture
def phone(tmp_path: Path) -> Iterator[FakePhone]:
    phone = FakePhone(tmp_path / "phone")
    yield phone
    phone.close()


def on(phone: FakePhone) -> System:
    """The phone as the monitor on it sees it."""

    def run(arguments, **_):
        return run_command(["env", *(f"{k}={v}" for k, v in phone.environment().items()), *phone.words(), *arguments], seconds=60)

    return System(root=phone.root, run=run)


def doze(phone: FakePhone) -> str:
    return phone.path(DOZE).read_text().strip()


@pytest.mark.parametrize(("timeout", "enabled"), [("30000", "1"), ("", "1"), ("600000", "0")])
def test_settings_are_changed_and_put_back(phone, timeout, enabled):
    if timeout:
        phone.write(f"/system/settings/{TIMEOUT}", f"{timeout}\n")
    phone.says("dumpsys deviceidle enabled all", f"{enabled}\n")
    said = []
    with kept_awake(on(phone), FILE, said.append) as awake:
        assert awake
        assert (phone.setting(TIMEOUT), doze(phone)) == (DAY_MS, "0")
        assert phone.path(FILE).exists(), "a kill must leave them to whoever comes next"
    assert (phone.setting(TIMEOUT), doze(phone)) == (timeout, enabled)
    assert not phone.path(FILE).exists()
    assert said == []


def test_what_a_killed_run_left_is_never_taken_for_the_settings_before(phone):
    phone.write(f"/system/settings/{TIMEOUT}", "30000\n")
    phone.says("dumpsys deviceidle enabled all", "1\n")
    killed = kept_awake(on(phone), FILE, lambda _: None)
    killed.__enter__()
    assert phone.setting(TIMEOUT) == DAY_MS
    with kept_awake(on(phone), FILE, lambda _: None):
        assert phone.setting(TIMEOUT) == DAY_MS
    assert (phone.setting(TIMEOUT), doze(phone)) == ("30000", "1")


def test_what_cannot_be_read_or_changed_is_left_and_said(phone):
    tool = phone.root / "system/bin/settings"
    said = []
    tool.write_text("#!/system/bin/sh\necho 'Security exception' >&2; exit 255\n")
    with kept_awake(on(phone), FILE, said.append):
        pass
    assert said == ["the screen's timeout is not known and stays as it is, so that the phone may fall asleep"]
    assert not phone.path(FILE).exists()
    tool.write_text('#!/system/bin/sh\ntest "$1" != get || echo 30000\n')  # takes no new value, as some makers' builds
    said.clear()
    with kept_awake(on(phone), FILE, said.append):
        pass
    assert said == ["the screen's timeout could not be lengthened, so that the phone may fall asleep"]


def test_other_machines_are_left_alone(tmp_path):
    commands = []
    system = System(root=tmp_path, run=lambda arguments, **_: commands.append(arguments))
    with kept_awake(system, FILE, pytest.fail) as awake:
        assert not awake
    assert commands == []


def test_settings_are_put_back_from_afar(daemon):
    transport, phone, said = AdbTransport(daemon.serial), daemon.phone, []
    restore_settings(transport, said.append)
    assert said == [], "nothing was changed"
    phone.write(f"/system/settings/{TIMEOUT}", f"{DAY_MS}\n")
    phone.write(transport.settings, "timeout=30000\ndoze=1\n")
    restore_settings(transport, said.append)
    assert (phone.setting(TIMEOUT), doze(phone)) == ("30000", "1")
    assert said == ["the screen's timeout and Doze are as they were before a run that was cut off"]
    assert not phone.path(transport.settings).exists()


def test_nothing_is_put_back_under_a_run_that_goes_on(daemon):
    transport, phone = AdbTransport(daemon.serial), daemon.phone
    start_job(transport, "/data/local/tmp/job", ["sleep", "60"])
    phone.write(transport.settings, "timeout=30000\ndoze=0\n")
    restore_settings(transport, pytest.fail)
    assert phone.path(transport.settings).exists()


def test_what_is_not_put_back_is_said(daemon):
    transport, said = AdbTransport(daemon.serial), []
    daemon.phone.write(transport.settings, "timeout=30000\ndoze=0\n")
    (daemon.phone.root / "system/bin/settings").write_text("#!/system/bin/sh\nexit 255\n")
    restore_settings(transport, said.append)
    words = "the screen's timeout could not be put back: settings put system screen_off_timeout 30000"
    assert said == [f"the phone's settings are still those of a run that was cut off: {words}"]
    assert daemon.phone.path(transport.settings).exists()


@pytest.mark.parametrize("shell", ["dash", "mksh", "bash"])
def test_a_file_with_other_text_changes_nothing(shell, tmp_path):
    """Whoever may write there could otherwise have a command run."""
    from edge_devices.remote.job_monitor import RESTORE

    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "file").write_text("timeout=1; touch owned\ndoze=$(touch owned)\n")
    done = subprocess.run([shell, "-c", RESTORE, "sh", "file"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not list(tmp_path.iterdir()), done
