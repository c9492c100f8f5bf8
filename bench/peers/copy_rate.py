"""The machine's own copy rate: the manifest's tensors to as many private ones in the same process, by one thread.

`mode`:
  plain      fastsync's native loop, cached stores
  streaming  the same loop with non-temporal stores
  torch      a Python loop of copy_
The receivers do nothing. This is the bar, not a way to move weights: nothing can be in the other process sooner than
one copy of it takes, except by sharing.
"""

from __future__ import annotations

import time

import torch

from bench.pattern import Bytes
from bench.peers.base import Options, Peer, RankContext


class CopyRate(Peer):
    kind = "copy"

    def __init__(self, ctx: RankContext, options: Options) -> None:
        super().__init__(ctx, options)
        self.mode = str(options.get("mode", "plain"))
        self.scratch: list[torch.Tensor] = []
        self.arrays: list[Bytes] = []
        self.seconds: float | None = None

    @classmethod
    def unavailable_reason(cls, options: Options) -> str | None:
        if options.get("mode") == "torch":
            return None
        try:
            from fastsync import _core
        except ImportError as error:
            return f"the native copy loop needs fastsync: {error}"
        return None if hasattr(_core, "copy_many") else "fastsync._core has no copy_many"

    def warm(self) -> None:
        if not self.ctx.is_source:
            return
        self.scratch = [torch.zeros_like(t) for t in self.ctx.tensors]
        flats = [t.view(-1).view(torch.uint8) for t in self.scratch]
        self.arrays = [f.numpy() for f in flats]
        self.into = [f.data_ptr() for f in flats]
        self.out_of = [f.data_ptr() for f in self.ctx.flats]
        self.sizes = [f.numel() for f in flats]

    def sync(self) -> None:
        if not self.ctx.is_source:
            return
        if self.mode == "torch":
            begin = time.monotonic()
            for destination, source in zip(self.scratch, self.ctx.tensors):
                destination.copy_(source)
            self.seconds = time.monotonic() - begin
            return
        from fastsync import _core

        # The loop's own clock: without the conversion of three Python lists.
        self.seconds = _core.copy_many(self.into, self.out_of, self.sizes, self.mode == "streaming")

    def inner_seconds(self) -> float | None:
        return self.seconds

    def wrong_bytes(self, round_number: int) -> int:
        return self.ctx.count_wrong(self.arrays, round_number) if self.ctx.is_source else 0

    def close(self) -> None:
        self.scratch, self.arrays = [], []
