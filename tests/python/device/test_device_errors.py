"""What cannot work is refused with the reason and the remedy, on every rank, and the group goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from device_syncs import HostTensors, Item, Party, Tensors, device_session, plain_items

import fastsync
from support.devices import DevicePool, machine_of
from support.markers import each_device_transport
from support.ranks import Failure, Group, Rank, raises, spmd

ITEMS = plain_items(5)


def per_rank(pool: DevicePool, *settings: Mapping[str, object]) -> Group:
    return pool.group(len(settings), setups=[{"device": one} for one in settings])


# --- tensors in the wrong place ---------------------------------------------------------------------------------------


@each_device_transport
@pytest.mark.parametrize("blame", [0, 1])
@spmd(3)
def test_tensors_on_two_devices_are_refused_by_name(rank: Rank, transport: str, blame: int) -> None:
    party = Party(rank, transport, ITEMS)
    with device_session(transport) as sync:
        arguments = party.mine.arguments()
        if rank.index == blame:
            elsewhere = machine_of("double", 3)
            arguments["t3"] = elsewhere.empty(ITEMS[3].source)
            party.machine.enter()
        mine = rank.index == blame
        kind = "InvalidArgument" if mine else "ManifestMismatch"
        with raises(kind, rank=None if mine else blame, mentions=["t3", "device"]) as caught:
            sync.broadcast(arguments) if rank.index == 0 else sync.receive(into=arguments)
        assert caught.seconds < 5
        party.sync(sync, 1)


@each_device_transport
@spmd(2)
def test_generator_that_changes_devices_is_refused_by_name(rank: Rank, transport: str) -> None:
    party = Party(rank, transport, ITEMS)
    with device_session(transport, bucket_bytes=1024) as sync:
        arguments = party.mine.arguments()
        if rank.index == 0:
            arguments["t3"] = machine_of("double", 3).empty(ITEMS[3].source)
            party.machine.enter()
            with raises("InvalidArgument", mentions=["t3", "cuda:3"]):
                sync.broadcast(iter(arguments.items()))
        else:
            with raises("ManifestMismatch", rank=0, mentions=["t3"]):
                sync.receive(into=arguments)
        party.sync(sync, 1)


@each_device_transport
@spmd(2)
def test_cpu_tensor_among_device_tensors_is_refused_by_name(rank: Rank, transport: str) -> None:
    party = Party(rank, transport, ITEMS)
    with device_session(transport) as sync:
        arguments = party.mine.arguments()
        if rank.index == 0:
            arguments["t2"] = HostTensors(ITEMS).tensors["t2"]
        with raises("InvalidArgument" if rank.index == 0 else "ManifestMismatch", mentions=["t2", "CPU"]):
            sync.broadcast(arguments) if rank.index == 0 else sync.receive(into=arguments)
        party.sync(sync, 1)


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@pytest.mark.parametrize("on_cpu", [0, 2])
@spmd(3)
def test_named_device_transport_needs_device_tensors_on_every_rank(rank: Rank, transport: str, on_cpu: int) -> None:
    party = Party(rank, transport, ITEMS)
    with device_session(transport) as sync:
        mine: Any = HostTensors(ITEMS) if rank.index == on_cpu else party.mine
        with raises("CommError", mentions=[f"'{transport}'", f"rank {on_cpu}", "CPU"]) as caught:
            sync.broadcast(mine.arguments()) if rank.index == 0 else sync.receive(into=mine.arguments())
        assert caught.seconds < 5
        party.sync(sync, 1)


@spmd(2)
def test_address_that_is_not_the_devices_is_refused(rank: Rank) -> None:
    class Elsewhere:
        shape = (4,)
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (4,),
            "typestr": "<f4",
            "data": (0x1234000, False),
            "strides": None,
            "version": 3,
            "stream": 1,
        }

    party = Party(rank, "ipc", ITEMS)
    with device_session("ipc") as sync:
        arguments = party.mine.arguments()
        if rank.index == 0:
            arguments["t1"] = Elsewhere()
        with raises("InvalidArgument" if rank.index == 0 else "ManifestMismatch", mentions=["t1", "0x1234000"]):
            sync.broadcast(arguments) if rank.index == 0 else sync.receive(into=arguments)
        party.sync(sync, 1)


# --- devices that do not fit -------------------------------------------------------------------------------------------


def syncs_on(
    rank: Rank, ordinals: Sequence[int], transport: str, expected: str, wanted: Sequence[str] = ()
) -> str | None:
    """Two syncs with this rank's tensors on `ordinals[rank]`; they succeed over `expected`, or fail with it."""
    machine = machine_of("double", ordinals[rank.index])
    mine = Tensors(machine, ITEMS, "source" if rank.index == 0 else "destination")
    with device_session(transport, bucket_bytes=1024, timeout_s=10.0) as sync:
        for step in range(2):
            if expected.endswith("Error"):
                with raises(expected, mentions=wanted) as caught:
                    sync.broadcast(mine.arguments()) if rank.index == 0 else sync.receive(into=mine.arguments())
                assert caught.seconds < 5
                continue
            mine.fill(step) if rank.index == 0 else mine.poison()
            report = sync.broadcast(mine.arguments()) if rank.index == 0 else sync.receive(into=mine.arguments())
            assert report.transport == expected
            if rank.index:
                mine.check(step)
    return None


