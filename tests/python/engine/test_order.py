"""Calls in the wrong order, and arguments that are wrong."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fastsync
from fastsync.engine import AutoCheckpointEngine, HCCLCheckpointEngine, ShmCheckpointEngine


def send(engine: Any, weights: Any = ()) -> Any:
    return asyncio.run(engine.send_weights(iter(weights)))


def receive(engine: Any) -> list[Any]:
    async def all_of() -> list[Any]:
        return [item async for item in engine.receive_weights()]

    return asyncio.run(all_of())


def place_of(*engines: Any) -> dict[str, Any]:
    """Where these engines meet; prepares them."""
    told = [engine.prepare() for engine in engines]
    trainers, _ = AutoCheckpointEngine.build_topology(1, max(1, len(engines) - 1), told[:1])
    return trainers["master_metadata"][0]


def ready(rank: int) -> ShmCheckpointEngine:
    """An engine after init_process_group() whose peers will not come."""
    master = ShmCheckpointEngine(is_master=True, timeout=1.0)
    place = place_of(master)
    if rank == 0:
        master.init_process_group(rank=0, world_size=2, master_metadata=place)
        return master
    engine = ShmCheckpointEngine(timeout=1.0)
    engine.master = master  # type: ignore[attr-defined]  # whose store it is
    engine.prepare()
    engine.init_process_group(rank=rank, world_size=2, master_metadata=place)
    return engine


@pytest.mark.parametrize(
    ("made", "call"),
    [
        (lambda: ShmCheckpointEngine(), lambda e: e.init_process_group(rank=1, world_size=2, master_metadata={})),
        (lambda: ShmCheckpointEngine(is_master=True), send),
        (lambda: ShmCheckpointEngine(), receive),
        (lambda: ready(0), lambda e: e.init_process_group(rank=0, world_size=2, master_metadata={})),
        (lambda: ready(0), receive),
        (lambda: ready(1), send),
        (lambda: ready(-1), receive),
        (lambda: _after(ready(0), "finalize"), send),
        (lambda: _after(ready(1), "finalize"), receive),
        (lambda: _after(ready(0), "prepare"), send),
    ],
)
def test_a_call_out_of_order_is_a_state_error(made: Callable[[], Any], call: Callable[[Any], Any]) -> None:
    with pytest.raises(fastsync.StateError, match=r"prepare|rank"):
        call(made())


def _after(engine: Any, name: str) -> Any:
    getattr(engine, name)()
    return engine


def test_a_call_during_an_update_is_a_state_error() -> None:
    engine = ready(0)
    seen: list[BaseException] = []

    class Weights:
        def __iter__(self) -> Iterator[Any]:
            for call in (engine.prepare, engine.finalize):
                try:
                    call()
                except fastsync.StateError as error:
                    seen.append(error)
            return iter([])

    with pytest.raises(fastsync.SyncTimeout):
        asyncio.run(engine.send_weights(Weights()))
    assert len(seen) == 2 and all("send_weights() runs" in str(error) for error in seen)


def test_a_trainer_without_a_part_only_exhausts_the_weights() -> None:
    engine = ready(-1)
    thread = threading.get_ident()
    pulled: list[int] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(5):
            pulled.append(threading.get_ident())
            yield f"w{i}", torch.zeros(1)

    assert asyncio.run(engine.send_weights(weights())) == {}
    assert pulled == [thread] * 5


def test_only_the_master_can_be_rank_zero() -> None:
    master, other = ShmCheckpointEngine(is_master=True), ShmCheckpointEngine()
    place = place_of(master, other)
    with pytest.raises(fastsync.StateError, match="is_master=False"):
        other.init_process_group(rank=0, world_size=2, master_metadata=place)
    with pytest.raises(fastsync.StateError, match="is_master=True"):
        master.init_process_group(rank=1, world_size=2, master_metadata=place)


def test_finalize_is_allowed_whenever_no_update_runs() -> None:
    engine = ShmCheckpointEngine()
    assert engine.finalize() == {"version": None, "dirty": False}
    engine.prepare()
    assert engine.finalize() == {"version": None, "dirty": False}
    engine.close()
    engine.close()


def test_an_engine_does_not_survive_fork() -> None:
    engine = ShmCheckpointEngine(is_master=True)
    engine.prepare()
    child = os.fork()
    if child == 0:
        try:
            engine.prepare()
        except fastsync.StateError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bucket_size": 0}, "bucket_bytes is 0"),
        ({"timeout": float("nan")}, "timeout_s"),
        ({"timeout": 0}, "timeout_s"),
        ({"buffers": 65}, "buffers is 65"),
        ({"verify": 1}, "verify"),
        ({"is_master": "twinkle_ckpt"}, "is_master"),
        ({"multi_sender": True}, "no option 'multi_sender'"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(fastsync.InvalidArgument, match=text):
        ShmCheckpointEngine(**options)


@pytest.mark.parametrize("step", [-1, 1 << 63, 1.5, True, "7"])
def test_a_bad_step_is_refused(step: Any) -> None:
    with pytest.raises(fastsync.InvalidArgument, match="global_steps"):
        asyncio.run(ready(0).send_weights(iter([]), global_steps=step))


def test_an_engine_without_its_transport_says_why() -> None:
    reason = fastsync.transports()["hccl"].reason
    assert HCCLCheckpointEngine.unavailable_reason() == reason
    with pytest.raises(fastsync.CommError, match=reason):
        HCCLCheckpointEngine()


def test_a_master_that_has_ended_is_an_error_that_says_so() -> None:
    master, worker = ShmCheckpointEngine(is_master=True), ShmCheckpointEngine(timeout=2.0)
    place = place_of(master, worker)
    master.close()
    del master
    with pytest.raises(fastsync.CommError, match="master"):
        worker.init_process_group(rank=1, world_size=2, master_metadata=place)
