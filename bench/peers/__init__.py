"""The ways to move weights that are compared. A peer's kind is its name on the command line and in the results."""

from __future__ import annotations

from bench.peers.base import Options, Peer, RankContext
from bench.peers.copy_rate import CopyRate
from bench.peers.fastsync_sync import FastsyncSync
from bench.peers.gloo_bucketed import GlooBucketed
from bench.peers.gloo_per_tensor import GlooPerTensor
from bench.peers.gloo_raw import GlooRaw
from bench.peers.mirror import Mirror

KINDS: dict[str, type[Peer]] = {
    cls.kind: cls for cls in (CopyRate, FastsyncSync, GlooBucketed, GlooPerTensor, GlooRaw, Mirror)
}

__all__ = ["KINDS", "Options", "Peer", "RankContext"]
