"""The gloo data plane: a torch.distributed process group of our own, driven bucket by bucket from the core.

The group is made from the caller's store under a fresh prefix, so the caller's own collectives are never interleaved
with ours. Gloo cannot abort an operation that waits for a stopped peer; a group left with such an operation is retired:
a thread keeps it, and the memory it writes to, until the operation ends (at the latest by its own timeout).
"""

from __future__ import annotations

import datetime
import threading
from typing import Any

import torch
import torch.distributed as dist

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
    """A process group as the core drives it: what to broadcast with, from group rank `root`.

    The core makes the calls itself (csrc/binding/process_group.h): a signal handler may raise between any two
    instructions of Python code, and must not leave a broadcast in flight that nobody knows of.
    """

    uint8 = torch.uint8
    frombuffer = staticmethod(torch.frombuffer)

    def __init__(self, group: Any, root: int, timeout_s: float) -> None:
        self.group = group
        self.options = dist.BroadcastOptions()
        self.options.rootRank = root
        self.options.rootTensor = 0
        # Ours must fire first: Gloo's own timeout ends the whole group.
        self.options.timeout = datetime.timedelta(seconds=min(2 * timeout_s + 5, 3.0e8))

    @staticmethod
    def retire(group: Any, works: list[tuple[Any, torch.Tensor]], memory: object) -> None:
        """Holds a group, its running operations and the memory they write to until the last of them has ended."""
        keep = [group, works, memory]
        threading.Thread(target=_retire, args=(keep,), name="fastsync-retire", daemon=True).start()


def _retire(keep: list[Any]) -> None:
    for work, _ in keep[1]:
        try:
            work.wait()
        except RuntimeError:
            continue
    keep.clear()
