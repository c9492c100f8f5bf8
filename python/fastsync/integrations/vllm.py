"""vLLM: a weight-transfer engine `fastsync` for its workers, and `VllmTrainer` for the process that trains.

Where vLLM runs, nothing but the configuration changes; the engine is found through an entry point:

    LLM(..., weight_transfer_config={"backend": "fastsync"})
    python -m vllm.entrypoints.openai.api_server ... --weight-transfer-config '{"backend": "fastsync"}'

Where the training runs (vLLM need not be installed there):

    from fastsync.integrations.vllm import HttpClient, VllmTrainer
    trainer = VllmTrainer(HttpClient("http://host:8000"), workers=2)  # tensor x pipeline x data parallel
    report = trainer.update(model)  # after every step

Every name, shape and dtype is checked against the model, on every worker, before anything is loaded; an update that
fails, there or midway, leaves the old weights in force on all workers. An update takes place between two steps of the
engine, so running requests go on, on the new weights; pause first (`HttpClient.pause`) where they must not mix. vLLM's
prefix cache is reset after an update if the client has `reset_prefix_cache`.

Several engines have a `VllmTrainer` each. With several trainer ranks rank 0 has the `VllmTrainer`; the others only walk
through the weights, if these are gathered on the way. Importing this module imports no vLLM.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Protocol

import torch.distributed as dist

from .._store_group import StoreGroup
from .._tensors import is_generator, read_items, split_items
from .._waiting import Deadline, bounded
from ..engine.topology import HostedStore
from ..errors import CommError, Error, InvalidArgument, PeerFailed, StateError, SyncTimeout
from ..report import SyncReport
from ..session import Params, WeightSync
from ._framework import FrameworkError
from ._vllm_manifest import InitInfo, Manifest, UpdateInfo, group_prefix, inside_key
from ._vllm_reload import VLLM
from ._vllm_worker import WorkerExtension

__all__ = ["HttpClient", "LocalClient", "RpcClient", "VllmTrainer", "WeightSyncClient", "WorkerExtension", "register"]

_log = logging.getLogger("fastsync")
# How long the one side of an update is waited for once the other has failed: both learn of it at once.
_GRACE_S = 5.0
_NAME = "fastsync"


def register() -> None:
    """Makes the engine known to vLLM in this process; vLLM calls it, through the entry point. May be called again.

    Nothing of the engine is imported before vLLM makes it. In a vLLM without a registry of engines this logs a warning
    and does nothing, so that such a vLLM starts all the same: use `WorkerExtension` there.
    """
    try:
        factory: Any = VLLM.load(
            "vllm.distributed.weight_transfer.factory",
            "WeightTransferEngineFactory.register_engine",
            "WeightTransferEngineFactory._registry",
        ).WeightTransferEngineFactory
    except FrameworkError as error:
        _log.warning("fastsync's weight-transfer engine is not registered: %s", error)
        return
    if _NAME not in factory._registry:
        factory.register_engine(_NAME, "fastsync.integrations._vllm_engine", "FastSyncWeightTransferEngine")


class WeightSyncClient(Protocol):
    """vLLM's four calls, blocking. vLLM's own HTTP and Ray clients are such, and the three classes below.

    `reset_prefix_cache()` is called after an update if it is there, too.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        """Brings `init_info` to every worker."""

    def start_weight_update(self) -> Any:
        """Announces an update."""

    def update_weights(self, update_info: Any) -> Any:
        """Brings `update_info` to every worker; returns when all of them have the weights."""

    def finish_weight_update(self, weight_version: str | None = None) -> Any:
        """Ends the update."""


