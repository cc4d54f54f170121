"""Reading the machine from real /proc samples under a fake root."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_devices.cli import main
from edge_devices.errors import byte_text
from edge_devices.machine.detection import read_machine
from edge_devices.machine.memory import available_memory_bytes, peak_memory_bytes

PI_5 = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 1

processor\t: 1
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU part\t: 0xd0b

Revision\t: c04170
Model\t\t: Raspberry Pi 5 Model B Rev 1.0
"""
LAPTOP = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Core(TM) i7\nflags\t\t: fpu sse2 avx2\n\n"
MEMINFO = "MemTotal:        8130496 kB\nMemFree:          215324 kB\nMemAvailable:    6012344 kB\n"


def root_with(tmp_path: Path, **files: str) -> Path:
    (tmp_path / "proc").mkdir()
    for name, text in files.items():
        (tmp_path / "proc" / name).write_text(text)
    return tmp_path


def test_raspberry_pi_5(tmp_path):
    machine = read_machine(root_with(tmp_path, cpuinfo=PI_5, meminfo=MEMINFO))
    assert machine.cores == ("Cortex-A76", "Cortex-A76")
    assert machine.processor == "Cortex-A76"
    assert "asimddp" in machine.features
    assert machine.memory_available == 6012344 * 1024


def test_laptop(tmp_path):
    machine = read_machine(root_with(tmp_path, cpuinfo=LAPTOP))
    assert machine.processor == "Intel(R) Core(TM) i7"
    assert machine.features == ("avx2", "fpu", "sse2")
    assert machine.memory_available is None


def test_unknown_parts_keep_their_numbers(tmp_path):
    text = "processor\t: 0\nCPU implementer\t: 0x61\nCPU part\t: 0x022\n"
    assert read_machine(root_with(tmp_path, cpuinfo=text)).cores == ("0x61 0x022",)


def test_no_proc_at_all(tmp_path):
    machine = read_machine(tmp_path)
    assert machine.cores == ()
    assert available_memory_bytes(tmp_path) is None


def test_damaged_meminfo(tmp_path):
    assert available_memory_bytes(root_with(tmp_path, meminfo="MemAvailable: lots kB\nMemAvailable")) is None


def test_peak_memory_is_plausible():
    assert 5_000_000 < peak_memory_bytes() < 1 << 40


def test_detect_command():
    record = json.loads(CliRunner().invoke(main, ["detect", "--json"]).stdout)
    assert record["usable_processors"] >= 1
    result = CliRunner().invoke(main, ["detect"])
    assert result.exit_code == 0
    assert "memory available" in result.stdout


@pytest.fixture
def machine_root(tmp_path: Path) -> Path:
    """A root with 8,000 kB available, and a process without a control group."""
    write(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n", "proc/self/cgroup": ""})
    return tmp_path


def write(root: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def v2(folder: str, limit: str, **more: str) -> dict[str, str]:
    """Files of a group in which 700,000 bytes are used, 200,000 of them pages of files."""
    stat = "anon 400000\nfile 300000\nshmem 100000\ninactive_file 150000\nactive_file 50000\n"
    files = {"memory.max": limit, "memory.current": "700000", "memory.stat": stat, **{f"memory.{key}": text for key, text in more.items()}}
    return {f"sys/fs/cgroup/{folder}/{name}": f"{text}\n" for name, text in files.items()}


def v1(folder: str, limit: str) -> dict[str, str]:
    stat = "cache 1\ninactive_file 1\ntotal_inactive_file 150000\ntotal_active_file 50000\n"
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": "700000", "memory.stat": stat}
    return {f"sys/fs/cgroup/memory/{folder}/{name}": f"{text}\n" for name, text in files.items()}


V1 = "9:name=systemd:/\n4:cpu,memory:/box/inner\n0::/\n"


@pytest.mark.parametrize(
    ("group", "files", "available"),
    [
        ("", {}, 8000 * 1024),
        ("0::/box\n", v2("box", "max"), 8000 * 1024),
        ("0::/box\n", v2("box", "1000000"), 500000),
        ("0::/box\n", v2("box", "max", high="900000"), 400000),
        ("0::/box\n", v2("box", "1000000", high="max"), 500000),
        ("0::/box\n", v2("box", "not a number"), 8000 * 1024),
        ("0::/box\n", v2("box", "600000"), 100000),
        ("0::/box\n", v2("box", "100000"), 0),
        ("0::/slice/box\n", v2("slice/box", "max") | v2("slice", "1000000"), 500000),
        ("0::/slice/box\n", v2("slice/box", "900000") | v2("slice", "1000000"), 400000),
        ("0::/host/path\n", v2(".", "1000000"), 500000),  # a container that has its own group as the mount
        ("0::/../../etc\n", v2(".", "1000000") | {"etc/memory.max": "5", "etc/memory.current": "1"}, 500000),
        (V1, v1("box/inner", "1000000"), 500000),
        (V1, v1("box/inner", "9223372036854771712"), 8000 * 1024),
        (V1, v1("box/inner", "9223372036854771712") | v1("box", "1000000"), 500000),
        (V1, v1(".", "1000000"), 500000),
        ("4:memory:/box\n0::/other\n", v1("box", "1000000") | v2("other", "900000"), 400000),
    ],
)
def test_available_memory_heeds_the_control_groups(group: str, files: dict[str, str], available: int, machine_root: Path) -> None:
    write(machine_root, {**files, "proc/self/cgroup": group})
    assert available_memory_bytes(machine_root) == available


ARENAS = """
import sys, threading
from edge_devices.machine.memory import mapped_bytes, share_one_arena
if sys.argv[1] == "one":
    share_one_arena()
before, release = mapped_bytes(), threading.Event()
threading.stack_size(1 << 20)
threads = [threading.Thread(target=lambda: (bytearray(1 << 16), release.wait())) for _ in range(8)]
for thread in threads:
    thread.start()
print(mapped_bytes() - before)
release.set()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc reserves arenas")
def test_threads_of_one_arena_reserve_no_address_space_of_their_own() -> None:
    """Where address space is limited, 64 MiB for each thread would be most of it."""

    def mapped(arenas: str) -> int:
        return int(subprocess.run([sys.executable, "-c", ARENAS, arenas], check=True, capture_output=True, text=True).stdout)

    assert mapped("one") < 8 * (4 << 20)
    assert mapped("several") > 2 * (64 << 20)


LIMITED = """
import resource, sys
from edge_devices.machine.memory import address_space_left, mapped_bytes
assert address_space_left() is None
resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + int(sys.argv[1]),) * 2)
print(address_space_left())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_limit_of_address_space_leaves_what_is_not_mapped_yet() -> None:
    command = [sys.executable, "-c", LIMITED, str(50 << 20)]
    left = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 45 << 20 < left <= 50 << 20


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_500_000, "1.5 MB"), (1_234_000_000, "1.23 GB"), (5 * 10**12, "5000.00 GB")],
)
def test_bytes_as_text(count: int, text: str) -> None:
    assert byte_text(count) == text
