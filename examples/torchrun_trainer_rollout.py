"""A trainer and its rollout workers as one torchrun job: rank 0 trains, all other ranks serve what it has learned.

    torchrun --standalone --nproc-per-node 3 examples/torchrun_trainer_rollout.py

After every step one call, the same on all ranks, brings the weights over. Prints the trainer's report of each sync, and
what each rollout worker serves: the version, and the loss that its copy has on a batch that every rank knows.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist

import fastsync


def make_model() -> torch.nn.Module:
    """A small network; its initial values do not matter on the ranks that receive."""
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))


def known_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Questions and answers that are the same on every rank."""
    questions = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    return questions, questions.sum(dim=1, keepdim=True).sin()


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    """How far the model is from the answers."""
    questions, answers = known_batch()
    return (model(questions) - answers).square().mean()


def train(model: torch.nn.Module, steps: int) -> None:
    """Rank 0: a step, then a sync."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        report = fastsync.broadcast_bucketed(model)
        print(f"trainer: {report}; loss {loss_of(model):.6f}", flush=True)


def serve(model: torch.nn.Module, steps: int) -> None:
    """The other ranks: the same call overwrites their weights in place; then they generate with them."""
    for _ in range(steps):
        report = fastsync.broadcast_bucketed(model)
        with torch.no_grad():
            print(f"rollout {dist.get_rank()}: version {report.version}, loss {loss_of(model):.6f}", flush=True)


def main() -> None:
    """Runs this rank's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    torch.seed()  # a rank of its own begins with values of its own
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    try:
        (train if dist.get_rank() == 0 else serve)(make_model(), steps)
    finally:
        fastsync.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
