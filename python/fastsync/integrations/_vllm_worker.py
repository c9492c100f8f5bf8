"""The receiving end inside a vLLM worker: `Receiver`, and `WorkerExtension`, by which vLLM may call it.

An update is one call, `update()`. It checks the manifest against the model and with the engine's other workers, takes
part in the sync as rank `rank_offset + worker`, loads every bucket as it comes, finishes vLLM's reload, and only then
lets fastsync commit. In the end the workers tell each other how it went: if one of them failed, all of them go back to
the old weights. Between two calls the model is always whole, so requests may run on.

Everything happens on the thread that calls, which owns the model. Waits: for the trainer and in the transfer, each ended
by `timeout_s` without progress; for the other workers of the engine, at most `timeout_s`.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from .._store_group import StoreGroup
from ..engine.topology import connect_store
from ..errors import Error, InvalidArgument, PeerFailed, StateError, SyncTimeout
from ..report import SyncReport
from ..session import WeightSync
from ._vllm_manifest import InitInfo, Manifest, UpdateInfo
from ._vllm_reload import VLLM, LayerwiseLoad, Plan, rehearse

__all__ = ["Receiver", "WorkerExtension", "receiver_of"]

_log = logging.getLogger("fastsync")
_REMEMBERED = 4  # manifests found good


class Receiver:
    """What one worker receives with, whatever vLLM calls it by.

    Args:
        worker: This worker's number among all workers of all replicas, from 0.
        name: How messages call it.
    """

    def __init__(self, worker: int, name: str) -> None:
        self.worker = worker
        self.name = name
        self._info: InitInfo | None = None
        self._sync: WeightSync | None = None
        self._plans: dict[str, Plan] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self.mixed = False
        """Whether an update failed midway and could not be undone (keep_old=False)."""
        self.version: int | None = None
        """Of the last update that this worker holds; None if none came."""
        self.report: SyncReport | None = None
        self.copied_bytes = 0
        """Of the last update: bytes copied because their layer was open at a bucket's edge."""
        self.most_open_bytes = 0
        """Of the last update: the most bytes that such copies, and tensors spanning buckets, held at one time."""

    def init(self, info: InitInfo) -> None:
        """Joins the trainer's group, in place of any earlier one. Looks at the trainer's store; waits for nobody else."""
        self.close()
        rank = info.rank_offset + self.worker
        if rank > info.workers:
            raise InvalidArgument(
                f"{self.name} would be rank {rank} of a group of {info.workers} workers and the trainer; make VllmTrainer with "
                "workers= the number of all workers, tensor, pipeline and data parallel ones"
            )
        store = connect_store(info.store, info.timeout_s)
        group = StoreGroup(dist.PrefixStore(f"fastsync/vllm/{info.token}", store), rank, info.workers + 1)
        self._sync = WeightSync(group, src=0, transport=info.transport, timeout_s=info.timeout_s)
        if self._info is None or self._info.cast != info.cast:
            self._plans.clear()
        if not info.keep_old:
            self._memory.clear()
        self._info = info

    def close(self) -> None:
        """Leaves the trainer's group. Local; may be called twice."""
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.close()

    def update(self, model: torch.nn.Module, model_config: Any, info: UpdateInfo) -> SyncReport:
        """Receives one version and loads it into `model`, or raises and leaves the model as it was.

        Raises:
            StateError: There was no init(), or one of another trainer since; or the digest is not that of a manifest that was found good.
            InvalidArgument: The manifest does not fit the model, or what comes is not what it says.
            PeerFailed: Another worker of this engine failed.
            Error, Exception: As `WeightSync.receive`; what vLLM raises.
        """
        sync, init = self._sync, self._info
        if sync is None or init is None:
            raise StateError(f"{self.name} has no trainer; VllmTrainer calls init_weight_transfer_engine first")
        if info.token != init.token:
            raise StateError(f"{self.name} has another trainer by now; close() this one, its next update joins anew")
        workers = _Workers(init.timeout_s)
        plan: Plan | None = None
        problem: Exception | None = None
        try:
            plan = self._plan(model, model_config, info, init, workers)
        except Exception as error:
            problem = error
        load = (
            None if plan is None else LayerwiseLoad(model, model_config, plan, self._memory if init.keep_old else None)
        )

        def take(items: list[tuple[str, Any]]) -> None:
            # A manifest that is refused fails the sync from within, so that the trainer learns of it, and why.
            if problem is not None or load is None:
                raise problem or StateError(f"{self.name} has nothing to load")
            load.load([(name, tensor.clone()) for name, tensor in items] if init.copy else items)

        report = None
        failure: BaseException | None = None
        try:
            report = sync._receive_version(take, info.version)
            if load is None or not load.complete:
                raise InvalidArgument("the trainer's sync ended before all tensors that the update declared had come")
        except BaseException as error:
            failure = error
        all_well = False
        try:
            all_well = workers.total([failure is None])[0] == workers.size
        except Error as error:
            failure = failure or error
        if failure is None and not all_well:
            failure = PeerFailed("another worker of this engine failed in the update and has said why")
        if failure is not None or load is None or report is None:
            if load is not None and not load.undo():
                self.mixed = True
                _log.error("%s: holds a mix of old and new weights; update it again before it serves", self.name)
            raise self._named(failure or StateError("no report")) from failure
        load.keep()
        self.mixed = False
        self.version, self.report = info.version, report
        self.copied_bytes, self.most_open_bytes = load.copied_bytes, load.most_open_bytes
        return report

    def _plan(
        self, model: torch.nn.Module, model_config: Any, info: UpdateInfo, init: InitInfo, workers: _Workers
    ) -> Plan:
        """The plan for this manifest, with which all workers of the engine agree."""
        plan = self._plans.get(info.digest)
        manifest: Manifest | None = None
        problem: Exception | None = None
        if plan is None:
            try:
                manifest = info.manifest()
                if manifest is None:
                    raise StateError(
                        f"{self.name} does not know the manifest {info.digest[:12]}; send its names, dtypes and shapes"
                    )
            except Exception as error:
                problem = error
        # First what has a fixed size: who knows it, who can look at it, and whether they speak of the same one.
        mark = int(info.digest[:12], 16) if all(c in "0123456789abcdef" for c in info.digest[:12]) else 0
        known, sound, marks = workers.total([plan is not None, problem is None, mark])
        if problem is not None:
            raise problem
        if sound < workers.size or marks != mark * workers.size:
            raise PeerFailed("another worker of this engine was given another manifest, or a malformed one")
        if plan is not None and known == workers.size:
            return plan
        manifest = manifest or (None if plan is None else plan.manifest)
        if manifest is None:
            raise StateError(f"{self.name} has no manifest")
        try:
            found = rehearse(model, model_config, manifest, init.cast)
        except Exception:
            workers.total([0] * len(manifest.entries) + [1])  # the others wait for this one
            raise
        *taken, problems = workers.total([*found.taken, len(found.problems)])
        if found.problems:
            more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
            raise InvalidArgument(found.problems[0] + more)
        if problems:
            raise PeerFailed("another worker of this engine refuses the manifest and has said why")
        for entry, count in zip(manifest.entries, taken):
            if 0 < count < entry.numel:
                raise InvalidArgument(
                    f"tensor {entry} has {entry.numel} elements, of which the model takes {count} on all workers together: "
                    "its shape is not the model's"
                )
        idle = [e.name for e, count in zip(manifest.entries, taken) if count == 0 and e.numel > 0]
        if idle:
            _log.warning("%s: the model does not use %d of the tensors, such as '%s'", self.name, len(idle), idle[0])
        while len(self._plans) >= _REMEMBERED:
            del self._plans[next(iter(self._plans))]
        self._plans[info.digest] = found.plan
        return found.plan

    def _named(self, error: BaseException) -> BaseException:
        """The error with this worker's name in its text, which is all that travels to the client."""
        if not isinstance(error, Exception):
            return error
        text = f"{self.name}: {error.message if isinstance(error, PeerFailed) else error}"
        if self.mixed:
            text += " (it now holds a mix of old and new weights: update it again before it serves)"
        if isinstance(error, Error):
            return type(error)(text, error.rank)
        return RuntimeError(f"{self.name}: {type(error).__name__}: {error}")


