"""The one-liners over `WeightSync`, and the sessions that they keep from call to call."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from ._group import resolve_group
from .report import SyncReport
from .session import LoadWeights, Params, Source, WeightSync

__all__ = ["broadcast_bucketed", "close", "receive_bucketed"]

_sessions: dict[tuple[object, ...], tuple[Any, WeightSync]] = {}
_sessions_lock = threading.Lock()


def _session(group: Any, src: Any, options: tuple[tuple[str, Any], ...]) -> WeightSync:
    """The session of these options, kept from call to call."""
    fresh = WeightSync(group, src=src, **dict(options))  # checks everything; cheap and local
    process_group, _, _, _ = resolve_group(group, src)
    key = (id(process_group), src, *options)
    with _sessions_lock:
        found = _sessions.get(key)
        if found is not None:
            held, session = found
            if held() is process_group and not session._closed and not session._channel.closed:
                fresh.close()
                return session
        fresh._shares_version = True
        fresh._group = None  # a session that is kept for ever must not keep its group
        _sessions[key] = (weakref.ref(process_group), fresh)
        return fresh


def broadcast_bucketed(
    params: Params,
    *,
    src: Source = 0,
    group: Any = None,
    version: int | None = None,
    bucket_bytes: int | None = None,
    transport: str = "auto",
    verify: bool = True,
    timeout_s: float = 300.0,
    strict: bool = True,
    progress: bool = False,
    buffers: int = 2,
) -> SyncReport:
    """Copies `params` of rank `src` into the `params` of every other rank, in place. Every rank of the group calls it.

    A rank that has a loader instead of destinations calls `receive_bucketed`. The session behind it is kept, so the
    second call with the same tensors replays the first one's plan. Arguments and errors are `WeightSync`'s; `version`
    counts per group and source, and is the source's. With `src="sharded"` only the trainers call this, each with the same
    params, of which it sends a share; the others call `receive_bucketed`, or `WeightSync.receive` for destinations.

    Returns:
        The report of this rank.
    """
    session = _session(
        group,
        src,
        (
            ("bucket_bytes", bucket_bytes),
            ("transport", transport),
            ("verify", verify),
            ("timeout_s", timeout_s),
            ("strict", strict),
            ("progress", progress),
            ("buffers", buffers),
        ),
    )
    if src == "sharded" or session._rank == src:
        return session.broadcast(params, version)
    return session.receive(params)


def receive_bucketed(
    load_weights: LoadWeights,
    *,
    src: Source = 0,
    group: Any = None,
    transport: str = "auto",
    verify: bool = True,
    timeout_s: float = 300.0,
    progress: bool = False,
) -> SyncReport:
    """Takes part in a `broadcast_bucketed` of rank `src`, or of all trainers, with a loader instead of destinations.

    `load_weights(list[tuple[str, Tensor]])` is called bucket by bucket; see `WeightSync.receive(load=...)`.
    """
    session = _session(
        group,
        src,
        (("transport", transport), ("verify", verify), ("timeout_s", timeout_s), ("progress", progress)),
    )
    return session.receive(load=load_weights)


def close() -> None:
    """Closes the sessions that the one-liners keep. Local, never blocks; the next call starts afresh."""
    with _sessions_lock:
        sessions = [session for _, session in _sessions.values()]
        _sessions.clear()
    for session in sessions:
        session.close()
