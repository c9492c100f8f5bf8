"""Describes tensors to the core: where their bytes are and what they mean, or why they cannot be synced.

Plain CPU torch tensors are described in C++ (TensorTable). What comes here is the rest: lazily conjugated or negated
views, torch's bare dtypes, NumPy arrays, anything with DLPack or an array interface, and everything to be refused.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from . import _core
from .errors import InvalidArgument

__all__ = ["Description", "describe", "dtype_from_name", "is_generator", "read_items", "split_items"]


_MAX_DIMS = 64  # as in the core


class Description(NamedTuple):
    """What the core needs to know of one tensor. `keep` must outlive the sync."""

    dtype: str
    shape: tuple[int, ...]
    byte_strides: tuple[int, ...] | None
    itemsize: int
    address: int
    flip_real: bool
    flip_imag: bool
    is_complex: bool
    keep: object
    device: int = -1  # CUDA ordinal; -1: host memory
    stream: int | None = None  # the CUDA stream that the object names itself

    @property
    def layout(self) -> tuple[str, tuple[int, ...], tuple[int, ...] | None, int, int, bool, bool, bool]:
        """What the core's push() and describe() take between the name and the device: dtype to is_complex, in order."""
        return self[:8]


_NUMPY_NAMES = {
    "bool": "bool",
    "bool_": "bool",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
    # ml_dtypes
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e8m0fnu": "float8_e8m0fnu",
}
_TYPESTR_NAMES = {
    "b1": "bool",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
}


# Those whose negative is a flipped sign bit.
_SIGNED = frozenset(
    getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128")
    if hasattr(torch, name)
)


def _all_dtypes() -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            found[str(value).removeprefix("torch.")] = value
    return found


_DTYPES = _all_dtypes()


def dtype_from_name(name: str) -> torch.dtype:
    """The torch dtype of that name; InvalidArgument if this torch has none."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise InvalidArgument(
            f"the source sends dtype '{name}', which torch {torch.__version__} here does not have; "
            "use one torch version, or receive into tensors"
        ) from None


def _configure_core() -> None:
    plain: list[type] = [torch.Tensor, torch.nn.Parameter]
    buffer = getattr(torch.nn, "Buffer", None)
    if isinstance(buffer, type):
        plain.append(buffer)
    _core.configure_torch(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), tuple(plain))
    with contextlib.suppress(AttributeError):  # a torch that does not say: everything is then described here
        _learn_layout()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes warn that they are experimental
        # Those that everybody uses first: where DLPack does not tell two apart, the first is recognised fast.
        for name, dtype in sorted(_DTYPES.items(), key=lambda item: item[0] not in _TYPESTR_NAMES.values()):
            try:
                example = torch.empty((1,), dtype=dtype, device="cpu")
                if example.is_quantized:
                    continue
                _core.learn_dtype(example, name, dtype.itemsize)
            except (RuntimeError, TypeError, NotImplementedError):
                continue  # not to be had on a CPU: described in Python if it ever comes


def _learn_layout() -> None:
    """Shows the core where torch keeps what only its Python API says: dispatch keys, and a storage's memory."""
    plain = [torch.empty((n, n), device="cpu") for n in (1, 2, 3, 40)]
    plain += [torch.nn.Parameter(plain[1]), plain[2][1:], torch.empty(5, dtype=torch.complex64, device="cpu")]
    with torch.inference_mode():
        plain.append(torch.empty(7, device="cpu"))
    for tensor, nbytes in ((plain[0], 0), (plain[2], 12), (plain[3], 16_000)):
        tensor.untyped_storage().resize_(nbytes)
    odd = [torch._neg_view(plain[1]), plain[6].conj(), plain[6].conj().imag]

    def keys(tensor: torch.Tensor) -> int:
        return int(torch._C._dispatch_keys(tensor).raw_repr())

    plain_keys = 0
    for tensor in plain:
        plain_keys |= keys(tensor)
    for name in ("CUDA", "AutogradCUDA", "AutocastCUDA"):
        plain_keys |= int(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr())
    examples = []
    for tensor in plain + odd:
        storage = tensor.untyped_storage()
        examples.append(
            (id(tensor), tensor._cdata, storage._cdata, keys(tensor), storage.data_ptr(), storage.nbytes()),
        )
    if all(keys(tensor) & ~plain_keys for tensor in odd):
        _core.learn_layout(examples, plain_keys)


