"""verl: importing this module registers the checkpoint engine `fastsync`.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: fastsync
      custom_backend_module: fastsync.integrations.verl
      engine_kwargs: {fastsync: {transport: auto, timeout: 300}}

verl imports it by itself wherever it makes an engine: in its driver, its trainers and its rollout workers. Options are
those of `fastsync.engine.AutoCheckpointEngine` (`timeout`, `verify`, `buffers`), and `transport`.
"""

from __future__ import annotations

from typing import Any

from ..engine import AutoCheckpointEngine
from ._framework import Framework

__all__ = ["FastSyncCheckpointEngine"]

_VERL = Framework("verl", "0.8.0 and 0.9.1", "verl")
_module: Any = _VERL.load(
    "verl.checkpoint_engine", "CheckpointEngineRegistry.register", "CheckpointEngineRegistry.get", "CheckpointEngine"
)


@_module.CheckpointEngineRegistry.register("fastsync")
class FastSyncCheckpointEngine(AutoCheckpointEngine, _module.CheckpointEngine):  # type: ignore[misc]
    """`AutoCheckpointEngine` as verl makes it, with metrics as verl logs them.

    Args:
        bucket_size: The most bytes a bucket may have; verl's `update_weights_bucket_megabytes`.
        is_master: True on trainer rank 0.
        transport: "auto", or a name of `fastsync.transports()`.
        options: As for `AutoCheckpointEngine`.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, *, transport: str = "auto", **options: Any) -> None:
        self.transport = transport
        super().__init__(bucket_size, is_master, **options)

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """As `AutoCheckpointEngine.send_weights`; the numbers of the report come back as `checkpoint_engine/...`."""
        report = await super().send_weights(weights, global_steps)
        numbers = {**report, **{f"phase_{name}_s": value for name, value in report.pop("phases", {}).items()}}
        return {
            f"checkpoint_engine/{name}": value
            for name, value in numbers.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
