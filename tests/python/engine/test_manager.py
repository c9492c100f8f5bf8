"""The driver's manager over real engines, with threads in the place of Ray's actors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastsync.ray
from fastsync.engine import ShmCheckpointEngine
from fastsync.ray import CheckpointEngineManager
from support.tensors import assert_same, clone_exact, random_tensor

TIMEOUT_S = 4.0


def weights(step: int, count: int = 8) -> dict[str, torch.Tensor]:
    return {f"w{i}": random_tensor((300 + i, 7), torch.bfloat16, 100 * step + i) for i in range(count)}


class RayActorError(Exception):
    """What Ray raises, by name, for a call on an actor that is gone."""


class Actor:
    """Calls on one thread, answered by awaitables, as an actor answers them."""

    def __init__(self) -> None:
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.dead = False

    def submit(self, work: Callable[[], Any]) -> Any:
        if self.dead:
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            future.set_exception(RayActorError("the actor died"))
        else:
            future = self.pool.submit(work)

        async def answer() -> Any:
            return await asyncio.wrap_future(future)

        return answer()


class Worker(Actor):
    """A rollout worker: what verl's CheckpointEngineWorker does, with a consumer that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = ShmCheckpointEngine(timeout=TIMEOUT_S, bucket_size=4096)
        self.got: dict[str, torch.Tensor] = {}
        self.trouble: Callable[[int], Any] | None = None
        self.lies = False
        self.execute_checkpoint_engine = SimpleNamespace(remote=self._execute)
        self.update_weights = SimpleNamespace(remote=self._update)

    def _execute(self, method: str, **kwargs: Any) -> Any:
        def work() -> Any:
            result = getattr(self.engine, method)(**kwargs)
            if self.lies and method == "finalize":
                result["version"] -= 1
            return result

        return self.submit(work)

    def _update(self, global_steps: int | None) -> Any:
        async def take() -> None:
            got: dict[str, torch.Tensor] = {}
            async for name, tensor in self.engine.receive_weights(global_steps):
                got[name] = tensor
                if self.trouble is not None and len(got) == 5:
                    self.trouble(len(got))
            self.got = got

        return self.submit(lambda: asyncio.run(take()))


