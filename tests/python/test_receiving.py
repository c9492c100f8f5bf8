"""What a receiver is given: whole tensors, each once, private where promised, and never visible to other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import fastsync
from support.markers import each_mode, each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, good_sync, receive, session
from support.tensors import assert_same, assert_tensor, clone_exact, poisoned_like, random_tensor

MIB = 2**20


def params(seed: int = 0) -> dict[str, torch.Tensor]:
    found = {f"t{i}": random_tensor((100 + 7 * i,), torch.float32, seed * 1000 + i) for i in range(40)}
    found["large"] = random_tensor((9000,), torch.float32, seed * 1000 + 99)
    found["scalar"] = random_tensor((), torch.int64, seed)
    return found


@each_transport
@spmd(2)
def test_loader_is_called_bucket_by_bucket_with_lists_of_named_tensors(rank: Rank, transport: str) -> None:
    sent = params()
    with session(transport=transport, bucket_bytes=4096) as sync:
        if rank.index == 0:
            sync.broadcast(sent)
            return
        calls: list[list[str]] = []

        def load(batch: list[tuple[str, torch.Tensor]]) -> None:
            assert isinstance(batch, list) and batch
            for name, tensor in batch:
                assert isinstance(name, str) and isinstance(tensor, torch.Tensor)
                assert_tensor(tensor, sent[name], name)
            calls.append([name for name, _ in batch])

        report = sync.receive(load=load)
        assert [name for names in calls for name in names] == list(sent)
        assert 2 < len(calls) <= report.buckets + 1


def scribble(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8).fill_(0xEE)


@each_transport
@pytest.mark.parametrize("mode", ["load", "borrow", "stream"])
@spmd(3)
def test_what_a_callee_writes_no_other_rank_sees(rank: Rank, transport: str, mode: str) -> None:
    sent = params()
    with session(transport=transport, bucket_bytes=4096) as sync:
        for _ in range(3):
            if rank.index == 0:
                sync.broadcast(sent)
                assert_same(sent, params())
            elif rank.index == 1:

                def load(batch: list[tuple[str, torch.Tensor]]) -> None:
                    for _, tensor in batch:
                        scribble(tensor)

                if mode == "load":
                    sync.receive(load=load)
                else:
                    for item in sync.stream(borrow=mode == "borrow"):
                        load([item])
            else:

                def check(batch: list[tuple[str, torch.Tensor]]) -> None:
                    time.sleep(0.001)  # the other receiver scribbles first
                    for name, tensor in batch:
                        assert_tensor(tensor, sent[name], name)

                sync.receive(load=check)


@each_transport
@spmd(2)
def test_list_of_stream_owns_its_memory_after_close_and_later_syncs(rank: Rank, transport: str) -> None:
    first, second = params(1), params(2)
    sync = session(transport=transport, bucket_bytes=4096)
    if rank.index == 0:
        sync.broadcast(first)
        sync.broadcast(second)
        sync.close()
        return
    got = list(sync.stream())
    assert_same(dict(got), first)
    later = list(sync.stream())
    assert_same(dict(got), first)
    assert_same(dict(later), second)
    report = sync.report
    assert report is not None and report.buckets > 10
    sync.close()
    assert_same(dict(got), first)
    assert_same(dict(later), second)


@spmd(2)
def test_streamed_tensors_are_private_and_writable(rank: Rank) -> None:
    sent = params()
    with session(bucket_bytes=4096) as sync:
        if rank.index == 0:
            sync.broadcast(sent)
            return
        got = list(sync.stream())
        for index, (_, tensor) in enumerate(got):
            scribble(tensor)
            for name, later in got[index + 1 : index + 3]:
                assert_tensor(later, sent[name], name)
        ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for _, tensor in got if tensor.numel())
        assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))


@each_transport
@spmd(2)
def test_borrowed_tensor_is_right_until_the_next_item(rank: Rank, transport: str) -> None:
    sent = params()
    with session(transport=transport, bucket_bytes=2048) as sync:
        if rank.index == 0:
            sync.broadcast(sent)
            return
        for name, tensor in sync.stream(borrow=True):
            time.sleep(0.002)  # the source fills other buckets meanwhile
            assert_tensor(tensor, sent[name], name)


@each_transport
@each_mode
@spmd(2)
def test_reported_version_moves_only_after_the_last_item(rank: Rank, transport: str, mode: str) -> None:
    sent = params()
    with session(transport=transport, bucket_bytes=2048) as sync:
        if rank.index == 0:
            sync.broadcast(sent, version=11)
        elif mode == "load":
            sync.receive(load=lambda batch: _assert_none(sync))
        elif mode == "into":
            sync.receive(into=poisoned_like(sent))
        else:
            for _ in sync.stream(borrow=mode == "borrow"):
                _assert_none(sync)
        assert sync.version == 11


def _assert_none(sync: fastsync.WeightSync) -> None:
    assert sync.version is None and sync.report is None


@pytest.mark.parametrize("borrow", [False, True])
@pytest.mark.parametrize("leave", ["break", "close", "raise"])
@each_transport
@spmd(3)
def test_leaving_the_stream_early_is_that_ranks_failure(rank: Rank, transport: str, leave: str, borrow: bool) -> None:
    sent = params()
    with session(transport=transport, bucket_bytes=1024) as sync:
        if rank.index == 1:
            stream = sync.stream(borrow=borrow)
            if leave == "raise":
                with raises("ZeroDivisionError"):
                    for _ in stream:
                        raise ZeroDivisionError
                stream.close()
            else:
                for _ in stream:
                    break
                stream.close()
            with raises("StopIteration"):
                next(stream)
        else:
            with raises("PeerFailed", rank=1) as caught:
                sync.broadcast(sent) if rank.index == 0 else receive(sync, "load")
            assert caught.seconds < 5
        assert sync.version is None
        good_sync(rank, sync)


@spmd(2)
def test_leaving_the_stream_by_plain_break_needs_no_close(rank: Rank) -> None:
    sent = params()
    with session(bucket_bytes=1024) as sync:
        if rank.index == 1:
            for _ in sync.stream():
                break
        else:
            with raises("PeerFailed", rank=1) as caught:
                sync.broadcast(sent)
            assert caught.seconds < 5
        good_sync(rank, sync)


@spmd(2)
def test_leaving_after_the_last_item_is_no_failure(rank: Rank) -> None:
    sent = {"a": torch.ones(3), "b": torch.ones(4)}
    with session() as sync:
        for _ in range(2):
            if rank.index == 0:
                sync.broadcast(sent)
            else:
                stream = sync.stream()
                assert [name for name, _ in stream] == ["a", "b"]
                stream.close()
        assert sync.version == 2


@each_transport
@spmd(2)
def test_sources_may_be_overwritten_and_freed_as_soon_as_the_call_returns(rank: Rank, transport: str) -> None:
    with session(transport=transport, bucket_bytes=64 * 1024) as sync:
        for step in range(5):
            sent = {f"t{i}": torch.full((50_000,), float(step)) for i in range(8)}
            into = poisoned_like(sent)
            if rank.index == 0:
                sync.broadcast(sent)
                for tensor in sent.values():
                    tensor.fill_(-1)
                    tensor.untyped_storage().resize_(0)
            else:
                sync.receive(into=into)
                assert all(bool((tensor == step).all()) for tensor in into.values())


@each_transport
@spmd(3)
def test_slow_reader_gets_every_bucket_unharmed_and_keeps_it_through_the_next_sync(rank: Rank, transport: str) -> None:
    def numbered(start: int) -> dict[str, torch.Tensor]:
        return {f"t{i}": torch.full((1024,), float(start + i)) for i in range(20)}

    kept: list[tuple[str, torch.Tensor]] = []
    with session(transport=transport, bucket_bytes=4096) as sync:
        for start in (0, 100):
            sent = numbered(start)
            if rank.index == 0:
                sync.broadcast(sent)
            elif rank.index == 1:
                assert_same(dict(sync.stream()), sent)
            else:
                mine: list[tuple[str, torch.Tensor]] = []
                for item in sync.stream():
                    time.sleep(0.02)
                    mine.append(item)
                assert_same(dict(mine), sent)
                if kept:
                    assert_same(dict(kept), numbered(0))
                kept = mine


@spmd(2)
def test_seconds_are_the_time_of_the_whole_sync_not_of_its_enqueueing(rank: Rank) -> None:
    sent = {f"t{i}": torch.full((1024,), float(i)) for i in range(10)}
    with session(bucket_bytes=4096) as sync:
        if rank.index == 0:
            report = sync.broadcast(sent)
        else:
            report = sync.receive(load=lambda batch: time.sleep(0.04))
        assert report.seconds >= 0.35
        assert sum(report.phases.values()) <= report.seconds * 1.5 + 0.01


def _raising(error: BaseException, after: int) -> Callable[[list[tuple[str, torch.Tensor]]], None]:
    seen: list[str] = []

    def load(batch: list[tuple[str, torch.Tensor]]) -> None:
        for name, _ in batch:
            seen.append(name)
            if len(seen) > after:
                raise error

    return load


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("loader is broken"), "loader is broken"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit"),
        (GeneratorExit("g"), "GeneratorExit"),
        (BaseException("bare"), "bare"),
        (ValueError("x" * 100_000), "xxxx"),
        (ValueError("ü" * 5000), "üü"),
        (ValueError("half \ud800 character"), "half"),
        (ValueError("nul \x00 inside"), "nul"),
        (ValueError(""), "ValueError"),
    ],
    ids=["value", "interrupt", "exit", "generator_exit", "base", "long", "wide", "surrogate", "nul", "empty"],
)
@each_transport
@spmd(3)
def test_what_the_loader_raises_comes_out_unchanged_and_reaches_the_others(
    rank: Rank, transport: str, error: BaseException, text: str
) -> None:
    sent = params()
    for after in (0, 20, 41):
        with session(transport=transport, bucket_bytes=1024) as sync:
            if rank.index == 2:
                try:
                    sync.receive(load=_raising(error, after))
                except BaseException as caught:
                    assert caught is error
                else:
                    raise AssertionError("the loader's exception was lost")
            else:
                with raises("PeerFailed", rank=2, mentions=[text]) as peer:
                    sync.broadcast(sent) if rank.index == 0 else receive(sync, "load")
                assert isinstance(peer.error, fastsync.PeerFailed)
                assert peer.error.rank == 2 and text in peer.error.message
                assert len(peer.error.message.encode()) <= 4096
                assert peer.seconds < 5
            good_sync(rank, sync)


@spmd(2)
def test_exception_without_text_still_reaches_the_others(rank: Rank) -> None:
    error = Silent()
    with session() as sync:
        if rank.index == 1:
            try:
                sync.receive(load=_raising(error, 0))
            except Silent as caught:
                assert caught is error
        else:
            with raises("PeerFailed", rank=1, mentions=["Silent"]):
                sync.broadcast(params())
        good_sync(rank, sync)


@each_transport
@spmd(2)
def test_assembled_tensor_is_handed_over_whole(rank: Rank, transport: str) -> None:
    sent = {"a": torch.ones(10), "big": random_tensor((3 * MIB + 1,), torch.uint8, 1), "z": torch.ones(10)}
    with session(transport=transport, bucket_bytes=100_000) as sync:
        for mode in ("load", "stream", "borrow", "into"):
            exchange(rank, sent, sync=sync, mode=mode)


@spmd(2)
def test_streams_may_be_held_open_while_the_tensors_are_used(rank: Rank) -> None:
    sent = params()
    with session(bucket_bytes=4096) as sync:
        if rank.index == 0:
            sync.broadcast(sent)
        else:
            pieces = []
            for name, tensor in sync.stream():
                pieces.append((name, clone_exact(tensor * 1)))
            assert [name for name, _ in pieces] == list(sent)


@spmd(2)
def test_tensor_held_at_close_stays_valid(rank: Rank) -> None:
    sent = params()
    held: list[tuple[str, torch.Tensor]] = []
    with session(bucket_bytes=4096) as sync:
        if rank.index == 0:
            sync.broadcast(sent)
        else:
            for item in sync.stream(borrow=True):
                held.append(item)
    # A borrowed tensor has no promised value now, but touching it must not crash the process.
    assert all(float(tensor.reshape(-1)[:1].sum()) is not None for _, tensor in held)
