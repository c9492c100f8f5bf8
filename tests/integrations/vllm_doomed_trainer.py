"""A trainer process that is killed in the middle of an update: model folder, server's URL, tensors sent before."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm_models

from fastsync.integrations.vllm import HttpClient, VllmTrainer


def until_killed(model: Any, after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, item in enumerate(model.state_dict().items()):
        if number == after:
            os.kill(os.getpid(), signal.SIGKILL)
        yield item


def main() -> None:
    folder, url, after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    model = vllm_models.make("llama", folder)
    vllm_models.train(model, 666)
    metadata = [(name, t.dtype, tuple(t.shape)) for name, t in model.state_dict().items()]
    trainer = VllmTrainer(HttpClient(url, 60), workers=1, transport="shm", bucket_bytes=60_000, timeout_s=60)
    trainer.update(until_killed(model, after), metadata=metadata)


if __name__ == "__main__":
    main()
