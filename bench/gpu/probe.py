"""bench/gpu/probe.cc by ctypes: the core's device packer by itself."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from bench.gpu import build


class ProbeError(RuntimeError):
    """What the core said."""


class Probe:
    """Packs and unpacks one set of tensors; see probe.cc."""

    def __init__(
        self,
        ordinal: int,
        nbytes: Sequence[int],
        sources: Sequence[int],
        destinations: Sequence[int],
        bucket_bytes: int,
    ) -> None:
        if not build.PROBE.is_file():
            raise ProbeError(f"{build.PROBE} is not there: run python -m bench.gpu.build")
        self._library = library = ctypes.CDLL(str(build.PROBE))
        library.fastsync_probe_error.restype = ctypes.c_char_p
        library.fastsync_probe_open.restype = ctypes.c_void_p
        library.fastsync_probe_buckets.restype = ctypes.c_size_t
        library.fastsync_probe_staging_bytes.restype = ctypes.c_uint64
        library.fastsync_probe_unequal_sums.restype = ctypes.c_size_t
        array = ctypes.c_uint64 * len(nbytes)
        handle = library.fastsync_probe_open(
            ordinal,
            ctypes.c_size_t(len(nbytes)),
            array(*nbytes),
            array(*sources),
            array(*destinations),
            ctypes.c_uint64(bucket_bytes),
        )
        if not handle:
            raise ProbeError(self._error())
        self._handle = ctypes.c_void_p(handle)
        self.buckets = int(library.fastsync_probe_buckets(self._handle))
        self.staging_bytes = int(library.fastsync_probe_staging_bytes(self._handle))

    def _error(self) -> str:
        return (self._library.fastsync_probe_error() or b"").decode(errors="replace")

    def run(
        self, *, unpack: bool, verify: bool, staging: int, stream: int, passes: int, timeout_s: float
    ) -> tuple[float, float]:
        """(seconds, seconds of the host until all was queued) of one pass."""
        seconds, host_seconds = ctypes.c_double(), ctypes.c_double()
        failed = self._library.fastsync_probe_run(
            self._handle,
            int(unpack),
            int(verify),
            ctypes.c_uint64(staging),
            ctypes.c_uint64(stream),
            passes,
            ctypes.c_double(timeout_s),
            ctypes.byref(seconds),
            ctypes.byref(host_seconds),
        )
        if failed:
            raise ProbeError(self._error())
        return seconds.value / passes, host_seconds.value / passes

    def unequal_sums(self) -> int:
        """Buckets whose checksum after the last verified pack is not that after the last verified unpack."""
        return int(self._library.fastsync_probe_unequal_sums(self._handle))

    def close(self) -> None:
        self._library.fastsync_probe_close(self._handle)
