"""The receiving end inside a vLLM worker: `Receiver`, and `WorkerExtension`, by which vLLM may call it.

An update is one call, `update()`. It checks the manifest against the model and with the engine's other workers, takes
part in the sync as rank `rank_offset + worker`, loads every bucket as it comes, finishes vLLM's reload, and only then
lets fastsync commit. In the end the workers tell each other how it went: if one of them failed, all of them go back to
the old weights. Between two calls the model is always whole, so requests may run on.

After a failure only the engine's last worker raises, with what all of them have to say: where an earlier one raises,
vLLM 0.32's executor stops listening to the later ones, and takes their answers for those to its next call. vLLM's mark
that an update is running is then lifted on that worker alone; each worker tells the next trainer, through the
trainer's store, whether it still has the mark, so that the trainer can have it lifted.

Everything happens on the thread that calls, which owns the model. Waits: for the trainer and in the transfer, each
ended by `timeout_s` without progress; for the other workers of the engine, at most `timeout_s`.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from .._store_group import StoreGroup
from .._waiting import Deadline, bounded
from ..engine.topology import connect_store
from ..errors import Error, InvalidArgument, PeerFailed, StateError, SyncTimeout
from ..report import SyncReport
from ..session import WeightSync
from ._vllm_manifest import InitInfo, Manifest, UpdateInfo, group_prefix, inside_key
from ._vllm_reload import VLLM, LayerwiseLoad, Plan, Rehearsal, rehearse

__all__ = ["Receiver", "WorkerExtension", "receiver_of"]

_log = logging.getLogger("fastsync")
_REMEMBERED = 4  # manifests found good
_SHOWN = 4  # workers' errors in a message
_TEXT_BYTES = 2048  # of an error that the workers tell each other


class Receiver:
    """What one worker receives with, whatever vLLM calls it by.

    Args:
        worker: This worker's number among all workers of all replicas, from 0.
        is_last: Whether it is the last worker of its engine, which is the one that raises.
    """

    def __init__(self, worker: int, is_last: bool) -> None:
        self.worker = worker
        self.name = f"vLLM worker {worker}"
        self.is_last = is_last
        self.inside = False
        """Whether vLLM has this worker inside an update, between its start and its end."""
        self.mixed = False
        """Whether an update failed midway and could not be undone (keep_old=False)."""
        self.version: int | None = None
        """Of the last update that this worker holds; None if none came."""
        self.report: SyncReport | None = None
        self.copied_bytes = 0
        """Of the last update: bytes copied because their layer was open at a bucket's edge."""
        self.most_open_bytes = 0
        """Of the last update: the most bytes that vLLM's open layers held at one time."""
        self._info: InitInfo | None = None
        self._sync: WeightSync | None = None
        self._plans: dict[str, Plan] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._workers = _Workers()

    def init(self, info: InitInfo) -> None:
        """Joins the trainer's group, in place of any earlier one. Local, but for a look at the trainer's store.

        Raises, on the last worker:
            InvalidArgument: The info is malformed, or for another number of workers.
            CommError, SyncTimeout: The trainer's store cannot be reached, by this worker or another.
        """
        failure: Exception | None = None
        try:
            self._join(info)
        except Exception as error:
            failure = error
        agreed = self._agreed(failure)
        if agreed is not None:
            self.close()  # on all workers, so that they stay in step
            self._raise(agreed)

    def _join(self, info: InitInfo) -> None:
        self.close()
        info.check()
        rank = info.rank_offset + self.worker
        if rank > info.workers:
            raise InvalidArgument(
                f"this would be rank {rank} of a group of {info.workers} workers and the trainer; make VllmTrainer "
                "with workers= the number of all workers, tensor, pipeline and data parallel ones"
            )
        store = dist.PrefixStore(group_prefix(info.token), connect_store(info.store, info.timeout_s))
        self._sync = WeightSync(
            StoreGroup(store, rank, info.workers + 1), src=0, transport=info.transport, timeout_s=info.timeout_s
        )
        bounded(
            lambda _: store.set(inside_key(rank), "1" if self.inside else "0"),
            Deadline(info.timeout_s),
            "telling the trainer's store of this worker",
        )
        if self._info is None or self._info.cast != info.cast:
            self._plans.clear()
        if not info.keep_old:
            self._memory.clear()
        self._workers.timeout_s = info.timeout_s
        self._info = info

    def close(self) -> None:
        """Leaves the trainer's group. Local; may be called twice."""
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.close()

    def update(self, model: torch.nn.Module, model_config: Any, info: UpdateInfo) -> SyncReport | None:
        """Receives one version and loads it into `model`; after a failure the model is as it was.

        Returns:
            The report; None after a failure that the last worker raises.

        Raises, on the last worker, whichever failed:
            StateError: There was no init(), or one of another trainer since; or the digest is not that of a manifest
                that was found good.
            InvalidArgument: The manifest does not fit the model, or what comes is not what it says.
            Error: As `WeightSync.receive`. PeerFailed also where other workers failed and this one did not.
            RuntimeError: What vLLM raised, in its words.
        """
        report, load, failure = self._received(model, model_config, info)
        try:
            agreed = self._agreed(failure)
        except Error as error:
            agreed = error
        if agreed is not None or load is None or report is None:
            if load is not None and not load.undo():
                self.mixed = True
                _log.error("%s holds a mix of old and new weights; update it again before it serves", self.name)
            if failure is not None and not isinstance(failure, Exception):
                raise failure  # an interrupt
            self._raise(agreed)
            return None
        load.keep()
        self.mixed = False
        self.version, self.report = info.version, report
        self.copied_bytes, self.most_open_bytes = load.copied_bytes, load.most_open_bytes
        return report

    def _received(
        self, model: torch.nn.Module, model_config: Any, info: UpdateInfo
    ) -> tuple[SyncReport | None, LayerwiseLoad | None, BaseException | None]:
        """This worker's part: what it has loaded, which can still be undone, and what failed."""
        sync, init = self._sync, self._info
        if sync is None or init is None:
            return None, None, StateError("there is no trainer; VllmTrainer calls init_weight_transfer_engine first")
        if info.token != init.token:
            return None, None, StateError("it has another trainer by now; close() this one, its next update joins anew")
        load: LayerwiseLoad | None = None
        problem: Exception | None = None
        try:
            plan = self._plan(model, model_config, info, init)
            memory = self._memory if init.keep_old else None
            load = LayerwiseLoad(model, model_config, plan, memory, init.copy)
        except Exception as error:
            problem = error

        def take(items: list[tuple[str, Any]]) -> None:
            # A manifest that is refused fails the sync from within, so that the trainer learns of it, and why.
            if load is None:
                raise problem or StateError("there is nothing to load into")
            load.load([(name, tensor.clone()) for name, tensor in items] if init.copy else items)

        try:
            report = sync._receive_version(take, info.version)
            if load is None or not load.complete:
                raise InvalidArgument("the trainer's sync ended before all tensors that the update declared had come")
        except BaseException as error:
            return None, load, error
        return report, load, None

    def _plan(self, model: torch.nn.Module, model_config: Any, info: UpdateInfo, init: InitInfo) -> Plan:
        """The plan for this manifest, with which all workers of the engine agree."""
        plan = self._plans.get(info.digest)
        manifest = None if plan is None else plan.manifest
        failure: Exception | None = None
        if plan is None:
            try:
                manifest = info.manifest()
            except Exception as error:
                failure = error
        # First what has a fixed size: whether each can look at it, and whether they speak of the same one.
        mark = int(hashlib.sha256(str(info.digest).encode()).hexdigest()[:12], 16)
        known, marks = self._workers.total([plan is not None, mark])
        if failure is None and marks != mark * self._workers.size:
            failure = InvalidArgument("the workers of this engine were given different manifests")
        if failure is None and manifest is None:
            failure = StateError(f"it does not know the manifest {info.digest[:12]}; send names, dtypes and shapes")
        agreed = self._agreed(failure)
        if agreed is not None:
            raise agreed
        if plan is not None and known == self._workers.size:
            return plan
        if manifest is None:  # said above already
            raise StateError("there is no manifest")
        return self._rehearsed(model, model_config, manifest, init.cast)

    def _rehearsed(self, model: torch.nn.Module, model_config: Any, manifest: Manifest, cast: bool) -> Plan:
        found: Rehearsal | None = None
        failure: Exception | None = None
        try:
            found = rehearse(model, model_config, manifest, cast)
            if found.problems:
                more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
                failure = InvalidArgument(found.problems[0] + more)
        except Exception as error:
            failure = error
        agreed = self._agreed(failure)
        if agreed is not None or found is None:
            raise agreed or StateError("there was no rehearsal")
        totals = self._workers.total(found.taken)
        for entry, count in zip(manifest.entries, totals):
            if 0 < count < entry.numel:
                raise InvalidArgument(
                    f"tensor {entry} has {entry.numel} elements, of which the model takes {count} on all workers "
                    "together: its shape is not the model's"
                )
        idle = [e.name for e, count in zip(manifest.entries, totals) if count == 0 and e.numel > 0]
        if idle:
            _log.warning("%s: the model does not use %d of the tensors, such as '%s'", self.name, len(idle), idle[0])
        while len(self._plans) >= _REMEMBERED:
            del self._plans[next(iter(self._plans))]
        self._plans[manifest.digest] = found.plan
        return found.plan

    def _agreed(self, failure: BaseException | None) -> Exception | None:
        """What the workers of the engine together make of it: None if none of them failed, else what they all say."""
        own = "" if failure is None else self._text(failure)
        said = list(dict.fromkeys(text for text in self._workers.gather(own) if text))[:_SHOWN]
        if not said:
            return None
        text = " | ".join([own, *(other for other in said if other != own)] if own else said)
        if isinstance(failure, Error):
            return type(failure)(text, failure.rank)
        return PeerFailed(text) if failure is None else RuntimeError(text)

    def _text(self, error: BaseException) -> str:
        text = error.message if isinstance(error, PeerFailed) else str(error)
        if text.startswith("vLLM worker "):
            return text  # it has been through an agreement already
        if not isinstance(error, Error):
            text = f"{type(error).__name__}: {text}"
        return f"{self.name}: {text}"

    def _raise(self, error: Exception | None) -> None:
        if error is None:
            return
        _log.error("%s", error)
        if self.is_last:
            raise error


