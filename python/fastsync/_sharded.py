"""src="sharded": several trainers hold the same params, and each sends a share of them to every rollout rank.

It is a composition of ordinary sessions. One *verdict* session spans the group: the lowest trainer (the lead) is its
source, and its manifest is the whole one, but no bucket travels on it. One *share* session per trainer has that trainer
as its source and the rollout ranks as receivers. One sync:

    verdict   join, begin: every rank checks the whole manifest, trainers against their own, rollouts their destinations
              go: nothing has been written anywhere, and from here on the shares run
    shares    each by itself up to "verified"; a rollout takes one bucket of each in turn, all of them in the same order
    verdict   done by whoever has everything, commit by the lead: the version moves on every rank or on none
    shares    end, without waiting for anybody

Every wait of a share looks at the verdict session too, so a failure of any rank reaches every other by two ways, whatever
it waits for. Calls pair up again in the verdict session alone: the shares of a failed sync are thrown away, and the lead
names the set of share sessions to use in every Begin.

Everything runs on the calling thread.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from . import _core
from ._delivery import deliver_in_turn
from ._group import Channel
from ._progress import Display
from ._sharded_channel import ROLLOUT, TRAINER, ShardedChannel
from ._tensors import is_generator
from ._transports import asked_of_share, candidates, default_bucket_bytes
from ._waiting import Deadline
from .errors import CommError, Error, InvalidArgument, ManifestMismatch, PeerFailed, Refused, StateError, SyncTimeout
from .report import SyncReport

if TYPE_CHECKING:
    from .session import WeightSync

__all__ = ["ShardedChannel", "broadcast", "receive", "stream"]

# The verdict session's manifest is never cut: one bucket holds it all.
_UNCUT = 1 << 62
# A trainer sees a stuck one only by what the rollouts no longer take, and would blame them. They know better, and their
# deadline is no later than its own: it lets them speak first.
_PATIENCE_PART = 0.25
_MAX_PATIENCE_S = 0.5
_COMM_PATIENCE_S = 0.5


class _Call:
    """One call of this rank. Whatever ends it early goes through fail(), which tells every session it takes part in."""

    def __init__(self, session: WeightSync, role: str, display: Display) -> None:
        self.session, self.role, self.display = session, role, display
        self.channel = cast(ShardedChannel, session._channel)
        self.deadline = Deadline(session._timeout_s)
        self.verdict: Any = None  # this rank's half of the verdict session
        self.halves: list[Any] = []  # of the share sessions: a trainer's own, a rollout's in the trainers' order
        self.begin: dict[str, Any] = {}  # what the lead sent
        self.begins: list[dict[str, Any]] = []  # what the trainers sent, at a rollout
        self.shares: Any = None
        self._hooks: list[Callable[[], None]] = []  # the core borrows them for the length of the sync
        session._device = None
        session._touched = False
        session._user_message = ""

    @property
    def leads(self) -> bool:
        return self.channel.is_source

    def check(self) -> None:
        """Throws what has become known of the sync."""
        self.verdict.check()

    # --- the verdict session

    def meet(self, problem: BaseException | None) -> None:
        """Who is who. An interrupt that came late in the last call may have left something undone."""
        try:
            self.channel.meet(self.role, self.deadline)
        except Error as error:
            if problem is not None and not isinstance(error, StateError):
                raise problem from None  # nobody came to be told
            raise
        if self.channel.running:
            self.channel.drop_set()

    def _open(self, half: Any) -> None:
        if half.active:  # an interrupt came right behind open() in the last call
            half.fail(PeerFailed.kind, self.session._rank, "interrupted")
        hook = self.session._make_hook(self.channel, self.display)
        self._hooks.append(hook)
        half.open(self.session._timeout_s, hook)
        self.verdict = half

    def _connect(self, problem: BaseException | None) -> None:
        try:
            self.channel.connect(self.deadline)
        except Error:
            if problem is not None:
                raise problem from None  # nobody came to be told
            raise

    def lead(self, problem: BaseException | None, version: object) -> tuple[int, str, _core.SyncPlan, bool]:
        """The lead's way to Go: (version, transport, whole plan, whether everybody held that already)."""
        session, channel = self.session, self.channel
        session._reconcile(channel.sender)
        number = 0
        if problem is None:
            try:
                number = session._next_version(version)
            except InvalidArgument as error:
                problem = error
        self._connect(problem)
        sender = channel.sender
        if sender is None:
            raise StateError("the session is closed")
        self._open(sender)
        if problem is not None:
            sender.connect_all()
            raise problem
        usable = candidates(session._device is not None)
        if session._device is not None:
            sender.use_device(session._device, session._stream_handle)
        if len(channel.ranks) > 1:
            transport = sender.join(session._transport, usable)
        else:  # nobody to send to: what would have been used
            transport = usable[0] if session._transport == "auto" else session._transport
        plan, known = session._plan_for(_UNCUT)
        self.share_bytes = _share_bytes(session._bucket_bytes or default_bucket_bytes(transport), len(channel.trainers))
        self.buffers, self.verify, self.strict = session._buffers, session._verify, session._strict
        channel.use_set(channel.set_id or secrets.randbits(63) | 1)
        channel.running = True  # whatever fails from here on: some ranks may have had their Go
        held = sender.begin(
            number,
            _UNCUT,
            self.buffers,
            self.verify,
            self.strict,
            plan,
            False,
            channel.set_id,
            self.share_bytes,
        )
        session._begun = (sender.sync, number)
        return number, transport, plan, known and held

    def follow(self, problem: BaseException | None, use: Callable[[Any], None]) -> dict[str, Any]:
        """Everybody else's way to Begin, which it returns. Then comes go()."""
        session, channel = self.session, self.channel
        while True:
            self._connect(problem)
            receiver = channel.receiver
            if receiver is None:
                raise StateError("the session is closed")
            session._reconcile(receiver)
            self._open(receiver)
            try:
                if problem is not None:
                    receiver.announce()
                    raise problem
                use(receiver)
                begin = receiver.join(session._transport)
                break
            except _core.SourceClosed:
                receiver.fail(PeerFailed.kind, session._rank, "the source closed its session")
        session._begun = (receiver.sync, begin["version"])
        self.share_bytes, self.buffers = begin["share_bytes"], begin["buffers"]
        self.verify, self.strict = begin["verify"], begin["strict"]
        return begin

    def go(self, begin: dict[str, Any]) -> None:
        """This rank is content; returns when every rank is."""
        self.begin = begin
        self.verdict.ready()
        self.channel.use_set(begin["set_id"])
        self.channel.running = True

    # --- the shares

    def _share_hook(self, part: Channel) -> Callable[[], None]:
        def hook() -> None:
            self.channel.check_open()
            part.serve_other_hosts()
            self.display.tick()
            self.check()

        self._hooks.append(hook)
        return hook

    def _attach_external(self, part: Channel, half: Any, generation: int) -> None:
        if half.needs_external:
            half.attach_external(part.make_driver(generation, self.session._timeout_s, half.check))

    def open_share(self) -> Any:
        """This trainer's own share, as its source."""
        session = self.session
        part = self.channel.part(session._rank)
        part.connect(self.deadline, self.check)
        sender = part.sender
        if sender is None:
            raise StateError("the session is closed")
        sender.open(session._timeout_s, self._share_hook(part))
        self.halves.append(sender)
        return sender

    def send_share(self, sender: Any, number: int, transport: str, shares: _core.Shares, plan: _core.SyncPlan) -> bool:
        """Sends everything; returns, whether every rollout held the plan, when all of them have verified it."""
        session, channel = self.session, self.channel
        if session._device is not None:
            sender.use_device(session._device, session._stream_handle)
        if channel.rollouts:
            sender.join(asked_of_share(transport), candidates(session._device is not None))
        held = sender.begin(number, self.share_bytes, self.buffers, self.verify, self.strict, plan, False)
        self._attach_external(channel.part(session._rank), sender, sender.comm_generation)
        self.display.start(plan.nbytes, lambda: sender.bytes_sent)
        sender.send_share(session._table, shares, channel.trainers.index(session._rank))
        sender.verified()
        return bool(held)

    def open_shares(self, use: Callable[[Any], None], binder: Any) -> None:
        """All shares, as a receiver, up to their first buckets. Every rollout takes the same steps in the same order."""
        channel, transport = self.channel, asked_of_share(self.begin["transport"])
        verdict, count = self.verdict, len(channel.trainers)
        self.shares = channel.shares(self.begin["fingerprint"], lambda: verdict.shares(count))
        for trainer in channel.trainers:
            self.halves.append(self._announce(trainer, transport, use))
        for k, trainer in enumerate(channel.trainers):
            while True:
                try:
                    begin = self.halves[k].join(transport)
                    break
                except _core.SourceClosed:
                    self._abandon(self.halves[k])
                    self.halves[k] = self._announce(trainer, transport, use)
            if begin["fingerprint"] != self.shares.fingerprint(k):
                raise ManifestMismatch(
                    f"rank {trainer} sends another share than the lead's manifest gives it; trainers of one sync hold equal "
                    "params",
                    trainer,
                )
            self.begins.append(begin)
        for half, trainer, begin in zip(self.halves, channel.trainers, self.begins):
            if binder is not None:
                half.bind(binder)
            half.ready()
            self._attach_external(channel.part(trainer), half, begin["comm_generation"])
        self.display.start(None, lambda: sum(half.bytes_received for half in self.halves))

    def _announce(self, trainer: int, transport: str, use: Callable[[Any], None]) -> Any:
        part = self.channel.part(trainer)
        while True:
            part.connect(self.deadline, self.check)
            receiver = part.receiver
            if receiver is None:
                raise StateError("the session is closed")
            receiver.open(self.session._timeout_s, self._share_hook(part))
            try:
                use(receiver)
                receiver.ask(transport)
                return receiver
            except _core.SourceClosed:  # it opened this set anew
                self._abandon(receiver)
            except BaseException:
                self.halves.append(receiver)
                raise

    def _abandon(self, receiver: Any) -> None:
        receiver.fail(PeerFailed.kind, self.session._rank, "the source closed its session")

    # --- the end

    def fail(self, error: BaseException) -> BaseException:
        """Tells every rank, and gives up the set of shares. Returns what is to be raised here."""
        session = self.session
        if self.role == ROLLOUT and self.halves:
            session._dirty = session._dirty or session._touched or any(half.wrote for half in self.halves)
        error = self._settle(error)
        kind, rank, message = session._outward(error)
        if self.verdict is not None:
            self.verdict.fail(kind, rank, message)
        # Bringing a data plane to rest may take its time where the other end is stuck: that one comes last, so that the
        # others hear at once.
        stuck_last = [half for half in self.halves if half.source != rank] + [
            half for half in self.halves if half.source == rank
        ]
        for half in stuck_last:
            half.fail(kind, rank, message)
        if self.channel.running:
            self.channel.drop_set()
        return error

    def _settle(self, error: BaseException) -> BaseException:
        """The same error, or one that another rank knows better."""
        session = self.session
        if isinstance(error, CommError):
            patience = Deadline(_COMM_PATIENCE_S)  # the data plane broke: somebody knows who failed
        elif isinstance(error, SyncTimeout) and self.role == TRAINER:
            patience = Deadline(min(_PATIENCE_PART * session._timeout_s, _MAX_PATIENCE_S))
        else:
            return session._settle(error, None)
        if error is session._user_error or self.verdict is None or not self.verdict.active:
            return error
        # The shares, too: the lead may be the one that is stuck, and pass nothing on.
        halves = [self.verdict, *(half for half in self.halves if half.active)]
        while patience.left() > 0:
            for half in halves:
                try:
                    half.check()
                except Error as better:
                    if half is self.verdict or not isinstance(better, CommError):
                        return session._settle(better, None)
                    # else the share's broken data plane once more
                except _core.SourceClosed:
                    continue  # which says nothing of why
                except BaseException as interrupt:
                    return interrupt
            threading.Event().wait(0.01)
        return error

    def report(self, *, version: int, **fields: Any) -> SyncReport:
        """The sync was committed."""
        session = self.session
        self.channel.running = False
        session._set_version(version)
        session._begun = None
        session._dirty = False
        staging = sum(half.staging_bytes for half in self.halves)
        session._report = session._make_report(version=version, peak_staging_bytes=staging, **fields)
        session._report.__dict__["_imbalance"] = self.shares.imbalance
        return session._report

    def phases(self, plan_s: float) -> dict[str, float]:
        """Of all sessions that this call took part in."""
        total = {"plan": plan_s}
        for half in (self.verdict, *self.halves):
            for name, seconds in half.phases.items():
                total[name] = total.get(name, 0.0) + seconds
        return total


