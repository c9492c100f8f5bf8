"""One sync in which one rank is struck at a chosen phase; shared by the fault tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import fastsync
from support.ranks import Failure, Rank
from support.syncing import good_sync, session

COUNT = 24
ELEMENTS = 1024  # of float32: each tensor fills one bucket
BUCKET_BYTES = 4 * ELEMENTS

# Where the victim is struck. "first_call" is before its session has ever spoken to the others.
SOURCE_PHASES = ("first_call", "before_call", "item_0", "item_12", "item_23", "after_last_item")
RECEIVER_PHASES = (
    *("first_call", "before_call", "load_0", "load_12", "load_23"),
    *("stream_0", "stream_12", "stream_23", "borrow_12", "after_stream_loop"),
)


@dataclass(frozen=True)
class Seen:
    """What one rank saw of the sync in which the victim was struck."""

    failure: Failure | None
    began_at: float
    ended_at: float
    version: int | None

    def expect(self, *names: str) -> Failure:
        assert self.failure is not None, "the sync succeeded"
        assert set(names) & set(self.failure.bases), self.failure.traceback
        return self.failure


def weights(fill: float) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((ELEMENTS,), fill + i) for i in range(COUNT)}


def one_sync(rank: Rank, sync: fastsync.WeightSync, strike_at: str, strike: Callable[[], None], fill: float) -> None:
    """Runs one sync. `strike` is called at phase `strike_at` (which only the victim's own side knows of)."""
    kind, _, number = strike_at.rpartition("_")
    at = int(number) if number.isdigit() else -1
    sent = weights(fill)
    if strike_at in ("first_call", "before_call"):
        strike()
    if rank.index == 0:
        if kind != "item" and strike_at != "after_last_item":
            sync.broadcast(sent)
            return

        def items() -> Iterator[tuple[str, torch.Tensor]]:
            for i, item in enumerate(sent.items()):
                if i == at:
                    strike()
                yield item
            if strike_at == "after_last_item":
                strike()

        sync.broadcast(items())
        return
    if kind == "load":
        seen = 0

        def load(batch: list[tuple[str, torch.Tensor]]) -> None:
            nonlocal seen
            for name, tensor in batch:
                if seen == at:
                    strike()
                assert bool((tensor == sent[name]).all())
                seen += 1

        sync.receive(load=load)
        assert seen == COUNT
    elif kind in ("stream", "borrow") or strike_at == "after_stream_loop":
        i = 0
        for name, tensor in sync.stream(borrow=kind == "borrow"):
            if i == at:
                strike()
            assert bool((tensor == sent[name]).all())
            i += 1
        assert i == COUNT
        if strike_at == "after_stream_loop":
            strike()
    else:
        into = {name: torch.zeros(ELEMENTS) for name in sent}
        sync.receive(into=into)
        assert all(bool((into[name] == sent[name]).all()) for name in sent)


def struck(
    rank: Rank,
    transport: str,
    victim: int,
    phase: str,
    action: str,
    timeout_s: float,
    delay_s: float = 0.0,
    recover: bool = True,
) -> Seen:
    """A good sync, one in which `victim` dies, freezes or is late at `phase`, and (unless it died) a good one."""

    def strike() -> None:
        if action == "die":
            rank.die()
        elif action == "freeze":
            rank.freeze()
        else:
            time.sleep(delay_s)

    def nothing() -> None:
        return

    with session(transport=transport, bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s) as sync:
        if phase != "first_call":
            one_sync(rank, sync, "", nothing, 100.0)
        rank.barrier()
        mine = rank.index == victim
        failure: Failure | None = None
        began_at = time.monotonic()
        try:
            one_sync(rank, sync, phase if mine else "", strike if mine else nothing, 200.0)
        except fastsync.Error as error:
            failure = Failure.of(error)
        ended_at = time.monotonic()
        version = sync.version
        rank.mark("ended")
        if recover:
            rank.barrier()
            good_sync(rank, sync)
        return Seen(failure, began_at, ended_at, version)


def whole(rank: Rank, transport: str) -> Any:
    """A sync of a fresh group: what survivors do next."""
    with session(transport=transport, bucket_bytes=BUCKET_BYTES) as sync:
        for fill in (1.0, 2.0):
            one_sync(rank, sync, "", lambda: None, fill)
        return sync.version
