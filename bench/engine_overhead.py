"""What an update of many tensors costs beside moving their bytes, fastsync's engine against the code of verl's.

    python -m bench.engine_overhead --write-readme       # where fastsync and verl are installed; README.md says how

The 18,867 names of Qwen3-30B-A3B, each with 256 bytes, so that nearly all time goes into names, not into bytes. Two
processes, a trainer's and a rollout worker's; in each round both peers make one update, in turns:

- fastsync: `ShmCheckpointEngine`, from the framework's call of `send_weights` and `receive_weights` until both return.
  Counted is the CPU time of all threads of both processes: the copies, the checksums and the plan's comparison included.
- verl: what its engines do with each tensor, by its own `split_weight_chunks`, `TensorMeta`, a pickle of a bucket's
  metadata and `merge_weight_chunks`. Copies, socket and collective are not counted.

The consumer is the same for both: it counts tensors and bytes and lets each go, as a loader that copies does. Between the
rounds that are timed each peer makes an update in which every byte is compared with what this round's must be.

Prints one JSON object a peer. The exit code is 1 where a byte was wrong, and with --strict where a bound was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import itertools
import json
import multiprocessing
import pickle
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastsync.engine import ShmCheckpointEngine

from . import render, results
from .workloads import qwen3_30b_a3b

HERE = Path(__file__).parent
COUNT = 18_867
ELEMENTS = 128  # of bfloat16: 256 bytes, the size of the model's smallest tensors
BUCKET_BYTES = 64 << 20
TIMEOUT_S = 120.0
PATIENCE_S = 600.0
PEERS = ("fastsync", "verl")
MARKS = (
    "<!-- engine overhead: begin (written by engine_overhead.py --write-readme) -->",
    "<!-- engine overhead: end -->",
)
COLUMNS = (
    "peer",
    "CPU us a tensor",
    "sending",
    "receiving",
    "CPU ms an update",
    "lowest",
    "call to first tensor, ms",
    "calls around, ms",
)
# What the engine has to reach: CPU time of an update as a share of verl's, and the three calls around it together.
MOST_OF_VERLS = 0.1
MOST_AROUND_S = 5e-3


class BenchError(RuntimeError):
    """A side failed, or something that arrived is not what was sent."""


class Cost(NamedTuple):
    """What one side spent in one update."""

    cpu_s: float
    called: float  # on the host's monotonic clock
    first: float  # the first tensor was there (receiver)
    around_s: float  # prepare, init_process_group and finalize
    spent_before_first_s: float  # of cpu_s


def verl_is_here() -> str | None:
    """Why verl's code cannot be used, or None."""
    try:
        import verl.checkpoint_engine.base as base
    except ImportError as error:
        return f"verl cannot be imported: {error}"
    absent = [name for name in ("split_weight_chunks", "merge_weight_chunks") if not hasattr(base, name)]
    return f"this verl has no {', '.join(absent)}" if absent else None


class Model:
    """The tensors of one side. Every value is another one each round."""

    def __init__(self, count: int) -> None:
        self.names = [spec.name for spec in itertools.islice(qwen3_30b_a3b(), count)]
        if len(self.names) < count:
            raise BenchError(f"{count} tensors are asked for; the model has {len(self.names)} names")
        self.flat = torch.empty(count * ELEMENTS, dtype=torch.int16)
        # One storage a tensor, as a model has.
        self.tensors = [torch.empty(ELEMENTS, dtype=torch.bfloat16) for _ in range(count)]
        self.nbytes = 2 * self.flat.numel()

    def values(self, number: int) -> torch.Tensor:
        self.flat.copy_(torch.arange(self.flat.numel(), dtype=torch.int64).mul_(31).add_(number * 7919))
        return self.flat

    def fill(self, number: int) -> None:
        for tensor, values in zip(self.tensors, self.values(number).split(ELEMENTS)):
            tensor.view(torch.int16).copy_(values)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self.names, self.tensors)

    def check(self, got: Sequence[tuple[str, torch.Tensor]], number: int, peer: str) -> None:
        if [name for name, _ in got] != self.names:
            raise BenchError(f"{peer}: {len(got)} tensors came, not the {len(self.names)} sent in their order")
        whole = torch.cat([tensor.view(torch.int16).view(-1) for _, tensor in got])
        wrong = int((whole != self.values(number)).sum())
        if wrong:
            raise BenchError(f"{peer}: {wrong} of {whole.numel()} values are wrong")


