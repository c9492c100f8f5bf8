"""Bad arguments are refused before any traffic; what ranks disagree on is settled or refused."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

import fastsync
from support.markers import each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, good_sync, receive, session
from support.tensors import assert_same, poisoned_like, random_tensor, untouched

BAD_OPTIONS: dict[str, list[Any]] = {
    "bucket_bytes": [0, -1, True, "x", 4096.0, math.nan],
    "buffers": [0, -1, 1.5, True, "2"],
    "timeout_s": [0, -1, -0.5, math.nan, math.inf, -math.inf, None, "10", True],
    "transport": ["", "tcp", "SHM ", 3, None],
    "src": [-1, 2, 99, "0", 0.0, True, None],
    "verify": ["yes"],
    "strict": ["no"],
}
CASES = [(name, value) for name, values in BAD_OPTIONS.items() for value in values]


@spmd(2)
def test_bad_options_are_refused_by_every_entry_point_without_traffic(rank: Rank) -> None:
    # Only one rank calls at a time: an implementation that talks to the others first would sit until the deadline.
    for turn in range(rank.size):
        if rank.index == turn:
            for name, value in CASES:
                options: dict[str, Any] = {"timeout_s": 20.0, name: value}
                began = time.monotonic()
                try:
                    with raises("InvalidArgument", mentions=[name]):
                        fastsync.WeightSync(**options)
                    with raises("InvalidArgument", mentions=[name]):
                        fastsync.broadcast_bucketed({"a": torch.ones(2)}, **options)
                    if name not in ("bucket_bytes", "buffers", "strict"):
                        with raises("InvalidArgument", mentions=[name]):
                            fastsync.receive_bucketed(print, **options)
                except BaseException as error:
                    raise AssertionError(f"{name}={value!r}: {error!r}") from error
                assert time.monotonic() - began < 1.0, f"{name}={value!r} was refused only after a wait"
        rank.barrier()
    with session() as sync:
        good_sync(rank, sync)


@spmd(1)
def test_unknown_transport_error_lists_the_known_ones(rank: Rank) -> None:
    with raises("InvalidArgument", mentions=["carrier-pigeon", "shm", "gloo", "nccl", "hccl", "ipc", "auto"]):
        fastsync.WeightSync(transport="carrier-pigeon")


@pytest.mark.parametrize("params", [None, 3, "weights", [torch.ones(1)], [("a", torch.ones(1), 2)], torch.ones(3)])
@spmd(2)
def test_params_that_are_no_named_tensors_are_refused(rank: Rank, params: Any) -> None:
    with session() as sync:
        if rank.index == 0:
            with raises("InvalidArgument"):
                sync.broadcast(params)
        else:
            with raises("ManifestMismatch", "PeerFailed", "InvalidArgument", rank=0):
                sync.receive(into={})
        good_sync(rank, sync)


@pytest.mark.parametrize(
    "arguments", [{}, {"into": {}, "load": print}, {"load": 3}, {"into": 3}, {"into": None, "load": None}]
)
@spmd(2)
def test_receive_takes_exactly_one_kind_of_destination(rank: Rank, arguments: dict[str, Any]) -> None:
    with session(timeout_s=5) as sync:
        if rank.index == 1:
            with raises("InvalidArgument"):
                sync.receive(**arguments)
        # Whether the source is told of it or not: the next sync of all ranks must work.
        if rank.index == 0:
            try:
                sync.broadcast({"a": torch.ones(3)})
            except fastsync.Error:
                sync.broadcast({"a": torch.ones(3)})
        else:
            got, _ = receive(sync, "load")
            assert_same(got, {"a": torch.ones(3)})


@spmd(2)
def test_generator_as_destination_is_refused(rank: Rank) -> None:
    with session(timeout_s=3) as sync:
        if rank.index == 0:
            with raises("Error"):
                sync.broadcast({"a": torch.ones(3)})
        else:
            with raises("InvalidArgument"):
                sync.receive(into=((name, torch.ones(3)) for name in "a"))
        rank.barrier()
        good_sync(rank, sync)


@spmd(3)
def test_different_transports_are_invalid_on_every_rank(rank: Rank) -> None:
    mine = {"a": torch.full((8,), 7.0)} if rank.index == 0 else {"a": torch.full((8,), -1.0)}
    transport = "gloo" if rank.index == 1 else "shm"
    with raises("InvalidArgument", mentions=["shm", "gloo"]) as caught, session(transport=transport) as sync:
        sync.broadcast(mine) if rank.index == 0 else sync.receive(into=mine)
    assert caught.seconds < 10
    assert mine["a"][0] == (7.0 if rank.index == 0 else -1.0)
    rank.barrier()
    with session() as sync:
        good_sync(rank, sync)


@spmd(2)
def test_different_src_is_an_error_on_every_rank_by_the_deadline(rank: Rank) -> None:
    mine = {"a": torch.full((8,), float(rank.index))}
    with raises("Error") as caught, session(src=rank.index, timeout_s=2) as sync:
        sync.broadcast(mine)
    assert caught.seconds < 4.5
    rank.barrier()
    with session() as sync:
        good_sync(rank, sync)


@spmd(2)
def test_both_ranks_receiving_is_an_error_on_every_rank_by_the_deadline(rank: Rank) -> None:
    mine = {"a": torch.full((8,), -1.0)}
    with raises("Error") as caught, session(src=1 - rank.index, timeout_s=2) as sync:
        sync.receive(into=mine)
    assert caught.seconds < 4.5
    assert bool((mine["a"] == -1.0).all())
    rank.barrier()
    with session() as sync:
        good_sync(rank, sync)


def some() -> dict[str, torch.Tensor]:
    return {f"t{i}": random_tensor((100 + i,), torch.float32, i) for i in range(30)}


@each_transport
@spmd(2)
def test_source_decides_bucket_bytes(rank: Rank, transport: str) -> None:
    for mine, theirs in ((1024, 4096), (4096, 1024), (None, 512), (512, None)):
        size = mine if rank.index == 0 else theirs
        report = exchange(rank, some(), bucket_bytes=size, transport=transport)
        if mine is not None:
            assert report.bucket_bytes == mine
        assert len(set(rank.share(report.bucket_bytes))) == 1


@spmd(2)
def test_source_decides_buffers_and_each_rank_its_own_timeout(rank: Rank) -> None:
    report = exchange(rank, some(), bucket_bytes=1024, buffers=4 if rank.index == 0 else 2, timeout_s=9 + rank.index)
    assert report.peak_staging_bytes <= 4 * 1024 + 2**20


@each_transport
@spmd(2)
def test_source_decides_verify(rank: Rank, transport: str) -> None:
    exchange(rank, some(), verify=rank.index == 0, transport=transport)
    exchange(rank, some(), verify=rank.index == 1, transport=transport)


@spmd(2)
def test_source_decides_strict(rank: Rank) -> None:
    sent = some()
    mine = poisoned_like({name: sent[name] for name in list(sent)[1:]})
    with session(strict=rank.index == 1) as sync:
        report = sync.broadcast(sent) if rank.index == 0 else sync.receive(into=mine)
        assert report.unexpected == ["t0"]
    mine = poisoned_like(mine)
    with session(strict=rank.index == 0) as sync:
        with raises("ManifestMismatch", mentions=["t0", "rank 1"]):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=mine)
        assert rank.index == 0 or untouched(mine)


@pytest.mark.parametrize("buffers", [2, 3, 8])
@each_transport
@spmd(2)
def test_more_buffers_may_be_asked_for(rank: Rank, transport: str, buffers: int) -> None:
    report = exchange(rank, some(), bucket_bytes=1024, buffers=buffers, transport=transport)
    assert report.peak_staging_bytes <= buffers * 1024 + 2**20
