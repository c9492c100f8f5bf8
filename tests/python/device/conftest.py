"""The device tests' own pool: its processes work on the doubles, which must have seen no broken rule after any test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.devices import DevicePool, doubles_missing_reason, gpu_missing_reason


def _needs_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = gpu_missing_reason() if _needs_gpu(item) else doubles_missing_reason()
    if reason is not None:
        pytest.skip(reason)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if _needs_gpu(item) and params.get("transport") == "nccl" and torch.cuda.device_count() < 3:
        pytest.skip(f"nccl needs a device for each of 3 ranks, there are {torch.cuda.device_count()}")


@pytest.fixture(scope="session")
def _device_pools() -> Iterator[dict[str, DevicePool]]:
    pools: dict[str, DevicePool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def pool(_device_pools: dict[str, DevicePool], request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    """The rank processes. No double may have seen a violation; after a failed test all processes are replaced."""
    kind = "gpu" if _needs_gpu(request.node) else "double"
    if kind not in _device_pools:
        _device_pools[kind] = DevicePool(kind)
    pool = _device_pools[kind]
    failed_before = request.session.testsfailed
    yield pool
    violations = pool.violations()
    pool.drop_extra()
    if violations or request.session.testsfailed > failed_before:
        pool.reset()
    assert not violations, "the doubles saw broken rules:\n" + "\n".join(violations)
