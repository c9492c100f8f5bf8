"""Who has which role in a sharded sync, and the sessions that it is made of; see `_sharded`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from . import _core
from ._group import Channel, _wait_key
from ._waiting import Deadline
from .errors import StateError, SyncTimeout

__all__ = ["ROLLOUT", "TRAINER", "ShardedChannel"]

TRAINER, ROLLOUT = "trainer", "rollout"
_CALLS = {TRAINER: "broadcast()", ROLLOUT: "receive() or stream()"}
_REMEMBERED = 4


class ShardedChannel(Channel):
    """The verdict session's channel of one process group, who has which role, and the share sessions' channels."""

    def __init__(self, group: Any, ranks: list[int], rank: int, src: int, pairing: _core.Pairing) -> None:
        super().__init__(group, ranks, rank, src, pairing, "sharded")
        self.trainers: list[int] = []
        self.rollouts: list[int] = []
        self.set_id = 0  # of the set that `parts` belong to; 0: none
        self.running = False  # a sync has gone as far as the shares, and has not ended
        self._parts: dict[int, Channel] = {}
        self._role = ""
        self._shares: dict[int, _core.Shares] = {}  # by fingerprint of the whole manifest, newest last
        self._share_plans: dict[tuple[int, int], _core.SyncPlan] = {}  # by that and the bucket size

    def check_role(self, role: str) -> None:
        """StateError for a call of the other role than this rank has."""
        if self._role and self._role != role:
            raise StateError(
                f"rank {self.rank} is a {self._role} of this process group (its first call with src='sharded' was "
                f"{_CALLS[self._role]}) and stays one; {_CALLS[role]} is for a {role}"
            )

    def meet(self, role: str, deadline: Deadline) -> None:
        """Says this rank's role, and learns everybody's: once per process group. The lowest trainer becomes the source."""
        self.check_role(role)
        if self.trainers:
            return
        store = self._open_store()
        mine = f"role/{self.rank}"
        keys = [f"role/{r}" for r in self.ranks]

        def ask(cancelled: threading.Event) -> dict[int, str]:
            if not store.check([mine]):
                store.set(mine, role)
            if store.get(mine).decode() != role:
                return {self.rank: store.get(mine).decode()}
            _wait_key(store, keys, deadline, cancelled)
            return {r: store.get(key).decode() for r, key in zip(self.ranks, keys) if store.check([key])}

        roles: dict[int, str] = self._with_store(ask, deadline, "learning every rank's role through the group's store")
        self._role = roles[self.rank]
        self.check_role(role)
        absent = [r for r in self.ranks if r not in roles]
        if absent:
            raise SyncTimeout(
                f"phase 'join': rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} did not come within "
                f"{deadline.timeout_s:g} s; every rank of the group must call, trainers {_CALLS[TRAINER]} and the others "
                f"{_CALLS[ROLLOUT]}, all with src='sharded'",
                absent[0],
            )
        trainers = [r for r in sorted(roles) if roles[r] == TRAINER]
        if not trainers:
            raise StateError(
                f"no rank of the group is a trainer: all {len(roles)} called {_CALLS[ROLLOUT]}. A rank keeps its role as "
                "long as the process group lives, so make a new one, in which at least one rank calls broadcast()"
            )
        self.rollouts = [r for r in sorted(roles) if roles[r] == ROLLOUT]
        self.src = trainers[0]
        self.is_source = self.rank == self.src
        self.trainers = trainers

    def use_set(self, set_id: int) -> None:
        """From now on part() means the share sessions of this set."""
        if set_id != self.set_id:
            self.drop_set()
            self.set_id = set_id

    def part(self, trainer: int) -> Channel:
        """This rank's end of the session of one trainer's share."""
        part = self._parts.get(trainer)
        if part is None:
            group = self._group()
            if group is None:
                raise StateError("the process group of this session was destroyed")
            ranks = sorted([trainer, *self.rollouts])
            name = f"sharded/{self.set_id:x}/{trainer}"
            part = self._parts[trainer] = Channel(group, ranks, self.rank, trainer, _core.Pairing(), name)
        return part

    def drop_set(self, exiting: bool = False) -> None:
        """Closes the share sessions. Local."""
        self.running = False
        self.set_id = 0
        while self._parts:
            _, part = self._parts.popitem()
            part._close_now(exiting)

    def shares(self, fingerprint: int, make: Callable[[], _core.Shares]) -> _core.Shares:
        """The shares of the manifest with this fingerprint, made once."""
        found = self._shares.pop(fingerprint, None)
        self._shares[fingerprint] = found = make() if found is None else found
        if len(self._shares) > _REMEMBERED:
            del self._shares[next(iter(self._shares))]
        return found

    def share_plan(self, fingerprint: int, shares: _core.Shares, share_bytes: int) -> tuple[_core.SyncPlan, bool]:
        """The plan of this trainer's share, and whether an earlier sync made it."""
        key = (fingerprint, share_bytes)
        found = self._share_plans.pop(key, None)
        plan = shares.plan(self.trainers.index(self.rank), share_bytes) if found is None else found
        self._share_plans[key] = plan
        if len(self._share_plans) > _REMEMBERED:
            del self._share_plans[next(iter(self._share_plans))]
        return plan, found is not None

    def _close_now(self, exiting: bool) -> None:
        self.drop_set(exiting)
        super()._close_now(exiting)
