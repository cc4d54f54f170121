"""ARM64 devices without one: qemu runs the programs, proot gives them a root folder of their own. Neither needs root.

`Userland.command` is what a test, or a fake adbd as its shell, starts.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

QEMU, PROOT = "qemu-aarch64-static", "proot"
ANDROID_TMP = "/data/local/tmp"
# As a Raspberry Pi 5 (also phones since 2018) and a Raspberry Pi 4 tell of themselves; the second has no dot products.
CPUS = {
    "cortex-a76": ("0xd0b", "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"),
    "cortex-a72": ("0xd08", "fp asimd evtstrm crc32 cpuid"),
}
_APPLETS = (
    "ls cat mkdir rm mv cp chmod ln readlink realpath sha256sum md5sum stat df du ps kill sleep date head tail grep sed awk cut wc"
    " sort uniq find xargs touch env id uname tar dd sync nohup setsid tr basename dirname which mktemp free uptime timeout"
    " seq cmp od test true false"
)


def missing_programs() -> str | None:
    """Why nothing can be emulated here, or None."""
    missing = [name for name in (QEMU, PROOT, "dpkg-deb", "apt-get") if shutil.which(name) is None]
    return f"needs {', '.join(missing)} (apt install qemu-user-static proot)" if missing else None


@dataclass(frozen=True, kw_only=True)
class Userland:
    """A root folder with a shell and small tools for ARM64, statically linked: no C library, no Python. `shell` is a path in it."""

    root: Path
    shell: str
    home: str
    cpu: str = "cortex-a76"
    # Folders of this machine that the device sees, by their place on the device.
    shared: Mapping[str, Path] = field(default_factory=dict)

    def command(self, words: Sequence[str], folder: str | None = None) -> list[str]:
        """The command of this machine that runs `words`, a program of the device and its arguments, in a folder of the device."""
        observed = {"/proc": "", f"{self.root}/cpuinfo": "/proc/cpuinfo", "/dev": ""} | {
            str(path): place for place, path in self.shared.items()
        }
        binds = [word for path, place in observed.items() for word in ("-b", f"{path}:{place}" if place else path)]
        proot, qemu = shutil.which(PROOT) or PROOT, shutil.which(QEMU) or QEMU
        return [proot, "-r", str(self.root), "-q", qemu, *binds, "-w", folder or self.home, *words]

    def environment(self) -> dict[str, str]:
        """What programs of the device find in their environment, and what qemu itself reads from it."""
        # onnxruntime computes wrong results on qemu 7.2's default CPU.
        return {"PATH": "/system/bin:/bin", "HOME": "/", "QEMU_CPU": self.cpu, "PROOT_NO_SECCOMP": "1"}

    def run(self, words: Sequence[str], *, folder: str | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Runs a program on the device and returns what it said."""
        return subprocess.run(
            self.command(words, folder),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def path(self, place: str) -> Path:
        """Where a place of the device lies on this machine."""
        return self.root / place.lstrip("/")


def make_userland(root: Path, cache: Path, *, android: bool, cpu: str = "cortex-a76") -> Userland:
    """Makes a userland of Debian's static busybox, where Android or a Raspberry Pi has its shell and tools.

    Android's own shell, mksh, asks by access() before it starts a program, which proot 5.1 lets through to this machine's files.
    """
    from edge_export.device_package.debian import fetch_archives

    archive = fetch_archives(("busybox-static",), "arm64", cache)["busybox-static"]
    unpacked = root.parent / f"{root.name}-unpacked"
    subprocess.run(["dpkg-deb", "-x", str(archive), str(unpacked)], check=True)
    tools = root / ("system/bin" if android else "bin")
    tools.mkdir(parents=True)
    shutil.copy(unpacked / "bin/busybox", tools / "busybox")
    for name in _APPLETS.split():
        (tools / name).symlink_to("busybox")
    (tools / "sh").symlink_to("busybox")
    if not android:
        (root / "tmp").mkdir()
    shutil.rmtree(unpacked)
    home = ANDROID_TMP if android else "/home/pi"
    for place in (home, "/proc", "/dev", "/sys"):
        (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
    write_cpuinfo(root / "cpuinfo", cpu)
    processors = root / "sys/devices/system/cpu"
    processors.mkdir(parents=True)
    for name in ("possible", "present", "online"):
        (processors / name).write_text("0-1\n")
    return Userland(root=root, shell="/system/bin/sh" if android else "/bin/sh", home=home, cpu=cpu)


def write_cpuinfo(path: Path, cpu: str, processors: int = 2) -> None:
    """Writes /proc/cpuinfo of an ARM machine; onnxruntime crashes on an x86 one, and the launcher chooses by it."""
    part, features = CPUS[cpu]
    entry = (
        f"BogoMIPS\t: 108.00\nFeatures\t: {features}\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
        f"CPU part\t: {part}\nCPU revision\t: 1\n\n"
    )
    path.write_text("".join(f"processor\t: {number}\n{entry}" for number in range(processors)))
