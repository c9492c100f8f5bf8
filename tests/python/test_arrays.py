"""NumPy arrays and anything with an array interface or DLPack are tensors too."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch

from support.markers import each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, good_sync, refused, session
from support.tensors import assert_same, bytes_of, clone_exact, poisoned_like, random_tensor, untouched


class ArrayInterfaceOnly:
    """An object whose only face is __array_interface__."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__


class DLPackOnly:
    """An object whose only face is DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


NUMPY_DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@each_transport
@spmd(2)
def test_numpy_arrays_arrive_as_torch_tensors(rank: Rank, transport: str, dtype: str) -> None:
    raw = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 256, 48 * 16, dtype=np.uint8)
    array = raw.view(dtype).reshape(-1, 4)
    params = {"whole": array, "reversed": array[::-1], "fortran": np.asfortranarray(array), "columns": array[:, 1::2]}
    expected = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in params.items()}
    for mode in ("into", "load", "stream"):
        exchange(rank, params, expected, mode=mode, transport=transport, bucket_bytes=512)


@spmd(2)
def test_numpy_scalars_and_empty_arrays_keep_their_shapes(rank: Rank) -> None:
    params = {"zero_dim": np.array(1.5), "empty": np.empty((0, 3), np.int32), "one": np.ones((1, 1), np.float16)}
    expected = {name: torch.from_numpy(value.copy()) for name, value in params.items()}
    exchange(rank, params, expected, mode="stream")
    exchange(rank, params, expected)


@spmd(2)
def test_read_only_numpy_source_is_fine(rank: Rank) -> None:
    array = np.arange(10.0)
    array.flags.writeable = False
    exchange(rank, {"a": array}, {"a": torch.arange(10, dtype=torch.float64)})


@each_transport
@spmd(2)
def test_numpy_destinations_are_written_through_their_strides(rank: Rank, transport: str) -> None:
    sent = {name: random_tensor((6, 8), torch.float32, i) for i, name in enumerate(["c", "f", "rev", "step"])}
    wide = np.full((6, 16), -1.0, np.float32)
    mine = {
        "c": np.zeros((6, 8), np.float32),
        "f": np.zeros((8, 6), np.float32).T,
        "rev": np.zeros((6, 8), np.float32)[::-1, ::-1],
        "step": wide[:, ::2],
    }
    with session(transport=transport) as sync:
        for _ in range(2):
            if rank.index == 0:
                sync.broadcast(sent)
            else:
                sync.receive(into=mine)
                for name, array in mine.items():
                    assert array.tobytes() == bytes_of(sent[name]), name
                assert (wide[:, 1::2] == -1.0).all()


@pytest.mark.parametrize("wrapper", [ArrayInterfaceOnly, DLPackOnly])
@each_transport
@spmd(2)
def test_objects_with_only_an_interface_are_sources_and_destinations(rank: Rank, transport: str, wrapper: type) -> None:
    def wrap(tensor: torch.Tensor) -> Any:
        return wrapper(tensor.numpy() if wrapper is ArrayInterfaceOnly else tensor)

    plain = {
        "matrix": random_tensor((9, 5), torch.float32, 1),
        "transposed": random_tensor((9, 5), torch.float64, 2).t(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty((0, 2)),
        "bytes": random_tensor((77,), torch.uint8, 3),
    }
    expected = {name: clone_exact(tensor) for name, tensor in plain.items()}
    with session(transport=transport, bucket_bytes=256) as sync:
        for _ in range(3):
            mine = poisoned_like(plain)
            if rank.index == 0:
                sync.broadcast({name: wrap(tensor) for name, tensor in plain.items()})
            else:
                sync.receive(into={name: wrap(tensor) for name, tensor in mine.items()})
                assert_same(mine, expected)
        exchange(rank, [(name, wrap(tensor)) for name, tensor in plain.items()], expected, mode="load", sync=sync)


@spmd(2)
def test_interface_objects_may_come_from_a_generator(rank: Rank) -> None:
    plain = {f"t{i}": random_tensor((10 + i,), torch.float32, i) for i in range(20)}
    with session(bucket_bytes=256) as sync:
        for _ in range(3):
            items = ((name, ArrayInterfaceOnly(tensor.clone().numpy())) for name, tensor in plain.items())
            exchange(rank, items, plain, sync=sync, mode="stream")


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">c16"])
@spmd(2)
def test_big_endian_arrays_are_refused_on_either_side(rank: Rank, side: str, dtype: str) -> None:
    array = np.zeros(6, dtype)
    native = {"ok": torch.ones(4), "swapped": torch.from_numpy(np.zeros(6, array.dtype.newbyteorder("=")))}
    odd = {"ok": torch.ones(4), "swapped": array}
    blame = 0 if side == "source" else 1
    sent, into = (odd, native) if side == "source" else (native, odd)
    refused(rank, sent, into, blame=blame, names="swapped")


@pytest.mark.parametrize(
    "array",
    [np.array([None, 1], object), np.array(["a", "b"]), np.zeros(3, "datetime64[s]"), np.zeros(3, [("x", "f4")])],
    ids=["object", "string", "datetime", "record"],
)
@spmd(2)
def test_arrays_that_are_no_numbers_are_refused(rank: Rank, array: np.ndarray) -> None:
    refused(rank, {"ok": torch.ones(4), "odd-one": array}, {"ok": torch.ones(4)}, blame=0, names="odd-one")


@spmd(2)
def test_read_only_numpy_destination_is_refused(rank: Rank) -> None:
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    sent = {"ok": torch.ones(4), "frozen": torch.ones(4)}
    refused(rank, sent, {"ok": torch.zeros(4), "frozen": frozen}, blame=1, names="frozen")
    assert not frozen.any()


@spmd(2)
def test_read_only_interface_destination_is_refused(rank: Rank) -> None:
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    sent = {"ok": torch.ones(4), "frozen": torch.ones(4)}
    refused(rank, sent, {"ok": torch.zeros(4), "frozen": ArrayInterfaceOnly(frozen)}, blame=1, names="frozen")
    assert not frozen.any()


class Lying(ArrayInterfaceOnly):
    """An __array_interface__ with one key replaced."""

    def __init__(self, **replaced: Any) -> None:
        super().__init__(np.zeros((4, 4), np.float32))
        self._replaced = replaced

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {**super().__array_interface__, **self._replaced}


@pytest.mark.parametrize(
    "replaced",
    [
        {"shape": (-1, 4)},
        {"strides": (4,)},
        {"typestr": "<q"},
        {"typestr": 7},
        {"typestr": "<f3"},
        {"data": None},
        {"data": (0, False)},
        {"shape": (2**40, 2**40)},
        {"shape": (2**70,)},
        {"shape": 4},
        {"shape": (1.5,)},
        {"shape": None},
        {"shape": (1,) * 70, "strides": None},
        {"shape": (2, 2), "strides": (2**62, 2**62)},
        {"strides": (2**70, 4)},
        {"strides": ("4", "4")},
        {"typestr": None},
        {"typestr": "<"},
        {"typestr": "<b1"[:2]},
        {"data": ("12", False)},
        {"data": (-1, False)},
        {"data": (2**64, False)},
        {"data": (1,)},
        {"data": 4096},
        {"data": b"too short"},
        {"data": bytearray(64), "offset": 1},
        {"data": bytearray(64), "offset": -1},
        {"data": bytearray(64), "offset": "0"},
        {"data": bytearray(64), "shape": (4,), "strides": (-4,)},
        {"data": bytearray(64), "mask": np.zeros((4, 4), np.bool_)},
    ],
    ids=str,
)
@spmd(2)
def test_malformed_interface_is_refused_by_name(rank: Rank, replaced: dict[str, Any]) -> None:
    odd = Lying(**replaced)
    refused(rank, {"ok": torch.ones(4), "liar": odd}, {"ok": torch.ones(4)}, blame=0, names="liar")


@spmd(2)
def test_interface_over_a_buffer_with_gaps_is_refused_by_name(rank: Rank) -> None:
    odd = Lying(data=memoryview(bytes(128))[::2])
    refused(rank, {"ok": torch.ones(4), "liar": odd}, {"ok": torch.ones(4)}, blame=0, names="liar")


@pytest.mark.parametrize("key", ["typestr", "shape"])
@pytest.mark.parametrize("face", ["__array_interface__", "__cuda_array_interface__"])
@spmd(2)
def test_interface_without_a_key_is_refused_by_name(rank: Rank, face: str, key: str) -> None:
    class Partial:
        pass

    odd = Partial()
    interface = dict(np.zeros(4, np.float32).__array_interface__)
    del interface[key]
    setattr(odd, face, interface)
    refused(rank, {"ok": torch.ones(4), "partial": odd}, {"ok": torch.ones(4)}, blame=0, names="partial")


@pytest.mark.parametrize(
    "replaced", [{"data": None}, {"data": b"1234"}, {"data": (1,)}, {"stream": "1"}, {"stream": 0}]
)
@spmd(2)
def test_malformed_device_interface_is_refused_by_name(rank: Rank, replaced: dict[str, Any]) -> None:
    class Device:
        def __init__(self) -> None:
            fields = {"shape": (4,), "typestr": "|u1", "version": 3, "data": (4096, False)}
            self.__cuda_array_interface__ = {**fields, **replaced}

    refused(rank, {"ok": torch.ones(4), "odd": Device()}, {"ok": torch.ones(4)}, blame=0, names="odd")


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@spmd(2)
def test_numpy_scalars_are_sources(rank: Rank, dtype: str) -> None:
    raw = np.random.default_rng(2).integers(0, 2 if dtype == "bool" else 256, 16 * 20, dtype=np.uint8)
    values = raw.view(dtype)[:20]
    expected = {f"s{i}": torch.from_numpy(np.array(value)) for i, value in enumerate(values)}
    assert all(isinstance(value, np.generic) for value in values)
    with session() as sync:
        for _ in range(3):
            exchange(rank, {f"s{i}": value for i, value in enumerate(values)}, expected, sync=sync)
            exchange(rank, ((f"s{i}", v) for i, v in enumerate(values)), expected, sync=sync, mode="stream")


@spmd(2)
def test_numpy_scalar_destination_is_refused(rank: Rank) -> None:
    sent = {"ok": torch.ones(4), "scalar": torch.tensor(1.0)}
    refused(rank, sent, {"ok": torch.zeros(4), "scalar": np.float32(0)}, blame=1, names="scalar")


class Fleeting:
    """Makes the memory of its interface anew each time it is asked for, and keeps none of it."""

    def __init__(self, nbytes: int, make: Any) -> None:
        self._nbytes = nbytes
        self._make = make

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return dict(self._make(self._nbytes // 4).__array_interface__)


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("nbytes", [4, 400, 4_000, 400_000])
@spmd(2)
def test_memory_that_does_not_last_is_refused(rank: Rank, nbytes: int, side: str) -> None:
    odd = {"ok": torch.ones(4), "fleeting": Fleeting(nbytes, lambda n: np.ones(n, np.float32))}
    good = {"ok": torch.ones(4), "fleeting": torch.ones(nbytes // 4)}
    if side == "source":
        refused(rank, odd, good, blame=0, names="fleeting")
    else:
        refused(rank, good, odd, blame=1, names="fleeting")


class Buffered:
    """An interface whose data is a buffer, as images have it."""

    def __init__(self, data: Any, **fields: Any) -> None:
        self._fields = {"typestr": "|u1", "version": 3, "data": data, **fields}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._fields


class Image:
    """One that makes its bytes when it is asked for them; they belong to what it returns."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"typestr": "<f4", "version": 3, "shape": (500,), "data": np.arange(500, dtype=np.float32).tobytes()}


