"""Updates through checkpoint engines, without any framework."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.markers import each_transport
from support.ranks import Pool, Rank, raises, spmd
from support.tensors import assert_same, clone_exact, poisoned, random_tensor, storage_bytes
from support.updates import Member


def weights(seed: int, count: int = 12) -> dict[str, torch.Tensor]:
    return {f"w{i}": random_tensor((300 + i, 7), torch.bfloat16, 100 * seed + i) for i in range(count)}


def one_by_one(params: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from params.items()


@each_transport
@spmd(4, make_group=False)
def test_five_updates_bring_every_value_to_every_rollout_worker(rank: Rank, transport: str) -> None:
    member = Member(rank, trainers=2, name=transport)
    for step in range(5):
        params = weights(step)
        moved = member.update(one_by_one(params), params, step)
        if rank.index == 0:
            assert moved["version"] == step and moved["transport"] == transport
            assert moved["tensors"] == len(params) and moved["plan_reused"] == (step > 0)
        elif rank.index == 1:
            assert moved == {}
    assert member.engine.finalize() == {"version": None if rank.index == 1 else 4, "dirty": False}


@spmd(3, make_group=False)
def test_awkward_tensors_arrive_as_they_are(rank: Rank) -> None:
    base = random_tensor((40, 30), torch.float32, 5)
    params = {
        "odd": random_tensor((7,), torch.bfloat16, 1),
        "then": random_tensor((5,), torch.float32, 2),
        "empty": torch.empty((0, 4)),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": torch.tensor([1, 2], dtype=torch.int64).expand(3, 2),
        "large": random_tensor((5000,), torch.float32, 3),
        "last.empty": torch.empty(0, dtype=torch.int8),
    }
    member = Member(rank, bucket_size=1024)
    for _ in range(2):
        member.update(one_by_one(params), params)


@each_transport
@spmd(3, make_group=False)
def test_a_generator_may_free_what_it_yielded(rank: Rank, transport: str) -> None:
    params = weights(1, 30)
    scratch = poisoned((329, 7), torch.bfloat16)

    def reused() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in params.items():
            view = scratch[: tensor.shape[0]]
            view.copy_(tensor)
            yield name, view
            storage_bytes(scratch)[:] = 0xA5

    member = Member(rank, name=transport, bucket_size=4096)
    for _ in range(2):
        member.update(reused(), params)


@spmd(2, make_group=False)
def test_what_a_consumer_retained_is_never_written_again(rank: Rank) -> None:
    member = Member(rank, bucket_size=4096)
    kept: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    for step in range(4):
        moved = member.update(one_by_one(weights(step)), weights(step))
        if rank.index == 1:
            kept.append((moved, {name: clone_exact(tensor) for name, tensor in moved.items()}))
        for retained, copy in kept:
            assert_same(retained, copy)


@spmd(2, make_group=False)
def test_what_is_not_a_generator_is_sent_as_well(rank: Rank) -> None:
    module = torch.nn.Linear(3, 2)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    want = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    member = Member(rank)
    member.update(module, want)
    member.update(want, want)
    member.update(list(want.items()), want)


@spmd(2, make_group=False)
def test_an_asynchronous_generator_is_sent_too(rank: Rank) -> None:
    async def later(seed: int) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for item in weights(seed).items():
            await asyncio.sleep(0)
            yield item

    member = Member(rank)
    for seed in range(2):
        member.update(later(seed), weights(seed))


@spmd(3)
def test_the_process_group_of_the_user_is_left_alone(rank: Rank) -> None:
    member = Member(rank, name="gloo")
    before = dist.distributed_c10d._world.pg_map.copy()
    for step in range(2):
        total = torch.ones(4)
        running = dist.all_reduce(total, async_op=True)
        member.update(one_by_one(weights(step)), weights(step))
        running.wait()
        assert total.tolist() == [3.0] * 4
    assert dist.distributed_c10d._world.pg_map == before


@spmd(3, make_group=False)
def test_a_steady_state_costs_next_to_nothing_outside_the_update(rank: Rank) -> None:
    member = Member(rank)
    params = weights(1)
    member.update(one_by_one(params), params)
    session, spent = member.engine._sync, []
    for _ in range(20):
        about = member.engine.prepare  # the driver's part is left out: it is the framework's
        began = time.perf_counter()
        told = about()
        spent.append(time.perf_counter() - began)
        told = rank.share(told)
        built = rank.share(type(member.engine).build_topology(1, 2, told) if rank.index == 0 else None)[0]
        kwargs, at = (built[0], 0) if rank.index == 0 else (built[1], rank.index - 1)
        began = time.perf_counter()
        member.engine.init_process_group(**{name: values[at] for name, values in kwargs.items()})
        spent[-1] += time.perf_counter() - began
        member.move(one_by_one(params))
        began = time.perf_counter()
        member.engine.finalize()
        spent[-1] += time.perf_counter() - began
    assert member.engine._sync is session, "a new group was formed though nothing changed"
    assert sorted(spent)[len(spent) // 2] < 0.005, f"the median is {sorted(spent)[len(spent) // 2] * 1e3:.2f} ms"


def _keep_updating(rank: Rank, steps: int, die_at: int | None) -> int:
    """Updates until this rank dies between two of them, or an update fails; returns how many succeeded."""
    global _member
    _member = Member(rank)
    for step in range(steps):
        if step == die_at:
            rank.die()
        _member.form()
        _member.move(one_by_one(weights(step)), step)
        _member.engine.finalize()
    return steps


_member: Any = None


def _goes_on(rank: Rank, trainers: int, step: int, restarted: bool = False) -> int:
    """The next updates of the members that are left, and of new ones."""
    global _member
    if _member is None or restarted:
        _member = Member(rank, trainers)
    _member.rank, _member.trainers = rank, trainers
    for seed in (step, step + 1):
        _member.update(one_by_one(weights(seed)), weights(seed), seed)
    last = _member.engine.finalize()
    assert not last["dirty"]
    version: int = last["version"]
    return version


def test_a_worker_that_was_replaced_between_updates_is_served(pool: Pool) -> None:
    group = pool.group(3, fresh=True, make_group=False)
    group.run(_keep_updating, 2, None)
    group.kill(2)
    assert pool.regroup(group, [0, 1], replace=True).run(_goes_on, 1, 2) == [3, 3, 3]


def test_a_worker_that_was_removed_is_not_waited_for(pool: Pool) -> None:
    group = pool.group(3, fresh=True, make_group=False)
    group.run(_keep_updating, 2, None)
    assert pool.regroup(group, [0, 2]).run(_goes_on, 1, 2) == [3, 3]


def test_a_trainer_that_was_restarted_finds_the_old_workers(pool: Pool) -> None:
    group = pool.group(3, fresh=True, make_group=False)
    group.run(_keep_updating, 2, None)
    group.kill(0)
    assert pool.regroup(group, [1, 2], replace=True).run(_goes_on, 1, 7) == [8, 8, 8]


def _fails_midway(rank: Rank, how: str) -> tuple[int, str]:
    """An update during which rank 2 dies, or raises; returns how many items the trainers' generator gave."""
    global _member
    _member = Member(rank, trainers=1, bucket_size=4096)
    _member.update(one_by_one(weights(0)), weights(0), 0)
    _member.form()
    given = 0
    closed = "never"

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal given, closed
        for item in weights(1, 60).items():
            given += 1
            yield item
        closed = "at the end"  # what an unmerge would be

    async def leave(items: Any) -> None:
        count = 0
        async for _ in items:
            count += 1
            if rank.index == 2 and count == 7:
                if how == "dies":
                    rank.die()
                raise KeyError("no such weight")

    try:
        _member.move(counted(), 1, leave)
    except Exception as error:
        last = _member.engine.finalize()
        assert last["version"] == 0
        if rank.index in (0, 2):  # the others may have been given something, or not
            assert last["dirty"] == (rank.index == 2)
        if rank.index == 0:
            assert (given, closed) == (60, "at the end"), f"{given} items, {closed}"
        return getattr(error, "rank", -1), type(error).__name__
    raise AssertionError("the update succeeded")


