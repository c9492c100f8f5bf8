"""`StoreGroup`: ranks that find each other through a store, without a process group of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .errors import InvalidArgument

__all__ = ["StoreGroup"]


class StoreGroup:
    """The ranks 0 to `world_size - 1`, meeting in `store`; passed as `group=` wherever a process group is.

    For processes that share no torch.distributed group, and need none for anything else. Making it is local. It is held
    by the sessions on it; the one-liners hold it only weakly, so keep it as long as their session is wanted.

    Args:
        store: Any `torch.distributed.Store` that all ranks reach, such as a `TCPStore` that one of them hosts. Give
            each group of ranks a prefix of its own (`torch.distributed.PrefixStore`), and use a prefix once.
        rank: This process's rank.
        world_size: How many ranks there are.

    Raises:
        InvalidArgument: The store is none, or the rank is not one of the group.
    """

    __slots__ = ("__weakref__", "rank", "store", "world_size")

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        if not dist.is_available():
            raise InvalidArgument("this torch is built without torch.distributed, whose stores a StoreGroup needs")
        if not isinstance(store, dist.Store):
            raise InvalidArgument(
                f"store is a {type(store).__name__}; it is a torch.distributed.Store, such as a TCPStore"
            )
        for name, value in (("rank", rank), ("world_size", world_size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidArgument(f"{name} is {value!r}; it is a whole number")
        if not 1 <= world_size <= 1 << 20:
            raise InvalidArgument(f"world_size is {world_size}; it is 1 to {1 << 20} ranks")
        if not 0 <= rank < world_size:
            raise InvalidArgument(f"rank is {rank}; in a group of {world_size} it is 0 to {world_size - 1}")
        self.store = store
        self.rank = rank
        self.world_size = world_size

    def __repr__(self) -> str:
        return f"StoreGroup(rank {self.rank} of {self.world_size})"
