"""Building a manifest and planning its buckets: what the first sync of a session costs before a byte moves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from bench.workloads import load

BUCKET_BYTES = 4 << 20


def _manifest(core: ModuleType, entries: list[tuple[str, tuple[int, ...]]]) -> Any:
    manifest = core.Manifest()
    for name, shape in entries:
        manifest.append(name, "bfloat16", shape, 2)
    return manifest


@pytest.mark.parametrize("workload", ["dense", "moe", "lora"])
def test_manifest(benchmark: Any, core: ModuleType, workload: str) -> None:
    entries = [(s.name, s.shape) for s in load(workload).specs]
    benchmark.extra_info["tensors"] = len(entries)
    benchmark(_manifest, core, entries)


@pytest.mark.parametrize("workload", ["dense", "moe", "lora", "embedding"])
def test_plan(benchmark: Any, core: ModuleType, workload: str) -> None:
    specs = load(workload).specs
    manifest = _manifest(core, [(s.name, s.shape) for s in specs])
    benchmark.extra_info["tensors"] = len(specs)
    benchmark(core.plan, manifest, BUCKET_BYTES)