def test_a_worker_killed_during_an_update_is_named_and_the_others_go_on(pool: Pool) -> None:
    group = pool.group(4, fresh=True, make_group=False)
    running = group.start(_fails_midway, "dies")
    outcomes = running.join()
    assert outcomes[2].died
    for survivor in (0, 1, 3):
        assert outcomes[survivor].result() == (2, "PeerLost")
        assert outcomes[survivor].seconds < 10
    assert pool.regroup(group, [0, 1, 3]).run(_goes_on, 1, 2) == [3, 3, 3]


def test_a_consumer_that_raises_fails_the_update_and_not_the_next(pool: Pool) -> None:
    group = pool.group(3, make_group=False)
    outcomes = group.start(_fails_midway, "raises").join()
    assert outcomes[2].result()[1] == "KeyError"
    for other in (0, 1):
        assert outcomes[other].result() == (2, "PeerFailed")
    assert group.run(_goes_on, 1, 2) == [3, 3, 3]


def _one_never_answers(rank: Rank) -> float:
    member = Member(rank, trainers=1, timeout=1.0)
    member.form()
    if rank.index == 2:
        rank.hold("here")
        return 0.0
    with raises("SyncTimeout", rank=2 if rank.index == 0 else None) as caught:
        member.move(one_by_one(weights(1)))
    member.engine.finalize()
    return caught.seconds


