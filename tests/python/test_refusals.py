"""What cannot be sent or written is refused by name, on every rank, before a byte of any destination changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastsync
from support.markers import each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import good_sync, refused, session
from support.tensors import poisoned, poisoned_like, random_tensor, untouched


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)


def dtensor() -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(2, 3)


def resized(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The tensor, after its storage was given another size behind its back."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def batched() -> torch.Tensor:
    """A tensor of a vmap that is over: it has no storage."""
    seen: list[torch.Tensor] = []

    def look(item: torch.Tensor) -> torch.Tensor:
        seen.append(item)
        return item

    torch.vmap(look)(torch.ones(2, 3))
    return seen[0]


class Refusing(torch.Tensor):
    """A subclass that lets no function at it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise KeyError("no function here")


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": quantised,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested_jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "dtensor": dtensor,
    "fake": fake,
    "uninitialised": lambda: torch.nn.LazyLinear(3).weight,
    "none": lambda: None,
    "float": lambda: 1.5,
    "list": lambda: [1.0, 2.0],
    "text": lambda: "weights",
    "class": lambda: torch.Tensor,
    "zeros": lambda: torch._efficientzerotensor((2, 3)),
    "functional": lambda: torch._to_functional_tensor(torch.ones(2, 3)),
    "batched": batched,
    "emptied": lambda: resized(torch.ones(2, 3), 0),
    "emptied_view": lambda: resized(torch.ones(4, 3)[2:], 0),
    "shrunk": lambda: resized(torch.ones(2, 3), 23),
    "shrunk_view": lambda: resized(torch.ones(4, 3)[2:], 24),
    "shrunk_strided": lambda: resized(torch.ones(2, 6)[:, ::2], 40),
    "raising": lambda: torch.ones(2, 3).as_subclass(Refusing),
    "many_dims": lambda: torch.ones([1] * 65),
    "many_dims_strided": lambda: torch.ones(2, 3).t().reshape([1] * 66 + [3, 2]).transpose(66, 67),
    "huge": lambda: torch.ones(1).expand(2**40, 2**21),
}
WORDS = {
    "meta": "meta",
    "sparse_coo": "sparse",
    "sparse_csr": "sparse",
    "quantised": "quant",
    "nested": "nested",
    "nested_jagged": "nested",
    "dtensor": "DTensor",
    "none": "None",
    "float": "float",
    "list": "list",
    "text": "str",
    "class": "class",
    "functional": "functional",
    "emptied": "no memory",
    "shrunk": "23 bytes",
    "raising": "KeyError",
    "many_dims": "65 dimensions",
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
@each_transport
@spmd(2)
def test_unsupported_source_is_refused_by_name(rank: Rank, transport: str, kind: str) -> None:
    odd = UNSUPPORTED[kind]()
    sent = {"first": torch.ones(4), "the.odd.one": odd, "last": torch.ones(2)}
    into = {"first": poisoned((4,), torch.float32), "the.odd.one": torch.zeros(2, 3), "last": torch.zeros(2)}
    refused(rank, sent, into, blame=0, names="the.odd.one", transport=transport)


@pytest.mark.parametrize("kind", UNSUPPORTED)
@spmd(3)
def test_unsupported_destination_is_refused_by_name(rank: Rank, kind: str) -> None:
    odd = UNSUPPORTED[kind]()
    sent = {"first": torch.ones(4), "the.odd.one": torch.ones(2, 3), "last": torch.ones(2)}
    into: dict[str, Any] = poisoned_like(sent)
    if rank.index == 1:
        into["the.odd.one"] = odd
    plain = {name: tensor for name, tensor in into.items() if name != "the.odd.one"}
    refused(rank, sent, into, blame=1, names="the.odd.one", watch=plain)


@pytest.mark.parametrize("kind", UNSUPPORTED)
@spmd(2)
def test_unsupported_item_of_a_generator_is_refused_by_name(rank: Rank, kind: str) -> None:
    odd = UNSUPPORTED[kind]()
    with session() as sync:
        for _ in range(2):
            with raises("InvalidArgument" if rank.index == 0 else "ManifestMismatch", rank=0, mentions=["the.odd.one"]):
                if rank.index == 0:
                    sync.broadcast(iter([("first", torch.ones(4)), ("the.odd.one", odd)]))
                else:
                    sync.receive(load=lambda batch: None)
        good_sync(rank, sync)


@spmd(2)
def test_cause_of_a_refusal_is_what_the_tensor_raised(rank: Rank) -> None:
    if rank.index == 0:
        with session() as sync, raises("InvalidArgument", rank=0, mentions=["odd", "no function here"]) as caught:
            sync.broadcast({"odd": torch.ones(3).as_subclass(Refusing)})
        assert isinstance(caught.error.__cause__, KeyError)
    else:
        with session() as sync, raises("ManifestMismatch", rank=0):
            sync.receive(load=lambda batch: None)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base,
    "end": lambda base: base[60:],
    "strided": lambda base: base[::3],
    "transposed": lambda base: base.view(25, 4).t(),
}


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("left", [0, 16, 396])
@pytest.mark.parametrize("view", VIEWS)
@spmd(2)
def test_storage_that_shrinks_between_two_syncs_is_refused_then(rank: Rank, view: str, left: int, side: str) -> None:
    base = torch.full((100,), float(rank.index))  # not poisoned: what NumPy has seen cannot be resized
    params = {"first": poisoned((8,), torch.float32), "shrinks": VIEWS[view](base)}
    blame = 0 if side == "source" else 1
    with session() as sync:
        for _ in range(2):
            sync.broadcast(params) if rank.index == 0 else sync.receive(into=params)
        if rank.index == blame:
            resized(base, left)
        if rank.index == 0:
            params["first"].fill_(1)
        for _ in range(2):
            with raises(
                "InvalidArgument" if rank.index == blame else "ManifestMismatch", rank=blame, mentions=["shrinks"]
            ):
                sync.broadcast(params) if rank.index == 0 else sync.receive(into=params)
        assert rank.index == 0 or untouched({"first": params["first"]})
        if rank.index == blame:
            resized(base, 400)
        if rank.index == 0:
            base.copy_(torch.arange(100.0))
        sync.broadcast(params) if rank.index == 0 else sync.receive(into=params)
        assert torch.equal(params["shrinks"], VIEWS[view](torch.arange(100.0)))


