"""What is kept is what was read.

The engine's activations live in buffers that it writes over: a layer's residual is rewritten by the next fused norm.
A block gets views of them, so that an edit in place lands. When the block moves on, whatever it still holds of the
buffers just shown to it is given other memory, in place: the block's own tensor objects are repointed, so that lists,
tuples and aliases that hold them need no change. What it does not hold costs a look at a counter.

The blocks that wait for a location are shown it one after the other, each its own rows. What they hold of a tensor is
copied once all of them have moved on, the rows of all in one copy (:mod:`nnsight_async.worker.slabs`).

A variable that the program will overwrite before it reads it again is dropped instead of copied: after
``hidden, residual = layer.output`` and ``acts.append(hidden + residual)``, the two names are dead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from operator import gt, sub
from types import FunctionType, ModuleType
from typing import Any, Final
from weakref import ref

import numpy as np
import torch

from nnsight_async.tree import ModuleRef
from nnsight_async.worker.rows import Parts, Spans, narrow, tensors_of
from nnsight_async.worker.slabs import Slab, Slabs, own

#: What cannot hold a tensor, or is not the block's own.
_OPAQUE = (int, float, str, bytes, type(None), type, ModuleType, np.ndarray, torch.nn.Module)
#: What most of a program's variables are that cannot.
_PLAIN: Final = frozenset({int, float, str, bytes, bool, type(None), FunctionType, ModuleRef})
_count: Final[Callable[[int], int]] = torch._C._storage_Use_Count


def use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors (and storage handles) refer to a storage."""
    return int(_count(storage._cdata))


