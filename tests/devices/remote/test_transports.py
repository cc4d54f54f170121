"""What holds for every way to a device: this machine, a phone behind the real adb, a host behind the real sshd."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_devices.errors import LinkError, TransportError
from edge_devices.machine.system import CommandResult
from edge_devices.remote import file_sync as tree
from edge_devices.remote.jobs import BOOT_ID, LIVE, JobState, poll_job, remove, running_job, start_job, stop_job
from edge_devices.remote.transport import AdbTransport, FramedCommand, SshTransport, Transport, frame_command, prepare_folder, shell
from fake_adbd import FakeAdbd
from local_transport import LocalTransport
from phones import Desk
from polling import wait

AWKWARD = [
    "plain",
    "",
    "with space",
    "it's",
    '"quoted"',
    "$HOME `id` $(id)",
    "back\\slash",
    "* ? [a]",
    "a\nb",
    "-n",
    "ünïcödé 漢字",
    "; exit 3",
    "%s%n",
]
ARGUMENTS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), max_size=4)


@pytest.fixture(scope="module")
def phone(desk: Desk) -> FakeAdbd:
    """A phone of this file's own: what other files do to theirs is no matter here."""
    return desk.phone()


@pytest.fixture(params=["local", "adb", "ssh"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    if request.param == "local":
        return LocalTransport(tmp_path / "device")
    if request.param == "ssh":
        result: SshTransport = request.getfixturevalue("pi")
        return result
    daemon = request.getfixturevalue("phone")
    assert request.getfixturevalue("desk").plugged(daemon)
    return AdbTransport(daemon.serial, f"/data/local/tmp/{tmp_path.name}")


def test_arguments_arrive_as_they_are(transport: Transport) -> None:
    done = transport.run(["sh", "-c", 'for a in "$@"; do printf "%s|" "$a"; done', "sh", *AWKWARD])
    assert (done.code, done.text) == (0, "".join(f"{a}|" for a in AWKWARD))


def test_exit_codes_and_both_outputs_arrive(transport: Transport) -> None:
    done = transport.run(["sh", "-c", "echo out; echo bad >&2; exit 37"])
    assert (done.code, done.text, done.errors) == (37, "out\n", "bad\n")
    assert transport.run(["no-such-program-here"]).code == 127
    assert transport.run(["sleep", "5"], seconds=0.3).code == 124


@pytest.mark.parametrize("separate", [True, False])
@given(arguments=ARGUMENTS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sealed_command_brings_any_argument_through_a_real_shell(arguments: list[str], separate: bool) -> None:
    framed = frame_command(
        ["sh", "-c", 'for a in "$@"; do printf "%s\\0" "$a"; done; echo oops >&2; exit 5', "sh", *arguments], separate=separate
    )
    done = subprocess.run(["sh", "-c", framed.line], capture_output=True, check=False)
    answer = framed.parse(done.stdout, done.stderr.decode())
    assert answer is not None
    assert (answer.code, answer.output.decode(), answer.errors.strip()) == (5, "".join(f"{a}\0" for a in arguments), "oops")
    assert framed.parse(done.stdout[: len(answer.output)], "") is None  # cut off: no code is made up


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("code", [0, 5, 137])
def test_an_output_cut_anywhere_before_the_end_of_its_code_gives_no_code(separate: bool, code: int) -> None:
    framed = frame_command(["sh", "-c", f"echo out; echo bad >&2; exit {code}"], separate=separate)
    whole = subprocess.run(["sh", "-c", framed.line], capture_output=True, check=False).stdout
    end = whole.index(framed.mark) + len(framed.mark) + len(str(code)) + 1
    assert [framed.parse(whole[:cut], "") for cut in range(end)] == [None] * end
    actual = framed.parse(whole, "")
    assert actual == CommandResult(code=code, output=b"out\n", errors="" if separate else "bad")


@pytest.mark.parametrize("rest", ["x\n", "-1\n", "\n", "1e3\n", "9" * 19 + "\n"])
def test_a_code_that_is_no_number_is_a_broken_link(rest: str) -> None:
    assert FramedCommand("true", b"[mark]").parse(b"out[mark]" + rest.encode(), "") is None


def test_an_argument_with_a_nul_byte_is_refused_among_others() -> None:
    with pytest.raises(TransportError, match="an argument with a NUL byte cannot be passed to a command"):
        frame_command(["echo", "a\0b", "c"])


def test_markers_are_long_and_differ() -> None:
    marks = {frame_command(["true"]).mark for _ in range(50)}
    assert len(marks) == 50
    assert {len(mark) for mark in marks} == {18}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Names that shells and tools stumble over, a program, an empty file, and a file of several chunks."""
    made = tmp_path / "source"
    for name in ("a.txt", "deep/er/b.txt", "with space.txt", "it's $HOME.txt", "-n", "ünïcödé.txt", 'quo"te*?[x].txt'):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(name)
    (made / "empty").touch()
    (made / "program").write_text("#!/bin/sh\necho ran\n")
    (made / "program").chmod(0o755)
    return made


def test_a_folder_arrives_whole_and_only_changes_are_sent(transport: Transport, folder: Path) -> None:
    target = f"{prepare_folder(transport)}/a folder"
    first = tree.push_tree(transport, folder, target)
    assert (first.sent, first.unchanged, first.removed) == (9, 0, 0)
    there = tree.device_files(transport, target)
    assert there == {f.path: f.sha256 for f in tree.local_files(folder)}
    assert shell(transport, '"$1/program"', target) == "ran\n"
    (folder / "a.txt").write_text("changed")
    (folder / "empty").unlink()
    second = tree.push_tree(transport, folder, target)
    assert (second.sent, second.unchanged, second.removed, second.bytes) == (1, 7, 1, 7)
    assert shell(transport, 'cat "$1/a.txt"', target) == "changed"
    assert tree.push_tree(transport, folder, target).sent == 0


def test_large_files_go_in_chunks_and_resume(transport: Transport, tmp_path: Path) -> None:
    source = tmp_path / "big it's.bin"
    source.write_bytes(bytes(range(256)) * 14_000)
    target = f"{prepare_folder(transport)}/models/big it's.bin"
    sent: list[int] = []

    class Enough(Exception):
        pass

    def stop(count: int) -> None:
        sent.append(count)
        if count == 2 << 20:
            raise Enough

    with pytest.raises(Enough):
        tree.push_file(transport, source, target, stop)
    resumed: list[int] = []
    tree.push_file(transport, source, target, resumed.append)
    assert (sent, resumed) == ([1 << 20, 2 << 20], [3 << 20, source.stat().st_size])
    back = tmp_path / "back"
    tree.pull_file(transport, target, back)
    assert back.read_bytes() == source.read_bytes()
    assert list(tree.device_files(transport, target.rpartition("/")[0])) == ["big it's.bin"]


def test_a_damaged_part_is_not_resumed(transport: Transport, tmp_path: Path) -> None:
    source = tmp_path / "file.bin"
    source.write_bytes(b"right" * 1000)
    target = f"{prepare_folder(transport)}/file.bin"
    shell(transport, 'printf wrong > "$1.partial"', target)
    tree.push_file(transport, source, target)
    assert tree.device_files(transport, prepare_folder(transport)) == {"file.bin": tree.sha256_of(source)}


def test_what_is_not_there_cannot_be_fetched(transport: Transport, tmp_path: Path) -> None:
    with pytest.raises(TransportError):
        tree.pull_file(transport, f"{prepare_folder(transport)}/nothing", tmp_path / "nothing")
    assert not list(tmp_path.glob("nothing*"))


def test_a_file_that_is_too_large_stays_on_the_device(tmp_path: Path) -> None:
    device = LocalTransport(tmp_path / "device")
    source = Path(prepare_folder(device)) / "log"
    with source.open("wb") as file:
        file.truncate(tree.MAX_PULL_BYTES + 1)
    with pytest.raises(TransportError, match=r"log is larger than .* it is left there"):
        tree.pull_file(device, str(source), tmp_path / "log")
    assert not list(tmp_path.glob("log*"))


def test_a_device_that_sends_more_than_the_file_has_cannot_fill_the_disk(tmp_path: Path) -> None:
    written = []

    class Liar(LocalTransport):
        def run(self, arguments: Sequence[str], *, seconds: float = 60.0) -> CommandResult:
            written.extend(path.stat().st_size for path in tmp_path.glob("log*") if tree.HASH in arguments)
            done = super().run(arguments, seconds=seconds)
            return replace(done, output=bytes(5_000_000)) if tree.SLICE in arguments else done

    device = Liar(tmp_path / "device")
    source = Path(prepare_folder(device)) / "log"
    source.write_bytes(bytes(range(250)) * 4)
    with pytest.raises(TransportError, match="arrived damaged"):
        tree.pull_file(device, str(source), tmp_path / "log")
    assert written == [1000] * (tree.ATTEMPTS - 1)


def test_a_flood_is_no_broken_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken link is waited for; a device that floods would be asked again and again."""
    (tmp_path / "adb").write_text("#!/bin/sh\nhead -c 3000000 /dev/zero\n")
    (tmp_path / "adb").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(TransportError, match="adb:x: the answer is longer than 1048576 bytes") as caught:
        AdbTransport("x").run(["true"])
    assert not isinstance(caught.value, LinkError)


def test_a_job_goes_on_by_itself_and_tells_its_end(transport: Transport) -> None:
    job = f"{prepare_folder(transport)}/runs/one"
    release = f"{prepare_folder(transport)}/release"
    script = 'echo begun; echo r1 >> res; while ! test -e "$1"; do sleep 0.05; done; echo r2 >> res; exit 3'
    start_job(transport, job, ["sh", "-c", script, "sh", release])
    assert wait(lambda: poll_job(transport, job, "res").records == 1)
    status = poll_job(transport, job, "res")
    assert (status.state, status.exit_code, status.log) == (JobState.RUNNING, None, ("begun",))
    with pytest.raises(TransportError, match="already"):
        start_job(transport, job, ["true"])
    shell(transport, ': > "$1"', release)
    assert wait(lambda: poll_job(transport, job, "res").state is JobState.FINISHED)
    status = poll_job(transport, job, "res")
    assert (status.exit_code, status.records) == (3, 2)
    remove(transport, job)
    assert poll_job(transport, job, "res").state is JobState.ABSENT


def test_a_job_that_is_killed_or_restarted_is_seen_as_such(transport: Transport) -> None:
    job = f"{prepare_folder(transport)}/runs/two"
    start_job(transport, job, ["sleep", "60"])
    assert poll_job(transport, job, "res").state is JobState.RUNNING
    shell(transport, 'kill -KILL "-$(cut -d" " -f1 "$1/pid")"', job)
    assert wait(lambda: poll_job(transport, job, "res").state is JobState.DIED)
    shell(transport, 'echo another > "$1/boot"', job)
    assert poll_job(transport, job, "res").state is JobState.RESTARTED


def test_a_device_runs_one_job_at_a_time(transport: Transport) -> None:
    runs = f"{prepare_folder(transport)}/runs"
    assert running_job(transport) == ""
    start_job(transport, f"{runs}/first", ["sleep", "60"])
    assert running_job(transport) == f"{runs}/first"
    with pytest.raises(TransportError, match=r"run first goes on there: `--run first` follows and collects it, and with --stop ends it"):
        start_job(transport, f"{runs}/second", ["true"])
    assert poll_job(transport, f"{runs}/second", "res").state is JobState.ABSENT
    stop_job(transport, f"{runs}/first")
    assert poll_job(transport, f"{runs}/first", "res").state is JobState.STOPPED
    start_job(transport, f"{runs}/second", ["true"])
    assert wait(lambda: poll_job(transport, f"{runs}/second", "res").state is JobState.FINISHED)
    assert wait(lambda: shell(transport, 'ls -d "$1" 2>/dev/null; exit 0', transport.lock) == "")  # freed by its end
    for name, words in (("second", "run second is over already"), ("third", "there is no run third")):
        with pytest.raises(TransportError, match=words):
            stop_job(transport, f"{runs}/{name}")


@pytest.mark.parametrize("transport", ["local", "adb"], indirect=True, ids="on {}".format)  # both shells: coreutils', and a phone's
@pytest.mark.parametrize(
    "stale",
    [
        'kill -KILL "-$(cut -d" " -f1 "$1/pid")"',
        'echo another > "$1/boot"',
        'p="$(cut -d" " -f1 "$1/pid")"; echo "$p 1" > "$1/pid"',
        'mv "$1" "$1.gone"',
    ],
)
def test_a_lock_that_was_left_behind_holds_nobody_up(transport: Transport, stale: str) -> None:
    """After a crash, after a restart, with its number at another process, and without its folder."""
    runs = f"{prepare_folder(transport)}/runs"
    start_job(transport, f"{runs}/crashed", ["sleep", "5"])
    shell(transport, stale, f"{runs}/crashed")
    assert wait(lambda: running_job(transport) == "")
    start_job(transport, f"{runs}/next", ["sleep", "60"])
    assert running_job(transport) == f"{runs}/next"
    stop_job(transport, f"{runs}/next")


# The file names a starting shell that is gone: no process has such a number. While that shell is looked for, the file comes to name the
# job's own process, which here is the looking shell itself.
HANDED_OVER = f"""{LIVE}
job="$1"; mkdir -p "$job"; cat {BOOT_ID} > "$job/boot" 2>/dev/null
echo "99999999 1" > "$job/pid"
live "$job" && echo "live before"
kill() {{ test "$2" = $$ || {{ echo "$$ $(born $$)" > "$job/pid"; return 1; }}; }}
live "$job" && echo live
exit 0
"""


@pytest.mark.parametrize("transport", ["local", "adb"], indirect=True, ids="on {}".format)
def test_a_job_that_is_handed_over_during_a_look_is_live(transport: Transport) -> None:
    """Else another one would take the device's lock."""
    assert shell(transport, HANDED_OVER, f"{prepare_folder(transport)}/job") == "live\n"


def test_of_several_that_start_at_once_one_runs(tmp_path: Path) -> None:
    device = LocalTransport(tmp_path / "device")
    runs = f"{prepare_folder(device)}/runs"
    Path(device.lock).symlink_to(f"{runs}/left behind")

    def start(number: int) -> bool:
        try:
            start_job(device, f"{runs}/{number}", ["sleep", "60"])
        except TransportError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(start, range(8))) == 1
    stop_job(device, running_job(device))


def test_nothing_outside_the_own_folder_is_removed(transport: Transport) -> None:
    for path in ("/", f"{transport.folder}/../other", f"{transport.folder}x", ""):
        with pytest.raises(TransportError, match="is not removed"):
            remove(transport, path)


def test_free_space_is_known_before_the_folder_is(transport: Transport) -> None:
    free = tree.free_bytes(transport, f"{prepare_folder(transport)}/not/yet/there")
    assert free is not None
    assert free > 1 << 20


def test_too_little_room_is_refused_before_anything_is_sent(folder: Path, tmp_path: Path) -> None:
    class Full(LocalTransport):
        def run(self, arguments: Sequence[str], *, seconds: float = 60.0) -> CommandResult:
            done = super().run(arguments, seconds=seconds)
            listed = b"Filesystem 1K-blocks Used Available Use% Mounted on\ntmpfs 9 8 1 90% /\n"
            return replace(done, output=listed) if any("df -k" in word for word in arguments) else done

    device = Full(tmp_path / "device")
    with pytest.raises(TransportError, match="are free"):
        tree.push_tree(device, folder, f"{prepare_folder(device)}/no room")
    assert tree.device_files(device, prepare_folder(device)) == {}


def test_a_device_that_does_not_answer_in_time_is_waited_for_and_no_failure(transport: Transport) -> None:
    """As a board that swaps: who follows a run there asks again."""
    with pytest.raises(LinkError, match=r"no answer in 0\.5 s"):
        shell(transport, "sleep 20", seconds=0.5)
