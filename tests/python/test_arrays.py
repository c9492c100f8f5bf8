"""NumPy arrays and anything with an array interface or DLPack are tensors too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.markers import each_transport
from support.ranks import Rank, spmd
from support.syncing import exchange, refused, session
from support.tensors import assert_same, bytes_of, clone_exact, poisoned_like, random_tensor


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
    ],
    ids=str,
)
@spmd(2)
def test_malformed_interface_is_refused_by_name(rank: Rank, replaced: dict[str, Any]) -> None:
    odd = Lying(**replaced)
    refused(rank, {"ok": torch.ones(4), "liar": odd}, {"ok": torch.ones(4)}, blame=0, names="liar")
