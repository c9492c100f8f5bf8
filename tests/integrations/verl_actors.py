"""verl's own worker classes, on CPUs: what the tests add is a model, a server and an adapter that looks closely."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica
from weights import Digests, all_weights, digests


class ShardedModel:
    """Two trainers hold half of each tensor each, and gather as they go: both must walk in step, to the end."""

    def __init__(self) -> None:
        self.step = 0
        self.walks = 0
        self.scratch = torch.empty(3 << 18, dtype=torch.float64)

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return self._gathered(all_weights(self.step)), None

    def _gathered(self, whole: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        rank = dist.get_rank()
        for name, tensor in whole.items():
            mine = torch.zeros(tensor.numel(), dtype=torch.float64)
            half = slice(0, tensor.numel() // 2) if rank == 0 else slice(tensor.numel() // 2, None)
            mine[half] = tensor.reshape(-1)[half].to(torch.float64)
            dist.all_reduce(mine)
            if tensor.is_contiguous() and tensor.numel():
                # Freed, that is written over, as soon as the next one is asked for.
                view = self.scratch.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
                view.copy_(mine.view(tensor.shape))
                yield name, view
                self.scratch.fill_(float("nan"))
            else:
                tensor.copy_(mine.view(tensor.shape))
                yield name, tensor
        self.walks += 1


class Trainer(ActorRolloutRefWorker):
    """verl's trainer with another model: execute_checkpoint_engine and update_weights are verl's."""

    def __init__(self, rollout: Any, meeting_place: str) -> None:
        Worker.__init__(self)
        dist.init_process_group(
            "gloo", init_method=meeting_place, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
        )
        self.config = SimpleNamespace(rollout=rollout)
        self.actor = SimpleNamespace(engine=ShardedModel())
        engine = rollout.checkpoint_engine
        import_external_libs(engine.custom_backend_module or None)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            engine.backend,
            is_master=dist.get_rank() == 0,
            bucket_size=engine.update_weights_bucket_megabytes << 20,
            **engine.engine_kwargs.get(engine.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> None:
        self.actor.engine.step = step

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> dict[str, Any]:
        engine = self.checkpoint_engine
        return {
            "walks": self.actor.engine.walks,
            "session": id(engine._sync),
            "groups": len(dist.distributed_c10d._world.pg_map),
        }


class Adapter(BaseRollout):
    """Retains what it is yielded, as verl's SGLang adapter does: a clone only of what has a `_base`."""

    replica_rank = 0
    is_leader_rank = True

    def __init__(self) -> None:
        self.updates: list[tuple[int | None, dict[str, torch.Tensor], Digests]] = []
        self.plan: tuple[str, int] | None = None

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        kept: dict[str, torch.Tensor] = {}
        came: Digests = {}
        async for name, tensor in weights:
            assert name not in kept, f"{name} came twice"
            kept[name] = tensor if tensor._base is None else tensor.clone()
            came.update(digests({name: tensor}))
            if self.plan is not None and len(kept) == self.plan[1]:
                if self.plan[0] == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.plan[0] == "stop":  # it is there, and never answers anything again
                    os.kill(os.getpid(), signal.SIGSTOP)
                self.plan = None
                raise KeyError("no such weight in this replica")
        self.updates.append((global_steps, kept, came))
        del self.updates[:-3]


class Rollout(CheckpointEngineWorker):
    """verl's rollout worker, with ways to look at what it was given."""

    def __init__(self, rollout: Any) -> None:
        super().__init__(rollout, None, Adapter())

    def plan(self, what: str, after: int) -> None:
        """Says what the next update ends in, after so many tensors."""
        self.server_adapter.plan = (what, after)

    def retained(self) -> list[tuple[int | None, Digests, Digests]]:
        """The last updates: the step, what each tensor was when it came, and what it is now."""
        return [(step, came, digests(kept)) for step, kept, came in self.server_adapter.updates]


class Replica(RolloutReplica):
    """verl's replica over workers and a server that are there already."""

    def __init__(self, number: int, workers: list[Any], server: Any) -> None:
        self.replica_rank = number
        self.workers = workers
        self.servers = [server]

    async def launch_servers(self) -> None: ...
