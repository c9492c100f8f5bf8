"""What the microbenchmarks share: the native module, touched memory, and a receiver to hand buckets to."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

TIMEOUT_S = 60.0

Bytes = npt.NDArray[np.uint8]


@pytest.fixture(scope="session")
def core() -> ModuleType:
    return pytest.importorskip("fastsync._core", reason="the native module is not built")


@pytest.fixture
def memory() -> Callable[[int], Bytes]:
    """Makes memory whose every page has been touched."""

    def make(nbytes: int) -> Bytes:
        return np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)

    return make


def _join(rank: int, port: int) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    return dist


def _receiver(port: int, control: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    import fastsync

    _join(1, port)
    sessions: dict[str, Any] = {}
    try:
        while True:
            # (session, keywords, sizes): one more sync of bfloat16 tensors of these many bytes.
            name, keywords, sizes = control.recv()
            if name not in sessions:
                into = {str(i): torch.zeros(n // 2, dtype=torch.bfloat16) for i, n in enumerate(sizes)}
                sessions[name] = (fastsync.WeightSync(src=0, timeout_s=TIMEOUT_S, **keywords), into)
            session, into = sessions[name]
            session.receive(into=into)
    except EOFError:
        os._exit(0)


class Partner:
    """A receiver in another process; `run` does one sync with it and returns fastsync's report.

    `sizes` are the bytes of the tensors; even numbers, as they are bfloat16.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        spawn = multiprocessing.get_context("spawn")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._control, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_receiver, args=(self._store.port, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._dist = _join(0, self._store.port)
        self._sessions: dict[str, Any] = {}

    def run(self, name: str, sizes: list[int], **keywords: Any) -> Any:
        import torch

        import fastsync

        if name not in self._sessions:
            params = {str(i): torch.ones(n // 2, dtype=torch.bfloat16) for i, n in enumerate(sizes)}
            self._sessions[name] = (fastsync.WeightSync(src=0, timeout_s=TIMEOUT_S, **keywords), params)
        self._control.send((name, keywords, sizes))
        session, params = self._sessions[name]
        return session.broadcast(params)

    def close(self) -> None:
        for session, _ in self._sessions.values():
            session.close()
        self._control.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._dist.destroy_process_group()


@pytest.fixture(scope="session")
def partner(core: ModuleType) -> Iterator[Partner]:
    made = Partner()
    yield made
    made.close()
