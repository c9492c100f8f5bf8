"""The weight-transfer engine `fastsync`, as vLLM makes it in each worker; see `vllm.register`.

Needs vLLM when imported, and is imported where vLLM makes the engine, nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch

from ._vllm_manifest import InitInfo, UpdateInfo
from ._vllm_reload import VLLM
from ._vllm_worker import receiver_of

__all__ = ["FastSyncWeightTransferEngine"]

_base: Any = VLLM.load(
    "vllm.distributed.weight_transfer.base",
    "WeightTransferEngine.receive_weights",
    "WeightTransferEngine.finish_weight_update",
)


class FastSyncWeightTransferEngine(_base.WeightTransferEngine):  # type: ignore[misc]
    """vLLM's weight-transfer engine `fastsync`, made by vLLM in each worker.

    One `update_weights` is one whole update, between `start_weight_update` and `finish_weight_update`, which do nothing
    of their own: an engine that is told to start and then never gets an update serves on.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False  # not tested

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.receiver = receiver_of(self.parallel_config, int(self.parallel_config.rank))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """See `Receiver.init`."""
        self.receiver.init(init_info)

    def start_weight_update(self) -> None:
        """Nothing but a note: the model stays whole until the weights come."""
        self.receiver.inside = True

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See `Receiver.update`."""
        try:
            self.receiver.update(self.model, self.model_config, update_info)
        except BaseException:
            self.receiver.inside = False  # as vLLM then sees it
            raise

    def finish_weight_update(self) -> None:
        """Nothing but a note: an update that returned is in force."""
        self.receiver.inside = False

    def shutdown(self) -> None:
        """Leaves the trainer's group; the model serves on."""
        self.receiver.close()