@pytest.mark.parametrize("kind", WORDS)
@spmd(2)
def test_refusal_says_what_is_wrong_with_the_tensor(rank: Rank, kind: str) -> None:
    odd = UNSUPPORTED[kind]()
    with session() as sync, raises("InvalidArgument", "ManifestMismatch", mentions=[WORDS[kind]]):
        sync.broadcast({"odd": odd}) if rank.index == 0 else sync.receive(into={})


@spmd(2)
def test_dtensor_refusal_says_to_gather_first(rank: Rank) -> None:
    odd = dtensor()
    with session() as sync, raises("InvalidArgument", "ManifestMismatch", mentions=["gather", "full_tensor"]):
        sync.broadcast({"sharded": odd}) if rank.index == 0 else sync.receive(into={})


DESTINATIONS: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.zeros(1, 3).expand(2, 3),
    "overlapping": lambda: torch.zeros(4).as_strided((2, 3), (1, 1)),
    "zero_stride": lambda: torch.zeros(1).expand(2, 3),
    "conj": lambda: torch.zeros(2, 3, dtype=torch.complex64).conj(),
    "neg": lambda: torch._neg_view(torch.zeros(2, 3)),
}


@pytest.mark.parametrize("kind", DESTINATIONS)
@each_transport
@spmd(3)
def test_destination_that_cannot_be_written_plainly_is_refused(rank: Rank, transport: str, kind: str) -> None:
    odd = DESTINATIONS[kind]()
    sent = {"first": torch.ones(4), "the.odd.one": torch.ones(2, 3, dtype=odd.dtype), "last": torch.ones(2)}
    into = poisoned_like(sent)
    if rank.index == 2:
        into["the.odd.one"] = odd
    refused(rank, sent, into, blame=2, names="the.odd.one", transport=transport)


@each_transport
@spmd(3)
def test_shape_mismatch_names_rank_tensor_and_both_shapes(rank: Rank, transport: str) -> None:
    sent = {"a": torch.ones(8), "b": torch.ones(4, 6)}
    into = poisoned_like(sent)
    if rank.index == 1:
        into["b"] = poisoned((6, 4), torch.float32)
    refused(rank, sent, into, blame=1, names="'b'", own=("ManifestMismatch",), transport=transport)
    with session(transport=transport) as sync:
        with raises("ManifestMismatch", rank=1, mentions=["4, 6", "6, 4"]):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)


@each_transport
@spmd(3)
def test_dtype_mismatch_names_rank_tensor_and_both_dtypes(rank: Rank, transport: str) -> None:
    sent = {"a": torch.ones(8), "lora.X": torch.ones(4, 6)}
    into = poisoned_like(sent)
    if rank.index == 2:
        into["lora.X"] = poisoned((4, 6), torch.bfloat16)
    refused(rank, sent, into, blame=2, names="lora.X", own=("ManifestMismatch",), transport=transport)
    with session(transport=transport) as sync:
        with raises("ManifestMismatch", rank=2, mentions=["float32", "bfloat16", "lora.X"]):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)


