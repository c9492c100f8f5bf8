"""Errors and interrupts of code that is not ours, wherever they come: nobody is lost by them, and calls pair up again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastsync
from support.markers import each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import good_sync, session
from support.tensors import assert_same, poisoned_like, random_tensor

Items = Iterator[tuple[str, torch.Tensor]]


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": random_tensor((700 + i,), torch.float32, seed * 100 + i) for i in range(8)}


class Relay(dict):  # type: ignore[type-arg]
    """A mapping that asks another group, and finds a peer of that one lost."""

    def items(self) -> Any:
        raise fastsync.PeerLost("rank 7 of another group", 7)


# A relay's own PeerLost is not ours: the others see a rank that failed, and the next sync works.
@pytest.mark.parametrize("where", ["loader", "generator", "stream", "mapping"])
@spmd(2)
def test_a_peer_lost_of_another_group_does_not_poison_this_one(rank: Rank, where: str) -> None:
    at = 0 if where in ("generator", "mapping") else 1

    def fails(*_: object) -> Any:
        raise fastsync.PeerLost("rank 7 of another group", 7)

    def items() -> Items:
        yield "a", torch.ones(3)
        fails()

    with session() as sync:
        with raises("PeerLost" if rank.index == at else "PeerFailed", rank=7 if rank.index == at else at):
            if rank.index == 0:
                sync.broadcast(
                    {"generator": items, "mapping": lambda: Relay(a=torch.ones(1))}.get(where, lambda: weights(1))()
                )
            elif where == "stream":
                loop = sync.stream()
                next(loop)
                loop.throw(fastsync.PeerLost("rank 7 of another group", 7))  # type: ignore[attr-defined]
            else:
                sync.receive(load=fails)
        good_sync(rank, sync)


@pytest.mark.parametrize(
    "call", ["broadcast_bucketed(None)", "receive_bucketed(None)", "receive_bucketed(5)", "receive(both)"]
)
@spmd(3)
def test_a_call_without_a_destination_fails_on_every_rank_at_once(rank: Rank, call: str) -> None:
    options = {"timeout_s": 20.0}
    with raises("InvalidArgument", rank=1) as caught:
        if rank.index != 1:
            fastsync.broadcast_bucketed(weights(1) if rank.index == 0 else poisoned_like(weights(1)), **options)
        elif call == "broadcast_bucketed(None)":
            fastsync.broadcast_bucketed(None, **options)  # type: ignore[arg-type]
        elif call == "receive(both)":
            fastsync.WeightSync(**options).receive(into=poisoned_like(weights(1)), load=print)
        else:
            fastsync.receive_bucketed(None if call == "receive_bucketed(None)" else 5, **options)  # type: ignore[arg-type]
    assert caught.seconds < 5
    into = weights(2) if rank.index == 0 else poisoned_like(weights(2))
    fastsync.broadcast_bucketed(into, **options)
    assert_same(into, weights(2))


@spmd(2)
def test_a_call_inside_a_callback_is_refused_whatever_its_source(rank: Rank) -> None:
    with session() as sync:
        if rank.index == 0:
            with raises("PeerFailed", rank=1):
                sync.broadcast(weights(1))
        else:
            with raises("StateError"):
                sync.receive(load=lambda _: fastsync.broadcast_bucketed(weights(1), src=1, timeout_s=3.0))
        good_sync(rank, sync)


@spmd(2)
def test_a_forked_child_cannot_make_a_new_session_on_the_inherited_group(rank: Rank) -> None:
    with session() as sync:
        good_sync(rank, sync)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                fastsync.WeightSync(bucket_bytes=12345)
                os.write(writing, b"made")
            except fastsync.StateError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(pid, 0)
        assert "fork" in said, said
        good_sync(rank, sync)


# Ctrl-C between any two instructions of our Python code: in flight operations are never forgotten with their memory.
@each_transport
@pytest.mark.parametrize("victim", [0, 1])
@spmd(2)
def test_interrupts_at_any_moment_leave_a_usable_session(rank: Rank, transport: str, victim: int) -> None:
    mine = rank.index == victim
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with session(transport=transport, bucket_bytes=1024) as sync:
        good_sync(rank, sync)
        into = poisoned_like(weights(0))
        for round_number in range(30):
            data = weights(round_number)
            try:
                if mine:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0004 * round_number)
                try:
                    if rank.index == 0:
                        sync.broadcast(data)
                    else:
                        sync.receive(into=into)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                assert mine
            except fastsync.Error as error:
                assert not isinstance(error, fastsync.PeerLost), error
        signal.signal(signal.SIGALRM, previous)
        rank.barrier()


@spmd(2)
def test_a_generator_takes_no_more_memory_than_its_buckets_may_ever_need(rank: Rank) -> None:
    with session(bucket_bytes=8 << 30) as sync:
        if rank.index == 0:
            report = sync.broadcast(iter([("a", torch.ones(50))]))
            assert report.peak_staging_bytes <= 2 * report.bucket_bytes + (1 << 20) < 200 << 20
        else:
            sync.receive(load=lambda batch: None)


def test_a_daemon_thread_inside_a_sync_does_not_crash_the_exit() -> None:
    script = textwrap.dedent(
        """
        import os, sys, threading, torch, torch.distributed as dist, fastsync
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
        params = {"a": torch.ones(1000)}
        fastsync.broadcast_bucketed(params)
        if rank == 1:
            inside = threading.Event()
            def loop():
                inside.set()
                fastsync.broadcast_bucketed(params, timeout_s=60.0)
            threading.Thread(target=loop, daemon=True).start()
            inside.wait()
        else:
            sys.stdin.read(1)
        """
    )
    path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"fastsync-exit-{os.getpid()}-{threading.get_ident()}")
    try:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(rank), path],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        _, said = ranks[1].communicate(timeout=60)
        assert ranks[1].returncode == 0, said
        ranks[0].communicate("x", timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        if os.path.exists(path):
            os.unlink(path)
