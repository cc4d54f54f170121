"""Device packages on emulated devices: tokens and drafts are those of this machine.

qemu runs their programs, and proot gives them a root folder of their own; neither needs root. Times under emulation mean nothing. The
packages are made here for onnxruntime alone; EDGE_MTP_PACKAGES names a folder with whole ones (such as linux-arm64 in it, made with
`edge-export package linux-arm64 --with-llama-tools`), because compiling llama.cpp takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from drafts_of import drafts_of
from edge_devices.files.limited_read import sha256_of
from fake_phone import write_cpuinfo

QEMU, PROOT = shutil.which("qemu-aarch64-static"), shutil.which("proot")
if not (QEMU and PROOT and shutil.which("dpkg-deb") and shutil.which("apt-get")):
    pytest.skip("needs apt-get, dpkg-deb, qemu-aarch64-static and proot (apt install qemu-user-static proot)", allow_module_level=True)

from edge_devices.waiting import no_report
from edge_export.device_package.debian import fetch_archives
from edge_export.device_package.inventory import PLATFORMS, SITE
from edge_export.device_package.native_libraries import IN_PACKAGE, add_kernels
from edge_export.device_package.wheels import add_own_code
from edge_runtime.backends.kernels import loader
from edge_runtime.backends.kernels.build import TARGETS, library_name
from package_home import Home, chat_bundle
from stub_package import made_package

pytestmark = pytest.mark.slow(8)
SUPPORT = Path(__file__).parents[2] / "support"
PROMPTS = ["def area(r):\n", "class Stack:\n"]
TOKENS = 10
ANDROID_TMP = "/data/local/tmp"
APPLETS = (
    "ls cat mkdir rm mv cp chmod ln readlink realpath sha256sum md5sum stat df du ps kill sleep date head tail grep sed awk cut wc"
    " sort uniq find xargs touch env id uname tar dd sync nohup setsid tr basename dirname which mktemp free uptime timeout"
    " seq cmp od test true false sh"
)
Packages = Callable[[str], Path]


@dataclass(frozen=True, kw_only=True)
class Userland:
    """A root folder with a shell and small tools for ARM64, statically linked: no C library, no Python. `shell` is a path in it."""

    root: Path
    shell: str
    home: str
    cpu: str = "cortex-a76"
    # Folders of this machine that the device sees, by their place on the device.
    shared: Mapping[str, Path] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        """The command of this machine that runs a program of the device, in the user's home."""
        seen = ["/proc", f"{self.root}/cpuinfo:/proc/cpuinfo", "/dev", *(f"{path}:{place}" for place, path in self.shared.items())]
        binds = [word for bind in seen for word in ("-b", bind)]
        return [str(PROOT), "-r", str(self.root), "-q", str(QEMU), *binds, "-w", self.home, *words]

    def environment(self) -> dict[str, str]:
        """What programs of the device find in their environment, and what qemu itself reads from it."""
        # onnxruntime computes wrong results on qemu 7.2's default CPU.
        return {"PATH": "/system/bin:/bin", "HOME": "/", "QEMU_CPU": self.cpu, "PROOT_NO_SECCOMP": "1"}

    def run(self, line: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a line of the shell, in which "$@" are these words, and returns what it said."""
        command, pipes = self.command(self.shell, "-c", line, "sh", *words), {"stdin": subprocess.DEVNULL, "capture_output": True}
        return subprocess.run(command, env=self.environment(), text=True, timeout=300, check=False, **pipes)

    def path(self, place: str) -> Path:
        """Where a place of the device lies on this machine."""
        return self.root / place.lstrip("/")


def make_userland(root: Path, cache: Path, *, android: bool) -> Userland:
    """Makes a userland of Debian's static busybox, where Android or a Raspberry Pi has its shell and tools.

    Android's own shell, mksh, asks by access() before it starts a program, which proot 5.1 lets through to this machine's files.
    """
    tools, home = ("/system/bin", ANDROID_TMP) if android else ("/bin", "/home/pi")
    result = Userland(root=root, shell=f"{tools}/sh", home=home)
    for place in (tools, home, "/proc", "/dev", "/sys/devices/system/cpu", *(() if android else ("/tmp",))):
        result.path(place).mkdir(parents=True)
    archive = fetch_archives(("busybox-static",), "arm64", cache)["busybox-static"]
    unpacked = root.parent / f"{root.name}-unpacked"
    subprocess.run(["dpkg-deb", "-x", str(archive), str(unpacked)], check=True)
    (unpacked / "bin/busybox").rename(result.path(f"{tools}/busybox"))
    shutil.rmtree(unpacked)
    for name in APPLETS.split():
        result.path(f"{tools}/{name}").symlink_to("busybox")
    write_cpuinfo(root / "cpuinfo", result.cpu)
    for name in ("possible", "present", "online"):
        result.path(f"/sys/devices/system/cpu/{name}").write_text("0-1\n")
    return result


def link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Packages:
    """From a platform to its package, with today's light packages in it."""
    root, value = tmp_path_factory.mktemp("packages"), os.environ.get("EDGE_MTP_PACKAGES")

    def package_for(platform: str) -> Path:
        folder = root / platform
        if folder.is_dir():
            return folder
        ready = Path(value) / platform if value else None
        if ready is not None and ready.is_dir():
            shutil.copytree(ready, folder, copy_function=link_or_copy)
            for old in [*(folder / SITE).glob("edge_*")]:
                shutil.rmtree(old)
            add_own_code(folder, ("llama", "onnx", "grammar", "serve"))
            add_kernels(folder, PLATFORMS[platform], cache, lambda _: no_report)
            return folder
        return made_package(platform, folder)

    return package_for


def whole(package: Path, part: str) -> Path:
    if not (package / part).exists():
        pytest.skip(f"EDGE_MTP_PACKAGES names no folder with a {package.name} that has {part}: make one with edge-export package")
    return package


@pytest.fixture(scope="module")
def pi(tmp_path_factory: pytest.TempPathFactory, packages: Packages, cache: Path) -> Userland:
    """A Raspberry Pi 5 with nothing on it but a shell, and the package in the user's home."""
    result = make_userland(tmp_path_factory.mktemp("pi") / "root", cache, android=False)
    return replace(result, shared={"/home/pi/package": packages("linux-arm64"), "/home/pi/support": SUPPORT})


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory, packages: Packages, cache: Path) -> Userland:
    """A phone with its shell in /system/bin, no /bin, no /tmp and no C library, and the package where adb may put it."""
    result = make_userland(tmp_path_factory.mktemp("phone") / "root", cache, android=True)
    shutil.copytree(packages("android-arm64"), result.path(f"{ANDROID_TMP}/package"), copy_function=link_or_copy)
    return result


