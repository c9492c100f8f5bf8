"""Runs peers in real processes, all ranks in step, and takes the times.

The parent (no rank of its own) drives: one JSON command to every rank, one JSON answer back. So the parent decides
what comes next from what it has measured, and a rank that dies or fails is seen at once. The end-to-end time of a sync
runs from the source's call to the last receiver's return, on the host's one CLOCK_MONOTONIC; the receivers are in
their calls before the source makes its own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Semaphore
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")


class BenchError(RuntimeError):
    """A rank failed, died or did not answer; the message says which and why."""


@dataclass(frozen=True)
class PeerSpec:
    """A peer with its settings. `label` names it in the results."""

    label: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """One sync, over all ranks."""

    seconds: float
    source_seconds: float
    cpu_seconds: float
    involuntary_switches: int
    others_cpu_seconds: float  # what processes outside the benchmark (and the host) took of our cores meanwhile
    memory_bytes: list[int]  # growth of each rank's resident set during the sync
    facts: list[dict[str, Any]]


@dataclass(frozen=True)
class _Seat:
    """What a rank's process is started with."""

    rank: int
    world_size: int
    workload: str
    scale: float
    store_port: int
    timeout_s: float
    control: Connection
    links: dict[int, Connection]
    entered: Sequence[Semaphore]
    filled: Sequence[Semaphore]
    drained: Sequence[Semaphore]


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def busy_seconds() -> float:
    """CPU time that the machine has spent on anything, and that its host has kept from it."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class _Rank:
    """The loop inside a rank's process."""

    def __init__(self, seat: _Seat) -> None:
        import torch
        import torch.distributed as dist

        from bench.pattern import Pattern
        from bench.peers.base import RankContext
        from bench.workloads import load

        torch.set_num_threads(1)
        self.seat = seat
        timeout = timedelta(seconds=seat.timeout_s)
        store = dist.TCPStore("127.0.0.1", seat.store_port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.world_size, timeout=timeout)
        specs = load(seat.workload, seat.scale).specs
        tensors = [torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in specs]
        for tensor in tensors:
            tensor.view(-1).view(torch.uint8).fill_(1)  # touches every page: a model in use has been
        self.ctx = RankContext(
            seat.rank,
            seat.world_size,
            specs,
            tensors,
            Pattern(),
            seat.timeout_s,
            seat.links,
            seat.filled,
            seat.drained,
        )
        self.peers: dict[str, Any] = {}
        dist.barrier()
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection inside one peer's round would be another peer's garbage

    def make(self, label: str, kind: str, options: dict[str, Any]) -> None:
        from bench.peers import KINDS

        self.peers[label] = KINDS[kind](self.ctx, options)
        self.peers[label].warm()

    def fill(self, label: str, round_number: int) -> None:
        if self.ctx.is_source:
            for i, array in enumerate(self.ctx.arrays):
                self.ctx.pattern.fill(i, array, round_number)
        self.peers[label].before(round_number)

    def sync(self, label: str, first: bool) -> dict[str, Any]:
        peer = self.peers[label]
        memory = resident_bytes()
        if self.ctx.is_source:
            for semaphore in self.seat.entered:
                if not semaphore.acquire(timeout=self.seat.timeout_s):
                    raise TimeoutError("a receiver did not come to the sync")
        usage = resource.getrusage(resource.RUSAGE_SELF)
        if not self.ctx.is_source:
            self.seat.entered[self.ctx.rank - 1].release()
        begin = time.monotonic_ns()
        if first:
            peer.open()
        peer.sync()
        end = time.monotonic_ns()
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "begin": begin,
            "end": end,
            "cpu": after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime,
            "switches": after.ru_nivcsw - usage.ru_nivcsw,
            "memory": resident_bytes() - memory,
            "facts": peer.facts(),
            "inner": peer.inner_seconds(),
        }

    def check(self, label: str, round_number: int) -> int:
        return int(self.peers[label].wrong_bytes(round_number))

    def drop(self, label: str) -> None:
        self.peers.pop(label).close()
        gc.collect()


