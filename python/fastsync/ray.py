"""The driver's side of an update where Ray runs the processes: `CheckpointEngineManager`, with verl's interface.

    actor_rollout_ref.rollout.checkpoint_manager_class: fastsync.ray.CheckpointEngineManager

It makes Ray calls on the handles that it is given and awaits what they return, so anything awaitable will do: the
module imports neither Ray nor a framework.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from .engine import AutoCheckpointEngine
from .errors import Error, InvalidArgument, PeerFailed, StateError, SyncTimeout

__all__ = ["CheckpointEngineManager", "FailedReplica"]

_log = logging.getLogger("fastsync")
T = TypeVar("T")

# How long the others are waited for once one call of a phase has failed: they learn of it at once.
_GRACE_S = 15.0
_DEFAULT_TIMEOUT_S = 300.0
# Ray's words for an actor that is gone, by name: they are not imported for it.
_DEAD = {"RayActorError", "ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "NodeDiedError"}


class FailedReplica(NamedTuple):
    """A replica that was taken out of the manager.

    Attributes:
        replica: The replica, as it was added.
        name: How messages call it.
        phase: In what it failed.
        error: What it raised, or SyncTimeout if it did not answer.
    """

    replica: Any
    name: str
    phase: str
    error: BaseException


class _Outcome(NamedTuple):
    value: Any
    error: BaseException | None


class _Failures(Exception):
    """An attempt failed because of these replicas, and can be made again without them."""

    def __init__(self, phase: str, blamed: dict[int, BaseException]) -> None:
        super().__init__(phase)
        self.phase = phase
        self.blamed = blamed  # by id of the replica


def _sync_or_async(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Any]:
    """Lets a coroutine method be awaited from a coroutine, and simply be called from anywhere else."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        work = method(*args, **kwargs)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work)
        if sys._getframe(1).f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            return work
        with concurrent.futures.ThreadPoolExecutor(1, "fastsync-update") as pool:  # this thread's loop is taken
            return pool.submit(asyncio.run, work).result()

    return call


