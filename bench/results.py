"""From samples to rows, from rows to ratios and verdicts. Pure functions: no processes, no clocks."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import PeerSpec, Sample
from bench.workloads import Workload


@dataclass(frozen=True)
class Times:
    p50: float
    p99: float
    low: float
    high: float
    samples: list[float]

    @property
    def spread(self) -> float:
        """(high - low) / p50."""
        return (self.high - self.low) / self.p50 if self.p50 > 0 else 0.0


def times(samples: Iterable[float]) -> Times:
    values = [float(v) for v in samples]
    return Times(
        p50=float(np.percentile(values, 50)),
        p99=float(np.percentile(values, 99)),
        low=min(values),
        high=max(values),
        samples=values,
    )


@dataclass
class Row:
    """One peer on one workload with one number of receivers. Times in seconds, sizes in bytes."""

    workload: str
    receivers: int
    peer: str
    kind: str
    options: dict[str, Any]
    tensors: int
    nbytes: int
    rounds: int
    first_s: float
    steady_s: Times
    source_s: Times  # how long the source's call took
    cpu_s: Times  # all ranks, user and system
    involuntary_switches: int
    others_cpu_share: float  # CPU time of everything else on the machine, by the elapsed time: 0 when it is idle
    first_memory: list[int]  # resident growth of each rank in the first sync
    steady_memory: list[int]  # and over all steady ones together
    first_facts: list[dict[str, Any]]
    facts: list[dict[str, Any]]
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.steady_s.p50 / 1e9

    def to_dict(self) -> dict[str, Any]:
        out = asdict(self)
        out["gb_per_s"] = self.gb_per_s
        out["steady_s"]["spread"] = self.steady_s.spread
        return out


def make_row(workload: Workload, receivers: int, spec: PeerSpec, first: Sample, steady: Sequence[Sample]) -> Row:
    return Row(
        workload=workload.name,
        receivers=receivers,
        peer=spec.label,
        kind=spec.kind,
        options=dict(spec.options),
        tensors=len(workload.specs),
        nbytes=workload.nbytes,
        rounds=len(steady),
        first_s=first.seconds,
        steady_s=times(s.seconds for s in steady),
        source_s=times(s.source_seconds for s in steady),
        cpu_s=times(s.cpu_seconds for s in steady),
        involuntary_switches=sum(s.involuntary_switches for s in steady),
        others_cpu_share=sum(s.others_cpu_seconds for s in steady) / sum(s.seconds for s in steady),
        first_memory=first.memory_bytes,
        steady_memory=[int(n) for n in np.sum([s.memory_bytes for s in steady], axis=0)],
        first_facts=first.facts,
        facts=steady[-1].facts,
    )


class Table:
    """Rows, found by workload, receivers and peer."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self._index = {(r.workload, r.receivers, r.peer): r for r in self.rows}

    def get(self, workload: str, receivers: int, peer: str) -> Row | None:
        return self._index.get((workload, receivers, peer))

    def cases(self) -> list[tuple[str, int]]:
        return list(dict.fromkeys((r.workload, r.receivers) for r in self.rows))

    def add_ratios(self) -> None:
        """Each row learns how many times faster it is than every other peer of its case."""
        for row in self.rows:
            for other in self.rows:
                if (other.workload, other.receivers) == (row.workload, row.receivers) and other is not row:
                    row.ratios[f"vs {other.peer}"] = other.steady_s.p50 / row.steady_s.p50


SHM, SHM_PLAIN, GLOO = "fastsync shm", "fastsync shm, unverified", "fastsync gloo"
BUCKETED, PER_TENSOR, RAW = "gloo bucketed", "gloo per tensor", "gloo raw"
MIRROR, MIRROR_FOREACH = "mirror", "mirror, foreach"
COPY, COPY_NT, COPY_TORCH = "copy", "copy, non-temporal", "copy, torch loop"

