"""Rows and verdicts as text, as a plot, and as the table in README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.results import COPY_NT, SHM, Row, Table, Verdict

BEGIN_MARK = "<!-- last table: begin (written by side_by_side.py --write-readme) -->"
END_MARK = "<!-- last table: end -->"

COLUMNS = (
    "peer", "steady ms", "p99", "spread", "GB/s", "of NT copy", "first ms", "source ms", "CPU ms", "memory MB",
    "grew MB", "others", "shm is",
)  # fmt: skip


def _cells(row: Row, table: Table) -> list[str]:
    copy = table.get(row.workload, row.receivers, COPY_NT)
    shm = table.get(row.workload, row.receivers, SHM)
    return [
        row.peer,
        f"{row.steady_s.p50 * 1e3:.1f}",
        f"{row.steady_s.p99 * 1e3:.1f}",
        f"{row.steady_s.spread * 100:.0f} %",
        f"{row.gb_per_s:.2f}",
        f"{copy.steady_s.p50 / row.steady_s.p50:.2f}" if copy else "-",
        f"{row.first_s * 1e3:.0f}",
        f"{row.source_s.p50 * 1e3:.1f}",
        f"{row.cpu_s.p50 * 1e3:.0f}",
        f"{row.first_memory[0] / 1e6:.0f} / {max(row.first_memory[1:]) / 1e6:.0f}",
        f"{max(row.steady_memory) / 1e6:.1f}",
        f"{row.others_cpu_share:.2f}",
        f"{row.steady_s.p50 / shm.steady_s.p50:.2f} x" if shm else "-",
    ]


def _title(workload: str, receivers: int, rows: Sequence[Row]) -> str:
    one = rows[0]
    plural = "receiver" if receivers == 1 else "receivers"
    return f"{workload}: {one.tensors:,} tensors, {one.nbytes / 1e6:.0f} MB, {receivers} {plural}"


def _by_case(table: Table) -> list[tuple[str, list[Row]]]:
    out = []
    for workload, receivers in table.cases():
        rows = [r for r in table.rows if (r.workload, r.receivers) == (workload, receivers)]
        rows.sort(key=lambda r: r.steady_s.p50)
        out.append((_title(workload, receivers, rows), rows))
    return out


def verdict_cells(verdict: Verdict) -> list[str]:
    value = "-" if verdict.value is None else f"{verdict.value:.2f} {verdict.unit}"
    mark = "not measured" if verdict.met is None else "met" if verdict.met else "MISSED"
    return [verdict.what, f"{verdict.bound} {verdict.unit}", value, mark]


def settings(rows: Sequence[Row]) -> str:
    """Every peer's options in one line."""
    parts = [f"{r.peer}: {', '.join(f'{k}={v}' for k, v in r.options.items())}" for r in rows if r.options]
    return "; ".join(parts)


def print_tables(table: Table, found: Sequence[Verdict]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(markdown(table, found))
        return
    # A pipe has no width of its own; 80 columns would cut the numbers.
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    for title, rows in _by_case(table):
        shown = RichTable(title=title, caption=settings(rows))
        for column in COLUMNS:
            shown.add_column(column, justify="left" if column == "peer" else "right")
        for row in rows:
            shown.add_row(*_cells(row, table), style="bold" if row.kind == "fastsync" else "")
        console.print(shown)
    shown = RichTable(title="what fastsync has to reach")
    for column in ("figure", "bound", "got", ""):
        shown.add_column(column, justify="left" if column == "figure" else "right")
    for verdict in found:
        style = "dim" if verdict.met is None else "green" if verdict.met else "red"
        shown.add_row(*verdict_cells(verdict), style=style)
    console.print(shown)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([" --- "] + [" ---: "] * (len(header) - 1)) + "|"]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]


def markdown(table: Table, found: Sequence[Verdict]) -> str:
    lines: list[str] = []
    for title, rows in _by_case(table):
        lines += [f"**{title}**", ""]
        lines += markdown_table(COLUMNS, [_cells(row, table) for row in rows])
        lines += ["", f"Settings: {settings(rows)}.", ""]
    lines += ["**What fastsync has to reach**", ""]
    lines += markdown_table(("figure", "bound", "got", ""), [verdict_cells(v) for v in found])
    return "\n".join(lines) + "\n"


def describe(facts: dict[str, Any]) -> str:
    caches = ", ".join(f"{name} {size}" for name, size in facts["caches"].items())
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({caches}), {facts['memory_bytes'] / 2**30:.0f} GiB, Linux "
        f"{facts['kernel']}, Python {facts['python']}, torch {facts['torch']}, fastsync {facts['fastsync']} "
        f"(copy kernel {facts.get('copy_kernel')}), load average at the start {facts['load_average']:.2f}, "
        f"{facts['time']}"
    )


def write_readme(readme: Path, text: str, marks: tuple[str, str] = (BEGIN_MARK, END_MARK)) -> None:
    """Replaces what stands between the two marks."""
    begin_mark, end_mark = marks
    page = readme.read_text(encoding="utf-8")
    head, mark, rest = page.partition(begin_mark)
    _, end, tail = rest.partition(end_mark)
    if not mark or not end:
        raise ValueError(f"{readme} has lost its marks: {begin_mark} and {end_mark}")
    readme.write_text(f"{head}{begin_mark}\n\n{text}\n{end_mark}{tail}", encoding="utf-8")


def plot(table: Table, path: Path, subtitle: str) -> str | None:
    """Draws steady times as bars with their range; returns why not where it cannot."""
    try:
        import matplotlib
    except ImportError as error:
        return f"no plot: {error}"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = _by_case(table)
    columns = 2 if len(cases) > 1 else 1
    lines = -(-len(cases) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(7.5 * columns, 3.6 * lines + 0.6), squeeze=False)
    for axis, (title, rows) in zip(axes.flat, cases):
        rows = rows[::-1]
        middle = [r.steady_s.p50 * 1e3 for r in rows]
        below = [(r.steady_s.p50 - r.steady_s.low) * 1e3 for r in rows]
        above = [(r.steady_s.high - r.steady_s.p50) * 1e3 for r in rows]
        colours = ["#1f77b4" if r.kind == "fastsync" else "#7f7f7f" if r.kind == "copy" else "#ff7f0e" for r in rows]
        axis.barh([r.peer for r in rows], middle, xerr=[below, above], color=colours, ecolor="#333333", capsize=2)
        for y, value in enumerate(middle):
            axis.text(value, y + 0.28, f" {value:.1f}", va="center", fontsize=7)
        axis.set_xscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("steady sync, ms (median; bar: lowest to highest; log scale)", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", which="both", alpha=0.25)
        axis.set_axisbelow(True)
    for axis in list(axes.flat)[len(cases) :]:
        axis.axis("off")
    figure.suptitle(subtitle, fontsize=8, wrap=True)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return None
