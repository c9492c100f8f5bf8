"""Channels: the connection of this process to one source's group, shared by every session on it.

A channel belongs to (process group, source). It holds the core's sender or receiver, with the control connections, the
data plane and the remembered plans. It is made on first use and closed with its last session, with the process group,
by `fastsync.close()`, or at exit.

Rendezvous goes through the group's own store, under a prefix of ours: each rank says where it runs, the source says
where it listens. Nothing else goes through the store, so later syncs do not need it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from . import _core, _gloo
from ._store_group import StoreGroup
from ._waiting import Deadline, bounded
from .errors import CommError, InvalidArgument, PeerLost, StateError, SyncTimeout

__all__ = ["SHARDED", "Channel", "channel_for", "close_all", "close_channel", "resolve_group"]

SHARDED = -1  # the source of a sync in which every trainer rank sends a share

_SIOCGIFADDR = 0x8915  # from linux/sockios.h
# How often the store is asked for what is not there yet: at first, and at last.
_FIRST_ASK_S = 0.002
_LAST_ASK_S = 0.1
_PREFIX = "fastsync/1"
# How long an exiting process waits for a thread of its own that is inside a sync.
_EXIT_PATIENCE_S = 2.0


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def host_id() -> str:
    """Equal for processes that can share sockets and memory: one boot of one kernel, one network namespace."""
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        namespace = 0
    return f"{_read('/proc/sys/kernel/random/boot_id')}/{namespace}"


def _interface_addresses() -> dict[str, str]:
    """IPv4 address by interface name."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def local_addresses() -> list[str]:
    """Numeric addresses at which other hosts may reach this one, likeliest first.

    FASTSYNC_HOST (a name or address) overrides; an interface that GLOO_SOCKET_IFNAME names comes first.
    """
    forced = os.environ.get("FASTSYNC_HOST")
    if forced:
        return [str(info[4][0]) for info in socket.getaddrinfo(forced, None, type=socket.SOCK_STREAM)][:1]
    interfaces = _interface_addresses()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    found: list[str] = [interfaces[name] for name in chosen if name in interfaces]
    for family, probe in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Connecting a datagram socket sends nothing; it picks the interface that leads out.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect((probe, 9))
            found.append(s.getsockname()[0])
    found += interfaces.values()
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return [a for a in dict.fromkeys(found) if not a.startswith("127.") and a != "::1"]


def _resolve_process_group(group: Any) -> tuple[Any, list[int], int]:
    if not dist.is_available() or not dist.is_initialized():
        if group is None:
            raise InvalidArgument(
                "no process group: call torch.distributed.init_process_group(...) first (torchrun sets up its environment), "
                "or pass group= (a fastsync.StoreGroup needs no torch.distributed group)"
            )
        if not dist.is_available():
            raise InvalidArgument("this torch is built without torch.distributed")
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(
            f"group is {group!r}, not a process group that this rank belongs to; only members of the group call"
        )
    try:
        ranks = list(dist.get_process_group_ranks(group))
        me = dist.get_rank()
    except (RuntimeError, ValueError, KeyError) as error:
        raise InvalidArgument(f"group is not a process group of torch.distributed any more: {error}") from None
    return group, ranks, me


def resolve_group(group: Any, src: object) -> tuple[Any, list[int], int, int]:
    """(group, its global ranks, this rank, source rank or SHARDED); InvalidArgument if any of it is wrong."""
    if isinstance(group, StoreGroup):
        ranks, me = list(range(group.world_size)), group.rank
    else:
        group, ranks, me = _resolve_process_group(group)
    if isinstance(src, str) and src == "sharded":
        return group, ranks, me, SHARDED
    if isinstance(src, bool) or not isinstance(src, int):
        raise InvalidArgument(
            f"src is {src!r}; it is a global rank (int) of the group {_short(ranks)}, or 'sharded' (every trainer rank sends "
            "a share)"
        )
    if src not in ranks:
        raise InvalidArgument(f"src is {src}, which is not a rank of the group {_short(ranks)}; src is a global rank")
    return group, ranks, me, src


