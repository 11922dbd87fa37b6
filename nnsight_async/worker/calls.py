"""Modules that a block calls itself, on its own tensors and the worker's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from nnsight_async.tree import ModuleRef
from nnsight_async.worker.keep import use_count
from nnsight_async.worker.parameters import ReadOnly, plain
from nnsight_async.worker.rows import tensors_of


def call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    context: Callable[[], AbstractContextManager[None]],
) -> Any:
    """Call a module, or a method of one, for a block.

    It works on copies of the tensors among the arguments, since vLLM's norms and rotary embeddings write over what they
    are given. The result is nobody else's memory. ``context`` gives the surroundings that vLLM's layers look for.
    """
    given = [_map(value, _argument) for value in args]
    named = {name: _map(value, _argument) for name, value in kwargs.items()}
    with context():
        output = function(*given, **named)
    del given, named
    held = Counter(tensor.untyped_storage()._cdata for tensor in tensors_of(output))
    kept = {id(tensor) for tensor in _kept(function)} if held else set()
    return _map(output, lambda value: _owned(value, held, kept))


def _argument(value: Any) -> Any:
    if isinstance(value, ModuleRef):
        return value._module
    if isinstance(value, ReadOnly):
        return plain(value)
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.clone(memory_format=torch.contiguous_format)
    return value


def _owned(value: Any, held: Counter[int], kept: set[int]) -> Any:
    """A tensor of the output, copied if anybody but the output holds its memory (a buffer of the module, a weight).

    ``kept`` are the module's own tensors: of one that is returned as it is, no use count tells.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    storage = value.untyped_storage()
    shared = id(value) in kept or use_count(storage) > held[storage._cdata] + 1
    return value.detach().clone() if shared else value


def _kept(function: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """The tensors that a module, or the module that a method is of, holds in its attributes and those below it."""
    module = getattr(function, "__self__", function)
    for inner in module.modules() if isinstance(module, torch.nn.Module) else ():
        yield from inner.parameters(recurse=False)
        yield from inner.buffers(recurse=False)
        yield from (value for value in vars(inner).values() if isinstance(value, torch.Tensor))


def _map(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """``value`` with ``leaf`` applied to what stands in its tuples, lists and dicts."""
    if isinstance(value, tuple):
        items = [_map(item, leaf) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_map(item, leaf) for item in value]
    if isinstance(value, dict):
        return {key: _map(item, leaf) for key, item in value.items()}
    return leaf(value)
