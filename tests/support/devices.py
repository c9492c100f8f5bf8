"""Device memory for the tests: on the doubles of the vendors' libraries, or on a real GPU through torch.

A `Machine` makes, writes and reads tensors on one device of this process. It has two implementations, so that a test
is written once:

    DoubleMachine   the double of libcuda, by ctypes; its tensors are `DeviceArray`s (`__cuda_array_interface__`)
    TorchMachine    torch.cuda; its tensors are torch's

A `DevicePool` is a `Pool` whose processes have the doubles in their environment, and that knows what the doubles saw:
after every test their journals must be free of violations. The doubles are looked for in build/cpp, where `make
doubles` puts them, or in the folder that FASTSYNC_TEST_DOUBLES names.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import numpy as np
import torch

from support.ranks import Group, Pool, Rank, Running, Worker
from support.tensors import POISON, bytes_of

REPOSITORY = Path(__file__).resolve().parents[2]
DEVICES = 4  # of a double's machine


# ---------------------------------------------------------------------------------------------------------------------
# Which machine
# ---------------------------------------------------------------------------------------------------------------------


def doubles_folder() -> Path:
    named = os.environ.get("FASTSYNC_TEST_DOUBLES")
    return Path(named) if named else REPOSITORY / "build" / "cpp" / "tests" / "doubles"


def cuda_double() -> Path:
    return doubles_folder() / "libfastsync_fake_cuda.so"


def nccl_double() -> Path:
    return doubles_folder() / "nccl" / "libfastsync_fake_nccl.so"


def doubles_missing_reason() -> str | None:
    """Why the tests on the doubles cannot run here; None if they can."""
    absent = [str(path) for path in (cuda_double(), nccl_double()) if not path.is_file()]
    if not absent:
        return None
    return (
        f"no test doubles of CUDA and NCCL ({', '.join(absent)}); `make doubles` builds them where the CUDA toolkit's "
        "cuda.h is found, and FASTSYNC_TEST_DOUBLES names another folder"
    )


def gpu_missing_reason() -> str | None:
    """Why the tests on a real device cannot run here; None if they can."""
    if os.environ.get("FASTSYNC_TEST_DOUBLES"):
        return "FASTSYNC_TEST_DOUBLES asks for the doubles, not for a GPU"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def environment(rank: int, **settings: object) -> dict[str, str]:
    """What a rank's process needs to work on the doubles. `settings` are variables, None for one that is not set."""
    values: dict[str, object] = {
        "FASTSYNC_CUDA_PATH": cuda_double(),
        "FASTSYNC_NCCL_PATH": nccl_double(),
        "FASTSYNC_ALLOW_FAKE": 1,
        "FASTSYNC_FAKE_RANK": rank,
        "FASTSYNC_FAKE_DEVICES": DEVICES,
        "FASTSYNC_FAKE_MEMORY_MB": 512,
        "FASTSYNC_FAKE_DELAY_US": 100,
        "FASTSYNC_FAKE_SEED": 1,
        "CUDA_VISIBLE_DEVICES": None,
        "NCCL_COMM_BLOCKING": None,
        **settings,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


# ---------------------------------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------------------------------

_TYPESTRS = {
    "bool": "|b1",
    "int8": "|i1",
    "uint8": "|u1",
    "int16": "<i2",
    "float16": "<f2",
    "bfloat16": "|V2",  # NumPy has none: the name says it
    "int32": "<i4",
    "float32": "<f4",
    "int64": "<i8",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
LAYOUTS = ("plain", "element", "shifted", "transposed", "gappy", "reversed")  # of a destination
SOURCE_LAYOUTS = (*LAYOUTS, "expanded")


def itemsize_of(dtype: str) -> int:
    return getattr(torch, dtype).itemsize  # type: ignore[no-any-return]


@dataclass(frozen=True)
class View:
    """A dtype and a shape, and where the elements lie in a storage of their own. Offset and strides are in bytes."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = "plain"
    offset: int = field(init=False)
    strides: tuple[int, ...] = field(init=False)
    storage_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = self.itemsize
        strides: list[int] = []
        step = size * 3 if self.layout == "gappy" else size
        order = range(len(self.shape)) if self.layout == "transposed" else reversed(range(len(self.shape)))
        by_dimension = {}
        for dimension in order:
            by_dimension[dimension] = step
            step *= max(self.shape[dimension], 1)
        strides = [by_dimension[dimension] for dimension in range(len(self.shape))]
        # A device traps a misaligned access, and vectors are of 16 bytes: both kinds of offset are off for those.
        offset = {"element": size, "shifted": 1, "gappy": 3 * size}.get(self.layout, 0)
        if self.layout == "expanded" and strides:
            strides[0] = 0
        if self.layout == "reversed" and strides:
            offset = max(self.shape[0] - 1, 0) * strides[0]
            strides[0] = -strides[0]
        reach = sum(max(n - 1, 0) * stride for n, stride in zip(self.shape, strides) if stride > 0)
        object.__setattr__(self, "strides", tuple(strides))
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "storage_nbytes", offset + reach + size + 5 if self.nbytes else 0)

    @property
    def itemsize(self) -> int:
        return itemsize_of(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)

    def of(self, storage: np.ndarray) -> np.ndarray:
        """The elements in a storage's bytes, as (*shape, itemsize), sharing memory."""
        return np.lib.stride_tricks.as_strided(
            storage[self.offset :], shape=(*self.shape, self.itemsize), strides=(*self.strides, 1)
        )

    def logical(self, storage: np.ndarray) -> bytes:
        """The tensor's value: its elements in row-major order."""
        return self.of(storage).tobytes() if self.nbytes else b""

    def image(self, data: bytes, background: np.ndarray) -> np.ndarray:
        """The storage with `data` in the elements and `background` around them."""
        storage = background.copy()
        if self.nbytes:
            self.of(storage)[...] = np.frombuffer(data, np.uint8).reshape(*self.shape, self.itemsize)
        return storage

    def poisoned(self) -> np.ndarray:
        return np.full(self.storage_nbytes, POISON, np.uint8)

    def random(self, *seed: int) -> np.ndarray:
        """A storage of random bytes: any bit pattern, the same in every process."""
        return np.random.default_rng(seed).integers(0, 256, self.storage_nbytes, dtype=np.uint8)


class _Dtype:
    """Names a dtype as torch does, for arrays of dtypes that NumPy does not have."""

    def __init__(self, name: str) -> None:
        self.name = name


class DeviceArray:
    """A view in a storage of its own in the double's memory. What a framework without torch would pass."""

    def __init__(self, machine: DoubleMachine, view: View, stream: int | None = None) -> None:
        self.view = view
        self.shape = view.shape
        self.dtype = _Dtype(view.dtype)
        self.stream = machine.stream if stream is None else stream
        self._machine = machine
        self.base = machine.allocate(view.storage_nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        plain = self.view.layout in ("plain", "element", "shifted")
        return {
            "shape": self.shape,
            "typestr": _TYPESTRS[self.view.dtype],
            "data": (self.base + self.view.offset if self.base else 0, False),
            "strides": None if plain else self.view.strides,
            "version": 3,
            "stream": self.stream,
        }

    def free(self) -> None:
        """Gives the memory back, in stream order as a framework's allocator does: the stream is waited for first."""
        if self.base:
            self._machine.synchronize(self.stream)
            self._machine.call("cuMemFree_v2", ctypes.c_uint64(self.base))
            self.base = 0

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.free()


class TorchArray:
    """The same in torch's memory: `tensor` is what a test passes on."""

    def __init__(self, machine: TorchMachine, view: View) -> None:
        self.view = view
        self.storage = torch.empty(view.storage_nbytes + 16, dtype=torch.uint8, device=machine.device)
        self.tensor = self.storage[: view.storage_nbytes // view.itemsize * view.itemsize + view.itemsize].view(
            getattr(torch, view.dtype)
        )
        self.tensor = self.tensor.as_strided(
            view.shape, [s // view.itemsize for s in view.strides], view.offset // view.itemsize
        )


Array = Union[DeviceArray, TorchArray]


# ---------------------------------------------------------------------------------------------------------------------
# The two machines
# ---------------------------------------------------------------------------------------------------------------------


class CudaFailed(Exception):
    """A call of the tests' own failed: `code` is the CUresult."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code}")
        self.code = code


class _Staging:
    """A pinned buffer, and the stream whose work used it last; None: nobody's."""

    def __init__(self, machine: DoubleMachine, nbytes: int) -> None:
        address = ctypes.c_void_p()
        machine.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes), 0)
        self.nbytes, self.address = nbytes, address.value or 0
        self.stream: int | None = None


_last_entered: dict[int, DoubleMachine] = {}  # by thread


class DoubleMachine:
    """One device of the double, made current on the thread that asks. Calls of the tests' own are counted with the rest."""

    has_any_alignment = True

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._library = double_library()
        self._staging: list[_Staging] = []
        self._context = ctypes.c_void_p()
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()
        self.stream = self.new_stream()

    def enter(self) -> None:
        _last_entered[threading.get_ident()] = self
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        if self._context and _last_entered.get(threading.get_ident()) is not self:
            self.enter()  # a test may work on two devices
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise CudaFailed(name, code)

    def new_stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)  # does not wait for the default stream
        assert stream.value is not None
        return stream.value

    def synchronize(self, stream: int | None = None) -> None:
        self.call("cuStreamSynchronize", ctypes.c_void_p(self.stream if stream is None else stream))

    def allocate(self, nbytes: int) -> int:
        if nbytes == 0:
            return 0
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def empty(self, view: View, stream: int | None = None) -> DeviceArray:
        return DeviceArray(self, view, stream)

    def argument(self, array: DeviceArray) -> DeviceArray:
        """What is passed to fastsync."""
        return array

    def write(self, array: DeviceArray, storage: np.ndarray, stream: int | None = None) -> None:
        """Queues a copy of these bytes over the whole storage of `array`; the caller need not keep them."""
        if array.view.storage_nbytes:
            self.copy_in(array.base, storage.tobytes(), array.stream if stream is None else stream)

    def copy_in(self, address: int, data: bytes, stream: int) -> None:
        staging = self._free_staging(len(data))
        ctypes.memmove(staging.address, data, len(data))
        self.call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(address),
            ctypes.c_void_p(staging.address),
            ctypes.c_size_t(len(data)),
            ctypes.c_void_p(stream),
        )
        staging.stream = stream

    def copy_out(self, address: int, nbytes: int, stream: int) -> bytes:
        if nbytes == 0:
            return b""
        staging = self._free_staging(nbytes)
        self.call(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(staging.address),
            ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )
        staging.stream = stream
        self.synchronize(stream)
        return ctypes.string_at(staging.address, nbytes)

    def read(self, array: DeviceArray, stream: int | None = None) -> np.ndarray:
        """The storage's bytes as they are when the array's stream gets there."""
        stream = array.stream if stream is None else stream
        return np.frombuffer(self.copy_out(array.base, array.view.storage_nbytes, stream), np.uint8)

    def value(self, tensor: Any) -> bytes:
        """The bytes of a tensor that fastsync handed out, wherever it lies."""
        if isinstance(tensor, torch.Tensor):
            assert tensor.device.type == "cpu"
            return bytes_of(tensor)
        interface = tensor.__cuda_array_interface__
        assert interface["strides"] is None and interface["version"] == 3
        assert interface["stream"] != 0
        nbytes = tensor.itemsize * math.prod(interface["shape"])
        return self.copy_out(interface["data"][0], nbytes, interface["stream"])

    def copy_storage(self, to: DeviceArray, source: DeviceArray) -> None:
        """Queues a copy of the whole storage on the source's stream."""
        self._copy(to.base, source.base, source.view.storage_nbytes, source.stream)

    def queue_copy(self, to: DeviceArray, tensor: Any) -> None:
        """Queues a copy of a plain tensor that fastsync handed out, on the stream that it names."""
        if isinstance(tensor, torch.Tensor):
            self.copy_in(to.base, bytes_of(tensor), to.stream)
        else:
            interface = tensor.__cuda_array_interface__
            self._copy(to.base, interface["data"][0], to.view.nbytes, interface["stream"])

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )

    def is_mine(self, tensor: Any) -> bool:
        return not isinstance(tensor, torch.Tensor)

    def busy(self, seconds: float, stream: int | None = None) -> None:
        """Keeps a stream busy, as a kernel that takes its time."""
        usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)  # not Python: the driver's thread calls it
        self.call(
            "cuLaunchHostFunc",
            ctypes.c_void_p(self.stream if stream is None else stream),
            usleep,
            ctypes.c_void_p(int(seconds * 1e6)),
        )

    def order(self, first: int, then: int) -> None:
        """What is queued on `then` from now on runs behind what `first` holds."""
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), 2)
        self.call("cuEventRecord", event, ctypes.c_void_p(first))
        self.call("cuStreamWaitEvent", ctypes.c_void_p(then), event, 0)
        self.call("cuEventDestroy_v2", event)

    @contextlib.contextmanager
    def current(self, stream: int) -> Iterator[None]:
        """The arrays name their stream themselves."""
        yield

    def reserve(self, count: int, nbytes: int) -> None:
        """Makes staging buffers now, so that the calls that follow are fastsync's alone."""
        self._staging += [_Staging(self, nbytes) for _ in range(count)]

    @property
    def staging_buffers(self) -> int:
        """How many pinned buffers the tests' own copies go through."""
        return len(self._staging)

    def _free_staging(self, nbytes: int) -> _Staging:
        # Whether a stream is empty is what the tests ask: fastsync asks events, so the journal keeps the two apart.
        busy = {staging.stream for staging in self._staging} - {None}
        idle = {stream for stream in busy if self._library.cuStreamQuery(ctypes.c_void_p(stream)) == 0}
        for staging in self._staging:
            if staging.stream in idle:
                staging.stream = None
        for staging in self._staging:
            if staging.stream is None and staging.nbytes >= nbytes:
                return staging
        staging = _Staging(self, max(4096, 1 << (nbytes - 1).bit_length()))
        self._staging.append(staging)
        return staging


