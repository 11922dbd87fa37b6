"""Which locations hold shares of a tensor-parallel value: worked out once, from one forward pass.

vLLM's parallel layers say by their class what they do. What stands between them (activations, attention, norms of
heads, a gated sum of experts) says nothing, so the pass is watched operation by operation: what is computed from shares
is a share, what is computed from summands is a summand, and a collective makes it whole. A storage that no operation
was seen to fill (a kernel launched by its own means, attention that skips a made-up pass) is judged by its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from nnsight_async.worker.block import Key
from nnsight_async.worker.rows import tensors_of
from nnsight_async.worker.shards import Layout, Plain, Segment, Sharded, column_segments

#: A location's layouts, one for each tensor in its value.
Layouts = tuple[Layout, ...]

#: The methods of a vLLM process group that make whatever they return whole.
_COLLECTIVES: Final = ("all_reduce", "all_gather")
#: Operations whose result is not computed from what they are given.
_FACTORIES: Final = ("empty", "zeros", "ones", "full", "rand")


class LayoutRecorder:
    """Watches one forward pass of one token; :attr:`layouts` is what it has learned.

    Use it as a context manager around the pass, and give each location to :meth:`see` as the pass comes to it.
    Locations whose tensors are all whole are left out of :attr:`layouts`.
    """

    def __init__(self, modules: Mapping[str, nn.Module], group: Any) -> None:
        self.layouts: dict[Key, Layouts] = {}
        self._modules = modules
        self._group = group
        self._tags = _Tags()
        self._watch = _Watch(self._tags)
        self._calls: list[_Call] = []

    def __enter__(self) -> Self:
        for name in _COLLECTIVES:
            setattr(self._group, name, self._whole_after(getattr(self._group, name)))
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        for name in _COLLECTIVES:
            delattr(self._group, name)
        self._tags.clear()

    def _whole_after(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = collective(*args, **kwargs)
            for tensor in tensors_of(result):
                self._tags.put(tensor, Plain.WHOLE)
            return result

        return call

    def see(self, key: Key, value: Any) -> None:
        """Take in a location's value."""
        path, side = key
        module = self._modules[path]
        module = getattr(module, "base_layer", module)  # LoRA's layers stand around the parallel ones
        tensors = list(tensors_of(value))
        if side == "in":
            self._see_inputs(path, module, tensors)
        else:
            self._see_outputs(path, module, tensors)
        found = tuple(map(self._layout, tensors))
        if any(layout is not Plain.WHOLE for layout in found):
            self.layouts.setdefault(key, found)

    def _layout(self, tensor: torch.Tensor) -> Layout:
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return Plain.WHOLE
        layout = self._tags.get(tensor) or Plain.WHOLE
        if isinstance(layout, Sharded) and tensor.shape[0] > 1:  # of one token
            return replace(layout, flattened=tensor.shape[0])
        return layout

    def _see_inputs(self, path: str, module: nn.Module, tensors: list[torch.Tensor]) -> None:
        inside = bool(self._calls) and self._calls[-1].between
        takes_shares = isinstance(module, RowParallelLinear) and module.input_is_parallel and module.tp_size > 1
        for index, tensor in enumerate(tensors):
            known = self._tags.get(tensor)
            if takes_shares and index == 0 and not isinstance(known, Sharded):
                self._tags.put(tensor, _share_of(tensor))
            elif known is None:
                share = inside and tensor.is_floating_point() and tensor.dim() > 1
                self._tags.put(tensor, _share_of(tensor) if share else Plain.WHOLE)
        if isinstance(module, RowParallelLinear):
            for call in self._calls:
                call.between = False
        self._calls.append(_Call(path, [self._layout(tensor) for tensor in tensors]))

    def _see_outputs(self, path: str, module: nn.Module, tensors: list[torch.Tensor]) -> None:
        call = self._leave(path)
        layout = _layout_by_class(module)
        if layout is not None and tensors:
            self._tags.put(tensors[0], layout)
            if isinstance(layout, Sharded):
                for outer in self._calls:
                    outer.between = True
        for tensor in tensors:
            if self._tags.get(tensor) is None:
                self._tags.put(tensor, call.judge(tensor))
            for outer in self._calls:
                outer.made[tensor.shape] = self._layout(tensor)

    def _leave(self, path: str) -> _Call:
        for index in range(len(self._calls) - 1, -1, -1):
            if self._calls[index].path == path:
                return self._calls.pop(index)
        return _Call(path, [])


