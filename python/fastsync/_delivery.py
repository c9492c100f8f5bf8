"""Hands the tensors of a sync to code that has a loader instead of destinations, bucket by bucket.

Where a bucket lies (host or device) decides what its tensors are made of: a `Space` makes views of a bucket's memory,
makes memory of its own, and copies between the two. All whole tensors of a bucket are views of one block of memory, the
bucket's own or one that it was copied to, made in a few calls; how a bucket is cut up is remembered from sync to sync
(`Cuts`), so that a tensor costs little more than the object that stands for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch._utils import _unflatten_dense_tensors

from . import _core
from ._device import DeviceArray, torch_bytes
from ._tensors import dtype_from_name
from .errors import CommError

__all__ = ["Cuts", "DeviceSpace", "HostSpace", "Space", "deliver", "deliver_in_turn"]


class Space(Protocol):
    """Makes tensors where the buckets lie."""

    def open(self, address: int, nbytes: int, owner: object) -> None:
        """A bucket has come; `owner` keeps its memory mapped."""

    def raw(self) -> torch.Tensor | None:
        """The bucket's bytes as a torch tensor, or None where torch cannot have one there."""

    def block(self, nbytes: int) -> torch.Tensor | None:
        """Bytes with memory of their own as a torch tensor, or None as above."""

    def view(self, offset: int, nbytes: int, dtype: str, shape: list[int]) -> Any:
        """A tensor over the bucket's bytes, or None for a dtype that cannot be viewed."""

    def empty(self, dtype: str, shape: list[int], nbytes: int) -> Any:
        """A tensor with memory of its own."""

    def fill(self, tensor: Any, at: int, address: int, nbytes: int) -> None:
        """Copies bytes of a bucket to offset `at` of a tensor made by empty()."""


def _typed(raw: torch.Tensor, dtype: str, shape: list[int]) -> torch.Tensor | None:
    """`raw` bytes as a tensor that shares their memory; None for dtypes that torch cannot view bytes as."""
    try:
        return raw.view(dtype_from_name(dtype)).view(shape)
    except RuntimeError:
        return None


class HostSpace:
    """CPU tensors over shared or heap memory."""

    def __init__(self) -> None:
        self._raw: torch.Tensor | None = None

    def open(self, address: int, nbytes: int, owner: object) -> None:
        self._raw = None
        if nbytes > 0:
            buffer = (ctypes.c_uint8 * nbytes).from_address(address)
            buffer.owner = owner  # type: ignore[attr-defined]
            self._raw = torch.frombuffer(buffer, dtype=torch.uint8)

    def raw(self) -> torch.Tensor | None:
        return self._raw

    def block(self, nbytes: int) -> torch.Tensor | None:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def view(self, offset: int, nbytes: int, dtype: str, shape: list[int]) -> torch.Tensor | None:
        return None if self._raw is None else _typed(self._raw[offset : offset + nbytes], dtype, shape)

    def empty(self, dtype: str, shape: list[int], nbytes: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype_from_name(dtype), device="cpu")

    def fill(self, tensor: torch.Tensor, at: int, address: int, nbytes: int) -> None:
        _core.copy_bytes(tensor.data_ptr() + at, address, nbytes, False)


class DeviceSpace:
    """CUDA tensors, or `DeviceArray` where this torch has no CUDA. Work is queued on the caller's stream."""

    def __init__(self, runtime: _core.CudaRuntime, stream: int) -> None:
        self._runtime = runtime
        self._stream = stream
        self._address = 0
        self._nbytes = 0
        self._owner: object = None
        self._raw: torch.Tensor | None = None
        self._torch = torch.cuda.is_initialized()

    def open(self, address: int, nbytes: int, owner: object) -> None:
        self._address, self._nbytes, self._owner = address, nbytes, owner
        self._raw = (
            torch_bytes(address, nbytes, self._runtime.ordinal, self._stream, owner)
            if self._torch and nbytes > 0
            else None
        )

    def raw(self) -> torch.Tensor | None:
        return self._raw

    def block(self, nbytes: int) -> torch.Tensor | None:
        if not self._torch:
            return None
        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self._runtime.ordinal}")

    def view(self, offset: int, nbytes: int, dtype: str, shape: list[int]) -> Any:
        if self._nbytes == 0:
            return None
        if self._raw is not None:
            return _typed(self._raw[offset : offset + nbytes], dtype, shape)
        return self._array(self._address + offset, dtype, shape, nbytes, self._owner)

    def empty(self, dtype: str, shape: list[int], nbytes: int) -> Any:
        if self._torch:
            return torch.empty(shape, dtype=dtype_from_name(dtype), device=f"cuda:{self._runtime.ordinal}")
        if nbytes == 0:
            return self._array(0, dtype, shape, 0, None)
        memory = _core.DeviceMemory(self._runtime, nbytes, self._stream)
        return self._array(memory.address, dtype, shape, nbytes, memory)

    def fill(self, tensor: Any, at: int, address: int, nbytes: int) -> None:
        base = tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor.__cuda_array_interface__["data"][0]
        self._runtime.copy(base + at, address, nbytes, self._stream)

    def _array(self, address: int, dtype: str, shape: list[int], nbytes: int, owner: object) -> DeviceArray:
        count = 1
        for n in shape:
            count *= n
        itemsize = nbytes // count if count else dtype_from_name(dtype).itemsize
        return DeviceArray(address, tuple(shape), dtype, itemsize, self._stream, owner)


