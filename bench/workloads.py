"""The manifests that are synced: names, shapes and dtypes of real models, built from their public configurations.

Every function is pure and needs no download. A `scale` below 1 shrinks shapes, never the number of names, so a quick
run still pays every per-tensor cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

BF16_BYTES = 2


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a manifest. Everything here is bfloat16, which is what such models are served in."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BF16_BYTES


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def _qwen3_attention(prefix: str, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}.self_attn.q_proj.weight", (heads * head_dim, hidden))
    yield TensorSpec(f"{prefix}.self_attn.k_proj.weight", (kv_heads * head_dim, hidden))
    yield TensorSpec(f"{prefix}.self_attn.v_proj.weight", (kv_heads * head_dim, hidden))
    yield TensorSpec(f"{prefix}.self_attn.o_proj.weight", (hidden, heads * head_dim))
    yield TensorSpec(f"{prefix}.self_attn.q_norm.weight", (head_dim,))
    yield TensorSpec(f"{prefix}.self_attn.k_norm.weight", (head_dim,))


def qwen3_0_6b() -> Iterator[TensorSpec]:
    """Qwen3-0.6B: 310 names, 1.19 GB. `lm_head` is tied to the embedding and listed once."""
    vocab, hidden, layers, intermediate = 151936, 1024, 28, 3072
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden))
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield from _qwen3_attention(prefix, hidden, heads=16, kv_heads=8, head_dim=128)
        yield TensorSpec(f"{prefix}.mlp.gate_proj.weight", (intermediate, hidden))
        yield TensorSpec(f"{prefix}.mlp.up_proj.weight", (intermediate, hidden))
        yield TensorSpec(f"{prefix}.mlp.down_proj.weight", (hidden, intermediate))
        yield TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,))
        yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,))
    yield TensorSpec("model.norm.weight", (hidden,))


def qwen3_30b_a3b() -> Iterator[TensorSpec]:
    """Qwen3-30B-A3B at full size: 18,867 names, of which 18,432 are expert projections."""
    vocab, hidden, layers, experts, intermediate = 151936, 2048, 48, 128, 768
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden))
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield from _qwen3_attention(prefix, hidden, heads=32, kv_heads=4, head_dim=128)
        yield TensorSpec(f"{prefix}.mlp.gate.weight", (experts, hidden))
        for expert in range(experts):
            yield TensorSpec(f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (intermediate, hidden))
            yield TensorSpec(f"{prefix}.mlp.experts.{expert}.up_proj.weight", (intermediate, hidden))
            yield TensorSpec(f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, intermediate))
        yield TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,))
        yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,))
    yield TensorSpec("model.norm.weight", (hidden,))
    yield TensorSpec("lm_head.weight", (vocab, hidden))


def lora_adapters() -> Iterator[TensorSpec]:
    """4,000 LoRA tensors of 8 to 64 KiB: ten adapters of different rank on the attention of a 50-layer model."""
    hidden, layers = 1024, 50
    for adapter, rank in enumerate((4, 8, 12, 16, 16, 20, 24, 28, 32, 32)):
        for layer in range(layers):
            for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
                prefix = f"adapter_{adapter}.model.layers.{layer}.self_attn.{module}"
                yield TensorSpec(f"{prefix}.lora_A.weight", (rank, hidden))
                yield TensorSpec(f"{prefix}.lora_B.weight", (hidden, rank))


def embedding() -> Iterator[TensorSpec]:
    """One tensor of 600 MB: it spans every bucket."""
    yield TensorSpec("model.embed_tokens.weight", (300_000, 1000))


def _shrink(specs: tuple[TensorSpec, ...], factor: float) -> tuple[TensorSpec, ...]:
    """Multiplies both sides of a matrix by `factor`, and a vector's length, keeping at least one element."""
    return tuple(TensorSpec(s.name, tuple(max(1, round(d * factor)) for d in s.shape)) for s in specs)


def scaled_to(specs: tuple[TensorSpec, ...], nbytes: int) -> tuple[TensorSpec, ...]:
    """Shrinks shapes so that the total comes as close to `nbytes` as rounding allows."""
    total = sum(s.nbytes for s in specs)
    if nbytes >= total:
        return specs
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(s.nbytes for s in _shrink(specs, middle)) > nbytes:
            high = middle
        else:
            low = middle
    return _shrink(specs, low)


MOE_BYTES = 300_000_000

_BUILDERS: dict[str, tuple[str, Callable[[], Iterator[TensorSpec]]]] = {
    "dense": ("Qwen3-0.6B", qwen3_0_6b),
    "moe": ("Qwen3-30B-A3B names, scaled", qwen3_30b_a3b),
    "lora": ("4,000 LoRA tensors", lora_adapters),
    "embedding": ("one embedding", embedding),
}

WORKLOADS = tuple(_BUILDERS)


def load(name: str, scale: float = 1.0) -> Workload:
    """Builds the workload `name`; `scale` multiplies its bytes (not its names)."""
    if name not in _BUILDERS:
        raise ValueError(f"unknown workload '{name}'; known: {', '.join(WORKLOADS)}")
    if not 0.0 < scale <= 1.0:
        raise ValueError(f"scale is {scale}; it must be in (0, 1]")
    title, build = _BUILDERS[name]
    specs = tuple(build())
    if name == "moe":
        specs = scaled_to(specs, int(MOE_BYTES * scale))
    elif scale < 1.0:
        specs = scaled_to(specs, int(sum(s.nbytes for s in specs) * scale))
    return Workload(name, title, specs)


if __name__ == "__main__":
    for workload_name in WORKLOADS:
        w = load(workload_name)
        sizes = sorted(s.nbytes for s in w.specs)
        print(
            f"{w.name:10} {len(w.specs):6} tensors {w.nbytes / 1e6:8.1f} MB  "
            f"smallest {sizes[0]}, median {sizes[len(sizes) // 2]}, largest {sizes[-1]} bytes"
        )
