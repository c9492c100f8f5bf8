"""The error family: one class a kind, all under `fastsync.Error`.

Every error has `.rank`, the global rank it is about (the lost, stuck, failing or mismatching one), or -1.
"""

from __future__ import annotations

from types import TracebackType

from . import _core

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
    "SyncTimeout",
]


class Error(Exception):
    """Base of everything fastsync raises on purpose."""

    kind = 0

    def __init__(self, message: str = "", rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[Error], tuple[str, int]]:
        return (type(self), (str(self), self.rank))


class Refused:
    """Marks an InvalidArgument raised inside it as being about a tensor: other ranks see it as a ManifestMismatch."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, InvalidArgument):
            error.refused = True  # type: ignore[attr-defined]


class InvalidArgument(Error, ValueError):
    """An argument or a tensor that cannot be synced; nothing was written."""

    kind = 1


class ManifestMismatch(Error, ValueError):
    """Names, shapes or dtypes differ between the source and a receiver."""

    kind = 2


class ChecksumError(Error):
    """A bucket arrived with other bytes than were sent."""

    kind = 3


class SyncTimeout(Error, TimeoutError):
    """No progress within `timeout_s`; the message names the rank and the phase."""

    kind = 4


class PeerLost(Error, ConnectionError):
    """A process of the group ended. The group must be replaced; nothing else works any more."""

    kind = 5


class PeerFailed(Error):
    """Another rank raised. `.rank` is that rank, `.message` what it raised (at most 4 KiB)."""

    kind = 6

    def __init__(self, message: str = "", rank: int = -1) -> None:
        super().__init__(f"rank {rank} failed: {message}" if rank >= 0 else message, rank)
        self.message = message

    def __reduce__(self) -> tuple[type[Error], tuple[str, int]]:
        return (type(self), (self.message, self.rank))


class StateError(Error, RuntimeError):
    """A call that the session's state does not allow: after close(), after fork(), inside a callback."""

    kind = 7


class DeviceError(Error, RuntimeError):
    """Memory or a device failed."""

    kind = 8


class CommError(Error, RuntimeError):
    """The transport failed or is unavailable."""

    kind = 9


class SharedDestination(InvalidArgument, ManifestMismatch):
    """Destinations share memory that the source's tensors of these names do not share."""

    kind = 2


for _class in (
    Error,
    InvalidArgument,
    ManifestMismatch,
    ChecksumError,
    SyncTimeout,
    PeerLost,
    PeerFailed,
    StateError,
    DeviceError,
    CommError,
):
    _core.set_error_class(_class.kind, _class)
