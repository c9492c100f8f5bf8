"""One sync with src="sharded": the lowest ranks are trainers, the others receive."""

from __future__ import annotations

from typing import Any

import torch

import fastsync
from support.ranks import Rank
from support.syncing import Params, receive, session
from support.tensors import assert_same, random_tensor

BUCKET_BYTES = 4096


def sharded(**options: Any) -> fastsync.WeightSync:
    options.setdefault("bucket_bytes", BUCKET_BYTES)
    return session("sharded", **options)  # type: ignore[arg-type]


def some_weights(seed: int) -> dict[str, torch.Tensor]:
    """Every kind of tensor that a share may have: larger than a bucket, empty, scalar, strided, of odd sizes."""
    sizes = [(300, 5), (7,), (), (0, 3), (64, 64), (1,), (1023,), (2, 3, 5), (1025,), (0,), (130, 31), (9, 9), (511,)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    weights = {
        f"layer.{i}": random_tensor(shape, torch.uint8 if i == 7 else dtypes[i % len(dtypes)], 100 * seed + i)
        for i, shape in enumerate(sizes)
    }
    weights["strided"] = random_tensor((40, 60), torch.float32, 100 * seed + 50).t()
    weights["last.empty"] = torch.empty(0, 4)
    return weights


def take_part(
    rank: Rank,
    sync: fastsync.WeightSync,
    trainers: int,
    params: Params,
    *,
    mode: str = "into",
    into: Any = None,
    version: int | None = None,
) -> fastsync.SyncReport:
    """Sends as a trainer, else checks that everything came, byte for byte."""
    if rank.index < trainers:
        report = sync.broadcast(params, version=version)
    else:
        got, report = receive(sync, mode, params, into)
        assert_same({name: got[name] for name in params}, params)
        assert len(got) == len(params)
    assert report.tensors == len(params)
    assert report.nbytes == sum(t.numel() * t.element_size() for t in params.values())
    return report


def good_sharded_sync(rank: Rank, sync: fastsync.WeightSync, trainers: int, seed: int = 77) -> None:
    """The sync after a failure."""
    take_part(rank, sync, trainers, some_weights(seed))
    assert not sync.dirty