_configure_core()


def _refuse(rank: int, name: str, why: str) -> InvalidArgument:
    shown = _core.shown_name(name.encode("utf-8", "backslashreplace").decode())  # it may not have been checked yet
    return InvalidArgument(f"rank {rank}: tensor '{shown}' {why}", rank)


def _describe_torch(t: torch.Tensor, name: str, rank: int, destination: bool) -> Description:
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and isinstance(t, dtensor.DTensor):
        raise _refuse(
            rank,
            name,
            "is a DTensor, of which this rank holds a shard; gather it first (.full_tensor(), on every rank of its "
            "mesh), or wrap the local shard yourself with .to_local() and give it a name of its own",
        )
    if t.is_nested:
        raise _refuse(rank, name, "is nested; sync its .values() and .offsets() under names of their own")
    if t.layout is not torch.strided:
        raise _refuse(rank, name, f"has layout {t.layout}; sync its parts, or .to_dense() it")
    if t.is_quantized:
        raise _refuse(rank, name, "is quantised; sync its .int_repr(), scales and zero points under names of their own")
    if t.is_meta:
        raise _refuse(rank, name, "is on the meta device and has no bytes; materialise it first")
    if t.device.type not in ("cpu", "cuda"):
        raise _refuse(
            rank,
            name,
            f"is on {t.device}; the transports of this version carry CPU and CUDA tensors (see "
            "fastsync.transports()): .cpu() it",
        )
    if torch._is_functional_tensor(t):
        raise _refuse(rank, name, "is a functional tensor without bytes of its own")
    try:
        address = t.data_ptr()
        strides = t.stride()
        storage = t.untyped_storage()
        held = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise _refuse(rank, name, f"({type(t).__name__}) gives no access to its bytes: {error}") from error
    itemsize = t.element_size()
    if t.numel() > 0:
        reach = itemsize + sum((n - 1) * s for n, s in zip(t.shape, strides)) * itemsize
        if address == 0 or not held:
            raise _refuse(rank, name, f"({type(t).__name__}) has no memory of its own; materialise it first")
        if address < held.start or address + reach > held.stop:
            raise _refuse(
                rank,
                name,
                f"reaches beyond its storage, which has {len(held)} bytes (was it resized?), of which the tensor needs "
                f"bytes {address - held.start} to {address - held.start + reach}",
            )
    is_complex = t.is_complex()
    conj, neg = t.is_conj(), t.is_neg()
    if destination and (conj or neg):
        raise _refuse(
            rank,
            name,
            "is a lazily conjugated or negated view; a destination must own its bytes (.resolve_conj().resolve_neg())",
        )
    if (conj or neg) and t.dtype not in _SIGNED:
        # no sign bit to flip on the way
        return _describe_torch(t.resolve_conj().resolve_neg(), name, rank, destination)
    return Description(
        str(t.dtype).removeprefix("torch."),
        tuple(t.shape),
        None if t.is_contiguous() else tuple(s * itemsize for s in strides),
        itemsize,
        address,
        neg,
        is_complex and conj != neg,
        is_complex,
        t,
        t.device.index if t.device.type == "cuda" else -1,
    )


