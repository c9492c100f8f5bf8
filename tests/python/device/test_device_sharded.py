"""src="sharded" over every transport of device tensors: two trainers, and receivers of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from device_syncs import HostTensors, Item, Tensors, odd_items, plain_items, same_bytes, value

import fastsync
from support.devices import DevicePool, machine_of
from support.markers import each_mode
from support.ranks import Rank, raises, spmd

each_carrier = pytest.mark.parametrize("transport", ["ipc", "nccl", "nccl+ipc", "gloo", "shm"])
# Where the ranks are: in the fan-out one trainer's share stays on its device, the other's crosses to a leader there.
PLACES = {"ipc": (0, 0, 0, 0), "nccl+ipc": (0, 1, 0, 0)}
TRAINERS = 2


class Side:
    """This rank's tensors, and its part in a sync."""

    def __init__(self, rank: Rank, transport: str, items: Sequence[Item], mode: str) -> None:
        self.rank, self.items, self.mode, self.transport = rank, items, mode, transport
        self.machine = machine_of("double", PLACES.get(transport, range(4))[rank.index])
        self.trains = rank.index < TRAINERS
        self.mine: Any = None
        if self.trains:
            self.mine = Tensors(self.machine, items, "source")
        elif mode == "into":
            self.mine = HostTensors(items) if transport == "shm" else Tensors(self.machine, items, "destination")

    def sync(self, sync: fastsync.WeightSync, step: int) -> fastsync.SyncReport:
        self.machine.enter()
        if self.trains:
            self.mine.fill(step)
            report = sync.broadcast(self.mine.arguments())
        elif self.mode == "into":
            self.mine.poison()
            report = sync.receive(into=self.mine.arguments())
            self.mine.check(step)
        else:
            report = self._take(sync, step)
        assert report.tensors == len(self.items)
        assert report.nbytes == sum(item.source.nbytes for item in self.items)
        assert report.transport == self.transport
        return report

    def _take(self, sync: fastsync.WeightSync, step: int) -> fastsync.SyncReport:
        position = {item.name: i for i, item in enumerate(self.items)}

        def look(name: str, tensor: Any) -> None:
            i = position.pop(name)
            same_bytes(name, self.machine.value(tensor), value(i, self.items[i], step))

        if self.mode == "load":
            sync.receive(load=lambda batch: [look(name, tensor) for name, tensor in batch])
        elif self.mode == "borrow":
            for name, tensor in sync.stream(borrow=True):
                look(name, tensor)
        else:
            for name, tensor in list(sync.stream()):
                look(name, tensor)
        assert not position, f"{list(position)} did not come"
        assert sync.report is not None
        return sync.report


def sharded(transport: str, **options: Any) -> fastsync.WeightSync:
    transport = "nccl" if transport == "nccl+ipc" else transport
    return fastsync.WeightSync(src="sharded", transport=transport, timeout_s=20.0, **options)


@each_carrier
@each_mode
@spmd(4)
def test_every_kind_of_tensor_arrives_byte_for_byte(rank: Rank, transport: str, mode: str) -> None:
    side = Side(rank, transport, odd_items(any_alignment=True)[::2], mode)
    with sharded(transport, bucket_bytes=8192) as sync:
        for step in range(3):
            assert side.sync(sync, step).plan_reused == (step > 0)


MODES = ("into", "load", "stream", "borrow")


@each_carrier
@spmd(4)
def test_receivers_in_different_modes_take_the_shares_in_one_order(rank: Rank, transport: str) -> None:
    # Tensors of many buckets make those come in which no tensor becomes whole.
    items = [Item.of(f"wide.{i}", "float32", (700 + 13 * i,)) for i in range(9)]
    for first in range(4):
        side = Side(rank, transport, items, MODES[(first + rank.index) % 4])
        with sharded(transport, bucket_bytes=1024, buffers=1 + first % 2) as sync:
            for step in range(2):
                side.sync(sync, step)


def failing_syncs(rank: Rank, transport: str) -> None:
    side = Side(rank, transport, plain_items(24), "load")
    with sharded(transport, bucket_bytes=2048) as sync:
        side.sync(sync, 1)
        for _ in range(2):
            if rank.index == 3:
                side.machine.enter()
                calls: list[int] = []

                def load(batch: list[tuple[str, Any]], calls: list[int] = calls) -> None:
                    for (
                        _,
                        tensor,
                    ) in batch:  # the double wants a stream to have ended before memory that it uses is freed
                        side.machine.value(tensor)
                    calls.append(1)
                    if len(calls) == 5:
                        raise ValueError("enough")

                with raises("ValueError"):
                    sync.receive(load=load)
            else:
                with raises("PeerFailed", rank=3, mentions=["enough"]) as caught:
                    side.sync(sync, 2)
                assert caught.seconds < 5.0
            for step in (3, 4):
                side.sync(sync, step)
        assert sync.version == 5


@each_carrier
def test_a_failed_sync_leaves_the_next_ones_good(pool: DevicePool, transport: str) -> None:
    pool.group(4).run(failing_syncs, transport)


@spmd(4)
def test_auto_chooses_once_for_all_ranks(rank: Rank) -> None:
    side = Side(rank, "nccl", plain_items(6), "into")
    with sharded("auto") as sync:
        report = side.sync(sync, 1)
        assert report.transport == "nccl"
        if rank.index == 0:
            assert "ipc" in report.transport_reason