class Trainers:
    """A worker group of two trainers."""

    world_size = 2

    def __init__(self) -> None:
        self.actors = [Actor(), Actor()]
        self.engines = [
            ShmCheckpointEngine(is_master=i == 0, timeout=TIMEOUT_S, bucket_size=4096) for i in range(self.world_size)
        ]
        self.step = 0
        self.trouble: Exception | None = None
        self.walks = [0, 0]

    def execute_checkpoint_engine(self, method: list[str], **lists: list[Any]) -> list[Any]:
        calls = []
        for at, (actor, engine) in enumerate(zip(self.actors, self.engines)):
            own = {name: values[at] for name, values in lists.items()}
            calls.append(actor.submit(lambda e=engine, m=method[at], k=own: getattr(e, m)(**k)))
        return calls

    def update_weights(self, global_steps: int | None, mode: str) -> list[Any]:
        assert mode == "shm"
        return [
            actor.submit(lambda e=engine, n=at: asyncio.run(e.send_weights(self._walk(n), global_steps)))
            for at, (actor, engine) in enumerate(zip(self.actors, self.engines))
        ]

    def _walk(self, at: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(weights(self.step, 60).items()):
            if number == 40 and self.trouble is not None:
                raise self.trouble
            yield item
        self.walks[at] += 1


class Replica:
    """Notes what it is asked, in which order."""

    def __init__(self, number: int, workers: int = 1) -> None:
        self.replica_rank = number
        self.workers = [Worker() for _ in range(workers)]
        self.log: list[str] = []
        self.trouble = ""
        self.serving = True

    async def _asked(self, what: str) -> None:
        self.log.append(what)
        if self.trouble == what:
            raise RuntimeError(f"cannot {what}")
        if self.trouble == f"{what} never":
            await asyncio.sleep(1e6)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self._asked("abort")
        self.serving = False

    async def release_kv_cache(self) -> None:
        await self._asked("release")

    async def resume_kv_cache(self) -> None:
        await self._asked("restore")

    async def resume_generation(self) -> None:
        await self._asked("resume")
        self.serving = True

    def check(self, step: int) -> None:
        for worker in self.workers:
            assert_same({name: clone_exact(tensor) for name, tensor in worker.got.items()}, weights(step, 60))


class Job:
    def __init__(self, replicas: int, workers: int = 1, timeout: float = 8.0) -> None:
        self.trainers = Trainers()
        self.replicas = [Replica(i, workers) for i in range(replicas)]
        config = SimpleNamespace(backend="shm", engine_kwargs={})
        self.manager = CheckpointEngineManager(config, self.trainers, self.replicas, timeout=timeout)

    def update(self, step: int) -> dict[str, Any]:
        self.trainers.step = step
        metrics: dict[str, Any] = self.manager.update_weights(global_steps=step)
        return metrics


def test_every_replica_gets_every_step_in_the_order_of_verls_lifecycle() -> None:
    job = Job(2, workers=2)
    for step in range(3):
        metrics = job.update(step)
        assert metrics["version"] == step and metrics["checkpoint_engine/replicas"] == 2
        for replica in job.replicas:
            replica.check(step)
            assert replica.log == ["abort", "release", "restore", "resume"] and replica.serving
            replica.log.clear()
    assert job.trainers.walks == [3, 3]


def test_it_can_be_awaited_and_called_from_inside_a_loop() -> None:
    job = Job(1)

    async def both() -> None:
        job.trainers.step = 1
        assert (await job.manager.update_weights(1))["version"] == 1
        assert (lambda: job.update(2))()["version"] == 2

    asyncio.run(both())
    job.replicas[0].check(2)


@pytest.mark.parametrize("how", ["raises", "hangs", "dead", "lies", "abort", "release", "abort never"])
def test_one_replica_that_fails_is_named_and_the_others_serve_the_new_version(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastsync.ray, "_GRACE_S", 2.0)
    job = Job(3, timeout=1.0 if how == "abort never" else 8.0)
    job.update(1)
    bad = job.replicas[1]
    worker = bad.workers[0]
    woken = concurrent.futures.Future[None]()
    if how == "raises":
        worker.trouble = lambda _: {}["no such weight"]
    elif how == "hangs":
        worker.trouble = lambda _: woken.result(60)
    elif how == "dead":
        worker.dead = True
    elif how == "lies":
        worker.lies = True
    else:
        bad.trouble = how
    began = time.monotonic()
    metrics = job.update(2)
    assert time.monotonic() - began < 60
    woken.set_result(None)
    assert metrics["checkpoint_engine/replicas"] == 2 and metrics["checkpoint_engine/failed_replicas"] == 1
    (failed,) = job.manager.failed_replicas
    assert failed.replica is bad and failed.name == "replica 1"
    wanted = {
        "raises": "no such weight",
        "hangs": "rank 2",
        "dead": "the actor died",
        "lies": "version 1; version 2 was sent",
        "abort never": "no answer to abort",
    }
    assert wanted.get(how, f"cannot {how}") in str(failed.error)
    for replica in (job.replicas[0], job.replicas[2]):
        replica.check(2)
        assert replica.serving
    assert not bad.serving or how.startswith("abort")
    assert bad not in job.manager.replicas
    job.update(3)  # and on without it
    job.replicas[2].check(3)


def test_replicas_come_and_go_between_steps() -> None:
    job = Job(2)
    job.update(1)
    new = Replica(7)
    job.manager.add_replicas([new, new])
    job.update(2)
    new.check(2)
    job.manager.remove_replicas([job.replicas[0]])
    job.update(3)
    new.check(3)
    job.replicas[1].check(3)
    job.replicas[0].check(2)


def test_a_failed_replica_may_come_back() -> None:
    job = Job(2)
    job.update(1)
    job.replicas[1].workers[0].trouble = lambda _: {}["no such weight"]
    job.update(2)
    job.replicas[1].workers[0].trouble = None
    job.manager.add_replicas([job.replicas[1]])
    job.update(3)
    for replica in job.replicas:
        replica.check(3)
        assert replica.serving


def test_trainers_that_fail_leave_no_replica_serving_mixed_weights() -> None:
    job = Job(2)
    job.update(1)
    job.trainers.trouble = ValueError("out of memory")
    with pytest.raises(ValueError, match="out of memory"):
        job.update(2)
    assert len(job.manager.replicas) == 2 and not job.manager.failed_replicas
    for replica in job.replicas:
        assert replica.serving == (not replica.workers[0].engine.finalize()["dirty"])
    assert not all(replica.serving for replica in job.replicas)
    job.trainers.trouble = None
    job.update(2)
    for replica in job.replicas:
        replica.check(2)
        assert replica.serving
        assert replica.log.count("abort") == replica.log.count("resume")
        assert replica.log.count("release") == replica.log.count("restore")


def test_trainers_that_cannot_even_prepare_leave_the_replicas_serving() -> None:
    job = Job(2)
    job.trainers.actors[1].dead = True
    with pytest.raises(RayActorError):
        job.update(1)
    assert all(replica.serving for replica in job.replicas)


def test_the_last_replica_that_fails_ends_the_update_with_its_reason() -> None:
    job = Job(2)
    for replica in job.replicas:
        replica.workers[0].trouble = lambda _: {}["no such weight"]
    with pytest.raises(fastsync.PeerFailed, match=r"replica [01] in update: KeyError.*replica [01] in update"):
        job.update(1)
    with pytest.raises(fastsync.StateError, match="no replica"):
        job.update(1)


def test_what_is_wrong_with_the_arguments_is_said() -> None:
    config = SimpleNamespace(backend="shm", engine_kwargs={"shm": {"timeout": 7}})
    with pytest.raises(fastsync.InvalidArgument, match="worker group"):
        CheckpointEngineManager(config)
    with pytest.raises(fastsync.InvalidArgument, match="timeout is -1"):
        CheckpointEngineManager(config, Trainers(), timeout=-1)
    assert CheckpointEngineManager(config, trainer=Trainers()).timeout == 14
