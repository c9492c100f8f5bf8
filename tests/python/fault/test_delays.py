"""Ranks that are late or slow: a wait is bounded by its time without progress, not by the length of the sync."""

from __future__ import annotations

import time

import pytest
import torch
from scenario import RECEIVER_PHASES, SOURCE_PHASES, struck

from support.markers import each_transport, fault
from support.ranks import Pool, Rank, raises, spmd
from support.syncing import exchange, good_sync, receive, session
from support.tensors import poisoned, untouched

pytestmark = fault

CASES = [(0, phase) for phase in SOURCE_PHASES] + [(1, phase) for phase in RECEIVER_PHASES]


@each_transport
@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_late_rank_delays_the_sync_and_nothing_else(pool: Pool, transport: str, victim: int, phase: str) -> None:
    outcomes = pool.group(3).outcomes(struck, transport, victim, phase, "delay", 10.0, 0.15)
    for outcome in outcomes.values():
        seen = outcome.result()
        assert seen.failure is None, seen.failure.traceback
        assert seen.version == (1 if phase == "first_call" else 2)


@each_transport
@pytest.mark.parametrize("slow", [0, 1])
@spmd(3)
def test_slow_sync_may_take_longer_than_the_timeout_while_it_moves(rank: Rank, transport: str, slow: int) -> None:
    sent = {f"t{i}": torch.full((1024,), float(i)) for i in range(12)}

    def items() -> object:
        for item in sent.items():
            if slow == 0:
                time.sleep(0.15)
            yield item

    def load(batch: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in batch:
            if slow == rank.index:
                time.sleep(0.15)
            assert bool((tensor == sent[name]).all())

    began = time.monotonic()
    with session(transport=transport, bucket_bytes=4096, timeout_s=0.8) as sync:
        sync.broadcast(items()) if rank.index == 0 else sync.receive(load=load)
        assert sync.version == 1
    assert time.monotonic() - began > 1.0, "the sync was not slow enough to prove anything"


@each_transport
@pytest.mark.parametrize("late", [0, 1])
@spmd(2)
def test_rank_that_joins_a_second_late_is_waited_for(rank: Rank, transport: str, late: int) -> None:
    if rank.index == late:
        time.sleep(1.0)
    exchange(rank, {"a": torch.ones(1000)}, transport=transport)


@each_transport
@pytest.mark.parametrize("caller", [0, 1])
@spmd(2)
def test_peer_that_never_comes_is_a_timeout_that_names_it(rank: Rank, transport: str, caller: int) -> None:
    into = {"a": poisoned((100,), torch.float32)}
    if rank.index == caller:
        with raises("SyncTimeout", rank=1 - caller) as caught, session(transport=transport, timeout_s=1.0) as sync:
            sync.broadcast({"a": torch.ones(100)}) if caller == 0 else sync.receive(into=into)
        assert 0.9 <= caught.seconds < 2.0, f"took {caught.seconds:.3f} s"
        assert untouched(into)
    rank.barrier()
    with session(transport=transport) as sync:
        good_sync(rank, sync)


@each_transport
@pytest.mark.parametrize("caller", [0, 1])
@spmd(2)
def test_peer_that_stays_away_from_a_later_sync_is_a_timeout_that_names_it(
    rank: Rank, transport: str, caller: int
) -> None:
    with session(transport=transport, timeout_s=1.0) as sync:
        good_sync(rank, sync)
        if rank.index == caller:
            with raises("SyncTimeout", rank=1 - caller) as caught:
                sync.broadcast({"a": torch.ones(100)}) if caller == 0 else receive(sync, "load")
            assert 0.9 <= caught.seconds < 2.0, f"took {caught.seconds:.3f} s"
            assert sync.version == 1
        rank.barrier()
        good_sync(rank, sync)
        assert sync.version == 2


@each_transport
@pytest.mark.parametrize("warm", [True, False])
@spmd(3)
def test_one_rank_that_gives_up_tells_the_others_at_once(rank: Rank, transport: str, warm: bool) -> None:
    # Rank 2 stays away. Rank 0 gives up after 0.6 s; rank 1, with 20 s, must learn of it at once.
    with session(transport=transport, timeout_s=0.6 if rank.index == 0 else 20.0) as sync:
        if warm:
            good_sync(rank, sync)
        rank.barrier()
        if rank.index < 2:
            with raises("SyncTimeout", "PeerFailed") as caught:
                sync.broadcast({"a": torch.ones(10)}) if rank.index == 0 else receive(sync, "load")
            assert caught.seconds < 3.0, f"rank {rank.index} took {caught.seconds:.3f} s"
        rank.barrier()
    with session(transport=transport) as again:
        good_sync(rank, again)


@each_transport
@spmd(2)
def test_first_sync_takes_about_as_long_as_the_second_once_the_session_is_warm(rank: Rank, transport: str) -> None:
    sent = {f"t{i}": torch.full((50_000,), float(i)) for i in range(20)}
    with session(transport=transport) as sync:
        good_sync(rank, sync)
        times = []
        for _ in range(2):
            rank.barrier()
            began = time.monotonic()
            exchange(rank, sent, sync=sync)
            times.append(time.monotonic() - began)
    assert times[0] < 10 * times[1] + 0.3, f"{times}"
