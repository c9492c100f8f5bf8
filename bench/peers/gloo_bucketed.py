"""A bucketed, double-buffered Gloo broadcast that works the way verl's NCCL checkpoint engine does.

Written from a description of that engine. Kept from it: tensors are cut into chunks of at most a bucket; a chunk that
does not fit into what is left starts the next bucket; one bucket is filled while the one before is in flight; each
bucket's metadata is a pickled dict that travels beside it, first; only the used bytes are broadcast.

Changed, always in this peer's favour: buffers are made once instead of every step; metadata goes through a pipe (no
ZMQ); a chunk of a tensor larger than a bucket is copied straight to its destination, where that engine first assembles
the whole tensor; tensors go into the destination by one copy_ with a looked-up view.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.peers.base import Options, Peer, RankContext


@dataclass(frozen=True)
class ChunkMeta:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk_offset: int
    chunk_size: int
    offset: int  # in the bucket


class GlooBucketed(Peer):
    kind = "gloo_bucketed"

    def __init__(self, ctx: RankContext, options: Options) -> None:
        super().__init__(ctx, options)
        self.bucket_bytes = int(options["bucket_bytes"])
        self.buffers: list[torch.Tensor] = []
        self.destinations: dict[str, torch.Tensor] = {}

    def open(self) -> None:
        self.buffers = [torch.empty(self.bucket_bytes, dtype=torch.uint8) for _ in range(2)]
        if not self.ctx.is_source:
            self.destinations = {s.name: f for s, f in zip(self.ctx.specs, self.ctx.flats)}

    def sync(self) -> None:
        if self.ctx.is_source:
            self._send()
        else:
            self._receive()

    def _send(self) -> None:
        filling, flying = self.buffers
        in_flight: Any = None
        used = 0
        chunks: list[ChunkMeta] = []

        def flush(is_last: bool) -> None:
            nonlocal filling, flying, in_flight, used, chunks
            if in_flight is not None:
                in_flight.wait()
            message = pickle.dumps({"bucket_meta": chunks, "is_last": is_last, "length": used})
            for rank in self.ctx.receivers:
                self.ctx.links[rank].send_bytes(message)
            in_flight = dist.broadcast(filling[:used], src=0, async_op=True)
            filling, flying = flying, filling
            used, chunks = 0, []

        for spec, tensor, flat in zip(self.ctx.specs, self.ctx.tensors, self.ctx.flats):
            for start in range(0, flat.numel(), self.bucket_bytes):
                size = min(self.bucket_bytes, flat.numel() - start)
                if used + size > self.bucket_bytes:
                    flush(is_last=False)
                filling[used : used + size].copy_(flat if size == flat.numel() else flat[start : start + size])
                chunks.append(ChunkMeta(spec.name, spec.shape, tensor.dtype, start, size, used))
                used += size
        flush(is_last=True)
        in_flight.wait()

    def _receive(self) -> None:
        link = self.ctx.links[0]
        arriving, reading = self.buffers
        meta = pickle.loads(link.recv_bytes())  # noqa: S301  # as that engine does; from our own process
        dist.broadcast(arriving[: meta["length"]], src=0)
        while True:
            arriving, reading = reading, arriving
            following: Any = None
            in_flight: Any = None
            if not meta["is_last"]:
                following = pickle.loads(link.recv_bytes())  # noqa: S301
                in_flight = dist.broadcast(arriving[: following["length"]], src=0, async_op=True)
            for chunk in meta["bucket_meta"]:
                destination = self.destinations[chunk.name]
                if chunk.chunk_size != destination.numel():
                    destination = destination[chunk.chunk_offset : chunk.chunk_offset + chunk.chunk_size]
                destination.copy_(reading[chunk.offset : chunk.offset + chunk.chunk_size])
            if following is None:
                return
            in_flight.wait()
            meta = following

    def close(self) -> None:
        self.buffers = []
