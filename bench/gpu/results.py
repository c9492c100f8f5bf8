"""From rows to ratios, goals, a table and a section of RESULTS.md. No processes, no clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.device import DOUBLE

Row = dict[str, Any]

PEAK = "copy peak"


@dataclass(frozen=True)
class Goal:
    """What a figure has to reach (the project's own goals for a real device)."""

    figure: str
    sign: str  # ">=" or "<="
    bound: float

    def met(self, value: float) -> bool:
        return value >= self.bound if self.sign == ">=" else value <= self.bound


GOALS = (
    Goal("pack dense / copy peak", ">=", 0.9),
    Goal("pack moe / copy peak", ">=", 0.8),
    Goal("host, per tensor", "<=", 0.1),
    Goal("colocated, fastsync ipc / (bytes / copy peak)", "<=", 1.5),
)
_GOALS = {goal.figure: goal for goal in GOALS}


def find(rows: Sequence[Row], figure: str) -> Row | None:
    return next((row for row in rows if row["figure"] == figure), None)


def _quotients(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str]]:
    """(part, figure, what is divided, by what); PEAK is the copy peak."""
    for name in ("dense", "moe", "lora"):
        for figure in (f"pack {name}", f"unpack {name}"):
            yield "pack", f"{figure} / copy peak", figure, PEAK
            yield "pack", f"{figure}: time with checksum / without", f"{figure}, no checksum", figure
        for other in ("torch foreach", "torch.cat"):
            yield "pack", f"pack {name}: fastsync / {other}", f"pack {name}", f"pack {name}, {other}"
    many = "host, a sync of many tensors"
    yield "host", "host, many tensors: torch CUDA IPC's time / fastsync's", f"{many}, torch CUDA IPC", many
    yield "link", "shm, device to host / link peak", "shm, device to host", "link peak, to the host"
    yield "link", "gloo, device to host / link peak", "gloo, device to host", "link peak, to the host"
    yield "link", "gloo, host to device / link peak", "gloo, host to device", "link peak, to the device"
    by_gloo = "gloo, device to device"
    yield "link", f"{by_gloo} / torch bucketed over gloo", by_gloo, f"torch bucketed over {by_gloo}"
    by_torch, by_us = "colocated, torch CUDA IPC", "colocated, fastsync ipc"
    yield "colocated", "colocated: torch CUDA IPC's time / fastsync's", by_torch, by_us
    for row in rows:
        if row["figure"].startswith("nccl, fastsync, "):
            where = row["figure"].removeprefix("nccl, fastsync, ")
            for other in ("raw broadcasts", "torch bucketed", "vLLM-style packed"):
                yield "nccl", f"nccl: fastsync / {other}", row["figure"], f"nccl, {other}, {where}"


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows, and those that relate them to each other; a ratio whose parts were not measured is left out."""
    out = [row for row in rows if row["figure"] != "facts"]
    values = {row["figure"]: float(row["value"]) for row in out}
    # The faster of the two ways to copy: the stricter bar.
    values[PEAK] = max((value for figure, value in values.items() if figure.startswith("copy peak, ")), default=0.0)

    def add(part: str, figure: str, value: float) -> None:
        out.append({"part": part, "figure": figure, "value": value, "unit": "x", "details": {}})

    for part, figure, above, below in _quotients(rows):
        if above in values and values.get(below, 0.0) > 0.0:
            add(part, figure, values[above] / values[below])
    for row in rows:
        if row["part"] == "colocated" and values[PEAK] > 0.0:
            copies = row["value"] / (row["details"]["nbytes"] / (values[PEAK] * 1e9))
            add("colocated", f"{row['figure']} / (bytes / copy peak)", copies)
            # Every byte is copied into a bucket and out of it again.
            add("colocated", f"{row['figure']} / (bytes moved / copy peak)", copies / 2)
    order = {part: i for i, part in enumerate(dict.fromkeys(row["part"] for row in out))}
    return sorted(out, key=lambda row: order[row["part"]])  # stable: ratios behind what they are made of


def number(value: float) -> str:
    """Four digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def cells(rows: Sequence[Row], *, double: bool) -> list[list[str]]:
    """figure, value, unit, goal, verdict; what has a goal and was not measured says so."""
    out = []
    for row in rows:
        goal = _GOALS.get(row["figure"])
        verdict = "" if goal is None else "met" if goal.met(row["value"]) else "MISSED"
        spread = row["details"].get("spread")
        out.append(
            [
                row["figure"],
                number(row["value"]),
                row["unit"],
                "" if spread is None else f"{spread * 100:.0f} %",
                "" if goal is None else f"{goal.sign} {goal.bound:g}",
                DOUBLE if double else verdict,
            ]
        )
    measured = {row["figure"] for row in rows}
    for goal in GOALS:
        if goal.figure not in measured:
            out.append([goal.figure, "-", "", "", f"{goal.sign} {goal.bound:g}", "not measured"])
    return out


HEADER = ("figure", "value", "unit", "spread", "goal", "")


def text_table(rows: Sequence[Row], *, double: bool) -> str:
    table = [list(HEADER), *cells(rows, double=double)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]

    def line(content: Sequence[str]) -> str:
        shown = [c.rjust(w) if i == 1 else c.ljust(w) for i, (c, w) in enumerate(zip(content, widths))]
        return "  ".join(shown).rstrip()

    return "\n".join([line(table[0]), "  ".join("-" * w for w in widths), *map(line, table[1:])])


def section(rows: Sequence[Row], facts: dict[str, Any], about: dict[str, str], failures: Sequence[str]) -> str:
    """A dated section of RESULTS.md."""
    lines = [
        f"## {about['date']}: {facts.get('device', 'unknown device')}",
        "",
        f"Driver (CUDA) {facts.get('driver')}, torch {facts.get('torch')}, NCCL {facts.get('nccl') or 'none'}, "
        f"{(facts.get('total_bytes') or 0) / 1e9:.0f} GB of device memory ({(facts.get('free_bytes') or 0) / 1e9:.0f} GB "
        f"free), commit {about['commit']}. Command: `{about['command']}`. Took {about['seconds']} s. "
        f"pytest -m gpu: {about['tests']}.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "| --- | ---: | --- | ---: | --- | --- |",
        *("| " + " | ".join(line) + " |" for line in cells(rows, double=False)),
    ]
    if failures:
        lines += ["", "Not measured:", "", *(f"- {failure}" for failure in failures)]
    return "\n".join(lines) + "\n"


def append(page: Path, new: str) -> None:
    """Puts a section at the end of the page, which from then on does not say that there is none."""
    text = page.read_text(encoding="utf-8").replace("No run on a real device yet. ", "")
    page.write_text(f"{text.rstrip()}\n\n{new}", encoding="utf-8")
