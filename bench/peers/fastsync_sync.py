"""fastsync itself, through its public interface: a WeightSync session that is kept between syncs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bench.peers.base import Options, Peer, RankContext


class FastsyncSync(Peer):
    kind = "fastsync"

    def __init__(self, ctx: RankContext, options: Options) -> None:
        super().__init__(ctx, options)
        self.session: Any = None
        self.report: Any = None
        self.params: dict[str, torch.Tensor] = {}

    @classmethod
    def unavailable_reason(cls, options: Options) -> str | None:
        try:
            import fastsync
        except ImportError as error:
            return f"fastsync is not installed: {error}"
        transport = str(options.get("transport", "auto"))
        info = fastsync.transports().get(transport)
        return None if info is None or info.available else info.reason

    def _open(self) -> Any:
        import fastsync

        keywords = {k: v for k, v in self.options.items() if k in ("transport", "verify", "bucket_bytes", "buffers")}
        # A group of its own: sessions of one group share one data plane, and those that name different transports in turn
        # would make it anew in every round.
        group = dist.new_group(backend="gloo")
        return fastsync.WeightSync(group, src=0, timeout_s=self.ctx.timeout_s, **keywords)

    def _run(self, session: Any, params: dict[str, torch.Tensor]) -> Any:
        return session.broadcast(params) if self.ctx.is_source else session.receive(into=params)

    def warm(self) -> None:
        # A session of one tiny tensor loads the library and its code paths; the measured session starts without a plan.
        with self._open() as session:
            self._run(session, {"warm": torch.zeros(256, dtype=torch.uint8)})
        self.params = self.ctx.named()

    def open(self) -> None:
        self.session = self._open()

    def sync(self) -> None:
        self.report = self._run(self.session, self.params)

    def facts(self) -> dict[str, Any]:
        return dict(self.report.to_dict()) if self.report is not None else {}

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
