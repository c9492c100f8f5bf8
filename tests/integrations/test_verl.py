"""verl's own manager, registry and worker classes, two trainers and two replicas, over fastsync."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from server import Server
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl_actors import Replica, Rollout, Trainer
from weights import all_weights, digests

import fastsync.ray

TIMEOUT_S = 30.0
LIMIT_S = 90.0


def rollout_config() -> RolloutConfig:
    return RolloutConfig(
        name="vllm",
        checkpoint_engine=CheckpointEngineConfig(
            backend="fastsync",
            custom_backend_module="fastsync.integrations.verl",
            update_weights_bucket_megabytes=1,
            engine_kwargs={"fastsync": {"timeout": TIMEOUT_S}},
        ),
    )


def on_one_rank(rank: int, size: int) -> dict[str, Any]:
    """Where verl's workers look for their place; port 0 is a free one."""
    env = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return {"num_cpus": 1, "runtime_env": {"env_vars": env}}


class Job:
    """A training job: the trainers, the replicas, and a manager of verl's or ours."""

    def __init__(self, folder: Path) -> None:
        self.config = rollout_config()
        self.trainer_cls, self.rollout_cls, self.server_cls = map(ray.remote, (Trainer, Rollout, Server))
        place = f"file://{folder / 'meet'}"
        trainers = [self.trainer_cls.options(**on_one_rank(r, 2)).remote(self.config, place) for r in range(2)]
        self.actor_wg = RayWorkerGroup(
            worker_handles=trainers, ray_cls_with_init=RayClassWithInitArgs(cls=self.trainer_cls)
        )
        self.count = 0
        self.step = 0

    def replica(self) -> Replica:
        number, self.count = self.count, self.count + 1
        worker = self.rollout_cls.options(**on_one_rank(0, 1)).remote(self.config)
        return Replica(number, [worker], self.server_cls.options(num_cpus=0).remote())

    def manager(self, cls: Any, replicas: list[Replica]) -> Any:
        return cls(self.config.checkpoint_engine, self.actor_wg, replicas)

    def train(self) -> int:
        self.step += 1
        self.actor_wg.train(self.step)
        return self.step

    def trainers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.actor_wg.state()
        return found


