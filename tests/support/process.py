"""What a process holds: memory, descriptors, threads, shared-memory files."""

from __future__ import annotations

import gc
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path


def rss_bytes(pid: int | None = None) -> int:
    """Resident private and shared-file memory of a process, now."""
    text = Path(f"/proc/{pid or 'self'}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def peak_rss_bytes() -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def reset_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def fd_targets() -> tuple[str, ...]:
    """What the descriptors are, without the numbers that tell one socket from another."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}")))
        except FileNotFoundError:
            continue  # the listing's own
    return tuple(sorted(found))


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def shm_entries() -> set[str]:
    """Names in /dev/shm, multiprocessing's own semaphores left out."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def shm_used_bytes() -> int:
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


@dataclass(frozen=True)
class Held:
    """A count of everything that may leak."""

    rss: int
    fds: int
    native: int
    python_threads: int
    maps: int
    shm: frozenset[str]
    targets: tuple[str, ...] = ()

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        return cls(
            rss_bytes(),
            open_fds(),
            native_threads(),
            threading.active_count(),
            mappings(),
            frozenset(shm_entries()),
            fd_targets(),
        )

    def assert_flat_since(self, before: Held, rss_slack: int) -> None:
        assert self.fds <= before.fds, (
            f"descriptors grew from {before.fds} to {self.fds}: {before.targets} became {self.targets}"
        )
        assert self.native <= before.native, f"threads grew from {before.native} to {self.native}"
        assert self.python_threads <= before.python_threads
        assert self.shm <= before.shm, f"left in /dev/shm: {sorted(self.shm - before.shm)}"
        assert self.maps <= before.maps + 8, f"mappings grew from {before.maps} to {self.maps}"
        grown = self.rss - before.rss
        assert grown <= rss_slack, f"resident memory grew by {grown / 2**20:.1f} MiB"
