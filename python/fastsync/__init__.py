"""fastsync: moves a model's weights from the processes that train it to the processes that serve it."""

from __future__ import annotations

from . import _core
from ._bucketed import broadcast_bucketed, close, receive_bucketed
from ._store_group import StoreGroup
from ._transports import TransportInfo, transports
from .errors import (
    ChecksumError,
    CommError,
    DeviceError,
    Error,
    InvalidArgument,
    ManifestMismatch,
    PeerFailed,
    PeerLost,
    StateError,
    SyncTimeout,
)
from .report import SyncReport
from .session import WeightSync

__version__: str = _core.__version__

__all__ = [
    "ChecksumError",
    "CommError",
    "DeviceError",
    "Error",
    "InvalidArgument",
    "ManifestMismatch",
    "PeerFailed",
    "PeerLost",
    "StateError",
    "StoreGroup",
    "SyncReport",
    "SyncTimeout",
    "TransportInfo",
    "WeightSync",
    "__version__",
    "broadcast_bucketed",
    "close",
    "receive_bucketed",
    "transports",
]
