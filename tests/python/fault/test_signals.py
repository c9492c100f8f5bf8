"""Ctrl-C: seen within a second whatever the rank waits for, told to the others, and nothing is left behind."""

from __future__ import annotations

import select
import signal
import time
from typing import Any

import pytest
import torch

import fastsync
from support.markers import each_transport, fault
from support.process import open_fds, shm_entries
from support.ranks import Failure, Pool, Rank, names_rank
from support.syncing import good_sync, session

pytestmark = fault

SEEN_WITHIN_S = 1.0


class Terminated(BaseException):
    """What this test's SIGTERM handler raises."""


def _terminated(number: int, frame: object) -> None:
    raise Terminated


def interrupted(rank: Rank, transport: str, what: str, busy: int) -> tuple[Failure | None, float]:
    """Rank `busy` ends up waiting in the way `what` says; the others play the part that makes it wait."""
    signal.signal(signal.SIGTERM, _terminated)
    weights = {f"t{i}": torch.ones(1024) for i in range(30)}
    failure = None
    sync = session(transport=transport, bucket_bytes=4096, timeout_s=25)
    try:
        if what != "first_peer":
            good_sync(rank, sync)
        rank.barrier()
        try:
            if what in ("first_peer", "peer") and rank.index != busy:
                rank.hold("away")
            elif rank.index == 0:
                rank.mark("in")
                sync.broadcast(_stuck(rank, weights, what == "transfer" and busy != 0))
            elif rank.index != busy and what == "transfer":
                rank.mark("in")
                for i, _ in enumerate(sync.stream()):
                    if i == 3:
                        _stay(rank)
            else:
                rank.mark("in")
                sync.receive(load=lambda batch: None)
        except BaseException as error:
            failure = Failure.of(error)
        ended_at = time.monotonic()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank.barrier()
    sync.close()
    with session(transport=transport) as again:
        good_sync(rank, again)
    return failure, ended_at


def _stay(rank: Rank) -> None:
    """Keeps this rank busy in its callback until the test has seen the other one end."""
    rank.hold("busy")


def _stuck(rank: Rank, weights: dict[str, torch.Tensor], stuck: bool) -> Any:
    if not stuck:
        return weights

    def items() -> Any:
        for i, item in enumerate(weights.items()):
            if i == 10:
                _stay(rank)
            yield item

    return items()


@each_transport
@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("what", ["first_peer", "peer", "transfer"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["sigint", "sigterm"])
def test_signal_ends_a_wait_within_a_second_and_the_next_sync_works(
    pool: Pool, transport: str, busy: int, what: str, number: signal.Signals
) -> None:
    entries = shm_entries()
    group = pool.group(2)
    running = group.start(interrupted, transport, what, busy)
    group.wait_mark(busy, "in")
    group.wait_mark(1 - busy, "busy" if what == "transfer" else "away")
    select.select([], [], [], 0.3)  # the rank has nothing to do but to go into its wait
    sent_at = group.interrupt(busy, number)
    # The other rank is let go only now, so nothing but the signal can end the wait.
    select.select([], [], [], SEEN_WITHIN_S)
    group.release(1 - busy)
    outcomes = running.join(40)
    failure, ended_at = outcomes[busy].result()
    assert failure is not None, "the call returned as if nothing had happened"
    assert failure.type_name == ("KeyboardInterrupt" if number == signal.SIGINT else "Terminated"), failure.traceback
    assert ended_at - sent_at < SEEN_WITHIN_S, f"the signal was seen after {ended_at - sent_at:.3f} s"
    other, _ = outcomes[1 - busy].result()
    if what == "transfer":
        assert other is not None and other.type_name == "PeerFailed" and names_rank(other.message, busy), other
    assert shm_entries() <= entries


def interrupted_in_transfer(rank: Rank, transport: str) -> tuple[str, float]:
    weights = {"big": torch.zeros(64 * 2**20, dtype=torch.uint8)}
    inside = False

    def interrupt(number: int, frame: object) -> None:
        if inside:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.002)  # between two syncs it would hit this test: try again in the next

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    try:
        with session(transport=transport, bucket_bytes=2**20, timeout_s=25) as sync:
            try:
                while True:
                    inside = True
                    sync.broadcast(weights) if rank.index == 0 else sync.receive(into=weights)
                    inside = False
                    rank.mark("once")
            except KeyboardInterrupt as error:
                kind, ended_at = type(error).__name__, time.monotonic()
            except fastsync.Error as error:
                kind, ended_at = f"{type(error).__name__}: {error}", time.monotonic()
            rank.barrier()
            good_sync(rank, sync)
            return kind, ended_at
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@each_transport
@pytest.mark.parametrize("busy", [0, 1, 2])
def test_interrupt_in_the_middle_of_large_transfers(pool: Pool, transport: str, busy: int) -> None:
    group = pool.group(3)
    running = group.start(interrupted_in_transfer, transport)
    group.wait_mark(busy, "once")
    sent_at = group.interrupt(busy)
    outcomes = running.join(40)
    for rank in range(3):
        kind, ended_at = outcomes[rank].result()
        assert ended_at - sent_at < SEEN_WITHIN_S, f"rank {rank} ended after {ended_at - sent_at:.3f} s"
        if rank == busy:
            assert kind == "KeyboardInterrupt"
        else:
            assert kind.startswith("PeerFailed") and names_rank(kind, busy), kind


def handled(rank: Rank, transport: str) -> int:
    """A signal whose handler returns must not end the wait, nor break it."""
    calls = []
    signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
    rank.barrier()
    if rank.index == 1:
        rank.hold("away")
    else:
        rank.mark("in")
    with session(transport=transport) as sync:
        good_sync(rank, sync)
    return len(calls)


@each_transport
def test_signal_whose_handler_returns_does_not_end_the_wait(pool: Pool, transport: str) -> None:
    group = pool.group(2)
    running = group.start(handled, transport)
    group.wait_mark(0, "in")
    group.wait_mark(1, "away")
    for _ in range(5):
        select.select([], [], [], 0.1)
        group.interrupt(0, signal.SIGUSR2)
    select.select([], [], [], 0.3)
    group.release(1)
    calls = running.results(30)
    assert calls[0] >= 3, "the handler did not run while the rank waited"


def descriptors_after_interrupts(rank: Rank, transport: str) -> tuple[int, int]:
    counts = []
    for _ in range(8):
        sync = session(transport=transport, timeout_s=20)
        good_sync(rank, sync)
        if rank.index == 0:

            def items() -> Any:
                yield "a", torch.ones(3)
                signal.raise_signal(signal.SIGINT)
                yield "b", torch.ones(3)

            try:
                sync.broadcast(items())
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("the interrupt was lost")
        else:
            try:
                sync.receive(load=lambda batch: None)
            except fastsync.PeerFailed:
                pass
            else:
                raise AssertionError("the receiver did not learn of the interrupt")
        good_sync(rank, sync)
        sync.close()
        rank.barrier()
        counts.append(open_fds())
    return counts[3], counts[-1]


@each_transport
def test_interrupts_leave_no_descriptor_behind(pool: Pool, transport: str) -> None:
    for early, late in pool.group(2, fresh=True).run(descriptors_after_interrupts, transport):
        assert late <= early