def check(replica: Replica, step: int) -> None:
    """The replica has every value of `step`, and nothing that it retained has changed since it came."""
    updates = get(replica.workers[0].retained.remote())
    assert updates[-1][0] == step
    for seen_step, came, now in updates:
        want = digests(all_weights(seen_step))
        assert list(came) == list(want)
        assert came == want, f"step {seen_step}: wrong values in {[n for n in want if came[n] != want[n]]}"
        assert now == came, f"step {seen_step}: retained tensors changed: {[n for n in want if came[n] != now[n]]}"


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def job(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def replicas(job: Job) -> Iterator[list[Replica]]:
    made = [job.replica(), job.replica()]
    yield made
    for replica in made:
        for actor in (*replica.workers, *replica.servers):
            ray.kill(actor)


def test_five_steps_through_verls_own_manager(job: Job, replicas: list[Replica]) -> None:
    manager = job.manager(CheckpointEngineManager, replicas)
    assert CheckpointEngineRegistry.get("fastsync").__module__ == "fastsync.integrations.verl"
    sessions = set()
    for _ in range(5):
        step = job.train()
        metrics = manager.update_weights(global_steps=step)
        if metrics is not None:  # since 0.9
            assert metrics["checkpoint_engine/version"] == step
            assert all(isinstance(value, (int, float)) for value in metrics.values())
        for replica in replicas:
            check(replica, step)
            assert get(replica.servers[0].state.remote())[:2] == (True, True)
        state = job.trainers()
        sessions.add(state[0]["session"])
        assert [each["groups"] for each in state] == [1, 1], "a group of the trainers' was touched"
    assert len(sessions) == 1, "a new group was formed though nothing changed"
    assert len({each["walks"] for each in job.trainers()}) == 1


def test_a_replica_killed_between_updates_is_removed_and_another_added(job: Job, replicas: list[Replica]) -> None:
    manager = job.manager(CheckpointEngineManager, list(replicas))
    manager.update_weights(global_steps=job.train())
    ray.kill(replicas[1].workers[0])
    step = job.train()
    with pytest.raises(ray.exceptions.RayActorError):
        manager.update_weights(global_steps=step)
    manager.remove_replicas([replicas[1]])
    manager.update_weights(global_steps=step)
    check(replicas[0], step)
    replicas.append(job.replica())
    manager.add_replicas([replicas[2]])
    step = job.train()
    manager.update_weights(global_steps=step)
    for replica in (replicas[0], replicas[2]):
        check(replica, step)


@pytest.mark.parametrize("how", ["die", "raise"])
def test_a_replica_that_fails_during_an_update_does_not_stop_the_next(
    job: Job, replicas: list[Replica], how: str
) -> None:
    manager = job.manager(CheckpointEngineManager, list(replicas))
    manager.update_weights(global_steps=job.train())
    walks = [each["walks"] for each in job.trainers()]
    get(replicas[1].workers[0].plan.remote(how, 9))
    step = job.train()
    began = time.monotonic()
    with pytest.raises(Exception, match=r"rank 2|no such weight|died"):
        manager.update_weights(global_steps=step)
    assert time.monotonic() - began < TIMEOUT_S
    assert [each["walks"] for each in job.trainers()] == [w + 1 for w in walks], "a trainer was left inside its model"
    if how == "die":
        manager.remove_replicas([replicas[1]])
    manager.update_weights(global_steps=step)
    for replica in replicas[:1] if how == "die" else replicas:
        check(replica, step)


def test_our_manager_goes_on_without_a_replica_that_dies_and_serves_one_that_is_added(
    job: Job, replicas: list[Replica]
) -> None:
    cls = load_class_from_fqn(
        "fastsync.ray.CheckpointEngineManager", "CheckpointEngineManager"
    )  # as verl's trainers do
    assert cls is fastsync.ray.CheckpointEngineManager
    manager = job.manager(cls, list(replicas))
    for _ in range(2):
        step = job.train()
        manager.update_weights(global_steps=step)
        for replica in replicas:
            check(replica, step)
    get(replicas[1].workers[0].plan.remote("die", 9))
    get(replicas[0].servers[0].state.remote())
    step = job.train()
    metrics = manager.update_weights(global_steps=step)
    assert metrics["checkpoint_engine/replicas"] == metrics["checkpoint_engine/failed_replicas"] == 1
    (failed,) = manager.failed_replicas
    assert failed.replica is replicas[1] and failed.phase == "update"
    check(replicas[0], step)
    log = ["abort", "release_kv", "resume_kv", "resume"]
    assert get(replicas[0].servers[0].state.remote()) == (True, True, log)
    assert get(replicas[1].servers[0].state.remote())[0] is False
    replicas.append(job.replica())
    manager.add_replicas([replicas[2]])
    step = job.train()
    assert manager.update_weights(global_steps=step)["checkpoint_engine/replicas"] == 2
    for replica in (replicas[0], replicas[2]):
        check(replica, step)


def test_our_manager_names_a_replica_that_never_answers_and_the_rest_go_on(job: Job, replicas: list[Replica]) -> None:
    manager = job.manager(fastsync.ray.CheckpointEngineManager, list(replicas))
    manager.update_weights(global_steps=job.train())
    get(replicas[1].workers[0].plan.remote("stop", 9))
    step = job.train()
    began = time.monotonic()
    metrics = manager.update_weights(global_steps=step)
    # The engines' deadline, and the time that those who are left give the silent one in the two phases after it.
    assert time.monotonic() - began < manager.timeout + 2 * fastsync.ray._GRACE_S
    assert metrics["checkpoint_engine/replicas"] == metrics["checkpoint_engine/failed_replicas"] == 1
    (failed,) = manager.failed_replicas
    assert (failed.replica, failed.name, failed.phase) == (
        replicas[1],
        f"replica {replicas[1].replica_rank}",
        "update",
    )
    assert "rank 2" in str(failed.error)
    check(replicas[0], step)
    assert get(replicas[0].servers[0].state.remote())[:2] == (True, True)
    step = job.train()
    manager.update_weights(global_steps=step)
    check(replicas[0], step)