STAGING_SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """A figure that fastsync has to reach, and the one that it reached."""

    what: str
    bound: str
    value: float | None
    unit: str
    met: bool | None  # None: not measured in this run
    how: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verdicts(table: Table) -> list[Verdict]:
    out: list[Verdict] = []

    def judge(what: str, bound: float, unit: str, at_least: bool, how: str, value: Callable[[], float]) -> None:
        sign = ">=" if at_least else "<="
        try:
            got = value()
        except LookupError as missing:
            out.append(Verdict(what, f"{sign} {bound:g}", None, unit, None, f"not measured: {missing.args[0]}"))
            return
        met = got >= bound if at_least else got <= bound
        out.append(Verdict(what, f"{sign} {bound:g}", got, unit, met, how))

    def need(workload: str, receivers: int, peer: str) -> Row:
        row = table.get(workload, receivers, peer)
        if row is None:
            raise LookupError(f"no row '{peer}' for {workload}, {receivers} receiver(s)")
        return row

    def p50(workload: str, receivers: int, peer: str) -> float:
        return need(workload, receivers, peer).steady_s.p50

    def speedup(workload: str, receivers: int, peer: str, than: str) -> Callable[[], float]:
        return lambda: p50(workload, receivers, than) / p50(workload, receivers, peer)

    def overhead_us(workload: str) -> Callable[[], float]:
        def value() -> float:
            pure = min(p50(workload, 1, COPY), p50(workload, 1, COPY_NT))
            row = need(workload, 1, SHM)
            return (row.steady_s.p50 - pure) / row.tensors * 1e6

        return value

    def verify_cost(workload: str, receivers: int) -> Callable[[], float]:
        return lambda: (p50(workload, receivers, SHM) / p50(workload, receivers, SHM_PLAIN) - 1.0) * 100.0

    def plan_ms() -> float:
        row = need("moe", 1, SHM)
        return max(float(facts["phases"]["plan"]) for facts in row.first_facts) * 1e3

    def staging_excess() -> float:
        facts = [
            (float(f["peak_staging_bytes"]) - int(row.options.get("buffers", 2)) * float(f["bucket_bytes"]))
            for row in table.rows
            if row.kind == "fastsync"
            for f in row.first_facts + row.facts
            if f
        ]
        if not facts:
            raise LookupError("no fastsync rows")
        return max(facts) / STAGING_SLACK_BYTES

    ratio = "medians of one run"
    judge("shm, dense, 1 receiver: share of the non-temporal copy rate", 0.7, "x", True, ratio,
          speedup("dense", 1, SHM, COPY_NT))  # fmt: skip
    judge("shm, dense, 1 receiver: against bucketed Gloo", 4, "x", True, ratio, speedup("dense", 1, SHM, BUCKETED))
    judge("shm, dense, 1 receiver: against the mirror", 1.6, "x", True, ratio, speedup("dense", 1, SHM, MIRROR))
    judge("shm, dense, 2 receivers: against bucketed Gloo", 4, "x", True, ratio, speedup("dense", 2, SHM, BUCKETED))
    pure = "steady time less the faster of the two native copies of the manifest, by tensor"
    judge("shm, moe, 1 receiver: over the pure copy", 0.3, "us/tensor", False, pure, overhead_us("moe"))
    judge("shm, lora, 1 receiver: over the pure copy", 0.3, "us/tensor", False, pure, overhead_us("lora"))
    judge("shm, moe, 1 receiver: against the mirror", 4, "x", True, ratio, speedup("moe", 1, SHM, MIRROR))
    judge("planning 18,867 tensors the first time", 50, "ms", False, "report.phases['plan'] of the first sync of a "
          "session, slowest rank, process warm", plan_ms)  # fmt: skip
    for workload, receivers in table.cases():
        if table.get(workload, receivers, SHM_PLAIN) is not None:
            judge(f"shm, {workload}, {receivers} receiver(s): what verify=True costs", 15, "%", False, ratio,
                  verify_cost(workload, receivers))  # fmt: skip
    for workload, receivers in table.cases():
        if table.get(workload, receivers, RAW) is not None:
            judge(f"gloo, {workload}, {receivers} receiver(s): against raw Gloo of the same bytes and buckets", 1, "x",
                  True, ratio, speedup(workload, receivers, GLOO, RAW))  # fmt: skip
    judge("gloo, moe, 1 receiver: against one broadcast per tensor", 3, "x", True, ratio,
          speedup("moe", 1, GLOO, PER_TENSOR))  # fmt: skip
    judge("staging beyond buffers x bucket_bytes, worst rank and case", 1, "MiB", False,
          "report.peak_staging_bytes", staging_excess)  # fmt: skip
    return out


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def machine() -> dict[str, Any]:
    """What a figure cannot be read without."""
    import torch

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in (_read("/proc/cpuinfo") or "").splitlines()
            if line.lower().startswith(("model name", "cpu model"))
        ),
        platform.processor() or platform.machine(),
    )
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(str(index / name)) for name in ("level", "type", "size"))
        caches[f"L{level} {kind}"] = size
    memory = next(
        (int(line.split()[1]) * 1024 for line in (_read("/proc/meminfo") or "").splitlines() if "MemTotal" in line), 0
    )
    out: dict[str, Any] = {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "caches": caches,
        "memory_bytes": memory,
        "kernel": platform.release(),
        "transparent_hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "load_average": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    try:
        import fastsync

        out["fastsync"] = fastsync.__version__
        out["copy_kernel"] = getattr(fastsync._core, "copy_kernel_name", lambda: None)()
    except ImportError:
        out["fastsync"] = None
    return out