def _describe_array(
    obj: Any, face: str, interface: Mapping[str, Any], name: str, rank: int, destination: bool
) -> Description:
    on_device = face == "__cuda_array_interface__"

    def malformed(why: str) -> InvalidArgument:
        return _refuse(rank, name, f"has a malformed {face}: {why}")

    typestr = interface.get("typestr")
    if not isinstance(typestr, str) or len(typestr) < 3:
        raise malformed(f"typestr is {_shown(typestr)}")
    order, kind = typestr[:1], typestr[1:]
    size = int(kind[1:]) if kind[1:].isascii() and kind[1:].isdigit() else 0
    if order == ">" and size > 1:
        raise _refuse(
            rank, name, f"is big-endian ('{typestr}'); convert it: array.astype(array.dtype.newbyteorder('='))"
        )
    dtype_name = getattr(getattr(obj, "dtype", None), "name", None)
    dtype = _NUMPY_NAMES.get(dtype_name) if isinstance(dtype_name, str) else None
    if on_device and dtype is None and isinstance(dtype_name, str) and dtype_name in _DTYPES:
        dtype = dtype_name  # one of ours, of a dtype that NumPy does not have
    if dtype is None:
        dtype = _TYPESTR_NAMES.get(kind)
    if dtype is None or size != _DTYPES[dtype].itemsize:
        raise _refuse(rank, name, f"has array dtype '{typestr}', which torch does not have")
    if interface.get("mask") is not None:
        raise _refuse(rank, name, "is masked, and its mask would be lost; sync its values and its mask apart")
    shape = _numbers(interface.get("shape"))
    if shape is None or any(n < 0 for n in shape):
        raise malformed(f"shape is {_shown(interface.get('shape'))}")
    strides = interface.get("strides")
    byte_strides = None if strides is None else _numbers(strides)
    if strides is not None and (byte_strides is None or len(byte_strides) != len(shape)):
        raise malformed(f"shape is {shape}, strides are {_shown(strides)}")
    empty = 0 in shape
    low, high = 0, 0 if empty else size
    if byte_strides is None:
        high *= math.prod(shape)
    elif not empty:
        steps = [(n - 1) * s for n, s in zip(shape, byte_strides)]
        low, high = sum(s for s in steps if s < 0), size + sum(s for s in steps if s > 0)
    memory = _array_memory(obj, interface, on_device)
    if isinstance(memory, str):
        raise malformed(memory)
    address, read_only, owner = memory
    if destination and read_only:
        raise _refuse(rank, name, "is read-only; a destination is written to: pass a writable copy")
    if owner is not None and (address + low < owner[0] or address + high > owner[0] + owner[1]):
        raise malformed(f"its buffer has {owner[1]} bytes, which shape {shape} and its offset and strides leave")
    if not empty and not 0 < address + low <= address + high < 1 << 62:
        raise malformed(f"address {address:#x} for shape {shape}, strides {byte_strides}")
    if byte_strides is not None and _row_major(shape, byte_strides, size):
        byte_strides = None
    device, stream = -1, None
    if on_device:
        named = interface.get("stream")
        if named is not None and (not isinstance(named, int) or named <= 0):
            raise malformed(f"stream is {_shown(named)}; 1 is the default stream, and 0 is forbidden")
        stream = named
        if not empty:
            device = _core.cuda_device_of(address)
            if device < 0:
                why = _core.cuda_unavailable_reason() or "CUDA does not know that address"
                raise _refuse(rank, name, f"says that it is in device memory at {address:#x}: {why}")
    if not _is_lasting(obj, face, address, high - low, owner is not None and not destination):
        raise _refuse(
            rank,
            name,
            f"gives its {face} from memory that is made anew each time it is asked for and does not last; pass the array itself",
        )
    keep = (obj, interface, None if owner is None else owner[2])
    return Description(dtype, shape, byte_strides, size, address, False, False, kind[:1] == "c", keep, device, stream)


def _shown(value: object) -> str:
    """A foreign value for a message: short, whatever its repr does."""
    return reprlib.repr(value)


def _numbers(value: object) -> tuple[int, ...] | None:
    """A tuple of 64-bit numbers; None where `value` is none."""
    if not isinstance(value, (tuple, list)):
        return None
    try:
        numbers = tuple(int(n.__index__()) for n in value)
    except (AttributeError, TypeError):
        return None
    return numbers if all(-(1 << 63) <= n < 1 << 63 for n in numbers) else None


