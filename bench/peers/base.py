"""What the harness asks of a way to move weights.

A peer lives in every rank's process. The harness calls, on all ranks at once:

    warm()                      untimed, once: imports, connections that any program would have by then
    before(round), open()+sync()      timed as the first sync
    before(round), sync()             timed, again and again
    wrong_bytes(round)          untimed, after every sync
    close()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from typing import Any, ClassVar

import torch

from bench.pattern import Bytes, Pattern
from bench.workloads import TensorSpec

Options = Mapping[str, Any]


@dataclass
class RankContext:
    """One rank's share of a case. Rank 0 is the source; `tensors` are its weights, or a receiver's destinations."""

    rank: int
    world_size: int
    specs: Sequence[TensorSpec]
    tensors: list[torch.Tensor]
    pattern: Pattern
    timeout_s: float
    # Source: one connection to each receiver, by rank. Receiver: {0: connection to the source}.
    links: dict[int, Connection]
    # One of each per receiver: "the mirror is full" and "I have read it".
    filled: Sequence[Semaphore]
    drained: Sequence[Semaphore]
    flats: list[torch.Tensor] = field(default_factory=list)  # the same memory as one-dimensional uint8
    arrays: list[Bytes] = field(default_factory=list)  # and as numpy

    def __post_init__(self) -> None:
        self.flats = [t.view(-1).view(torch.uint8) for t in self.tensors]
        self.arrays = [f.numpy() for f in self.flats]

    @property
    def is_source(self) -> bool:
        return self.rank == 0

    @property
    def receivers(self) -> range:
        return range(1, self.world_size)

    @property
    def nbytes(self) -> int:
        return sum(f.numel() for f in self.flats)

    def named(self) -> dict[str, torch.Tensor]:
        return {spec.name: tensor for spec, tensor in zip(self.specs, self.tensors)}

    def count_wrong(self, arrays: Sequence[Bytes], round_number: int) -> int:
        return sum(self.pattern.wrong_bytes(i, array, round_number) for i, array in enumerate(arrays))


class Peer:
    """One way to move the weights. Bytes must be where they belong when sync() returns on a receiver."""

    kind: ClassVar[str]

    def __init__(self, ctx: RankContext, options: Options) -> None:
        self.ctx = ctx
        self.options = options

    @classmethod
    def unavailable_reason(cls, options: Options) -> str | None:
        """Asked before anything is made; None means it can run here."""
        return None

    def warm(self) -> None:
        """Untimed preparation that a long-running program would have behind it."""

    def before(self, round_number: int) -> None:
        """Untimed; the source's tensors already hold this round's bytes."""

    def open(self) -> None:
        """Makes what is kept between syncs. Counts into the first sync."""

    def sync(self) -> None:
        raise NotImplementedError

    def wrong_bytes(self, round_number: int) -> int:
        """Compares every byte that arrived with what the source must have sent."""
        return 0 if self.ctx.is_source else self.ctx.count_wrong(self.ctx.arrays, round_number)

    def facts(self) -> dict[str, Any]:
        """JSON-ready details of the last sync, for the row."""
        return {}

    def inner_seconds(self) -> float | None:
        """For a peer that stays in the source's process: the time of the last sync by its own clock."""
        return None

    def close(self) -> None:
        """Gives back what open() made."""
