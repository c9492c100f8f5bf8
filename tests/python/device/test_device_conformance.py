"""Device tensors through every transport, into every kind of receiver: each byte that arrives is compared."""

from __future__ import annotations

import pytest
import torch
from device_syncs import HostTensors, Item, Party, Tensors, device_session, odd_items, plain_items

import fastsync
from support.devices import DevicePool, journal, machine_of
from support.markers import each_device_transport, each_machine, each_mode
from support.ranks import Rank, raises, spmd

each_carrier = pytest.mark.parametrize("transport", ["ipc", "nccl", "gloo", "shm"])
# Ranks 0 and 1 share a device, ranks 2 and 3 another one: with three ranks the source has a follower and there is one
# rank elsewhere; with four that one has a follower, too.
each_carrier_of_three = pytest.mark.parametrize("transport", ["ipc", "nccl", "nccl+ipc", "gloo", "shm"])
each_source = pytest.mark.parametrize("source", ["mapping", "generator"])


@each_machine
@each_carrier_of_three
@each_source
@each_mode
@spmd(3)
def test_every_kind_of_tensor_arrives_byte_for_byte(
    rank: Rank, machine: str, transport: str, source: str, mode: str
) -> None:
    items = odd_items(any_alignment=machine == "double")
    party = Party(rank, transport, items, mode=mode, source=source, machine=machine)
    with device_session(transport, bucket_bytes=8192) as sync:
        for step in range(3):
            report = party.sync(sync, step)
            assert report.plan_reused == (step > 0)
            assert report.buckets >= 10


def few_syncs(rank: Rank, transport: str, mode: str, source: str = "mapping", src: int = 0, **options: object) -> None:
    party = Party(rank, transport, odd_items()[::5], mode=mode, source=source, src=src)
    with device_session(transport, src, **options) as sync:
        for step in range(3):
            party.sync(sync, step)


@each_carrier
@pytest.mark.parametrize(("receivers", "buffers"), [(1, 1), (1, 4), (2, 2), (2, 3), (3, 1), (3, 4)])
def test_any_number_of_receivers_and_buffers(pool: DevicePool, transport: str, receivers: int, buffers: int) -> None:
    mode, source = [("into", "mapping"), ("stream", "generator"), ("borrow", "mapping"), ("load", "mapping")][
        buffers - 1
    ]
    pool.group(receivers + 1).run(few_syncs, transport, mode, source, buffers=buffers, bucket_bytes=4096)


@each_carrier
@each_mode
@spmd(2)
def test_smallest_buckets_carry_the_same(rank: Rank, transport: str, mode: str) -> None:
    # A bucket of 256 bytes: every tensor but the smallest spans several, and there are more buckets than anything queues.
    items = [Item.of("wide", "float32", (300, 5), "transposed", "gappy"), *odd_items()[9:40:3]]
    party = Party(rank, transport, items, mode=mode)
    with device_session(transport, bucket_bytes=1) as sync:
        for step in range(2):
            report = party.sync(sync, step)
            assert report.bucket_bytes == 256 and report.buckets > 30


def long_syncs(rank: Rank) -> None:
    items = [Item.of("long", "uint8", (2100 * 256 + 13,))]
    for transport, mode in (("nccl", "into"), ("ipc", "load")):
        party = Party(rank, transport, items, mode=mode)
        with device_session(transport, bucket_bytes=256) as sync:
            assert party.sync(sync, 1).buckets == 2101


def test_more_buckets_than_checksums_fit_on_the_device(pool: DevicePool) -> None:
    pool.device_group(2, FASTSYNC_FAKE_DELAY_US=0).run(long_syncs)


@each_carrier
@pytest.mark.parametrize("source", ["mapping", "generator"])
@pytest.mark.parametrize("mode", ["into", "load"])
@spmd(2)
def test_without_verification_the_same_bytes_arrive(rank: Rank, transport: str, source: str, mode: str) -> None:
    few_syncs(rank, transport, mode, source, verify=False, bucket_bytes=2048)


@each_device_transport
@spmd(3)
def test_source_need_not_be_rank_0(rank: Rank, transport: str) -> None:
    few_syncs(rank, transport, "into", src=2, bucket_bytes=4096)
    few_syncs(rank, transport, "stream", "generator", src=1, bucket_bytes=4096)


