"""Updates through checkpoint engines: what a driver does, done by the ranks among themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fastsync.engine
from support.ranks import Rank
from support.tensors import assert_same, clone_exact

TIMEOUT_S = 20.0


class Member:
    """One rank's engine. The first `trainers` ranks are trainers, the others rollout workers."""

    def __init__(self, rank: Rank, trainers: int = 1, name: str = "shm", **options: Any) -> None:
        options.setdefault("timeout", TIMEOUT_S)
        self.rank = rank
        self.trainers = trainers
        self.engine: Any = fastsync.engine.new(name, is_master=rank.index == 0, **options)

    @property
    def is_trainer(self) -> bool:
        return self.rank.index < self.trainers

    def form(self, rank: Rank | None = None, *, master_only: bool = False) -> None:
        """prepare() on every rank, build_topology() on one, init_process_group() on every rank."""
        rank = rank or self.rank
        told = rank.share(self.engine.prepare())
        workers = rank.size - self.trainers
        if master_only:
            told = told[:1]
        built = type(self.engine).build_topology(self.trainers, workers, told) if rank.index == 0 else None
        trainer_kwargs, worker_kwargs = rank.share(built)[0]
        kwargs, at = (trainer_kwargs, rank.index) if self.is_trainer else (worker_kwargs, rank.index - self.trainers)
        assert all(len(values) == (self.trainers if self.is_trainer else workers) for values in kwargs.values())
        self.engine.init_process_group(**{name: values[at] for name, values in kwargs.items()})

    def move(self, weights: Any, step: int | None = None, consume: Callable[..., Any] | None = None) -> Any:
        """send_weights() or receive_weights(); returns the metrics or what came."""
        if self.is_trainer:
            return asyncio.run(self.engine.send_weights(weights, global_steps=step))
        return asyncio.run((consume or collect)(self.engine.receive_weights(global_steps=step)))

    def update(self, weights: Any, want: Mapping[str, torch.Tensor], step: int | None = None) -> Any:
        """One whole update; a rollout worker checks every value."""
        self.form()
        moved = self.move(weights, step)
        if not self.is_trainer:
            assert_same(moved, want)
        self.engine.finalize()
        return moved


async def collect(items: Any) -> dict[str, torch.Tensor]:
    """Retains what it is yielded as an adapter of SGLang does: a clone only of what says that it is a view."""
    got: dict[str, torch.Tensor] = {}
    first: dict[str, torch.Tensor] = {}
    async for name, tensor in items:
        assert name not in got, f"{name} came twice"
        got[name] = tensor if tensor._base is None else tensor.clone()
        first[name] = clone_exact(tensor)
    assert_same(got, first)  # nothing of what was retained has changed
    return got
