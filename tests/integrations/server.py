"""An inference server of which only the doors are modelled: what is open, and in which order it was asked."""

from __future__ import annotations

import os
import signal


class Server:
    """Answers the calls that verl's replicas pass on."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.serving = True
        self.has_kv_cache = True

    def abort_all_requests(self, reject_request: bool = False) -> None:
        self.log.append("abort")
        self.serving = False

    def resume_generation(self) -> None:
        self.log.append("resume")
        assert self.has_kv_cache, "generation was resumed without a KV cache"
        self.serving = True

    def release_kv_cache(self) -> None:
        self.log.append("release_kv")
        assert not self.serving, "the KV cache was released under running requests"
        self.has_kv_cache = False

    def resume_kv_cache(self) -> None:
        self.log.append("resume_kv")
        self.has_kv_cache = True

    def sleep(self) -> None:
        self.log.append("sleep")

    def wake_up(self) -> None:
        self.log.append("wake_up")

    def state(self) -> tuple[bool, bool, list[str]]:
        log, self.log = self.log, []
        return self.serving, self.has_kv_cache, log

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
