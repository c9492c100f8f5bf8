"""Engines by name. Another package adds its own with `register`; a name belongs to whoever took it first."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..errors import CommError, InvalidArgument
from .base import CheckpointEngine

__all__ = ["get", "names", "new", "register", "register_missing"]

T = TypeVar("T", bound="type[CheckpointEngine]")


class _Entry(NamedTuple):
    cls: type[CheckpointEngine]
    requires: tuple[str, ...]
    extra: str


_engines: dict[str, _Entry] = {}
_missing: dict[str, str] = {}  # why an engine could not be registered


def register(name: str, *, requires: Sequence[str] = (), extra: str = "") -> Callable[[T], T]:
    """Class decorator: makes the engine known as `name`.

    Args:
        name: What a user's configuration says.
        requires: Modules that the engine imports when it is used.
        extra: What to install for them, such as "my-package[rdma]".

    Raises:
        InvalidArgument: The name is taken by another class, or what is decorated is no CheckpointEngine.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"an engine's name is {name!r}; it is a non-empty str")

    def add(cls: T) -> T:
        if not isinstance(cls, type) or not issubclass(cls, CheckpointEngine):
            raise InvalidArgument(f"engine '{name}' is {cls!r}, not a subclass of fastsync.engine.CheckpointEngine")
        held = _engines.get(name)
        # A module that is imported anew brings its classes again.
        if held is not None and (held.cls.__module__, held.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InvalidArgument(
                f"engine name '{name}' is taken by {held.cls.__module__}.{held.cls.__qualname__}; register "
                f"{cls.__module__}.{cls.__qualname__} under another name"
            )
        _engines[name] = _Entry(cls, tuple(requires), extra)
        _missing.pop(name, None)
        return cls

    return add


def register_missing(name: str, error: BaseException) -> None:
    """Says why the engine `name` could not be registered (its module's import failed); asking for it says so, too."""
    if name not in _engines:
        _missing[name] = f"{type(error).__name__}: {error}"


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_engines)


def get(name: str) -> type[CheckpointEngine]:
    """The engine registered as `name`.

    Raises:
        InvalidArgument: There is none; the message lists those there are.
        CommError: It needs a module that is not installed, or its own module could not be imported.
    """
    entry = _engines.get(name)
    if entry is None:
        if name in _missing:
            raise CommError(f"engine '{name}' could not be imported: {_missing[name]}")
        text = f"unknown engine {name!r}; known are {', '.join(repr(n) for n in names())}"
        if _missing:
            text += f"; could not be imported: {', '.join(sorted(_missing))}"
        raise InvalidArgument(text)
    absent = [module for module in entry.requires if not _is_installed(module)]
    if absent:
        raise CommError(
            f"engine '{name}' ({entry.cls.__module__}) needs {', '.join(absent)}, not installed here; install "
            f"{entry.extra or ' '.join(absent)}"
        )
    return entry.cls


def new(name: str, *args: Any, **options: Any) -> CheckpointEngine:
    """A new engine of the class registered as `name`, made with these arguments."""
    return get(name)(*args, **options)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the package that holds it is not there; or it is half imported
        return False
