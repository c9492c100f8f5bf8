"""Times ways to move a model from rank 0 to rank 1, and compares every byte that arrives.

The end-to-end time of a sync runs from the source's call to the receiver's return, on the host's one monotonic clock;
the receiver is in its call (or about to be) before the source makes its own. What a device still has to do when a call
returns is waited for inside the time.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.device import HostModel
from bench.gpu.ranks import Rank


class WrongBytes(RuntimeError):
    """What arrived is not what was sent: no time of this run counts."""


@dataclass
class Times:
    """Seconds of the counted syncs; lists of equal length. Only the source has them."""

    wall: list[float] = field(default_factory=list)
    source_call: list[float] = field(default_factory=list)
    source_cpu: list[float] = field(default_factory=list)  # of the calling thread
    receiver_cpu: list[float] = field(default_factory=list)
    first: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.wall)

    @property
    def spread(self) -> float:
        return (max(self.wall) - min(self.wall)) / self.median


class Peer:
    """A way to move the weights, on one rank. open() makes what is kept between syncs."""

    def open(self) -> None: ...
    def sync(self) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


def has_fastsync() -> bool:
    """Where it was not built (or is of before the device path), what needs none of it is measured all the same."""
    try:
        import fastsync._device  # noqa: F401
    except ImportError:
        return False
    return True


class Fastsync(Peer):
    """A WeightSync session that is kept between syncs."""

    def __init__(self, rank: Rank, model: HostModel, **keywords: Any) -> None:
        self.rank = rank
        self.params = model.named()
        self.keywords = {"bucket_bytes": rank.sizes.bucket_bytes, "timeout_s": rank.sizes.timeout_s, **keywords}
        self.report: Any = None

    def open(self) -> None:
        import fastsync

        self.session = fastsync.WeightSync(src=0, **self.keywords)

    def sync(self) -> None:
        if self.rank.is_source:
            self.report = self.session.broadcast(self.params)
        else:
            self.report = self.session.receive(into=self.params)

    def close(self) -> None:
        self.session.close()


class Meter:
    """Takes the times of one peer. The same calls are made on both ranks."""

    def __init__(self, rank: Rank, model: HostModel, peer: Peer) -> None:
        self.rank = rank
        self.model = model
        self.peer = peer
        self.round = 0
        self.times = Times()
        begin = time.perf_counter()
        peer.open()
        self._one(check=True)
        self.times.first = time.perf_counter() - begin

    def _one(self, *, check: bool) -> tuple[float, float, float, float]:
        """One sync; with `check`, every byte is changed before and compared after."""
        rank, link = self.rank, self.rank.link
        if check:
            self.round += 1
            if rank.is_source:
                self.model.fill(self.round)
                rank.device.synchronize()
        if rank.is_source:
            link.recv_bytes()  # the receiver is on its way
        else:
            link.send_bytes(b"entering")
        cpu = time.thread_time()
        begin = time.monotonic_ns()
        self.peer.sync()
        rank.device.synchronize()
        end = time.monotonic_ns()
        cpu = time.thread_time() - cpu
        if not rank.is_source:
            wrong = self.model.wrong_bytes(self.round) if check else 0
            link.send((end, cpu, wrong))
            return 0.0, 0.0, 0.0, 0.0
        their_end, their_cpu, wrong = link.recv()
        if wrong:
            raise WrongBytes(f"{wrong} of {self.model.nbytes} bytes are wrong after sync {self.round}")
        return (their_end - begin) / 1e9, (end - begin) / 1e9, cpu, their_cpu

    def measure(self, rounds: int, *, check: bool = True) -> Times:
        """Counts so many syncs. Without `check` only the last one is followed by a comparison (for many small ones)."""
        for _ in range(rounds):
            wall, call, cpu, their_cpu = self._one(check=check)
            self.times.wall.append(wall)
            self.times.source_call.append(call)
            self.times.source_cpu.append(cpu)
            self.times.receiver_cpu.append(their_cpu)
        if not check:
            self._one(check=True)
        return self.times
