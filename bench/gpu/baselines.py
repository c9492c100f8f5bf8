"""What fastsync is compared with: weight transfer as RL engines do it, in torch alone, on the same tensors.

Written from descriptions of those engines. Where one of them does something slow that has nothing to do with the way it
moves bytes (buffers made anew for every sync, pickled metadata for every tensor, a Python loop where torch has a fused
one), the peer here does not do it: the comparison is with the method at its best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing  # teaches connections to send shared tensors

from bench.gpu.device import HostModel
from bench.gpu.meter import Peer
from bench.gpu.ranks import Rank

_ALIGN = 16  # so that every view may be copied by vectors


@dataclass(frozen=True)
class Cut:
    """A bucket: which pieces of which flat tensors lie in it, one behind the other."""

    pieces: list[torch.Tensor]
    offsets: list[int]
    used_bytes: int

    def views(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        return [bucket[o : o + p.numel()] for o, p in zip(self.offsets, self.pieces)]


def cut(flats: Sequence[torch.Tensor], bucket_bytes: int) -> list[Cut]:
    """In order; what does not fit into the rest of a bucket starts the next one, what is larger than a bucket is cut."""
    cuts: list[Cut] = []
    pieces: list[torch.Tensor] = []
    offsets: list[int] = []
    used = 0
    for flat in flats:
        for start in range(0, flat.numel(), bucket_bytes):
            piece = flat[start : start + bucket_bytes]
            at = -(-used // _ALIGN) * _ALIGN
            if pieces and at + piece.numel() > bucket_bytes:
                cuts.append(Cut(pieces, offsets, used))
                pieces, offsets, at = [], [], 0
            pieces.append(piece)
            offsets.append(at)
            used = at + piece.numel()
    if pieces:
        cuts.append(Cut(pieces, offsets, used))
    return cuts


class TorchBucketed(Peer):
    """verl's checkpoint engine: two flat buffers, one being filled or emptied while the other is broadcast.

    Filled and emptied by torch._foreach_copy_ through views that are made once; ordered by streams, where that engine
    synchronises the device.
    """

    def __init__(self, rank: Rank, model: HostModel, group: Any, dist: Any, bucket_bytes: int) -> None:
        self.rank, self.group, self.dist = rank, group, dist
        self.cuts = cut(model.flats, bucket_bytes)
        self.bucket_bytes = bucket_bytes
        self.torch_device = rank.device.torch_device

    def open(self) -> None:
        self.buffers = [torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self.torch_device) for _ in range(2)]
        self.views = [c.views(self.buffers[i % 2]) for i, c in enumerate(self.cuts)]

    def _broadcast(self, number: int) -> Any:
        bucket = self.buffers[number % 2][: self.cuts[number].used_bytes]
        return self.dist.broadcast(bucket, src=0, group=self.group, async_op=True)

    def sync(self) -> None:
        if self.rank.is_source:
            running: list[Any] = [None, None]
            for number, bucket in enumerate(self.cuts):
                if running[number % 2] is not None:
                    running[number % 2].wait()
                torch._foreach_copy_(self.views[number], bucket.pieces)
                running[number % 2] = self._broadcast(number)
            for work in running:
                if work is not None:
                    work.wait()
            return
        arriving = self._broadcast(0)
        for number, bucket in enumerate(self.cuts):
            # The other buffer has been emptied by now, or will be before the broadcast begins: same stream.
            following = self._broadcast(number + 1) if number + 1 < len(self.cuts) else None
            arriving.wait()
            torch._foreach_copy_(bucket.pieces, self.views[number])
            arriving = following

    def close(self) -> None:
        del self.buffers, self.views


class VllmPacked(Peer):
    """vLLM's packed broadcast: torch.cat of a bucket, broadcast, and split, on one stream for each of two slots.

    A bucket is closed by the tensor that makes it too large, so it may exceed its size by one tensor. The receiver makes
    a tensor for every bucket, as that engine does, and copies it to the destinations one by one, as a loader does.
    """

    def __init__(self, rank: Rank, model: HostModel, group: Any, dist: Any, bucket_bytes: int) -> None:
        self.rank, self.group, self.dist = rank, group, dist
        self.buckets: list[list[torch.Tensor]] = [[]]
        used = 0
        for flat in model.flats:
            self.buckets[-1].append(flat)
            used += flat.numel()
            if used > bucket_bytes:
                self.buckets.append([])
                used = 0
        self.buckets = [bucket for bucket in self.buckets if bucket]
        self.sizes = [[flat.numel() for flat in bucket] for bucket in self.buckets]

    def open(self) -> None:
        self.streams = [self.rank.device.side_stream() for _ in range(2)]

    def sync(self) -> None:
        device = self.rank.device
        caller = device.current_stream()
        for stream in self.streams:
            stream.wait_stream(caller)
        for number, (bucket, sizes) in enumerate(zip(self.buckets, self.sizes)):
            stream = self.streams[number % 2]
            stream.synchronize()  # the slot's last bucket is through
            with device.on_stream(stream):
                if self.rank.is_source:
                    self.dist.broadcast(torch.cat(bucket), src=0, group=self.group)
                    continue
                packed = torch.empty(sum(sizes), dtype=torch.uint8, device=device.torch_device)
                self.dist.broadcast(packed, src=0, group=self.group)
                for destination, arrived in zip(bucket, packed.split(sizes)):
                    destination.copy_(arrived)
        for stream in self.streams:
            caller.wait_stream(stream)


class TorchIpc(Peer):
    """verl's and vLLM's colocated path: one bucket exported by torch's CUDA IPC, filled, announced, emptied, acknowledged.

    The device is synchronised before each announcement and each acknowledgement, which is all that orders the two
    processes. Kept for all syncs, where those engines export a bucket anew for each; filled and emptied by
    torch._foreach_copy_, where they loop.
    """

    def __init__(self, rank: Rank, model: HostModel, bucket_bytes: int) -> None:
        self.rank = rank
        self.cuts = cut(model.flats, bucket_bytes)
        self.bucket_bytes = bucket_bytes

    def open(self) -> None:
        device, link = self.rank.device, self.rank.link
        if self.rank.is_source:
            self.bucket = torch.empty(self.bucket_bytes, dtype=torch.uint8, device=device.torch_device)
            if device.is_double:
                self.bucket.share_memory_()
            link.send(self.bucket)
        else:
            self.bucket = link.recv()
        self.views = [c.views(self.bucket) for c in self.cuts]

    def sync(self) -> None:
        device, link = self.rank.device, self.rank.link
        for views, bucket in zip(self.views, self.cuts):
            if self.rank.is_source:
                torch._foreach_copy_(views, bucket.pieces)
                device.synchronize_torch()
                link.send_bytes(b"filled")
                link.recv_bytes()
            else:
                link.recv_bytes()
                torch._foreach_copy_(bucket.pieces, views)
                device.synchronize_torch()
                link.send_bytes(b"emptied")

    def close(self) -> None:
        # The exporter's memory must outlive the importer's use of it.
        if self.rank.is_source:
            self.rank.link.recv_bytes()
            del self.views, self.bucket
        else:
            del self.views, self.bucket
            self.rank.link.send_bytes(b"let go")
