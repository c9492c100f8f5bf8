"""build_topology() and the registry: pure functions of what they are given."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest

import fastsync
from fastsync.engine import AutoCheckpointEngine, CheckpointEngine, ShmCheckpointEngine, get, names, new, register
from fastsync.engine import registry as registry_module


def told(trainers: int, workers: int) -> list[dict[str, Any]]:
    store = {"id": "s", "host": "h", "ips": ["192.0.2.7"], "port": 1234}
    metadata = [{"fastsync": 1, "member": f"t{i}", "joined": None} for i in range(trainers)]
    metadata[0]["store"] = store
    return metadata + [{"fastsync": 1, "member": f"w{i}", "joined": None} for i in range(workers)]


def build(trainers: int, workers: int, metadata: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    return AutoCheckpointEngine.build_topology(trainers, workers, metadata)


def joined(metadata: list[dict[str, Any]], trainers: int, place: dict[str, Any]) -> list[dict[str, Any]]:
    """What the same processes say once they have met in `place`."""
    after = copy.deepcopy(metadata)
    for number, entry in enumerate(after):
        if number == 0 or number >= trainers:
            entry["joined"] = [place["members"], place["token"]]
    return after


def test_the_first_trainer_sends_to_every_worker_and_the_others_take_no_part() -> None:
    trainers, workers = build(3, 2, told(3, 2))
    assert trainers["rank"] == [0, -1, -1] and workers["rank"] == [1, 2]
    assert trainers["world_size"] == [3] * 3 and workers["world_size"] == [3] * 2
    assert trainers["master_metadata"][0] == workers["master_metadata"][1]
    assert pickle.loads(pickle.dumps((trainers, workers))) == (trainers, workers)


def test_the_same_processes_keep_their_token() -> None:
    metadata = told(2, 2)
    place = build(2, 2, metadata)[0]["master_metadata"][0]
    again = build(2, 2, joined(metadata, 2, place))[0]["master_metadata"][0]
    assert again == place
    assert build(2, 2, metadata)[0]["master_metadata"][0]["token"] != place["token"]  # never met, or met elsewhere


@pytest.mark.parametrize("change", ["worker", "order", "store", "lost", "trainer lost", "fewer"])
def test_any_change_makes_a_fresh_token(change: str) -> None:
    metadata = told(2, 2)
    place = build(2, 2, metadata)[0]["master_metadata"][0]
    after = joined(metadata, 2, place)
    workers = 2
    if change == "worker":
        after[3]["member"] = "new"
    elif change == "order":
        after[2], after[3] = after[3], after[2]
    elif change == "store":
        after[0]["store"]["port"] = 4321
    elif change == "lost":
        after[3]["joined"] = None
    elif change == "trainer lost":
        after[0]["joined"] = None
    else:
        del after[3]
        workers = 1
    assert build(2, workers, after)[0]["master_metadata"][0]["token"] != place["token"]


def test_a_trainer_without_a_part_may_come_and_go() -> None:
    metadata = told(2, 2)
    place = build(2, 2, metadata)[0]["master_metadata"][0]
    after = joined(metadata, 2, place)
    after[1]["member"] = "new"
    assert build(2, 2, after)[0]["master_metadata"][0] == place


@pytest.mark.parametrize(
    ("trainers", "workers", "metadata", "text"),
    [
        (0, 1, told(1, 1), "trainer world size is 0"),
        (1, 0, told(1, 0), "rollout world size is 0"),
        (1, 1, told(1, 1)[1:], "0 of 1 processes call themselves master"),
        (1, 1, told(1, 0) + told(1, 0), "2 of 2"),
        (2, 1, [told(2, 1)[1], told(2, 1)[0], told(2, 1)[2]], "not the first trainer"),
        (2, 2, told(2, 2)[:3], "metadata of 3 processes"),
        (1, 2, [*told(1, 1), told(1, 1)[1]], "listed twice"),
        (1, 1, [{"zmq_ip": "x"}, {}], "no fastsync engine made"),
        (1, 1, [dict(told(1, 0)[0], fastsync=2)], "format 2"),
    ],
)
def test_bad_metadata_is_refused(trainers: int, workers: int, metadata: list[Any], text: str) -> None:
    with pytest.raises(fastsync.InvalidArgument, match=text):
        build(trainers, workers, metadata)


# --- the registry


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_engines", dict(registry_module._engines))
    monkeypatch.setattr(registry_module, "_missing", {})


def test_the_engines_are_known_by_name() -> None:
    assert names() == ["auto", "gloo", "hccl", "nccl", "shm"]
    assert get("shm") is ShmCheckpointEngine
    assert isinstance(new("shm", bucket_size=1 << 20), ShmCheckpointEngine)


@pytest.mark.usefixtures("clean_registry")
def test_another_package_adds_an_engine_but_takes_no_name() -> None:
    @register("mine")
    class Mine(ShmCheckpointEngine):
        pass

    assert get("mine") is Mine
    register("mine")(Mine)  # the same one again
    with pytest.raises(fastsync.InvalidArgument, match=r"'shm' is taken by fastsync\.engine"):
        register("shm")(Mine)
    assert get("shm") is ShmCheckpointEngine
    with pytest.raises(fastsync.InvalidArgument, match="not a subclass"):
        register("other")(dict)  # type: ignore[type-var]


@pytest.mark.usefixtures("clean_registry")
def test_a_missing_dependency_is_named_with_what_to_install() -> None:
    @register("rdma", requires=["sys", "no_such_module_7", "no_such_package_7.inner"], extra="fancy[rdma]")
    class Rdma(ShmCheckpointEngine):
        pass

    with pytest.raises(fastsync.CommError, match=r"no_such_module_7, no_such_package_7\.inner.*fancy\[rdma\]"):
        get("rdma")
    registry_module.register_missing("broken", ImportError("libfoo.so.1: cannot open"))
    with pytest.raises(fastsync.CommError, match=r"libfoo\.so\.1"):
        get("broken")
    with pytest.raises(fastsync.InvalidArgument, match=r"unknown engine 'shn'.*'shm'.*broken"):
        get("shn")
    registry_module.register_missing("shm", ImportError("late"))
    assert get("shm") is ShmCheckpointEngine


def test_importing_the_engines_imports_no_framework() -> None:
    assert issubclass(ShmCheckpointEngine, CheckpointEngine)
    assert not {"ray", "verl", "twinkle", "vllm"} & set(sys.modules)
