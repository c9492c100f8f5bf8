"""`CheckpointEngine`: the calls that verl and Twinkle make on an engine, in the order in which they make them."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["CheckpointEngine", "Topology", "Weights"]

Weights = Iterable[tuple[str, torch.Tensor]]
# Keyword arguments of init_process_group(), each a list with one value a worker: of the trainers, of the rollout workers.
Topology = tuple[dict[str, list[Any]], dict[str, list[Any]]]


class CheckpointEngine(abc.ABC):
    """One process's end of the weight updates from the trainers to the rollout workers.

    Every trainer rank and every rollout worker has one. An update is, on all of them:

        prepare() -> build_topology(), once, where the driver is -> init_process_group() -> send_weights() on every
        trainer rank while receive_weights() runs on every rollout worker -> finalize()

    `prepare`, `init_process_group` and `finalize` are plain functions with picklable arguments and results, since
    drivers call them from afar.
    """

    # What receive_weights() yields: (name, whole tensor).
    wire_format = "named_tensors"

    rank: int | None = None
    """This process's rank in the update: 0 sends, 1 and up receive, -1 has no part in the transfer; None before."""

    is_master: bool = False
    """True on trainer rank 0, which sends; set before prepare()."""

    @abc.abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Gets ready for an update; returns what build_topology() must know of this process."""

    @classmethod
    @abc.abstractmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any] | None]
    ) -> Topology:
        """Decides who is which rank. Runs where the driver is.

        Args:
            trainer_world_size: How many trainer ranks there are.
            rollout_world_size: How many rollout workers.
            metadata: What prepare() returned, trainers first; or the master's alone.

        Returns:
            Keyword arguments of init_process_group() for the trainers and for the rollout workers: lists with one value
            a worker.
        """

    @abc.abstractmethod
    def init_process_group(self, **kwargs: Any) -> None:
        """Takes this process's place in the topology."""

    @abc.abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Sends `weights`, an iterator of (name, tensor). Every trainer rank calls it, and every one exhausts it."""

    @abc.abstractmethod
    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) as they come, in the order in which they are sent. Called by every rollout worker."""

    @abc.abstractmethod
    def finalize(self) -> Any:
        """Ends an update, whether it succeeded or not."""