class _Workers:
    """The workers of this engine, through vLLM's own CPU group; a group of one where there is only this one.

    All of them make the same calls in the same order. Every call ends with SyncTimeout after `timeout_s`.
    """

    def __init__(self) -> None:
        state: Any = VLLM.load("vllm.distributed.parallel_state", "get_world_group")
        world = state.get_world_group()
        self._group = world.cpu_group
        self.size = int(world.world_size)
        self.timeout_s = 300.0

    def total(self, values: Sequence[int]) -> list[int]:
        """The sums over all workers of equally many values."""
        if self.size == 1:
            return [int(v) for v in values]
        sums = torch.tensor([int(v) for v in values], dtype=torch.int64, device="cpu")
        self._wait(dist.all_reduce(sums, group=self._group, async_op=True))
        return [int(v) for v in sums.tolist()]

    def gather(self, text: str) -> list[str]:
        """Every worker's text, each cut to `_TEXT_BYTES`."""
        if self.size == 1:
            return [text]
        raw = text.encode("utf-8", "replace")[:_TEXT_BYTES]
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        mine[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(dist.all_gather(found, mine, group=self._group, async_op=True))
        return [bytes(each.tolist()).rstrip(b"\0").decode("utf-8", "ignore") for each in found]

    def _wait(self, work: Any) -> None:
        try:
            work.wait(datetime.timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise SyncTimeout(
                f"another worker of this engine gave no answer within {self.timeout_s:g} s: {error}"
            ) from None


def receiver_of(parallel_config: Any, rank: int) -> Receiver:
    """For the worker of this rank in its replica."""
    index = int(getattr(parallel_config, "data_parallel_index", getattr(parallel_config, "data_parallel_rank", 0)) or 0)
    size = int(parallel_config.world_size)
    return Receiver(index * size + rank, rank == size - 1)


class WorkerExtension:
    """Receives through vLLM's `worker_extension_cls`, in versions that have no registry of weight-transfer engines.

        LLM(..., worker_extension_cls="fastsync.integrations.vllm.WorkerExtension")

    The trainer's client for it is `vllm.RpcClient`. Where the engine `fastsync` is there, too, both are one receiver.
    """

    # vLLM makes no instance of this: its methods become the worker's.
    rank: int
    vllm_config: Any
    model_runner: Any
    model_config: Any

    def fastsync_init(self, init_info: dict[str, Any]) -> int:
        """Joins the trainer's group. Returns this worker's number."""
        receiver = self.fastsync_receiver()
        receiver.init(InitInfo(**init_info))
        return receiver.worker

    def fastsync_update(self, update_info: dict[str, Any]) -> dict[str, Any] | None:
        """Takes one update. Returns the sync's report as a dict; None after a failure that the last worker raises."""
        info = UpdateInfo(**update_info)
        config: Any = VLLM.load("vllm.config", "set_current_vllm_config")
        with config.set_current_vllm_config(self.vllm_config):
            report = self.fastsync_receiver().update(self.model_runner.get_model(), self.model_config, info)
        with contextlib.suppress(RuntimeError):  # no accelerator, nothing to wait for
            torch.accelerator.synchronize()
        return None if report is None else report.to_dict()

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