@pytest.mark.parametrize(
    ("sent_shape", "into_shape", "sent_dtype", "into_dtype"),
    [
        ((8,), (4,), torch.float32, torch.float32),
        ((4,), (8,), torch.float32, torch.float32),
        ((4,), (4,), torch.float32, torch.int32),
        ((4,), (2,), torch.float32, torch.float64),
        ((), (1,), torch.float32, torch.float32),
        ((1,), (), torch.float32, torch.float32),
        ((2, 3), (6,), torch.float32, torch.float32),
        ((0, 4), (0, 5), torch.float32, torch.float32),
        ((4,), (4,), torch.float8_e4m3fn, torch.float8_e4m3fnuz),
        ((4,), (4,), torch.uint8, torch.bool),
    ],
)
@each_transport
@spmd(2)
def test_any_difference_in_shape_or_dtype_is_a_mismatch_also_when_not_strict(
    rank: Rank,
    transport: str,
    sent_shape: tuple[int, ...],
    into_shape: tuple[int, ...],
    sent_dtype: torch.dtype,
    into_dtype: torch.dtype,
) -> None:
    sent = {"same": torch.ones(3), "differs": random_tensor(sent_shape, sent_dtype, 1)}
    for strict in (True, False):
        into = {"same": poisoned((3,), torch.float32), "differs": poisoned(into_shape, into_dtype)}
        own = ("ManifestMismatch",)
        refused(rank, sent, into, blame=1, names="differs", own=own, transport=transport, strict=strict)


@each_transport
@pytest.mark.parametrize(("sent", "expected"), [(10, 9), (10, 11), (1, 0), (0, 1)])
@spmd(2)
def test_different_counts_fail_on_both_ranks(rank: Rank, transport: str, sent: int, expected: int) -> None:
    source = {f"t{i}": torch.ones(4) for i in range(sent)}
    into = poisoned_like({f"t{i}": torch.ones(4) for i in range(expected)})
    odd = f"t{min(sent, expected)}"
    refused(rank, source, into, blame=1, names=odd, own=("ManifestMismatch",), transport=transport)


@spmd(3)
def test_refusal_in_a_later_sync_of_a_known_plan_touches_nothing(rank: Rank) -> None:
    sent = {f"t{i}": torch.full((100,), float(i)) for i in range(10)}
    with session(bucket_bytes=512) as sync:
        into = poisoned_like(sent)
        for _ in range(2):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
        into = poisoned_like(sent)
        if rank.index == 2:
            into["t7"] = torch.zeros(99)
        with raises("ManifestMismatch", rank=2, mentions=["t7"]):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
        assert rank.index != 1 or untouched(into)
        assert sync.version == 2 and not sync.dirty
        good_sync(rank, sync)


@spmd(2)
def test_source_refusal_in_a_later_sync_of_a_known_plan(rank: Rank) -> None:
    sent: dict[str, Any] = {f"t{i}": torch.full((100,), float(i)) for i in range(10)}
    with session() as sync:
        into = poisoned_like(sent)
        for _ in range(2):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
        into = poisoned_like(sent)
        sent["t7"] = torch.empty(100, device="meta")
        kind = "InvalidArgument" if rank.index == 0 else "ManifestMismatch"
        with raises(kind, mentions=["t7"]):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
        assert rank.index == 0 or untouched(into)
        good_sync(rank, sync)


@spmd(2)
def test_loader_ranks_learn_of_another_ranks_mismatch_before_they_are_called(rank: Rank) -> None:
    sent = {"a": torch.ones(4)}
    with session() as sync:
        if rank.index == 0:
            with raises("InvalidArgument", mentions=["bad"]):
                sync.broadcast(sent | {"bad": torch.empty(3, device="meta")})
        else:
            calls: list[int] = []
            with raises("ManifestMismatch", rank=0, mentions=["bad"]):
                sync.receive(load=lambda batch: calls.append(len(batch)))
            assert calls == []
        good_sync(rank, sync)


@spmd(2)
def test_nobody_sends_means_timeout_and_untouched_destinations(rank: Rank) -> None:
    if rank.index == 1:
        into = poisoned_like({"a": torch.ones(100)})
        with raises("SyncTimeout", rank=0) as caught, session(timeout_s=1.0) as sync:
            sync.receive(into=into)
        assert 0.9 <= caught.seconds < 2.0
        assert untouched(into)
    rank.barrier()
    with session() as sync:
        good_sync(rank, sync)


@spmd(2)
def test_refusals_carry_the_rank_attribute_of_a_peer_failure_only(rank: Rank) -> None:
    with session() as sync:
        if rank.index == 0:
            with raises("PeerFailed") as caught:
                sync.broadcast({"a": torch.ones(1)})
            error = caught.error
            assert isinstance(error, fastsync.PeerFailed)
            assert error.rank == 1 and "no room" in error.message
        else:
            with raises("MemoryError", mentions=["no room"]):
                sync.receive(load=_no_room)


def _no_room(batch: object) -> None:
    raise MemoryError("no room")
