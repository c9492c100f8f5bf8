"""What an update of a vLLM engine declares beforehand: every tensor's name, dtype and shape, in the order of sending.

The trainer makes a `Manifest` and sends it with vLLM's own `update_weights` call; each worker holds its model against
it before anything is loaded, and the tensors against it as they come. A worker remembers the manifests that it has
found good, so that later updates name theirs by its digest alone.

No vLLM is imported here: the trainer needs none.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._tensors import describe, dtype_from_name
from ..errors import InvalidArgument

__all__ = ["Entry", "InitInfo", "Manifest", "UpdateInfo", "group_prefix", "inside_key"]


def group_prefix(token: str) -> str:
    """Where in the trainer's store a group meets."""
    return f"fastsync/vllm/{token}"


def inside_key(rank: int) -> str:
    """Under which the worker of that rank says whether vLLM has it inside an update ("1" or "0")."""
    return f"inside/{rank}"


class Entry(NamedTuple):
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"'{self.name}' ({self.dtype} {list(self.shape)})"


class Manifest:
    """All tensors of an update, in order; equal digests mean equal manifests."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        text = json.dumps([[e.name, e.dtype, list(e.shape)] for e in self.entries], separators=(",", ":"))
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def of(cls, items: Iterable[tuple[str, Any]]) -> Manifest:
        """Of (name, tensor) pairs; InvalidArgument for what fastsync could not send."""
        entries = []
        for name, tensor in items:
            if isinstance(tensor, torch.Tensor):
                entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
            else:
                told = describe(tensor, name, 0, destination=False)
                entries.append(Entry(name, told.dtype, tuple(told.shape)))
        return cls(entries)

    @classmethod
    def declared(cls, metadata: Iterable[Any]) -> Manifest:
        """Of (name, dtype, shape) triples, such as vLLM's `ParamMeta`."""
        entries = []
        for item in metadata:
            name, dtype, shape = item if isinstance(item, (tuple, list)) else (item.name, item.dtype, item.shape)
            entries.append(Entry(str(name), str(dtype).removeprefix("torch."), tuple(int(n) for n in shape)))
        return cls(entries)


@dataclass
class InitInfo:
    """How a worker finds the trainer; what vLLM calls init_info. Made by `VllmTrainer`, JSON all through.

    Attributes:
        store: Where the trainer's rendezvous store is.
        token: The group's own word in it.
        workers: How many workers take part, of all replicas.
        rank_offset: The group's rank of worker 0.
        transport: "auto", or a name of `fastsync.transports()`.
        timeout_s: Seconds without progress after which a wait of the worker ends.
        keep_old: Keep a host copy of this worker's weights during an update, so that one that fails midway can be
            undone. False saves that memory; such an update then leaves mixed weights, and the error says so.
        cast: Take tensors of another dtype than the model's, which vLLM converts; else only exact widening is taken.
        copy: Give vLLM's loader tensors that own their memory, for models whose loaders keep tensors in places that
            fastsync does not know (an error says so).
    """

    store: dict[str, Any]
    token: str
    workers: int
    rank_offset: int = 1
    transport: str = "auto"
    timeout_s: float = 300.0
    keep_old: bool = True
    cast: bool = False
    copy: bool = False

    def check(self) -> None:
        """InvalidArgument if anything is malformed."""
        if not isinstance(self.store, dict) or not {"id", "host", "ips", "port"} <= set(self.store):
            raise InvalidArgument("init_info has no address of a trainer's store; it is made by VllmTrainer")
        for name in ("workers", "rank_offset"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"init_info: {name} is {value!r}; it is a whole number, at least 1")
        for name in ("keep_old", "cast", "copy"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"init_info: {name} is {getattr(self, name)!r}; it is True or False")


@dataclass
class UpdateInfo:
    """What vLLM calls update_info: the group, the version, and its manifest, or the digest of a known one."""

    token: str
    version: int
    digest: str
    names: list[str] | None = None
    dtypes: list[str] | None = None
    shapes: list[list[int]] | None = None

    @classmethod
    def of(cls, token: str, version: int, manifest: Manifest, known: bool) -> UpdateInfo:
        """For `version`; with the digest alone if the workers know the manifest."""
        if known:
            return cls(token, version, manifest.digest)
        entries = manifest.entries
        return cls(
            token,
            version,
            manifest.digest,
            [e.name for e in entries],
            [e.dtype for e in entries],
            [list(e.shape) for e in entries],
        )

    def manifest(self) -> Manifest | None:
        """The manifest, or None if only its digest is here. InvalidArgument if it is malformed."""
        if self.names is None or self.dtypes is None or self.shapes is None:
            return None
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise InvalidArgument(
                f"update_info has {len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes"
            )
        if not self.names:
            raise InvalidArgument("update_info names no tensor; there is nothing to update")
        entries = []
        seen: set[str] = set()
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes):
            if not isinstance(name, str) or name in seen:
                raise InvalidArgument(f"update_info: the name {name!r} comes twice, or is no str")
            seen.add(name)
            dtype_from_name(dtype)
            if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
                raise InvalidArgument(f"update_info: the shape of '{name}' is {shape!r}; it is a list of sizes")
            entries.append(Entry(name, dtype, tuple(shape)))
        found = Manifest(entries)
        if found.digest != self.digest:
            raise InvalidArgument("update_info's digest is not that of its names, dtypes and shapes")
        return found
