"""src="sharded": several trainers send a share each, and the rollout ranks get the whole, or nobody gets anything."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fastsync
from support.markers import each_mode, each_transport, leak
from support.process import Held
from support.ranks import Pool, Rank, raises, spmd
from support.sharding import BUCKET_BYTES, good_sharded_sync, sharded, some_weights, take_part
from support.syncing import TIMEOUT_S, receive
from support.tensors import assert_tensor, poisoned_like, untouched

each_split = pytest.mark.parametrize(("trainers", "rollouts"), [(2, 2), (3, 1), (1, 2), (1, 0), (3, 0)])
MODES = ("into", "load", "stream", "borrow")


# --- what arrives


def several_syncs(rank: Rank, transport: str, trainers: int, mode: str) -> None:
    with sharded(transport=transport) as sync:
        for step in range(3):
            report = take_part(rank, sync, trainers, some_weights(step), mode=mode)
            assert report.version == sync.version == step + 1
            assert report.plan_reused == (step > 0)
            assert report.transport == transport
            assert report.peak_staging_bytes <= 2 * BUCKET_BYTES + 2**20
            assert report.imbalance is not None and report.imbalance >= 1.0
            assert f"imbalance {report.imbalance:.2f}" in str(report)
            assert len(set(rank.share(report.imbalance))) == 1
            assert set(report.phases) == {"plan", "pack", "transfer", "unpack", "wait", "commit"}


@each_transport
@each_split
@each_mode
def test_every_byte_arrives_whatever_the_numbers(
    pool: Pool, transport: str, trainers: int, rollouts: int, mode: str
) -> None:
    if rollouts == 0 and mode != "into":
        pytest.skip("nobody receives")
    pool.group(trainers + rollouts).run(several_syncs, transport, trainers, mode)


@each_transport
@spmd(4)
def test_receivers_of_one_sync_may_differ_in_mode(rank: Rank, transport: str) -> None:
    with sharded(transport=transport, buffers=1) as sync:
        for step in range(4):
            take_part(rank, sync, 1, some_weights(step), mode=MODES[(step + rank.index) % 4])
    with sharded(transport=transport, buffers=3, verify=False) as sync:
        for step in range(4):
            take_part(rank, sync, 1, some_weights(step), mode=MODES[(step + rank.index) % 4])


@spmd(3)
def test_every_trainer_sends_its_own_balanced_share(rank: Rank) -> None:
    names = [f"t{i}" for i in range(32)]
    with sharded(transport="shm", bucket_bytes=8192) as sync:
        if rank.index < 2:
            report = sync.broadcast({name: torch.full((1000,), float(rank.index)) for name in names})
            assert report.buckets == 16  # of its own share: 16 of the tensors, one a bucket
        else:
            into = {name: torch.full((1000,), -1.0) for name in names}
            report = sync.receive(into=into)
            sent_by = [int(tensor[0]) for tensor in into.values()]
            assert sent_by.count(0) == sent_by.count(1) == 16
            assert all(bool((tensor == tensor[0]).all()) for tensor in into.values())
            assert report.buckets == 32
        assert report.imbalance == 1.0


@spmd(3)
def test_one_large_tensor_shows_as_imbalance(rank: Rank) -> None:
    params = {"small": torch.zeros(100, dtype=torch.uint8), "large": torch.ones(900, dtype=torch.uint8)}
    with sharded(transport="shm") as sync:
        assert take_part(rank, sync, 2, params).imbalance == pytest.approx(1.8)


@spmd(3)
def test_memory_of_a_receiver_does_not_grow_with_the_trainers(rank: Rank) -> None:
    params = {f"t{i}": torch.full((2**18,), float(i)) for i in range(12)}
    with sharded(transport="gloo", bucket_bytes=2**21, buffers=2) as sync:
        for _ in range(2):
            report = take_part(rank, sync, 2, params)
            assert report.bucket_bytes == 2**20
            assert report.peak_staging_bytes == (2**22 if rank.index == 2 else 2**21)


@spmd(3)
def test_a_manifest_may_change_and_come_back(rank: Rank) -> None:
    one, two = some_weights(1), {"only": torch.arange(5000)}
    with sharded(transport="shm") as sync:
        for step, params in enumerate((one, two, one, two)):
            assert take_part(rank, sync, 2, params).plan_reused == (step > 1)


@spmd(3)
def test_fewer_tensors_than_trainers(rank: Rank) -> None:
    with sharded(transport="shm") as sync:
        for params in ({"one": torch.ones(3)}, {}, {"empty": torch.empty(0)}):
            for mode in MODES:
                take_part(rank, sync, 2, params, mode=mode)


@each_transport
@spmd(3)
def test_one_liners(rank: Rank, transport: str) -> None:
    for step in range(1, 4):
        if rank.index < 2:
            report = fastsync.broadcast_bucketed({"a": torch.full((9,), step)}, src="sharded", transport=transport)
        else:
            got: dict[str, torch.Tensor] = {}
            report = fastsync.receive_bucketed(
                lambda batch, got=got: got.update((n, t.clone()) for n, t in batch), src="sharded", transport=transport
            )
            assert int(got["a"].sum()) == 9 * step
        assert report.version == step
        assert report.plan_reused == (step > 1)


@spmd(3)
def test_sharded_and_plain_sessions_share_a_group(rank: Rank) -> None:
    params = some_weights(3)
    with sharded(transport="shm") as sync, fastsync.WeightSync(src=2, transport="shm", timeout_s=TIMEOUT_S) as plain:
        for _ in range(2):
            take_part(rank, sync, 2, params)
            plain.broadcast(params) if rank.index == 2 else receive(plain, "into", params)


# --- ties


def tied(fill: float) -> dict[str, torch.Tensor]:
    base = torch.full((600,), fill)
    return {"a": base, "other": torch.full((500,), fill), "b": base, "tail": base[300:]}


@each_transport
@spmd(4)
def test_tied_names_arrive_in_tied_destinations(rank: Rank, transport: str) -> None:
    with sharded(transport=transport) as sync:
        for step in range(3):
            params = tied(float(step))
            take_part(rank, sync, 2, params, into=tied(-1.0) if step != 1 else poisoned_like(params))


@spmd(3)
def test_destinations_that_share_memory_in_another_way_are_refused(rank: Rank) -> None:
    with sharded(transport="shm") as sync:
        into = tied(-1.0)
        params = {name: tensor.clone() for name, tensor in tied(1.0).items()}
        with raises("ManifestMismatch", mentions=["'a'", "share memory"]):
            sync.broadcast(params) if rank.index < 2 else sync.receive(into=into)
        assert all(bool((tensor == -1.0).all()) for tensor in into.values())
        good_sharded_sync(rank, sync, 2)


# --- what is refused, before anything is written


def wrong_shape(rank: Rank, transport: str, strict: bool) -> None:
    params = some_weights(1)
    into = poisoned_like(params)
    with sharded(transport=transport, strict=strict) as sync:
        take_part(rank, sync, 2, params)
        if rank.index == 3:
            into["layer.4"] = torch.zeros(5)
        with raises("ManifestMismatch", rank=3, mentions=["layer.4"]) as caught:
            sync.broadcast(params) if rank.index < 2 else sync.receive(into=into)
        assert caught.seconds < TIMEOUT_S / 2
        del into["layer.4"]
        assert untouched(into) and not sync.dirty and sync.version == 1
        good_sharded_sync(rank, sync, 2)
        assert sync.version == 2


@each_transport
@pytest.mark.parametrize("strict", [True, False])
def test_a_tensor_that_does_not_fit_in_one_share_writes_nothing_anywhere(
    pool: Pool, transport: str, strict: bool
) -> None:
    pool.group(4).run(wrong_shape, transport, strict)


@spmd(4)
def test_missing_and_unexpected_are_those_of_the_whole(rank: Rank) -> None:
    params = some_weights(1)
    with sharded(transport="shm") as sync:
        into = poisoned_like(params)
        del into["layer.0"], into["layer.12"]
        into["new"] = torch.zeros(3)
        with raises("ManifestMismatch", rank=3, mentions=["'layer.0', 'layer.12'", "'new'"]):
            if rank.index < 2:
                sync.broadcast(params)
            else:
                sync.receive(into=into if rank.index == 3 else poisoned_like(params))
        del into["new"]
        assert untouched(into)
        good_sharded_sync(rank, sync, 2)


@each_transport
@spmd(4)
def test_not_strict_syncs_what_both_sides_have(rank: Rank, transport: str) -> None:
    params = some_weights(1)
    with sharded(transport=transport, strict=False) as sync:
        for _ in range(2):
            if rank.index < 2:
                report = sync.broadcast(params)
                assert report.unexpected == ["layer.0", "layer.4", "layer.12"]
                assert report.missing == ["new.2", "new.3"]
                continue
            into = poisoned_like(params)
            gone = ["layer.12", "layer.0"] if rank.index == 2 else ["layer.4"]
            for name in gone:
                del into[name]
            into[f"new.{rank.index}"] = torch.full((3,), 5.0)
            report = sync.receive(into=into)
            assert report.unexpected == sorted(gone, key=list(params).index)
            assert report.missing == [f"new.{rank.index}"]
            assert bool((into[f"new.{rank.index}"] == 5.0).all())
            for name in into.keys() & params.keys():
                assert_tensor(into[name], params[name], name)


DIFFERENT = {
    "shape": ("layer.4", lambda p: p.update({"layer.4": torch.zeros(3)})),
    "dtype": ("layer.1", lambda p: p.update({"layer.1": torch.zeros(7)})),
    "left out": ("last.empty", lambda p: p.pop("last.empty")),
    "one more": ("extra", lambda p: p.update({"extra": torch.zeros(1)})),
    "order": ("layer.0", lambda p: p.update({"layer.0": p.pop("layer.0")})),
    "tie": ("layer.11", lambda p: p.update({"layer.11": p["layer.11"].clone(), "again": p["again"].clone()})),
}


@each_transport
@spmd(4)
def test_trainers_that_differ_are_named_and_nothing_is_written(rank: Rank, transport: str) -> None:
    with sharded(transport=transport) as sync:
        for name, change in DIFFERENT.values():
            params = some_weights(1)
            params["again"] = params["layer.11"]
            into = poisoned_like(params)
            if rank.index == 1:
                change(params)
            with raises("ManifestMismatch", rank=1, mentions=[name, "rank 0"]) as caught:
                sync.broadcast(params) if rank.index < 2 else sync.receive(into=into)
            assert caught.seconds < TIMEOUT_S / 2
            assert untouched(into) and not sync.dirty and sync.version is None
        good_sharded_sync(rank, sync, 2)


@spmd(3)
def test_a_generator_is_refused_and_the_next_sync_works(rank: Rank) -> None:
    with sharded(transport="shm") as sync:
        for bad in (0, 1):
            with raises("InvalidArgument", rank=bad, mentions=["generator"]):
                if rank.index < 2:
                    params = some_weights(1)
                    sync.broadcast(iter(params.items()) if rank.index == bad else params)
                else:
                    receive(sync, "into", some_weights(1))
        good_sharded_sync(rank, sync, 2)


@spmd(3)
def test_a_refused_tensor_of_a_trainer_reaches_everybody(rank: Rank) -> None:
    with sharded(transport="shm") as sync:
        for bad in (0, 1):
            own = rank.index == bad
            with raises("InvalidArgument" if own else "ManifestMismatch", rank=bad, mentions=["'m'"]):
                params = {"m": torch.zeros(3)}
                if own:
                    params = {"m": torch.zeros(3, device="meta")}
                sync.broadcast(params) if rank.index < 2 else receive(sync, "into", params)
        good_sharded_sync(rank, sync, 2)


# --- versions


@spmd(3)
def test_the_lowest_trainer_counts_the_versions(rank: Rank) -> None:
    params = some_weights(1)
    with sharded(transport="shm") as sync:
        for given, version in [((None, None), 1), ((7, None), 7), ((None, 8), 8), ((9, 9), 9), ((None, None), 10)]:
            mine = given[rank.index] if rank.index < 2 else None
            assert take_part(rank, sync, 2, params, version=mine).version == version
        for given, blame in [((11, 12), 1), ((10, None), 0), ((None, 10), 1), ((-1, None), 0), (("x", None), 0)]:
            named = None if rank.index == blame else blame
            with raises("InvalidArgument", rank=named, mentions=["version"]) as caught:
                if rank.index < 2:
                    sync.broadcast(params, version=given[rank.index])  # type: ignore[arg-type]
                else:
                    receive(sync, "into", params)
            assert caught.seconds < TIMEOUT_S / 2
            assert sync.version == 10
        assert take_part(rank, sync, 2, params).version == 11


# --- roles


@spmd(3)
def test_a_rank_keeps_its_role(rank: Rank) -> None:
    params = some_weights(1)
    with sharded(transport="shm") as sync:
        take_part(rank, sync, 2, params)
        with raises("StateError", mentions=["trainer" if rank.index < 2 else "rollout"]):
            receive(sync, "into", params) if rank.index < 2 else sync.broadcast(params)
        take_part(rank, sync, 2, params)
    with sharded(transport="shm") as sync:  # the group's, not the session's
        with raises("StateError", mentions=["process group"]):
            receive(sync, "into", params) if rank.index < 2 else sync.broadcast(params)
        take_part(rank, sync, 2, params)


@spmd(2)
def test_no_trainer_is_an_error_on_every_rank(rank: Rank) -> None:
    with sharded(transport="shm") as sync:
        with raises("StateError", mentions=["no rank of the group is a trainer"]):
            receive(sync, "into", some_weights(1))


@spmd(3)
def test_ranks_that_do_not_come_are_named(rank: Rank) -> None:
    params = some_weights(1)
    if rank.index == 0:
        with sharded(transport="shm", timeout_s=0.4) as sync:
            with raises("SyncTimeout", rank=1, mentions=["ranks 1, 2", "join"]):
                sync.broadcast(params)
    rank.barrier()
    with sharded(transport="shm") as sync:
        take_part(rank, sync, 2, params)
        rank.barrier()
    with sharded(transport="shm", timeout_s=0.6) as sync:
        if rank.index != 1:
            with raises("SyncTimeout"):
                sync.broadcast(params) if rank.index < 2 else receive(sync, "into", params)
        rank.barrier()


def test_any_other_text_for_src_is_refused(pool: Pool) -> None:
    pool.group(1).run(other_sources)


def other_sources(rank: Rank) -> None:
    for src in ("", "shard", "SHARDED", b"sharded", None):
        with raises("InvalidArgument", mentions=["'sharded'"]):
            fastsync.WeightSync(src=src)  # type: ignore[arg-type]


@spmd(3)
def test_ranks_that_name_different_transports_are_refused(rank: Rank) -> None:
    params = some_weights(1)
    with sharded(transport=("shm", "gloo", "auto")[rank.index]) as sync:
        with raises("InvalidArgument", mentions=["'shm'", "'gloo'"]):
            sync.broadcast(params) if rank.index < 2 else receive(sync, "into", params)


# --- failures of user code, and what comes after


def raising(rank: Rank, transport: str, mode: str) -> None:
    params = some_weights(1)
    with sharded(transport=transport) as sync:
        take_part(rank, sync, 2, params)
        for at in (0, 3, len(params) - 1):
            if rank.index != 3:
                with raises("PeerFailed", rank=3, mentions=["boom" if mode == "load" else "left the loop"]) as caught:
                    sync.broadcast(params) if rank.index < 2 else receive(sync, "into", params)
                assert caught.seconds < 2.0
                assert sync.dirty == (rank.index == 2 and at > 0) or at == 0
            elif mode == "load":
                count = itertools.count()

                def load(batch: list[Any], at: int = at, count: itertools.count[int] = count) -> None:
                    for _ in batch:
                        if next(count) == at:
                            raise KeyError("boom")

                with raises("KeyError", mentions=["boom"]):
                    sync.receive(load=load)
            else:
                for i, _ in enumerate(sync.stream(borrow=mode == "borrow")):
                    if i == at:
                        break
            assert sync.version == 1
            if rank.index < 2:
                assert not sync.dirty
        good_sharded_sync(rank, sync, 2)
        assert sync.version == 2


@each_transport
@pytest.mark.parametrize("mode", ["load", "stream", "borrow"])
def test_what_a_receiver_raises_reaches_every_rank_and_the_next_sync_works(
    pool: Pool, transport: str, mode: str
) -> None:
    pool.group(4).run(raising, transport, mode)


@spmd(3)
def test_a_call_inside_a_loader_is_a_state_error(rank: Rank) -> None:
    params = some_weights(1)
    with sharded(transport="shm") as sync:
        if rank.index < 2:
            sync.broadcast(params)
        else:

            def load(batch: list[Any]) -> None:
                with raises("StateError"):
                    sync.receive(load=load)

            sync.receive(load=load)


@each_transport
@pytest.mark.parametrize("who", [0, 1, 2])
@spmd(4)
def test_a_session_may_be_closed_and_made_anew_on_one_rank(rank: Rank, transport: str, who: int) -> None:
    params = some_weights(1)
    sync = sharded(transport=transport)
    for step in range(4):
        report = take_part(rank, sync, 2, params, mode=MODES[step])
        assert report.version == (step + 1 if who != 0 else 1)
        rank.barrier()
        if rank.index == who:
            sync.close()
            sync = sharded(transport=transport)
        elif who == 0:
            # The lead's count begins afresh, and everybody takes its word.
            assert sync.version == 1
    sync.close()
    with raises("StateError"):
        sync.broadcast(params) if rank.index < 2 else sync.receive(into=params)


# --- nothing is left behind


def soak(rank: Rank, transport: str, failing: bool) -> None:
    params = some_weights(1)
    wrong = {**params, "layer.4": torch.zeros(5)}

    def fail() -> None:
        with raises("ManifestMismatch"):
            sync.broadcast(params) if rank.index < 2 else sync.receive(into=wrong)

        def load(batch: list[Any]) -> None:
            raise ValueError("no")

        with raises("ValueError", "PeerFailed"):
            sync.broadcast(params) if rank.index < 2 else sync.receive(load=load)

    with sharded(transport=transport) as sync:
        before = None
        for step in range(80):
            if step == 30:
                rank.barrier()
                before = Held.now()
                rank.barrier()
            if failing and step % 4 == 0:
                fail()
            take_part(rank, sync, 2, params, mode=MODES[step % 4])
        rank.barrier()
        assert before is not None
        Held.now().assert_flat_since(before, rss_slack=6 * 2**20)
        rank.barrier()


@leak
@each_transport
@pytest.mark.parametrize("failing", [False, True])
@spmd(4, limit_s=180, fresh=True)
def test_fifty_syncs_are_flat(rank: Rank, transport: str, failing: bool) -> None:
    soak(rank, transport, failing)
