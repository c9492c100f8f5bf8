"""Checkpoint engines: what verl and Twinkle call to bring weights from their trainers to their rollout workers.

`fastsync.integrations` puts them into the frameworks; `register` adds an engine of another package.
"""

from __future__ import annotations

from .base import CheckpointEngine
from .engines import (
    AutoCheckpointEngine,
    GlooCheckpointEngine,
    HCCLCheckpointEngine,
    NCCLCheckpointEngine,
    ShmCheckpointEngine,
)
from .registry import get, names, new, register, register_missing

__all__ = [
    "AutoCheckpointEngine",
    "CheckpointEngine",
    "GlooCheckpointEngine",
    "HCCLCheckpointEngine",
    "NCCLCheckpointEngine",
    "ShmCheckpointEngine",
    "get",
    "names",
    "new",
    "register",
    "register_missing",
]
