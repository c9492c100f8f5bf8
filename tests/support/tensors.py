"""Reference bytes of tensors, computed without fastsync and without torch's own copy kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

POISON = 0xA5
QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def all_dtypes() -> list[torch.dtype]:
    """Every dtype of this torch that has a byte view."""
    found: list[torch.dtype] = []
    for _, value in sorted(vars(torch).items()):
        if isinstance(value, torch.dtype) and value not in found and value not in QUANTISED:
            found.append(value)
    return found


def storage_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's whole storage as bytes, sharing memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[arg-type]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The logical bytes in row-major order, lazy bits resolved."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return b""
    size = tensor.dtype.itemsize
    start = tensor.storage_offset() * size
    view = np.lib.stride_tricks.as_strided(
        storage_bytes(tensor)[start:],
        shape=(*tensor.shape, size),
        strides=(*(stride * size for stride in tensor.stride()), 1),
    )
    return view.tobytes()


def of_bytes(data: bytes | np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor with exactly these bytes."""
    raw = np.frombuffer(bytes(data), dtype=np.uint8).copy()
    assert raw.size == math.prod(shape) * dtype.itemsize
    out = torch.empty(shape, dtype=dtype)
    if raw.size:
        storage_bytes(out)[: raw.size] = raw
    return out


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes, the same in every process: any bit pattern, NaN payloads and trap values included."""
    nbytes = math.prod(shape) * dtype.itemsize
    return of_bytes(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8), dtype, shape)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous destination that shows whether anything was written to it."""
    out = torch.empty(shape, dtype=dtype)
    storage_bytes(out)[:] = POISON
    return out


def poisoned_like(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: poisoned(tuple(tensor.shape), tensor.dtype) for name, tensor in params.items()}


def untouched(params: Mapping[str, torch.Tensor]) -> bool:
    """Whether every byte of every storage is still the poison."""
    return all(bool((storage_bytes(tensor) == POISON).all()) for tensor in params.values())


def assert_same(got: Mapping[str, Any], want: Mapping[str, torch.Tensor]) -> None:
    """Same names in the same order, dtypes, shapes and bytes."""
    assert list(got) == list(want), f"names differ: {list(got)[:20]} and {list(want)[:20]}"
    for name, tensor in want.items():
        assert_tensor(got[name], tensor, name)


def assert_tensor(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    assert got.dtype == want.dtype, f"{name}: {got.dtype} is not {want.dtype}"
    assert tuple(got.shape) == tuple(want.shape), f"{name}: {tuple(got.shape)} is not {tuple(want.shape)}"
    one, two = bytes_of(got), bytes_of(want)
    if one != two:
        at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
        raise AssertionError(f"{name}: byte {at} of {len(two)} is {one[at]:#x}, not {two[at]:#x}")


def clone_exact(tensor: torch.Tensor) -> torch.Tensor:
    """A private contiguous copy, for any dtype."""
    return of_bytes(bytes_of(tensor), tensor.dtype, tuple(tensor.shape))
