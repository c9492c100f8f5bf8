"""Strides, offsets and lazy bits: the logical values travel, from any layout into any layout."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from support.markers import each_mode, each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, session
from support.tensors import assert_same, assert_tensor, bytes_of, clone_exact, random_tensor, storage_bytes


def base(shape: tuple[int, ...] = (8, 12), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random_tensor(shape, dtype, 42)


SOURCES: dict[str, Callable[[], torch.Tensor]] = {
    "every_second": lambda: torch.arange(8.0)[::2],
    "transposed": lambda: base().t(),
    "columns": lambda: base()[:, 1:3],
    "flipped": lambda: base().flip(0),
    "channels_last": lambda: base((4, 3, 5, 6)).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: base((2, 3, 4, 5, 6)).to(memory_format=torch.channels_last_3d),
    "overlapping_as_strided": lambda: base((40,)).as_strided((5, 6), (3, 1), 2),
    "offset": lambda: base((100,))[37:],
    "narrow_of_large": lambda: torch.arange(2.0**20)[1000:1007],
    "expanded": lambda: base((1, 3)).expand(1000, 3),
    "expanded_scalar": lambda: torch.tensor(7.25).expand(5, 6),
    "zero_stride_inside": lambda: base((5, 1, 4)).expand(5, 6, 4),
    "permuted": lambda: base((3, 4, 5, 6)).permute(2, 0, 3, 1),
    "diagonal": lambda: base((9, 9)).diagonal(),
    "unfolded": lambda: base((20,)).unfold(0, 5, 2),
    "size_one_dims": lambda: base((6, 1, 7)).transpose(0, 1)[:, ::2],
    "scalar_view": lambda: base()[3, 4],
    "empty_slice": lambda: base()[:, 4:4],
    "odd_offset_bytes": lambda: base((64,), torch.uint8)[3:50:5],
    "bf16_odd": lambda: base((31,), torch.bfloat16)[1::3],
    "complex_real": lambda: torch.view_as_real(base((6,), torch.complex64))[:, 1],
    "conj": lambda: base((5, 4), torch.complex64).conj(),
    "conj_transposed": lambda: base((5, 4), torch.complex128).mH,
    "conj_strided": lambda: base((9, 4), torch.complex64)[::2].conj(),
    "neg": lambda: base((5, 4), torch.complex64).conj().imag,
    "neg_view": lambda: torch._neg_view(base((5, 4))),
    "neg_int_view": lambda: torch._neg_view(torch.arange(-6, 6, dtype=torch.int32)),
    "neg_complex_view": lambda: torch._neg_view(base((5,), torch.complex64)),
    "conj_and_neg": lambda: torch._neg_view(base((5,), torch.complex64).conj()),
    "parameter": lambda: torch.nn.Parameter(base()),
    "parameter_transposed": lambda: torch.nn.Parameter(base()).t(),
    "requires_grad": lambda: base().clone().requires_grad_(),
    "non_leaf": lambda: base().clone().requires_grad_() * 2,
    "many_dims": lambda: base((2,) * 12).permute(*reversed(range(12))),
}


def want(tensor: torch.Tensor) -> torch.Tensor:
    """The logical values, made by torch where a lazy bit is set and by plain indexing elsewhere."""
    return clone_exact(tensor)


@pytest.mark.parametrize("name", SOURCES)
@spmd(2)
def test_view_sends_its_logical_values(rank: Rank, name: str) -> None:
    params = {"before": torch.ones(3), name: SOURCES[name](), "after": torch.ones(5, dtype=torch.uint8)}
    expected = {key: want(tensor) for key, tensor in params.items()}
    for bucket_bytes in (64, 512, None):
        for mode in ("into", "load", "stream"):
            exchange(rank, params, expected, bucket_bytes=bucket_bytes, mode=mode)


@each_transport
@each_mode
@spmd(2)
def test_all_views_travel_in_one_sync(rank: Rank, transport: str, mode: str) -> None:
    params = {name: make() for name, make in SOURCES.items()}
    expected = {name: want(tensor) for name, tensor in params.items()}
    exchange(rank, params, expected, mode=mode, transport=transport, bucket_bytes=1024)


@spmd(2)
def test_lazy_bits_are_resolved_for_every_floating_and_complex_dtype(rank: Rank) -> None:
    params, expected = {}, {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128):
        # No zeros: torch's own kernels do not agree with each other about the sign of a negated complex zero.
        values = torch.arange(1, 17).to(dtype)
        if dtype.is_complex:
            values = torch.complex(torch.arange(1.0, 17.0), torch.arange(-20.0, -4.0)).to(dtype)
        params[f"{dtype}.neg"] = torch._neg_view(values)
        expected[f"{dtype}.neg"] = -values
        if dtype.is_complex:
            params[f"{dtype}.conj"] = values.conj()
            expected[f"{dtype}.conj"] = values.conj().resolve_conj()
            assert params[f"{dtype}.conj"].is_conj()
    exchange(rank, params, expected, bucket_bytes=256)


def destinations(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Writable tensors of one shape in many layouts, each over its own poisoned storage."""
    rows, columns = shape

    def storage(count: int) -> torch.Tensor:
        out = torch.empty(count, dtype=dtype)
        storage_bytes(out)[:] = 0xA5
        return out

    return {
        "contiguous": storage(rows * columns).view(rows, columns),
        "transposed": storage(rows * columns).view(columns, rows).t(),
        "every_second": storage(rows * columns * 2).view(rows, columns, 2)[:, :, 1],
        "padded_rows": storage(rows * (columns + 5)).view(rows, columns + 5)[:, 2 : 2 + columns],
        "offset": storage(rows * columns + 7)[7:].view(rows, columns),
        "parameter": torch.nn.Parameter(storage(rows * columns).view(rows, columns), requires_grad=False),
    }


