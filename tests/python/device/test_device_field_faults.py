"""Faults that others met in the field and that only a device shows; the numbers are those of ../FIELD_FAULTS.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from device_syncs import (
    ON_DEVICE,
    Item,
    Party,
    Tensors,
    device_session,
    pairs,
    plain_items,
    same_bytes,
    value,
)

from support.devices import DevicePool, View, journal, machine_of, ordinal_of
from support.markers import each_device_transport, each_machine
from support.ranks import Rank, raises, spmd

ROUNDS = 50


# 43: packing did not wait for the stream that makes the weights.
@each_machine
@each_device_transport
@spmd(3, limit_s=120)
def test_weights_that_a_busy_stream_is_still_writing_are_waited_for(rank: Rank, machine: str, transport: str) -> None:
    items = plain_items(3, 700)
    party = Party(rank, transport, items, machine=machine)
    with device_session(transport, bucket_bytes=1024) as sync:
        for step in range(ROUNDS):
            if party.is_source:
                party.mine.fill(step + 1000)  # stale
                party.machine.busy(0.001)
                party.mine.fill(step)
                sync.broadcast(party.mine.arguments())
            else:
                party.mine.poison()
                sync.receive(into=party.mine.arguments())
                party.mine.check(step)


# 43: the same for a caller on a side stream, which waits for the stream that makes the weights.
@each_machine
@each_device_transport
@spmd(2, limit_s=120)
def test_caller_on_a_side_stream_is_waited_for(rank: Rank, machine: str, transport: str) -> None:
    items = plain_items(3, 700)
    device = machine_of(machine, ordinal_of(rank.index, transport))
    side, producer = device.new_stream(), device.new_stream()
    mine = Tensors(device, items, "source" if rank.index == 0 else "destination", side)
    with device_session(transport, bucket_bytes=1024) as sync, device.current(side):
        for step in range(ROUNDS // 2):
            device.busy(0.001, producer)
            if rank.index == 0:
                mine.fill(step, producer)
                device.order(producer, side)
                sync.broadcast(mine.arguments())
            else:
                # What a destination held is overwritten by the sync, not by what was queued before it.
                for item in items:
                    device.write(mine.arrays[item.name], item.destination.poisoned(), producer)  # type: ignore[arg-type]
                device.order(producer, side)
                sync.receive(into=mine.arguments())
                mine.check(step)


# 42: "done" when the transfer was only queued. 44: source freed before its copy was made.
@each_machine
@each_device_transport
@spmd(2, limit_s=120)
def test_sources_may_be_overwritten_and_freed_as_soon_as_the_call_returns(
    rank: Rank, machine: str, transport: str
) -> None:
    party = Party(rank, transport, plain_items(10, 700), machine=machine)
    with device_session(transport, bucket_bytes=2048) as sync:
        for step in range(8):
            if party.is_source:
                party.mine.fill(step)
                sync.broadcast(party.mine.arguments())
                party.mine.fill(step + 1000)
                if step % 2:
                    for array in party.mine.arrays.values():
                        if machine == "double":
                            array.free()
                    party.renew()
            else:
                party.mine.poison()
                sync.receive(into=party.mine.arguments())
                party.mine.check(step)


# 40: a generator that yields one scratch tensor, refilled each time on its stream.
@each_machine
@each_device_transport
@pytest.mark.parametrize("mode", ["into", "stream"])
@spmd(2, limit_s=120)
def test_generator_may_refill_one_scratch_tensor(rank: Rank, machine: str, transport: str, mode: str) -> None:
    items = [Item.of(f"t{i}", "float32", (1024,)) for i in range(50)]
    party = Party(rank, transport, items, mode=mode, machine=machine)
    scratch: Any = party.machine.empty(items[0].source)

    def refilled(step: int) -> Iterator[tuple[str, Any]]:
        for index, item in enumerate(items):
            party.machine.busy(0.0003)
            party.machine.write(scratch, item.source.random(index, step))
            yield item.name, party.machine.argument(scratch)

    with device_session(transport, bucket_bytes=10_000) as sync:
        for step in range(3):
            if party.is_source:
                sync.broadcast(refilled(step))
            else:
                party.sync(sync, step)


# 40: a generator that frees each tensor when it is asked for the next.
@each_device_transport
@spmd(2)
def test_generator_may_free_what_it_yielded(rank: Rank, transport: str) -> None:
    items = plain_items(30, 400)
    party = Party(rank, transport, items)

    def fresh(step: int) -> Iterator[tuple[str, Any]]:
        for index, item in enumerate(items):
            array: Any = party.machine.empty(item.source)
            party.machine.write(array, item.source.random(index, step))
            yield item.name, array
            array.free()

    with device_session(transport, bucket_bytes=4096) as sync:
        for step in range(3):
            sync.broadcast(fresh(step)) if party.is_source else party.sync(sync, step)


# 46: the whole generator pulled before anything is sent.
@each_device_transport
@spmd(2)
def test_generator_is_never_collected_into_a_list(rank: Rank, transport: str) -> None:
    items = [Item.of(f"t{i}", "uint8", (65536,)) for i in range(40)]
    party = Party(rank, transport, items, mode="load")
    most = 0

    def fresh(step: int) -> Iterator[tuple[str, Any]]:
        nonlocal most
        for index, item in enumerate(items):
            array: Any = party.machine.empty(item.source)
            party.machine.write(array, item.source.random(index, step))
            most = max(most, journal().live["device_bytes"])
            yield item.name, array

    with device_session(transport, bucket_bytes=65536) as sync:
        for step in range(2):
            start = journal().live.get("device_bytes", 0)
            sync.broadcast(fresh(step)) if party.is_source else party.sync(sync, step)
            assert most - start <= 8 * 65536 + (1 << 19), f"{most - start} bytes were alive at a time"


# 39: the consumer kept views into the one bucket that is used again.
@each_machine
@each_device_transport
@spmd(2)
def test_streamed_tensors_own_their_memory(rank: Rank, machine: str, transport: str) -> None:
    items = plain_items(24, 300)
    party = Party(rank, transport, items, mode="stream", machine=machine)
    kept: list[tuple[int, list[tuple[str, Any]]]] = []
    with device_session(transport, bucket_bytes=1024) as sync:
        for step in range(3):
            if party.is_source:
                assert party.sync(sync, step).buckets >= 12
            else:
                kept.append((step, list(sync.stream())))
    for step, got in kept:
        assert len(got) == len(items)
        for index, (name, tensor) in enumerate(got):
            party.look(index, name, tensor, step)


# 41: acknowledged when one of several readers was done.
@each_machine
@each_device_transport
@spmd(3, limit_s=120)
def test_slow_reader_holds_its_buckets_back_from_the_source(rank: Rank, machine: str, transport: str) -> None:
    items = plain_items(20, 250)
    party = Party(rank, transport, items, machine=machine)

    def look_late(batch: list[tuple[str, Any]], step: int, done: list[str]) -> None:
        if rank.index == 2 and transport in ON_DEVICE:
            party.machine.busy(0.01)
        for name, tensor in batch:
            party.look(len(done), name, tensor, step)
            done.append(name)

    with device_session(transport, bucket_bytes=1024, buffers=2) as sync:
        for step in range(3):
            done: list[str] = []
            if party.is_source or rank.index == 1:
                party.sync(sync, step)
            else:
                sync.receive(load=lambda batch, step=step, done=done: look_late(batch, step, done))
                assert len(done) == len(items)


# 41: destinations whose stream is busy with the weights of the sync before.
@each_machine
@each_device_transport
@spmd(2, limit_s=120)
def test_destinations_that_are_still_being_read_are_not_overwritten(rank: Rank, machine: str, transport: str) -> None:
    items = plain_items(4, 700)
    party = Party(rank, transport, items, machine=machine)
    copies: Any = None if party.is_source else Tensors(party.machine, items, "destination")
    with device_session(transport, bucket_bytes=1024) as sync:
        party.sync(sync, 0)
        for step in range(1, 12):
            if party.is_source:
                party.sync(sync, step)
                continue
            # An inference step that reads the old weights is queued; the sync must not come before it.
            party.machine.busy(0.003)
            for item in items:
                party.machine.copy_storage(copies.arrays[item.name], party.mine.arrays[item.name])  # type: ignore[arg-type]
            sync.receive(into=party.mine.arguments())
            copies.check(step - 1)
            party.mine.check(step)


# 44: memory given back while queued work still uses it. A loader queues its copies, and keeps nothing.
@each_device_transport
@pytest.mark.parametrize("elements", [200, 3000])
@spmd(2)
def test_loader_may_drop_its_tensors_with_their_copies_still_queued(rank: Rank, transport: str, elements: int) -> None:
    items = plain_items(6, elements)
    party = Party(rank, transport, items, mode="load")
    copies: Any = None if party.is_source else Tensors(party.machine, items, "destination")

    def queue(batch: list[tuple[str, Any]]) -> None:
        party.machine.busy(0.002)
        for name, tensor in batch:
            party.machine.queue_copy(copies.arrays[name], tensor)  # type: ignore[union-attr]

    with device_session(transport, bucket_bytes=1024) as sync:
        for step in range(4):
            if party.is_source:
                party.sync(sync, step)
            else:
                copies.poison()
                sync.receive(load=queue)
                copies.check(step)


# 44: the same where the loader fails while a tensor that spans buckets is being assembled.
@each_device_transport
def test_loader_may_fail_while_a_tensor_is_assembled(pool: DevicePool, transport: str) -> None:
    pool.device_group(2, FASTSYNC_FAKE_DELAY_US=4000).run(fails_with_half_a_tensor, transport)


def fails_with_half_a_tensor(rank: Rank, transport: str) -> None:
    items = plain_items(4, 350)  # of 1.4 buckets: with the end of one comes the beginning of the next
    party = Party(rank, transport, items, mode="load")

    def fail(batch: list[tuple[str, Any]]) -> None:
        raise ValueError("at once")

    with device_session(transport, bucket_bytes=1024) as sync:
        for _ in range(3):
            with raises("ValueError" if rank.index else "PeerFailed", mentions=["at once"]):
                sync.broadcast(party.mine.arguments()) if party.is_source else sync.receive(load=fail)
        party.sync(sync, 7)


# 48: reference counts of shared memory; 1..3 consumers, one closing early. 49: a new stream each call.
@pytest.mark.parametrize("receivers", [1, 2, 3])
def test_shared_rings_are_given_back_when_a_consumer_closes_early(pool: DevicePool, receivers: int) -> None:
    pool.group(receivers + 1).run(consumers_come_and_go, limit_s=60)


def consumers_come_and_go(rank: Rank) -> None:
    party = Party(rank, "ipc", plain_items(8))
    last = rank.size - 1
    sync = device_session("ipc", bucket_bytes=1024)
    seen = []
    for step in range(12):
        party.sync(sync, step)
        if rank.index == last:
            sync.close()  # the others go on with theirs
            sync = device_session("ipc", bucket_bytes=1024)
        live = journal().live
        seen.append({kind: live.get(kind, 0) for kind in ("device_bytes", "memory_import", "event_import", "stream")})
        rank.barrier()
    sync.close()
    assert all(seen[-1][kind] <= seen[4][kind] for kind in seen[-1]), seen


# 79: the new version was published after a failed sync.
@each_device_transport
@spmd(3)
def test_failed_sync_moves_no_version_and_the_next_repairs(rank: Rank, transport: str) -> None:
    party = Party(rank, transport, plain_items(12, 200))

    def load(batch: list[tuple[str, Any]]) -> None:
        calls.append(len(batch))
        if len(calls) == 3:
            raise ValueError("third bucket")

    calls: list[int] = []
    with device_session(transport, bucket_bytes=1024) as sync:
        party.sync(sync, 1)
        if rank.index == 2:
            with raises("ValueError", mentions=["third bucket"]):
                sync.receive(load=load)
        else:
            with raises("PeerFailed", rank=2, mentions=["third bucket"]):
                if party.is_source:
                    party.mine.fill(2)
                    sync.broadcast(party.mine.arguments())
                else:
                    sync.receive(into=party.mine.arguments())
        assert sync.version == 1
        report = party.sync(sync, 3)
        assert not sync.dirty and report.version == 2


# 83: outcome depends on the size of the buckets.
@each_device_transport
@spmd(2)
def test_outcome_does_not_depend_on_the_bucket_size(rank: Rank, transport: str) -> None:
    items = [Item.of("a", "float32", (333, 5), "transposed"), Item.of("b", "int16", (77,)), Item.of("c", "uint8", ())]
    party = Party(rank, transport, items)
    for bucket_bytes in (1, 1000, 4096, 1 << 20, 1 << 40):
        with device_session(transport, bucket_bytes=bucket_bytes) as sync:
            party.sync(sync, 7)


# 73: memory that was pinned by hand and never unpinned.
@spmd(2)
def test_registered_host_memory_is_unregistered(rank: Rank) -> None:
    party = Party(rank, "shm", plain_items(6))
    before = journal().live.get("registration", 0)
    for step in range(6):
        with device_session("shm", bucket_bytes=4096) as sync:
            party.sync(sync, step)
            party.sync(sync, step + 100)
        rank.barrier()
        assert journal().live.get("registration", 0) <= before, f"after {step + 1} sessions"


# 71: memory that cannot be exported (expandable segments). What is exported is fastsync's own ring, never the caller's.
@spmd(2)
def test_callers_memory_is_never_exported(rank: Rank) -> None:
    party = Party(rank, "ipc", plain_items(20))
    before = journal()
    with device_session("ipc", bucket_bytes=1024) as sync:
        for step in range(3):
            party.sync(sync, step)
    calls = journal().calls_since(before)
    assert calls.get("cuIpcGetMemHandle", 0) == (1 if party.is_source else 0)
    assert calls.get("cuIpcOpenMemHandle_v2", 0) == (0 if party.is_source else 1)


# 32: values under the wrong names. Many tensors of one shape, destinations in another order.
@each_device_transport
@spmd(2)
def test_each_name_gets_its_own_value(rank: Rank, transport: str) -> None:
    items = [Item.of(f"t{i}", "float32", (64,)) for i in range(100)]
    party = Party(rank, transport, items)
    with device_session(transport, bucket_bytes=2048) as sync:
        for step in range(2):
            if party.is_source:
                party.sync(sync, step)
            else:
                party.mine.poison()
                backwards = dict(reversed(list(pairs(party.mine.arguments()))))
                sync.receive(into=backwards)
                party.mine.check(step)
    view = View("float32", (64,))
    same_bytes("t3", value(3, items[3], 1), view.logical(view.random(3, 1)))
