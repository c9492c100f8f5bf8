"""What a sync costs the host: per sync, per tensor, and per bucket that is handed over.

Over `ipc`, with so few bytes that the device has nothing to do. The cost of a tensor is the difference between a model
of very many tensors and one tensor of as many bytes, in equally many buckets; the cost of a bucket that between very
many buckets and one.
"""

from __future__ import annotations

import statistics

from bench.gpu import sizes
from bench.gpu.baselines import TorchIpc
from bench.gpu.meter import Fastsync, Meter, Times
from bench.gpu.ranks import Rank
from bench.workloads import TensorSpec


def _times(rank: Rank, specs: tuple[TensorSpec, ...], bucket_bytes: int) -> tuple[Times, int]:
    model = rank.device.model(specs)
    peer = Fastsync(rank, model, transport="ipc", bucket_bytes=bucket_bytes)
    meter = Meter(rank, model, peer)
    times = meter.measure(rank.sizes.host_syncs, check=False)
    peer.close()
    return times, peer.report.buckets


def run(rank: Rank) -> None:
    rank.join()
    s = rank.sizes
    specs = sizes.tiny_tensors(s.tensors)
    nbytes = sum(spec.nbytes for spec in specs)
    many, many_buckets = _times(rank, specs, 2 * nbytes)
    one, one_buckets = _times(rank, sizes.one_tensor(nbytes), 2 * nbytes)
    if rank.is_source:
        median = statistics.median

        def per_tensor(these: list[float], those: list[float]) -> float:
            return (median(these) - median(those)) / (len(specs) - 1) * 1e6

        facts = {"tensors": len(specs), "buckets": many_buckets, "buckets_of_one": one_buckets, "syncs": s.host_syncs}
        rank.row("host, a sync of many tensors", many.median * 1e6, "us", spread=many.spread, **facts)
        rank.row("host, a sync of one tensor", one.median * 1e6, "us", spread=one.spread)
        rank.row("host, per tensor", per_tensor(many.wall, one.wall), "us", **facts)
        rank.row("host, per tensor, source's CPU", per_tensor(many.source_cpu, one.source_cpu), "us")
        rank.row("host, per tensor, receiver's CPU", per_tensor(many.receiver_cpu, one.receiver_cpu), "us")
        rank.row("host, first sync of many tensors", many.first * 1e3, "ms")

    model = rank.device.torch_model(specs)
    peer = TorchIpc(rank, model, 2 * nbytes)
    by_torch = Meter(rank, model, peer).measure(s.host_syncs, check=False)
    peer.close()
    if rank.is_source:
        rank.row("host, a sync of many tensors, torch CUDA IPC", by_torch.median * 1e6, "us", spread=by_torch.spread)

    pieces = tuple(TensorSpec(f"piece.{i}", (2048,)) for i in range(s.handoffs))
    apart, buckets = _times(rank, pieces, 4096)
    together, _ = _times(rank, pieces, 4096 * s.handoffs)
    if rank.is_source:
        rank.row("ipc, per bucket handed over", (apart.median - together.median) / (buckets - 1) * 1e6, "us",
                 buckets=buckets, spread=apart.spread)  # fmt: skip
