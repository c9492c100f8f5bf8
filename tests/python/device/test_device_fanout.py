"""NCCL between devices and ipc on each of them, in one sync ("nccl+ipc"): what only that combination has.

Ranks 0 and 1 share a device, ranks 2 and 3 another one (`ordinal_of`). With three ranks the source has a follower and
rank 2 is alone on its device; with four, rank 2 has a follower too, which is behind a leader that is not the source.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from device_syncs import Item, Party, Tensors, device_session, odd_items, pairs, plain_items

import fastsync
from support.devices import DevicePool, journal, machine_of
from support.markers import fault, leak
from support.ranks import Failure, Group, Rank, names_rank, raises, spmd

FANOUT = "nccl+ipc"
MIB = 1 << 20
each_size = pytest.mark.parametrize("size", [3, 4])


def few_syncs(
    rank: Rank, mode: str, source: str = "mapping", src: int = 0, syncs: int = 3, **options: object
) -> fastsync.SyncReport:
    party = Party(rank, FANOUT, odd_items()[::5], mode=mode, source=source, src=src)
    with device_session(FANOUT, src, **options) as sync:
        for step in range(syncs):
            report = party.sync(sync, step)
    return report


def per_rank(pool: DevicePool, *settings: Mapping[str, object]) -> Group:
    return pool.group(len(settings), setups=[{"device": one} for one in settings])


# --- the same bytes everywhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("source", ["mapping", "generator"])
@pytest.mark.parametrize("mode", ["into", "load", "stream", "borrow"])
@spmd(4)
def test_every_kind_of_tensor_reaches_leaders_and_followers(rank: Rank, mode: str, source: str, verify: bool) -> None:
    party = Party(rank, FANOUT, odd_items(), mode=mode, source=source)
    with device_session(FANOUT, bucket_bytes=8192, verify=verify) as sync:
        for step in range(2):
            report = party.sync(sync, step)
            assert report.plan_reused == (step > 0)
            assert report.buckets >= 10  # and "large" spans nine of them


@pytest.mark.parametrize("src", [1, 2, 3])
@each_size
def test_any_rank_may_be_the_source(pool: DevicePool, size: int, src: int) -> None:
    if src >= size:
        pytest.skip("there is no such rank")
    pool.group(size).run(few_syncs, "into", "mapping", src, bucket_bytes=4096)
    pool.group(size).run(few_syncs, "stream", "generator", src, bucket_bytes=4096)


@pytest.mark.parametrize("buffers", [1, 2, 4])
@pytest.mark.parametrize("mode", ["into", "load"])
@spmd(4)
def test_many_buckets_wrap_around_the_ring(rank: Rank, mode: str, buffers: int) -> None:
    party = Party(rank, FANOUT, [Item.of("long", "uint8", (600 * 256 + 13,))], mode=mode)
    with device_session(FANOUT, bucket_bytes=256, buffers=buffers) as sync:
        for step in range(2):
            assert party.sync(sync, step).buckets == 601


@spmd(4)
def test_ranks_may_receive_in_different_ways(rank: Rank) -> None:
    for shift in range(4):
        few_syncs(rank, ("into", "load", "stream", "borrow")[(rank.index + shift) % 4], bucket_bytes=4096)


@spmd(4, limit_s=90)
def test_twenty_syncs_change_their_manifests_and_bucket_sizes(rank: Rank) -> None:
    parties = [Party(rank, FANOUT, items) for items in (plain_items(6), odd_items()[::6], plain_items(3, 4000))]
    with device_session(FANOUT, bucket_bytes=4096) as sync:
        for step in range(20):
            parties[step // 2 % 3].sync(sync, step)


@pytest.mark.parametrize("seed", [2, 3])
def test_bytes_do_not_depend_on_how_streams_are_delayed(pool: DevicePool, seed: int) -> None:
    group = pool.device_group(
        4, FASTSYNC_FAKE_SEED=seed, FASTSYNC_FAKE_DELAY_US=2000, FASTSYNC_FAKE_NCCL_CHUNK_DELAY_US=500
    )
    for mode, source in (("into", "mapping"), ("stream", "generator"), ("borrow", "mapping")):
        group.run(few_syncs, mode, source, bucket_bytes=16384)


@pytest.mark.parametrize(
    "settings",
    [{"FASTSYNC_IPC": "vmm"}, {"FASTSYNC_FAKE_NO_IPC": "event"}, {"FASTSYNC_FAKE_NCCL_DEFER": "always"}],
    ids=["by descriptor", "ordered by hosts", "NCCL in progress"],
)
def test_it_works_however_memory_and_order_are_shared(pool: DevicePool, settings: dict[str, object]) -> None:
    group = pool.device_group(4, FASTSYNC_FAKE_DELAY_US=1000, **settings)
    group.run(few_syncs, "into", bucket_bytes=4096)
    group.run(few_syncs, "load", "generator", bucket_bytes=4096)


# --- when it is chosen ------------------------------------------------------------------------------------------------


def chosen(rank: Rank, ordinals: Sequence[int], asked: str) -> tuple[str, str]:
    machine = machine_of("double", ordinals[rank.index])
    mine = Tensors(machine, plain_items(5), "source" if rank.index == 0 else "destination")
    with fastsync.WeightSync(src=0, transport=asked, timeout_s=10.0, bucket_bytes=1024) as sync:
        for step in range(2):
            mine.fill(step) if rank.index == 0 else mine.poison()
            report = sync.broadcast(mine.arguments()) if rank.index == 0 else sync.receive(into=mine.arguments())
            if rank.index:
                mine.check(step)
    return report.transport, report.transport_reason


@pytest.mark.parametrize("asked", ["auto", "nccl"])
def test_report_names_the_leaders(pool: DevicePool, asked: str) -> None:
    group = pool.group(4)
    seen = group.run(chosen, [0, 1, 0, 1], asked)
    assert [transport for transport, _ in seen] == [FANOUT] * 4
    assert "rank 0 leads rank 2, rank 1 leads rank 3" in seen[0][1], seen[0][1]
    assert [transport for transport, _ in group.run(chosen, [0, 1, 2, 3], asked)] == ["nccl"] * 4


def test_it_is_not_a_name_to_ask_for(pool: DevicePool) -> None:
    pool.group(1).run(refused_name)


def refused_name(rank: Rank) -> None:
    with raises("InvalidArgument", mentions=[FANOUT, "nccl", "auto"]):
        fastsync.WeightSync(transport=FANOUT)
    assert FANOUT not in fastsync.transports() and FANOUT in fastsync.transports()["nccl"].use_when


def test_followers_need_no_nccl(pool: DevicePool) -> None:
    without: dict[str, object] = {"FASTSYNC_NCCL_PATH": "/nowhere/libnccl.so.2"}
    group = per_rank(pool, {}, without, {}, {"FASTSYNC_FAKE_NCCL_VERSION": 22705})
    assert group.run(chosen, [0, 0, 1, 1], "auto")[0][0] == FANOUT
    assert group.run(chosen, [0, 1, 0, 1], "auto")[0][0] == "gloo"  # rank 1 leads, and cannot


def test_one_copy_crosses_the_wire_where_nccl_would_take_two(pool: DevicePool) -> None:
    settings: dict[str, object] = {"NCCL_MULTI_RANK_GPU_ENABLE": 1, "FASTSYNC_FAKE_NCCL_VERSION": 23003}
    group = per_rank(pool, *[settings] * 3)
    assert group.run(chosen, [0, 1, 1], "nccl")[0][0] == FANOUT


@spmd(4)
def test_ranks_may_change_places_between_syncs(rank: Rank) -> None:
    with device_session(FANOUT, bucket_bytes=1024) as sync:
        for step, ordinals in enumerate([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 2, 3], [2, 2, 0, 0]]):
            machine = machine_of("double", ordinals[rank.index])
            mine = Tensors(machine, plain_items(5), "source" if rank.index == 0 else "destination")
            mine.fill(step) if rank.index == 0 else mine.poison()
            report = sync.broadcast(mine.arguments()) if rank.index == 0 else sync.receive(into=mine.arguments())
            assert report.transport == ("nccl" if step == 3 else FANOUT)
            if rank.index:
                mine.check(step)


# --- what it costs ----------------------------------------------------------------------------------------------------


@spmd(4)
def test_bucket_crosses_the_wire_once_a_device_and_is_held_once(rank: Rank) -> None:
    party = Party(rank, FANOUT, [Item.of("w", "uint8", (MIB,))])
    with device_session(FANOUT, bucket_bytes=65536, buffers=2) as sync:
        before = journal()
        report = party.sync(sync, 0)
        calls = journal().calls_since(before)
        leads = rank.index % 2 == 0
        assert calls.get("ncclBroadcast", 0) == (report.buckets if leads else 0)
        assert calls.get("cuIpcGetMemHandle", 0) == (1 if leads else 0)
        assert calls.get("cuIpcOpenMemHandle_v2", 0) == (0 if leads else 1)
        assert 2 * 65536 <= report.peak_staging_bytes <= 2 * 65536 + MIB


@pytest.mark.parametrize("slow", [1, 2, 3])
@spmd(4)
def test_slow_reader_anywhere_holds_the_source_back(rank: Rank, slow: int) -> None:
    """As many buckets as there are buffers, the one that is being filled, and the one that is being read."""
    items = [Item.of(f"t{i}", "uint8", (4096,)) for i in range(24)]
    party = Party(rank, FANOUT, items, mode="load", source="generator")
    with device_session(FANOUT, bucket_bytes=4096, buffers=2) as sync:
        if rank.index == 0:
            party.mine.fill(0)

            def pulled() -> Iterator[tuple[str, Any]]:
                for number, item in enumerate(pairs(party.mine.arguments())):
                    rank.store.set("pulled", str(number + 1))
                    yield item

            rank.store.set("pulled", "0")
            rank.barrier()
            sync.broadcast(pulled())
            return
        rank.barrier()
        most = seen = 0

        def load(batch: list[tuple[str, object]]) -> None:
            nonlocal most, seen
            seen += len(batch)
            if rank.index == slow:
                time.sleep(0.02)
                most = max(most, int(rank.store.get("pulled")) - seen)

        sync.receive(load=load)
        assert most <= 3, f"the source was {most} buckets ahead"


# --- when ranks fail --------------------------------------------------------------------------------------------------


def fails_in_its_loader(rank: Rank, victim: int) -> list[int]:
    """Every other sync the victim's loader raises at its third bucket."""
    party = Party(rank, FANOUT, plain_items(12, 500), mode="load")
    held = []
    with device_session(FANOUT, bucket_bytes=4096) as sync:
        for step in range(8):
            if step % 2 == 0:
                party.sync(sync, step)
                held.append(journal().live["device_bytes"])
                continue
            seen = 0

            def load(batch: list[tuple[str, object]]) -> None:
                nonlocal seen
                seen += 1
                if rank.index == victim and seen == 3:
                    raise ValueError("third bucket")

            with raises("ValueError" if rank.index == victim else "PeerFailed") as caught:
                sync.broadcast(party.mine.arguments()) if party.is_source else sync.receive(load=load)
            assert caught.seconds < 5
            if rank.index != victim:
                assert getattr(caught.error, "rank") == victim  # noqa: B009
            del caught  # its frames hold the last bucket, and that its ring
    return held