class Shown:
    """A location's value while the blocks that wait there are shown it, one after the other.

    ``key`` is the location; ``value`` what the block whose turn it is sees of it, and None between two turns. ``spans``
    says where the blocks' rows are.
    """

    __slots__ = (
        "_cdatas",
        "_columns",
        "_given",
        "_held_at_most",
        "_index",
        "_known_slabs",
        "_refs",
        "_slabs",
        "_source",
        "_spans",
        "_storages",
        "_views",
        "key",
        "value",
    )

    def __init__(self, key: tuple[str, str], value: Any, spans: Spans, slabs: Slabs) -> None:
        self.key = key
        self.value: Any = None
        self._source = value
        self._spans = spans
        self._known_slabs = slabs
        self._index = 0
        self._refs: list[ref[torch.Tensor]] = []
        self._slabs: dict[int, Slab | None] = {}  # by the storage whose rows they take
        #: The tensors that are handed out in rows, where that is all that is handed out.
        self._columns: tuple[torch.Tensor, ...] = ()
        self._views: list[Any] | None = None  # what each block sees, until it has been its turn
        tensors: Collection[torch.Tensor]
        if isinstance(value, torch.Tensor):
            tensors = (value,)
            if spans.are_in(value):
                self._columns = tensors
                self._views = list(spans.split(value))
        elif type(value) is tuple and value and all(isinstance(i, torch.Tensor) and spans.are_in(i) for i in value):
            tensors = self._columns = value
            self._views = list(map(Parts, zip(*map(spans.split, value), strict=True)))
        else:
            tensors = list(tensors_of(value))
        given: dict[int, int] = {}  # how many views of a storage each block is given that has not had its turn
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            cdata = storage._cdata
            storages[cdata] = storage
            given[cdata] = given.get(cdata, 0) + (self._views is not None)
        self._storages = storages  # they have to live as long as their addresses are used
        self._cdatas = list(storages)
        self._given = list(given.values())
        self._held_at_most: list[int] = []

    def turn(self, index: int) -> None:
        """It is the turn of one of the blocks."""
        self._index = index
        self._held_at_most = list(map(sub, map(_count, self._cdatas), self._given))
        views = self._views
        if views is not None:
            value = views[index]
            views[index] = None
            self._refs = [ref(value)] if type(value) is not Parts else list(map(ref, value))
        else:
            self._refs = []
            spans = self._spans
            start, stop = spans.bounds[index]
            value = narrow(self._source, spans.size, start, stop, self.hand_out)
        self.value = value

    def hand_out(self, view: torch.Tensor) -> torch.Tensor:
        """Remember a view that the block gets."""
        self._refs.append(ref(view))
        return view

    def held(self) -> bool:
        """Whether the block still holds any of it."""
        counts, most = list(map(_count, self._cdatas)), self._held_at_most
        return counts != most and any(map(gt, counts, most))

    def release(
        self,
        namespace: dict[str, Any],
        dead: Iterable[str],
        saved: dict[str, Any],
        others: Callable[[], Iterable[dict[str, Any]]],
    ) -> bool:
        """Give what the block still holds other memory; returns False where some of it could not be found.

        ``dead`` are the program's variables in ``namespace`` that will not be read again, ``saved`` is what the block
        has saved; ``others`` gives the variables of functions that it is in the middle of calling. What was held has
        its values after :meth:`settle`.
        """
        for name in dead:
            if name in namespace and type(namespace[name]) not in _PLAIN and _is_plain(namespace[name]):
                del namespace[name]
        columns, slabs = self._columns, self._slabs
        for column, known in enumerate(self._refs):
            tensor = known()
            if tensor is None:
                continue
            slab = slabs.get(tensor.untyped_storage()._cdata)
            if slab is not None and column < len(columns):
                slab.take(tensor, known, self._index)
            else:
                self._own(tensor, known, column)
            del tensor
        if not self.held():
            return True
        # What was just read was most likely just stored, at the end of a list that is saved.
        for value in saved.values():
            if type(value) is list and value and type(value[-1]) is torch.Tensor:
                tensor = value[-1]
                if tensor.untyped_storage()._cdata in self._storages:
                    self._own(tensor, ref(tensor), None)
                    if not self.held():
                        return True
                del tensor
        # Else the newest are looked at first.
        for tensor in _tensors(namespace, others):
            if tensor.untyped_storage()._cdata in self._storages:
                self._own(tensor, ref(tensor), None)
                del tensor
                if not self.held():
                    return True
        return not self.held()

    def _own(self, tensor: torch.Tensor, known: ref[torch.Tensor], column: int | None) -> None:
        cdata = tensor.untyped_storage()._cdata
        if cdata in self._slabs:
            slab = self._slabs[cdata]
        elif cdata in self._storages:
            slab = self._slabs[cdata] = self._open(cdata)
        else:
            return  # the block has made it show something else
        if slab is None:
            own(tensor)
        elif column is None or column >= len(self._columns):
            slab.take_part(tensor, known, self._index)
        else:
            slab.take(tensor, known, self._index)

    def _open(self, cdata: int) -> Slab | None:
        """A slab for the one tensor of a storage; None where blocks may come to each other's rows of it."""
        tensors = [tensor for tensor in self._columns if tensor.untyped_storage()._cdata == cdata]
        if len(tensors) != 1 or len(self._spans.bounds) < 2 or not tensors[0].is_contiguous():
            return None
        return Slab(tensors[0], self._spans)

    def undo(self) -> None:
        """Give what the block holds its values at once: it goes on to run."""
        for slab in self._slabs.values():
            if slab is not None:
                slab.undo(self._index)

    def settle(self) -> None:
        """Copy what the blocks that have had their turn hold."""
        for slab in self._slabs.values():
            if slab is not None:
                self._known_slabs.add(slab.settle())
        self._slabs.clear()


def _is_plain(value: Any) -> bool:
    """A tensor or a tuple of them: what dropping a dead variable may drop without anyone noticing."""
    if isinstance(value, tuple):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def _tensors(namespace: dict[str, Any], others: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[torch.Tensor]:
    """Every tensor that variables lead to through containers and the attributes of plain objects, the last ones first.

    What comes of a long list is looked at one by one, so that it costs nothing where the first is the last.
    """
    seen: set[int] = set()
    stack: list[Iterator[Any]] = [reversed(namespace.values())]
    others_too = True
    while stack:
        for item in stack[-1]:
            kind = type(item)
            if kind is torch.Tensor:
                yield item
                continue
            if kind in _PLAIN or (kind is not list and isinstance(item, _OPAQUE)) or id(item) in seen:
                continue
            if isinstance(item, torch.Tensor):
                yield item
                continue
            inner: Iterator[Any]
            if isinstance(item, dict):
                inner = reversed(item.values())
            elif isinstance(item, (list, tuple)):
                inner = reversed(item)
            elif isinstance(item, (set, frozenset)):
                inner = iter(item)
            elif hasattr(item, "__dict__") and not callable(item):
                inner = reversed(vars(item).values())
            else:
                continue
            seen.add(id(item))
            stack.append(inner)
            break
        else:
            stack.pop()
        if not stack and others_too:
            others_too = False
            stack += [reversed(names.values()) for names in reversed(list(others()))]
