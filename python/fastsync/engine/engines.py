"""The engines over `WeightSync`: one class that does it all, and one a transport."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import inspect
import itertools
import os
import secrets
import threading
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._store_group import StoreGroup
from .._transports import default_bucket_bytes, transports
from ..errors import CommError, DeviceError, InvalidArgument, PeerLost, StateError, SyncTimeout
from ..session import WeightSync
from . import registry, topology
from .base import CheckpointEngine, Topology

__all__ = [
    "AutoCheckpointEngine",
    "GlooCheckpointEngine",
    "HCCLCheckpointEngine",
    "NCCLCheckpointEngine",
    "ShmCheckpointEngine",
]

# After these a session may hold what cannot be used again; after the others it carries the next update.
_BREAKS_SESSION = (PeerLost, CommError, DeviceError, SyncTimeout)


@registry.register("auto")
class AutoCheckpointEngine(CheckpointEngine):
    """Sends from trainer rank 0 to every rollout worker, with whatever transport suits the tensors.

    Plan, buffers, communicator and connections are kept from update to update; `prepare`, `init_process_group` and
    `finalize` do nothing while the same processes take part, and form a new group when they changed or one was lost.
    The processes' own torch.distributed groups are never used. One thread at a time; calls in the wrong order are a
    StateError.

    All calls run on the thread that makes them, so an update holds its event loop; no wait outlasts `timeout`.

    Args:
        bucket_size: The most bytes that a bucket may have; what suits the transport is taken where that is less. Two
            buckets are held.
        is_master: True on trainer rank 0. May be set as an attribute before prepare().
        timeout: Seconds without progress after which a wait ends with SyncTimeout.
        verify: Checksum every bucket.
        buffers: Buckets in flight.
        group_name: A word for error messages.
        rebuild_group: Form a new group for every update (for comparison; it costs time and brings nothing).

    Raises:
        InvalidArgument: An argument is wrong or unknown.
        CommError: The transport cannot be used here; the message has its reason.
    """

    transport = "auto"

    def __init__(
        self,
        bucket_size: int = 3072 << 20,
        is_master: bool = False,
        *,
        timeout: float = 300.0,
        verify: bool = True,
        buffers: int = 2,
        group_name: str = "fastsync",
        rebuild_group: bool = False,
        **options: Any,
    ) -> None:
        if options:
            raise InvalidArgument(
                f"{type(self).__name__} has no option {', '.join(repr(o) for o in sorted(options))}; it has bucket_size, "
                "is_master, timeout, verify, buffers, group_name and rebuild_group"
            )
        reason = self.unavailable_reason()
        if reason is not None:
            raise CommError(f"{type(self).__name__}: transport '{self.transport}' is unavailable: {reason}")
        self.rank: int | None = None
        self.world_size: int | None = None
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.timeout = timeout
        self.group_name = group_name
        self.rebuild_group = rebuild_group
        self._options: dict[str, Any] = {
            "verify": verify,
            "buffers": buffers,
            "timeout_s": timeout,
            "transport": self.transport,
        }
        self._check_options()
        self._member = secrets.token_hex(16)
        self._pid = os.getpid()
        self._state = "new"
        self._busy: _Call | None = None  # the call that is inside
        self._guard = threading.Lock()
        self._hosted: topology.HostedStore | None = None
        self._reached: tuple[str, Any] | None = None  # (id, client) of the master's store
        self._joined: list[str] | None = None  # [members, token] of the session
        self._sync: WeightSync | None = None
        self._stream: Generator[list[tuple[str, torch.Tensor]], None, None] | None = None
        self._version: int | None = None
        self._dirty = False

    def _check_options(self) -> None:
        """Lets the session say what is wrong, before there is anybody to make one with."""
        self._check_master()
        with WeightSync(StoreGroup(dist.HashStore(), 0, 1), bucket_bytes=self.bucket_size, **self._options):
            pass

    def _check_master(self) -> None:
        if not isinstance(self.is_master, bool):
            raise InvalidArgument(f"is_master is {self.is_master!r}; it is True on trainer rank 0, else False")

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why this engine cannot be used in this process, or None."""
        if cls.transport == "auto":
            return None
        info = transports()[cls.transport]
        return None if info.available else info.reason

    # --- the way to a group

    def prepare(self) -> dict[str, Any]:
        """What build_topology() must know of this process. The first time, the master opens its store's port."""
        with self._call("prepare", "new", "prepared", "ready", "finalized"):
            self._check_master()
            self._leave_stream()
            if self._sync is not None and (self.rebuild_group or self.is_master != (self.rank == 0)):
                self._drop_session()
            about: dict[str, Any] = {"fastsync": topology.FORMAT, "member": self._member, "joined": self._joined}
            if self.is_master:
                if self._hosted is None:
                    self._hosted = topology.HostedStore(self.timeout)
                about["store"] = self._hosted.address
            self._state = "prepared"
            return about

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any] | None]
    ) -> Topology:
        """See CheckpointEngine. A pure function of its arguments, but for the token of a group that is new."""
        return topology.build_topology(trainer_world_size, rollout_world_size, metadata)

    def init_process_group(self, *, rank: int, world_size: int, master_metadata: Any) -> None:  # type: ignore[override]
        """Takes `rank` of `world_size`. Local but for a look at the master's store; the ranks meet in the update."""
        with self._call("init_process_group", "prepared"):
            place = topology.check_master(master_metadata)
            if self.is_master != (rank == 0):
                raise StateError(
                    f"rank 0 is the master's: this process got rank {rank} and has is_master={self.is_master}; is_master is "
                    "set on trainer rank 0, before prepare()"
                )
            if rank < 0:
                self._drop_session()
                self.rank, self.world_size = -1, world_size
            else:
                joined = [str(place["members"]), str(place["token"])]
                if self._sync is None or joined != self._joined or rank != self.rank:
                    self._join(rank, world_size, place, joined)
            self._state = "ready"

    def _join(self, rank: int, world_size: int, place: Mapping[str, Any], joined: list[str]) -> None:
        self._drop_session()
        store = self._store_at(place["store"])
        group = StoreGroup(dist.PrefixStore(topology.store_prefix(place), store), rank, world_size)
        self._sync = WeightSync(group, src=0, bucket_bytes=self._bucket_bytes(), **self._options)
        self.rank, self.world_size = rank, world_size
        self._joined = joined

    def _store_at(self, address: Mapping[str, Any]) -> Any:
        if self._hosted is not None and self._hosted.address["id"] == address["id"]:
            return self._hosted.store
        if self._reached is None or self._reached[0] != address["id"]:
            self._reached = None
            self._reached = (str(address["id"]), topology.connect_store(address, self.timeout))
        return self._reached[1]

    def _bucket_bytes(self) -> int | None:
        usual = default_bucket_bytes("nccl" if self.transport == "auto" else self.transport)
        return self.bucket_size if self.bucket_size < usual else None

    def _drop_session(self) -> None:
        sync, self._sync = self._sync, None
        self._joined = None
        if sync is not None:
            sync.close()

    # --- the update

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Sends `weights` from the master; on the other trainer ranks it pulls them to their end.

        A failed update, too, pulls them to their end before it raises: the other trainer ranks may be waiting inside
        them, and what stands behind the last item (an unmerge) gets done. Nothing is pulled after an exception of
        theirs, or an interrupt.

        Args:
            weights: An iterator of (name, tensor), also an asynchronous one; or an nn.Module, a mapping, a sequence.
                Each tensor is copied before the next is asked for.
            global_steps: The version; the receivers must be called for the same one. A number that is not above the
                last one, or None, counts on from it.

        Returns:
            `SyncReport.to_dict()` on the master, {} elsewhere.

        Raises:
            StateError: Not between init_process_group() and finalize(), or on a rollout worker.
            Error: As `WeightSync.broadcast`; ranks are those of the topology: rollout worker n is rank n + 1.
        """
        with self._call("send_weights", "ready"):
            if self.rank is None or self.rank > 0:
                raise StateError(f"send_weights() is for trainers; this is rank {self.rank}: call receive_weights()")
            later = hasattr(weights, "__aiter__")
            if self.rank < 0:
                if later:
                    async for item in weights:
                        del item
                elif isinstance(weights, Iterable):
                    _exhaust(weights)
                return {}
            sync = self._session()
            version = _newer(global_steps, sync.version)
            if later:
                # This loop must stay free to make the items, so the sync has a thread of its own.
                items = _pulled_from(weights, asyncio.get_running_loop(), self.timeout)
                return await asyncio.to_thread(self._send, sync, items, version)
            return self._send(sync, weights, version)

    def _send(self, sync: WeightSync, weights: Any, version: int | None) -> dict[str, Any]:
        once = isinstance(weights, Iterator)
        try:
            # The session closes a generator whose sync fails; this one is to be pulled to its end.
            report = sync.broadcast(itertools.chain(weights) if once else weights, version)
        except Exception as error:
            self._note(error)
            if once:
                try:
                    _exhaust(weights)
                except Exception as also:
                    error.__context__ = also
            raise
        except BaseException as error:
            self._note(error)
            raise
        self._version = report.version
        return report.to_dict()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) in the order of the source; the tensors' memory is the consumer's own, to keep or write to.

        Tensors that came in one bucket share a block of memory, which is freed when the last of them is.

        The update is committed when the iterator is exhausted. A consumer that stops before fails it, for every rank.

        Raises:
            StateError: Not between init_process_group() and finalize(), or on a trainer.
            Error: As `WeightSync.stream`.
        """
        with self._call("receive_weights", "ready") as call:
            if self.rank is None or self.rank <= 0:
                raise StateError(
                    f"receive_weights() is for rollout workers; this is rank {self.rank}: call send_weights()"
                )
            sync = self._session()
            stream = sync._buckets_of_version(_newer(global_steps, sync.version))
            self._stream = stream
            try:
                for items in stream:
                    self._dirty = True
                    items.reverse()
                    while items:
                        yield items.pop()  # nothing here holds on to what the consumer has let go
                        if self._busy is not call:
                            raise StateError("the update was given up by a later call of prepare() or finalize()")
                self._version, self._dirty = sync.version, False
            except BaseException as error:
                self._note(error)
                raise
            finally:
                if self._stream is stream:
                    self._stream = None
                stream.close()

    def _session(self) -> WeightSync:
        if self._sync is None:
            raise StateError("this engine has no group any more; call prepare() and init_process_group() again")
        return self._sync

    def _note(self, error: BaseException) -> None:
        if isinstance(error, _BREAKS_SESSION) and not isinstance(error, StateError):
            self._joined = None  # the next topology makes a fresh group

    def _is_suspended(self) -> bool:
        return self._stream is not None and inspect.getgeneratorstate(self._stream) != inspect.GEN_RUNNING

    def _leave_stream(self) -> None:
        """Ends an update whose consumer has gone without closing its iterator; the other ranks are told."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.close()

    # --- the end

    def finalize(self) -> dict[str, Any]:
        """Ends an update, whether it succeeded or not, and keeps everything for the next.

        Returns:
            "version": that of the last update that this process took part in to its end; None before, and on rank -1.
            "dirty": whether an update that failed had given this process's consumer tensors, until a later one commits.
        """
        with self._call("finalize", "new", "prepared", "ready", "finalized"):
            self._leave_stream()
            if self.rebuild_group:
                self._drop_session()
            self._state = "finalized"
            return {"version": self._version, "dirty": self._dirty}

    def close(self) -> None:
        """Lets go of everything, the store included. Local, does not wait, may be called twice."""
        if os.getpid() != self._pid:
            return
        self._leave_stream()
        self._drop_session()
        self._hosted = self._reached = None
        self._state = "new"

    @contextlib.contextmanager
    def _call(self, name: str, *states: str) -> Iterator[_Call]:
        """One call at a time, and only in `states`; yields what `_busy` is during it."""
        if os.getpid() != self._pid:
            raise StateError("this process was forked from the one that made the engine; make one in the child")
        call = _Call(name)
        with self._guard:
            # A consumer that raised may not have closed its iterator yet: the next update, or the end of this one, does.
            left = name in ("prepare", "finalize") and self._is_suspended()
            if self._busy is not None and not left:
                raise StateError(f"{name}() was called while {self._busy.name}() runs on this engine; let it end first")
            if self._state not in states:
                raise StateError(f"{name}() was called {_AFTER[self._state]}; {_ORDER}")
            self._busy = call
        try:
            yield call
        finally:
            with self._guard:
                if self._busy is call:
                    self._busy = None


class _Call:
    """One call of an engine's method, told from the next by identity."""

    def __init__(self, name: str) -> None:
        self.name = name


