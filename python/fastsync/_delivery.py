"""Hands the tensors of a sync to code that has a loader instead of destinations, bucket by bucket.

Where a bucket lies (host or device) decides what its tensors are made of: a `Space` makes views of a bucket's memory,
makes memory of its own, and copies between the two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from . import _core
from ._device import DeviceArray, torch_bytes
from ._tensors import dtype_from_name
from .errors import CommError

__all__ = ["DeviceSpace", "HostSpace", "Space", "deliver", "deliver_in_turn"]


class Space(Protocol):
    """Makes tensors where the buckets lie."""

    def open(self, address: int, nbytes: int, owner: object) -> None:
        """A bucket has come; `owner` keeps its memory mapped."""

    def view(self, offset: int, nbytes: int, dtype: str, shape: list[int]) -> Any:
        """A tensor over the bucket's bytes, or None for a dtype that cannot be viewed."""

    def empty(self, dtype: str, shape: list[int], nbytes: int) -> Any:
        """A tensor with memory of its own."""

    def fill(self, tensor: Any, at: int, address: int, nbytes: int) -> None:
        """Copies bytes of a bucket to offset `at` of a tensor made by empty()."""


def _typed(raw: torch.Tensor, dtype: str, shape: list[int]) -> torch.Tensor | None:
    """`raw` bytes as a tensor that shares their memory; None for dtypes that torch cannot view bytes as."""
    try:
        return raw.view(dtype_from_name(dtype)).view(shape)
    except RuntimeError:
        return None


class HostSpace:
    """CPU tensors over shared or heap memory."""

    def __init__(self) -> None:
        self._raw: torch.Tensor | None = None

    def open(self, address: int, nbytes: int, owner: object) -> None:
        self._raw = None
        if nbytes > 0:
            buffer = (ctypes.c_uint8 * nbytes).from_address(address)
            buffer.owner = owner  # type: ignore[attr-defined]
            self._raw = torch.frombuffer(buffer, dtype=torch.uint8)

    def view(self, offset: int, nbytes: int, dtype: str, shape: list[int]) -> torch.Tensor | None:
        return None if self._raw is None else _typed(self._raw[offset : offset + nbytes], dtype, shape)

    def empty(self, dtype: str, shape: list[int], nbytes: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype_from_name(dtype), device="cpu")

    def fill(self, tensor: torch.Tensor, at: int, address: int, nbytes: int) -> None:
        _core.copy_bytes(tensor.data_ptr() + at, address, nbytes, False)


class DeviceSpace:
    """CUDA tensors, or `DeviceArray` where this torch has no CUDA. Work is queued on the caller's stream."""

    def __init__(self, runtime: _core.CudaRuntime, stream: int) -> None:
        self._runtime = runtime
        self._stream = stream
        self._address = 0
        self._nbytes = 0
        self._owner: object = None
        self._raw: torch.Tensor | None = None
        self._torch = torch.cuda.is_initialized()

    def open(self, address: int, nbytes: int, owner: object) -> None:
        self._address, self._nbytes, self._owner = address, nbytes, owner
        self._raw = (
            torch_bytes(address, nbytes, self._runtime.ordinal, self._stream, owner)
            if self._torch and nbytes > 0
            else None
        )

    def view(self, offset: int, nbytes: int, dtype: str, shape: list[int]) -> Any:
        if self._nbytes == 0:
            return None
        if self._raw is not None:
            return _typed(self._raw[offset : offset + nbytes], dtype, shape)
        return self._array(self._address + offset, dtype, shape, nbytes, self._owner)

    def empty(self, dtype: str, shape: list[int], nbytes: int) -> Any:
        if self._torch:
            return torch.empty(shape, dtype=dtype_from_name(dtype), device=f"cuda:{self._runtime.ordinal}")
        if nbytes == 0:
            return self._array(0, dtype, shape, 0, None)
        memory = _core.DeviceMemory(self._runtime, nbytes, self._stream)
        return self._array(memory.address, dtype, shape, nbytes, memory)

    def fill(self, tensor: Any, at: int, address: int, nbytes: int) -> None:
        base = tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor.__cuda_array_interface__["data"][0]
        self._runtime.copy(base + at, address, nbytes, self._stream)

    def _array(self, address: int, dtype: str, shape: list[int], nbytes: int, owner: object) -> DeviceArray:
        count = 1
        for n in shape:
            count *= n
        itemsize = nbytes // count if count else dtype_from_name(dtype).itemsize
        return DeviceArray(address, tuple(shape), dtype, itemsize, self._stream, owner)


def deliver(receiver: Any, space: Space, *, own: bool) -> Iterator[list[tuple[str, Any]]]:
    """Bucket by bucket, the tensors that are whole now. `own`: copied out; else views of the bucket."""
    for items in deliver_buckets(receiver, space, own=own):
        if items:
            yield items
        items = []


def deliver_in_turn(receivers: list[Any], spaces: list[Space], *, own: bool) -> Iterator[list[tuple[str, Any]]]:
    """As deliver(), from several receivers: one bucket of each in turn, as long as they have one."""
    left = [(r, deliver_buckets(r, space, own=own)) for r, space in zip(receivers, spaces)]
    while left:
        for turn in list(left):
            receiver, buckets = turn
            items = next(buckets, None)
            if items is None:
                left.remove(turn)
                continue
            if items:
                yield items
            items = []
            receiver.release_bucket()  # its next one can come while it is the others' turn


def deliver_buckets(receiver: Any, space: Space, *, own: bool) -> Iterator[list[tuple[str, Any]]]:
    """As deliver(), with an empty list for a bucket that makes no tensor whole."""
    partial: Any = None
    delivered = 0

    def empty(index: int) -> tuple[str, Any]:
        name, dtype, shape, nbytes = receiver.entry(index)
        return name, space.empty(dtype, shape, nbytes)

    while (bucket := receiver.next_bucket(not own)) is not None:
        address, used, pieces, first, last = bucket
        if not own:
            space.open(address, used, receiver.bucket_owner())
        whole: dict[int, Any] = {}
        for index, offset, at, nbytes, completes in pieces:
            if offset == 0 and completes and not own:
                _, dtype, shape, _ = receiver.entry(index)
                view = space.view(at, nbytes, dtype, shape)
                if view is not None:
                    whole[index] = view
                    continue
            if offset == 0:
                partial = empty(index)[1]
            if partial is None:
                raise CommError(f"tensor number {index} arrived without its beginning")
            space.fill(partial, offset, address + at, nbytes)
            if completes:
                whole[index] = partial
                partial = None
        if own:
            receiver.release_bucket()  # copied out: the source need not wait for the callee
        items = []
        for index in range(first, last):
            tensor = whole.pop(index, None)
            name, dtype, shape, nbytes = receiver.entry(index)
            items.append((name, space.empty(dtype, shape, nbytes) if tensor is None else tensor))
        delivered = last
        space.open(0, 0, None)
        yield items
        items = []
        receiver.release_bucket()
    rest = [empty(index) for index in range(delivered, receiver.tensors)]  # empty tensors after the last bucket
    if rest:
        yield rest
