"""A whole model between two processes on one device: fastsync's ipc, and CUDA IPC as engines do it with torch."""

from __future__ import annotations

from bench.gpu import sizes
from bench.gpu.baselines import TorchIpc
from bench.gpu.device import HostModel
from bench.gpu.meter import Fastsync, Meter, Peer, has_fastsync
from bench.gpu.ranks import Rank

_ROUNDING = 1.12  # what torch's allocator takes for a byte of such a model


def run(rank: Rank) -> None:
    rank.join()
    s, device = rank.sizes, rank.device
    # Both ranks must come to the same size, and the first to allocate changes what is free.
    if rank.is_source:
        free, _ = device.memory()
        nbytes = min(s.colocated_bytes, int((free - s.reserve_bytes) / 2 / _ROUNDING))
        rank.link.send(nbytes)
    else:
        nbytes = rank.link.recv()
    specs = sizes.moe(nbytes, s.tensors)
    model = device.model(specs)

    def measure(figure: str, moved: HostModel, which: Peer) -> None:
        if isinstance(which, Fastsync) and not has_fastsync():
            return
        times = Meter(rank, moved, which).measure(s.rounds)
        which.close()
        if rank.is_source:
            rank.row(figure, times.median, "s", nbytes=moved.nbytes, tensors=len(specs), spread=times.spread,
                     first_s=times.first, source_s=times.source_call)  # fmt: skip

    measure("colocated, fastsync ipc", model, Fastsync(rank, model, transport="ipc"))
    measure("colocated, fastsync ipc, no checksum", model, Fastsync(rank, model, transport="ipc", verify=False))
    if device.is_double:
        model = device.torch_model(specs)
    measure("colocated, torch CUDA IPC", model, TorchIpc(rank, model, s.peer_bucket_bytes))
