"""A phone that is a folder of this machine: /data, /sys, /system and its boot id are its own, through proot, the rest is the machine's.

Its shell is mksh with toybox where they are installed, as on Android. With `userland`, a folder of an aarch64 system, everything runs in
that through qemu. What `dumpsys`, `cmd`, `getprop` and `vcgencmd` say is what a test wrote into `says`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import uuid
from pathlib import Path

ANSWER = """#!{shell}
f="/system/says/${{0##*/}} $*"
test -f "$f" || {{ echo "$0: no answer to $*" >&2; exit 1; }}
cat "$f"
"""
ANSWERING = ("dumpsys", "cmd", "getprop", "vcgencmd", "settings")
BATTERY = """Current Battery Service state:
  AC powered: false
  USB powered: {usb}
  Wireless powered: false
  status: {status}
  level: {level}
  voltage: 3964
  temperature: {temperature}
"""


class FakePhone:
    """`root` is its disk. Everything a test changes is a file below it, so it may change at any time."""

    def __init__(self, root: Path, *, userland: Path | None = None, cpu: str = "cortex-a76") -> None:
        self.root, self._userland, self._cpu = root, userland, cpu
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stop = threading.Event()
        for folder in ("data/local/tmp", "sys", "system/bin", "system/says", "system/pipes", "proc"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        self.write("/system/build.prop", "")
        self.boot()
        self._tools()
        self.battery()
        self.says("dumpsys power", "  mWakefulness=Awake\n")
        self.says("dumpsys deviceidle enabled all", "0\n")
        self.says("dumpsys thermalservice", "Thermal Status: 0\n")
        self.says("getprop ro.product.model", "Fake One\n")
        self.says("getprop ro.soc.model", "\n")
        self.write("/sys/class/thermal/thermal_zone0/temp", "31000\n")
        self.write("/sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "schedutil\n")
        self.write("/sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq", "2400000\n")

    def path(self, device_path: str) -> Path:
        """Returns where a path of the phone is on this machine."""
        first = device_path.lstrip("/").partition("/")[0]
        outside = self._userland or Path("/")
        return (self.root if first in ("data", "sys", "system") else outside) / device_path.lstrip("/")

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

    def battery(self, *, usb: bool = False, level: int = 67, celsius: float = 31.0, status: int | None = None) -> None:
        """Scripts `dumpsys battery`; status 2 charges, 3 discharges."""
        text = BATTERY.format(usb=str(usb).lower(), status=status or (2 if usb else 3), level=level, temperature=round(celsius * 10))
        self.says("dumpsys battery", text)

    def vary(self, device_path: str, texts: list[str], every_s: float) -> threading.Thread:
        """Changes a file as time goes by."""

        def go() -> None:
            for text in texts:
                self.write(device_path, text)
                if self._stop.wait(every_s):
                    return

        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        return thread

    def popen(self, line: str, pipe: str, **streams: int) -> subprocess.Popen[bytes]:
        """Starts a shell command that writes its exit code into the named pipe of /system/pipes at its end."""
        words = ["proot"]
        if self._userland:
            words += ["-r", str(self._userland), "-q", "qemu-aarch64-static", "-b", "/dev", "-b", "/proc"]
        for folder in ("data", "sys", "system"):
            words += ["-b", f"{self.root / folder}:/{folder}"]
        words += ["-b", f"{self.root / 'proc/boot_id'}:/proc/sys/kernel/random/boot_id"]
        for name in ("cpuinfo", "meminfo"):
            if (self.root / "proc" / name).exists():
                words += ["-b", f"{self.root / 'proc' / name}:/proc/{name}"]
        shell = "/bin/sh" if self._userland else "sh"
        words += ["-w", "/data/local/tmp", shell, "-c", f'{shell} -c "$1"; echo $? > /system/pipes/{pipe}', "sh", line]
        environment = os.environ | {"PATH": f"/system/bin:{os.environ['PATH']}", "HOME": "/data/local/tmp", "TMPDIR": "/data/local/tmp"}
        if self._userland:
            environment |= {"PATH": "/system/bin:/usr/bin:/bin", "QEMU_CPU": self._cpu}
        process = subprocess.Popen(words, start_new_session=True, env=environment, **streams)  # type: ignore[call-overload]
        self._processes.add(process)
        return process

    def boot(self) -> None:
        """Starts anew: another boot id."""
        (self.root / "proc").mkdir(exist_ok=True)
        (self.root / "proc/boot_id").write_text(f"{uuid.uuid4()}\n")

    def kill_all(self) -> None:
        """Ends everything that runs on the phone; what was detached is a child of some proot and ends with it."""
        for process in self._processes:
            for number in [*_descendants(process.pid), process.pid]:
                try:
                    os.kill(number, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream and not stream.closed:
                    stream.close()
        self._processes.clear()

    def close(self) -> None:
        """Ends the phone."""
        self._stop.set()
        self.kill_all()

    def _tools(self) -> None:
        folder, shell = self.root / "system/bin", "/bin/sh"
        mksh, toybox = shutil.which("mksh"), shutil.which("toybox")
        if mksh and toybox and not self._userland:
            (folder / "sh").symlink_to(mksh)
            shell = mksh
            for name in subprocess.run([toybox], capture_output=True, text=True, check=True).stdout.split():
                (folder / name).symlink_to(toybox)
        for name in ANSWERING:
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_text(ANSWER.format(shell=shell))
            (folder / name).chmod(0o755)


def _descendants(number: int) -> list[int]:
    """Returns the process numbers below one, deepest first (proc(5), task/*/children)."""
    found: list[int] = []
    for listing in Path(f"/proc/{number}/task").glob("*/children") if Path(f"/proc/{number}/task").exists() else ():
        try:
            children = [int(word) for word in listing.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [*_descendants(child), child]
    return found