class VllmTrainer:
    """Sends weights to the workers of a vLLM engine, over and over.

    Making it is local, but for opening a port for the rendezvous; the workers are told by the first update. Groups and
    plans are kept from update to update, and made anew after one that failed. One update at a time.

    Args:
        client: Has vLLM's four calls; see `WeightSyncClient`.
        workers: How many workers there are behind the client: tensor x pipeline x data parallel.
        transport: "auto", or a name of `fastsync.transports()`.
        bucket_bytes, buffers, verify: As for `WeightSync`.
        timeout_s: Seconds without progress after which a wait ends, here and in the workers; of every call of the
            client's, how long it may take beyond the transfer.
        keep_old, cast, copy: See `InitInfo`.

    Raises:
        InvalidArgument: An argument is wrong.
        CommError: The transport cannot be used here, or no port can be opened.
    """

    def __init__(
        self,
        client: WeightSyncClient,
        *,
        workers: int,
        transport: str = "auto",
        bucket_bytes: int | None = None,
        buffers: int = 2,
        verify: bool = True,
        timeout_s: float = 300.0,
        keep_old: bool = True,
        cast: bool = False,
        copy: bool = False,
    ) -> None:
        missing = [name for name in _CALLS if not callable(getattr(client, name, None))]
        if missing:
            raise InvalidArgument(
                f"client is a {type(client).__name__} without {', '.join(missing)}; see WeightSyncClient"
            )
        self.client: Any = client
        self.timeout_s = timeout_s
        self._options: dict[str, Any] = {
            "transport": transport,
            "bucket_bytes": bucket_bytes,
            "buffers": buffers,
            "verify": verify,
            "timeout_s": timeout_s,
        }
        with WeightSync(StoreGroup(dist.HashStore(), 0, 1), **self._options):
            pass  # checks the options
        self._store = HostedStore(timeout_s)
        self._info = InitInfo(
            self._store.address,
            "",
            workers,
            transport=transport,
            timeout_s=timeout_s,
            keep_old=keep_old,
            cast=cast,
            copy=copy,
        )
        self._info.check()
        self._sync: WeightSync | None = None
        self._token = ""  # of the group
        self._known: str | None = None  # the digest of the manifest that the workers know
        self._version: int | None = None
        self._busy = threading.Lock()

    @property
    def version(self) -> int | None:
        """The last version that all workers hold; None before the first."""
        return self._version

    def close(self) -> None:
        """Leaves the group; the engine serves on, and the next update joins anew. Local; may be called twice."""
        sync, self._sync = self._sync, None
        self._known = None
        if sync is not None:
            sync.close()

    def __enter__(self) -> VllmTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(
        self, params: Params, version: int | None = None, *, metadata: Iterable[Any] | None = None
    ) -> SyncReport:
        """Brings `params` to every worker as `version`. Returns when all of them generate with it.

        Args:
            params: As for `WeightSync.broadcast`, under the names of the model's checkpoint, and all of them.
            version: Above the last one; None: last + 1, counted from 1. vLLM is told it as its `weight_version`.
            metadata: What a generator will yield: (name, dtype, shape) of every tensor, in order, or vLLM's
                `ParamMeta`s. Anything else says so itself.

        Raises:
            InvalidArgument: A tensor, the version or the metadata is refused here.
            PeerFailed: A worker refused the weights, or failed; `.rank` - 1 is its number. Old weights stay in force.
            PeerLost, SyncTimeout, CommError, ChecksumError, DeviceError: As named; the message names the worker.
            StateError: An update is running.
            Exception: What the client raises when it cannot reach the engine; what `params` raises.
        """
        if not self._busy.acquire(blocking=False):
            raise StateError("an update is running on this VllmTrainer; let it end first")
        try:
            return self._update(params, version, metadata)
        finally:
            self._busy.release()

    def _update(self, params: Any, version: int | None, metadata: Iterable[Any] | None) -> SyncReport:
        if metadata is not None:
            manifest = Manifest.declared(metadata)
        elif is_generator(params):
            raise InvalidArgument("params is a generator; say with metadata= which tensors it will yield")
        else:
            names, tensors = split_items(read_items(params, 0), 0)
            params = list(zip(names, tensors))
            manifest = Manifest.of(params)
        if not manifest.entries:
            raise InvalidArgument("there is no tensor in params; an update is all of the model's weights")
        number = self._next(version)
        try:
            sync = self._connected()
            self._call("start_weight_update")
            info = UpdateInfo.of(self._token, number, manifest, known=self._known == manifest.digest)
            report = self._transfer(sync, params, number, asdict(info))
            self._call("finish_weight_update", str(number))
        except BaseException:
            self.close()
            raise
        self._known, self._version = manifest.digest, number
        if callable(getattr(self.client, "reset_prefix_cache", None)):
            self._call("reset_prefix_cache")
        return report

    def _next(self, version: object) -> int:
        last = self._version
        if version is None:
            return 1 if last is None else last + 1
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 1 << 63:
            raise InvalidArgument(f"version is {version!r}; it is a whole number, 0 to 2**63 - 1")
        if last is not None and version <= last:
            raise InvalidArgument(f"version is {version}, but {last} is already in force; versions only grow")
        return version

    def _connected(self) -> WeightSync:
        if self._sync is None:
            token = self._token = secrets.token_hex(8)
            store = dist.PrefixStore(group_prefix(token), self._store.store)
            self._sync = WeightSync(StoreGroup(store, 0, self._info.workers + 1), src=0, **self._options)
            self._call("init_weight_transfer_engine", {**asdict(self._info), "token": token})
            keys = [inside_key(self._info.rank_offset + worker) for worker in range(self._info.workers)]
            # Those that there are have all said it by now; the sync says which are missing.
            if any(store.check([key]) and store.get(key) == b"1" for key in keys):
                # A trainer died, or an update failed, and vLLM waits for its end on some workers. Others may object.
                with contextlib.suppress(Exception):
                    self._call("finish_weight_update")
        return self._sync

    def _transfer(self, sync: WeightSync, params: Any, version: int, info: dict[str, Any]) -> SyncReport:
        """Sends on this thread while another waits in the client's call; what fails on one side ends the other."""
        sent, answered = threading.Event(), threading.Event()
        failure: list[BaseException] = []

        def call() -> None:
            try:
                self.client.update_weights(info)
            except BaseException as error:
                failure.append(error)
                # Workers that fail tell the sync, which knows more; where none took part nobody does.
                if not sent.wait(_GRACE_S):
                    sync.close()
            finally:
                answered.set()

        threading.Thread(target=call, name="fastsync-vllm", daemon=True).start()
        try:
            try:
                report = sync.broadcast(params, version)
            finally:
                sent.set()
        except Error as error:
            answered.wait(_GRACE_S)
            if isinstance(error, StateError) and failure:
                raise failure[0] from error  # it was the client's failure that closed the session
            raise self._named(error, failure) from error
        except BaseException:
            answered.wait(_GRACE_S)  # the workers have gone back to the old weights when it has answered
            raise
        if not answered.wait(self.timeout_s):
            raise SyncTimeout(f"vLLM has not answered update_weights {self.timeout_s:g} s after the weights were sent")
        if failure:
            raise failure[0]
        return report

    def _named(self, error: Error, answers: list[BaseException]) -> Error:
        """The same error, with the worker's number in vLLM's own count."""
        if error.rank < self._info.rank_offset:
            return error
        text = error.message if isinstance(error, PeerFailed) else str(error)
        worker = f"vLLM worker {error.rank - self._info.rank_offset}"
        if worker not in text:
            text = f"{worker}: {text}"
        named = type(error)(text, error.rank)
        named.__context__ = answers[0] if answers else None
        return named

    def _call(self, name: str, *args: Any) -> Any:
        return bounded(lambda _: getattr(self.client, name)(*args), Deadline(self.timeout_s), f"vLLM's {name}")


_CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


# --- clients


class HttpClient:
    """Calls vLLM's HTTP server, which must run with VLLM_SERVER_DEV_MODE=1.

    Args:
        base_url: Such as "http://host:8000".
        timeout_s: Seconds that one call may take.

    Raises (all calls):
        CommError: The server cannot be reached, or answers with an error, whose text it has.
        SyncTimeout: No answer within `timeout_s`.
    """

    def __init__(self, base_url: str, timeout_s: float = 300.0) -> None:
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidArgument(f"base_url is {base_url!r}; it is such as 'http://host:8000'")
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s

    def request(self, path: str, body: Any = None, *, method: str = "POST", **query: Any) -> Any:
        """Sends `body` as JSON to `path`; returns the answer's JSON, None if it is empty."""
        url = f"{self.base_url}/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise CommError(f"{method} {url} answered {error.code}: {_error_text(error.read())}") from None
        except TimeoutError:
            raise SyncTimeout(f"{method} {url}: no answer within {self.timeout_s:g} s") from None
        except (OSError, urllib.error.URLError) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise SyncTimeout(f"{method} {url}: no answer within {self.timeout_s:g} s") from None
            raise CommError(f"{method} {url}: {getattr(error, 'reason', error)}") from None
        return json.loads(text) if text else None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See WeightSyncClient."""
        self.request("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """See WeightSyncClient."""
        self.request("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """See WeightSyncClient."""
        self.request("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See WeightSyncClient."""
        self.request("finish_weight_update", None if weight_version is None else {"weight_version": weight_version})

    def reset_prefix_cache(self) -> None:
        """Forgets what earlier weights left in the prefix cache; what running requests use stays."""
        self.request("reset_prefix_cache")

    def pause(self, mode: str = "abort") -> None:
        """Stops generation. "abort" ends running requests, "wait" lets them end, "keep" freezes them until resume()."""
        self.request("pause", mode=mode)

    def resume(self) -> None:
        """Goes on after pause()."""
        self.request("resume")

    def is_paused(self) -> bool:
        """Whether generation is stopped."""
        return bool(self.request("is_paused", method="GET")["is_paused"])

    def weight_version(self) -> str:
        """The version in force, as finish_weight_update() named it; "default" before the first."""
        return str(self.request("weight_info", method="GET")["weight_version"])

    def world_size(self) -> int:
        """How many workers the server has, all replicas together."""
        return int(self.request("get_world_size", method="GET", include_dp="true")["world_size"])