@each_machine
@each_device_transport
@spmd(2)
def test_tensors_may_be_replaced_between_syncs(rank: Rank, machine: str, transport: str) -> None:
    # The tables of addresses that a plan keeps on the device must follow the tensors.
    items = odd_items(any_alignment=machine == "double")[::4]
    party = Party(rank, transport, items, machine=machine)
    with device_session(transport, bucket_bytes=4096) as sync:
        for step in range(6):
            if step in (2, 4) or (step == 3 and rank.index == 1):
                keep = party.mine  # so that no address is taken again
                party.renew()
                del keep
            assert party.sync(sync, step).plan_reused == (step > 0)


@each_device_transport
@spmd(2)
def test_one_replaced_tensor_is_noticed(rank: Rank, transport: str) -> None:
    items = plain_items(8)
    party = Party(rank, transport, items)
    with device_session(transport, bucket_bytes=1024) as sync:
        for step in range(5):
            name = f"t{step}"
            party.mine.arrays[name] = party.machine.empty(party.mine.view(items[step]))
            party.sync(sync, step)


@each_device_transport
@spmd(2)
def test_other_tensors_under_other_names_make_a_new_plan(rank: Rank, transport: str) -> None:
    one, two = Party(rank, transport, plain_items(6)), Party(rank, transport, odd_items()[::6])
    with device_session(transport, bucket_bytes=2048) as sync:
        for step in range(6):
            party = one if step % 2 else two
            assert party.sync(sync, step).plan_reused == (step > 1)


@spmd(3)
def test_bucket_size_and_transport_change_between_syncs(rank: Rank) -> None:
    items = odd_items()[::6]
    parties = {transport: Party(rank, transport, items) for transport in ("ipc", "nccl", "gloo", "shm")}
    choices = [
        *[("ipc", 4096), ("nccl", 4096), ("ipc", 4096), ("gloo", 1024), ("ipc", 512), ("shm", 512), ("nccl", 8192)],
        *[("nccl", 1024), ("ipc", 65536), ("gloo", 1024), ("shm", 4096), ("ipc", 4096)],
    ]
    for step, (transport, bucket_bytes) in enumerate(choices):
        party = parties[transport]
        options = {"transport": transport, "bucket_bytes": bucket_bytes, "timeout_s": 20.0}
        if rank.index == 0:
            party.mine.fill(step)
        else:
            party.mine.poison()
        report = fastsync.broadcast_bucketed(party.mine.arguments(), **options)
        assert (report.transport, report.version) == (transport, step + 1)
        if rank.index:
            party.mine.check(step)
    fastsync.close()


@each_device_transport
@spmd(3)
def test_ranks_may_receive_in_different_ways(rank: Rank, transport: str) -> None:
    for shift in range(4):
        mode = ("into", "load", "stream", "borrow")[(rank.index + shift) % 4]
        few_syncs(rank, transport, mode, bucket_bytes=4096)


# Where the ranks' tensors lie (a device's ordinal, or None for the CPU), and the transport that reaches all of them.
AUTO = [
    ((0, 0, 0), "ipc"),
    ((0, 1, 2), "nccl"),
    ((0, None, None), "shm"),
    ((0, 0, 1), "nccl+ipc"),
    ((1, 0, 0), "nccl+ipc"),
    ((0, 1, None), "gloo"),
    ((None, None, None), "shm"),
    ((None, 1, 1), "gloo"),
]


@pytest.mark.parametrize(("places", "transport"), AUTO)
@spmd(3)
def test_auto_takes_the_first_transport_that_reaches_every_rank(
    rank: Rank, places: tuple[int | None, ...], transport: str
) -> None:
    items = plain_items(5)
    place = places[rank.index]
    mine: HostTensors | Tensors
    if place is None:
        mine = HostTensors(items)
    else:
        mine = Tensors(machine_of("double", place), items, "source" if rank.index == 0 else "destination")
    with device_session("auto", bucket_bytes=1024) as sync:
        for step in range(2):
            if rank.index == 0 and place is None:
                mine.tensors = {
                    item.name: torch.frombuffer(bytearray(item.source.random(i, step)), dtype=torch.uint8)[
                        : item.source.nbytes
                    ].view(torch.float32)
                    for i, item in enumerate(items)
                }
            elif rank.index == 0:
                mine.fill(step)
            else:
                mine.poison()
            report = sync.broadcast(mine.arguments()) if rank.index == 0 else sync.receive(into=mine.arguments())
            assert report.transport == transport
            if rank.index:
                mine.check(step)


