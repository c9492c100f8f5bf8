"""Runs every part and shows what came out; bench/gpu/run.sh is how to call it.

python -m bench.gpu [--dry-run] [--only PART ...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import ranks, results
from bench.gpu.device import DOUBLE, is_double, unavailable_reason
from bench.gpu.sizes import FULL, TINY

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOTAL_S = 235.0  # for all parts together

_SHARED_DEVICE = 23003  # the first NCCL that lets two ranks share a device


def say(text: str) -> None:
    print(text, flush=True)


def version_number(text: str | None) -> int:
    """ "2.30.7" -> 23007; 0 for None."""
    if not text:
        return 0
    parts = [int("".join(c for c in p if c.isdigit()) or 0) for p in text.split(".")[:3]] + [0, 0]
    return parts[0] * 10000 + parts[1] * 100 + parts[2]


def nccl_job(facts: dict[str, Any]) -> tuple[str, dict[str, str], dict[str, Any]]:
    """How NCCL can be run here: ("one device" | "two devices" | "alone" | "none", environment, options)."""
    if not facts.get("nccl"):
        return "none", {}, {}
    if int(facts.get("devices", 1)) >= 2:
        where = "two devices"
        return where, {}, {"where": where, "a_device_each": True}
    if version_number(facts["nccl"]) >= _SHARED_DEVICE:
        where = "two ranks on one device"
        return "one device", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, {"where": where}
    return "alone", {}, {}


def plan(facts: dict[str, Any]) -> tuple[list[ranks.Job], list[str]]:
    """The parts that can run here, in order of what they are worth, and why others cannot."""
    jobs: list[ranks.Job] = []
    why_not: list[str] = []
    jobs.append(ranks.Job("pack", budget_s=40))
    present = facts.get("fastsync") is not None
    if not present:
        why_not.append(f"everything of fastsync: {facts.get('fastsync_reason')}")
    if not facts.get("probe"):
        why_not.append("fastsync's pack and unpack by themselves: the probe is not built")
    two_sided = [ranks.Job("host", 2, 25)] if present else []
    two_sided += [ranks.Job("colocated", 2, 60), ranks.Job("link", 2, 45)]
    how, environment, options = nccl_job(facts)
    if how == "none":
        why_not.append(f"nccl: {facts.get('nccl_reason') or facts.get('fastsync_reason') or 'no NCCL was found'}")
    elif how == "alone":
        two_sided.append(ranks.Job("nccl", 1, 20))
        why_not.append(
            f"nccl with two ranks: one device, and NCCL {facts['nccl']} refuses that (2.30.3 or later would not)"
        )
    else:
        two_sided.append(ranks.Job("nccl", 2, 45, environment, options))
    if not present:
        return jobs + two_sided, why_not
    two_sided.append(ranks.Job("memory", 2, 25))
    two_sided.append(ranks.Job("abort", 4, 25, options={"transport": "ipc"}, victims=(1, 2, 3)))
    if how in ("one device", "two devices"):
        two_sided.append(ranks.Job("abort", 2, 25, environment, {**options, "transport": "nccl"}, (1,)))
    return jobs + two_sided, why_not


def commit() -> str:
    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return run.stdout.strip() if run.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD") or "unknown"
    return head + (" with changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the test doubles; measures nothing")
    parser.add_argument("--check", action="store_true", help="only say whether anything can be measured here")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to run: pack, host, colocated, link, ...")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder of the JSON lines")
    parser.add_argument("--tests", default="not run", help="what pytest -m gpu said, for RESULTS.md")
    parser.add_argument("--command", default="python -m bench.gpu", help="how this was started, for RESULTS.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.dry_run != is_double():
        say("--dry-run needs the double that FASTSYNC_CUDA_PATH names, and nothing else may: use bench/gpu/run.sh")
        return 2
    reason = unavailable_reason()
    if reason is not None:
        say(f"nothing can be measured here: {reason}")
        return 2
    if arguments.check:
        return 0
    sizes = TINY if arguments.dry_run else FULL
    # The double is slow where a device is not: its run is bounded as a whole only.
    stretch = 4.0 if arguments.dry_run else 1.0
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    failures: list[str] = []

    def run(job: ranks.Job) -> ranks.Outcome:
        left = TOTAL_S * stretch - (time.monotonic() - begin)
        name = job.part + (f" ({job.options['transport']})" if "transport" in job.options else "")
        if left < 5:
            failures.append(f"{name}: no time was left of the {TOTAL_S:.0f} s for all parts")
            return ranks.Outcome(job)
        job = ranks.Job(
            job.part, job.world, min(job.budget_s * stretch, left), job.environment, job.options, job.victims
        )
        outcome = ranks.run(job, sizes)
        rows.extend(outcome.rows)
        say(f"  {name}: {len(outcome.rows)} figures in {outcome.seconds:.1f} s")
        if outcome.error is not None:
            failures.append(f"{name}: {outcome.error}")
            say(f"  {name} FAILED, going on: {outcome.error}\n{outcome.details}".rstrip())
        return outcome

    found = run(ranks.Job("facts", budget_s=30))
    if not found.rows:
        say("the device could not be opened; nothing else was tried")
        return 1
    facts = dict(found.rows[0]["details"])
    say("  " + ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None))
    jobs, why_not = plan(facts)
    failures += why_not
    for job in jobs:
        if arguments.only is None or job.part in arguments.only:
            run(job)
    shown = results.with_ratios(rows)
    seconds = f"{time.monotonic() - begin:.0f}"

    about = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit(),
        "command": arguments.command,
        "seconds": seconds,
        "tests": arguments.tests,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open(arguments.out / ("dry_run.jsonl" if arguments.dry_run else "rows.jsonl"), "a", encoding="utf-8") as lines:
        for row in shown:
            extra = {"note": DOUBLE} if arguments.dry_run else {}
            lines.write(json.dumps({**about, **extra, "facts": facts, **row}) + "\n")
    say("")
    say(results.text_table(shown, double=arguments.dry_run))
    for failure in failures:
        say(f"not measured: {failure}")
    if not arguments.dry_run:
        results.append(HERE / "RESULTS.md", results.section(shown, facts, about, failures))
    where = os.path.relpath(arguments.out)
    say(
        f"{len(shown)} figures, bytes compared, {seconds} s; in {where}"
        + ("" if arguments.dry_run else " and RESULTS.md")
    )
    # What cannot run on this machine is no failure; what ran and failed is, and so is a build that did not come about.
    return 1 if len(failures) > len(why_not) or not facts["fastsync"] or not facts["probe"] else 0


if __name__ == "__main__":
    sys.exit(main())
