"""The session: `WeightSync`."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Union

import torch

from . import _core, _sharded
from ._delivery import Cuts, DeviceSpace, HostSpace, Space, deliver
from ._device import cuda_in_use, current_device, runtime_for, stream_handle
from ._group import SHARDED, Channel, channel_for, close_channel, resolve_group
from ._progress import Display, check_progress
from ._store_group import StoreGroup
from ._tensors import Description, describe, is_generator, pair, read_items, split_items
from ._transports import candidates, check_transport, default_bucket_bytes
from ._waiting import Deadline
from .errors import CommError, Error, InvalidArgument, PeerFailed, PeerLost, Refused, SharedDestination, StateError
from .report import SyncReport

__all__ = ["LoadWeights", "Params", "Source", "WeightSync"]

Params = Union[torch.nn.Module, Mapping[str, Any], Iterable[tuple[str, Any]]]
LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], object]
Source = Union[int, Literal["sharded"]]

_MAX_BUFFERS = 64
_REMEMBERED_PLANS = 4


def _check_int(name: str, value: object, low: int, high: int, unit: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidArgument(f"{name} is {value!r}; it is a whole number of {unit}")
    number = int(value.__index__())
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is {number}; it is {low} to {high} {unit}")
    return number


def _check_timeout(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"timeout_s is {value!r}; it is a finite number of seconds above 0")
    seconds = float(value) if abs(value) < 1e300 else math.inf
    if not math.isfinite(seconds) or seconds <= 0:
        raise InvalidArgument(f"timeout_s is {value!r}; it is a finite number of seconds above 0")
    return seconds


def _check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} is {value!r}; it is True or False")
    return value


def _on_cuda() -> bool:
    return cuda_in_use() and _core.cuda_unavailable_reason() is None


class WeightSync:
    """Syncs weights from one rank of a group to all others, over and over; keeps plan, buffers and communicator.

    Every rank of the group makes one and calls it in step: `broadcast()` on rank `src`, `receive()` or `stream()` on
    the others. Making it is local; the ranks find each other in the first sync.

    With `src="sharded"` every rank that calls `broadcast()` is a trainer: all of them hold the same params, and each sends
    a share of the bytes, so that one host's network is not the limit. Ranks that call `receive()` or `stream()` get the
    whole. A rank keeps its role as long as the process group lives. Where settings differ, the lowest trainer's hold.

    Args:
        group: A `torch.distributed` process group, or a `StoreGroup`; None is the default group.
        src: Global rank of the source, or "sharded".
        bucket_bytes: Bytes of a bucket, at least 1; rounded up to 256, cut down to what the plan needs. None: by
            transport and cache size. The source's value holds. Sharded: of one bucket of every share together, so that a
            receiver's memory does not grow with the number of trainers.
        transport: "auto", "shm" (one host), "gloo" (several), "nccl" (CUDA; ranks that share a device included, as long
            as there is another device) or "ipc" (CUDA, all ranks on one device); see `fastsync.transports()`.
        verify: Checksum every bucket. The source's value holds.
        timeout_s: Seconds without progress after which a wait of this rank ends with `SyncTimeout`.
        strict: Unknown and missing names are errors; False syncs what both sides have, as in torch. The source's value
            holds.
        progress: Draw a progress bar on stderr (needs rich).
        buffers: Buckets in flight, 1 to 64. The source's value holds.

    Raises:
        InvalidArgument: An argument is wrong, or there is no process group.
        CommError: The transport is unavailable here; the message says why.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        src: Source = 0,
        bucket_bytes: int | None = None,
        transport: str = "auto",
        verify: bool = True,
        timeout_s: float = 300.0,
        strict: bool = True,
        progress: bool = False,
        buffers: int = 2,
    ) -> None:
        self._closed = True  # until everything is checked
        if bucket_bytes is not None:
            bucket_bytes = _check_int("bucket_bytes", bucket_bytes, 1, 1 << 62, "bytes")
        self._bucket_bytes = bucket_bytes
        self._buffers = _check_int("buffers", buffers, 1, _MAX_BUFFERS, "buckets")
        self._verify = _check_bool("verify", verify)
        self._strict = _check_bool("strict", strict)
        self._timeout_s = _check_timeout(timeout_s)
        self._progress = check_progress(progress)
        self._transport = check_transport(transport)
        process_group, ranks, rank, source = resolve_group(group, src)
        self._rank = rank
        # Nobody else need keep a StoreGroup; torch keeps its process groups.
        self._group = process_group if isinstance(process_group, StoreGroup) else None
        self._src = source
        kind = _sharded.ShardedChannel if source == SHARDED else Channel
        self._channel: Channel = channel_for(process_group, ranks, rank, source, kind)
        self._shares_version = False
        self._version: int | None = None
        self._dirty = False
        self._report: SyncReport | None = None
        self._table = _core.TensorTable(rank)
        self._plans: list[tuple[int, Any]] = []  # (bucket_bytes asked for, plan), newest first
        self._stream_plan: tuple[int, Any] | None = None
        self._plan_current = False  # the newest plan is the table's
        self._cuts = Cuts()  # of what is received with a loader or as a stream
        self._user_error: BaseException | None = None
        self._begun: tuple[int, int] | None = None  # (sync, version) that this call may commit
        self._expected: int | None = None  # the only version that a receiver takes part in
        self._device: _core.CudaRuntime | None = None  # of the running sync's tensors
        self._stream_handle = 0
        self._anywhere = False  # they have no bytes: any device will do
        self._closed = False

    # --- what is known

    @property
    def version(self) -> int | None:
        """The last committed version; None if never synced."""
        return self._channel.version if self._shares_version else self._version

    @property
    def dirty(self) -> bool:
        """True when a failed sync may have left this rank's destinations half written; until a later one commits."""
        return self._dirty

    @property
    def report(self) -> SyncReport | None:
        """The report of the last sync that committed."""
        return self._report

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session. Local, does not wait for anybody, may be called twice; a sync after it is a StateError."""
        if self._closed:
            return
        self._closed = True
        self._plans.clear()
        self._stream_plan = None
        close_channel(self._channel)
        self._group = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    # --- the source

    def broadcast(self, params: Params, version: int | None = None) -> SyncReport:
        """Sends `params` to every other rank and commits them as `version`. Called by rank `src`, or by every trainer.

        Args:
            params: An nn.Module (its `state_dict(keep_vars=True)`), a mapping, an iterable of (name, tensor) pairs, or a
                generator of them, which is pulled on this thread, one item at a time, each copied before the next is
                asked for. Do not write to the tensors until this returns. Sharded: not a generator, and equal names,
                shapes, dtypes and ties on every trainer.
            version: A whole number above the last committed one; None: last + 1, counted from 1. Sharded: the lowest
                trainer's; the others pass None or the same.

        Raises:
            InvalidArgument: A tensor or the version is refused.
            ManifestMismatch: A receiver's destinations do not fit; nothing was written anywhere.
            ChecksumError, SyncTimeout, PeerLost, PeerFailed, CommError, DeviceError: As named; every rank gets it.
            StateError: Closed, forked, on a receiver, or inside a callback of a sync on this group.
        """
        self._check_usable()
        if self._src == SHARDED:
            return _sharded.broadcast(self, params, version)
        if self._rank != self._src:
            raise StateError(
                f"broadcast() is called on rank {self._src} (src), this is rank {self._rank}: call receive()"
            )
        channel = self._channel
        channel.acquire(self._timeout_s)
        try:
            channel.enter()
            return self._broadcast(channel, params, version)
        finally:
            channel.release()
            self._user_error = None

    def _broadcast(self, channel: Channel, params: Params, version: int | None) -> SyncReport:
        started = time.perf_counter()
        streaming = is_generator(params)
        display = Display(self._progress, f"sync from rank {self._rank}")
        try:
            problem: BaseException | None = None
            plan_s = 0.0
            keep: list[object] = []
            self._device = None
            self._reconcile(channel.sender)
            try:
                number = self._next_version(version)
                if streaming:
                    if cuda_in_use():
                        params = self._peek(params)
                else:
                    names, tensors = self._read(params)
                    with Refused():
                        keep = self._refresh(names, tensors, destination=False)
                        self._table.find_ties()
                        self._plan_current = self._plan_current and not self._table.changed
                    plan_s = time.perf_counter() - started
            except BaseException as error:
                problem = error
            try:
                channel.connect(Deadline(self._timeout_s))
            except Error:
                if problem is not None:
                    raise problem from None  # nobody came to be told
                raise
            sender = channel.sender
            if sender is None:
                raise StateError("the session is closed")
            hook = self._make_hook(channel, display)  # the core borrows it for the length of the sync
            if sender.active:  # an interrupt came right behind open() in the last call
                sender.fail(PeerFailed.kind, self._rank, "interrupted")
            sender.open(self._timeout_s, hook)
            try:
                if problem is not None:
                    sender.connect_all()
                    raise problem
                usable = candidates(self._device is not None)
                if self._device is not None:
                    sender.use_device(self._device, self._stream_handle)
                if len(channel.ranks) > 1:
                    transport = sender.join(self._transport, usable)
                else:  # nobody to send to: what would have been used
                    transport = usable[0] if self._transport == "auto" else self._transport
                mark = time.perf_counter()
                asked = self._bucket_bytes or default_bucket_bytes(transport)
                plan, known = self._stream_plan_for(asked) if streaming else self._plan_for(asked)
                plan_s += time.perf_counter() - mark
                held = sender.begin(number, asked, self._buffers, self._verify, self._strict, plan, streaming)
                if sender.needs_external:
                    sender.attach_external(channel.make_driver(sender.comm_generation, self._timeout_s, sender.check))
                display.start(None if plan is None else plan.nbytes, lambda: sender.bytes_sent)
                if streaming:
                    self._push_all(sender, params)
                    plan = sender.finish_stream()
                    self._stream_plan = (asked, plan)
                    known = known and sender.followed_plan
                else:
                    sender.send_plan(self._table)
                self._begun = (sender.sync, number)
                missing, unexpected = sender.commit()
            except BaseException as error:
                error = self._settle(error, sender.check if sender.active else None)
                sender.fail(*self._outward(error))
                raise error
            self._set_version(number)
            self._begun = None
            self._dirty = False
            self._report = self._make_report(
                number,
                transport,
                plan.nbytes,
                plan.tensors,
                plan.buckets,
                sender.bucket_bytes,
                time.perf_counter() - started,
                known and held,
                sender.staging_bytes,
                {"plan": plan_s, **sender.phases},
                unexpected,
                missing,
            )
            del keep
            return self._report
        finally:
            display.stop()
            if streaming:
                self._close_generator(params)

    def _peek(self, params: Any) -> Iterator[Any]:
        """The generator, after a look at where its first tensor is; what it raises then is raised in its turn."""
        held: list[Any] = []
        while True:
            try:
                item = next(params)
            except StopIteration:
                return iter(held)
            except BaseException as error:
                self._user_error = error
                raise
            held.append(item)
            with Refused():
                name, tensor = pair(item, len(held) - 1, self._rank)
                d = describe(tensor, str(name), self._rank, destination=False)
            if 0 not in d.shape:  # an empty tensor is nowhere
                break
        self._find_device(d.device, set() if d.stream is None else {d.stream})
        del item, tensor, d
        return _chain(held, params)

    def _push_all(self, sender: Any, params: Any) -> None:
        channel, push_plain = self._channel, sender.push_plain
        index = 0
        while True:
            try:
                item = next(params)
            except StopIteration:
                return
            except BaseException as error:
                self._user_error = error
                raise
            channel.check_open()
            try:
                name, tensor = item if type(item) is tuple and len(item) == 2 else pair(item, index, self._rank)
                if type(name) is not str or not name.isascii():
                    _check_name(name, index, self._rank)
                if not push_plain(name, tensor):
                    self._push_other(sender, name, tensor)
            except InvalidArgument as error:  # as Refused, without its two calls for every tensor
                error.refused = True  # type: ignore[attr-defined]
                raise
            del item, tensor
            index += 1

    def _push_other(self, sender: Any, name: str, tensor: Any) -> None:
        d = describe(tensor, name, self._rank, destination=False)
        stream = self._check_item_device(d, name)
        sender.push(name, *d.layout, stream)

    @staticmethod
    def _close_generator(params: Any) -> None:
        close_it = getattr(params, "close", None)
        if close_it is not None:
            close_it()

    def _next_version(self, version: object) -> int:
        last = self.version
        if version is None:
            if last is not None and last + 1 >= 1 << 63:
                raise InvalidArgument(
                    f"rank {self._rank}: version {last} was the last one possible; make a new session", self._rank
                )
            return 1 if last is None else last + 1
        number = _check_int("version", version, 0, (1 << 63) - 1, "(a version number)")
        if last is not None and number <= last:
            raise InvalidArgument(
                f"rank {self._rank}: version is {number}, but {last} is already committed; versions only grow",
                self._rank,
            )
        return number

    def _read(self, params: Any) -> tuple[list[Any], list[Any]]:
        """Names and tensors of a container, whose own code may raise anything, our errors too."""
        try:
            items = read_items(params, self._rank)
        except BaseException as error:
            if not getattr(error, "about_params", False):
                self._user_error = error
            raise
        with Refused():
            return split_items(items, self._rank)

    def _reconcile(self, half: Any) -> None:
        """What an interrupt at the end of the last call left undone here, but was done in the core."""
        begun, self._begun = self._begun, None
        if half is None or begun is None:
            return
        sync, number = begun
        if half.committed_sync == sync and (self.version is None or self.version < number):
            self._set_version(number)
            self._dirty = False

    def _set_version(self, number: int) -> None:
        self._version = number
        if self._shares_version:
            self._channel.version = number

    def _refresh(self, names: list[Any], tensors: list[Any], *, destination: bool) -> list[object]:
        """Brings the table up to date with these tensors; returns what must stay alive during the sync."""
        keep: list[object] = [tensors]
        streams: set[int] = set()
        try:
            for i in self._table.refresh(names, tensors):
                d = describe(tensors[i], names[i], self._rank, destination=destination)
                keep.append(d.keep)
                if d.stream is not None:
                    streams.add(d.stream)
                self._table.describe(i, *d.layout, d.device)
            ordinal = self._table.device()
            self._anywhere = ordinal == _core.NOWHERE
            if self._anywhere and _on_cuda():
                ordinal = current_device()
            self._find_device(ordinal, streams)
        except BaseException:
            self._table.clear()  # half described
            self._plan_current = False
            raise
        return keep

    def _find_device(self, ordinal: int, streams: set[int]) -> None:
        """Where this sync's tensors are, and on which stream the caller works on them."""
        self._device = None
        self._stream_handle = 0
        if ordinal >= 0:
            self._stream_handle = stream_handle(ordinal, streams)
            self._device = runtime_for(ordinal)

    def _check_item_device(self, d: Description, name: str) -> int:
        """The stream of a generator's item; all items are where the first one was."""
        nbytes = d.itemsize
        for n in d.shape:
            nbytes *= n
        ordinal = -1 if self._device is None else self._device.ordinal
        if nbytes > 0 and d.device != ordinal:
            places = ["the CPU" if i < 0 else f"cuda:{i}" for i in (d.device, ordinal)]
            raise InvalidArgument(
                f"rank {self._rank}: tensor '{_core.shown_name(name)}' is on {places[0]}, the generator's first one on "
                f"{places[1]}; the "
                "tensors of one sync must be on one device",
                self._rank,
            )
        if ordinal < 0:
            return 0
        return stream_handle(ordinal, () if d.stream is None else (d.stream,))

    def _plan_for(self, asked: int) -> tuple[Any, bool]:
        """The plan of the table, and whether an earlier sync made it."""
        if self._plans and self._plan_current and self._plans[0][0] == asked:
            return self._plans[0][1], True
        with Refused():
            plan = self._table.plan(asked)
        for i, (bucket_bytes, old) in enumerate(self._plans):
            if bucket_bytes == asked and old.fingerprint == plan.fingerprint:
                self._plans.insert(0, self._plans.pop(i))
                self._plan_current = True
                return old, True
        self._plans.insert(0, (asked, plan))
        del self._plans[_REMEMBERED_PLANS:]
        self._plan_current = True
        return plan, False

    def _stream_plan_for(self, asked: int) -> tuple[Any, bool]:
        if self._stream_plan is not None and self._stream_plan[0] == asked:
            return self._stream_plan[1], True
        return None, False

    # --- receivers

    def receive(self, into: Params | None = None, *, load: LoadWeights | None = None) -> SyncReport:
        """Takes part in a sync; returns when its version is committed. Called by every rank but `src`.

        Args:
            into: Destinations, overwritten in place: an nn.Module, a mapping or a sequence of (name, tensor) pairs.
            load: Instead: called bucket by bucket with a list of (name, tensor), each name once and whole. The tensors
                are valid during the call and meant to be read; what the callee writes to them no other rank sees.

        Raises:
            As broadcast(). What `load` raises is raised here unchanged, and is PeerFailed on the other ranks. After an
            error `dirty` says whether destinations may be half written.
        """
        self._check_usable()
        if self._rank == self._src:
            raise StateError(
                f"receive() is for the other ranks; this is rank {self._rank}, the source: call broadcast()"
            )
        problem: InvalidArgument | None = None  # one that the other ranks are told of
        if (into is None) == (load is None):
            problem = InvalidArgument(
                f"rank {self._rank}: receive() takes either destinations (into=) or a loader (load=), it was given "
                + ("neither" if into is None else "both"),
                self._rank,
            )
        elif load is not None and not callable(load):
            problem = InvalidArgument(f"rank {self._rank}: load is a {type(load).__name__}, not a callable", self._rank)
        if self._src == SHARDED:
            return _sharded.receive(self, into, load, problem)
        channel = self._channel
        channel.acquire(self._timeout_s)
        try:
            channel.enter()
            if load is None or problem is not None:
                return self._receive_into(channel, into, problem)
            return self._receive_load(channel, load)
        finally:
            channel.release()
            self._user_error = None

    def stream(self, *, borrow: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Takes part in a sync as an iterator of (name, tensor); committed when it is exhausted. In the source's order,
        or, sharded, as the shares' buckets come in turn.

        Leaving the loop early is a failure of this rank. The tensors are this rank's own, unless `borrow=True`: they are
        then read-only by agreement and valid until the next item is asked for. Those of one bucket share a block of
        memory, which is freed when the last of them is.
        """
        self._check_usable()
        if self._rank == self._src:
            raise StateError(
                f"stream() is for the other ranks; this is rank {self._rank}, the source: call broadcast()"
            )
        if self._src == SHARDED:
            return _sharded.stream(self, _check_bool("borrow", borrow))
        return self._stream(_check_bool("borrow", borrow))

    def _buckets_of_version(self, version: int | None) -> Generator[list[tuple[str, torch.Tensor]], None, None]:
        """As stream(), a bucket's tensors at a time; they are to be taken out of the list that they come in.

        Any other version is refused before its first tensor; None takes what comes.
        """
        self._check_usable()
        return self._stream(False, version, in_buckets=True)

    def _receive_version(self, load: LoadWeights, version: int) -> SyncReport:
        """As receive(load=...), but any other version is refused before its first tensor. One thread at a time."""
        self._expected = version
        try:
            return self.receive(load=load)
        finally:
            self._expected = None

    def _receive_into(self, channel: Channel, into: Any, problem: BaseException | None) -> SyncReport:
        started = time.perf_counter()
        keep: list[object] = []
        self._device = None
        try:
            if problem is not None:
                raise problem
            keep = self._read_destinations(into)
        except BaseException as error:
            problem = error
        plan_s = time.perf_counter() - started
        with self._receiving(channel, problem, self._use_destinations) as (receiver, begin):
            binder = _core.TableBinder(self._table, begin["strict"], begin["streaming"])
            try:
                with Refused():
                    receiver.bind(binder)
            except InvalidArgument as error:
                raise self._shared_destination(error) from None
            self._get_ready(channel, receiver, begin)
            try:
                receiver.receive_into(binder)
            except InvalidArgument as error:
                raise self._shared_destination(error) from None
            tensors = receiver.tensors
            receiver.commit(binder.missing, binder.unexpected)
        del keep
        return self._received(receiver, begin, tensors, started, plan_s, binder.unexpected, binder.missing)

    def _read_destinations(self, into: Any) -> list[object]:
        """Brings the table up to date with these destinations; returns what must stay alive during the sync."""
        with Refused():
            if is_generator(into):
                raise InvalidArgument(
                    f"rank {self._rank}: destinations cannot be a generator; pass a module, a mapping or a list of pairs",
                    self._rank,
                )
            names, tensors = self._read(into)
            keep = self._refresh(names, tensors, destination=True)
            self._table.check_destinations()
        return keep

    def _shared_destination(self, error: InvalidArgument) -> SharedDestination:
        shared = SharedDestination(str(error), error.rank)
        shared.refused = True  # type: ignore[attr-defined]
        return shared

    def _receive_load(self, channel: Channel, load: LoadWeights) -> SyncReport:
        started = time.perf_counter()
        with self._receiving(channel, None, self._use_loader) as (receiver, begin):
            self._get_ready(channel, receiver, begin)
            self._cuts.begin(begin["fingerprint"], begin["bucket_bytes"])
            for items in deliver(receiver, self._space(receiver), self._cuts, own=False):
                self._touched = True
                try:
                    load(items)
                except BaseException as error:
                    self._user_error = error
                    raise
                del items
                channel.check_open()
            tensors = receiver.tensors
            receiver.commit([], [])
        return self._received(receiver, begin, tensors, started, 0.0, [], [])

    def _stream(
        self, borrow: bool, version: int | None = None, *, in_buckets: bool = False
    ) -> Generator[Any, None, None]:
        channel = self._channel
        channel.acquire(self._timeout_s)
        try:
            channel.enter()
            self._expected = version
            started = time.perf_counter()
            with self._receiving(channel, None, self._use_loader) as (receiver, begin):
                self._get_ready(channel, receiver, begin)
                self._cuts.begin(begin["fingerprint"], begin["bucket_bytes"])
                count = 0
                for items in deliver(receiver, self._space(receiver), self._cuts, own=not borrow):
                    self._touched = True
                    for unit in [items] if in_buckets else items:
                        count += len(items) if in_buckets else 1
                        try:
                            yield unit
                        except GeneratorExit as error:
                            count -= len(items) if in_buckets else 0  # those that were not taken
                            self._user_error = error
                            self._user_message = f"left the loop over stream() after {count} tensors"
                            raise
                        except BaseException as error:  # thrown into the loop from outside
                            self._user_error = error
                            raise
                        channel.adopt()
                        channel.check_open()
                        del unit
                    items.clear()
                tensors = receiver.tensors
                receiver.commit([], [])
            self._received(receiver, begin, tensors, started, 0.0, [], [])
        finally:
            self._expected = None
            channel.release()
            self._user_error = None

    def _use_destinations(self, receiver: Any) -> None:
        if self._device is not None:
            receiver.use_device(self._device, self._stream_handle, self._anywhere)

    def _use_loader(self, receiver: Any) -> None:
        """A loader takes tensors where they come: on this thread's device too, if the process has one in use."""
        self._device = None
        receiver.verify_first(True)
        if _on_cuda():
            self._find_device(current_device(), set())
            receiver.use_device(self._device, self._stream_handle, True)

    def _space(self, receiver: Any) -> Space:
        if receiver.on_device and self._device is not None:
            return DeviceSpace(self._device, self._stream_handle)
        return HostSpace()

    @contextlib.contextmanager
    def _receiving(
        self, channel: Channel, problem: BaseException | None, use: Callable[[Any], None]
    ) -> Iterator[tuple[Any, Any]]:
        """One sync of a receiver: joined inside, failed towards the others if the body raises."""
        self._touched = False
        self._user_message = ""
        deadline = Deadline(self._timeout_s)
        display = Display(self._progress, f"sync to rank {self._rank}")
        try:
            hook = self._make_hook(channel, display)  # the core borrows it for the length of the sync
            while True:
                try:
                    channel.connect(deadline)
                except Error:
                    if problem is not None:
                        raise problem from None  # nobody came to be told
                    raise
                receiver = channel.receiver
                if receiver is None:
                    raise StateError("the session is closed")
                self._reconcile(receiver)
                if receiver.active:  # an interrupt came right behind open() in the last call
                    receiver.fail(PeerFailed.kind, self._rank, "interrupted")
                receiver.open(self._timeout_s, hook)
                try:
                    if problem is not None:
                        receiver.announce()
                        raise problem
                    use(receiver)
                    begin = receiver.join(self._transport)
                    self._check_version(begin["version"])
                    self._begun = (receiver.sync, begin["version"])
                    break
                except _core.SourceClosed:
                    # Its next session is another connection; the wait for it is still the same one.
                    receiver.fail(PeerFailed.kind, self._rank, "the source closed its session")
                except BaseException as error:
                    error = self._settle(error, None)
                    receiver.fail(*self._outward(error))
                    raise error
            try:
                display.start(None, lambda: receiver.bytes_received)
                yield receiver, begin
            except BaseException as error:
                self._dirty = self._dirty or receiver.wrote or self._touched
                error = self._settle(error, receiver.check if receiver.active else None)
                receiver.fail(*self._outward(error))
                raise error
        finally:
            display.stop()

    def _check_version(self, version: int) -> None:
        if self._expected is not None and version != self._expected:
            raise InvalidArgument(
                f"rank {self._rank}: this rank was called for version {self._expected}, the source sends version {version}; "
                "call both sides for the same one",
                self._rank,
            )

    @staticmethod
    def _make_hook(channel: Channel, display: Display) -> Callable[[], None]:
        def hook() -> None:
            channel.check_open()
            channel.serve_other_hosts()
            display.tick()

        return hook

    def _get_ready(self, channel: Channel, receiver: Any, begin: Any) -> None:
        receiver.ready()
        if receiver.needs_external:
            receiver.attach_external(channel.make_driver(begin["comm_generation"], self._timeout_s, receiver.check))

    def _received(
        self,
        receiver: Any,
        begin: Any,
        tensors: int,
        started: float,
        plan_s: float,
        unexpected: list[str],
        missing: list[str],
    ) -> SyncReport:
        self._set_version(begin["version"])
        self._begun = None
        self._dirty = False
        self._report = self._make_report(
            begin["version"],
            begin["transport"],
            receiver.bytes_received,
            tensors,
            receiver.buckets_received,
            begin["bucket_bytes"],
            time.perf_counter() - started,
            receiver.held_plan and not receiver.deviated,
            receiver.staging_bytes,
            {"plan": plan_s, **receiver.phases},
            unexpected,
            missing,
        )
        return self._report

    # --- both

    def _check_usable(self) -> None:
        self._channel.check_process()
        if self._closed:
            raise StateError("this session is closed; make a new WeightSync")
        if self._channel.closed:
            # Closed with its process group, or by fastsync.close(): a session outlives neither.
            raise StateError(
                "the process group of this session is gone, or fastsync.close() was called; make a new WeightSync"
            )

    def _settle(self, error: BaseException, check: Callable[[], None] | None) -> BaseException:
        """Where the data plane broke, the control plane may know better why: who died, or who failed."""
        if isinstance(error, PeerLost) and error is not self._user_error:
            self._channel.lost = error
        if check is None or not isinstance(error, CommError) or error is self._user_error:
            return error
        patience = Deadline(0.5)
        while patience.left() > 0:
            try:
                check()
            except Error as better:
                if isinstance(better, PeerLost):
                    self._channel.lost = better
                return better
            except BaseException as interrupt:
                return interrupt
            threading.Event().wait(0.01)
        return error

    def _outward(self, error: BaseException) -> tuple[int, int, str]:
        """(kind, rank, message) that the other ranks see for an error of this one."""
        if isinstance(error, Error) and error is not self._user_error and not isinstance(error, StateError):
            kind = 2 if getattr(error, "refused", False) else error.kind
            message = error.message if isinstance(error, PeerFailed) else str(error)
            rank = error.rank
            if rank < 0:
                rank = self._rank
                message = f"rank {rank}: {message}"
        else:
            kind, rank = PeerFailed.kind, self._rank
            try:
                text = str(error)
            except Exception:
                text = "(its text could not be made)"
            text = text or (self._user_message if isinstance(error, GeneratorExit) else "")
            message = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return kind, rank, message.encode("utf-8", "replace")[: _core.MAX_MESSAGE_BYTES].decode("utf-8", "ignore")

    def _make_report(
        self,
        version: int,
        transport: str,
        nbytes: int,
        tensors: int,
        buckets: int,
        bucket_bytes: int,
        seconds: float,
        plan_reused: bool,
        peak_staging_bytes: int,
        phases: dict[str, float],
        unexpected: list[str],
        missing: list[str],
    ) -> SyncReport:
        report = SyncReport(
            version=version,
            transport=transport,
            nbytes=nbytes,
            tensors=tensors,
            buckets=buckets,
            bucket_bytes=bucket_bytes,
            seconds=seconds,
            gb_per_s=nbytes / seconds / 1e9 if seconds > 0 else 0.0,
            plan_reused=plan_reused,
            peak_staging_bytes=peak_staging_bytes,
            phases=phases,
            unexpected=unexpected,
            missing=missing,
        )
        if self._channel.sender is not None:
            report.__dict__["_transport_reason"] = self._channel.sender.transport_reason
        return report

    _touched = False
    _user_message = ""


def _chain(held: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """What is held, then `rest`; keeps no hold of an item that has been taken."""
    while held:
        yield held.pop(0)
    yield from rest


def _check_name(name: object, index: int, rank: int) -> None:
    valid = isinstance(name, str)
    if isinstance(name, str) and not name.isascii():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            valid = False
    if not valid:
        raise InvalidArgument(
            f"rank {rank}: the name of tensor number {index} is {name!r}, not a valid str (UTF-8 without lone surrogates)",
            rank,
        )