class Sink:
    """The consumer. `kept`: hold on to everything, to compare it later."""

    def __init__(self, model: Model, kept: bool) -> None:
        self.model = model
        self.kept: list[tuple[str, torch.Tensor]] | None = [] if kept else None
        self.first = 0.0
        self.cpu_at_first = 0.0

    async def take(self, items: AsyncIterator[tuple[str, torch.Tensor]]) -> None:
        count = nbytes = 0
        kept = self.kept
        async for name, tensor in items:
            if not count:
                self.first, self.cpu_at_first = time.monotonic(), time.process_time()
            count += 1
            nbytes += tensor.nbytes
            if kept is not None:
                kept.append((name, tensor))
        if (count, nbytes) != (len(self.model.names), self.model.nbytes):
            raise BenchError(
                f"{count} tensors of {nbytes} bytes came, not {len(self.model.names)} of {self.model.nbytes}"
            )


class Side:
    """A trainer or a rollout worker, over a pipe to the driver."""

    def __init__(self, sends: bool, pipe: Connection, other: Connection, count: int) -> None:
        self.sends, self.pipe, self.other = sends, pipe, other
        self.model = Model(count)
        self.engine = ShmCheckpointEngine(BUCKET_BYTES, is_master=sends, timeout=TIMEOUT_S)
        self.loop = asyncio.new_event_loop()
        self.memory: torch.Tensor | None = None  # in which verl's bytes travel
        verl_is_here()  # imported at once: what its heap costs the garbage collector is then counted for both peers alike

    def update(self, peer: str, number: int, kept: bool) -> Cost:
        if self.sends:
            self.model.fill(number)
        sink = Sink(self.model, kept)
        if peer not in PEERS:
            raise BenchError(f"there is no peer '{peer}'; there are {', '.join(PEERS)}")
        cost = self._fastsync(sink) if peer == "fastsync" else self._verl(sink)
        if sink.kept:
            self.model.check(sink.kept, number, peer)
        return cost

    def _fastsync(self, sink: Sink) -> Cost:
        engine = self.engine
        marks = [time.perf_counter()]
        told = engine.prepare()
        marks.append(time.perf_counter())
        self.pipe.send(told)
        kwargs = self.pipe.recv()
        marks.append(time.perf_counter())
        engine.init_process_group(**kwargs)
        marks.append(time.perf_counter())
        called, cpu = time.monotonic(), time.process_time()
        if self.sends:
            self.loop.run_until_complete(engine.send_weights(self.model.items()))
        else:
            self.loop.run_until_complete(sink.take(engine.receive_weights()))
        cpu_s = time.process_time() - cpu
        marks.append(time.perf_counter())
        engine.finalize()
        around_s = (marks[1] - marks[0]) + (marks[3] - marks[2]) + (time.perf_counter() - marks[4])
        return Cost(cpu_s, called, sink.first, around_s, max(0.0, sink.cpu_at_first - cpu))

    def _verl(self, sink: Sink) -> Cost:
        if self.sends:
            called, cpu = time.monotonic(), time.process_time()
            message = self.loop.run_until_complete(self._verl_send())
            cpu_s = time.process_time() - cpu
            flat = torch.cat([tensor.view(torch.uint8) for tensor in self.model.tensors])
            self.other.send_bytes(message)
            self.other.send_bytes(flat.numpy())
            return Cost(cpu_s, called, 0.0, 0.0, cpu_s)
        message = self.other.recv_bytes()
        raw = torch.frombuffer(bytearray(self.other.recv_bytes()), dtype=torch.uint8)
        called, cpu = time.monotonic(), time.process_time()
        self.loop.run_until_complete(sink.take(self._verl_receive(message, raw)))
        return Cost(time.process_time() - cpu, called, sink.first, 0.0, max(0.0, sink.cpu_at_first - cpu))

    async def _verl_send(self) -> bytes:
        from verl.checkpoint_engine.base import split_weight_chunks

        metas: dict[str, Any] = {}
        offset = 0
        async for meta, chunk in split_weight_chunks(self.model.items(), BUCKET_BYTES):
            meta.offset = offset
            metas[meta.name] = meta
            offset += meta.chunk_size
            del chunk
        return pickle.dumps({"bucket_meta": metas, "is_last": True, "length": offset})

    async def _verl_receive(self, message: bytes, raw: torch.Tensor) -> AsyncIterator[tuple[str, torch.Tensor]]:
        from verl.checkpoint_engine.base import merge_weight_chunks

        async def chunks() -> AsyncIterator[tuple[Any, torch.Tensor]]:
            for meta in pickle.loads(message)["bucket_meta"].values():  # noqa: S301 (as its engines do)
                yield meta, raw[meta.offset : meta.offset + meta.chunk_size]

        async for item in merge_weight_chunks(chunks(), BUCKET_BYTES):
            yield item