@each_transport
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
@spmd(2)
def test_strided_destinations_are_written_through_and_nothing_beside_them(
    rank: Rank, transport: str, dtype: torch.dtype
) -> None:
    shape = (12, 20)
    sent = {name: random_tensor(shape, dtype, i) for i, name in enumerate(destinations(shape, dtype))}
    with session(transport=transport, bucket_bytes=512) as sync:
        for _ in range(2):
            mine = destinations(shape, dtype)
            if rank.index == 0:
                sync.broadcast(sent)
                continue
            sync.receive(into=mine)
            for name, tensor in mine.items():
                assert_tensor(tensor, sent[name], name)
                raw = storage_bytes(tensor.detach()).copy()
                outside = raw.size - tensor.numel() * tensor.itemsize
                tensor.detach().copy_(torch.zeros((), dtype=dtype))
                left = storage_bytes(tensor.detach())
                assert int((left != 0).sum()) == outside, f"{name}: bytes beside the view were written"
                assert int((left == 0xA5).sum()) == outside


@spmd(2)
def test_module_parameters_that_require_grad_are_written_in_place(rank: Rank) -> None:
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    sent = {"w": random_tensor((6, 4), torch.float32, 3)}
    exchange(rank, sent, into={"w": parameter})
    if rank.index == 1:
        assert parameter.requires_grad and parameter.grad is None and parameter.is_leaf


@spmd(2)
def test_only_the_bytes_of_a_view_travel(rank: Rank) -> None:
    large = torch.zeros(25 * 2**20)
    params = {"view": large[1000:1010]}
    report = exchange(rank, params, {"view": torch.zeros(10)})
    assert report.nbytes == 40


@spmd(2)
def test_expanded_view_sends_its_logical_bytes(rank: Rank) -> None:
    report = exchange(rank, {"e": torch.tensor([[1.0, 2.0, 3.0]]).expand(1000, 3)})
    assert report.nbytes == 12_000


@each_transport
@spmd(2)
def test_temporaries_may_die_and_be_reused_during_the_sync(rank: Rank, transport: str) -> None:
    def fresh() -> dict[str, torch.Tensor]:
        return {f"t{i}": random_tensor((50 + i, 20), torch.float32, i).t() for i in range(200)}

    expected = {name: clone_exact(tensor) for name, tensor in fresh().items()}
    with session(transport=transport, bucket_bytes=8192) as sync:
        for _ in range(3):
            if rank.index == 0:
                sync.broadcast(((name, tensor.contiguous()) for name, tensor in fresh().items()))
                gc.collect()
                junk = [torch.full((50 + i, 20), -1.0) for i in range(200)]
                assert len(junk) == 200
            else:
                got = {name: clone_exact(tensor) for name, tensor in sync.stream()}
                assert_same(got, expected)


OVERSIZE: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: base((128, 256)).t(),
    "requires_grad": lambda: base((128, 256)).requires_grad_(),
    "expanded": lambda: base((1, 256)).expand(128, 256),
    "zero_stride": lambda: torch.tensor(2.5).expand(128, 256),
    "bf16": lambda: base((128, 257), torch.bfloat16),
    "parameter": lambda: torch.nn.Parameter(base((128, 256))),
    "conj": lambda: base((128, 100), torch.complex64).conj(),
    "channels_last": lambda: base((8, 16, 16, 16)).to(memory_format=torch.channels_last),
}