class _Call:
    """A module's call in progress.

    ``between`` says that it is between a column-parallel and a row-parallel layer; ``made`` holds the layout of what
    modules inside it returned last, by shape.
    """

    def __init__(self, path: str, inputs: Sequence[Layout]) -> None:
        self.path = path
        self.between = False
        self.made: dict[torch.Size, Layout] = {}
        self._inputs = inputs

    def judge(self, tensor: torch.Tensor) -> Layout:
        """The layout of an output that nothing else is known of."""
        made = self.made.get(tensor.shape)
        if made is not None:
            return made
        return _join(tensor, self._inputs) if tensor.is_floating_point() else Plain.WHOLE


class _Tags:
    """The layouts of storages, which are kept alive so that none is taken for another."""

    def __init__(self) -> None:
        self._tags: dict[int, tuple[torch.UntypedStorage, Layout]] = {}

    def get(self, tensor: torch.Tensor) -> Layout | None:
        """The layout of a tensor, which may be a view of some segments of its storage; None if it is not known."""
        found = self._tags.get(tensor.untyped_storage()._cdata)
        if found is None or not isinstance(found[1], Sharded):
            return found and found[1]
        first = tensor.storage_offset()
        last = first + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
        )
        start, kept = 0, []
        for segment in found[1].segments:
            if start <= last and first < start + segment.width:
                kept.append(segment)
            start += segment.width
        if sum(segment.width for segment in kept) != _columns(tensor):
            return _share_of(tensor, kept)
        return Sharded(tuple(kept))

    def put(self, tensor: torch.Tensor, layout: Layout) -> None:
        """Give a tensor's storage a layout."""
        storage = tensor.untyped_storage()
        self._tags[storage._cdata] = (storage, layout)

    def clear(self) -> None:
        """Let go of the storages."""
        self._tags.clear()


class _Watch(TorchDispatchMode):
    """Hands layouts on from what an operation is given to what it makes."""

    def __init__(self, tags: _Tags) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tags = tags

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [layout for tensor in tensors_of((args, kwargs)) if (layout := self._tags.get(tensor)) is not None]
        written = list(_written(func, args, kwargs))
        before = [self._tags.get(tensor) for tensor in written]
        result = func(*args, **kwargs)
        if not given:
            return result
        name = func._schema.name
        for tensor, own in zip(written, before, strict=True):
            if name == "aten::copy_" or not isinstance(own, Sharded):  # rotary embeddings rotate queries and keys apart
                source = [self._tags.get(args[1])] if name == "aten::copy_" else given
                self._tags.put(tensor, _join(tensor, source))
        if not any(word in name for word in _FACTORIES):
            for tensor in tensors_of(result):
                if self._tags.get(tensor) is None:
                    self._tags.put(tensor, _join(tensor, given))
        return result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    """The tensors that an operation writes to, as its schema says."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_of(args[index] if index < len(args) else kwargs.get(argument.name))


def _layout_by_class(module: nn.Module) -> Layout | None:
    """What a parallel layer's class says of its output; None where the collectives of the pass have said it."""
    if isinstance(module, ColumnParallelLinear) and module.tp_size > 1 and not module.gather_output:
        replicas = getattr(module, "num_kv_head_replicas", 1)
        return column_segments(list(module.output_partition_sizes), replicas)
    if isinstance(module, RowParallelLinear) and module.tp_size > 1 and not module.reduce_results:
        return Plain.PARTIAL
    if isinstance(module, VocabParallelEmbedding) and module.tp_size > 1 and not module.reduce_results:
        return Plain.PARTIAL
    if isinstance(module, FusedMoEMethodBase):
        return Plain.PARTIAL if module.moe.tp_size > 1 or module.moe.ep_size > 1 else None
    if isinstance(module, MoERunner) and module.moe_config.skip_final_all_reduce:
        config = module.moe_config
        return Plain.PARTIAL if config.tp_size > 1 or config.ep_size > 1 else None
    return None


def _join(tensor: torch.Tensor, given: Iterable[Layout | None]) -> Layout:
    """The layout of what is computed from tensors of these layouts."""
    given = list(given)
    shares = [layout for layout in given if isinstance(layout, Sharded)]
    columns = _columns(tensor)
    for share in shares:
        if sum(segment.width for segment in share.segments) == columns:
            return Sharded(share.segments)
    if shares:
        return _share_of(tensor, [segment for share in shares for segment in share.segments])
    return Plain.PARTIAL if Plain.PARTIAL in given else Plain.WHOLE


def _share_of(tensor: torch.Tensor, made_of: Sequence[Segment] = ()) -> Sharded:
    """A share in one piece; of queries and of keys that several ranks hold alike, it is queries' heads."""
    return Sharded((Segment(_columns(tensor), min((segment.replicas for segment in made_of), default=1)),))


def _columns(tensor: torch.Tensor) -> int:
    """How many numbers a tensor has for the one token of the recorded pass."""
    return tensor.numel()
