"""What a session holds, and what a thousand small syncs leave behind."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bench.gpu import sizes
from bench.gpu.meter import Fastsync, Meter
from bench.gpu.ranks import Rank
from bench.harness import resident_bytes

_SAMPLES = 10


def slope(values: Sequence[float], step: float) -> float:
    """Least squares: how much `values`, taken `step` apart, grow by one."""
    n = len(values)
    mean_x, mean_y = (n - 1) / 2, sum(values) / n
    above = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(values))
    return above / sum((x - mean_x) ** 2 for x in range(n)) / step


def run(rank: Rank) -> None:
    rank.join()
    s, device = rank.sizes, rank.device
    model = device.model(sizes.lora(s.lora_tensors))
    model.fill(0)
    device.synchronize()

    def used() -> int:
        free, total = device.memory()
        return total - free

    rank.link.send(None)
    rank.link.recv()  # both have their tensors now
    before, reserved = used(), device.reserved_bytes()
    peer = Fastsync(rank, model, transport="ipc")
    meter = Meter(rank, model, peer)
    core_counters = _counters(rank)
    if rank.is_source:
        rank.row("memory, driver, of a session on both ranks", (used() - before) / 1e6, "MB",
                 staging_bytes=peer.report.peak_staging_bytes, bucket_bytes=peer.report.bucket_bytes)  # fmt: skip
        rank.row("memory, torch reserved for a session", (device.reserved_bytes() - reserved) / 1e6, "MB")
    meter.measure(max(10, s.leak_syncs // 20), check=False)  # pools that fill once are no leak
    every = max(1, s.leak_syncs // _SAMPLES)
    driver: list[float] = [used()]
    torch_reserved: list[float] = [device.reserved_bytes()]
    resident: list[float] = [resident_bytes()]
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(_SAMPLES):
        meter.measure(every, check=False)
        driver.append(used())
        torch_reserved.append(device.reserved_bytes())
        resident.append(resident_bytes())
    if rank.is_source:
        syncs = {"syncs": every * _SAMPLES}
        rank.row("leak, driver memory", slope(driver, every), "B/sync", total=driver[-1] - driver[0], **syncs)
        rank.row("leak, torch reserved", slope(torch_reserved, every), "B/sync", **syncs)
        rank.row("leak, host resident", slope(resident, every), "B/sync", total=resident[-1] - resident[0], **syncs)
        rank.row("leak, descriptors", len(os.listdir("/proc/self/fd")) - descriptors, "", **syncs)
        grown = sum(after - core_counters[name] for name, after in _counters(rank).items())
        rank.row("leak, allocations, streams and events of the core", grown, "", **syncs)
        rank.row("small sync (lora) over ipc", meter.times.median * 1e6, "us", tensors=s.lora_tensors,
                 nbytes=model.nbytes)  # fmt: skip
    peer.close()


def _counters(rank: Rank) -> dict[str, int]:
    from fastsync import _core

    return dict(_core.cuda_runtime(rank.device.ordinal).counters)
