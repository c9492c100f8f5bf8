"""Names are exact; order is the source's; unknown, missing and duplicate names are errors."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from support.markers import each_mode, each_transport
from support.ranks import Pool, Rank, raises, spmd
from support.syncing import exchange, good_sync, refused, session
from support.tensors import assert_same, poisoned_like, random_tensor, untouched

ODD_NAMES = [
    *("", " ", "a", "a.b", "a.b.", ".", "module.a", "_orig_mod.a", "a\n", "a\x00b", "a\tb", "'", '"', "%s{}", "\\"),
    *("ä", "a\u0308", "重み", "🙂", "\U0010ffff", "\ufeffa", "\u202e", "A", "n" * 10_240),
    "z" * 65_536,
    "ü" * 32_768,
]


@each_transport
@each_mode
@spmd(2)
def test_any_valid_name_travels_exactly(rank: Rank, transport: str, mode: str) -> None:
    params = {name: torch.tensor([i]) for i, name in enumerate(ODD_NAMES)}
    exchange(rank, params, transport=transport, mode=mode, bucket_bytes=1024)


@pytest.mark.parametrize("name", ["bad-name\ud800", "bad-name\udfff!", "bad-name" + "x" * 65_536])
@pytest.mark.parametrize("side", ["source", "destination"])
@spmd(2)
def test_malformed_names_are_refused(rank: Rank, side: str, name: str) -> None:
    good, bad = {"a": torch.ones(2)}, {"a": torch.ones(2), name: torch.ones(2)}
    if side == "source":
        refused(rank, bad, poisoned_like(good), blame=0, names="bad-name")
    else:
        refused(rank, good, poisoned_like(bad), blame=1, names="bad-name", own=("InvalidArgument", "ManifestMismatch"))


@pytest.mark.parametrize("key", [7, None, b"bytes", ("a",), 1.5])
@pytest.mark.parametrize("side", ["source", "destination"])
@spmd(2)
def test_names_that_are_no_strings_are_refused(rank: Rank, side: str, key: Any) -> None:
    good, bad = {"a": torch.ones(2)}, {"a": torch.ones(2), key: torch.ones(2)}
    if side == "source":
        refused(rank, bad, poisoned_like(good), blame=0, names=repr(key))
    else:
        into = {"a": poisoned_like(good)["a"], key: torch.ones(2)}
        refused(rank, good, into, blame=1, names=repr(key))


@pytest.mark.parametrize("where", ["next", "far"])
@each_transport
@spmd(2)
def test_duplicate_name_in_a_list_is_refused(rank: Rank, transport: str, where: str) -> None:
    pairs = [("a", torch.ones(2)), ("twice", torch.ones(3))]
    pairs += [(f"m{i}", torch.ones(4)) for i in range(0 if where == "next" else 100)] + [("twice", torch.ones(3))]
    into = poisoned_like(dict(pairs))
    own = ("InvalidArgument", "ManifestMismatch")
    refused(rank, pairs, into, blame=0, names="twice", own=own, transport=transport)


@spmd(2)
def test_duplicate_name_in_the_destinations_is_refused(rank: Rank) -> None:
    sent = {"a": torch.ones(2), "twice": torch.ones(3)}
    first = poisoned_like(sent)
    pairs = [*first.items(), ("twice", torch.zeros(3))]
    own = ("InvalidArgument", "ManifestMismatch")
    refused(rank, sent, pairs, blame=1, names="twice", own=own, watch=first)


@each_transport
@spmd(2)
def test_duplicate_name_in_a_generator_is_refused(rank: Rank, transport: str) -> None:
    def items() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b", "twice", "c", "twice", "d"):
            yield name, torch.full((300,), 5.0)

    kinds = ("InvalidArgument", "ManifestMismatch") if rank.index == 0 else ("ManifestMismatch",)
    with session(transport=transport, bucket_bytes=1024) as sync:
        for _ in range(2):
            got: list[str] = []
            with raises(*kinds, mentions=["twice"]):
                if rank.index == 0:
                    sync.broadcast(items())
                else:
                    sync.receive(load=lambda batch, got=got: got.extend(name for name, _ in batch))
            assert got.count("twice") <= 1 and "d" not in got
        good_sync(rank, sync)


@each_transport
@spmd(2)
def test_unknown_name_is_an_error_before_anything_is_written(rank: Rank, transport: str) -> None:
    sent = {"a": torch.ones(2), "a.b": torch.ones(2), "c": torch.ones(2)}
    into = poisoned_like({"a": sent["a"], "c": sent["c"]})
    refused(rank, sent, into, blame=1, names="a.b", own=("ManifestMismatch",), transport=transport)


@each_transport
@spmd(2)
def test_missing_name_is_an_error_before_anything_is_written(rank: Rank, transport: str) -> None:
    sent = {"a": torch.ones(2), "c": torch.ones(2)}
    into = poisoned_like(sent | {"a.b": torch.ones(2)})
    refused(rank, sent, into, blame=1, names="a.b", own=("ManifestMismatch",), transport=transport)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."])
@spmd(2)
def test_wrapper_prefixes_are_not_stripped(rank: Rank, prefix: str) -> None:
    refused(
        rank,
        {prefix + "a": torch.ones(2)},
        poisoned_like({"a": torch.ones(2)}),
        blame=1,
        names=prefix + "a",
        own=("ManifestMismatch",),
    )
    exchange(rank, {prefix + "a": torch.ones(2), "a": torch.zeros(2)})


@each_transport
@spmd(3)
def test_lenient_sync_returns_unexpected_and_missing_in_manifest_order(rank: Rank, transport: str) -> None:
    sent = {name: random_tensor((50,), torch.float32, i) for i, name in enumerate("zyxabc")}
    keep = {0: "", 1: "xabcQ", 2: "zyxaRQ"}[rank.index]
    into = {name: torch.full((50,), -1.0) for name in reversed(keep)}
    with session(transport=transport, strict=False, bucket_bytes=256) as sync:
        for _ in range(2):
            report = sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
            unexpected, missing = rank.share((report.unexpected, report.missing))[rank.index]
            if rank.index == 0:
                assert unexpected == ["z", "y", "b", "c"], f"not the union in manifest order: {unexpected}"
                assert sorted(missing) == ["Q", "R"], f"not the union: {missing}"
            elif rank.index == 1:
                assert unexpected == ["z", "y"] and missing == ["Q"]
            else:
                assert unexpected == ["b", "c"] and missing == ["Q", "R"]
            for name, tensor in into.items():
                assert_same({name: tensor}, {name: sent.get(name, torch.full((50,), -1.0))})


@spmd(2)
def test_lenient_missing_names_follow_the_destinations_order(rank: Rank) -> None:
    into = {name: torch.zeros(2) for name in ("q", "b", "z", "a", "m")}
    with session(strict=False) as sync:
        report = sync.broadcast({"z": torch.ones(2)}) if rank.index == 0 else sync.receive(into=into)
        assert report.missing == ["q", "b", "a", "m"] and report.unexpected == []


@spmd(2)
def test_lenient_sync_from_a_generator_reports_too(rank: Rank) -> None:
    sent = {name: torch.full((50,), 2.0) for name in "abcd"}
    with session(strict=False, bucket_bytes=256) as sync:
        for _ in range(3):
            into = {name: torch.zeros(50) for name in "dbQ"}
            report = sync.broadcast(iter(sent.items())) if rank.index == 0 else sync.receive(into=into)
            assert report.unexpected == ["a", "c"] and report.missing == ["Q"]
            if rank.index == 1:
                assert into["b"][0] == 2 and into["d"][49] == 2 and into["Q"][0] == 0


@spmd(2)
def test_lenient_sync_with_nothing_in_common_succeeds_and_says_so(rank: Rank) -> None:
    into = poisoned_like({"b": torch.ones(3)})
    with session(strict=False) as sync:
        report = sync.broadcast({"a": torch.ones(3)}) if rank.index == 0 else sync.receive(into=into)
        assert report.unexpected == ["a"] and report.missing == ["b"]
        assert untouched(into)


def interleaved() -> dict[str, torch.Tensor]:
    params: dict[str, torch.Tensor] = {}
    for i in range(100):
        params[f"w{i}"] = torch.full((7,), float(i), dtype=torch.bfloat16 if i % 2 else torch.float32)
    return params


def reversed_order(rank: Rank, transport: str) -> int:
    sent = interleaved()
    names = list(sent)
    if rank.index == 1:
        names = list(set(names))  # an order that differs from process to process
    elif rank.index == 2:
        names.reverse()
    into = poisoned_like({name: sent[name] for name in names})
    with session(transport=transport, bucket_bytes=512) as sync:
        for _ in range(2):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
            if rank.index:
                assert_same({name: into[name] for name in sent}, sent)
    return hash("seed")


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_order_is_the_sources_whatever_the_hash_seed(pool: Pool, transport: str) -> None:
    setups = [{"environment": {"PYTHONHASHSEED": str(seed)}} for seed in (1, 2, 3)]
    hashes = pool.group(3, method="spawn", setups=setups).run(reversed_order, transport)
    assert len(set(hashes)) == 3, "the seeds did not differ, so this test would prove nothing"


@spmd(2)
def test_order_of_destinations_does_not_matter(rank: Rank) -> None:
    sent = interleaved()
    names = list(sent)
    with session(bucket_bytes=300) as sync:
        for seed in range(5):
            random.Random(seed).shuffle(names)
            into = poisoned_like({name: sent[name] for name in names})
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
            if rank.index == 1:
                assert_same({name: into[name] for name in sent}, sent)


@spmd(2)
def test_source_order_may_change_between_syncs(rank: Rank) -> None:
    sent = interleaved()
    names = list(sent)
    into = poisoned_like(sent)
    with session() as sync:
        for seed in range(5):
            random.Random(seed).shuffle(names)
            shuffled = {name: sent[name] + seed for name in names}
            sync.broadcast(shuffled) if rank.index == 0 else sync.receive(into=into)
            if rank.index == 1:
                assert_same({name: into[name] for name in names}, shuffled)


class Lookup(Mapping[str, torch.Tensor]):
    """A mapping that is no dict."""

    def __init__(self, items: dict[str, torch.Tensor]) -> None:
        self._items = items

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@pytest.mark.parametrize("kind", ["dict", "ordered", "mapping", "list", "tuple", "items"])
@pytest.mark.parametrize("side", ["source", "destination"])
@spmd(2)
def test_every_container_works_on_both_sides(rank: Rank, side: str, kind: str) -> None:
    make: Any = {
        "dict": dict,
        "ordered": OrderedDict,
        "mapping": Lookup,
        "list": lambda d: list(d.items()),
        "tuple": lambda d: tuple(d.items()),
        "items": lambda d: d.items(),
    }[kind]
    sent = {f"t{i}": random_tensor((i, 3), torch.float32, i) for i in range(9)}
    with session() as sync:
        for _ in range(2):
            into = poisoned_like(sent)
            if rank.index == 0:
                sync.broadcast(make(sent) if side == "source" else sent)
            else:
                sync.receive(into=make(into) if side == "destination" else into)
                assert_same(into, sent)


class Counting(Lookup):
    """A mapping that counts how often it is walked through."""

    walks = 0

    def __iter__(self) -> Iterator[str]:
        self.walks += 1
        return super().__iter__()


@spmd(2)
def test_container_is_read_once_at_each_call(rank: Rank) -> None:
    sent = {f"t{i}": torch.full((100,), float(i)) for i in range(10)}
    container = Counting(sent if rank.index == 0 else poisoned_like(sent))
    with session(bucket_bytes=512) as sync:
        for calls in (1, 2, 3):
            sync.broadcast(container) if rank.index == 0 else sync.receive(into=container)
            assert container.walks == calls
    assert_same({name: container[name] for name in sent}, sent)


@pytest.mark.parametrize("length", [65_537, 3 << 20, 9 << 20])
@pytest.mark.parametrize("strict", [True, False])
@spmd(2)
def test_destinations_name_that_is_too_long_is_refused_on_its_rank(rank: Rank, length: int, strict: bool) -> None:
    sent = {"a": torch.ones(2)}
    into = poisoned_like({"a": sent["a"], "too-long" + "x" * (length - 8): torch.ones(2)})
    refused(rank, sent, into, blame=1, names="too-long", strict=strict)


@spmd(2)
def test_many_long_names_that_are_not_sent_are_reported(rank: Rank) -> None:
    missing = [f"{i:03}" + "x" * 65_533 for i in range(40)]
    into = {name: torch.zeros(2) for name in ["a", *missing]}
    with session(strict=False) as sync:
        report = sync.broadcast({"a": torch.ones(2)}) if rank.index == 0 else sync.receive(into=into)
        assert report.missing == missing


@spmd(3)
def test_missing_names_are_reported_receiver_by_receiver_in_their_own_order(rank: Rank) -> None:
    many = [f"x{i}" for i in range(30_000)]  # so that rank 2 is done first
    into = {1: ["q", "a", "p", "both", "z", *many], 2: ["m", "both", "q", "b"]}
    with session(strict=False) as sync:
        for _ in range(3):
            if rank.index == 0:
                report = sync.broadcast({"z": torch.ones(2)})
                assert report.missing == ["q", "a", "p", "both", *many, "m", "b"]
            else:
                sync.receive(into={name: torch.zeros(2) for name in into[rank.index]})


@pytest.mark.parametrize("what", ["shape", "names", "duplicate", "refused"])
@spmd(2)
def test_message_about_a_name_with_a_null_character_is_whole(rank: Rank, what: str) -> None:
    sent: Any = {"a\x00b": torch.ones(3)}
    into: Any = {"a\x00b": torch.zeros(3)}
    blame, words = 1, ["a\\x00b"]
    if what == "shape":
        into, words = {"a\x00b": torch.zeros(4)}, [*words, "must be equal"]
    elif what == "names":
        into, words = {"c\x00d": torch.zeros(3)}, [*words, "c\\x00d", "compared exactly"]
    elif what == "duplicate":
        sent, blame, words = [*sent.items()] * 2, 0, [*words, "unique"]
    else:
        sent, blame, words = {"a\x00b": None}, 0, [*words, "not a tensor"]
    with session() as sync:
        with raises("InvalidArgument", "ManifestMismatch", rank=blame, mentions=[f"rank {blame}", *words]):
            sync.broadcast(sent) if rank.index == 0 else sync.receive(into=into)
        good_sync(rank, sync)


@spmd(2)
def test_null_character_does_not_end_what_a_peer_says(rank: Rank) -> None:
    def load(batch: object) -> None:
        raise ValueError("before\x00after")

    with session() as sync:
        with raises("PeerFailed" if rank.index == 0 else "ValueError", mentions=["before\x00after"]):
            sync.broadcast({"a": torch.ones(3)}) if rank.index == 0 else sync.receive(load=load)
        good_sync(rank, sync)


@pytest.mark.parametrize("name", ["twice", "long" + "x" * 65_536, "bad\ud800"])
@spmd(2)
def test_bad_name_of_a_generator_is_an_error_with_rank_and_name(rank: Rank, name: str) -> None:
    items = [("twice", torch.ones(2)), (name, torch.ones(3))]
    with session() as sync:
        for _ in range(2):
            with raises(
                "InvalidArgument" if rank.index == 0 else "ManifestMismatch", rank=0, mentions=["rank 0", name[:3]]
            ):
                sync.broadcast(iter(items)) if rank.index == 0 else sync.receive(load=lambda batch: None)
        good_sync(rank, sync)


class AnyName(str):
    """A name that takes itself for every other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


@spmd(2)
def test_names_are_told_apart_by_their_text_alone(rank: Rank) -> None:
    with session() as sync:
        for name in ("p", "q", "r"):
            got: list[str] = []
            if rank.index == 0:
                sync.broadcast({AnyName(name): torch.ones(2)})
            else:
                sync.receive(load=lambda batch, got=got: got.extend(name for name, _ in batch))
                assert got == [name]
