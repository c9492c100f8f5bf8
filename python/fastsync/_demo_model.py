"""The model that `fastsync demo` trains: MiniLM, a small BERT that turns sentences into vectors, in plain torch.

Parameter names are those of the checkpoint, so its state dict loads with `strict=True`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Two wordings of one thought a line: the training pulls each pair together and pushes the others apart.
PAIRS: tuple[tuple[str, str], ...] = (
    ("The cat is asleep on the warm windowsill.", "A cat naps by the sunny window."),
    ("Our train to Geneva leaves at a quarter past nine.", "We depart for Geneva by rail at 9:15."),
    ("She repaired the bicycle with a spoon and some tape.", "The bike was fixed by her using tape and a spoon."),
    ("Heavy rain is expected in the mountains tonight.", "Forecasters predict a downpour in the hills this evening."),
    ("The committee rejected the budget for the second time.", "Once more, the budget failed to pass the committee."),
    ("Add the flour slowly while stirring the batter.", "Stir the batter and pour in the flour bit by bit."),
    ("The library closes early on public holidays.", "On bank holidays the library shuts before its usual hour."),
    ("He learned to play the cello when he was sixty.", "At the age of sixty he took up the cello."),
)


class Config(NamedTuple):
    """The part of a checkpoint's config.json that shapes the model."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def from_file(cls, path: Path) -> Config:
        """Reads config.json."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: values[name] for name in cls._fields})


class _Embeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.position_ids: Tensor
        self.register_buffer("position_ids", torch.arange(config.max_position_embeddings).unsqueeze(0))

    def forward(self, token_ids: Tensor) -> Tensor:
        positions = self.position_ids[:, : token_ids.shape[1]]
        summed = self.word_embeddings(token_ids) + self.position_embeddings(positions)
        out: Tensor = self.LayerNorm(summed + self.token_type_embeddings.weight[0])
        return out


class _SelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        return attended.transpose(1, 2).flatten(2)


class _Output(nn.Module):
    """A projection back to the hidden size, added to what went in."""

    def __init__(self, inner_size: int, config: Config) -> None:
        super().__init__()
        self.dense = nn.Linear(inner_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, inner: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(self.dense(inner) + residual)
        return out


class _Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = _Output(config.hidden_size, config)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.output(self.self(hidden, mask), hidden)
        return out


class _Dense(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)


class _Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.intermediate = _Dense(config.hidden_size, config.intermediate_size)
        self.output = _Output(config.intermediate_size, config)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = self.attention(hidden, mask)
        out: Tensor = self.output(F.gelu(self.intermediate.dense(hidden)), hidden)
        return out


class _Encoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))


class MiniLM(nn.Module):
    """Token ids and their mask in, one unit vector a sentence out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        # In the checkpoint, and so in the sync, but not part of a sentence's vector.
        self.pooler = _Dense(config.hidden_size, config.hidden_size)

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embeddings(token_ids)
        for layer in self.encoder.layer:
            hidden = layer(hidden, mask)
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


class Tokenizer:
    """Sentences to padded token ids."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.enable_truncation(64)
        self._tokenizer.enable_padding()

    def __call__(self, sentences: list[str]) -> tuple[Tensor, Tensor]:
        """Returns token ids and a mask that is False over padding."""
        encoded = self._tokenizer.encode_batch(sentences)
        return torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded]).bool()


def contrastive_loss(first: Tensor, second: Tensor) -> Tensor:
    """How badly each vector of `first` picks its partner in `second` among all of them."""
    return F.cross_entropy(first @ second.T * 5.0, torch.arange(first.shape[0]))
