"""What the machine does to us: huge sizes, small limits, strangers on our sockets."""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastsync
from support.markers import each_mode, each_transport
from support.ranks import Group, Pool, Rank, raises, spmd
from support.syncing import exchange, good_sync, receive, session
from support.tensors import assert_same, poisoned_like, random_tensor

TIB = 2**40


def weights() -> dict[str, torch.Tensor]:
    return {f"w{i}": random_tensor((1000 + i,), torch.float32, i) for i in range(10)}


@each_transport
@each_mode
@pytest.mark.parametrize("bucket_bytes", [TIB, 2**50, 2**62])
@spmd(2)
def test_bucket_of_a_tebibyte_is_cut_down_to_the_plan(rank: Rank, transport: str, mode: str, bucket_bytes: int) -> None:
    report = exchange(rank, weights(), bucket_bytes=bucket_bytes, transport=transport, mode=mode)
    assert report.bucket_bytes < 2**20 and report.peak_staging_bytes < 2**21


@each_transport
@spmd(2)
def test_generator_with_a_bucket_of_a_tebibyte_works_or_fails_at_once(rank: Rank, transport: str) -> None:
    began = time.monotonic()
    with session(transport=transport, bucket_bytes=TIB) as sync:
        try:
            exchange(rank, iter(weights().items()), weights(), sync=sync, mode="load")
            failed = False
        except fastsync.Error as error:
            assert "bucket" in str(error)
            failed = True
        assert time.monotonic() - began < 5
        assert len(set(rank.share(failed))) == 1, "one rank failed and the other did not"
        if not failed:
            good_sync(rank, sync)
    with session(transport=transport) as sync:
        good_sync(rank, sync)


def sync_with_little_locked_memory(rank: Rank, transport: str) -> None:
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == 4096
    exchange(rank, weights(), bucket_bytes=2**20, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_small_memlock_limit_is_no_obstacle(pool: Pool, transport: str) -> None:
    pool.group(2, setups=[{"memlock_bytes": 4096}] * 2).run(sync_with_little_locked_memory, transport)


@pytest.mark.parametrize("victim", [0, 1])
@spmd(2, fresh=True)
def test_exhausted_descriptors_are_a_typed_error_and_pass(rank: Rank, victim: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    hoard: list[int] = []
    with session(timeout_s=3) as sync:
        if rank.index == victim:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, limit[0]), limit[1]))
            while True:
                try:
                    hoard.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    break
        rank.barrier()
        try:
            exchange(rank, weights(), sync=sync)
            failed = False
        except fastsync.Error:
            failed = True
        for descriptor in hoard:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert len(set(rank.share(failed))) == 1, "one rank failed and the other did not"
    with session() as sync:
        good_sync(rank, sync)


def syncs_around_strangers(rank: Rank) -> None:
    sync = session(timeout_s=20)
    good_sync(rank, sync)
    rank.hold("idle")
    good_sync(rank, sync)
    if rank.index == 1:
        sync.close()  # its next session connects anew, behind the strangers
        sync = session(timeout_s=20)
    exchange(rank, weights(), sync=sync)
    good_sync(rank, sync)
    sync.close()


