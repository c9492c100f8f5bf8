#!/usr/bin/env python3
"""fastsync against everything else that could move the weights, in one run, every byte compared.

    python -m bench.side_by_side                 # everything: 10 to 15 minutes
    python -m bench.side_by_side --quick         # about a minute, smaller shapes, the same names
    python -m bench.side_by_side --workloads dense --receivers 1 --only fastsync mirror

Results go to bench/out/: rows.jsonl (one object a row), verdicts.json, side_by_side.png, table.md.
The exit code is 1 where a peer failed or moved wrong bytes, and with --strict also where a figure was missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import render, results
from bench.harness import BenchError, Case, PeerSpec, Sample
from bench.workloads import WORKLOADS, Workload, load

MIB = 1 << 20
SLOW_S = 1.0

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Effort:
    """How much of everything; the two presets below differ in nothing else."""

    scale: dict[str, float]
    rounds: int
    slow_rounds: int  # of a peer that needs more than SLOW_S
    sweep_rounds: int
    bucket_sizes: tuple[int, ...]
    windows: tuple[int, ...]
    receivers: dict[str, tuple[int, ...]]


FULL = Effort(
    scale=dict.fromkeys(WORKLOADS, 1.0),
    rounds=9,
    slow_rounds=5,
    sweep_rounds=3,
    bucket_sizes=(1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    windows=(1, 8),
    receivers=dict.fromkeys(WORKLOADS, (1, 2)),
)
QUICK = Effort(
    scale={"dense": 0.125, "moe": 0.25, "lora": 0.5, "embedding": 0.125},
    rounds=5,
    slow_rounds=3,
    sweep_rounds=1,
    bucket_sizes=(4 * MIB, 16 * MIB),
    windows=(1,),
    receivers={"dense": (1, 2), "moe": (1,), "lora": (1,), "embedding": (1,)},
)


@dataclass
class Outcome:
    rows: list[results.Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class PeerError(Exception):
    """A peer broke its case; the processes are of no more use."""

    def __init__(self, label: str, error: BenchError) -> None:
        super().__init__(str(error))
        self.label = label


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def candidates(effort: Effort) -> list[tuple[str, list[PeerSpec]]]:
    """Every peer, with the settings that are tried before the best one runs for the record."""
    fast = "fastsync"
    return [
        (results.SHM, [PeerSpec(results.SHM, fast, {"transport": "shm", "verify": True})]),
        (results.SHM_PLAIN, [PeerSpec(results.SHM_PLAIN, fast, {"transport": "shm", "verify": False})]),
        (results.GLOO, [PeerSpec(results.GLOO, fast, {"transport": "gloo", "verify": True})]),
        (results.RAW, [PeerSpec(results.RAW, "gloo_raw", {"bucket_bytes": 0, "buffers": 2})]),
        (
            results.BUCKETED,
            [PeerSpec(results.BUCKETED, "gloo_bucketed", {"bucket_bytes": size}) for size in effort.bucket_sizes],
        ),
        (
            results.PER_TENSOR,
            [PeerSpec(results.PER_TENSOR, "gloo_per_tensor", {"window": window}) for window in effort.windows],
        ),
        (results.MIRROR, [PeerSpec(results.MIRROR, "mirror", {"loop": "copy"})]),
        (results.MIRROR_FOREACH, [PeerSpec(results.MIRROR_FOREACH, "mirror", {"loop": "foreach"})]),
        (results.COPY, [PeerSpec(results.COPY, "copy", {"mode": "plain"})]),
        (results.COPY_NT, [PeerSpec(results.COPY_NT, "copy", {"mode": "streaming"})]),
        (results.COPY_TORCH, [PeerSpec(results.COPY_TORCH, "copy", {"mode": "torch"})]),
    ]


def attempt(case: Case, workload: Workload, receivers: int, effort: Effort, skip: set[str]) -> list[results.Row]:
    """Runs every peer but those in `skip`: settings first, then rounds in which the peers take turns."""
    chosen: list[PeerSpec] = []
    first: dict[str, Sample] = {}
    steady: dict[str, list[Sample]] = {}

    def run(label: str, *, is_first: bool = False) -> Sample:
        try:
            return case.sync(label, first=is_first)
        except BenchError as error:
            raise PeerError(label, error) from error

    def start(spec: PeerSpec) -> Sample:
        try:
            case.make(spec)
        except BenchError as error:
            raise PeerError(spec.label, error) from error
        return run(spec.label, is_first=True)

    for label, specs in candidates(effort):
        if label in skip:
            continue
        if label == results.RAW:
            facts = first[results.GLOO].facts[0] if results.GLOO in first else {}
            # Alone, raw Gloo runs at a size that is good on most machines.
            specs = [
                PeerSpec(label, "gloo_raw", {"bucket_bytes": int(facts.get("bucket_bytes", 4 * MIB)), "buffers": 2})
            ]
        best = specs[0]
        if len(specs) > 1:
            tried: list[tuple[float, PeerSpec]] = []
            for spec in specs:
                start(spec)
                again = [run(label).seconds]
                while len(again) < effort.sweep_rounds and again[0] < SLOW_S:
                    again.append(run(label).seconds)
                tried.append((statistics.median(again), spec))
                case.drop(label)
            best = min(tried, key=lambda pair: pair[0])[1]
            say(
                f"    {label}: best of "
                + ", ".join(f"{next(iter(s.options.values()))}: {t * 1e3:.1f} ms" for t, s in tried)
            )
        first[label] = start(best)
        if first[label].seconds < SLOW_S:
            run(label)  # warm-up: the first steady one still touches new pages
        chosen.append(best)
        steady[label] = []
    for round_index in range(effort.rounds):
        # Turns rotate, so nobody always runs behind the same neighbour.
        turn = round_index % max(1, len(chosen))
        for spec in chosen[turn:] + chosen[:turn]:
            if round_index < effort.slow_rounds or statistics.median(s.seconds for s in steady[spec.label]) < SLOW_S:
                steady[spec.label].append(run(spec.label))
    return [results.make_row(workload, receivers, s, first[s.label], steady[s.label]) for s in chosen]


def unavailable(label_specs: Sequence[tuple[str, list[PeerSpec]]]) -> dict[str, str]:
    from bench.peers import KINDS

    found = {}
    for label, specs in label_specs:
        reason = KINDS[specs[0].kind].unavailable_reason(specs[0].options)
        if reason is not None:
            found[label] = reason
    return found


def run_case(name: str, receivers: int, effort: Effort, left_out: set[str], timeout_s: float, outcome: Outcome) -> None:
    workload = load(name, effort.scale[name])
    say(f"  {name}: {len(workload.specs)} tensors, {workload.nbytes / 1e6:.0f} MB, {receivers} receiver(s)")
    skip = set(left_out)
    while True:
        begin = time.monotonic()
        try:
            with Case(name, effort.scale[name], receivers, timeout_s) as case:
                outcome.rows += attempt(case, workload, receivers, effort, skip)
            say(f"    {time.monotonic() - begin:.0f} s")
            return
        except PeerError as failed:
            # The other ranks are stuck in a half-done sync: start afresh without it, and say so at the end.
            outcome.failures.append(f"{name}, {receivers} receiver(s), {failed.label}: {failed}")
            say(f"    FAILED, going on without it: {outcome.failures[-1]}")
            skip.add(failed.label)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="about a minute: smaller shapes, fewer settings")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--receivers", nargs="+", type=int, help="numbers of receivers (default: 1 and 2)")
    parser.add_argument("--rounds", type=int, help="steady rounds of each peer (at least 5 for a median to quote)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="peers whose name contains one of these words")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="of any one sync")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a figure was missed")
    parser.add_argument("--write-readme", action="store_true", help="put the table into bench/README.md")
    arguments = parser.parse_args(argv)
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; it must be at least 1")
    if arguments.receivers and min(arguments.receivers) < 1:
        parser.error("--receivers must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    effort = QUICK if arguments.quick else FULL
    if arguments.rounds is not None:
        effort = Effort(**{**effort.__dict__, "rounds": arguments.rounds})
    facts = results.machine()
    say(render.describe(facts))
    every = candidates(effort)
    skip = unavailable(every)
    for label, reason in skip.items():
        say(f"  not run: {label}: {reason}")
    left_out = set(skip)
    if arguments.only:
        left_out |= {label for label, _ in every if not any(word in label for word in arguments.only)}
    outcome = Outcome()
    begin = time.monotonic()
    for name in arguments.workloads:
        for receivers in arguments.receivers or effort.receivers[name]:
            run_case(name, receivers, effort, left_out, arguments.timeout, outcome)
    table = results.Table(outcome.rows)
    table.add_ratios()
    found = results.verdicts(table)

    arguments.out.mkdir(parents=True, exist_ok=True)
    mode = "quick" if arguments.quick else "full"
    with open(arguments.out / "rows.jsonl", "w", encoding="utf-8") as lines:
        for row in table.rows:
            lines.write(json.dumps({"mode": mode, "machine": facts, **row.to_dict()}) + "\n")
    (arguments.out / "verdicts.json").write_text(json.dumps([v.to_dict() for v in found], indent=1), encoding="utf-8")
    heading = f"{render.describe(facts)}; {mode} run, {effort.rounds} rounds."
    text = f"{heading}\n\n{render.markdown(table, found)}"
    (arguments.out / "table.md").write_text(text, encoding="utf-8")
    if table.rows:
        render.print_tables(table, found)
        why_not = render.plot(table, arguments.out / "side_by_side.png", heading)
        if why_not is not None:
            say(why_not)
    if arguments.write_readme:
        render.write_readme(HERE / "README.md", text)
    for failure in outcome.failures:
        say(f"FAILED: {failure}")
    missed = [v for v in found if v.met is False]
    say(
        f"{len(table.rows)} rows, every byte compared; {len(missed)} of {len(found)} figures missed; "
        f"{time.monotonic() - begin:.0f} s; results in {arguments.out}"
    )
    return 1 if outcome.failures or (arguments.strict and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
