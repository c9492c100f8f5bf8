"""The weights that the integration tests move: a small language model's, and tensors that engines tend to trip over."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch


def model_weights(step: int) -> dict[str, torch.Tensor]:
    """A tiny Llama, seeded, as it would be after `step` optimiser steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    state = LlamaForCausalLM(config).to(torch.bfloat16).state_dict()
    return {name: tensor + step for name, tensor in state.items()}


def awkward_weights(step: int) -> dict[str, torch.Tensor]:
    """An odd number of bf16 before fp32, empty, 0-dim, strided, and one of 3 MiB."""
    values = torch.Generator().manual_seed(1000 + step)
    grid = torch.randn(40, 30, generator=values)
    return {
        "awkward.odd": torch.randn(7, generator=values).to(torch.bfloat16),
        "awkward.fp32": torch.randn(5, generator=values),
        "awkward.empty": torch.empty(0, 8),
        "awkward.scalar": torch.tensor(float(step), dtype=torch.float64),
        "awkward.transposed": grid.t(),
        "awkward.strided": grid[::2, ::3],
        "awkward.large": torch.randn(3 << 18, generator=values),
        "awkward.last": torch.tensor([step, -step], dtype=torch.int64),
    }


def all_weights(step: int) -> dict[str, torch.Tensor]:
    """What one update of `step` moves, in order."""
    return {**model_weights(step), **awkward_weights(step)}


Digests = dict[str, tuple[str, tuple[int, ...], str]]


def digests(items: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> Digests:
    """Name to (dtype, shape, hash of the values' bytes)."""
    pairs = items.items() if isinstance(items, Mapping) else items
    return {name: (str(t.dtype), tuple(t.shape), _hash(t)) for name, t in pairs}


def _hash(tensor: torch.Tensor) -> str:
    raw = (
        tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    )
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()
