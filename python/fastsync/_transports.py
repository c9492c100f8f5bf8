"""The capability table: which transports there are, which work here, and when to use each."""

from __future__ import annotations

import functools
from typing import NamedTuple

from . import _core, _gloo
from .errors import CommError, InvalidArgument

__all__ = ["TransportInfo", "check_transport", "default_bucket_bytes", "transports"]


class TransportInfo(NamedTuple):
    """One row of the capability table."""

    name: str
    available: bool
    reason: str
    use_when: str


_NOT_BUILT = "not part of this version: it carries CPU tensors only"
_USE_WHEN = {
    "shm": "all ranks on one host, CPU tensors: the fastest there",
    "gloo": "ranks on several hosts, CPU tensors",
    "nccl": "CUDA tensors, one device a rank",
    "hccl": "Ascend tensors, one device a rank",
    "ipc": "trainer and rollout on one device",
}


def transports() -> dict[str, TransportInfo]:
    """Every known transport by name: whether it works in this process, and if not, why."""
    reasons: dict[str, str | None] = {
        "shm": _core.shm_unavailable_reason(),
        "gloo": _gloo.unavailable_reason(),
        "nccl": _NOT_BUILT,
        "hccl": _NOT_BUILT,
        "ipc": _NOT_BUILT,
    }
    return {
        name: TransportInfo(name, why is None, why or "available", _USE_WHEN[name]) for name, why in reasons.items()
    }


@functools.lru_cache(maxsize=1)
def candidates() -> list[str]:
    """Names that `auto` may choose, best first. Asked once: what a process can use does not change."""
    return [info.name for info in transports().values() if info.available]


def check_transport(name: object) -> str:
    """`name` if it can be used here; InvalidArgument if unknown, CommError with the reason if unavailable."""
    if name == "auto":
        return "auto"
    table = transports()
    info = table.get(name) if isinstance(name, str) else None
    if info is None:
        raise InvalidArgument(f"unknown transport {name!r}; known are 'auto', {', '.join(repr(n) for n in table)}")
    if not info.available:
        raise CommError(f"transport '{info.name}' is unavailable: {info.reason}")
    return info.name


def default_bucket_bytes(transport: str) -> int:
    """Bucket size when none is asked for."""
    if transport == "shm":
        # Two buckets must stay in the last-level cache between the source's write and the receiver's read.
        return max(256 << 10, min(2 << 20, _core.last_level_cache_bytes() // 8))
    return 4 << 20
