"""What every adapter does first: find its framework, and say what is wrong if it cannot."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from types import ModuleType
from typing import NamedTuple

from ..errors import Error

__all__ = ["Framework", "FrameworkError"]


class FrameworkError(Error, ImportError):
    """A framework is not installed, or is not of a shape that its adapter knows."""


class Framework(NamedTuple):
    """A framework as an adapter knows it.

    Attributes:
        distribution: Its name on PyPI.
        tested: The versions that the adapter is tested with, in words.
        extra: The extra of fastsync that installs it.
    """

    distribution: str
    tested: str
    extra: str

    def load(self, module: str, *features: str) -> ModuleType:
        """Imports `module`, which must have `features` (names, dots for names within); FrameworkError if not."""
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise FrameworkError(
                f"cannot import {module}: {error}; this adapter needs {self._wanted()}"
                + (f" ({self.distribution} {self.version()} is installed)" if self.version() else "")
            ) from error
        for feature in features:
            holder: object = found
            for name in feature.split("."):
                holder = getattr(holder, name, None)
            if holder is None:
                raise FrameworkError(
                    f"{self.distribution} {self.version() or 'of unknown version'} has no {module}.{feature}; this adapter "
                    f"needs {self._wanted()}"
                )
        return found

    def version(self) -> str:
        """The version that is installed; empty if it is not, or is no distribution."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(self.distribution)
        return ""

    def _wanted(self) -> str:
        return f"{self.distribution} (tested: {self.tested}): pip install 'fastsync-rl[{self.extra}]'"
