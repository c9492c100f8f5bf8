"""One rank of test_two_hosts.py: argv is rank, file of the store, output file. Runs in a network namespace of its own."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

import fastsync


def main() -> None:
    rank, store_file, out_file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ["GLOO_SOCKET_IFNAME"] = f"veth{rank}"
    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=2)
    seen: list[object] = []
    weights = {"a": torch.zeros(300_000), "b": torch.zeros(3, dtype=torch.int64)}

    def sync(session: fastsync.WeightSync, value: int) -> None:
        if rank == 0:
            for tensor in weights.values():
                tensor.fill_(value)
            report = session.broadcast(weights)
        else:
            report = session.receive(into=weights)
            assert all(bool((tensor == value).all()) for tensor in weights.values())
        seen.append([report.version, report.transport])

    def boom(_: object) -> None:
        raise ValueError("boom")

    with fastsync.WeightSync(timeout_s=30) as session:
        sync(session, 5)
        sync(session, 6)
        try:
            if rank == 0:
                session.broadcast(weights)
            else:
                session.receive(load=boom)
        except (fastsync.PeerFailed, ValueError) as error:
            seen.append([type(error).__name__, str(error)])
        sync(session, 7)
    try:
        with fastsync.WeightSync(timeout_s=30, transport="shm") as session:
            sync(session, 8)
    except fastsync.CommError as error:
        seen.append(["CommError", str(error)])
    with open(out_file, "w") as out:
        json.dump(seen, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
