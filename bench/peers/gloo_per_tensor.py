"""One Gloo broadcast per tensor: what a first version usually does.

`window` broadcasts are in flight at once; 1 is the plain loop.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch.distributed as dist

from bench.peers.base import Peer


class GlooPerTensor(Peer):
    kind = "gloo_per_tensor"

    def sync(self) -> None:
        # uint8 views: Gloo refuses some dtypes, and a broadcast does not care.
        window = int(self.options.get("window", 1))
        if window == 1:
            for flat in self.ctx.flats:
                dist.broadcast(flat, src=0)
            return
        running: deque[Any] = deque()
        for flat in self.ctx.flats:
            if len(running) == window:
                running.popleft().wait()
            running.append(dist.broadcast(flat, src=0, async_op=True))
        while running:
            running.popleft().wait()
