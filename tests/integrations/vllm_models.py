"""Tiny language models for the vLLM tests, and Hugging Face's answers with their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 256
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [200, 17, 91], [42]]
NEW_TOKENS = 8


def make(kind: str, folder: Path) -> Any:
    """A random model of `kind`, its configuration saved in `folder`. fp32, so that equal weights mean equal tokens."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    config: Any
    if kind == "llama":
        config, cls = LlamaConfig(tie_word_embeddings=False, **sizes), LlamaForCausalLM
    elif kind == "experts":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        config = Qwen3MoeConfig(tie_word_embeddings=False, head_dim=32, **experts, **sizes)
        cls = Qwen3MoeForCausalLM
    else:
        config, cls = Qwen3Config(tie_word_embeddings=True, head_dim=32, **sizes), Qwen3ForCausalLM
    config.architectures = [cls.__name__]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    return cls(config).float().eval()


@torch.no_grad()
def train(model: Any, step: int) -> None:
    """Other weights for every step, far enough apart that the next token does not hang on the last bit."""
    values = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=values)
        parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.3 * noise)


def checkpoint(model: Any) -> dict[str, torch.Tensor]:
    """The weights under the names of checkpoints, where every expert's are its own."""
    found = {}
    for name, tensor in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                found[f"{prefix}.{number}.gate_proj.weight"] = gate
                found[f"{prefix}.{number}.up_proj.weight"] = up
        elif last == "down_proj":
            found.update({f"{prefix}.{number}.down_proj.weight": expert for number, expert in enumerate(tensor)})
        else:
            found[name] = tensor
    return found


@torch.no_grad()
def answers(model: Any, new_tokens: int = NEW_TOKENS, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Greedy tokens that follow each prompt."""
    found = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        found.append(out[0, len(prompt) :].tolist())
    return found