class _Workers:
    """The workers of this engine, through vLLM's own CPU group; a group of one where there is only this one."""

    def __init__(self, timeout_s: float) -> None:
        state: Any = VLLM.load("vllm.distributed.parallel_state", "get_world_group")
        world = state.get_world_group()
        self._timeout_s = timeout_s
        self._group = world.cpu_group
        self.size = int(world.world_size)

    def total(self, values: list[Any]) -> list[int]:
        """The sums over all workers, which all call this with equally many values; SyncTimeout after `timeout_s`."""
        if self.size == 1:
            return [int(v) for v in values]
        sums = torch.tensor([int(v) for v in values], dtype=torch.int64, device="cpu")
        work = dist.all_reduce(sums, group=self._group, async_op=True)
        try:
            done = work.wait(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise SyncTimeout(
                f"another worker of this engine did not come to an agreement within {self._timeout_s:g} s: {error}"
            ) from None
        if not done:
            raise SyncTimeout(f"another worker of this engine gave no answer within {self._timeout_s:g} s")
        return [int(v) for v in sums.tolist()]


def receiver_of(parallel_config: Any, rank: int) -> Receiver:
    """For the worker of this rank in its replica."""
    index = int(getattr(parallel_config, "data_parallel_index", getattr(parallel_config, "data_parallel_rank", 0)) or 0)
    worker = index * int(parallel_config.world_size) + rank
    return Receiver(worker, f"vLLM worker {worker}")


class WorkerExtension:
    """Receives through vLLM's `worker_extension_cls`, in versions that have no registry of weight-transfer engines.

        LLM(..., worker_extension_cls="fastsync.integrations.vllm.WorkerExtension")

    The trainer's client for it is `vllm.RpcClient`. Where the engine `fastsync` is there as well, both are one receiver.
    """

    # vLLM makes no instance of this: its methods become the worker's.
    rank: int
    vllm_config: Any
    model_runner: Any
    model_config: Any

    def fastsync_init(self, init_info: dict[str, Any]) -> int:
        """Joins the trainer's group. Returns this worker's number."""
        try:
            info = InitInfo(**init_info)
        except TypeError as error:
            raise InvalidArgument(f"init_info: {error}") from None
        receiver = self.fastsync_receiver()
        receiver.init(info)
        return receiver.worker

    def fastsync_update(self, update_info: dict[str, Any]) -> dict[str, Any]:
        """Takes one update. Returns the report of the sync as a dict."""
        try:
            info = UpdateInfo(**update_info)
        except TypeError as error:
            raise InvalidArgument(f"update_info: {error}") from None
        config: Any = VLLM.load("vllm.config", "set_current_vllm_config")
        with config.set_current_vllm_config(self.vllm_config):
            report = self.fastsync_receiver().update(self.model_runner.get_model(), self.model_config, info)
        with contextlib.suppress(RuntimeError):  # no accelerator, nothing to wait for
            torch.accelerator.synchronize()
        return report.to_dict()

    def fastsync_state(self) -> dict[str, Any]:
        """What this worker holds: version, whether mixed, and what the last update copied."""
        receiver = self.fastsync_receiver()
        return {
            "worker": receiver.worker,
            "version": receiver.version,
            "mixed": receiver.mixed,
            "copied_bytes": receiver.copied_bytes,
            "most_open_bytes": receiver.most_open_bytes,
            "report": None if receiver.report is None else asdict(receiver.report),
        }

    def fastsync_receiver(self) -> Receiver:
        """This worker's receiver: the engine's if there is one, else its own, made when first asked for."""
        engines = getattr(getattr(self, "weight_transfer_engine", None), "receiver", None)
        if isinstance(engines, Receiver):
            return engines
        found: Receiver | None = vars(self).get("_fastsync_receiver")
        if found is None:
            found = receiver_of(self.vllm_config.parallel_config, int(self.rank))
            vars(self)["_fastsync_receiver"] = found
        return found
