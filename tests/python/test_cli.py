"""The `fastsync` command, run as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

import fastsync

TIMEOUT_S = 120.0
COMMAND = [sys.executable, "-m", "fastsync.cli"]


def fastsync_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sharded checkpoint of odd tensors."""
    generator = torch.Generator().manual_seed(1)
    first = {
        "dense": torch.randn(512, 300, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"ids": torch.arange(1001)}, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_installed_as_a_command() -> None:
    command = [Path(sys.executable).with_name("fastsync"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"fastsync-rl {fastsync.__version__}\n"


def test_transports_prints_every_row_with_its_reason() -> None:
    done = fastsync_command("transports")
    assert done.returncode == 0
    for info in fastsync.transports().values():
        (row,) = [line for line in done.stdout.splitlines() if line.split()[0] == info.name]
        assert row.split()[1] == ("yes" if info.available else "no")
        assert info.use_when in row
        assert info.available or info.reason in row


def test_demo_trains_and_verifies_every_version() -> None:
    done = fastsync_command("demo", "--steps", "2", "--receivers", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    versions = [line for line in lines if line.startswith("version ")]
    assert [line.split()[1] for line in versions] == ["1", "2"]
    assert all("1/1 workers agree" in line and "checksum ok" in line for line in versions)
    assert any(line.startswith("Verified") for line in lines)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_demo_syncs_any_folder_of_safetensors(checkpoint: Path, transport: str) -> None:
    done = fastsync_command("demo", "--model", checkpoint, "--steps", "3", "--transport", transport)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2/2 workers agree") == 3
    assert f"4 tensors, {(512 * 300 * 2 + 4 + 1001 * 8) / 1000:.1f} kB, by {transport}" in done.stdout


def test_demo_refuses_a_folder_without_weights(tmp_path: Path) -> None:
    done = fastsync_command("demo", "--model", tmp_path)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert "safetensors" in done.stderr


@pytest.mark.parametrize("arguments", [("--receivers", "0"), ("--steps", "x"), ("--transport", "carrier-pigeon")])
def test_demo_refuses_silly_options(arguments: tuple[str, str]) -> None:
    done = fastsync_command("demo", *arguments)
    assert done.returncode == 2
    assert arguments[1] in done.stderr


class RunningDemo:
    """A demo that would go on for long, once its first version has arrived."""

    def __init__(self, checkpoint: Path) -> None:
        # Tests that a shell started in its background ignore interrupts, and so would the demo.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                [*COMMAND, "demo", "--model", checkpoint, "--steps", "1000000"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        finally:
            signal.signal(signal.SIGINT, before)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("version "):
                break
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        self.ranks = [child for child in self.family if "spawn_main" in " ".join(child.cmdline())]

    def finish(self) -> str:
        """Waits for its end and returns what it said of it. Nothing it started may outlive it for long."""
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        _, alive = psutil.wait_procs(self.family, timeout=10)
        assert alive == []
        return errors


def test_demo_reports_a_killed_rank_and_leaves_nothing_behind(checkpoint: Path) -> None:
    demo = RunningDemo(checkpoint)
    assert len(demo.ranks) == 3
    started = time.monotonic()
    demo.ranks[2].kill()
    errors = demo.finish()
    assert time.monotonic() - started < 15
    assert demo.process.returncode == 1
    assert "rollout 2 was killed by SIGKILL" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_demo_ends_on_a_signal_and_leaves_nothing_behind(checkpoint: Path, number: int, status: int) -> None:
    demo = RunningDemo(checkpoint)
    demo.process.send_signal(number)
    errors = demo.finish()
    assert demo.process.returncode == status
    assert "Traceback" not in errors
