"""`verify=True` finds a byte that changed on the way; `verify=False` shows that the test really changes one."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

import fastsync
from support.ranks import Rank, raises, spmd
from support.syncing import good_sync, session
from support.tensors import bytes_of, random_tensor

MARKER = bytes(range(1, 97))


def flip_in_shared_memory(pattern: bytes) -> int:
    """Flips one byte of every copy of `pattern` in this process's shared mappings; returns how many."""
    flipped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.s .*memfd:", line)
        if found is None:
            continue
        start, end = int(found.group(1), 16), int(found.group(2), 16)
        at = ctypes.string_at(start, end - start).find(pattern)
        if at >= 0:
            ctypes.memset(start + at + 50, pattern[50] ^ 0x40, 1)
            flipped += 1
    return flipped


def tampered(rank: Rank, verify: bool) -> None:
    """The source flips a byte of an item that lies in the open bucket, after its checksum was taken."""
    marked = torch.frombuffer(bytearray(MARKER), dtype=torch.uint8)
    flipped = [0]

    def items() -> object:
        yield "before", random_tensor((200,), torch.float32, 1)
        yield "marked", marked.clone()
        flipped[0] = flip_in_shared_memory(MARKER)
        yield "after", random_tensor((200,), torch.float32, 2)

    with session(bucket_bytes=2**20, verify=verify) as sync:
        if verify:
            with raises("ChecksumError" if rank.index else "Error", mentions=["rank 1", "bucket"]):
                sync.broadcast(items()) if rank.index == 0 else sync.receive(load=lambda batch: None)
            assert sync.version is None
            good_sync(rank, sync)
        else:
            got: dict[str, bytes] = {}
            if rank.index == 0:
                sync.broadcast(items())
            else:
                for name, tensor in sync.stream():
                    got[name] = bytes_of(tensor)
                assert got["marked"] != MARKER, "nothing was changed on the way, so this test proves nothing"
        assert rank.index or flipped[0] == 1


@spmd(2)
def test_changed_byte_is_a_checksum_error_that_names_rank_and_bucket(rank: Rank) -> None:
    tampered(rank, verify=True)


@spmd(2)
def test_changed_byte_passes_when_verification_is_off(rank: Rank) -> None:
    tampered(rank, verify=False)


@spmd(3)
def test_checksum_error_reaches_every_rank_and_marks_written_destinations_dirty(rank: Rank) -> None:
    marked = torch.frombuffer(bytearray(MARKER), dtype=torch.uint8)

    def items() -> object:
        for i in range(6):
            yield f"t{i}", torch.full((1024,), float(i))
        yield "marked", marked.clone()
        flip_in_shared_memory(MARKER)
        yield "after", torch.ones(8)

    into = {f"t{i}": torch.zeros(1024) for i in range(6)}
    into |= {"marked": torch.zeros(96, dtype=torch.uint8), "after": torch.zeros(8)}
    with session(bucket_bytes=4096) as sync:
        with raises("ChecksumError", "PeerFailed", mentions=["bucket"]) as caught:
            sync.broadcast(items()) if rank.index == 0 else sync.receive(into=into)
        assert isinstance(caught.error, fastsync.Error) and caught.seconds < 5
        assert sync.version is None
        if rank.index:
            assert sync.dirty and bool((into["t1"] == 1).all())
        good_sync(rank, sync)
