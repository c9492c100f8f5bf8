"""One Ray cluster for a test module, on this machine's CPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    # Workers inherit the environment of the cluster that is started here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH", "")]))
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEDUP_LOGS="0",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="0",
    )
    ray.init(
        num_cpus=16,  # of the scheduler's; processes mostly wait
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=os.environ.get("FASTSYNC_TEST_LOGS") == "1",
    )
    yield ray
    ray.shutdown()