def serve(sends: bool, pipe: Connection, other: Connection, count: int) -> None:
    """One process: answers the driver until it says None."""
    torch.set_num_threads(1)
    try:
        side = Side(sends, pipe, other, count)
        while (order := pipe.recv()) is not None:
            pipe.send(("done", side.update(*order)))
        side.engine.close()
    except Exception as error:  # the driver raises it
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


class Pair:
    """The two processes, driven."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        ends = context.Pipe()
        self.pipes: list[Connection] = []
        self.processes = []
        for sends, end in zip((True, False), ends):
            near, far = context.Pipe()
            process = context.Process(target=serve, args=(sends, far, end, count), daemon=True)
            process.start()
            far.close()
            end.close()
            self.pipes.append(near)
            self.processes.append(process)

    def update(self, peer: str, number: int, kept: bool) -> dict[str, float]:
        for pipe in self.pipes:
            pipe.send((peer, number, kept))
        topology_s = 0.0
        if peer == "fastsync":
            told = [self._get(pipe) for pipe in self.pipes]
            began = time.perf_counter()
            places = ShmCheckpointEngine.build_topology(1, 1, told)
            topology_s = time.perf_counter() - began
            for pipe, kwargs in zip(self.pipes, places):
                pipe.send({name: values[0] for name, values in kwargs.items()})
        send, receive = (self._get(pipe)[1] for pipe in self.pipes)
        first_s = (
            receive.first - send.called
            if peer == "fastsync"
            else send.spent_before_first_s + receive.spent_before_first_s  # one after the other, nothing between
        )
        return {
            "cpu_s": send.cpu_s + receive.cpu_s,
            "send_cpu_s": send.cpu_s,
            "receive_cpu_s": receive.cpu_s,
            "first_s": first_s,
            "around_s": max(send.around_s, receive.around_s),
            "topology_s": topology_s,
        }

    def _get(self, pipe: Connection) -> Any:
        if not pipe.poll(PATIENCE_S):
            raise BenchError(f"a side has been silent for {PATIENCE_S:g} s")
        try:
            answer = pipe.recv()
        except EOFError:
            raise BenchError("a side has ended") from None
        if isinstance(answer, tuple) and answer[0] == "failed":
            raise BenchError(answer[1])
        return answer

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            try:
                pipe.send(None)
                process.join(10)
            except OSError:
                pass  # it has ended already
            if process.is_alive():
                process.kill()
                process.join()


def measure(count: int, rounds: int, peers: Sequence[str] = PEERS) -> list[dict[str, Any]]:
    """One row a peer, with the medians of `rounds` timed updates and the lowest CPU time.

    Raises:
        BenchError: A byte was wrong, or a side failed.
    """
    pair = Pair(count)
    found: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
    number = 0
    try:
        for at in range(-2, rounds):  # two to set up and to warm up
            for peer in peers if at % 2 else peers[::-1]:
                for kept in (True, False):
                    number += 1
                    cost = pair.update(peer, number, kept)
                    if at >= 0 and not kept:
                        found[peer].append(cost)
    finally:
        pair.close()
    rows = []
    for peer, costs in found.items():
        row: dict[str, Any] = {"peer": peer, "tensors": count, "rounds": rounds}
        for name in costs[0]:
            row[name] = statistics.median(cost[name] for cost in costs)
        row["lowest_cpu_s"] = min(cost["cpu_s"] for cost in costs)
        row["us_a_tensor"] = row["cpu_s"] / count * 1e6
        rows.append(row)
    return rows


def verdicts(rows: Sequence[dict[str, Any]]) -> list[results.Verdict]:
    """The bounds, and what was got."""
    by_peer = {row["peer"]: row for row in rows}
    ours = by_peer["fastsync"]
    around_ms = (ours["around_s"] + ours["topology_s"]) * 1e3
    found = [
        _verdict("prepare, topology, init_process_group and finalize together", around_ms, MOST_AROUND_S * 1e3, "ms")
    ]
    if "verl" in by_peer:
        for name, text in (("cpu_s", "CPU time of an update"), ("first_s", "from the call to the first tensor")):
            share = ours[name] / by_peer["verl"][name]
            found.append(_verdict(f"{text}, share of verl's", share, MOST_OF_VERLS, "x"))
    return found


def _verdict(what: str, value: float, most: float, unit: str) -> results.Verdict:
    return results.Verdict(what, f"<= {most:g}", value, unit, value <= most, "medians of one run")


def markdown(rows: Sequence[dict[str, Any]], found: Sequence[results.Verdict], command: str) -> str:
    """The table for README.md."""
    lines = [f"`{command}`, {_verl_version()}, {render.describe(results.machine())}", ""]
    cells = []
    for row in rows:
        parts = [row[name] / row["tensors"] * 1e6 for name in ("cpu_s", "send_cpu_s", "receive_cpu_s")]
        numbers = [f"{part:.2f}" for part in parts]
        numbers += [f"{row[name] * 1e3:.1f}" for name in ("cpu_s", "lowest_cpu_s", "first_s")]
        around = f"{(row['around_s'] + row['topology_s']) * 1e3:.2f}" if row["peer"] == "fastsync" else "-"
        cells.append([row["peer"], *numbers, around])
    lines += render.markdown_table(COLUMNS, cells)
    lines.append("")
    lines += render.markdown_table(("figure", "bound", "got", ""), [render.verdict_cells(v) for v in found])
    return "\n".join(lines) + "\n"


def _verl_version() -> str:
    try:
        return f"verl {importlib.metadata.version('verl')}"
    except importlib.metadata.PackageNotFoundError:
        return "verl not installed"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=COUNT)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--strict", action="store_true", help="exit code 1 where a bound was missed")
    parser.add_argument("--write-readme", action="store_true", help="put the table into bench/README.md")
    options = parser.parse_args(arguments)
    why = verl_is_here()
    if why is not None:
        print(f"{why}: nothing to compare with", file=sys.stderr)
    try:
        rows = measure(options.tensors, options.rounds, PEERS if why is None else PEERS[:1])
    except BenchError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    for row in rows:
        print(json.dumps({name: round(v, 6) if isinstance(v, float) else v for name, v in row.items()}))
    found = verdicts(rows)
    for verdict in found:
        print("  ".join(render.verdict_cells(verdict)))
    if options.write_readme:
        command = " ".join(["python -m bench.engine_overhead", *(sys.argv[1:] if arguments is None else arguments)])
        render.write_readme(HERE / "README.md", markdown(rows, found, command), MARKS)
    return 1 if options.strict and not all(verdict.met for verdict in found) else 0


if __name__ == "__main__":
    sys.exit(main())
