"""Between device and host: shm and gloo against what the link does with pinned memory, measured beside them."""

from __future__ import annotations

from bench.gpu import sizes
from bench.gpu.baselines import TorchBucketed
from bench.gpu.device import HostModel, seconds_of
from bench.gpu.meter import Fastsync, Meter, Peer, WrongBytes, has_fastsync
from bench.gpu.ranks import Rank


def _peaks(rank: Rank) -> None:
    device = rank.device
    out, back = (device.pinned(rank.sizes.pinned_bytes) for _ in range(2))
    nbytes = out.numel()
    model = device.model(sizes.one_tensor(nbytes))
    model.fill(1)
    device.synchronize()
    (address,) = model.addresses()
    down = seconds_of(lambda: device.copy_out(out, address), device.synchronize, 4)
    model.fill(2)
    device.synchronize()
    up = seconds_of(lambda: device.copy_in(address, out), device.synchronize, 4)
    if model.wrong_bytes(1):
        raise WrongBytes("bytes went to the host and back, and are others now")
    rank.row("link peak, to the host", nbytes / down / 1e9, "GB/s", nbytes=nbytes)
    rank.row("link peak, to the device", nbytes / up / 1e9, "GB/s", nbytes=nbytes)
    del back


def run(rank: Rank) -> None:
    s, device = rank.sizes, rank.device
    if rank.is_source:
        _peaks(rank)
        device.release_cached()
    dist = rank.join()

    def measure(figure: str, model: HostModel, peer: Peer) -> None:
        if isinstance(peer, Fastsync) and not has_fastsync():
            return
        times = Meter(rank, model, peer).measure(s.rounds)
        peer.close()
        if rank.is_source:
            rank.row(figure, model.nbytes / times.median / 1e9, "GB/s", nbytes=model.nbytes, spread=times.spread,
                     first_s=times.first)  # fmt: skip

    def fastsync(figure: str, nbytes: int, transport: str, *, device_to: bool, device_from: bool) -> None:
        on_device = device_from if rank.is_source else device_to
        specs = sizes.dense(nbytes)
        model = device.model(specs) if on_device else device.host_model(specs)
        # Buckets of the transport's own size: these are sized for the host's cache.
        measure(figure, model, Fastsync(rank, model, transport=transport, bucket_bytes=None))

    fastsync("shm, device to host", s.link_bytes, "shm", device_from=True, device_to=False)
    fastsync("gloo, device to host", s.gloo_bytes, "gloo", device_from=True, device_to=False)
    fastsync("gloo, host to device", s.gloo_bytes, "gloo", device_from=False, device_to=True)
    fastsync("gloo, device to device", s.gloo_bytes, "gloo", device_from=True, device_to=True)
    model = device.torch_model(sizes.dense(s.gloo_bytes))
    measure("torch bucketed over gloo, device to device", model,
            TorchBucketed(rank, model, dist.group.WORLD, dist, min(s.peer_bucket_bytes, 32 * sizes.MIB)))  # fmt: skip
