"""A receiver is killed in the middle of a sync: how long until the source knows."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from bench.gpu import sizes
from bench.gpu.ranks import Rank


def run(rank: Rank) -> None:
    import fastsync

    dist = rank.join()
    transport = str(rank.options["transport"])
    victims = range(1, rank.world)
    # A group for each, made before anybody dies: making one needs everybody.
    groups = {victim: dist.new_group([0, victim], backend="gloo") for victim in victims}
    dist.barrier()
    keywords: dict[str, Any] = {"transport": transport, "timeout_s": rank.sizes.timeout_s}
    bucket_bytes = max(4096, rank.sizes.abort_bytes // 64)
    if not rank.is_source:
        session = fastsync.WeightSync(groups[rank.number], src=0, **keywords)
        calls = 0

        def load(_items: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                rank.marks[rank.number] = time.monotonic_ns()
                os.kill(os.getpid(), signal.SIGKILL)

        session.receive(load=load)
        raise RuntimeError("the sync was over before the third bucket")
    model = rank.device.model(sizes.dense(rank.sizes.abort_bytes))
    model.fill(1)
    rank.device.synchronize()
    seconds = []
    for victim in victims:
        session = fastsync.WeightSync(groups[victim], src=0, bucket_bytes=bucket_bytes, **keywords)
        try:
            session.broadcast(model.named())
        except fastsync.PeerLost as lost:
            seconds.append((time.monotonic_ns() - rank.marks[victim]) / 1e9)
            if lost.rank != victim:
                raise RuntimeError(f"rank {victim} was killed, the error names rank {lost.rank}: {lost}") from lost
        else:
            raise RuntimeError(f"rank {victim} was killed, and the source noticed nothing")
        finally:
            session.close()
    rank.row(f"abort, {transport}, from SIGKILL to PeerLost", max(seconds) * 1e3, "ms", each=seconds)
