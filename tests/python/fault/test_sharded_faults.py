"""Ranks that die, stop or are interrupted in a sharded sync: every other rank says whom it lost, within its deadline."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fastsync
from support.markers import each_transport, fault
from support.ranks import Failure, Pool, Rank, names_rank
from support.sharding import good_sharded_sync, sharded

pytestmark = fault

TRAINERS, RANKS = 2, 4
HOLDER = 3  # the rollout whose loader holds everybody up in the middle of the buckets
COUNT, ELEMENTS = 48, 512
BUCKET_BYTES = 2 * 4 * ELEMENTS  # one tensor a bucket of each share
NOTICED_WITHIN_S = {"shm": 1.0, "gloo": 3.0}


@dataclass(frozen=True)
class Seen:
    failure: Failure | None
    began_at: float
    ended_at: float
    version: int | None
    dirty: bool


def held_sync(rank: Rank, sync: fastsync.WeightSync, hold: bool) -> None:
    params = {f"t{i}": torch.full((ELEMENTS,), float(i)) for i in range(COUNT)}
    if rank.index < TRAINERS:
        sync.broadcast(params)
    elif rank.index == HOLDER:
        seen = 0

        def load(batch: list[Any]) -> None:
            nonlocal seen
            for name, tensor in batch:
                seen += 1
                assert float(tensor[0]) == float(name[1:])
                if hold and seen == COUNT // 2:
                    rank.hold("middle")

        sync.receive(load=load)
    else:
        sync.receive(into={name: torch.zeros(ELEMENTS) for name in params})


def struck(rank: Rank, transport: str, timeout_s: float, recover: bool) -> Seen:
    """A good sync, one that the holder holds up in the middle, and, with `recover`, a good one."""
    with sharded(transport=transport, bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s) as sync:
        held_sync(rank, sync, False)
        rank.barrier()
        failure = None
        began_at = time.monotonic()
        try:
            held_sync(rank, sync, True)
        except (fastsync.Error, KeyboardInterrupt) as error:
            failure = Failure.of(error)
        ended_at = time.monotonic()
        version, dirty = sync.version, sync.dirty
        rank.mark("ended")
        if recover:
            rank.barrier()
            for seed in (1, 2):
                good_sharded_sync(rank, sync, TRAINERS, seed)
        return Seen(failure, began_at, ended_at, version, dirty)


def fresh_syncs(rank: Rank, transport: str, trainers: int) -> int | None:
    with sharded(transport=transport) as sync:
        for seed in (1, 2):
            good_sharded_sync(rank, sync, trainers, seed)
        return sync.version


@each_transport
@pytest.mark.parametrize("victim", range(RANKS))
def test_killed_rank_is_lost_to_every_other(pool: Pool, transport: str, victim: int) -> None:
    group = pool.group(RANKS)
    running = group.start(struck, transport, 10.0, False)
    group.wait_mark(HOLDER, "middle")
    died_at = group.kill(victim)
    if victim != HOLDER:
        group.release(HOLDER)
    outcomes = running.join(30)
    assert outcomes[victim].died
    survivors = [rank for rank in range(RANKS) if rank != victim]
    for rank in survivors:
        seen = outcomes[rank].result()
        assert seen.failure is not None
        assert "PeerLost" in seen.failure.bases, seen.failure.traceback
        assert names_rank(seen.failure.message, victim), seen.failure.message
        assert seen.version == 1
        assert seen.dirty == (rank >= TRAINERS)
        assert seen.ended_at - died_at < NOTICED_WITHIN_S[transport], f"rank {rank}: {seen.ended_at - died_at:.3f} s"
    trainers = len([rank for rank in survivors if rank < TRAINERS])
    assert pool.regroup(group, survivors).run(fresh_syncs, transport, trainers) == [2, 2, 2]


@each_transport
@pytest.mark.parametrize("victim", range(RANKS))
def test_stopped_rank_is_named_at_the_deadline_and_joins_the_next_sync(pool: Pool, transport: str, victim: int) -> None:
    timeout_s = 1.0
    group = pool.group(RANKS)
    running = group.start(struck, transport, timeout_s, True)
    group.wait_mark(HOLDER, "middle")
    group.stop(victim)
    if victim != HOLDER:
        group.release(HOLDER)
    others = [rank for rank in range(RANKS) if rank != victim]
    for rank in others:
        group.wait_mark(rank, "ended", 10)
    if victim == HOLDER:
        group.release(HOLDER)
    woken_at = group.cont(victim)
    results = running.join(30)
    for rank in others:
        seen = results[rank].result()
        assert seen.failure is not None
        assert "SyncTimeout" in seen.failure.bases, seen.failure.traceback
        assert names_rank(seen.failure.message, victim), f"rank {rank}: {seen.failure.message}"
        took = seen.ended_at - seen.began_at
        assert 0.7 * timeout_s <= took <= 2 * timeout_s + 0.7, f"rank {rank} took {took:.3f} s"
    seen = results[victim].result()
    assert seen.failure is not None and seen.version == 1
    assert seen.ended_at - woken_at < 1.0


@each_transport
@pytest.mark.parametrize("victim", range(RANKS))
def test_interrupted_rank_fails_every_other_and_the_next_sync_works(pool: Pool, transport: str, victim: int) -> None:
    group = pool.group(RANKS)
    running = group.start(struck, transport, 10.0, True)
    group.wait_mark(HOLDER, "middle")
    interrupted_at = group.interrupt(victim, signal.SIGINT)
    if victim != HOLDER:
        # The other ranks hear of it while the holder's loader still runs; it does when that returns.
        for rank in range(RANKS):
            if rank != HOLDER:
                group.wait_mark(rank, "ended", 5)
        group.release(HOLDER)
    results = running.results(30)
    for rank, seen in enumerate(results):
        assert seen.failure is not None
        if rank == victim:
            assert "KeyboardInterrupt" in seen.failure.bases
            continue
        assert "PeerFailed" in seen.failure.bases, seen.failure.traceback
        assert seen.failure.attributes["rank"] == victim
        if rank != HOLDER:
            assert seen.ended_at - interrupted_at < 1.0


def late(rank: Rank, transport: str, victim: int) -> list[str]:
    """`victim` comes to a sync when every other rank has given it up."""
    outcomes = []
    with sharded(transport=transport, bucket_bytes=BUCKET_BYTES, timeout_s=0.8) as sync:

        def call() -> None:
            began_at = time.monotonic()
            try:
                held_sync(rank, sync, False)
                outcomes.append("ok")
            except fastsync.Error as error:
                late_s = time.monotonic() - began_at
                assert rank.index != victim or late_s < 0.5, f"{late_s:.3f} s for what had failed before"
                outcomes.append(f"{type(error).__name__} {names_rank(str(error), victim)}")

        call()
        for _ in range(2):
            rank.barrier()
            if rank.index != victim:
                call()
            rank.barrier()
            if rank.index == victim:
                call()
            rank.barrier()
            call()
    return outcomes


@each_transport
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_rank_that_comes_late_is_named_and_calls_pair_up_again(pool: Pool, transport: str, victim: int) -> None:
    results = pool.group(RANKS).run(late, transport, victim, limit_s=60)
    assert results == [["ok", "SyncTimeout True", "ok", "SyncTimeout True", "ok"]] * RANKS
