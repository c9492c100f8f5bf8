"""The real vLLM on CPUs, over fastsync: a server with one worker (Llama), an LLM with two (Qwen3), one with experts.

This process trains; Hugging Face's model with the same weights says which tokens are right.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm_models
from vllm_server import HERE, Server, environment

import fastsync
from fastsync.integrations.vllm import HttpClient, LocalClient, RpcClient, VllmTrainer, register

TIMEOUT_S = 60.0
# Layers span buckets of this size, and buckets are reused many times in one update.
BUCKET_BYTES = 60_000


def trainer_for(client: Any, workers: int, **options: Any) -> VllmTrainer:
    options = {"transport": "shm", "bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S, **options}
    return VllmTrainer(client, workers=workers, **options)


class Job:
    """A trainer's model and the engine that is to answer as it does."""

    def __init__(self, model: Any, engine: Any, client: Any, workers: int) -> None:
        self.model = model
        self.engine = engine
        self.client = client
        self.workers = workers
        self.step = 0
        self.trainer = trainer_for(client, workers)

    def train(self) -> None:
        self.step += 1
        vllm_models.train(self.model, self.step)

    def update(self) -> fastsync.SyncReport:
        """One good step, after which the engine answers as Hugging Face's model."""
        self.train()
        report = self.trainer.update(vllm_models.checkpoint(self.model))
        self.check()
        return report

    def check(self) -> None:
        assert self.engine.answers() == vllm_models.answers(self.model)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def state(self) -> list[dict[str, Any]]:
        return RpcClient(self.engine.rpc, TIMEOUT_S).state()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One worker behind HTTP."""
    folder = tmp_path_factory.mktemp("llama")
    model = vllm_models.make("llama", folder)
    engine = Server(folder)
    try:
        yield Job(model, engine, engine.client, 1)
    finally:
        engine.stop()


class Local:
    """An LLM of this process, asked as the server is."""

    def __init__(self, folder: Path, workers: int) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            tensor_parallel_size=workers,
            weight_transfer_config={"backend": "fastsync"},
            worker_extension_cls="vllm_probe.Probe",
        )

    def answers(self) -> list[list[int]]:
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=vllm_models.NEW_TOKENS, ignore_eos=True, detokenize=False)
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in vllm_models.PROMPTS]
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts, wanted, use_tqdm=False)]

    def rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return list(self.llm.collective_rpc(method, timeout, args))


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two workers, tensor parallel, in an LLM of this process."""
    yield from local_job("qwen3", tmp_path_factory.mktemp("qwen3"), 2)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One worker with a mixture of experts, in an LLM of this process."""
    yield from local_job("experts", tmp_path_factory.mktemp("experts"), 1)


def local_job(kind: str, folder: Path, workers: int) -> Iterator[Job]:
    model = vllm_models.make(kind, folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        engine = Local(folder, workers)
        try:
            yield Job(model, engine, LocalClient(engine.llm), workers)
        finally:
            engine.llm.llm_engine.engine_core.shutdown()


# --- good updates


def test_five_steps_through_the_http_server(server: Job) -> None:
    for step in range(1, 6):
        report = server.update()
        assert report.transport == "shm" and report.version == step
        assert report.buckets > 10
        assert report.plan_reused == (step > 1)
        assert server.client.weight_version() == str(step)


def test_five_steps_to_two_tensor_parallel_workers(two_workers: Job) -> None:
    for step in range(1, 6):
        report = two_workers.update()
        assert report.version == step
        assert [each["version"] for each in two_workers.state()] == [step, step]


def test_experts_are_packed_anew_for_vllms_kernel(experts: Job) -> None:
    for _ in range(3):
        experts.update()
    before = vllm_models.answers(experts.model)
    experts.engine.rpc("probe_fail_in_bucket", None, (0, 20))
    experts.train()
    try:
        with pytest.raises(fastsync.PeerFailed, match="the disk is full"):
            experts.trainer.update(vllm_models.checkpoint(experts.model))
        assert experts.engine.answers() == before
    finally:
        experts.engine.rpc("probe_mend")
    experts.update()


def test_over_gloo_and_with_the_model_in_one_bucket(two_workers: Job) -> None:
    two_workers.trainer.close()
    for options in ({"transport": "gloo"}, {"bucket_bytes": None}):
        with trainer_for(two_workers.client, 2, **options) as other:
            for _ in range(2):
                two_workers.train()
                report = other.update(two_workers.model)
                two_workers.check()
            assert report.transport == options.get("transport", "shm")


def test_through_the_worker_extension(two_workers: Job) -> None:
    with trainer_for(RpcClient(two_workers.engine.rpc, TIMEOUT_S), 2) as other:
        two_workers.train()
        other.update(two_workers.model)
        two_workers.check()


def test_through_vllms_own_http_client(server: Job) -> None:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    server.update()
    with trainer_for(HTTPVLLMWeightSyncClient(server.client.base_url, TIMEOUT_S), 1) as other:
        server.train()
        other.update(server.model, version=77)
    assert server.client.weight_version() == "77"
    server.client.reset_prefix_cache()  # this client has no such call
    server.check()
    with pytest.raises(fastsync.CommError, match="vLLM worker 0: it has another trainer by now"):
        server.trainer.update(server.model)
    server.update()


def test_a_generator_that_frees_what_it_yielded(server: Job) -> None:
    server.train()
    scratch = torch.empty(1 << 20)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in server.model.state_dict().items():
            view = scratch[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view
            scratch.fill_(float("nan"))

    metadata = [(name, t.dtype, t.shape) for name, t in server.model.state_dict().items()]
    server.trainer.update(gathered(), metadata=metadata)
    server.check()


def test_tied_weights_may_come_once_or_twice(two_workers: Job) -> None:
    once = dict(two_workers.model.named_parameters())
    twice = two_workers.model.state_dict()
    assert set(twice) - set(once) == {"lm_head.weight"}
    for weights in (once, twice):
        two_workers.train()
        two_workers.trainer.update(weights)
        two_workers.check()


def test_a_loader_that_reads_ahead(server: Job) -> None:
    server.engine.rpc("probe_read_ahead")
    try:
        server.train()
        weights = server.weights()
        weights = dict(reversed(weights.items()))  # another manifest, which is looked at with this loader
        server.trainer.update(weights)
        server.check()
    finally:
        server.engine.rpc("probe_mend")


# --- what the loader keeps


def test_only_tensors_of_layers_open_at_a_buckets_edge_are_copied(server: Job) -> None:
    report = server.update()
    (state,) = server.state()
    layers: dict[str, int] = {}
    for name, tensor in server.model.state_dict().items():
        module = name.rsplit(".", 2)[0]
        fused = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
        part = name.rsplit(".", 2)[1]
        layer = f"{module}.{fused.get(part, part)}"
        layers[layer] = layers.get(layer, 0) + tensor.nbytes
    assert 0 < state["most_open_bytes"] <= max(layers.values())
    assert state["copied_bytes"] < report.nbytes / 2
    assert state["report"]["peak_staging_bytes"] <= 2 * report.bucket_bytes + (1 << 20)


def test_a_bucket_reused_under_tensors_that_the_loader_keeps_would_be_wrong_and_is_noticed(server: Job) -> None:
    server.update()
    before = vllm_models.answers(server.model)
    server.engine.rpc("probe_drop_copies", None, (True,))
    try:
        server.train()
        with pytest.raises(fastsync.PeerFailed, match=r"loader keeps tensors.*copy=True"):
            server.trainer.update(server.model)
        assert server.engine.answers() == before
        # What it is guarded against: nobody copies, nobody looks.
        server.engine.rpc("probe_drop_copies", None, (False,))
        server.trainer.update(server.model)
        assert server.engine.answers() != vllm_models.answers(server.model)
    finally:
        server.engine.rpc("probe_mend")
    server.update()


def test_tensors_with_memory_of_their_own_on_request(server: Job) -> None:
    server.trainer.close()
    server.engine.rpc("probe_drop_copies", None, (True,))
    try:
        with trainer_for(server.client, 1, copy=True) as other:
            server.train()
            other.update(server.model)
            server.check()
    finally:
        server.engine.rpc("probe_mend")


# --- bad updates


def lacking(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def misnamed(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.mlp.upward.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")


def too_small(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(63, 128)


def too_large(weights: dict[str, torch.Tensor]) -> None:
    # vLLM takes its part from the front of such a tensor.
    weights["model.layers.1.mlp.gate_proj.weight"] = torch.zeros(113, 128)


def transposed(weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name].t()


def narrowed(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].double()


BAD = {
    lacking: r"lacks tensors.*layers\.1\.mlp\.gate_up_proj\.weight' \(\d+ of \d+",
    misnamed: r"cannot load tensor 'model\.layers\.1\.mlp\.upward\.weight'",
    too_small: r"cannot load tensor 'model\.layers\.1\.self_attn\.k_proj\.weight' \(float32 \[63, 128\]\)",
    too_large: r"'model\.layers\.1\.mlp\.gate_proj\.weight' \(float32 \[113, 128\]\) has 14464 elements.*takes 14336",
    transposed: r"cannot load tensor 'model\.layers\.1\.mlp\.down_proj\.weight' \(float32 \[112, 128\]\)",
    narrowed: r"'model\.norm\.weight' \(float64 \[128\]\) comes as torch\.float64.*cast=True",
}


@pytest.mark.parametrize("change", BAD, ids=lambda change: change.__name__)
def test_a_bad_update_is_refused_before_anything_is_loaded(server: Job, change: Any) -> None:
    server.update()
    version = server.client.weight_version()
    before = vllm_models.answers(server.model)
    server.train()
    weights = server.weights()
    change(weights)
    with pytest.raises(fastsync.PeerFailed, match=BAD[change]) as caught:
        server.trainer.update(weights)
    assert caught.value.rank == 1 and "vLLM worker 0" in str(caught.value)
    assert server.engine.answers() == before
    assert server.client.weight_version() == version
    server.update()


def test_a_bad_update_is_refused_by_two_workers(two_workers: Job) -> None:
    two_workers.update()
    before = vllm_models.answers(two_workers.model)
    for change in (lacking, too_large, too_small):
        weights = two_workers.weights()
        change(weights)
        with pytest.raises(fastsync.PeerFailed, match=r"vLLM worker [01].*(layers\.1|refuses the manifest)"):
            two_workers.trainer.update(weights)
        assert two_workers.engine.answers() == before
        # vLLM still takes each worker's answer for what it is.
        assert [each["worker"] for each in two_workers.state()] == [0, 1]
    two_workers.update()


def test_other_dtypes_are_taken_on_request(server: Job) -> None:
    server.trainer.close()
    with trainer_for(server.client, 1, cast=True) as other:
        server.train()
        other.update({name: tensor.double() for name, tensor in server.weights().items()})
        server.check()


def test_a_generator_that_breaks_its_word_or_raises_midway_leaves_the_old_weights(server: Job) -> None:
    server.update()
    before = vllm_models.answers(server.model)
    metadata = [(name, t.dtype, t.shape) for name, t in server.model.state_dict().items()]

    def wrong() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(server.model.state_dict().items()):
            yield name, tensor + 1 if number < 17 else tensor.reshape(-1)

    def raising() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(server.model.state_dict().items()):
            if number == 17:
                raise LookupError("the optimiser has lost it")
            yield name, tensor + 1

    for weights, error, text in ((wrong, fastsync.PeerFailed, "declared"), (raising, LookupError, "has lost it")):
        with pytest.raises(error, match=text):
            server.trainer.update(weights(), metadata=metadata)
        assert server.engine.answers() == before
    server.update()


def test_a_trainer_killed_midway_leaves_the_old_weights_and_another_goes_on(server: Job, tmp_path: Path) -> None:
    server.update()
    before = vllm_models.answers(server.model)
    server.trainer.close()
    script = [sys.executable, str(HERE / "vllm_doomed_trainer.py"), str(tmp_path), server.client.base_url, "17"]
    env = {**os.environ, **environment()}
    died = subprocess.run(script, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert died.returncode == -9, died.stderr
    assert server.engine.answers() == before
    server.update()


@pytest.mark.parametrize("how", ["probe_fail_after_commit", "probe_fail_in_bucket"])
def test_a_worker_that_fails_takes_the_others_back_with_it(two_workers: Job, how: str) -> None:
    two_workers.update()
    before = vllm_models.answers(two_workers.model)
    two_workers.engine.rpc(how, None, (1, 9) if how == "probe_fail_in_bucket" else (1,))
    two_workers.train()
    try:
        with pytest.raises(Exception, match=r"vLLM worker [01].*(the disk is full|has said why)"):
            two_workers.trainer.update(two_workers.model)
        assert two_workers.engine.answers() == before
    finally:
        two_workers.engine.rpc("probe_mend")
    two_workers.update()


def test_without_the_old_weights_a_failure_midway_is_said_to_leave_a_mix(server: Job) -> None:
    server.trainer.close()
    with trainer_for(server.client, 1, keep_old=False) as other:
        server.train()
        other.update(server.model)
        server.check()
        server.engine.rpc("probe_fail_in_bucket", None, (0, 9))
        try:
            with pytest.raises(fastsync.PeerFailed, match="the disk is full"):
                other.update(server.model)
        finally:
            server.engine.rpc("probe_mend")
        assert server.state()[0]["mixed"]
        other.update(server.model)
        assert not server.state()[0]["mixed"]
        server.check()


# --- the server's routes


def test_requests_go_on_while_the_weights_change_under_them(server: Job) -> None:
    count = 900
    for _ in range(4):
        server.update()
        (old,) = vllm_models.answers(server.model, count, vllm_models.PROMPTS[:1])
        server.train()
        chunks = server.engine.stream(vllm_models.PROMPTS[0], count)
        first = next(t for t in chunks if t)
        server.trainer.update(server.model)
        tokens = [*first, *(token for chunk in chunks for token in chunk)]
        server.check()
        assert len(tokens) == count
        assert first == old[: len(first)], "it did not begin with the old weights"
        if tokens != old:
            return  # else the request was through before the update reached the engine, which shows nothing
    pytest.fail("no request went on with the new weights")


def test_pause_keeps_requests_through_an_update(server: Job) -> None:
    server.update()
    tokens = server.engine.stream(vllm_models.PROMPTS[0], 300)
    first = next(t for t in tokens if t)
    server.client.pause("keep")
    assert server.client.is_paused()
    server.train()
    server.trainer.update(server.model)
    count: list[int] = []
    reader = threading.Thread(target=lambda: count.append(sum(len(t) for t in tokens)), daemon=True)
    reader.start()
    assert server.client.is_paused() and not count
    server.client.resume()
    reader.join(TIMEOUT_S)
    assert count == [300 - len(first)]
    assert not server.client.is_paused()
    server.check()


def test_the_server_says_how_many_workers_it_has_and_what_is_wrong(server: Job) -> None:
    assert server.client.world_size() == server.workers
    with pytest.raises(fastsync.CommError, match=r"answered 500.*finish_weight_update called without"):
        server.client.finish_weight_update("x")
    server.trainer.close()
    with trainer_for(server.client, 3, timeout_s=5.0) as other:
        with pytest.raises(fastsync.SyncTimeout, match=r"vLLM worker [12]"):
            other.update(server.model)
    server.update()


def test_the_engine_is_registered_once_and_not_imported_here(two_workers: Job) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    register()
    assert "fastsync" in WeightTransferEngineFactory._registry
    assert "fastsync.integrations._vllm_engine" not in sys.modules


def test_a_server_that_is_gone_is_an_error_at_once(two_workers: Job) -> None:
    with pytest.raises(fastsync.CommError, match=r"127\.0\.0\.1:9"):
        VllmTrainer(HttpClient("http://127.0.0.1:9", 5), workers=1, timeout_s=30).update(two_workers.model)