# So many tensors are made at a time. Python's garbage collector runs more often, and over more, where more live at once.
_RUN_TENSORS = 256


class _Run(NamedTuple):
    """Tensors of one dtype that lie one behind the other.

    Attributes:
        dtype: Theirs.
        begin: Where they begin in their bucket's block of whole tensors, in bytes.
        end: Where they end.
        shapes: Of what lies there, padding between tensors included: tensors without bytes of their own.
        real: Which of those are tensors.
        padded: Whether any is not.
        indices: Which tensor of the manifest each is.
        names: Their names.
    """

    dtype: torch.dtype
    begin: int
    end: int
    shapes: list[torch.Tensor]
    real: list[bool]
    padded: bool
    indices: list[int]
    names: list[str]

    def tensors(self, block: torch.Tensor, own: bool) -> Iterable[torch.Tensor]:
        """The tensors over `block`, which begins where the bucket's first whole tensor does.

        `own`: as tensors in their own right. Nobody else writes to their bytes, so that autograd need not know of what
        they are views, which is half of what a view costs; and a consumer that clones what has a `_base` need not.
        """
        with _no_views() if own else contextlib.nullcontext():
            views: Iterable[torch.Tensor] = _unflatten_dense_tensors(
                block[self.begin : self.end].view(self.dtype), self.shapes
            )
        return itertools.compress(views, self.real) if self.padded else views


def _find_no_views() -> Callable[[], contextlib.AbstractContextManager[object]]:
    try:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        for name in ("AutogradCPU", "AutogradCUDA"):
            keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            pass
    except (AttributeError, TypeError):  # a torch that has no such thing makes views, which are right, too
        return contextlib.nullcontext
    return lambda: torch._C._ExcludeDispatchKeyGuard(keys)


_no_views = _find_no_views()


class _Cut(NamedTuple):
    """How the whole tensors of one bucket lie in it.

    Attributes:
        form: What the bucket looked like: (used bytes, pieces, first and last tensor).
        begin: Where the first whole tensor starts; offsets of runs count from there.
        end: Where the last one ends.
        runs: Them, in order.
        straight: They are all that is in the bucket and all that it completes, in its order.
    """

    form: tuple[int, int, int, int]
    begin: int
    end: int
    runs: list[_Run]
    straight: bool