def seeing(userland: Userland, bundle: Path) -> Userland:
    """The device with the bundle at the same path as here: proot 5.1 passes access(), with which click checks files, to this machine."""
    return replace(userland, shared={**userland.shared, str(bundle): bundle})


def output_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_module_of_the_standard_library_finds_its_libraries(pi: Userland) -> None:
    code = (
        "import importlib, json, pathlib, subprocess, sys\n"
        "folder = pathlib.Path(sys.prefix) / 'lib/python3.11/lib-dynload'\n"
        "names = [path.name.partition('.')[0] for path in folder.glob('*.so')]\n"
        "for name in names: importlib.import_module(name)\n"
        "import numpy\n"  # with its small BLAS
        "for kind in 'fdFD':\n"
        "    a = numpy.arange(12, dtype=kind).reshape(3, 4) / 7\n"
        "    assert numpy.allclose(a @ a.T, (a[:, None] * a).sum(-1)) and numpy.allclose(a @ a[0], (a * a[0]).sum(-1)), kind\n"
        "child = subprocess.run([sys.executable, '-c', 'import sys; print(sys.prefix)'], capture_output=True, text=True)\n"
        "print(json.dumps([len(names), sys.prefix, child.stdout.strip(), sys.path]))"
    )
    count, prefix, child, path = output_of(pi.run('exec "$@"', "/home/pi/package/bin/edge-python", "-c", code))
    assert count > 20
    assert prefix == child == "/home/pi/package"
    assert all(place == "" or place.startswith(prefix) for place in path)


def test_package_json_is_what_lies_there(packages: Packages) -> None:
    folder = packages("android-arm64")
    reported = json.loads((folder / "package.json").read_text())
    kept = {file["path"]: file for file in reported["files"]}
    for path, file in kept.items():
        if f"{SITE}/edge_" not in path:  # of EDGE_MTP_PACKAGES: replaced by today's
            assert ((folder / path).stat().st_size, sha256_of(folder / path)) == (file["bytes"], file["sha256"])
    assert not [path for path in kept if "edge_export" in path or "torch" in Path(path).parts]
    # A disk of macOS or Windows holds the same files: no two names differ in case alone, and none is Windows' own.
    assert len({path.lower() for path in kept}) == len(kept)
    assert not [path for path in kept if re.search(r'(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.|/|$)|[<>:"|?*\\]', path.lower())]
    for component in reported["licences"]:
        assert component["texts"], component["name"]
        assert all((folder / text).stat().st_size > 100 for text in component["texts"])


def test_a_pi_serves_as_the_readme_says(pi: Userland, packages: Packages) -> None:
    """All that a package brings answers: onnxruntime, the grammar library and the server. (The other commands: test_package_at_home.py.)"""
    pi = replace(pi, shared={**pi.shared, "/home/pi/linux-arm64": packages("linux-arm64")})
    shutil.copytree(chat_bundle(), pi.path("/home/pi/my-bundle"), dirs_exist_ok=True)
    home = Home(
        folder=pi.path("/home/pi"),
        readme=(packages("linux-arm64") / "README.md").read_text(),
        command=lambda line: pi.command(pi.shell, "-c", line),
        environment=pi.environment(),
    )
    copy, _, serve, _ = home.lines()
    assert copy == "scp -r linux-arm64 my-bundle pi@raspberrypi:"
    home.serve(serve)