def _array_memory(
    obj: Any, interface: Mapping[str, Any], on_device: bool
) -> tuple[int, bool, tuple[int, int, memoryview] | None] | str:
    """(address, read-only, (address, bytes, view) of the buffer that it is in, if any); a text saying what is wrong."""
    data = interface.get("data")
    if isinstance(data, tuple):
        if len(data) != 2 or not hasattr(data[0], "__index__") or not 0 <= int(data[0]) < 1 << 64:
            return f"data is {_shown(data)}, not (address, read-only)"
        return int(data[0]), bool(data[1]), None
    if on_device:
        return f"data is {_shown(data)}, not (address, read-only)"
    offset = interface.get("offset", 0)
    if not isinstance(offset, int) or not 0 <= offset < 1 << 63:
        return f"offset is {_shown(offset)}"
    try:  # the protocol: a buffer, or the object itself is one
        view = memoryview(obj if data is None else data)
    except TypeError:
        return f"data is {_shown(data)}, neither (address, read-only) nor a buffer"
    if not view.c_contiguous:
        return "data is a buffer that is not contiguous"
    start = _core.buffer_address(view)
    return start + offset, view.readonly, (start, view.nbytes, view)


def _is_lasting(obj: Any, face: str, address: int, nbytes: int, held: bool) -> bool:
    """False for an object that makes its memory when its interface is asked for, and may have freed it since.

    The array interface owns nothing: its memory must be the object's for as long as that lives. `held`: it is a buffer
    that we hold, which is as good.
    """
    numpy = sys.modules.get("numpy")
    if held or nbytes == 0 or (numpy is not None and type(obj) is numpy.ndarray):
        return True
    # What was freed would be given out again at once: to these, and then to others.
    blockers: list[object] = []
    if face == "__array_interface__" and nbytes <= 1 << 30:
        if numpy is not None:
            blockers.append(numpy.empty(nbytes, numpy.uint8))
        if nbytes <= 1024:
            blockers.append(bytearray(nbytes))
    again = getattr(obj, face)
    memory = _array_memory(obj, again, face != "__array_interface__")
    del blockers
    return not isinstance(memory, str) and memory[0] == address


