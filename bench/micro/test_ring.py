"""Handing buckets to another process through the shared-memory ring, with almost no bytes in them.

A sync of N one-line buckets, less an empty sync, by N: what a hand-over costs beyond its bytes.
"""

from __future__ import annotations

from typing import Any

import pytest

TINY_BYTES = 256  # the alignment: one tensor fills one bucket
BUCKETS = 2000


def test_empty_sync(benchmark: Any, partner: Any) -> None:
    """Begin and commit: what every sync costs whatever it carries."""
    report = benchmark(partner.run, "empty", [2], transport="shm")
    assert report.tensors == 1


@pytest.mark.parametrize("buffers", [2, 4])
def test_ring_hand_off(benchmark: Any, partner: Any, buffers: int) -> None:
    report = benchmark(
        partner.run,
        f"ring-{buffers}",
        [TINY_BYTES] * BUCKETS,
        transport="shm",
        bucket_bytes=TINY_BYTES,
        buffers=buffers,
        verify=False,
    )
    assert report.buckets == BUCKETS
    benchmark.extra_info["us_per_bucket"] = benchmark.stats.stats.median / BUCKETS * 1e6


@pytest.mark.parametrize("verify", [False, True], ids=["unverified", "verified"])
def test_small_tensors(benchmark: Any, partner: Any, verify: bool) -> None:
    """20,000 tensors of 1 KiB: what a tensor costs from end to end, when its bytes cost next to nothing."""
    report = benchmark(partner.run, f"small-{verify}", [1024] * 20_000, transport="shm", verify=verify)
    assert report.tensors == 20_000
    assert report.plan_reused
    benchmark.extra_info["us_per_tensor"] = benchmark.stats.stats.median / 20_000 * 1e6
    benchmark.extra_info["phases"] = report.phases
