"""Groups of ranks that meet in a store, with no torch.distributed group anywhere."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastsync
from fastsync import _group
from support.markers import each_mode, each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, good_sync, session
from support.tensors import assert_same, poisoned_like, random_tensor


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": random_tensor((400 + i,), torch.float32, seed * 100 + i) for i in range(10)}


@each_mode
@each_transport
@spmd(3, make_group=False)
def test_ranks_sync_without_a_process_group(rank: Rank, transport: str, mode: str) -> None:
    assert not dist.is_initialized()
    with session(src=1, group=fastsync.StoreGroup(rank.store, rank.index, 3), transport=transport) as sync:
        for seed in range(3):
            exchange(rank, weights(seed), src=1, sync=sync, mode=mode)
    assert not dist.is_initialized()


@spmd(3, make_group=False)
def test_a_store_of_one_of_the_ranks_will_do(rank: Rank) -> None:
    hosted = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank.index == 0 else None
    port = rank.share(hosted and hosted.port)[0]
    store = hosted or dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    with session(group=fastsync.StoreGroup(store, rank.index, 3)) as sync:
        good_sync(rank, sync)
    rank.barrier()


@spmd(2, make_group=False)
def test_the_one_liners_take_it_and_end_with_it(rank: Rank) -> None:
    group: Any = fastsync.StoreGroup(rank.store, rank.index, 2)
    for version in (1, 2):
        mine = weights(version) if rank.index == 0 else poisoned_like(weights(version))
        assert fastsync.broadcast_bucketed(mine, group=group, timeout_s=20).version == version
        assert_same(mine, weights(version))
    gone = weakref.ref(group)
    channels = [channel for channel in _group._channels.values() if channel._group() is group]
    assert len(channels) == 1
    del group
    gc.collect()
    assert gone() is None and channels[0].closed


@spmd(2, make_group=False)
def test_a_session_keeps_its_group(rank: Rank) -> None:
    sync = session(group=fastsync.StoreGroup(rank.store, rank.index, 2))
    gc.collect()
    good_sync(rank, sync)
    gone = weakref.ref(sync._group)
    sync.close()
    gc.collect()
    assert gone() is None


@spmd(2, make_group=False)
def test_a_missing_rank_is_named(rank: Rank) -> None:
    with session(group=fastsync.StoreGroup(rank.store, rank.index, 3), timeout_s=1.0) as sync:
        with raises("SyncTimeout", rank=2 if rank.index == 0 else None):
            sync.broadcast(weights(1)) if rank.index == 0 else sync.receive(into=poisoned_like(weights(1)))


@spmd(3)
def test_it_lives_beside_a_process_group(rank: Rank) -> None:
    order = (rank.index + 1) % 3
    with session(group=fastsync.StoreGroup(rank.store, order, 3), src=2) as one, session(src=2) as two:
        for seed in range(2):
            exchange(rank, weights(seed), src=2, sync=two)
            params = weights(seed + 5)
            if order == 2:
                one.broadcast(params)
            else:
                into = poisoned_like(params)
                one.receive(into=into)
                assert_same(into, params)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((object(), 0, 1), "store is a object"),
        ((dist.HashStore(), 2, 2), "rank is 2; in a group of 2"),
        ((dist.HashStore(), -1, 2), "rank is -1"),
        ((dist.HashStore(), 0, 0), "world_size is 0"),
        ((dist.HashStore(), True, 2), "rank is True"),
        ((dist.HashStore(), 0, 2.0), "world_size is 2.0"),
    ],
)
def test_a_bad_argument_is_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(fastsync.InvalidArgument, match=text):
        fastsync.StoreGroup(*arguments)


def test_a_source_that_is_no_rank_of_it_is_refused() -> None:
    with pytest.raises(fastsync.InvalidArgument, match="src is 2"):
        fastsync.WeightSync(fastsync.StoreGroup(dist.HashStore(), 0, 2), src=2)
