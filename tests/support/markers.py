"""Every marker and shared parametrisation of the Python tests, in one place."""

from __future__ import annotations

import pytest

slow = pytest.mark.slow
fault = pytest.mark.fault
leak = pytest.mark.leak

DESCRIPTIONS = {
    "slow": "takes more than 20 seconds",
    "fault": "kills, stops, delays or interrupts ranks",
    "leak": "counts what many syncs leave behind",
}

TRANSPORTS = ("shm", "gloo")
RECEIVE_MODES = ("into", "load", "stream", "borrow")

each_transport = pytest.mark.parametrize("transport", TRANSPORTS)
each_mode = pytest.mark.parametrize("mode", RECEIVE_MODES)
