"""How a loader's tensors are made from a bucket, on buckets that are made here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastsync import _delivery
from fastsync._delivery import Cuts, HostSpace, deliver
from support.tensors import assert_tensor, clone_exact, random_tensor

ALIGNMENT = 256
Tensors = dict[str, torch.Tensor]


def mixed(seed: int = 0) -> Tensors:
    """Neighbours of other dtypes, odd lengths, no elements, no dimensions; one larger than a bucket."""
    return {
        "odd": random_tensor((7,), torch.bfloat16, seed),
        "wide": random_tensor((5, 3), torch.float32, seed + 1),
        "wide too": random_tensor((3, 64), torch.float32, seed + 2),
        "empty": torch.empty(0, 4),
        "scalar": random_tensor((), torch.int64, seed + 3),
        "flags": random_tensor((11,), torch.bool, seed + 4),
        "large": random_tensor((1500,), torch.float64, seed + 5),
        "complex": random_tensor((2, 2), torch.complex128, seed + 6),
        "bytes": random_tensor((300,), torch.uint8, seed + 7),
        "last": torch.empty(0, dtype=torch.int32),
    }


class Receiver:
    """Answers deliver() as the core's does: `sent` in buckets of `bucket_bytes`, by the rules of csrc/bucket."""

    deviated = False

    def __init__(self, sent: Tensors, bucket_bytes: int = 4096) -> None:
        self.sent = list(sent.items())
        self.tensors = len(self.sent)
        self.asked = 0
        self.open = 0
        self.buckets: list[tuple[torch.Tensor, int, list[tuple[int, int, int, int, bool]], int, int]] = []
        pieces: list[tuple[int, int, int, int, bool]] = []
        memory, at, first, last = torch.zeros(bucket_bytes, dtype=torch.uint8), 0, 0, 0

        def close() -> None:
            nonlocal memory, at, first, pieces
            if pieces:
                self.buckets.append((memory, pieces[-1][2] + pieces[-1][3], pieces, first, last))
            memory, at, first, pieces = torch.zeros(bucket_bytes, dtype=torch.uint8), 0, last, []

        for index, (_, tensor) in enumerate(self.sent):
            raw = (
                tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
            )
            if bucket_bytes - at < len(raw) <= bucket_bytes:
                close()
            offset = 0
            while offset < len(raw):
                piece = raw[offset : offset + bucket_bytes - at]
                memory[at : at + len(piece)] = piece
                pieces.append((index, offset, at, len(piece), offset + len(piece) == len(raw)))
                offset += len(piece)
                at = -(-(at + len(piece)) // ALIGNMENT) * ALIGNMENT
                if offset == len(raw):
                    last = index + 1
                if at == bucket_bytes:
                    close()
            if not len(raw):
                last = index + 1
        close()
        self.left: Iterator[Any] = iter(self.buckets)

    def next_bucket(self, exposed: bool) -> Any:
        found = next(self.left, None)
        if found is None:
            return None
        memory, *rest = found
        self.open += 1
        return (memory.data_ptr(), *rest)

    def bucket_owner(self) -> object:
        return self

    def release_bucket(self) -> None:
        pass

    def entry(self, index: int) -> tuple[str, str, list[int], int]:
        self.asked += 1
        name, tensor = self.sent[index]
        return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes


def delivered(receiver: Receiver, cuts: Cuts, *, own: bool = True) -> Tensors:
    """What a consumer gets that copies before it asks for more; or, if `own`, that keeps everything."""
    got: Tensors = {}
    for items in deliver(receiver, HostSpace(), cuts, own=own):
        for name, tensor in items:
            assert name not in got
            got[name] = tensor if own else clone_exact(tensor)
    return got


def check(got: Tensors, sent: Tensors) -> None:
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert_tensor(got[name], tensor, name)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("bucket_bytes", [256, 1024, 4096, 1 << 20])
def test_every_tensor_comes_once_whole_and_in_order(own: bool, bucket_bytes: int) -> None:
    cuts = Cuts()
    for step in range(3):
        cuts.begin(1, bucket_bytes)
        sent = mixed(step)
        check(delivered(Receiver(sent, bucket_bytes), cuts, own=own), sent)


def test_many_small_tensors_come_in_several_lists_that_together_are_all() -> None:
    sent = {f"t{i}": random_tensor((1 + i % 5,), torch.int16, i) for i in range(1000)}
    receiver = Receiver(sent, 1 << 20)
    lists = list(deliver(receiver, HostSpace(), Cuts(), own=True))
    assert receiver.open == 1
    assert max(len(items) for items in lists) < len(sent) / 3
    check(dict(item for items in lists for item in items), sent)


def test_owned_tensors_are_tensors_in_their_own_right() -> None:
    sent = mixed()
    got = delivered(Receiver(sent), Cuts())
    untouched = dict(got)
    for name, tensor in got.items():
        assert tensor._base is None, "a consumer that clones what has a base would copy for nothing"
        assert tensor.is_leaf
        assert not tensor.is_inference()
        del untouched[name]
        versions = [t._version for t in untouched.values()]
        tensor.zero_()
        assert versions == [t._version for t in untouched.values()]
        check(untouched, {other: sent[other] for other in untouched})
    trained = torch.nn.Parameter(delivered(Receiver(sent), Cuts())["wide too"])
    (trained * 2).sum().backward()
    assert trained.grad is not None
    assert bool((trained.grad == 2).all())


def test_borrowed_tensors_are_views_of_the_bucket() -> None:
    receiver = Receiver({"a": torch.arange(9.0), "b": torch.arange(4)})
    ((a, b),) = ([t for _, t in items] for items in deliver(receiver, HostSpace(), Cuts(), own=False))
    assert a._base is not None
    assert b._base is not None
    assert a.data_ptr() == receiver.buckets[0][0].data_ptr()
    assert b.data_ptr() == a.data_ptr() + ALIGNMENT


def test_a_torch_that_always_keeps_a_record_of_views_delivers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_delivery, "_no_views", contextlib.nullcontext)
    sent = mixed()
    check(delivered(Receiver(sent), Cuts()), sent)


