"""Sub-groups, several groups at once, threads, callbacks and fork."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

import fastsync
from support.markers import each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, good_sync, receive, session
from support.tensors import assert_same, poisoned_like, random_tensor


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": random_tensor((400 + i,), torch.float32, seed * 100 + i) for i in range(10)}


@each_transport
@spmd(3)
def test_src_is_a_global_rank_in_a_subgroup(rank: Rank, transport: str) -> None:
    group = dist.new_group([1, 2], backend="gloo")
    if rank.index == 0:
        with raises("InvalidArgument", mentions=["group"]):
            fastsync.WeightSync(group, src=1)
    else:
        with raises("InvalidArgument", mentions=["src", "0"]):
            fastsync.WeightSync(group, src=0)
        exchange(rank, weights(1), src=2, group=group, transport=transport)
        mine = weights(2) if rank.index == 2 else poisoned_like(weights(2))
        report = fastsync.broadcast_bucketed(mine, src=2, group=group, transport=transport, timeout_s=20)
        assert report.version == 1
        assert_same(mine, weights(2))


@spmd(3)
def test_errors_in_a_subgroup_name_global_ranks(rank: Rank) -> None:
    group = dist.new_group([0, 2], backend="gloo")
    if rank.index == 1:
        return
    with session(group=group) as sync:
        with raises("ManifestMismatch", rank=2, mentions=["w3"]):
            into = poisoned_like(weights(1))
            into["w3"] = torch.zeros(1)
            sync.broadcast(weights(1)) if rank.index == 0 else sync.receive(into=into)
        with raises("PeerFailed" if rank.index == 0 else "KeyError") as caught:
            sync.broadcast(weights(1)) if rank.index == 0 else sync.receive(load=lambda batch: {}[0])
        if isinstance(caught.error, fastsync.PeerFailed):
            assert caught.error.rank == 2


@each_transport
@spmd(3)
def test_groups_that_overlap_in_one_rank_sync_independently(rank: Rank, transport: str) -> None:
    low = dist.new_group([0, 1], backend="gloo")
    high = dist.new_group([1, 2], backend="gloo")
    sessions = {}
    if rank.index in (0, 1):
        sessions["low"] = session(0, group=low, transport=transport)
    if rank.index in (1, 2):
        sessions["high"] = session(1, group=high, transport=transport)
    for step in range(3):
        if rank.index in (0, 1):
            report = exchange(rank, weights(step), sync=sessions["low"], src=0)
            assert report.version == step + 1
        if rank.index in (1, 2):
            report = exchange(rank, weights(step + 50), sync=sessions["high"], src=1)
            assert report.version == step + 1
    for sync in sessions.values():
        sync.close()


@each_transport
@spmd(2)
def test_two_groups_sync_at_once_from_two_threads(rank: Rank, transport: str) -> None:
    groups = [dist.new_group([0, 1], backend="gloo") for _ in range(2)]

    def run(index: int) -> list[int]:
        versions = []
        with session(index, group=groups[index], transport=transport, bucket_bytes=1024) as sync:
            for step in range(20):
                report = exchange(rank, weights(step + 1000 * index), sync=sync, src=index)
                versions.append(report.version)
        return versions

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == [list(range(1, 21))] * 2


@each_transport
@spmd(2)
def test_two_threads_on_one_group_are_serialised(rank: Rank, transport: str) -> None:
    lock = threading.Lock()
    versions: list[int] = []

    def run(_: int) -> None:
        for _ in range(10):
            mine = weights(1) if rank.index == 0 else poisoned_like(weights(1))
            report = fastsync.broadcast_bucketed(mine, transport=transport, bucket_bytes=1024, timeout_s=20)
            assert_same(mine, weights(1))
            with lock:
                versions.append(report.version)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    assert sorted(versions) == list(range(1, 21))


@spmd(2)
def test_second_thread_waits_no_longer_than_its_deadline(rank: Rank) -> None:
    inside, leave = threading.Event(), threading.Event()

    def load(batch: object) -> None:
        inside.set()
        assert leave.wait(20)

    if rank.index == 0:
        with session(timeout_s=15) as sync:
            sync.broadcast({"a": torch.ones(3)})
    else:
        with session(timeout_s=1.0) as sync, ThreadPoolExecutor(1) as threads:
            first = threads.submit(sync.receive, load=load)
            assert inside.wait(10)
            with raises("SyncTimeout", "StateError") as caught:
                sync.receive(load=print)
            assert caught.seconds < 2.5
            leave.set()
            assert first.result(10).version == 1
            assert sync.version == 1


@each_transport
@spmd(2)
def test_call_inside_a_callback_of_the_same_group_is_a_state_error(rank: Rank, transport: str) -> None:
    with session(transport=transport) as sync:
        if rank.index == 0:

            def items() -> object:
                with raises("StateError"):
                    sync.broadcast({"x": torch.ones(1)})
                with raises("StateError"):
                    fastsync.broadcast_bucketed({"x": torch.ones(1)}, transport=transport, timeout_s=5)
                yield "a", torch.ones(3)

            sync.broadcast(items())
        else:

            def load(batch: object) -> None:
                with raises("StateError"):
                    sync.receive(load=print)
                with raises("StateError"):
                    list(sync.stream())
                with raises("StateError"):
                    fastsync.receive_bucketed(print, transport=transport, timeout_s=5)

            sync.receive(load=load)
        assert sync.version == 1
        good_sync(rank, sync)


@spmd(2)
def test_second_stream_while_one_is_open_is_a_state_error(rank: Rank) -> None:
    with session() as sync:
        if rank.index == 0:
            sync.broadcast(weights(1))
        else:
            stream = sync.stream()
            first = next(stream)
            with raises("StateError"):
                next(sync.stream())
            with raises("StateError"):
                sync.receive(load=print)
            assert_same(dict([first, *stream]), weights(1))
        good_sync(rank, sync)


@spmd(2)
def test_close_inside_a_callback_ends_that_sync_not_the_process(rank: Rank) -> None:
    sync = session(timeout_s=5)
    if rank.index == 0:
        with raises("Error"):
            sync.broadcast(weights(1))
    else:
        with raises("Error"):
            sync.receive(load=lambda batch: sync.close())
            sync.receive(load=print)
    sync.close()
    rank.barrier()
    with session() as again:
        good_sync(rank, again)


@each_transport
@spmd(2)
def test_use_after_fork_is_a_state_error_in_the_child_and_harmless_to_the_parent(rank: Rank, transport: str) -> None:
    with session(transport=transport) as sync:
        good_sync(rank, sync)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with raises("StateError"):
                    sync.broadcast({}) if rank.index == 0 else sync.receive(into={})
                with raises("StateError"):
                    list(sync.stream())
                sync.close()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        good_sync(rank, sync)
        good_sync(rank, sync)


@each_transport
@spmd(2)
def test_users_collectives_between_syncs_and_in_other_threads_meet_their_own_partners(
    rank: Rank, transport: str
) -> None:
    def all_reduce_often() -> None:
        for i in range(50):
            total = torch.full((100,), float(i))
            dist.all_reduce(total)
            assert bool((total == 2 * i).all())

    with session(transport=transport, bucket_bytes=1024) as sync, ThreadPoolExecutor(1) as threads:
        for step in range(5):
            busy = threads.submit(all_reduce_often)
            exchange(rank, weights(step), sync=sync, mode=("into", "stream")[step % 2])
            busy.result(30)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert float(total) == 2.0


@spmd(2)
def test_many_groups_start_at_once(rank: Rank) -> None:
    groups = [dist.new_group([0, 1], backend="gloo") for _ in range(12)]

    def run(index: int) -> None:
        with session(index % 2, group=groups[index]) as sync:
            for step in range(3):
                exchange(rank, weights(index * 10 + step), sync=sync, src=index % 2)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(run, range(12)))


@spmd(3)
def test_member_that_never_calls_is_named(rank: Rank) -> None:
    if rank.index < 2:
        # Rank 1 waits for the source and cannot know whom the source waits for.
        absent = 2 if rank.index == 0 else None
        with raises("SyncTimeout", rank=absent) as caught, session(timeout_s=1.0) as sync:
            sync.broadcast(weights(1)) if rank.index == 0 else receive(sync, "load")
        assert caught.seconds < 3.0
    rank.barrier()
    with session() as sync:
        good_sync(rank, sync)


@each_transport
@spmd(2)
def test_sessions_opened_and_closed_many_times(rank: Rank, transport: str) -> None:
    for step in range(15):
        exchange(rank, weights(step), transport=transport, mode=("into", "load")[step % 2])


@spmd(4)
def test_four_ranks_with_the_source_in_the_middle(rank: Rank) -> None:
    for transport in ("shm", "gloo"):
        with session(2, transport=transport, bucket_bytes=1024) as sync:
            for mode in ("into", "load", "stream", "borrow"):
                exchange(rank, weights(3), sync=sync, src=2, mode=mode)
