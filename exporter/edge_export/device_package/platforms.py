"""The platforms that a package can be built for."""

from __future__ import annotations

from dataclasses import dataclass

PYTHON = "3.11"
SITE = "lib/python3/dist-packages"  # Debian's folder of Python packages, relative to the prefix


@dataclass(frozen=True, kw_only=True)
class Processors:
    """The processors of one build of llama.cpp's CPU library.

    The build is used if all `features` are in /proc/cpuinfo; `model` is zig's name for the same features.
    """

    name: str
    features: tuple[str, ...]
    model: str


@dataclass(frozen=True, kw_only=True)
class Platform:
    """`processors` go from the newest to those without required features; `cpuinfo_key` is the line of /proc/cpuinfo with the features.

    Without processors, llama.cpp is not built for the platform. `tools` is the member that llama.cpp's static tools are built for.
    `page_bytes`: the largest pages of kernels that the package runs on.
    """

    name: str
    debian: str
    machine: str
    loader: str
    wheel_tags: tuple[str, ...]
    shell: str
    cpuinfo_key: str
    processors: tuple[Processors, ...]
    tools: str
    page_bytes: int

    @property
    def triplet(self) -> str:
        """The folder of libraries in Debian's packages."""
        return f"{self.machine}-linux-gnu"


_ARM_PROCESSORS = (
    Processors(name="dotprod", features=("asimddp", "asimdhp"), model="generic+v8_2a+dotprod+fullfp16"),
    Processors(name="armv8", features=(), model="generic"),
)


def _tags(machine: str) -> tuple[str, ...]:
    """The manylinux tags whose C library is no newer than the package's own, Debian 12's 2.36."""
    return (*(f"manylinux_2_{minor}_{machine}" for minor in (34, 31, 28, 27, 26, 24, 17)), f"manylinux2014_{machine}")


def _arm(name: str, shell: str) -> Platform:
    return Platform(
        name=name,
        debian="arm64",
        machine="aarch64",
        loader="ld-linux-aarch64.so.1",
        wheel_tags=_tags("aarch64"),
        shell=shell,
        cpuinfo_key="Features",
        processors=_ARM_PROCESSORS,
        tools="dotprod",
        page_bytes=16384,
    )


PLATFORMS = {
    platform.name: platform
    for platform in (
        _arm("android-arm64", "/system/bin/sh"),
        _arm("linux-arm64", "/bin/sh"),
        Platform(
            name="linux-x64",
            debian="amd64",
            machine="x86_64",
            loader="ld-linux-x86-64.so.2",
            wheel_tags=_tags("x86_64"),
            shell="/bin/sh",
            cpuinfo_key="flags",
            processors=(),
            tools="",
            page_bytes=4096,
        ),
    )
}