@pytest.mark.parametrize("own", [True, False])
def test_names_of_a_known_plan_are_not_asked_for_again(own: bool) -> None:
    cuts = Cuts()
    asked = []
    for step in range(3):
        cuts.begin(7, 4096)
        sent = {f"t{i}": random_tensor((50,), torch.float32, 100 * step + i) for i in range(64)}
        receiver = Receiver(sent)
        check(delivered(receiver, cuts, own=own), sent)
        asked.append(receiver.asked)
    assert asked == [64, 0, 0]


@pytest.mark.parametrize("known", [0, 7])
def test_another_plan_that_looks_alike_is_cut_anew(known: int) -> None:
    """Same bytes in the same pieces: only the fingerprint tells them apart, and 0 is none."""
    cuts = Cuts()
    plans = [
        {f"a{i}": random_tensor((8, 16), torch.float32, i) for i in range(20)},
        {f"b{i}": random_tensor((16, 8), torch.int32, i) for i in range(20)},
    ]
    for number, sent in enumerate([*plans, *plans]):
        cuts.begin(known and known + number % 2, 4096)
        check(delivered(Receiver(sent), cuts), sent)


def test_a_source_that_left_its_plan_is_believed_over_what_is_remembered() -> None:
    cuts = Cuts()
    planned = {f"a{i}": random_tensor((64,), torch.float32, i) for i in range(64)}
    cuts.begin(7, 4096)
    check(delivered(Receiver(planned), cuts), planned)
    other = {(f"a{i}" if i < 40 else f"new{i}"): random_tensor((64,), torch.float32, 100 + i) for i in range(64)}
    receiver = Receiver(other)
    receiver.deviated = True
    cuts.begin(7, 4096)
    check(delivered(receiver, cuts), other)
    cuts.begin(7, 4096)
    check(delivered(Receiver(planned), cuts), planned)
