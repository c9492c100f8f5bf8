"""The programs in examples/ run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 200.0


def run_under_torchrun(program: str, ranks: int, *arguments: str) -> str:
    """What the ranks printed; the meeting place's port is one that the system picks."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *(str(EXAMPLES / program), *arguments),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rollout_workers_under_torchrun_serve_every_version_that_the_trainer_made() -> None:
    said = run_under_torchrun("torchrun_trainer_rollout.py", 3, "--steps", "4")
    # A rank's words come in one piece, but another's may come before the end of its line.
    loss = r"loss (\d+\.\d{6})"
    trained = dict(re.findall(rf"trainer: version (\d+): 4 tensors, [^;\n]* over \w+, [^;\n]*; {loss}", said))
    assert list(trained) == ["1", "2", "3", "4"], said
    assert len(set(trained.values())) == 4, said
    for rank in (1, 2):
        served = dict(re.findall(rf"rollout {rank}: version (\d+), {loss}", said))
        assert served == trained, said
