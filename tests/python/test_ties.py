"""Tied names and overlapping views: every name arrives; destinations share bytes only as the source's do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.markers import each_mode, each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, good_sync, refused, session
from support.tensors import assert_same, clone_exact, poisoned, poisoned_like, random_tensor, untouched

Params = dict[str, torch.Tensor]


def same(base: torch.Tensor) -> Params:
    return {"emb": base, "mid": torch.ones(3), "head": base}


def transposed(base: torch.Tensor) -> Params:
    return {"emb": base, "head": base.t()}


def overlapping(base: torch.Tensor) -> Params:
    return {"low": base[:20], "high": base[10:]}


def reshaped(base: torch.Tensor) -> Params:
    return {"flat": base.view(-1), "matrix": base, "row": base[3]}


def parameters(base: torch.Tensor) -> Params:
    shared = torch.nn.Parameter(base, requires_grad=False)
    return {"emb": shared, "head": shared}


TIES: dict[str, Callable[[torch.Tensor], Params]] = {
    "same": same,
    "transposed": transposed,
    "overlapping": overlapping,
    "reshaped": reshaped,
    "parameters": parameters,
}


@pytest.mark.parametrize("tie", TIES)
@each_transport
@each_mode
@spmd(2)
def test_every_tied_name_carries_the_new_values_in_every_sync(rank: Rank, transport: str, mode: str, tie: str) -> None:
    base = random_tensor((32, 24), torch.float32, 1)
    sent = TIES[tie](base)
    with session(transport=transport, bucket_bytes=1024) as sync:
        for step in range(3):
            base.copy_(random_tensor((32, 24), torch.float32, step))
            expected = {name: clone_exact(tensor) for name, tensor in sent.items()}
            exchange(rank, sent, expected, sync=sync, mode=mode)


@pytest.mark.parametrize("tie", TIES)
@each_transport
@spmd(2)
def test_destinations_may_be_tied_as_the_source_is(rank: Rank, transport: str, tie: str) -> None:
    base = random_tensor((32, 24), torch.float32, 1)
    sent = TIES[tie](base)
    landing = torch.full((32, 24), -1.0)
    with session(transport=transport, bucket_bytes=1024) as sync:
        for step in range(3):
            base.copy_(random_tensor((32, 24), torch.float32, step))
            if rank.index == 0:
                sync.broadcast(sent)
            else:
                into = TIES[tie](landing)
                sync.receive(into=into)
                assert_same(into, {name: clone_exact(tensor) for name, tensor in sent.items()})


@pytest.mark.parametrize("tie", TIES)
@spmd(2)
def test_tied_source_into_separate_destinations(rank: Rank, tie: str) -> None:
    base = random_tensor((32, 24), torch.float32, 1)
    exchange(rank, TIES[tie](base), bucket_bytes=512)


@each_transport
@spmd(3)
def test_destinations_that_share_bytes_where_the_sources_do_not_are_refused(rank: Rank, transport: str) -> None:
    sent = {"emb": torch.ones(4, 4), "x": torch.ones(2), "head": torch.ones(4, 4)}
    into = poisoned_like(sent)
    if rank.index == 2:
        into["head"] = into["emb"]
    own = ("InvalidArgument", "ManifestMismatch")
    refused(rank, sent, into, blame=2, names="head", own=own, transport=transport)


@spmd(2)
def test_destinations_that_overlap_differently_from_the_sources_are_refused(rank: Rank) -> None:
    base = random_tensor((40, 8), torch.float32, 1)
    sent = {"low": base[:20], "high": base[10:30]}
    landing = poisoned((40, 8), torch.float32)
    into = {"low": landing[:20], "high": landing[11:31]}
    own = ("InvalidArgument", "ManifestMismatch")
    refused(rank, sent, into, blame=1, names="high", own=own)


@spmd(2)
def test_destinations_tied_in_another_layout_are_refused(rank: Rank) -> None:
    base = random_tensor((8, 8), torch.float32, 1)
    sent = {"emb": base, "head": base}
    landing = poisoned((8, 8), torch.float32)
    into = {"emb": landing, "head": landing.t()}
    own = ("InvalidArgument", "ManifestMismatch")
    refused(rank, sent, into, blame=1, names="head", own=own)


@spmd(2)
def test_destinations_that_become_tied_later_are_refused_then(rank: Rank) -> None:
    sent = {"emb": torch.ones(64), "head": torch.zeros(64)}
    with session() as sync:
        into = poisoned_like(sent)
        for _ in range(2):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
        shared = poisoned((64,), torch.float32)
        with raises("InvalidArgument", "ManifestMismatch", mentions=["head"]):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into={"emb": shared, "head": shared})
        assert untouched({"shared": shared})
        good_sync(rank, sync)


@spmd(2)
def test_source_that_is_no_longer_tied_refuses_tied_destinations(rank: Rank) -> None:
    base = torch.ones(64)
    landing = poisoned((64,), torch.float32)
    into = {"emb": landing, "head": landing}
    with session() as sync:
        tied = {"emb": base, "head": base}
        for _ in range(2):
            sync.broadcast(tied) if rank.index == 0 else sync.receive(into=into)
        landing.view(torch.uint8).fill_(0xA5)
        split = {"emb": base, "head": base.clone()}
        with raises("InvalidArgument", "ManifestMismatch", mentions=["head"]):
            sync.broadcast(split) if rank.index == 0 else sync.receive(into=into)
        assert rank.index == 0 or untouched({"landing": landing})
        good_sync(rank, sync)


@each_transport
@spmd(2)
def test_neighbours_in_one_storage_share_no_byte_and_are_fine(rank: Rank, transport: str) -> None:
    landing = torch.full((8, 10), -1.0)
    sent = {
        "even": random_tensor((8, 5), torch.float32, 1),
        "odd": random_tensor((8, 5), torch.float32, 2),
    }
    into = {"even": landing[:, ::2], "odd": landing[:, 1::2]}
    for _ in range(2):
        exchange(rank, sent, into=into, transport=transport)
        exchange(rank, sent, into={"even": landing[:4].view(8, 5), "odd": landing[4:].view(8, 5)}, transport=transport)


@spmd(2)
def test_tied_destinations_are_refused_when_the_source_is_a_generator(rank: Rank) -> None:
    base = torch.ones(64)
    landing = torch.zeros(64)
    into = {"emb": landing, "head": landing}
    with session() as sync:
        for _ in range(2):
            with raises("InvalidArgument", "ManifestMismatch", "PeerFailed", mentions=["head"]):
                if rank.index == 0:
                    sync.broadcast((name, base) for name in ("emb", "head"))
                else:
                    sync.receive(into=into)
        good_sync(rank, sync)


@spmd(2)
def test_empty_tensors_at_one_address_share_nothing(rank: Rank) -> None:
    empty = torch.empty(0)
    exchange(rank, {"a": torch.empty(0), "b": torch.empty(0)}, into={"a": empty, "b": empty})


LAZY_PAIRS: dict[str, Callable[[torch.Tensor], Params]] = {
    "conj": lambda z: {"a": z, "b": z.conj()},
    "neg": lambda z: {"a": z, "b": torch._neg_view(z)},
    "conj_and_neg": lambda z: {"a": z.conj(), "b": torch._neg_view(z)},
    "part": lambda z: {"a": z.imag, "b": z.conj().imag},
    "whole_and_part": lambda z: {"a": z.conj(), "b": z.imag},
}


@pytest.mark.parametrize("pair", LAZY_PAIRS)
@each_transport
@spmd(2)
def test_names_that_read_shared_memory_differently_are_not_tied(rank: Rank, transport: str, pair: str) -> None:
    base = random_tensor((6,), torch.complex64, 1)
    sent = LAZY_PAIRS[pair](base)
    exchange(rank, sent, {name: clone_exact(tensor) for name, tensor in sent.items()}, transport=transport)
    landing = poisoned((6,), torch.complex64)
    into = {"a": landing, "b": landing}
    if pair == "part":
        into = {"a": landing.imag, "b": landing.imag}
    elif pair == "whole_and_part":
        into = {"a": landing, "b": landing.imag}
    refused(rank, sent, into, blame=1, names="'b'", transport=transport, watch={"landing": landing})


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, torch._neg_view], ids=["conj", "neg"])
@spmd(2)
def test_names_that_read_shared_memory_alike_are_tied(rank: Rank, lazy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    base = random_tensor((6,), torch.complex64, 1)
    sent = {"a": lazy(base), "b": lazy(base)}
    landing = torch.zeros(6, dtype=torch.complex64)
    with session() as sync:
        for _ in range(2):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into={"a": landing, "b": landing})
        assert rank.index == 0 or torch.equal(landing, lazy(base))


@spmd(2)
def test_tie_that_becomes_lazy_on_one_side_is_refused_then(rank: Rank) -> None:
    base = random_tensor((6,), torch.complex64, 1)
    landing = poisoned((6,), torch.complex64)
    into = {"a": landing, "b": landing}
    with session() as sync:
        sent = {"a": base, "b": base}
        for _ in range(2):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
        sent = {"a": base, "b": base.conj()}
        landing.view(torch.uint8).fill_(0xA5)
        with raises("InvalidArgument", "ManifestMismatch", rank=1, mentions=["'b'"]):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
        assert rank.index == 0 or untouched({"landing": landing})
        good_sync(rank, sync)