@each_transport
@spmd(2)
def test_buffers_behind_an_interface_are_sources(rank: Rank, transport: str) -> None:
    memory = bytearray(range(200))
    sent = {
        "bytes": Buffered(b"abcd", shape=(4,)),
        "offset": Buffered(memory, shape=(10,), offset=100),
        "offset_none": Buffered(memory, shape=(3, 2), strides=(50, 1), offset=7),
        "reversed": Buffered(memoryview(memory), shape=(4,), strides=(-2,), offset=6),
        "numpy": Buffered(np.arange(30, dtype=np.float32), typestr="<f4", shape=(5, 6)),
        "image": Image(),
        "empty": Buffered(b"", shape=(0, 3)),
    }
    numbers = torch.arange(200, dtype=torch.uint8)
    expected = {
        "bytes": torch.tensor(list(b"abcd"), dtype=torch.uint8),
        "offset": numbers[100:110].clone(),
        "offset_none": numbers[7:].as_strided((3, 2), (50, 1)).clone(),
        "reversed": torch.tensor([6, 4, 2, 0], dtype=torch.uint8),
        "numpy": torch.arange(30.0).view(5, 6),
        "image": torch.arange(500.0),
        "empty": torch.empty((0, 3), dtype=torch.uint8),
    }
    with session(transport=transport) as sync:
        for _ in range(3):
            exchange(rank, sent, expected, sync=sync)
            exchange(rank, iter(sent.items()), expected, sync=sync, mode="stream")


