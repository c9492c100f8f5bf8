"""The three calls, the session and the report."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch
import torch.distributed as dist

import fastsync
from support.markers import each_mode, each_transport
from support.ranks import Pool, Rank, raises, spmd
from support.syncing import exchange, good_sync, receive, session
from support.tensors import assert_same, clone_exact, poisoned_like, random_tensor


def model(seed: int = 1) -> dict[str, torch.Tensor]:
    return {
        "embed": random_tensor((300, 17), torch.bfloat16, seed),
        "layer.weight": random_tensor((33, 65), torch.float32, seed + 1),
        "layer.scale": random_tensor((), torch.float32, seed + 2),
        "steps": random_tensor((4,), torch.int64, seed + 3),
        "none": torch.empty((0, 4)),
    }


@each_transport
@spmd(3)
def test_broadcast_bucketed_overwrites_destinations_in_place(rank: Rank, transport: str) -> None:
    params = model()
    mine = params if rank.index == 0 else poisoned_like(params)
    pointers = [tensor.data_ptr() for tensor in mine.values()]
    report = fastsync.broadcast_bucketed(mine, src=0, transport=transport, bucket_bytes=4096, timeout_s=20)
    assert_same(mine, params)
    assert [tensor.data_ptr() for tensor in mine.values()] == pointers
    assert report.version == 1


@each_transport
@spmd(2)
def test_receive_bucketed_hands_every_tensor_to_the_loader(rank: Rank, transport: str) -> None:
    params = model()
    if rank.index == 0:
        fastsync.broadcast_bucketed(params, transport=transport, timeout_s=20)
    else:
        got: dict[str, torch.Tensor] = {}
        report = fastsync.receive_bucketed(
            lambda batch: got.update({name: clone_exact(tensor) for name, tensor in batch}),
            transport=transport,
            timeout_s=20,
        )
        assert_same(got, params)
        assert report.version == 1 and report.tensors == 5


@each_transport
@each_mode
@spmd(2)
def test_session_delivers_in_every_receive_mode(rank: Rank, transport: str, mode: str) -> None:
    exchange(rank, model(), mode=mode, transport=transport, bucket_bytes=1024)


@each_transport
@spmd(4)
def test_ranks_mix_all_calls_in_one_sync(rank: Rank, transport: str) -> None:
    for round_ in (1, 2, 3):
        params = model(round_ * 10)
        if rank.index == 0:
            report = fastsync.broadcast_bucketed(params, transport=transport, bucket_bytes=2048, timeout_s=20)
        elif rank.index == 1:
            got: dict[str, torch.Tensor] = {}
            report = fastsync.receive_bucketed(
                lambda batch, got=got: got.update({name: clone_exact(tensor) for name, tensor in batch}),
                transport=transport,
                timeout_s=20,
            )
            assert_same(got, params)
        elif rank.index == 2:
            mine = poisoned_like(params)
            report = fastsync.broadcast_bucketed(mine, transport=transport, timeout_s=20)
            assert_same(mine, params)
        else:
            with session(transport=transport) as sync:
                got, report = receive(sync, "stream")
            assert_same(got, params)
        assert report.version == round_


@spmd(2)
def test_default_group_and_auto_transport_need_no_options(rank: Rank) -> None:
    params = model()
    mine = params if rank.index == 0 else poisoned_like(params)
    report = fastsync.broadcast_bucketed(mine)
    assert_same(mine, params)
    assert report.transport == "shm"


@each_transport
@spmd(2)
def test_report_tells_what_was_done(rank: Rank, transport: str) -> None:
    params = model()
    with session(transport=transport, bucket_bytes=1000) as sync:
        began = time.perf_counter()
        report = exchange(rank, params, sync=sync)
        took = time.perf_counter() - began
        assert report is sync.report or report == sync.report
    assert [field.name for field in dataclasses.fields(report)] == [
        *("version", "transport", "nbytes", "tensors", "buckets", "bucket_bytes", "seconds", "gb_per_s"),
        *("plan_reused", "peak_staging_bytes", "phases", "unexpected", "missing"),
    ]
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in params.values())
    assert report.version == 1 and report.transport == transport
    assert report.nbytes == nbytes and report.tensors == len(params)
    assert report.bucket_bytes == 1024, "1000 is rounded up to the alignment"
    assert nbytes / report.bucket_bytes <= report.buckets <= nbytes / report.bucket_bytes + len(params)
    assert 0 < report.seconds <= took
    assert report.gb_per_s == pytest.approx(nbytes / report.seconds / 1e9, rel=0.05)
    assert report.plan_reused is False
    assert 0 < report.peak_staging_bytes <= 2 * report.bucket_bytes + 2**20
    assert set(report.phases) == {"plan", "pack", "transfer", "unpack", "wait", "commit"}
    assert all(isinstance(value, float) and value >= 0 for value in report.phases.values())
    assert report.unexpected == [] and report.missing == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.version = 9  # type: ignore[misc]


@spmd(2)
def test_report_prints_as_one_line_and_dumps_as_json(rank: Rank) -> None:
    report = exchange(rank, model(), version=41)
    line = str(report)
    assert "\n" not in line and "41" in line and "shm" in line
    assert repr(report) != ""
    again = json.loads(json.dumps(report.to_dict()))
    assert again["version"] == 41 and again["phases"] == report.phases and again["nbytes"] == report.nbytes
    assert set(again) == {field.name for field in dataclasses.fields(report)}


@spmd(2)
def test_buckets_agree_on_every_rank(rank: Rank) -> None:
    report = exchange(rank, model(), bucket_bytes=777)
    first, second = rank.share((report.buckets, report.bucket_bytes, report.nbytes, report.tensors, report.version))
    assert first == second and first[0] > 10


@each_transport
@spmd(2)
def test_session_is_reused_and_replays_its_plan(rank: Rank, transport: str) -> None:
    with session(transport=transport) as sync:
        assert sync.version is None and sync.report is None and sync.dirty is False
        for version in range(1, 6):
            report = exchange(rank, model(version), sync=sync, mode=("into", "load")[version % 2])
            assert report.plan_reused is (version > 1)
            assert sync.version == version == report.version
            assert sync.report == report and sync.dirty is False
        changed = model() | {"extra": torch.ones(3)}
        assert exchange(rank, changed, sync=sync).plan_reused is False
        assert exchange(rank, changed, sync=sync).plan_reused is True


@spmd(2)
def test_one_liner_keeps_its_plan_between_calls(rank: Rank) -> None:
    for version in (1, 2, 3):
        params = model(version)
        mine = params if rank.index == 0 else poisoned_like(params)
        report = fastsync.broadcast_bucketed(mine, timeout_s=20)
        assert_same(mine, params)
        assert report.version == version and report.plan_reused is (version > 1)
    fastsync.close()
    fastsync.close()
    mine = model() if rank.index == 0 else poisoned_like(model())
    report = fastsync.broadcast_bucketed(mine, timeout_s=20)
    assert report.version == 1 and report.plan_reused is False


@spmd(2)
def test_close_is_idempotent_and_ends_the_session(rank: Rank) -> None:
    unused = session()
    unused.close()
    unused.close()
    sync = session()
    good_sync(rank, sync)
    began = time.monotonic()
    sync.close()
    sync.close()
    assert time.monotonic() - began < 1.0
    for call in (
        lambda: sync.broadcast({}),
        lambda: sync.receive(into={}),
        lambda: sync.receive(load=print),
        lambda: list(sync.stream()),
    ):
        with raises("StateError"):
            call()
    with raises("StateError"):
        with sync:
            sync.broadcast({}) if rank.index == 0 else sync.receive(into={})


@spmd(2)
def test_context_manager_closes_also_on_an_exception(rank: Rank) -> None:
    with raises("ZeroDivisionError"), session() as sync:
        good_sync(rank, sync)
        raise ZeroDivisionError
    with raises("StateError"):
        sync.broadcast({}) if rank.index == 0 else sync.receive(into={})


@each_transport
@spmd(2)
def test_session_reopened_on_the_receiver_pairs_with_the_old_source(rank: Rank, transport: str) -> None:
    sync = session(transport=transport)
    exchange(rank, model(), sync=sync, version=5)
    if rank.index == 1:
        sync.close()
        sync = session(transport=transport)
    exchange(rank, model(2), sync=sync)
    assert sync.version == 6
    sync.close()


@each_transport
@spmd(2)
def test_session_reopened_on_the_source_counts_for_all(rank: Rank, transport: str) -> None:
    sync = session(transport=transport)
    exchange(rank, model(), sync=sync, version=5)
    if rank.index == 0:
        sync.close()
        sync = session(transport=transport)
    exchange(rank, model(2), sync=sync)
    assert sync.version == 1
    sync.close()


@spmd(2)
def test_broadcast_on_a_receiver_and_receive_on_the_source_are_state_errors(rank: Rank) -> None:
    with session() as sync:
        with raises("StateError"):
            if rank.index == 0:
                sync.receive(into={})
            else:
                sync.broadcast({})
        with raises("StateError"):
            if rank.index == 0:
                list(sync.stream())
            else:
                sync.broadcast({"a": torch.ones(1)})
        rank.barrier()
        good_sync(rank, sync)
        if rank.index == 0:
            with raises("StateError"):
                fastsync.receive_bucketed(print, src=0)


@spmd(1)
def test_group_of_one_commits(rank: Rank) -> None:
    with session() as sync:
        report = sync.broadcast(model())
        assert report.version == 1 and report.tensors == 5 and sync.version == 1
        with raises("InvalidArgument", "ManifestMismatch"):
            sync.broadcast({"m": torch.empty(3, device="meta")})
        assert sync.broadcast(model()).version == 2
    assert fastsync.broadcast_bucketed(model()).version == 1


def no_group(rank: Rank) -> None:
    assert not dist.is_initialized()
    for call in (
        lambda: fastsync.broadcast_bucketed({"a": torch.ones(1)}),
        lambda: fastsync.receive_bucketed(print),
        lambda: fastsync.WeightSync(),
    ):
        with raises("Error", mentions=["init_process_group"]):
            call()


def test_without_a_default_group_the_error_says_how_to_get_one(pool: Pool) -> None:
    pool.group(1, make_group=False).run(no_group)


@spmd(1)
def test_errors_are_one_family_and_also_the_usual_python_types(rank: Rank) -> None:
    for name, base in {
        "InvalidArgument": ValueError,
        "ManifestMismatch": ValueError,
        "ChecksumError": Exception,
        "SyncTimeout": TimeoutError,
        "PeerLost": ConnectionError,
        "PeerFailed": Exception,
        "StateError": RuntimeError,
        "DeviceError": RuntimeError,
        "CommError": RuntimeError,
    }.items():
        kind = getattr(fastsync, name)
        assert issubclass(kind, fastsync.Error) and issubclass(kind, base)


@spmd(1)
def test_transports_is_a_table_of_all_known_names(rank: Rank) -> None:
    table = fastsync.transports()
    assert isinstance(table, dict) and {"shm", "gloo", "nccl", "hccl", "ipc"} <= set(table)
    for name, info in table.items():
        assert info.name == name and isinstance(info.available, bool)
        assert isinstance(info.use_when, str) and info.use_when
        assert info.available or info.reason, f"{name} is unavailable without a reason"
    assert table["shm"].available and table["gloo"].available
    assert isinstance(table["shm"], fastsync.TransportInfo)


@spmd(2)
def test_unavailable_transport_is_refused_with_the_reason_of_the_table(rank: Rank) -> None:
    unavailable = [info for info in fastsync.transports().values() if not info.available]
    assert unavailable, "this machine has every transport; nothing to refuse"
    for info in unavailable:
        with raises("CommError", mentions=[info.name, info.reason]):
            exchange(rank, model(), transport=info.name)
    good = session()
    good_sync(rank, good)
    good.close()


@spmd(2)
def test_arguments_after_the_first_are_keyword_only(rank: Rank) -> None:
    with raises("TypeError"):
        fastsync.broadcast_bucketed({}, 0)  # type: ignore[misc]
    with raises("TypeError"):
        fastsync.receive_bucketed(print, 0)  # type: ignore[misc]


@spmd(2)
def test_progress_option_changes_nothing_but_the_display(rank: Rank) -> None:
    exchange(rank, model(), progress=True)
    exchange(rank, model(), progress=True, mode="load")


@spmd(2)
def test_source_tensors_are_never_changed(rank: Rank) -> None:
    params = model()
    copies = {name: clone_exact(tensor) for name, tensor in params.items()}
    exchange(rank, params, bucket_bytes=512)
    assert_same(params, copies)


@spmd(2)
def test_any_rank_may_be_the_source(rank: Rank) -> None:
    exchange(rank, model(), src=1)
    params = model(9)
    mine = params if rank.index == 1 else poisoned_like(params)
    fastsync.broadcast_bucketed(mine, src=1, timeout_s=20)
    assert_same(mine, params)