@each_transport
@pytest.mark.parametrize("name", OVERSIZE)
@spmd(2)
def test_oversize_tensor_gets_the_same_treatment_as_a_small_one(rank: Rank, transport: str, name: str) -> None:
    tensor = OVERSIZE[name]()
    expected = {"a": torch.ones(3), "big": want(tensor), "z": torch.ones(2)}
    params = {"a": torch.ones(3), "big": tensor, "z": torch.ones(2)}
    for mode in ("into", "load", "stream", "borrow"):
        for bucket_bytes in (1024, None):
            exchange(rank, params, expected, mode=mode, bucket_bytes=bucket_bytes, transport=transport)


@spmd(2)
def test_strided_source_meets_strided_destination(rank: Rank) -> None:
    sent = {"w": random_tensor((30, 50), torch.float32, 1).t()}
    storage = torch.full((30 * 50 * 3,), -1.0)
    mine = {"w": storage.as_strided((50, 30), (3, 150))}
    exchange(rank, sent, into=mine, bucket_bytes=300)
    if rank.index == 1:
        assert bytes_of(mine["w"]) == bytes_of(sent["w"])
        assert int((storage == -1.0).sum()) >= 30 * 50 * 2 - 2


@spmd(2)
def test_layout_may_change_between_syncs_of_one_plan(rank: Rank) -> None:
    values = random_tensor((16, 16), torch.float32, 2)
    layouts = [values, values.t().contiguous().t(), values.flip(1).flip(1), values.repeat(2, 1)[:16]]
    with session() as sync:
        for layout in (*layouts, values.clone()):
            exchange(rank, {"w": layout}, {"w": values}, sync=sync)
        for layout in layouts:
            mine = torch.empty(16, 32)[:, ::2] if layout is layouts[1] else torch.empty(16, 16)
            exchange(rank, {"w": values}, sync=sync, into={"w": mine})


LAZY: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "neg": lambda: (base((6,)), torch._neg_view(base((6,)))),
    "neg_int": lambda: (torch.arange(6), torch._neg_view(torch.arange(6))),
    "neg_bf16": lambda: (torch.ones(6, dtype=torch.bfloat16), torch._neg_view(torch.ones(6, dtype=torch.bfloat16))),
    "neg_complex": lambda: (base((6,), torch.complex64), torch._neg_view(base((6,), torch.complex64))),
    "conj": lambda: (base((6,), torch.complex64), base((6,), torch.complex64).conj()),
    "imaginary_part": lambda: (base((6,), torch.complex64).imag, base((6,), torch.complex64).conj().imag),
    "strided": lambda: (base((6, 2))[:, 1], torch._neg_view(base((6, 2)))[:, 1]),
}


@pytest.mark.parametrize("kind", LAZY)
@each_mode
@spmd(2)
def test_lazy_bits_that_come_and_go_under_one_object_are_seen(rank: Rank, mode: str, kind: str) -> None:
    plain, lazy = LAZY[kind]()
    assert lazy.is_neg() or lazy.is_conj()
    tensor = torch.empty_like(plain)
    with session() as sync:
        for value in (plain, plain, lazy, lazy, plain, lazy):
            tensor.data = value
            exchange(rank, {"w": tensor}, {"w": want(value)}, sync=sync, mode=mode)


@spmd(2)
def test_lazy_bit_over_the_very_same_memory_is_seen(rank: Rank) -> None:
    memory = torch.arange(1.0, 9.0)
    tensor = torch.empty(0)
    with session() as sync:
        for value in (memory, torch._neg_view(memory), memory, torch._neg_view(memory)):
            tensor.data = value
            exchange(rank, {"w": tensor}, {"w": want(value)}, sync=sync)


@pytest.mark.parametrize("kind", LAZY)
@spmd(2)
def test_destination_that_becomes_lazy_is_refused_then(rank: Rank, kind: str) -> None:
    plain, lazy = LAZY[kind]()
    mine = torch.empty_like(plain)
    mine.data = plain.clone()
    sent = {"w": clone_exact(plain)}
    with session() as sync:
        for _ in range(2):
            exchange(rank, sent, sync=sync, into={"w": mine})
        mine.data = lazy
        with raises("InvalidArgument" if rank.index == 1 else "ManifestMismatch", rank=1, mentions=["'w'", "lazily"]):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into={"w": mine})
        mine.data = plain.clone()
        exchange(rank, sent, sync=sync, into={"w": mine})


@spmd(2)
def test_copy_on_write_destination_does_not_write_to_its_twin(rank: Rank) -> None:
    twin = torch.zeros(5)
    mine = torch._lazy_clone(twin)
    exchange(rank, {"w": torch.ones(5)}, into={"w": mine})
    assert not twin.any()
