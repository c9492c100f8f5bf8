"""Many syncs leave nothing behind: memory, descriptors, threads, mappings and /dev/shm stay flat."""

from __future__ import annotations

import gc

import torch

from support.markers import each_transport, leak
from support.process import Held, shm_entries, shm_used_bytes
from support.ranks import Pool, Rank, raises, spmd
from support.syncing import good_sync, receive, session
from support.tensors import poisoned_like

MIB = 2**20
pytestmark = leak


def weights(fill: float, count: int = 16) -> dict[str, torch.Tensor]:
    return {f"layer{i}.w": torch.full((64 * 1024 + i,), fill) for i in range(count)}


def soak(rank: Rank, transport: str, syncs: int, settle: int, fail_every: int = 0) -> None:
    """Runs `syncs` syncs of 4 MiB in all receive modes and compares what is held after `settle` and at the end."""
    mine = weights(0.0)
    modes = ("into", "into", "load", "stream", "borrow")
    before = None
    with session(transport=transport, bucket_bytes=MIB) as sync:
        for step in range(syncs):
            if step == settle:
                _rest(rank, sync, mine)
                before = Held.now()
                rank.barrier()
            if fail_every and step % fail_every == 1:
                _failing(rank, sync, step, mine)
                continue
            if rank.index == 0:
                for tensor in mine.values():
                    tensor.fill_(float(step))
                sync.broadcast(mine if step % 7 else iter(mine.items()))
            else:
                mode = modes[step % len(modes)]
                if mode == "into":
                    sync.receive(into=mine)
                    assert float(mine["layer3.w"][-1]) == step
                else:
                    got, _ = receive(sync, mode)
                    assert float(got["layer3.w"][-1]) == step
                    del got
        _rest(rank, sync, mine)
        assert before is not None
        Held.now().assert_flat_since(before, rss_slack=6 * MIB)
        rank.barrier()


def _rest(rank: Rank, sync: object, mine: dict[str, torch.Tensor]) -> None:
    """Brings a session into the state of just having run a good sync into a loader: two such states are comparable."""
    if rank.index == 0:
        sync.broadcast(mine)  # type: ignore[attr-defined]
    else:
        sync.receive(load=lambda batch: None)  # type: ignore[attr-defined]
    rank.barrier()


def _failing(rank: Rank, sync: object, step: int, mine: dict[str, torch.Tensor]) -> None:
    """A sync that fails on the source, on a receiver, or by a mismatch, in turn."""
    kind = step // 2 % 3
    if kind == 0:

        def items() -> object:
            yield from list(mine.items())[:5]
            raise ValueError("source")

        with raises("ValueError", "PeerFailed"):
            sync.broadcast(items()) if rank.index == 0 else receive(sync, "load")  # type: ignore[attr-defined]
    elif kind == 1:
        calls = []

        def load(batch: object) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("receiver")

        with raises("ValueError", "PeerFailed"):
            sync.broadcast(mine) if rank.index == 0 else sync.receive(load=load)  # type: ignore[attr-defined]
    else:
        other = {name: tensor for name, tensor in mine.items() if name != "layer2.w"}
        with raises("ManifestMismatch"):
            sync.broadcast(mine) if rank.index == 0 else sync.receive(into=other)  # type: ignore[attr-defined]


@spmd(2, limit_s=180, fresh=True)
def test_three_hundred_shm_syncs_are_flat(rank: Rank) -> None:
    soak(rank, "shm", 300, 40)


@spmd(2, limit_s=180, fresh=True)
def test_hundred_gloo_syncs_are_flat(rank: Rank) -> None:
    soak(rank, "gloo", 100, 25)


@spmd(3, limit_s=180, fresh=True)
def test_shm_syncs_with_a_failure_every_second_one_are_flat(rank: Rank) -> None:
    soak(rank, "shm", 200, 80, fail_every=2)


@spmd(2, limit_s=180, fresh=True)
def test_gloo_syncs_with_a_failure_every_second_one_are_flat(rank: Rank) -> None:
    soak(rank, "gloo", 120, 60, fail_every=2)


