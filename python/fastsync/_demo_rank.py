"""What each process of `fastsync demo` runs: rank 0 trains and sends, the others receive and check.

A rank tells the parent what it does by JSON lines on a pipe. It ends by itself when the parent is gone.
"""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import json
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync import _demo_model

# Without progress for this long, a rank gives up.
TIMEOUT_S = 60.0
# Vectors of length one, computed by one code from equal weights: what remains is a different order of additions.
TOLERANCE = 1e-5

Params = Union[nn.Module, Mapping[str, Tensor]]


class Settings(NamedTuple):
    """What the command line chose."""

    model: str
    trains: bool
    receivers: int
    transport: str
    steps: int


class VerificationError(RuntimeError):
    """A rollout worker holds something else than the trainer sent."""


class _Sentences:
    """MiniLM: the trainer takes optimizer steps, everybody turns the same sentences into vectors."""

    def __init__(self, folder: Path, trainer: bool) -> None:
        self.model = _demo_model.MiniLM(_demo_model.Config.from_file(folder / "config.json"))
        if trainer:
            from safetensors.torch import load_file

            self.model.load_state_dict(load_file(folder / "model.safetensors"))
            self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5, fused=True)
        tokenizer = _demo_model.Tokenizer(folder / "tokenizer.json")
        self._inputs = tokenizer([sentence for pair in _demo_model.PAIRS for sentence in pair])

    @property
    def params(self) -> Params:
        return self.model

    def step(self) -> str:
        vectors = self.model(*self._inputs)
        loss = _demo_model.contrastive_loss(vectors[0::2], vectors[1::2])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return f"loss {loss.item():.4f}"

    def tensors(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    @torch.no_grad()
    def outputs(self) -> Tensor | None:
        out: Tensor = self.model(*self._inputs)
        return out


class _Files:
    """Any folder of safetensors: between two steps the trainer changes every byte."""

    def __init__(self, folder: Path, trainer: bool) -> None:
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in read_folder(folder):
            # The receiver takes names, shapes and dtypes from the files, and nothing else.
            self._tensors[name] = tensor.clone() if trainer else torch.zeros_like(tensor)

    @property
    def params(self) -> Params:
        return self._tensors

    def step(self) -> str:
        for tensor in self._tensors.values():
            tensor.reshape(-1).view(torch.uint8).add_(1)
        return "every byte changed"

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def outputs(self) -> Tensor | None:
        return None


def read_folder(folder: Path) -> list[tuple[str, Tensor]]:
    """Maps the tensors of every *.safetensors in `folder`; their bytes are read when they are used."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in found:
                    raise ValueError(f"{path} holds '{name}', which an earlier file of the folder holds too")
                found[name] = file.get_tensor(name)
    if not found:
        raise ValueError(f"{folder} has no *.safetensors with tensors in it")
    return list(found.items())


def digest(tensors: Mapping[str, Tensor]) -> bytes:
    """SHA-256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            total.update((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()))
    return total.digest()


class _Rank:
    def __init__(self, settings: Settings, rank: int, connection: Connection) -> None:
        self._settings = settings
        self._trainer = rank == 0
        self._connection = connection

    def tell(self, kind: str, **details: Any) -> None:
        self._connection.send_bytes(json.dumps({"kind": kind, **details}).encode())

    def run(self) -> None:
        self.tell("state", text="loading the model" if self._trainer else "building an empty model")
        workload = (_Sentences if self._settings.trains else _Files)(Path(self._settings.model), self._trainer)
        before_outputs, before_digest = workload.outputs(), digest(workload.tensors())

        for step in range(1, self._settings.steps + 1):
            note = ""
            if self._trainer:
                self.tell("state", text="training" if self._settings.trains else "changing every byte")
                note = workload.step()
            self.tell("state", text="sending" if self._trainer else "waiting for weights")
            report = fastsync.broadcast_bucketed(
                workload.params, src=0, transport=self._settings.transport, timeout_s=TIMEOUT_S
            )
            self.tell("state", text="checking")
            outputs, new_digest = workload.outputs(), digest(workload.tensors())
            difference = self._compare(step, new_digest, outputs)
            if new_digest == before_digest:
                raise VerificationError(f"step {step} changed no weight, so it proves nothing")
            moved = None
            if outputs is not None and before_outputs is not None:
                moved = (outputs - before_outputs).abs().max().item()
            before_outputs, before_digest = outputs, new_digest
            self.tell(
                "step",
                step=step,
                note=note,
                digest=new_digest.hex(),
                difference=difference,
                moved=moved,
                report=report.to_dict(),
            )

    def _compare(self, step: int, own_digest: bytes, own_outputs: Tensor | None) -> float | None:
        """Holds this rank's weights and outputs against the trainer's, which come by the user's own collectives."""
        wire = torch.tensor(list(own_digest), dtype=torch.uint8)
        dist.broadcast(wire, src=0)
        theirs = bytes(wire.tolist())
        if theirs != own_digest:
            raise VerificationError(
                f"step {step}: the weights' SHA-256 is {own_digest.hex()[:12]} here, {theirs.hex()[:12]} in the trainer"
            )
        if own_outputs is None:
            return None
        their_outputs = own_outputs.clone()
        dist.broadcast(their_outputs, src=0)
        difference = (own_outputs - their_outputs).abs().max().item()
        if not difference <= TOLERANCE:
            raise VerificationError(f"step {step}: embeddings differ from the trainer's by {difference:.1e}")
        return difference


def main(settings: Settings, rank: int, port: int, connection: Connection) -> None:
    """The process's body. Its exit status is 0 only if every check of every step held."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its ranks.
    torch.set_num_threads(1)
    # One host: no name service, no outside interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    self = _Rank(settings, rank, connection)
    try:
        self.tell("state", text="joining")
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.receivers + 1, timeout=timeout)
        self.run()
        fastsync.close()
        dist.destroy_process_group()
        self.tell("done")
    except BrokenPipeError:
        os._exit(1)  # The parent is gone, nobody listens.
    except Exception as error:
        self.tell("error", type=type(error).__name__, message=str(error))
        # Not sys.exit: a half-dead process group may wait for its peers in a destructor.
        connection.close()
        os._exit(1)
