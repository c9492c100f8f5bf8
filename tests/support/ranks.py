"""Rank processes for the tests: started once, kept for the whole run, driven from the test process.

A `Pool` owns worker processes (forked from a server that has torch loaded, so a replacement costs milliseconds). A
`Group` is a fresh torch.distributed Gloo group on some of them, found through a store that the test process hosts, so
that it outlives any rank. Functions are sent by reference and called with a `Rank`; what they return or raise comes
back as an `Outcome`.

Two ways to use it:

    @spmd(2)                                   # the body runs on every rank; any rank's failure is the test's
    def test_scalar_keeps_its_shape(rank: Rank) -> None: ...

    def test_survivor_reports_lost_peer(pool: Pool) -> None:
        group = pool.group(2)                  # the test drives the ranks, and may kill, stop or interrupt them
        running = group.start(body)
        group.kill(1)
        running.join()[0].expect("PeerLost")

Every wait is bounded. A rank that does not come back in time has its stack dumped into the failure and is replaced.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import inspect
import itertools
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

DEFAULT_LIMIT_S = 60.0
_STEP_LIMIT_S = 30.0  # one wait inside a rank: a barrier, a value of another rank
# Loaded once, in the server that ranks are forked from.
_PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch.nested._internal.nested_tensor",
    "torch._dynamo",
    "numpy",
    "pytest",
]


# ---------------------------------------------------------------------------------------------------------------------
# What comes back
# ---------------------------------------------------------------------------------------------------------------------


def names_rank(message: str, rank: int) -> bool:
    """Whether a message names this rank: "rank 2", "ranks 1, 2" or "ranks [1, 2]"."""
    return re.search(rf"\branks? \[?(\d+(, | and ))*{rank}\b", message) is not None


@dataclass(frozen=True)
class Failure:
    """An exception of a rank, as plain data."""

    type_name: str
    bases: tuple[str, ...]
    message: str
    attributes: dict[str, Any]
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        attributes = {}
        for name in ("rank", "message", "code"):
            value = getattr(error, name, None)
            if isinstance(value, (int, str)):
                attributes[name] = value
        return cls(
            type(error).__name__,
            tuple(base.__name__ for base in type(error).__mro__),
            str(error),
            attributes,
            "".join(traceback.format_exception(error)),
        )


@dataclass(frozen=True)
class Outcome:
    """How one rank's call ended. `ended_at` is CLOCK_MONOTONIC, which all processes of a host share."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    died: bool = False
    stuck: str = ""
    began_at: float = 0.0
    ended_at: float = 0.0
    log: str = ""

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at

    @property
    def ok(self) -> bool:
        return self.failure is None and not self.died and not self.stuck

    def describe(self) -> str:
        if self.stuck:
            return f"rank {self.rank} did not come back in time; its threads:\n{self.stuck}"
        if self.died:
            return f"rank {self.rank} died; its log:\n{self.log}"
        if self.failure is not None:
            return f"rank {self.rank} raised after {self.seconds:.3f} s:\n{self.failure.traceback}"
        return f"rank {self.rank} returned {self.value!r:.200} after {self.seconds:.3f} s"

    def result(self) -> Any:
        assert self.ok, self.describe()
        return self.value

    def expect(self, *type_names: str, rank: int | None = None, mentions: Sequence[str] = ()) -> Failure:
        """Asserts that the call raised one of these types (or a subclass), and what its message names."""
        assert self.failure is not None, f"expected {' or '.join(type_names)}, but {self.describe()}"
        assert set(type_names) & set(self.failure.bases), f"expected {' or '.join(type_names)}, but {self.describe()}"
        if rank is not None:
            assert names_rank(self.failure.message, rank), f"message does not name rank {rank}: {self.failure.message}"
            if "rank" in self.failure.attributes:
                assert self.failure.attributes["rank"] == rank, self.describe()
        for text in mentions:
            assert text in self.failure.message, f"message does not mention {text!r}: {self.failure.message}"
        return self.failure


