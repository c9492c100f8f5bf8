"""How much is moved, and for how long each part may run: FULL on a device, TINY on the double."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.workloads import TensorSpec, lora_adapters, qwen3_0_6b, qwen3_30b_a3b, scaled_to

GB = 1_000_000_000
MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    table_bytes: int  # of the pattern
    copy_bytes: int  # one copy of the peaks
    pinned_bytes: int
    dense_bytes: int
    moe_bytes: int
    tensors: int  # of the manifests with many; 18,867 is all of Qwen3-30B-A3B
    lora_tensors: int
    bucket_bytes: int
    copy_passes: int
    rounds: int  # timed syncs of a large model
    host_syncs: int
    handoffs: int  # buckets of the hand-off measurement
    link_bytes: int
    gloo_bytes: int
    colocated_bytes: int  # at most; cut down to what is free
    reserve_bytes: int  # that the colocated model leaves free
    nccl_bytes: int
    peer_bucket_bytes: int  # of the implementations that fastsync is compared with: what their engines use
    leak_syncs: int
    abort_bytes: int
    timeout_s: float


FULL = Sizes(
    table_bytes=64 * MIB,
    copy_bytes=8 << 30,
    pinned_bytes=1 << 30,
    dense_bytes=4_768_399_360,  # Qwen3-0.6B with both sides of its matrices doubled
    moe_bytes=6 * GB,
    tensors=18_867,
    lora_tensors=4_000,
    bucket_bytes=64 * MIB,
    copy_passes=20,
    rounds=3,
    host_syncs=100,
    handoffs=256,
    link_bytes=2 * GB,
    gloo_bytes=1 * GB,
    colocated_bytes=62 * GB,
    reserve_bytes=6 << 30,
    nccl_bytes=1 * GB,
    peer_bucket_bytes=512 * MIB,
    leak_syncs=1_000,
    abort_bytes=256 * MIB,
    timeout_s=20.0,
)

TINY = Sizes(
    table_bytes=256 << 10,
    copy_bytes=1 * MIB,
    pinned_bytes=1 * MIB,
    dense_bytes=2 * MIB,
    moe_bytes=2 * MIB,
    tensors=300,
    lora_tensors=100,
    bucket_bytes=256 << 10,
    copy_passes=2,
    rounds=1,
    host_syncs=5,
    handoffs=8,
    link_bytes=2 * MIB,
    gloo_bytes=1 * MIB,
    colocated_bytes=4 * MIB,
    reserve_bytes=64 * MIB,
    nccl_bytes=2 * MIB,
    peer_bucket_bytes=512 << 10,
    leak_syncs=30,
    abort_bytes=2 * MIB,
    timeout_s=20.0,
)


def _grown(specs: tuple[TensorSpec, ...], nbytes: int) -> tuple[TensorSpec, ...]:
    """Shapes multiplied by the whole number that comes closest to `nbytes` from below (sides, so bytes by its square)."""
    factor = max(1, int((nbytes / sum(s.nbytes for s in specs)) ** 0.5 + 0.001))
    return tuple(TensorSpec(s.name, tuple(d * factor for d in s.shape)) for s in specs)


def _first(specs: Iterator[TensorSpec], count: int) -> tuple[TensorSpec, ...]:
    """The first `count` of them."""
    return tuple(spec for spec, _ in zip(specs, range(count)))


def dense(nbytes: int) -> tuple[TensorSpec, ...]:
    specs = tuple(qwen3_0_6b())
    grown = _grown(specs, nbytes)
    return scaled_to(grown, nbytes)


def moe(nbytes: int, tensors: int) -> tuple[TensorSpec, ...]:
    return scaled_to(_first(qwen3_30b_a3b(), tensors), nbytes)


def lora(tensors: int) -> tuple[TensorSpec, ...]:
    return _first(lora_adapters(), tensors)


def tiny_tensors(tensors: int) -> tuple[TensorSpec, ...]:
    """The names of the large model, 256 bytes each: nothing to move, everything to look at."""
    return tuple(TensorSpec(spec.name, (128,)) for spec in _first(qwen3_30b_a3b(), tensors))


def one_tensor(nbytes: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("weight", (nbytes // 2,)),)
