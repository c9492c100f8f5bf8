"""Who takes part in an update, and where they meet.

The master hosts a TCPStore for as long as it lives, and says in its metadata where. A membership (these processes, in
this order) meets in it under a token. While nothing changes the token stays, and with it everything that was set up;
any change, and any process that comes without a session of its own, makes a fresh one.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from .._group import host_id, local_addresses
from .._waiting import Deadline, bounded
from ..errors import CommError, InvalidArgument, SyncTimeout
from .base import Topology

__all__ = ["FORMAT", "HostedStore", "build_topology", "check_master", "connect_store", "store_prefix"]

FORMAT = 1
_PREFIX = "fastsync/engine"
_CONNECT_S = 5.0  # one address of a host that has several


class HostedStore:
    """The store that this process hosts for everybody else."""

    def __init__(self, timeout_s: float) -> None:
        timeout = datetime.timedelta(seconds=min(timeout_s, 3.0e8))
        try:
            self.store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise CommError(f"the master could not open a port for the rendezvous: {error}") from None
        self.address: dict[str, Any] = {
            "id": secrets.token_hex(16),
            "host": host_id(),
            "ips": local_addresses(),
            "port": int(self.store.port),
        }


def connect_store(address: Mapping[str, Any], timeout_s: float) -> Any:
    """A client of the store at `address`; CommError or SyncTimeout if it cannot be reached by the deadline."""
    deadline = Deadline(timeout_s)
    port = int(address["port"])
    ips = ["127.0.0.1"] if address["host"] == host_id() else list(address["ips"])
    for ip in ips:
        # The store's own client tries one address until the deadline, and writes to stderr all the while.
        with contextlib.suppress(OSError):
            socket.create_connection((ip, port), max(0.1, min(_CONNECT_S, deadline.left()))).close()
            break
    else:
        raise CommError(
            f"cannot reach the master's store at port {port} of {', '.join(ips) or 'no address at all'}; the master may have "
            "ended, or set FASTSYNC_HOST on its host to an address that other hosts can reach"
        )
    timeout = datetime.timedelta(seconds=min(max(1.0, deadline.left()), 3.0e8))
    try:
        return bounded(
            lambda _: dist.TCPStore(ip, port, None, False, timeout, wait_for_workers=False),
            deadline,
            f"connecting to the master's store at {ip}:{port}",
        )
    except SyncTimeout:
        raise
    except (RuntimeError, ValueError) as error:
        raise CommError(f"cannot use the master's store at {ip}:{port}: {error}") from None


def build_topology(
    trainer_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any] | None]
) -> Topology:
    """Trainer rank 0 sends as rank 0, the rollout workers receive as ranks 1 and up, the other trainers have rank -1.

    `metadata` holds every process's, trainers first, or the master's alone: then a changed rollout worker shows only
    when the next update fails.
    """
    for name, value in (("trainer", trainer_world_size), ("rollout", rollout_world_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgument(f"the {name} world size is {value!r}; it is a number of processes, at least 1")
    known = [_check(entry, number) for number, entry in enumerate(metadata) if entry is not None]
    masters = [entry for entry in known if "store" in entry]
    if len(masters) != 1:
        raise InvalidArgument(
            f"{len(masters)} of {len(known)} processes call themselves master; it is trainer rank 0 alone (is_master=True, "
            "set before prepare())"
        )
    (master,) = masters
    rollout: list[Mapping[str, Any]] = []
    if len(metadata) == trainer_world_size + rollout_world_size:
        if metadata[0] is not master:
            raise InvalidArgument("the master is not the first trainer rank; trainer rank 0 is the one that sends")
        rollout = [entry for entry in metadata[trainer_world_size:] if entry is not None]
    elif len(known) != 1:
        raise InvalidArgument(
            f"metadata of {len(metadata)} processes for {trainer_world_size} trainers and {rollout_world_size} rollout "
            "workers; pass every process's, trainers first, or the master's alone"
        )
    taking_part = [master, *rollout]
    listed = [entry["member"] for entry in taking_part]
    if len(set(listed)) != len(listed):
        raise InvalidArgument("one rollout worker is listed twice; every worker has an engine of its own")
    world_size = rollout_world_size + 1
    members = hashlib.sha256(json.dumps([master["store"], listed, world_size]).encode()).hexdigest()[:32]
    # A process that lost its session, or never had one, makes all of them start anew.
    joined = [entry["joined"] for entry in taking_part]
    unchanged = joined[0] is not None and joined[0][0] == members and all(each == joined[0] for each in joined)
    place = {
        "fastsync": FORMAT,
        "store": dict(master["store"]),
        "members": members,
        "token": joined[0][1] if unchanged else secrets.token_hex(8),
    }
    trainers: dict[str, list[Any]] = {
        "rank": [0] + [-1] * (trainer_world_size - 1),
        "world_size": [world_size] * trainer_world_size,
        "master_metadata": [place] * trainer_world_size,
    }
    workers: dict[str, list[Any]] = {
        "rank": list(range(1, world_size)),
        "world_size": [world_size] * rollout_world_size,
        "master_metadata": [place] * rollout_world_size,
    }
    return trainers, workers


def _check(entry: object, number: int) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping) or "fastsync" not in entry:
        raise InvalidArgument(
            f"metadata number {number} is a {type(entry).__name__} that no fastsync engine made; all processes must use "
            "the same engine"
        )
    if entry["fastsync"] != FORMAT:
        raise InvalidArgument(
            f"metadata number {number} has format {entry['fastsync']}, this fastsync has {FORMAT}; install one version "
            "everywhere"
        )
    return entry


def check_master(place: object) -> Mapping[str, Any]:
    """The place that build_topology() made, or InvalidArgument."""
    checked = _check(place, 0)
    if "token" not in checked:
        raise InvalidArgument("master_metadata is what prepare() returned; pass what build_topology() returned")
    return checked


def store_prefix(place: Mapping[str, Any]) -> str:
    """Where in the store this membership meets."""
    return f"{_PREFIX}/{place['token']}"
