"""What a sync costs once its plan is known, and that many of them leave nothing behind, by the doubles' journals."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from device_syncs import Item, Party, device_session, odd_items, plain_items

from fastsync import _core
from support.devices import DevicePool, Journal, itemsize_of, journal, ordinal_of
from support.markers import DEVICE_TRANSPORTS, each_device_transport, leak
from support.process import Held
from support.ranks import Rank, raises, spmd

MIB = 2**20
# What a steady sync never calls: it makes nothing, and waits for no stream, context or event by a call that blocks.
MAKES_OR_BLOCKS = (
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemAllocHost_v2",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemCreate",
    "cuMemMap",
    "cuMemAddressReserve",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuIpcGetEventHandle",
    "cuIpcOpenEventHandle",
    "cuModuleLoadData",
    "cuLibraryLoadData",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuMemcpy",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyDtoD_v2",
    "ncclCommInitRank",
    "ncclCommInitRankConfig",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclCommFinalize",
    "ncclGetUniqueId",
    "ncclGetVersion",
)
# Objects that may not grow. What is queued on streams comes and goes.
LIVE = (
    "device_memory",
    "device_bytes",
    "pinned",
    "registration",
    "stream",
    "event",
    "memory_import",
    "event_import",
    "vmm_handle",
    "vmm_reservation",
    "vmm_mapping",
    "module",
    "primary_context",
    "communicator",
    "memory",
)


def counted(party: Party, sync: Any, step: int) -> tuple[dict[str, int], int]:
    """One in-place sync of the values of `step`; the calls that fastsync made in it, and the number of buckets."""
    arguments = party.mine.arguments()
    if party.is_source:
        party.mine.fill(step)
    else:
        party.mine.poison()
    before = journal()
    report = sync.broadcast(arguments) if party.is_source else sync.receive(into=arguments)
    calls = journal().calls_since(before)
    if not party.is_source:
        party.mine.check(step)
    assert report.plan_reused
    return calls, report.buckets


# In a fan-out, ranks 0 and 2 take part in NCCL; ranks 1 and 3 read what those hold.
LEADERS = {"nccl": range(4), "nccl+ipc": (0, 2)}


@pytest.mark.parametrize("transport", [*DEVICE_TRANSPORTS, "nccl+ipc"])
def test_steady_sync_launches_once_a_bucket_and_makes_nothing(pool: DevicePool, transport: str) -> None:
    pool.group(4 if transport == "nccl+ipc" else 3).run(steady_sync, transport)


def steady_sync(rank: Rank, transport: str) -> None:
    party = Party(rank, transport, odd_items()[::3])
    with device_session(transport, bucket_bytes=8192) as sync:
        for step in range(3):
            party.sync(sync, step)
        gc.collect()  # what earlier tests left in this process would be freed while the calls are counted
        for step in range(3, 6):
            calls, buckets = counted(party, sync, step)
            assert buckets >= 5
            made = {name: calls[name] for name in MAKES_OR_BLOCKS if name in calls}
            assert not made, f"a steady sync of {buckets} buckets called {made}"
            assert calls.get("cuLaunchKernel", 0) + calls.get("cuLaunchKernelEx", 0) == buckets
            assert calls.get("ncclBroadcast", 0) == (buckets if rank.index in LEADERS.get(transport, ()) else 0)
            # The tables are on the device already: what is copied are checksums (and, through the host, buckets).
            copies = sum(count for name, count in calls.items() if name.startswith("cuMemcpy"))
            assert copies <= (buckets + 1 if transport == "gloo" else 1), calls


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@spmd(2)
def test_number_of_tensors_does_not_change_the_number_of_calls(rank: Rank, transport: str) -> None:
    few = Party(rank, transport, [Item.of(f"few{i}", "uint8", (16384,)) for i in range(2)])
    many = Party(rank, transport, [Item.of(f"many{i}", "uint8", (256,)) for i in range(128)])
    seen = []
    with device_session(transport, bucket_bytes=8192) as sync:
        for party in (few, many):
            for step in range(2):
                party.sync(sync, step)
            calls, buckets = counted(party, sync, 2)
            assert buckets == 4
            # How often a wait looks depends on time.
            polls = ("cuEventQuery", "ncclCommGetAsyncError", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxPushCurrent")
            ignored = (*polls, "cuCtxPopCurrent_v2", "cuCtxPushCurrent_v2", "cuPointerGetAttribute")
            seen.append({name: count for name, count in calls.items() if name not in ignored})
    for one in seen:  # where each tensor lies is asked once a tensor
        one.pop("cuPointerGetAttributes", None)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@spmd(2)
def test_each_rank_waits_for_its_device_once(rank: Rank, transport: str) -> None:
    # A host wait begins by recording an event behind the queue; there is one such record more than the slots' own.
    party = Party(rank, transport, [Item.of("w", "uint8", (64 * 1024,))])
    records = []
    with device_session(transport, bucket_bytes=8192, buffers=2) as sync:
        for step in range(3):
            party.sync(sync, step)
        calls, buckets = counted(party, sync, 3)
        assert buckets == 8
        records.append(calls["cuEventRecord"])
    per_bucket = {"ipc": 1, "nccl": 2}[transport]
    # What the caller's stream held, the end of our queue for the host, and for the caller's stream.
    assert records[0] <= per_bucket * 8 + 3, records


def rest(rank: Rank, party: Party, sync: Any, step: int) -> tuple[Journal, dict[str, int]]:
    """A good in-place sync, then what this process holds: two such moments are comparable."""
    party.sync(sync, step)
    party.machine.synchronize()
    return journal(), _core.cuda_runtime(party.machine.ordinal).counters


def soak(rank: Rank, transport: str, syncs: int, settle: int, fail_every: int = 0) -> None:
    modes = ("into", "into", "load", "stream", "borrow")
    party = Party(rank, transport, plain_items(12, 500))
    before: tuple[Journal, dict[str, int]] | None = None
    held: Held | None = None
    with device_session(transport, bucket_bytes=4096) as sync:
        for step in range(syncs):
            party.mode = "into"
            if step == settle:
                before, held = rest(rank, party, sync, step), Held.now()
                rank.barrier()
            if fail_every and step % fail_every == fail_every - 1:
                fails(rank, party, sync, step)
                continue
            party.mode = modes[step % len(modes)]
            party.source = "generator" if step % 7 == 6 else "mapping"
            party.sync(sync, step)
        party.mode, party.source = "into", "mapping"
        after, end = rest(rank, party, sync, syncs), Held.now()
        rank.barrier()
    assert before is not None and held is not None
    grown = {kind: (before[0].live.get(kind, 0), after[0].live.get(kind, 0)) for kind in LIVE}
    grown = {kind: (old, new) for kind, (old, new) in grown.items() if new > old}
    assert not grown, f"alive, then and now: {grown}"
    if not fail_every:  # a failure may cost a ring; without one nothing is made at all
        streamed = ("allocations", "allocated_bytes")  # tensors of stream() are allocated for the caller
        for name, count in after[1].items():
            assert name in streamed or count == before[1][name], f"{name}: {before[1][name]}, then {count}"
    end.assert_flat_since(held, rss_slack=6 * MIB)


def fails(rank: Rank, party: Party, sync: Any, step: int) -> None:
    """A sync that fails while buckets are on their way, or before any is."""
    arguments = party.mine.arguments()
    if step % 2:

        def load(batch: list[tuple[str, object]]) -> None:
            seen.append(len(batch))
            if len(seen) == 2:
                raise ValueError("receiver")

        seen: list[int] = []
        with raises("ValueError", "PeerFailed"):
            sync.broadcast(arguments) if party.is_source else sync.receive(load=load)
    else:
        if not party.is_source:
            arguments["t2"] = party.machine.empty(Item.of("t2", "float32", (3,)).destination)
        with raises("ManifestMismatch"):
            sync.broadcast(arguments) if party.is_source else sync.receive(into=arguments)


@leak
@spmd(4, limit_s=120, fresh=True)
def test_hundred_syncs_of_a_fan_out_are_flat(rank: Rank) -> None:
    soak(rank, "nccl+ipc", 100, 40)


@leak
@spmd(4, limit_s=120, fresh=True)
def test_fan_outs_with_a_failure_every_fifth_sync_are_flat(rank: Rank) -> None:
    soak(rank, "nccl+ipc", 80, 40, fail_every=5)


@leak
@each_device_transport
@spmd(2, limit_s=120, fresh=True)
def test_three_hundred_syncs_are_flat(rank: Rank, transport: str) -> None:
    soak(rank, transport, 300 if transport != "gloo" else 120, 40)


@leak
@each_device_transport
@spmd(3, limit_s=120, fresh=True)
def test_syncs_with_a_failure_every_fifth_one_are_flat(rank: Rank, transport: str) -> None:
    soak(rank, transport, 120, 40, fail_every=5)


@leak
@pytest.mark.parametrize("transport", ["ipc", "nccl", "nccl+ipc"])
@spmd(3, limit_s=120, fresh=True)
def test_from_the_fourth_sync_on_nothing_is_made(rank: Rank, transport: str) -> None:
    party = Party(rank, transport, plain_items(12, 500))
    runtime = _core.cuda_runtime(ordinal_of(rank.index, transport))
    with device_session(transport, bucket_bytes=4096) as sync:
        for step in range(3):
            party.sync(sync, step)
        counters, live = runtime.counters, journal().live
        for step in range(3, 40):
            party.sync(sync, step)
        assert runtime.counters == counters
        now = journal().live
        changed = {kind: (live.get(kind, 0), now.get(kind, 0)) for kind in LIVE}
        changed = {kind: (old, new) for kind, (old, new) in changed.items() if old != new}
        assert not changed, f"alive, then and now: {changed}"


@leak
@pytest.mark.parametrize("transport", [*DEVICE_TRANSPORTS, "nccl+ipc"])
def test_sessions_opened_and_closed_leave_nothing(pool: DevicePool, transport: str) -> None:
    pool.device_group(4 if transport == "nccl+ipc" else 2).run(sessions, transport, limit_s=120)


def sessions(rank: Rank, transport: str) -> None:
    party = Party(rank, transport, plain_items(6))

    def once(step: int) -> None:
        with device_session(transport, bucket_bytes=1024) as sync:
            party.sync(sync, step)
        rank.barrier()

    # A session's ring may be kept until the others have closed it, so at rest there are none or one.
    before: dict[str, int] = {}
    held: list[Held] = []
    after: list[Held] = []
    for step in range(16):  # until the doubles' address space is cut up as much as it will be
        once(step)
        before = {kind: max(before.get(kind, 0), journal().live.get(kind, 0)) for kind in LIVE}
        held.append(Held.now())
    rank.barrier()
    for step in range(16, 36):
        once(step)
        after.append(Held.now())
    now = journal().live
    assert all(now.get(kind, 0) <= before.get(kind, 0) for kind in LIVE), (before, dict(now))
    most, least = max(held[8:], key=lambda one: one.fds), min(after[12:], key=lambda one: one.fds)
    least.assert_flat_since(most, rss_slack=4 * MIB)
    rank.barrier()


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@spmd(2)
def test_streamed_tensors_give_their_memory_back(rank: Rank, transport: str) -> None:
    party = Party(rank, transport, plain_items(10), mode="stream")
    alive = []
    with device_session(transport, bucket_bytes=1024) as sync:
        for step in range(8):
            party.sync(sync, step)
            alive.append(journal().live["device_bytes"])
    assert alive[-1] == alive[2], alive


@each_device_transport
@spmd(2)
def test_reported_phases_cover_the_time_of_the_sync(rank: Rank, transport: str) -> None:
    party = Party(rank, transport, [Item.of("w", "float32", (256 * 1024,))])
    assert itemsize_of("float32") == torch.float32.itemsize
    with device_session(transport, bucket_bytes=65536) as sync:
        party.sync(sync, 0)
        report = party.sync(sync, 1)
    assert set(report.phases) == {"plan", "pack", "transfer", "unpack", "wait", "commit"}
    assert all(seconds >= 0 for seconds in report.phases.values())
    assert sum(report.phases.values()) <= report.seconds * 1.05 + 0.01