def _short(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 16 else f"[{ranks[0]}, ..., {ranks[-1]}] ({len(ranks)} ranks)"


def _store_of(group: Any) -> Any:
    """The group's store (a prefix store, ours to extend)."""
    if isinstance(group, StoreGroup):
        return group.store
    pg_map = dist.distributed_c10d._world.pg_map
    entry = pg_map.get(group)
    if entry is not None and entry[1] is not None:
        return entry[1]
    get = getattr(group, "get_group_store", None)
    store = get() if get is not None else None
    if store is None:
        raise InvalidArgument("the process group has no store, which fastsync needs to find the other ranks")
    return store


def _refused(ips: list[str], port: int, deadline: Deadline) -> bool:
    """Whether a host answers at one of these addresses, and says that nobody listens at the port."""
    for ip in ips:
        try:
            socket.create_connection((ip, port), timeout=min(1.0, max(0.1, deadline.left()))).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            continue
    return False


def _wait_key(store: Any, keys: list[str], deadline: Deadline, cancelled: threading.Event) -> bool:
    """Waits until the store has all keys; False at the deadline.

    Asks again and again instead of the store's own wait, which holds the caller's connection and, when it times out,
    writes to stderr. Only the first sync of a session waits here.
    """
    pause = _FIRST_ASK_S
    failures = 0
    while deadline.left() > 0:
        try:
            if store.check(keys):
                return True
            failures = 0
        except RuntimeError as error:
            failures += 1
            if failures >= 3:
                raise PeerLost(
                    f"the process group's store does not answer any more ({error}); the process that hosts it has ended: "
                    "make a new process group"
                ) from None
        if cancelled.wait(max(0.0, min(pause, deadline.left()))):
            return False
        pause = min(2 * pause, _LAST_ASK_S)
    return False


class Channel:
    """This process's end of one (group, source). Use it between `acquire()` and `release()`."""

    def __init__(
        self, group: Any, ranks: list[int], rank: int, src: int, pairing: _core.Pairing, name: str | None = None
    ) -> None:
        self._pairing = pairing  # of this group's calls, whatever session they were made on
        self.ranks = ranks
        self.rank = rank
        self.src = src
        self.is_source = rank == src
        self.version: int | None = None  # of the one-liners
        self.users = 0
        self.pid = os.getpid()
        self.sender: _core.WeightSender | None = None
        self.receiver: _core.WeightReceiver | None = None
        self.closed = False
        self.lost: PeerLost | None = None
        self._group = weakref.ref(group)
        self._name = str(src) if name is None else name  # under which the store keeps what is said here
        self._store: Any = None
        self._token = ""
        self._generation = 0
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._claimed: int | None = None  # the thread that has the lock, or is about to be known to have it
        self._inside = False  # its call will release it
        self._close_wanted = False
        self._hosts_known = False  # whether all receivers have said where they are
        self._remote = False  # one of them is on another host
        self._tcp_open = False
        self._looking: threading.Thread | None = None
        self._cancelled = threading.Event()

    # --- one call at a time

    def acquire(self, timeout_s: float) -> None:
        """Takes the channel for one sync. StateError from inside a callback of a sync on it."""
        self.check_process()
        me = threading.get_ident()
        if self._claimed == me and not self._inside:
            # An interrupt ended this thread's last call between its taking the channel and its own clean-up.
            self._claimed = self._owner = None
            if self._lock.locked():
                self._lock.release()
        for other in _channels_of(self._group()):
            if other._owner == me:
                raise StateError(
                    "a sync on this group is running on this thread (this call comes from inside its loader, generator "
                    "or stream loop); finish it first"
                )
        deadline = Deadline(timeout_s)
        while not self._lock.acquire(timeout=max(0.0, min(0.2, deadline.left()))):
            if deadline.left() <= 0:
                raise SyncTimeout(
                    f"another thread of rank {self.rank} has used this group for {timeout_s:g} s; syncs on one group run "
                    "one after the other",
                    self.rank,
                )
        self._claimed = self._owner = me

    def enter(self) -> None:
        """First thing inside the `try` whose `finally` calls release()."""
        self._inside = True

    def release(self) -> None:
        self._inside = False
        self._claimed = self._owner = None
        self._lock.release()
        if self._close_wanted:
            self.close()

    def check_open(self) -> None:
        """StateError once close() was called, from another thread or from inside a callback of the running sync."""
        if self._close_wanted:
            raise StateError("the session was closed while a sync ran on it")

    def adopt(self) -> None:
        """A stream's loop may be continued by another thread than began it."""
        self._claimed = self._owner = threading.get_ident()

    def check_process(self) -> None:
        """StateError in a forked child: sockets and mappings are the parent's."""
        if os.getpid() != self.pid:
            raise StateError(
                "this process was forked from the one that made the session; sessions do not survive fork(): make the "
                "process group and the session in the child (or start it with spawn)"
            )

    # --- rendezvous

    def connect(self, deadline: Deadline, check: Callable[[], None] | None = None) -> None:
        """Makes the core's object for this end, and, as a receiver, a connection to the source.

        `check` is called on every wake of a wait, and may end it by an exception.
        """
        if self.lost is not None:
            raise PeerLost(str(self.lost), self.lost.rank)
        if len(self.ranks) == 1:
            if self.sender is None:
                self.sender = _core.WeightSender(self.rank, self.src, self.ranks, "", "", self._pairing)
            return
        if self.is_source:
            if self.sender is None:
                self._serve(deadline, check)
            if not self._hosts_known:
                self._look_for_hosts(deadline)
        else:
            if self.receiver is None:
                self.receiver = self._make_receiver("")  # it may know already that this call fails
            if not (self.receiver.connected or self.receiver.has_missed):
                self._reach(deadline, check)

    def _make_receiver(self, token: str) -> _core.WeightReceiver:
        return _core.WeightReceiver(self.rank, self.src, self.ranks, token, host_id(), self._pairing)

    def _open_store(self) -> Any:
        if self._store is None:
            group = self._group()
            if group is None:
                raise StateError("the process group of this session was destroyed")
            self._store = dist.PrefixStore(f"{_PREFIX}/{self._name}", _store_of(group))
        return self._store

    def _say_hello(self, store: Any) -> None:
        store.set(f"host/{self.rank}", json.dumps({"host": host_id(), "pid": os.getpid()}))

    def _serve(self, deadline: Deadline, check: Callable[[], None] | None) -> None:
        """Listens, and says where: from then on receivers can connect, and be told if this sync fails."""
        store = self._open_store()
        token = secrets.token_hex(16)
        sender = _core.WeightSender(self.rank, self.src, self.ranks, token, host_id(), self._pairing)
        address = {"unix": sender.unix_name, "host": host_id(), "token": token}

        def publish(_: threading.Event) -> int:
            generation = int(store.add("generation", 1))
            store.set(f"address/{generation}", json.dumps(address))
            return generation

        try:
            self._generation = self._with_store(
                publish, deadline, "publishing the source's address in the group's store", check
            )
        except BaseException:
            sender.close(False)
            raise
        self._token = token
        self.sender = sender
        self._hosts_known = self._remote = self._tcp_open = False

    def _look_for_hosts(self, deadline: Deadline) -> None:
        """Finds out, beside the wait for the receivers, whether any of them is on another host."""
        if self._looking is not None and self._looking.is_alive():
            return
        store = self._open_store()
        keys = [f"host/{r}" for r in self.ranks if r != self.rank]
        mine = host_id()
        cancelled = self._cancelled = threading.Event()

        def look() -> None:
            # Whatever breaks here, the wait for the receivers ends with an error that names them.
            with contextlib.suppress(Exception):
                if _wait_key(store, keys, deadline, cancelled):
                    self._remote = any(json.loads(store.get(k))["host"] != mine for k in keys)
                    self._hosts_known = True

        self._looking = threading.Thread(target=look, name="fastsync-hosts", daemon=True)
        self._looking.start()

    def serve_other_hosts(self) -> None:
        """Opens the TCP control port once a receiver on another host is known. Called between looks of a wait."""
        sender = self.sender
        if not self._remote or self._tcp_open or sender is None:
            return
        self._tcp_open = True
        store, key = self._open_store(), f"tcp/{self._generation}"
        value = json.dumps({"port": sender.listen_tcp(), "ips": local_addresses()})

        def publish() -> None:
            with contextlib.suppress(Exception):  # the receivers' deadline says what is missing
                store.set(key, value)

        threading.Thread(target=publish, name="fastsync-tcp", daemon=True).start()

    def _reach(self, deadline: Deadline, check: Callable[[], None] | None) -> None:
        store = self._open_store()
        mine = host_id()
        if self.receiver is not None:
            self.receiver.close(False)
            self.receiver = None

        def find(cancelled: threading.Event) -> dict[str, Any] | None:
            self._say_hello(store)
            generation = max(int(store.add("generation", 0)), self._generation + 1, 1)
            if not _wait_key(store, [f"address/{generation}"], deadline, cancelled):
                return None
            found: dict[str, Any] = json.loads(store.get(f"address/{generation}"))
            found["generation"] = generation
            if found["host"] != mine:
                if not _wait_key(store, [f"tcp/{generation}"], deadline, cancelled):
                    return None
                found.update(json.loads(store.get(f"tcp/{generation}")))
            return found

        unreachable: CommError | None = None
        while True:
            address = self._with_store(
                find, deadline, f"finding rank {self.src} (the source) through the group's store", check
            )
            if address is None:
                if unreachable is not None:
                    raise unreachable
                raise SyncTimeout(
                    f"phase 'join': rank {self.src} (the source) did not come within {deadline.timeout_s:g} s; every rank of "
                    f"the group must make the call, and name the same src",
                    self.src,
                )
            self._generation = int(address["generation"])
            self._token = str(address["token"])
            connection = None
            if address["host"] == mine:
                connection = _core.connect_unix(address["unix"])
            else:
                for ip in address.get("ips", []):
                    connection = _core.connect_tcp(ip, int(address["port"]), min(5.0, max(0.1, deadline.left())))
                    if connection is not None:
                        break
                else:
                    if address.get("ips"):
                        unreachable = CommError(
                            f"rank {self.rank} cannot reach the source's control port {address['port']} at "
                            f"{', '.join(address['ips'])}; set FASTSYNC_HOST on rank {self.src} to an address that other "
                            "hosts can reach",
                            self.src,
                        )
                        # Where nobody listens any more, that session was closed, and its next one is waited for.
                        if not _refused(address["ips"], int(address["port"]), deadline):
                            raise unreachable
            if connection is None:
                continue  # that session is gone: wait for its next one
            receiver = self._make_receiver(self._token)
            receiver.connect(connection)
            self.receiver = receiver
            return

    def _with_store(
        self,
        work: Callable[[threading.Event], Any],
        deadline: Deadline,
        what: str,
        check: Callable[[], None] | None = None,
    ) -> Any:
        what_of = f"rank {self.rank}: {what} (the rank that hosts the store may be stopped)"
        try:
            return bounded(work, deadline, what_of, check)
        except (RuntimeError, ConnectionError) as error:
            if isinstance(error, (PeerLost, CommError, StateError)):
                raise
            raise PeerLost(
                f"{what}: {error}; the process that hosts the store has ended: make a new process group"
            ) from None

    # --- the gloo data plane

    def make_driver(self, generation: int, timeout_s: float, check: Callable[[], None]) -> _gloo.GlooDriver:
        """A process group of our own for this generation of the data plane; every rank calls it at the same point."""
        store = self._open_store()
        prefix = f"pg/{self._token}/{generation}"
        me = self.ranks.index(self.rank)
        deadline = Deadline(timeout_s)
        try:
            group = bounded(
                lambda _: _gloo.make_group(store, prefix, me, len(self.ranks), timeout_s),
                deadline,
                "connecting the gloo group of all ranks",
                check,
            )
        except RuntimeError as error:
            if isinstance(error, (StateError, CommError)):
                raise
            check()
            raise CommError(f"gloo could not connect the {len(self.ranks)} ranks of the group: {error}") from None
        return _gloo.GlooDriver(group, self.ranks.index(self.src), timeout_s)

    # --- end

    def close(self, exiting: bool = False) -> None:
        """Local; says goodbye and lets go of everything. Does not block: a sync that is running ends first, by an error."""
        self.closed = True
        if os.getpid() != self.pid:
            return
        if exiting:
            # A daemon thread may be inside a sync: it is asked to leave, for a moment. If it does not, the process ends
            # with it; what is closed under it would be a crash, and the kernel tells the peers.
            self._close_wanted = True
            if not self._lock.acquire(timeout=_EXIT_PATIENCE_S):
                return
            try:
                self._close_now(exiting)
            finally:
                self._lock.release()
            return
        if not self._lock.acquire(blocking=False):
            self._close_wanted = True
            if self._lock.acquire(blocking=False):  # it ended meanwhile, perhaps without seeing the wish
                self._lock.release()
                self.close()
            return
        try:
            self._close_now(exiting)
        finally:
            self._lock.release()

    def _close_now(self, exiting: bool) -> None:
        self._cancelled.set()
        sender, self.sender = self.sender, None
        receiver, self.receiver = self.receiver, None
        if sender is not None:
            sender.close(exiting)
        if receiver is not None:
            receiver.close(exiting)
        self._store = None


_channels: dict[tuple[int, int], Channel] = {}
_pairings: dict[tuple[int, int], _core.Pairing] = {}  # of groups whose end closes their channel
_registry_lock = threading.RLock()


def channel_for(group: Any, ranks: list[int], rank: int, src: int, kind: type[Channel] = Channel) -> Channel:
    """The channel of (group, src), made (as a `kind`) or found."""
    key = (id(group), src)
    with _registry_lock:
        if any(channel.pid != os.getpid() for channel in _channels_of(group)):
            raise StateError(
                "this process was forked from one that used fastsync on this process group; neither survives fork(): make "
                "a new process group in the child (or start it with spawn)"
            )
        channel = _channels.get(key)
        if channel is not None and not channel.closed and channel.pid == os.getpid():
            channel.users += 1
            return channel
        if key in _pairings:
            _pairings[key].next_session()
        else:
            _pairings[key] = _core.Pairing()
            weakref.finalize(group, _forget, key).atexit = False
        channel = kind(group, ranks, rank, src, _pairings[key])
        channel.users = 1
        _channels[key] = channel
        return channel


def _channels_of(group: Any) -> list[Channel]:
    """All channels of one process group, whatever their source."""
    if group is None:
        return []
    return [channel for channel in list(_channels.values()) if channel._group() is group]


def close_channel(channel: Channel) -> None:
    """A session is done with `channel`; the last one closes it."""
    with _registry_lock:
        channel.users -= 1
        if channel.users > 0:
            return
        for key, held in list(_channels.items()):
            if held is channel:
                del _channels[key]
    channel.close()


def _forget(key: tuple[int, int]) -> None:
    with _registry_lock:
        _pairings.pop(key, None)
        channel = _channels.pop(key, None)
    if channel is not None:
        channel.close()


def close_all(exiting: bool = False) -> None:
    """Closes every channel of this process."""
    with _registry_lock:
        channels = list(_channels.values())
        _channels.clear()
    for channel in channels:
        channel.close(exiting)


atexit.register(close_all, True)
