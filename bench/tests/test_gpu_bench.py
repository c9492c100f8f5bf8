"""The benchmark for a real device, without one: its arithmetic, its processes, and all of it on the doubles."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import ranks, results, sizes
from bench.gpu.__main__ import nccl_job, plan, version_number
from bench.gpu.baselines import cut
from bench.gpu.device import DOUBLE, HostModel
from bench.gpu.meter import Meter, Peer
from bench.gpu.parts.memory import slope
from bench.gpu.pattern import Pattern
from bench.workloads import TensorSpec
from support import devices

ROOT = Path(__file__).resolve().parents[2]


# --- what is compared, and with what


def test_every_byte_changes_every_round_and_one_wrong_byte_is_found() -> None:
    pattern, flats = Pattern("cpu", 4096), [torch.zeros(n, dtype=torch.uint8) for n in (1, 10_000)]
    pattern.fill(flats, 1)
    before = [flat.clone() for flat in flats]
    pattern.fill(flats, 2)
    assert not any(bool((flat == old).any()) for flat, old in zip(flats, before))
    assert pattern.wrong_bytes(flats, 2) == 0
    flats[1][9_999] ^= 0x80
    assert pattern.wrong_bytes(flats, 2) == 1
    assert pattern.wrong_bytes(flats, 1) == 10_001


def test_pieces_that_changed_places_are_found() -> None:
    pattern, flat = Pattern("cpu", 4096), torch.zeros(3 * 2048, dtype=torch.uint8)
    pattern.fill([flat], 1)
    swapped = torch.cat([flat[2048:4096], flat[:2048], flat[4096:]])
    assert pattern.wrong_bytes([swapped], 1) > 2048


def test_manifests_have_the_sizes_that_the_figures_name() -> None:
    full = sizes.FULL
    assert sum(s.nbytes for s in sizes.dense(full.dense_bytes)) == pytest.approx(full.dense_bytes, rel=0.01)
    moe = sizes.moe(full.moe_bytes, full.tensors)
    assert len(moe) == 18_867
    assert sum(s.nbytes for s in moe) == pytest.approx(full.moe_bytes, rel=0.01)
    assert sum(s.nbytes for s in sizes.moe(full.colocated_bytes, full.tensors)) == pytest.approx(61e9, rel=0.01)
    assert len(sizes.lora(full.lora_tensors)) == 4_000


@pytest.mark.parametrize("bucket_bytes", [64, 1000, 1 << 20])
def test_the_baselines_cut_keeps_every_byte_in_order_and_within_a_bucket(bucket_bytes: int) -> None:
    flats = [torch.arange(n, dtype=torch.int64).to(torch.uint8) for n in (1, 5, 64, 0, 999, 3000)]
    cuts = cut(flats, bucket_bytes)
    assert torch.equal(torch.cat([p for c in cuts for p in c.pieces]), torch.cat(flats))
    for c in cuts:
        assert c.used_bytes <= bucket_bytes
        ends = [o + p.numel() for o, p in zip(c.offsets, c.pieces)]
        assert all(o % 16 == 0 for o in c.offsets)
        assert all(end <= start for end, start in zip(ends, c.offsets[1:]))


# --- how it is run here


@pytest.mark.parametrize(
    ("facts", "how"),
    [
        ({"nccl": "2.30.3", "devices": 1}, "one device"),
        ({"nccl": "2.29.7", "devices": 1}, "alone"),
        ({"nccl": "2.28.9", "devices": 2}, "two devices"),
        ({"nccl": None, "devices": 2}, "none"),
    ],
)
def test_nccl_runs_as_the_version_and_the_devices_allow(facts: dict[str, Any], how: str) -> None:
    assert nccl_job(facts)[0] == how
    parts = [(job.part, job.world) for job in plan({**facts, "fastsync": "1", "probe": True})[0]]
    assert (("nccl", 2) in parts) == (how in ("one device", "two devices"))
    assert (("nccl", 1) in parts) == (how == "alone")


def test_versions_compare_as_numbers() -> None:
    assert version_number("2.30.3") == 23003 > version_number("2.9.10")
    assert version_number(None) == 0


def test_without_fastsync_what_needs_none_of_it_still_runs() -> None:
    jobs, why_not = plan({"fastsync": None, "fastsync_reason": "not built", "nccl": "2.30.7", "devices": 1})
    assert {job.part for job in jobs} == {"pack", "colocated", "link", "nccl"}
    assert any("not built" in reason for reason in why_not)


# --- what is said of it


def _row(part: str, figure: str, value: float, **details: Any) -> dict[str, Any]:
    return {"part": part, "figure": figure, "value": value, "unit": "GB/s", "details": details}


_ROWS = [
    _row("pack", "copy peak, cuMemcpyDtoD", 1900.0),
    _row("pack", "copy peak, torch copy_", 2000.0),
    _row("pack", "pack dense", 1850.0),
    _row("pack", "pack moe", 1500.0),
    _row("colocated", "colocated, fastsync ipc", 0.06, nbytes=60e9),
]


def test_ratios_are_to_the_faster_copy_and_goals_are_judged() -> None:
    rows = results.with_ratios(_ROWS)
    found = {line[0]: line[-1] for line in results.cells(rows, double=False)}
    assert results.find(rows, "pack dense / copy peak")["value"] == pytest.approx(0.925)  # type: ignore[index]
    assert found["pack dense / copy peak"] == "met"
    assert found["pack moe / copy peak"] == "MISSED"
    assert results.find(rows, "colocated, fastsync ipc / (bytes / copy peak)")["value"] == pytest.approx(2.0)  # type: ignore[index]
    assert found["colocated, fastsync ipc / (bytes / copy peak)"] == "MISSED"
    assert found["host, per tensor"] == "not measured"


def test_nothing_of_a_double_is_called_a_measurement() -> None:
    lines = results.cells(results.with_ratios(_ROWS), double=True)
    assert {line[-1] for line in lines} == {DOUBLE, "not measured"}


def test_a_section_names_what_a_figure_cannot_be_read_without() -> None:
    about = {"date": "2026-01-02", "commit": "abc", "command": "run.sh", "seconds": "9", "tests": "passed"}
    facts = {"device": "H", "driver": "13.0", "torch": "2, CUDA 13", "nccl": "2.30.7"}
    text = results.section(results.with_ratios(_ROWS), facts, about, ["nccl: why"])
    assert all(
        word in text for word in ("2026-01-02", "abc", "run.sh", "13.0", "2.30.7", "CUDA 13", "- nccl: why", "met")
    )


def test_sections_are_added_and_the_page_no_longer_says_that_it_is_empty(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    page.write_bytes((ROOT / "bench/gpu/RESULTS.md").read_bytes())
    results.append(page, "## one\n")
    results.append(page, "## two\n")
    text = page.read_text(encoding="utf-8")
    assert text.endswith("\n\n## one\n\n## two\n")
    assert "No run" not in text


def test_slope_is_the_growth_by_one() -> None:
    assert slope([100.0, 120.0, 140.0], 10) == pytest.approx(2.0)
    assert slope([5.0, 5.0, 5.0], 10) == 0.0


# --- its processes; run() is what the ranks of these parts do


@dataclass
class _NoDevice:
    is_double = True

    def synchronize(self) -> None: ...


class _MovesNothing(Peer):
    def sync(self) -> None: ...


def run(rank: ranks.Rank) -> None:
    rank.row("before", 1.0, "")
    do = rank.options["do"]
    if do == "raise" and rank.number == 1:
        raise ValueError("a reason")
    if do == "die" and rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if do in ("raise", "die", "hang"):
        time.sleep(60)
    if do == "move nothing":
        rank.device = _NoDevice()  # type: ignore[assignment]
        model = HostModel((TensorSpec("a", (100,)),), Pattern("cpu", 4096))
        Meter(rank, model, _MovesNothing())


def _run(do: str, budget_s: float = 40.0, victims: tuple[int, ...] = ()) -> ranks.Outcome:
    job = ranks.Job(__name__, 2, budget_s, options={"do": do}, victims=victims)
    return ranks.run(job, replace(sizes.TINY, timeout_s=10.0))


@pytest.mark.parametrize(
    ("do", "says"), [("raise", "rank 1: ValueError: a reason"), ("die", r"rank 1 died \(exit code -9\)")]
)
def test_a_part_that_fails_says_why_and_keeps_what_it_had(do: str, says: str) -> None:
    outcome = _run(do)
    assert outcome.error is not None
    assert re.search(says, outcome.error)
    assert [row["figure"] for row in outcome.rows] == ["before", "before"]
    assert outcome.seconds < 35


def test_a_part_that_hangs_ends_with_its_budget() -> None:
    outcome = _run("hang", budget_s=12.0)
    assert outcome.error is not None
    assert "not done within its 12 s" in outcome.error
    assert outcome.seconds < 25


def test_bytes_that_did_not_arrive_end_the_part() -> None:
    outcome = _run("move nothing")
    assert outcome.error is not None
    assert "WrongBytes: 200 of 200 bytes are wrong" in outcome.error


def test_a_part_that_succeeds_has_no_error() -> None:
    assert _run("nothing").error is None


# --- all of it


@pytest.mark.timeout(600)
def test_dry_run_executes_every_part_and_writes_no_result(tmp_path: Path) -> None:
    missing = devices.doubles_missing_reason()
    if missing is not None:
        pytest.skip(missing)
    doubles = devices.doubles_folder()
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "FASTSYNC_TEST_DOUBLES": str(doubles),
        "FASTSYNC_GPU_BUILD": str(tmp_path / "build"),
        "FASTSYNC_GPU_CORE": str(doubles.parents[1] / "libfastsync_core.a"),
    }
    before = (ROOT / "bench/gpu/RESULTS.md").read_bytes()
    done = subprocess.run(
        [str(ROOT / "bench/gpu/run.sh"), "--dry-run", "--out", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured:" not in done.stdout
    assert (ROOT / "bench/gpu/RESULTS.md").read_bytes() == before
    rows = [json.loads(line) for line in (tmp_path / "dry_run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["part"] for row in rows} == {"pack", "host", "colocated", "link", "nccl", "memory", "abort"}
    assert {row["note"] for row in rows} == {DOUBLE}
    assert all(goal.figure in {row["figure"] for row in rows} for goal in results.GOALS)
    for line in done.stdout.splitlines():
        assert " met" not in line and "MISSED" not in line
