"""The plumbing of bench/engine_overhead.py, with few tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import engine_overhead as overhead
from bench import render


def measured(peers: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {row["peer"]: row for row in overhead.measure(300, 2, peers)}


def test_an_update_is_measured_on_both_sides() -> None:
    row = measured(("fastsync",))["fastsync"]
    assert row["tensors"] == 300
    assert row["cpu_s"] > 0
    assert row["send_cpu_s"] > 0
    assert row["receive_cpu_s"] > 0
    assert 0 < row["first_s"] < overhead.TIMEOUT_S
    assert 0 < row["around_s"] < overhead.TIMEOUT_S


@pytest.mark.skipif(overhead.verl_is_here() is not None, reason=str(overhead.verl_is_here()))
def test_verls_own_code_is_measured_in_the_same_run() -> None:
    rows = measured(overhead.PEERS)
    assert list(rows) == ["fastsync", "verl"]
    assert rows["verl"]["cpu_s"] > rows["verl"]["receive_cpu_s"] > 0
    assert len(overhead.verdicts(list(rows.values()))) == 3


@pytest.mark.parametrize("damage", ["value", "names", "missing", "old"])
def test_what_arrives_wrong_is_found(damage: str) -> None:
    model = overhead.Model(20)
    model.fill(7)
    got = [(name, tensor.clone()) for name, tensor in model.items()]
    model.check(got, 7, "peer")
    if damage == "value":
        got[5][1].view(torch.int16)[9] ^= 1
    elif damage == "names":
        got[:2] = [(got[1][0], got[0][1]), (got[0][0], got[1][1])]
    elif damage == "missing":
        got.pop()
    with pytest.raises(overhead.BenchError):
        model.check(got, 8 if damage == "old" else 7, "peer")


def test_a_side_that_fails_fails_the_run() -> None:
    with pytest.raises(overhead.BenchError, match="no-such-peer"):
        overhead.measure(10, 1, ("no-such-peer",))


def test_the_table_goes_between_its_own_marks(tmp_path: Path) -> None:
    row = {"peer": "fastsync", "tensors": 10, "cpu_s": 0.1, "send_cpu_s": 0.04, "receive_cpu_s": 0.06}
    row |= {"lowest_cpu_s": 0.1, "first_s": 0.01, "around_s": 0.004, "topology_s": 0.002}
    found = overhead.verdicts([row])
    assert [verdict.met for verdict in found] == [False], "6 ms are over the bound"
    page = tmp_path / "README.md"
    page.write_text(f"before\n{overhead.MARKS[0]}\nold\n{overhead.MARKS[1]}\nafter\n", encoding="utf-8")
    render.write_readme(page, overhead.markdown([row], found, "a command"), overhead.MARKS)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| fastsync | 10000.00 | 4000.00 | 6000.00 | 100.0 | 100.0 | 10.0 | 6.00 |" in text
    assert "MISSED" in text
