"""Runs one part of the benchmark in processes of its own, and keeps what it has measured, whatever becomes of it.

A part is a function of bench.gpu.parts that is called on every rank with its `Rank`. Figures are sent to the parent as
they are made; an exception, a death that was not announced, or a budget that is used up ends the part with one line
that says so, and every process of it is killed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from bench.gpu.sizes import Sizes

if TYPE_CHECKING:
    from bench.gpu.device import Device

_SPAWN = multiprocessing.get_context("spawn")
_GRACE_S = 3.0  # after one rank's failure: the time in which others may say what they saw


@dataclass(frozen=True)
class Job:
    """A part, and what it is run with."""

    part: str  # "pack" is bench.gpu.parts.pack; a name with dots is a module of its own
    world: int = 1
    budget_s: float = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    victims: tuple[int, ...] = ()  # ranks that are meant to die


@dataclass
class Outcome:
    """What a part has measured, and why it ended early if it did."""

    job: Job
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    details: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Seat:
    part: str
    number: int
    world: int
    sizes: Sizes
    environment: Mapping[str, str]
    options: Mapping[str, Any]
    store_port: int
    control: Connection
    links: Mapping[int, Connection]
    marks: Any


class Rank:
    """One rank of a part, as the part sees it."""

    def __init__(self, seat: _Seat) -> None:
        self.number = seat.number
        self.world = seat.world
        self.sizes = seat.sizes
        self.options = seat.options
        self.links = seat.links  # between rank 0 and each other one
        self.marks = seat.marks  # a shared number for each rank: monotonic nanoseconds
        self._seat = seat
        self._control = seat.control

    @functools.cached_property
    def device(self) -> Device:
        """Opened by the first who asks."""
        from bench.gpu.device import open_device

        ordinal = self.number if self.options.get("a_device_each") else 0
        return open_device(ordinal, self.sizes.table_bytes)

    @property
    def is_source(self) -> bool:
        return self.number == 0

    @property
    def link(self) -> Connection:
        """To the other one, where there are two."""
        return self.links[1 if self.is_source else 0]

    def row(self, figure: str, value: float, unit: str, **details: Any) -> None:
        """One figure; it counts from now on, whatever happens to the part later."""
        row = {"part": self._seat.part, "figure": figure, "value": value, "unit": unit, "details": details}
        self._control.send_bytes(json.dumps({"row": row}).encode())

    def join(self) -> Any:
        """torch.distributed over Gloo, with all ranks of the part."""
        import torch.distributed as dist

        timeout = timedelta(seconds=self.sizes.timeout_s)
        store = dist.TCPStore("127.0.0.1", self._seat.store_port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=self.number, world_size=self.world, timeout=timeout)
        return dist


def _main(seat: _Seat) -> None:
    # Before torch is imported, and before any library reads its environment.
    os.environ.update(seat.environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["FASTSYNC_FAKE_RANK"] = str(seat.number)
    message: dict[str, Any] = {"done": True}
    try:
        module = importlib.import_module(seat.part if "." in seat.part else f"bench.gpu.parts.{seat.part}")
        module.run(Rank(seat))
    except BaseException as error:
        text = f"rank {seat.number}: {type(error).__name__}: {error}"
        message = {"error": text.splitlines()[0][:600], "details": traceback.format_exc()}
    with contextlib.suppress(OSError):
        seat.control.send_bytes(json.dumps(message).encode())
    # Destructors of communicators may wait for ranks that are gone; everything that matters has been sent.
    os._exit(0)


def run(job: Job, sizes: Sizes) -> Outcome:
    """Runs the part; returns within its budget (and a little)."""
    import torch.distributed as dist

    begin = time.monotonic()
    outcome = Outcome(job)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = {number: _SPAWN.Pipe() for number in range(1, job.world)}
    marks = _SPAWN.Array("q", job.world)
    controls: dict[int, Connection] = {}
    processes: dict[int, Any] = {}
    try:
        for number in range(job.world):
            control, theirs = _SPAWN.Pipe()
            links = {n: ends[0] for n, ends in pipes.items()} if number == 0 else {0: pipes[number][1]}
            seat = _Seat(job.part, number, job.world, sizes, job.environment, job.options, store.port, theirs, links,
                         marks)  # fmt: skip
            process = _SPAWN.Process(target=_main, args=(seat,), name=f"{job.part}-{number}", daemon=True)
            process.start()
            theirs.close()
            controls[number], processes[number] = control, process
        for ends in pipes.values():
            ends[0].close()
            ends[1].close()
        _listen(outcome, controls, processes, begin + job.budget_s)
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.join(10)
        for control in controls.values():
            control.close()
    outcome.seconds = time.monotonic() - begin
    return outcome


def _listen(outcome: Outcome, controls: dict[int, Connection], processes: dict[int, Any], deadline: float) -> None:
    missing = set(controls)
    while missing:
        left = deadline - time.monotonic()
        if left <= 0:
            ranks = ", ".join(map(str, sorted(missing)))
            outcome.error = outcome.error or f"not done within its {outcome.job.budget_s:.0f} s (rank {ranks})"
            return
        for ready in wait([controls[number] for number in missing], timeout=left):
            number = next(n for n in missing if controls[n] is ready)
            try:
                message = json.loads(controls[number].recv_bytes())
            except (EOFError, OSError):
                missing.discard(number)
                processes[number].join(5)
                if number not in outcome.job.victims:
                    outcome.error = outcome.error or f"rank {number} died (exit code {processes[number].exitcode})"
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                continue
            if "row" in message:
                outcome.rows.append(message["row"])
                continue
            missing.discard(number)
            if "error" in message:
                # What a rank says that lost another one matters less than what that other one says.
                if outcome.error is None or "PeerFailed" in outcome.error or "PeerLost" in outcome.error:
                    outcome.error, outcome.details = message["error"], message["details"]
                deadline = min(deadline, time.monotonic() + _GRACE_S)