class Cuts:
    """How the buckets of the last plan are cut up. One session's; a plan that is another one starts afresh."""

    def __init__(self) -> None:
        self._plan: tuple[int, int] | None = None
        self._cuts: dict[int, _Cut | None] = {}
        self._shapes: dict[tuple[int, ...], torch.Tensor] = {}

    def begin(self, fingerprint: int, bucket_bytes: int) -> None:
        """A sync begins, of a plan that is known by these two; a fingerprint of 0 is no plan."""
        plan = (fingerprint, bucket_bytes) if fingerprint else None
        if plan is None or plan != self._plan:
            self._cuts.clear()
            self._shapes.clear()
        self._plan = plan

    def find(self, receiver: Any, number: int, bucket: Any) -> _Cut | None:
        """The cut of bucket `number`; None where none of its tensors is whole, or torch cannot view one's dtype."""
        _, used, pieces, first, last = bucket
        planned = self._plan is not None and not receiver.deviated
        form = (used, len(pieces), first, last)
        if planned and number in self._cuts:
            cut = self._cuts[number]
            if cut is None or cut.form == form:
                return cut
        cut = self._make(receiver, form, pieces)
        if planned:
            self._cuts[number] = cut
        return cut

    def _make(self, receiver: Any, form: tuple[int, int, int, int], pieces: list[tuple[int, ...]]) -> _Cut | None:
        _, _, first, last = form
        whole = [(index, at, nbytes) for index, offset, at, nbytes, completes in pieces if completes and offset == 0]
        if not whole:
            return None
        begin = whole[0][1]
        runs: list[_Run] = []
        run_dtype = ""
        for index, at, nbytes in whole:
            name, dtype, shape, _ = receiver.entry(index)
            if not runs or dtype != run_dtype or len(runs[-1].names) == _RUN_TENSORS:
                if not _can_view(dtype):
                    return None
                run_dtype = dtype
                runs.append(_Run(dtype_from_name(dtype), at - begin, at - begin, [], [], False, [], []))
            run = runs[-1]
            gap = at - begin - run.end
            if gap:  # the next tensor's alignment
                run.shapes.append(self._shape((gap // run.dtype.itemsize,)))
                run.real.append(False)
            run.shapes.append(self._shape(tuple(shape)))
            run.real.append(True)
            run.indices.append(index)
            run.names.append(name)
            runs[-1] = run._replace(end=at - begin + nbytes, padded=run.padded or gap > 0)
        straight = len(whole) == len(pieces) and [index for index, _, _ in whole] == list(range(first, last))
        return _Cut(form, begin, whole[-1][1] + whole[-1][2], runs, straight)

    def _shape(self, shape: tuple[int, ...]) -> torch.Tensor:
        found = self._shapes.get(shape)
        if found is None:
            found = self._shapes[shape] = torch.empty((), dtype=torch.uint8, device="cpu").expand(shape)
        return found


@functools.cache
def _can_view(dtype: str) -> bool:
    return _typed(torch.empty(dtype_from_name(dtype).itemsize, dtype=torch.uint8, device="cpu"), dtype, [1]) is not None


def deliver(receiver: Any, space: Space, cuts: Cuts, *, own: bool) -> Iterator[list[tuple[str, Any]]]:
    """The tensors as they become whole: all of a bucket at a time, views of it; or, if `own`, copied out, and fewer."""
    for items in deliver_buckets(receiver, space, cuts, own=own):
        if items:
            yield items
        items = []


def deliver_in_turn(receivers: list[Any], spaces: list[Space], *, own: bool) -> Iterator[list[tuple[str, Any]]]:
    """As deliver(), from several receivers: in turn, as long as they have one."""
    left = [(r, deliver_buckets(r, space, Cuts(), own=own)) for r, space in zip(receivers, spaces)]
    while left:
        for turn in list(left):
            receiver, buckets = turn
            items = next(buckets, None)
            if items is None:
                left.remove(turn)
                continue
            if items:
                yield items
            items = []
            receiver.release_bucket()  # its next one can come while it is the others' turn


def deliver_buckets(receiver: Any, space: Space, cuts: Cuts, *, own: bool) -> Iterator[list[tuple[str, Any]]]:
    """As deliver(), with an empty list for a bucket that makes no tensor whole."""
    partial: Any = None
    delivered = 0
    number = 0

    def empty(index: int) -> tuple[str, Any]:
        name, dtype, shape, nbytes = receiver.entry(index)
        return name, space.empty(dtype, shape, nbytes)

    while (bucket := receiver.next_bucket(not own)) is not None:
        address, used, pieces, first, last = bucket
        if not own:
            space.open(address, used, receiver.bucket_owner())
        cut = cuts.find(receiver, number, bucket)
        number += 1
        block = _whole_block(space, cut, address, own)
        items: list[tuple[str, Any]] = []
        if cut is not None and block is not None and cut.straight:
            if own:
                receiver.release_bucket()  # copied out: the source need not wait for the callee
                for run in cut.runs[:-1]:
                    yield list(zip(run.names, run.tensors(block, own)))
                items.extend(zip(cut.runs[-1].names, cut.runs[-1].tensors(block, own)))
            else:
                for run in cut.runs:
                    items.extend(zip(run.names, run.tensors(block, own)))
        else:
            whole: dict[int, Any] = {}
            if cut is not None and block is not None:
                for run in cut.runs:
                    whole.update(zip(run.indices, run.tensors(block, own)))
            for index, offset, at, nbytes, completes in pieces:
                if index in whole:
                    continue
                if offset == 0 and completes and not own:
                    _, dtype, shape, _ = receiver.entry(index)
                    view = space.view(at, nbytes, dtype, shape)
                    if view is not None:
                        whole[index] = view
                        continue
                if offset == 0:
                    partial = empty(index)[1]
                if partial is None:
                    raise CommError(f"tensor number {index} arrived without its beginning")
                space.fill(partial, offset, address + at, nbytes)
                if completes:
                    whole[index] = partial
                    partial = None
            for index in range(first, last):
                tensor = whole.pop(index, None)
                items.append((receiver.entry(index)[0], tensor) if tensor is not None else empty(index))
            tensor = None
            if own:
                receiver.release_bucket()
        block = None
        delivered = last
        space.open(0, 0, None)
        yield items
        items = []
        receiver.release_bucket()
    rest = [empty(index) for index in range(delivered, receiver.tensors)]  # empty tensors after the last bucket
    if rest:
        yield rest


def _whole_block(space: Space, cut: _Cut | None, address: int, own: bool) -> torch.Tensor | None:
    """The bytes of a bucket's whole tensors, copied if `own`; None where there are none, or torch cannot have them."""
    if cut is None:
        return None
    if not own:
        raw = space.raw()
        return None if raw is None else raw[cut.begin : cut.end]
    block = space.block(cut.end - cut.begin)
    if block is not None:
        space.fill(block, 0, address + cut.begin, cut.end - cut.begin)
    return block
