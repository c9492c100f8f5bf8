"""Random manifests: dtypes x shapes x strides x bucket sizes x ways to send and receive, compared byte for byte."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.markers import RECEIVE_MODES, TRANSPORTS
from support.ranks import Group, Pool, Rank
from support.syncing import receive, session
from support.tensors import all_dtypes, assert_same, clone_exact, poisoned, random_tensor, storage_bytes

DTYPES = all_dtypes()
LAYOUTS = ("contiguous", "reversed_dims", "step", "padded", "offset", "expanded", "overlapping")
DESTINATION_LAYOUTS = ("contiguous", "reversed_dims", "step", "padded", "offset")


@dataclass(frozen=True)
class TensorSpec:
    dtype: int
    shape: tuple[int, ...]
    layout: str
    into_layout: str


@dataclass(frozen=True)
class SyncSpec:
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    buffers: int
    transport: str
    mode: str
    source: str
    verify: bool


def laid_out(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int | None) -> torch.Tensor:
    """A tensor of `shape` over random bytes (or poison, for seed None), in this layout."""

    def flat(count: int) -> torch.Tensor:
        return poisoned((count,), dtype) if seed is None else random_tensor((count,), dtype, seed)

    count = 1
    for size in shape:
        count *= size
    if layout == "reversed_dims":
        return flat(count).view(tuple(reversed(shape))).permute(tuple(reversed(range(len(shape)))))
    if layout == "step" and shape:
        return flat(count * 2).view(*shape, 2)[..., 1]
    if layout == "padded" and shape:
        padded = (*shape[:-1], shape[-1] + 3)
        total = 1
        for size in padded:
            total *= size
        return flat(total).view(padded)[..., 1 : 1 + shape[-1]]
    if layout == "offset":
        return flat(count + 5)[5:].view(shape)
    if layout == "expanded" and shape:
        inner = (1, *shape[1:])
        total = 1
        for size in inner:
            total *= size
        return flat(total).view(inner).expand(shape)
    if layout == "overlapping" and shape:
        strides = tuple(range(1, len(shape) + 1))
        reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
        return flat(max(reach, 1)).as_strided(shape, strides)
    return flat(count).view(shape)


def carry(rank: Rank, spec: SyncSpec) -> None:
    names = [f"n{i}.{tensor.layout}" for i, tensor in enumerate(spec.tensors)]
    sent = {
        name: laid_out(tensor.shape, DTYPES[tensor.dtype], tensor.layout, seed)
        for seed, (name, tensor) in enumerate(zip(names, spec.tensors, strict=True))
    }
    expected = {name: clone_exact(tensor) for name, tensor in sent.items()}
    options = {"bucket_bytes": spec.bucket_bytes, "buffers": spec.buffers, "verify": spec.verify, "timeout_s": 5.0}
    with session(transport=spec.transport, **options) as sync:
        for step in range(2):
            if rank.index == 0:
                report = sync.broadcast(iter(sent.items()) if spec.source == "generator" else sent)
            else:
                into = {
                    name: laid_out(tensor.shape, DTYPES[tensor.dtype], tensor.into_layout, None)
                    for name, tensor in zip(names, spec.tensors, strict=True)
                }
                got, report = receive(sync, spec.mode, into=into)
                assert_same(got, expected)
                if spec.mode == "into":
                    for name, tensor in into.items():
                        beside = storage_bytes(tensor).size - tensor.numel() * tensor.itemsize
                        kept = int((storage_bytes(tensor) == 0xA5).sum())
                        assert kept >= beside, f"{name}: bytes beside the destination were written"
            assert report.plan_reused is (step == 1)
            assert report.peak_staging_bytes <= spec.buffers * max(report.bucket_bytes, 256) + 2**20


tensors = st.builds(
    TensorSpec,
    dtype=st.integers(0, len(DTYPES) - 1),
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.tuples(st.integers(200, 3000)),
    layout=st.sampled_from(LAYOUTS),
    into_layout=st.sampled_from(DESTINATION_LAYOUTS),
)


def syncs(transport: str) -> st.SearchStrategy[SyncSpec]:
    return st.builds(
        SyncSpec,
        tensors=st.lists(tensors, max_size=12).map(tuple),
        bucket_bytes=st.sampled_from([1, 256, 300, 1024, 4096, 10_000, 2**20]),
        buffers=st.integers(2, 4),
        transport=st.just(transport),
        mode=st.sampled_from(RECEIVE_MODES),
        source=st.sampled_from(["mapping", "generator"]),
        verify=st.booleans(),
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_manifest_arrives_byte_for_byte(pool: Pool, transport: str) -> None:
    group: Group = pool.group(2)

    @settings(
        max_examples=150 if transport == "shm" else 60,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),  # a failing sync takes seconds: shrinking would take minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(spec=syncs(transport))
    def check(spec: SyncSpec) -> None:
        group.run(carry, spec)

    check()


@dataclass(frozen=True)
class Change:
    """One sync of a sequence over one session."""

    order: int
    drop: int
    resize: int
    source: str
    mode: str


def carry_sequence(rank: Rank, changes: tuple[Change, ...], transport: str) -> None:
    with session(transport=transport, bucket_bytes=1024, timeout_s=5.0) as sync:
        for step, change in enumerate(changes):
            sizes = [10, 300, 0, 77, 500][change.drop :]
            sizes = [size + (change.resize if i == 1 else 0) for i, size in enumerate(sizes)]
            sent = {f"t{i}": random_tensor((size,), torch.float32, step * 10 + i) for i, size in enumerate(sizes)}
            if change.order:
                sent = dict(reversed(sent.items()))
            if rank.index == 0:
                report = sync.broadcast(iter(sent.items()) if change.source == "generator" else sent)
            else:
                into = {name: poisoned(tuple(tensor.shape), tensor.dtype) for name, tensor in sent.items()}
                got, report = receive(sync, change.mode, into=into)
                assert_same(got, sent)
            assert report.version == step + 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_sequence_of_changing_manifests_arrives(pool: Pool, transport: str) -> None:
    group = pool.group(2)
    change = st.builds(
        Change,
        order=st.integers(0, 1),
        drop=st.integers(0, 5),
        resize=st.sampled_from([0, 1, 1000]),
        source=st.sampled_from(["mapping", "generator"]),
        mode=st.sampled_from(RECEIVE_MODES),
    )

    @settings(
        max_examples=50 if transport == "shm" else 25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(changes=st.lists(change, min_size=2, max_size=10).map(tuple))
    def check(changes: tuple[Change, ...]) -> None:
        group.run(carry_sequence, changes, transport)

    check()