class CheckpointEngineManager:
    """Brings the trainers' weights to the replicas, and keeps the replicas apart: one that fails does not stop the rest.

    An update is: abort (running requests are saved) -> release the KV cache -> prepare, topology, init_process_group ->
    send and receive -> finalize -> restore the KV cache -> resume generation. Every phase has a deadline. Whatever
    happens, every replica whose weights are whole is serving again when it ends.

    A replica that fails in any phase, or does not answer, is named in the log, listed in `failed_replicas` and taken
    out; the update is made again without it. It stays paused: its weights may be half of one version and half of
    another. Add it (or its successor) again with add_replicas(). A failure of the trainers is raised; replicas that it
    left with mixed weights stay paused until an update succeeds.

    Every worker of every replica must say that it committed the version that the trainer sent; one that says anything
    else counts as failed.

    The methods may be awaited, or called where no event loop runs. One update at a time; replicas may be added and
    removed meanwhile, which the next update sees.

    Args:
        config: Has `backend` (the engines' name), and `engine_kwargs`; verl's CheckpointEngineConfig.
        actor_wg: The trainers: `world_size`, `execute_checkpoint_engine(method=[...], **lists)` and
            `update_weights(global_steps=, mode=)`, which return one awaitable a trainer; verl's RayWorkerGroup.
        replicas: Each has `workers`, actor handles with `execute_checkpoint_engine` and `update_weights`, and coroutine
            methods `abort_all_requests`, `release_kv_cache`, `resume_kv_cache`, `resume_generation`; verl's
            RolloutReplica.
        trainer: What verl 0.8 calls `actor_wg`.
        timeout: Seconds that a phase may take; None: twice the `timeout` of the engines (600 if they have none). Where
            the engines' deadline is met first, its error says more.
    """

    def __init__(
        self,
        config: Any,
        actor_wg: Any = None,
        replicas: Iterable[Any] = (),
        *,
        trainer: Any = None,
        timeout: float | None = None,
    ) -> None:
        if (actor_wg is None) == (trainer is None):
            raise InvalidArgument("pass the trainers' worker group, as actor_wg= or as trainer=")
        self.config = config
        self.backend = str(config.backend)
        self.actor_wg = actor_wg if trainer is None else trainer
        self.replicas = list(replicas)
        self.failed_replicas: list[FailedReplica] = []
        options = dict(getattr(config, "engine_kwargs", {}).get(self.backend, {}))
        self.timeout = 2 * float(options.get("timeout", _DEFAULT_TIMEOUT_S)) if timeout is None else timeout
        if not 0 < self.timeout < float("inf"):
            raise InvalidArgument(f"timeout is {timeout!r}; it is a finite number of seconds above 0")
        self._paused: dict[int, Any] = {}  # replicas with mixed weights, by id; the next good update resumes them
        self._names: dict[int, str] = {}
        self._updating = threading.Lock()

    # --- who takes part

    def add_replicas(self, replicas: Iterable[Any]) -> None:
        """From the next update on these are served, too. One that is there already is not added again."""
        for replica in replicas:
            if all(replica is not held for held in self.replicas):
                self.replicas = [*self.replicas, replica]

    def remove_replicas(self, replicas: Iterable[Any]) -> None:
        """From the next update on these are not served."""
        gone = {id(replica) for replica in replicas}
        self.replicas = [replica for replica in self.replicas if id(replica) not in gone]
        for key in gone:
            self._paused.pop(key, None)

    # --- what verl calls on all replicas

    @_sync_or_async
    async def sleep_replicas(self) -> None:
        """Frees the weights and the KV cache of every replica."""
        await self._on_all("sleep", lambda replica: replica.sleep())

    @_sync_or_async
    async def wake_up_replicas(self) -> None:
        """Restores what sleep_replicas() freed."""
        await self._on_all("wake_up", lambda replica: replica.wake_up())

    @_sync_or_async
    async def abort_replicas(self, reject_request: bool = False) -> None:
        """Aborts and saves the running requests of every replica."""
        options = {"reject_request": True} if reject_request else {}
        await self._on_all("abort", lambda replica: replica.abort_all_requests(**options))

    @_sync_or_async
    async def resume_generation_replicas(self) -> None:
        """Lets every replica take requests again."""
        await self._on_all("resume", lambda replica: replica.resume_generation())

    @_sync_or_async
    async def release_kv_cache_replicas(self) -> None:
        """Frees the KV cache of every replica; weights stay."""
        await self._on_all("release_kv_cache", lambda replica: replica.release_kv_cache())

    @_sync_or_async
    async def resume_kv_cache_replicas(self) -> None:
        """Restores the KV cache of every replica."""
        await self._on_all("resume_kv_cache", lambda replica: replica.resume_kv_cache())

    async def _on_all(self, phase: str, call: Callable[[Any], Awaitable[Any]]) -> None:
        replicas = list(self.replicas)
        for outcome in await self._outcomes(phase, [call(replica) for replica in replicas]):
            if outcome.error is not None:
                raise outcome.error

    # --- the update

    @_sync_or_async
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Brings the trainers' weights to every replica.

        Returns:
            The trainers' metrics, and `checkpoint_engine/replicas` and `checkpoint_engine/failed_replicas`, how many
            serve the new version and how many were taken out.

        Raises:
            PeerFailed: No replica is left; the message has each one's reason.
            StateError: An update is running.
            Exception: What the trainers raised.
        """
        if self.backend == "naive":  # trainers and rollout in one process: no engine takes part
            await self._trainers("update", self.actor_wg.update_weights(global_steps=global_steps, mode="naive"))
            return {}
        if not self._updating.acquire(blocking=False):
            raise StateError("an update is running; let it end first")
        try:
            return await self._update(global_steps)
        finally:
            self._updating.release()

    async def _update(self, global_steps: int | None) -> dict[str, Any]:
        for number, replica in enumerate(self.replicas):
            self._names[id(replica)] = f"replica {getattr(replica, 'replica_rank', number)}"
        taking_part = list(self.replicas)
        whole: list[Any] = []
        failed_before = len(self.failed_replicas)
        if not taking_part:
            raise StateError("there is no replica to update; add_replicas() first")
        metrics: dict[str, Any] = {}
        try:
            # Those that a failed update left paused are so already.
            paused = [replica for replica in taking_part if id(replica) in self._paused]
            open_now = [replica for replica in taking_part if id(replica) not in self._paused]
            open_now = await self._each("abort", open_now, lambda replica: replica.abort_all_requests())
            open_now = await self._each("release_kv_cache", open_now, lambda replica: replica.release_kv_cache())
            taking_part = [*paused, *open_now]
            while taking_part:
                try:
                    metrics = await self._attempt(taking_part, global_steps)
                    break
                except _Failures as failures:
                    taking_part = self._take_out(failures.phase, taking_part, failures.blamed)
        finally:
            whole = [replica for replica in taking_part if id(replica) not in self._paused]
            whole = await self._each("resume_kv_cache", whole, lambda replica: replica.resume_kv_cache())
            whole = await self._each("resume", whole, lambda replica: replica.resume_generation())
        failed = self.failed_replicas[failed_before:]
        if not whole:
            raise PeerFailed(
                "no replica is left: " + "; ".join(f"{f.name} in {f.phase}: {_text(f.error)}" for f in failed)
            )
        metrics["checkpoint_engine/replicas"] = len(whole)
        metrics["checkpoint_engine/failed_replicas"] = len(failed)
        return metrics

    async def _attempt(self, replicas: list[Any], global_steps: int | None) -> dict[str, Any]:
        """One whole transfer; _Failures if it may be made again without some of the replicas."""
        trainers = int(self.actor_wg.world_size)
        owners = [replica for replica in replicas for _ in replica.workers]
        started = False
        try:
            told = await self._everywhere("prepare", owners, replicas, lambda _: {})
            for_trainers, for_workers = AutoCheckpointEngine.build_topology(trainers, len(owners), told)
            topologies = (for_trainers, for_workers)
            await self._everywhere("init_process_group", owners, replicas, lambda side: topologies[side])
            started = True
            calls = _listed(self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend), trainers)
            calls += [w.update_weights.remote(global_steps=global_steps) for r in replicas for w in r.workers]
            sent = await self._settle("update", calls, owners)
        except BaseException:
            # Also after an interrupt, so that no engine waits for an update that will not come.
            ends = await self._finalize(owners, replicas)
            self._mark_mixed(owners, ends[trainers:], started)
            raise
        ends = await self._finalize(owners, replicas)
        self._check_versions(ends, owners)
        for replica in replicas:
            self._paused.pop(id(replica), None)
        metrics: dict[str, Any] = {}
        for value in sent[:trainers]:
            if isinstance(value, dict):
                metrics.update(value)
        return metrics

    async def _everywhere(
        self, method: str, owners: list[Any], replicas: list[Any], kwargs: Callable[[int], dict[str, list[Any]]]
    ) -> list[Any]:
        """Calls an engine's method on every trainer and worker; returns the results, trainers first."""
        return await self._settle(method, self._calls(method, replicas, kwargs), owners)

    def _calls(self, method: str, replicas: list[Any], kwargs: Callable[[int], dict[str, list[Any]]]) -> list[Any]:
        trainers = int(self.actor_wg.world_size)
        calls = _listed(
            self.actor_wg.execute_checkpoint_engine(method=[method] * trainers, **kwargs(0)),
            trainers,
        )
        lists = kwargs(1)
        workers = [worker for replica in replicas for worker in replica.workers]
        for at, worker in enumerate(workers):
            own = {name: values[at] for name, values in lists.items()}
            calls.append(worker.execute_checkpoint_engine.remote(method, **own))
        return calls

    async def _settle(self, phase: str, calls: list[Any], owners: list[Any]) -> list[Any]:
        """The results of all calls; _Failures naming replicas, or the trainers' own error."""
        outcomes = await self._outcomes(phase, calls)
        trainers = len(calls) - len(owners)
        blamed: dict[int, BaseException] = {}

        def blame(worker: int, error: BaseException) -> None:
            blamed.setdefault(id(owners[worker]), error)

        for at, outcome in enumerate(outcomes):
            if outcome.error is None:
                continue
            error = _cause(outcome.error)
            named = error.rank - 1 if isinstance(error, Error) and not _is_unanswered(error) else -1
            if 0 <= named < len(owners) and (at < trainers or named != at - trainers):
                blame(named, error)
            elif at >= trainers and (not isinstance(error, Error) or error.rank != 0):
                blame(at - trainers, error)
        if blamed:
            # Who was blamed by others may have said itself what was wrong.
            for owner, outcome in zip(owners, outcomes[trainers:]):
                if outcome.error is not None and id(owner) in blamed and not isinstance(_cause(outcome.error), Error):
                    blamed[id(owner)] = outcome.error
            # An error of the trainers that names nobody is theirs, whatever it did to the replicas.
            own = [
                o.error for o in outcomes[:trainers] if o.error is not None and not isinstance(_cause(o.error), Error)
            ]
            if own:
                raise own[0]
            raise _Failures(phase, blamed)
        for at, outcome in enumerate(outcomes):
            if outcome.error is not None:
                if at < trainers and _is_unanswered(outcome.error):
                    raise SyncTimeout(f"trainer {at} failed the update: {outcome.error}")
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    async def _finalize(self, owners: list[Any], replicas: list[Any]) -> list[_Outcome]:
        return await self._outcomes(
            "finalize", self._calls("finalize", replicas, lambda _: {}), min(self.timeout, _GRACE_S)
        )

    def _mark_mixed(self, owners: list[Any], ends: list[_Outcome], started: bool) -> None:
        """Keeps those from serving whose consumer got part of an update that failed."""
        for owner, end in zip(owners, ends):
            told = end.value if end.error is None and isinstance(end.value, dict) else {"dirty": started}
            if told.get("dirty", started):
                self._paused[id(owner)] = owner

    def _check_versions(self, ends: list[_Outcome], owners: list[Any]) -> None:
        trainers = len(ends) - len(owners)
        for end in ends[:trainers]:
            if end.error is not None:
                raise end.error
        sent = ends[0].value["version"]
        blamed: dict[int, BaseException] = {}
        for owner, end in zip(owners, ends[trainers:]):
            if end.error is not None:
                blamed[id(owner)] = end.error
            elif end.value["version"] != sent or end.value["dirty"]:
                blamed[id(owner)] = StateError(
                    f"a worker says that it has version {end.value['version']}"
                    f"{', half written' if end.value['dirty'] else ''}; version {sent} was sent"
                )
        if blamed:
            raise _Failures("finalize", blamed)

    # --- calls and their ends

    async def _each(self, phase: str, replicas: list[Any], call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """Calls every replica; takes those out that fail, and returns the others."""
        outcomes = await self._outcomes(phase, [call(replica) for replica in replicas])
        blamed = {id(r): o.error for r, o in zip(replicas, outcomes) if o.error is not None}
        return self._take_out(phase, replicas, blamed)

    def _take_out(self, phase: str, replicas: list[Any], blamed: dict[int, BaseException]) -> list[Any]:
        for replica in replicas:
            error = blamed.get(id(replica))
            if error is None:
                continue
            name = self._names.get(id(replica), "a replica")
            self.failed_replicas.append(FailedReplica(replica, name, phase, error))
            self.remove_replicas([replica])
            _log.error("%s failed in %s and is taken out: %s", name, phase, _text(error))
        return [replica for replica in replicas if id(replica) not in blamed]

    async def _trainers(self, phase: str, calls: Any) -> list[Any]:
        outcomes = await self._outcomes(phase, _listed(calls, int(self.actor_wg.world_size)))
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    async def _outcomes(self, phase: str, calls: Sequence[Any], timeout_s: float | None = None) -> list[_Outcome]:
        """How each call ended, within the deadline; the others' time is cut short once one has failed."""
        timeout_s = self.timeout if timeout_s is None else timeout_s
        tasks = [asyncio.ensure_future(_await(call)) for call in calls]
        if not tasks:
            return []
        try:
            _, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if pending and any(task.done() and task.exception() is not None for task in tasks):
                timeout_s = min(_GRACE_S, timeout_s)
                _, pending = await asyncio.wait(pending, timeout=timeout_s)
        finally:
            for task in tasks:
                task.cancel()  # no effect on those that are done; Ray's calls themselves go on
        silence = SyncTimeout(f"no answer to {phase} within {timeout_s:g} s")
        return [
            _Outcome(None, silence)
            if task in pending
            else _Outcome(None, task.exception())
            if task.exception() is not None
            else _Outcome(task.result(), None)
            for task in tasks
        ]


async def _await(call: Any) -> Any:
    return await call if inspect.isawaitable(call) or hasattr(call, "__await__") else call


def _listed(calls: Any, count: int) -> list[Any]:
    """What a worker group returned for its workers: one for each."""
    found = list(calls) if isinstance(calls, (list, tuple)) else [calls]
    if len(found) != count:
        raise InvalidArgument(f"the trainers' worker group of {count} returned {len(found)} results")
    return found


def _cause(error: BaseException) -> BaseException:
    """What a worker raised, without the wrapper that Ray brings it in."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def _is_unanswered(error: BaseException) -> bool:
    return isinstance(error, SyncTimeout) and error.rank < 0


def _text(error: BaseException) -> str:
    if any(cls.__name__ in _DEAD for cls in type(error).__mro__):
        return f"its process has ended ({type(error).__name__})"
    error = _cause(error)
    return f"{type(error).__name__}: {str(error).strip()}"[:1000]
