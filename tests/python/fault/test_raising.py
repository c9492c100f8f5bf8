"""A rank that raises: everybody learns at once who and why, and the next sync works."""

from __future__ import annotations

import time

import pytest
import torch

import fastsync
from support.markers import each_transport, fault
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, good_sync, receive, session

pytestmark = fault


def weights() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((1024,), float(i)) for i in range(30)}


def fails_on(number: int, text: str) -> object:
    seen = []

    def load(batch: list[tuple[str, torch.Tensor]]) -> None:
        for name, _ in batch:
            seen.append(name)
            if len(seen) == number + 1:
                raise ValueError(text)

    return load


@each_transport
@pytest.mark.parametrize("others", ["into", "load", "stream", "borrow"])
@spmd(4)
def test_loader_of_one_of_four_ranks_raises_on_tensor_five(rank: Rank, transport: str, others: str) -> None:
    with session(transport=transport, bucket_bytes=4096) as sync:
        good_sync(rank, sync)
        if rank.index == 2:
            with raises("ValueError", mentions=["tensor five"]):
                sync.receive(load=fails_on(5, "tensor five"))
        else:
            with raises("PeerFailed", rank=2, mentions=["tensor five"]) as caught:
                sync.broadcast(weights()) if rank.index == 0 else receive(sync, others, weights())
            assert caught.seconds < 2.0
            assert isinstance(caught.error, fastsync.PeerFailed) and caught.error.rank == 2
        assert sync.version == 1
        good_sync(rank, sync)
        exchange(rank, weights(), sync=sync)


@each_transport
@spmd(4)
def test_generator_of_the_source_raises_on_item_seven(rank: Rank, transport: str) -> None:
    def items() -> object:
        for i, item in enumerate(weights().items()):
            if i == 7:
                raise ValueError("item seven")
            yield item

    with session(transport=transport, bucket_bytes=4096) as sync:
        for attempt in range(3):
            if rank.index == 0:
                with raises("ValueError", mentions=["item seven"]):
                    sync.broadcast(items())
            else:
                with raises("PeerFailed", rank=0, mentions=["item seven"]) as caught:
                    receive(sync, ("load", "stream", "borrow")[attempt])
                assert caught.seconds < 2.0
        good_sync(rank, sync)


@each_transport
@spmd(3)
def test_failure_reaches_a_rank_that_is_busy_in_its_own_callback(rank: Rank, transport: str) -> None:
    with session(transport=transport, bucket_bytes=4096) as sync:
        if rank.index == 0:
            with raises("PeerFailed", rank=1):
                sync.broadcast(weights())
        elif rank.index == 1:
            with raises("ValueError"):
                sync.receive(load=fails_on(0, "at once"))
        else:

            def slow(batch: object) -> None:
                time.sleep(0.3)

            with raises("PeerFailed", rank=1, mentions=["at once"]) as caught:
                sync.receive(load=slow)
            assert caught.seconds < 2.5
        good_sync(rank, sync)


@each_transport
@spmd(3)
def test_first_failure_wins_when_two_ranks_raise(rank: Rank, transport: str) -> None:
    with session(transport=transport, bucket_bytes=4096) as sync:
        for _ in range(5):
            if rank.index == 0:
                with raises("PeerFailed", mentions=["broken on rank"]):
                    sync.broadcast(weights())
            else:
                with raises("ValueError", "PeerFailed", mentions=["broken on rank"]):
                    sync.receive(load=fails_on(3, f"broken on rank {rank.index}"))
            good_sync(rank, sync)


@each_transport
@spmd(3)
def test_error_before_joining_reaches_the_others_at_once(rank: Rank, transport: str) -> None:
    with session(transport=transport) as sync:
        good_sync(rank, sync)
        if rank.index == 1:
            into = {"t0": torch.zeros(1024), "the.odd.one": None}
            with raises("InvalidArgument", mentions=["the.odd.one"]):
                sync.receive(into=into)
        else:
            with raises("ManifestMismatch", rank=1, mentions=["the.odd.one"]) as caught:
                sync.broadcast(weights()) if rank.index == 0 else receive(sync, "load")
            assert caught.seconds < 2.0
        good_sync(rank, sync)


@each_transport
@spmd(2)
def test_exception_every_second_sync_never_wears_the_session_out(rank: Rank, transport: str) -> None:
    with session(transport=transport, bucket_bytes=4096) as sync:
        for round_ in range(25):
            at = round_ % 30
            if rank.index == 0:
                with raises("PeerFailed", rank=1, mentions=[f"round {round_}."]):
                    sync.broadcast(weights())
            else:
                with raises("ValueError"):
                    sync.receive(load=fails_on(at, f"round {round_}."))
            exchange(rank, weights(), sync=sync, mode=("into", "load", "stream")[round_ % 3])
            assert sync.version == round_ + 1


@spmd(2)
def test_one_liner_recovers_from_a_failure(rank: Rank) -> None:
    for round_ in (1, 2, 3):
        if rank.index == 0:
            with raises("PeerFailed", rank=1):
                fastsync.broadcast_bucketed(weights(), timeout_s=20)
            report = fastsync.broadcast_bucketed(weights(), timeout_s=20)
        else:
            with raises("ValueError"):
                fastsync.receive_bucketed(fails_on(1, "no"), timeout_s=20)
            report = fastsync.receive_bucketed(lambda batch: None, timeout_s=20)
        assert report.version == round_