class TorchMachine:
    """One CUDA device of torch. Streams are torch's current ones, as they are for fastsync."""

    has_any_alignment = False

    def __init__(self, ordinal: int) -> None:
        torch.cuda.set_device(ordinal)
        self.ordinal = ordinal
        self.device = torch.device("cuda", ordinal)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.stream = torch.cuda.current_stream().cuda_stream

    def enter(self) -> None:
        torch.cuda.set_device(self.ordinal)

    def new_stream(self) -> int:
        stream = torch.cuda.Stream(self.device)
        self._streams[stream.cuda_stream] = stream
        return stream.cuda_stream

    def _of(self, stream: int | None) -> torch.cuda.Stream:
        if stream is None or stream not in self._streams:
            return torch.cuda.current_stream(self.device)
        return self._streams[stream]

    def synchronize(self, stream: int | None = None) -> None:
        self._of(stream).synchronize()

    def empty(self, view: View, stream: int | None = None) -> TorchArray:
        return TorchArray(self, view)

    def argument(self, array: TorchArray) -> torch.Tensor:
        return array.tensor

    def write(self, array: TorchArray, storage: np.ndarray, stream: int | None = None) -> None:
        if array.view.storage_nbytes:
            pinned = torch.from_numpy(storage.copy()).pin_memory()
            with torch.cuda.stream(self._of(stream)):
                array.storage[: array.view.storage_nbytes].copy_(pinned, non_blocking=True)

    def read(self, array: TorchArray, stream: int | None = None) -> np.ndarray:
        with torch.cuda.stream(self._of(stream)):
            return array.storage[: array.view.storage_nbytes].cpu().numpy()

    def value(self, tensor: torch.Tensor) -> bytes:
        return bytes_of(tensor.cpu())

    def copy_storage(self, to: TorchArray, source: TorchArray) -> None:
        to.storage.copy_(source.storage)

    def queue_copy(self, to: TorchArray, tensor: torch.Tensor) -> None:
        to.tensor.copy_(tensor, non_blocking=True)

    def is_mine(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def busy(self, seconds: float, stream: int | None = None) -> None:
        with torch.cuda.stream(self._of(stream)):
            torch.cuda._sleep(int(seconds * 1e9))  # cycles, of about a nanosecond

    def order(self, first: int, then: int) -> None:
        self._of(then).wait_stream(self._of(first))

    @contextlib.contextmanager
    def current(self, stream: int) -> Iterator[None]:
        with torch.cuda.stream(self._of(stream)):
            yield


Machine = Union[DoubleMachine, TorchMachine]
_machines: dict[tuple[str, int], Machine] = {}


def ordinal_of(rank: int, transport: str) -> int:
    """Where a rank's tensors lie: all on one device for ipc, two on each for nccl+ipc, else each on its own."""
    return {"ipc": 0, "nccl+ipc": rank // 2}.get(transport, rank)


def machine_of(kind: str, ordinal: int) -> Machine:
    """This process's `kind` ("double" or "gpu") device, current on this thread."""
    key = (kind, ordinal)
    if key not in _machines:
        _machines[key] = DoubleMachine(ordinal) if kind == "double" else TorchMachine(ordinal)
    _machines[key].enter()
    return _machines[key]


# ---------------------------------------------------------------------------------------------------------------------
# The journals
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def double_library() -> ctypes.CDLL:
    """The copy of the libcuda double that fastsync uses, too."""
    return ctypes.CDLL(os.environ["FASTSYNC_CUDA_PATH"])


@functools.cache
def nccl_library() -> ctypes.CDLL | None:
    path = os.environ.get("FASTSYNC_NCCL_PATH", "")
    try:
        library = ctypes.CDLL(path)
        return library if hasattr(library, "fastsync_fake_nccl_journal") else None
    except OSError:
        return None


@dataclass(frozen=True)
class Journal:
    """What this process's doubles have seen so far. The staging buffers of the tests' own are not among what lives."""

    calls: Mapping[str, int]
    live: Mapping[str, int]
    violations: Sequence[str]

    def calls_since(self, before: Journal) -> dict[str, int]:
        grown = {name: count - before.calls.get(name, 0) for name, count in self.calls.items()}
        return {name: count for name, count in grown.items() if count}


def _read_journal(library: ctypes.CDLL, name: str) -> dict[str, Any]:
    function = getattr(library, name)
    function.restype = ctypes.c_size_t
    size = function(None, ctypes.c_size_t(0)) + 4096
    buffer = ctypes.create_string_buffer(size)
    function(buffer, ctypes.c_size_t(size))
    return json.loads(buffer.value)  # type: ignore[no-any-return]


def journal() -> Journal:
    found = [_read_journal(double_library(), "fastsync_fake_journal")]
    nccl = nccl_library()
    if nccl is not None:
        found.append(_read_journal(nccl, "fastsync_fake_nccl_journal"))
    calls: dict[str, int] = {}
    live: dict[str, int] = {}
    violations: list[str] = []
    for one in found:
        calls.update(one["calls"])
        live.update(one["live"])
        violations += one["violations"]
    for machine in _machines.values():
        if isinstance(machine, DoubleMachine):
            live["pinned"] = live.get("pinned", 0) - machine.staging_buffers
    return Journal(calls, live, violations)


def clear_violations() -> None:
    double_library().fastsync_fake_clear_violations()
    nccl = nccl_library()
    if nccl is not None:
        nccl.fastsync_fake_nccl_clear_violations()


# ---------------------------------------------------------------------------------------------------------------------
# The processes
# ---------------------------------------------------------------------------------------------------------------------


def enter_environment(rank: Rank, values: Mapping[str, str]) -> None:
    """The first thing that a rank's process does: the doubles read their environment at their first call."""
    for name in [name for name in os.environ if name.startswith(("FASTSYNC_", "CUDA_VISIBLE", "NCCL_"))]:
        del os.environ[name]
    os.environ.update(values)


def seen_violations(rank: Rank) -> list[str]:
    """Asked of every process after every test."""
    return list(journal().violations) if _machines else []


def forgive_violations(rank: Rank) -> list[str]:
    """For tests that provoke some: returns them and forgets them."""
    found = list(journal().violations)
    clear_violations()
    return found


class DevicePool(Pool):
    """Rank processes whose environment has the doubles, or (kind "gpu") a real CUDA.

    A setup of `group(setups=...)` may have "device": variables on top of the usual ones, None for one that is unset.
    """

    def __init__(self, kind: str = "double") -> None:
        super().__init__()
        self._kind = kind
        self._entered: set[Worker] = set()
        self._settings: dict[Worker, Mapping[str, object]] = {}

    def device_group(self, size: int, faults: str = "", **settings: object) -> Group:
        """A group of fresh processes with these variables set for all of them, and this fault plan."""
        if faults:
            settings["FASTSYNC_FAKE_FAULTS"] = faults
        return self.group(size, setups=[{"device": settings}] * size)

    def _start(self, method: str, setup: Mapping[str, Any]) -> Worker:
        worker = super()._start(method, setup)
        self._settings[worker] = setup.get("device", {})
        return worker

    def _form(self, workers: Sequence[Worker], make_group: bool) -> Group:
        group = super()._form(workers, make_group)
        if self._kind != "double":
            return group  # the machine's own environment is the right one
        new = [rank for rank, worker in enumerate(workers) if worker not in self._entered]
        for rank in new:
            worker = group.worker(rank)
            self._call(worker, "enter_environment", environment(rank, **self._settings[worker]))
            self._entered.add(worker)
        Running(group, new).results()
        return group

    @staticmethod
    def _call(worker: Worker, name: str, *arguments: Any) -> None:
        folder = str(Path(__file__).resolve().parents[1])
        worker.send(("call", "support.devices", folder, name, pickle.dumps((arguments, {}))))

    def violations(self) -> list[str]:
        """What the doubles of every process that still lives have recorded."""
        if self._kind != "double":
            return []
        found: list[str] = []
        asked = [w for w in (*self._workers, *self._extra) if w in self._entered and w.alive() and not w.busy]
        for worker in asked:
            self._call(worker, "seen_violations")
        deadline = time.monotonic() + 20
        for number, worker in enumerate(asked):
            outcome = worker.reply(number, deadline)
            if outcome.ok:
                found += [f"process {worker.pid}: {text}" for text in outcome.value]
            elif not outcome.died:
                found.append(outcome.describe())
        return found