def _row_major(shape: tuple[int, ...], byte_strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    for n, s in zip(reversed(shape), reversed(byte_strides)):
        if n == 0:
            return True
        if n != 1 and s != expected:
            return False
        expected *= n
    return True


def describe(obj: Any, name: str, rank: int, *, destination: bool) -> Description:
    """Describes anything that is a tensor to us; raises InvalidArgument naming it otherwise."""
    try:
        description = _describe(obj, name, rank, destination)
        if len(description.shape) > _MAX_DIMS:
            raise _refuse(rank, name, f"has {len(description.shape)} dimensions; at most {_MAX_DIMS} are supported")
        return description
    except InvalidArgument:
        raise
    except Exception as error:  # whatever the object's own methods raise
        raise _refuse(
            rank, name, f"({type(obj).__name__}) could not be described; it raised {_raised(error)}"
        ) from error


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _describe(obj: Any, name: str, rank: int, destination: bool) -> Description:
    if isinstance(obj, torch.Tensor):
        return _describe_torch(obj, name, rank, destination)
    if isinstance(obj, type):
        raise _refuse(rank, name, f"is the class {obj.__name__}, not an instance of it")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(obj, numpy.generic):
            if destination:
                raise _refuse(
                    rank, name, f"is a {type(obj).__name__} scalar, which cannot be written to; pass an array"
                )
            obj = numpy.array(obj)  # its own interface is of memory that is gone by the time it is read
        elif "numpy.ma" in sys.modules and isinstance(obj, numpy.ma.MaskedArray):
            raise _refuse(rank, name, "is a MaskedArray, and its mask would be lost; sync .data and .mask apart")
    on_device = getattr(obj, "__cuda_array_interface__", None)
    if isinstance(on_device, Mapping):
        return _describe_array(obj, "__cuda_array_interface__", on_device, name, rank, destination)
    if isinstance(obj, (bool, int, float, complex, str, bytes, list, tuple, dict, type(None))):
        raise _refuse(rank, name, f"is a {type(obj).__name__}, not a tensor; pass a torch tensor or an array")
    interface = getattr(obj, "__array_interface__", None)
    if isinstance(interface, Mapping):
        return _describe_array(obj, "__array_interface__", interface, name, rank, destination)
    if hasattr(obj, "__dlpack__"):
        return _describe_dlpack(obj, name, rank, destination)
    raise _refuse(
        rank,
        name,
        f"is a {type(obj).__name__}, not a tensor: torch tensors, and objects with DLPack or an array interface, are",
    )


class _Export:
    """What torch.from_dlpack() takes `obj` for, with a look at what comes out."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        self.flags = 0

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._obj.__dlpack__(**options)
        self.flags = _core.dlpack_flags(capsule)
        return capsule

    def __dlpack_device__(self) -> Any:
        return self._obj.__dlpack_device__()


def _describe_dlpack(obj: Any, name: str, rank: int, destination: bool) -> Description:
    device = getattr(obj, "__dlpack_device__", None)
    if device is None:
        raise _refuse(rank, name, f"({type(obj).__name__}) has __dlpack__ but no __dlpack_device__")
    kind = int(device()[0])
    if kind not in (1, 2, 3):
        raise _refuse(
            rank,
            name,
            f"is on a DLPack device of type {kind}; the transports of this version carry CPU and CUDA "
            "memory (see fastsync.transports())",
        )
    export = _Export(obj)
    try:
        imported = torch.from_dlpack(export)
        if destination:
            if export.flags & _core.DLPACK_READ_ONLY:
                raise _refuse(rank, name, "is read-only; a destination is written to: pass a writable copy")
            again = torch.from_dlpack(export)
            if export.flags & _core.DLPACK_COPIED or again.data_ptr() != imported.data_ptr():
                raise _refuse(rank, name, "exports a copy through DLPack, and what is written to that would be lost")
    except InvalidArgument:
        raise
    except Exception as error:
        raise _refuse(
            rank, name, f"({type(obj).__name__}) could not be taken through DLPack; it raised {_raised(error)}"
        ) from error
    return _describe_torch(imported, name, rank, destination)


def is_generator(params: object) -> bool:
    """Whether `params` can be walked only once (a generator or another iterator)."""
    return isinstance(params, Iterator)


def read_items(params: object, rank: int) -> tuple[list[Any], list[Any]] | list[Any]:
    """What a module, mapping or sequence of pairs holds, read once: (names, tensors), or items still to be split.

    A module stands for its `state_dict(keep_vars=True)`: parameters, persistent buffers and every tied name. Runs the
    container's own code, which may raise anything; our own InvalidArgument is marked `about_params`.
    """
    if isinstance(params, torch.nn.Module):
        state = params.state_dict(keep_vars=True)
        return list(state.keys()), list(state.values())
    if type(params) is dict:
        return list(params.keys()), list(params.values())
    if isinstance(params, Mapping):
        return list(params.items())
    if isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        return list(params)
    error = InvalidArgument(
        f"rank {rank}: params is a {type(params).__name__}; pass an nn.Module, a mapping of name to tensor, or an "
        "iterable of (name, tensor) pairs",
        rank,
    )
    error.about_params = True  # type: ignore[attr-defined]
    error.refused = True  # type: ignore[attr-defined]
    raise error


def split_items(items: tuple[list[Any], list[Any]] | list[Any], rank: int) -> tuple[list[Any], list[Any]]:
    """Names and tensors of what read_items() returned."""
    if isinstance(items, tuple):
        return items
    names: list[Any] = []
    tensors: list[Any] = []
    for i, item in enumerate(items):
        name, tensor = pair(item, i, rank)
        names.append(name)
        tensors.append(tensor)
    return names, tensors


def pair(item: object, index: int, rank: int) -> tuple[Any, Any]:
    """A (name, tensor) pair, or InvalidArgument saying what came instead."""
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    raise InvalidArgument(
        f"rank {rank}: item number {index} of params is a {type(item).__name__}, not a (name, tensor) pair", rank
    )