@fault
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_loader_that_raises_fails_the_sync_everywhere_and_the_next_works(pool: DevicePool, victim: int) -> None:
    for held in pool.group(4).run(fails_in_its_loader, victim, limit_s=90):
        assert held[-1] == held[0], held


def fails_many_times(rank: Rank) -> list[int]:
    """Bytes on the device after a sync, which has one ring, and after nothing but failures."""
    party = Party(rank, FANOUT, plain_items(12, 500))
    with device_session(FANOUT, bucket_bytes=MIB) as sync:
        party.sync(sync, 0)
        held = [journal().live["device_bytes"]]
        for _ in range(12):
            with raises("ValueError", "PeerFailed"):
                if party.is_source:
                    sync.broadcast(party.mine.arguments())
                else:
                    sync.receive(load=raises_at_once if rank.index == 3 else lambda batch: None)
            held.append(journal().live["device_bytes"])
            rank.barrier()
    return held


def raises_at_once(batch: object) -> None:
    raise ValueError("no")


@fault
@leak
def test_failures_in_a_row_hold_no_more_than_one_ring(pool: DevicePool) -> None:
    for held in pool.group(4).run(fails_many_times, limit_s=90):
        assert max(held) == held[0], held


def holds_in_its_loader(rank: Rank, victim: int, timeout_s: float) -> tuple[Failure | None, float]:
    """The victim does not come back from its loader until the others have given up."""
    party = Party(rank, FANOUT, plain_items(12, 500), mode="load")
    with device_session(FANOUT, bucket_bytes=4096, timeout_s=timeout_s) as sync:
        party.sync(sync, 0)
        rank.barrier()
        began = time.monotonic()
        failure = None
        held = False

        def load(batch: list[tuple[str, object]]) -> None:
            nonlocal held
            if rank.index == victim and not held:
                held = True
                rank.hold("stuck")

        try:
            sync.broadcast(party.mine.arguments()) if party.is_source else sync.receive(load=load)
        except fastsync.Error as error:
            failure = Failure.of(error)
        ended = time.monotonic() - began
        rank.mark("ended")
        rank.barrier()
        party.sync(sync, 2)
        return failure, ended


