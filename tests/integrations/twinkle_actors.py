"""A model and a sampler on Twinkle's mixin, as its own are, small enough for a CPU.

What the model sends, in which mode, with which names, merged and unmerged, is the code of Twinkle's TransformersModel.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from twinkle import remote_class, remote_function
from twinkle.checkpoint_engine.mixin import CheckpointEngineMixin
from twinkle.model.transformers.transformers import TransformersModel
from weights import Digests, digests

from fastsync.integrations.twinkle import EngineMixin


@remote_class()
class Model(EngineMixin, CheckpointEngineMixin):
    """A tiny Llama with LoRA; every rank has all of it."""

    _bucket_size = 1 << 16

    def __init__(self, device_mesh: Any = None, **_: Any) -> None:
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
        )
        self.model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
        self.strategy = SimpleNamespace(unwrap_model=lambda model: model)

    def _get_default_group(self) -> str:
        return "default"

    @remote_function(dispatch="all", lazy_collect=False)
    def train(self, step: int) -> None:
        values = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=values))

    @remote_function(dispatch="all", lazy_collect=True)
    def send_weights(
        self, base_sync_done: bool = False, merge_and_sync: bool = False, model_keys: list[str] | None = None
    ) -> None:
        TransformersModel.send_weights.__wrapped__(self, None, base_sync_done, merge_and_sync, model_keys)

    @remote_function(collect="first", lazy_collect=False)
    def get_peft_config_dict(self) -> dict[str, Any]:
        return {"r": 3, "target_modules": ["q_proj", "v_proj"]}

    @remote_function(collect="none", lazy_collect=False)
    def merged(self) -> bool:
        return any(getattr(module, "merged", False) for module in self.model.modules())

    @remote_function(collect="first", lazy_collect=False)
    def expected(self, mode: str) -> Digests:
        """What a sampler should have been given."""
        if mode == "adapter":
            from peft.utils import get_peft_model_state_dict

            found = get_peft_model_state_dict(self.model, adapter_name="default")
            return digests((name.replace("base_model.model.", ""), tensor) for name, tensor in found.items())
        if mode == "merged":
            self.model.merge_adapter()
        try:
            state = {name: t for name, t in self.model.state_dict().items() if "lora_" not in name}
            keep = mode == "base"
            return digests(
                (name.replace("base_model.model.", "").replace(*(("", "") if keep else (".base_layer", ""))), tensor)
                for name, tensor in state.items()
            )
        finally:
            if mode == "merged":
                self.model.unmerge_adapter()


@remote_class()
class Sampler(EngineMixin, CheckpointEngineMixin):
    """Keeps what it is given."""

    _bucket_size = 1 << 16

    def __init__(self, device_mesh: Any = None, **_: Any) -> None:
        self.got: dict[str, torch.Tensor] = {}
        self.peft_config: Any = None
        self.fail = False

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def get_state_keys(self) -> list[str]:
        return list(self.got)

    @remote_function(dispatch="all", lazy_collect=False)
    def fail_next(self) -> None:
        self.fail = True

    @remote_function(dispatch="all", lazy_collect=True)
    def receive_weights(self, base_sync_done: bool = False, peft_config: Any = None) -> None:
        async def take() -> None:
            got: dict[str, torch.Tensor] = {}
            async for name, tensor in self._get_or_create_checkpoint_engine().receive_weights():
                got[name] = tensor
                if self.fail and len(got) == 3:
                    self.fail = False
                    raise KeyError("no such weight in this sampler")
            self.got, self.peft_config = got, peft_config

        asyncio.run(take())

    @remote_function(collect="none", lazy_collect=False)
    def holds(self) -> tuple[Digests, Any]:
        return [digests(self.got), self.peft_config]
