"""Moving and checking bytes inside one process, at the sizes of a bucket and of whole tensors.

Pack is a cached copy of many tensors into one bucket that stays in cache; unpack is the way out, with non-temporal
stores into destinations that do not.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

Memory = Callable[[int], Any]

BUCKET_BYTES = 2 << 20
MODEL_BYTES = 256 << 20  # much larger than any cache


def _rate(benchmark: Any, nbytes: int) -> None:
    benchmark.extra_info["nbytes"] = nbytes
    benchmark.extra_info["gb_per_s"] = nbytes / benchmark.stats.stats.median / 1e9


@pytest.mark.parametrize("nbytes", [4 << 10, 64 << 10, BUCKET_BYTES, MODEL_BYTES])
def test_checksum(benchmark: Any, core: ModuleType, memory: Memory, nbytes: int) -> None:
    data = memory(nbytes)
    benchmark(core.checksum_bytes, data.ctypes.data, nbytes)
    _rate(benchmark, nbytes)


@pytest.mark.parametrize("streaming", [False, True], ids=["cached", "streaming"])
@pytest.mark.parametrize("nbytes", [64 << 10, BUCKET_BYTES, MODEL_BYTES])
def test_copy(benchmark: Any, core: ModuleType, memory: Memory, nbytes: int, streaming: bool) -> None:
    source, destination = memory(nbytes), np.zeros(nbytes, dtype=np.uint8)
    benchmark(core.copy_bytes, destination.ctypes.data, source.ctypes.data, nbytes, streaming)
    assert np.array_equal(source, destination)
    _rate(benchmark, nbytes)


@pytest.mark.parametrize("tensor_bytes", [16 << 10, 1 << 20], ids=["16KiB", "1MiB"])
def test_pack(benchmark: Any, core: ModuleType, memory: Memory, tensor_bytes: int) -> None:
    """Cold tensors into one hot bucket, over and over, as the source does."""
    model, bucket = memory(MODEL_BYTES), np.zeros(BUCKET_BYTES, dtype=np.uint8)
    out_of = [model.ctypes.data + i for i in range(0, MODEL_BYTES, tensor_bytes)]
    into = [bucket.ctypes.data + i % BUCKET_BYTES for i in range(0, MODEL_BYTES, tensor_bytes)]
    sizes = [tensor_bytes] * len(out_of)
    benchmark(core.copy_many, into, out_of, sizes, False)
    assert np.array_equal(bucket, model[-BUCKET_BYTES:])
    _rate(benchmark, MODEL_BYTES)


@pytest.mark.parametrize("tensor_bytes", [16 << 10, 1 << 20], ids=["16KiB", "1MiB"])
def test_unpack(benchmark: Any, core: ModuleType, memory: Memory, tensor_bytes: int) -> None:
    """One hot bucket into cold tensors, over and over, as a receiver does."""
    model, bucket = np.zeros(MODEL_BYTES, dtype=np.uint8), memory(BUCKET_BYTES)
    into = [model.ctypes.data + i for i in range(0, MODEL_BYTES, tensor_bytes)]
    out_of = [bucket.ctypes.data + i % BUCKET_BYTES for i in range(0, MODEL_BYTES, tensor_bytes)]
    sizes = [tensor_bytes] * len(out_of)
    benchmark(core.copy_many, into, out_of, sizes, True)
    assert np.array_equal(bucket, model[-BUCKET_BYTES:])
    _rate(benchmark, MODEL_BYTES)