_ORDER = "the order is prepare, init_process_group, send_weights or receive_weights, finalize"
_AFTER = {
    "new": "before prepare()",
    "prepared": "right after prepare()",
    "ready": "after init_process_group()",
    "finalized": "after finalize()",
}


@registry.register("shm")
class ShmCheckpointEngine(AutoCheckpointEngine):
    """For trainers and rollout workers on one host, CPU tensors (or CUDA at the source)."""

    transport = "shm"


@registry.register("gloo")
class GlooCheckpointEngine(AutoCheckpointEngine):
    """For several hosts, CPU tensors (or CUDA, through host memory)."""

    transport = "gloo"


@registry.register("nccl")
class NCCLCheckpointEngine(AutoCheckpointEngine):
    """For CUDA tensors, one device a rank."""

    transport = "nccl"


@registry.register("hccl")
class HCCLCheckpointEngine(AutoCheckpointEngine):
    """For Ascend tensors. Known by name; making one says why it cannot be used until there is its transport."""

    transport = "hccl"


def _newer(global_steps: object, last: int | None) -> int | None:
    """`global_steps` as a version, or None (last + 1) where it is none or would not be above the last one."""
    if global_steps is None:
        return None
    if isinstance(global_steps, bool) or not hasattr(global_steps, "__index__"):
        raise InvalidArgument(f"global_steps is {global_steps!r}; it is a whole number, at least 0, or None")
    step = int(global_steps.__index__())
    if not 0 <= step < 1 << 63:
        raise InvalidArgument(f"global_steps is {step}; it is a whole number, 0 to 2**63 - 1")
    return step if last is None or step > last else None


def _exhaust(weights: Iterable[Any]) -> None:
    collections.deque(weights, maxlen=0)


_END = object()


async def _next_of(source: AsyncIterator[Any]) -> Any:
    try:
        return await source.__anext__()
    except StopAsyncIteration:
        return _END


def _pulled_from(weights: Any, loop: asyncio.AbstractEventLoop, timeout_s: float) -> Iterator[Any]:
    """The items of an asynchronous iterator, made on its loop while another thread waits for them."""
    source = weights.__aiter__()
    while True:
        future = asyncio.run_coroutine_threadsafe(_next_of(source), loop)
        if not concurrent.futures.wait([future], timeout_s).done:
            future.cancel()
            raise SyncTimeout(f"the weights' iterator gave no tensor for {timeout_s:g} s", 0)
        item = future.result()
        if item is _END:
            return
        yield item
        del item, future