def test_a_worker_that_never_answers_is_named_within_the_deadline(pool: Pool) -> None:
    group = pool.group(3, make_group=False)
    group.start(_one_never_answers)
    group.wait_mark(2, "here")
    waiting = [group.worker(rank).reply(rank, time.monotonic() + 20) for rank in (0, 1)]
    assert max(outcome.result() for outcome in waiting) < 4.0
    group.release(2)
    group.worker(2).reply(2, time.monotonic() + 20).result()


@spmd(3, make_group=False)
def test_a_worker_called_for_another_step_refuses_before_the_first_tensor(rank: Rank) -> None:
    member = Member(rank)
    member.update(one_by_one(weights(1)), weights(1), 4)
    member.form()
    came: list[str] = []

    async def note(items: Any) -> None:
        async for name, _ in items:
            came.append(name)

    with raises("InvalidArgument", mentions=["version 6", "version 5"]):
        member.move(one_by_one(weights(2)), 6 if rank.index == 2 else 5, note)
    assert not came or rank.index == 1
    member.engine.finalize()
    member.update(one_by_one(weights(3)), weights(3), 7)


@pytest.mark.parametrize("steps", [(3, 3), (3, None), (3, 1)])
def test_a_step_that_does_not_grow_counts_on(pool: Pool, steps: tuple[int, int | None]) -> None:
    assert pool.group(2, make_group=False).run(_two_steps, *steps) == [4, 4]


def _two_steps(rank: Rank, first: int, second: int | None) -> int:
    member = Member(rank)
    member.update(one_by_one(weights(1)), weights(1), first)
    member.update(one_by_one(weights(2)), weights(2), second)
    version: int = member.engine.finalize()["version"]
    return version


@spmd(3, make_group=False)
def test_the_masters_metadata_alone_makes_a_topology(rank: Rank) -> None:
    member = Member(rank)
    held = None
    for step in range(3):
        member.form(master_only=True)
        moved = member.move(one_by_one(weights(step)), None)
        if rank.index > 0:
            assert_same(moved, weights(step))
        member.engine.finalize()
        session = member.engine._sync
        assert held in (None, session), "a new group was formed though nothing changed"
        held = session


def _alone(rank: Rank) -> None:
    """An update of which only the master is told, with a worker that has lost everything it knew."""
    global _member
    if _member is None:
        _member = Member(rank)
    _member.rank = rank
    for attempt in range(2):
        _member.form(rank, master_only=True)
        try:
            moved = _member.move(one_by_one(weights(5)))
        except ConnectionError:
            assert attempt == 0, "the update after the failed one failed, too"
            _member.engine.finalize()
            continue
        if rank.index > 0:
            assert_same(moved, weights(5))
        _member.engine.finalize()


def test_a_restarted_worker_that_the_master_is_not_told_of_costs_at_most_one_update(pool: Pool) -> None:
    group = pool.group(3, fresh=True, make_group=False)
    group.run(_keep_updating, 2, None)
    group.kill(2)
    pool.regroup(group, [0, 1], replace=True).run(_alone)


@spmd(2, make_group=False)
def test_an_iterator_that_nobody_closed_is_ended_by_the_next_prepare(rank: Rank) -> None:
    member = Member(rank, bucket_size=4096)
    member.form()
    if rank.index == 0:
        with raises("PeerFailed", rank=1):
            member.move(one_by_one(weights(1, 60)))
    else:

        async def first() -> Any:
            items = member.engine.receive_weights()
            await items.__anext__()
            return items

        loop = asyncio.new_event_loop()
        items = loop.run_until_complete(first())
    member.form()
    if rank.index == 1:
        with raises("StateError"):
            loop.run_until_complete(items.__anext__())
        loop.close()
    member.move(one_by_one(weights(2)))
    member.engine.finalize()
