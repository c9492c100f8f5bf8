"""Twinkle's own manager, mixin and base class, two trainers and two samplers, over fastsync."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("twinkle")

import twinkle
from twinkle import DeviceGroup, DeviceMesh
from twinkle.checkpoint_engine.base import CheckpointEngine
from twinkle.checkpoint_engine.manager import CheckpointEngineManager
from twinkle_actors import Model, Sampler

import fastsync.integrations.twinkle as adapter


@pytest.fixture(scope="module")
def placed(cluster: Any) -> tuple[Any, Any]:
    twinkle.initialize(
        mode="ray",
        nproc_per_node=4,
        ncpu_proc_per_node=4,
        groups=[DeviceGroup("model", 2, "CPU"), DeviceGroup("sampler", 2, "CPU")],
        lazy_collect=False,
    )
    adapter.install()
    mesh = DeviceMesh.from_sizes(world_size=2, dp_size=2)
    return Model(device_mesh=mesh, remote_group="model"), Sampler(device_mesh=mesh, remote_group="sampler")


@pytest.fixture
def manager(placed: tuple[Any, Any]) -> Any:
    return CheckpointEngineManager(*placed)


def check(manager: Any, mode: str) -> None:
    want = manager.model.expected(mode)
    for got, _ in manager.sampler.holds():
        assert list(got) == list(want)
        assert got == want, [name for name in want if got[name] != want[name]]
    assert manager.model.merged() == [False, False]


def test_the_manager_takes_the_engine(manager: Any) -> None:
    assert manager.backend_cls is adapter.FastSyncCheckpointEngine
    assert issubclass(adapter.FastSyncCheckpointEngine, CheckpointEngine)


def test_full_weights_and_then_merged_ones(manager: Any) -> None:
    manager.sync_weights(merge_and_sync=True)
    check(manager, "full")
    for step in range(1, 5):
        manager.model.train(step)
        manager.sync_weights(merge_and_sync=True)
        check(manager, "merged")


def test_the_base_once_and_then_the_adapter_alone(manager: Any) -> None:
    manager.sync_weights(merge_and_sync=False)
    check(manager, "base")
    for step in range(5, 8):
        manager.model.train(step)
        manager.sync_weights(merge_and_sync=False)
        check(manager, "adapter")
        assert all(config == {"r": 3, "target_modules": ["q_proj", "v_proj"]} for _, config in manager.sampler.holds())


def test_a_sampler_that_fails_leaves_the_model_unmerged(manager: Any) -> None:
    manager.sync_weights(merge_and_sync=True)
    manager.sampler.fail_next()
    with pytest.raises(Exception, match=r"no such weight|rank [12]"):
        manager.sync_weights(merge_and_sync=True)
    assert manager.model.merged() == [False, False]
    manager.model.train(9)
    manager.sync_weights(merge_and_sync=True)
    check(manager, "merged")


def test_its_timeout_variable_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapter.FastSyncCheckpointEngine().timeout == 300
    monkeypatch.setenv("TWINKLE_CKPT_HCCL_META_TIMEOUT_S", "12")
    assert adapter.FastSyncCheckpointEngine(1 << 20, "name", False).timeout == 12
    assert adapter.FastSyncCheckpointEngine(timeout=7).timeout == 7
    monkeypatch.setenv("TWINKLE_CKPT_HCCL_META_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="TWINKLE_CKPT_HCCL_META_TIMEOUT_S is 'soon'"):
        adapter.FastSyncCheckpointEngine()
