"""Bytes travel, never values: every dtype, bit for bit."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from support.markers import each_mode, each_transport
from support.ranks import Rank, spmd
from support.syncing import exchange, session
from support.tensors import all_dtypes, bytes_of, of_bytes, random_tensor

DTYPES = all_dtypes()
EVERY_BYTE = np.arange(256, dtype=np.uint8)


def test_the_list_of_dtypes_has_the_ones_that_have_failed_elsewhere() -> None:
    names = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    assert {"bool", "bfloat16", "int16", "uint16", "uint32", "uint64", "complex32", "complex128"} <= names
    assert {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"} <= names
    newer = {"float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "uint1", "uint7", "int1", "int7"}
    assert newer <= names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@spmd(2)
def test_every_byte_value_of_every_dtype_arrives(rank: Rank, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    params = {
        "row": of_bytes(EVERY_BYTE, dtype, (256 // size,)),
        "matrix": of_bytes(np.tile(EVERY_BYTE, 3 * size)[::-1], dtype, (3, 256)),
        "scalar": of_bytes(EVERY_BYTE[-size:], dtype, ()),
        "none": of_bytes(b"", dtype, (0, 2)),
        "strided": of_bytes(np.tile(EVERY_BYTE, size), dtype, (16, 16)).t()[1:, ::3],
    }
    with session(bucket_bytes=1024) as sync:
        for mode in ("into", "stream", "load", "borrow"):
            exchange(rank, params, sync=sync, mode=mode)


@each_transport
@each_mode
@spmd(2)
def test_all_dtypes_travel_in_one_sync(rank: Rank, transport: str, mode: str) -> None:
    params = {f"{dtype}.{i}": random_tensor((7, 9 + i), dtype, i) for i in (0, 1) for dtype in DTYPES}
    exchange(rank, params, mode=mode, transport=transport, bucket_bytes=700)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@spmd(2)
def test_nan_payloads_infinities_and_signed_zeros_keep_their_bits(rank: Rank, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    mantissa = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}[dtype]
    exponent_bits = (1 << (size * 8 - 1)) - (1 << mantissa)
    sign = 1 << (size * 8 - 1)
    patterns = [0, sign, 1, sign | 1, exponent_bits, sign | exponent_bits]
    patterns += [exponent_bits | 1, sign | exponent_bits | 1, exponent_bits | (1 << (mantissa - 1)), sign - 1]
    patterns += [exponent_bits | payload for payload in range(1, 60)]
    raw = b"".join(pattern.to_bytes(size, "little") for pattern in patterns)
    params = {"patterns": of_bytes(raw, dtype, (len(patterns),))}
    assert math.isnan(params["patterns"][6].item())
    for mode in ("into", "load", "stream"):
        exchange(rank, params, mode=mode)


@spmd(2)
def test_signalling_bfloat16_nan_is_not_quieted(rank: Rank) -> None:
    exchange(rank, {"nan": of_bytes(bytes.fromhex("817f") * 40, torch.bfloat16, (5, 8))})


@spmd(2)
def test_values_at_the_edge_of_precision_are_not_cast(rank: Rank) -> None:
    params = {
        "fp32": torch.tensor([1 + 2**-20, -(1 + 2**-23)], dtype=torch.float32),
        "int64": torch.tensor([2**60 + 1, -(2**63), 2**63 - 1]),
        "fp64": torch.tensor([1 + 2**-52], dtype=torch.float64),
        "bf16": torch.ones(5, dtype=torch.bfloat16),
    }
    exchange(rank, params)
    assert bytes_of(params["fp32"])[:4] == struct.pack("<f", 1 + 2**-20)


@spmd(2)
def test_packed_fp4_keeps_its_packed_shape(rank: Rank) -> None:
    params = {"fp4": of_bytes(np.tile(EVERY_BYTE, 2), torch.float4_e2m1fn_x2, (8, 64))}
    for mode in ("into", "stream"):
        exchange(rank, params, mode=mode)


@each_transport
@spmd(2)
def test_bools_with_odd_bytes_arrive_as_they_are(rank: Rank, transport: str) -> None:
    exchange(rank, {"flags": of_bytes(EVERY_BYTE, torch.bool, (256,))}, transport=transport)


@spmd(2)
def test_same_bytes_after_one_three_and_five_syncs(rank: Rank) -> None:
    params = {f"{dtype}": random_tensor((33,), dtype, 5) for dtype in DTYPES}
    fresh = {f"{dtype}": random_tensor((33,), dtype, 6) for dtype in DTYPES}
    mine = {name: torch.empty_like(tensor, memory_format=torch.contiguous_format) for name, tensor in params.items()}
    with session() as sync:
        for sent in (params, params, params, fresh, fresh):
            exchange(rank, sent, sync=sync, into=mine)
