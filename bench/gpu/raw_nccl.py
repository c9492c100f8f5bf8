"""NCCL itself by ctypes: buckets that lie there already, broadcast one after the other. The ceiling for `nccl`."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from bench.gpu.meter import Peer
from bench.gpu.ranks import Rank

_UINT8 = 1


class UniqueId(ctypes.Structure):
    """ncclUniqueId; passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class NcclError(RuntimeError):
    """A call of NCCL failed."""


def library_path() -> str:
    """The NCCL that fastsync would take: the named one, the one that torch has loaded, a package's, the loader's."""
    named = os.environ.get("FASTSYNC_NCCL_PATH")
    if named:
        return named
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if "libnccl.so.2" in line:
                return line.split(maxsplit=5)[5].strip()
    try:
        from fastsync._device import nccl_candidates

        return (nccl_candidates() or ["libnccl.so.2"])[0]
    except ImportError:
        return "libnccl.so.2"


def version_text(number: int) -> str:
    """22809 -> 2.28.9."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


class RawNccl(Peer):
    """Broadcasts `nbytes` in buckets out of (and into) two that are filled already; the bytes of those are compared."""

    def __init__(self, rank: Rank, nbytes: int, bucket_bytes: int) -> None:
        from bench.gpu import sizes

        self.rank = rank
        self.nbytes = nbytes
        self.model = rank.device.model(sizes.one_tensor(min(nbytes, 2 * bucket_bytes)))
        self.bucket_bytes = bucket_bytes
        self._library = ctypes.CDLL(library_path())
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._comm = ctypes.c_void_p()

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._library, function)(*arguments)
        if result != 0:
            raise NcclError(f"{function} failed: {self._library.ncclGetErrorString(result).decode()} ({result})")

    def version(self) -> str:
        number = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(number))
        return version_text(number.value)

    def open(self) -> None:
        unique = UniqueId()
        if self.rank.is_source:
            self._call("ncclGetUniqueId", ctypes.byref(unique))
            for link in self.rank.links.values():
                link.send_bytes(bytes(unique))
        else:
            unique = UniqueId.from_buffer_copy(self.rank.link.recv_bytes())
        self._call("ncclCommInitRank", ctypes.byref(self._comm), self.rank.world, unique, self.rank.number)

    def sync(self) -> None:
        (base,) = self.model.addresses()
        stream = ctypes.c_void_p(self.rank.device.stream)
        room = max(1, self.model.nbytes - self.bucket_bytes)
        for number, start in enumerate(range(0, self.nbytes, self.bucket_bytes)):
            nbytes = min(self.bucket_bytes, self.nbytes - start)
            at = ctypes.c_void_p(base + (self.bucket_bytes if number % 2 and nbytes <= room else 0))
            self._call("ncclBroadcast", at, at, ctypes.c_size_t(nbytes), _UINT8, 0, self._comm, stream)

    def close(self) -> None:
        self.rank.device.synchronize()
        self._call("ncclCommDestroy", self._comm)
