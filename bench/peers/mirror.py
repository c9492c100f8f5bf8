"""What a careful user writes by hand for one host: a second copy of the model in torch shared memory.

The trainer copies its tensors into the mirror and rings each rollout; the rollouts copy out. The trainer may go on
once it has copied in, and waits for the readers before it writes the mirror again. `loop="copy"` is a copy_ per tensor,
`loop="foreach"` is torch._foreach_copy_ over all of them.
"""

from __future__ import annotations

import torch
import torch.multiprocessing  # teaches connections to send shared tensors

from bench.peers.base import Peer

_ALIGN = 64


class Mirror(Peer):
    kind = "mirror"

    def open(self) -> None:
        # One shared allocation with a view per tensor: one descriptor instead of eighteen thousand.
        offsets, total = [], 0
        for flat in self.ctx.flats:
            offsets.append(total)
            total += -(-flat.numel() // _ALIGN) * _ALIGN
        if self.ctx.is_source:
            self.arena = torch.empty(total, dtype=torch.uint8).share_memory_()
            for rank in self.ctx.receivers:
                self.ctx.links[rank].send(self.arena)
        else:
            self.arena = self.ctx.links[0].recv()
        self.views = [
            self.arena[start : start + flat.numel()].view(tensor.dtype).view(tensor.shape)
            for start, flat, tensor in zip(offsets, self.ctx.flats, self.ctx.tensors)
        ]
        self.first = True

    def _take(self, semaphore: object) -> None:
        if not semaphore.acquire(timeout=self.ctx.timeout_s):  # type: ignore[attr-defined]
            raise TimeoutError(f"mirror: rank {self.ctx.rank} waited {self.ctx.timeout_s} s for the other side")

    def _copy(self, into: list[torch.Tensor], out_of: list[torch.Tensor]) -> None:
        if self.options.get("loop", "copy") == "foreach":
            torch._foreach_copy_(into, out_of)
            return
        for destination, source in zip(into, out_of):
            destination.copy_(source)

    def sync(self) -> None:
        if self.ctx.is_source:
            if not self.first:
                for semaphore in self.ctx.drained:
                    self._take(semaphore)
            self.first = False
            self._copy(self.views, self.ctx.tensors)
            for semaphore in self.ctx.filled:
                semaphore.release()
        else:
            self._take(self.ctx.filled[self.ctx.rank - 1])
            self._copy(self.ctx.tensors, self.views)
            self.ctx.drained[self.ctx.rank - 1].release()

    def close(self) -> None:
        if self.ctx.is_source:
            for semaphore in self.ctx.drained:
                self._take(semaphore)
        del self.views, self.arena
