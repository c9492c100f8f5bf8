"""One sync, in whichever way a test asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import fastsync
from support.ranks import Rank, raises
from support.tensors import assert_same, clone_exact, poisoned_like, storage_bytes

Params = Mapping[str, torch.Tensor]
TIMEOUT_S = 20.0


def session(src: int = 0, **options: Any) -> fastsync.WeightSync:
    options.setdefault("timeout_s", TIMEOUT_S)
    return fastsync.WeightSync(src=src, **options)


def receive(
    sync: fastsync.WeightSync, mode: str, like: Params | None = None, into: Any = None
) -> tuple[dict[str, torch.Tensor], fastsync.SyncReport]:
    """Receives in `mode`; returns private copies of what came, and the report."""
    if mode == "into":
        if into is None:
            assert like is not None
            into = poisoned_like(like)
        report = sync.receive(into=into)
        return {name: clone_exact(tensor) for name, tensor in into.items()}, report
    got: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        assert name not in got, f"{name} came twice"
        got[name] = clone_exact(tensor)

    if mode == "load":

        def load(batch: list[tuple[str, torch.Tensor]]) -> None:
            assert isinstance(batch, list)
            for name, tensor in batch:
                keep(name, tensor)

        report = sync.receive(load=load)
    elif mode == "stream":
        items = list(sync.stream())
        for name, tensor in items:
            keep(name, tensor)
        report = sync.report
    else:
        assert mode == "borrow"
        for name, tensor in sync.stream(borrow=True):
            keep(name, tensor)
        report = sync.report
    return got, report


def exchange(
    rank: Rank,
    params: Any,
    want: Params | None = None,
    *,
    mode: str = "into",
    src: int = 0,
    sync: fastsync.WeightSync | None = None,
    into: Any = None,
    version: int | None = None,
    **options: Any,
) -> fastsync.SyncReport:
    """Sends `params` from `src`; every other rank checks that it got `want` (else `params`) byte for byte."""
    expected: Params = want if want is not None else params

    def once(sync: fastsync.WeightSync) -> fastsync.SyncReport:
        if rank.index == src:
            report = sync.broadcast(params, version=version)
        else:
            got, report = receive(sync, mode, expected, into)
            assert_same(got, expected)
        assert report.tensors == len(expected)
        return report

    if sync is not None:
        return once(sync)
    with session(src, **options) as own:
        return once(own)


def good_sync(rank: Rank, sync: fastsync.WeightSync, src: int = 0, seed: float = 3.0) -> None:
    """The sync after a failure: must succeed on the same session and bring the right bytes."""
    params = {"after.a": torch.full((5, 3), seed), "after.b": torch.full((7,), int(seed), dtype=torch.int64)}
    exchange(rank, params, sync=sync, src=src)
    assert not sync.dirty


def refused(
    rank: Rank,
    sent: Any,
    into: Any,
    *,
    blame: int,
    names: str,
    transport: str = "shm",
    own: tuple[str, ...] = ("InvalidArgument",),
    others: tuple[str, ...] = ("ManifestMismatch",),
    watch: Params | None = None,
    **options: Any,
) -> None:
    """A sync that must be refused before a byte is written: rank `blame` gets `own`, every other rank `others`.

    `names` is what each message must name besides the rank. `watch` are plain tensors whose bytes must not change
    (by default every plain tensor of `into`). Then the same session must carry a good sync.
    """
    with session(transport=transport, **options) as sync:
        if watch is None:
            items = into.items() if isinstance(into, Mapping) else into
            watch = {str(name): item for name, item in items if type(item) is torch.Tensor and is_plain(item)}
        before = {name: bytes(storage_bytes(tensor)) for name, tensor in watch.items()}
        kinds = own if rank.index == blame else others
        with raises(*kinds, rank=None if rank.index == blame else blame, mentions=[names]) as caught:
            if rank.index == 0:
                sync.broadcast(sent)
            else:
                sync.receive(into=into)
        assert caught.seconds < TIMEOUT_S / 2, "the refusal came with the deadline, not at once"
        for name, tensor in watch.items():
            assert bytes(storage_bytes(tensor)) == before[name], f"{name} was written to"
        assert sync.version is None and sync.report is None and not sync.dirty
        good_sync(rank, sync)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's storage can be read as bytes."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