def listening_sockets(pid: int) -> list[str]:
    """Addresses of the Unix sockets on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
        except FileNotFoundError:
            continue
        if found:
            inodes.add(found.group(1))
    addresses = []
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & 0x10000 and fields[6] in inodes:
            addresses.append(fields[7])
    return addresses


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "one_byte": b"x",
    "silent": b"",
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_stranger_on_the_listening_socket_disturbs_nobody(pool: Pool, stranger: str) -> None:
    group: Group = pool.group(2)
    running = group.start(syncs_around_strangers)
    for rank in range(2):
        group.wait_mark(rank, "idle")
    addresses = [address for rank in range(2) for address in listening_sockets(group.pid(rank))]
    assert addresses, "no rank listens on a Unix socket; if the design has changed, so must this test"
    connections = []
    for address in addresses * 3:
        connection = _connect("\0" + address[1:] if address.startswith("@") else address)
        connection.settimeout(2)
        try:
            connection.sendall(STRANGERS[stranger])
        except OSError:
            pass  # it hung up on us first
        connections.append(connection)
    for rank in range(2):
        group.release(rank)
    running.results(40)
    for connection in connections:
        connection.close()


def _connect(name: str) -> socket.socket:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        connection = socket.socket(socket.AF_UNIX, kind)
        try:
            connection.connect(name)
        except OSError:
            connection.close()
        else:
            return connection
    raise AssertionError(f"nobody listens on {name!r}")


def test_no_socket_has_a_name_in_the_file_system(pool: Pool) -> None:
    group = pool.group(2)
    running = group.start(syncs_around_strangers)
    for rank in range(2):
        group.wait_mark(rank, "idle")
    addresses = [address for rank in range(2) for address in listening_sockets(group.pid(rank))]
    assert addresses, "no rank listens on a Unix socket; if the design has changed, so must this test"
    for address in addresses:
        assert address.startswith("@"), f"{address} is a file that a killed process would leave behind"
    for rank in range(2):
        group.release(rank)
    running.results(40)


@spmd(2)
def test_sync_works_with_one_torch_thread_or_many(rank: Rank) -> None:
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        exchange(rank, weights())
    torch.set_num_threads(1)


@each_transport
@spmd(2)
def test_default_dtype_and_grad_mode_do_not_matter(rank: Rank, transport: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), session(transport=transport) as sync:
            for mode in ("into", "load", "stream"):
                exchange(rank, weights(), sync=sync, mode=mode)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        exchange(rank, weights(), transport=transport)


@spmd(2)
def test_default_device_of_the_caller_does_not_matter(rank: Rank) -> None:
    params = weights()
    into = poisoned_like(params)
    torch.set_default_device("meta")
    try:
        with session(bucket_bytes=1024) as sync:
            for mode in ("into", "load", "stream", "borrow"):
                if rank.index == 0:
                    sync.broadcast(params)
                elif mode == "into":
                    sync.receive(into=into)
                else:
                    items: list[tuple[str, torch.Tensor]] = []
                    if mode == "load":
                        sync.receive(load=lambda batch, items=items: items.extend(batch))
                    else:
                        items.extend(sync.stream(borrow=mode == "borrow"))
                    assert all(tensor.device.type == "cpu" for _, tensor in items)
    finally:
        torch.set_default_device(None)
    assert rank.index == 0 or assert_same(into, params) is None


@spmd(2)
def test_group_over_a_file_store_works(rank: Rank) -> None:
    import tempfile

    path = rank.share(tempfile.mktemp() if rank.index == 0 else None)[0]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank.index, world_size=2)
    for transport in ("shm", "gloo"):
        with session(transport=transport) as sync:
            good_sync(rank, sync)
    rank.barrier()
    dist.destroy_process_group()
    if rank.index == 0:
        Path(path).unlink(missing_ok=True)


@spmd(2)
def test_group_made_anew_in_one_process_works(rank: Rank) -> None:
    for step in range(3):
        mine = weights() if rank.index == 0 else poisoned_like(weights())
        assert fastsync.broadcast_bucketed(mine, timeout_s=20).version == 1
        assert_same(mine, weights())
        store = dist.PrefixStore(f"again{step}", rank.store)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank.index, world_size=2)


@spmd(2)
def test_receiver_alone_fails_at_its_deadline_and_the_store_is_left_usable(rank: Rank) -> None:
    for attempt in range(2):
        if rank.index == 1:
            with raises("SyncTimeout", rank=0), session(timeout_s=0.5) as sync:
                receive(sync, "load")
        rank.barrier()
        with session() as sync:
            good_sync(rank, sync, seed=float(attempt))
