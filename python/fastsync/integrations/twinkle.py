"""Twinkle: gives its models and samplers a fastsync checkpoint engine.

    from fastsync.integrations import twinkle
    twinkle.install()                      # in every process, before models and samplers are made
    manager = CheckpointEngineManager(model=model, sampler=sampler)   # Twinkle's own, as before

or, without patching anything, `twinkle.EngineMixin` ahead of Twinkle's class in a model's or sampler's bases, and
`manager.backend_cls = twinkle.FastSyncCheckpointEngine`.

`TWINKLE_CKPT_HCCL_META_TIMEOUT_S` (seconds), Twinkle's own variable, is the deadline of every wait.
"""

from __future__ import annotations

import os
from typing import Any

from ..engine import AutoCheckpointEngine
from ..errors import InvalidArgument
from ._framework import Framework

__all__ = ["EngineMixin", "FastSyncCheckpointEngine", "install"]

_TWINKLE = Framework("twinkle-kit", "0.5.1", "twinkle")
_TIMEOUT = "TWINKLE_CKPT_HCCL_META_TIMEOUT_S"


def _base() -> Any:
    module: Any = _TWINKLE.load("twinkle.checkpoint_engine.base", "CheckpointEngine.build_topology")
    return module.CheckpointEngine


def _timeout() -> float:
    text = os.environ.get(_TIMEOUT, "300")
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"{_TIMEOUT} is {text!r}; it is a number of seconds") from None


class FastSyncCheckpointEngine(AutoCheckpointEngine, _base()):  # type: ignore[misc]
    """`AutoCheckpointEngine` as Twinkle makes it.

    Args:
        bucket_size: The most bytes a bucket may have.
        group_name: A word for error messages.
        rebuild_group: Form a new group for every update.
        rollout_dtype: Taken as by Twinkle's own engines, which do not use it: every tensor keeps its dtype.
        timeout: Seconds without progress after which a wait ends; None: TWINKLE_CKPT_HCCL_META_TIMEOUT_S, else 300.
        transport: "auto", or a name of `fastsync.transports()`.
        options: As for `AutoCheckpointEngine`.
    """

    def __init__(
        self,
        bucket_size: int = 3072 << 20,
        group_name: str = "twinkle_ckpt",
        rebuild_group: bool = False,
        rollout_dtype: Any = None,
        *,
        timeout: float | None = None,
        transport: str = "auto",
        **options: Any,
    ) -> None:
        del rollout_dtype
        self.transport = transport
        super().__init__(
            bucket_size,
            timeout=_timeout() if timeout is None else timeout,
            group_name=group_name,
            rebuild_group=rebuild_group,
            **options,
        )

    @property
    def is_master(self) -> bool:
        """Whether this is trainer rank 0. Twinkle's mixin sets it to a list of one bool, which is true even of False."""
        return self._is_master

    @is_master.setter
    def is_master(self, value: Any) -> None:
        if isinstance(value, (list, tuple)) and len(value) == 1:
            (value,) = value
        if not isinstance(value, bool):
            raise InvalidArgument(f"is_master is {value!r}; it is True on trainer rank 0, else False")
        self._is_master = value


def _get_or_create(self: Any) -> FastSyncCheckpointEngine:
    if self._checkpoint_engine is None:
        self._checkpoint_engine = FastSyncCheckpointEngine(self._bucket_size)
    engine: FastSyncCheckpointEngine = self._checkpoint_engine
    return engine


class EngineMixin:
    """Ahead of Twinkle's `CheckpointEngineMixin` in the bases: makes that mixin's engine a fastsync one."""

    _get_or_create_checkpoint_engine = _get_or_create


def install() -> None:
    """Makes Twinkle's mixin and manager use fastsync in this process. May be called again."""
    mixin: Any = _TWINKLE.load(
        "twinkle.checkpoint_engine.mixin", "CheckpointEngineMixin._get_or_create_checkpoint_engine"
    )
    manager: Any = _TWINKLE.load("twinkle.checkpoint_engine.manager", "CheckpointEngineManager.decide_backend_engine")
    mixin.CheckpointEngineMixin._get_or_create_checkpoint_engine = _get_or_create
    manager.CheckpointEngineManager.decide_backend_engine = staticmethod(lambda platform=None: FastSyncCheckpointEngine)
