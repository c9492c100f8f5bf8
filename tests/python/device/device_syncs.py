"""What the device tests send: tensors of every awkward kind, and one sync in which every byte is compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import fastsync
from support.devices import Machine, View, machine_of, ordinal_of
from support.ranks import Rank
from support.tensors import POISON, bytes_of, poisoned, storage_bytes

TIMEOUT_S = 20.0
ON_DEVICE = ("ipc", "nccl", "nccl+ipc")  # where buckets, and so what loaders are given, lie on the device


@dataclass(frozen=True)
class Item:
    """A tensor of the sync: how it lies at the source, and at destinations."""

    name: str
    source: View
    destination: View

    @classmethod
    def of(
        cls, name: str, dtype: str, shape: tuple[int, ...], source: str = "plain", destination: str = "plain"
    ) -> Item:
        return cls(name, View(dtype, shape, source), View(dtype, shape, destination))


def plain_items(count: int, elements: int = 300, dtype: str = "float32") -> list[Item]:
    return [Item.of(f"t{i}", dtype, (elements + i,)) for i in range(count)]


def odd_items(any_alignment: bool = True) -> list[Item]:
    """Every item size from 1 to 16, every layout on either side, empty, 0-dim, larger than a bucket."""
    items = [
        Item.of("empty.first", "float32", (0,)),
        Item.of("scalar", "float64", ()),
        Item.of("one byte", "uint8", (1,)),
        Item.of("large", "uint8", (70_001,)),
        Item.of("large.strided", "float32", (93, 71), "transposed", "gappy"),
        Item.of("empty.middle", "int64", (3, 0, 2)),
        Item.of("large.complex", "complex128", (600,), "gappy", "plain"),
        Item.of("many dims", "int16", (2, 3, 1, 4, 2, 3), "transposed", "plain"),
        Item.of("many dims back", "int16", (2, 3, 1, 4, 2, 3), "plain", "transposed"),
    ]
    dtypes = ("uint8", "bfloat16", "float32", "complex64", "complex128")
    for dtype in dtypes:
        for source in ("plain", "element", "shifted", "transposed", "gappy", "reversed", "expanded"):
            for destination in ("plain", "shifted", "transposed", "reversed"):
                if source == "plain" or destination == "plain" or dtype == "float32":
                    items.append(Item.of(f"{dtype}.{source}.{destination}", dtype, (5, 7, 3), source, destination))
    items += [Item.of(f"scalar.{dtype}", dtype, (), "shifted" if any_alignment else "plain") for dtype in dtypes]
    items.append(Item.of("empty.last", "uint8", (4, 0)))
    if any_alignment:
        return items
    # torch has no tensors at odd addresses and no negative strides.
    return [item for item in items if not {item.source.layout, item.destination.layout} & {"shifted", "reversed"}]


class Tensors:
    """One side's tensors of some items."""

    def __init__(self, machine: Machine, items: Sequence[Item], side: str, stream: int | None = None) -> None:
        self.machine, self.items, self.side = machine, items, side
        self.arrays = {item.name: machine.empty(self.view(item), stream) for item in items}

    def view(self, item: Item) -> View:
        return item.source if self.side == "source" else item.destination

    def arguments(self) -> dict[str, Any]:
        return {name: self.machine.argument(array) for name, array in self.arrays.items()}  # type: ignore[arg-type]

    def fill(self, step: int, stream: int | None = None) -> None:
        """Queues the values of `step`; does not wait for them."""
        for index, item in enumerate(self.items):
            self.machine.write(self.arrays[item.name], self.view(item).random(index, step), stream)  # type: ignore[arg-type]

    def poison(self) -> None:
        for item in self.items:
            self.machine.write(self.arrays[item.name], self.view(item).poisoned())  # type: ignore[arg-type]

    def check(self, step: int, only: Sequence[str] | None = None) -> None:
        """Every byte of every storage: the values of `step` in the elements, and around them what was there before."""
        for index, item in enumerate(self.items):
            if only is not None and item.name not in only:
                continue
            got = self.machine.read(self.arrays[item.name])  # type: ignore[arg-type]
            want = item.destination.image(value(index, item, step), item.destination.poisoned())
            same_bytes(item.name, got, want)


def value(index: int, item: Item, step: int) -> bytes:
    return item.source.logical(item.source.random(index, step))


