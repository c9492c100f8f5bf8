"""What a sync did: `SyncReport`."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["SyncReport"]


def format_bytes(n: float) -> str:
    """1234567 -> '1.23 MB' (powers of 1000, as bandwidths are quoted)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1000
    return f"{n:.2f} TB"


@dataclasses.dataclass(frozen=True)
class SyncReport:
    """What one sync did, as this rank saw it.

    Attributes:
        version: The version that was committed.
        transport: What carried the bytes ("shm", "gloo", ...); in a group of one rank, what would have. "nccl+ipc": NCCL
            between one rank of each device, ipc from that to the others of the device.
        nbytes: Bytes of tensor data that were synced.
        tensors: How many tensors.
        buckets: How many buckets carried them.
        bucket_bytes: Size of a bucket, as it really was.
        seconds: Wall time of the call, the wait for the other ranks included.
        gb_per_s: nbytes / seconds / 1e9.
        plan_reused: The plan of an earlier sync was replayed.
        peak_staging_bytes: Bucket and scratch memory that this process held for it. A shared ring's last 2 MiB block of
            device memory counts as far as buckets lie in it.
        phases: Seconds of this rank's thread in plan, pack, transfer, unpack, wait and commit.
        unexpected: Names that were sent and have no destination (strict=False); at the source, of any receiver.
        missing: Names that have a destination and were not sent (strict=False); at the source, of any receiver.
    """

    version: int
    transport: str
    nbytes: int
    tensors: int
    buckets: int
    bucket_bytes: int
    seconds: float
    gb_per_s: float
    plan_reused: bool
    peak_staging_bytes: int
    phases: dict[str, float]
    unexpected: list[str]
    missing: list[str]

    @property
    def transport_reason(self) -> str:
        """At the source: why this transport, and why none of the others that "auto" tries before it; else empty."""
        return str(self.__dict__.get("_transport_reason", ""))

    @property
    def imbalance(self) -> float | None:
        """With src="sharded": bytes of the largest trainer's share over the mean share (1.0 is perfect); else None."""
        return self.__dict__.get("_imbalance")

    def __str__(self) -> str:
        text = (
            f"version {self.version}: {self.tensors} tensors, {format_bytes(self.nbytes)} in {self.seconds:.4f} s "
            f"({self.gb_per_s:.2f} GB/s) over {self.transport}, {self.buckets} buckets of "
            f"{format_bytes(self.bucket_bytes)}, plan {'reused' if self.plan_reused else 'made'}"
        )
        if self.imbalance is not None:
            text += f", imbalance {self.imbalance:.2f}"
        if self.unexpected or self.missing:
            text += f", {len(self.unexpected)} unexpected, {len(self.missing)} missing"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        return dataclasses.asdict(self)
