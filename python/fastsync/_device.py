"""Devices: whether this process has any, which stream a caller works on, and tensors over raw device memory.

Nothing here initialises CUDA in a process that does not use it: a trainer on the CPU must not pay for it, nor be kept
from forking. A process uses CUDA when it passes device tensors, when torch has initialised it, or when it says so by
FASTSYNC_CUDA_PATH.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from . import _core
from .errors import CommError, InvalidArgument

__all__ = ["DeviceArray", "cuda_in_use", "current_device", "nccl_candidates", "runtime_for", "stream_handle"]

# How __cuda_array_interface__ names streams that have no handle: 1 legacy default, 2 per-thread default.
_LEGACY_STREAM = 1
_TYPESTRS = {
    "bool": "|b1",
    "int8": "|i1",
    "uint8": "|u1",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}


def cuda_in_use() -> bool:
    """Whether this process works with CUDA already, so that a loader may be given device tensors."""
    return bool(os.environ.get("FASTSYNC_CUDA_PATH")) or torch.cuda.is_initialized()


def current_device() -> int:
    """Ordinal of the device on which this thread works."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else _core.cuda_current_device()


def runtime_for(ordinal: int) -> _core.CudaRuntime:
    """The core's runtime of that device; CommError with the reason where CUDA cannot be used."""
    reason = _core.cuda_unavailable_reason()
    if reason is not None:
        raise CommError(f"device tensors need CUDA, which cannot be used here: {reason}")
    return _core.cuda_runtime(ordinal)


def stream_handle(ordinal: int, named: Iterable[int] = ()) -> int:
    """The stream on which the caller's tensors are made and read, as a native handle.

    `named`: what the tensors themselves say (`__cuda_array_interface__`); else it is torch's current stream.
    """
    streams = set(named)
    if len(streams) > 1:
        raise InvalidArgument(
            f"the tensors name {len(streams)} different CUDA streams ({sorted(streams)}); make one wait for the others "
            "and name that one"
        )
    if streams:
        return streams.pop()
    if torch.cuda.is_initialized():
        return int(torch.cuda.current_stream(ordinal).cuda_stream)
    return _LEGACY_STREAM


def nccl_candidates() -> list[str]:
    """Files of NCCL that Python packages have installed: the loader does not look there."""
    found: list[str] = []
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found += [str(Path(str(f.locate())).resolve()) for f in files if f.name == "libnccl.so.2"]
    return found


class _Dtype:
    """Only a name: what stands for a dtype where there is no torch on the device."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class DeviceArray:
    """An array in device memory, for whoever reads `__cuda_array_interface__`.

    What loaders and `stream()` are given where this torch has no CUDA. `dtype.name` is the sender's name of the dtype;
    dtypes that NumPy does not have are typed as raw bytes of their size.
    """

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: str, itemsize: int, stream: int, owner: object
    ) -> None:
        self.shape = shape
        self.dtype = _Dtype(dtype)
        self.itemsize = itemsize
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": _TYPESTRS.get(dtype, f"|V{itemsize}"),
            "data": (address, False),
            "strides": None,
            "version": 3,
            "stream": stream or _LEGACY_STREAM,
        }

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        count = self.itemsize
        for n in self.shape:
            count *= n
        return count


class _Raw:
    """Bytes in device memory, as torch wants to be told of them."""

    def __init__(self, address: int, nbytes: int, stream: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
            "stream": stream or _LEGACY_STREAM,
        }


def torch_bytes(address: int, nbytes: int, ordinal: int, stream: int, owner: object) -> torch.Tensor:
    """A uint8 tensor over device memory that somebody else owns."""
    return torch.as_tensor(_Raw(address, nbytes, stream, owner), device=f"cuda:{ordinal}")