def test_onnx_drafts_on_a_pi_are_those_of_this_machine(
    pi: Userland, onnx_pair: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = onnx_pair("f32")
    words = ["package/bin/edge-python", "support/drafts_of.py", str(bundle), "onnx", "split", str(TOKENS), *PROMPTS]
    assert output_of(seeing(pi, bundle).run('exec "$@"', *words)) == drafts_of(bundle, "onnx", "split", TOKENS, PROMPTS)


@pytest.mark.parametrize(("cpu", "build"), [("cortex-a76", "dotprod"), ("cortex-a72", "armv8")])
def test_llama_drafts_on_a_pi_are_those_of_this_machine(
    cpu: str, build: str, pi: Userland, packages: Packages, exported_pair: Path, probe_memory: None
) -> None:
    """On a Pi 5 and a Pi 4, which take different builds of the CPU library and variants of the row kernels."""
    whole(packages("linux-arm64"), f"lib/llama-{build}/libggml-cpu.so")
    write_cpuinfo(pi.path("cpuinfo"), cpu)
    words = ["package/bin/edge-python", "support/drafts_of.py", str(exported_pair), "llama", "split", str(TOKENS), *PROMPTS]
    done = replace(seeing(pi, exported_pair), cpu=cpu).run('exec "$@"', *words)
    write_cpuinfo(pi.path("cpuinfo"), "cortex-a76")
    assert output_of(done) == drafts_of(exported_pair, "llama", "split", TOKENS, PROMPTS)


@pytest.mark.parametrize(("cpu", "variant"), [("cortex-a76", "dotprod"), ("cortex-a72", "neon")])
@pytest.mark.parametrize("device", ["pi", "phone"])
def test_a_device_runs_the_kernels_of_its_processor(device: str, cpu: str, variant: str, request: pytest.FixtureRequest) -> None:
    userland: Userland = request.getfixturevalue(device)
    code = "import json; from edge_runtime.backends.kernels.loader import usable_variants; print(json.dumps(usable_variants()))"
    assert output_of(replace(userland, cpu=cpu).run('exec "$@"', "package/bin/edge-python", "-c", code))[0] == variant


def test_a_device_loads_no_library_of_another_platform(pi: Userland, packages: Packages) -> None:
    """From a folder that has this machine's, too, as a released wheel has those of all."""
    both = pi.path("/home/pi/both")
    shutil.copytree(loader.FOLDER, both)
    for system, machine in TARGETS:
        (both / library_name(TARGETS[system, machine])).touch()
    shutil.copytree(packages("linux-arm64") / IN_PACKAGE, both, dirs_exist_ok=True)
    code = (
        "import json, pathlib; from edge_runtime.backends.kernels import loader; loader.FOLDER = pathlib.Path('/home/pi/both');"
        "names, maps = loader.usable_variants(), open('/proc/self/maps').read().split();"
        "print(json.dumps([names, sorted({word.rpartition('/')[2] for word in maps if 'libedge_rows' in word})]))"
    )
    names, loaded = output_of(pi.run('exec "$@"', "package/bin/edge-python", "-c", code))
    assert (names[0], loaded) == ("dotprod", ["libedge_rows-linux-aarch64.so"])


def test_edge_run_on_a_phone_with_llama(phone: Userland, packages: Packages, exported_pair: Path, probe_memory: None) -> None:
    whole(packages("android-arm64"), "lib/llama-dotprod/libggml-cpu.so")
    words = (
        f"package/bin/edge-run {exported_pair} --backend llama --drafter dense --draft-length 3 --max-tokens {TOKENS} --threads 1 --json "
        "'class Stack:'"
    )
    reported = output_of(seeing(phone, exported_pair).run(words))
    here = drafts_of(exported_pair, "llama", "dense", TOKENS, ["class Stack:"])[0]
    assert reported["stats"]["tokens"] == TOKENS
    assert reported["stats"]["accepted_tokens"] == sum(here["accepted"])
    assert reported["stats"]["drafted_tokens"] == sum(map(len, here["drafts"]))


def test_static_tools_draft_where_there_is_no_python(phone: Userland, packages: Packages, exported_pair: Path) -> None:
    whole(packages("android-arm64"), "tools/llama-speculative-simple")
    files = {file["role"]: file["path"] for file in json.loads((exported_pair / "manifest.json").read_text())["files"]}
    words = (
        f"package/tools/llama-speculative-simple -m {exported_pair}/{files['target']} -md {exported_pair}/{files['drafter']}"
        " --spec-type draft-mtp"
        " --spec-draft-n-max 3 -p 'class Stack:' -n 16 --temp 0 -t 1 -c 256"
    )
    done = seeing(phone, exported_pair).run(words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "n_accept" in done.stdout + done.stderr