@spmd(2)
def test_writable_buffer_behind_an_interface_is_a_destination(rank: Rank) -> None:
    memory = bytearray(b"x" * 20)
    into = {"a": Buffered(memory, shape=(4,), offset=8)}
    with session() as sync:
        for text in (b"abcd", b"efgh"):
            sent = {"a": torch.tensor(list(text), dtype=torch.uint8)}
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
            assert rank.index == 0 or memory == b"x" * 8 + text + b"x" * 8


@pytest.mark.parametrize("kind", ["bytes", "image"])
@spmd(2)
def test_buffer_that_cannot_be_written_to_is_refused_as_a_destination(rank: Rank, kind: str) -> None:
    odd = Buffered(b"abcd", shape=(4,)) if kind == "bytes" else Image()
    like = torch.ones(4, dtype=torch.uint8) if kind == "bytes" else torch.ones(500)
    sent = {"ok": torch.ones(4), "frozen": like}
    refused(rank, sent, {"ok": torch.zeros(4), "frozen": odd}, blame=1, names="frozen")


@pytest.mark.parametrize("side", ["source", "destination"])
@spmd(2)
def test_masked_array_is_refused_on_either_side(rank: Rank, side: str) -> None:
    masked = np.ma.MaskedArray(np.zeros(4, np.float32), mask=[0, 1, 0, 1])
    good, odd = {"ok": torch.ones(4), "m": torch.ones(4)}, {"ok": torch.ones(4), "m": masked}
    if side == "source":
        refused(rank, odd, good, blame=0, names="MaskedArray")
    else:
        refused(rank, good, odd, blame=1, names="MaskedArray")