# ---------------------------------------------------------------------------------------------------------------------
# Inside a rank
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What a function on a rank gets: who it is, and ways to meet the other ranks that use no collective."""

    index: int
    size: int
    store: Any
    generation: int
    _marks: Connection
    _counter: itertools.count = field(default_factory=itertools.count)

    def barrier(self) -> None:
        """Waits until every rank of the group has come here."""
        key = f"barrier/{next(self._counter)}"
        if self.store.add(key, 1) == self.size:
            self.store.set(key + "/open", b"1")
        self.store.wait([key + "/open"], datetime.timedelta(seconds=_STEP_LIMIT_S))

    def share(self, value: Any) -> list[Any]:
        """Exchanges a value with every rank; returns them in rank order."""
        key = f"share/{next(self._counter)}"
        self.store.set(f"{key}/{self.index}", pickle.dumps(value))
        keys = [f"{key}/{index}" for index in range(self.size)]
        self.store.wait(keys, datetime.timedelta(seconds=_STEP_LIMIT_S))
        return [pickle.loads(self.store.get(key)) for key in keys]

    def mark(self, text: str) -> None:
        """Tells the test process that this rank has come to `text`."""
        self._marks.send((text, time.monotonic()))

    def hold(self, text: str) -> None:
        """Marks, then waits until the test calls `Group.release` for this rank."""
        self.mark(text)
        if not self._marks.poll(_STEP_LIMIT_S):
            raise TimeoutError(f"rank {self.index} was not released from {text!r}")
        self._marks.recv()

    def die(self) -> None:
        """SIGKILLs this process, here and now."""
        self.mark("died")
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOPs this process, here and now; it goes on when the test continues it."""
        self.mark("frozen")
        os.kill(os.getpid(), signal.SIGSTOP)


class Raises:
    """`with raises("PeerFailed", rank=2, mentions=["boom"])`, where the exception also names its own type family."""

    def __init__(self, *type_names: str, rank: int | None = None, mentions: Sequence[str] = ()) -> None:
        self._type_names, self._rank, self._mentions = type_names, rank, mentions
        self.error: BaseException | None = None
        self.seconds = 0.0

    def __enter__(self) -> Raises:
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.seconds = time.monotonic() - self._began
        wanted = " or ".join(self._type_names)
        assert error is not None, f"expected {wanted}, but nothing was raised"
        bases = {base.__name__ for base in type(error).__mro__}
        if not bases & set(self._type_names):
            return False  # the unexpected exception is the better report
        if self._rank is not None:
            assert names_rank(str(error), self._rank), f"message does not name rank {self._rank}: {error}"
        for text in self._mentions:
            assert text in str(error), f"message does not mention {text!r}: {error}"
        self.error = error
        return True


raises = Raises


def _resolve(module_name: str, folder: str, name: str) -> Callable[..., Any]:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    target: Any = importlib.import_module(module_name)
    for part in name.split("."):
        target = getattr(target, part)
    return getattr(target, "rank_body", target)


