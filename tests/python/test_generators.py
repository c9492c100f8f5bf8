"""Sources that are generators: pulled one at a time on the calling thread, copied at once, closed exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fastsync
from support.markers import each_mode, each_transport
from support.process import peak_rss_bytes, reset_peak_rss, rss_bytes
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, good_sync, receive, session
from support.tensors import assert_same, bytes_of, clone_exact, poisoned_like, random_tensor

MIB = 2**20
Items = Iterator[tuple[str, torch.Tensor]]


@each_transport
@each_mode
@spmd(2)
def test_one_scratch_tensor_refilled_each_time_arrives_with_all_its_values(
    rank: Rank, transport: str, mode: str
) -> None:
    def items() -> Items:
        scratch = torch.empty(1024)
        for i in range(50):
            scratch.fill_(i)
            yield f"t{i}", scratch

    expected = {f"t{i}": torch.full((1024,), float(i)) for i in range(50)}
    with session(transport=transport, bucket_bytes=10_000) as sync:
        for _ in range(3):
            exchange(rank, items(), expected, sync=sync, mode=mode)


@each_transport
@spmd(2)
def test_item_may_be_spoilt_and_freed_after_its_yield(rank: Rank, transport: str) -> None:
    def items() -> Items:
        for i in range(40):
            tensor = torch.full((3000 + i,), float(i))
            yield f"t{i}", tensor
            tensor.fill_(-1)
            tensor.untyped_storage().resize_(0)

    expected = {f"t{i}": torch.full((3000 + i,), float(i)) for i in range(40)}
    with session(transport=transport, bucket_bytes=4096) as sync:
        for _ in range(3):
            exchange(rank, items(), expected, sync=sync, mode="stream")


@each_transport
@spmd(2)
def test_generator_runs_on_the_calling_thread_one_item_at_a_time(rank: Rank, transport: str) -> None:
    threads: set[int] = set()
    running = threading.Lock()

    def items() -> Items:
        for i in range(30):
            assert running.acquire(blocking=False), "two items were asked for at once"
            threads.add(threading.get_ident())
            running.release()
            yield f"t{i}", torch.full((500,), float(i))

    expected = {f"t{i}": torch.full((500,), float(i)) for i in range(30)}
    with session(transport=transport, bucket_bytes=1024) as sync:
        for _ in range(2):
            exchange(rank, items(), expected, sync=sync, mode="load")
    if rank.index == 0:
        assert threads == {threading.get_ident()}


@spmd(2)
def test_generator_whose_items_come_from_a_thread_pool(rank: Rank) -> None:
    def fill(i: int) -> torch.Tensor:
        time.sleep(0.001 * (i % 5))
        return torch.full((2000,), float(i))

    def items() -> Items:
        with ThreadPoolExecutor(4) as workers:
            futures = [workers.submit(fill, i) for i in range(40)]
            for i, future in enumerate(futures):
                yield f"t{i}", future.result()

    expected = {f"t{i}": torch.full((2000,), float(i)) for i in range(40)}
    with session(bucket_bytes=8192) as sync:
        for _ in range(2):
            exchange(rank, items(), expected, sync=sync, mode="stream")


class Counted:
    """A generator that counts what is done to it."""

    def __init__(self, count: int, fail_at: int | None = None, error: BaseException | None = None) -> None:
        self.asked = self.closed = 0
        self.items = self._items(count, fail_at, error)

    def _items(self, count: int, fail_at: int | None, error: BaseException | None) -> Items:
        try:
            for i in range(count):
                self.asked += 1
                if i == fail_at:
                    assert error is not None
                    raise error
                yield f"t{i}", torch.full((1000,), float(i))
            if fail_at == count:
                assert error is not None
                raise error
        finally:
            self.closed += 1


@each_transport
@spmd(2)
def test_generator_is_closed_exactly_once_on_success_and_on_failure(rank: Rank, transport: str) -> None:
    with session(transport=transport, bucket_bytes=4096) as sync:
        for _ in range(2):
            counted = Counted(20)
            if rank.index == 0:
                sync.broadcast(counted.items)
                assert counted.closed == 1 and counted.asked == 20
                assert next(counted.items, None) is None
            else:
                sync.receive(load=lambda batch: None)
        counted = Counted(2000)
        if rank.index == 0:
            with raises("PeerFailed", rank=1, mentions=["enough"]):
                sync.broadcast(counted.items)
            assert counted.closed == 1, "the generator was left suspended after a failure"
            assert counted.asked < 2000
        else:
            with raises("RuntimeError", mentions=["enough"]):
                sync.receive(load=_enough)
        good_sync(rank, sync)


def _enough(batch: object) -> None:
    raise RuntimeError("enough")


@spmd(2)
def test_generator_is_closed_when_the_call_is_refused(rank: Rank) -> None:
    with session() as sync:
        exchange(rank, {"a": torch.ones(1)}, sync=sync, version=5)
        counted = Counted(5)
        with raises("InvalidArgument"):
            sync.broadcast(counted.items, version=5) if rank.index == 0 else sync.receive(into={})
        # A generator that never started cannot run its finally block; being closed shows in the next pull.
        assert rank.index == 1 or next(counted.items, None) is None
        good_sync(rank, sync)


ERRORS: dict[str, Callable[[], BaseException]] = {
    "exception": lambda: ValueError("item is broken"),
    "interrupt": lambda: KeyboardInterrupt("item is broken"),
    "generator_exit": lambda: GeneratorExit("item is broken"),
    "base": lambda: BaseException("item is broken"),
    "system_exit": lambda: SystemExit("item is broken"),
    "fastsync": lambda: fastsync.StateError("item is broken"),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("at", [0, 7, 20])
@each_transport
@spmd(2)
def test_what_the_generator_raises_comes_out_unchanged_and_reaches_the_others(
    rank: Rank, transport: str, at: int, kind: str
) -> None:
    with session(transport=transport, bucket_bytes=4096) as sync:
        for warm in (False, True):
            if warm:
                counted = Counted(20)
                sync.broadcast(counted.items) if rank.index == 0 else receive(sync, "load")
            error = ERRORS[kind]()
            counted = Counted(20, at, error)
            began = time.monotonic()
            if rank.index == 0:
                try:
                    sync.broadcast(counted.items)
                except BaseException as caught:
                    assert caught is error, f"{caught!r} is not the very exception of the generator"
                else:
                    raise AssertionError("the generator's exception was lost")
                assert counted.closed == 1
            else:
                with raises("PeerFailed", rank=0, mentions=["item is broken", type(error).__name__]) as peer:
                    receive(sync, "load")
                assert isinstance(peer.error, fastsync.PeerFailed)
                assert peer.error.rank == 0 and "item is broken" in peer.error.message
            assert time.monotonic() - began < 5
            good_sync(rank, sync)


def shapes(*sizes: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": random_tensor((size,), torch.float32, size) for i, size in enumerate(sizes)}


@each_transport
@each_mode
@spmd(2)
def test_generator_is_replayed_from_the_second_sync_with_fresh_tensors(rank: Rank, transport: str, mode: str) -> None:
    with session(transport=transport, bucket_bytes=1024) as sync:
        for step in range(4):
            params = {name: tensor + step for name, tensor in shapes(10, 500, 20, 3, 700, 0).items()}
            report = exchange(rank, (item for item in params.items()), params, sync=sync, mode=mode)
            assert report.plan_reused is (step > 0)


DEVIATIONS: dict[str, dict[str, torch.Tensor]] = {
    "fewer": shapes(10, 500, 20),
    "more": shapes(10, 500, 20, 30, 40, 50),
    "none": {},
    "shape": shapes(10, 500, 21, 30, 40),
    "much_larger": shapes(10, 500, 9000, 30, 40),
    "first": shapes(11, 500, 20, 30, 40),
    "last": shapes(10, 500, 20, 30, 41),
    "dtype": {**shapes(10, 500, 20, 30, 40), "t2": torch.ones(20, dtype=torch.int32)},
    "name": {"u0" if name == "t0" else name: tensor for name, tensor in shapes(10, 500, 20, 30, 40).items()},
    "order": dict(reversed(shapes(10, 500, 20, 30, 40).items())),
}


@pytest.mark.parametrize("deviation", DEVIATIONS)
@each_transport
@spmd(2)
def test_generator_that_changed_makes_a_new_plan(rank: Rank, transport: str, deviation: str) -> None:
    usual, other = shapes(10, 500, 20, 30, 40), DEVIATIONS[deviation]
    with session(transport=transport, bucket_bytes=1024) as sync:
        for params, reused in ((usual, False), (usual, True), (other, False), (other, True)):
            report = exchange(rank, iter(params.items()), params, sync=sync, mode="stream")
            assert report.plan_reused is reused
            assert report.tensors == len(params)
        exchange(rank, iter(usual.items()), usual, sync=sync, mode="load")
        exchange(rank, usual, sync=sync, mode="into")


@each_transport
@spmd(2)
def test_generator_that_changed_keeps_in_place_destinations_right(rank: Rank, transport: str) -> None:
    usual, grown = shapes(10, 500, 20), shapes(10, 500, 20, 600, 7)
    with session(transport=transport, bucket_bytes=1024) as sync:
        for params in (usual, usual, grown, grown, usual):
            exchange(rank, iter(params.items()), params, sync=sync)


@each_transport
@spmd(2)
def test_generator_meets_mismatch_before_the_tensors_not_yet_reached(rank: Rank, transport: str) -> None:
    sent = {f"t{i:02}": torch.full((1024,), float(i)) for i in range(40)}
    with session(transport=transport, bucket_bytes=4096) as sync:
        for _ in range(2):
            into = poisoned_like(sent)
            into["t20"] = torch.zeros(1023)
            if rank.index == 0:
                with raises("ManifestMismatch", rank=1, mentions=["t20"]):
                    sync.broadcast(iter(sent.items()))
            else:
                with raises("ManifestMismatch", mentions=["t20"]):
                    sync.receive(into=into)
                assert not into["t20"].any()
                for name, tensor in into.items():
                    assert name <= "t20" or bytes_of(tensor) == b"\xa5" * 4096, f"{name} was written to"
            assert sync.version is None
        good_sync(rank, sync)
        into = poisoned_like(sent)
        sync.broadcast(iter(sent.items())) if rank.index == 0 else sync.receive(into=into)
        assert rank.index == 0 or not sync.dirty
        if rank.index == 1:
            assert_same(into, sent)


@pytest.mark.parametrize("kind", ["meta", "none", "sparse"])
@each_transport
@spmd(2)
def test_generator_that_yields_what_cannot_travel_is_refused_by_name(rank: Rank, transport: str, kind: str) -> None:
    odd: Any = {"meta": torch.empty(3, device="meta"), "none": None, "sparse": torch.eye(3).to_sparse()}[kind]

    def items() -> Iterator[tuple[str, Any]]:
        for i in range(10):
            yield f"t{i}", torch.ones(1000)
        yield "the.odd.one", odd
        yield "never", torch.ones(3)

    names: list[str] = []
    with session(transport=transport, bucket_bytes=4096) as sync:
        if rank.index == 0:
            with raises("InvalidArgument", mentions=["the.odd.one"]):
                sync.broadcast(items())
        else:
            with raises("ManifestMismatch", rank=0, mentions=["the.odd.one"]):
                sync.receive(load=lambda batch: names.extend(name for name, _ in batch))
            assert "the.odd.one" not in names and "never" not in names
        good_sync(rank, sync)


@pytest.mark.parametrize("item", ["t0", ("t0",), ("t0", torch.ones(1), 3), None, 5], ids=repr)
@spmd(2)
def test_generator_that_yields_no_pairs_is_refused(rank: Rank, item: Any) -> None:
    with session() as sync:
        if rank.index == 0:
            with raises("InvalidArgument"):
                sync.broadcast(iter([("ok", torch.ones(2)), item]))
        else:
            with raises("ManifestMismatch", "PeerFailed", "InvalidArgument", rank=0):
                receive(sync, "load")
        good_sync(rank, sync)


@each_transport
@spmd(2)
def test_generator_is_never_collected_into_a_list(rank: Rank, transport: str) -> None:
    def items() -> Items:
        for i in range(200):
            yield f"t{i}", torch.full((MIB // 4,), float(i))

    with session(transport=transport, bucket_bytes=4 * MIB) as sync:
        good_sync(rank, sync)
        for _ in range(2):
            reset_peak_rss()
            before = rss_bytes()
            if rank.index == 0:
                sync.broadcast(items())
            else:
                count = 0
                for name, tensor in sync.stream(borrow=True):
                    assert name == f"t{count}" and float(tensor[-1]) == count
                    count += 1
                assert count == 200
            grown = peak_rss_bytes() - before
            assert grown < 24 * MIB, f"resident memory grew by {grown / MIB:.1f} MiB"


@each_transport
@spmd(2)
def test_generator_and_mapping_of_one_manifest_alternate(rank: Rank, transport: str) -> None:
    params = shapes(10, 500, 20, 3000)
    with session(transport=transport, bucket_bytes=1024) as sync:
        for step in range(6):
            now = {name: tensor + step for name, tensor in params.items()}
            sent = iter(now.items()) if step % 2 else now
            exchange(rank, sent, now, sync=sync, mode=("into", "load", "stream")[step % 3])


@spmd(2)
def test_zip_map_and_custom_iterators_are_generators_too(rank: Rank) -> None:
    params = shapes(4, 5, 6)

    class Plain:
        def __init__(self) -> None:
            self._left = list(params.items())

        def __iter__(self) -> Plain:
            return self

        def __next__(self) -> tuple[str, torch.Tensor]:
            if not self._left:
                raise StopIteration
            return self._left.pop(0)

    for source in (zip(params.keys(), params.values(), strict=True), map(tuple, params.items()), Plain()):
        exchange(rank, source, params, mode="load")


@each_transport
@spmd(2)
def test_oversize_items_of_a_generator_are_split_not_deadlocked(rank: Rank, transport: str) -> None:
    params = shapes(10, 100_000, 3, 50_001, 50_002)
    with session(transport=transport, bucket_bytes=4096) as sync:
        for mode in ("into", "load", "stream", "borrow"):
            exchange(rank, iter(params.items()), params, sync=sync, mode=mode)


@spmd(2)
def test_generator_of_views_and_lazy_tensors(rank: Rank) -> None:
    base = random_tensor((30, 40), torch.complex64, 1)
    params = {"t": base.t(), "conj": base.conj(), "imag": base.conj().imag, "one": base[3, 4], "none": base[:0]}
    expected = {name: clone_exact(tensor) for name, tensor in params.items()}
    with session(bucket_bytes=777) as sync:
        for mode in ("into", "stream", "load"):
            exchange(rank, iter(params.items()), expected, sync=sync, mode=mode)
