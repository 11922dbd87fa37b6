"""Memory for what blocks keep: the rows of all of them that a location showed, in one piece.

A copy for each block would be a launch for each on a GPU, 128 where one does. The price is that a slab lives as long as
any tensor that shows some of it. So it is used only where at least half of it is held at first; and when requests end,
what is left of the slabs that are then held to less than half is moved together (:class:`Slabs`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Final

import torch

from nnsight_async.worker.rows import Spans

Refs = list["weakref.ref[torch.Tensor]"]

#: How many slabs are looked at in a step after a request has ended.
_LOOKED_AT: Final = 64
#: How many slabs there have to be before those that nobody holds any more are taken off the list.
_FEW: Final = 1024


class Slab:
    """The rows that several blocks have of one contiguous tensor, and the tensors of theirs that have come to show it.

    The tensors are repointed as the blocks move on; they have their values after :meth:`settle`.
    """

    __slots__ = (
        "_base",
        "_before",
        "_each",
        "_elements",
        "_held",
        "_mark",
        "_of",
        "_row",
        "_rows",
        "_spans",
        "_tensor",
        "_views",
        "refs",
    )

    def __init__(self, tensor: torch.Tensor, spans: Spans) -> None:
        # No view of it is made before the end: it would count as held by a block.
        self._tensor = tensor
        row = self._row = tensor.shape[1:]
        self._each: Sequence[torch.Tensor] | None = None  # its rows, one by one
        self._rows = tensor.new_empty((spans.stop - spans.start, *row))
        self._views: Sequence[torch.Tensor] = spans.split_cut(self._rows)
        self._spans = spans
        self._elements = row.numel()  # in a row
        self._base = tensor.storage_offset() + spans.start * self._elements
        self._held = 0
        self._of = -1  # the block that took something last
        self._mark = 0  # where, in ``refs``, what it took begins
        self._before = 0  # what was held before
        self.refs: Refs = []

    def take(self, tensor: torch.Tensor, ref: weakref.ref[torch.Tensor], index: int) -> None:
        """Repoint a block's view of all of its rows."""
        view = self._views[index]
        if tensor.shape != view.shape or tensor.stride() != view.stride():  # changed in place, by ``unsqueeze_`` say
            self.take_part(tensor, ref, index)
            return
        refs = self.refs
        if self._of != index:
            self._of, self._mark, self._before = index, len(refs), self._held
        tensor.data = view
        refs.append(ref)
        self._held = self._before + view.numel()

    def take_part(self, tensor: torch.Tensor, ref: weakref.ref[torch.Tensor], index: int) -> None:
        """Repoint any view of a block's rows."""
        start, stop = self._spans.bounds[index]
        if tensor.shape == self._row and self._rows.shape[0] <= 2 * len(self._views):
            newest = stop - 1 - self._spans.start
            if tensor.storage_offset() == self._base + newest * self._elements and tensor.is_contiguous():
                if self._each is None:  # most likely all blocks keep the like
                    self._each = self._rows.unbind()
                if self._of != index:
                    self._of, self._mark, self._before = index, len(self.refs), self._held
                tensor.data = self._each[newest]
                self.refs.append(ref)
                self._held = min(self._held + self._elements, self._before + (stop - start) * self._elements)
                return
        offset = tensor.storage_offset() - self._base
        shape, strides = tensor.size(), tensor.stride()
        if tensor.is_contiguous():
            last = offset + tensor.numel() - 1
        else:
            last = offset + sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])
        first = self._spans.start
        inside = (start - first) * self._elements <= offset <= last < (stop - first) * self._elements
        if tensor.dtype is not self._rows.dtype or not inside:
            own(tensor)
            return
        if self._of != index:
            self._of, self._mark, self._before = index, len(self.refs), self._held
        tensor.set_(self._rows.untyped_storage(), offset, shape, strides)
        self.refs.append(ref)
        # Views that share rows count once, or a slab could be taken for full that is not.
        self._held = min(self._held + tensor.numel(), self._before + (stop - start) * self._elements)

    def undo(self, index: int) -> None:
        """Give what a block has taken its values, and memory of its own."""
        if self._of == index:
            for tensor in _alive(self.refs[self._mark :]):
                tensor.set_(self._read(tensor).clone())  # type: ignore[call-overload]
            del self.refs[self._mark :]
            self._held = self._before

    def settle(self) -> Refs:
        """Copy what was taken; returns references to the tensors that now share memory."""
        if 2 * self._held >= self._rows.numel():
            self._rows.copy_(self._spans.cut(self._tensor))
            return self.refs
        return _gather([(tensor, self._read(tensor)) for tensor in _alive(self.refs)])

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a repointed tensor is to show, where it still is."""
        return self._tensor.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() + self._base)


class Slabs:
    """The slabs that are held by blocks. It holds none of them itself."""

    def __init__(self) -> None:
        self._slabs: list[Refs] = []
        self._most = _FEW
        self._unseen = 0  # how many are to be looked at, from the end

    def add(self, refs: Refs) -> None:
        """Take note of tensors that share memory."""
        if len(refs) < 2:
            return
        self._slabs.append(refs)
        if len(self._slabs) > self._most:
            self._slabs = [refs for refs in self._slabs if any(ref() is not None for ref in refs)]
            self._most = max(2 * len(self._slabs), _FEW)
            self._unseen = min(self._unseen, len(self._slabs))

    def requests_ended(self) -> None:
        """Have the slabs looked at in the steps to come: parts of them may be held by nobody any more."""
        self._unseen = len(self._slabs)

    def tidy(self) -> None:
        """Look at some slabs: what is left of one that is held to less than half gets memory of its own."""
        if not self._unseen:
            return
        with torch.inference_mode(), contextlib.suppress(torch.OutOfMemoryError):  # nothing has to be moved now
            for _ in range(min(_LOOKED_AT, self._unseen)):
                self._unseen -= 1
                self._look_at(self._unseen)

    def _look_at(self, place: int) -> None:
        refs = self._slabs[place]
        alive = _alive(refs)
        if 2 * len(alive) >= len(refs) or (alive and _share_with_others(alive)):
            return
        left = _gather([(tensor, tensor) for tensor in alive])
        if len(left) > 1:
            self._slabs[place] = left
        else:
            self._slabs[place] = self._slabs[-1]
            self._slabs.pop()


def own(tensor: torch.Tensor) -> None:
    """Repoint a tensor to a copy of what it shows."""
    tensor.set_(tensor.clone())  # type: ignore[call-overload]


def _alive(refs: Refs) -> list[torch.Tensor]:
    return [tensor for ref in refs if (tensor := ref()) is not None]


def _share_with_others(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of some tensors is shown by any other: then moving them would take the two apart."""
    storage = tensors[0].untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > len(tensors) + 1


def _gather(moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Refs:
    """Repoint tensors to copies of others, in one piece of memory; returns references to those that share it."""
    together = [(tensor, shown) for tensor, shown in moves if shown.is_contiguous() and shown.numel()]
    for tensor, shown in moves:
        if not (shown.is_contiguous() and shown.numel()):
            tensor.set_(shown.clone())  # type: ignore[call-overload]
    if not together:
        return []
    flat = [shown.view(-1) for _, shown in together]
    parts = torch.cat(flat).split([len(part) for part in flat])
    for (tensor, shown), part in zip(together, parts, strict=True):
        tensor.set_(part.view(shown.shape))
    return [weakref.ref(tensor) for tensor, _ in together]