def _share_bytes(bucket_bytes: int, trainers: int) -> int:
    """Of one bucket of each share, so that those of all shares together are as large as was asked for."""
    alignment = _core.ALIGNMENT
    return max(alignment, -(-(bucket_bytes // trainers) // alignment) * alignment)


@contextlib.contextmanager
def _calling(session: WeightSync, role: str, title: str) -> Iterator[_Call]:
    channel = session._channel
    channel.acquire(session._timeout_s)
    try:
        channel.enter()
        display = Display(session._progress, title)
        try:
            call = _Call(session, role, display)
            try:
                yield call
            except BaseException as error:
                raise call.fail(error)  # noqa: B904  (usually the same one)
        finally:
            display.stop()
    finally:
        channel.release()
        session._user_error = None


def broadcast(session: WeightSync, params: Any, version: int | None) -> SyncReport:
    """`WeightSync.broadcast` of a trainer."""
    started = time.perf_counter()
    with _calling(session, TRAINER, f"share from rank {session._rank}") as call:
        problem: BaseException | None = None
        keep: list[object] = []
        names: list[Any] = []
        try:
            if is_generator(params):
                raise InvalidArgument(
                    f"rank {session._rank}: with src='sharded' params cannot be a generator: shares are balanced by size, "
                    "which must be known before; pass a module, a mapping or a list of pairs",
                    session._rank,
                )
            names, tensors = session._read(params)
            with Refused():
                keep = session._refresh(names, tensors, destination=False)
                session._table.find_ties()
                session._plan_current = session._plan_current and not session._table.changed
        except BaseException as error:
            problem = error
        plan_s = time.perf_counter() - started
        call.meet(problem)
        channel = call.channel
        if call.leads:
            number, transport, whole, known = call.lead(problem, version)
        else:
            begin = call.follow(problem, lambda half: _use_device(session, half))
            number, transport = begin["version"], begin["transport"]
            whole, known = _agree(call, begin, version)
            call.go(begin)
        mark = time.perf_counter()
        shares = call.shares = channel.shares(whole.fingerprint, lambda: _core.Shares(whole, len(channel.trainers)))
        plan, known_share = channel.share_plan(whole.fingerprint, shares, call.share_bytes)
        plan_s += time.perf_counter() - mark
        sender = call.open_share()
        held = call.send_share(sender, number, transport, shares, plan)
        if call.leads:
            missing, unexpected = call.verdict.commit()
            sender.commit()
        else:
            call.verdict.commit([], [])
            missing, unexpected = sender.commit()
            place = {name: i for i, name in enumerate(names)} if unexpected else {}
            unexpected.sort(key=lambda name: place.get(name, 0))
        report = call.report(
            version=number,
            transport=transport,
            nbytes=whole.nbytes,
            tensors=whole.tensors,
            buckets=plan.buckets,
            bucket_bytes=sender.bucket_bytes,
            seconds=time.perf_counter() - started,
            plan_reused=known and known_share and held,
            phases=call.phases(plan_s),
            unexpected=unexpected,
            missing=missing,
        )
        del keep
        return report


def _use_device(session: WeightSync, half: Any) -> None:
    """A trainer takes part in the verdict session as a receiver; its tensors may lie anywhere."""
    if session._device is not None:
        half.use_device(session._device, session._stream_handle, True)


def _agree(call: _Call, begin: dict[str, Any], version: int | None) -> tuple[_core.SyncPlan, bool]:
    """Another trainer than the lead: its params and version must be the lead's."""
    session, lead = call.session, call.channel.src
    with Refused():
        whole, known = session._plan_for(_UNCUT)
    if whole.fingerprint != begin["fingerprint"]:
        raise ManifestMismatch(
            f"rank {session._rank}: its params differ from those of rank {lead}, the lowest trainer: "
            f"{call.verdict.first_difference(whole)}; with src='sharded' all trainers pass equal names, shapes, dtypes and "
            "ties in one order",
            session._rank,
        )
    if version is not None and version != begin["version"]:
        raise InvalidArgument(
            f"rank {session._rank}: version is {version}, rank {lead} (the lowest trainer) commits {begin['version']}; pass "
            "the same on every trainer, or None on all but the lowest",
            session._rank,
        )
    return whole, known and call.verdict.held_plan


def receive(session: WeightSync, into: Any, load: Any, problem: BaseException | None) -> SyncReport:
    """`WeightSync.receive` of a rollout rank."""
    if load is None or problem is not None:
        return _receive_into(session, into, problem)
    started = time.perf_counter()
    with _calling(session, ROLLOUT, f"shares to rank {session._rank}") as call:
        for items in _deliver(call, own=False):
            session._touched = True
            try:
                load(items)
            except BaseException as error:
                session._user_error = error
                raise
            del items
            session._channel.check_open()
        return _received(call, started, 0.0, [], [])


def stream(session: WeightSync, borrow: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """`WeightSync.stream` of a rollout rank."""
    started = time.perf_counter()
    with _calling(session, ROLLOUT, f"shares to rank {session._rank}") as call:
        count = 0
        for items in _deliver(call, own=not borrow):
            session._touched = True
            for item in items:
                count += 1
                try:
                    yield item
                except GeneratorExit as error:
                    session._user_error = error
                    session._user_message = f"left the loop over stream() after {count} tensors"
                    raise
                except BaseException as error:  # thrown into the loop from outside
                    session._user_error = error
                    raise
                call.channel.adopt()
                call.channel.check_open()
                del item
            items.clear()
        _received(call, started, 0.0, [], [])


def _receive_into(session: WeightSync, into: Any, problem: BaseException | None) -> SyncReport:
    started = time.perf_counter()
    with _calling(session, ROLLOUT, f"shares to rank {session._rank}") as call:
        keep: list[object] = []
        try:
            if problem is not None:
                raise problem
            keep = session._read_destinations(into)
        except BaseException as error:
            problem = error
        plan_s = time.perf_counter() - started
        call.meet(problem)
        begin = call.follow(problem, session._use_destinations)
        binder = _core.TableBinder(session._table, begin["strict"], False)
        try:
            with Refused():
                call.verdict.bind(binder)
        except InvalidArgument as error:
            raise session._shared_destination(error) from None
        call.go(begin)
        parts = _core.ShareBinder(session._table)
        call.open_shares(session._use_destinations, parts)
        left = list(call.halves)
        while left:
            at_most = 1 if len(left) > 1 else sys.maxsize
            left = [half for half in left if not half.receive_share(parts, at_most)]
        report = _received(call, started, plan_s, binder.unexpected, binder.missing)
        del keep
        return report


def _deliver(call: _Call, *, own: bool) -> Iterator[list[tuple[str, Any]]]:
    """Up to the shares, whose tensors it returns as they come."""
    session = call.session
    call.meet(None)
    call.go(call.follow(None, session._use_loader))
    call.open_shares(session._use_loader, None)
    return deliver_in_turn(call.halves, [session._space(half) for half in call.halves], own=own)


def _received(call: _Call, started: float, plan_s: float, unexpected: list[str], missing: list[str]) -> SyncReport:
    """Everything has arrived: the verdict, and the report."""
    verdict, begin = call.verdict, call.begin
    for half in call.halves:
        half.verified(missing, unexpected)
    tensors = verdict.tensors
    verdict.commit(missing, unexpected)
    for half in call.halves:
        half.conclude()
    return call.report(
        version=begin["version"],
        transport=begin["transport"],
        nbytes=sum(half.bytes_received for half in call.halves),
        tensors=tensors,
        buckets=sum(half.buckets_received for half in call.halves),
        bucket_bytes=max(one["bucket_bytes"] for one in call.begins),
        seconds=time.perf_counter() - started,
        plan_reused=verdict.held_plan and all(half.held_plan for half in call.halves),
        phases=call.phases(plan_s),
        unexpected=unexpected,
        missing=missing,
    )
