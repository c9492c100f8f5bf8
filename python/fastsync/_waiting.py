"""Bounded waits on things that have no bounded, interruptible wait of their own (stores, group constructors)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .errors import SyncTimeout

__all__ = ["Deadline", "bounded"]

T = TypeVar("T")
_SLICE_S = 0.05
# Work that keeps the deadline itself knows better what it waited for: it gets this much longer to say so.
_GRACE_S = 0.5


class Deadline:
    """A point in time that a wait must not outlast."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + min(timeout_s, 3.0e9)

    def left(self) -> float:
        return self._end - time.monotonic()


def bounded(
    work: Callable[[threading.Event], T], deadline: Deadline, what: str, check: Callable[[], None] | None = None
) -> T:
    """Runs `work(cancelled)` on a thread of its own; returns what it returns and raises what it raises.

    Wakes often enough for signals, calls `check` on each wake. When the deadline passes or something raises here, the
    thread is told to stop by the event, and left to end when the call it is in does (it is a daemon).
    """
    cancelled = threading.Event()
    done = threading.Event()
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work(cancelled))
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="fastsync-wait", daemon=True)
    thread.start()
    try:
        while not done.wait(max(0.0, min(_SLICE_S, deadline.left()))):
            if check is not None:
                check()
            if deadline.left() <= 0:
                cancelled.set()
                if done.wait(_GRACE_S):
                    break
                raise SyncTimeout(f"{what} did not end within {deadline.timeout_s:g} s")
    except BaseException:
        cancelled.set()
        raise
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
