"""The capability table: which transports there are, which work here, and when to use each."""

from __future__ import annotations

import functools
from typing import NamedTuple

from . import _core, _gloo
from ._device import nccl_candidates
from .errors import CommError, InvalidArgument

__all__ = ["TransportInfo", "check_transport", "default_bucket_bytes", "transports"]


class TransportInfo(NamedTuple):
    """One row of the capability table."""

    name: str
    available: bool
    reason: str
    use_when: str


_NOT_BUILT = "not part of this version"
_USE_WHEN = {
    "shm": "all ranks on one host, CPU tensors (or CUDA at the source): the fastest there",
    "gloo": "ranks on several hosts, CPU tensors (or CUDA, through host memory)",
    "nccl": "CUDA tensors on several devices (ranks that share one get its buckets by ipc: 'nccl+ipc' in the report)",
    "hccl": "Ascend tensors, one device a rank",
    "ipc": "trainer and rollout, all of them on one device",
}


def _nccl_unavailable_reason() -> str | None:
    return _core.cuda_unavailable_reason() or _core.nccl_unavailable_reason(nccl_candidates())


def _said_of_available(name: str) -> str:
    """What is there, and that it is not the real thing where it is not."""
    if name == "nccl":
        fake = _core.nccl_is_fake() or _core.cuda_is_fake()
        return f"available: NCCL {_core.nccl_version()}" + (" (a test double)" if fake else "")
    if name == "ipc" and _core.cuda_is_fake():
        return "available (a test double)"
    return "available"


def transports() -> dict[str, TransportInfo]:
    """Every known transport by name: whether it works in this process, and if not, why. Initialises CUDA if there is any."""
    reasons: dict[str, str | None] = {
        "shm": _core.shm_unavailable_reason(),
        "gloo": _gloo.unavailable_reason(),
        "nccl": _nccl_unavailable_reason(),
        "hccl": _NOT_BUILT,
        "ipc": _core.cuda_unavailable_reason(),
    }
    return {
        name: TransportInfo(name, why is None, why or _said_of_available(name), _USE_WHEN[name])
        for name, why in reasons.items()
    }


@functools.lru_cache(maxsize=1)
def _host_candidates() -> list[str]:
    reasons = {"shm": _core.shm_unavailable_reason(), "gloo": _gloo.unavailable_reason()}
    return [name for name, why in reasons.items() if why is None]


def candidates(on_device: bool) -> list[str]:
    """Names that this rank can use. A process whose tensors are on the CPU is not asked about CUDA."""
    names = list(_host_candidates())
    if on_device:
        names.append("ipc")
        if _core.nccl_unavailable_reason(nccl_candidates()) is None:
            names.append("nccl")
    return names


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


def asked_of_share(transport: str) -> str:
    """What the ranks of one share ask for where all shares together use `transport`.

    A fan-out is nobody's to ask for, and the ranks of a share may be all on one device, or all on their own.
    """
    return "auto" if transport == "nccl+ipc" else transport


def default_bucket_bytes(transport: str) -> int:
    """Bucket size when none is asked for."""
    if transport == "shm":
        # Two buckets must stay in the last-level cache between the source's write and the receiver's read.
        return max(256 << 10, min(2 << 20, _core.last_level_cache_bytes() // 8))
    if transport in ("nccl", "ipc", "nccl+ipc"):
        return 64 << 20  # long enough that neither a launch nor a collective's start is felt
    return 4 << 20
