"""NCCL: fastsync, the library alone, and what engines do with torch; two ranks, or the library with one rank."""

from __future__ import annotations

from datetime import timedelta

from bench.gpu import sizes
from bench.gpu.baselines import TorchBucketed, VllmPacked
from bench.gpu.device import HostModel, seconds_of
from bench.gpu.meter import Fastsync, Meter, Peer, has_fastsync
from bench.gpu.ranks import Rank
from bench.gpu.raw_nccl import RawNccl


def _alone(rank: Rank) -> None:
    s = rank.sizes
    raw = RawNccl(rank, s.nccl_bytes, s.bucket_bytes)
    raw.open()
    seconds = seconds_of(raw.sync, rank.device.synchronize, s.rounds)
    buckets = -(-s.nccl_bytes // s.bucket_bytes)
    # A broadcast among one rank, in place, moves nothing: what is left is what NCCL asks of the host and the stream.
    rank.row("nccl, raw, one rank: per broadcast", seconds / buckets * 1e6, "us", version=raw.version())
    raw.close()


def run(rank: Rank) -> None:
    if rank.world == 1:
        _alone(rank)
        return
    s, device = rank.sizes, rank.device
    dist = rank.join()
    specs = sizes.dense(s.nccl_bytes)
    nbytes = sum(spec.nbytes for spec in specs)
    where = str(rank.options["where"])

    def measure(figure: str, moved: HostModel, which: Peer) -> None:
        if isinstance(which, Fastsync) and not has_fastsync():
            return
        times = Meter(rank, moved, which).measure(s.rounds)
        which.close()
        if rank.is_source:
            rank.row(f"{figure}, {where}", nbytes / times.median / 1e9, "GB/s", nbytes=nbytes, spread=times.spread,
                     first_s=times.first)  # fmt: skip

    model = device.model(specs)
    measure("nccl, fastsync", model, Fastsync(rank, model, transport="nccl"))
    raw = RawNccl(rank, nbytes, s.bucket_bytes)
    measure("nccl, raw broadcasts", raw.model, raw)
    if device.is_double:
        model = device.torch_model(specs)
    backend = "gloo" if device.is_double else "nccl"
    group = dist.new_group([0, 1], backend=backend, timeout=timedelta(seconds=s.timeout_s))
    measure("nccl, torch bucketed", model, TorchBucketed(rank, model, group, dist, s.peer_bucket_bytes))
    measure("nccl, vLLM-style packed", model, VllmPacked(rank, model, group, dist, s.peer_bucket_bytes))
