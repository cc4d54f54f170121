"""The speed of a device: taken from a profile, or measured on this machine by two short probes."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from edge_devices.machine.detection import detect_device, profile
from edge_devices.machine.memory import read_bandwidth
from edge_devices.machine.processors import LoadWatch
from edge_devices.machine.system import System
from edge_runtime.errors import RequestError
from edge_runtime.planning.speed import Range, SpeedProfile

# The lowest and highest expected ratios of the speed in a forward to a known speed.

# To the peak bandwidth of the memory: assumed for processors.
OF_PEAK = (0.35, 0.75)
# To the bandwidth of the probe: a forward also unpacks weights and synchronizes threads; but other load on the machine may slow the probe.
OF_READ = (0.7, 1.1)
# To the operations per second of a large float32 product: 8-bit arithmetic is faster, but few rows use the units less fully.
OF_PRODUCT = (0.4, 1.6)
# Operations per byte read, assumed for profiles without arithmetic speed: of few cores, and of many cores or matrix units.
BALANCE = (6.0, 45.0)
# The same figures for a GPU or NPU that shares the processor's memory, as in phones, laptops and boards. Nothing was measured on one.
SHARED_OF_PEAK, SHARED_OF_READ, SHARED_BALANCE = (0.35, 0.9), (0.7, 1.5), (2.0, 60.0)
_SHARED = "estimated, as nothing was measured on one: it shares the processor's memory, at"
# The size of the matrices of the float32 product, and how often it is timed.
_SIDE, _TIMES = 768, 6


def speed_profile(name: str | None, threads: int | None, *, accelerator: str | None = None) -> SpeedProfile:
    """Returns the speed in the profile `name`; None: measures this machine with two probes, each of some tenths of a second.

    The speed of a GPU or NPU, `accelerator`, is estimated from the memory that it shares with the processor; a board with its own memory is
    faster. Raises DeviceError, or RequestError for a profile without memory speed.
    """
    if accelerator is None:
        return _profile_speed(name) if name is not None else _machine_speed(threads)
    if name is None:
        machine = _machine_speed(threads)
        read = machine.bandwidth.low / OF_READ[0]
        shared = _shared(
            machine, tuple(share * read for share in SHARED_OF_READ), f"{SHARED_OF_READ[0]:g} to {SHARED_OF_READ[1]:g} x its reads"
        )
    else:
        peak, machine = profile(name).peak_gb_per_s, _profile_speed(name)
        ends = (machine.bandwidth.low, machine.bandwidth.high) if peak is None else tuple(share * peak * 1e9 for share in SHARED_OF_PEAK)
        shared = _shared(machine, ends, machine.bandwidth_from if peak is None else "{:.0%} to {:.0%} of its peak".format(*SHARED_OF_PEAK))
    return replace(shared, name=f"{accelerator} of {shared.name}")


def _shared(machine: SpeedProfile, ends: tuple[float, ...], source: str) -> SpeedProfile:
    """Returns the speed of a device that reads the processor's memory with a bandwidth between these `ends`, in bytes per second."""
    return replace(
        machine,
        bandwidth=Range.between(*ends),
        bandwidth_from=f"{_SHARED} {source}",
        operations=Range.between(SHARED_BALANCE[0] * ends[0], SHARED_BALANCE[1] * ends[1]),
        operations_from=f"assumed, {SHARED_BALANCE[0]:g} to {SHARED_BALANCE[1]:g} for each byte read",
    )


def _profile_speed(name: str) -> SpeedProfile:
    device = profile(name)
    if device.effective_gb_per_s is not None:
        low, high = (value * 1e9 for value in device.effective_gb_per_s)
        source = "the profile's, measured by others"
    elif device.peak_gb_per_s is not None:
        low, high = (share * device.peak_gb_per_s * 1e9 for share in OF_PEAK)
        source = f"{OF_PEAK[0]:.0%} to {OF_PEAK[1]:.0%} of the memory's peak"
    else:
        raise RequestError(
            f"the profile {name} has no memory speed, since it differs between machines; run edge-run plan there, without --profile"
        )
    operations = Range.between(BALANCE[0] * low, BALANCE[1] * high)
    operations_from = f"assumed, {BALANCE[0]:g} to {BALANCE[1]:g} for each byte read: the profile lists no arithmetic speed"
    if device.giga_operations is not None:
        operations = Range.between(*(value * 1e9 for value in device.giga_operations))
        operations_from = "the profile's published ones, measured without the row kernels"
    return SpeedProfile(
        name=device.title,
        bandwidth=Range.between(low, high),
        bandwidth_from=source,
        operations=operations,
        operations_from=operations_from,
        largest_gb=device.largest_gb,
    )


def _machine_speed(threads: int | None) -> SpeedProfile:
    device, watch = detect_device(System()), LoadWatch()
    threads = threads or device.threads
    read = read_bandwidth(threads, memory_available=device.machine.memory_available)
    if read is None:
        raise RequestError("too little memory is free to measure its speed; close other programs, or name a profile with --profile")
    product = product_operations(device.machine.usable_processors) * min(1.0, threads / device.machine.usable_processors)
    load = watch.load()
    return SpeedProfile(
        memory_available=device.machine.memory_available,
        load=load.words() if load.is_busy else "",
        name=f"this machine ({device.machine.processor or device.profile.title}, {threads} threads)",
        bandwidth=Range.between(OF_READ[0] * read, OF_READ[1] * read),
        bandwidth_from=f"{OF_READ[0]:g} to {OF_READ[1]:g} x the {read / 1e9:.3g} GB/s it reads",
        operations=Range.between(OF_PRODUCT[0] * product, OF_PRODUCT[1] * product),
        operations_from=f"{OF_PRODUCT[0]:g} to {OF_PRODUCT[1]:g} x the {product / 1e9:.3g} G/s of a float32 product",
    )


def product_operations(processors: int) -> float:
    """Returns the float32 operations per second of a matrix product on this number of processors, by the best of several runs.

    numpy's BLAS may use all processors, or only one: that of a device package does, or OPENBLAS_NUM_THREADS may say so. So the result is
    scaled from the processor time that was used.
    """
    matrix = np.ones((_SIDE, _SIDE), dtype=np.float32)
    best, used = float("inf"), 1.0
    for _ in range(_TIMES):
        begin, busy = time.perf_counter(), time.process_time()
        np.matmul(matrix, matrix)
        seconds, busy = time.perf_counter() - begin, time.process_time() - busy
        if seconds < best:
            best, used = seconds, min(max(busy / max(seconds, 1e-9), 1.0), processors)
    return 2.0 * _SIDE**3 / max(best, 1e-9) * processors / used