def _error_text(raw: bytes) -> str:
    """What the server says is wrong."""
    try:
        found = json.loads(raw)
        error = found.get("error", found) if isinstance(found, dict) else found
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        return raw.decode("utf-8", "replace")[:2000]


class LocalClient:
    """Calls a `vllm.LLM` of this process. Its calls have no deadline of their own; VllmTrainer's has."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See WeightSyncClient."""
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """See WeightSyncClient."""
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        """See WeightSyncClient."""
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See WeightSyncClient."""
        self.llm.finish_weight_update(weight_version)

    def reset_prefix_cache(self) -> None:
        """Forgets what earlier weights left in the prefix cache."""
        self.llm.reset_prefix_cache()


class RpcClient:
    """Calls `WorkerExtension` in the workers, for versions of vLLM without a registry of weight-transfer engines.

    Args:
        collective_rpc: `LLM.collective_rpc`, or anything called like it: (method, timeout, args) -> a list of results.
        timeout_s: Seconds that one call may take.
    """

    def __init__(self, collective_rpc: Callable[..., Any], timeout_s: float = 300.0) -> None:
        self._rpc = collective_rpc
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See WeightSyncClient."""
        self._rpc("fastsync_init", self._timeout_s, (init_info,))

    def start_weight_update(self) -> None:
        """Nothing: an update is one call."""

    def update_weights(self, update_info: Any) -> None:
        """See WeightSyncClient."""
        self._rpc("fastsync_update", self._timeout_s, (update_info,))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing: an update is one call."""

    def state(self) -> list[dict[str, Any]]:
        """What each worker holds; see `WorkerExtension.fastsync_state`."""
        return list(self._rpc("fastsync_state", self._timeout_s))