@each_transport
@spmd(2, limit_s=120, fresh=True)
def test_sessions_opened_and_closed_leave_nothing(rank: Rank, transport: str) -> None:
    mine = weights(1.0, 3)

    def once() -> None:
        with session(transport=transport, bucket_bytes=MIB) as sync:
            sync.broadcast(mine) if rank.index == 0 else sync.receive(into=mine)

    for _ in range(6):
        once()
    rank.barrier()
    before = Held.now()
    rank.barrier()
    for _ in range(30):
        once()
    rank.barrier()
    Held.now().assert_flat_since(before, rss_slack=4 * MIB)
    rank.barrier()


@each_transport
@spmd(2, limit_s=120, fresh=True)
def test_new_manifests_do_not_pile_up_plans(rank: Rank, transport: str) -> None:
    before = None
    with session(transport=transport, bucket_bytes=MIB) as sync:
        for step in range(140):
            if step == 60:
                rank.barrier()
                before = Held.now()
                rank.barrier()
            sent = {f"step{step}.tensor{i}.{'n' * 200}": torch.ones(4) for i in range(500)}
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=poisoned_like(sent))
    rank.barrier()
    assert before is not None
    Held.now().assert_flat_since(before, rss_slack=8 * MIB)
    rank.barrier()


@each_transport
@spmd(2, fresh=True)
def test_sync_keeps_no_tensor_alive_after_close(rank: Rank, transport: str) -> None:
    import weakref

    mine = weights(1.0, 3)
    seen = [weakref.ref(tensor) for tensor in mine.values()]
    with session(transport=transport) as sync:
        for _ in range(2):
            sync.broadcast(mine) if rank.index == 0 else sync.receive(into=mine)
    del mine
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


@spmd(2, fresh=True)
def test_memory_of_streamed_tensors_is_given_back(rank: Rank) -> None:
    with session(bucket_bytes=MIB) as sync:
        held = None
        for step in range(30):
            if step == 8:
                held = Held.now()
            if rank.index == 0:
                sync.broadcast(weights(float(step)))
            else:
                for _, tensor in sync.stream():
                    assert float(tensor[0]) == step
                del tensor
        assert held is not None
        Held.now().assert_flat_since(held, rss_slack=6 * MIB)


def one_good(rank: Rank, transport: str) -> None:
    with session(transport=transport) as sync:
        good_sync(rank, sync)


def dies_in_second_bucket(rank: Rank, transport: str, victim: int) -> None:
    sent = weights(2.0, 6)

    def items() -> object:
        for i, item in enumerate(sent.items()):
            if i == 2 and rank.index == victim:
                rank.die()
            yield item

    def load(batch: object) -> None:
        load.calls += 1  # type: ignore[attr-defined]
        if load.calls == 2 and rank.index == victim:  # type: ignore[attr-defined]
            rank.die()

    load.calls = 0  # type: ignore[attr-defined]
    with session(transport=transport, bucket_bytes=256 * 1024) as sync:
        with raises("PeerLost", "PeerFailed", "SyncTimeout"):
            sync.broadcast(items()) if rank.index == 0 else sync.receive(load=load)


def test_killed_ranks_leave_nothing_in_shared_memory(pool: Pool) -> None:
    entries, used = shm_entries(), shm_used_bytes()
    for round_ in range(12):
        group = pool.group(3)
        running = group.start(dies_in_second_bucket, "shm", round_ % 3)
        group.wait_mark(round_ % 3, "died")
        outcomes = running.join(30)
        assert outcomes[round_ % 3].died
        for rank in {0, 1, 2} - {round_ % 3}:
            outcomes[rank].result()
    pool.group(3).run(one_good, "shm")
    pool.reset()
    assert shm_entries() <= entries
    assert shm_used_bytes() <= used + MIB


def held(rank: Rank) -> Held:
    return Held.now()


def test_kill_and_rejoin_rounds_keep_the_survivor_flat(pool: Pool) -> None:
    for transport in ("shm", "gloo"):
        group = pool.group(3, fresh=True)
        baseline = None
        for round_ in range(12):
            group.run(one_good, transport)
            if round_ == 6:
                baseline = group.run(held)[1]
            victim = (0, 2)[round_ % 2]
            running = group.start(dies_in_second_bucket, transport, victim)
            group.wait_mark(victim, "died")
            outcomes = running.join(30)
            outcomes[1].result()
            group = pool.regroup(group, [rank for rank in range(3) if rank != victim], replace=True)
        group.run(one_good, transport)
        after = group.run(held)[1]
        assert baseline is not None
        after.assert_flat_since(baseline, rss_slack=8 * MIB)