@fault
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_stuck_rank_is_a_timeout_that_names_it_on_every_rank(pool: DevicePool, victim: int) -> None:
    group = pool.group(4)
    running = group.start(holds_in_its_loader, victim, 1.5)
    others = [rank for rank in range(4) if rank != victim]
    for rank in others:
        group.wait_mark(rank, "ended", 15)
    group.release(victim)
    outcomes = running.join(30)
    for rank in range(4):
        failure, seconds = outcomes[rank].result()
        assert failure is not None, f"rank {rank}'s sync succeeded"
        if rank != victim:
            assert "SyncTimeout" in failure.bases, failure.traceback
            assert names_rank(failure.message, victim), f"rank {rank}: {failure.message}"
            assert seconds <= 2 * 1.5 + 2, f"rank {rank} took {seconds:.1f} s"


# --- what it leaves behind --------------------------------------------------------------------------------------------


@leak
def test_a_forked_child_of_a_leader_does_not_end_its_followers_rings(pool: DevicePool) -> None:
    pool.device_group(4).run(syncs_around_a_fork)


def syncs_around_a_fork(rank: Rank) -> None:
    party = Party(rank, FANOUT, plain_items(6))
    with device_session(FANOUT, bucket_bytes=1024) as sync:
        party.sync(sync, 0)
        rank.barrier()
        child = os.fork()
        if child == 0:
            sync.close()
            os._exit(0)
        os.waitpid(child, 0)
        rank.barrier()
        for step in range(1, 4):
            party.sync(sync, step)