def same_bytes(name: str, got: bytes | np.ndarray, want: bytes | np.ndarray) -> None:
    one, two = np.frombuffer(bytes(got), np.uint8), np.frombuffer(bytes(want), np.uint8)
    assert one.size == two.size, f"{name}: {one.size} bytes, not {two.size}"
    differ = np.flatnonzero(one != two)
    assert differ.size == 0, (
        f"{name}: {differ.size} of {two.size} bytes differ, the first at {differ[0]}: {one[differ[0]]:#x}, not "
        f"{two[differ[0]]:#x}"
    )


class HostTensors:
    """Destinations in CPU memory, for transports that deliver there."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.tensors = {i.name: poisoned(i.source.shape, getattr(torch, i.source.dtype)) for i in items}

    def arguments(self) -> dict[str, Any]:
        return self.tensors

    def poison(self) -> None:
        for tensor in self.tensors.values():
            storage_bytes(tensor)[:] = POISON

    def check(self, step: int) -> None:
        for index, item in enumerate(self.items):
            same_bytes(item.name, bytes_of(self.tensors[item.name]), value(index, item, step))


def pairs(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from arguments.items()


class Party:
    """This rank's part in a series of syncs: its tensors, kept from one to the next, and how it takes part."""

    def __init__(
        self,
        rank: Rank,
        transport: str,
        items: Sequence[Item],
        *,
        mode: str = "into",
        source: str = "mapping",
        src: int = 0,
        machine: str = "double",
        stream: int | None = None,
    ) -> None:
        self.rank, self.transport, self.items = rank, transport, items
        self.mode, self.source, self.src = mode, source, src
        self.machine = machine_of(machine, ordinal_of(rank.index, transport))
        self.stream = stream
        self.is_source = rank.index == src
        self.renew()

    def renew(self) -> None:
        """New tensors at new addresses."""
        self.mine: Any
        if self.is_source:
            self.mine = Tensors(self.machine, self.items, "source", self.stream)
        elif self.mode != "into":
            self.mine = None
        elif self.transport == "shm":
            self.mine = HostTensors(self.items)
        else:
            self.mine = Tensors(self.machine, self.items, "destination", self.stream)

    def sync(self, sync: fastsync.WeightSync, step: int, version: int | None = None) -> fastsync.SyncReport:
        """One sync of the values of `step`; everything that arrived is compared."""
        self.machine.enter()  # loaders are given tensors on the thread's current device
        if self.is_source:
            self.mine.fill(step)
        elif self.mine is not None:
            self.mine.poison()
        self.before_call()
        if self.is_source:
            arguments = self.mine.arguments()
            report = sync.broadcast(pairs(arguments) if self.source == "generator" else arguments, version=version)
        elif self.mode == "into":
            report = sync.receive(into=self.mine.arguments())
            self.mine.check(step)
        else:
            report = self._take(sync, step)
        assert report.tensors == len(self.items)
        assert report.nbytes == sum(item.source.nbytes for item in self.items)
        assert report.transport == self.transport
        return report

    def before_call(self) -> None:
        """For tests that count: everything is prepared, and fastsync's call comes next."""

    def _take(self, sync: fastsync.WeightSync, step: int) -> fastsync.SyncReport:
        names: list[str] = []

        def look(name: str, tensor: Any) -> None:
            index = len(names)
            assert index < len(self.items), f"{name} is one too many"
            names.append(name)
            self.look(index, name, tensor, step)

        if self.mode == "load":
            sync.receive(load=lambda batch: [look(name, tensor) for name, tensor in batch])
        elif self.mode == "borrow":
            for name, tensor in sync.stream(borrow=True):
                look(name, tensor)
        else:
            for name, tensor in list(sync.stream()):  # they own their memory: looked at when all have come
                look(name, tensor)
        assert names == [item.name for item in self.items]
        assert sync.report is not None
        return sync.report

    def look(self, index: int, name: str, tensor: Any, step: int) -> None:
        item = self.items[index]
        assert name == item.name
        assert tuple(tensor.shape) == item.source.shape, f"{name}: {tuple(tensor.shape)}"
        dtype = getattr(tensor.dtype, "name", None) or str(tensor.dtype).removeprefix("torch.")
        assert dtype == item.source.dtype, f"{name}: {dtype}"
        if math.prod(item.source.shape):
            assert self.machine.is_mine(tensor) == (self.transport in ON_DEVICE), f"{name} lies elsewhere"
        same_bytes(name, self.machine.value(tensor), value(index, item, step))


def device_session(transport: str, src: int = 0, **options: Any) -> fastsync.WeightSync:
    """A session of that transport; "nccl+ipc" is what "nccl" becomes where ranks share devices."""
    options.setdefault("timeout_s", TIMEOUT_S)
    transport = "nccl" if transport == "nccl+ipc" else transport
    return fastsync.WeightSync(src=src, transport=transport, **options)
