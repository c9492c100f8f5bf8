"""The progress display (`progress=True`), drawn by rich on stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import InvalidArgument

__all__ = ["Display", "check_progress"]


def check_progress(progress: object) -> bool:
    """`progress` as a bool; InvalidArgument when it is none, or rich is not there to draw it."""
    if not isinstance(progress, bool):
        raise InvalidArgument(f"progress is {progress!r}; it is True or False")
    if progress:
        try:
            import rich.progress  # noqa: F401
        except ImportError:
            raise InvalidArgument("progress=True needs rich: pip install 'fastsync-rl[progress]'") from None
    return progress


class Display:
    """One bar for one sync: bytes done, rate, time. A no-op unless enabled."""

    def __init__(self, enabled: bool, label: str) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._done: Callable[[], int] | None = None
        if enabled:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(label, total=None)

    def start(self, total: int | None, done: Callable[[], int]) -> None:
        if self._bar is not None:
            self._done = done
            self._bar.start()
            self._bar.update(self._task, total=total)

    def tick(self) -> None:
        if self._bar is not None and self._done is not None:
            self._bar.update(self._task, completed=self._done())

    def stop(self) -> None:
        if self._bar is not None:
            self.tick()
            self._bar.stop()
