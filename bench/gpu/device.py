"""The device as the benchmark uses it: all that needs torch.cuda is here, and a second implementation over the double.

`Driver` speaks to libcuda itself (ctypes), so copies, pinned memory, clocks and free memory are the same code on a real
device and on the double of libcuda. What differs is who owns tensors: `TorchDevice` has torch's, `DoubleDevice` has
arrays in the double's memory (torch has no CUDA there), and torch's part of a measurement then runs on CPU tensors.

All work is on `stream`, which is the caller's stream for fastsync too: torch's current one, or the double's own.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Union

import torch

from bench.gpu.pattern import Pattern
from bench.workloads import TensorSpec

DOUBLE = "double: not a measurement"


class DriverError(RuntimeError):
    """A call of libcuda failed; the message has the function and what the driver calls the error."""


def is_double() -> bool:
    return bool(os.environ.get("FASTSYNC_CUDA_PATH"))


class Driver:
    """libcuda, in the primary context of one device, current on the thread that made this."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._cuda = ctypes.CDLL(os.environ.get("FASTSYNC_CUDA_PATH") or "libcuda.so.1")
        self("cuInit", 0)
        self._device = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(self._device), ordinal)
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self("cuCtxSetCurrent", context)
        self.stream = 0

    def __call__(self, function: str, *arguments: Any) -> None:
        result = getattr(self._cuda, function)(*arguments)
        if result != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(result, ctypes.byref(text))
            raise DriverError(f"{function} failed: {(text.value or b'unknown error').decode()} ({result})")

    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        self("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode()

    def driver_version(self) -> str:
        number = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def count(self) -> int:
        number = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device, as the driver sees it: of all processes, with contexts and all."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self("cuMemFree_v2", ctypes.c_uint64(address))

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory as a uint8 tensor; kept until the process ends."""
        address = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes), 0)
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address.value or 0), dtype=torch.uint8)

    def copy(self, into: int, out_of: int, nbytes: int) -> None:
        """Queues a copy between device addresses."""
        self("cuMemcpyDtoDAsync_v2", *map(ctypes.c_uint64, (into, out_of)), ctypes.c_size_t(nbytes), self._stream())

    def copy_in(self, into: int, host: torch.Tensor) -> None:
        """Queues a copy to the device."""
        self("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(into), ctypes.c_void_p(host.data_ptr()),
             ctypes.c_size_t(host.numel()), self._stream())  # fmt: skip

    def copy_out(self, host: torch.Tensor, out_of: int) -> None:
        """Queues a copy from the device."""
        self("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host.data_ptr()), ctypes.c_uint64(out_of),
             ctypes.c_size_t(host.numel()), self._stream())  # fmt: skip

    def synchronize(self) -> None:
        self("cuStreamSynchronize", self._stream())

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.stream)


class HostModel:
    """Tensors in ordinary host memory."""

    device = "cpu"

    def __init__(self, specs: Sequence[TensorSpec], pattern: Pattern) -> None:
        self.specs = specs
        self.pattern = pattern
        self.tensors = [torch.zeros(spec.shape, dtype=torch.bfloat16, device=self.device) for spec in specs]
        self.flats = [t.view(-1).view(torch.uint8) for t in self.tensors]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def named(self) -> dict[str, Any]:
        """What fastsync is given."""
        return {spec.name: tensor for spec, tensor in zip(self.specs, self.tensors)}

    def addresses(self) -> list[int]:
        return [t.data_ptr() for t in self.tensors]

    def fill(self, round_number: int) -> None:
        self.pattern.fill(self.flats, round_number)

    def wrong_bytes(self, round_number: int) -> int:
        return self.pattern.wrong_bytes(self.flats, round_number)


class TorchModel(HostModel):
    """Tensors in torch's device memory, each with its own allocation, as a model has them."""

    def __init__(self, specs: Sequence[TensorSpec], pattern: Pattern, device: str) -> None:
        self.device = device
        super().__init__(specs, pattern)


class _DoubleArray:
    """A tensor in the double's memory, for whoever reads __cuda_array_interface__."""

    class _Dtype:
        name = "bfloat16"

    dtype = _Dtype()

    def __init__(self, driver: Driver, spec: TensorSpec) -> None:
        self.address = driver.allocate(spec.nbytes)
        self.__cuda_array_interface__ = {
            "shape": spec.shape,
            "typestr": "|V2",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": driver.stream,
        }


class DoubleModel(HostModel):
    """Tensors in the double's memory, filled and compared through a pinned copy on the host."""

    def __init__(self, specs: Sequence[TensorSpec], pattern: Pattern, driver: Driver) -> None:
        self.specs = specs
        self.pattern = pattern
        self.driver = driver
        self.arrays = [_DoubleArray(driver, spec) for spec in specs]
        arena = driver.pinned(self.nbytes)
        self.flats = list(torch.split(arena, [spec.nbytes for spec in specs]))

    def named(self) -> dict[str, Any]:
        return {spec.name: array for spec, array in zip(self.specs, self.arrays)}

    def addresses(self) -> list[int]:
        return [array.address for array in self.arrays]

    def fill(self, round_number: int) -> None:
        super().fill(round_number)
        for flat, array in zip(self.flats, self.arrays):
            self.driver.copy_in(array.address, flat)
        self.driver.synchronize()

    def wrong_bytes(self, round_number: int) -> int:
        for flat, array in zip(self.flats, self.arrays):
            flat.zero_()
            self.driver.copy_out(flat, array.address)
        self.driver.synchronize()
        return super().wrong_bytes(round_number)


class TorchDevice(Driver):
    """A real device, with torch's allocator and current stream."""

    is_double = False

    def __init__(self, ordinal: int, table_bytes: int) -> None:
        torch.cuda.set_device(ordinal)
        torch.cuda.init()  # makes the primary context, which Driver then finds
        super().__init__(ordinal)
        self.torch_device = f"cuda:{ordinal}"
        self.stream = int(torch.cuda.current_stream().cuda_stream)
        self.pattern = Pattern(self.torch_device, table_bytes)

    def model(self, specs: Sequence[TensorSpec]) -> HostModel:
        """Tensors for fastsync."""
        return TorchModel(specs, self.pattern, self.torch_device)

    def torch_model(self, specs: Sequence[TensorSpec]) -> HostModel:
        """Tensors for what is written in torch."""
        return self.model(specs)

    def host_model(self, specs: Sequence[TensorSpec]) -> HostModel:
        return HostModel(specs, Pattern("cpu", self.pattern.piece_bytes * 2))

    def reserved_bytes(self) -> int:
        """What torch's allocator holds of the device."""
        return int(torch.cuda.memory_reserved(self.ordinal))

    def release_cached(self) -> None:
        """Gives back what torch's allocator holds and nobody uses."""
        torch.cuda.empty_cache()

    def synchronize_torch(self) -> None:
        """Waits for everything on the device, as the engines do that are compared with."""
        torch.cuda.synchronize(self.ordinal)

    def side_stream(self) -> Any:
        """A new stream of torch's, to be entered by on_stream()."""
        return torch.cuda.Stream(self.ordinal)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.ordinal)

    def on_stream(self, stream: Any) -> Any:
        """A context in which torch works on that stream."""
        return torch.cuda.stream(stream)

    def torch_version(self) -> str:
        return f"{torch.__version__}, CUDA {torch.version.cuda}"

    def nccl_version(self) -> str | None:
        """Of torch's own NCCL."""
        try:
            return ".".join(map(str, torch.cuda.nccl.version()))
        except (AttributeError, RuntimeError):
            return None


