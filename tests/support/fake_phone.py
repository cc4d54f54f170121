"""A phone, or a Pi, that is a folder of this machine: /data, /sys, /system and parts of /proc are its own, through proot.

Its shell is mksh with toybox where they are installed, as on Android. With an emulated `cpu`, aarch64 programs run through qemu, while
shell and tools stay native. What `dumpsys`, `cmd`, `getprop`, `vcgencmd` and `uname` say is what a test wrote into `says`.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ANSWER = """#!/system/bin/sh
f="/system/says/${0##*/} $*"
test -f "$f" || { echo "$0: no answer to $*" >&2; exit 1; }
cat "$f"
"""
# Doze is a switch, and settings are kept, as on a phone.
DUMPSYS = ANSWER.replace(
    "test -f",
    """case "$*" in
  "deviceidle enable all") echo 1 > "/system/says/dumpsys deviceidle enabled all"; exit 0;;
  "deviceidle disable all") echo 0 > "/system/says/dumpsys deviceidle enabled all"; exit 0;;
esac
test -f""",
    1,
)
SETTINGS = """#!/system/bin/sh
f="/system/settings/$2 $3"
case "$1" in get) cat "$f" 2>/dev/null || echo null;; put) echo "$4" > "$f";; delete) rm -f "$f"; echo "Deleted 1 rows";; esac
"""
SCRIPTS = {"dumpsys": DUMPSYS, "settings": SETTINGS} | dict.fromkeys(("cmd", "getprop", "vcgencmd", "input"), ANSWER)
BATTERY = """Current Battery Service state:
  AC powered: false
  USB powered: {usb}
  Wireless powered: false
  status: {status}
  level: {level}
  voltage: 3964
  temperature: {temperature}
