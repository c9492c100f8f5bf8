"""Describes tensors to the core: where their bytes are and what they mean, or why they cannot be synced.

Plain CPU torch tensors are described in C++ (TensorTable). What comes here is the rest: lazily conjugated or negated
views, torch's bare dtypes, NumPy arrays, anything with DLPack or an array interface, and everything to be refused.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from . import _core
from .errors import InvalidArgument

__all__ = ["Description", "describe", "dtype_from_name", "is_generator", "snapshot"]


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
    examples = [torch.empty((n, n), device="cpu") for n in (1, 2, 3)]
    examples += [torch.nn.Parameter(examples[1]), examples[2][1:]]
    with contextlib.suppress(AttributeError):  # a torch that does not say: refreshing a plan is then slower
        _core.learn_layout(examples, [t._cdata for t in examples], [t.untyped_storage()._cdata for t in examples])
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


_configure_core()


def _refuse(rank: int, name: str, why: str) -> InvalidArgument:
    shown = name if len(name) <= 200 else name[:200] + "..."
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
    if type(t) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(t, torch.nn.Parameter):
        functional = getattr(torch, "_is_functional_tensor", None)
        if functional is not None and functional(t):
            raise _refuse(rank, name, "is a functional tensor without bytes of its own")
    try:
        address = t.data_ptr()
        strides = t.stride()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise _refuse(rank, name, f"({type(t).__name__}) gives no access to its bytes: {error}") from None
    if address == 0 and t.numel() > 0:
        raise _refuse(rank, name, f"({type(t).__name__}) has no memory of its own; materialise it first")
    is_complex = t.is_complex()
    conj, neg = t.is_conj(), t.is_neg()
    if neg and not destination and not (is_complex or t.is_floating_point()):
        return _describe_torch(t.resolve_neg(), name, rank, destination)  # no sign bit to flip on the way
    if destination and (conj or neg):
        raise _refuse(
            rank,
            name,
            "is a lazily conjugated or negated view; a destination must own its bytes (.resolve_conj().resolve_neg())",
        )
    itemsize = t.element_size()
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
    obj: Any, interface: Mapping[str, Any], name: str, rank: int, destination: bool, *, on_device: bool = False
) -> Description:
    typestr = str(interface["typestr"])
    order, kind = typestr[:1], typestr[1:]
    size = int(kind[1:]) if kind[1:].isdigit() else 0
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
    if dtype is None:
        raise _refuse(rank, name, f"has array dtype '{typestr}', which torch does not have")
    data = interface.get("data")
    shape = tuple(int(n) for n in interface["shape"])
    if data is None:
        raise _refuse(rank, name, "exposes its array interface without a data pointer")
    address, read_only = data
    if destination and read_only:
        raise _refuse(rank, name, "is read-only; a destination is written to: pass a writable copy")
    strides = interface.get("strides")
    byte_strides = tuple(int(s) for s in strides) if strides is not None else None
    if any(n < 0 for n in shape) or (byte_strides is not None and len(byte_strides) != len(shape)):
        raise _refuse(rank, name, f"has a malformed array interface: shape {shape}, strides {byte_strides}")
    if not address and 0 not in shape:
        raise _refuse(rank, name, f"has a malformed array interface: a null address for shape {shape}")
    if byte_strides is not None and _row_major(shape, byte_strides, size):
        byte_strides = None
    device, stream = -1, None
    if on_device:
        named = interface.get("stream")
        if named == 0:
            raise _refuse(rank, name, "names stream 0 in its array interface, which the interface forbids; 1 is the default")
        stream = None if named is None else int(named)
        if 0 not in shape:
            device = _core.cuda_device_of(int(address))
            if device < 0:
                why = _core.cuda_unavailable_reason() or "CUDA does not know that address"
                raise _refuse(rank, name, f"says that it is in device memory at {int(address):#x}: {why}")
    return Description(
        dtype, shape, byte_strides, size, int(address), False, False, kind[:1] == "c", obj, device, stream
    )


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
    if isinstance(obj, torch.Tensor):
        return _describe_torch(obj, name, rank, destination)
    on_device = getattr(obj, "__cuda_array_interface__", None)
    if isinstance(on_device, Mapping):
        return _describe_array(obj, on_device, name, rank, destination, on_device=True)
    if isinstance(obj, (bool, int, float, complex, str, bytes, list, tuple, dict, type(None))):
        raise _refuse(rank, name, f"is a {type(obj).__name__}, not a tensor; pass a torch tensor or an array")
    interface = getattr(obj, "__array_interface__", None)
    if isinstance(interface, Mapping):
        return _describe_array(obj, interface, name, rank, destination)
    if hasattr(obj, "__dlpack__"):
        device = getattr(obj, "__dlpack_device__", None)
        if device is not None and int(device()[0]) not in (1, 2, 3):
            raise _refuse(
                rank,
                name,
                f"is on a DLPack device of type {int(device()[0])}; the transports of this version carry CPU and CUDA "
                "memory (see fastsync.transports())",
            )
        try:
            imported = torch.from_dlpack(obj)
        except (RuntimeError, TypeError, BufferError, ValueError, AttributeError) as error:
            raise _refuse(rank, name, f"({type(obj).__name__}) could not be taken through DLPack: {error}") from None
        return _describe_torch(imported, name, rank, destination)
    raise _refuse(
        rank,
        name,
        f"is a {type(obj).__name__}, not a tensor: torch tensors, and objects with DLPack or an array interface, are",
    )


def is_generator(params: object) -> bool:
    """Whether `params` can be walked only once (a generator or another iterator)."""
    return isinstance(params, Iterator)


def snapshot(params: object, rank: int) -> tuple[list[Any], list[Any]]:
    """Names and tensors of a module, mapping or sequence of pairs, read once.

    A module stands for its `state_dict(keep_vars=True)`: parameters, persistent buffers and every tied name.
    """
    if isinstance(params, torch.nn.Module):
        state = params.state_dict(keep_vars=True)
        return list(state.keys()), list(state.values())
    if type(params) is dict:
        return list(params.keys()), list(params.values())
    if isinstance(params, Mapping):
        items = list(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        items = list(params)
    else:
        raise InvalidArgument(
            f"rank {rank}: params is a {type(params).__name__}; pass an nn.Module, a mapping of name to tensor, or an "
            "iterable of (name, tensor) pairs",
            rank,
        )
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
