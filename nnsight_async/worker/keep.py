"""What is kept is what was read.

The engine's activations live in buffers that it writes over: a layer's residual is rewritten by the next fused norm.
A block gets views of them, so that an edit in place lands. When the block moves on, whatever it still holds of the
buffers just shown to it is given memory of its own, in place: the block's own tensor objects are repointed to a copy,
so that lists, tuples and aliases that hold them need no change. What it does not hold costs a look at a counter.

A variable that the program will overwrite before it reads it again is dropped instead of copied: after
``hidden, residual = layer.output`` and ``acts.append(hidden + residual)``, the two names are dead.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

#: What cannot hold a tensor, or is not the block's own.
_OPAQUE = (int, float, str, bytes, type(None), type, ModuleType, np.ndarray, torch.nn.Module)


def use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors (and storage handles) refer to a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


class Shown:
    """The engine's memory that is shown to one block at one location, and who held it before."""

    __slots__ = ("_before", "_refs")

    def __init__(self, tensors: Collection[torch.Tensor]) -> None:
        storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in tensors)}
        self._before = [(storage, use_count(storage)) for storage in storages.values()]
        self._refs: list[weakref.ref[torch.Tensor]] = []

    def hand_out(self, view: torch.Tensor) -> torch.Tensor:
        """Remember a view that the block gets."""
        self._refs.append(weakref.ref(view))
        return view

    def held(self) -> bool:
        """Whether the block still holds any of it."""
        return any(use_count(storage) > before for storage, before in self._before)

    def release(
        self,
        namespace: dict[str, Any],
        names: Collection[str],
        live: Collection[str],
        helpers: Sequence[Mapping[str, Any]] = (),
    ) -> bool:
        """Give what the block still holds memory of its own; returns False where some of it could not be found.

        ``names`` are the program's variables in ``namespace``, ``live`` those of them that may still be read;
        ``helpers`` are the variables of functions that the block is in the middle of calling.
        """
        for name in names:
            if name not in live and _is_plain(namespace.get(name)):
                del namespace[name]
        mine = {storage._cdata for storage, _ in self._before}
        for ref in self._refs:
            tensor = ref()
            if tensor is not None and tensor.untyped_storage()._cdata in mine:
                _own(tensor)
            del tensor
        if not self.held():
            return True
        seen: set[int] = set()
        # The newest first: what was just read was most likely just stored.
        values = [*reversed(namespace.values()), *(value for helper in helpers for value in helper.values())]
        for value in values:
            for tensor in _tensors(value, seen):
                if tensor.untyped_storage()._cdata in mine:
                    _own(tensor)
                    del tensor
                    if not self.held():
                        return True
        return not self.held()


def _own(tensor: torch.Tensor) -> None:
    """Repoint a tensor to a copy of what it shows."""
    tensor.set_(tensor.clone())  # type: ignore[call-overload]


def _is_plain(value: Any) -> bool:
    """A tensor or a tuple of them: what dropping a dead variable may drop without anyone noticing."""
    items = value if isinstance(value, tuple) else (value,)
    return any(isinstance(item, torch.Tensor) for item in items)


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor reachable through containers and the attributes of plain objects, the last ones first."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
            continue
        if isinstance(item, _OPAQUE):
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        elif hasattr(item, "__dict__") and not callable(item):
            stack.extend(vars(item).values())