@pytest.mark.parametrize("seed", [2, 3])
@each_device_transport
def test_bytes_do_not_depend_on_how_streams_are_delayed(pool: DevicePool, transport: str, seed: int) -> None:
    group = pool.device_group(3, FASTSYNC_FAKE_SEED=seed, FASTSYNC_FAKE_DELAY_US=2000)
    group.run(few_syncs, transport, "into", bucket_bytes=16384)
    group.run(few_syncs, transport, "stream", "generator", bucket_bytes=16384)
    group.run(few_syncs, transport, "borrow", bucket_bytes=16384)


@pytest.mark.parametrize("defer", ["never", "always"])
def test_calls_of_nccl_that_stay_in_progress_are_waited_for(pool: DevicePool, defer: str) -> None:
    group = pool.device_group(3, FASTSYNC_FAKE_NCCL_DEFER=defer, FASTSYNC_FAKE_NCCL_CHUNK_DELAY_US=500)
    group.run(few_syncs, "nccl", "into", bucket_bytes=16384)
    group.run(few_syncs, "nccl", "load", "generator", bucket_bytes=16384)


def test_memory_may_be_shared_by_descriptor(pool: DevicePool) -> None:
    group = pool.device_group(3, FASTSYNC_IPC="vmm")
    group.run(few_syncs, "ipc", "into", bucket_bytes=8192)
    group.run(few_syncs, "ipc", "borrow", "generator", bucket_bytes=8192)


@each_device_transport
@pytest.mark.parametrize("stream", [1, 2])
@spmd(2)
def test_default_streams_are_ordered_too(rank: Rank, transport: str, stream: int) -> None:
    """1 is the legacy default stream, 2 the calling thread's, as the array interface names them."""
    party = Party(rank, transport, odd_items()[::6], stream=stream)
    with device_session(transport, bucket_bytes=4096) as sync:
        for step in range(3):
            party.sync(sync, step)


@each_device_transport
@spmd(2)
def test_lenient_sync_writes_only_what_both_sides_have(rank: Rank, transport: str) -> None:
    items = plain_items(10)
    party = Party(rank, transport, items)
    with device_session(transport, bucket_bytes=1024, strict=False) as sync:
        for step in range(2):
            if rank.index == 0:
                party.mine.fill(step)
                sent = party.mine.arguments()
                del sent["t3"]
                report = sync.broadcast(sent)
            else:
                party.mine.poison()
                into = party.mine.arguments()
                del into["t6"]
                report = sync.receive(into=into)
                party.mine.check(step, only=[f"t{i}" for i in range(10) if i not in (3, 6)])
                for name in ("t3", "t6"):
                    assert set(party.machine.read(party.mine.arrays[name]).tolist()) == {0xA5}
            assert (report.missing, report.unexpected) == (["t3"], ["t6"])


@each_device_transport
@spmd(2)
def test_nothing_to_send_is_a_sync_that_commits(rank: Rank, transport: str) -> None:
    items = [Item.of("empty", "float32", (0, 4))]
    with device_session(transport) as sync:
        for params in ([], items, plain_items(2)):
            party = Party(rank, transport, params)
            party.sync(sync, 0)


@each_device_transport
@spmd(3)
def test_mismatch_is_refused_before_anything_is_written(rank: Rank, transport: str) -> None:
    items = plain_items(6)
    party = Party(rank, transport, items)
    with device_session(transport, bucket_bytes=1024) as sync:
        for _ in range(2):
            into = party.mine.arguments()
            if rank.index == 2:
                into["t4"] = party.machine.empty(Item.of("t4", "float32", (7, 7)).destination)
            if rank.index:
                party.mine.poison()
            with raises("ManifestMismatch", mentions=["t4"]):
                sync.broadcast(into) if rank.index == 0 else sync.receive(into=into)
            assert not sync.dirty
            if rank.index:
                for item in items:
                    assert set(party.machine.read(party.mine.arrays[item.name]).tolist()) == {0xA5}
        party.sync(sync, 5)


@spmd(2)
def test_report_counts_staging_on_the_device(rank: Rank) -> None:
    for transport in ("ipc", "nccl"):
        for buffers in (1, 2, 4):
            party = Party(rank, transport, [Item.of("w", "uint8", (1 << 20,))])
            with device_session(transport, bucket_bytes=65536, buffers=buffers) as sync:
                report = party.sync(sync, 0)
                assert buffers * 65536 <= report.peak_staging_bytes <= buffers * 65536 + (1 << 20)
    assert not journal().violations
