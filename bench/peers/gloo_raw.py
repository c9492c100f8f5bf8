"""Gloo alone: the same number of bytes in buckets of the same size, double-buffered, nothing packed or unpacked.

This is the ceiling for any transport that moves its buckets with Gloo.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bench.peers.base import Options, Peer, RankContext


class GlooRaw(Peer):
    kind = "gloo_raw"

    def __init__(self, ctx: RankContext, options: Options) -> None:
        super().__init__(ctx, options)
        self.bucket_bytes = int(options["bucket_bytes"])
        self.depth = int(options.get("buffers", 2))
        self.buckets: list[torch.Tensor] = []

    def warm(self) -> None:
        # Not part of the first sync: before() fills them.
        self.buckets = [torch.zeros(self.bucket_bytes, dtype=torch.uint8) for _ in range(self.depth)]

    def before(self, round_number: int) -> None:
        if self.ctx.is_source:
            for i, bucket in enumerate(self.buckets):
                self.ctx.pattern.fill(i, bucket.numpy(), round_number)

    def sync(self) -> None:
        running: list[Any] = [None] * self.depth
        for i, start in enumerate(range(0, self.ctx.nbytes, self.bucket_bytes)):
            slot = i % self.depth
            if running[slot] is not None:
                running[slot].wait()
            size = min(self.bucket_bytes, self.ctx.nbytes - start)
            running[slot] = dist.broadcast(self.buckets[slot][:size], src=0, async_op=True)
        for work in running:
            if work is not None:
                work.wait()

    def wrong_bytes(self, round_number: int) -> int:
        if self.ctx.is_source:
            return 0
        # Only what a bucket received this round can be checked: all of it, unless the workload is smaller than that.
        buckets = -(-self.ctx.nbytes // self.bucket_bytes)
        if buckets == 1:
            return self.ctx.count_wrong([self.buckets[0].numpy()[: self.ctx.nbytes]], round_number)
        full = self.buckets[: buckets - 1] if buckets <= self.depth else self.buckets
        return self.ctx.count_wrong([b.numpy() for b in full], round_number)

    def close(self) -> None:
        self.buckets = []
