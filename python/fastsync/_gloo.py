"""The gloo data plane: a torch.distributed process group of our own, driven bucket by bucket from the core.

The group is made from the caller's store under a fresh prefix, so the caller's own collectives are never interleaved
with ours. Gloo cannot abort an operation that waits for a stopped peer; a group left with such an operation is retired:
a thread keeps it, and the memory it writes to, until the operation ends (at the latest by its own timeout).
"""

from __future__ import annotations

import ctypes
import datetime
import threading
from typing import Any

import torch
import torch.distributed as dist

from .errors import CommError

__all__ = ["GlooDriver", "make_group", "unavailable_reason"]


def unavailable_reason() -> str | None:
    """Why gloo cannot be used in this process, or None."""
    if not dist.is_available():
        return "this torch is built without torch.distributed"
    if not dist.is_gloo_available():
        return "this torch is built without gloo"
    return None


def make_group(store: Any, prefix: str, rank: int, size: int, timeout_s: float) -> Any:
    """A gloo process group of `size` ranks under `prefix`; blocks until all of them are there, or `timeout_s`."""
    timeout = datetime.timedelta(seconds=min(timeout_s, 3.0e8))
    return dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, size, timeout)


class GlooDriver:
    """Starts and awaits broadcasts from group rank `root`; what the core's ExternalOps call.

    `memory` is set by the core: it keeps the buckets alive as long as this object lives.
    """

    def __init__(self, group: Any, root: int, timeout_s: float) -> None:
        self.memory: object = None
        self._group = group
        self._options = dist.BroadcastOptions()
        self._options.rootRank = root
        self._options.rootTensor = 0
        # Ours must fire first: Gloo's own timeout ends the whole group.
        self._options.timeout = datetime.timedelta(seconds=min(2 * timeout_s + 5, 3.0e8))
        self._works: dict[int, tuple[Any, torch.Tensor]] = {}
        self._orphans: list[tuple[Any, torch.Tensor]] = []
        self._next = 1

    def start(self, address: int, nbytes: int) -> int:
        """Starts a broadcast of [address, address + nbytes); returns a handle."""
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        try:
            work = self._group.broadcast([tensor], self._options)
        except RuntimeError as error:
            raise CommError(f"gloo: cannot start a broadcast of {nbytes} bytes: {error}") from None
        handle = self._next
        self._next += 1
        self._works[handle] = (work, tensor)
        return handle

    def wait(self, handle: int, milliseconds: int) -> bool:
        """Waits at most that long; True once the broadcast is complete here. Raises CommError if it failed."""
        work, _ = self._works[handle]
        try:
            # A Python-side timeout: unlike the operation's own it leaves the group as it is.
            work.wait(datetime.timedelta(milliseconds=max(1, milliseconds)))
        except RuntimeError:
            if not work.is_completed():
                return False
            # It ended, perhaps between our timeout and the question: what it says now is its own outcome.
            try:
                work.wait()
            except RuntimeError as error:
                raise CommError(f"gloo: a broadcast failed: {error}") from None
        return True

    def drop(self, handle: int) -> None:
        """Forgets a broadcast, complete or not."""
        work, tensor = self._works.pop(handle)
        if not work.is_completed():
            self._orphans.append((work, tensor))

    def __del__(self) -> None:
        pending = [w for w in [*self._orphans, *self._works.values()] if not w[0].is_completed()]
        if not pending:
            return
        keep = [self._group, pending, self.memory]
        self._group = None
        threading.Thread(target=_retire, args=(keep,), name="fastsync-retire", daemon=True).start()


def _retire(keep: list[Any]) -> None:
    """Holds a group until its last operation ended; then lets go of it."""
    for work, _ in keep[1]:
        try:
            work.wait()
        except RuntimeError:
            continue
    keep.clear()
