"""Device tensors through every transport, into every kind of receiver: each byte that arrives is compared."""

from __future__ import annotations

import pytest
from device_syncs import Party, device_session, odd_items

from support.markers import each_machine, each_mode
from support.ranks import Rank, spmd

each_carrier = pytest.mark.parametrize("transport", ("ipc", "nccl", "gloo", "shm"))
each_source = pytest.mark.parametrize("source", ("mapping", "generator"))


@each_machine
@each_carrier
@each_source
@each_mode
@spmd(3)
def test_every_kind_of_tensor_arrives_byte_for_byte(
    rank: Rank, machine: str, transport: str, source: str, mode: str
) -> None:
    items = odd_items(any_alignment=machine == "double")
    party = Party(rank, transport, items, mode=mode, source=source, machine=machine)
    with device_session(transport, bucket_bytes=8192) as sync:
        for step in range(3):
            report = party.sync(sync, step)
            assert report.plan_reused == (step > 0)
            assert report.buckets >= 10
