"""Every marker and shared parametrisation of the Python tests, in one place."""

from __future__ import annotations

import pytest

slow = pytest.mark.slow
fault = pytest.mark.fault
leak = pytest.mark.leak
gpu = pytest.mark.gpu

DESCRIPTIONS = {
    "slow": "takes more than 20 seconds",
    "fault": "kills, stops, delays or interrupts ranks",
    "leak": "counts what many syncs leave behind",
    "gpu": "runs on a real CUDA device; only where asked for with -m gpu",
}

TRANSPORTS = ("shm", "gloo")
DEVICE_TRANSPORTS = ("ipc", "nccl", "gloo")
RECEIVE_MODES = ("into", "load", "stream", "borrow")

each_transport = pytest.mark.parametrize("transport", TRANSPORTS)
each_device_transport = pytest.mark.parametrize("transport", DEVICE_TRANSPORTS)
# Tests that are written for both: on the doubles, and on a real device where one is asked for.
each_machine = pytest.mark.parametrize("machine", ["double", pytest.param("gpu", marks=gpu)])
each_mode = pytest.mark.parametrize("mode", RECEIVE_MODES)