def _rank_main(seat: _Seat) -> None:
    # Before torch is imported: one thread each, and Gloo on the loopback whatever the host's name resolves to.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        rank = _Rank(seat)
        seat.control.send_bytes(json.dumps({"ok": None}).encode())
        while True:
            command = json.loads(seat.control.recv_bytes())
            if command["do"] == "quit":
                break
            answer = getattr(rank, command["do"])(**command["with"])
            seat.control.send_bytes(json.dumps({"ok": answer}).encode())
    except (EOFError, KeyboardInterrupt):
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            seat.control.send_bytes(json.dumps({"error": traceback.format_exc()}).encode())
    finally:
        # Gloo's destructor may wait for peers that are gone; everything that matters has been sent.
        os._exit(0)


class Case:
    """One workload on one number of receivers: the processes, and the commands they understand."""

    def __init__(self, workload: str, scale: float, receivers: int, timeout_s: float) -> None:
        import torch.distributed as dist

        self.world_size = receivers + 1
        self.timeout_s = timeout_s
        self.round_number = 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = {rank: _SPAWN.Pipe() for rank in range(1, self.world_size)}
        semaphores = [[_SPAWN.Semaphore(0) for _ in range(receivers)] for _ in range(3)]
        self._controls: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for rank in range(self.world_size):
                control, theirs = _SPAWN.Pipe()
                links = {r: ends[0] for r, ends in pipes.items()} if rank == 0 else {0: pipes[rank][1]}
                seat = _Seat(
                    rank, self.world_size, workload, scale, self._store.port, timeout_s, theirs, links, *semaphores
                )
                process = _SPAWN.Process(target=_rank_main, args=(seat,), name=f"bench-rank-{rank}", daemon=True)
                process.start()
                theirs.close()
                self._controls.append(control)
                self._processes.append(process)
            for ends in pipes.values():
                ends[0].close()
                ends[1].close()
            self._answers("start")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for control in self._controls:
            with contextlib.suppress(OSError):
                control.send_bytes(json.dumps({"do": "quit"}).encode())
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        for control in self._controls:
            control.close()

    def _answers(self, doing: str) -> list[Any]:
        answers: list[Any] = [None] * self.world_size
        missing = set(range(self.world_size))
        deadline = time.monotonic() + self.timeout_s + 60.0
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise BenchError(f"{doing}: no answer from rank(s) {sorted(missing)} in time")
            ready = wait([self._controls[rank] for rank in missing], timeout=left)
            for rank in [r for r in missing if self._controls[r] in ready]:
                try:
                    answer = json.loads(self._controls[rank].recv_bytes())
                except (EOFError, OSError):
                    raise BenchError(f"{doing}: rank {rank} ended without an answer") from None
                if "error" in answer:
                    raise BenchError(f"{doing}: rank {rank} failed:\n{answer['error']}")
                answers[rank] = answer["ok"]
                missing.discard(rank)
        return answers

    def _tell(self, ranks: Sequence[int], do: str, **keywords: Any) -> None:
        message = json.dumps({"do": do, "with": keywords}).encode()
        for rank in ranks:
            try:
                self._controls[rank].send_bytes(message)
            except OSError as error:
                raise BenchError(f"{do}: rank {rank} is gone: {error}") from None

    def _all(self, do: str, **keywords: Any) -> list[Any]:
        self._tell(range(self.world_size), do, **keywords)
        return self._answers(f"{do} {keywords.get('label', '')}")

    def make(self, spec: PeerSpec) -> None:
        self._all("make", label=spec.label, kind=spec.kind, options=spec.options)

    def drop(self, label: str) -> None:
        self._all("drop", label=label)

    def sync(self, label: str, *, first: bool = False) -> Sample:
        """Changes every byte at the source, syncs, and compares every byte at every receiver."""
        self.round_number += 1
        self._all("fill", label=label, round_number=self.round_number)
        busy = busy_seconds()
        answers = self._all("sync", label=label, first=first)
        busy = busy_seconds() - busy
        wrong = self._all("check", label=label, round_number=self.round_number)
        if any(wrong):
            raise BenchError(f"{label}: {wrong} wrong bytes by rank, in round {self.round_number}")
        cpu = sum(a["cpu"] for a in answers)
        begin, inner = answers[0]["begin"], answers[0]["inner"]
        return Sample(
            seconds=(max(a["end"] for a in answers[1:]) - begin) / 1e9 if inner is None else inner,
            source_seconds=(answers[0]["end"] - begin) / 1e9,
            cpu_seconds=cpu,
            others_cpu_seconds=max(0.0, busy - cpu),
            involuntary_switches=sum(a["switches"] for a in answers),
            memory_bytes=[a["memory"] for a in answers],
            facts=[a["facts"] for a in answers],
        )
