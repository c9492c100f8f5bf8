"""fastsync's worker extension with ways to break a worker: vLLM mixes it into its workers."""

from __future__ import annotations

from typing import Any

import fastsync.integrations._vllm_reload as reload
from fastsync.integrations.vllm import WorkerExtension
from fastsync.session import WeightSync

_COPY_OPEN = reload.LayerwiseLoad._copy_open
_IS_KEPT = reload.LayerwiseLoad._is_kept
_RECEIVE = WeightSync._receive_version
_BUCKET = reload.LayerwiseLoad.load


class Probe(WorkerExtension):
    """What a test does to the workers by collective_rpc; probe_mend() takes it back."""

    def probe_drop_copies(self, notice: bool) -> None:
        """Lets vLLM keep its references into the buckets, and, unless `notice`, nobody look for them."""
        reload.LayerwiseLoad._copy_open = lambda self, slots: None
        if not notice:
            reload.LayerwiseLoad._is_kept = staticmethod(lambda slots, before: False)

    def probe_fail_after_commit(self, worker: int) -> None:
        """Makes one worker fail when its part of the sync has been committed."""

        def receive(sync: WeightSync, load: Any, version: int) -> Any:
            _RECEIVE(sync, load, version)
            raise OSError("the disk is full")

        if self.fastsync_receiver().worker == worker:
            WeightSync._receive_version = receive

    def probe_fail_in_bucket(self, worker: int, number: int) -> None:
        """Makes one worker fail in a bucket, after it has loaded it."""
        count = 0

        def load(one: Any, items: Any) -> None:
            nonlocal count
            _BUCKET(one, items)
            count += 1
            if count == number:
                raise OSError("the disk is full")

        if self.fastsync_receiver().worker == worker:
            reload.LayerwiseLoad.load = load

    def probe_read_ahead(self) -> None:
        """Gives the model a loader that looks at all that it is given before it loads anything."""
        model = self.model_runner.get_model()
        plain = type(model).load_weights
        model.load_weights = lambda weights: plain(model, list(weights))

    def probe_mend(self) -> None:
        vars(self.model_runner.get_model()).pop("load_weights", None)
        reload.LayerwiseLoad._copy_open = _COPY_OPEN
        reload.LayerwiseLoad._is_kept = staticmethod(_IS_KEPT)
        reload.LayerwiseLoad.load = _BUCKET
        WeightSync._receive_version = _RECEIVE
