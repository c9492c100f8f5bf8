"""The device's copy peak, and the pack and unpack kernel against it, with and without the checksum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.gpu import sizes
from bench.gpu.baselines import cut
from bench.gpu.build import PROBE
from bench.gpu.device import HostModel, seconds_of
from bench.gpu.meter import WrongBytes
from bench.gpu.probe import Probe
from bench.gpu.ranks import Rank
from bench.workloads import TensorSpec


def _check(what: str, model: HostModel, round_number: int) -> None:
    wrong = model.wrong_bytes(round_number)
    if wrong:
        raise WrongBytes(f"{what}: {wrong} of {model.nbytes} bytes are wrong")


def _peaks(rank: Rank) -> None:
    device, nbytes = rank.device, rank.sizes.copy_bytes
    source, destination = (device.model(sizes.one_tensor(nbytes)) for _ in range(2))
    source.fill(1)
    (out_of,), (into,) = source.addresses(), destination.addresses()
    seconds = seconds_of(lambda: device.copy(into, out_of, nbytes), device.synchronize, rank.sizes.copy_passes)
    _check("cuMemcpyDtoD", destination, 1)
    rank.row("copy peak, cuMemcpyDtoD", nbytes / seconds / 1e9, "GB/s", nbytes=nbytes)

    source, destination = (device.torch_model(sizes.one_tensor(nbytes)) for _ in range(2))
    source.fill(2)
    seconds = seconds_of(
        lambda: destination.tensors[0].copy_(source.tensors[0]), device.synchronize_torch, rank.sizes.copy_passes
    )
    _check("torch copy_", destination, 2)
    rank.row("copy peak, torch copy_", nbytes / seconds / 1e9, "GB/s", nbytes=nbytes)


def _pack(rank: Rank, name: str, specs: Sequence[TensorSpec], passes: int) -> None:
    device = rank.device
    source, destination = device.model(specs), device.model(specs)
    probe = Probe(
        device.ordinal,
        [spec.nbytes for spec in specs],
        source.addresses(),
        destination.addresses(),
        rank.sizes.bucket_bytes,
    )
    staging = device.allocate(probe.staging_bytes)
    nbytes = source.nbytes
    for contents, verify in ((3, True), (4, False)):
        source.fill(contents)
        device.synchronize()
        for unpack in (False, True):

            def go(passes: int, verify: bool = verify, unpack: bool = unpack) -> tuple[float, float]:
                return probe.run(
                    unpack=unpack,
                    verify=verify,
                    staging=staging,
                    stream=device.stream,
                    passes=passes,
                    timeout_s=rank.sizes.timeout_s,
                )

            go(1)
            seconds, host_seconds = go(passes)
            rank.row(
                f"{'unpack' if unpack else 'pack'} {name}{'' if verify else ', no checksum'}",
                nbytes / seconds / 1e9,
                "GB/s",
                tensors=len(specs),
                nbytes=nbytes,
                buckets=probe.buckets,
                host_us=host_seconds * 1e6,
            )
        _check(f"unpack {name}", destination, contents)
        if verify and probe.unequal_sums():
            raise WrongBytes(f"{name}: {probe.unequal_sums()} of {probe.buckets} buckets have another checksum")
    probe.close()
    device.free(staging)


def _pack_in_torch(rank: Rank, name: str, specs: Sequence[TensorSpec], passes: int) -> None:
    """The same by torch: into views of each bucket by _foreach_copy_, and by torch.cat, which makes each bucket anew."""
    device = rank.device
    source, destination = device.torch_model(specs), device.torch_model(specs)
    source.fill(5)
    cuts = cut(source.flats, rank.sizes.bucket_bytes)
    buckets = [torch.empty(c.used_bytes, dtype=torch.uint8, device=device.torch_device) for c in cuts]
    views = [c.views(bucket) for c, bucket in zip(cuts, buckets)]

    def foreach() -> None:
        for into, bucket in zip(views, cuts):
            torch._foreach_copy_(into, bucket.pieces)

    def cat() -> None:
        for bucket in cuts:
            torch.cat(bucket.pieces)

    for figure, work in (("torch foreach", foreach), ("torch.cat", cat)):
        seconds = seconds_of(work, device.synchronize_torch, passes)
        rank.row(f"pack {name}, {figure}", source.nbytes / seconds / 1e9, "GB/s", tensors=len(specs))
    for into, bucket in zip(views, cuts):
        if not torch.equal(torch.cat(bucket.pieces), torch.cat(into)):
            raise WrongBytes(f"pack {name}: torch.cat and torch foreach made different buckets")
    for out_of, there in zip(views, cut(destination.flats, rank.sizes.bucket_bytes)):
        torch._foreach_copy_(there.pieces, out_of)
    device.synchronize_torch()
    _check(f"pack {name}, torch foreach", destination, 5)


def run(rank: Rank) -> None:
    _peaks(rank)
    rank.device.release_cached()
    s = rank.sizes
    for name, specs, passes in (
        ("dense", sizes.dense(s.dense_bytes), s.copy_passes),
        ("moe", sizes.moe(s.moe_bytes, s.tensors), s.copy_passes),
        ("lora", sizes.lora(s.lora_tensors), s.copy_passes * 10),
    ):
        if PROBE.is_file():
            _pack(rank, name, specs, passes)
        rank.device.release_cached()
        _pack_in_torch(rank, name, specs, passes)
        rank.device.release_cached()
