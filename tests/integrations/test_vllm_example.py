"""The GRPO example learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

pytest.importorskip("vllm")

from vllm_server import HERE, environment

STEPS = 16


def test_the_mean_reward_rises(tmp_path: Path) -> None:
    rewards_file = tmp_path / "rewards.json"
    script = HERE.parents[1] / "examples" / "vllm_grpo.py"
    command = [sys.executable, str(script), "--steps", str(STEPS), "--json", str(rewards_file)]
    ran = subprocess.run(
        command, env={**os.environ, **environment()}, capture_output=True, text=True, timeout=550, check=False
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    lines = [line for line in ran.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == STEPS and "plan reused" in lines[-1]
    rewards = json.loads(rewards_file.read_text())
    assert 0.3 < mean(rewards[:3]) < 0.7  # even or odd, by chance
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.1, rewards