class Exporting:
    """DLPack of an array, with whatever a test does to it on the way."""

    def __init__(self, array: np.ndarray, *, versions: bool = True, error: Exception | None = None, copies: str = "no"):
        self._array = array
        self._versions = versions
        self._error = error
        self._copies = copies

    def __dlpack__(self, **options: Any) -> Any:
        if self._error is not None:
            raise self._error
        if not self._versions and options:
            raise TypeError("no such options")
        if self._copies == "said":
            options["copy"] = True
        array = self._array.copy() if self._copies == "unsaid" else self._array
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize("backing", ["array", "broadcast", "memmap"])
@spmd(2)
def test_read_only_memory_behind_dlpack_is_refused_as_a_destination(rank: Rank, backing: str, versions: bool) -> None:
    if backing == "array":
        frozen = np.zeros(4, np.float32)
        frozen.flags.writeable = False
    elif backing == "broadcast":
        frozen = np.broadcast_to(np.float32(0), (4,))
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(16))
            file.flush()
            frozen = np.memmap(file.name, dtype=np.float32, mode="r", shape=(4,))
    sent = {"ok": torch.ones(4), "frozen": torch.ones(4)}
    odd = Exporting(frozen, versions=versions)
    refused(rank, sent, {"ok": torch.zeros(4), "frozen": odd}, blame=1, names="frozen")
    assert not frozen.any()


@spmd(2)
def test_read_only_memory_behind_dlpack_is_a_source(rank: Rank) -> None:
    frozen = np.arange(4, dtype=np.float32)
    frozen.flags.writeable = False
    exchange(rank, {"a": Exporting(frozen)}, {"a": torch.arange(4.0)})


@pytest.mark.parametrize("copies", ["said", "unsaid"])
@spmd(2)
def test_destination_that_exports_a_copy_is_refused(rank: Rank, copies: str) -> None:
    sent = {"ok": torch.ones(4), "copied": torch.ones(4)}
    odd = Exporting(np.zeros(4, np.float32), copies=copies)
    refused(rank, sent, {"ok": torch.zeros(4), "copied": odd}, blame=1, names="copied")
    exchange(rank, {"copied": odd}, {"copied": torch.zeros(4)})


class Raising:
    """Raises where it is looked at."""

    def __init__(self, face: str, error: Exception) -> None:
        self._face = face
        self._error = error

    def __getattr__(self, name: str) -> Any:
        if name == self._face:
            raise self._error
        raise AttributeError(name)


@pytest.mark.parametrize("error", [KeyError("boom"), NotImplementedError("boom"), ZeroDivisionError("boom")], ids=repr)
@pytest.mark.parametrize("where", ["__array_interface__", "__cuda_array_interface__", "__dlpack__", "export"])
@spmd(2)
def test_what_an_object_raises_becomes_a_refusal_with_it_as_the_cause(rank: Rank, where: str, error: Exception) -> None:
    odd = Exporting(np.zeros(4), error=error) if where == "export" else Raising(where, error)
    into = poisoned_like({"ok": torch.ones(4)})
    with session() as sync:
        if rank.index == 0:
            with raises("InvalidArgument", rank=0, mentions=["odd-one", type(error).__name__, "boom"]) as caught:
                sync.broadcast({"ok": torch.ones(4), "odd-one": odd})
            assert type(caught.error.__cause__) is type(error)
        else:
            with raises("ManifestMismatch", rank=0, mentions=["odd-one"]):
                sync.receive(into=into)
            assert untouched(into)
        good_sync(rank, sync)
