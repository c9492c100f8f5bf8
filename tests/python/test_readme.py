"""The README's programs run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import fastsync

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def programs() -> dict[str, str]:
    found = re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return {name: body for body, name in found}


def first_cells(heading: str) -> set[str]:
    """The `names` in the first column of a section's table."""
    rows = [row for row in README.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines() if row.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_program_is_found_and_complete() -> None:
    assert README.count("```python") == len(programs()) == 3


def test_trainer_and_both_rollout_workers_run_as_one_group(tmp_path: Path) -> None:
    for name, body in programs().items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    # The readme's port is the reader's to choose. Here the store is ours, on a port that the system picked.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, tmp_path / name],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, name in enumerate(["trainer.py", "rollout.py", "rollout_loader.py"])
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(outputs)
    trainer, rollout, loader = ([line for line in output.splitlines() if "version" in line] for output in outputs)
    assert len(trainer) == 3
    # Both workers served the same weights, and each version other ones.
    sums = [[line.split("weights sum to ")[1] for line in lines] for lines in (rollout, loader)]
    assert sums[0] == sums[1]
    assert len(set(sums[0])) == 3
    assert [re.findall(r"version (\d+)", line)[0] for line in rollout] == ["1", "2", "3"]


def test_transport_table_lists_what_the_package_has() -> None:
    assert first_cells("Transports") == set(fastsync.transports())


def test_report_table_lists_every_field() -> None:
    listed, fields = first_cells("How to read a report"), set(fastsync.SyncReport.__dataclass_fields__)
    properties = {name for name, value in vars(fastsync.SyncReport).items() if isinstance(value, property)}
    assert listed <= fields | properties
    assert fields - listed <= {"transport", "tensors"}  # These say it themselves.


def test_error_table_names_real_errors() -> None:
    listed = first_cells("When it fails")
    assert listed
    assert all(issubclass(getattr(fastsync, name), fastsync.Error) for name in listed)
