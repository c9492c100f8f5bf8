"""What a version means: counted per session, moved only by a commit, never backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastsync
from support.markers import each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, good_sync, session
from support.tensors import assert_same, poisoned_like, storage_bytes, untouched


def full(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((256,), value) for i in range(8)}


@spmd(2)
def test_versions_count_from_one_and_may_jump(rank: Rank) -> None:
    with session() as sync:
        assert exchange(rank, full(1), sync=sync).version == 1
        assert exchange(rank, full(1), sync=sync).version == 2
        assert exchange(rank, full(1), sync=sync, version=7).version == 7
        assert exchange(rank, full(1), sync=sync).version == 8
    with session() as sync:
        assert exchange(rank, full(1), sync=sync, version=0).version == 0
        assert sync.version == 0
        assert exchange(rank, full(1), sync=sync).version == 1


@pytest.mark.parametrize("version", [-1, 2**63, 2**64, 2**70, True, "7", 7.0])
@each_transport
@spmd(2)
def test_bad_version_is_invalid_on_every_rank(rank: Rank, transport: str, version: Any) -> None:
    mine = full(3) if rank.index == 0 else poisoned_like(full(3))
    with session(transport=transport) as sync:
        with raises("InvalidArgument", mentions=["version"]):
            sync.broadcast(mine, version=version) if rank.index == 0 else sync.receive(into=mine)
        assert rank.index == 0 or untouched(mine)
        assert sync.version is None and not sync.dirty
        good_sync(rank, sync)
        assert sync.version == 1


@pytest.mark.parametrize("version", [5, 4, 0])
@spmd(2)
def test_version_that_does_not_grow_is_invalid_on_every_rank(rank: Rank, version: int) -> None:
    mine = full(3) if rank.index == 0 else poisoned_like(full(3))
    with session() as sync:
        exchange(rank, full(1), sync=sync, version=5)
        with raises("InvalidArgument", mentions=["version", "5"]):
            sync.broadcast(mine, version=version) if rank.index == 0 else sync.receive(into=mine)
        assert rank.index == 0 or untouched(mine)
        assert sync.version == 5 and not sync.dirty
        assert exchange(rank, full(2), sync=sync).version == 6


@spmd(2)
def test_bad_version_in_the_one_liner_leaves_the_next_call_good(rank: Rank) -> None:
    mine = full(3) if rank.index == 0 else poisoned_like(full(3))
    for _ in range(2):
        with raises("InvalidArgument", mentions=["version"]):
            fastsync.broadcast_bucketed(mine, version=-1, timeout_s=20)
        assert rank.index == 0 or untouched(mine)
    assert fastsync.broadcast_bucketed(mine, timeout_s=20).version == 1
    assert_same(mine, full(3))


@spmd(2)
def test_last_version_may_be_reached_but_not_passed(rank: Rank) -> None:
    with session() as sync:
        assert exchange(rank, full(1), sync=sync, version=2**63 - 1).version == 2**63 - 1
        with raises("InvalidArgument", mentions=["version"]):
            sync.broadcast(full(2)) if rank.index == 0 else sync.receive(into=full(0))
        assert sync.version == 2**63 - 1


@spmd(2)
def test_sessions_count_on_their_own(rank: Rank) -> None:
    with session() as one:
        exchange(rank, full(1), sync=one, version=9)
    with session() as two:
        assert exchange(rank, full(1), sync=two).version == 1


@spmd(2)
def test_one_liners_count_per_source(rank: Rank) -> None:
    for expected in (1, 2):
        for src in (0, 1):
            mine = full(expected) if rank.index == src else poisoned_like(full(0))
            assert fastsync.broadcast_bucketed(mine, src=src, timeout_s=20).version == expected
            assert_same(mine, full(expected))


@spmd(2)
def test_one_liners_with_other_options_share_the_version_counter(rank: Rank) -> None:
    for expected, bucket_bytes in enumerate((1024, 4096, 1024, None), 1):
        mine = full(expected) if rank.index == 0 else poisoned_like(full(0))
        report = fastsync.broadcast_bucketed(mine, bucket_bytes=bucket_bytes, timeout_s=20)
        assert report.version == expected
        assert_same(mine, full(expected))


@each_transport
@spmd(3)
def test_failed_sync_moves_no_version_and_the_next_repairs(rank: Rank, transport: str) -> None:
    with session(transport=transport, bucket_bytes=1024) as sync:
        weights = full(1) if rank.index == 0 else poisoned_like(full(0))
        first = sync.broadcast(weights) if rank.index == 0 else sync.receive(into=weights)
        if rank.index == 0:
            with raises("PeerFailed", rank=2, mentions=["bucket three"]):
                sync.broadcast(full(2))
        elif rank.index == 1:
            with raises("PeerFailed", rank=2, mentions=["bucket three"]):
                sync.receive(into=weights)
        else:
            seen = []

            def load(batch: list[tuple[str, torch.Tensor]]) -> None:
                seen.extend(name for name, _ in batch)
                if len(seen) >= 3:
                    raise ValueError("bucket three")

            with raises("ValueError", mentions=["bucket three"]):
                sync.receive(load=load)
        assert sync.version == 1 and sync.report == first
        if rank.index == 1:
            changed = any(bool((tensor != 1).any()) for tensor in weights.values())
            assert sync.dirty or not changed
        if rank.index == 0:
            assert not sync.dirty, "the source has no destinations"
        assert exchange(rank, full(3), sync=sync).version == 2
        assert not sync.dirty


@spmd(2)
def test_dirty_is_set_when_a_destination_was_written_and_cleared_by_a_commit(rank: Rank) -> None:
    def breaks() -> Any:
        yield "w0", torch.ones(4096)
        for i in range(1, 40):
            yield f"w{i}", torch.ones(4096)
        raise ValueError("late")

    mine = {f"w{i}": torch.zeros(4096) for i in range(40)}
    with session(bucket_bytes=16384) as sync:
        if rank.index == 0:
            with raises("ValueError", mentions=["late"]):
                sync.broadcast(breaks())
        else:
            with raises("PeerFailed", rank=0, mentions=["late"]):
                sync.receive(into=mine)
            written = any(bool(tensor.any()) for tensor in mine.values())
            assert written, "40 buckets with two buffers: some must have been written when the generator failed"
            assert sync.dirty
        assert sync.version is None
        good_sync(rank, sync)


@spmd(2)
def test_committed_set_is_whole_when_the_version_moved(rank: Rank) -> None:
    with session(bucket_bytes=1024) as sync:
        for version in range(1, 21):
            mine = full(version) if rank.index == 0 else poisoned_like(full(0))
            sync.broadcast(mine) if rank.index == 0 else sync.receive(into=mine)
            assert sync.version == version
            assert all(bool((tensor == version).all()) for tensor in mine.values())
            assert not any(bool((storage_bytes(tensor) == 0xA5).all()) for tensor in mine.values())


@spmd(3)
def test_reopened_receiver_says_never_synced_until_it_has_received(rank: Rank) -> None:
    sync = session()
    for version in (1, 2, 3):
        exchange(rank, full(version), sync=sync)
    if rank.index == 2:
        sync.close()
        sync = session()
        assert sync.version is None and sync.report is None
    exchange(rank, full(4), sync=sync)
    assert sync.version == 4
    sync.close()
