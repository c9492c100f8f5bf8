"""A session that is closed and opened again between a failed call and the next: calls still pair up on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fastsync
from support.markers import each_transport, fault
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, good_sync, session

pytestmark = fault


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((512,), value + i) for i in range(6)}


def refused() -> dict[str, object]:
    return {"w0": "not a tensor"}


def reopened(sync: fastsync.WeightSync, transport: str, when: bool) -> fastsync.WeightSync:
    if not when:
        return sync
    sync.close()
    return session(transport=transport)


@pytest.mark.parametrize("reopens", [(0,), (1,), (2,)])
@each_transport
@spmd(3)
def test_receiver_refuses_its_call_before_the_source_comes(
    rank: Rank, transport: str, reopens: tuple[int, ...]
) -> None:
    sync = session(transport=transport)
    good_sync(rank, sync)
    if rank.index == 1:
        with raises("InvalidArgument", mentions=["w0"]):
            sync.receive(into=refused())
        dist.barrier()
    else:
        dist.barrier()  # that call is over
        sync = reopened(sync, transport, rank.index in reopens)
        with raises("ManifestMismatch", rank=1, mentions=["w0"]) as caught:
            sync.broadcast(weights(1)) if rank.index == 0 else sync.receive(into=weights(1))
        assert caught.seconds < 2.0
    sync = reopened(sync, transport, rank.index == 1 and 1 in reopens)
    for value in (2.0, 3.0):
        exchange(rank, weights(value), sync=sync)
    sync.close()


@pytest.mark.parametrize("reopens", [(0,), (1,), (1, 2)])
@each_transport
@spmd(3)
def test_source_refuses_its_call_before_the_receivers_come(
    rank: Rank, transport: str, reopens: tuple[int, ...]
) -> None:
    sync = session(transport=transport)
    good_sync(rank, sync)
    if rank.index == 0:
        with raises("InvalidArgument", mentions=["w0"]):
            sync.broadcast(refused())
        dist.barrier()
    else:
        dist.barrier()
    sync = reopened(sync, transport, rank.index in reopens and rank.index != 0)
    if rank.index != 0:
        with raises("ManifestMismatch", rank=0, mentions=["w0"]) as caught:
            sync.receive(into=weights(1))
        assert caught.seconds < 2.0
    sync = reopened(sync, transport, rank.index == 0 and 0 in reopens)
    for value in (2.0, 3.0):
        exchange(rank, weights(value), sync=sync)
    sync.close()


@pytest.mark.parametrize("caller", [0, 1])
@each_transport
@spmd(3)
def test_ranks_that_all_open_another_session_start_afresh(rank: Rank, transport: str, caller: int) -> None:
    sync = session(transport=transport)
    good_sync(rank, sync)
    if rank.index == caller:  # the others stay away from this one
        with raises("InvalidArgument", mentions=["w0"]):
            sync.broadcast(refused()) if rank.index == 0 else sync.receive(into=refused())
    dist.barrier()
    sync = reopened(sync, transport, True)
    for value in (2.0, 3.0):
        exchange(rank, weights(value), sync=sync)
    sync.close()


@each_transport
@spmd(2)
def test_both_refuse_the_same_call_and_reopen(rank: Rank, transport: str) -> None:
    sync = session(transport=transport)
    good_sync(rank, sync)
    for round_ in range(3):
        with raises("InvalidArgument", "ManifestMismatch", mentions=["w0"]):
            sync.broadcast(refused()) if rank.index == 0 else sync.receive(into=refused())
        sync = reopened(sync, transport, rank.index == round_ % 2 or round_ == 2)
        exchange(rank, weights(round_), sync=sync)
    sync.close()


@spmd(2)
def test_one_liners_pair_up_after_close_as_well(rank: Rank) -> None:
    params = weights(1.0) if rank.index == 0 else {name: torch.zeros_like(t) for name, t in weights(1.0).items()}
    fastsync.broadcast_bucketed(params, timeout_s=20)
    if rank.index == 1:
        with raises("InvalidArgument", mentions=["w0"]):
            fastsync.broadcast_bucketed(refused(), timeout_s=20)
        dist.barrier()
    else:
        dist.barrier()
        fastsync.close()
        with raises("ManifestMismatch", rank=1, mentions=["w0"]):
            fastsync.broadcast_bucketed(params, timeout_s=20)
    fastsync.broadcast_bucketed(params, timeout_s=20)
    assert all(torch.equal(params[name], tensor) for name, tensor in weights(1.0).items())