def test_nccl_refuses_ranks_that_are_all_on_one_device(pool: DevicePool) -> None:
    wanted = ["ranks 0 and 1", "share a device", "'ipc'", "NCCL_MULTI_RANK_GPU_ENABLE"]
    pool.group(3).run(syncs_on, [1, 1, 1], "nccl", "CommError", wanted)
    pool.group(3).run(syncs_on, [0, 1, 1], "nccl", "nccl+ipc")
    pool.group(3).run(syncs_on, [2, 1, 2], "nccl", "nccl+ipc")


def test_ipc_refuses_different_devices(pool: DevicePool) -> None:
    pool.group(3).run(syncs_on, [0, 0, 1], "ipc", "CommError", ["rank 2", "device is another than rank 0's"])


def test_one_device_is_one_under_different_ordinals(pool: DevicePool) -> None:
    group = per_rank(
        pool, {"CUDA_VISIBLE_DEVICES": "0,2"}, {"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "3,1,2"}
    )
    group.run(syncs_on, [1, 0, 2], "ipc", "ipc")
    group.run(syncs_on, [1, 0, 2], "auto", "ipc")
    group.run(syncs_on, [1, 0, 2], "nccl", "CommError", ["share a device"])


def test_different_devices_are_different_under_one_ordinal(pool: DevicePool) -> None:
    group = per_rank(pool, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"})
    group.run(syncs_on, [0, 0], "ipc", "CommError", ["rank 1", "device is another than rank 0's"])
    group.run(syncs_on, [0, 0], "nccl", "nccl")
    group.run(syncs_on, [0, 0], "auto", "nccl")


def test_devices_named_by_uuid_are_found(pool: DevicePool) -> None:
    uuid = "GPU-66616b65-2d64-6576-6963-652d00000001"
    group = per_rank(pool, {"CUDA_VISIBLE_DEVICES": uuid}, {"CUDA_VISIBLE_DEVICES": "0,1"})
    group.run(syncs_on, [0, 1], "auto", "ipc")


# --- libraries that do not fit -----------------------------------------------------------------------------------------


def test_different_nccl_versions_are_refused_with_both(pool: DevicePool) -> None:
    group = per_rank(pool, {}, {"FASTSYNC_FAKE_NCCL_VERSION": 22705}, {})
    group.run(syncs_on, [0, 1, 2], "nccl", "CommError", ["rank 1", "22705", "22809", "FASTSYNC_NCCL_PATH"])
    group.run(syncs_on, [0, 1, 2], "auto", "gloo")


@pytest.mark.parametrize("lacking", [0, 1])
def test_rank_without_nccl_is_named(pool: DevicePool, lacking: int) -> None:
    settings: list[dict[str, object]] = [{}, {}, {}]
    settings[lacking] = {"FASTSYNC_NCCL_PATH": "/nowhere/libnccl.so.2"}
    group = per_rank(pool, *settings)
    outcomes = group.start(opens_nccl, ranks=[lacking]).join(30)
    outcomes[lacking].expect("CommError", mentions=["/nowhere/libnccl.so.2", "FASTSYNC_NCCL_PATH"])
    group.run(syncs_on, [0, 1, 2], "auto", "gloo")


def opens_nccl(rank: Rank) -> None:
    device_session("nccl").close()


def capabilities(rank: Rank) -> dict[str, tuple[bool, str]]:
    return {name: (info.available, info.reason) for name, info in fastsync.transports().items()}


def refusal(rank: Rank, transport: str) -> Failure:
    """What a session of an unavailable transport raises."""
    try:
        device_session(transport).close()
    except fastsync.Error as error:
        return Failure.of(error)
    raise AssertionError(f"transport '{transport}' is available")


NO_CUDA = {
    "no driver": ({"FASTSYNC_CUDA_PATH": "/nowhere/libcuda.so.1"}, ["no CUDA driver", "install the NVIDIA driver"]),
    "not a driver": ({"FASTSYNC_CUDA_PATH": "/etc/hostname"}, ["no CUDA driver", "/etc/hostname"]),
    "too old": ({"FASTSYNC_FAKE_DRIVER": 11080}, ["11.8", "12.0", "update the NVIDIA driver"]),
    "stub": ({"FASTSYNC_FAKE_CUDA_INIT": 34}, ["stub", "LD_LIBRARY_PATH"]),
    "no device": ({"FASTSYNC_FAKE_CUDA_INIT": 100}, ["cuInit", "CUDA_VISIBLE_DEVICES"]),
    "hidden device": ({"CUDA_VISIBLE_DEVICES": ""}, ["CUDA_VISIBLE_DEVICES"]),
    "mismatch": ({"FASTSYNC_FAKE_CUDA_INIT": 803}, ["kernel module", "libcuda"]),
    "double": ({"FASTSYNC_ALLOW_FAKE": None}, ["test double", "FASTSYNC_ALLOW_FAKE"]),
}
NO_NCCL = {
    "no library": ({"FASTSYNC_NCCL_PATH": "/nowhere/libnccl.so.2"}, ["/nowhere/libnccl.so.2"]),
    "not NCCL": ({"FASTSYNC_NCCL_PATH": "libm.so.6"}, ["NCCL"]),
    "too old": ({"FASTSYNC_FAKE_NCCL_VERSION": 21205}, ["2.12.5", "install nvidia-nccl-cu"]),
}


@pytest.mark.parametrize("case", NO_CUDA)
def test_table_says_why_cuda_cannot_be_used(pool: DevicePool, case: str) -> None:
    settings, wanted = NO_CUDA[case]
    group = per_rank(pool, settings)
    [table] = group.run(capabilities)
    for transport in ("ipc", "nccl"):
        available, reason = table[transport]
        assert not available
        [failure] = group.run(refusal, transport)
        assert failure.type_name == "CommError"
        for text in wanted:
            assert text in reason, reason
            assert text in failure.message, failure.message
    assert table["shm"][0] and table["gloo"][0]


@pytest.mark.parametrize("case", NO_NCCL)
def test_table_says_why_nccl_cannot_be_used(pool: DevicePool, case: str) -> None:
    settings, wanted = NO_NCCL[case]
    group = per_rank(pool, settings)
    [table] = group.run(capabilities)
    assert table["ipc"][0], table["ipc"]
    available, reason = table["nccl"]
    assert not available
    [failure] = group.run(refusal, "nccl")
    assert failure.type_name == "CommError"
    for text in wanted:
        assert text in reason, reason
        assert text in failure.message, failure.message


@spmd(1)
def test_table_says_that_a_double_is_one(rank: Rank) -> None:
    table = fastsync.transports()
    assert table["nccl"].available and table["ipc"].available
    assert "2.28.9" in table["nccl"].reason
    assert "test double" in table["nccl"].reason and "test double" in table["ipc"].reason


def on_cpu_without_cuda(rank: Rank) -> None:
    """A rank on the CPU neither needs CUDA nor opens it."""
    mine = HostTensors([Item.of("a", "float32", (1000,))])
    with device_session("auto") as sync:
        report = sync.broadcast(mine.arguments()) if rank.index == 0 else sync.receive(into=mine.arguments())
        assert report.transport == "shm"


def test_cpu_ranks_do_not_mind_a_broken_driver(pool: DevicePool) -> None:
    per_rank(pool, {"FASTSYNC_FAKE_CUDA_INIT": 999}, {"FASTSYNC_CUDA_PATH": "/nowhere"}).run(on_cpu_without_cuda)


# --- containers that refuse sharing -------------------------------------------------------------------------------------


def test_refused_memory_handles_name_the_remedy(pool: DevicePool) -> None:
    group = per_rank(pool, {}, {"FASTSYNC_FAKE_NO_IPC": "mem"}, {})
    group.run(syncs_on, [0, 0, 0], "ipc", "DeviceError", ["cuIpcOpenMemHandle", "FASTSYNC_IPC=vmm"])
    group.run(syncs_on, [0, 0, 0], "gloo", "gloo")


def test_refused_memory_handles_are_not_needed_with_descriptors(pool: DevicePool) -> None:
    per_rank(pool, *[{"FASTSYNC_FAKE_NO_IPC": "mem", "FASTSYNC_IPC": "vmm"}] * 3).run(syncs_on, [0, 0, 0], "ipc", "ipc")


@pytest.mark.parametrize("seed", [1, 2])
def test_where_events_are_refused_the_hosts_order_the_buckets(pool: DevicePool, seed: int) -> None:
    settings = {"FASTSYNC_FAKE_NO_IPC": "event", "FASTSYNC_FAKE_SEED": seed, "FASTSYNC_FAKE_DELAY_US": 2000}
    group = per_rank(pool, settings, settings, settings)
    group.run(syncs_on, [0, 0, 0], "ipc", "ipc")
    group.run(syncs_on_in_every_way, limit_s=60)


def syncs_on_in_every_way(rank: Rank) -> None:
    for mode in ("into", "load", "stream", "borrow"):
        for source in ("mapping", "generator"):
            party = Party(rank, "ipc", plain_items(12), mode=mode, source=source)
            with device_session("ipc", bucket_bytes=2048) as sync:
                for step in range(2):
                    party.sync(sync, step)


@pytest.mark.parametrize("refusing", [0, 1])
def test_events_that_one_rank_alone_refuses_end_in_order_or_in_an_error(pool: DevicePool, refusing: int) -> None:
    settings: list[dict[str, object]] = [{}, {}, {}]
    settings[refusing] = {"FASTSYNC_FAKE_NO_IPC": "event"}
    outcomes = per_rank(pool, *settings).outcomes(syncs_on, [0, 0, 0], "ipc", "ipc")
    if any(not outcome.ok for outcome in outcomes.values()):
        for outcome in outcomes.values():
            failure = outcome.expect("DeviceError", "CommError", "PeerFailed")
            assert "event" in failure.message.lower(), failure.message


def test_process_that_was_forked_after_cuda_says_so(pool: DevicePool) -> None:
    [said] = pool.device_group(1).run(asks_in_a_forked_child)
    assert "fork" in said and "spawn" in said, said


def asks_in_a_forked_child(rank: Rank) -> str:
    machine_of("double", 0)
    assert fastsync.transports()["ipc"].available
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, fastsync.transports()["ipc"].reason.encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 65536).decode()
    os.close(read)
    os.waitpid(child, 0)
    return text
