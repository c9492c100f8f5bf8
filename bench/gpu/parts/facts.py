"""What a figure cannot be read without: the device, the versions, and what can run here."""

from __future__ import annotations

from bench.gpu.build import PROBE
from bench.gpu.ranks import Rank


def run(rank: Rank) -> None:
    device = rank.device
    free, total = device.memory()
    facts = {
        "device": device.name() + (" (double: not a measurement)" if device.is_double else ""),
        "devices": device.count(),
        "driver": device.driver_version(),
        "torch": device.torch_version(),
        "free_bytes": free,
        "total_bytes": total,
        "fastsync": None,
        "probe": PROBE.is_file(),
        "nccl": device.nccl_version(),
        "nccl_reason": None,
    }
    try:
        import fastsync
        from fastsync import _core
        from fastsync._device import nccl_candidates

        facts["fastsync"] = fastsync.__version__
        facts["nccl_reason"] = _core.nccl_unavailable_reason(nccl_candidates())
        facts["nccl"] = _core.nccl_version() if facts["nccl_reason"] is None else None
        facts["cuda_reason"] = _core.cuda_unavailable_reason()
    except ImportError as error:
        facts["fastsync_reason"] = str(error)
    rank.row("facts", 0.0, "", **facts)