def _leave_group() -> None:
    import torch.distributed as dist

    fastsync = sys.modules.get("fastsync")
    if fastsync is not None:
        fastsync.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _worker(commands: Connection, marks: Connection, log_path: str, setup: Mapping[str, Any]) -> None:
    """The life of a rank process: takes one command at a time, on its main thread."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if "memlock_bytes" in setup:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (setup["memlock_bytes"],) * 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank: Rank | None = None
    store: Any = None
    while True:
        try:
            message = commands.recv()
        except KeyboardInterrupt:
            continue  # a late signal of the test before
        except EOFError:
            os._exit(0)
        began_at = time.monotonic()
        try:
            if message[0] == "group":
                _, generation, port, index, size, make_group = message
                _leave_group()
                if store is None:
                    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
                    store.set_timeout(datetime.timedelta(seconds=_STEP_LIMIT_S))
                if make_group:
                    dist.init_process_group(
                        "gloo",
                        store=dist.PrefixStore(f"g{generation}/torch", store),
                        rank=index,
                        world_size=size,
                        timeout=datetime.timedelta(seconds=_STEP_LIMIT_S),
                    )
                rank = Rank(index, size, dist.PrefixStore(f"g{generation}/test", store), generation, marks)
                reply: tuple[Any, ...] = ("ok", None)
            else:
                _, module_name, folder, name, payload = message
                body = _resolve(module_name, folder, name)
                args, kwargs = pickle.loads(payload)
                reply = ("ok", body(rank, *args, **kwargs))
        except BaseException as error:
            reply = ("raised", Failure.of(error))
            del error
        ended_at = time.monotonic()
        while True:
            try:
                commands.send((*reply, began_at, ended_at))
                break
            except KeyboardInterrupt:
                continue
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                reply = ("raised", Failure.of(error))


# ---------------------------------------------------------------------------------------------------------------------
# In the test process
# ---------------------------------------------------------------------------------------------------------------------


class Worker:
    """One rank process and the two pipes to it."""

    def __init__(self, folder: Path, number: int, method: str, setup: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        self.log_path = folder / f"worker{number}.log"
        self.commands, far_commands = multiprocessing.Pipe()
        self.marks, far_marks = multiprocessing.Pipe()
        environment = setup.get("environment", {})
        saved = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            self.process = context.Process(
                target=_worker, args=(far_commands, far_marks, str(self.log_path), dict(setup)), daemon=True
            )
            self.process.start()
        finally:
            for name, value in saved.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        far_commands.close()
        far_marks.close()
        self.busy = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def alive(self) -> bool:
        return self.process.is_alive()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def send(self, message: tuple[Any, ...]) -> None:
        self.busy = True
        try:
            self.commands.send(message)
        except OSError:
            pass  # dead: the reply says so

    def reply(self, rank: int, deadline: float) -> Outcome:
        ready = wait([self.commands, self.process.sentinel], max(0.0, deadline - time.monotonic()))
        if self.commands in ready:
            try:
                kind, value, began_at, ended_at = self.commands.recv()
            except (EOFError, OSError):
                ready = [self.process.sentinel]
            else:
                self.busy = False
                if kind == "ok":
                    return Outcome(rank, value=value, began_at=began_at, ended_at=ended_at)
                return Outcome(rank, failure=value, began_at=began_at, ended_at=ended_at, log=self.log())
        if ready:
            return Outcome(rank, died=True, ended_at=time.monotonic(), log=self.log())
        return Outcome(rank, stuck=self.stacks())

    def log(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")[-6000:]
        except OSError:
            return ""

    def stacks(self) -> str:
        """Asks every thread of the rank for its stack."""
        before = len(self.log())
        try:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGUSR1)
        except ProcessLookupError:
            return "(dead)"
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and len(self.log()) <= before:
            wait([self.process.sentinel], 0.05)
        wait([self.process.sentinel], 0.1)
        return self.log()[before:]

    def destroy(self) -> None:
        if self.alive():
            self.signal(signal.SIGKILL)
            self.process.join(10)
        self.commands.close()
        self.marks.close()


class Running:
    """Calls in progress on some ranks."""

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, list(ranks)

    def join(self, limit_s: float = DEFAULT_LIMIT_S) -> dict[int, Outcome]:
        """Waits for every rank; a rank that is stuck or dead is part of the answer, never of the wait."""
        deadline = time.monotonic() + limit_s
        return {rank: self._group.worker(rank).reply(rank, deadline) for rank in self._ranks}

    def results(self, limit_s: float = DEFAULT_LIMIT_S) -> list[Any]:
        """Waits for every rank and asserts that all of them returned."""
        outcomes = self.join(limit_s)
        bad = [outcome for outcome in outcomes.values() if not outcome.ok]
        assert not bad, "\n\n".join(outcome.describe() for outcome in bad)
        return [outcomes[rank].value for rank in self._ranks]


class Group:
    """A fresh torch.distributed group over some workers; `rank` below is the rank in it."""

    def __init__(self, workers: Sequence[Worker], generation: int, port: int, make_group: bool = True) -> None:
        self._workers = list(workers)
        self.generation, self.size = generation, len(workers)
        for index, worker in enumerate(self._workers):
            worker.send(("group", generation, port, index, self.size, make_group))
        Running(self, range(self.size)).results()

    def worker(self, rank: int) -> Worker:
        return self._workers[rank]

    def start(self, body: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None, **kwargs: Any) -> Running:
        """Calls body(rank, *args, **kwargs) on every rank (or on `ranks`), without waiting."""
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        folder = str(Path(inspect.getfile(body)).parent)
        payload = pickle.dumps((args, kwargs))
        for rank in chosen:
            self._workers[rank].send(("call", body.__module__, folder, body.__qualname__, payload))
        return Running(self, chosen)

    def run(self, body: Callable[..., Any], *args: Any, limit_s: float = DEFAULT_LIMIT_S, **kwargs: Any) -> list[Any]:
        return self.start(body, *args, **kwargs).results(limit_s)

    def outcomes(
        self, body: Callable[..., Any], *args: Any, limit_s: float = DEFAULT_LIMIT_S, **kwargs: Any
    ) -> dict[int, Outcome]:
        return self.start(body, *args, **kwargs).join(limit_s)

    def wait_mark(self, rank: int, text: str, limit_s: float = DEFAULT_LIMIT_S) -> float:
        """Waits until `rank` has come to `text`; returns when that was."""
        worker, deadline = self._workers[rank], time.monotonic() + limit_s
        while True:
            left = deadline - time.monotonic()
            ready = wait([worker.marks, worker.process.sentinel], max(0.0, left))
            assert ready, f"rank {rank} did not come to {text!r}; its threads:\n{worker.stacks()}"
            if worker.marks in ready and worker.marks.poll():
                try:
                    seen, when = worker.marks.recv()
                except EOFError:
                    break
                if seen == text:
                    return float(when)
            elif worker.process.sentinel in ready:
                break
        raise AssertionError(f"rank {rank} died before it came to {text!r}: {worker.log()}")

    def release(self, rank: int) -> None:
        """Lets a rank in Rank.hold() go on."""
        self._workers[rank].marks.send("go")

    def pid(self, rank: int) -> int:
        return self._workers[rank].pid

    def kill(self, rank: int) -> float:
        when = time.monotonic()
        self._workers[rank].signal(signal.SIGKILL)
        return when

    def stop(self, rank: int) -> float:
        when = time.monotonic()
        self._workers[rank].signal(signal.SIGSTOP)
        return when

    def cont(self, rank: int) -> float:
        """Continues a stopped rank; first waits until it is stopped, since an earlier SIGCONT would be lost."""
        deadline = time.monotonic() + 10.0
        while Path(f"/proc/{self.pid(rank)}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"rank {rank} is not stopped"
            time.sleep(0.001)
        when = time.monotonic()
        self._workers[rank].signal(signal.SIGCONT)
        return when

    def interrupt(self, rank: int, number: int = signal.SIGINT) -> float:
        when = time.monotonic()
        self._workers[rank].signal(number)
        return when


class Pool:
    """Worker processes that live for the whole test run. A dead or stuck one is replaced by the next group()."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._generation = itertools.count()
        self._numbers = itertools.count()
        self._workers: list[Worker] = []
        self._extra: list[Worker] = []
        self._lock = threading.Lock()

    def group(
        self,
        size: int,
        *,
        fresh: bool = False,
        method: str = "forkserver",
        setups: Sequence[Mapping[str, Any]] | None = None,
        make_group: bool = True,
    ) -> Group:
        """A group of `size` ranks. `fresh` (implied by `setups`) uses processes that no test has used before."""
        with self._lock:
            if fresh or setups is not None or method != "forkserver":
                setups = setups if setups is not None else [{}] * size
                workers = [self._start(method, setup) for setup in setups]
                self._extra.extend(workers)
            else:
                for index, worker in enumerate(self._workers):
                    if worker.busy or not worker.alive():
                        worker.destroy()
                        self._workers[index] = self._start("forkserver", {})
                while len(self._workers) < size:
                    self._workers.append(self._start("forkserver", {}))
                workers = self._workers[:size]
            return self._form(workers, make_group)

    def regroup(self, group: Group, ranks: Sequence[int], *, replace: bool = False) -> Group:
        """A new group of these ranks of `group` (the survivors); `replace` puts a new process for each other one."""
        workers = [group.worker(rank) for rank in ranks]
        if replace:
            workers = []
            for rank in range(group.size):
                worker = group.worker(rank)
                if rank not in ranks:
                    new = self._start("forkserver", {})
                    if worker in self._workers:
                        self._workers[self._workers.index(worker)] = new
                    else:
                        self._extra.append(new)
                    worker.destroy()
                    worker = new
                workers.append(worker)
        return self._form(workers, True)

    def reset(self) -> None:
        """Throws every process away: what a failed test left behind must not reach the next."""
        for worker in (*self._workers, *self._extra):
            worker.destroy()
        self._workers, self._extra = [], []

    def drop_extra(self) -> None:
        for worker in self._extra:
            worker.destroy()
        self._extra = []

    def close(self) -> None:
        self.reset()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, method: str, setup: Mapping[str, Any]) -> Worker:
        return Worker(self._folder, next(self._numbers), method, setup)

    def _form(self, workers: Sequence[Worker], make_group: bool) -> Group:
        for worker in workers:
            while worker.marks.poll():
                worker.marks.recv()
        return Group(workers, next(self._generation), self._store.port, make_group)


def spmd(size: int, *, limit_s: float = DEFAULT_LIMIT_S, **group_options: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes `body(rank, **params)` a test that runs on every rank of a fresh group of `size`."""

    def decorate(body: Callable[..., None]) -> Any:
        signature = inspect.signature(body)
        params = list(signature.parameters.values())[1:]

        def test(pool: Pool, **kwargs: Any) -> None:
            group = pool.group(size, **group_options)
            folder = str(Path(inspect.getfile(body)).parent)
            for rank in range(size):
                group.worker(rank).send(
                    ("call", body.__module__, folder, body.__qualname__, pickle.dumps(((), kwargs)))
                )
            outcomes = Running(group, range(size)).join(limit_s)
            bad = [outcome.describe() for outcome in outcomes.values() if not outcome.ok]
            if bad:
                pytest.fail("\n\n".join(bad), pytrace=False)

        pool_parameter = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in params]
        test.__signature__ = signature.replace(parameters=[pool_parameter, *keyword_only])  # type: ignore[attr-defined]
        test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
        test.__module__ = body.__module__
        test.rank_body = body  # type: ignore[attr-defined]
        for mark in getattr(body, "pytestmark", []):
            test = getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs)(test)
        return test

    return decorate