class _NoStream:
    """Stands for a stream where torch has none: everything is done when a call returns."""

    def wait_stream(self, _other: Any) -> None: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...


class DoubleDevice(Driver):
    """The double of libcuda. Nothing measured on it says anything about a device."""

    is_double = True

    def __init__(self, ordinal: int, table_bytes: int) -> None:
        super().__init__(ordinal)
        self.torch_device = "cpu"
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), 1)
        self.stream = stream.value or 0
        self.pattern = Pattern("cpu", table_bytes)

    def model(self, specs: Sequence[TensorSpec]) -> HostModel:
        return DoubleModel(specs, self.pattern, self)

    def torch_model(self, specs: Sequence[TensorSpec]) -> HostModel:
        return HostModel(specs, self.pattern)

    def host_model(self, specs: Sequence[TensorSpec]) -> HostModel:
        return HostModel(specs, self.pattern)

    def reserved_bytes(self) -> int:
        return 0

    def release_cached(self) -> None: ...

    def synchronize_torch(self) -> None: ...

    def side_stream(self) -> Any:
        return _NoStream()

    def current_stream(self) -> Any:
        return _NoStream()

    def on_stream(self, stream: Any) -> Any:
        return stream

    def torch_version(self) -> str:
        return f"{torch.__version__}, no CUDA"

    def nccl_version(self) -> str | None:
        return None


Device = Union[TorchDevice, DoubleDevice]


def open_device(ordinal: int, table_bytes: int) -> Device:
    """The device of this run: real, or the double that FASTSYNC_CUDA_PATH names."""
    return DoubleDevice(ordinal, table_bytes) if is_double() else TorchDevice(ordinal, table_bytes)


def unavailable_reason() -> str | None:
    """Why nothing can be measured here."""
    if is_double() or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return f"torch {torch.__version__} finds no CUDA device"


def seconds_of(work: Callable[[], object], finish: Callable[[], None], passes: int) -> float:
    """Time of one pass, `passes` of them being queued behind each other and waited for together."""
    work()
    finish()
    begin = time.perf_counter()
    for _ in range(passes):
        work()
    finish()
    return (time.perf_counter() - begin) / passes