"""
PI = "Raspberry Pi 5 Model B Rev 1.0"
# As a Raspberry Pi 5 (also phones since 2018) and a Raspberry Pi 4 tell of themselves; the second has no dot products.
CPUS = {
    "cortex-a76": ("0xd0b", "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"),
    "cortex-a72": ("0xd08", "fp asimd evtstrm crc32 cpuid"),
}


class FakePhone:
    """`root` is its disk. Everything a test changes is a file below it, so it may change at any time. `pi`: its model, no Android then."""

    def __init__(self, root: Path, *, cpu: str = "", pi: str = "", fresh: bool = True) -> None:
        self.root, self._cpu = root, cpu
        self._processes: set[subprocess.Popen[bytes]] = set()
        if fresh:
            for folder in ("data/local/tmp", "sys", "system/bin", "system/says", "system/settings", "system/pipes", "proc"):
                (root / folder).mkdir(parents=True, exist_ok=True)
            self.boot()
            self._tools()
            self.write("/sys/class/thermal/thermal_zone0/temp", "31000\n")
            self.write("/sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "schedutil\n")
            self.write("/sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq", "2400000\n")
            if pi:
                (root / "proc/device-tree").mkdir()
                (root / "proc/device-tree/model").write_text(pi)
                self.says("vcgencmd get_throttled", "throttled=0x0\n")
            else:
                self._android()
            if cpu:
                self._processor(cpu)

    def _android(self) -> None:
        self.write("/system/build.prop", "")
        self.battery()
        self.says("input keyevent KEYCODE_WAKEUP", "")
        self.says("dumpsys deviceidle enabled all", "0\n")
        self.says("dumpsys thermalservice", "Thermal Status: 0\n")
        self.says("getprop ro.product.model", "Fake One\n")
        self.says("getprop ro.soc.model", "\n")

    def _processor(self, cpu: str) -> None:
        """What the kernel says must be what qemu emulates: libraries choose their code by it."""
        write_cpuinfo(self.root / "proc/cpuinfo", cpu, processors=4)
        for name in ("possible", "present"):
            self.write(f"/sys/devices/system/cpu/{name}", "0-3\n")
        self.says("uname -m", "aarch64\n")
        (self.root / "system/bin/uname").unlink(missing_ok=True)
        self._program("uname", ANSWER)

    def path(self, device_path: str) -> Path:
        """Returns where a path of the phone is on this machine."""
        first = device_path.lstrip("/").partition("/")[0]
        return (self.root if first in ("data", "sys", "system") else Path("/")) / device_path.lstrip("/")

    def write(self, device_path: str, text: str) -> None:
        """Puts a file on the phone, in one step, so that no reader sees half of it."""
        path = self.path(device_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".fresh")
        fresh.write_text(text)
        fresh.replace(path)

    def says(self, command: str, text: str) -> None:
        """Scripts what a command answers."""
        self.write(f"/system/says/{command}", text)

    def setting(self, name: str) -> str:
        """Returns what `settings` has under a name such as "system screen_off_timeout"; empty for what was never put there."""
        path = self.path(f"/system/settings/{name}")
        return path.read_text().strip() if path.exists() else ""

    def battery(self, *, usb: bool = False, level: int = 67, celsius: float = 31.0) -> None:
        """Scripts `dumpsys battery`; status 2 charges, 3 discharges."""
        text = BATTERY.format(usb=str(usb).lower(), status=2 if usb else 3, level=level, temperature=round(celsius * 10))
        self.says("dumpsys battery", text)

    def words(self) -> list[str]:
        """Returns the words before a command that make it run on the phone."""
        words = ["proot"]
        if self._cpu:
            words += ["-q", "qemu-aarch64-static"]
        for folder in ("data", "sys", "system"):
            words += ["-b", f"{self.root / folder}:/{folder}"]
        words += ["-b", f"{self.root / 'proc/boot_id'}:/proc/sys/kernel/random/boot_id"]
        for name in ("cpuinfo", "meminfo", "stat", "pressure", "device-tree"):
            if (self.root / "proc" / name).exists():
                words += ["-b", f"{self.root / 'proc' / name}:/proc/{name}"]
        return [*words, "-w", "/data/local/tmp"]

    def environment(self) -> dict[str, str]:
        own = {
            "PATH": f"/system/bin:{os.environ['PATH']}",
            "HOME": "/data/local/tmp",
            "TMPDIR": "/data/local/tmp",
            "QEMU_CPU": self._cpu or "max",
        }
        return os.environ | own

    def start(self, line: str) -> Running:
        pipe = self.root / "system/pipes" / os.urandom(8).hex()
        os.mkfifo(pipe)
        ended = f'sh -c "$1"; echo $? > /system/pipes/{pipe.name}'
        process = subprocess.Popen(
            [*self.words(), "sh", "-c", ended, "sh", line], start_new_session=True, env=self.environment(), stdin=-1, stdout=-1, stderr=-1
        )
        self._processes.add(process)
        return Running(process, pipe)

    def boot(self) -> None:
        """Starts anew: another boot id."""
        (self.root / "proc").mkdir(exist_ok=True)
        (self.root / "proc/boot_id").write_text(f"{uuid.uuid4()}\n")

    def kill_all(self) -> None:
        """Kills every process that our proots trace, whatever its parent is now.

        All are stopped first, so that none sees the end of another.
        """
        numbers = traced({process.pid for process in self._processes})
        for sent in (signal.SIGSTOP, signal.SIGKILL):
            for item in numbers:
                with suppress(ProcessLookupError):
                    os.kill(item, sent)
        for process in self._processes:
            process.kill()
            process.wait()
            _close(process)
        self._processes.clear()

    def close(self) -> None:
        self.kill_all()

    def _tools(self) -> None:
        folder = self.root / "system/bin"
        mksh, toybox = shutil.which("mksh"), shutil.which("toybox")
        if mksh and toybox:
            (folder / "sh").symlink_to(mksh)
            for name in subprocess.run([toybox], capture_output=True, text=True, check=True).stdout.split():
                (folder / name).symlink_to(toybox)
        else:
            (folder / "sh").symlink_to("/bin/sh")
        for name, script in SCRIPTS.items():
            self._program(name, script)

    def _program(self, name: str, script: str) -> None:
        (self.root / "system/bin" / name).write_text(script)
        (self.root / "system/bin" / name).chmod(0o755)


class Running:
    """A command on the phone. It is over when its shell is, whatever it left in the background."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: Path) -> None:
        self.process, self._pipe = process, pipe
        self._status = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)

    def relay(self, out: Callable[[bytes], None], err: Callable[[bytes], None], gone: Callable[[], bool]) -> int | None:
        """Passes both outputs on until the end; returns the exit code, None when nobody listens any more."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        outputs = {self.process.stdout.fileno(): out, self.process.stderr.fileno(): err}
        for descriptor in outputs:
            os.set_blocking(descriptor, False)
        code = None
        try:
            while code is None and not gone():
                readable = select.select([*outputs, self._status], [], [], 0.2)[0]
                if self._status in readable:
                    code = int(os.read(self._status, 16))
                elif self.process.poll() is not None:
                    code = 137
                for descriptor, write in outputs.items():
                    _forward(descriptor, write)
            return code
        finally:
            os.close(self._status)
            self._pipe.unlink(missing_ok=True)
            _close(self.process)  # a phone of many commands would come to descriptors that select cannot take


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream and not stream.closed:
            with suppress(BrokenPipeError):
                stream.close()


def _forward(descriptor: int, write: Callable[[bytes], None]) -> None:
    with suppress(BlockingIOError):
        while data := os.read(descriptor, 1 << 16):
            write(data)


def traced(tracers: set[int]) -> list[int]:
    """Returns the numbers of all processes that some others trace (proc(5), status, TracerPid)."""
    result = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError, StopIteration):
            line = next(line for line in status.read_text().splitlines() if line.startswith("TracerPid:"))
            if int(line.split()[1]) in tracers:
                result.append(int(status.parent.name))
    return result


def write_cpuinfo(path: Path, cpu: str, processors: int = 2) -> None:
    """Writes /proc/cpuinfo of an ARM machine; onnxruntime crashes on an x86 one, and the launcher chooses by it."""
    part, features = CPUS[cpu]
    entry = (
        f"BogoMIPS\t: 108.00\nFeatures\t: {features}\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
        f"CPU part\t: {part}\nCPU revision\t: 1\n\n"
    )
    path.write_text("".join(f"processor\t: {number}\n{entry}" for number in range(processors)))
